"""Plans of two devices, whose partitions one GPU can capture: what would be lowered to XLA there is found here."""

import warnings

import jax
import jax.numpy as jnp
import models_parallel
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_communication import COLLECTIVES

import dynaflow_jax as df
from dynaflow_jax.errors import DispatchWarning
from dynaflow_jax.runtime.binder import Binder
from dynaflow_jax.runtime.work import Exchange


@pytest.fixture
def works(monkeypatch):
    """What was captured."""
    found, real = [], Binder.rehearse

    def rehearse(self):
        real(self)
        found.append(self.work)

    monkeypatch.setattr(Binder, "rehearse", rehearse)
    return found


def capture(fun, scheduler, in_specs, out_specs, args, axes=None, axis="i"):
    """Captures a plan of two devices, which the CPU's stand for, on the GPU."""
    mesh = jax.make_mesh((2,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    flow = df.dynaflow(fun, scheduler=scheduler, backend="dispatch", batch_axes=axes)
    mapped = jax.shard_map(flow, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DispatchWarning)
        jax.eval_shape(mapped, *args)


STRATEGIES = {
    "sequential": (models_parallel.tensor_parallel, df.strategies.Sequential()),
    "halves": (models_parallel.tensor_parallel, df.strategies.NanoFlow(2)),
    "one half beside the other": (models_parallel.tensor_parallel, df.strategies.NanoFlow(2, concurrent=True)),
    "token weave": (models_parallel.tensor_parallel, df.strategies.TokenWeave()),
    "sequence parallel": (models_parallel.sequence_parallel, df.strategies.AsyncTensorParallel()),
    "fully sharded": (models_parallel.fully_sharded, df.strategies.ParameterPrefetch()),
    "data parallel": (models_parallel.data_parallel, df.strategies.GradientBuckets()),
    "experts": (models_parallel.expert_parallel, df.strategies.DualBatchOverlap()),
    "experts in pieces": (models_parallel.expert_parallel, df.strategies.Comet()),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies(name, works):
    model, scheduler = STRATEGIES[name]
    made = model()
    capture(made.fun, scheduler, made.in_specs, made.out_specs, made.args, made.axes, models_parallel.AXIS)
    (work,) = works
    assert any(isinstance(operation, Exchange) for operation in work.operations)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name, works):
    """Alone, and with something computed before and behind."""
    fun, out = COLLECTIVES[name]
    for around in (lambda x: fun(x), lambda x: jax.tree.map(jnp.sin, fun(jnp.cos(x)))):
        capture(around, df.strategies.SingleBatchOverlap(), P("i"), out, (jnp.ones((16, 16)),))
    assert len(works) == 2


OPERANDS = {
    "an input": lambda x: x,
    "a part of an input": lambda x: x[:2],
    "an input in another shape": lambda x: x.reshape(-1),
    "an input in other words": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "a constant": lambda x: jnp.arange(64.0),
    "something known": lambda x: jnp.zeros((8, 8)) + 1,
    "a number": lambda x: x.sum(),
    "computed": lambda x: jnp.sin(x),
    "a part of something computed": lambda x: jnp.sin(x)[1:3],
    "bits": lambda x: x > 0,
}


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmax, lambda x, axis: lax.all_gather(x, axis)])
@pytest.mark.parametrize("name", OPERANDS)
def test_operands_of_the_last_exchange(name, reduce, works):
    """Nothing tells when it has been read, so it is computed where nothing else is."""

    def fun(x):
        with df.mark("all"):
            y = OPERANDS[name](x)
            y = y.astype(jnp.float32) if y.dtype == bool and reduce is not lax.all_gather else y
            return reduce(y, "i"), y.sum()

    capture(fun, df.strategies.Sequential(), P(), (P(), P()), (jnp.ones((8, 8)),))
    assert works


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "complex64"])
def test_types_of_the_last_exchange(dtype, works):
    def fun(x):
        with df.mark("all"):
            return lax.psum(x * x, "i")

    capture(fun, df.strategies.Sequential(), P(), P(), (jnp.ones((8, 32), dtype),))
    (work,) = works
    (exchange,) = (operation for operation in work.operations if isinstance(operation, Exchange))
    assert work.lasting == set(exchange.reads)
    assert exchange.sums == (dtype in ("float32", "bfloat16"))
