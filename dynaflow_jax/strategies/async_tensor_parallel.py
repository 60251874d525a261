"""Asynchronous tensor parallelism: matmuls in pieces, computed while the pieces of others travel."""

from collections.abc import Callable
from typing import Any

from dynaflow_jax.collective_matmul import overlapped
from dynaflow_jax.schedule import OpScheduler, ScheduleContext, ScheduledOperator


class AsyncTensorParallel(OpScheduler):
    """Takes an all-gather and the matmul behind it apart, and a matmul and the reduce-scatter behind it.

    For tensor and sequence parallelism, where a layer gathers the sequence before its first matmul and scatters it
    behind its last one, forward and backward. After TorchTitan (arXiv 2410.06511) and FLUX (arXiv 2406.06858): the
    batch stays whole; the part of one device is multiplied while those of the others are on their way.

    The operator behind an ``all_gather`` has to multiply what was gathered as it is, and the one before a
    ``reduce_scatter`` has to end in a matmul (see ``dynaflow_jax.collective_matmul``). All others run as they are.
    """

    def schedule(self, ctx: ScheduleContext) -> None:
        """Executes operators in program order, together with the neighbours that they can overlap with."""
        done: set[int] = set()
        while ops := ctx.get_ready_ops():
            group, fn = _with_neighbours(ctx, min(ops, key=lambda op: op.index), done)
            stream = "network" if fn is None and group[0].bound == "network" else "compute"
            ctx.execute(group, stream=stream, fn=fn)
            done.update(op.index for op in group)


def _with_neighbours(
    ctx: ScheduleContext, op: ScheduledOperator, done: set[int]
) -> tuple[list[ScheduledOperator], Callable[..., Any] | None]:
    """The operators to run together, and the function to replace them by; the operator itself and ``None``, mostly."""
    groups = [[op]]
    for _ in range(2 if op.bound == "network" else 1):  # gather and compute, or compute and scatter, or all three
        last = groups[-1][-1]
        for reader in _readers(ctx, last):
            known = done | {other.index for other in groups[-1]}
            alternates = (reader.bound == "network") != (last.bound == "network")
            if alternates and set(reader.predecessors) <= known and not (last.runs_once or reader.runs_once):
                groups.append([*groups[-1], reader])
                break
    for group in reversed(groups[1:]):
        if fn := overlapped(ctx.jaxpr_of(group)):
            return group, fn
    return [op], None


def _readers(ctx: ScheduleContext, op: ScheduledOperator) -> list[ScheduledOperator]:
    found = set(ctx.graph.successors[op.index])
    return [other for other in ctx.all_ops() if other.index in found and other.micro_batch == op.micro_batch]
