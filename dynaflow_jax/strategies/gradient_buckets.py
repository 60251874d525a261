"""Gradient buckets: in a data-parallel training step, gradients are reduced while the backward pass goes on."""

from dynaflow_jax.schedule import OpScheduler, ScheduleContext, ScheduledOperator


class GradientBuckets(OpScheduler):
    """Collects gradients into buckets as the backward pass makes them, and reduces each bucket behind what follows.

    After PyTorch's DistributedDataParallel (arXiv 2006.15704, sections 3.2.2 and 3.2.3) and the tensor fusion of
    Horovod (arXiv 1802.05799): the last layers' gradients are there first, and need not wait for the others'; small
    ones wait for each other, since a collective takes some time however small it is. Weights are updated in the order
    in which their gradients arrive, so that the last buckets travel behind the first updates.

    What counts as a gradient's reduction is a collective that nothing in the backward pass depends on. It has to be an
    operator of its own: ``df.collectives.all_reduce``, or ``rules=[df.SplitFunc("psum")]`` for those that ``jax.grad``
    makes of replicated parameters. Schedule the whole step, ``jax.value_and_grad`` included, and mark each layer's
    update, or all of them wait for the last gradient. Layers in a ``jax.lax.scan`` have their gradients all at its end,
    and nothing to hide them behind.

    Args:
      bucket_bytes: a bucket is reduced once its gradients have this many bytes together (by default 25 MiB, as in
        PyTorch), or when the backward pass is over.
      update_stream: where weights are updated: when the backward pass is over, on its stream, ``"compute"``; or on a
        stream of another name, beside it.
    """

    def __init__(self, bucket_bytes: int = 25 << 20, update_stream: str = "compute"):
        if type(bucket_bytes) is not int or bucket_bytes < 0:
            raise ValueError(f"GradientBuckets needs a number of bytes, not {bucket_bytes=}.")
        self.bucket_bytes = bucket_bytes
        self.update_stream = update_stream

    def schedule(self, ctx: ScheduleContext) -> None:
        """Full buckets first, then compute; a bucket that does not fill up goes when the backward pass is over."""
        gradients = ctx.graph.reductions
        waits = ctx.graph.behind(gradients)
        sent: dict[int, int] = {}  # the reductions under way, in their order
        while ops := ctx.get_ready_ops():
            bucket = [op for op in ops if op.index in gradients]
            behind = [op for op in ops if op.index in waits]
            backward = [op for op in ops if op.index not in gradients and op.index not in waits]
            if bucket and (not backward or sum(map(_bytes, bucket)) >= self.bucket_bytes):
                ctx.execute(bucket, stream="network")
                sent |= {op.index: len(sent) for op in bucket}
            elif backward:
                op = min(backward, key=lambda op: (op.bound != "network", op.index))
                ctx.execute(op, stream="network" if op.bound == "network" else "compute")
            else:
                op = min(behind, key=lambda op: (max(map(sent.__getitem__, waits[op.index])), op.index))
                ctx.execute(op, stream=self.update_stream)


def _bytes(op: ScheduledOperator) -> int:
    return sum(aval.size * aval.dtype.itemsize for aval in op.outputs)
