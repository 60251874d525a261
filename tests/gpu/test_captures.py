"""Plans of two devices, whose partitions one GPU can capture: what would be lowered to XLA there is found here."""

import functools
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
from examples.attention.decoder import Config, apply, init, partition
from examples.benchmarks import end_to_end


@pytest.fixture
def works(monkeypatch):
    """What was captured."""
    found, real = [], Binder.rehearse

    def rehearse(self):
        real(self)
        found.append(self.work)

    monkeypatch.setattr(Binder, "rehearse", rehearse)
    return found


def capture(fun, scheduler, in_specs, out_specs, args, axes=None, axis="i", **options):
    """Captures a plan of two devices, which the CPU's stand for, on the GPU."""
    mesh = jax.make_mesh((2,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    flow = df.dynaflow(fun, scheduler=scheduler, backend="dispatch", batch_axes=axes, **options)
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


def shapes(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == jnp.float32 else x.dtype), tree
    )


@pytest.mark.parametrize("scheduler", [df.strategies.Sequential(), df.strategies.NanoFlow(2, concurrent=True)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_end_to_end(phase, scheduler, works):
    sizes, batch, is_decode = end_to_end.SMALL, 4, phase == "decode"
    weights = {
        "embed": jnp.ones((sizes.vocabulary, sizes.width)),
        "layers": [tuple(map(jnp.ones, sizes.shapes))] * sizes.layers,
        "logits": jnp.ones((sizes.width, sizes.vocabulary)),
    }
    cache = jnp.ones((batch, sizes.kv_heads, sizes.context, sizes.head))
    caches = [(cache, cache)] * sizes.layers if is_decode else None
    tokens = jnp.zeros((batch, 1 if is_decode else sizes.context), jnp.int32)
    column, row, heads = P(None, "tp"), P("tp"), [(P(None, "tp"), P(None, "tp"))] * sizes.layers
    specs = {"embed": P(), "layers": [(column, row, column, row)] * sizes.layers, "logits": column}
    model = functools.partial(end_to_end.decoder, sizes=sizes, reduce=functools.partial(lax.psum, axis_name="tp"))
    args = shapes((weights, tokens, caches))
    ins = (specs, P(), heads if is_decode else None)
    capture(model, scheduler, ins, (column, heads), args, (None, 0, 0 if is_decode else None), "tp")
    (work,) = works
    sums = [operation.sums for operation in work.operations if isinstance(operation, Exchange)]
    assert all(sums) == (scheduler.__class__ is df.strategies.Sequential)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_serving(phase, works):
    """A cache that is written in place, and a plan that is picked in every call."""
    config = Config(layers=2, width=64, heads=4, head_dim=16, hidden=96, vocab=128, capacity=32)
    prefill, decode = apply(config.on(2, "i"))
    params, rows, heads = init(config), 4, P(None, None, "i")
    tokens, lengths = jnp.zeros((rows, 16), jnp.int32), jnp.ones(rows, jnp.int32)
    _, cache = jax.eval_shape(apply(config)[0], params, tokens, lengths)
    plans = df.strategies.Switch([df.strategies.Sequential(), df.strategies.NanoFlow(2)], lambda *args: args[-1] > 8)
    if phase == "prefill":
        fun = lambda params, tokens, lengths, count: prefill(params, tokens, lengths)  # noqa: E731
        args, specs, axes, out = (params, tokens, lengths), (P(), P()), (None, 0, 0, None), (P(), heads)
    else:
        fun = lambda params, token, position, cache, count: decode(params, token, position, cache)  # noqa: E731
        args, specs, axes = (params, lengths, lengths, cache), (P(), P(), heads), (None, 0, 0, 0, None)
        out = (P(), heads)
    args = (*shapes(args), jax.ShapeDtypeStruct((), jnp.int32))
    donated = 3 if phase == "decode" else ()
    capture(fun, plans, (partition(params, "i"), *specs, P()), out, args, axes, donate_argnums=donated)
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
