"""A mixture of experts under ``shard_map``, after GShard (arXiv 2006.16668): every device has rows and an expert.

A token goes to the expert that likes it most. Each device sorts its tokens into a box for every expert, the devices
exchange boxes (dispatch), every expert works through what it got, and the boxes go back (combine). The boxes of one row
of the batch are its own, so rows are independent and the batch may be split.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from models import normal

import dynaflow_jax as df

WIDTH, TOKENS, AXIS = 8, 4, "expert"


def parameters(layers, experts):
    """Weights of a stack of layers; the experts' are sharded by expert."""
    return [
        {
            "qkv": normal(WIDTH, 3 * WIDTH, seed=10 * i) / 3,
            "router": normal(WIDTH, experts, seed=10 * i + 1),
            "up": normal(experts, WIDTH, 2 * WIDTH, seed=10 * i + 2) / 3,
            "down": normal(experts, 2 * WIDTH, WIDTH, seed=10 * i + 3) / 3,
            "dense": normal(WIDTH, WIDTH, seed=10 * i + 4) / 3,
        }
        for i in range(layers)
    ]


def specs(params):
    """How the weights are sharded."""
    return [{name: P(AXIS) if name in ("up", "down") else P() for name in layer} for layer in params]


def attention(p, x):
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    return x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2), axis=-1) @ v


def route(p, x):
    """For each row: boxes of tokens by expert, and how to get back."""
    scores = jax.nn.softmax(x @ p["router"], axis=-1)
    chosen = jax.nn.one_hot(scores.argmax(-1), scores.shape[-1])  # row, token, expert
    place = jnp.cumsum(chosen, axis=1) * chosen - 1
    where = jax.nn.one_hot(place.astype(jnp.int32), x.shape[1])  # row, token, expert, place in the box
    boxes = jnp.einsum("bted,btw->bedw", where, x)
    return boxes, where * (scores * chosen)[..., None]


def exchange(boxes):
    """Between rows sharded with all experts, and all rows with one expert."""
    return jax.lax.all_to_all(boxes, AXIS, split_axis=1, concat_axis=1, tiled=True)


def experts(p, boxes):
    return jax.nn.relu(boxes @ p["up"][0]) @ p["down"][0]


def moe_layer(p, x):
    """Attention, dispatch, experts, combine: the four parts of DeepSeek-V3's layer."""
    with df.mark("attention", tags={"compute"}):
        x = attention(p, x)
        boxes, back = route(p, x)
    with df.mark("dispatch"):
        boxes = exchange(boxes)
    with df.mark("experts", tags={"compute"}):
        boxes = experts(p, boxes)
    with df.mark("combine"):
        boxes = exchange(boxes)
    with df.mark("add"):
        return x + jnp.einsum("bted,bedw->btw", back, boxes)


def shortcut_layer(p, x):
    """The dense branch of LongCat-Flash's layer does not wait for the tokens that travel to the experts."""
    with df.mark("attention"):
        x = attention(p, x)
        boxes, back = route(p, x)
    with df.mark("dispatch"):
        boxes = exchange(boxes)
    with df.mark("dense", tags={"compute"}):
        y = x + jnp.tanh(x @ p["dense"])
    with df.mark("experts", tags={"compute"}):
        boxes = experts(p, boxes)
    with df.mark("combine"):
        boxes = exchange(boxes)
    with df.mark("dense 2", tags={"compute"}):
        y = y + jnp.tanh(y @ p["dense"])
    with df.mark("add"):
        return y + jnp.einsum("bted,bedw->btw", back, boxes)


def stack(layer, mesh, params):
    """The layers one after the other, under ``shard_map``: ``(params, x) -> y``."""

    def fun(params, x):
        for p in params:
            x = layer(p, x)
        return x

    return jax.shard_map(fun, mesh=mesh, in_specs=(specs(params), P(AXIS)), out_specs=P(AXIS))
