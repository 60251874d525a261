"""Comet: the experts of a batch a few at a time, so that some compute while the tokens of others travel."""

from collections.abc import Callable
from typing import Any

from dynaflow_jax.expert_pipeline import pipelined
from dynaflow_jax.schedule import OpScheduler, ScheduleContext, ScheduledOperator


class Comet(OpScheduler):
    """Takes two all-to-alls and the experts between them apart, along the experts.

    After Comet (arXiv 2502.19811), which cuts what an exchange and the computation behind it share along the dimension
    that is independent on both sides: tile by tile in one kernel there, experts on copy engines here. The batch stays
    whole, so matmuls keep their rows and every weight is read once; only the first piece's way to its experts and the
    last one's way back are exposed. For inference: what a backward pass reads stays whole. Operators that are no such
    experts (see ``dynaflow_jax.expert_pipeline``) run as they are, communication first.

    Args:
      pieces: in how many parts the experts of a device are computed.
    """

    def __init__(self, pieces: int = 2):
        if not isinstance(pieces, int) or isinstance(pieces, bool) or pieces < 1:
            raise ValueError(f"Comet needs a whole number of pieces, at least 1, not pieces={pieces!r}.")
        self.pieces = pieces

    def schedule(self, ctx: ScheduleContext) -> None:
        """Communication first; an exchange together with its experts and the exchange behind them."""
        done: set[int] = set()
        while ops := ctx.get_ready_ops():
            op = min(ops, key=lambda op: (op.bound != "network", op.index))
            group, fn = self._with_experts(ctx, op, done)
            stream = "network" if fn is None and op.bound == "network" else "compute"
            ctx.execute(group, stream=stream, fn=fn)
            done.update(op.index for op in group)

    def _with_experts(
        self, ctx: ScheduleContext, op: ScheduledOperator, done: set[int]
    ) -> tuple[list[ScheduledOperator], Callable[..., Any] | None]:
        """The operators to run together, and the function to replace them by, if any."""
        group, known = [op], done | {op.index}
        if op.bound == "network" and not op.runs_once:
            for other in ctx.all_ops():
                needs = set(other.predecessors)
                if other.index in known or other.runs_once or not needs <= known or needs <= done:
                    continue
                group.append(other)
                known.add(other.index)
                if other.bound == "network":
                    fn = pipelined(ctx.jaxpr_of(group), self.pieces)
                    return (group, fn) if fn else ([op], None)
        return [op], None
