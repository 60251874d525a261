"""Memory that several devices use, and when it may be used again.

A device does not see when another one has read what it sent, or has in its memory. But devices of a group run the same
operations, so it can conclude it: if every reader of a value is over before its device takes part in some later
exchange, then whoever has heard from that device in that exchange may write to the memory again. No message has to be
sent for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from dynaflow_jax.runtime.precedence import predecessors
from dynaflow_jax.runtime.work import ALIGNMENT, Exchange, Partition, Pattern, Work


class _History:
    """What is over when, and who touches what."""

    def __init__(self, work: Work):
        self.work = work
        self.operations = work.operations
        self.before = predecessors(work.operations, lambda value: work.base(value)[0])
        self.touching: dict[int, int] = {}  # for each value, a bit mask of the operations that touch it
        for i, operation in enumerate(work.operations):
            for value in work.bases(operation):
                self.touching[value] = self.touching.get(value, 0) | 1 << i
        self.exchanges = [(i, op) for i, op in enumerate(work.operations) if isinstance(op, Exchange)]
        self.kept = {work.base(value)[0] for _, parts in work.outputs for value, _ in parts}

    def readers(self, exchange: Exchange) -> int:
        """A bit mask of the operations that touch what an exchange gives."""
        mask = 0
        for value in exchange.writes:
            mask |= self.touching[value]
        return mask

    def reading(self, i: int, exchange: Exchange) -> int:
        """A bit mask of the operations during which others' memory is read, or what they have sent apart."""
        return 1 << i if exchange.sums else self.readers(exchange)

    def heard(self, touching: int, axes: tuple[str, ...]) -> list[int]:
        """The exchanges after which a device knows that operations are over on all devices of its group."""
        return list(telling(self.exchanges, self.before, touching, axes, self.work.group_size(axes)))

    def reaches_all(self, exchange: Exchange) -> bool:
        """Whether every device of a group sends to every other one."""
        return _reaches_all(exchange, self.work.group_size(exchange.axes))


def telling(
    exchanges: Iterable[tuple[int, Exchange]],
    before: Sequence[int],
    done: int,
    axes: tuple[str, ...],
    group_size: int,
) -> Iterator[int]:
    """The exchanges after which a device knows that operations are over on all devices of its group.

    Args:
      exchanges: of a plan, with their indices among its operations.
      before: by index, a bit mask of the operations that are over before one.
      done: a bit mask of the operations in question.
      axes: the mesh axes that span the group.
      group_size: how many devices it has.
    """
    for k, exchange in exchanges:
        if exchange.axes == axes and _reaches_all(exchange, group_size) and not done & ~before[k]:
            yield k


def _reaches_all(exchange: Exchange, group_size: int) -> bool:
    swaps = set(exchange.pairs) == {(0, 1), (1, 0)} and group_size == 2
    return exchange.pattern is not Pattern.PERMUTE or swaps


def releases(work: Work) -> dict[int, int]:
    """For each exchange whose value is read in place, the exchange after which its memory may be written again.

    The number of operations, if none tells in the same run.
    """
    history = _History(work)
    found = {}
    for i, exchange in history.exchanges:
        if exchange.in_place:
            later = history.heard(history.reading(i, exchange), exchange.axes)
            kept = history.kept & set(exchange.writes) and not exchange.sums
            found[i] = len(work.operations) if kept or not later else later[0]
    return found


def dead_before(work: Work) -> list[list[int]]:
    """For each partition, the values whose memory it may take: whoever touches them is over when it starts.

    On any timing and on any device, so that no operation waits for memory that another stream still reads. A value
    that is touched last on another stream is dead only once that has been waited for, for whatever reason.

    Memory goes back to the pool of the stream that its value was computed on, and any later partition there may take
    it, for values within itself too, of which the executor does not know. So it must be one of that stream that waits.
    """
    history = _History(work)
    touching = dict(history.touching)
    released = releases(work)
    for i, exchange in reversed(history.exchanges):
        if exchange.is_apart or exchange.sums:
            source = work.base(exchange.reads[0])[0]
            touching[source] |= history.reading(i, exchange) | 1 << released.get(i, i)
    partitions = [(i, op) for i, op in enumerate(work.operations) if isinstance(op, Partition)]
    computed_on = {value: op.where.stream for _, op in partitions for value in op.writes}
    dead: list[list[int]] = [[] for _ in work.operations]
    for value, mask in touching.items():
        if value in computed_on and value not in history.kept:
            stream = computed_on[value]
            later = (i for i, op in partitions if op.where.stream == stream and not mask & ~history.before[i])
            if (first := next(later, None)) is not None:
                dead[first].append(value)
    return dead


def heard_by(work: Work, rank: int) -> set[int]:
    """The devices, by position in the mesh, from which the one at ``rank`` gets something in every run."""
    found = set[int]()
    for exchange in work.operations:
        if not isinstance(exchange, Exchange):
            continue
        group = work.group(rank, exchange.axes)
        me = group.index(rank)
        if exchange.pattern is Pattern.PERMUTE:
            found.update(group[sender] for sender, receiver in exchange.pairs if receiver == me)
        else:
            found.update(group)
    return found - {rank}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arriving values and flags lie, alike on every device.

    Attributes:
      size: bytes of the memory for arriving values.
      offsets: for each exchange, by its index among the operations, where in that memory its values begin.
      flags: for each exchange the number of its first flag; there is one for each sender.
      start: the number of the first of the flags that say who has started.
      seen: the number of the first of the flags by which devices say that they have seen that.
      num_flags: of all.
    """

    size: int
    offsets: dict[int, int]
    flags: dict[int, int]
    start: int
    seen: int
    num_flags: int


@dataclasses.dataclass
class _Buffer:
    offset: int
    size: int
    axes: tuple[str, ...]
    touching: int  # a bit mask of the operations that touch what is in it


def slot_size(work: Work, exchange: Exchange) -> int:
    """Bytes that one of the values which an exchange gives takes: from one sender's place to the next, if apart."""
    return -(-work.values[exchange.writes[0]].size // ALIGNMENT) * ALIGNMENT


def layout(work: Work) -> Layout:
    """Assigns memory and flags to all exchanges of a plan."""
    history = _History(work)
    offsets: dict[int, int] = {}
    flags: dict[int, int] = {}
    buffers: list[_Buffer] = []
    size, num_flags = 0, 2 * work.participants
    for i, exchange in history.exchanges:
        flags[i] = num_flags
        num_flags += work.group_size(exchange.axes)
        if exchange.in_place and not exchange.sums:
            continue
        needed = slot_size(work, exchange) * (len(exchange.writes) - exchange.is_apart)
        # Whoever gets nothing in a permutation has zeros, in memory that nobody writes to. And if nothing reads what
        # arrives, nothing tells when a device has copied its own part there.
        is_read = bool(history.readers(exchange) & ~(1 << i))
        reusable = is_read and history.reaches_all(exchange) and not history.kept & set(exchange.writes)
        buffer = next(
            (
                b
                for b in buffers
                if reusable
                and (b.size, b.axes) == (needed, exchange.axes)
                and any(history.before[i] >> k & 1 for k in history.heard(b.touching, b.axes))
            ),
            None,
        )
        if buffer is None:
            buffer = _Buffer(size, needed, exchange.axes, 0)
            size += needed
            if reusable:
                buffers.append(buffer)
        buffer.touching = history.readers(exchange)
        offsets[i] = buffer.offset
    return Layout(size, offsets, flags, 0, work.participants, num_flags)
