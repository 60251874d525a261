"""Flax NNX: a decoder of nnx.MultiHeadAttention and gated feed-forward blocks, through nnx.split and nnx.merge."""

import jax
import optax
from flax import nnx

import dynaflow_jax as df
from examples.integrations.check import Sizes, System


class FeedForward(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.gate = nnx.Linear(sizes.width, sizes.hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(sizes.width, sizes.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(sizes.hidden, sizes.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            sizes.heads, sizes.width, qkv_features=sizes.heads * sizes.head, decode=False, rngs=rngs
        )
        self.ffn_norm = nnx.RMSNorm(sizes.width, rngs=rngs)
        self.ffn = FeedForward(sizes, rngs)

    @nnx.remat
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.RMSNorm(sizes.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(self.norm(x))


def system() -> System:
    sizes = Sizes(layers=2)
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 1, sizes.vocabulary)
    definition, params, rest = nnx.split(Decoder(sizes, nnx.Rngs(0)), nnx.Param, ...)

    def apply(params: nnx.State, rest: nnx.State, tokens: jax.Array) -> jax.Array:
        return nnx.merge(definition, params, rest)(tokens)

    def loss(params: nnx.State, rest: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = apply(params, rest, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # dynaflow: begin
    rules = [
        df.SplitModule(nnx.MultiHeadAttention),
        df.SplitModule(FeedForward),
        df.SplitModule(nnx.Embed),
    ]
    options = {"scheduler": df.strategies.NanoFlow(), "rules": rules, "batch_axes": (None, None, 0)}
    forward = df.dynaflow(apply, **options)
    step = df.dynaflow(jax.value_and_grad(loss), out_axes="mean", **options)
    # dynaflow: end

    return System("flax", apply, loss, forward, step, (params, rest, tokens))
