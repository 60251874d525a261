"""Collectives of dispatched plans on the host twin: devices exchange memory, and get what XLA's collectives give."""

import functools
import threading
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import models_parallel
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax.errors import DispatchWarning
from dynaflow_jax.lowering import builder, dispatch
from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime import program as wire
from dynaflow_jax.runtime.arrivals import releases
from dynaflow_jax.runtime.work import Exchange, Partition

pytestmark = [
    pytest.mark.skipif(extension.module is None, reason="the extension was not built"),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs several (virtual) devices"),
]
DEVICES = [count for count in (2, 4, 8) if count <= jax.device_count()]
MANY = DEVICES[-1] if DEVICES else 1
SOME = min(MANY, 4)


def mesh_of(**axes):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:count]
    )


class Strictly:
    """A function inside ``shard_map``, as it is and dispatched; a plan that is lowered to XLA is an error."""

    def __init__(self, fun, mesh, in_specs, out_specs, scheduler=None, check=True, **options):
        flow = df.dynaflow(
            fun, scheduler=scheduler or df.strategies.SingleBatchOverlap(), backend="dispatch", **options
        )
        specs = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "check_vma": check}
        self.plain = jax.jit(jax.shard_map(fun, **specs))
        self.flow = jax.jit(jax.shard_map(flow, **specs))

    def __call__(self, *args):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DispatchWarning)
            return self.flow(*args)

    def check(self, *args, exact=True):
        with jax.default_matmul_precision("highest"):  # GPUs round float32 otherwise, each product in its own way
            got, want = self(*args), self.plain(*args)

        def compare(a, b):
            if exact:
                np.testing.assert_array_equal(a, b)
            else:
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)

        jax.tree.map(compare, got, want)


def numbers(*shape, dtype=jnp.float32, seed=0):
    """Small whole numbers, whose sums are exact in every order."""
    return jax.random.randint(jax.random.key(seed), shape, -8, 8).astype(dtype)


class Told(NamedTuple):
    """What a device's executor is told to run."""

    streams: list[wire.Stream]
    commands: list[wire.Command]


@pytest.fixture
def programs(monkeypatch):
    """The programs that are bound, of every device."""
    found, real = [], wire.encode

    def encode(version, name, streams, partitions, inputs, outputs, commands, devices):
        found.append(Told(streams, commands))
        return real(version, name, streams, partitions, inputs, outputs, commands, devices)

    monkeypatch.setattr(wire, "encode", encode)
    return found


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "i"), P()),
    "pmean": (lambda x: lax.pmean(x, "i"), P()),
    "pmax": (lambda x: lax.pmax(x, "i"), P()),
    "pmin": (lambda x: lax.pmin(x, "i"), P()),
    "all_gather": (lambda x: lax.all_gather(x, "i"), P(None, "i")),
    "all_gather tiled": (lambda x: lax.all_gather(x, "i", tiled=True), P("i")),
    "all_gather on axis 1": (lambda x: lax.all_gather(x, "i", axis=1), P("i")),
    "all_gather tiled on axis 1": (lambda x: lax.all_gather(x, "i", axis=1, tiled=True), P("i")),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "i", tiled=True), P("i")),
    "psum_scatter on axis 1": (lambda x: lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True), P("i")),
    "psum_scatter untiled": (lambda x: lax.psum_scatter(x[: lax.axis_size("i")], "i"), P("i")),
    "all_to_all": (lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True), P("i")),
    "all_to_all on other axes": (lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True), P("i")),
    "all_to_all back": (lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True), P("i")),
    "all_to_all untiled": (lambda x: lax.all_to_all(x[: lax.axis_size("i")], "i", 0, 1), P("i")),
    "ppermute": (lambda x: lax.ppermute(x, "i", [(0, 1), (1, 0)]), P("i")),
    "ppermute to one": (lambda x: lax.ppermute(x, "i", [(0, 1)]), P("i")),
    "ppermute to itself": (lambda x: lax.ppermute(x, "i", [(1, 1)]), P("i")),
    "axis_index": (lambda x: x * lax.axis_index("i"), P("i")),
    "a sum of sums": (lambda x: lax.psum(lax.psum(x, "i") * x, "i"), P()),
    "a sum of what was gathered": (lambda x: lax.psum(lax.all_gather(x, "i", axis=1), "i"), P("i")),
    "a scalar": (lambda x: lax.psum(x.sum(), "i"), P()),
}


@pytest.mark.parametrize("devices", [1, *DEVICES])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name, devices):
    fun, out = COLLECTIVES[name]
    if "ppermute" in name and devices == 1:
        pytest.skip("needs two devices")
    # check_vma has no way to say that a gathered value is the same everywhere.
    run = Strictly(fun, mesh_of(i=devices), P("i"), out, check=False)
    for seed in range(3):
        run.check(numbers(8 * devices, 16, seed=seed), exact=name != "pmean")


@pytest.mark.parametrize("devices", [1, *DEVICES])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_gathering_what_is_then_the_same_everywhere(axis, tiled, devices):
    """Another primitive than the gathering of what may vary."""
    fun = lambda x: lax.all_gather(x, "i", axis=axis, tiled=tiled, to="invarying")  # noqa: E731
    run = Strictly(fun, mesh_of(i=devices), P("i"), P())
    run.check(numbers(2 * devices, 6))


@pytest.mark.parametrize("marked", [False, True])
def test_a_collective_that_is_not_dispatched_is_named(marked):
    def fun(x):
        sizes = jnp.ones(2, jnp.int32)
        offsets = jnp.arange(2, dtype=jnp.int32)
        target = jnp.full(2, lax.axis_index("i"), jnp.int32)
        if not marked:
            return lax.ragged_all_to_all(x, x * 0, offsets, sizes, target, sizes, axis_name="i")
        with df.mark("exchange"):
            return jnp.sin(lax.ragged_all_to_all(jnp.tanh(x), x * 0, offsets, sizes, target, sizes, axis_name="i"))

    flow = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend="dispatch")
    mapped = jax.shard_map(flow, mesh=mesh_of(i=2), in_specs=P("i"), out_specs=P("i"), check_vma=False)
    with pytest.warns(DispatchWarning, match="communicates by ragged_all_to_all, which is not dispatched"):
        jax.eval_shape(mapped, numbers(4, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "int32", "uint32", "complex64"])
def test_dtypes(dtype):
    run = Strictly(
        lambda x: (lax.psum(x, "i"), lax.all_gather(x, "i", axis=1)),
        mesh_of(i=SOME),
        P("i"),
        (P(), P("i")),
        check=False,
    )
    run.check(numbers(8, 3, dtype=dtype))


@pytest.mark.parametrize("size", [1, 7, 1 << 16, (1 << 17) + 5])
def test_large_sums_take_two_steps(size):
    Strictly(lambda x: lax.psum(x, "i"), mesh_of(i=SOME), P("i"), P()).check(numbers(SOME, size))


@pytest.mark.parametrize("axes", ["i", "j", ("i", "j"), ("j", "i")])
def test_groups_of_a_mesh(axes):
    if MANY < 8:
        pytest.skip("needs 8 devices")
    mesh = mesh_of(i=2, j=4)
    fun = lambda x: (lax.psum(x, axes), lax.all_gather(x, axes), x * lax.axis_index(axes))  # noqa: E731
    out = (
        P(tuple({"i", "j"} - {*((axes,) if isinstance(axes, str) else axes)}) or None),
        P(None, ("i", "j")),
        P(("i", "j")),
    )
    Strictly(fun, mesh, P(("i", "j")), out, check=False).check(numbers(16, 3))


def parallel(ws, x):
    """Two tensor-parallel layers."""
    for up, down in ws:
        with df.mark("mlp"):
            y = jnp.tanh(x @ up) @ down
        x = x + lax.psum(y, "model")
    return x


def layers(width=16, count=3):
    keys = jax.random.split(jax.random.key(0), 2 * count)
    return [
        (jax.random.normal(a, (width, 32)) / 4, jax.random.normal(b, (32, width)) / 4)
        for a, b in zip(keys[::2], keys[1::2], strict=True)
    ]


SPECS = [(P(None, "model"), P("model", None))] * 3


@pytest.mark.parametrize("devices", DEVICES[:2])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("check", [True, False])
def test_tensor_parallel_layers(devices, micro_batches, check):
    scheduler = df.strategies.NanoFlow(micro_batches)
    run = Strictly(parallel, mesh_of(model=devices), (SPECS, P()), P(), scheduler, check, batch_axes=(None, 0))
    for seed in range(5):
        run.check(layers(), jax.random.normal(jax.random.key(seed), (12, 16)), exact=False)


def test_streams_and_one_stream_agree(monkeypatch):
    """Bit by bit: the same partitions, overlapped and one after the other."""
    results = []
    for serial in ("0", "1"):
        monkeypatch.setenv("DYNAFLOW_SERIAL", serial)
        run = Strictly(
            parallel, mesh_of(model=SOME), (SPECS, P()), P(), df.strategies.NanoFlow(2), batch_axes=(None, 0)
        )
        results.append([np.asarray(run(layers(), jax.random.normal(jax.random.key(s), (12, 16)))) for s in range(20)])
    np.testing.assert_array_equal(*results)


def test_data_and_tensor_parallel():
    if MANY < 8:
        pytest.skip("needs 8 devices")
    mesh = mesh_of(data=2, model=4)
    run = Strictly(parallel, mesh, (SPECS, P("data")), P("data"), df.strategies.NanoFlow(2), batch_axes=(None, 0))
    run.check(layers(), jax.random.normal(jax.random.key(1), (12, 16)), exact=False)


def test_a_loop_over_layers():
    def looped(stacked, x):
        return lax.scan(lambda x, w: (parallel([w], x), None), x, stacked)[0]

    stacked = jax.tree.map(lambda *w: jnp.stack(w), *layers())
    specs = ((P(None, None, "model"), P(None, "model", None)), P())
    run = Strictly(looped, mesh_of(model=SOME), specs, P(), df.strategies.NanoFlow(2), batch_axes=(None, 0))
    run.check(stacked, jax.random.normal(jax.random.key(1), (12, 16)), exact=False)


CARRIED = {
    "a sum": lambda x, t: (x + t, lax.psum(jnp.tanh(x + t), "i")),
    "a mean": lambda x, t: (jnp.tanh(x + t), lax.pmean(x * t, "i")),
    "a sum that fades": lambda x, t: (lax.psum(jnp.tanh(x), "i") / 4, t * 0.5),
    "two that fade in turns": lambda x, t: (t * 0.5, x),
    "two that change places": lambda x, t: (t, x),
    "a sum from the start": lambda x, t: (jnp.tanh(x * t), t),
    "the sum before": lambda x, t: (lax.psum(jnp.sin(x), "i"), x * 0.25),
}


@pytest.mark.parametrize("name", CARRIED)
def test_sums_that_a_loop_carries(name, monkeypatch):
    """Iterations compile to equal modules, however many they are, though expressions pass from one to the next."""
    modules, real = set(), dispatch.build

    def build(*args):
        work = real(*args)
        modules.update(operation.key for operation in work.operations if isinstance(operation, Partition))
        return work

    monkeypatch.setattr(dispatch, "build", build)

    def fun(length):
        def iteration(carry, k):
            with df.mark("layer"):
                return CARRIED[name](*carry), (lax.psum(k, "i"), carry[1])

        def looped(x):
            return lax.scan(iteration, (x, lax.psum(x, "i")), jnp.arange(float(length)))

        return looped

    counts = []
    for length in (6, 12):
        modules.clear()
        run = Strictly(fun(length), mesh_of(i=2), P("i"), P("i"), df.strategies.Sequential(), check=False)
        run.check(jax.random.normal(jax.random.key(0), (4, 8)), exact=False)
        counts.append(len(modules))
    assert counts[0] == counts[1]


def test_a_collective_inside_an_operator():
    """Marked as one with what is around it: the operator runs in pieces."""

    @jax.jit
    def reduced(y):
        return lax.psum(y * 2, "model") + 1

    def whole(ws, x):
        for up, down in ws:
            with df.mark("layer"):
                x = x + reduced(jnp.tanh(x @ up) @ down)
        return x

    run = Strictly(whole, mesh_of(model=2), (SPECS, P()), P(), df.strategies.NanoFlow(2), batch_axes=(None, 0))
    run.check(layers(), jax.random.normal(jax.random.key(1), (12, 16)), exact=False)


def test_training_step():
    def loss(ws, x):
        return (parallel(ws, x) ** 2).mean()

    step = jax.value_and_grad(loss)
    run = Strictly(
        step,
        mesh_of(model=SOME),
        (SPECS, P()),
        (P(), SPECS),
        df.strategies.NanoFlow(2),
        batch_axes=(None, 0),
        out_axes="mean",
    )
    run.check(layers(), jax.random.normal(jax.random.key(1), (12, 16)), exact=False)


@pytest.mark.parametrize("check", [True, False])
def test_around_shard_map(check):
    """The body is dispatched by each device, what is around it is XLA's, and it is differentiated as a whole."""
    specs = {"mesh": mesh_of(model=SOME), "in_specs": (SPECS, P()), "out_specs": P(), "check_vma": check}
    mapped = jax.shard_map(parallel, **specs)
    fun = lambda ws, x: jnp.tanh(mapped(ws, x * 2))  # noqa: E731
    flow = df.dynaflow(fun, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), backend="dispatch")
    ws, x = layers(), jax.random.normal(jax.random.key(1), (12, 16))
    with warnings.catch_warnings(), jax.default_matmul_precision("highest"):
        warnings.simplefilter("error", DispatchWarning)
        for scale in (1, 2):
            got, want = jax.jit(flow)(ws, x * scale), jax.jit(fun)(ws, x * scale)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
        assert "dynaflow_dispatch" in jax.jit(flow).lower(ws, x).as_text()
        got, want = (jax.jit(jax.grad(lambda ws, f=f: (f(ws, x) ** 2).mean()))(ws) for f in (flow, fun))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def row_sums(x, w):
    return jnp.tanh(x @ w) * lax.psum(x.sum(), "i")


def turns(fun, x, length=3):
    return lax.scan(lambda x, _: (fun(x), None), x, None, length=length)[0]


def layer(x, w):
    with df.mark("a"):
        h = jnp.tanh(x @ w)
    with df.mark("b"):
        return jnp.sin(h) @ w


AROUND = {
    "before a loop": lambda mapped, x, w: turns(lambda x: layer(x, w), mapped(x, w)),
    "behind a loop": lambda mapped, x, w: mapped(turns(lambda x: layer(x, w), x), w),
    "before a loop that stacks": lambda mapped, x, w: lax.map(
        functools.partial(layer, mapped(x, w)), jnp.stack([w, 2 * w])
    ),
    "in a loop": lambda mapped, x, w: turns(lambda x: mapped(x, w) / 8, x),
    "in a loop with more": lambda mapped, x, w: turns(lambda x: layer(mapped(x / 8, w), w), x),
    "in a loop's loop": lambda mapped, x, w: turns(lambda x: turns(lambda x: mapped(x, w) / 8, x + 1, 2), x),
    "in a loop without order": lambda mapped, x, w: lax.scan(
        lambda c, w: (c, mapped(x, w)), 0.0, jnp.stack([w, 2 * w, -w, w / 2]), unroll=2
    ),
}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_loops_around_shard_map(name, explicit):
    """They are left to XLA, which partitions them: a custom call would have all rows gathered on every device."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((SOME,), ("i",), axis_types=(kind,), devices=jax.devices()[:SOME])
    mapped = jax.shard_map(row_sums, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    fun = lambda x, w: AROUND[name](mapped, x, w)  # noqa: E731
    flow = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend="dispatch")
    x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 16)), NamedSharding(mesh, P("i")))
    w = jax.device_put(jax.random.normal(jax.random.key(1), (16, 16)) / 4, NamedSharding(mesh, P()))
    with warnings.catch_warnings(), jax.default_matmul_precision("highest"), jax.set_mesh(mesh):
        warnings.simplefilter("error", DispatchWarning)
        lowered = jax.jit(flow).lower(x, w)
        assert lowered.as_text().count("dynaflow_dispatch") == 1
        assert "all-gather" not in lowered.compile().as_text()
        for scale in (1, 2):
            got, want = jax.jit(flow)(x * scale, w), jax.jit(fun)(x * scale, w)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_weights_closed_over_inside_shard_map():
    """Their type names the mesh as it is outside."""
    mesh = mesh_of(i=2)
    w = jax.device_put(numbers(16, 16), NamedSharding(mesh, P()))
    Strictly(lambda x: lax.psum(x @ w, "i"), mesh, P("i"), P()).check(numbers(8, 16))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("inside", [True, False])
def test_axes_that_shard_map_leaves_to_xla(inside, size):
    """XLA partitions what is inside over them, if they have devices."""
    specs = {"mesh": mesh_of(i=2, j=size), "in_specs": (P("i"), P()), "out_specs": P("i"), "axis_names": {"i"}}
    options = {"scheduler": df.strategies.SingleBatchOverlap(), "backend": "dispatch"}
    fun = jax.shard_map(row_sums, **specs)
    flow = jax.shard_map(df.dynaflow(row_sums, **options), **specs) if inside else df.dynaflow(fun, **options)
    x, w = jax.random.normal(jax.random.key(0), (8, 16)), jax.random.normal(jax.random.key(1), (16, 16)) / 4
    with warnings.catch_warnings(record=True) as said, jax.default_matmul_precision("highest"):
        warnings.simplefilter("always", DispatchWarning)
        np.testing.assert_allclose(jax.jit(flow)(x, w), jax.jit(fun)(x, w), rtol=2e-5, atol=2e-5)
    assert [str(warning.message).count("the mesh axes j") for warning in said] == [1] * (size - 1)


def test_two_calls_in_one_program():
    """Devices meet in each of them, and do not take one for the other."""
    mesh, ws = mesh_of(model=SOME), layers()
    flow = df.dynaflow(parallel, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), backend="dispatch")

    def twice(f):
        specs = {"mesh": mesh, "in_specs": (SPECS, P(), P()), "out_specs": (P(), P())}
        return jax.jit(jax.shard_map(lambda ws, x, y: (f(ws, x), f(ws, y)), **specs))

    with jax.default_matmul_precision("highest"):
        run, plain = twice(flow), twice(parallel)
        for seed in range(10):
            x, y = jax.random.normal(jax.random.key(seed), (2, 12, 16))
            for got, want in zip(run(ws, x, y), plain(ws, x, y), strict=True):
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_threads_that_call_different_functions():
    """Their runs neither mix nor wait for each other forever."""
    runs = [
        Strictly(parallel, mesh_of(model=SOME), (SPECS, P()), P(), df.strategies.NanoFlow(k), batch_axes=(None, 0))
        for k in (1, 2)
    ]
    xs = [jax.random.normal(jax.random.key(seed), (12, 16)) for seed in range(3)]
    want = [[np.asarray(run(layers(), x)) for x in xs] for run in runs]
    wrong = []

    def work(i):
        for k in range(10):
            if not np.array_equal(runs[i](layers(), xs[k % 3]), want[i][k % 3]):
                wrong.append((i, k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["axis_index_groups", "a branch"])
def test_what_is_not_dispatched_is_lowered_to_xla(name):
    def fun(x):
        if name == "a branch":
            return lax.cond(x.sum() > 0, lambda x: lax.psum(x, "i"), lambda x: x, x)
        return lax.psum(x, "i", axis_index_groups=[[i, i + 1] for i in range(0, SOME, 2)])

    mesh = mesh_of(i=SOME)
    flow = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend="dispatch")
    specs = {"mesh": mesh, "in_specs": P("i"), "out_specs": P("i"), "check_vma": False}
    x = jnp.abs(numbers(8, 4)) + 1
    with pytest.warns(DispatchWarning, match=name.split()[-1] if name != "a branch" else "cond"):
        got = jax.jit(jax.shard_map(flow, **specs))(x)
    np.testing.assert_array_equal(got, jax.jit(jax.shard_map(fun, **specs))(x))


# -- the device's own part -------------------------------------------------------------------------------------------


def gathered(x):
    return lax.all_gather(x, "i", tiled=True)


def gathered_inside(x):
    return lax.all_gather(x, "i", axis=1, tiled=True)


def turned(x):
    return lax.all_to_all(x, "i", 1, 0, tiled=True)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("fun", [gathered, gathered_inside, turned])
def test_the_own_part_does_not_wait_for_the_link(fun, serial, programs, monkeypatch):
    """It is copied on a stream beside the exchange's, and the flags are one behind the other."""
    if serial:
        monkeypatch.setenv("DYNAFLOW_SERIAL", "1")
    Strictly(fun, mesh_of(i=2), P("i"), P("i")).check(numbers(4, 6))
    for commands in (program.commands for program in programs):
        copies = [c for c in commands if c.kind == wire.COPY and c.reads[0].space == c.writes[0].space == wire.MEMORY]
        own, sent = ([c for c in copies if (c.target == 0) == is_own] for is_own in (True, False))
        assert len(own) == len(sent) == 1
        assert (own[0].stream == sent[0].stream) == serial
        kinds = [c.kind for c in commands if c.stream == sent[0].stream and c.operator == sent[0].operator]
        assert kinds[-2:] == [wire.SIGNAL, wire.AWAIT]


@pytest.mark.parametrize("fun", [gathered, gathered_inside, turned])
def test_own_parts_of_many_exchanges(fun):
    """Every exchange takes the memory of an earlier one, while own parts are copied on their own stream."""

    def many(x):
        for i in range(12):
            y = fun(x * (i + 1))
            x = x + y.sum() + jnp.sin(x)
        return x

    Strictly(many, mesh_of(i=SOME), P("i"), P("i"), check=False).check(numbers(2 * SOME, 2 * SOME), exact=False)


# -- what is read in the memory of others ----------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_what_others_read_to_the_end_lies_in_memory_of_its_own(layers):
    """No later exchange tells when they have, and this device's next run may be of another plan."""
    work = models_parallel.tensor_parallel(layers).work(2, df.strategies.NanoFlow(1))
    exchanges = [operation for operation in work.operations if isinstance(operation, Exchange)]
    assert all(exchange.in_place for exchange in exchanges)
    *earlier, last = releases(work).values()
    assert all(told < len(work.operations) for told in earlier)
    assert last == len(work.operations)
    assert work.lasting == {exchanges[-1].reads[0]}


@pytest.mark.parametrize(("scheduler", "streams"), [(df.strategies.NanoFlow(1), 1), (df.strategies.NanoFlow(2), 2)])
def test_operations_that_take_turns_are_on_one_stream(scheduler, streams, programs):
    """Computing and exchanging by turns, on streams of different names, is a straight line."""
    model = models_parallel.tensor_parallel(3)
    assert len(model.work(2, scheduler).streams) == 2
    model.check(2, scheduler, "dispatch")
    assert {len(program.streams) for program in programs} == {streams}


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_what_cannot_lie_there_is_sent(layers, monkeypatch):
    monkeypatch.setattr(builder.Builder, "_can_place", False)
    work = models_parallel.tensor_parallel(layers).work(2, df.strategies.NanoFlow(1))
    in_place = [operation.in_place for operation in work.operations if isinstance(operation, Exchange)]
    assert in_place == [True] * (layers - 1) + [False]
    assert all(told < len(work.operations) for told in releases(work).values())


def test_calls_of_two_plans_in_turns():
    """What others still read of the one, no partition of the other writes to."""
    mesh, x = mesh_of(i=2), numbers(64, 64)
    one = Strictly(lambda x: lax.psum(x @ x.T, "i"), mesh, P("i"), P())
    other = Strictly(lambda x: jnp.tanh(lax.psum(jnp.cos(x) @ x.T @ x, "i")), mesh, P("i"), P())
    wanted = one.plain(x), other.plain(x)
    for _ in range(20):
        for run, want in zip((one, other), wanted, strict=True):
            np.testing.assert_allclose(run(x), want, rtol=1e-5, atol=1e-5)


def summing(x):
    y = lax.psum(x * 2, "i")
    return y + lax.psum_scatter(x * y, "i", tiled=True).sum()


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("width", [64, 63 * 64, 64 * 1024])
def test_sums_of_what_is_read_in_place(width, dtype, devices, programs):
    """Are one command with the flags ahead of it, where the executor knows how to add."""
    run = Strictly(summing, mesh_of(i=devices), P(), P(), check=False)
    run.check(numbers(devices, width, dtype=jnp.dtype(dtype)))
    for commands in (program.commands for program in programs):
        sums = [i for i, command in enumerate(commands) if command.kind == wire.SUM]
        assert bool(sums) == (dtype in ("float32", "bfloat16"))
        for i in sums:
            assert len(commands[i].reads) == devices
            around = [commands[k].kind for k in range(i - 2 * (devices - 1), i)]
            assert around == [wire.SIGNAL] * (devices - 1) + [wire.AWAIT] * (devices - 1)


# -- what is in memory anyway ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[2:6],
        lambda x: x[3],
        lambda x: x[:, 2:6],
        lambda x: x[::2],
        lambda x: x[1:2, 3:5],
        lambda x: x.reshape(-1),
        lambda x: x[4:].reshape(2, -1),
        lambda x: lax.reshape(x, (64, 256), (1, 0, 2)),
        lambda x: lax.slice(x, (0, 0, 0), (8, 32, 1)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bool", "int4"])
def test_parts_of_inputs_and_arrivals(view, dtype):
    """Read where they are if their elements lie end to end, and right if not."""

    def fun(x):
        arrived = lax.all_to_all(x, "i", 0, 0, tiled=True)
        return [lax.psum(view(y).astype(jnp.int32).sum(), "i") + view(y).astype(jnp.int32) for y in (x, arrived)]

    x = (numbers(8 * 2, 64, 32) * 4).astype(dtype)

    def around(x):
        with df.mark("all"):
            return fun(x)

    Strictly(around, mesh_of(i=2), P("i"), P("i"), check=False).check(x)
