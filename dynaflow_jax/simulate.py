"""Predicting when each step of a plan runs on a device, without the device.

The model, kernel by kernel:

- A stream runs its steps in order. A step starts when the steps that it reads or waits for are over.
- A kernel first waits for its launch, then works. Its work takes as long as the slower of its arithmetic and its
  memory traffic. A matrix product is cut into tiles that the multiprocessors take in waves, with the size of tile and
  the split of the sum that take least; an exchange takes its latency and its bytes over the link.
- What runs at once shares the device. Every kernel has a demand on each of four resources (multiprocessors, memory,
  link, launches): the fraction of it that the kernel would use up by itself. While demands add up to more than all of
  a resource, the kernels that use it advance at an equally reduced rate, those of higher priority first.
- A loop is a barrier on every stream, as it is where XLA runs it; its iterations are alike.

So a plan takes at least its critical path and at least the busiest resource's total, and at most the sum of its steps.
The constants are in ``dynaflow_jax.devices``; how far predictions are off is in ``examples/benchmarks/predicted.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from dynaflow_jax import devices
from dynaflow_jax.cost import Kernel
from dynaflow_jax.details import StepDetails
from dynaflow_jax.devices import DeviceModel
from dynaflow_jax.errors import PlanError
from dynaflow_jax.schedule import Step
from dynaflow_jax.timeline import Event, Timeline

if TYPE_CHECKING:
    from dynaflow_jax.plan import Plan

RESOURCES = ("multiprocessors", "memory", "link", "launches")
"""What kernels that run at once have to share."""

# Tiles of the output that libraries' matrix products are made of, and how near they come to the best of them.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9), (64, 128, 0.75), (128, 64, 0.75), (64, 64, 0.6))
_LEAST_SUM = 256  # a split of a product leaves each part at least so long a sum
_ATTENTION = 0.6  # of a plain product's rate: between the two of attention lies a softmax
_BLOCK_BYTES = 16 << 10  # what one block of an elementwise kernel reads and writes
_DONE = 1e-9


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of a step's time, as it is when nothing else runs.

    Attributes:
      us: how long it takes.
      demand: the fraction of each of ``RESOURCES`` that it uses, between 0 and 1.
    """

    us: float
    demand: tuple[float, float, float, float]


def simulate(plan: Plan, device: DeviceModel | str | None = None) -> Timeline:
    """The timeline that a plan is predicted to have, dispatched on a device with one stream for each of its streams.

    Where a loop runs, its events stand for all of its iterations: they are those of one, as many times longer.

    Args:
      plan: of a function; one from JSON has to be applied to a function first.
      device: the device's model, or its name, such as ``"H100"``; by default that of the device that the plan was
        made on.

    Returns:
      The timeline; its times are in microseconds, and one device's.

    Raises:
      PlanError: if the plan does not know what its steps do.
      DynaFlowError: if there is no device model of this name.
    """
    details, model = plan.details, model_of(plan, device)
    events, _ = placed(plan.steps, details, Predicted(model))
    return Timeline(plan.strategy, model.name, False, tuple(events), plan.streams)


def step_us(plan: Plan, device: DeviceModel | str | None = None) -> float:
    """How long one call of a plan is predicted to take, in microseconds; see ``simulate``."""
    details, model = plan.details, model_of(plan, device)
    return placed(plan.steps, details, Predicted(model))[1]


def model_of(plan: Plan, device: DeviceModel | str | None) -> DeviceModel:
    """The model of a device by name; for ``None``, of the device that a plan was made on."""
    if isinstance(device, DeviceModel):
        return device
    if device is not None:
        return devices.named(device)
    if plan.origin is None:
        raise PlanError("The plan does not know on which device it was made: say which one to simulate.")
    return devices.find(plan.origin.info.platform, plan.origin.info.device_kind)


def phases_of(details: StepDetails, device: DeviceModel, sm_budget: int | None = None) -> list[Phase]:
    """What a step goes through on a device, one after the other."""
    return [phase for kernel in details.kernels for phase in _phases(kernel, device, sm_budget)]


def alone_us(details: StepDetails, device: DeviceModel, sm_budget: int | None = None) -> float:
    """How long a step takes when nothing else runs; for a loop, when one step inside follows the other."""
    if details.body is not None:
        return details.trips * sum(alone_us(inner, device) for inner in details.body)
    return sum(phase.us for phase in phases_of(details, device, sm_budget))


def bound_on(details: StepDetails, device: DeviceModel) -> str:
    """What a step waits for most on a device: ``"compute"``, ``"memory"`` or ``"network"``."""
    if details.bound == "network":
        return "network"
    compute = memory = 0.0
    for kernel in details.kernels:
        compute += kernel.count * _compute(kernel, device, device.sms)[0]
        memory += kernel.count * _memory_us(kernel, device)
    return "compute" if compute > memory else "memory"


# -- kernels ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _phases(kernel: Kernel, device: DeviceModel, sm_budget: int | None) -> tuple[Phase, ...]:
    sms = min(sm_budget or device.sms, device.sms)
    compute, filled = _compute(kernel, device, sms)
    memory = _memory_us(kernel, device)
    link = kernel.sent / device.link_rate * 1e6
    work = max(compute, memory, link)
    if kernel.sent:
        wait = Phase(kernel.count * kernel.hops * device.link_latency_us, (0.0, 0.0, 0.0, 0.0))
    else:
        wait = Phase(kernel.count * device.kernel_us, (0.0, 0.0, 0.0, min(1.0, device.launch_us / device.kernel_us)))
    if not work:
        return (wait,)
    if kernel.sent and not kernel.flops:  # by copy engines
        taken = device.exchange_share
    else:
        blocks = min(1.0, kernel.bytes / (_BLOCK_BYTES * device.sms))
        taken = device.share * max(filled * compute / work, min(blocks, sms / device.sms))
    return wait, Phase(kernel.count * work, (min(1.0, taken), memory / work, link / work, 0.0))


def _memory_us(kernel: Kernel, device: DeviceModel) -> float:
    return kernel.bytes / (device.memory_rate * device.memory_fraction) * 1e6


def _compute(kernel: Kernel, device: DeviceModel, sms: int) -> tuple[float, float]:
    """How long a kernel's arithmetic takes in microseconds, and the fraction of the device that it fills."""
    if not kernel.flops:
        return 0.0, 0.0
    integer = kernel.dtype.startswith(("int", "uint"))
    rate = device.flops(kernel.itemsize, is_integer=integer) * device.matmul_fraction / device.sms
    if kernel.matmul is None:
        rate *= _ATTENTION if "attention" in kernel.name else 1.0
        return kernel.flops / (rate * sms) * 1e6, sms / device.sms
    batch, rows, columns, summed = kernel.matmul
    best = (math.inf, 1.0)
    for height, width, efficiency in _TILES:
        split = 1
        while split == 1 or summed // split >= _LEAST_SUM:
            tiles = batch * -(-rows // height) * -(-columns // width) * split
            waves = -(-tiles // sms)
            us = waves * 2.0 * height * width * -(-summed // split) / (rate * efficiency) * 1e6
            if split > 1:  # the parts' sums pass through memory
                us += 8.0 * split * batch * rows * columns / (device.memory_rate * device.memory_fraction) * 1e6
            best = min(best, (us, tiles / (waves * device.sms)))
            split *= 2
    return best


# -- steps -----------------------------------------------------------------------------------------------------------

Path = tuple[int, ...]
"""Where a step stands in a plan: its index, behind those of the loops around it."""


class Timing(Protocol):
    """How long steps take."""

    def phases(self, path: Path, step: Step, what: StepDetails) -> list[Phase]:
        """What a step goes through, one after the other, as it is when nothing else runs."""
        ...

    def bound(self, what: StepDetails) -> str:
        """What a step waits for most."""
        ...


class Predicted:
    """What a device model says."""

    def __init__(self, device: DeviceModel):
        self.device = device

    def phases(self, path: Path, step: Step, what: StepDetails) -> list[Phase]:
        """See ``Timing``."""
        del path
        return phases_of(what, self.device, step.sm_budget)

    def bound(self, what: StepDetails) -> str:
        """See ``Timing``."""
        return bound_on(what, self.device)


def placed(
    steps: Sequence[Step], details: Sequence[StepDetails], timing: Timing, around: Path = ()
) -> tuple[list[Event], float]:
    """The events of a region's steps, by start, and how long the region takes.

    Args:
      steps: a plan's, or those inside a loop.
      details: what each of them does.
      timing: how long they take when nothing else runs.
      around: where the loop around them stands in the plan.
    """
    events: list[Event] = []
    pending: list[int] = []
    now = 0.0

    def flush() -> None:
        nonlocal now
        begin = now
        phases = {i: timing.phases((*around, i), steps[i], details[i]) for i in pending}
        for i, (start, end) in sorted(_concurrently(steps, phases).items()):
            events.append(_event(steps[i].stream, details[i], begin + start, begin + end, timing))
            now = max(now, begin + end)
        pending.clear()

    for i, (step, what) in enumerate(zip(steps, details, strict=True)):
        if step.body is None or what.body is None:
            pending.append(i)
            continue
        flush()
        inner, once = placed(step.body, what.body, timing, (*around, i))
        events += [_repeated(event, now, what.trips) for event in inner]
        now += once * what.trips
    flush()
    events.sort(key=lambda event: event.start_us)
    return events, now


def _event(stream: str, what: StepDetails, start: float, end: float, timing: Timing) -> Event:
    size = what.sent if what.bound == "network" else what.bytes
    bound = timing.bound(what)
    return Event(what.name, stream, start, end, bound, what.flops, size, what.outputs, what.micro_batch)


def _repeated(event: Event, start: float, trips: int) -> Event:
    return dataclasses.replace(
        event,
        start_us=start + event.start_us * trips,
        end_us=start + event.end_us * trips,
        flops=event.flops * trips,
        bytes=event.bytes * trips,
    )


class _Running:
    """The step at the head of a stream."""

    __slots__ = ("index", "left", "phases", "priority")

    def __init__(self, index: int, phases: list[Phase], priority: int):
        self.index = index
        self.phases = phases[::-1]  # the next one last
        self.left = phases[0].us if phases else 0.0
        self.priority = priority

    def advance(self, us: float) -> None:
        """Works off time of the phase under way."""
        self.left -= us
        while self.phases and self.left <= _DONE:
            self.phases.pop()
            self.left = self.phases[-1].us if self.phases else 0.0


def _concurrently(steps: Sequence[Step], phases: dict[int, list[Phase]]) -> dict[int, tuple[float, float]]:
    """Start and end of steps that are no loops, each stream in order, from the time when all before them is over.

    Args:
      steps: the region's.
      phases: of those to run, by index, in order.
    """
    queues: dict[str, list[int]] = {}
    for i in reversed(phases):
        queues.setdefault(steps[i].stream, []).append(i)
    started: dict[int, float] = {}
    times: dict[int, tuple[float, float]] = {}
    running: dict[str, _Running] = {}
    now = 0.0
    while queues or running:
        while ready := [
            stream
            for stream, queue in queues.items()
            if stream not in running
            and all(j in times for j in (*steps[queue[-1]].reads, *steps[queue[-1]].after) if j in phases)
        ]:
            for stream in ready:
                i = queues[stream].pop()
                if not queues[stream]:
                    del queues[stream]
                started[i] = now
                head = _Running(i, phases[i], steps[i].priority)
                head.advance(0.0)
                if head.phases:
                    running[stream] = head
                else:
                    times[i] = now, now
        heads = list(running.values())
        rates = _rates([(head.phases[-1].demand, head.priority) for head in heads])
        passed = min((head.left / rate for head, rate in zip(heads, rates, strict=True) if rate > _DONE), default=0.0)
        now += passed
        for stream, rate in zip(list(running), rates, strict=True):
            head = running[stream]
            head.advance(passed * rate)
            if not head.phases:
                times[head.index] = started[head.index], now
                del running[stream]
    return times


def _rates(running: Sequence[tuple[tuple[float, ...], int]]) -> list[float]:
    """How fast each phase advances, of its speed when alone: at equal rates as far as the resources go round.

    Args:
      running: demands and priority of each.
    """
    rates, left = [1.0] * len(running), [1.0] * len(RESOURCES)
    for priority in sorted({priority for _, priority in running}, reverse=True):
        waiting = [i for i, (_, own) in enumerate(running) if own == priority]
        while waiting:
            loads = [sum(running[i][0][r] for i in waiting) for r in range(len(left))]
            rate, tightest = min((left[r] / load, r) for r, load in enumerate(loads) if load) if any(loads) else (1, 0)
            held = waiting if rate >= 1 else [i for i in waiting if running[i][0][tightest]]
            for i in held:
                rates[i] = min(1.0, max(rate, 0.0))
                left = [max(0.0, of - rates[i] * d) for of, d in zip(left, running[i][0], strict=True)]
            waiting = [i for i in waiting if i not in held]
    return rates
