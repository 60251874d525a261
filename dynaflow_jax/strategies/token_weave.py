"""TokenWeave: two uneven parts of a batch, cut where no tile of the matmuls is cut."""

from collections.abc import Sequence

from dynaflow_jax.schedule import InputInfo, OpScheduler, ScheduleContext


class TokenWeave(OpScheduler):
    """Splits the batch in two at a multiple of a tile; one part's all-reduce runs behind the other's compute.

    After TokenWeave (arXiv 2505.11329): matmuls work on tiles of rows, so a part that ends inside a tile pays for the
    whole of it, and in small batches that costs more than overlapping gains. So the first part is a whole number of
    tiles, about half; the second part has the rest; and batches of fewer than ``min_rows`` stay whole. The sums of an
    all-reduce run together with the addition and the norm behind it here too, for all that reads what arrives from
    other devices adds it up itself.

    Args:
      tile: rows of the batch in a tile. Count what stands in one row: 128 for rows of one token, 1 for sequences of
        128 tokens or more.
      min_rows: smaller batches are not split; by default those of fewer than eight tiles (1024 tokens in the paper's
        implementation). Like tiles, of one device's share if the batch is sharded.
    """

    def __init__(self, tile: int = 128, min_rows: int | None = None):
        if any(type(number) is not int or number < 1 for number in (tile, 1 if min_rows is None else min_rows)):
            raise ValueError(f"TokenWeave needs positive whole numbers, not {tile=} and {min_rows=}.")
        self.tile = tile
        self.min_rows = min_rows

    def split(self, info: InputInfo) -> Sequence[int]:
        """Half of the tiles, rounded up, and the rest; of each shard, if the batch is sharded."""
        rows, shards = info.batch_size // info.shards, info.shards
        tiles = -(-rows // self.tile)
        first = min(rows, (tiles + 1) // 2 * self.tile)
        if rows < (self.min_rows or 8 * self.tile) or first == rows:
            return [info.batch_size]
        return [shards * first, shards * (rows - first)]

    def schedule(self, ctx: ScheduleContext) -> None:
        """A part computes up to its next collective, starts that, and hands over to the other."""
        turn = 0
        while ops := ctx.get_ready_ops():
            op = min(ops, key=lambda op: (op.micro_batch not in (turn, None), op.bound != "network", op.index))
            ctx.execute(op, stream="network" if op.bound == "network" else "compute")
            if op.bound == "network" and op.micro_batch is not None:
                turn = 1 - op.micro_batch
