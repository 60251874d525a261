"""The program that the executor runs, and its bytes; `xla_ffi/README.md` has the format."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Sequence

MEMORY, INPUT, OUTPUT = range(3)
LAUNCH, COPY, RECORD, WAIT, SIGNAL, AWAIT, SUM = range(7)
ELEMENTS = {"float32": 0, "bfloat16": 1}
"""What a sum can be of."""

SUM_BYTES = 16
"""Of which the size and the addresses of a sum are multiples, and the rows of a norm."""

MAX_SUMMANDS = 16

MAX_ROW_BYTES = 32768
"""Of a norm."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Bytes that a command reads or writes.

    Attributes:
      space: ``MEMORY`` (absolute addresses), ``INPUT`` or ``OUTPUT`` (counted from the buffer of a call).
      index: which input or output.
      offset: the first byte.
      size: how many.
    """

    space: int
    index: int
    offset: int
    size: int

    def encode(self) -> bytes:
        """The range's bytes."""
        return struct.pack("<BIQQ", self.space, self.index, self.offset, self.size)


@dataclasses.dataclass(frozen=True)
class Norm:
    """What a sum goes on to: the RMS norm of its rows, in float32.

    Attributes:
      width: elements in a row.
      eps: added to the mean square.
      residual: whether one is added to the sum before, behind the summands among the reads.
      weight: the type of the weights of the columns, the last of the reads; ``None`` if there are none.
      rounds_scale: whether the rows' scale is rounded before it is multiplied with.
      rounds_normed: whether rows are rounded before they are multiplied with the weights.
    """

    width: int
    eps: float
    residual: bool
    weight: str | None
    rounds_scale: bool = False
    rounds_normed: bool = False

    def encode(self) -> bytes:
        """The norm's bytes."""
        weight = 0 if self.weight is None else 1 + ELEMENTS[self.weight]
        return struct.pack("<If4B", self.width, self.eps, self.residual, weight, self.rounds_scale, self.rounds_normed)


@dataclasses.dataclass(frozen=True)
class Command:
    """One command on a stream; ``target`` is a partition, an event or a device, by kind (see ``xla_ffi/README.md``).

    ``rows`` are those of a copy: how many, and how many bytes their starts lie apart at the source and destination;
    ``element`` and ``norm`` are those of a sum.
    """

    kind: int
    stream: int
    operator: str
    target: int = 0
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    rows: tuple[int, int, int] = (1, 0, 0)
    element: int = 0
    norm: Norm | None = None

    def encode(self) -> bytes:
        """The command's bytes."""
        head = struct.pack("<BI", self.kind, self.stream) + _string(self.operator) + struct.pack("<I", self.target)
        tail = struct.pack("<IQQ", *self.rows) if self.kind == COPY else b""
        if self.kind == SUM:
            tail += struct.pack("<B", self.element) + (
                struct.pack("<I", 0) if self.norm is None else self.norm.encode()
            )
        return head + _list(r.encode() for r in self.reads) + _list(r.encode() for r in self.writes) + tail


@dataclasses.dataclass(frozen=True)
class Stream:
    """A stream of the first device; ``sm_budget`` 0 stands for all multiprocessors."""

    priority: int = 0
    sm_budget: int = 0

    def encode(self) -> bytes:
        """The stream's bytes: lower runs first there."""
        return struct.pack("<IiI", 0, -self.priority, self.sm_budget)


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of the custom call; a pinned one is read in place, at its address."""

    size: int
    address: int | None = None

    def encode(self) -> bytes:
        """The input's bytes."""
        return struct.pack("<BQQ", self.address is not None, self.address or 0, self.size)


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of the custom call; a pinned one is written in place, at its address; ``donor`` is an input."""

    size: int
    address: int | None = None
    donor: int | None = None

    def encode(self) -> bytes:
        """The output's bytes."""
        return struct.pack("<iQQ", -1 if self.donor is None else self.donor, self.size, self.address or 0)


def encode(
    version: int,
    name: str,
    streams: Sequence[Stream],
    partitions: Sequence[int],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    commands: Sequence[Command],
    devices: int = 1,
) -> bytes:
    """The bytes of a program for one device.

    Args:
      version: of the format.
      name: for messages.
      streams: its streams.
      partitions: ids of the captures that it launches.
      inputs: of the custom call.
      outputs: of the custom call.
      commands: in an order that respects every dependency; orders between streams may be missing.
      devices: how many devices it knows of: the one it runs on, and those it writes to.
    """
    events = 1 + max((c.target for c in commands if c.kind in (RECORD, WAIT)), default=-1)
    return b"".join(
        (
            b"DYNAFLOW",
            struct.pack("<I", version),
            _string(name),
            struct.pack("<II", devices, events),
            _list(stream.encode() for stream in streams),
            _list(struct.pack("<q", partition) for partition in partitions),
            _list(given.encode() for given in inputs),
            _list(result.encode() for result in outputs),
            _list(command.encode() for command in commands),
        )
    )


def _string(text: str) -> bytes:
    data = text.encode(errors="backslashreplace").replace(b"\0", b"\\0")  # the executor takes what it can quote
    return struct.pack("<I", len(data)) + data


def _list(entries: Iterable[bytes]) -> bytes:
    entries = list(entries)
    return struct.pack("<I", len(entries)) + b"".join(entries)
