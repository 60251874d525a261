"""The arguments of a call of a scheduled function: which are arrays, where their rows are, what they are called."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError, SplitError
from dynaflow_jax.options import Options


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call, taken apart.

    Attributes:
      tree: their structure.
      leaves: the arrays among them.
      positions: where those stand among all leaves.
      static: the other leaves, by position.
      avals: types of the arrays.
      axes: batch axis of each array, or ``None``.
      names: path of each array, for messages.
      parameters: names of the function's positional parameters, as far as it tells.
      shards: over how many devices the batch is split already.
      donated: whether each array's memory is free to be an output's.
      spread: the first array of which several devices have a part each, as far as it can be known; by name.
    """

    tree: Any
    leaves: list[Any]
    positions: tuple[int, ...]
    static: tuple[tuple[int, Any], ...]
    avals: tuple[Any, ...]
    axes: tuple[int | None, ...]
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    shards: int
    donated: tuple[bool, ...]
    spread: str | None

    @property
    def signature(self) -> Any:
        """Equal for calls that run the same program."""
        # Of Python's numbers 1, 1.0 and True are equal, and so are 0.0 and -0.0; in a program they are not.
        static = tuple((i, type(v), v, repr(v) if isinstance(v, float) else None) for i, v in self.static)
        return self.tree, self.positions, static, self.avals, self.axes, self.shards, self.spread

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[str], options: Options) -> Call:
        """Takes arguments apart.

        Args:
          args: the positional ones; arrays may be ``jax.ShapeDtypeStruct``.
          kwargs: the others.
          parameters: names of the function's positional parameters, as far as it tells.
          options: how the function is scheduled.

        Raises:
          SplitError: if ``batch_axes`` does not fit them.
          DynaFlowError: if one is neither an array nor hashable, or is to be donated and not there.
        """
        with_paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        axes = _batch_axes(parameters, options.batch_axes, args, kwargs)
        leaves, positions, static, chosen, names, donated = [], [], [], [], [], []
        if args and (beyond := [number for number in options.donate_argnums if number >= len(args)]):
            raise DynaFlowError(
                f"donate_argnums names argument {beyond[0]}, and there are {len(args)} positional ones."
            )
        for i, ((path, leaf), axis) in enumerate(zip(with_paths, axes, strict=True)):
            name = argument_name(parameters, path)
            if compat.is_array(leaf) or compat.is_tracer(leaf):
                leaves.append(leaf)
                positions.append(i)
                names.append(name)
                chosen.append(_check_axis(axis, leaf, name))
                donated.append(path[0].idx == 0 and path[1].idx in options.donate_argnums)
            elif axis is not None:
                raise SplitError(
                    f"batch_axes gives {name} the axis {axis!r}, but it is {leaf!r:.60}, not an array: it has no rows. "
                    "Give it None."
                )
            else:
                static.append((i, _hashable(leaf, name)))
        avals = tuple(compat.aval_of(leaf) for leaf in leaves)
        placed = [compat.shards_of(leaf, axis) for leaf, axis in zip(leaves, chosen, strict=True) if axis is not None]
        shards = options.batch_shards or max(placed, default=1)
        spread = next((name for leaf, name in zip(leaves, names, strict=True) if compat.is_spread(leaf)), None)
        return Call(
            *(tree, leaves, tuple(positions), tuple(static), avals),
            *(tuple(chosen), tuple(names), tuple(parameters), shards, tuple(donated), spread),
        )

    def check_values(self) -> None:
        """Raises if an argument is only the type of one."""
        for leaf, name in zip(self.leaves, self.names, strict=True):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise DynaFlowError(
                    f"The argument {name} is a ShapeDtypeStruct: good for the methods graph, plan and explain, "
                    "not for a call. Pass an array."
                )

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these arrays."""
        everything = [None] * (len(self.positions) + len(self.static))
        for position, leaf in zip(self.positions, leaves, strict=True):
            everything[position] = leaf
        for position, value in self.static:
            everything[position] = value
        return jax.tree.unflatten(self.tree, everything)

    def row_bytes(self) -> int:
        """Bytes of one row, in all leaves that are split."""
        split = [(a, axis) for a, axis in zip(self.avals, self.axes, strict=True) if axis is not None]
        return sum(a.size // max(a.shape[axis], 1) * a.dtype.itemsize for a, axis in split)

    def batch_size(self) -> int | None:
        """Rows of the batch; ``None`` if nothing is split."""
        rows = zip(self.avals, self.axes, self.names, strict=True)
        sizes = {aval.shape[axis]: name for aval, axis, name in rows if axis is not None}
        if len(sizes) > 1:
            (a, first), (b, second) = list(sizes.items())[:2]
            raise SplitError(f"batch_axes: {first} has {a} rows and {second} has {b}; a batch has one size.")
        return next(iter(sizes), None)

    def avals_at(self, size: int) -> list[Any]:
        """Types of the arrays when the batch has ``size`` rows."""
        return [
            aval if axis is None else compat.resized(aval, axis, size)
            for aval, axis in zip(self.avals, self.axes, strict=True)
        ]


def _hashable(leaf: Any, name: str) -> Any:
    try:
        hash(leaf)
    except TypeError:
        raise DynaFlowError(
            f"The argument {name} is {type(leaf).__name__}: neither an array nor hashable. "
            "Pass arrays, or close over it."
        ) from None
    return leaf


def names_of(fun: Callable[..., Any]) -> list[str]:
    """Names of the positional parameters of a function, as far as it tells."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):  # some functions written in C
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def argument_name(parameters: Sequence[str], path: Any) -> str:
    """``params['w']`` for a leaf's path in ``(args, kwargs)``."""
    which, *rest = path
    if which.idx == 0 and rest:
        index, *rest = rest
        name = str(parameters[index.idx]) if index.idx < len(parameters) else f"argument {index.idx}"
    elif rest:
        index, *rest = rest
        name = str(index.key)
    else:
        name = "argument"
    return name + jax.tree_util.keystr(tuple(rest))


def _check_axis(axis: Any, leaf: Any, name: str) -> int | None:
    if axis is None:
        return None
    ndim = leaf.ndim
    try:
        index = operator.index(axis)
    except TypeError:
        index = ndim
    if isinstance(axis, bool) or not -ndim <= index < ndim:
        raise SplitError(f"batch_axes gives {name} the axis {axis!r}; it has {ndim} axes.")
    return index % ndim


def _batch_axes(parameters: Sequence[str], axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The batch axis of every leaf of ``(args, kwargs)``."""
    if isinstance(axes, dict):
        by_position, by_name = _axes_by_name(parameters, axes, args, kwargs)
    else:
        by_position, by_name = axes, {}
    if isinstance(by_position, list):
        by_position = tuple(by_position)
    if isinstance(by_position, tuple) and len(by_position) != len(args):
        raise SplitError(
            f"batch_axes has {len(by_position)} {'entry' if len(by_position) == 1 else 'entries'}, the call has "
            f"{len(args)} positional arguments: give an entry for each (None for those that are not split), or a dict "
            "by parameter name, which also names arguments given by keyword."
        )
    try:
        positional = _prefix(by_position, args)
        if kwargs and not isinstance(axes, dict) and not positional and jax.tree.leaves(axes):
            raise SplitError(
                f"batch_axes={axes!r} is about positional arguments, and all are given by keyword "
                f"({', '.join(kwargs)}): give a dict by parameter name."
            )
        named = [axis for name in sorted(kwargs) for axis in _prefix(by_name.get(name), kwargs[name])]
    except ValueError as error:
        text = str(error).replace("tree_map tree", "batch_axes")
        raise SplitError(f"batch_axes does not fit the arguments: {text}") from None
    return positional + named


def _prefix(prefix: Any, full: Any) -> list[Any]:
    """A pytree prefix, one entry for each leaf; ``None`` is an entry."""
    found: list[Any] = []

    def add(entry: Any, subtree: Any) -> None:
        found.extend([entry] * jax.tree.structure(subtree).num_leaves)

    jax.tree.map(add, prefix, full, is_leaf=lambda entry: entry is None)
    return found


def _axes_by_name(
    parameters: Sequence[str], axes: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    used = parameters[: len(args)]
    if unknown := sorted(set(axes) - set(used) - set(kwargs), key=repr):
        known = ", ".join([*used, *kwargs])
        raise SplitError(f"batch_axes names {unknown[0]!r}, which is not among the arguments: {known}.")
    return tuple(axes.get(name) for name in used) + (None,) * (len(args) - len(used)), axes
