"""What the steps of a plan do: shapes, arithmetic, memory traffic and kernels, each on the rows that it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dynaflow_jax import cost, devices
from dynaflow_jax.batch.region import Region
from dynaflow_jax.cost import Itemized, Kernel
from dynaflow_jax.graph import Operator
from dynaflow_jax.schedule import InputInfo, Step, external_inputs, external_outputs


@dataclasses.dataclass(frozen=True)
class StepDetails:
    """What one step does, on one device.

    Attributes:
      name: the step as text, such as ``"layer_0/mlp[1]"``.
      micro_batch: which micro-batch, or ``None`` for several or for what runs once for all of them.
      inputs: shapes and dtypes of what it reads, such as ``("bf16[8,128]",)``.
      outputs: shapes and dtypes of what it gives to others.
      dtype: the dtype of what its largest kernel computes with, such as ``"bfloat16"``.
      bound: ``"compute"``, ``"memory"`` or ``"network"``, on the device that the plan was made on.
      flops: floating-point operations, estimated.
      bytes: bytes of device memory read and written, estimated.
      sent: bytes that the device sends to others.
      kernels: what it consists of, one after the other; empty for a loop.
      trips: how often the steps inside run, for a loop; otherwise 1.
      body: for a loop or ``shard_map``, the steps inside; its own figures are theirs, times ``trips``.
    """

    name: str
    micro_batch: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtype: str
    bound: str
    flops: float
    bytes: float
    sent: float
    kernels: tuple[Kernel, ...]
    trips: int = 1
    body: tuple[StepDetails, ...] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The function that a plan was made for.

    Attributes:
      region: its operators.
      info: what was known of its inputs.
      axes: sizes of the mesh axes around it.
    """

    region: Region
    info: InputInfo
    axes: Mapping[str, int]


def details_of(steps: Sequence[Step], origin: Origin) -> tuple[StepDetails, ...]:
    """What the steps of a plan for a function do."""
    info = origin.info
    ridge = devices.find(info.platform, info.device_kind).ridge
    return tuple(_Details(origin.region, {**origin.axes}, info.shards, ridge).of(step) for step in steps)


class _Details:
    """What the steps of a region do.

    Args:
      region: the region.
      axes: sizes of the mesh axes around it.
      shards: over how many devices XLA shards what the region computes.
      ridge: operations per byte above which the plan's device is bound by compute.
    """

    def __init__(self, region: Region, axes: Mapping[str, int], shards: int, ridge: float):
        self.region = region
        self.axes = axes
        self.shards = shards
        self.ridge = ridge

    def of(self, step: Step) -> StepDetails:
        """One step."""
        if step.body is not None:
            return self._loop(step, step.body)
        ops = self._operators(step)
        kernels = self._replacement(step, ops) if step.fn is not None else self._kernels(step, ops)
        kernels = tuple(kernel.shared_by(self.shards) for kernel in kernels)
        flops, sent = sum(op.flops for op in ops) / self.shards, sum(k.sent * k.count for k in kernels)
        traffic = sum(kernel.bytes * kernel.count for kernel in kernels)
        bound = "compute" if flops > self.ridge * traffic else "memory"
        if any(op.bound == "network" for op in ops):
            bound = "network"
        inputs, outputs = self._edges(step, ops)
        dtype = max(kernels, key=lambda kernel: (kernel.flops, kernel.bytes)).dtype if kernels else ""
        batches = {ref.micro_batch for ref in step.operators}
        micro_batch = batches.pop() if len(batches) == 1 else None
        return StepDetails(str(step), micro_batch, inputs, outputs, dtype, bound, flops, traffic, sent, kernels)

    def _operators(self, step: Step) -> list[Operator]:
        """What is evaluated: a merged step's operator on the joined rows, otherwise each for its micro-batch."""
        region, key = self.region, step.operators[0].key
        if step.is_merged:
            size = sum(region.sizes[ref.micro_batch or 0] for ref in step.operators)
            return [region.variant_of(size).graph[key]]
        return [region.variants[ref.micro_batch or 0].graph[ref.key] for ref in step.operators]

    def _kernels(self, step: Step, ops: Sequence[Operator]) -> list[Kernel]:
        if len(ops) == 1:
            (op,) = ops
            eqns = op.program.eqns if op.draw is None else op.draw
            outputs = op.program.outvars if op.draw is None else op.draw[-1].outvars
            return cost.itemized(eqns, outputs, self.axes)
        # One unit, within which XLA fuses; micro-batches of one size share their variables.
        outputs = external_outputs(self.region, step.operators)
        found = []
        for m in dict.fromkeys(ref.micro_batch or 0 for ref in step.operators):
            own = [op for ref, op in zip(step.operators, ops, strict=True) if (ref.micro_batch or 0) == m]
            eqns = [eqn for op in own for eqn in op.program.eqns]
            found += cost.itemized(eqns, [var for batch, var in outputs if batch == m], self.axes)
        return found

    def _replacement(self, step: Step, ops: Sequence[Operator]) -> list[Kernel]:
        """One kernel that does all that the operators do, without passing what lies between them through memory.

        Unless the replacement says itself what it takes.
        """
        if isinstance(step.fn, Itemized):
            return step.fn.kernels(self.axes)
        own = [kernel for op in ops for kernel in cost.itemized(op.program.eqns, op.program.outvars, self.axes)]
        if not own:
            return []
        read = external_inputs(self.region, step.operators), external_outputs(self.region, step.operators)
        outside = set(read[0]) | set(read[1])
        refs = list(zip(step.operators, ops, strict=True))
        between = sum(
            cost.bytes_of(var.aval)
            for ref, op in refs
            for var in (*op.program.invars, *op.program.outvars)
            if (ref.micro_batch or 0, var) not in outside
        )
        largest = max(own, key=lambda kernel: kernel.flops)
        flops, traffic, sent = (sum(getattr(k, name) * k.count for k in own) for name in ("flops", "bytes", "sent"))
        hops = max(kernel.hops for kernel in own)
        return [
            dataclasses.replace(
                largest,
                name=getattr(step.fn, "__name__", "fn"),
                flops=flops,
                bytes=max(0.0, traffic - between),
                sent=sent,
                hops=hops,
                count=1,
            )
        ]

    def _edges(self, step: Step, ops: Sequence[Operator]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if len(ops) == 1:
            read, given = ops[0].inputs, ops[0].outputs
        else:
            read = [var.aval for _, var in external_inputs(self.region, step.operators)]
            given = [var.aval for _, var in external_outputs(self.region, step.operators)]
        return tuple(map(_short, read)), tuple(map(_short, given))

    def _loop(self, step: Step, body: Sequence[Step]) -> StepDetails:
        (ref,) = step.operators
        op = self.region.graph[ref.key]
        eqn = op.program.eqns[-1]
        region = self.region.body(op.index)
        # Inside shard_map shapes are one device's.
        shards = 1 if eqn.primitive.name == "shard_map" else self.shards
        inner = _Details(region, {**self.axes, **region.axes}, shards, self.ridge)
        steps, trips = tuple(map(inner.of, body)), eqn.params.get("length", 1)
        flops, traffic, sent = (
            trips * sum(getattr(inside, name) for inside in steps) for name in ("flops", "bytes", "sent")
        )
        heaviest = max(steps, key=lambda inside: (inside.flops, inside.bytes))
        inputs, outputs = self._edges(step, [op])
        bound = "compute" if flops > self.ridge * traffic else "memory"
        figures = (heaviest.dtype, bound, flops, traffic, sent)
        return StepDetails(str(step), None, inputs, outputs, *figures, (), trips, steps)


def _short(aval: Any) -> str:
    return aval.str_short(short_dtypes=True).partition("{")[0]  # without what it varies over
