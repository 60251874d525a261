"""Putting a dispatched plan's work together: values, what is computed from them, and what is compiled as one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.lowering import norms
from dynaflow_jax.lowering.capture import captured, enclosed, tied
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


@dataclasses.dataclass(frozen=True)
class Expr:
    """A value that is computed wherever it is read, from values in memory.

    The sum of what arrived from other devices, say: it becomes part of whatever reads it, and costs no pass over
    memory of its own.

    Attributes:
      reads: indices of values.
      compute: from these values to the one that is meant.
    """

    reads: tuple[int, ...]
    compute: Callable[..., Any]


Term = int | Expr
"""A value in memory, by its index, or an expression."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to compute; neighbours on a stream may become one partition.

    Attributes:
      name: the operators in it, for messages.
      where: where it runs.
      reads: indices of the values it takes.
      writes: indices of the values it gives.
      after: indices of operations that must be over before it starts.
      compute: from values of ``reads`` to values of ``writes``; can be traced.
      scope: tasks of different scopes (iterations of a loop) stay apart, since they compile to equal modules.
      products: how many matrix products and convolutions it computes.
    """

    name: str
    where: Where
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: tuple[int, ...]
    compute: Callable[..., Sequence[Any]]
    scope: tuple[int, ...] = ()
    products: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """An operation in a builder's list, which may still grow in front of it.

    Attributes:
      operation: the operation; its own ``after`` is filled in when the list is complete.
      after: what must be over before it starts.
    """

    operation: Task | Exchange
    after: tuple[Entry, ...]


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
        aval, byte = jax.ShapeDtypeStruct(value.shape, value.dtype), _byte_for(value.dtype)
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
        joined = _coalesced(listed, self._base, kept)
        if self.in_place:
            joined = self._normalizing(self._summing(self._read_in_place(joined, kept)), kept)
        placed = self._placed(joined, donors)
        over = {value: self.inputs[donors[i]] for value, (i, _) in placed.items() if i in donors}
        operations = tuple(self._compiled(operation, placed.keys() | self._lasting, over) for operation in joined)
        used = {self._base(value) for operation in operations for value in (*operation.reads, *operation.writes)}
        if not all(self._values[i].size for i in used | kept):
            raise DynaFlowError("a value without elements has no address.")
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
                operation = _reading_sums(operation, dropped)
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
        return _without_idle(found)

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
        form = _Module(
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
            _fingerprint(lowered.as_text()),
            into,
            tuple(over[i] if i in donated else None for i in into),
            () if self.platform == "cpu" else tuple(functools.partial(form.bytecode, of) for of in (enclosed, tied)),
        )


def _without_idle(operations: Sequence[Task | Exchange]) -> list[Task | Exchange]:
    """The operations without tasks that give nothing any more; who waited for one waits for what it waited for."""
    idle = {i for i, operation in enumerate(operations) if isinstance(operation, Task) and not operation.writes}
    writer = {value: i for i, operation in enumerate(operations) for value in operation.writes}
    waits: dict[int, list[int]] = {}
    for i, operation in enumerate(operations):
        before = [*operation.after, *(writer[value] for value in operation.reads if value in writer and i in idle)]
        waits[i] = [k for j in before for k in (waits[j] if j in idle else [j])]
    place = {i: k for k, i in enumerate(i for i in range(len(operations)) if i not in idle)}
    return [
        dataclasses.replace(operation, after=tuple(dict.fromkeys(place[j] for j in waits[i])))
        for i, operation in enumerate(operations)
        if i not in idle
    ]


def _reading_sums(task: Task, dropped: Mapping[int, int]) -> Task:
    """A task that reads sums in place of parts, all of which it takes the first one's value for."""
    reads = tuple(value for value in task.reads if value not in dropped)

    def compute(*values: Any) -> Sequence[Any]:
        found = dict(zip(reads, values, strict=True))
        return task.compute(*(found[dropped.get(value, value)] for value in task.reads))

    return dataclasses.replace(task, reads=reads, compute=compute)


@dataclasses.dataclass(frozen=True)
class _Module:
    """What a task becomes for XLA: a function of values as they are in memory.

    Attributes:
      task: what it computes.
      reads: the types of its operands.
      writes: its results on CUDA, in their order there.
      donated: operands in whose memory the first results are computed.
      given: the types of those that follow, each in the memory of a further operand.
    """

    task: Task
    reads: Sequence[Any]
    writes: Sequence[int]
    donated: tuple[int, ...]
    given: Sequence[Any]

    def on_host(self) -> Any:
        """Lowered for the host twin, whose results have memory of their own."""
        return self._lowered(self._compute, self._shapes(self.reads), ())

    def in_capture(self, form: Callable[..., Callable[..., list[Any]]]) -> Any:
        """Lowered for CUDA; ``form`` makes of the function one that is captured as it runs."""
        shapes, given = self._shapes(self.reads), self._shapes(self.given)
        first = [self.task.writes.index(i) for i in self.writes]

        def compute(*args: Any) -> list[Any]:
            results = self._compute(*args)
            return [results[i] for i in first]

        enclosing = form(compute, sorted(self.donated))  # in the order of the first results
        memory = (*self.donated, *range(len(shapes), len(shapes) + len(given)))
        return self._lowered(lambda *args: enclosing(*args[: len(shapes)]), [*shapes, *given], memory)

    def bytecode(self, form: Callable[..., Callable[..., list[Any]]]) -> bytes:
        """The same, as bytes."""
        return compat.module_bytecode(self.in_capture(form))

    def _compute(self, *args: Any) -> list[Any]:
        return [to_bits(x) for x in self.task.compute(*map(from_bits, args, self.reads))]

    def _lowered(self, fun: Callable[..., Any], shapes: Sequence[Any], donated: tuple[int, ...]) -> Any:
        def named(*args: Any) -> list[Any]:
            return fun(*args)

        named.__name__ = self.task.name  # and so the module's, which profilers show
        try:
            # Arguments that a partition does not use stay arguments, so that its signature is what it reads.
            return jax.jit(named, keep_unused=True, donate_argnums=donated).lower(*shapes)
        except Exception as error:
            raise DynaFlowError(f"{self.task.name} cannot be compiled on its own: {error}") from error

    @staticmethod
    def _shapes(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(*physical(aval)) for aval in avals]


_NAME = r'("[^"]*"|[^\s"(]+)'  # in quotes if it holds a space, say
_MODULE = re.compile(rf"^module @{_NAME}")
_PRIVATE = re.compile(rf"func\.func private @{_NAME}\(")


def _fingerprint(text: str) -> str:
    """A hash that modules share which differ only in their names and in those of their functions."""
    text = _MODULE.sub("module", text)
    for i, name in enumerate(dict.fromkeys(_PRIVATE.findall(text))):
        text = re.sub(rf"@{re.escape(name)}(?=\()", f"@f{i}", text)
    return hashlib.sha256(text.encode()).hexdigest()


# -- tasks that become one -------------------------------------------------------------------------------------------

# A device takes the kernels of one module from a graph before those of the next, about one a microsecond: those of a
# stream with a long module would keep the other streams waiting.
_PRODUCTS_BESIDE = 4


def _coalesced(
    operations: Sequence[Task | Exchange], base: Callable[[int], int], kept: set[int]
) -> list[Task | Exchange]:
    """The operations, with neighbours on a stream as one wherever no other stream could tell.

    One module in place of two lets XLA fuse across them, and is one launch less. Two tasks become one if the second
    waits for nothing that the first does not wait for, and nothing waits for the first that does not wait for the
    second as well. Beside other streams' tasks they only grow up to a number of products.

    Args:
      operations: with ``after`` as indices into this list.
      base: from a value to the value in whose memory it lies.
      kept: values that are read after all operations.
    """
    before = predecessors(operations, base)
    followers = [0] * len(operations)  # bit masks: ``before`` the other way round
    for i, mask in enumerate(before):
        while mask:
            low = mask & -mask
            followers[low.bit_length() - 1] |= 1 << i
            mask ^= low
    tasks = [(1 << i, other.where.stream) for i, other in enumerate(operations) if isinstance(other, Task)]
    elsewhere: dict[str, int] = {}  # the tasks of other streams
    for stream in {stream for _, stream in tasks}:
        elsewhere[stream] = sum(bit for bit, other in tasks if other != stream)
    products: dict[int, int] = {}  # of each run, so far
    member_of = list(range(len(operations)))  # the first task of the run that an operation belongs to
    runs: dict[int, list[int]] = {}
    writer = {value: i for i, operation in enumerate(operations) for value in operation.writes}
    last: dict[str, int] = {}
    for i, operation in enumerate(operations):
        previous = last.get(operation.where.stream)
        last[operation.where.stream] = i
        first = operations[previous] if previous is not None else None
        if (
            previous is not None
            and isinstance(first, Task)
            and isinstance(operation, Task)
            and (first.where, first.scope) == (operation.where, operation.scope)
            and not before[i] & ~(before[previous] | 1 << previous)
            and not followers[previous] & ~(followers[i] | 1 << i)
            # What lies within another value has to be in memory to be read.
            and not any(
                base(value) != value and member_of[writer.get(base(value), i)] == member_of[previous]
                for value in operation.reads
            )
        ):
            beside = elsewhere[operation.where.stream] & ~before[i] & ~followers[i]
            if not beside or products[member_of[previous]] + operation.products <= _PRODUCTS_BESIDE:
                member_of[i] = member_of[previous]
        runs.setdefault(member_of[i], []).append(i)
        if isinstance(operation, Task):
            products[member_of[i]] = products.get(member_of[i], 0) + operation.products
    readers: dict[int, set[int]] = {}
    for i, operation in enumerate(operations):
        for value in operation.reads:
            readers.setdefault(base(value), set()).add(member_of[i])
    order = {first: position for position, first in enumerate(runs)}
    result: list[Task | Exchange] = []
    for first, members in runs.items():
        after = tuple(dict.fromkeys(order[member_of[j]] for i in members for j in operations[i].after))
        after = tuple(j for j in after if j != order[first])
        tasks = [operations[i] for i in members]
        joined = tasks[0] if len(tasks) == 1 else _joined(tasks, first, readers, kept)
        result.append(dataclasses.replace(joined, after=after))
    return result


def _joined(tasks: Sequence[Any], first: int, readers: Mapping[int, set[int]], kept: set[int]) -> Task:
    """Tasks as one, that gives what others read."""
    made = [value for task in tasks for value in task.writes]
    reads = tuple(dict.fromkeys(v for task in tasks for v in task.reads if v not in set(made)))
    writes = tuple(v for v in made if v in kept or readers.get(v, set()) - {first}) or tuple(made[-1:])

    def compute(*values: Any) -> list[Any]:
        env = dict(zip(reads, values, strict=True))
        for task in tasks:
            env.update(zip(task.writes, task.compute(*(env[v] for v in task.reads)), strict=True))
        return [env[v] for v in writes]

    name = " + ".join(dict.fromkeys(task.name for task in tasks))
    return Task(name, tasks[0].where, reads, writes, (), compute, tasks[0].scope, sum(task.products for task in tasks))


# -- types in memory -------------------------------------------------------------------------------------------------


def physical(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type in memory: keys are bits, a boolean is a byte, and so is whatever is smaller or no standard."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return bits.shape, np.dtype(bits.dtype)
    return tuple(aval.shape), np.dtype(_byte_for(aval.dtype) or aval.dtype)


def to_bits(value: Any) -> Any:
    """A value as it lies in memory."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    byte = _byte_for(value.dtype)
    if byte is None:
        return value
    if jnp.issubdtype(value.dtype, jnp.floating):
        value = jax.lax.bitcast_convert_type(value, f"uint{jnp.finfo(value.dtype).bits}")
    return value.astype(byte)


def from_bits(value: Any, aval: Any) -> Any:
    """A value of a type, from what lies in memory."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return compat.wrap_key_data(value, aval.dtype)
    if _byte_for(aval.dtype) is None:
        return value
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value.astype(f"uint{jnp.finfo(aval.dtype).bits}"), aval.dtype)
    return value.astype(aval.dtype)


def _byte_for(dtype: Any) -> Any:
    """The type of the byte that holds an element of a type that buffers are not exchanged in, if it is of that kind."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.uint8 if jnp.finfo(dtype).bits <= 8 else None
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8
    return None
