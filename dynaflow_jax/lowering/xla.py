"""Lowering a plan to XLA: the operators in the plan's order, with ordering constraints inside every stream.

The reference for every other lowering, the one that can be differentiated, and the one used where there is no
dispatcher. Order is kept by optimization barriers: what a step reads passes through a barrier together with the
results of the step before it on the same stream. Where a step reads those results anyway there is nothing to add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaflow_jax.batch.region import Region
from dynaflow_jax.batch.state import INVARIANT, Invariant
from dynaflow_jax.lowering.order import can_wait, can_wait_for, hold
from dynaflow_jax.lowering.steps import RunRegion, Slot, Values, call_of, is_shard_map
from dynaflow_jax.program import outputs_of
from dynaflow_jax.schedule import Step


def run(
    region: Region, steps: Sequence[Step], inputs: Values, shards: int = 1, run_region: RunRegion | None = None
) -> Values:
    """Evaluates a region in the current trace.

    Args:
      region: the operators of every micro-batch.
      steps: a plan's steps for this region.
      inputs: what the micro-batches' programs start from.
      shards: over how many devices the batch is sharded.
      run_region: how the bodies of ``shard_map`` are evaluated, also of those in loops; like this region by default.
        Loops around them are always evaluated like it: there, values still belong to several devices.

    Returns:
      The outputs of the micro-batches' programs.
    """
    env: dict[Slot, Any] = {}
    free: set[Slot] = set()  # there from the start for every micro-batch alike: weights, mostly
    for m, (variant, values) in enumerate(zip(region.variants, inputs, strict=True)):
        slots = [(m, var) for var in variant.graph.program.invars]
        env.update(zip(slots, values, strict=True))
        free.update(slot for slot in slots if isinstance(variant.states.get(slot[1], INVARIANT), Invariant))
    order = _Order()

    def inside(region: Region, steps: Sequence[Step], inputs: Values) -> Values:
        return run(region, steps, inputs, shards, run_region)

    for step in steps:
        run_body = run_region if run_region is not None and is_shard_map(region, step) else inside
        call = call_of(region, step, run_body, shards)
        values = [env[slot] for slot in call.reads]
        waited = order.waited(step)
        if waited:
            # Weights need not wait: whatever reads them reads something else as well, or nothing else at all.
            held = [i for i, slot in enumerate(call.reads) if slot not in free and can_wait(values[i])]
            if not any(can_wait_for(values[i], waited) for i in held):
                held = list(range(len(values)))
            for i, value in zip(held, hold([values[i] for i in held], waited), strict=True):
                values[i] = value
        results = list(call.compute(*values))
        env.update(zip(call.writes, results, strict=True))
        order.done(results)
    programs = [variant.graph.program for variant in region.variants]
    return [outputs_of(program, lambda var, m=m: env[m, var]) for m, program in enumerate(programs)]


def holds_shard_map(region: Region, steps: Sequence[Step]) -> bool:
    """Whether there is a ``shard_map`` among a region's steps, or in a loop among them."""
    for step in steps:
        if step.body is None:
            continue
        body = region.body(region.graph[step.operators[0].key].index)
        if is_shard_map(region, step) or holds_shard_map(body, step.body):
            return True
    return False


class _Order:
    """Which steps have to be waited for, beyond those whose results are read."""

    def __init__(self):
        self.results: list[list[Any]] = []  # of each step so far
        self.before: list[int] = []  # for each step, a bit mask of the steps that are over when it starts
        self.last: dict[str, int] = {}  # of each stream

    def waited(self, step: Step) -> list[Any]:
        """The results that a step must wait for, of steps that are not over anyway by the time it starts."""
        before = 0
        for i in step.reads:
            before |= self.before[i] | 1 << i
        streams = list(self.last) if step.body is not None else [step.stream]  # a loop occupies every stream
        earlier = [*(self.last[stream] for stream in streams if stream in self.last), *step.after]
        extra = [i for i in dict.fromkeys(earlier) if not before >> i & 1]
        for i in extra:
            before |= self.before[i] | 1 << i
        index = len(self.before)
        self.before.append(before)
        self.last.update(dict.fromkeys([*streams, step.stream], index))
        return [value for i in extra for value in self.results[i]]

    def done(self, results: list[Any]) -> None:
        """Notes what the step has given."""
        self.results.append(results)
