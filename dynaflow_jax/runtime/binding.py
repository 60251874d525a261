"""One device's program under construction: the addresses of all values, and the commands."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import extension, private
from dynaflow_jax.runtime import program as wire
from dynaflow_jax.runtime.arrivals import Layout, dead_before, heard_by, releases, slot_size
from dynaflow_jax.runtime.work import Exchange, Partition, Pattern, Value, Work

_DLPACK_KIND = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}
_DLPACK_DEVICE = {"cpu": 1, "cuda": 2}
_FLAG = 4  # bytes


@dataclasses.dataclass(frozen=True)
class Shared:
    """A device's memory that others write into.

    Attributes:
      arrivals: address of the memory for arriving values.
      flags: address of the flags, all zero between runs.
    """

    arrivals: int
    flags: int


@dataclasses.dataclass(frozen=True)
class Team:
    """The devices that run a plan together, as seen from one of them.

    Attributes:
      rank: its position in the mesh.
      devices: the ordinals of all, by position in the mesh; ``None`` of one of another process.
      processes: likewise, which of the other processes each belongs to; -1 for this one.
      shared: likewise, their memory, at the addresses where this device reaches it.
      layout: of the shared memory, alike on every device.
      keep: what owns the memory.
    """

    rank: int
    devices: tuple[int | None, ...]
    processes: tuple[int, ...]
    shared: tuple[Shared, ...]
    layout: Layout
    keep: Any


class Binding(abc.ABC):
    """A program of one device.

    Args:
      work: the plan's.
      device: the device's ordinal.
      inputs: addresses of the custom call's inputs; ``None`` for a rehearsal on memory of no meaning.
      outputs: addresses of its outputs; ``None`` for one whose address changes, which is copied to where it is.
      moving: whether each input is copied into memory of the program's own, or read at its address.
      team: the devices that run the plan together, if there are several.
      serial: whether all operations run one after the other, on one stream.

    Attributes:
      keep: what must live as long as the program.
    """

    platform: str

    def __init__(
        self,
        work: Work,
        device: int,
        inputs: Sequence[int] | None,
        outputs: Sequence[int | None],
        moving: Sequence[bool],
        team: Team | None,
        serial: bool,
    ):
        self.work = work
        self.device = device
        self.team = team
        self._serial = serial
        self.keep: list[Any] = []
        self.moving = list(moving)
        if inputs is None:  # a rehearsal: nothing runs, so that one piece of memory can stand for all inputs
            self.moving = [False] * len(self.moving)
            anywhere = self.allocate(max([*work.inputs, *(size for size, _ in work.outputs)], default=0))
            inputs, outputs = [anywhere] * len(work.inputs), [anywhere] * len(work.outputs)
        self._bases = list(inputs)
        written = {output for output, _ in work.placed.values()}
        self._outputs = [address if i in written else None for i, address in enumerate(outputs)]
        for i, donor in work.donors.items():
            self._outputs[i] = self._bases[donor] if i in written and not self.moving[donor] else None
        self._address: dict[int, int] = {}
        used = set[int]().union(*map(work.bases, work.operations))
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
        self._summands: dict[int, list[wire.Range]] = {}  # by exchange, in the memory of all devices of the group
        self._released = releases(work)
        self._dead = dead_before(work)

    def step(self, index: int, others: Mapping[int, Binding]) -> None:
        """Gives addresses to what an operation writes; those before it have theirs, on all devices.

        Args:
          index: of the operation.
          others: the bindings of this process's devices that run the plan together, by position in the mesh.
        """
        operation = self.work.operations[index]
        for value in self._dead[index]:
            self.drop(value)
        if isinstance(operation, Partition):
            self.make(operation)
        else:
            self._place_arrivals(index, operation, others)

    @abc.abstractmethod
    def make(self, partition: Partition) -> None:
        """Prepares a partition, and assigns addresses to what it writes."""

    @abc.abstractmethod
    def drop(self, value: int) -> None:
        """Gives back the memory of a value that nobody touches any more."""

    @abc.abstractmethod
    def allocate(self, size: int) -> int:
        """Memory that lives as long as the program."""

    @abc.abstractmethod
    def place(self, value: Any) -> int:
        """Memory with a constant in it."""

    @abc.abstractmethod
    def add(self, plan: int, keep: Sequence[Any], timed: bool) -> None:
        """Hands the program to the executor when all operations are prepared.

        Args:
          plan: the executor's number of the plan.
          keep: what must live as long as the program: memory of all devices, which read each other's.
          timed: whether the executor is to take the time of every command.
        """

    def owners(self) -> list[Any]:
        """What owns the program's memory, and must live as long as any device's program."""
        return self.keep

    def forget(self) -> None:  # noqa: B027 (most have nothing to let go of)
        """Lets go of what only ``add`` needs; called whether or not it comes to that."""

    def at(self, index: int) -> int:
        """The address of a value."""
        base, offset = self.work.base(index)
        return self._address[base] + offset

    def places(self, partition: Partition) -> dict[int, int]:
        """The addresses that a partition's placed values are to have: in outputs, or in memory of the program's own."""
        found = {}
        for value, over in zip(partition.placed, partition.over, strict=True):
            output, offset = self.work.placed.get(value, (None, 0))
            address = None if output is None else self._outputs[output]
            if over is not None:  # of an input that its output takes the memory of, or that was copied from there
                found[value] = self.at(over)
            elif address is not None:
                found[value] = address + offset
            else:
                found[value] = self.allocate(self.work.values[value].size)
        return found

    def assign(self, index: int, address: int) -> None:
        """Says where a computed value lies."""
        self._address[index] = address

    def view(self, client: private.Client, value: Value, address: int) -> Any:
        """A value in memory as a buffer of a private client."""
        return view(client, self.platform, self.device, value.shape, value.dtype, address)

    def encode(self, partitions: Sequence[int], timed: bool) -> bytes:
        """The program's bytes; the executor adds the events that its reads and writes call for.

        A plan whose operations take turns is a program of one stream, whatever streams it names: a CUDA graph that is a
        straight line has less between its nodes. Times are shown by stream, so one that is timed keeps them.

        Args:
          partitions: for each partition, the number of its capture, or its index.
          timed: whether the executor is to take the time of every command.
        """
        work = self.work
        names = [*work.streams, *work.copying]
        one_stream = self._serial or (work.in_turns and not timed)
        if one_stream:
            index_of = companion_of = dict.fromkeys(names, 0)
        else:
            index_of = {name: i for i, name in enumerate(work.streams)}
            companion_of = {name: len(index_of) + i for i, name in enumerate(work.copying)}
        streams = [self._stream(name) for name in names[: 1 if one_stream else None]]
        commands = []
        for i in self._entered:
            if self.moving[i]:
                size = work.inputs[i]
                source, target = wire.Range(wire.INPUT, i, 0, size), wire.Range(wire.MEMORY, 0, self._bases[i], size)
                commands.append(wire.Command(wire.COPY, 0, f"input {i}", 0, (source,), (target,)))
        waited = {i: event for event, i in enumerate(sorted({i for op in work.operations for i in op.after}))}
        all_started, started = len(waited), set[int]()
        copied = len(waited) + 1  # the event of the next copy of an own part
        written_on: dict[int, int] = {}
        first = next((op for op in work.operations if isinstance(op, Exchange)), None)
        if first is not None:
            stream = index_of[first.where.stream]
            commands += self._start(stream)
            commands.append(wire.Command(wire.RECORD, stream, first.name, all_started))
            started.add(stream)
        count = 0
        for i, operation in enumerate(work.operations):
            stream = index_of[operation.where.stream]
            for other in operation.after:
                if index_of[work.operations[other].where.stream] != stream:
                    commands.append(wire.Command(wire.WAIT, stream, operation.name, waited[other]))
            if isinstance(operation, Exchange):
                if stream not in started:
                    started.add(stream)
                    commands.append(wire.Command(wire.WAIT, stream, operation.name, all_started))
                own = companion_of[operation.where.stream] if operation.copies_own else stream
                commands += self._exchange(i, operation, stream, own, copied)
                copied += 1
            else:
                reads, writes = map(self._range, operation.reads), map(self._range, operation.writes)
                commands.append(wire.Command(wire.LAUNCH, stream, operation.name, count, tuple(reads), tuple(writes)))
                count += 1
            written_on.update((work.base(value)[0], stream) for value in operation.writes)
            if i in waited:
                commands.append(wire.Command(wire.RECORD, stream, operation.name, waited[i]))
        if first is not None:
            commands += self._end(index_of[first.where.stream])
        for i, (_, parts) in enumerate(work.outputs):
            for value, offset in parts:
                if work.placed.get(value) == (i, offset) and self._outputs[i] is not None:
                    continue  # it was computed there
                target = wire.Range(wire.OUTPUT, i, offset, work.values[value].size)
                stream = written_on.get(work.base(value)[0], 0)
                commands.append(wire.Command(wire.COPY, stream, f"output {i}", 0, (self._range(value),), (target,)))
        pinned = {i for i in self._entered if not self.moving[i]}
        pinned |= {donor for i, donor in work.donors.items() if self._outputs[i] is not None}  # read or not
        inputs = [wire.Input(size, self._bases[i] if i in pinned else None) for i, size in enumerate(work.inputs)]
        outputs = [wire.Output(size, self._outputs[i], work.donors.get(i)) for i, (size, _) in enumerate(work.outputs)]
        version, devices = extension.module.PROGRAM_VERSION, work.participants
        return wire.encode(version, work.name, streams, partitions, inputs, outputs, commands, devices)

    def devices(self) -> list[int]:
        """The ordinals of all devices that the program knows of, its own first; -1 for one of another process."""
        if self.team is None:
            return [self.device]
        found = [-1 if device is None else device for device in self.team.devices]
        return [found.pop(self.team.rank), *found]

    def processes(self) -> list[int]:
        """Which of the other processes each of these devices belongs to, -1 for this one."""
        if self.team is None:
            return [-1]
        found = list(self.team.processes)
        return [found.pop(self.team.rank), *found]

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
        return self.work.group(self.team.rank, axes).index(self.team.rank)

    def _target(self, rank: int) -> int:
        """Which of the program's devices one is, by its position in the mesh: its own is the first."""
        assert self.team is not None
        return 0 if rank == self.team.rank else rank + (rank < self.team.rank)

    def _group(self, exchange: Exchange) -> tuple[list[int], int]:
        """The positions in the mesh of the devices that an exchange is between, and one's own place among them."""
        assert self.team is not None
        group = self.work.group(self.team.rank, exchange.axes)
        return group, group.index(self.team.rank)

    def _arrival(self, rank: int, index: int, sender: int, receiver: int) -> int:
        """Where in the memory of the device at ``rank`` an exchange puts what one of the group sends another."""
        assert self.team is not None
        exchange = self.work.operations[index]
        assert isinstance(exchange, Exchange)
        begin = self.team.shared[rank].arrivals + self.team.layout.offsets[index]
        if exchange.pattern is Pattern.PERMUTE:
            return begin
        if exchange.is_apart:
            return begin + slot_size(self.work, exchange) * (sender - (sender > receiver))
        size = self._sent(exchange)[1]
        return begin + (size // exchange.rows.count if exchange.rows.target else size) * sender

    def _sent(self, exchange: Exchange) -> tuple[int, int]:
        """How far apart what a device sends to one and to the next begins, and how many bytes it is."""
        whole = self.work.values[exchange.reads[0]].size
        if exchange.pattern is not Pattern.SCATTER:
            return 0, whole
        part = whole // self.work.group_size(exchange.axes)
        return part // exchange.rows.count if exchange.rows.source else part, part

    def _place_arrivals(self, index: int, exchange: Exchange, others: Mapping[int, Binding]) -> None:
        """Gives addresses to what an exchange gives."""
        if self.team is None:  # a rehearsal
            for value in exchange.writes:
                self.assign(value, self.allocate(self.work.values[value].size))
            return
        group, me = self._group(exchange)
        offset = self._sent(exchange)[0] * me
        if exchange.sums:
            addresses = [others[rank].at(exchange.reads[0]) + offset for rank in group]
            size = self.work.values[exchange.writes[0]].size
            self._summands[index] = [wire.Range(wire.MEMORY, 0, address, size) for address in addresses]
        if not exchange.is_apart:
            begin = self._arrival(group[me], index, 0, me)
            for k, value in enumerate(exchange.writes):
                self.assign(value, begin + k * slot_size(self.work, exchange))
            return
        for sender, value in enumerate(exchange.writes):
            if sender == me or exchange.in_place:
                self.assign(value, others[group[sender]].at(exchange.reads[0]) + offset)
            else:
                self.assign(value, self._arrival(group[me], index, sender, me))

    def _flag(self, rank: int, number: int) -> wire.Range:
        assert self.team is not None
        return wire.Range(wire.MEMORY, 0, self.team.shared[rank].flags + _FLAG * number, _FLAG)

    def _signal(self, stream: int, name: str, rank: int, number: int) -> wire.Command:
        return wire.Command(wire.SIGNAL, stream, name, self._target(rank), (), (self._flag(rank, number),))

    def _await(
        self, stream: int, name: str, rank: int, number: int, arrived: tuple[wire.Range, ...] = ()
    ) -> wire.Command:
        assert self.team is not None
        writes = (self._flag(self.team.rank, number), *arrived)
        return wire.Command(wire.AWAIT, stream, name, self._target(rank), (), writes)

    def _start(self, stream: int) -> list[wire.Command]:
        """Tells the others that the earlier run is over here, so that they may write; and waits for them.

        Values that the others read in place until the end of a run may be written again from here on.

        A device must not start again before the others have seen that it has started, or they would see it once only.
        From whom it gets something, it knows; the rest tell it, for ``_end`` to wait for.
        """
        assert self.team is not None
        first, me = self.team.layout.start, self.team.rank
        others = [rank for rank in range(self.work.participants) if rank != me]
        signals = [self._signal(stream, "start", rank, first + me) for rank in others]
        released = self._released_by(len(self.work.operations))
        awaits = [
            self._await(stream, "start", rank, first + rank, released if rank == others[-1] else ()) for rank in others
        ]
        seen = [
            self._signal(stream, "start", rank, self.team.layout.seen + me)
            for rank in others
            if me not in heard_by(self.work, rank)
        ]
        return [*signals, *awaits, *seen]

    def _end(self, stream: int) -> list[wire.Command]:
        """Waits until all others have seen that this device has started."""
        assert self.team is not None
        known = heard_by(self.work, self.team.rank) | {self.team.rank}
        others = [rank for rank in range(self.work.participants) if rank not in known]
        return [self._await(stream, "end", rank, self.team.layout.seen + rank) for rank in others]

    def _released_by(self, index: int) -> tuple[wire.Range, ...]:
        """The memory that may be written again after an exchange, having been read in place by others until then."""
        sources = [self.work.operations[i].reads[0] for i, k in self._released.items() if k == index]
        return tuple(map(self._range, sources))

    def _exchange(self, index: int, exchange: Exchange, stream: int, beside: int, copied: int) -> list[wire.Command]:
        """The commands of an exchange.

        Args:
          index: of the operation.
          exchange: the operation.
          stream: the exchange's.
          beside: the stream that the device's own part is copied on.
          copied: the number of the event that this is over.
        """
        assert self.team is not None
        group, me = self._group(exchange)
        n, name, first = len(group), exchange.name, self.team.layout.flags[index]
        stride, size = self._sent(exchange)

        rows = exchange.rows
        width = size // rows.count
        source_pitch, target_pitch = (width * n if apart else width for apart in (rows.source, rows.target))
        sent, arriving = (pitch * (rows.count - 1) + width for pitch in (source_pitch, target_pitch))

        def copy(receiver: int) -> wire.Command:
            rank = group[receiver]
            read = wire.Range(wire.MEMORY, 0, self.at(exchange.reads[0]) + stride * receiver, sent)
            write = wire.Range(wire.MEMORY, 0, self._arrival(rank, index, me, receiver), arriving)
            shape = (rows.count, source_pitch, target_pitch)
            where = beside if receiver == me else stream
            return wire.Command(wire.COPY, where, name, self._target(rank), (read,), (write,), shape)

        if exchange.pattern is Pattern.PERMUTE:
            receivers = [to for sender, to in exchange.pairs if sender == me]
            senders = [sender for sender, to in exchange.pairs if to == me]
        else:
            # Everyone begins with the next device, so that no one is written to by all at once.
            receivers = [(me + i) % n for i in range(1, n)]
            senders = [(me - i) % n for i in range(1, n)]
        commands = []
        if exchange.copies_own or me in receivers:
            commands += [copy(me), wire.Command(wire.RECORD, beside, name, copied)]
        receivers = [receiver for receiver in receivers if receiver != me]
        for receiver in receivers:
            if not exchange.in_place:
                commands.append(copy(receiver))
            # One's own part is there long before. To wait for it here, and not only where it is read, lets the last
            # signal and what is awaited next to it be one command.
            if receiver == receivers[-1] and beside != stream:
                commands.append(wire.Command(wire.WAIT, stream, name, copied))
            commands.append(self._signal(stream, name, group[receiver], first + me))
        senders = [sender for sender in senders if sender != me]
        for sender in senders:
            if exchange.sums:
                arrived = self._summands[index][sender]
            elif exchange.in_place:
                arrived = self._range(exchange.writes[sender])
            else:
                arrived = wire.Range(wire.MEMORY, 0, self._arrival(group[me], index, sender, me), arriving)
            released = self._released_by(index) if sender == senders[-1] else ()
            commands.append(self._await(stream, name, group[sender], first + sender, (arrived, *released)))
        if exchange.sums:
            element = wire.ELEMENTS[self.work.values[exchange.writes[0]].dtype.name]
            reads = (*self._summands[index], *map(self._range, exchange.reads[1:]))
            writes, norm = tuple(map(self._range, exchange.writes)), exchange.norm
            commands.append(wire.Command(wire.SUM, stream, name, 0, reads, writes, element=element, norm=norm))
        return commands


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
