"""Collectives of a dispatched plan: exchanges between devices, and the arithmetic on what arrives.

An exchange only moves bytes, which on GPUs the copy engines do, so that no compute unit is taken from the kernels
beside it. The additions of a reduction belong to whatever reads the sum, as part of its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import compat, cost
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.lowering.builder import Builder
from dynaflow_jax.lowering.tasks import Entry, Expr, Term
from dynaflow_jax.runtime.work import Exchange, Pattern, Rows, Where

# Larger sums of more than two devices are computed in two steps, each device a share: less to send, one hop more.
_ONE_STEP_BYTES = 256 << 10

_REDUCTIONS = {"psum": jnp.add, "psum_invariant": jnp.add, "pmax": jnp.maximum, "pmin": jnp.minimum}


def is_collective(eqn: Any) -> bool:
    """Whether an equation needs the other devices, or one's position among them."""
    return eqn.primitive.name in _EMIT or eqn.primitive.name in cost.COLLECTIVES


def emit(
    builder: Builder, eqn: Any, operands: Sequence[Term], name: str, where: Where, after: Sequence[Entry]
) -> list[Term]:
    """Adds what a collective equation does; returns its results.

    Args:
      builder: of the plan.
      eqn: an equation for which ``is_collective``.
      operands: what it reads.
      name: the operator, for messages.
      where: where the exchange runs.
      after: operations that must be over before.

    Raises:
      DynaFlowError: if it is of a kind that is not dispatched.
    """
    if eqn.primitive.name not in _EMIT:
        raise DynaFlowError(f"{name} communicates by {eqn.primitive.name}, which is not dispatched.")
    if eqn.params.get("axis_index_groups") is not None:
        raise DynaFlowError(f"{name} communicates in groups that are no mesh axes (axis_index_groups).")
    group = _Group(builder, eqn, name, where, after)
    return _EMIT[eqn.primitive.name](group, eqn, operands)


class _Group:
    """The devices that take part in a collective, as seen from one of them."""

    def __init__(self, builder: Builder, eqn: Any, name: str, where: Where, after: Sequence[Entry]):
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        self.axes: tuple[str, ...] = axes if isinstance(axes, tuple) else (axes,)
        unknown = [axis for axis in self.axes if axis not in builder.mesh]
        if unknown:
            raise DynaFlowError(f"{name} communicates over {unknown[0]!r}, which is no axis of the mesh around it.")
        self.size = builder.group_size(self.axes)
        self.builder = builder
        self.name = name
        self.where = where
        self.after = tuple(after)

    def in_memory(self, term: Term, aval: Any) -> int:
        """Something to send."""
        return term if isinstance(term, int) else self.arranged(lambda x: x, term, tuple(aval.shape), aval.dtype)

    def arranged(self, fun: Callable[..., Any], term: Term, shape: tuple[int, ...], dtype: Any) -> int:
        """Something to send, put in order where it is made."""
        aval = jax.ShapeDtypeStruct(shape, dtype)
        return self.builder.beside_producer(self.name, fun, term, aval, self.where)

    def exchange(self, value: int, shape: tuple[int, ...], pattern: Pattern, **attributes: Any) -> int:
        """Sends a value; returns what arrives, of a shape whose first axis counts senders."""
        arrived = self.builder.arrival(shape, self.builder.aval(value).dtype)
        exchange = Exchange(self.name, self.where, (value,), (arrived,), (), self.axes, pattern, **attributes)
        self.builder.exchange(exchange, self.after)
        return arrived

    def combined(self, value: int, shape: tuple[int, ...], pattern: Pattern, combine: Callable[..., Any]) -> Expr:
        """Sends a value; returns what ``combine`` makes of what all devices sent, each of a shape.

        In the group's order everywhere, so that all devices get the same bits.
        """
        parts = tuple(self.builder.arrival(shape, self.builder.aval(value).dtype) for _ in range(self.size))
        exchange = Exchange(self.name, self.where, (value,), parts, (), self.axes, pattern)
        self.builder.exchange(exchange, self.after)
        return self.builder.combined(parts, combine)

    def reshaped(self, value: int, shape: tuple[int, ...]) -> int:
        """A value in memory under another shape."""
        aval = self.builder.aval(value)
        return self.builder.value(jax.ShapeDtypeStruct(shape, aval.dtype), within=(value, 0))


def _reduce(group: _Group, eqn: Any, operands: Sequence[Term]) -> list[Term]:
    """All-reduce: devices send each other all they have, or first a share each and then what became of it."""
    combine = _REDUCTIONS[eqn.primitive.name]
    return [_reduced(group, term, var.aval, combine) for term, var in zip(operands, eqn.invars, strict=True)]


def _reduced(group: _Group, term: Term, aval: Any, combine: Callable[..., Any]) -> Term:
    n = group.size
    if n == 1:
        return term
    value = group.in_memory(term, aval)
    if n == 2 or aval.size * aval.dtype.itemsize <= _ONE_STEP_BYTES:
        return group.combined(value, tuple(aval.shape), Pattern.GATHER, combine)
    share = -(-aval.size // n)

    def shares(x: Any) -> Any:
        return jnp.pad(x.reshape(-1), (0, n * share - aval.size)).reshape(n, share)

    sent = group.reshaped(value, (n, share)) if n * share == aval.size else None
    if sent is None:
        sent = group.arranged(shares, value, (n, share), aval.dtype)
    own = group.combined(sent, (share,), Pattern.SCATTER, combine)
    own = group.builder.in_memory(own, jax.ShapeDtypeStruct((share,), aval.dtype), group.name, group.where)
    whole = group.exchange(own, (n, share), Pattern.GATHER)
    if n * share == aval.size:
        return group.reshaped(whole, tuple(aval.shape))
    return Expr((whole,), lambda x: x.reshape(-1)[: aval.size].reshape(aval.shape))


def _all_gather(group: _Group, eqn: Any, operands: Sequence[Term]) -> list[Term]:
    (term,), (var,) = operands, eqn.invars
    axis, tiled, shape = eqn.params["all_gather_dimension"], eqn.params["tiled"], tuple(var.aval.shape)
    out = tuple(eqn.outvars[0].aval.shape)
    # What lies before the axis are rows, between which those of the others come to lie.
    before = math.prod(shape[:axis])
    rows = Rows(before, target=before > 1)
    del tiled  # either way the elements are in the same order
    value = group.in_memory(term, var.aval)
    return [group.reshaped(group.exchange(value, (group.size, *shape), Pattern.GATHER, rows=rows), out)]


def _reduce_scatter(group: _Group, eqn: Any, operands: Sequence[Term]) -> list[Term]:
    (term,), (var,) = operands, eqn.invars
    out = tuple(eqn.outvars[0].aval.shape)
    parts = _split(group, term, var.aval, eqn.params["scatter_dimension"], eqn.params["tiled"])
    if group.size == 1:
        return [Expr((parts,), lambda x: x.reshape(out))]
    rest = tuple(group.builder.aval(parts).shape[1:])
    total = group.combined(parts, rest, Pattern.SCATTER, jnp.add)
    return [Expr(total.reads, lambda *values: total.compute(*values).reshape(out))]


def _all_to_all(group: _Group, eqn: Any, operands: Sequence[Term]) -> list[Term]:
    (term,), (var,) = operands, eqn.invars
    split, concat, n = eqn.params["split_axis"], eqn.params["concat_axis"], group.size
    shape, out = tuple(var.aval.shape), tuple(eqn.outvars[0].aval.shape)
    # A part is rows before the split axis where it is sent from, and before the other axis where it arrives.
    sent, arriving = math.prod(shape[:split]), math.prod(out[:concat])
    rows = Rows(max(sent, arriving), source=sent > 1, target=arriving > 1)
    if sent == 1 or arriving == 1 or sent == arriving:
        value = group.in_memory(term, var.aval)
        return [group.reshaped(group.exchange(value, (n, var.aval.size // n), Pattern.SCATTER, rows=rows), out)]
    parts = _split(group, term, var.aval, split, eqn.params["tiled"])
    rows = Rows(arriving, target=True)
    return [group.reshaped(group.exchange(parts, group.builder.aval(parts).shape, Pattern.SCATTER, rows=rows), out)]


def _split(group: _Group, term: Term, aval: Any, axis: int, tiled: bool) -> int:
    """A value whose first axis counts the devices that its parts go to."""
    shape, n = tuple(aval.shape), group.size
    if tiled:
        rest = (*shape[:axis], shape[axis] // n, *shape[axis + 1 :])
    else:
        rest = (*shape[:axis], *shape[axis + 1 :])
    if axis == 0:
        return group.reshaped(group.in_memory(term, aval), (n, *rest))

    def parts(x: Any) -> Any:
        x = x.reshape(*shape[:axis], n, -1, *shape[axis + 1 :]) if tiled else x
        return jnp.moveaxis(x, axis, 0).reshape(n, *rest)

    return group.arranged(parts, term, (n, *rest), aval.dtype)


def _permute(group: _Group, eqn: Any, operands: Sequence[Term]) -> list[Term]:
    (term,), (var,) = operands, eqn.invars
    pairs = tuple((int(source), int(target)) for source, target in eqn.params["perm"])
    value = group.in_memory(term, var.aval)
    return [group.exchange(value, tuple(var.aval.shape), Pattern.PERMUTE, pairs=pairs)]


def _axis_index(group: _Group, eqn: Any, operands: Sequence[Term]) -> list[Term]:
    del eqn, operands
    return [group.builder.rank(group.axes)]


_EMIT: dict[str, Callable[[_Group, Any, Sequence[Term]], list[Term]]] = {
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _permute,
    "axis_index": _axis_index,
}


def communicates(eqn: Any) -> bool:
    """Whether an equation is a collective, or holds one."""
    return is_collective(eqn) or any(
        communicates(inner) for _, body in compat.sub_jaxprs(eqn) for inner in compat.open_jaxpr(body).eqns
    )
