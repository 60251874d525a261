"""Arrays that a function closes over, or makes of its batch size with NumPy: each micro-batch gets its own of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from models import normal, same
from scheduling import Do, Split, run_merged

import dynaflow_jax as df

B = 6
X, R, PICK = normal(B, 4), np.asarray(normal(B, 1, seed=1)), jnp.array([0, 3, 1, 2, 2, 0])
KEYS = jax.random.split(jax.random.key(0), B)


def noise(key):
    return jax.random.normal(key, (4,))


SAME = {
    "ones": lambda x: x * np.ones((x.shape[0], 1), np.float32),
    "zeros": lambda x: jnp.concatenate([x, np.zeros((x.shape[0], 2), np.float32)], 1),
    "mask": lambda x: jnp.where(np.ones(x.shape, bool), x, 0),
    "carried": lambda x: lax.fori_loop(0, 3, lambda _, c: c + x, np.ones(x.shape, np.float32)),
    "in a call": lambda x: jax.jit(lambda x: x * np.ones((x.shape[0], 1), np.float32))(x),
    "beside the batch": lambda x: jnp.stack([x, 2 * x]) * np.ones((2, x.shape[0], 1), np.float32),
    "alone": lambda x: x + (jnp.asarray(np.ones((x.shape[0], 1), np.float32)) * 2).sum(1, keepdims=True),
    "returned": lambda x: (x * 2, np.ones((x.shape[0], 3), np.float32)),
    "picked": lambda x: x[np.arange(x.shape[0]), PICK[0]],
    "picked flat": lambda x: x.reshape(-1)[np.arange(x.size)].reshape(x.shape),
}
"""Alike at every batch size, but for how many rows there are."""

OWN = {
    "rows": lambda x: x * R,
    "first rows": lambda x: x * R[: x.shape[0]],
    "positions": lambda x: x + np.arange(x.shape[0], dtype=np.int32)[:, None],
    "every other": lambda x: jnp.where(np.arange(x.shape[0])[:, None] % 2 == 0, x, 0),
    "of the second axis": lambda x: (x.T * R[:, 0]).T,
    "rows in blocks": lambda x: (x.reshape(-1) * np.repeat(R, 4)).reshape(x.shape),
    "rows twice over": lambda x: (jnp.stack([x, x]).reshape(-1, 4) * np.concatenate([R, R])).reshape(2, -1, 4),
    "in a loop": lambda x: lax.scan(lambda c, _: (c * R, None), x, None, length=3)[0],
    "keys": lambda x: x + jax.vmap(noise)(KEYS),
    "half precision": lambda x: x.astype(jnp.bfloat16) * jnp.asarray(R, jnp.bfloat16),
    "two arrays": lambda x: jnp.where(R > 0, x * R, x + np.arange(B, dtype=np.float32)[:, None]),
    "returned": lambda x: (x * 2, R),
}
"""With rows that differ."""

SUMS = {
    "of products": lambda x: np.eye(x.shape[0], dtype=np.float32) @ x,
    "of shares": lambda x: (x * np.full((x.shape[0], 1), 1 / x.shape[0], np.float32)).sum(0),
    "of some": lambda x: (x * R).sum(0),
}


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4), (1, 5)], ids=str)
@pytest.mark.parametrize("fun", [*SAME.values(), *OWN.values()], ids=[*SAME, *map("own {}".format, OWN)])
def test_micro_batches_have_their_rows_of_arrays(fun, sizes):
    same(df.dynaflow(fun, scheduler=Split(*sizes), batch_axes=0)(X), fun(X))


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_the_batch_have_all_rows_of_arrays(name, sizes):
    fun = SUMS[name]
    same(df.dynaflow(fun, scheduler=Split(*sizes), batch_axes=0, out_axes="sum")(X), fun(X))


def test_positions_pick_rows_by_an_argument():
    fun = lambda x, i: x[np.arange(x.shape[0]), i]  # noqa: E731
    same(df.dynaflow(fun, scheduler=Split(2, 4), batch_axes=0)(X, PICK), fun(X, PICK))


TRACED = {
    "ones": SAME["ones"],
    "picked": SAME["picked"],
    "mean": lambda x: (x * np.full(4, 1 / x.shape[0], np.float32)).sum(0),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_micro_batches_have_arrays_of_their_own(name):
    """A function of the parts is asked for, so the program of a micro-batch is what the function makes of its rows."""
    fun = lambda x: (TRACED[name](x), x.sum(0))  # noqa: E731
    how = "mean" if name == "mean" else None
    same(df.dynaflow(fun, scheduler=Split(2, 4), batch_axes=0, out_axes=(how, sum))(X), fun(X))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: (x * R, x.sum(0)),
        lambda x: (jax.jit(lambda x: x * jnp.asarray(R))(x), x.sum(0)),
        lambda x: (lax.cond(x[0, 0] > 0, lambda x: x * R, lambda x: x, x), x.sum(0)),
    ],
    ids=["rows", "rows in a call", "rows in a branch"],
)
def test_rows_that_no_micro_batch_can_have_are_refused_by_name(fun):
    flow = df.dynaflow(fun, scheduler=Split(2, 4), batch_axes=0, out_axes=(None, sum))
    with pytest.raises(
        df.SplitError, match=r"takes 6 rows, but not the 2(.|\n)*float32\[6,1\](.|\n)*into the arguments"
    ):
        flow.plan(X)


def test_what_depends_on_all_rows_is_refused_by_name():
    with pytest.raises(df.BatchMixingError, match=r"the constant float32\[6,6\] depends on the batch size"):
        df.dynaflow(
            lambda x: x @ x.T * np.ones((x.shape[0], x.shape[0]), np.float32), scheduler=Split(2, 4), batch_axes=0
        ).plan(X)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4)], ids=str)
def test_merged_operators_have_the_rows_of_their_micro_batches(sizes):
    fun = lambda x: jnp.tanh(x * R) + np.arange(x.shape[0], dtype=np.float32)[:, None]  # noqa: E731
    same(df.dynaflow(fun, scheduler=Do(run_merged, *sizes), batch_axes=0)(X), fun(X))


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu], ids=["tanh", "relu"])
@pytest.mark.parametrize("array", [R, 1.0], ids=["rows", "none"])
@pytest.mark.parametrize("shape", [(B, 1), ()], ids=str)
def test_arrays_are_differentiated(shape, array, activation):
    """Also with a derivative rule of its own inside, which is for the shapes that were traced."""

    def loss(schedule, w):
        return schedule(lambda x: (activation(x * w) * array).sum())(X)

    schedule = lambda fun: df.dynaflow(fun, scheduler=Split(2, 4), batch_axes=0, out_axes="sum")  # noqa: E731
    w = normal(*shape, seed=2)
    same(jax.grad(lambda w: loss(schedule, w))(w), jax.grad(lambda w: loss(lambda fun: fun, w))(w))
    ws = normal(3, *shape, seed=3)
    same(jax.vmap(lambda w: loss(schedule, w))(ws), jax.vmap(lambda w: loss(lambda fun: fun, w))(ws))
    same(jax.jit(lambda w: loss(schedule, w))(w), loss(lambda fun: fun, w))


def test_arrays_beside_a_sharded_batch():
    mesh = jax.make_mesh((2,), ("data",))
    x = jax.device_put(normal(8, 4), jax.NamedSharding(mesh, P("data")))
    rows = np.asarray(normal(8, 1, seed=4))
    fun = lambda x: x * rows + np.arange(8, dtype=np.float32)[:, None]  # noqa: E731
    flow = df.dynaflow(fun, scheduler=Split(2, 6), batch_axes=0, backend="xla")
    assert flow.plan(x)
    same(jax.jit(flow)(x), fun(x))
    same(flow(x), fun(x))
