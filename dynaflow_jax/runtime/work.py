"""What a dispatched plan consists of, before it is bound to a device and to addresses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

ALIGNMENT = 256
"""Bytes to which XLA expects buffers to be aligned; parts of a buffer that are not are copied out instead."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A value in memory.

    Attributes:
      shape: its shape.
      dtype: its type; random keys are their bits.
      source: for (a part of) an input, which input and the offset in bytes; ``None`` for what a partition computes.
      constant: its value, if it is known.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: tuple[int, int] | None = None
    constant: Any = None

    @property
    def size(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape, dtype=int)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Partition:
    """One compiled module.

    Attributes:
      name: the operators in it, for messages.
      stream: where it runs.
      reads: indices of the values it takes.
      writes: indices of the values it gives.
      module: its StableHLO, as bytes.
      capture: on CUDA, the number under which its module captures its kernels.
      after: indices of partitions that must be over before it starts, beyond those whose values it reads.
      priority: of its stream.
      sm_budget: of its stream.
    """

    name: str
    stream: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    module: bytes
    capture: int | None
    after: tuple[int, ...] = ()
    priority: int = 0
    sm_budget: int | None = None


@dataclasses.dataclass(frozen=True)
class Work:
    """A plan's partitions, the values between them, and how the custom call's buffers become values and back.

    Attributes:
      name: the function's name.
      values: what partitions read and write.
      partitions: in the plan's order.
      inputs: bytes of each input of the custom call.
      moving: whether an input is expected at another address in every call.
      outputs: for each output its size, and which values it is put together of, each at an offset in bytes.
    """

    name: str
    values: tuple[Value, ...]
    partitions: tuple[Partition, ...]
    inputs: tuple[int, ...]
    moving: tuple[bool, ...]
    outputs: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    def last_readers(self) -> dict[int, int]:
        """For each value, the last partition that touches it; outputs are read after all of them."""
        last: dict[int, int] = {}
        for i, partition in enumerate(self.partitions):
            last.update(dict.fromkeys((*partition.reads, *partition.writes), i))
        for _, parts in self.outputs:
            last.update((value, len(self.partitions)) for value, _ in parts)
        return last
