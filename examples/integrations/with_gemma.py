"""DeepMind's gemma package: its Gemma 3 transformer, a small configuration with local and global layers."""

import jax
import jax.numpy as jnp
import optax
from gemma import gm

import dynaflow_jax as df
from examples.integrations.check import System


def system() -> System:
    local, everywhere = gm.nn.AttentionType.LOCAL_SLIDING, gm.nn.AttentionType.GLOBAL
    config = gm.nn.config.TransformerConfig(
        num_embed=128,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(local, everywhere),
        sliding_window_size=8,
    )
    model = gm.nn.Transformer(config=config, tokens="batch.tokens", dtype=jnp.float32)
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 1, config.num_embed)
    params = jax.jit(model.init)(jax.random.key(1), tokens)

    def apply(params, tokens):
        return model.apply(params, tokens).logits

    def loss(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # dynaflow: begin
    rules = [
        df.SplitModule(gm.nn.Attention),
        df.SplitModule(gm.nn.FeedForward),
        df.SplitModule(gm.nn.Embedder),
    ]
    options = {"scheduler": df.strategies.NanoFlow(), "rules": rules, "batch_axes": (None, 0)}
    forward = df.dynaflow(apply, **options)
    step = df.dynaflow(jax.value_and_grad(loss), out_axes="mean", **options)
    # dynaflow: end

    return System("gemma", apply, loss, forward, step, (params, tokens))
