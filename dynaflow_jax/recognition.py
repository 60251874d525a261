"""What a jaxpr computes that a kernel could compute instead, however a model writes it: norms, grouped matmuls."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.substitution import Dataflow

_LAYOUTS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pvary", "pcast")
"""Primitives that repeat a value, or only say something else of it (the last two: that devices may differ in it)."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm; its arrays are variables of the jaxpr.

    Attributes:
      x: what is normalized.
      weight: ``[width]``; ``None`` if there is none.
      normed: what comes out, of ``x``'s dtype.
      eps: added to the mean square.
      terms: two arrays of ``x``'s type that ``x`` is the sum of; empty if it is something else.
      rounds_scale: whether what the rows are multiplied with is rounded to ``x``'s dtype before.
      rounds_normed: whether rows are rounded to it before they are multiplied with the weight.
    """

    x: Any
    weight: Any | None
    normed: Any
    eps: float
    terms: tuple[Any, ...]
    rounds_scale: bool = False
    rounds_normed: bool = False


def norms(jaxpr: Any) -> Iterator[Norm]:
    """The RMSNorms in an open jaxpr that are computed in float32, and whose parts nothing else reads.

    As Flax Linen and NNX, Equinox, MaxText and models by hand write it: with ``rsqrt``, or dividing by ``sqrt``; with
    the weight multiplied before or after, or without one; with a mean that is subtracted and known to be zero; with
    roundings on the way.
    """
    flow = Dataflow(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("rsqrt", "sqrt") and (found := _norm(flow, eqn)):
            yield found


def _norm(flow: Dataflow, root: Any) -> Norm | None:
    inside = [root]  # the equations that are not needed any more
    mean, eps = _mean_and_eps(flow, root.invars[0], inside)
    squared = None if mean is None else _mean_of_square(flow, mean, inside)
    if squared is None or squared.aval.dtype != jnp.float32:
        return None
    x = _narrow(flow, squared)
    scaled = None if compat.is_literal(x) else _scaled(flow, root, x, inside)
    if scaled is None or any(flow.only_reader(eqn.outvars[0]) is None for eqn in inside[:-1]):
        return None
    if not all(_stays_with_its_row(eqn, x.aval.shape) for eqn in inside if eqn.primitive.name in _LAYOUTS):
        return None
    if (scaled.normed.aval.shape, scaled.normed.aval.dtype) != (x.aval.shape, x.aval.dtype):
        return None
    add = flow.made_by(x, "add", "add_any")
    terms = () if add is None else tuple(add.invars)
    if any(compat.is_literal(term) or term.aval.shape != x.aval.shape for term in terms):
        terms = ()
    return dataclasses.replace(scaled, eps=eps, terms=terms)


def _mean_and_eps(flow: Dataflow, atom: Any, inside: list[Any]) -> tuple[Any, float]:
    """The two that were added."""
    if (add := flow.made_by(atom, "add")) is None:
        return None, 0.0
    inside.append(add)
    for value, other in (add.invars, add.invars[::-1]):
        if (eps := _number(flow, other)) is not None and not compat.is_literal(value):
            return value, eps
    return None, 0.0


def _mean_of_square(flow: Dataflow, atom: Any, inside: list[Any]) -> Any | None:
    """What was squared and averaged over its last axis."""
    scaled = flow.made_by(_bare(flow, atom, inside), "div", "mul")
    if scaled is None or (number := _number(flow, scaled.invars[1])) is None:
        return None
    inside.append(scaled)
    total = flow.made_by(_bare(flow, scaled.invars[0], inside), "reduce_sum")
    if total is None:
        return None
    (operand,) = total.invars
    width = operand.aval.shape[-1] if operand.aval.shape else 0
    factor = number if scaled.primitive.name == "mul" else 1 / number if number else 0.0
    if total.params["axes"] != (operand.aval.ndim - 1,) or not math.isclose(factor * width, 1.0, rel_tol=1e-6):
        return None
    square = flow.made_by(operand, "square", "integer_pow", "mul")
    if square is None or square.params.get("y", 2) != 2 or any(atom is not square.invars[0] for atom in square.invars):
        return None
    inside += [total, square]
    return square.invars[0]


def _scaled(flow: Dataflow, root: Any, x: Any, inside: list[Any]) -> Norm | None:
    """The norm, as far as it is what becomes of the root: multiplied with what was normalized and with a weight."""
    weight, normalizes, var = None, False, root.outvars[0]
    rounds_scale = rounds_normed = False
    narrow = False  # whether the value has been rounded
    while (eqn := flow.only_reader(var)) is not None:
        (out,), name = eqn.outvars, eqn.primitive.name
        if name == "convert_element_type" and out.aval.dtype == x.aval.dtype and not narrow:
            if not normalizes and (weight is not None or root.primitive.name == "sqrt"):
                break  # it is something else that is rounded
            narrow, rounds_scale = True, rounds_scale or not normalizes
        elif name in ("mul", "div") and out.aval.dtype == var.aval.dtype:
            others = [atom for atom in eqn.invars if atom is not var]
            inverse = root.primitive.name == "sqrt" and not normalizes
            if len(others) != 1 or inverse != (name == "div") or (inverse and eqn.invars[1] is not var):
                break
            if not normalizes and (others[0] if narrow else _narrow(flow, others[0])) is x:
                normalizes = True
            elif weight is None and not inverse and not (narrow and not normalizes):
                weight = _row(flow, others[0], x.aval.shape[-1])
                if weight is None:
                    break
                rounds_normed = narrow
            else:
                break
        elif name not in _LAYOUTS or normalizes:
            break
        inside.append(eqn)
        var = out
    return Norm(x, weight, var, 0.0, (), rounds_scale, rounds_normed) if normalizes else None


def _narrow(flow: Dataflow, atom: Any) -> Any:
    """The value that one in float32 was converted from, or is, less a zero that was subtracted."""
    while True:
        if (sub := flow.made_by(atom, "sub")) is not None and _number(flow, sub.invars[1]) == 0.0:
            atom = sub.invars[0]
        elif (source := widened(flow, atom)) is not None:
            atom = source
        else:
            return atom


def widened(flow: Dataflow, atom: Any) -> Any | None:
    """What a value was converted from, if that lost nothing."""
    eqn = flow.made_by(atom, "convert_element_type")
    if eqn is None:
        return None
    source, dtype = eqn.invars[0].aval.dtype, atom.aval.dtype
    is_wider = jnp.issubdtype(source, jnp.floating) and jax.numpy.promote_types(source, dtype) == dtype
    return eqn.invars[0] if is_wider else None


def _bare(flow: Dataflow, atom: Any, inside: list[Any]) -> Any:
    """A value as it was before axes of size one were put in."""
    while (eqn := flow.made_by(atom, *_LAYOUTS)) is not None and eqn.invars[0].aval.size == atom.aval.size:
        inside.append(eqn)
        atom = eqn.invars[0]
    return atom


def _stays_with_its_row(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether a number for each row of an array of a shape is still for the same row in an equation's result.

    In a square array it could as well have become one for each column.
    """
    if eqn.outvars[0].aval.shape not in (shape[:-1], (*shape[:-1], 1), shape):
        return False
    return eqn.params.get("broadcast_dimensions") in (None, tuple(range(eqn.invars[0].aval.ndim)))


def _row(flow: Dataflow, atom: Any, width: int) -> Any | None:
    """The vector that an array holds in each of its rows."""
    while not compat.is_literal(atom) and atom.aval.shape != (width,):
        if (source := widened(flow, atom)) is None:
            eqn = flow.made_by(atom, *_LAYOUTS)
            if eqn is None or not _keeps_rows(eqn, width):
                return None
            source = eqn.invars[0]
        atom = source
    return None if compat.is_literal(atom) else atom


def _keeps_rows(eqn: Any, width: int) -> bool:
    """Whether the last axis of an equation's result is the last one of what it reads."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if not before or before[-1] != width or after[-1:] != (width,):
        return False
    if eqn.primitive.name == "broadcast_in_dim":
        return eqn.params["broadcast_dimensions"][-1] == len(after) - 1
    return True


def _number(flow: Dataflow, atom: Any) -> float | None:
    """The number that a value is, everywhere; ``None`` if it is not known."""
    dtypes: list[Any] = []  # that it was converted to, the last one first
    while (eqn := flow.made_by(atom, *_LAYOUTS, "convert_element_type")) is not None:
        dtypes += [eqn.params["new_dtype"]] if "new_dtype" in eqn.params else []
        atom = eqn.invars[0]
    if not compat.is_literal(atom) or np.ndim(atom.val):
        return None
    value = np.asarray(atom.val)
    for dtype in reversed(dtypes):
        value = value.astype(dtype)
    return float(value)


@dataclasses.dataclass(frozen=True)
class GroupedMatmul:
    """Rows times the weights of their group: variables of the jaxpr."""

    x: Any
    weights: Any
    sizes: Any
    product: Any


def grouped_matmuls(jaxpr: Any) -> Iterator[GroupedMatmul]:
    """The ``jax.lax.ragged_dot`` of an open jaxpr, with a conversion to the operands' dtype behind it."""
    flow = Dataflow(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "ragged_dot_general" or eqn.params.get("group_offset") is not None:
            continue
        if len(eqn.invars) != 3 or eqn.params["ragged_dot_dimension_numbers"] != _PLAIN:
            continue
        (x, weights, sizes), (product,) = eqn.invars, eqn.outvars
        if product.aval.dtype != x.aval.dtype:
            behind = flow.only_reader(product)
            if behind is None or behind.primitive.name != "convert_element_type":
                continue
            (product,) = behind.outvars
        if product.aval.dtype == x.aval.dtype and not any(map(compat.is_literal, eqn.invars)):
            yield GroupedMatmul(x, weights, sizes, product)


_PLAIN = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)
