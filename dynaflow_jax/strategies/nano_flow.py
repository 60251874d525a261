"""NanoFlow: one micro-batch computes while another one communicates."""

from collections.abc import Sequence

from dynaflow_jax.schedule import InputInfo, OpScheduler, ScheduleContext


class NanoFlow(OpScheduler):
    """Splits the batch and alternates between the micro-batches, with collectives on a stream of their own.

    After NanoFlow (arXiv 2408.12757) and DynaFlow (arXiv 2605.21603): while one micro-batch's collective is on the
    wire, the next operator of another one runs.

    Args:
      micro_batches: how many to split the batch into; sizes differ by at most one row (one row per shard).
      min_rows: batches that would leave a micro-batch fewer rows than this are not split.
    """

    def __init__(self, micro_batches: int = 2, min_rows: int = 1):
        if any(type(number) is not int or number < 1 for number in (micro_batches, min_rows)):
            raise ValueError(f"NanoFlow needs positive whole numbers, not {micro_batches=} and {min_rows=}.")
        self.micro_batches = micro_batches
        self.min_rows = min_rows

    def split(self, info: InputInfo) -> Sequence[int]:
        """Sizes as equal as they can be."""
        rows, shards = info.batch_size // info.shards, info.shards
        count = max(1, min(self.micro_batches, rows * shards // self.min_rows, rows))
        return [shards * (rows // count + (i < rows % count)) for i in range(count)]

    def schedule(self, ctx: ScheduleContext) -> None:
        """Takes turns: each micro-batch runs one operator, so that its collective meets the other's compute."""
        while ops := ctx.get_ready_ops():
            first = {}
            for op in ops:
                first.setdefault(op.micro_batch, op)
            for op in first.values():
                ctx.execute(op, stream="network" if op.bound == "network" else "compute")

    def __repr__(self) -> str:
        return f"NanoFlow(micro_batches={self.micro_batches})"
