"""Which lowering a plan gets, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from dynaflow_jax import cost
from dynaflow_jax.batch.region import Region
from dynaflow_jax.graph import Operator
from dynaflow_jax.schedule import Step

SMALL_KERNEL = 1e-6
"""Seconds of work per kernel, on average, below which launching dominates a plan.

A kernel takes about 5 µs from its launch to the start of what waits for it, however small it is, and streams overlap
that. Measured on an H200 (``examples/benchmarks/one_gpu.py``): plans of two streams gain at 0.5 µs a kernel, are even
at 0.7 µs and lose from 1.3 µs on, where a kernel by itself fills more of the device.
"""

SMALL_EXCHANGE = 1 << 20
"""Bytes below which a collective with nothing beside it is as fast as XLA's.

With one micro-batch there is mostly nothing beside it. Measured on two H200s (``examples/benchmarks/end_to_end.py``,
``tp_overlap.py``): at 128 KiB 0.97 times as fast as XLA, at 2 MiB 1.01 to 1.12 times.
"""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A lowering.

    Attributes:
      dispatch: whether the plan's steps are launched on streams of their own; otherwise it is one XLA program.
      why: the reason, as the end of a sentence.
    """

    dispatch: bool
    why: str

    def __str__(self) -> str:
        return f"{'dispatched' if self.dispatch else 'one XLA program'}, since {self.why}"


def choose(backend: str, platform: str, device_kind: str, region: Region, steps: Sequence[Step]) -> Choice:
    """The lowering that is wanted; whether it can be had is another question.

    ``"auto"`` dispatches a plan of several streams on CUDA if there is something that they can hide: communication, or
    the launching of kernels so small that it dominates. Everything else XLA runs as fast or faster on one stream.

    Args:
      backend: ``"auto"``, ``"xla"`` or ``"dispatch"``.
      platform: the device's, as JAX names it.
      device_kind: likewise.
      region: the operators.
      steps: the plan's.
    """
    if backend != "auto":
        return Choice(backend == "dispatch", f"the backend is {backend!r}")
    if platform != "gpu":
        return Choice(False, f"streams run at once on CUDA only, and this is {platform}")
    streams = {step.stream for step, _, _ in _operators(region, steps)}
    # A function in place of operators that communicate may compute meanwhile, on whatever stream it is.
    overlaps = any(step.fn is not None and "network" in op.tags for step, op, _ in _operators(region, steps))
    if len(streams) < 2 and not overlaps:
        return Choice(False, "all steps are on one stream")
    work, count, small = 0.0, 0.0, None
    for step, op, times in _operators(region, steps):
        if "network" in op.tags or op.bound == "network":
            size = sum(aval.size * aval.dtype.itemsize for aval in (*op.inputs, *op.outputs)) / 2
            if len(region.sizes) > 1 or overlaps or size >= SMALL_EXCHANGE:
                return Choice(True, f"{op.name} communicates, which other streams can hide")
            small = op.name
        work += times * cost.seconds(op.flops, op.bytes, platform, device_kind)
        count += times * cost.kernels(op.program.eqns) / (len(step.operators) if step.is_merged else 1)
    if small is not None:
        return Choice(False, f"{small} and whatever else communicates is small, and of one micro-batch")
    figures = f"{count:.0f} kernels with {work * 1e6:.0f} µs of work together"
    if work < count * SMALL_KERNEL:
        return Choice(True, f"launching dominates {figures}")
    return Choice(False, f"no operator communicates, and {figures} are too large for launching to matter")


def _operators(region: Region, steps: Sequence[Step], times: int = 1) -> Iterator[tuple[Step, Operator, int]]:
    """The operators of a plan with their steps, and how often they run; those inside a loop in place of the loop."""
    for step in steps:
        for ref in step.operators:
            op = region.variants[ref.micro_batch or 0].graph[ref.key]
            if step.body is None:
                yield step, op, times
                continue
            length = max((eqn.params.get("length", 1) for eqn in op.program.eqns), default=1)
            yield from _operators(region.body(op.index), step.body, times * length)
