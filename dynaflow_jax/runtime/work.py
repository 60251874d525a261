"""What a dispatched plan consists of, before it is bound to devices and to addresses."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dynaflow_jax.runtime import program as wire
from dynaflow_jax.runtime.precedence import predecessors

ALIGNMENT = 256
"""Bytes to which XLA expects buffers to be aligned; parts of a buffer that are not are copied out instead."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A value in memory: computed by an operation, unless one of the attributes below says where it comes from.

    Attributes:
      shape: its shape.
      dtype: its type; random keys are their bits.
      input: which input of the custom call it is.
      within: the value that it is a part of, and the offset in bytes.
      constant: its elements, if they are known.
      rank: the mesh axes along which it is the device's position.
      arrives: whether an exchange places it: in memory that other devices write, or where it is computed.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    input: int | None = None
    within: tuple[int, int] | None = None
    constant: Any = None
    rank: tuple[str, ...] | None = None
    arrives: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape, dtype=int)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Where:
    """Where an operation runs.

    Attributes:
      stream: the name of its stream.
      priority: of its stream.
      sm_budget: of its stream.
    """

    stream: str
    priority: int = 0
    sm_budget: int | None = None


@dataclasses.dataclass(frozen=True)
class Partition:
    """One compiled module.

    Attributes:
      name: the operators in it, for messages.
      where: where it runs.
      reads: indices of the values it takes.
      writes: indices of the values it gives.
      after: indices of operations that must be over before it starts, beyond those whose values it reads.
      module: its StableHLO, as bytes.
      key: what equal modules have in common: one is compiled for all of them.
      placed: which of ``writes`` are written where the binding says. On CUDA they are the module's first results, and
        the others follow in the order of ``writes``.
      over: for each of ``placed`` the value among ``reads`` in whose memory it is to lie, or ``None``: on CUDA the
        memory is then a further operand.
      others: give modules for where XLA leaves something outside of the first one's capture, each with more inside.
    """

    name: str
    where: Where
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[int, ...]
    module: bytes
    key: str
    placed: tuple[int, ...] = ()
    over: tuple[int | None, ...] = ()
    others: tuple[Callable[[], bytes], ...] = ()


class Pattern(enum.Enum):
    """Which part of its value a device sends to which others of its group."""

    GATHER = enum.auto()
    """All of it, to every other."""
    SCATTER = enum.auto()
    """The q-th part of it to the q-th device."""
    PERMUTE = enum.auto()
    """All of it, to the devices that the exchange's ``pairs`` name."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """How a part that a device sends lies in memory, if not end to end: as so many rows, a pitch of bytes apart.

    Parts for (or from) the next device then begin one row further on, not one part.

    Attributes:
      count: how many.
      source: whether they lie apart where they are sent from; end to end otherwise.
      target: whether they lie apart where they arrive.
    """

    count: int = 1
    source: bool = False
    target: bool = False


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Devices of a group send each other (parts of) a value.

    Attributes:
      name: the operator, for messages.
      where: where it runs.
      reads: the index of the value to send; with a norm, of its residual and weight too, where it has them.
      writes: what arrives. Either the index of one value, with a place for each sender in the group's order, the
        device's own part copied to its place (for a permutation, a single place); or one index for each sender in the
        group's order, each value where it happens to be: the device's own where it was computed.
      after: indices of operations that must be over before it starts.
      axes: the mesh axes that span a group.
      pattern: who gets what.
      pairs: for a permutation, senders and receivers by position in the group.
      in_place: whether nothing is sent: what the others computed is read in their memory.
      sums: whether it is read right away, to be added: then what is given is the sum.
      norm: the norm of the sum's rows, if that is given too, as a second value.
      rows: of each part that is sent.
    """

    name: str
    where: Where
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[int, ...]
    axes: tuple[str, ...]
    pattern: Pattern
    pairs: tuple[tuple[int, int], ...] = ()
    in_place: bool = False
    sums: bool = False
    norm: wire.Norm | None = None
    rows: Rows = Rows()

    @property
    def is_apart(self) -> bool:
        """Whether what arrives are separate values, one for each sender."""
        return self.pattern is not Pattern.PERMUTE and len(self.writes) > 1 and not self.sums

    @property
    def copies_own(self) -> bool:
        """Whether a device copies its own part to its place among those that arrive."""
        return self.pattern is not Pattern.PERMUTE and not self.is_apart and not self.sums


Operation = Partition | Exchange


@dataclasses.dataclass(frozen=True)
class Work:
    """A plan's operations, the values between them, and how the custom call's buffers become values and back.

    Attributes:
      name: the function's name.
      values: what operations read and write.
      operations: in the plan's order.
      inputs: bytes of each input of the custom call.
      moving: whether an input is likely to be at another address in every call.
      outputs: for each output its size, and which values it is put together of, each at an offset in bytes.
      mesh: the sizes of the mesh axes, outermost first, if devices communicate; the last input is the device's
        position among all of them.
      placed: from values that are computed and given as they are to the output that each is a part of, and the offset:
        they can be written there at once.
      donors: from outputs to the inputs whose memory they take.
      lasting: the values that are computed in memory which the plan uses for nothing else: others may still read them
        when this device begins its next run, of whatever plan.
    """

    name: str
    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    moving: tuple[bool, ...]
    outputs: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    placed: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    donors: Mapping[int, int] = dataclasses.field(default_factory=dict)
    lasting: frozenset[int] = frozenset()

    @property
    def participants(self) -> int:
        """How many devices run the plan together."""
        return int(np.prod(list(self.mesh.values()), dtype=int))

    @property
    def streams(self) -> list[str]:
        """The streams that operations run on, in order of first use; at least one."""
        return list(dict.fromkeys(operation.where.stream for operation in self.operations)) or ["compute"]

    @property
    def copying(self) -> list[str]:
        """The streams with exchanges that copy a device's own part.

        Each has a companion for these copies: they do not take the link, so nothing that does should wait for them.
        """
        own = (o.where.stream for o in self.operations if isinstance(o, Exchange) and o.copies_own)
        return list(dict.fromkeys(own))

    @property
    def in_turns(self) -> bool:
        """Whether every operation waits for the one before it, so that one stream serves for all.

        Not if streams differ in their priority or multiprocessors, or if exchanges copy something beside the link.
        """
        before = predecessors(self.operations, lambda value: self.base(value)[0])
        kinds = {(operation.where.priority, operation.where.sm_budget) for operation in self.operations}
        return len(kinds) <= 1 and not self.copying and all(mask >> i - 1 & 1 for i, mask in enumerate(before) if i)

    def group_size(self, axes: tuple[str, ...]) -> int:
        """How many devices a group along some mesh axes has."""
        return int(np.prod([self.mesh[axis] for axis in axes], dtype=int))

    def group(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """The positions in the mesh of the devices in one's group, in the group's order."""
        names, shape = list(self.mesh), tuple(self.mesh.values())
        own = dict(zip(names, np.unravel_index(rank, shape), strict=True))
        members = []
        for place in np.ndindex(*(self.mesh[axis] for axis in axes)):
            at = own | dict(zip(axes, place, strict=True))
            members.append(int(np.ravel_multi_index([at[name] for name in names], shape)))
        return members

    def base(self, index: int) -> tuple[int, int]:
        """The value in whose memory a value lies, and the offset in bytes."""
        offset = 0
        while (within := self.values[index].within) is not None:
            index, offset = within[0], offset + within[1]
        return index, offset

    def bases(self, operation: Operation) -> set[int]:
        """The values in whose memory an operation's values lie."""
        return {self.base(value)[0] for value in (*operation.reads, *operation.writes)}
