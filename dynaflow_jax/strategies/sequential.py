"""No overlap: the baseline that every other strategy has to beat."""

from dynaflow_jax.schedule import OpScheduler, ScheduleContext


class Sequential(OpScheduler):
    """The whole batch, in program order, on one stream."""

    def schedule(self, ctx: ScheduleContext) -> None:
        """Executes operators as they become ready."""
        while ops := ctx.get_ready_ops():
            ctx.execute(ops[0])
