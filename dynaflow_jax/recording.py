"""The timeline of a dispatched plan as it ran: what the executor says of its commands, put together by operator."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import devices
from dynaflow_jax.details import StepDetails
from dynaflow_jax.devices import DeviceModel
from dynaflow_jax.runtime.binder import Binder, Ran
from dynaflow_jax.simulate import alone_us, bound_on
from dynaflow_jax.timeline import Event, Timeline, joined_from
from dynaflow_jax.transform import Resolved

_WARM_UP = 3  # at its third address an input is known to move, and programs stay what they are


def record(resolved: Resolved, leaves: Sequence[Any], calls: int) -> Timeline | None:
    """Runs a dispatched plan, and says when what ran; ``None`` if it turns out that nothing of it is dispatched.

    Args:
      resolved: the function at these shapes; its plan is dispatched.
      leaves: its arrays.
      calls: of how many runs to take the medians.
    """
    binders: list[Binder] = []
    run = jax.jit(resolved.timed(binders))
    constants, arrays = ([jnp.asarray(value) for value in values] for values in (resolved.constants, leaves))
    try:
        runs: list[list[dict[int, list[Ran]]]] = []
        for i in range(_WARM_UP + calls):
            with jax.profiler.TraceAnnotation(resolved.plan.strategy):
                jax.block_until_ready(run(constants, arrays))
            if i >= _WARM_UP:
                runs.append([binder.times() for binder in binders])
    finally:
        for binder in binders:
            binder.close()
    if not binders:
        return None
    plan, info = resolved.plan, resolved.info
    what = _Attribution(plan.details, devices.find(info.platform, info.device_kind))
    events: list[Event] = []
    for several in zip(*runs, strict=True):
        commands = _slowest(several)
        begin = max((event.end_us for event in events), default=0.0) - min((c.begin_us for c in commands), default=0.0)
        for event in what.events(commands):
            moved = {"start_us": event.start_us + begin, "end_us": event.end_us + begin}
            events.append(dataclasses.replace(event, **moved))
    events.sort(key=lambda event: event.start_us)
    streams = dict.fromkeys((*plan.streams, *(event.stream for event in events)))
    return Timeline(plan.strategy, info.device_kind, True, tuple(events), tuple(streams))


def _slowest(runs: Sequence[Mapping[int, list[Ran]]]) -> list[Ran]:
    """The commands of the device that takes longest, each with the medians of its times."""
    medians = [_medians([run[device] for run in runs if device in run]) for device in runs[-1]]
    return max(medians, key=lambda commands: max((c.end_us for c in commands), default=0.0))


def _medians(runs: Sequence[list[Ran]]) -> list[Ran]:
    """Commands with the medians of their times, which are in the order in which the times of every run are.

    Runs of another program, from before an input moved, are left out.
    """
    same = [run for run in runs if list(map(_identity, run)) == list(map(_identity, runs[-1]))]
    return [
        dataclasses.replace(
            each[0],
            begin_us=statistics.median(c.begin_us for c in each),
            end_us=statistics.median(c.end_us for c in each),
        )
        for each in zip(*same, strict=True)
    ]


def _identity(command: Ran) -> tuple[Any, ...]:
    return command.operator, command.kind, command.stream, command.to_peer, command.bytes


class _Attribution:
    """What commands do, from what the plan's steps do.

    Operators and bytes of a step that became several commands, or that runs several times, are shared out equally.

    Args:
      details: of the plan's steps.
      device: the model of the device.
    """

    def __init__(self, details: Sequence[StepDetails], device: DeviceModel):
        self._device = device
        self._steps: dict[str, list[tuple[StepDetails, int]]] = {}  # by name, with how often each runs
        for what, trips in _leaves(details):
            self._steps.setdefault(what.name, []).append((what, trips))

    def events(self, commands: Sequence[Ran]) -> list[Event]:
        """One for each launch and for each exchange, in the order of the commands."""
        groups = _grouped(commands)
        launches: dict[str, int] = {}  # how often each step's name occurs
        exchanges: dict[str, int] = {}
        for group in groups:
            counts = launches if group[0].kind == "launch" else exchanges
            for name in joined_from(group[0].operator, self._steps):
                counts[name] = counts.get(name, 0) + 1
        return [
            self._launch(group[0], launches, exchanges)
            if group[0].kind == "launch"
            else self._exchange(group, exchanges)
            for group in groups
        ]

    def _launch(self, command: Ran, launches: Mapping[str, int], exchanges: Mapping[str, int]) -> Event:
        flops = size = 0.0
        parts: list[StepDetails] = []
        for name in joined_from(command.operator, self._steps):
            for what, trips in self._steps[name]:
                if name in exchanges:  # they communicate for it
                    what = dataclasses.replace(what, bound="memory", sent=0.0)
                parts.append(what)
                flops += what.flops * trips / launches[name]
                size += (what.sent if what.bound == "network" else what.bytes) * trips / launches[name]
        if not parts:
            return self._event([command], "memory", 0.0, float(command.bytes), ())
        longest = max(parts, key=lambda what: alone_us(what, self._device))
        return self._event([command], bound_on(longest, self._device), flops, size, parts)

    def _exchange(self, group: Sequence[Ran], exchanges: Mapping[str, int]) -> Event:
        steps = [(name, *step) for name in joined_from(group[0].operator, self._steps) for step in self._steps[name]]
        sent = float(sum(command.bytes for command in group if command.to_peer))
        if not steps and not sent and all(command.kind == "copy" for command in group):  # of an input, or to an output
            return self._event(group, "memory", 0.0, 2.0 * sum(command.bytes for command in group), ())
        # What is read in the memory of others is copied by nobody.
        sent = sent or sum(what.sent * trips / exchanges[name] for name, what, trips in steps)
        return self._event(group, "network", 0.0, sent, [what for _, what, _ in steps])

    def _event(
        self, group: Sequence[Ran], bound: str, flops: float, size: float, parts: Sequence[StepDetails]
    ) -> Event:
        outputs = parts[-1].outputs if parts else ()
        batches = {what.micro_batch for what in parts}
        batch = batches.pop() if len(batches) == 1 else None
        times = min(command.begin_us for command in group), max(command.end_us for command in group)
        return Event(group[0].operator, group[0].stream, *times, bound, flops, size, outputs, batch)


def _leaves(details: Sequence[StepDetails], trips: int = 1) -> Iterator[tuple[StepDetails, int]]:
    """The steps that are no loops, with how often they run."""
    for what in details:
        if what.body is None:
            yield what, trips
        else:
            yield from _leaves(what.body, trips * what.trips)


_PHASES = {"copy": 0, "signal": 0, "await": 1, "sum": 2}  # of an exchange


def _grouped(commands: Sequence[Ran]) -> list[list[Ran]]:
    """Launches one by one; copies, signals, awaits and sums that follow one another for an operator together.

    An exchange sends and signals first, then awaits, and sums last: what comes behind that is the next one.
    """
    groups: list[list[Ran]] = []
    last: dict[str, list[Ran]] = {}  # of each stream
    for command in commands:
        group = last.get(command.stream)
        belongs = (
            group is not None
            and "launch" not in (command.kind, group[-1].kind)
            and group[0].operator == command.operator
            and _PHASES[command.kind] >= _PHASES[group[-1].kind]
        )
        if group is not None and belongs:
            group.append(command)
        else:
            last[command.stream] = group = [command]
            groups.append(group)
    return groups
