"""The kernels that stand for a part of an operator, for a strategy to look for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import recognition
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.substitution import Match
from pallas_kernels import add_rms_norm, grouped_matmul, measured, rms_norm


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Finds in a jaxpr what kernels can compute; for ``df.strategies.WithKernels`` and ``Auto(kernels=...)``.

    - ``"add_rms_norm"``: the RMSNorm of a sum, as behind every layer of a transformer.
    - ``"rms_norm"``: any other RMSNorm, such as one whose sum another operator computes.
    - ``"grouped_matmul"``: ``jax.lax.ragged_dot``, the experts' matmul of a mixture of experts.

    Where a kernel does not support an array, or the device, or was not measured faster, nothing is found: measured in
    whole models if there are such numbers, by itself otherwise (``measured.json``).

    Args:
      only: names of kernels, or one; all of them if left out.
      everywhere: whether kernels are used wherever they are supported, measured or not.
      interpret: simulate the kernels on the CPU, everywhere: for tests.

    Raises:
      DynaFlowError: if there is no kernel of such a name.
    """

    only: str | tuple[str, ...] = ()
    everywhere: bool = False
    interpret: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.only, str):
            object.__setattr__(self, "only", (self.only,))
        for name in self.only:
            if name not in _MATCHERS:
                raise DynaFlowError(f"There is no kernel {name!r} to use in place; there are {', '.join(_MATCHERS)}.")

    def __repr__(self) -> str:
        given = [f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self)]
        return f"Kernels({', '.join(text for text in given if not text.endswith(('=()', '=False')))})"

    def __call__(self, jaxpr: Any) -> Iterator[Match]:
        """The parts of an open jaxpr that one of the kernels should compute."""
        for name in self.only or _MATCHERS:
            module, find = _MATCHERS[name]
            for match in find(jaxpr, self.interpret):
                if self._is_worthwhile(module, name, [var.aval for var in match.invars]):
                    yield match

    def _is_worthwhile(self, module: Any, name: str, avals: list[Any]) -> bool:
        if self.interpret:
            return bool(module.supports_shapes(*avals))
        if not module.supports(*avals):
            return False
        kind = jax.devices()[0].device_kind
        return self.everywhere or measured.worthwhile_in_place(name, kind, module.key(*avals))


def _weighted_norms(jaxpr: Any) -> Iterator[recognition.Norm]:
    """Those that the kernels compute: with a weight, and rounded once."""
    for found in recognition.norms(jaxpr):
        if found.weight is not None and not found.rounds_scale and not found.rounds_normed:
            yield found


def _sums_and_norms(jaxpr: Any, interpret: bool) -> Iterator[Match]:
    for found in _weighted_norms(jaxpr):
        if found.terms:
            fn = functools.partial(add_rms_norm.add_rms_norm, eps=found.eps, interpret=interpret)
            yield Match("add_rms_norm", fn, (*found.terms, found.weight), (found.normed, found.x))


def _norms(jaxpr: Any, interpret: bool) -> Iterator[Match]:
    for found in _weighted_norms(jaxpr):

        def norm(x: jax.Array, weight: jax.Array, eps: float = found.eps) -> tuple[jax.Array]:
            return (rms_norm.rms_norm(x, weight, eps=eps, interpret=interpret),)

        yield Match("rms_norm", norm, (found.x, found.weight), (found.normed,))


def _grouped(jaxpr: Any, interpret: bool) -> Iterator[Match]:
    def product(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array]:
        result = grouped_matmul.grouped_matmul(x, weights, sizes, interpret=interpret)
        # Rows of no group are zeros for ragged_dot; the kernel leaves them as they are. XLA fuses this into what reads.
        in_a_group = jnp.arange(len(x))[:, None] < sizes.sum()
        return (jnp.where(in_a_group, result, jnp.zeros_like(result)),)

    for found in recognition.grouped_matmuls(jaxpr):
        yield Match("grouped_matmul", product, (found.x, found.weights, found.sizes), (found.product,))


_MATCHERS: dict[str, tuple[Any, Callable[[Any, bool], Iterator[Match]]]] = {
    "add_rms_norm": (add_rms_norm, _sums_and_norms),
    "rms_norm": (rms_norm, _norms),
    "grouped_matmul": (grouped_matmul, _grouped),
}
