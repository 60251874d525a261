"""A Llama-shaped decoder without a cache, small enough to compile on a CPU: the benchmarks' model."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

import dynaflow_jax as df


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int = 64
    heads: int = 4
    hidden: int = 176  # Llama's 2.75 times the width
    vocab: int = 256


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        rows, length, _ = x.shape
        qkv = nn.Dense(3 * c.width, use_bias=False, name="qkv")(x)
        q, k, v = jnp.split(qkv.reshape(rows, length, 3 * c.heads, -1), 3, axis=2)
        out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return nn.Dense(c.width, use_bias=False, name="out")(out.reshape(rows, length, c.width))


class FeedForward(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = nn.Dense(self.config.hidden, use_bias=False, name="gate")(x)
        up = nn.Dense(self.config.hidden, use_bias=False, name="up")(x)
        return nn.Dense(self.config.width, use_bias=False, name="down")(nn.silu(gate) * up)


class Llama(nn.Module):
    """Token ids ``[rows, tokens]`` to logits ``[rows, tokens, vocab]``."""

    config: Config

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        c = self.config
        x = nn.Embed(c.vocab, c.width, name="embed")(ids)
        for i in range(c.layers):
            with df.mark("attention", tags={"compute"}):
                x = x + Attention(c, name=f"attention_{i}")(nn.RMSNorm(name=f"attention_norm_{i}")(x))
            with df.mark("ffn", tags={"compute"}):
                x = x + FeedForward(c, name=f"ffn_{i}")(nn.RMSNorm(name=f"ffn_norm_{i}")(x))
        with df.mark("head"):
            return nn.Dense(c.vocab, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864) of ``[rows, tokens, heads, width]``."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
