"""What follows the backward pass of a training step: the reductions of gradients, and the updates that read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dynaflow_jax.schedule import ScheduleContext


def reductions(ctx: ScheduleContext) -> set[int]:
    """The indices of the collectives that no operator of the backward pass depends on."""
    needed = set()  # what the backward pass depends on, and the backward pass
    for op in reversed(ctx.graph.operators):
        if any(i in needed or ctx.graph[i].phase != "forward" for i in ctx.graph.successors[op.index]):
            needed.add(op.index)
    return {op.index for op in ctx.graph if op.bound == "network" and op.index not in needed}


def updates(ctx: ScheduleContext, reduced: Collection[int]) -> Mapping[int, frozenset[int]]:
    """The operators behind reductions, and of which ones each: all that it has to wait for.

    Args:
      ctx: of the schedule.
      reduced: the indices of the reductions.

    Returns:
      From the index of an operator that computes to the indices of reductions.
    """
    waits: dict[int, frozenset[int]] = {}
    for op in ctx.graph:
        before = frozenset().union(*(waits.get(i, frozenset()) for i in op.predecessors))
        waits[op.index] = before | {i for i in op.predecessors if i in reduced}
    return {i: found for i, found in waits.items() if found and i not in reduced}
