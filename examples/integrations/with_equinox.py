"""Equinox: a decoder on one sequence, mapped over the batch, its layers scanned, in the style of Equinox's examples."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import dynaflow_jax as df
from examples.integrations.check import System

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 97, 32, 64, 4, 3


class DecoderLayer(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention_key)
        self.mlp_norm = eqx.nn.RMSNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, depth=1, activation=jax.nn.gelu, key=mlp_key)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    layers: DecoderLayer  # stacked
    norm: eqx.nn.RMSNorm
    unembed: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        embed_key, layers_key, unembed_key = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=embed_key)
        self.layers = eqx.filter_vmap(DecoderLayer)(jax.random.split(layers_key, LAYERS))
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.unembed = eqx.nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=unembed_key)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        stacked, static = eqx.partition(self.layers, eqx.is_array)

        @eqx.filter_checkpoint
        def body(x, layer):
            return eqx.combine(layer, static)(x, mask), None

        x, _ = jax.lax.scan(body, jax.vmap(self.embed)(tokens), stacked)
        return jax.vmap(self.unembed)(jax.vmap(self.norm)(x))


def system() -> System:
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 1, VOCABULARY)
    params, static = eqx.partition(Decoder(jax.random.key(1)), eqx.is_inexact_array)

    def apply(params: Decoder, tokens: jax.Array) -> jax.Array:
        return jax.vmap(eqx.combine(params, static))(tokens)

    def loss(params: Decoder, tokens: jax.Array) -> jax.Array:
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # dynaflow: begin
    rules = [
        df.SplitModule(eqx.nn.MultiheadAttention),
        df.SplitModule(eqx.nn.MLP),
        df.SplitModule(eqx.nn.Embedding),
        df.SplitModule("unembed"),
    ]
    options = {"scheduler": df.strategies.NanoFlow(), "rules": rules, "batch_axes": (None, 0)}
    forward = df.dynaflow(apply, **options)
    step = df.dynaflow(jax.value_and_grad(loss), out_axes="mean", **options)
    # dynaflow: end

    return System("equinox", apply, loss, forward, step, (params, tokens))
