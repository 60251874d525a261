"""NanoFlow: one micro-batch computes while another one communicates."""

from collections.abc import Sequence

from dynaflow_jax.schedule import InputInfo, OpScheduler, ScheduleContext, ScheduledOperator


class NanoFlow(OpScheduler):
    """Splits the batch and alternates between the micro-batches, with collectives on a stream of their own.

    After NanoFlow (arXiv 2408.12757) and DynaFlow (arXiv 2605.21603): while one micro-batch's collective is on the
    wire, the operators of another one run. Without collectives the micro-batches take turns operator by operator.

    Args:
      micro_batches: how many to split the batch into; sizes differ by at most one row (one row per shard).
      min_rows: batches that would leave a micro-batch fewer rows than this are not split.
      min_bytes: nor are those that would leave it fewer bytes of input than this, on all devices together. Splitting
        costs the matrix products some of their efficiency, which has to be worth the communication that it hides.
      concurrent: whether micro-batches have streams of their own, so that they also compute at the same time: one
        fills the compute units that the other's last tiles leave idle. Their order is then the device's to choose.
    """

    _always_shown = frozenset({"micro_batches"})

    def __init__(self, micro_batches: int = 2, min_rows: int = 1, min_bytes: int = 0, concurrent: bool = False):
        if any(type(number) is not int or number < 1 for number in (micro_batches, min_rows)):
            raise ValueError(f"NanoFlow needs positive whole numbers, not {micro_batches=} and {min_rows=}.")
        if type(min_bytes) is not int or min_bytes < 0:
            raise ValueError(f"NanoFlow needs a number of bytes, not {min_bytes=}.")
        self.micro_batches = micro_batches
        self.min_rows = min_rows
        self.min_bytes = min_bytes
        self.concurrent = concurrent

    def split(self, info: InputInfo) -> Sequence[int]:
        """Sizes as equal as they can be."""
        rows, shards = info.batch_size // info.shards, info.shards
        count = min(self.micro_batches, rows * shards // self.min_rows, rows)
        if self.min_bytes:
            count = min(count, info.batch_size * info.row_bytes // self.min_bytes)
        count = max(1, count)
        return [shards * (rows // count + (i < rows % count)) for i in range(count)]

    def schedule(self, ctx: ScheduleContext) -> None:
        """Takes turns: a micro-batch computes up to its next collective, starts that, and hands over."""
        communicates, turn = any(op.bound == "network" for op in ctx.graph), 0
        while ops := ctx.get_ready_ops():
            own = [op for op in ops if op.micro_batch in (turn, None)] or ops
            op = min(own, key=lambda op: (op.bound != "network", op.index))
            ctx.execute(op, stream=self._stream(op))
            if op.micro_batch is not None and (op.bound == "network" or not communicates):
                turn = (op.micro_batch + 1) % ctx.num_micro_batches

    def _stream(self, op: ScheduledOperator) -> str:
        name = "network" if op.bound == "network" else "compute"
        return f"{name}{op.micro_batch or 0}" if self.concurrent else name
