"""Matmuls behind an all-gather or before a reduce-scatter, in pieces that are computed while others travel.

The decomposition of Wang et al. (ASPLOS 2023, "Overlap communication with dependent computation via decomposition"),
also known as collective matmul. There the pieces walk around a ring, since only neighbours are linked. Here every
device sends each piece straight to where it is needed, as PyTorch's asynchronous tensor parallelism does (TorchTitan,
arXiv 2410.06511, section 2.2.3): all devices of a host are linked, and no piece waits for another one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import compat, cost


def overlapped(jaxpr: Any) -> Callable[..., tuple[Any, ...]] | None:
    """What a jaxpr computes, with its gathered and its scattered matmuls in pieces.

    An ``all_gather`` is taken apart if some ``dot_general`` reads its result and does not contract the gathered
    dimension: the part of each device is then a matmul of its own, the own one first. A ``reduce_scatter`` is taken
    apart if it is of a ``dot_general``, or of a sum of several, of which the scattered dimension is a row or column:
    what the other devices are to get is then computed and sent first, the own share last. Transpositions and
    conversions behind the matmuls are taken along.

    Args:
      jaxpr: a closed jaxpr without constants, of a function inside ``jax.shard_map``.

    Returns:
      A function with the jaxpr's inputs and outputs, equal up to the rounding of sums; ``None`` if it holds other
      collectives, or none.
    """
    pieces = _Pieces(compat.open_jaxpr(jaxpr))
    if not pieces.is_complete:
        return None

    def collective_matmul(*args: Any) -> tuple[Any, ...]:
        return pieces.run(args)

    return collective_matmul


class _Pieces:
    """Which equations of a jaxpr are evaluated in pieces.

    Attributes:
      gathers: by variable, the ``all_gather`` that gives it.
      gathered_dots: by index of a ``dot_general``, which operand is gathered.
      scatters: by index of a ``reduce_scatter``, the index behind which its pieces can be computed.
      postponed: indices of the equations that are evaluated for each piece only.
    """

    def __init__(self, jaxpr: Any):
        self.jaxpr = jaxpr
        self.made = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self.readers: dict[Any, list[int]] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            for var in eqn.invars:
                if not compat.is_literal(var):
                    self.readers.setdefault(var, []).append(i)
        self.kept = {var for var in jaxpr.outvars if not compat.is_literal(var)}
        self.gathers: dict[Any, Any] = {}
        self.gathered_dots: dict[int, int] = {}
        self.scatters: dict[int, int] = {}
        self.postponed: set[int] = set()
        for i, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name == "all_gather" and _is_plain(eqn):
                self._find_gathered(eqn)
            elif eqn.primitive.name == "reduce_scatter" and _is_plain(eqn):
                found: set[int] = set()
                if self._divides(eqn.invars[0], eqn.params["scatter_dimension"], [i], found):
                    self.scatters[i] = max(found)
                    self.postponed |= found

    @property
    def is_complete(self) -> bool:
        """Whether all collectives are taken apart, and there are some."""
        apart = [*(self.made[var] for var in self.gathers), *self.scatters]
        return bool(apart) and not any(
            i not in apart and cost.communicates(eqn) for i, eqn in enumerate(self.jaxpr.eqns)
        )

    def _find_gathered(self, gather: Any) -> None:
        (var,), axis = gather.outvars, gather.params["all_gather_dimension"]
        for i in self.readers.get(var, ()):
            eqn = self.jaxpr.eqns[i]
            sides = [side for side in (0, 1) if eqn.invars[side] is var] if eqn.primitive.name == "dot_general" else []
            if len(sides) == 1 and axis in _free(eqn, sides[0]):
                self.gathers[var] = gather
                self.gathered_dots[i] = sides[0]

    def _divides(self, var: Any, dim: int, readers: list[int], found: set[int]) -> bool:
        """Whether a variable can be computed piece by piece along a dimension; adds the equations that do so."""
        if compat.is_literal(var) or var in self.kept or self.readers[var] != readers or var not in self.made:
            return False
        i = self.made[var]
        eqn = self.jaxpr.eqns[i]
        found.add(i)
        match eqn.primitive.name:
            case "dot_general":
                return i not in self.gathered_dots and _side_of(eqn, dim) is not None
            case "convert_element_type":
                return self._divides(eqn.invars[0], dim, [i], found)
            case "transpose":
                return self._divides(eqn.invars[0], eqn.params["permutation"][dim], [i], found)
            case "add" | "add_any":
                return all(self._divides(operand, dim, [i], found) for operand in eqn.invars)
        return False

    # -- evaluation --------------------------------------------------------------------------------------------------

    def run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The jaxpr's outputs."""
        env: dict[Any, Any] = dict(zip(self.jaxpr.invars, args, strict=True))
        parts: dict[Any, list[Any]] = {}  # of gathered values, the own one first, then from the next devices
        sums: dict[int, Any] = {}  # of scatters whose pieces are under way

        def value(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        for i, eqn in enumerate(self.jaxpr.eqns):
            if i in self.scatters:
                env[eqn.outvars[0]] = functools.reduce(jnp.add, sums[i])
            elif i in self.gathered_dots:
                env[eqn.outvars[0]] = self._gathered_dot(i, parts, value)
            elif eqn.outvars and eqn.outvars[0] in self.gathers:
                (var,), x, (axis, n) = eqn.outvars, value(eqn.invars[0]), _group(eqn)
                parts[var] = [x, *(jax.lax.ppermute(x, axis, _from_next(n, s)) for s in range(1, n))]
                if var in self.kept or any(reader not in self.gathered_dots for reader in self.readers[var]):
                    env[var] = _in_order(parts[var], axis, n, eqn.params["all_gather_dimension"])
            elif i not in self.postponed:
                env.update(zip(eqn.outvars, compat.bind(eqn, *map(value, eqn.invars)), strict=True))
            for scatter, last in self.scatters.items():
                if last == i:
                    sums[scatter] = self._send(self.jaxpr.eqns[scatter], value)
        return tuple(map(value, self.jaxpr.outvars))

    def _gathered_dot(self, i: int, parts: dict[Any, list[Any]], value: Callable[[Any], Any]) -> Any:
        """A matmul of what was gathered: one of each part, in the order of their arrival."""
        eqn, side = self.jaxpr.eqns[i], self.gathered_dots[i]
        var = eqn.invars[side]
        gather = self.gathers[var]
        operands = [None if other is var else value(other) for other in eqn.invars]
        made = []
        for part in parts[var]:
            operands[side] = part
            made += compat.bind(eqn, *operands)
        return _in_order(made, *_group(gather), _output_dim(eqn, side, gather.params["all_gather_dimension"]))

    def _send(self, eqn: Any, value: Callable[[Any], Any]) -> list[Any]:
        """Sends the other devices their pieces; returns the own one, and those that arrive."""
        (axis, n), dim = _group(eqn), eqn.params["scatter_dimension"]
        rank = jax.lax.axis_index(axis)
        length = eqn.invars[0].aval.shape[dim] // n
        arrived = []
        for s in range(1, n):
            piece = self._piece(eqn.invars[0], dim, (rank + s) % n * length, length, value)
            arrived.append(jax.lax.ppermute(piece, axis, [(i, (i + s) % n) for i in range(n)]))
        return [self._piece(eqn.invars[0], dim, rank * length, length, value), *arrived]

    def _piece(self, var: Any, dim: int, start: Any, length: int, value: Callable[[Any], Any]) -> Any:
        """Some rows (or columns) of a variable, computed without the others."""
        eqn = self.jaxpr.eqns[self.made[var]]
        if eqn.primitive.name == "dot_general":
            side = _side_of(eqn, dim)
            assert side is not None
            operands = [value(atom) for atom in eqn.invars]
            operands[side[0]] = jax.lax.dynamic_slice_in_dim(operands[side[0]], start, length, side[1])
        else:
            inner = eqn.params["permutation"][dim] if eqn.primitive.name == "transpose" else dim
            operands = [self._piece(atom, inner, start, length, value) for atom in eqn.invars]
        (made,) = compat.bind(eqn, *operands)
        return made


def _is_plain(eqn: Any) -> bool:
    params = eqn.params
    return params["tiled"] and params["axis_index_groups"] is None and _group(eqn)[1] > 1


def _group(eqn: Any) -> tuple[Any, int]:
    """The axes of a collective, and how many devices they span."""
    return eqn.params["axis_name"], eqn.params["axis_size"]


def _from_next(n: int, distance: int) -> list[tuple[int, int]]:
    """Every device gets what the one so far behind it has."""
    return [((i + distance) % n, i) for i in range(n)]


def _in_order(parts: Sequence[Any], axis: Any, n: int, dim: int) -> Any:
    """Parts of this device and of those that follow it, put together in the order of the axis."""
    length = parts[0].shape[dim]
    twice = jax.lax.concatenate([*parts, *parts[:-1]], dim)
    first = (n - jax.lax.axis_index(axis)) % n  # the place of device 0's
    return jax.lax.dynamic_slice_in_dim(twice, first * length, n * length, dim)


def _free(eqn: Any, side: int) -> list[int]:
    """The dimensions of a ``dot_general``'s operand that its result has too, once each."""
    contracting, batch = eqn.params["dimension_numbers"]
    return [d for d in range(eqn.invars[side].aval.ndim) if d not in (*contracting[side], *batch[side])]


def _output_dim(eqn: Any, side: int, dim: int) -> int:
    """Where a free dimension of an operand is in the result."""
    _, batch = eqn.params["dimension_numbers"]
    return len(batch[0]) + side * len(_free(eqn, 0)) + _free(eqn, side).index(dim)


def _side_of(eqn: Any, dim: int) -> tuple[int, int] | None:
    """Which free dimension of which operand a dimension of the result is; ``None`` for a batch dimension."""
    own = [(side, d) for side in (0, 1) for d in _free(eqn, side)]
    return next((found for found in own if _output_dim(eqn, *found) == dim), None)
