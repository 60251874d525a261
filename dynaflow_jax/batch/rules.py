"""What each primitive does to the states of a split batch: one rule per family.

A rule is called with the equation as traced at the full batch, the same equation as traced at the micro-batch, and the
states of its inputs; it returns the states of its outputs (one state stands for all of them) or raises `Mixing`. Two
things are done before it is called: inputs in state ``Varies`` are set aside, and parameters of the equation that
differ between the two traces are refused unless the rule names them in ``sized``. So a rule speaks of ``Invariant``,
``Rows`` and ``Total`` only, and of ``RowIndex`` if it says ``positions=True``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from dynaflow_jax.batch.state import (
    INVARIANT,
    ONE,
    ZERO,
    Invariant,
    RowIndex,
    Rows,
    State,
    Total,
    describe,
    is_one_scale,
    is_positive,
    is_real,
    is_zero,
    power,
    times,
)

Apply = Callable[[Any, Any, Any, Sequence[State]], "State | Sequence[State]"]


class Mixing(Exception):
    """An equation mixes rows of the batch, or is not proven not to; the message says how, in one clause."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule of a primitive.

    Attributes:
      apply: from the analysis, the two equations and the input states to the output states.
      sized: parameters that may depend on the batch size.
      positions: whether `RowIndex` inputs are handled.
      opens: whether the equation holds programs, into which all states go as they are; see `nested`.
    """

    apply: Apply
    sized: frozenset[str] = frozenset()
    positions: bool = False
    opens: bool = False


RULES: dict[str, Rule] = {}


def rule(
    *primitives: str, sized: Sequence[str] = (), positions: bool = False, opens: bool = False
) -> Callable[[Apply], Apply]:
    """Register a rule for primitives, by name."""

    def register(apply: Apply) -> Apply:
        for name in primitives:
            RULES[name] = Rule(apply, frozenset(sized), positions or opens, opens)
        return apply

    return register


# -- what rules are made of ---------------------------------------------------------------------------------------


def shape(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return atom.aval.shape


def is_inexact(atom: Any) -> bool:
    """Whether an atom is floating point or complex: integers do not divide exactly."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def changed_axes(full: Any, part: Any) -> list[int]:
    """The axes of a value whose sizes differ between the full batch and a micro-batch."""
    if len(shape(full)) != len(shape(part)):
        raise Mixing("has another number of axes at another batch size")
    return [axis for axis, (n, m) in enumerate(zip(shape(full), shape(part), strict=True)) if n != m]


def move(state: Any, axis: int) -> Any:
    """The same rows, on another axis."""
    return state if state.axis == axis else dataclasses.replace(state, axis=axis)


def rows_of(states: Sequence[Any]) -> Rows | None:
    """Where the rows are, of values that are combined element by element; None if none of them has rows."""
    found: Rows | None = None
    for state in states:
        if type(state) is not Rows:
            continue
        if found is None or (found.uniform and found.axis == state.axis):
            found = state
        elif found.axis != state.axis:
            raise Mixing("combines each row of the batch with every other")
        elif not state.uniform and (state.outer, state.inner, state.pieces) != (found.outer, found.inner, found.pieces):
            raise Mixing("combines rows of the batch that are laid out differently")
    return found


def layout_of(*states: State | None) -> Any:
    """As `rows_of`, for values that have their rows on different axes; the axis of the result means nothing."""
    return rows_of([move(state, 0) for state in states if type(state) is Rows])


def agree(states: Sequence[Any], doing: str) -> Any:
    """The state of a value whose elements are taken from values of these states, or are sums of theirs."""
    rows = rows_of(states)
    some = [state for state in states if not is_zero(state)]
    if not some:
        return ZERO if rows is None else dataclasses.replace(rows, scale=ONE, zero=True)
    totals = [state for state in some if type(state) is Total]
    if totals and rows is not None:
        raise Mixing(f"{doing} rows of the batch and a sum over the batch")
    if totals and len(totals) < len(some):
        raise Mixing(f"{doing} a sum over the batch and a value that every micro-batch would contribute again")
    first = some[0].scale
    for state in some[1:]:
        if state.scale != first:
            scales = f"{describe(first)} and {describe(state.scale)}"
            raise Mixing(f"{doing} values that scale differently with the batch ({scales})")
    if rows is not None:
        return rows if rows.scale == first and not rows.zero else dataclasses.replace(rows, scale=first, zero=False)
    if totals:
        return totals[0] if len(totals) == 1 else Total(first)
    return Invariant(first)


def as_factor(state: Any) -> Any:
    """A sum over the batch as a factor of other values."""
    if type(state) is not Total:
        return state
    if state.factor is None:
        raise Mixing("uses a sum over the batch, and not a single number, as a factor")
    return Invariant(state.factor)


def product(a: Any, b: Any, exponent: int = 1) -> State:
    """The state of ``a * b ** exponent``, element by element or as any other bilinear operation without contraction."""
    rows = rows_of((a, b))
    if is_zero(a) or (is_zero(b) and exponent > 0):
        return ZERO if rows is None else dataclasses.replace(rows, scale=ONE, zero=True)
    if rows is not None or exponent < 0:
        b = as_factor(b)
    if rows is not None:
        a = as_factor(a)
    if type(a) is Total and type(b) is Total:
        raise Mixing("multiplies two sums over the batch")
    scale = times(a.scale, power(b.scale, exponent))
    if rows is not None:
        return rows if rows.scale == scale and not rows.zero else dataclasses.replace(rows, scale=scale, zero=False)
    total, other = (a, b) if type(a) is Total else (b, a)
    if type(total) is not Total:
        return Invariant(scale) if scale else INVARIANT
    by = power(other.scale, exponent if other is b else 1)
    return Total(scale, None if total.factor is None else times(total.factor, by))


def whole(full: Any, part: Any, states: Sequence[Any]) -> Any:
    """The state of a function of whole rows, of which nothing but that is known: scales must be absent."""
    for state in states:
        if state is INVARIANT:
            continue
        if type(state) is Total:
            raise Mixing(f"applies {part.primitive.name} to a sum over the batch")
        if not is_one_scale(state):
            raise Mixing(f"applies {part.primitive.name} to a value that scales with the batch: {state}")
    rows = rows_of(states)
    if rows is None:
        return INVARIANT
    return dataclasses.replace(rows, scale=ONE, zero=False) if rows.zero or rows.scale else rows


def real(state: Any, doing: str) -> State:
    """The state of what takes part in the real numbers alone, such as a conjugate: a complex scale does not pass."""
    if not is_zero(state) and not is_real(state.scale):
        raise Mixing(f"{doing} values scaled by a complex sum over the batch")
    return Total(state.scale) if type(state) is Total else state  # another number than the sum, as a factor


def homogeneous(states: Sequence[Any], doing: str) -> State:
    """The state of a function that a positive factor passes through, such as a maximum."""
    state = agree(states, doing)
    if type(state) is Total:
        raise Mixing(f"{doing} sums over the batch")
    if not is_positive(state.scale):
        raise Mixing(f"{doing} values scaled by a sum over the batch, whose sign is not known")
    return state


def without(state: Any, axes: Sequence[int]) -> State:
    """The state once axes other than the rows' are removed."""
    if type(state) in (Rows, RowIndex):
        return move(state, state.axis - sum(axis < state.axis for axis in axes))
    return state


def on_rows(state: Any, axes: Sequence[int]) -> bool:
    """Whether an axis of the rows is among the given ones."""
    return type(state) is Rows and state.axis in axes


# -- element by element -------------------------------------------------------------------------------------------


@rule(
    *(
        "acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz"
    ).split(),
    *("complex cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor igamma igamma_grad_a igammac imag").split(),
    *("is_finite lgamma log log1p log2 logistic mulhi nextafter not one_minus_square or polygamma polynomial").split(),
    *("population_count pow random_clone random_seed reciprocal regularized_incomplete_beta rem").split(),
    *("round rsqrt shift_left shift_right_arithmetic shift_right_logical sin sinh sqrt tan tanh").split(),
    *("threefry2x32 threefry4x32 xor zeta").split(),
)
def elementwise(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Functions of single elements, of which nothing else is known."""
    return whole(full, part, states)


@rule(
    *("copy copy_p device_put layout_constraint name neg optimization_barrier preduced pvary real").split(),
    *(
        "reduced_vary_cast reduced_vary_cast_p reduce_precision relayout reshard shard_alike sharding_constraint"
    ).split(),
    *("stop_gradient tie to_edtype from_edtype vary_unreduced_cast vary_unreduced_cast_p conj").split(),
    *("with_memory_space_constraint xla_metadata_value").split(),
    sized=("sharding",),
    positions=True,
)
def passed_on(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """The values themselves, or a multiple of them."""
    if part.primitive.name == "neg" and any(type(state) is RowIndex for state in states):
        raise Mixing("computes with the position of a row in the batch")
    if part.primitive.name in ("conj", "real"):
        return [real(states[0], f"takes the {'conjugate' if part.primitive.name == 'conj' else 'real part'} of")]
    return list(states[: len(part.outvars)])


@rule("convert_element_type", positions=True)
def convert(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Linear, unless it rounds or only asks whether a number is zero."""
    if is_inexact(part.outvars[0]) or (not is_inexact(part.invars[0]) and part.params["new_dtype"].kind != "b"):
        to_real = part.invars[0].aval.dtype.kind == "c" and part.outvars[0].aval.dtype.kind != "c"
        return real(states[0], "takes the real part of") if to_real else states[0]
    if is_zero(states[0]):
        return states[0]
    if type(states[0]) is RowIndex:
        raise Mixing("computes with the position of a row in the batch")
    return whole(full, part, states)


@rule("add", "add_any", "sub", positions=True)
def add(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Sums: of rows, or of sums; a constant added to a sum over the batch would be added once per micro-batch."""
    for state, other in zip(states, reversed(states), strict=True):
        if type(state) is RowIndex:  # the wrap-around of negative indices: never the branch that is taken
            if part.primitive.name == "add" and type(other) is Invariant and state.columns is None:
                return dataclasses.replace(state, shifted=True)
            raise Mixing("computes with the position of a row in the batch")
    return agree(states, "combines")


@rule("mul")
def mul(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Products: scales multiply."""
    return product(states[0], states[1])


@rule("div")
def div(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Quotients; by a sum over the batch too, which from then on is part of the scale."""
    if not is_inexact(part.outvars[0]):
        return whole(full, part, states)
    return product(*states, exponent=-1)


@rule("square", "integer_pow")
def integer_pow(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Powers, and so powers of the scale."""
    (state,), exponent = states, part.params.get("y", 2)
    if type(state) is Total and exponent > 1:
        raise Mixing("raises a sum over the batch to a power")
    if is_zero(state) and exponent > 0:
        return state
    state = as_factor(state)
    return dataclasses.replace(state, scale=power(state.scale, exponent), zero=False)


@rule("abs", "max", "min")
def maximum(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Functions through which a positive scale passes."""
    return homogeneous(states, f"takes the {part.primitive.name} of")


@rule("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "sign", positions=True)
def compare(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Comparisons: a positive scale common to both sides drops out."""
    if type(states[0]) is RowIndex and part.primitive.name == "lt" and is_zero(states[1]) and not states[0].shifted:
        return Rows(states[0].axis, uniform=True, zero=True)  # no position is negative, until something is added
    if any(type(state) is RowIndex for state in states):
        raise Mixing("compares the position of a row in the batch")
    state = homogeneous(states, "compares")
    zero = part.primitive.name == "sign" and is_zero(state)
    return dataclasses.replace(state, scale=ONE, zero=zero)


@rule("select_n", positions=True)
def select(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """A choice between values, row by row."""
    which, *cases = states
    if is_zero(which):
        rows = rows_of([which, *cases])
        return cases[0] if rows is None or type(cases[0]) is not Invariant else agree([which, cases[0]], "selects from")
    if any(type(state) is RowIndex for state in states):
        raise Mixing("computes with the position of a row in the batch")
    whole(full, part, [which])
    state = agree(cases, "selects from")
    if type(which) is not Rows:
        return state
    if type(state) is Total:
        raise Mixing("selects from sums over the batch, row by row")
    rows = rows_of([which, state])
    assert rows is not None
    return dataclasses.replace(rows, scale=state.scale, zero=is_zero(state))


# -- shapes -------------------------------------------------------------------------------------------------------


@rule("iota", sized=("shape",))
def iota(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Positions: of the rows if it counts along the batch, the same in each row otherwise."""
    axes = changed_axes(full.outvars[0], part.outvars[0])
    if not axes:
        return INVARIANT
    if len(axes) > 1:
        raise Mixing("has more than one axis that grows with the batch")
    return RowIndex(axes[0]) if axes[0] == part.params["dimension"] else Rows(axes[0], uniform=True)


@rule("broadcast_in_dim", sized=("shape",), positions=True)
def broadcast_in_dim(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """New axes, and repetition along axes of size one; along the batch every row is the same."""
    state, out = states[0], part.outvars[0]
    grown = changed_axes(full.outvars[0], out)
    if type(state) in (Rows, RowIndex):
        axis = part.params["broadcast_dimensions"][state.axis]
        if grown != [axis] or shape(out)[axis] != shape(part.invars[0])[state.axis]:
            raise Mixing("combines each row of the batch with every other")
        if type(state) is RowIndex and state.columns is not None:
            raise Mixing("computes with the position of a row in the batch")
        return move(state, int(axis))
    if not grown:
        return state
    if len(grown) > 1:
        raise Mixing("has more than one axis that grows with the batch")
    state = as_factor(state)
    return Rows(grown[0], state.scale, uniform=True, zero=is_zero(state))


@rule("reshape", sized=("new_sizes",), positions=True)
def reshape(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """The axis of the rows may be merged with its neighbours, and taken apart again between two rows."""
    state = states[0]
    if type(state) not in (Rows, RowIndex):
        return state
    grown = changed_axes(full.outvars[0], part.outvars[0])
    if part.params["dimensions"] is not None or len(grown) != 1:
        raise Mixing("takes the axis of the batch apart")
    (axis,) = grown
    old, new = shape(part.invars[0]), shape(part.outvars[0])
    before, after = math.prod(old[: state.axis]), math.prod(old[state.axis + 1 :])
    new_before, new_after = math.prod(new[:axis]), math.prod(new[axis + 1 :])
    if type(state) is RowIndex:
        if (before, after) != (new_before, new_after) or state.columns is not None:
            raise Mixing("computes with the position of a row in the batch")
        return move(state, axis)
    assert type(state) is Rows
    if 0 in old:
        raise Mixing("takes the axis of an empty batch apart")
    if state.uniform:
        if not (new_before % before or new_after % after):
            return move(state, axis)
        # Merged with an axis along which it is not uniform. Any division into rows is right: take the batch's.
        rows = ctx.rows_within(old[state.axis])
        state = dataclasses.replace(state, uniform=False, outer=1, inner=old[state.axis] // rows)
    outer, no_outer = divmod(before * state.outer, new_before)
    inner, no_inner = divmod(after * state.inner, new_after)
    if no_outer or no_inner:
        raise Mixing("takes the axis of the batch apart")
    return dataclasses.replace(state, axis=axis, outer=outer, inner=inner)


@rule("squeeze", positions=True)
def squeeze(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Axes of size one go away."""
    (state,), axes = states, part.params["dimensions"]
    if type(state) in (Rows, RowIndex):
        table = type(state) is RowIndex and state.columns is not None
        if table or state.axis in [axis % len(shape(part.invars[0])) for axis in axes]:
            raise Mixing("removes the axis of the batch")
    return without(state, axes)


@rule("transpose", positions=True)
def transpose(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Axes move."""
    (state,), permutation = states, part.params["permutation"]
    if type(state) is RowIndex and state.columns is not None:
        raise Mixing("computes with the position of a row in the batch")
    if type(state) in (Rows, RowIndex):
        return move(state, list(permutation).index(state.axis))
    return state


@rule("rev")
def rev(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Reversal, harmless except along the batch."""
    (state,) = states
    if on_rows(state, part.params["dimensions"]) and not state.uniform:
        raise Mixing("reverses the batch")
    return state


def _block(full: Any, part: Any, state: Rows) -> tuple[int, int]:
    """How many elements one run through all rows takes along their axis, for the full batch and a micro-batch."""
    if state.pieces is not None:
        raise Mixing("joins or cuts rows of the batch that lie in pieces by device")
    return shape(full)[state.axis] // state.outer, shape(part)[state.axis] // state.outer


@rule("concatenate", positions=True)
def concatenate(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Side by side along another axis; or batches end to end, which can be taken apart again."""
    dimension = int(part.params["dimension"])
    if any(type(state) is RowIndex for state in states):
        return _index_table(part, states, dimension)
    rows = rows_of([dataclasses.replace(s, outer=1) if on_rows(s, [dimension]) else s for s in states])
    if rows is None or rows.axis != dimension:
        return agree(states, "joins")
    if not all(type(state) is Rows for state in states):
        raise Mixing("joins rows of the batch and other rows")
    agree([dataclasses.replace(state, outer=1) for state in states], "joins")
    # The parts run through all rows `outer` times each, in blocks of one size.
    fixed = [(f, p, s) for f, p, s in zip(full.invars, part.invars, states, strict=True) if not s.uniform]
    block = _block(*(fixed[0] if fixed else (full.invars[0], part.invars[0], states[0])))
    outer = 0
    for f, p in zip(full.invars, part.invars, strict=True):
        times_full, times_part = (divmod(shape(v)[dimension], b) for v, b in zip((f, p), block, strict=True))
        if times_full != times_part or times_part[1]:
            raise Mixing("joins pieces of the batch")
        outer += times_part[0]
    scale = next((s.scale for s in states if not is_zero(s)), ONE)
    inner = rows.inner
    if not fixed:  # all uniform, but not equal: divide into the batch's rows
        inner = block[1] // ctx.rows_within(block[1])
    zero = all(is_zero(state) for state in states)
    return Rows(dimension, scale, outer, inner, uniform=zero, zero=zero)


def _index_table(part: Any, states: Sequence[Any], dimension: int) -> State:
    """Index vectors of which some entries are positions of rows."""
    axis = next(state.axis for state in states if type(state) is RowIndex)
    columns: list[bool] = []
    for var, state in zip(part.invars, states, strict=True):
        if dimension != len(shape(var)) - 1 or type(state) not in (Rows, RowIndex) or state.axis != axis:
            raise Mixing("computes with the position of a row in the batch")
        width = shape(var)[dimension]
        if type(state) is RowIndex:
            if state.shifted:
                raise Mixing("computes with the position of a row in the batch")
            columns += state.columns or (True,) * width
        elif not is_one_scale(state):
            raise Mixing("indexes by a value that scales with the batch")
        else:
            columns += (False,) * width
    data = rows_of([s for s in states if type(s) is Rows] + [s.data for s in states if type(s) is RowIndex and s.data])
    return RowIndex(axis, tuple(columns), data)


def _cut(full: Any, part: Any, state: Any, spans: Sequence[tuple[int, int]]) -> State:
    """The rows left by a slice along their axis, given its start and size at the full batch and at a micro-batch."""
    if state.uniform:
        (_, of_full), (_, of_part) = spans
        return Invariant(state.scale, state.zero) if of_full == of_part else state
    counts = []
    for (start, size), block in zip(spans, _block(full, part, state), strict=True):
        if start % block or size % block:
            raise Mixing("takes some rows out of the batch")
        counts.append((start // block, size // block))
    if counts[0] != counts[1]:
        raise Mixing("takes some rows out of the batch")
    return dataclasses.replace(state, outer=counts[0][1])


@rule("slice", sized=("start_indices", "limit_indices"), positions=True)
def slice_(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Along other axes; along the batch only between whole batches that were joined."""
    (state,) = states
    strides = part.params["strides"]
    spans = []
    for eqn in (full, part):
        starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
        spans.append([(start, limit - start) for start, limit in zip(starts, limits, strict=True)])
    axis = getattr(state, "axis", None)
    if any(a != b for i, (a, b) in enumerate(zip(*spans, strict=True)) if i != axis):
        raise Mixing("takes a slice that depends on the batch size")
    if axis is None:
        return state
    if all(span[axis] == (0, shape(eqn.invars[0])[axis]) for span, eqn in zip(spans, (full, part), strict=True)):
        if type(state) is RowIndex and state.columns is not None and shape(part.invars[0]) != shape(part.outvars[0]):
            raise Mixing("computes with the position of a row in the batch")
        if strides is None or strides[axis] == 1:
            return state
    if type(state) is RowIndex or (strides is not None and strides[axis] != 1):
        raise Mixing("takes some rows out of the batch")
    return _cut(full.invars[0], part.invars[0], state, [span[axis] for span in spans])


@rule("split", sized=("sizes",))
def split(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State | Sequence[State]:
    """Several slices at once."""
    (state,), axis = states, part.params["axis"]
    if not on_rows(state, [axis]):
        if full.params["sizes"] != part.params["sizes"]:
            raise Mixing("takes a slice that depends on the batch size")
        return state
    starts, out = [0, 0], []
    for sizes in zip(full.params["sizes"], part.params["sizes"], strict=True):
        spans = [(start, int(size)) for start, size in zip(starts, sizes, strict=True)]
        out.append(_cut(full.invars[0], part.invars[0], state, spans))
        starts = [start + size for start, size in spans]
    return out


@rule("stack")
def stack(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Side by side along a new axis."""
    state, axis = agree(states, "stacks"), part.params["axis"]
    return move(state, state.axis + (axis <= state.axis)) if type(state) is Rows else state


@rule("unstack")
def unstack(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """All slices along an axis, which goes away."""
    (state,), axis = states, part.params["axis"]
    if on_rows(state, [axis]):
        raise Mixing("takes the rows of the batch apart")
    return without(state, [axis])


@rule("tile")
def tile(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """The whole array again and again."""
    (state,), reps = states, part.params["reps"]
    if type(state) is not Rows or state.uniform:
        return state
    if reps[state.axis] == 1:
        return state
    _block(full.invars[0], part.invars[0], state)
    return dataclasses.replace(state, outer=state.outer * reps[state.axis])


@rule("pad")
def pad(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Padding along other axes."""
    state, value = states
    if on_rows(state, [i for i, config in enumerate(part.params["padding_config"]) if any(config)]):
        raise Mixing("pads the batch with other rows")
    return agree([state, value], "pads")


# -- reductions and scans along an axis ---------------------------------------------------------------------------


@rule("reduce_sum")
def reduce_sum(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """The sum over the batch is the sum of the micro-batches' sums."""
    (state,), axes = states, part.params["axes"]
    if on_rows(state, axes):
        return ZERO if is_zero(state) else Total(state.scale)
    return without(state, axes)


@rule("reduce_max", "reduce_min", "argmax", "argmin")
def reduce_max(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Reductions through which a positive scale passes, or drops out."""
    name, axes = part.primitive.name, part.params["axes"]
    if on_rows(states[0], axes):
        raise Mixing(f"reduces over the batch with {name.removeprefix('reduce_')}")
    state = without(homogeneous(states, "reduces"), axes)
    return state if name.startswith("reduce") else dataclasses.replace(state, scale=ONE, zero=False)


@rule("reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
def reduce_other(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Other reductions."""
    axes = part.params["axes"]
    if on_rows(states[0], axes):
        raise Mixing(f"reduces over the batch with {part.primitive.name.removeprefix('reduce_')}")
    return without(whole(full, part, states), axes)


@rule("reduce", sized=("jaxpr",))
def reduce(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """A reduction with a function of the user's; initial values come last."""
    axes = part.params["dimensions"]
    if any(on_rows(state, axes) for state in states):
        raise Mixing("reduces over the batch with a function")
    return without(whole(full, part, states), axes)


@rule("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp")
def cumulate(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Running reductions: along the batch, each row would miss those of the micro-batches before."""
    (state,), name = states, part.primitive.name
    if on_rows(state, [part.params["axis"]]):
        raise Mixing(f"accumulates along the batch with {name}")
    if name == "cumsum":
        return state
    return homogeneous(states, "accumulates") if name in ("cummax", "cummin") else whole(full, part, states)


@rule("sort", "top_k", "approx_top_k")
def sort(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State | Sequence[State]:
    """Sorting, harmless except along the batch; keys order the same when scaled, and so do what they carry along."""
    params = part.params
    axis = params.get("dimension", params.get("axis", params.get("reduction_dimension", -1)))
    rows = rows_of(states)
    if rows is not None and rows.axis == axis % len(shape(part.invars[0])):
        raise Mixing("sorts the batch")
    keys = params.get("num_keys", 1)
    homogeneous(states[:keys], "sorts")
    if any(type(state) is Total for state in states):
        raise Mixing("sorts a sum over the batch")
    if part.primitive.name != "sort":
        return [states[0], dataclasses.replace(states[0], scale=ONE, zero=False)]
    if rows is None:
        return list(states)
    return [dataclasses.replace(rows, scale=state.scale, zero=is_zero(state)) for state in states]


def _windowed(part: Any, state: Any) -> None:
    """Refuse windows that reach over more than one row."""
    if type(state) is not Rows:
        return
    trivial = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
    if any(tuple(part.params[k][state.axis]) != v if k == "padding" else part.params[k][state.axis] != v
           for k, v in trivial.items() if part.params.get(k)):  # fmt: skip
        raise Mixing("pools over the batch")


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window", sized=("jaxpr",))
def reduce_window(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Pooling within each row."""
    for state in states:
        _windowed(part, state)
    name = part.primitive.name
    if name == "reduce_window_sum":
        return states[0]
    return whole(full, part, states) if name == "reduce_window" else homogeneous(states, "pools")


@rule("select_and_scatter_add", "select_and_gather_add")
def select_and_scatter_add(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Derivatives of pooling: linear in the first input, the second one only chooses."""
    for state in states:
        _windowed(part, state)
    homogeneous(states[1:], "pools")
    if type(states[0]) is Total:
        raise Mixing("pools a sum over the batch")
    rows = rows_of(states)
    return states[0] if rows is None else dataclasses.replace(rows, scale=states[0].scale, zero=is_zero(states[0]))


@rule("fft", sized=("fft_lengths",))
def fft(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Linear along its axes, the last ones."""
    (state,), ndim = states, len(shape(part.invars[0]))
    if on_rows(state, range(ndim - len(part.params["fft_lengths"]), ndim)):
        raise Mixing("transforms along the batch")
    # The inverse of a real transform takes half of its input for the conjugate of the other half.
    return real(state, "transforms to real numbers") if part.params["fft_type"] == lax.FftType.IRFFT else state


@rule(*"cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve tridiagonal".split())
@rule("lu_pivots_to_permutation", "tridiagonal_solve", "symmetric_product")
def linalg(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Linear algebra on a stack of matrices: one per row, or several."""
    trailing = 1 if part.primitive.name == "lu_pivots_to_permutation" else 2
    stacked = max(len(shape(var)) for var in part.invars) - trailing
    if any(type(state) is Rows and state.axis >= stacked for state in states):
        raise Mixing("takes the batch for an axis of a matrix")
    return whole(full, part, states)


# -- contractions -------------------------------------------------------------------------------------------------


def _contracted(a: Any, b: Any) -> State:
    """The sum over the batch of the products of rows."""
    if is_zero(a) or is_zero(b):
        return ZERO
    layout_of(a, b)
    return Total(times(a.scale, b.scale))


def _kept(layout: Rows | None, axis: int, a: Any, b: Any) -> State:
    """Rows of one side, or of both in step, at their axis of the output."""
    assert layout is not None
    if type(a) is Total or type(b) is Total:
        raise Mixing("multiplies the rows of the batch with a sum over them")
    zero = is_zero(a) or is_zero(b)
    scale = ONE if zero else times(a.scale, b.scale)
    return dataclasses.replace(layout, axis=axis, scale=scale, zero=zero)


@rule("dot_general")
def dot_general(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Contracting the batch sums over it; a batch axis of one side, or one common to both, is kept."""
    (contract_a, contract_b), (batch_a, batch_b) = part.params["dimension_numbers"]
    a, b = states
    if type(a) is not Rows and type(b) is not Rows:
        return product(a, b)

    def place(state: Rows, ndim: int, contract: Sequence[int], batch: Sequence[int], offset: int) -> tuple[str, int]:
        if state.axis in contract:
            return "contracted", list(contract).index(state.axis)
        if state.axis in batch:
            return "batch", list(batch).index(state.axis)
        return "free", offset + [i for i in range(ndim) if i not in contract and i not in batch].index(state.axis)

    ndim_a, ndim_b = (len(shape(var)) for var in part.invars)
    free_a = ndim_a - len(contract_a) - len(batch_a)
    at_a = place(a, ndim_a, contract_a, batch_a, len(batch_a)) if type(a) is Rows else None
    at_b = place(b, ndim_b, contract_b, batch_b, len(batch_b) + free_a) if type(b) is Rows else None
    if at_a is not None and at_b is not None:
        if at_a != at_b or at_a[0] == "free":
            raise Mixing("multiplies each row of the batch with every other")
        if at_a[0] == "contracted":
            return _contracted(a, b)
        return _kept(layout_of(a, b), at_a[1], a, b)
    kind, axis = at_a or at_b or ("", 0)
    if kind != "free":
        raise Mixing("contracts the batch with something that has no batch")
    return _kept(layout_of(a, b), axis, a, b)


@rule("conv_general_dilated")
def conv_general_dilated(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Convolution of each row; the derivative by the kernel has the batch where features are, and contracts it."""
    a, b = states
    if type(a) is not Rows and type(b) is not Rows:
        return product(a, b)
    params, numbers = part.params, part.params["dimension_numbers"]
    (image, feature), (out_feature, in_feature) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    groups = params["feature_group_count"], params["batch_group_count"]
    if on_rows(a, [feature]) and on_rows(b, [in_feature]) and groups[0] == 1:
        return _contracted(a, b)
    if on_rows(a, [image]) and type(b) is not Rows and groups[1] == 1:
        return _kept(layout_of(a), numbers.out_spec[0], a, b)
    if on_rows(b, [out_feature]) and type(a) is not Rows and groups == (1, 1):
        return _kept(layout_of(b), numbers.out_spec[1], a, b)
    raise Mixing("convolves over the batch")


@rule("ragged_dot_general")
def ragged_dot_general(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Rows grouped by expert: the sizes of the groups are counts over the whole batch."""
    if any(type(state) is not Invariant for state in states):
        raise Mixing("groups the tokens of the whole batch by expert (MoE routing)")
    return whole(full, part, states)


@rule("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
def dot_product_attention(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """CuDNN's attention: all inputs and outputs have the batch first."""
    if any(type(state) is Rows and (state.axis or state.outer != 1) for state in states):
        raise Mixing("attends over the batch")
    return whole(full, part, states)


# -- indexing -----------------------------------------------------------------------------------------------------


def _picks_own_row(full: Any, part: Any, index: RowIndex, column: int, axis: int) -> None:
    """Check that an index vector's entry for the batch axis of the operand is the position of the very row."""
    width = shape(part.invars[1])[-1]
    columns = index.columns or (True,) * width
    if index.shifted or [i for i, position in enumerate(columns) if position] != [column]:
        raise Mixing("uses the position of a row in the batch")
    if any(shape(eqn.invars[0])[axis] != shape(eqn.invars[1])[index.axis] for eqn in (full, part)):
        raise Mixing("uses the position of a row in the batch")


def _as_index(state: Any) -> None:
    if type(state) is Total or not is_one_scale(state):
        raise Mixing("indexes by a sum over the batch" if type(state) is Total else "indexes by a scaled value")


def _filled(part: Any, state: Any) -> Any:
    """The operand of a lookup, which gives a constant instead of it where an index is out of bounds."""
    if part.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP or type(state) is RowIndex:
        return state
    fill = part.params["fill_value"]
    if fill is None and is_inexact(part.outvars[0]):
        fill = math.nan
    if fill is not None and fill == 0:
        return state
    if not (is_inexact(part.outvars[0]) and fill != fill):  # not a number is none when scaled, or added up, either
        if type(state) is Total:
            raise Mixing("looks up sums over the batch, with a constant where an index is out of bounds")
        if not is_one_scale(state):
            raise Mixing("looks up values that scale with the batch, with a constant where an index is out of bounds")
    return dataclasses.replace(state, zero=False) if is_zero(state) else state


@rule("gather", sized=("slice_sizes",), positions=True)
def gather(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Lookups: of rows in a table, within each row, or of each row by its own position."""
    operand, index = _filled(part, states[0]), states[1]
    numbers, sizes = part.params["dimension_numbers"], part.params["slice_sizes"]
    _as_index(index)
    out_ndim, ndim = len(shape(part.outvars[0])), len(shape(part.invars[0]))
    looked_up = [axis for axis in range(out_ndim) if axis not in numbers.offset_dims]
    window = [
        axis for axis in range(ndim) if axis not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    batch = operand.axis if type(operand) is Rows else None
    if any(m != n for i, (m, n) in enumerate(zip(full.params["slice_sizes"], sizes, strict=True)) if i != batch):
        raise Mixing("takes a slice that depends on the batch size")
    if type(operand) is RowIndex:
        raise Mixing("uses the position of a row in the batch")
    if getattr(index, "axis", -1) >= len(looked_up):
        raise Mixing("takes the batch for an index vector")

    if batch is None:
        if type(index) is Invariant:
            return agree([operand], "adds")
        if type(index) is RowIndex:
            raise Mixing("uses the position of a row in the batch")
        if type(operand) is Total:
            raise Mixing("looks up rows in a sum over the batch")
        axis = looked_up[index.axis]  # pyright: ignore[reportAttributeAccessIssue]
        return dataclasses.replace(index, axis=axis, scale=operand.scale, zero=is_zero(operand))

    assert type(operand) is Rows
    if type(index) is Invariant:
        full_slice = all(eqn.params["slice_sizes"][batch] == shape(eqn.invars[0])[batch] for eqn in (full, part))
        if batch not in window or batch in numbers.start_index_map or not full_slice:
            raise Mixing("takes some rows out of the batch")
        return move(operand, int(numbers.offset_dims[window.index(batch)]))
    if type(index) is RowIndex:
        if batch not in numbers.start_index_map or sizes[batch] != 1 or full.params["slice_sizes"][batch] != 1:
            raise Mixing("uses the position of a row in the batch")
        _picks_own_row(full, part, index, list(numbers.start_index_map).index(batch), batch)
    elif (batch, index.axis) not in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        raise Mixing("picks rows of the batch by data")
    layout = layout_of(operand, index.data if type(index) is RowIndex else index)
    return dataclasses.replace(layout, axis=looked_up[index.axis], scale=operand.scale, zero=operand.zero)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max",
      sized=("update_jaxpr",), positions=True)  # fmt: skip
def scatter(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Writes: within each row, to each row by its own position; or sums of rows, the derivative of a lookup."""
    operand, index, updates = states
    name, numbers = part.primitive.name, part.params["dimension_numbers"]
    _as_index(index)
    if type(operand) is RowIndex or type(updates) is RowIndex:
        raise Mixing("uses the position of a row in the batch")
    if name in ("scatter", "scatter-add", "scatter-sub"):
        combined: Callable[..., Any] = lambda states: agree(states, "writes")  # noqa: E731
    else:
        combined = lambda states: whole(full, part, states)  # noqa: E731
    ndim, update_ndim = len(shape(part.invars[0])), len(shape(part.invars[2]))
    looked_up = [axis for axis in range(update_ndim) if axis not in numbers.update_window_dims]
    if getattr(index, "axis", -1) >= len(looked_up):
        raise Mixing("takes the batch for an index vector")
    not_window = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [axis for axis in range(ndim) if axis not in not_window]

    if type(operand) is Rows:
        batch = operand.axis
        if type(index) is Invariant:
            at = numbers.update_window_dims[window.index(batch)] if batch in window else -1
            if batch in numbers.scatter_dims_to_operand_dims or not on_rows(updates, [at]):
                raise Mixing("writes to some rows of the batch")
            if any(shape(eqn.invars[2])[at] != shape(eqn.invars[0])[batch] for eqn in (full, part)):
                raise Mixing("writes to some rows of the batch")
        elif type(index) is RowIndex:
            to = list(numbers.scatter_dims_to_operand_dims)
            if batch not in to or batch not in numbers.inserted_window_dims:
                raise Mixing("uses the position of a row in the batch")
            _picks_own_row(full, part, index, to.index(batch), batch)
        elif (batch, index.axis) not in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        ):
            raise Mixing("writes to rows of the batch by data")
        if isinstance(index, (Rows, RowIndex)) and not on_rows(updates, [looked_up[index.axis]]):
            raise Mixing("writes to rows of the batch what does not come from them")
        layout = layout_of(operand, updates, index.data if type(index) is RowIndex else index)
        value = combined([move(operand, 0), move(updates, 0)])
        return dataclasses.replace(layout, axis=batch, scale=value.scale, zero=is_zero(value))

    if type(index) is Invariant and type(updates) is not Rows:
        return combined([operand, updates])
    if type(index) is RowIndex:
        raise Mixing("uses the position of a row in the batch")
    if name not in ("scatter-add", "scatter-sub"):
        raise Mixing("writes rows of the batch to places that data decides")
    if type(index) is not Rows or not on_rows(updates, [looked_up[index.axis]]):
        raise Mixing("writes rows of the batch to a value that has none")
    layout_of(index, updates)
    if is_zero(updates):
        return operand
    total = agree([operand, Total(updates.scale)], "adds")
    return Total(total.scale)


@rule("dynamic_slice", sized=("slice_sizes",))
def dynamic_slice(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """A slice at a place that is the same for all rows."""
    operand, *starts = states
    for start in starts:
        _as_index(start)
    batch = operand.axis if type(operand) is Rows else None
    sizes = list(zip(full.params["slice_sizes"], part.params["slice_sizes"], strict=True))
    if any(m != n for axis, (m, n) in enumerate(sizes) if axis != batch):
        raise Mixing("takes a slice that depends on the batch size")
    if batch is not None and sizes[batch] != (shape(full.invars[0])[batch], shape(part.invars[0])[batch]):
        raise Mixing("takes some rows out of the batch")
    return agree([operand], "adds")


@rule("dynamic_update_slice")
def dynamic_update_slice(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """A write at a place that is the same for all rows."""
    operand, update, *starts = states
    for start in starts:
        _as_index(start)
    rows = rows_of([operand, update])
    if rows is not None and any(shape(e.invars[0])[rows.axis] != shape(e.invars[1])[rows.axis] for e in (full, part)):
        raise Mixing("writes to some rows of the batch")
    return agree([operand, update], "writes")


# -- random numbers -----------------------------------------------------------------------------------------------


@rule("random_bits", "random_split", sized=("shape",))
def random_bits(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """With one key for all rows it is a draw over the batch; with a key per row it is like any function of rows."""
    grown = changed_axes(full.outvars[0], part.outvars[0])
    whole(full, part, states)
    if type(states[0]) is Rows:
        _draws_by_row(part)
        if grown != [states[0].axis]:
            raise Mixing("draws over the batch with a key per row")
        return states[0]
    if not grown:
        return INVARIANT
    if len(grown) > 1:
        raise Mixing("has more than one axis that grows with the batch")
    ctx.draw(part)
    size = shape(part.outvars[0])[grown[0]]
    return Rows(grown[0], inner=size // ctx.rows_within(size) if size else 1)


def _draws_by_row(part: Any) -> None:
    """Refuse keys with which JAX draws for all rows from the first row's key, once the draw is mapped over."""
    implementation = part.invars[0].aval.dtype.name
    right = {"key<fry>"} if part.primitive.name in ("random_bits", "random_gamma") else {"key<fry>", "key<rbg>"}
    if implementation not in right:
        raise Mixing(f"draws with a key per row, all of which may come from the first, as they are {implementation}")


@rule("random_fold_in")
def random_fold_in(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """A key for each row, from a key for each, or numbers for each."""
    if type(states[1]) is Rows:
        _draws_by_row(part)
    return whole(full, part, states)


@rule("random_wrap", "random_unwrap")
def random_wrap(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Keys as numbers, which have one more axis, and back."""
    if type(states[0]) is Rows and states[0].axis >= min(len(shape(part.invars[0])), len(shape(part.outvars[0]))):
        raise Mixing("takes the batch for the numbers of a key")
    return whole(full, part, states)


@rule("random_gamma")
def random_gamma(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Draws with parameters; with one key for all rows, their number decides what each row draws."""
    key, parameter = states
    if type(parameter) is Rows and type(key) is not Rows:
        raise Mixing("draws over the batch from a distribution with parameters")
    if type(key) is Rows:
        _draws_by_row(part)
    return whole(full, part, states)
