"""Tunix: its Llama 3 in Flax NNX, a small configuration, every layer rematerialised."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3 import model as llama3

import dynaflow_jax as df
from examples.integrations.check import System


def system() -> System:
    config = llama3.ModelConfig(
        num_layers=2,
        vocab_size=97,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        norm_eps=1e-5,
        rope_theta=10_000,
        remat_config=llama3.RematConfig.DECODER,
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    definition, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 1, config.vocab_size)

    def apply(params: nnx.State, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.tril(jnp.ones((tokens.shape[0], tokens.shape[1], tokens.shape[1]), bool))
        logits, _ = nnx.merge(definition, params)(tokens, positions, None, mask)
        return logits

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # dynaflow: begin
    rules = [
        df.SplitModule("attn"),
        df.SplitModule("mlp"),
        df.SplitModule("lm_head"),
    ]
    options = {"scheduler": df.strategies.NanoFlow(), "rules": rules, "batch_axes": (None, 0)}
    forward = df.dynaflow(apply, **options)
    step = df.dynaflow(jax.value_and_grad(loss), out_axes="mean", **options)
    # dynaflow: end

    return System("google-tunix", apply, loss, forward, step, (params, tokens))
