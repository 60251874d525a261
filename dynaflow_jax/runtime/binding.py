"""One device's program under construction: the addresses of all values, and the commands."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import extension, private
from dynaflow_jax.runtime import program as wire
from dynaflow_jax.runtime.arrivals import Layout
from dynaflow_jax.runtime.work import Exchange, Pattern, Value, Work

_DLPACK_KIND = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}
_DLPACK_DEVICE = {"cpu": 1, "cuda": 2}
_FLAG = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Shared:
    """A device's memory that others write into.

    Attributes:
      arrivals: address of the memory for arriving values.
      flags: address of the flags, all zero between runs.
      keep: what owns the memory.
    """

    arrivals: int
    flags: int
    keep: Any


@dataclasses.dataclass(frozen=True)
class Team:
    """The devices that run a plan together.

    Attributes:
      devices: their ordinals, by position in the mesh.
      shared: by ordinal.
      layout: of the shared memory, alike on every device.
    """

    devices: tuple[int, ...]
    shared: Mapping[int, Shared]
    layout: Layout


class Binding(abc.ABC):
    """A program of one device.

    Args:
      work: the plan's.
      device: the device's ordinal.
      inputs: addresses of the custom call's inputs; ``None`` for a rehearsal on memory of no meaning.
      moving: whether each input is copied into memory of the program's own, or read at its address.
      team: the devices that run the plan together, if there are several.

    Attributes:
      keep: what must live as long as the program.
    """

    platform: str

    def __init__(
        self, work: Work, device: int, inputs: Sequence[int] | None, moving: Sequence[bool], team: Team | None
    ):
        self.work = work
        self.device = device
        self.team = team
        self.keep: list[Any] = []
        self.moving = list(moving)
        if inputs is None:  # a rehearsal: nothing runs, so that one piece of memory can stand for all inputs
            self.moving = [False] * len(self.moving)
            inputs = [self.allocate(max(work.inputs, default=0))] * len(self.moving)
        self._bases = list(inputs)
        self._address: dict[int, int] = {}
        used = {work.base(value)[0] for operation in work.operations for value in (*operation.reads, *operation.writes)}
        used |= {work.base(value)[0] for _, parts in work.outputs for value, _ in parts}
        self._entered = sorted({index for value in used if (index := work.values[value].input) is not None})
        for i in self._entered:
            if self.moving[i]:
                self._bases[i] = self.allocate(work.inputs[i])
        for i in sorted(used):
            value = work.values[i]
            if value.input is not None:
                self._address[i] = self._bases[value.input]
            elif value.constant is not None:
                self._address[i] = self.place(value.constant)
            elif value.rank is not None:
                self._address[i] = self.place(np.int32(self._position(value.rank)))
            elif value.arrives:
                known = team is not None
                self._address[i] = self._arrival(self.device, i) if known else self.allocate(value.size)

    @abc.abstractmethod
    def allocate(self, size: int) -> int:
        """Memory that lives as long as the program."""

    @abc.abstractmethod
    def place(self, value: Any) -> int:
        """Memory with a constant in it."""

    @abc.abstractmethod
    def add(self, plan: int) -> None:
        """Completes the program and hands it to the executor, for a plan."""

    def at(self, index: int) -> int:
        """The address of a value."""
        base, offset = self.work.base(index)
        return self._address[base] + offset

    def assign(self, index: int, address: int) -> None:
        """Says where a computed value lies."""
        self._address[index] = address

    def view(self, client: private.Client, value: Value, address: int) -> Any:
        """A value in memory as a buffer of a private client."""
        return view(client, self.platform, self.device, value.shape, value.dtype, address)

    def encode(self, partitions: Sequence[int]) -> bytes:
        """The program's bytes; the executor adds the events that its reads and writes call for.

        Args:
          partitions: for each partition, the number of its capture, or its index.
        """
        work = self.work
        names = list(dict.fromkeys(operation.where.stream for operation in work.operations)) or ["compute"]
        if serial := _wants_serial():
            index_of = dict.fromkeys(names, 0)
        else:
            index_of = {name: i for i, name in enumerate(names)}
        streams = [self._stream(name) for name in names[: 1 if serial else None]]
        commands = []
        for i in self._entered:
            if self.moving[i]:
                size = work.inputs[i]
                source, target = wire.Range(wire.INPUT, i, 0, size), wire.Range(wire.MEMORY, 0, self._bases[i], size)
                commands.append(wire.Command(wire.COPY, 0, f"input {i}", 0, (source,), (target,)))
        waited = {i: event for event, i in enumerate(sorted({i for op in work.operations for i in op.after}))}
        written_on: dict[int, int] = {}
        started: set[str] = set()
        count = 0
        for i, operation in enumerate(work.operations):
            stream = index_of[operation.where.stream]
            for other in operation.after:
                if index_of[work.operations[other].where.stream] != stream:
                    commands.append(wire.Command(wire.WAIT, stream, operation.name, waited[other]))
            if isinstance(operation, Exchange):
                if operation.where.stream not in started:
                    started.add(operation.where.stream)
                    commands += self._start(operation, stream)
                commands += self._exchange(i, operation, stream)
            else:
                reads, writes = map(self._range, operation.reads), map(self._range, operation.writes)
                commands.append(wire.Command(wire.LAUNCH, stream, operation.name, count, tuple(reads), tuple(writes)))
                count += 1
            written_on.update((work.base(value)[0], stream) for value in operation.writes)
            if i in waited:
                commands.append(wire.Command(wire.RECORD, stream, operation.name, waited[i]))
        for i, (_, parts) in enumerate(work.outputs):
            for value, offset in parts:
                target = wire.Range(wire.OUTPUT, i, offset, work.values[value].size)
                stream = written_on.get(work.base(value)[0], 0)
                commands.append(wire.Command(wire.COPY, stream, f"output {i}", 0, (self._range(value),), (target,)))
        pinned = {i for i in self._entered if not self.moving[i]}
        inputs = [wire.Input(size, self._bases[i] if i in pinned else None) for i, size in enumerate(work.inputs)]
        outputs = [size for size, _ in work.outputs]
        version, devices = extension.module.PROGRAM_VERSION, work.participants
        return wire.encode(version, work.name, streams, partitions, inputs, outputs, commands, devices)

    def devices(self) -> list[int]:
        """The ordinals of all devices that the program knows of, its own first."""
        return [self.device, *(d for d in (self.team.devices if self.team else ()) if d != self.device)]

    # -- commands ----------------------------------------------------------------------------------------------------

    def _stream(self, name: str) -> wire.Stream:
        own = [operation.where for operation in self.work.operations if operation.where.stream == name]
        budgets = [where.sm_budget for where in own if where.sm_budget is not None]
        return wire.Stream(max((where.priority for where in own), default=0), min(budgets, default=0))

    def _range(self, index: int) -> wire.Range:
        """The memory of a value."""
        return wire.Range(wire.MEMORY, 0, self.at(index), self.work.values[index].size)

    def _position(self, axes: tuple[str, ...]) -> int:
        """The device's position in its group."""
        if self.team is None:
            return 0
        rank = self.team.devices.index(self.device)
        return self.work.group(rank, axes).index(rank)

    def _arrival(self, device: int, index: int) -> int:
        """Where a value arrives on a device."""
        assert self.team is not None
        return self.team.shared[device].arrivals + self.team.layout.offsets[index]

    def _flag(self, device: int, number: int) -> wire.Range:
        assert self.team is not None
        return wire.Range(wire.MEMORY, 0, self.team.shared[device].flags + _FLAG * number, _FLAG)

    def _signal(self, stream: int, name: str, device: int, number: int) -> wire.Command:
        return wire.Command(wire.SIGNAL, stream, name, self.devices().index(device), (), (self._flag(device, number),))

    def _await(
        self, stream: int, name: str, device: int, number: int, arrived: tuple[wire.Range, ...] = ()
    ) -> wire.Command:
        writes = (self._flag(self.device, number), *arrived)
        return wire.Command(wire.AWAIT, stream, name, self.devices().index(device), (), writes)

    def _start(self, exchange: Exchange, stream: int) -> list[wire.Command]:
        """Tells the others that the earlier run is over here, so that they may write; and waits for them."""
        assert self.team is not None
        first = self.team.layout.starts[exchange.where.stream]
        rank = self.team.devices.index(self.device)
        others = [(i, device) for i, device in enumerate(self.team.devices) if device != self.device]
        return [
            *(self._signal(stream, exchange.name, device, first + rank) for _, device in others),
            *(self._await(stream, exchange.name, device, first + i) for i, device in others),
        ]

    def _exchange(self, index: int, exchange: Exchange, stream: int) -> list[wire.Command]:
        assert self.team is not None
        (source,), (target,) = exchange.reads, exchange.writes
        group = [self.team.devices[rank] for rank in self.work.group(self._rank, exchange.axes)]
        me, n = group.index(self.device), len(group)
        first = self.team.layout.flags[index]
        whole = self.work.values[source].size
        size = whole // n if exchange.pattern is Pattern.SCATTER else whole

        def slot(sender: int, receiver: int) -> int:
            if exchange.pattern is Pattern.PERMUTE:
                return 0
            return sender if exchange.own else (receiver - sender - 1) % n

        def copy(receiver: int) -> wire.Command:
            device = group[receiver]
            begin = size * receiver if exchange.pattern is Pattern.SCATTER else 0
            read = wire.Range(wire.MEMORY, 0, self.at(source) + begin, size)
            write = wire.Range(wire.MEMORY, 0, self._arrival(device, target) + size * slot(me, receiver), size)
            return wire.Command(wire.COPY, stream, exchange.name, self.devices().index(device), (read,), (write,))

        if exchange.pattern is Pattern.PERMUTE:
            receivers = [to for sender, to in exchange.pairs if sender == me]
            senders = [sender for sender, to in exchange.pairs if to == me]
        else:
            # Everyone begins with the next device, so that no one is written to by all at once.
            receivers = [(me + i) % n for i in range(0 if exchange.own else 1, n)]
            senders = [(me - i) % n for i in range(1, n)]
        commands = []
        for receiver in receivers:
            commands.append(copy(receiver))
            if receiver != me:
                commands.append(self._signal(stream, exchange.name, group[receiver], first + me))
        for sender in senders:
            if sender != me:
                begin = self._arrival(self.device, target) + size * slot(sender, me)
                arrived = wire.Range(wire.MEMORY, 0, begin, size)
                commands.append(self._await(stream, exchange.name, group[sender], first + sender, (arrived,)))
        return commands

    @property
    def _rank(self) -> int:
        assert self.team is not None
        return self.team.devices.index(self.device)


def _wants_serial() -> bool:
    """Whether all operations are to run one after the other: equal results then tell a rounding from a race."""
    return os.environ.get("DYNAFLOW_SERIAL", "") not in ("", "0")


def view(
    client: private.Client, platform: str, device: int, shape: Sequence[int], dtype: np.dtype, address: int
) -> Any:
    """Memory as a buffer of a private client, without a copy."""
    kind = 4 if dtype.name == "bfloat16" else _DLPACK_KIND[dtype.kind]
    number = 0 if platform == "cpu" else device
    where = _DLPACK_DEVICE[platform]
    return client.view(extension.module.dlpack_capsule(address, tuple(shape), kind, 8 * dtype.itemsize, where, number))


@contextlib.contextmanager
def naming(name: str, doing: str) -> Iterator[None]:
    """Adds an operator's name to what goes wrong."""
    try:
        yield
    except Exception as error:
        raise DynaFlowError(f"{name} could not be {doing}: {error}") from error
