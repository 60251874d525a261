"""Attention to a sliding window and to the first tokens: Longformer's and StreamingLLM's.

Both see the same tokens and keep the same ones, in a cache of a fixed size: the first ones for good, the last ones in
a ring. They differ in the positions that those tokens have.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from examples.attention.full import Attention, Slots, attend, padded, put


@dataclasses.dataclass(frozen=True)
class Longformer(Attention):
    """A window, and global tokens that all others see (Longformer, arXiv 2004.05150, section 3.1 and 3.2).

    Causal, as in the paper's language models: token ``i`` sees ``j <= i`` if ``i - j < window`` or ``j`` is global.
    The global tokens are the first ones of a prompt (a question, an instruction). What a global token itself would see
    besides lies behind it. The paper gives global attention projections of its own, initialised as copies of the local
    ones; here the two are the same.

    Queries see two blocks of keys of the window's size, and the global ones (section 3.2, "chunks"), so that prefill
    costs ``O(tokens * (window + global_tokens))``. Keys are cached turned.

    Attributes:
      window: tokens that a token sees, itself among them.
      global_tokens: how many tokens at the beginning of a row all others see.
    """

    window: int = 16
    global_tokens: int = 4

    def prefill(self, q, k, v, tokens, lengths, rope, capacity):
        at = jnp.arange(q.shape[1])[None]
        q, k = rope(q, at), rope(k, at)
        out = banded(q, q, k, k, v, self.window, self.global_tokens)
        return out, kept(k, v, lengths, self.window, self.global_tokens)

    def decode(self, q, k, v, token, position, cache, rope):
        q, k = rope(q, position[:, None]), rope(k, position[:, None])
        cache = added(cache, k, v, position, self.window, self.global_tokens)
        held = tokens_held(position + 1, self.window, self.global_tokens)
        return attend(q, cache.k, cache.v, (held >= 0)[:, None, None]), cache


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Attention):
    """Attention sinks and a window, at positions within the cache (StreamingLLM, arXiv 2309.17453, section 3.2).

    What is seen are the first tokens, which soak up attention, and the last ones. Positions are counted in the cache,
    not in the text: with four sinks and a window of four, the tokens 0, 1, 2, 3, 6, 7, 8, 9 have the positions 0 to 7.
    So the model never meets a distance longer than it was trained with, however long the text grows. Keys are cached
    as they are and turned when they are read, since their positions change from token to token.

    Attributes:
      window: tokens that a token sees beside the sinks, itself among them.
      sinks: how many tokens at the beginning of a row are kept.
    """

    window: int = 16
    sinks: int = 4

    def prefill(self, q, k, v, tokens, lengths, rope, capacity):
        # Within the window distances are the text's. To the sinks they stop growing once the cache is full.
        at = jnp.arange(q.shape[1])[None]
        in_cache = jnp.minimum(at, self.sinks + self.window - 1)
        turned = rope(k, at)
        out = banded(rope(q, at), rope(q, in_cache), turned, turned, v, self.window, self.sinks)
        return out, kept(k, v, lengths, self.window, self.sinks)

    def decode(self, q, k, v, token, position, cache, rope):
        cache = added(cache, k, v, position, self.window, self.sinks)
        held = tokens_held(position + 1, self.window, self.sinks)
        gap = jnp.maximum(position + 1 - (self.sinks + self.window), 0)[:, None]  # tokens that are no longer kept
        in_cache = jnp.where(held < self.sinks, held, held - gap)
        q, k = rope(q, position[:, None] - gap), rope(cache.k, in_cache)
        return attend(q, k, cache.v, (held >= 0)[:, None, None]), cache


def banded(
    q: jax.Array, q_first: jax.Array, k: jax.Array, k_first: jax.Array, v: jax.Array, window: int, first: int
) -> jax.Array:
    """Causal attention to the last ``window`` tokens and to the ``first`` ones, block by block.

    Args:
      q: queries as the window's keys meet them, ``[rows, tokens, heads, head_dim]``.
      q_first: queries as the first keys meet them.
      k: keys as the window's.
      k_first: keys as the first ones.
      v: values.
      window: tokens in the window, the query's own among them.
      first: tokens at the beginning that everyone sees, inside the window or not.

    Returns:
      What was attended to, of the shape of ``q``.
    """
    rows, length, heads, head_dim = q.shape
    first, blocks = min(first, length), -(-length // window)
    padding = blocks * window

    def block(x: jax.Array) -> jax.Array:
        return padded(x, padding).reshape(rows, blocks, window, heads, head_dim)

    def with_block_before(x: jax.Array) -> jax.Array:
        before = jnp.pad(x[:, :-1], [(0, 0), (1, 0), (0, 0), (0, 0), (0, 0)])
        return jnp.concatenate([before, x], axis=2)

    at = jnp.arange(padding).reshape(blocks, window, 1)
    of = (jnp.arange(blocks)[:, None] - 1) * window + jnp.arange(2 * window)
    of = of[:, None]  # token of each key, by block
    near = (of >= first) & (of <= at) & (at - of < window)
    scale = 1 / math.sqrt(head_dim)
    keys, values = with_block_before(block(k)), with_block_before(block(v))
    logits = jnp.einsum("rbqhd,rbkhd->rbhqk", block(q), keys, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(near[None, :, None], logits, -jnp.inf)
    far = (
        jnp.einsum("rbqhd,rkhd->rbhqk", block(q_first), k_first[:, :first], preferred_element_type=jnp.float32) * scale
    )
    far = jnp.where((jnp.arange(first) <= at)[None, :, None], far, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([far, logits], axis=-1), axis=-1).astype(v.dtype)
    out = jnp.einsum("rbhqk,rkhd->rbqhd", weights[..., :first], v[:, :first])
    out += jnp.einsum("rbhqk,rbkhd->rbqhd", weights[..., first:], values)
    return out.reshape(rows, padding, heads, head_dim)[:, :length]


def tokens_held(lengths: jax.Array, window: int, first: int) -> jax.Array:
    """Which token each slot of a cache holds, ``int32[rows, first + window]``; -1 if none.

    The first tokens have slots of their own. The others take turns: token ``t`` is in slot
    ``first + (t - first) % window``, so that a row of ``lengths`` tokens holds its last ``window``.
    """
    slot = jnp.arange(window)
    rounds = (lengths[:, None] - 1 - first - slot) // window
    ring = jnp.where(rounds >= 0, first + slot + window * rounds, -1)
    start = jnp.arange(first)
    return jnp.concatenate([jnp.where(start < lengths[:, None], start, -1), ring], axis=1)


def kept(k: jax.Array, v: jax.Array, lengths: jax.Array, window: int, first: int) -> Slots:
    """The cache of prompts."""
    held = jnp.maximum(tokens_held(lengths, window, first), 0)[..., None, None]
    return Slots(jnp.take_along_axis(k, held, axis=1), jnp.take_along_axis(v, held, axis=1))


def added(cache: Slots, k: jax.Array, v: jax.Array, position: jax.Array, window: int, first: int) -> Slots:
    """The cache with one more token in each row; of those in the ring, the oldest makes room."""
    slot = jnp.where(position < first, position, first + (position - first) % window)
    return Slots(put(cache.k, slot, k[:, 0]), put(cache.v, slot, v[:, 0]))
