"""What runs before what among the operations of a dispatched plan, on any timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def predecessors(operations: Sequence[Any], base: Callable[[int], int]) -> list[int]:
    """For each operation, a bit mask of the operations that are over before it starts.

    An operation follows the one before it on its stream, those whose values it reads, and those it names in ``after``.

    Args:
      operations: with ``where``, ``reads``, ``writes`` and ``after``, each after all that it depends on.
      base: from a value to the value in whose memory it lies.
    """
    before: list[int] = []
    last: dict[str, int] = {}  # of each stream
    writer: dict[int, int] = {}
    for i, operation in enumerate(operations):
        direct = {*operation.after, *(writer[v] for v in map(base, operation.reads) if v in writer)}
        if operation.where.stream in last:
            direct.add(last[operation.where.stream])
        mask = 0
        for j in direct:
            mask |= before[j] | 1 << j
        before.append(mask)
        last[operation.where.stream] = i
        writer.update((base(v), i) for v in operation.writes)
    return before
