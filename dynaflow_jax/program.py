"""A program: the flat list of equations that a jaxpr becomes once its constants are inputs like the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from dynaflow_jax import compat


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Equations in program order, with their inputs and outputs.

    Attributes:
      invars: the inputs, constants first.
      outvars: the outputs: variables or literals.
      eqns: the equations, in an order in which every variable is defined before it is read.
    """

    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"Program({len(self.invars)} inputs, {len(self.eqns)} equations, {len(self.outvars)} outputs)"


def from_jaxpr(jaxpr: Any) -> Program:
    """The program of a jaxpr, open or closed; constant variables become the first inputs."""
    inner = compat.open_jaxpr(jaxpr)
    return Program(compat.all_invars(jaxpr), tuple(inner.outvars), tuple(inner.eqns))


def trace(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], axes: Mapping[str, int] | None = None
) -> tuple[Program, tuple[Any, ...]]:
    """Trace a function of flat arguments; returns its program and the values of the constants it closes over.

    Args:
      fun: the function.
      avals: types of its arguments.
      axes: sizes of mesh axes that it may communicate over, where no ``shard_map`` around the trace has them.
    """
    closed = jax.make_jaxpr(fun, axis_env=list(axes.items()) if axes else None)(*avals)
    return from_jaxpr(closed), compat.consts_of(closed)


def constants_inside(program: Program) -> Iterator[Any]:
    """The values of the constants that belong to the jaxprs inside a program's equations."""
    for eqn in program.eqns:
        for _, jaxpr in compat.sub_jaxprs(eqn):
            yield from compat.consts_of(jaxpr)
            yield from constants_inside(from_jaxpr(jaxpr))


def outputs_of(program: Program, value_of: Callable[[Any], Any]) -> list[Any]:
    """The values of a program's outputs, given those of its variables."""
    return [atom.val if compat.is_literal(atom) else value_of(atom) for atom in program.outvars]
