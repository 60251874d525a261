"""What a captured partition copies, so that XLA has nothing to copy outside of the capture."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import models_parallel
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import dynaflow_jax as df
from dynaflow_jax import compat
from dynaflow_jax.lowering import builder, capture
from dynaflow_jax.lowering.modules import Module
from dynaflow_jax.runtime import cuda, extension

pytestmark = pytest.mark.skipif(extension.module is None, reason="the extension was not built")

COPY = "dynaflow_copy"
FORMS = (capture.captured, capture.enclosed, capture.tied)
X, W = jnp.arange(12.0).reshape(3, 4), jnp.linspace(0, 1, 20).reshape(4, 5)


def copies(fun, *args):
    """How many values are copied; the results must be the function's, whatever the token holds."""
    extension.register("cpu")
    program = jax.make_jaxpr(fun)(*args)
    evaluate = lambda started: capture._evaluate(program, args, started)  # noqa: E731
    for started in (-1, 0, 1):
        jax.tree.map(np.testing.assert_array_equal, evaluate(jnp.int32(started)), list(fun(*args)))
    waiting = capture._evaluate(program, args, jnp.int32(7), tied=True)
    jax.tree.map(np.testing.assert_array_equal, waiting, list(fun(*args)))
    return str(jax.make_jaxpr(evaluate)(jnp.int32(0))).count("dynaflow_copy")


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x, w: [x @ w, jnp.tanh(x)], 0),
        (lambda x, w: [x, x @ w], 1),
        (lambda x, w: [x.reshape(-1), x.T, x[None], w.reshape(5, 4)], 4),
        (lambda x, w: [jnp.ones(3), jnp.arange(4) * 2, jnp.float32(1)], 3),
        (lambda x, w: [(x + 1).reshape(-1), (x @ w).T], 0),
        (lambda x, w: [jnp.broadcast_to(x, (2, 3, 4)), x.sum(0)], 0),  # kernels: no view is larger or smaller
        (lambda x, w: [x[1:], (x @ w)[1:].reshape(-1), (x + 1)[0], jax.jit(lambda y: y[:1])(x + 1)], 4),
        (lambda x, w: [x[1:] + 1, jax.lax.dynamic_slice(x + 1, (1, 1), (1, 2))], 1),
        (lambda x, w: jax.lax.optimization_barrier((x, jnp.tanh(w))), 1),
        (lambda x, w: [jax.lax.dynamic_update_slice(x, w[:1, :2], (1, 1))], 1),
        (lambda x, w: [x.at[1].set(0.0), jnp.tanh(x).at[1].add(2.0)], 1),
        (lambda x, w: list(jax.jit(lambda x, w: (x, x @ w, w.reshape(-1)))(x, w)), 2),
        (lambda x, w: list(jax.jit(lambda y, w: (y, w))(x + 1, w)), 1),
        (lambda x, w: [jax.checkpoint(lambda x: x.reshape(-1))(x), jnp.sin(x)], 1),
        (lambda x, w: [jax.jit(lambda x: x.at[1].set(0.0))(x) + 1], 1),
        (lambda x, w: [jax.jit(lambda x: jax.jit(lambda y: y.at[1].set(0.0))(x + 1))(x)], 0),
    ],
    ids=[
        "kernels",
        "input",
        "views",
        "constants",
        "views of results",
        "sizes differ",
        "slices",
        "dynamic slice",
        "barrier",
        "update",
        "scatter",
        "jit",
        "jit of a result",
        "checkpoint",
        "scatter in a jit",
        "scatter into a result in a jit",
    ],
)
def test_views_and_constants_are_copied_and_nothing_else(fun, expected):
    assert copies(fun, X, W) == expected


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16", "float32", "complex64"])
def test_copies_are_exact(dtype):
    x = (X * 7).astype(dtype)
    assert copies(lambda x: [x, x.reshape(-1)], x) == 2


def test_an_operand_that_a_custom_call_writes_to_is_copied():
    def fun(x):
        same = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("writes", same, input_output_aliases={1: 0})(x + 1, x)

    program = jax.make_jaxpr(fun)(X)
    found = jax.make_jaxpr(lambda started: capture._evaluate(program, (X,), started))(jnp.int32(0))
    assert str(found).count("dynaflow_copy") == 1


def test_random_keys_are_copied():
    key = jax.random.key(3)
    program = jax.make_jaxpr(lambda key: [key])(key)
    extension.register("cpu")
    (got,) = jax.jit(lambda key: capture._evaluate(program, (key,), jnp.int32(1)))(key)
    assert (jax.random.key_data(got) == jax.random.key_data(key)).all()


def test_values_that_vary_over_devices():
    """As they do in the body of a ``shard_map`` that checks it; a partition is compiled for one device."""

    def fun(x, w):
        return [jnp.zeros_like(x).at[1].set(x[0]), jax.jit(lambda x: x @ w + jnp.ones(()))(x), w]

    mesh, spec = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,)), PartitionSpec("i")
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=[spec, spec, PartitionSpec()])
    (eqn,) = jax.make_jaxpr(mapped)(X, W).eqns
    body = jax.extend.core.ClosedJaxpr(compat.open_jaxpr(eqn.params["jaxpr"]), ())
    assert "pvary" in str(body)
    extension.register("cpu")
    for tied in (False, True):
        got = jax.jit(functools.partial(capture._evaluate, body, tied=tied))((X, W), jnp.int32(1))
        jax.tree.map(np.testing.assert_array_equal, got, fun(X, W))


def test_a_scalar_that_is_passed_on_is_copied_whatever_is_done_to_it():
    assert copies(lambda loss: [loss[None], loss * 1], jnp.float32(jnp.nan)) == 2


def put(cache, row, place):
    return jax.vmap(lambda cache, row, place: cache.at[place].set(row))(cache, row, place)


def decode(cache, row, place):
    cache = jax.jit(put)(cache, row, place)
    return [jnp.einsum("bd,bnd->bn", row, cache), cache]


def decode_at_known_places(cache, row, _):
    return decode(cache, row, jnp.arange(len(row)) % 3)


def positions(cache, row, _):
    angles = jnp.arange(cache.shape[1])[:, None] / 10000 ** (jnp.arange(cache.shape[2]) / cache.shape[2])
    angles = jax.lax.optimization_barrier(angles)
    return [cache * jnp.sin(angles) + jnp.cos(angles) @ row.T @ row]


def given_back(cache, row, place):
    return [cache.reshape(-1), row, row.T.reshape(row.shape), jnp.ones_like(row), jnp.sin(row), jnp.sin(row)]


def unchanged(cache, row, place):
    return [place * 1, place + 0, jnp.where(place == place, place, 0), row * 1, jnp.sin(row)]


def accumulated(cache, row, place):
    return [jnp.zeros_like(cache).at[:, place].add(cache[:, place]), jax.jit(lambda n: jnp.full(row.shape, n) + row)(3)]


def stand_in():
    """Lets the CPU's compiler have the calls that only GPUs' do something for."""
    extension.register("cpu")
    copying = dict(extension.module.handlers("cpu"))[COPY]
    for name in ("dynaflow_capture_begin", "dynaflow_capture_end"):
        jax.ffi.register_ffi_target(name, copying, platform="cpu")


BARRIERS = pytest.mark.skipif(jax.__version_info__[:2] < (0, 11), reason="XLA's CPU compiler drops barriers first")


@BARRIERS
@pytest.mark.parametrize("fun", [decode, decode_at_known_places, positions, given_back, unchanged, accumulated])
def test_nothing_is_left_outside_of_the_capture(fun):
    """Compiled for the CPU, whose compiler copies and schedules as that for GPUs does, with stand-ins for the calls."""
    stand_in()
    shapes = [jax.ShapeDtypeStruct((8, 16, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)]
    shapes.append(jax.ShapeDtypeStruct((8,), jnp.int32))

    def left_outside(form):
        compiled = jax.jit(form(fun), keep_unused=True).lower(*shapes).compile()
        return cuda.outside_of_capture(compiled.as_text())

    assert left_outside(capture.tied) is None  # the last resort


STRATEGIES = {
    "tensor_parallel": df.strategies.NanoFlow(),
    "sequence_parallel": df.strategies.AsyncTensorParallel(),
    "expert_parallel": df.strategies.Comet(),
    "fully_sharded": df.strategies.ParameterPrefetch(),
    "data_parallel": df.strategies.GradientBuckets(1500),
}


@pytest.fixture
def modules(monkeypatch):
    """The partitions that are dispatched, before they are compiled."""
    found, on_host = [], Module.on_host

    def noted(module):
        found.append(module)
        return on_host(module)

    monkeypatch.setattr(Module, "on_host", noted)
    return found


def lower(name):
    model = getattr(models_parallel, name)()
    flow = df.dynaflow(model.fun, scheduler=STRATEGIES[name], backend="dispatch", batch_axes=model.axes)
    jax.jit(model.mapped(2, flow)).lower(*model.args)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_form_of_every_partition_can_be_lowered(name, modules):
    """Which one XLA leaves nothing outside of, only a compiler for GPUs tells: all have to be there."""
    lower(name)
    assert modules
    for module in modules:
        for form in FORMS:
            module.in_capture(form)


@BARRIERS
@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_of_any_partition_is_left_outside(name, modules):
    """A number that a partition only passes on, say, which XLA would copy at its own time."""
    stand_in()
    lower(name)
    for module in modules:
        compiled = module.in_capture(capture.tied).compile()
        assert cuda.outside_of_capture(compiled.as_text()) is None, module.task.name


@BARRIERS
@pytest.mark.parametrize("form", FORMS[1:])
def test_weights_that_are_read_to_the_end_are_written_over_inside(form, modules, monkeypatch):
    """XLA does not see that the backward pass has read them when they are replaced, and copies; not everywhere."""
    monkeypatch.setattr(builder, "IN_PLACE_OUTPUT_BYTES", 1)
    stand_in()

    def step(ws, x):
        def loss(ws):
            y = x
            for w, v in ws:
                y = y + jax.nn.silu(y @ w) @ v
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(ws)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), x * 2

    flow = df.dynaflow(step, scheduler=df.strategies.Sequential(), backend="dispatch", donate_argnums=0)
    jax.jit(flow, donate_argnums=0).lower([(jnp.ones((16, 32)), jnp.ones((32, 16)))] * 3, jnp.ones((8, 16)))
    (module,) = modules
    assert len(module.donated) == 6
    text = module.in_capture(form).compile().as_text()
    assert cuda.outside_of_capture(text) is None
    assert text.count(f'"{COPY}"') >= 6
