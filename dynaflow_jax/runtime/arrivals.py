"""Memory that other devices write into, and when it may be used again.

A sender does not see when a receiver has read what arrived. But devices of a group run the same operations, so it can
conclude it: if every reader of a buffer is over before its device takes part in some later exchange, then whoever has
heard from that device in that exchange may write to the buffer again. No message has to be sent for it.
"""

from __future__ import annotations

import dataclasses

from dynaflow_jax.runtime.precedence import predecessors
from dynaflow_jax.runtime.work import ALIGNMENT, Exchange, Pattern, Work


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arriving values and flags lie, alike on every device.

    Attributes:
      size: bytes of the memory for arriving values.
      offsets: for each arriving value, its offset in that memory.
      flags: for each exchange, by its index among the operations, the number of its first flag, one per sender.
      starts: for each stream with exchanges, the number of the first flag that says who has started.
      num_flags: of all.
    """

    size: int
    offsets: dict[int, int]
    flags: dict[int, int]
    starts: dict[str, int]
    num_flags: int


@dataclasses.dataclass
class _Buffer:
    offset: int
    size: int
    axes: tuple[str, ...] = ()
    readers: int = 0  # a bit mask of the operations that read, or write, what is in it


def layout(work: Work) -> Layout:
    """Assigns memory and flags to all exchanges of a plan."""
    operations = work.operations
    before = predecessors(operations, lambda value: work.base(value)[0])
    uses: dict[int, int] = {}  # of each arriving value, by its readers and writer
    for i, operation in enumerate(operations):
        for value in (work.base(v)[0] for v in (*operation.reads, *operation.writes)):
            uses[value] = uses.get(value, 0) | 1 << i
    kept = {work.base(value)[0] for _, parts in work.outputs for value, _ in parts}
    exchanges = [i for i, operation in enumerate(operations) if isinstance(operation, Exchange)]

    def heard(i: int, buffer: _Buffer) -> bool:
        """Whether exchange ``i`` can know that all receivers are done with a buffer."""
        for k in exchanges:
            exchange = operations[k]
            assert isinstance(exchange, Exchange)
            if exchange.axes != buffer.axes or exchange.pattern is Pattern.PERMUTE or not before[i] >> k & 1:
                continue
            if not buffer.readers & ~before[k]:
                return True
        return False

    offsets: dict[int, int] = {}
    buffers: list[_Buffer] = []
    size = 0
    flags: dict[int, int] = {}
    starts: dict[str, int] = {}
    num_flags = 0
    for i in exchanges:
        exchange = operations[i]
        assert isinstance(exchange, Exchange)
        if exchange.where.stream not in starts:
            starts[exchange.where.stream] = num_flags
            num_flags += work.participants
        flags[i] = num_flags
        num_flags += work.group_size(exchange.axes)
        (value,) = exchange.writes
        bytes_ = -(-work.values[value].size // ALIGNMENT) * ALIGNMENT
        # Whoever gets nothing in a permutation has zeros, in memory that nobody writes to.
        reusable = exchange.pattern is not Pattern.PERMUTE and value not in kept
        found = next(
            (b for b in buffers if reusable and b.size == bytes_ and b.axes == exchange.axes and heard(i, b)), None
        )
        if found is None:
            found = _Buffer(size, bytes_, exchange.axes)
            size += bytes_
            if reusable:
                buffers.append(found)
        found.readers = uses[value]
        offsets[value] = found.offset
    return Layout(size, offsets, flags, starts, num_flags)
