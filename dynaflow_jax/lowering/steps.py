"""What each step of a plan reads, gives and computes: the part that every lowering has in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.batch.region import Region
from dynaflow_jax.batch.split import merge, offsets, take, unmerge
from dynaflow_jax.batch.state import INVARIANT, Rows
from dynaflow_jax.graph import Operator
from dynaflow_jax.schedule import Step, external_inputs, external_outputs, replacement_name, results_of

Slot = tuple[int, Any]
"""A variable of a micro-batch's program: the micro-batch's index, and the variable."""

Values = list[list[Any]]
"""For each micro-batch, a value for each input or output of its program."""

RunRegion = Callable[[Region, Sequence[Step], Values], Values]
"""Evaluates a region by its steps; what the body of a loop or ``shard_map`` goes through."""


@dataclasses.dataclass(frozen=True)
class StepCall:
    """A step as a function.

    Attributes:
      reads: what it takes, in order.
      writes: what it gives, in order.
      compute: from values of ``reads`` to values of ``writes``; can be traced.
    """

    reads: tuple[Slot, ...]
    writes: tuple[Slot, ...]
    compute: Callable[..., Sequence[Any]]


def call_of(region: Region, step: Step, run_region: RunRegion, shards: int = 1) -> StepCall:
    """The function of a step.

    Args:
      region: the region that the step belongs to.
      step: the step.
      run_region: how the bodies of loops and of ``shard_map`` are evaluated.
      shards: over how many devices the batch is sharded.
    """
    if step.body is not None:
        return _region_call(region, step, run_region)
    if step.fn is not None:
        fn = step.fn
        reads, writes = external_inputs(region, step.operators), external_outputs(region, step.operators)
        outputs, name = [var.aval for _, var in writes], replacement_name(fn, step.operators)
        return StepCall(tuple(reads), tuple(writes), lambda *values: results_of(fn, values, outputs, name))
    if step.is_merged:
        return _merged_call(region, step)
    if step.operators[0].micro_batch is None:
        return _draw_call(region, step, shards)
    return _operators_call(region, step)


def _operators_call(region: Region, step: Step) -> StepCall:
    """One operator, or several one after the other."""
    ops = [(ref.micro_batch or 0, region.variants[ref.micro_batch or 0].graph[ref.key]) for ref in step.operators]
    reads = external_inputs(region, step.operators)
    writes = [(m, var) for m, op in ops for var in op.program.outvars]

    def compute(*values: Any) -> list[Any]:
        env = dict(zip(reads, values, strict=True))
        for m, op in ops:
            results = compat.call_jaxpr(op.jaxpr, [env[m, var] for var in op.program.invars], op.name)
            env.update(zip([(m, var) for var in op.program.outvars], results, strict=True))
        return [env[slot] for slot in writes]

    return StepCall(tuple(reads), tuple(writes), compute)


def _merged_call(region: Region, step: Step) -> StepCall:
    """One operator on the joined rows of several micro-batches."""
    key = step.operators[0].key
    batches = [ref.micro_batch or 0 for ref in step.operators]
    sizes = [region.sizes[m] for m in batches]
    joined = region.variant_of(sum(sizes)).graph[key]
    ops = [region.variants[m].graph[key] for m in batches]
    states = region.variants[batches[0]].states
    reads = [list(zip(batches, same, strict=True)) for same in zip(*(op.program.invars for op in ops), strict=True)]
    writes = [list(zip(batches, same, strict=True)) for same in zip(*(op.program.outvars for op in ops), strict=True)]

    def compute(*values: Any) -> list[Any]:
        remaining = iter(values)
        args = [merge([next(remaining) for _ in slots], states.get(slots[0][1], INVARIANT), sizes) for slots in reads]
        results = compat.call_jaxpr(joined.jaxpr, args, joined.name)
        found: list[Any] = []
        for value, slots in zip(results, writes, strict=True):
            found += unmerge(value, states.get(slots[0][1], INVARIANT), sizes)
        return found

    return StepCall(tuple(s for slots in reads for s in slots), tuple(s for slots in writes for s in slots), compute)


def _draw_call(region: Region, step: Step, shards: int) -> StepCall:
    """Random numbers for the whole batch, of which every micro-batch takes its rows."""
    key = step.operators[0].key
    op = region.graph[key]
    made: list[list[tuple[Slot, Rows]]] = []
    for m, variant in enumerate(region.variants):
        own = [var for var in variant.graph[key].program.eqns[-1].outvars if not compat.is_dropped(var)]
        made.append([((m, var), variant.states[var]) for var in own])  # pyright: ignore[reportArgumentType]

    def compute(*values: Any) -> list[Any]:
        results = compat.call_jaxpr(op.draw_jaxpr, values, op.name)
        spans = list(zip(offsets(region.sizes), region.sizes, strict=True))
        return [
            take(whole, rows, sum(region.sizes), offset, size, shards)
            for own, (offset, size) in zip(made, spans, strict=True)
            for whole, (_, rows) in zip(results, own, strict=True)
        ]

    reads = tuple((0, var) for var in op.program.invars)
    return StepCall(reads, tuple(slot for own in made for slot, _ in own), compute)


# -- loops and shard_map ---------------------------------------------------------------------------------------------


def is_shard_map(region: Region, step: Step) -> bool:
    """Whether a step is a ``shard_map`` with steps inside."""
    if step.body is None:
        return False
    return region.graph[step.operators[0].key].program.eqns[-1].primitive.name == "shard_map"


def _region_call(region: Region, step: Step, run_region: RunRegion) -> StepCall:
    """A loop or ``shard_map`` over all micro-batches at once."""
    (ref,) = step.operators
    ops = [variant.graph[ref.key] for variant in region.variants]
    eqns = [op.program.eqns[-1] for op in ops]
    body = region.body(ops[0].index)
    emit = _scan if eqns[0].primitive.name == "scan" else _shard_map

    def compute(*values: Any) -> list[Any]:
        inputs = region_inputs(ops, values)
        with compat.scope_of(eqns[0]):
            outputs = emit(eqns, inputs, lambda values: run_region(body, step.body or (), values))
        return region_outputs(ops, outputs)

    reads = tuple((m, var) for m, op in enumerate(ops) for var in op.program.invars)
    return StepCall(reads, tuple((m, var) for m, op in enumerate(ops) for var in op.program.outvars), compute)


def region_inputs(ops: Sequence[Operator], values: Sequence[Any]) -> Values:
    """What each micro-batch's loop or ``shard_map`` takes, of the values that the operators around them read."""
    remaining = iter(values)
    inputs = []
    for op in ops:
        eqn = op.program.eqns[-1]
        env = {var: next(remaining) for var in op.program.invars}
        for constant in op.program.eqns[:-1]:  # small constants that the equation reads
            args = [atom.val if compat.is_literal(atom) else env[atom] for atom in constant.invars]
            env.update(zip(constant.outvars, compat.bind(constant, *args), strict=True))
        inputs.append([atom.val if compat.is_literal(atom) else env[atom] for atom in eqn.invars])
    return inputs


def region_outputs(ops: Sequence[Operator], outputs: Values) -> list[Any]:
    """What the operators around loops or ``shard_map``s give, of the outputs of those."""
    found = []
    for op, outs in zip(ops, outputs, strict=True):
        made = dict(zip(op.program.eqns[-1].outvars, outs, strict=True))
        found += [made[var] for var in op.program.outvars]
    return found


Body = Callable[[Values], Values]


def _common(values: Sequence[Any]) -> bool:
    """Whether all micro-batches have one and the same value."""
    return all(value is values[0] for value in values)


def _scan(eqns: Sequence[Any], inputs: Values, body: Body) -> Values:
    """One ``scan`` whose iteration is that of every micro-batch."""
    params = eqns[0].params
    num_consts, num_carry = compat.scan_partition(eqns[0])
    count, batches = len(inputs[0]), range(len(inputs))
    common = [p for p in range(count) if not num_consts <= p < num_consts + num_carry]
    common = [p for p in common if _common([inputs[m][p] for m in batches])]
    own = [p for p in range(count) if p not in set(common)]
    consts = [p for p in own if p < num_consts]
    carries = [p for p in own if num_consts <= p < num_consts + num_carry]
    xs = [p for p in own if p >= num_consts + num_carry]
    shared_xs = [p for p in common if p >= num_consts]

    def iteration(carry, x):
        shared_x, own_x = x
        parts = []
        for m in batches:
            values: dict[int, Any] = {p: inputs[m][p] for p in (*consts, *common) if p < num_consts}
            values.update(zip(shared_xs, shared_x, strict=True))
            values.update(zip(carries, carry[m], strict=True))
            values.update(zip(xs, own_x[m], strict=True))
            parts.append([values[p] for p in range(count)])
        outs = body(parts)
        return tuple(out[:num_carry] for out in outs), tuple(out[num_carry:] for out in outs)

    init = tuple([inputs[m][p] for p in carries] for m in batches)
    slices = ([inputs[0][p] for p in shared_xs], tuple([inputs[m][p] for p in xs] for m in batches))
    carry, ys = jax.lax.scan(
        iteration, init, slices, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [[*carry[m], *ys[m]] for m in batches]


def _shard_map(eqns: Sequence[Any], inputs: Values, body: Body) -> Values:
    """One ``shard_map`` whose body is that of every micro-batch."""
    count, batches = len(inputs[0]), range(len(inputs))
    in_specs, out_specs = eqns[0].params["in_specs"], eqns[0].params["out_specs"]
    common = [p for p in range(count) if _common([inputs[m][p] for m in batches])]
    own = [p for p in range(count) if p not in set(common)]

    def inside(shared, parts):
        values = []
        for m in batches:
            found = dict(zip(common, shared, strict=True)) | dict(zip(own, parts[m], strict=True))
            values.append([found[p] for p in range(count)])
        return tuple(map(tuple, body(values)))

    specs = ([in_specs[p] for p in common], tuple([in_specs[p] for p in own] for _ in batches))
    mapped = compat.shard_map_like(eqns[0], inside, specs, tuple(tuple(out_specs) for _ in batches))
    outs = mapped([inputs[0][p] for p in common], tuple([inputs[m][p] for p in own] for m in batches))
    return [list(out) for out in outs]
