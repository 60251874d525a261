"""Rules for equations with programs inside (calls, loops, branches, ``shard_map``), and for collectives.

They have ``opens=True``: inputs in state ``Varies`` reach them, and they compare the parameters they care about
themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dynaflow_jax import compat
from dynaflow_jax.batch.rules import Mixing, agree, homogeneous, on_rows, rule
from dynaflow_jax.batch.state import (
    INVARIANT,
    VARIES,
    Invariant,
    RowIndex,
    Rows,
    State,
    Symbol,
    Total,
    is_one_scale,
    symbols,
)
from dynaflow_jax.inline import CALLS

# -- calls --------------------------------------------------------------------------------------------------------


@rule(
    *("call composite compute_on custom_jvp_call custom_lin custom_vjp_call custom_vjp_call_jaxpr").split(),
    *("custom_vmap_call jaxpr_call linear_call xla_metadata_call").split(),
    *compat.CALLS,
    *compat.REMAT,
    opens=True,
)
def call(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """Calls: what they do is what their body does."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee"):
        inner = part.params.get(name)
        if compat.is_jaxpr(inner) and len(compat.open_jaxpr(inner).invars) == len(states):
            with contextlib.nullcontext() if part.primitive.name in CALLS else ctx.closed(part):
                return ctx.enter(part, full.params[name], inner, states, ctx.used)
    raise Mixing(f"no rule for primitive '{part.primitive.name}' in this form")


@rule("custom_linear_solve", opens=True)
def custom_linear_solve(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """A solver, of which only derivatives need the equations that it solves: what is solved for comes last."""
    lengths = part.params["const_lengths"]
    if full.params["const_lengths"] != lengths:
        raise Mixing("depends on the batch size in its structure")
    start = lengths.matvec + lengths.vecmat
    inputs = [*states[start : start + lengths.solve], *states[sum(lengths) :]]
    solve = part.params["jaxprs"].solve
    used = [True] * len(compat.open_jaxpr(solve).outvars)
    with ctx.closed(part):
        return ctx.enter(part, full.params["jaxprs"].solve, solve, inputs, used)


# -- loops and branches -------------------------------------------------------------------------------------------


def join(a: Any, b: Any) -> State:
    """The state of a variable that holds a value now of one state, now of another."""
    if VARIES in (a, b):
        return VARIES
    if type(a) is RowIndex or type(b) is RowIndex:
        if a != b:
            raise Mixing("holds the position of a row in the batch now and then")
        return a
    state = agree([a, b], "carries in one variable")
    return Total(state.scale) if type(state) is Total else state


def _leave(ctx: Any, state: Any) -> State:
    """A state as seen outside of the region that the analysis has just left."""
    if any(symbol.region not in ctx.regions for symbol in symbols(getattr(state, "scale", frozenset()))):
        raise Mixing("scales by a sum over the batch that is not the same throughout the loop or on all devices")
    return Total(state.scale) if type(state) is Total else state


class _Carry:
    """What a loop carries: states that hold before and after every step, found by repetition.

    A variable for which there is no such state is reported, and goes on as `ProofContext.guess` has it.
    """

    def __init__(self, ctx: Any, full: Any, part: Any, init: Sequence[State], outs: slice) -> None:
        self.ctx, self.full, self.part = ctx, full, part
        self.states = list(init)
        self.outs = list(zip(full.outvars[outs], part.outvars[outs], strict=True))
        self.refused: dict[int, str] = {}

    def settle(self, step: Callable[[Sequence[State]], Sequence[State]]) -> None:
        """Repeat a step until the states stay."""
        before: list[State] | None = None
        while before != self.states:
            before = list(self.states)
            with self.ctx.rehearsing():
                after = step(self.states)
            for i, (old, new) in enumerate(zip(before, after, strict=True)):
                if i in self.refused:
                    continue
                try:
                    self.states[i] = _leave(self.ctx, join(old, new))
                except Mixing as mixing:
                    self.refused[i] = str(mixing)
                    self.states[i] = self.ctx.guess(*self.outs[i])
        for reason in dict.fromkeys(self.refused.values()):
            self.ctx.report(self.part, f"{reason}, from one step of the loop to the next")


def _element(state: Any) -> State:
    """The state of one slice along the leading axis."""
    if type(state) in (Rows, RowIndex):
        if state.axis == 0:
            raise Mixing("loops over the rows of the batch")
        return dataclasses.replace(state, axis=state.axis - 1)
    return Total(state.scale) if type(state) is Total else state


def _stacked(state: Any) -> State:
    """The state of slices put together along a new leading axis."""
    if type(state) in (Rows, RowIndex):
        return dataclasses.replace(state, axis=state.axis + 1)
    return state


@rule("scan", opens=True)
def scan(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """A loop of known length: what is carried must keep its state, what is stacked gains an axis."""
    num_consts, num_carry = counts = compat.scan_partition(part)
    if full.params["length"] != part.params["length"]:
        raise Mixing("loops over the rows of the batch")
    if compat.scan_partition(full) != counts or full.params["reverse"] != part.params["reverse"]:
        raise Mixing("depends on the batch size in its structure")
    consts, init = states[:num_consts], states[num_consts : num_consts + num_carry]
    elements = [_element(state) for state in states[num_consts + num_carry :]]
    used = [True] * num_carry + list(ctx.used[num_carry:])

    def body(carry: Sequence[State]) -> Sequence[State]:
        with ctx.region():
            return ctx.enter(part, full.params["jaxpr"], part.params["jaxpr"], [*consts, *carry, *elements], used)

    carry = _Carry(ctx, full, part, init, slice(num_carry))
    carry.settle(lambda states: body(states)[:num_carry])
    ys = body(carry.states)[num_carry:]
    return [*carry.states, *(_stacked(_leave(ctx, state)) for state in ys)]


@rule("while", opens=True)
def while_(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """A loop that runs until a condition fails, which must not depend on the batch."""
    num_cond, num_body = part.params["cond_nconsts"], part.params["body_nconsts"]
    if (full.params["cond_nconsts"], full.params["body_nconsts"]) != (num_cond, num_body):
        raise Mixing("depends on the batch size in its structure")
    for_cond, for_body, init = states[:num_cond], states[num_cond : num_cond + num_body], states[num_cond + num_body :]

    def inside(name: str, inputs: Sequence[State]) -> Sequence[State]:
        with ctx.region(), ctx.deciding():
            jaxpr = part.params[name]
            used = [True] * len(compat.open_jaxpr(jaxpr).outvars)
            return ctx.enter(part, full.params[name], jaxpr, inputs, used)

    carry = _Carry(ctx, full, part, init, slice(None))
    carry.settle(lambda states: inside("body_jaxpr", [*for_body, *states]))
    inside("body_jaxpr", [*for_body, *carry.states])
    (goes_on,) = inside("cond_jaxpr", [*for_cond, *carry.states])
    if goes_on == VARIES:
        return [ctx.guess(*pair) for pair in zip(full.outvars, part.outvars, strict=True)]
    if type(goes_on) is not Invariant or not is_one_scale(goes_on):
        raise Mixing("repeats a loop for as long as the data of the batch say")
    return carry.states


@rule("cond", opens=True)
def cond(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """A choice between programs, which must not depend on the batch."""
    which, *operands = states
    branches = [eqn.params["branches"] for eqn in (full, part)]
    if len(branches[0]) != len(branches[1]):
        raise Mixing("depends on the batch size in its structure")
    if which != VARIES and (type(which) is not Invariant or not is_one_scale(which)):
        raise Mixing("chooses a branch by the data of the batch")
    results = []
    for of_full, of_part in zip(*branches, strict=True):
        with ctx.region(), ctx.deciding():
            results.append(ctx.enter(part, of_full, of_part, operands, ctx.used))
    if which == VARIES:
        return [ctx.guess(*pair) for pair in zip(full.outvars, part.outvars, strict=True)]
    joined = results[0]
    for result in results[1:]:
        joined = [join(a, b) for a, b in zip(joined, result, strict=True)]
    return [_leave(ctx, state) for state in joined]


# -- devices ------------------------------------------------------------------------------------------------------


def _names(entry: Any) -> tuple[Any, ...]:
    """The mesh axes in one entry of a partition spec, or in the parameter of a collective."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list, frozenset, set)) else (entry,)


def _spec(spec: Any, axis: int) -> tuple[Any, ...]:
    return _names(spec[axis]) if axis < len(spec) else ()


@rule("shard_map", opens=True)
def shard_map(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """The program of one device, on its share of each value. A sharded batch is split within every share."""
    params = part.params
    if any(full.params[key] != params[key] for key in ("in_specs", "out_specs", "mesh")):
        raise Mixing("depends on the batch size in its structure")
    shards: tuple[Any, ...] | None = None
    for state, spec in zip(states, params["in_specs"], strict=True):
        if type(state) not in (Rows, RowIndex):
            continue
        names = _spec(spec, state.axis)
        if type(state) is Rows and state.pieces is not None:
            if names != state.pieces[0]:
                raise Mixing("takes pieces of rows that another shard_map returned, sharded differently")
            names = state.pieces[1]
        if shards not in (None, names):
            raise Mixing("takes rows of the batch that are sharded differently")
        if names and (type(state) is RowIndex or state.outer != 1):
            raise Mixing("shards the positions of the rows, or batches joined end to end")
        shards = names
    shards = shards or ()
    local = [_local(state) for state in states]
    with ctx.region(), ctx.sharded(shards, math.prod(params["mesh"].shape[name] for name in shards)):
        outs = ctx.enter(part, full.params["jaxpr"], params["jaxpr"], local, ctx.used)
    outside: dict[Symbol, Symbol] = {}

    def leave(state: Any) -> State:
        # A sum that all devices agree on is a factor outside, too.
        terms = []
        for symbol, exponent in getattr(state, "scale", ()):
            if isinstance(symbol, Symbol) and symbol.region not in ctx.regions and compat.replicated(symbol.var.aval):
                symbol = outside.setdefault(symbol, Symbol(symbol.var, ctx.regions[-1]))
            terms.append((symbol, exponent))
        return _leave(ctx, dataclasses.replace(state, scale=frozenset(terms)) if terms else state)

    results = []
    for state, spec in zip(outs, params["out_specs"], strict=True):
        if type(state) is RowIndex:
            raise Mixing("returns the positions of rows")
        if type(state) is Rows and _spec(spec, state.axis) != shards and not state.uniform:
            state = dataclasses.replace(state, pieces=(_spec(spec, state.axis), shards))
        results.append(leave(state))
    return results


def _local(state: Any) -> State:
    """A value as one device sees it."""
    if type(state) is Rows and state.pieces is not None:
        return dataclasses.replace(state, pieces=None)
    return Total(state.scale) if type(state) is Total else state


def _across(ctx: Any, part: Any) -> bool:
    """Whether a collective runs over devices that hold different rows of the batch."""
    params = part.params
    names = _names(params["axes"] if "axes" in params else params["axis_name"])
    return bool(set(names) & set(ctx.shards))


def _same_rows(ctx: Any, part: Any, states: Sequence[Any], doing: str) -> None:
    if any(type(state) is Rows for state in states) and _across(ctx, part):
        raise Mixing(f"{doing} rows of the batch across the devices that share it")


@rule("psum", "psum_invariant", "psum2", "unreduced_psum")
def psum(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """Sums over devices: of the same rows, or of parts of the same sum."""
    _same_rows(ctx, part, states, "sums")
    return [Total(state.scale) if type(state) is Total else state for state in states]


@rule("pmax", "pmin", "unreduced_pmax", "unreduced_pmin")
def pmax(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """Maxima over devices."""
    _same_rows(ctx, part, states, "compares")
    return [homogeneous([state], "compares") for state in states]


@rule("ppermute", "pbroadcast")
def ppermute(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """Values that move between devices."""
    _same_rows(ctx, part, states, "moves")
    return [Total(state.scale) if type(state) is Total else state for state in states]


@rule("all_gather", "all_gather_invariant", "all_gather_reduced")
def all_gather(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """Pieces of all devices joined: along the axis of the rows, that joins whole batches end to end."""
    params = part.params
    dimension = params["all_gather_dimension"]
    _same_rows(ctx, part, states, "gathers")

    def gathered(state: Any) -> State:
        if type(state) is not Rows:
            return Total(state.scale) if type(state) is Total else state
        if not params["tiled"]:
            return dataclasses.replace(state, axis=state.axis + (dimension <= state.axis))
        return (
            dataclasses.replace(state, outer=state.outer * params["axis_size"])
            if on_rows(state, [dimension])
            else state
        )

    return [gathered(state) for state in states]


@rule("reduce_scatter", "unreduced_reduce_scatter")
def reduce_scatter(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """A sum over devices of which each keeps a piece: along the axis of the rows, a whole batch."""
    params = part.params
    dimension = params["scatter_dimension"]
    _same_rows(ctx, part, states, "sums")

    def scattered(state: Any) -> State:
        if type(state) is not Rows:
            return Total(state.scale) if type(state) is Total else state
        if not on_rows(state, [dimension]):
            return state if params["tiled"] else dataclasses.replace(state, axis=state.axis - (dimension < state.axis))
        outer, rest = divmod(state.outer, params["axis_size"])
        if rest or not params["tiled"]:
            raise Mixing("deals the rows of the batch out to devices")
        return dataclasses.replace(state, outer=outer)

    return [scattered(state) for state in states]


@rule("all_to_all")
def all_to_all(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """Pieces exchanged between devices, along other axes than that of the rows.

    Also between devices that hold different rows, as expert parallelism does: a micro-batch takes the rows at the same
    positions of every share, so it meets the rows that it met in the full batch.
    """
    axes = part.params["split_axis"], part.params["concat_axis"]
    if any(on_rows(state, axes) for state in states):
        raise Mixing("deals the rows of the batch out to devices")
    return [Total(state.scale) if type(state) is Total else state for state in states]


@rule("axis_index")
def axis_index(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> State:
    """Which device it is does not depend on the rows that it works on."""
    return INVARIANT


# -- beyond the program -------------------------------------------------------------------------------------------


@rule("debug_callback", "debug_print", opens=True)
def debug_callback(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """It looks on and gives nothing back."""
    return []


@rule("io_callback", opens=True)
def io_callback(ctx: Any, full: Any, part: Any, states: Sequence[Any]) -> Sequence[State]:
    """An effect on the host would happen once per micro-batch."""
    raise Mixing("calls back to the host, once per micro-batch instead of once")


OPAQUE = {
    "pure_callback": "calls back to the host, which the proof cannot look into",
    "ffi_call": "calls foreign code, which the proof cannot look into",
    "pallas_call": "is a kernel, which the proof cannot look into",
    "mpmd_map": "is a kernel, which the proof cannot look into",
    "custom_partitioning": "is partitioned by a function of its own, which the proof cannot look into",
}
