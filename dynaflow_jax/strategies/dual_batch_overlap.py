"""Dual-batch overlap: two micro-batches half a layer apart, for models that dispatch tokens to experts."""

from collections.abc import Sequence

from dynaflow_jax.schedule import InputInfo, OpScheduler, ScheduleContext, ScheduledOperator


class DualBatchOverlap(OpScheduler):
    """Runs two micro-batches so that the all-to-alls of one hide behind the attention and experts of the other.

    After DeepSeek-V3 (arXiv 2412.19437, section 3.2.1): a layer is attention, dispatch, experts, combine; while one
    micro-batch dispatches or combines, the other computes. Operators count as communication if they hold a
    collective or carry one of the tags ``"network"``, ``"dispatch"`` and ``"combine"``.

    Args:
      min_rows: smaller batches are not split.
      concurrent: whether micro-batches have streams of their own, so that they also compute at the same time. Their
        order is then the device's to choose.
    """

    def __init__(self, min_rows: int = 2, concurrent: bool = False):
        if type(min_rows) is not int or min_rows < 1:
            raise ValueError(f"DualBatchOverlap needs a positive whole number, not {min_rows=}.")
        self.min_rows = min_rows
        self.concurrent = concurrent

    def split(self, info: InputInfo) -> Sequence[int]:
        """Two halves; the first takes the odd row."""
        rows, shards = info.batch_size // info.shards, info.shards
        if info.batch_size < self.min_rows or rows < 2:
            return [info.batch_size]
        return [shards * (rows - rows // 2), shards * (rows // 2)]

    def schedule(self, ctx: ScheduleContext) -> None:
        """A micro-batch computes up to its next communication, starts that, and hands over to the other."""
        turn = 0
        while ops := ctx.get_ready_ops():
            op = min(ops, key=lambda op: (not _communicates(op), op.micro_batch not in (turn, None), op.index))
            ctx.execute(op, stream=self._stream(op))
            if _communicates(op) and op.micro_batch is not None:
                turn = (op.micro_batch + 1) % ctx.num_micro_batches

    def _stream(self, op: ScheduledOperator) -> str:
        name = "network" if _communicates(op) else "compute"
        return f"{name}{op.micro_batch or 0}" if self.concurrent else name


def _communicates(op: ScheduledOperator) -> bool:
    return op.bound == "network" or bool(op.tags & {"dispatch", "combine"})
