"""Single-batch overlap: independent branches of one batch side by side, without splitting it."""

from dynaflow_jax.schedule import OpScheduler, ScheduleContext


class SingleBatchOverlap(OpScheduler):
    """Starts communication as soon as its inputs are there, and computes what does not need it meanwhile.

    After LongCat-Flash (arXiv 2509.01322): a shortcut connection lets a layer's dense branch run while the tokens of
    its expert branch travel. Nothing is split, so nothing is paid where there is nothing to overlap.
    """

    def schedule(self, ctx: ScheduleContext) -> None:
        """Communication first; of the rest, what has waited longest."""
        while ops := ctx.get_ready_ops():
            op = min(ops, key=lambda op: (op.bound != "network", op.index))
            ctx.execute(op, stream="network" if op.bound == "network" else "compute")
