"""A function's programs: the whole batch's, and those of its micro-batches, proven to be parts of it.

The whole batch's program is traced. A micro-batch's is derived from it (`batch.derive`), or traced where that cannot
be; either way the two are compared (`batch.proof`) before anything is split.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.annotate import Label, labelling
from dynaflow_jax.batch import draws as batch_draws
from dynaflow_jax.batch import outputs as batch_outputs
from dynaflow_jax.batch import split as batch_split
from dynaflow_jax.batch.derive import Derivation, Underivable, divides_by
from dynaflow_jax.batch.proof import Analysis, MixingSite, analyse
from dynaflow_jax.batch.region import Variant
from dynaflow_jax.batch.state import INVARIANT, ZERO, RowIndex, Rows
from dynaflow_jax.call import Call, argument_name
from dynaflow_jax.errors import BatchMixingError, DynaFlowError, SplitError
from dynaflow_jax.graph import OpGraph, cut
from dynaflow_jax.inline import Flat, inline, with_twins
from dynaflow_jax.options import Options
from dynaflow_jax.program import Program, constants_inside, trace


class Function(Protocol):
    """A function, and what ``dynaflow`` is told of how to split it."""

    fun: Callable[..., Any]
    options: Options


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function traced at one batch size."""

    program: Program
    constants: tuple[Any, ...]
    out_tree: Any

    def shards(self, axes: Sequence[int | None]) -> int:
        """Over how many devices the program itself wants its batched inputs split."""
        axis_of = dict(zip(self.program.invars[len(self.constants) :], axes, strict=True))
        return max(
            (
                compat.input_shards(eqn, position, axis)
                for eqn in self.program.eqns
                if eqn.primitive.name in ("shard_map", "sharding_constraint")
                for position, var in enumerate(eqn.invars)
                if not compat.is_literal(var) and (axis := axis_of.get(var)) is not None
            ),
            default=1,
        )

    def flat(self, flow: Function, *, draws: bool) -> _Flattened:
        """The program with everything opened that has a boundary inside."""
        options = {"draws": draws, "unroll": flow.options.unroll}
        return _Flattened(*inline(self.program, self.constants, flow.options.rules, **options), self.out_tree)


@dataclasses.dataclass(frozen=True, eq=False)
class _Flattened:
    """A traced function after inlining; ``constants`` are the first inputs of the flat program."""

    flat: Flat
    constants: tuple[Any, ...]
    out_tree: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """A micro-batch's program, what is proven of it, and what it has of each constant of the whole batch's."""

    flat: Flat
    analysis: Analysis
    constants: tuple[batch_split.Own, ...]


def traced(flow: Function, layout: Call, size: int | None = None) -> Traced:
    """A function's program at a batch size; ``None`` for the whole batch."""
    out_tree = None

    def flat_fun(*leaves: Any) -> list[Any]:
        nonlocal out_tree
        args, kwargs = layout.arguments(leaves)
        before = jax.tree_util.tree_leaves_with_path((args, kwargs))
        result = flow.fun(*args, **kwargs)
        outs, out_tree = jax.tree.flatten(result)
        if lost := _lost(before, jax.tree_util.tree_leaves_with_path((args, kwargs)), outs):
            raise DynaFlowError(_lost_message(flow, argument_name(layout.parameters, lost)))
        for path, out in jax.tree_util.tree_leaves_with_path(result):
            if not (compat.is_tracer(out) or compat.is_array(out) or isinstance(out, numbers.Number)):
                name = f"output{jax.tree_util.keystr(path)}"
                raise DynaFlowError(f"{flow!r}: {name} of the function is {out!r:.60}, not an array.")
        return outs

    with labelling(flow.options.rules):
        program, constants = trace(flat_fun, layout.avals if size is None else layout.avals_at(size))
    return Traced(program, constants, out_tree)


class Splitting:
    """The programs of a function at one set of shapes.

    Args:
      flow: the function.
      layout: the arguments of the whole batch.
      batch_size: its rows; ``None`` if nothing is split.
      unopened: the whole batch's program.
      ridge: operations per byte above which the device is bound by compute.
      split: whether there are several micro-batches.
      warn: whether to warn of rules and marks without effect.

    Attributes:
      whole: the whole batch's program with everything opened that has a boundary inside.
      derivation: where the micro-batches' programs are derived from that, how; otherwise they are traced.
    """

    def __init__(
        self,
        flow: Function,
        layout: Call,
        batch_size: int | None,
        unopened: Traced,
        ridge: float,
        *,
        split: bool,
        warn: bool,
    ):
        self._flow = flow
        self._layout = layout
        self._batch_size = batch_size
        self._unopened = unopened
        self._ridge = ridge
        self._warn = warn
        self.whole = unopened.flat(flow, draws=split)
        self.derivation: Derivation | None = None
        self._parts: dict[int, _Part] = {}
        self._variants: dict[int, Variant] = {}

    @functools.cached_property
    def graph(self) -> OpGraph:
        """The operators on the whole batch."""
        return self._cut(self.whole.flat)

    def _cut(self, flat: Flat) -> OpGraph:
        warn, self._warn = self._warn, False
        return cut(flat, self._flow.options.rules, self._ridge, warn=warn)

    def derive(self, sizes: tuple[int, ...]) -> None:
        """Derives the micro-batches' programs from the whole batch's, if nothing stands against it.

        What is refused of derived programs is refused only if it is of traced ones too, and in their words.
        """
        if any(map(callable, jax.tree.leaves(self._flow.options.out_axes))):
            return  # a function of the parts is about what the function returns for a micro-batch
        assert self._batch_size is not None
        try:
            self.derivation = Derivation(self.whole.flat, self._layout.axes, self._batch_size)
            for size in sizes:
                self._part(size)
            self.how_to_join(sizes)
        except (Underivable, SplitError, BatchMixingError):
            self.give_up_deriving()

    def give_up_deriving(self) -> None:
        """From here on, micro-batches' programs are traced."""
        self.derivation = None
        self._parts.clear()
        self._variants.clear()

    def how_to_join(self, sizes: tuple[int, ...]) -> list[batch_outputs.Join]:
        """How each output is joined."""
        program, divides = self.whole.flat.program, None
        if self.derivation is not None and self._batch_size is not None:
            divides = functools.partial(divides_by, program, self.derivation.counts | {self._batch_size})
        return batch_outputs.joins(
            self._flow.options.out_axes,
            self.whole.out_tree,
            [self._parts[size].analysis.outputs for size in sizes] if len(sizes) > 1 else None,
            program.outvars,
            self._flow.options.weights is not None,
            divides,
        )

    def variant(self, size: int) -> Variant:
        """The operators of a micro-batch, or of several joined, with the proof that the batch may be split that way."""
        if size not in self._variants:
            self._variants[size] = self._make_variant(size)
        return self._variants[size]

    def _make_variant(self, size: int) -> Variant:
        full = self.whole.flat
        if size == self._batch_size:  # all micro-batches joined
            flat, states = with_twins(full, full), {}
        else:
            part = self._part(size)
            flat, states = part.flat, part.analysis.states
        draws = next((batch_draws.locate(part.flat, part.analysis.draws) for part in self._parts.values()), frozenset())
        index = None
        if self._flow.options.rng == "exact":
            flat = batch_draws.draw_once(flat, full, draws)
        else:
            flat, index = batch_draws.draw_separately(flat, draws)
        return Variant(self._cut(flat), states, index)

    def _part(self, size: int) -> _Part:
        if size not in self._parts:
            self._parts[size] = self._traced_part(size) if self.derivation is None else self._derived_part(size)
        return self._parts[size]

    def _derived_part(self, size: int) -> _Part:
        assert self.derivation is not None
        assert self._batch_size is not None
        flat = self.derivation.at(size)
        programs, problem = (self.whole.flat.program, flat.program), ""
        for states in self.derivation.proposals(self.whole.constants):
            analysis = analyse(*programs, [*states, *self._layout.axes], self._batch_size, size)
            if not analysis.mixing:
                own: list[batch_split.Own] = [state if isinstance(state, Rows) else None for state in states]
                for i, state in enumerate(states):
                    if isinstance(state, RowIndex):  # every micro-batch counts its rows from zero
                        aval = flat.program.invars[i].aval
                        own[i] = np.arange(aval.shape[0], dtype=aval.dtype)
                return _Part(flat, analysis, tuple(own))
            problem = str(analysis.mixing[0])
        raise Underivable(problem)

    def _traced_part(self, size: int) -> _Part:
        assert self._batch_size is not None
        full = self.whole
        try:
            part = traced(self._flow, self._layout, size).flat(self._flow, draws=True)
        except SplitError:
            raise
        except Exception as error:  # whatever the function makes of a number of rows that it did not expect
            raise SplitError(self._untraceable(size, error)) from error
        if len(part.flat.program.invars) != len(full.flat.program.invars) or part.out_tree != full.out_tree:
            raise SplitError(
                f"At {size} rows the function closes over other constants, or returns another structure, than at "
                f"{self._batch_size}: its program depends on the batch size."
            )
        constants = (full.constants, part.constants)
        programs = (full.flat.program, part.flat.program)
        analysis = analyse(*programs, self._layout.axes, self._batch_size, size, self._allows, consts=constants)
        if analysis.mixing:
            differentiated = any(node.place.phase == "backward" for node in full.flat.nodes)
            raise BatchMixingError(_mixing_message(analysis.mixing, self._batch_size, size, differentiated))
        own = [
            None if analysis.states[var] in (INVARIANT, ZERO) else value
            for value, var in zip(part.constants, part.flat.program.invars, strict=False)
        ]
        return _Part(with_twins(part.flat, full.flat), analysis, tuple(own))

    def owns(self, sizes: Sequence[int]) -> list[tuple[batch_split.Own, ...]]:
        """For each micro-batch, what it has of every input of the whole batch's program."""
        if len(sizes) == 1:
            return [(None,) * len(self.whole.flat.program.invars)]
        rows = tuple(None if axis is None else Rows(axis) for axis in self._layout.axes)
        return [(*self._parts[size].constants, *rows) for size in sizes]

    def _untraceable(self, size: int, error: Exception) -> str:
        constants = (*self.whole.constants, *constants_inside(self._unopened.program))
        sized = [aval for aval in map(compat.aval_of, constants) if self._batch_size in aval.shape]
        message = (
            f"The function takes {self._batch_size} rows, but not the {size} of a micro-batch: {_said(error)}\n"
            "If the rows are elsewhere in an argument, correct batch_axes."
        )
        if sized:
            message += (
                f"\nIt closes over {sized[0].str_short()}, an array of the batch's size. What has a row for each of "
                "the batch's belongs into the arguments, with its batch axis in batch_axes."
            )
        return message

    def _allows(self, site: MixingSite) -> bool:
        names = set(_names(site))
        return any(entry == "*" or entry in names for entry in self._flow.options.allow_batch_mixing)


def _said(error: Exception) -> str:
    """What an error says, with its type where that is not about the arguments: an assertion says nothing by itself."""
    return str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}".rstrip(": ")


def _lost(before: Sequence[tuple[Any, Any]], after: Sequence[tuple[Any, Any]], outs: Sequence[Any]) -> Any | None:
    """Where a function has changed an object that it was given, as Flax NNX's modules do, and does not return that.

    What it does to containers, or to a state that it was given as one, is its own business, as under ``jax.jit``.
    """
    known = {path: id(value) for path, value in before}
    returned = set(map(id, outs))
    for path, value in after:
        is_in_object = any(isinstance(key, jax.tree_util.GetAttrKey) for key in path[:-1])
        if is_in_object and known.get(path) != id(value) and id(value) not in returned:
            return path
    return None


def _lost_message(flow: Function, name: str) -> str:
    return (
        f"{flow!r}: the function changes {name}, a part of its argument, and only what it returns is passed on. "
        "Return the new state (with Flax NNX, take the state as an argument, nnx.merge the module inside and return "
        "its nnx.state), or schedule what changes nothing, such as the gradients of a loss, and update outside."
    )


def _mixing_message(sites: Sequence[MixingSite], batch_size: int, size: int, differentiated: bool) -> str:
    lines = [f"Splitting the batch of {batch_size} rows into micro-batches of {size} is not proven to be harmless:"]
    found = collections.Counter(map(str, sites))
    lines += [f"  - {site}{f' ({count} times)' if count > 1 else ''}" for site, count in [*found.items()][:10]]
    if len(found) > 10:
        lines.append(f"  - and {len(found) - 10} more")
    if differentiated and any("sum over the batch" in site.reason for site in sites):
        lines.append(
            "If that is an optimizer, which uses the gradient of the whole batch: schedule jax.value_and_grad(loss), "
            "with out_axes='mean', and apply the optimizer to its result, outside of what is scheduled."
        )
    lines.append(
        "Let the strategy's split return the whole batch (Sequential() does), or, if every micro-batch may do this for "
        f"itself, pass allow_batch_mixing=({_names(sites[0])[0]!r},) to dynaflow."
    )
    if guards := [site for site in sites if site.guards]:
        lines.append(
            f"If {guards[0].primitive} guards the division in a mean over weighted or masked rows, as in "
            "(x * mask).sum() / max(mask.sum(), 1), pass out_axes='mean' and weights= a function of them as well."
        )
    if size == 1:
        lines.append(
            "At one row JAX may trace other operations than at several: try micro-batches of at least two rows."
        )
    return "\n".join(lines)


def _names(site: MixingSite) -> list[str]:
    """By what ``allow_batch_mixing`` may name a site: an operator, a module's path or its end, or a primitive."""
    labels, path = [], []
    for name, is_transform in site.name_stack:
        if label := Label.decode(name):
            labels.append(label.name)
        elif not is_transform:
            path.append(name)
    paths = ["/".join(path[i:j]) for j in range(len(path), 0, -1) for i in range(j)]
    return [*labels[::-1], *paths, site.primitive]
