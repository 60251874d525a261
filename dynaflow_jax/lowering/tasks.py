"""What is computed by a dispatched plan, and which neighbours on a stream are compiled as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynaflow_jax.runtime.precedence import predecessors
from dynaflow_jax.runtime.work import Exchange, Where


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


# A device takes the kernels of one module from a graph before those of the next, about one a microsecond: those of a
# stream with a long module would keep the other streams waiting.
_PRODUCTS_BESIDE = 4


def coalesced(
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


def without_idle(operations: Sequence[Task | Exchange]) -> list[Task | Exchange]:
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


def reading_sums(task: Task, dropped: Mapping[int, int]) -> Task:
    """A task that reads sums in place of parts, all of which it takes the first one's value for."""
    reads = tuple(value for value in task.reads if value not in dropped)

    def compute(*values: Any) -> Sequence[Any]:
        found = dict(zip(reads, values, strict=True))
        return task.compute(*(found[dropped.get(value, value)] for value in task.reads))

    return dataclasses.replace(task, reads=reads, compute=compute)
