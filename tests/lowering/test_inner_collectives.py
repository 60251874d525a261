"""Dispatched steps that communicate inside: operators, replacements and merged operators; and small dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import models_parallel as models
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from scheduling import Do, run_merged

import dynaflow_jax as df
from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime.work import Exchange

pytestmark = [
    pytest.mark.skipif(extension.module is None, reason="the extension was not built"),
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (virtual) devices"),
]

AXIS = models.AXIS


def model(fun):
    args = (models.normal(8, 8), models.normal(8, 8, seed=1))
    return models.Model(fun, args, (P(), P(AXIS)), P())


def overlapping(w, x):
    with df.mark("both"):
        y = lax.psum(x, AXIS)
        z = jnp.sin(w @ w)  # neither before the sum nor with its result
        return y @ z[:, :2]


def in_turn(w, x):
    with df.mark("layer"):
        return jnp.sin(lax.psum(x @ w, AXIS)) @ w


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(("fun", "stream"), [(overlapping, "network"), (in_turn, "compute")])
def test_an_operator_that_computes_and_communicates(fun, stream, devices):
    """Its exchanges leave its stream if, and only if, it has something to compute meanwhile."""
    model(fun).check(devices, df.strategies.Sequential(), "dispatch")
    operations = model(fun).work(devices, df.strategies.Sequential()).operations
    assert {op.where.stream for op in operations if isinstance(op, Exchange)} == {stream}
    assert {op.where.stream for op in operations if not isinstance(op, Exchange)} == {"compute"}
    if fun is overlapping:
        arriving = {value for op in operations if isinstance(op, Exchange) for value in op.writes}
        assert not arriving & set(next(op for op in operations if not isinstance(op, Exchange)).reads)


@pytest.mark.parametrize("devices", [2, 4])
def test_a_replacement_that_communicates(devices):
    table = np.arange(8, dtype=np.float32) / 64

    def replaced(w, x):
        return (jnp.sin(lax.psum(x, AXIS) + table) @ w,)

    def fun(w, x):
        with df.mark("sum"):
            y = lax.psum(x, AXIS)
        with df.mark("matmul"):
            return jnp.sin(y + jnp.arange(8.0) / 64) @ w

    def schedule(ctx):
        ops = ctx.all_ops()
        order = [aval.shape for aval in ctx.inputs_of(ops)]
        ctx.execute(ops, fn=replaced if order[0] == (8, 8) else lambda x, w: replaced(w, x))

    model(fun).check(devices, Do(schedule), "dispatch")


@pytest.mark.parametrize("backend", ["xla", "dispatch"])
def test_merged_collectives(backend):
    """The sums of two micro-batches as one."""

    def fun(w, x):
        with df.mark("matmul"):
            y = x @ w
        return df.collectives.all_reduce(y, AXIS)

    args = (models.normal(8, 8), models.normal(8, 8, seed=1))
    plan = models.Model(fun, args, (P(), P()), P(), (None, 0)).check(2, Do(run_merged, 4, 4), backend)
    assert [str(step) for step in plan.steps] == ["matmul[0,1]", "all_reduce[0,1]"]


@pytest.mark.filterwarnings("error::dynaflow_jax.errors.DispatchWarning")
@pytest.mark.parametrize(
    "dtype", ["int2", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu"]
)
@pytest.mark.parametrize("rows", [8, 512])
def test_small_dtypes(dtype, rows):
    """Inputs, constants, values between steps and outputs, of a whole batch and of micro-batches."""
    low, high = (1, 3) if dtype == "float8_e8m0fnu" else (0, 2) if dtype.startswith("uint") else (-1, 2)
    x = jnp.asarray(np.random.default_rng(0).integers(low, high, (rows, 6)), jnp.float32).astype(dtype)
    table = np.asarray([[1, 0, 1, 1, 0, 1]], getattr(ml_dtypes, dtype)) if dtype != "float8_e8m0fnu" else None

    def fun(x):
        with df.mark("a"):
            y = x if table is None else jnp.where(x == table, x, -x if dtype.startswith("float") else x * 0)
        with df.mark("b"):
            return y[:, ::-1], y.astype(jnp.float32).sum(1)

    for scheduler in (df.strategies.Sequential(), df.strategies.NanoFlow(2)):
        flow = df.dynaflow(fun, scheduler=scheduler, backend="dispatch", batch_axes=(0,))
        for got, want in zip(jax.jit(flow)(x), jax.jit(fun)(x), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
