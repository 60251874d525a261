"""Models of several devices, as one device computes them: what exchanges their parts is an argument."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dynaflow_jax as df
from examples.benchmarks.overlap import Attend, attend, attention, norm

Layer = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Exchange = Callable[[jax.Array], jax.Array]


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    gate, value = jnp.split(norm(x) @ up, 2, axis=-1)
    return (jax.nn.silu(gate) * value) @ down


def tensor_parallel(
    ws: Sequence[Layer], x: jax.Array, *, reduce: Exchange, head: int, attend: Attend = attend
) -> jax.Array:
    """Pre-norm layers on ``x`` of shape (batch, tokens, width); each device has its share of heads and hidden units."""
    for qkv, out, up, down in ws:
        with df.mark("attention"):
            y = attention(x, qkv, out, head, attend)
        x = x + reduce(y)
        with df.mark("mlp"):
            y = mlp(x, up, down)
        x = x + reduce(y)
    return x


def routes(tokens: int, experts: int, chosen: int) -> tuple[np.ndarray, np.ndarray]:
    """Balanced routing within a group: which token is in each of an expert's places, and where each token's are."""
    to = (np.arange(tokens)[:, None] * chosen + np.arange(chosen)) % experts
    places, found = np.zeros((experts, tokens * chosen // experts), np.int32), np.zeros((tokens, chosen, 2), np.int32)
    filled = np.zeros(experts, int)
    for token in range(tokens):
        for j, expert in enumerate(to[token]):
            places[expert, filled[expert]] = token
            found[token, j] = expert, filled[expert]
            filled[expert] += 1
    return places, found


def dispatch(x: jax.Array, places: np.ndarray) -> jax.Array:
    """Tokens of every group in the order of the experts: (experts, groups, places, width)."""
    return jnp.moveaxis(norm(x)[:, places], 1, 0)


def experts(y: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    gate, value = jnp.split(jnp.einsum("egcd,edf->egcf", y, up), 2, axis=-1)
    return jnp.einsum("egcf,efd->egcd", jax.nn.silu(gate) * value, down)


def combine(x: jax.Array, y: jax.Array, found: np.ndarray) -> jax.Array:
    """Adds to each token what its experts made of it."""
    return x + jnp.moveaxis(y, 1, 0)[:, found[..., 0], found[..., 1]].sum(2).astype(x.dtype)


def expert_parallel(
    ws: Sequence[Layer],
    x: jax.Array,
    *,
    there: Exchange,
    back: Exchange,
    routing: Any,
    head: int,
    attend: Attend = attend,
) -> jax.Array:
    """Layers on ``x`` of shape (groups, tokens, width)."""
    places, found = routing
    for qkv, out, up, down in ws:
        with df.mark("attention"):
            x = x + attention(x, qkv, out, head, attend)
            y = dispatch(x, places)
        y = there(y)
        with df.mark("experts"):
            y = experts(y, up, down)
        y = back(y)
        with df.mark("combine"):
            x = combine(x, y, found)
    return x


def exchanges(axis: str) -> dict[str, Exchange]:
    """What brings an expert-parallel layer's tokens to their experts and back, over a mesh axis."""
    exchange = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)
    return {
        "there": functools.partial(exchange, split_axis=0, concat_axis=2),
        "back": functools.partial(exchange, split_axis=2, concat_axis=0),
    }


def stays(y: jax.Array, *, to_experts: bool) -> jax.Array:
    """The shapes of an exchange between two devices and their experts, without the exchange."""
    e, g, c, d = y.shape
    return y.reshape(e // 2, g, 2 * c, d) if to_experts else y.reshape(2 * e, g, c // 2, d)
