"""MaxText: its decoder as configured by base.yml, made small, through nnx.split and nnx.merge; its layers scanned."""

import os

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils

import dynaflow_jax as df
from examples.integrations.check import System

SIZES = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 3,
    "head_dim": 8,
    "vocab_size": 128,
    "max_target_length": 16,
    "per_device_batch_size": 4,
}


def system() -> System:
    config = pyconfig.initialize(
        ["", os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")],
        run_name="small",
        base_output_directory="unused",
        enable_checkpointing=False,
        dtype="float32",
        attention="dot_product",
        skip_jax_distributed_system=True,
        **SIZES,
    )
    model = model_creation_utils.from_config(config, rngs=nnx.Rngs(params=0, dropout=1))
    definition, params, rest = nnx.split(model, nnx.Param, ...)
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 1, config.vocab_size)

    def apply(params: nnx.State, rest: nnx.State, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        model = nnx.merge(definition, params, rest)
        return model(tokens, positions, jnp.ones_like(tokens), enable_dropout=False)

    def loss(params: nnx.State, rest: nnx.State, tokens: jax.Array) -> jax.Array:
        logits = apply(params, rest, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # dynaflow: begin
    rules = [
        df.SplitModule("self_attention"),
        df.SplitModule("mlp"),
        df.SplitModule("token_embedder"),
    ]
    options = {"scheduler": df.strategies.NanoFlow(), "rules": rules, "batch_axes": (None, None, 0)}
    forward = df.dynaflow(apply, **options)
    step = df.dynaflow(jax.value_and_grad(loss), out_axes="mean", **options)
    # dynaflow: end

    return System("maxtext", apply, loss, forward, step, (params, rest, tokens))
