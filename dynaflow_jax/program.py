"""A program: the flat list of equations that a jaxpr becomes once its constants are inputs like the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> tuple[Program, tuple[Any, ...]]:
    """Trace a function of flat arguments; returns its program and the values of the constants it closes over."""
    closed = jax.make_jaxpr(fun)(*avals)
    return from_jaxpr(closed), compat.consts_of(closed)


def outputs_of(program: Program, value_of: Callable[[Any], Any]) -> list[Any]:
    """The values of a program's outputs, given those of its variables."""
    return [atom.val if compat.is_literal(atom) else value_of(atom) for atom in program.outvars]
