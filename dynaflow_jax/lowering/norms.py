"""Norms behind all-reduces: sum, residual and norm as one kernel (TokenWeave, arXiv 2505.11329, section 4).

A small all-reduce is a kernel of the executor's already, which reads the other devices' memory and adds. What follows
it in a transformer are the residual and an RMS norm, which XLA would read its result again for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.recognition import Norm, norms, widened
from dynaflow_jax.runtime import program as wire
from dynaflow_jax.substitution import Dataflow


@dataclasses.dataclass(frozen=True)
class Split:
    """A function whose first steps are the sum of its argument with a residual, and the norm of that.

    Attributes:
      norm: as the executor is told of it.
      operands: which other arguments the norm reads, by position: the residual and the weight, where it has them.
      given: for the sum and the norm, which of the function's results each is, or ``None``.
      reads: the arguments that the rest of the function reads, by position.
      rest: from these, and the sum and the norm before them, to the results that are not ``given``.
    """

    norm: wire.Norm
    operands: tuple[int, ...]
    given: tuple[int | None, int | None]
    reads: tuple[int, ...]
    rest: Callable[..., Sequence[Any]]


def split(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], total: int, there: Set[int], axes: Mapping[str, int]
) -> Split | None:
    """Splits a function behind the norm that it begins with; ``None`` if it does not, or the executor has no such norm.

    Args:
      fun: a function of arrays, which returns arrays.
      avals: types of its arguments.
      total: the position of the argument that is summed up.
      there: the positions of those that are known when it is.
      axes: sizes of the mesh axes that it may communicate over.
    """
    jaxpr = jax.make_jaxpr(fun, axis_env=list(axes.items()) if axes else None)(*avals)
    if compat.consts_of(jaxpr):
        return None
    inner = _opened(compat.open_jaxpr(jaxpr))
    flow, given = Dataflow(inner), inner.invars[total]
    position = {var: i for i, var in enumerate(inner.invars)}
    for found in norms(inner):
        terms = [_as_given(flow, atom) for atom in found.terms or (found.x,)]
        if given not in terms:
            continue
        terms.remove(given)
        weight = None if found.weight is None else _weight(flow, found.weight)
        operands = tuple(position.get(var, -1) for var in (*terms, weight) if var is not None)
        if norm := _told(found, weight, residual=bool(terms)) if there >= {*operands} else None:
            made = _cut(inner, found, norm, operands)
            return None if total in made.reads else made  # it is read elsewhere too
    return None


def _told(found: Norm, weight: Any | None, *, residual: bool) -> wire.Norm | None:
    """A norm as the executor is told of it, if it can compute it."""
    x, kind = found.x.aval, None if weight is None else weight.aval.dtype.name
    row = x.shape[-1] * x.dtype.itemsize
    if row % wire.SUM_BYTES or row > wire.MAX_ROW_BYTES or kind not in (None, "float32", x.dtype.name):
        return None
    return wire.Norm(x.shape[-1], found.eps, residual, kind, found.rounds_scale, found.rounds_normed)


def _cut(jaxpr: Any, found: Norm, norm: wire.Norm, operands: tuple[int, ...]) -> Split:
    """What is left of a jaxpr behind a norm."""
    made = (found.x, found.normed)
    results = list(jaxpr.outvars)
    given = [results.index(var) if var in results else None for var in made]
    left = [var for i, var in enumerate(results) if i not in given]
    needed, eqns = {var for var in left if not compat.is_literal(var)}, []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars) - {*made} or compat.has_effects(eqn):
            eqns.append(eqn)
            needed.update(var for var in eqn.invars if not compat.is_literal(var))
    reads = tuple(i for i, var in enumerate(jaxpr.invars) if var in needed - {*made})
    rest = compat.closed_jaxpr([*made, *(jaxpr.invars[i] for i in reads)], left, eqns[::-1])
    return Split(
        norm, operands, (given[0], given[1]), reads, lambda *values: compat.call_jaxpr(rest, values, "operator")
    )


def _as_given(flow: Dataflow, atom: Any) -> Any:
    """A value as it was before it was said that devices may differ in it."""
    while (eqn := flow.made_by(atom, "pvary", "pcast")) is not None:
        (atom,) = eqn.invars
    return atom


def _weight(flow: Dataflow, atom: Any) -> Any:
    """A weight as it was before it was converted without a loss, which the executor does itself."""
    atom = _as_given(flow, atom)
    source = widened(flow, atom)
    return atom if source is None else _as_given(flow, source)


def _opened(jaxpr: Any) -> Any:
    """An open jaxpr without calls of other jaxprs in it.

    Its equations stay as they were traced: evaluated again, they would not agree on what varies over devices.
    """
    eqns: list[Any] = []

    def run(inner: Any, env: dict[Any, Any], stack: Any) -> list[Any]:
        def renamed(atoms: Sequence[Any]) -> list[Any]:
            return [atom if compat.is_literal(atom) else env[atom] for atom in atoms]

        for eqn in inner.eqns:
            operands, bodies = renamed(eqn.invars), [body for _, body in compat.sub_jaxprs(eqn)]
            own = compat.name_stack(eqn) if stack is None else stack + compat.name_stack(eqn)
            if eqn.primitive.name in compat.CALLS and len(bodies) == 1 and not compat.consts_of(bodies[0]):
                body = compat.open_jaxpr(bodies[0])
                results = run(body, dict(zip(body.invars, operands, strict=True)), own)
            else:
                results = [compat.var_like(var, var.aval) for var in eqn.outvars]
                eqns.append(compat.replace_eqn(eqn, invars=operands, outvars=results, name_stack=own))
            env.update(zip(eqn.outvars, results, strict=True))
        return renamed(inner.outvars)

    outvars = run(jaxpr, {var: var for var in jaxpr.invars}, None)
    return compat.with_equations(jaxpr, jaxpr.invars, outvars, eqns)
