"""All-reduces that normalize what they add: found where a norm follows, however written, and nowhere else."""

import functools

import flax.linen as nn
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.sharding import PartitionSpec as P
from test_communication import DEVICES, Strictly, mesh_of, programs  # noqa: F401 (a fixture)

import dynaflow_jax as df
from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime import program as wire

pytestmark = [
    pytest.mark.skipif(extension.module is None, reason="the extension was not built"),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs several (virtual) devices"),
]
WIDTH, DEPTH, EPS = 64, 3, 1e-5


def scale_of(x):
    return lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + EPS)


def linen(x, w):
    return nn.RMSNorm(epsilon=EPS, dtype=x.dtype).apply({"params": {"scale": w}}, x)


def rounded_once(x, w):
    return (x.astype(jnp.float32) * scale_of(x) * w.astype(jnp.float32)).astype(x.dtype)


def weighed_last(x, w):
    """As Llama: what is normalized is rounded before it is weighed."""
    return (x.astype(jnp.float32) * scale_of(x)).astype(x.dtype) * w.astype(x.dtype)


def scale_rounded(x, w):
    return x * scale_of(x).astype(x.dtype) * w.astype(x.dtype)


def without_weight(x, w):
    del w
    return (x.astype(jnp.float32) * scale_of(x)).astype(x.dtype)


def all_in_its_type(x, w):
    del w
    return x * scale_of(x).astype(x.dtype)


NORMS = {
    linen: (False, False),
    rounded_once: (False, False),
    weighed_last: (False, True),
    scale_rounded: (True, True),
    without_weight: (False, False),
    all_in_its_type: (True, False),
}
"""And whether each rounds the scale, and what is normalized, where its type is not float32."""


def layers(norm, residual=True):
    def fun(ws, g, x):
        for w, v in ws:
            with df.mark("mlp"):
                y = jax.nn.silu(norm(x, g) @ w) @ v
            total = lax.psum(y, "i")
            x = x + total if residual else total
        return norm(x, g)

    return fun


def arguments(dtype, weight=None):
    keys = jax.random.split(jax.random.key(0), 2 * DEPTH + 2)
    draw = lambda key, *shape: (jax.random.normal(key, shape) / 8).astype(dtype)  # noqa: E731
    ws = [(draw(keys[2 * i], WIDTH, 128), draw(keys[2 * i + 1], 128, WIDTH)) for i in range(DEPTH)]
    g = (1 + jax.random.normal(keys[-1], (WIDTH,)) / 10).astype(weight or dtype)
    return ws, g, 8 * draw(keys[-2], 4, 16, WIDTH)


def scheduled(fun, devices=2, scheduler=None, **options):
    specs = [(P(None, "i"), P("i"))] * DEPTH, P(), P()
    return Strictly(fun, mesh_of(i=devices), specs, P(), scheduler or df.strategies.Sequential(), **options)


def norms_in(found):
    """Of every device the same: what its sums are told of norms."""
    told = [[command.norm for command in program.commands if command.kind == wire.SUM] for program in found]
    assert all(one == told[0] for one in told)
    return told[0] if told else []


def assert_near(got, want, roundings):
    """Within so many roundings of the largest magnitude, which layers pass on."""
    unit = 2.0 ** (-8 if got.dtype == jnp.bfloat16 else -22)
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=roundings * unit * np.abs(want).max())


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norms_behind_sums(norm, dtype, devices, programs):  # noqa: F811
    args = arguments(dtype)
    run = scheduled(layers(norm), devices)
    assert_near(run(*args), run.plain(*args), 8)
    weight = None if norm in (without_weight, all_in_its_type) else dtype
    rounds = NORMS[norm] if dtype == "bfloat16" else (False, False)
    assert norms_in(programs) == [wire.Norm(WIDTH, pytest.approx(EPS), True, weight, *rounds)] * DEPTH


@pytest.mark.parametrize("weight", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_another_type(dtype, weight, programs):  # noqa: F811
    args = arguments(dtype, weight=weight)
    run = scheduled(layers(rounded_once))
    assert_near(run(*args), run.plain(*args), 8)
    assert [norm is not None for norm in norms_in(programs)] == [weight in ("float32", dtype)] * DEPTH


def test_a_norm_without_a_residual(programs):  # noqa: F811
    args = arguments("float32")
    run = scheduled(layers(rounded_once, residual=False))
    assert_near(run(*args), run.plain(*args), 8)
    assert [norm.residual for norm in norms_in(programs)] == [False] * DEPTH


def one(fun):
    """A function of a sum, a residual and a weight, behind something that is computed on every device."""

    def around(x, r, w):
        with df.mark("makes"):
            y = jnp.tanh(x)
        total = lax.psum(y, "i")
        with df.mark("takes"):
            return fun(total, r, w)

    run = Strictly(around, mesh_of(i=2), (P("i"), P(), P()), P(), df.strategies.Sequential(), check=False)

    def check(width=WIDTH, dtype="float32"):
        keys = jax.random.split(jax.random.key(0), 3)
        x, r = (jax.random.normal(key, (rows, width)).astype(dtype) for key, rows in zip(keys, (16, 8), strict=False))
        w = (1 + jax.random.normal(keys[2], (width,)) / 10).astype(dtype)
        for got, want in zip(jax.tree.leaves(run(x, r, w)), jax.tree.leaves(run.plain(x, r, w)), strict=True):
            assert_near(got, want, 8)

    return check


GIVEN = {
    "the norm": lambda t, r, w: rounded_once(t + r, w),
    "both": lambda t, r, w: (s := t + r, rounded_once(s, w)),
    "the norm and more": lambda t, r, w: (jnp.sin(y := rounded_once(t + r, w)), y),
    "more of both": lambda t, r, w: jnp.sin(rounded_once(s := t + r, w)) + s,
    "the norm of the sum alone": lambda t, r, w: (rounded_once(t, w), r),
    "the sum, its norm and more": lambda t, r, w: (t, rounded_once(t, w), t + r),
    "the same twice": lambda t, r, w: (y := rounded_once(t + r, w), y),
    "in a call": lambda t, r, w: jax.jit(lambda t, r: rounded_once(t + r, w))(t, r),
    "the other way round": lambda t, r, w: rounded_once(r + t, w),
    "twice the sum": lambda t, r, w: rounded_once(t + t, w) + r,
}


@pytest.mark.parametrize("what", GIVEN)
def test_what_is_given(what, programs):  # noqa: F811
    one(GIVEN[what])()
    (norm,) = norms_in(programs)
    assert (norm is not None) == (what != "twice the sum")


LEFT_ALONE = {
    "the sum is read elsewhere": lambda t, r, w: rounded_once(t + r, w) + jnp.sin(t),
    "a mean is subtracted": lambda t, r, w: rounded_once((h := t + r) - h.mean(-1, keepdims=True), w),
    "of columns": lambda t, r, w: rounded_once((t + r).T, w[:8]).T,
    "the weight is computed": lambda t, r, w: rounded_once(t + r, 1 + w),
    "the residual is computed": lambda t, r, w: rounded_once(t + jnp.sin(r), w),
    "of a part": lambda t, r, w: rounded_once((t + r)[:, :32], w[:32]),
    "scaled before": lambda t, r, w: rounded_once(0.5 * t + r, w),
    "sent at once": lambda t, r, w: lax.psum(rounded_once(t + r, w), "i"),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
def test_what_is_left_alone(what, programs):  # noqa: F811
    one(LEFT_ALONE[what])()
    assert not any(norms_in(programs))


@pytest.mark.parametrize(
    ("width", "dtype", "fused"),
    [
        (8, "bfloat16", True),
        (12, "bfloat16", False),
        (12, "float32", True),
        (16384, "bfloat16", True),
        (8192, "float32", True),
        (8196, "float32", False),
        (64, "float16", False),
    ],
)
def test_rows_that_the_executor_takes(width, dtype, fused, programs):  # noqa: F811
    one(GIVEN["both"])(width, dtype)
    assert any(norms_in(programs)) == fused


def test_who_waited_for_a_norm_waits_for_the_exchange(programs):  # noqa: F811
    """The task of the norm is gone, and with it what another stream has waited for."""

    class Apart(df.OpScheduler):
        def schedule(self, ctx):
            steps = {}
            for op in ctx.all_ops():
                steps[op.name] = ctx.execute(op, stream=op.name, after=[s for n, s in steps.items() if n == "norm"])

    def fun(x, r, w):
        with df.mark("makes"):
            y = jnp.tanh(x)
        total = lax.psum(y, "i")
        with df.mark("norm"):
            normed = rounded_once(total + r, w)
        with df.mark("other"):
            return normed, jnp.sin(r)

    run = Strictly(fun, mesh_of(i=2), (P("i"), P(), P()), P(), Apart(), check=False)
    x, r, w = jnp.ones((16, WIDTH)), jnp.ones((8, WIDTH)), jnp.ones(WIDTH)
    for got, want in zip(run(x, r, w), run.plain(x, r, w), strict=True):
        assert_near(got, want, 8)
    assert any(norms_in(programs))
    launched = [c.operator for c in programs[0].commands if c.kind == wire.LAUNCH]
    assert launched == ["makes[0]", "other[0]"]


def test_layers_of_a_loop(programs):  # noqa: F811
    """Their weights are parts of what is stacked."""

    def fun(ws, gs, x):
        def layer(x, given):
            (w, v), g = given
            with df.mark("mlp"):
                y = jax.nn.silu(x @ w) @ v
            x = x + lax.psum(y, "i")
            with df.mark("norm"):
                return rounded_once(x, g), None

        return lax.scan(layer, x, (ws, gs))[0]

    ws, g, x = arguments("float32")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    specs = (P(None, None, "i"), P(None, "i")), P(), P()
    run = Strictly(fun, mesh_of(i=2), specs, P(), df.strategies.Sequential(), check=False)
    args = stacked, jnp.stack([g, 2 * g, 3 * g]), x
    assert_near(run(*args), run.plain(*args), 16)
    assert [norm is not None for norm in norms_in(programs)] == [True] * DEPTH


def test_sums_that_a_loop_carries(programs):  # noqa: F811
    """To the next iteration, which adds them to its residual and begins with their norm."""

    def fun(ws, gs, g, x):
        def layer(carry, given):
            (x, total), ((w, v), g) = carry, given
            with df.mark("norm"):
                x = x + total
                y = rounded_once(x, g)
            with df.mark("mlp"):
                y = jax.nn.silu(y @ w) @ v
            return (x, lax.psum(y, "i")), None

        x, total = lax.scan(layer, (x, x), (ws, gs))[0]
        return rounded_once(x + total, g)

    ws, g, x = arguments("float32")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    specs = (P(None, None, "i"), P(None, "i")), P(), P(), P()
    run = Strictly(fun, mesh_of(i=2), specs, P(), df.strategies.Sequential(), check=False)
    args = stacked, jnp.stack([g, 2 * g, 3 * g]), g, x
    assert_near(run(*args), run.plain(*args), 16)
    assert [norm is not None for norm in norms_in(programs)] == [True] * DEPTH
    launched = [c.operator for c in programs[0].commands if c.kind == wire.LAUNCH]
    assert not [name for name in launched if "scan" in name]


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("scheduler", [df.strategies.NanoFlow(2), df.strategies.TokenWeave(), None])
def test_strategies_that_split(scheduler, check):
    args = arguments("float32")
    run = scheduled(layers(weighed_last), scheduler=scheduler, check=check, batch_axes=(None, None, 0))
    assert_near(run(*args), run.plain(*args), 16)


@pytest.mark.parametrize("check", [True, False])
def test_gradients_of_shared_weights(check, programs):  # noqa: F811
    """The backward pass computes what the forward pass has normalized again, behind the same sums."""
    model = jax.checkpoint(layers(rounded_once))

    def fun(*args):
        return jax.grad(lambda *args: jnp.sum(model(*args) ** 2), argnums=(0, 2))(*args)

    specs = [(P(None, "i"), P("i"))] * DEPTH, P(), P()
    out_specs = specs[0], P() if check else P("i")  # where nothing is checked, each device has a part of it
    run = Strictly(fun, mesh_of(i=2), specs, out_specs, df.strategies.Sequential(), check=check)
    args = arguments("float32")
    for got, want in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(run.plain(*args)), strict=True):
        assert_near(got, want, 64)
    assert any(norms_in(programs))


def test_gradients_of_shared_rows():
    """What is read behind a sum are operators whose types say what varies over devices, and values that do not."""

    def loss(ws, g, x):
        for w, v in ws:
            x = x + jax.nn.silu(rounded_once(x, g) @ w) @ v
        return jnp.sum(rounded_once(x, g) ** 2)

    def fun(ws, g, x):
        gradients = jax.grad(loss, argnums=(0, 1))(ws, g, x)
        return jax.tree.map(lambda w, d: w - 0.01 * d, (ws, g), gradients)

    run = Strictly(fun, mesh_of(i=2), (P(), P(), P("i")), P(), df.strategies.Sequential())
    args = arguments("float32")
    for got, want in zip(jax.tree.leaves(run(*args)), jax.tree.leaves(run.plain(*args)), strict=True):
        assert_near(got, want, 64)


def test_a_serial_run_has_the_same_bits(monkeypatch):
    args = arguments("bfloat16")
    got = scheduled(layers(linen))(*args)
    monkeypatch.setenv("DYNAFLOW_SERIAL", "1")
    np.testing.assert_array_equal(got, scheduled(layers(linen))(*args))


@given(
    norm=st.sampled_from(list(NORMS)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    residual=st.booleans(),
    reads=st.sets(st.sampled_from(["total", "sum", "norm"]), min_size=1),
    returns=st.lists(st.sampled_from(["sum", "norm", "product"]), min_size=1, max_size=3),
    shape=st.sampled_from([(8,), (2, 4), (1, 2, 4)]),
    width=st.sampled_from([8, 16, 20, 64]),
    devices=st.sampled_from(DEVICES),
    check=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_whatever_is_read_and_returned(norm, dtype, residual, reads, returns, shape, width, devices, check):
    def fun(x, r, g, w):
        with df.mark("makes"):
            y = jnp.tanh(x @ w)
        total = lax.psum(y, "i")
        with df.mark("takes"):
            s = total + r if residual else total
            values = {"total": total, "sum": s, "norm": norm(s, g)}
            values["product"] = functools.reduce(jnp.add, (values[name] @ w for name in sorted(reads)))
        again = lax.psum(jnp.tanh(values["product"]), "i")
        return [norm(again, g), *(values[name] for name in returns)]

    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape).astype(dtype)  # noqa: E731
    args = draw(keys[0], *shape, width), draw(keys[1], *shape, width), draw(keys[2], width), draw(keys[3], width, width)
    run = Strictly(fun, mesh_of(i=devices), P(), P(), df.strategies.Sequential(), check=check)
    for got, want in zip(run(*args), run.plain(*args), strict=True):
        assert_near(got, want, 32)
