"""Flax Linen: a decoder in the style of Flax's own language-model example, its layers under nn.remat and nn.scan."""

import flax.linen as nn
import jax
import optax

import dynaflow_jax as df
from examples.integrations.check import Sizes, System


def kernel(*axes):
    return nn.with_logical_partitioning(nn.initializers.xavier_uniform(), axes)


class MlpBlock(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(self.sizes.hidden, kernel_init=kernel("embed", "mlp"), name="up")(x))
        x = nn.with_logical_constraint(x, ("batch", "length", "mlp"))
        return nn.Dense(self.sizes.width, kernel_init=kernel("mlp", "embed"), name="down")(x)


class DecoderLayer(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, x, mask):
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        attend = nn.MultiHeadDotProductAttention(
            self.sizes.heads,
            qkv_features=self.sizes.heads * self.sizes.head,
            kernel_init=kernel("embed", "kv"),
            name="self_attention",
        )
        x = x + attend(nn.LayerNorm(name="pre_attention_norm")(x), mask=mask)
        return x + MlpBlock(self.sizes, name="mlp")(nn.LayerNorm(name="pre_mlp_norm")(x)), None


class Decoder(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.sizes.vocabulary, self.sizes.width, name="token_embedder")
        layer = nn.remat(DecoderLayer, prevent_cse=False, policy=jax.checkpoint_policies.checkpoint_dots)
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.sizes.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(self.sizes, name="layers")(embed(tokens), nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm(name="decoder_norm")(x))


def system() -> System:
    sizes = Sizes(layers=3)
    model = Decoder(sizes)
    tokens = jax.random.randint(jax.random.key(0), (4, 16), 1, sizes.vocabulary)
    params = nn.unbox(jax.jit(model.init)(jax.random.key(1), tokens))

    def loss(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    # dynaflow: begin
    rules = [
        df.SplitModule("self_attention"),
        df.SplitModule("mlp"),
        df.SplitModule("token_embedder"),
    ]
    options = {"scheduler": df.strategies.NanoFlow(), "rules": rules, "batch_axes": (None, 0)}
    forward = df.dynaflow(model.apply, **options)
    step = df.dynaflow(jax.value_and_grad(loss), out_axes="mean", **options)
    # dynaflow: end

    return System("flax", model.apply, loss, forward, step, (params, tokens))
