"""Parameter prefetch: in a fully sharded training step, parameters are gathered shortly before they are used."""

from dynaflow_jax.schedule import OpScheduler, ScheduleContext, ScheduledOperator


class ParameterPrefetch(OpScheduler):
    """Gathers each parameter while the operators before its first use compute; reduces gradients behind the others.

    After PyTorch's FullyShardedDataParallel (arXiv 2304.11277, sections 3.3.1 to 3.3.3, and the rate limiter of
    section 3.4): a parameter is gathered during the compute before it, forward and backward, and not earlier, so that
    only a few whole parameters are in memory at a time. Parameters are updated when the backward pass is over, in the
    order in which it made their gradients, so that the last gradients travel behind the first updates.

    What counts as a parameter's gather is a collective that reads nothing but inputs of the function:
    ``df.collectives.all_gather`` of a shard. A ``jax.custom_vjp`` whose backward pass gathers again has that prefetched
    too; behind ``jax.checkpoint`` gathers wait until the backward pass has come to the layer, as JAX wants it. Layers
    in a ``jax.lax.scan`` are prefetched as far as ``unroll=`` lets one see.

    Args:
      ahead: how many operators before its first use a parameter's gather may start; 0 does not prefetch.
      update_stream: where parameters are updated: when the backward pass is over, on its stream, ``"compute"``; or on a
        stream of another name, beside it.
    """

    def __init__(self, ahead: int = 1, update_stream: str = "compute"):
        if type(ahead) is not int or ahead < 0:
            raise ValueError(f"ParameterPrefetch needs a whole number of operators, not {ahead=}.")
        self.ahead = ahead
        self.update_stream = update_stream

    def schedule(self, ctx: ScheduleContext) -> None:
        """Program order, but updates last; before each operator, gathers what is used ``ahead`` operators later."""
        gathers = [op for op in ctx.all_ops() if op.bound == "network" and not op.predecessors]
        waits = ctx.graph.behind(ctx.graph.reductions - {op.index for op in gathers})
        made = {i: max(j for of in before for j in ctx.graph[of].predecessors) for i, before in waits.items()}
        compute = [op for op in ctx.all_ops() if op.bound != "network"]
        compute.sort(key=lambda op: (made.get(op.index, -1), op.index))
        first_use = {gather: _first_use(ctx, gather, compute) for gather in gathers}
        last = ()
        for position, op in enumerate(compute):
            wanted = [gather for gather in gathers if first_use[gather] <= position + self.ahead]
            for gather in sorted(wanted, key=first_use.__getitem__):
                gathers.remove(gather)
                ctx.execute(gather, stream="network", after=last)
            _communicate(ctx, gathers)
            last = ctx.execute(op, stream=self.update_stream if op.index in waits else "compute")
            _communicate(ctx, gathers)
        _communicate(ctx, [])


def _first_use(ctx: ScheduleContext, gather: ScheduledOperator, compute: list[ScheduledOperator]) -> int:
    """How many operators compute before one that reads what is gathered."""
    readers = set(ctx.graph.successors[gather.index])
    return next((i for i, op in enumerate(compute) if op.index in readers), len(compute))


def _communicate(ctx: ScheduleContext, but: list[ScheduledOperator]) -> None:
    """Starts whatever else can be sent: gradients, mostly."""
    while ops := [op for op in ctx.get_ready_ops() if op.bound == "network" and op not in but]:
        ctx.execute(ops[0], stream="network")
