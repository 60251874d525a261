"""What every kind of attention does, and the plain one: every token sees all tokens before it."""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.attention.rope import RoPE


@dataclasses.dataclass(frozen=True)
class Attention(abc.ABC):
    """How a query finds the keys that it sees, and what is kept of them.

    A kind of attention has no parameters: projections are the decoder's. It is handed queries, keys and values as they
    were projected, ``[rows, tokens, heads, head_dim]``, and turns them itself, since the position that counts is not
    the same for all kinds. Rows are independent of each other, and every value of a cache has them on axis 0.
    """

    def at(self, layer: int) -> "Attention":
        """The kind that a layer uses, counted from 0."""
        return self

    @abc.abstractmethod
    def prefill(
        self, q: jax.Array, k: jax.Array, v: jax.Array, tokens: jax.Array, lengths: jax.Array, rope: RoPE, capacity: int
    ) -> tuple[jax.Array, Any]:
        """Attention within prompts.

        Args:
          q: queries, ``[rows, tokens, heads, head_dim]``.
          k: keys, likewise.
          v: values, likewise.
          tokens: the prompts' tokens, ``int32[rows, tokens]``, padded at the end.
          lengths: tokens of each prompt that are no padding, ``int32[rows]``, at least 1.
          rope: position embedding.
          capacity: tokens that a row may come to have.

        Returns:
          What was attended to, of the shape of ``q`` (undefined where there is padding), and the cache.
        """

    @abc.abstractmethod
    def decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, token: jax.Array, position: jax.Array, cache: Any, rope: RoPE
    ) -> tuple[jax.Array, Any]:
        """Attention of one more token in every row.

        Args:
          q: query, ``[rows, 1, heads, head_dim]``.
          k: key, likewise.
          v: value, likewise.
          token: the token, ``int32[rows]``.
          position: how many tokens its row had before it, ``int32[rows]``.
          cache: what ``prefill`` or ``decode`` returned.
          rope: position embedding.

        Returns:
          What was attended to, of the shape of ``q``, and the cache with the token.
        """


def weights(q: jax.Array, k: jax.Array, mask: jax.Array) -> jax.Array:
    """How much each query sees of each key: ``float32[rows, heads, queries, keys]``.

    Args:
      q: ``[rows, queries, heads, head_dim]``.
      k: ``[rows, keys, heads, head_dim]``.
      mask: what it may see, of a shape that broadcasts to the result's; something for every query.
    """
    logits = jnp.einsum("rqhd,rkhd->rhqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """The values of the keys that ``weights`` finds, ``[rows, queries, heads, head_dim]``."""
    return jnp.einsum("rhqk,rkhd->rqhd", weights(q, k, mask).astype(v.dtype), v)


def causal(length: int) -> jax.Array:
    """``bool[1, 1, length, length]``: a query sees keys up to itself, and so no padding at the end of its row."""
    at = jnp.arange(length)
    return (at[:, None] >= at)[None, None]


def put(cache: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    """``cache`` ``[rows, slots, ...]`` with ``value`` ``[rows, ...]`` in each row's own ``slot`` ``[rows]``."""
    return jax.vmap(lambda cache, slot, value: cache.at[slot].set(value))(cache, slot, value)


def padded(x: jax.Array, size: int) -> jax.Array:
    """``x`` with zeros added at the end of axis 1, up to ``size``."""
    return jnp.pad(x, [(0, 0), (0, size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


class Slots(NamedTuple):
    """Keys and values, ``[rows, slots, heads, head_dim]``."""

    k: jax.Array
    v: jax.Array


@dataclasses.dataclass(frozen=True)
class Full(Attention):
    """Every token sees itself and all tokens before it (Attention Is All You Need, arXiv 1706.03762, section 3.2.1).

    The cache holds every key, turned, and every value: slot ``t`` those of token ``t``.
    """

    def prefill(self, q, k, v, tokens, lengths, rope, capacity):
        at = jnp.arange(q.shape[1])[None]
        q, k = rope(q, at), rope(k, at)
        return attend(q, k, v, causal(q.shape[1])), Slots(padded(k, capacity), padded(v, capacity))

    def decode(self, q, k, v, token, position, cache, rope):
        q, k = rope(q, position[:, None]), rope(k, position[:, None])
        cache = Slots(put(cache.k, position, k[:, 0]), put(cache.v, position, v[:, 0]))
        seen = jnp.arange(cache.k.shape[1]) <= position[:, None]
        return attend(q, cache.k, cache.v, seen[:, None, None]), cache
