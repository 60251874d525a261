"""How the micro-batches' outputs become the function's."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import compat
from dynaflow_jax.batch import split
from dynaflow_jax.batch.state import ONE, Invariant, N, Rows, State, Total, Varies, is_one_scale, scale
from dynaflow_jax.errors import BatchMixingError, SplitError


@dataclasses.dataclass(frozen=True)
class Join:
    """How one output is made.

    Attributes:
      how: ``"rows"``, ``"first"``, ``"mean"``, ``"sum"`` or ``"function"``.
      rows: along which axis, for ``"rows"``.
      by_rows: for ``"mean"``, whether each part weighs as much as it has rows, whatever weights the user gives.
      function: of the list of parts, for ``"function"``.
      name: of the output, for messages.
    """

    how: str
    rows: Rows | None = None
    function: Callable[..., Any] | None = None
    name: str = "output"
    by_rows: bool = False


def joins(
    out_axes: Any,
    out_tree: Any,
    states: Sequence[Sequence[State]] | None,
    outvars: Sequence[Any],
    weighted: bool,
    divides: Callable[[], bool] | None = None,
) -> list[Join]:
    """How each output is joined, checked against what is proven of it.

    Args:
      out_axes: what the user asked for: a pytree prefix.
      out_tree: structure of the outputs.
      states: for each micro-batch, the state of each output; ``None`` if the batch is not split.
      outvars: the outputs.
      weighted: whether the user gives the weights of means.
      divides: if the parts are derived (see `derive`), whether the function divides by a number of rows.

    Raises:
      SplitError: if an output has no batch axis and ``out_axes`` does not say what to do.
      BatchMixingError: if what ``out_axes`` says would change the result.
    """
    full = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    asked: list[Any] = []
    if isinstance(out_axes, list) and isinstance(full, tuple):
        out_axes = tuple(out_axes)
    is_leaf = lambda entry: entry is None or isinstance(entry, str) or callable(entry)  # noqa: E731
    try:
        jax.tree.map(
            lambda entry, sub: asked.extend([entry] * jax.tree.structure(sub).num_leaves),
            out_axes,
            full,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        text = str(error).replace("tree_map tree", "out_axes")
        raise SplitError(f"out_axes does not fit the outputs: {text}") from None
    paths = jax.tree_util.tree_flatten_with_path(full)[0]
    found = []
    for i, ((path, _), want) in enumerate(zip(paths, asked, strict=True)):
        name = f"output{jax.tree_util.keystr(path)}"
        want = _checked(want, name)
        if states is None:
            found.append(Join("first"))
            continue
        own = list(dict.fromkeys(part[i] for part in states))
        found.append(_join(want, own, name, outvars[i].aval, weighted, divides))
    return found


def _checked(want: Any, name: str) -> Any:
    """What ``out_axes`` says of one output."""
    if want is None or callable(want) or (isinstance(want, str) and want in ("mean", "sum")):
        return want
    try:
        return operator.index(None if isinstance(want, bool) else want)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise SplitError(f"out_axes gives {name} {want!r}; it takes an axis, 'mean', 'sum' or a function.") from None


def _join(
    want: Any,
    states: list[State],
    name: str,
    aval: Any,
    weighted: bool,
    divides: Callable[[], bool] | None,
) -> Join:
    state = states[0]
    if not callable(want):
        _check_alike(states, name)
    if divides is not None and isinstance(state, (Invariant, Total)) and is_one_scale(state):
        # Parts that add up to the function's sum, or to its mean: that is what a constant of the program decides.
        # What does not look like what out_axes says is traced, to know.
        if isinstance(state, Invariant) and want in (None, "mean"):
            return Join("first")
        if isinstance(state, Total) and not weighted and want == ("mean" if divides() else "sum"):
            return Join("sum")
        raise SplitError(f"{name} {_is(state)}, and out_axes={want!r}.")
    if callable(want):
        return Join("function", function=want, name=name)
    if isinstance(state, Rows) and all(isinstance(s, Rows) and s.axis == state.axis for s in states):
        return _join_rows(want, states, name, aval.ndim)
    if isinstance(want, int):
        raise SplitError(f"out_axes={want} for {name}, which {_is(state)}: it has no rows to join there.")
    if isinstance(state, Invariant) and is_one_scale(state):
        return Join("first") if want in (None, "mean") else Join("sum")
    if isinstance(state, Varies):
        if want is None:
            raise SplitError(
                f"{name} {_is(state)} and has no batch axis: say with out_axes= what to do with the parts "
                "('mean', 'sum', or a function of them)."
            )
        if want == "mean" and not jnp.issubdtype(aval.dtype, jnp.inexact):
            raise SplitError(
                f"out_axes='mean' for {name}, which holds {aval.dtype}: their mean would be rounded. "
                "Return inexact numbers, or say 'sum' or a function of the parts."
            )
        return Join(want)
    hint = _hint(state, weighted)
    if want is None:
        raise SplitError(f"{name} {_is(state)}: it has no batch axis, so out_axes= must say how to join it{hint}.")
    if isinstance(state, Total):
        fits = (want == "sum" and is_one_scale(state)) or (want == "mean" and _is_mean(state, weighted))
        if fits:  # the scale of a mean over all rows is known, and is not that of weighted or masked ones
            return Join(want, by_rows=want == "mean" and state.scale == scale(N, -1))
    raise BatchMixingError(
        f"out_axes={want!r} for {name}, which {_is(state)}: the result would not be that of the whole batch{hint}."
    )


def _check_alike(states: Sequence[State], name: str) -> None:
    """Checks that an output is the same to micro-batches of all sizes, so that one way to join it is right."""
    first = next((state for state in states if not _is_uniform(state)), states[0])
    for state in states:
        if _kind(state) != _kind(first) and not (_is_uniform(state) and isinstance(first, Rows)):
            raise BatchMixingError(
                f"{name} {_is(first)} for micro-batches of one size, and for those of another it {_is(state)}: the "
                "program depends on the batch size, and there is no way to join it."
            )


def _kind(state: State) -> tuple[Any, ...]:
    """What decides how parts are joined. The sums in a scale are different variables at every size."""
    exponents = sorted((symbol != N, exponent) for symbol, exponent in getattr(state, "scale", ONE))
    layout = (state.axis, state.outer, state.inner) if isinstance(state, Rows) else ()
    return type(state), exponents, layout


def _is_uniform(state: State) -> bool:
    return isinstance(state, Rows) and state.uniform


def _join_rows(want: Any, states: Sequence[Any], name: str, ndim: int) -> Join:
    state = next((state for state in states if not state.uniform), Rows(states[0].axis, uniform=True))
    if isinstance(want, str):
        raise BatchMixingError(
            f"out_axes={want!r} for {name}, which has rows of the batch on axis {state.axis}: "
            "they would be added up. Leave it None to join them."
        )
    if isinstance(want, int) and want not in (state.axis, state.axis - ndim):
        raise SplitError(f"out_axes={want} for {name}, whose rows are on axis {state.axis}.")
    if scaled := [state for state in states if not is_one_scale(state)]:
        raise BatchMixingError(
            f"{name} {_is(scaled[0])}: each micro-batch scales its rows by its own size (the gradient of a mean with "
            "respect to the rows, say). Return something that does not, or pass a function of the parts as out_axes."
        )
    return Join("rows", state)


def _is_mean(state: Total, weighted: bool) -> bool:
    if state.scale == scale(N, -1):
        return True
    return weighted and len(state.scale) == 1 and next(iter(state.scale))[1] == -1


def _is(state: State) -> str:
    return "is the same for every micro-batch" if isinstance(state, Invariant) and state.scale == ONE else f"is {state}"


def _hint(state: State, weighted: bool) -> str:
    if isinstance(state, Total):
        if state.scale == ONE:
            return "; as it is a sum over the rows: out_axes='sum'"
        if _is_mean(state, weighted):
            return "; as it is a mean over the rows: out_axes='mean'"
        if _is_mean(state, True):
            return "; as it is a mean over weighted or masked rows: out_axes='mean' and weights= a function of them"
    return ""


def join(
    joins: Sequence[Join], outs: Sequence[Sequence[Any]], sizes: Sequence[int], shards: int, weights: Any
) -> list[Any]:
    """The function's outputs from those of the micro-batches.

    Args:
      joins: how each is made.
      outs: for each micro-batch, its outputs.
      sizes: rows of each micro-batch.
      shards: over how many devices the batch is split.
      weights: of each micro-batch, for means; ``None`` to weight them by their rows.
    """
    found = []
    for i, how in enumerate(joins):
        parts = [out[i] for out in outs]
        if how.how == "rows":
            assert how.rows is not None
            found.append(split.join(parts, how.rows, sizes, shards))
        elif how.how == "mean":
            found.append(split.mean(parts, sizes if weights is None or how.by_rows else weights))
        elif how.how == "sum":
            found.append(sum(parts[1:], start=parts[0]))
        elif how.how == "function":
            found.append(_joined_by_function(how, parts))
        else:
            found.append(parts[0])
    return found


def _joined_by_function(how: Join, parts: list[Any]) -> Any:
    assert how.function is not None
    try:
        value = how.function(parts)
    except Exception as error:
        error.add_note(f"The function that out_axes gives {how.name} failed; it gets the list of {len(parts)} parts.")
        raise
    if not _is_number_or_array(value):
        raise SplitError(f"The function that out_axes gives {how.name} returned {value!r:.60}, not an array.")
    return value


def checked_weight(weight: Any) -> Any:
    """What ``weights`` returned for one micro-batch."""
    if not _is_number_or_array(weight) or jnp.shape(weight) != ():
        raise SplitError(
            f"weights must return one number for each micro-batch, such as mask.sum(); not {weight!r:.60}."
        )
    return jnp.asarray(weight)


def _is_number_or_array(value: Any) -> bool:
    return compat.is_tracer(value) or compat.is_array(value) or isinstance(value, numbers.Number)
