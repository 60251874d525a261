"""Taking rows out of a batch and putting them back, by themselves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import same

import dynaflow_jax as df
from dynaflow_jax.batch.outputs import Join
from dynaflow_jax.batch.outputs import join as join_outputs
from dynaflow_jax.batch.split import check_sizes, join, mean, merge, merge_problem, offsets, take, unmerge
from dynaflow_jax.batch.state import INVARIANT, VARIES, Invariant, N, Rows, Symbol, Total, scale

FLOAT = jax.ShapeDtypeStruct((), jnp.float32)
SIZES = [(8,), (4, 4), (1, 7), (2, 1, 5)]


def test_sizes():
    assert check_sizes([4.0, np.int32(4)], 8, 1, "s") == (4, 4)
    assert check_sizes(np.array([4, 4]), 8, 4, "s") == (4, 4)
    assert offsets((2, 1, 5)) == (0, 2, 3)
    with pytest.raises(df.SplitError, match=r"sharded over 4 devices .* must be a multiple of 4, and 2 is not"):
        check_sizes([2, 6], 8, 4, "s")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("outer", "inner", "axis"), list(itertools.product([1, 2], [1, 3], [0, 1])))
def test_joining_undoes_taking(sizes, outer, inner, axis):
    whole = np.arange(outer * 8 * inner * 2).reshape(outer * 8 * inner, 2)
    value = jnp.asarray(whole if axis == 0 else whole.T)
    rows = Rows(axis, outer=outer, inner=inner)
    parts = [take(value, rows, 8, offset, size) for offset, size in zip(offsets(sizes), sizes, strict=True)]
    blocks = whole.reshape(outer, 8, inner, 2)
    for part, offset, size in zip(parts, offsets(sizes), sizes, strict=True):
        want = blocks[:, offset : offset + size].reshape(-1, 2)
        np.testing.assert_array_equal(part if axis == 0 else part.T, want)
    np.testing.assert_array_equal(join(parts, rows, sizes), value)


@pytest.mark.parametrize("outer", [1, 2])
def test_every_shard_gives_its_share(outer):
    """Of 8 rows on 2 devices, a micro-batch of 2 has the first row of each, and the next of 6 the other three."""
    value = jnp.arange(outer * 8)
    rows = Rows(0, outer=outer)
    first, second = (take(value, rows, 8, offset, size, 2) for offset, size in ((0, 2), (2, 6)))
    assert first.tolist()[:2] == [0, 4]
    assert second.tolist()[:6] == [1, 2, 3, 5, 6, 7]
    np.testing.assert_array_equal(join([first, second], rows, (2, 6), 2), value)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("length", [4, 8, 24])
def test_elements_that_are_all_alike(shards, length):
    """However many there are for each row."""
    rows, sizes = Rows(1, uniform=True, outer=3, inner=5), (2, 4, 2)
    value = jnp.ones((2, length))
    parts = [take(value, rows, 8, offset, size, shards) for offset, size in zip(offsets(sizes), sizes, strict=True)]
    assert [part.shape for part in parts] == [(2, length * size // 8) for size in sizes]
    same(join(parts, rows, sizes, shards), value)


def test_inside_shard_map_the_rows_are_those_of_one_shard():
    assert take(jnp.arange(4), Rows(0), 8, 2, 6, 2).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "state",
    [
        Rows(0),
        Rows(0, scale(N, -1)),
        Rows(0, scale(N, 2)),
        INVARIANT,
        Invariant(scale(N)),
        Total(),
        Total(scale(N, -1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(4, 4), (1, 7), (2, 1, 5)], ids=str)
def test_what_is_merged_and_taken_apart_again_means_the_same(state, sizes):
    """Rows stay, sums still add up, means still average out."""
    rng = np.random.default_rng(0)
    if isinstance(state, Rows):
        parts = [jnp.asarray(rng.normal(size=(size, 2)), jnp.float32) for size in sizes]
    elif isinstance(state, Invariant):
        degree = dict(state.scale).get(N, 0)
        parts = [jnp.full(2, float(size) ** degree) for size in sizes]
    else:
        parts = [jnp.asarray(rng.normal(size=2), jnp.float32) for _ in sizes]
    assert merge_problem(state, FLOAT) is None
    again = unmerge(merge(parts, state, sizes), state, sizes)
    if not isinstance(state, Total):
        same(again, parts)
    elif state.scale:
        same(mean(again, sizes), mean(parts, sizes))
    else:
        same(sum(again), sum(parts))


def test_what_cannot_be_merged():
    assert "different in every micro-batch" in merge_problem(VARIES, FLOAT)
    assert "each micro-batch has its own" in merge_problem(Total(scale(Symbol("t"), -1)), FLOAT)
    whole = jax.ShapeDtypeStruct((), jnp.int32)
    assert "whole numbers" in merge_problem(Total(scale(N, -1)), whole)
    assert merge_problem(Rows(0), whole) is None


def test_means():
    same(mean([jnp.float32(1), jnp.float32(4)], (1, 2)), jnp.float32(3))
    same(mean([jnp.float32(1), jnp.float32(4)], [jnp.int32(1), jnp.int32(2)]), jnp.float32(3))
    same(mean([jnp.float32(jnp.nan), jnp.float32(4)], [jnp.float32(0), jnp.float32(2)]), jnp.float32(4))
    assert mean([jnp.bfloat16(1), jnp.bfloat16(4)], (1, 2)).dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: mean([x, 2 * x], [jnp.float32(0), jnp.float32(2)]))(1.0)
    assert gradient == 2


def test_means_over_all_rows_are_not_weighted():
    joins = [Join("mean"), Join("mean", by_rows=True)]
    outs = [[jnp.float32(3)] * 2, [jnp.float32(6)] * 2]
    weighted, by_rows = join_outputs(joins, outs, (1, 2), 1, [jnp.float32(1), jnp.float32(0)])
    assert (weighted, by_rows) == (3, 5)


def test_outputs():
    joins = [Join("rows", Rows(0)), Join("first"), Join("sum"), Join("mean"), Join("function", function=max)]
    outs = [[jnp.ones(1), jnp.ones(2), 3, jnp.float32(3), 3], [jnp.zeros(2), jnp.ones(2), 4, jnp.float32(6), 4]]
    same(
        list(map(jnp.asarray, join_outputs(joins, outs, (1, 2), 1, None))),
        list(map(jnp.asarray, [[1.0, 0, 0], [1.0, 1], 7, 5.0, 4])),
    )
