"""What every integration shares: what a system is, how it is compared with its schedule, how lines are counted."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import dynaflow_jax as df

BEGIN, END = "# dynaflow: begin", "# dynaflow: end"

SYSTEMS = ("linen", "nnx", "equinox", "gemma", "tunix", "maxtext")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A decoder's: small, so that it runs anywhere.

    Attributes:
      layers: how many.
      vocabulary: how many tokens there are.
      width: of the residual stream.
      hidden: of the feed-forward blocks.
      heads: of attention.
      head: width of each.
    """

    layers: int
    vocabulary: int = 97
    width: int = 32
    hidden: int = 64
    heads: int = 4
    head: int = 8


@dataclasses.dataclass(frozen=True)
class System:
    """A model of some system, as it is and as scheduled.

    Attributes:
      package: the distribution on PyPI that it comes from.
      apply: the system's own forward pass, a function of ``arguments``.
      loss: the system's own scalar loss, of the same.
      forward: ``apply``, scheduled.
      step: ``jax.value_and_grad(loss)``, scheduled.
      arguments: random parameters, and a batch.
      dtype: what the system computes in.
    """

    package: str
    apply: Callable[..., Any]
    loss: Callable[..., jax.Array]
    forward: df.DynaFlow
    step: df.DynaFlow
    arguments: tuple[Any, ...]
    dtype: Any = jnp.float32

    @property
    def version(self) -> str:
        """The version that is installed."""
        return importlib.metadata.version(self.package)

    @property
    def bound(self) -> float:
        """How much a schedule may differ from the system, relative to the largest entry.

        The operations are the same. What differs is where XLA ends a fusion, in what order it adds up a product of
        fewer rows, and that the gradient of the batch is the mean of two: a few roundings in each of a few layers.
        """
        return 32 * float(jnp.finfo(self.dtype).eps)

    def forward_difference(self) -> float:
        """How far the scheduled forward pass is from the system's own."""
        return difference(jax.jit(self.forward)(*self.arguments), jax.jit(self.apply)(*self.arguments))

    def step_difference(self) -> float:
        """How far loss and gradient of the scheduled training step are from the system's own."""
        value, gradient = jax.jit(self.step)(*self.arguments)
        own_value, own_gradient = jax.jit(jax.value_and_grad(self.loss))(*self.arguments)
        return max(difference(value, own_value), difference(gradient, own_gradient))


def load(name: str) -> System:
    """The system of ``with_<name>.py``; an ``ImportError`` says what is not installed."""
    return importlib.import_module(f"examples.integrations.with_{name}").system()


def difference(got: Any, want: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of the second.

    Of the whole tree, since some gradients are zero but for rounding, such as that of a bias added to all keys.
    """
    if (structure := jax.tree.structure(want)) != jax.tree.structure(got):
        raise ValueError(f"Compared are {jax.tree.structure(got)} and {structure}.")
    pairs = [
        (jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    largest = max(float(jnp.abs(b).max()) for _, b in pairs)
    return max(float(jnp.abs(a - b).max()) for a, b in pairs) / largest


def lines_added(name: str) -> int:
    """Lines of code that a user adds to a system: those between the markers, and the import."""
    source = Path(__file__).with_name(f"with_{name}.py").read_text(encoding="utf-8")
    count, inside = 1, False
    for line in map(str.strip, source.splitlines()):
        inside = (inside or line == BEGIN) and line != END
        count += inside and bool(line) and not line.startswith("#")
    return count


def operators(graph: df.OpGraph) -> list[df.Operator]:
    """The operators of a graph, those inside loops in place of the loops."""
    return [leaf for op in graph for leaf in (operators(op.body) if op.body is not None else [op])]
