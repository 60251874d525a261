"""Gradient buckets: in a data-parallel training step, gradients are reduced while the backward pass goes on."""

from dynaflow_jax.schedule import OpScheduler, ScheduleContext, ScheduledOperator


class GradientBuckets(OpScheduler):
    """Collects gradients into buckets as the backward pass makes them, and reduces each bucket behind what follows.

    After PyTorch's DistributedDataParallel (arXiv 2006.15704, sections 3.2.2 and 3.2.3) and the tensor fusion of
    Horovod (arXiv 1802.05799): the last layers' gradients are there first, and need not wait for the others'; small
    ones wait for each other, since a collective takes some time however small it is.

    What counts as a gradient's reduction is a collective that nothing in the backward pass depends on. It has to be an
    operator of its own: ``df.collectives.all_reduce``, or ``rules=[df.SplitFunc("psum")]`` for those that ``jax.grad``
    makes of replicated parameters. Schedule the whole step, ``jax.value_and_grad`` included. Layers in a
    ``jax.lax.scan`` have their gradients all at its end, and nothing to hide them behind.

    Args:
      bucket_bytes: a bucket is reduced once its gradients have this many bytes together (by default 25 MiB, as in
        PyTorch), or when the backward pass is over.
    """

    def __init__(self, bucket_bytes: int = 25 << 20):
        self.bucket_bytes = bucket_bytes

    def schedule(self, ctx: ScheduleContext) -> None:
        """Full buckets first, then compute; a bucket that does not fill up goes when nothing else is left."""
        gradients = _reductions(ctx)
        while ops := ctx.get_ready_ops():
            bucket = [op for op in ops if op.index in gradients]
            rest = [op for op in ops if op.index not in gradients]
            if bucket and (not rest or sum(map(_bytes, bucket)) >= self.bucket_bytes):
                ctx.execute(bucket, stream="network")
            else:
                op = min(rest, key=lambda op: (op.bound != "network", op.index))
                ctx.execute(op, stream="network" if op.bound == "network" else "compute")


def _reductions(ctx: ScheduleContext) -> set[int]:
    """The indices of the collectives that no operator of the backward pass depends on."""
    needed = set()  # what the backward pass depends on, and the backward pass
    for op in reversed(ctx.graph.operators):
        if any(i in needed or ctx.graph[i].phase != "forward" for i in ctx.graph.successors[op.index]):
            needed.add(op.index)
    return {op.index for op in ctx.graph if op.bound == "network" and op.index not in needed}


def _bytes(op: ScheduledOperator) -> int:
    return sum(aval.size * aval.dtype.itemsize for aval in op.outputs)
