"""Putting a dispatched plan's work together: values, operations, and what lies where."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.lowering import norms
from dynaflow_jax.lowering.bits import byte_for, from_bits, physical, to_bits
from dynaflow_jax.lowering.capture import captured, enclosed, tied
from dynaflow_jax.lowering.modules import Module, fingerprint
from dynaflow_jax.lowering.tasks import Entry, Expr, Task, Term, coalesced, reading_sums, without_idle
from dynaflow_jax.runtime import program as wire
from dynaflow_jax.runtime.arrivals import telling
from dynaflow_jax.runtime.precedence import predecessors
from dynaflow_jax.runtime.work import ALIGNMENT, Exchange, Operation, Partition, Value, Where, Work

IN_PLACE_BYTES = 8 << 20
"""Up to this size, what others computed is read in their memory if nothing runs beside its exchange.

A copy costs a start and leaves the compute units to others; where there are none to profit, reading at once is faster.
Beyond this size the copy engines' bandwidth decides.
"""


IN_PLACE_OUTPUT_BYTES = 1 << 20
"""From this size on, what a partition computes of an output is written into the output's memory.

That binds the program to the output's address; copying less than this takes about as long as starting the copy does.
"""


class Builder:
    """Collects values and operations.

    Args:
      name: the function's name.
      platform: ``"cpu"`` or ``"cuda"``.
      avals: types of the inputs.
      mesh: the sizes of the mesh axes around the function, if it runs on several devices.
      in_place: whether devices may read what others have computed where it is: not in another process.

    Attributes:
      inputs: the values of the inputs.
      entries: the operations so far.
      scope: of the tasks to come.
    """

    def __init__(self, name: str, platform: str, avals: Sequence[Any], mesh: Mapping[str, int], in_place: bool = True):
        self.name = name
        self.in_place = in_place
        self.platform = platform
        self.mesh = mesh
        self.scope: tuple[int, ...] = ()
        self.entries: list[Entry] = []
        self._avals: list[Any] = []  # of values, as programs see them
        self._values: list[Value] = []
        self._ranks: dict[tuple[str, ...], int] = {}
        self._elsewhere: set[int] = set()  # values in the memory of other devices
        self._lasting: set[int] = set()  # values that others read until this device's next run
        self._sums: set[tuple[int, ...]] = set()  # what exchanges give to be added, and nothing else
        self._summed: set[tuple[int, ...]] = set()  # of these, the ones whose exchange gives the sum, as the first
        self._outputs: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self._output_avals: list[Any] = []
        self.inputs = [self.value(aval, input=i) for i, aval in enumerate(avals)]

    # -- values ------------------------------------------------------------------------------------------------------

    def value(self, aval: Any, **attributes: Any) -> int:
        """A new value of a type, with attributes of ``Value``."""
        shape, dtype = physical(aval)
        self._avals.append(aval)
        self._values.append(Value(shape, dtype, **attributes))
        return len(self._values) - 1

    def constant(self, value: Any) -> int:
        """A value that is known."""
        value = np.asarray(value)
        aval, byte = jax.ShapeDtypeStruct(value.shape, value.dtype), byte_for(value.dtype)
        if byte is not None:
            value = value.view(byte) if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(byte)
        return self.value(aval, constant=value)

    def rank(self, axes: Sequence[str]) -> int:
        """The device's position along mesh axes, as a 32-bit integer."""
        axes = tuple(axes)
        if axes not in self._ranks:
            self._ranks[axes] = self.value(jax.ShapeDtypeStruct((), np.int32), rank=axes)
        return self._ranks[axes]

    def arrival(self, shape: tuple[int, ...], dtype: Any) -> int:
        """A value that other devices write."""
        return self.value(jax.ShapeDtypeStruct(shape, dtype), arrives=True)

    def aval(self, value: int) -> Any:
        """The type of a value, as programs see it."""
        return self._avals[value]

    def group_size(self, axes: Sequence[str]) -> int:
        """How many devices a group along some mesh axes has."""
        return math.prod(self.mesh[axis] for axis in axes)

    def stays(self, value: int) -> bool:
        """Whether a value is in memory however tasks are joined: an input, what others send, or a part of these."""
        base = self._values[self._base(value)]
        return base.input is not None or base.arrives

    def part(self, value: int, aval: Any, offset: int) -> Term:
        """A part of a value, in place; of a value in memory whose part begins where XLA cannot read, an expression.

        Args:
          value: the whole.
          aval: the type of the part.
          offset: where it begins, in bytes; its elements lie end to end.
        """
        if offset % ALIGNMENT == 0:
            return self.value(aval, within=(value, offset))
        shape, dtype = physical(aval)
        first = offset // dtype.itemsize

        def cut(whole: Any) -> Any:
            bits = to_bits(whole).reshape(-1)[first : first + int(np.prod(shape, dtype=int))]
            return from_bits(bits.reshape(shape), aval)

        return Expr((value,), cut)

    def in_memory(self, term: Term, aval: Any, name: str, where: Where) -> int:
        """A term as a value in memory."""
        return term if isinstance(term, int) else self.task(name, lambda x: [x], [term], [aval], where)[0]

    def beside_producer(self, name: str, compute: Callable[..., Any], term: Term, aval: Any, where: Where) -> int:
        """What ``compute`` makes of a term, computed right behind the term itself, where that is computed.

        Something to send, say, is put in order by the kernels that made it, and the stream that sends it only sends.

        Args:
          name: the operator, for messages.
          compute: from the term's value to another of type ``aval``.
          term: what to start from.
          aval: the type of the result.
          where: where to compute it if no task computes the term.
        """
        reads = {self._base(value) for value in ((term,) if isinstance(term, int) else term.reads)}
        made = [i for i, entry in enumerate(self.entries) if reads & set(entry.operation.writes)]
        last = made[-1] if made else len(self.entries) - 1
        producer = self.entries[last].operation if made else None
        scope, rest = self.scope, self.entries[last + 1 :]
        del self.entries[last + 1 :]
        if isinstance(producer, Task):
            where, self.scope = producer.where, producer.scope
        try:
            return self.task(name, lambda x: [compute(x)], [term], [aval], where)[0]
        finally:
            self.scope = scope
            self.entries += rest

    def combined(self, parts: tuple[int, ...], combine: Callable[..., Any]) -> Expr:
        """What ``combine`` makes of what an exchange gives, one part after the other.

        It is kept apart from what reads it if parts lie in the memory of other devices: fused into several kernels it
        would be computed, and the parts fetched, by each of them.
        """
        if combine is jnp.add:
            self._sums.add(parts)

        def compute(*values: Any) -> Any:
            if parts in self._summed:
                return values[0]
            value = functools.reduce(combine, values)
            return jax.lax.optimization_barrier(value) if self._elsewhere.intersection(parts) else value

        return Expr(parts, compute)

    # -- operations --------------------------------------------------------------------------------------------------

    def task(
        self,
        name: str,
        compute: Callable[..., Sequence[Any]],
        terms: Sequence[Term],
        avals: Sequence[Any],
        where: Where,
        after: Sequence[Entry] = (),
        products: int = 0,
    ) -> list[int]:
        """Computes ``compute`` from terms; returns the new values, of types ``avals``."""
        operands = [(term,) if isinstance(term, int) else term.reads for term in terms]
        reads = tuple(dict.fromkeys(itertools.chain.from_iterable(operands)))

        def from_memory(*values: Any) -> Sequence[Any]:
            found = dict(zip(reads, values, strict=True))
            return compute(
                *(
                    found[term] if isinstance(term, int) else term.compute(*(found[i] for i in term.reads))
                    for term in terms
                )
            )

        writes = tuple(self.value(aval) for aval in avals)
        task = Task(name, where, reads, writes, (), from_memory, self.scope, products)
        self.entries.append(Entry(task, tuple(after)))
        return list(writes)

    def exchange(self, exchange: Exchange, after: Sequence[Entry] = ()) -> None:
        """Adds an exchange between devices."""
        self.entries.append(Entry(exchange, tuple(after)))

    def output(self, parts: Sequence[int], aval: Any) -> None:
        """The next output, of a type: values end to end."""
        self._output_avals.append(aval)
        spans = list(itertools.accumulate((self._values[i].size for i in parts), initial=0))
        self._outputs.append((spans[-1], tuple(zip(parts, spans[:-1], strict=True))))

    # -- the result --------------------------------------------------------------------------------------------------

    def work(self, moving: Sequence[bool], donated: Sequence[bool] | None = None) -> Work:
        """What was put together, compiled to StableHLO.

        Args:
          moving: whether each input is likely to be at another address in every call.
          donated: whether each input's memory is free to be an output's.
        """
        donors = self._donors(donated or [False] * len(self.inputs))
        sizes = [self._values[i].size for i in self.inputs]
        moving = list(moving)
        index_of = {entry: i for i, entry in enumerate(self.entries)}
        listed = [
            dataclasses.replace(entry.operation, after=tuple(index_of[other] for other in entry.after))
            for entry in self.entries
        ]
        communicates = any(isinstance(operation, Exchange) for operation in listed) or self._ranks
        if communicates:
            sizes.append(4)
            moving.append(True)
        kept = {self._base(value) for _, parts in self._outputs for value, _ in parts}
        joined = coalesced(listed, self._base, kept)
        if self.in_place:
            joined = self._normalizing(self._summing(self._read_in_place(joined, kept)), kept)
        placed = self._placed(joined, donors)
        over = {value: self.inputs[donors[i]] for value, (i, _) in placed.items() if i in donors}
        operations = tuple(self._compiled(operation, placed.keys() | self._lasting, over) for operation in joined)
        self._check_elements(operations, kept)
        return Work(
            self.name,
            tuple(self._values),
            operations,
            tuple(sizes),
            tuple(moving),
            tuple(self._outputs),
            dict(self.mesh) if communicates else {},
            placed,
            donors,
            frozenset(self._lasting),
        )

    def _check_elements(self, operations: Sequence[Operation], kept: set[int]) -> None:
        """Raises if a value has no elements, and so no address."""
        users = [(operation.name, (*operation.reads, *operation.writes)) for operation in operations]
        for name, values in (*users, ("the function", tuple(kept))):
            for value in values:
                if not self._values[self._base(value)].size:
                    aval = self._avals[value]
                    of = f"{aval.dtype}{list(aval.shape)}"
                    raise DynaFlowError(f"{name} reads or gives a value without elements, {of}, which has no address.")

    def _donors(self, donated: Sequence[bool]) -> dict[int, int]:
        """From outputs to the donated inputs whose memory they take: each the first of its type that is left."""
        given = {self._base(value) for _, parts in self._outputs for value, _ in parts}  # copied when all else is done
        left = [i for i, is_donated in enumerate(donated) if is_donated and self.inputs[i] not in given]
        found: dict[int, int] = {}
        for output, aval in enumerate(self._output_avals):
            same = (i for i in left if (self._avals[i].shape, self._avals[i].dtype) == (aval.shape, aval.dtype))
            donor = next(same, None)
            if donor is not None and physical(aval) == (tuple(aval.shape), aval.dtype):
                left.remove(donor)
                found[output] = donor
        return found

    def _base(self, index: int) -> int:
        while (within := self._values[index].within) is not None:
            index = within[0]
        return index

    def _read_in_place(self, operations: Sequence[Task | Exchange], kept: set[int]) -> list[Task | Exchange]:
        """The operations, with small exchanges that nothing runs beside as mere permissions to read.

        A later exchange tells when all have read. Without one, only the start of this plan's next run does: a device
        that is through may begin a run of any plan, whose partitions have memory of the pool among their temporaries.
        So what others read to the end lies in memory of its own.
        """
        before = predecessors(operations, self._base)
        exchanges = [(i, operation) for i, operation in enumerate(operations) if isinstance(operation, Exchange)]
        found: list[Task | Exchange] = []
        for i, operation in enumerate(operations):
            if isinstance(operation, Exchange) and operation.is_apart:
                beside = (
                    isinstance(other, Task) and not before[i] >> j & 1 and not before[j] >> i & 1
                    for j, other in enumerate(operations)
                )
                size = sum(self._values[value].size for value in operation.writes[1:])
                source = self._base(operation.reads[0])
                made_by = tuple(j for j, o in enumerate(operations) if isinstance(o, Task) and source in o.writes)
                reading = sum(1 << j for j, o in enumerate(operations) if set(o.reads) & set(operation.writes)) | 1 << i
                group_size = self.group_size(operation.axes)
                told = next(telling(exchanges, before, reading, operation.axes, group_size), None) is not None
                # Not an input: that is XLA's, which takes it back when this device is done.
                can_stay = made_by and (told or self._can_place) and not kept.intersection(operation.writes)
                if size <= IN_PLACE_BYTES and can_stay and not any(beside):
                    operation = dataclasses.replace(operation, in_place=True, after=(*operation.after, *made_by))
                    self._elsewhere.update(operation.writes)
                    if not told:
                        self._lasting.add(source)
            found.append(operation)
        return found

    def _summing(self, operations: Sequence[Task | Exchange]) -> list[Task | Exchange]:
        """The operations, with what is read in place only to be added as sums that exchanges give.

        The executor waits for the others, reads and adds in one kernel, where XLA's addition would be one of its own.
        """
        dropped: dict[int, int] = {}  # from parts to the sum that takes their place
        found: list[Task | Exchange] = []
        for operation in operations:
            if isinstance(operation, Exchange) and operation.in_place and self._can_sum(operation):
                self._summed.add(operation.writes)
                total, *others = operation.writes
                dropped.update(dict.fromkeys(others, total))
                operation = dataclasses.replace(operation, writes=(total,), sums=True)
            elif isinstance(operation, Task) and dropped.keys() & set(operation.reads):
                operation = reading_sums(operation, dropped)
            found.append(operation)
        return found

    def _normalizing(self, operations: list[Task | Exchange], kept: set[int]) -> list[Task | Exchange]:
        """The operations, with sums that give the norm of their rows too, where that is what they are read for."""
        made_at = {self._base(value): i for i, operation in enumerate(operations) for value in operation.writes}
        sent = {self._base(operation.reads[0]) for operation in operations if isinstance(operation, Exchange)}
        found = list(operations)
        for i, exchange in enumerate(operations):
            if not isinstance(exchange, Exchange) or not exchange.sums:
                continue
            (total,) = exchange.writes
            readers = [j for j, other in enumerate(found) if total in map(self._base, other.reads)]
            task = found[readers[0]] if len(readers) == 1 and total not in kept else None
            if not isinstance(task, Task) or total not in task.reads:
                continue
            avals = [self._avals[value] for value in task.reads]
            there = {k for k, value in enumerate(task.reads) if made_at.get(self._base(value), -1) < i}
            split = norms.split(task.compute, avals, task.reads.index(total), there, self.mesh)
            # What others read may not lie where exchanges put what arrives.
            if split is None or sent.intersection(task.writes[k] for k in split.given if k is not None):
                continue
            aval = self._avals[total]
            gives = tuple(self.arrival(aval.shape, aval.dtype) if k is None else task.writes[k] for k in split.given)
            for value in gives:
                self._values[value] = dataclasses.replace(self._values[value], arrives=True)
            operands = tuple(task.reads[k] for k in split.operands)
            found[i] = dataclasses.replace(exchange, reads=exchange.reads + operands, writes=gives, norm=split.norm)
            found[readers[0]] = dataclasses.replace(
                task,
                reads=(*gives, *(task.reads[k] for k in split.reads)),
                writes=tuple(value for value in task.writes if value not in gives),
                compute=split.rest,
            )
        return without_idle(found)

    def _can_sum(self, exchange: Exchange) -> bool:
        part = self._values[exchange.writes[0]]
        return (
            exchange.writes in self._sums
            and len(exchange.writes) <= wire.MAX_SUMMANDS
            and part.dtype.name in wire.ELEMENTS
            and part.dtype == self._avals[exchange.writes[0]].dtype
            and part.size % wire.SUM_BYTES == 0
        )

    @property
    def _can_place(self) -> bool:
        """Whether partitions can write where they are told to."""
        return self.platform == "cpu" or compat.WRITES_INTO_GIVEN_MEMORY

    def _placed(self, operations: Sequence[Task | Exchange], donors: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """The values that can be computed in an output's memory: which output, and the offset."""
        if not self._can_place:
            return {}
        computed = {value for operation in operations if isinstance(operation, Task) for value in operation.writes}
        # XLA may give an output's memory to others as soon as this device is done, while another one still reads.
        read_by_others = {self._base(o.reads[0]) for o in operations if isinstance(o, Exchange) and o.in_place}
        own = {value for value in computed - read_by_others if self._values[value].size >= IN_PLACE_OUTPUT_BYTES}
        placed: dict[int, tuple[int, int]] = {}
        for i, (_, parts) in enumerate(self._outputs):
            for value, offset in parts:
                if value not in own or value in placed or offset % ALIGNMENT:
                    continue
                donor = donors.get(i)
                if donor is None or (len(parts) == 1 and self._is_free(self.inputs[donor], value, operations)):
                    placed[value] = i, offset
        return placed

    def _is_free(self, given: int, value: int, operations: Sequence[Task | Exchange]) -> bool:
        """Whether nobody reads an input any more once ``value`` is computed; the partition that does so may, whole."""
        for operation in reversed(operations):
            read = [i for i in operation.reads if self._base(i) == given]
            if value in operation.writes:
                return not read or read == [given]
            if read:
                return False
        return False

    def _compiled(self, operation: Task | Exchange, placed: Set[int], over: Mapping[int, int]) -> Operation:
        if isinstance(operation, Exchange):
            return operation
        # Memory that is donated goes to the first result of its type that has none yet, operand by operand.
        donated = {i: operation.reads.index(over[i]) for i in operation.writes if over.get(i) in operation.reads}
        rest = [i for i in operation.writes if i in placed and i not in donated]
        into = (*sorted(donated, key=donated.__getitem__), *rest)
        form = Module(
            operation,
            [self._avals[i] for i in operation.reads],
            [*into, *(i for i in operation.writes if i not in placed)],
            tuple(donated.values()),
            [self._avals[i] for i in rest],
        )
        lowered = form.on_host() if self.platform == "cpu" else form.in_capture(captured)
        module = compat.module_bytecode(lowered)
        if compat.has_host_callback(module):
            raise DynaFlowError(f"{operation.name} calls back to the host.")
        return Partition(
            operation.name,
            operation.where,
            operation.reads,
            operation.writes,
            operation.after,
            module,
            fingerprint(lowered.as_text()),
            into,
            tuple(over[i] if i in donated else None for i in into),
            () if self.platform == "cpu" else tuple(functools.partial(form.bytecode, of) for of in (enclosed, tied)),
        )
