"""What the benchmarks of training steps share: Llama's layers, a step of gradient descent, and XLA's ways to run it."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import dynaflow_jax as df
from examples.benchmarks.overlap import XLA, attention, norm

Layer = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
Weights = Sequence[Layer]

COMBINERS_OFF = {
    f"xla_gpu_{name}_combine_threshold_bytes": 1 for name in ("all_reduce", "all_gather", "reduce_scatter")
}
OPTIONS = {
    **XLA,
    "combiners off": COMBINERS_OFF,
    "latency hiding, combiners off": COMBINERS_OFF | XLA["latency hiding"],
}
"""Compiler options under which XLA may overlap the communication of a training step; the best one counts."""


def sizes(quick: bool) -> tuple[int, int, int, int]:
    """Width, hidden width, width of a head, and the number of layers."""
    return (64, 96, 16, 2) if quick else (4096, 14336, 128, 4)


def shapes(width: int, hidden: int) -> tuple[tuple[int, int], ...]:
    """Of a layer's weights: queries, keys and values; attention's output; gate and up; down."""
    return ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))


def same(w: jax.Array) -> jax.Array:
    """What stands in for a collective where there is none."""
    return w


class Trained:
    """A training step with weights of its own, which every call replaces in their memory.

    Args:
      step: from weights and rows to a loss and new weights; the old ones are donated.
      ws: the weights to start from, which are copied.
    """

    def __init__(self, step: Callable[[Weights, jax.Array], tuple[jax.Array, Weights]], ws: Weights):
        self._step = step
        self._ws = jax.tree.map(jnp.copy, ws)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Weights]:
        """The loss, and the weights, until the next call."""
        loss, self._ws = self._step(self._ws, x)
        return loss, self._ws


def step(
    ws: Weights,
    x: jax.Array,
    *,
    head: int,
    gather: Callable[[jax.Array], jax.Array] = same,
    reduce: Callable[[jax.Array], jax.Array] = same,
    own: Callable[[jax.Array], jax.Array] = same,
) -> tuple[jax.Array, Weights]:
    """A step of gradient descent on the mean square of what pre-norm layers make of ``x`` (batch, tokens, width).

    Args:
      ws: the weights, or this device's part of them.
      x: this device's rows.
      head: the width of an attention head.
      gather: from a part of a weight to the whole; differentiated with it.
      reduce: from a gradient to the one over all devices.
      own: the part of a weight, or gradient, that this device updates.

    Returns:
      The loss of this device's rows, of shape (1,), and the new weights.
    """

    def loss(ws: Weights) -> jax.Array:
        y = x
        for layer in ws:
            qkv, out, up, down = map(gather, layer)
            with df.mark("attention"):
                y = y + attention(y, qkv, out, head)
            with df.mark("mlp"):
                gate, value = jnp.split(norm(y) @ up, 2, axis=-1)
                y = y + (jax.nn.silu(gate) * value) @ down
        with df.mark("loss"):
            return jnp.mean(y.astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(ws)
    gradients = jax.tree.map(reduce, gradients)
    updated = []
    for layer, gradient in zip(ws, gradients, strict=True):
        with df.mark("update"):  # one for each layer, so that none waits for the gradients of all
            updated.append(tuple(own(w) - 1e-3 * own(g) for w, g in zip(layer, gradient, strict=True)))
    return value[None], updated
