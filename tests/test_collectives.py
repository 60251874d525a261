"""``df.collectives``: what JAX's collectives give, alone and in plans of either lowering, with derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax import collectives as c
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import extension

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (virtual) devices")

BACKENDS = ["alone", "xla", "dispatch"]
NUMBERS = "int8 uint8 int16 uint16 int32 uint32 bfloat16 float16 float32 complex64".split()
SMALL = "int4 uint4 float8_e4m3fn float8_e5m2".split()

# Name: the function, its counterpart on the array of all devices' rows (device, row, column), how results are sharded.
CASES = {
    "all_reduce": (lambda x: c.all_reduce(x, "i"), lambda x: x.sum(0), P()),
    "all_reduce max": (lambda x: c.all_reduce(x, "i", op="max"), lambda x: x.max(0), P()),
    "all_reduce min": (lambda x: c.all_reduce(x, "i", op="min"), lambda x: x.min(0), P()),
    "all_gather": (lambda x: c.all_gather(x, "i"), lambda x: x.reshape(-1, x.shape[-1]), P()),
    "all_gather axis 1": (lambda x: c.all_gather(x, "i", axis=1), lambda x: jnp.concatenate(list(x), 1), P()),
    "all_gather stacked": (lambda x: c.all_gather(x, "i", tiled=False), lambda x: x, P()),
    "reduce_scatter": (lambda x: c.reduce_scatter(x, "i"), lambda x: x.sum(0), P("i")),
    "reduce_scatter axis 1": (lambda x: c.reduce_scatter(x, "i", axis=1), lambda x: x.sum(0), P(None, "i")),
    "all_to_all": (
        lambda x: c.all_to_all(x, "i", split_axis=0, concat_axis=0),
        lambda x: jnp.swapaxes(x.reshape(x.shape[0], x.shape[0], -1, x.shape[-1]), 0, 1).reshape(-1, x.shape[-1]),
        P("i"),
    ),
    "all_to_all to columns": (
        lambda x: c.all_to_all(x, "i", split_axis=1, concat_axis=0),
        lambda x: x.reshape(-1, x.shape[-1]),
        P(None, "i"),
    ),
    "permute": (
        lambda x: c.permute(x, "i", [(0, 1), (1, 0)]),
        lambda x: jnp.concatenate([x[1], x[0], *jnp.zeros_like(x[2:])]),
        P("i"),
    ),
}
SUMS = ("all_reduce", "reduce_scatter", "reduce_scatter axis 1")
ORDERED = ("all_reduce max", "all_reduce min")


def mapped(fun, devices, out, backend):
    if backend == "dispatch" and extension.module is None:
        pytest.skip("the extension was not built")
    mesh = jax.make_mesh((devices,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    if backend != "alone":
        fun = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend=backend)
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=out, check_vma=False))


def numbers(*shape, dtype="float32"):
    """Small whole numbers, whose sums are exact in every order; of either sign where there is one."""
    low = 0 if dtype.startswith("u") else -2
    return jnp.asarray(np.random.default_rng(0).integers(low, 3, shape), "int32").astype(dtype)


@pytest.mark.filterwarnings("error::dynaflow_jax.errors.DispatchWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_values(name, devices, backend):
    fun, want, out = CASES[name]
    if name == "permute" and devices == 1:
        pytest.skip("needs two devices")
    x = numbers(devices, 4, 8)
    got = mapped(fun, devices, out, backend)(x.reshape(-1, 8))
    np.testing.assert_array_equal(got, want(x))


@pytest.mark.filterwarnings("error::dynaflow_jax.errors.DispatchWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bool", *NUMBERS, *SMALL])
def test_dtypes(dtype, backend):
    """All collectives in one program: whatever moves keeps its bits, and sums are those of the dtype."""
    moving = [name for name in CASES if name not in (*SUMS, *ORDERED)]
    named = [*moving, *(() if dtype == "bool" else SUMS), *(() if dtype in ("bool", "complex64") else ORDERED)]
    x = numbers(4, 4, 8, dtype="int32").astype(dtype) if dtype != "bool" else numbers(4, 4, 8) > 0
    if dtype in SMALL:
        named = moving  # how sums of these round is XLA's business
    funs = [CASES[name][0] for name in named]
    run = mapped(lambda x: [fun(x) for fun in funs], 4, [CASES[name][2] for name in named], backend)
    for name, got in zip(named, run(x.reshape(-1, 8)), strict=True):
        want = CASES[name][1](x)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(
            got.astype("float32") if dtype in SMALL else got,
            want.astype("float32") if dtype in SMALL else want.astype(dtype),
            err_msg=name,
        )


@pytest.mark.filterwarnings("error::dynaflow_jax.errors.DispatchWarning")
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_keys(backend):
    keys = jax.random.split(jax.random.key(0), 8)
    got = mapped(lambda keys: c.all_gather(keys, "i"), 4, P(), backend)(keys)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(keys))


@pytest.mark.filterwarnings("error::dynaflow_jax.errors.DispatchWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ORDERED])
def test_derivatives(name, backend):
    """Of a sum of squares of the results, which ``check_grads`` would take for one device's alone."""
    fun, want, _ = CASES[name]
    x = numbers(4, 4, 8)

    def loss(x):
        y = fun(x)
        # Every device has all of a gathered or reduced value: each takes its share of the loss.
        return (y**2).sum() / (4 if CASES[name][2] == P() else 1)

    got = mapped(jax.grad(loss), 4, P("i"), backend)(x.reshape(-1, 8))
    np.testing.assert_allclose(got.reshape(x.shape), jax.grad(lambda x: (want(x) ** 2).sum())(x), rtol=1e-6)


def test_mean_and_several_axes():
    mesh = jax.make_mesh((2, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    fun = lambda x: c.all_reduce(x, ("i", "j"), op="mean")  # noqa: E731
    run = jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P(("i", "j")), out_specs=P()))
    x = numbers(4, 8)
    np.testing.assert_array_equal(run(x), x.mean(0, keepdims=True))


def test_pytrees():
    run = mapped(lambda x: c.all_reduce({"a": x, "b": (x + 1,)}, "i"), 4, P(), "alone")
    got, x = run(numbers(4, 8)), numbers(4, 8)
    np.testing.assert_array_equal(got["a"], x.sum(0, keepdims=True))
    np.testing.assert_array_equal(got["b"][0], (x + 1).sum(0, keepdims=True))


def test_each_is_an_operator():
    def fun(x):
        with df.mark("layer"):
            y = c.all_gather(jnp.sin(x), "i", name="tokens")
            z = jnp.cos(y)
        return c.reduce_scatter(z, "i")

    flow = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend="xla")
    graphs = []
    mapped(lambda x: (graphs.append(flow.graph(x)), fun(x))[1], 4, P("i"), "alone")(numbers(8, 8))
    found = {op.name: op for op in graphs[0]}
    assert list(found) == ["layer", "tokens", "reduce_scatter"]
    assert [op.bound for op in graphs[0]].count("network") == 2
    assert found["tokens"].tags == {"network"}


def test_independent_collectives_do_not_wait_for_each_other():
    """JAX lists an effect for each use of a mesh axis; that is no order."""

    def fun(x):
        return c.all_reduce(x, "i"), c.all_reduce(x + 1, "i")

    flow = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend="xla")
    graphs = []
    mapped(lambda x: (graphs.append(flow.graph(x)), fun(x))[1], 4, P(), "alone")(numbers(4, 8))
    network = [op for op in graphs[0] if op.bound == "network"]
    assert len(network) == 2
    assert not {op.index for op in network} & set(functools.reduce(tuple.__add__, (op.predecessors for op in network)))


def test_errors():
    with pytest.raises(DynaFlowError, match="all_reduce: op is one of 'sum', 'mean', 'max', 'min', not 'prod'"):
        c.all_reduce(jnp.ones(2), "i", op="prod")
    with pytest.raises(NameError, match="i"):
        c.all_reduce(jnp.ones(2), "i")
    for run in (
        lambda x: c.reduce_scatter(x, "i"),
        lambda x: c.all_to_all(x, "i", split_axis=0, concat_axis=0),
        lambda x: c.permute(x, "i", [(0, 1), (0, 2)]),
    ):
        with pytest.raises(ValueError, match=r"\d"):
            mapped(run, 4, P("i"), "alone")(jnp.ones((12, 2)))
