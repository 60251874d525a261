"""When memory that other streams and other devices touch may be used again."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaflow_jax.runtime.arrivals import dead_before, layout
from dynaflow_jax.runtime.precedence import predecessors
from dynaflow_jax.runtime.program import Norm
from dynaflow_jax.runtime.work import Exchange, Partition, Pattern, Value, Where, Work

SIZE = 256


def chain(*read: bool, pattern: Pattern = Pattern.GATHER) -> Work:
    """Exchanges one after the other, each of what a partition made of the arrivals so far that are read."""
    values, operations = [Value((SIZE // 4,), np.dtype(np.float32), input=0)], []
    last = 0
    for i, is_read in enumerate(read):
        made, arrived = len(values), len(values) + 1
        values.append(Value((SIZE // 4,), np.dtype(np.float32)))
        values.append(Value((2, SIZE // 4), np.dtype(np.float32), arrives=True))
        operations.append(Partition(f"compute {i}", Where("compute"), (last,), (made,), (), b"", ""))
        pairs = ((0, 1), (1, 0)) if pattern is Pattern.PERMUTE else ()
        operations.append(Exchange(f"exchange {i}", Where("network"), (made,), (arrived,), (), ("i",), pattern, pairs))
        last = arrived if is_read else made
    values.append(Value((SIZE // 4,), np.dtype(np.float32)))
    operations.append(Partition("end", Where("compute"), (last,), (len(values) - 1,), (), b"", ""))
    outputs = ((SIZE, ((len(values) - 1, 0),)),)
    return Work("chain", tuple(values), tuple(operations), (SIZE,), (False,), outputs, {"i": 2})


@pytest.mark.parametrize("pattern", [Pattern.GATHER, Pattern.PERMUTE])
def test_memory_is_used_again(pattern):
    """In every exchange devices hear from each other, so two places are enough."""
    places = layout(chain(*[True] * 8, pattern=pattern)).offsets
    assert len(set(places.values())) == 2


def test_memory_of_what_nobody_reads_is_not_used_again():
    """A device copies its own part there at some time of its own, of which nothing tells the others."""
    places = layout(chain(True, False, True, True, True, True, True, True)).offsets
    unread = places.pop(3)
    assert unread not in places.values()


STREAMS = ("a", "b", "c")


@st.composite
def works(draw) -> Work:
    """Partitions and exchanges on several streams, each of any values before it."""
    values, operations = [Value((SIZE // 4,), np.dtype(np.float32), input=0)], []
    for i in range(draw(st.integers(2, 12))):
        stream = Where(draw(st.sampled_from(STREAMS)))
        made = [value for op in operations if isinstance(op, Partition) for value in op.writes]
        if made and draw(st.booleans()):
            source = draw(st.sampled_from(made))
            how = draw(st.sampled_from(["together", "apart", "in place", "sums", "norms"]))
            # What arrives: values of their own, one of them the device's own; or one value.
            shape = (2, *values[source].shape) if how == "together" else values[source].shape
            arrived = tuple(range(len(values), len(values) + (1 if how in ("together", "sums") else 2)))
            values += [Value(shape, values[source].dtype, arrives=True)] * len(arrived)
            in_place, sums = how in ("in place", "sums", "norms"), how in ("sums", "norms")
            exchange = Exchange(f"{i}", stream, (source,), arrived, (), ("i",), Pattern.GATHER, (), in_place, sums)
            if how == "norms":
                residual = draw(st.sampled_from(range(len(values) - 2)))
                norm = Norm(SIZE // 4, 0.0, True, None)
                exchange = dataclasses.replace(exchange, reads=(source, residual), norm=norm)
            operations.append(exchange)
        else:
            reads = tuple(draw(st.sets(st.sampled_from(range(len(values))), min_size=1, max_size=3)))
            values.append(Value((SIZE // 4,), np.dtype(np.float32)))
            operations.append(Partition(f"{i}", stream, reads, (len(values) - 1,), (), b"", ""))
    outputs = ((SIZE, ((draw(st.sampled_from(range(len(values)))), 0),)),)
    return Work("any", tuple(values), tuple(operations), (SIZE,), (False,), outputs, {"i": 2})


@given(works())
def test_no_stream_takes_memory_that_another_one_touches(work):
    """Not for temporaries of its partitions either, of which nobody but XLA knows the addresses."""
    before = predecessors(work.operations, lambda value: work.base(value)[0])
    kept = {value for _, parts in work.outputs for value, _ in parts}
    for free_from, values in enumerate(dead_before(work)):
        for value in values:
            (writer,) = (op for op in work.operations if isinstance(op, Partition) and value in op.writes)
            touching = [i for i, op in enumerate(work.operations) if value in (*op.reads, *op.writes)]
            assert value not in kept
            for i, op in enumerate(work.operations[free_from:], free_from):
                if isinstance(op, Partition) and op.where.stream == writer.where.stream:
                    assert all(before[i] >> other & 1 for other in touching)


@given(works())
def test_what_others_read_in_place_stays_until_they_have_said_that_they_are_done(work):
    """They take part in an exchange when they have read, and only who is behind that takes the memory."""
    before = predecessors(work.operations, lambda value: work.base(value)[0])
    dead = {value: i for i, values in enumerate(dead_before(work)) for value in values}
    for i, exchange in enumerate(work.operations):
        if not isinstance(exchange, Exchange) or not exchange.in_place or exchange.reads[0] not in dead:
            continue
        reading = {i}
        if not exchange.sums:
            reading |= {k for k, op in enumerate(work.operations) if set(exchange.writes) & set(op.reads)}
        told = (
            k
            for k, op in enumerate(work.operations)
            if isinstance(op, Exchange) and all(before[k] >> r & 1 for r in reading)
        )
        assert any(before[dead[exchange.reads[0]]] >> k & 1 for k in told)


@given(works())
def test_memory_for_arrivals_is_shared_only_by_values_that_are_never_there_at_once(work):
    before = predecessors(work.operations, lambda value: work.base(value)[0])
    places = layout(work)
    written = {
        i: op.writes[1:] if op.is_apart else op.writes for i, op in enumerate(work.operations) if i in places.offsets
    }
    sizes = {i: sum(work.values[v].size for v in values) for i, values in written.items()}
    for i, at in places.offsets.items():
        for k, other in places.offsets.items():
            if i < k and at < other + sizes[k] and other < at + sizes[i]:
                touching = [n for n, op in enumerate(work.operations) if set(work.operations[i].writes) & set(op.reads)]
                assert all(before[k] >> n & 1 for n in (i, *touching))
                assert not {v for _, parts in work.outputs for v, _ in parts} & set(work.operations[i].writes)
