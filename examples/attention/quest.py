"""Quest: all keys are kept, but a query reads only the pages of them that may matter to it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.attention.full import Attention, Full, attend, causal, padded


class Pages(NamedTuple):
    """Keys and values in pages, and bounds of the keys in each.

    Attributes:
      k: turned keys, ``[rows, heads, pages, page, head_dim]``.
      v: values, likewise.
      low: the smallest of a page's keys in each dimension, ``[rows, heads, pages, head_dim]``.
      high: the largest, likewise.
    """

    k: jax.Array
    v: jax.Array
    low: jax.Array
    high: jax.Array


@dataclasses.dataclass(frozen=True)
class Quest(Attention):
    """Query-aware selection of pages (Quest, arXiv 2406.10774, section 3.3 and 3.4, algorithm 1).

    Of every page the cache knows the minimum ``m`` and maximum ``M`` of its keys in each dimension. No key of the page
    can have a larger product with the query ``q`` than ``sum_d max(q_d m_d, q_d M_d)``. Each head reads the
    ``top_pages`` pages with the largest bounds and attends to those alone. Prefill is not approximated, nor are the
    first layers, where attention is not sparse. With ``top_pages`` pages or fewer in a row, nothing is.

    Attributes:
      page: tokens in a page.
      top_pages: how many pages a head reads.
      dense_layers: how many of the first layers attend to everything.
    """

    page: int = 16
    top_pages: int = 4
    dense_layers: int = 2

    def at(self, layer):
        return Full() if layer < self.dense_layers else self

    def prefill(self, q, k, v, tokens, lengths, rope, capacity):
        at = jnp.arange(q.shape[1])[None]
        q, k = rope(q, at), rope(k, at)
        pages = -(-capacity // self.page)

        def paged(x: jax.Array) -> jax.Array:
            x = padded(x, pages * self.page).swapaxes(1, 2)
            return x.reshape(*x.shape[:2], pages, self.page, x.shape[-1])

        keys = paged(k)
        real = (jnp.arange(pages * self.page).reshape(pages, self.page) < lengths[:, None, None])[:, None, :, :, None]
        low = jnp.where(real, keys, jnp.inf).min(axis=3)
        high = jnp.where(real, keys, -jnp.inf).max(axis=3)
        return attend(q, k, v, causal(q.shape[1])), Pages(keys, paged(v), low, high)

    def decode(self, q, k, v, token, position, cache, rope):
        q, k = rope(q, position[:, None]), rope(k, position[:, None])
        cache = self._added(cache, k[:, 0], v[:, 0], position)
        query = q[:, 0, :, None]
        bound = jnp.maximum(query * cache.low, query * cache.high).astype(jnp.float32).sum(-1)
        pages = bound.shape[-1]
        used = jnp.arange(pages) <= (position // self.page)[:, None]
        _, chosen = jax.lax.top_k(jnp.where(used[:, None], bound, -jnp.inf), min(self.top_pages, pages))
        keys = jnp.take_along_axis(cache.k, chosen[..., None, None], axis=2)
        values = jnp.take_along_axis(cache.v, chosen[..., None, None], axis=2)
        at = chosen[..., None] * self.page + jnp.arange(self.page)  # [rows, heads, chosen, page]
        seen = at <= position[:, None, None, None]

        def flat(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:2], -1, x.shape[-1]).swapaxes(1, 2)

        return attend(q, flat(keys), flat(values), seen.reshape(*seen.shape[:2], 1, -1)), cache

    def _added(self, cache: Pages, k: jax.Array, v: jax.Array, position: jax.Array) -> Pages:
        """The cache with one more token in each row; ``k`` and ``v`` are ``[rows, heads, head_dim]``."""

        def one(cache: Pages, k: jax.Array, v: jax.Array, position: jax.Array) -> Pages:
            page, offset = position // self.page, position % self.page
            low = jnp.where(offset == 0, k, jnp.minimum(cache.low[:, page], k))
            high = jnp.where(offset == 0, k, jnp.maximum(cache.high[:, page], k))
            return Pages(
                cache.k.at[:, page, offset].set(k),
                cache.v.at[:, page, offset].set(v),
                cache.low.at[:, page].set(low),
                cache.high.at[:, page].set(high),
            )

        return jax.vmap(one)(cache, k, v, position)
