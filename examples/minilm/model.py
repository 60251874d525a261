"""all-MiniLM-L6-v2 in Flax Linen: a six-layer BERT encoder, mean pooling, unit length.

The model knows nothing of schedules. ``df.mark`` only says where its operators begin and end, and a tag whether one
looks at each word piece alone or at the whole sentence. ``init`` and ``apply`` work as in any other Linen model;
outside ``df.dynaflow`` a mark is no more than a named scope.
"""

import dataclasses
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp

import dynaflow_jax as df


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of the model, under the names that the published ``config.json`` gives them."""

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 12
    intermediate_size: int = 1536
    layer_norm_eps: float = 1e-12

    @classmethod
    def from_json(cls, path: Path) -> "Config":
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


class MiniLM(nn.Module):
    """Word pieces in, one unit vector for each sentence out: ``[rows, tokens] -> [rows, hidden_size]``.

    ``mask`` is 1 where ``ids`` holds a word piece and 0 where it is padding. A row of nothing but padding gives zeros.
    """

    config: Config = Config()

    @nn.compact
    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = Embeddings(self.config, name="embeddings")(ids)
        for i in range(self.config.num_hidden_layers):
            hidden = EncoderLayer(self.config, name=f"layers_{i}")(hidden, mask)
        return pool(hidden, mask)


class Embeddings(nn.Module):
    """What the word piece is, where it stands, and that it belongs to the first (here: the only) sentence."""

    config: Config

    @df.mark("embed", tags={"per_token"})
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        c = self.config
        words = nn.Embed(c.vocab_size, c.hidden_size, name="word")(ids)
        kinds = nn.Embed(c.type_vocab_size, c.hidden_size, name="token_type")(jnp.zeros_like(ids))
        places = nn.Embed(c.max_position_embeddings, c.hidden_size, name="position")(jnp.arange(ids.shape[-1]))
        return layer_norm(c, "norm")(words + kinds + places)


class EncoderLayer(nn.Module):
    """Attention, then a feed-forward block, each added to its input and normalised after."""

    config: Config

    @nn.compact
    def __call__(self, hidden: jax.Array, mask: jax.Array) -> jax.Array:
        c = self.config
        with df.mark("attention", tags={"per_sentence"}):
            attend = nn.MultiHeadDotProductAttention(c.num_attention_heads, name="attention")
            hidden = layer_norm(c, "attention_norm")(hidden + attend(hidden, mask=mask[:, None, None, :]))
        with df.mark("ffn", tags={"per_token"}):
            wide = nn.gelu(nn.Dense(c.intermediate_size, name="up")(hidden), approximate=False)
            hidden = layer_norm(c, "ffn_norm")(hidden + nn.Dense(c.hidden_size, name="down")(wide))
        return hidden


@df.mark("pool", tags={"per_sentence"})
def pool(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean over a sentence's word pieces, scaled to unit length."""
    weights = mask[:, :, None].astype(hidden.dtype)
    mean = (hidden * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1)
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), 1e-12)


def layer_norm(config: Config, name: str) -> nn.LayerNorm:
    # The fast variance, E[x²] - E[x]², cancels; these weights were trained with the other one.
    return nn.LayerNorm(epsilon=config.layer_norm_eps, use_fast_variance=False, name=name)
