"""FastGen: every head keeps what a look at the prompt shows that it needs."""

import dataclasses
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.attention.full import Attention, causal, padded, put, weights

POLICIES = (
    "special",
    "special + punctuation",
    "special + punctuation + frequent",
    "special + punctuation + frequent + local",
    "full",
)
"""What a head may keep, from the cheapest to the most expensive (FastGen, section 3.4, equation 2)."""


class Profiled(NamedTuple):
    """Keys and values, and what each head keeps of them.

    Attributes:
      k: turned keys, ``[rows, slots, heads, head_dim]``; slot ``t`` is token ``t``.
      v: values, likewise.
      kept: which of them a head still has, ``bool[rows, heads, slots]``.
      score: what each token was seen by its head in all, ``float32[rows, heads, slots]``.
      marked: whether a token is special (1), punctuation (2) or neither (0), ``int32[rows, slots]``.
      policy: of each head, as an index into ``POLICIES``, ``int32[rows, heads]``.
      prompt: tokens of the prompt, ``int32[rows]``.
    """

    k: jax.Array
    v: jax.Array
    kept: jax.Array
    score: jax.Array
    marked: jax.Array
    policy: jax.Array
    prompt: jax.Array


@dataclasses.dataclass(frozen=True)
class FastGen(Attention):
    """A cache of its own for every head (FastGen, arXiv 2310.01801, section 3.2 to 3.4, algorithms 1 and 2).

    Prefill attends to everything. A head then gets the cheapest policy whose tokens recover its attention map ``A``:
    ``|A - softmax(Q K_C^T)| <= 1 - T`` (equation 1). The distance of two distributions is taken as half the sum of
    their absolute differences, which for a subset of the keys is what ``A`` gives to the others; the mean is over the
    prompt's tokens. Tokens that a policy keeps:

    - special and punctuation: by their ids;
    - local: fewer than ``ceil(local * prompt)`` tokens back;
    - frequent: the ``ceil(frequent * tokens)`` with the largest sum of attention so far, of those still kept.

    A token that is decoded attends to what its head has kept, and to itself; then the sums grow, and what no part of
    the policy keeps is gone for good. Policies are each row's own: rows do not wait for, or depend on, each other.

    Shapes are static in a compiled program, and policies are not known before it runs, so every head has room for all
    tokens; what a head gave up is masked. ``kept`` says what storage of variable size, in pages, would have to hold.

    Attributes:
      special: ids of special tokens.
      punctuation: ids of punctuation.
      recovery: ``T``: which part of the attention a policy has to recover.
      local: length of the local context, as a part of the prompt's.
      frequent: how many frequent tokens are kept, as a part of the row's length.
    """

    special: tuple[int, ...] = (0, 1)
    punctuation: tuple[int, ...] = (2, 3, 4)
    recovery: float = 0.95
    local: Fraction = Fraction(3, 10)
    frequent: Fraction = Fraction(3, 10)

    def prefill(self, q, k, v, tokens, lengths, rope, capacity):
        at = jnp.arange(q.shape[1])[None]
        q, k = rope(q, at), rope(k, at)
        seen = weights(q, k, causal(q.shape[1]))
        out = jnp.einsum("rhqk,rkhd->rqhd", seen.astype(v.dtype), v)
        real = at < lengths[:, None]
        seen = jnp.where(real[:, None, :, None], seen, 0)
        score, marked = seen.sum(2), self._marked(tokens)
        kept = jnp.broadcast_to(real[:, None], score.shape)
        policy = self._profile(seen, marked, self._frequent(kept, score, lengths), lengths)
        kept = self._evict(policy, marked, kept, score, lengths, lengths)
        slots = [(0, 0), (0, 0), (0, capacity - q.shape[1])]
        k, v, marked = (padded(x, capacity) for x in (k, v, marked))
        return out, Profiled(k, v, jnp.pad(kept, slots), jnp.pad(score, slots), marked, policy, lengths)

    def decode(self, q, k, v, token, position, cache, rope):
        q, k = rope(q, position[:, None]), rope(k, position[:, None])
        keys, values = put(cache.k, position, k[:, 0]), put(cache.v, position, v[:, 0])
        marked = put(cache.marked, position, self._marked(token))
        kept = cache.kept | (jnp.arange(keys.shape[1]) == position[:, None])[:, None]
        seen = weights(q, keys, kept[:, :, None])
        out = jnp.einsum("rhqk,rkhd->rqhd", seen.astype(v.dtype), values)
        score = cache.score + seen[:, :, 0]
        kept = self._evict(cache.policy, marked, kept, score, cache.prompt, position + 1)
        return out, Profiled(keys, values, kept, score, marked, cache.policy, cache.prompt)

    def _marked(self, tokens: jax.Array) -> jax.Array:
        is_one_of = lambda ids: jnp.isin(tokens, jnp.asarray(ids, tokens.dtype))  # noqa: E731
        return jnp.where(is_one_of(self.special), 1, jnp.where(is_one_of(self.punctuation), 2, 0))

    def _frequent(self, kept: jax.Array, score: jax.Array, lengths: jax.Array) -> jax.Array:
        """Whether a token is among the most seen of those still kept, ``bool[rows, heads, slots]``."""
        order = jnp.argsort(jnp.where(kept, -score, jnp.inf), axis=-1)  # stable: of equals, the earlier
        return kept & (jnp.argsort(order, axis=-1) < _part(self.frequent, lengths)[:, None, None])

    def _profile(self, seen: jax.Array, marked: jax.Array, frequent: jax.Array, lengths: jax.Array) -> jax.Array:
        """The cheapest policy of each head that recovers what its queries see: ``int32[rows, heads]``."""
        at = jnp.arange(seen.shape[-1])
        local = at[:, None] - at < _part(self.local, lengths)[:, None, None]  # of a query, [rows, queries, keys]
        keeps = _policies(marked[:, None, None], frequent[:, :, None], local[:, None])
        recovered = [jnp.where(keep, seen, 0).sum((2, 3)) / lengths[:, None] for keep in keeps[:-1]]
        enough = [*(share >= self.recovery for share in recovered), jnp.ones_like(recovered[0], bool)]
        return jnp.argmax(jnp.stack(enough, axis=-1), axis=-1).astype(jnp.int32)

    def _evict(
        self,
        policy: jax.Array,
        marked: jax.Array,
        kept: jax.Array,
        score: jax.Array,
        prompt: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """What is left of ``kept`` under each head's policy, at the end of rows of ``lengths`` tokens."""
        back = lengths[:, None] - 1 - jnp.arange(marked.shape[1])
        local = back < _part(self.local, prompt)[:, None]
        keeps = _policies(marked[:, None], self._frequent(kept, score, lengths), local[:, None])
        for i, keep in enumerate(keeps):
            kept = jnp.where(policy[..., None] == i, kept & keep, kept)
        return kept


def _policies(marked: jax.Array, frequent: jax.Array, local: jax.Array) -> list[jax.Array]:
    """What each of ``POLICIES`` keeps, of what is kept so far."""
    special = marked == 1
    named = special | (marked == 2)
    often = named | frequent
    return [special, named, often, often | local, jnp.ones_like(special)]


def _part(part: Fraction, of: jax.Array) -> jax.Array:
    """A part of a number of tokens, rounded up."""
    return -(-of * part.numerator // part.denominator)
