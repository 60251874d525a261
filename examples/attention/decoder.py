"""A Llama-shaped decoder in Flax Linen whose attention is to choose.

The model knows nothing of schedules: ``df.mark`` says where its operators are, which outside ``df.dynaflow`` is no more
than a named scope. ``prefill`` reads prompts and makes a cache; ``decode`` adds a token to every row of it. Caches are
values that go in and come out, a tuple with an entry for each layer, so that they can be donated and split by rows.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.attention.full import Attention, Full
from examples.attention.rope import RoPE


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of the model, and its attention.

    Attributes:
      layers: how many.
      width: of the residual stream.
      heads: of attention; of one device's, if they are sharded.
      head_dim: of each head.
      hidden: of the feed-forward blocks; of one device's, if they are sharded.
      vocab: how many tokens there are.
      capacity: tokens that a row of a cache has room for.
      attention: the kind of attention.
      rope: the position embedding.
      axis: the mesh axis over which heads and hidden units are sharded, or ``None``.
    """

    layers: int = 2
    width: int = 64
    heads: int = 4
    head_dim: int = 16
    hidden: int = 176
    vocab: int = 256
    capacity: int = 128
    attention: Attention = dataclasses.field(default_factory=Full)
    rope: RoPE = dataclasses.field(default_factory=RoPE)
    axis: str | None = None

    def on(self, devices: int, axis: str = "model") -> "Config":
        """One device's share, of so many."""
        if self.heads % devices or self.hidden % devices:
            raise ValueError(f"{self.heads} heads and {self.hidden} hidden units do not divide over {devices} devices.")
        return dataclasses.replace(self, heads=self.heads // devices, hidden=self.hidden // devices, axis=axis)


class SelfAttention(nn.Module):
    """Projections around the kind of attention that the layer uses."""

    config: Config
    kind: Attention

    def setup(self):
        c = self.config
        self.q = nn.DenseGeneral((c.heads, c.head_dim), use_bias=False)
        self.k = nn.DenseGeneral((c.heads, c.head_dim), use_bias=False)
        self.v = nn.DenseGeneral((c.heads, c.head_dim), use_bias=False)
        self.out = nn.DenseGeneral(c.width, axis=(-2, -1), use_bias=False)

    def prefill(self, x: jax.Array, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        c = self.config
        y, cache = self.kind.prefill(self.q(x), self.k(x), self.v(x), tokens, lengths, c.rope, c.capacity)
        return self.out(y), cache

    def decode(self, x: jax.Array, token: jax.Array, position: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        y, cache = self.kind.decode(self.q(x), self.k(x), self.v(x), token, position, cache, self.config.rope)
        return self.out(y), cache


class FeedForward(nn.Module):
    """A gated block (arXiv 2002.05202)."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.Dense(self.config.hidden, use_bias=False, name="gate")(x)
        up = nn.Dense(self.config.hidden, use_bias=False, name="up")(x)
        return nn.Dense(self.config.width, use_bias=False, name="down")(nn.silu(gate) * up)


class Layer(nn.Module):
    """Attention, then the feed-forward block, each behind a norm and beside the residual stream."""

    config: Config
    kind: Attention

    def setup(self):
        self.attention_norm = nn.RMSNorm()
        self.attention = SelfAttention(self.config, self.kind)
        self.ffn_norm = nn.RMSNorm()
        self.ffn = FeedForward(self.config)

    def prefill(self, x: jax.Array, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Any]:
        with df.mark("attention"):
            y, cache = self.attention.prefill(self.attention_norm(x), tokens, lengths)
        return self._rest(x, y), cache

    def decode(self, x: jax.Array, token: jax.Array, position: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        with df.mark("attention"):
            y, cache = self.attention.decode(self.attention_norm(x), token, position, cache)
        return self._rest(x, y), cache

    def _rest(self, x: jax.Array, y: jax.Array) -> jax.Array:
        y = self._all_reduced(y)
        with df.mark("ffn"):
            x = x + y
            y = self.ffn(self.ffn_norm(x))
        y = self._all_reduced(y)
        with df.mark("residual"):
            return x + y

    def _all_reduced(self, y: jax.Array) -> jax.Array:
        axis = self.config.axis
        return y if axis is None else df.collectives.all_reduce(y, axis)


class Decoder(nn.Module):
    """Tokens in, logits of the next token out."""

    config: Config

    def setup(self):
        c = self.config
        self.embed = nn.Embed(c.vocab, c.width)
        self.layers = [Layer(c, c.attention.at(i)) for i in range(c.layers)]
        self.norm = nn.RMSNorm()
        self.head = nn.Dense(c.vocab, use_bias=False)

    def __call__(self, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Logits of what follows each token: ``[rows, tokens, vocab]``."""
        x, _ = self._read(tokens, lengths)
        with df.mark("head"):
            return self.head(self.norm(x))

    def prefill(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        """Reads prompts.

        Args:
          tokens: ``int32[rows, tokens]``, padded at the end.
          lengths: how many of each row are no padding, ``int32[rows]``, at least 1.

        Returns:
          Logits of what follows each prompt, ``[rows, vocab]``, and the cache.
        """
        x, cache = self._read(tokens, lengths)
        with df.mark("head"):
            last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
            return self.head(self.norm(last)), cache

    def decode(
        self, token: jax.Array, position: jax.Array, cache: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Reads one more token in every row.

        Args:
          token: ``int32[rows]``.
          position: how many tokens its row had before it, ``int32[rows]``.
          cache: what ``prefill`` or ``decode`` returned.

        Returns:
          Logits of what follows it, ``[rows, vocab]``, and the cache with it.
        """
        with df.mark("embed"):
            x, caches = self.embed(token[:, None]), []
        for layer, own in zip(self.layers, cache, strict=True):
            x, own = layer.decode(x, token, position, own)
            caches.append(own)
        with df.mark("head"):
            return self.head(self.norm(x[:, 0])), tuple(caches)

    def _read(self, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        with df.mark("embed"):
            x, caches = self.embed(tokens), []
        for layer in self.layers:
            x, cache = layer.prefill(x, tokens, lengths)
            caches.append(cache)
        return x, tuple(caches)


def init(config: Config, seed: int = 0) -> Any:
    """Random parameters of the whole model."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(Decoder(config).init)(jax.random.key(seed), tokens, jnp.ones((1,), jnp.int32))


def partition(params: Any, axis: str = "model") -> Any:
    """How parameters are sharded: the heads, and the hidden units; everything else is the same on every device."""
    shards = {
        "q": P(None, axis),
        "k": P(None, axis),
        "v": P(None, axis),
        "out": P(axis),
        "gate": P(None, axis),
        "up": P(None, axis),
        "down": P(axis),
    }

    def spec(path: Any, _: Any) -> P:
        return shards.get(path[-2].key, P())

    return jax.tree_util.tree_map_with_path(spec, params)


def apply(config: Config) -> tuple[Any, Any]:
    """``prefill`` and ``decode`` as functions of the parameters and the rest."""
    model = Decoder(config)

    def prefill(params: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
        return model.apply(params, tokens, lengths, method="prefill")  # pyright: ignore[reportReturnType]

    def decode(
        params: Any, token: jax.Array, position: jax.Array, cache: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        return model.apply(params, token, position, cache, method="decode")  # pyright: ignore[reportReturnType]

    return prefill, decode
