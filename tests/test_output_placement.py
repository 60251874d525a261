"""Large outputs of dispatched plans are computed where XLA wants them, as long as that stays the same place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax.lowering import builder
from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime import program as wire

pytestmark = pytest.mark.skipif(extension.module is None, reason="the extension was not built")

ROW = 64  # float32 numbers: the alignment of a buffer
X = jnp.arange(8.0 * ROW).reshape(8, ROW) / 100


class Streams(df.OpScheduler):
    """Micro-batches of some sizes, each on a stream of its own."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def split(self, info):
        return self.sizes or [info.batch_size]

    def schedule(self, ctx):
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=f"s{op.micro_batch or 0}")


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(builder, "IN_PLACE_OUTPUT_BYTES", 1)


@pytest.fixture
def copied(monkeypatch):
    """For each program that is made, in order, the outputs that are copied, and those that are pinned."""
    programs = []

    def encode(*args, **kwargs):
        outputs, commands = args[5], args[6]
        copies = [c.writes[0].index for c in commands if c.kind == wire.COPY and c.writes[0].space == wire.OUTPUT]
        programs.append((copies, [i for i, output in enumerate(outputs) if output.address]))
        return real(*args, **kwargs)

    real = wire.encode
    monkeypatch.setattr(wire, "encode", encode)
    return programs


def model(x):
    with df.mark("first"):
        y = jnp.tanh(x)
    with df.mark("second"):
        return y * 2 + x


def flow(fun=model, *sizes, **options):
    options.setdefault("batch_axes", 0 if sizes else None)
    return df.dynaflow(fun, scheduler=Streams(*sizes), backend="dispatch", **options)


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), got, want)


def rotating(count):
    """A function's results at ``count`` addresses in turn: as many are alive."""
    held = []

    def hold(result):
        held.append(result)
        del held[:-count]

    return hold


@pytest.mark.parametrize("sizes", [(), (4, 4), (3, 5), (1, 2, 5)], ids=str)
def test_nothing_is_copied(sizes, copied):
    run = jax.jit(flow(model, *sizes))
    kept = [run(X * scale) for scale in (1, 2)]
    for scale, got in zip((1, 2), kept, strict=True):
        close(got, model(X * scale))  # no run wrote into another's results
    assert all(outputs == ([], [0]) for outputs in copied)
    assert copied


def test_small_outputs_are_copied(copied, monkeypatch):
    monkeypatch.setattr(builder, "IN_PLACE_OUTPUT_BYTES", X.nbytes)

    def fun(x):
        y = model(x)
        return y, y[0]

    close(jax.jit(flow(fun))(X), fun(X))
    assert copied == [([1], [0])]


def test_from_the_third_address_on_it_is_copied(copied):
    run, hold = jax.jit(flow()), rotating(8)
    for _ in range(12):
        got = run(X)
        close(got, model(X))
        hold(got)
    assert copied[-1] == ([0], [])
    assert len(copied) <= 4  # the input may have moved as well
    made = len(copied)
    for scale in range(5):
        close(run(X), model(X)), hold(run(X + scale))
    assert len(copied) <= made + 2


@pytest.mark.parametrize("to_flow", [(), (0,)], ids=["unknown", "known"])
@pytest.mark.parametrize("donate", [(), (0,)], ids=["kept", "donated"])
def test_a_state_that_is_replaced_again_and_again(donate, to_flow):
    step = jax.jit(flow(model, 4, 4, donate_argnums=to_flow), donate_argnums=donate)
    state, want = X + 0, X
    for _ in range(6):
        state, want = step(state), jax.jit(model)(want)
        close(state, want)


def test_parts_that_begin_anywhere_are_copied(copied):
    narrow = X[:, :3]
    run = jax.jit(flow(model, 3, 5))
    close(run(narrow), model(narrow))
    assert copied == [([0], [0])]  # the first part is in place


def test_what_is_given_twice_or_an_input_is_copied(copied):
    def fun(x):
        with df.mark("only"):
            y = jnp.sin(x)
        return y, y, x, jnp.ones(3)

    close(jax.jit(flow(fun))(X), fun(X))
    ((copies, pinned),) = copied
    assert pinned == [0, 3]
    assert copies == [1, 2]


def test_what_later_operators_read_may_be_an_output(copied):
    def fun(x):
        with df.mark("first"):
            y = jnp.sin(x)
        with df.mark("second"):
            z = y @ y.T
        with df.mark("third"):
            return y, jnp.cos(z), z

    run = jax.jit(flow(fun))
    for scale in (1.0, 0.5, 2.0):
        close(run(X * scale), jax.jit(fun)(X * scale))
    assert not any(copies for copies, _ in copied[:1])


def test_prepared_plans_copy(copied):
    prepared = flow(model, 4, 4)
    prepared.prepare(X)
    assert [pinned for _, pinned in copied] == [[]]
    close(jax.jit(prepared)(X), model(X))
    assert len(copied) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_what_other_devices_read_is_not_an_outputs_memory(in_place, copied, monkeypatch):
    monkeypatch.setattr(builder, "IN_PLACE_BYTES", 1 << 20 if in_place else 0)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def fun(x):
        with df.mark("own"):
            y = jnp.tanh(x)
        with df.mark("sum"):
            z = jax.lax.psum(y, "d")
        with df.mark("after"):
            z = z * 2
        with df.mark("another sum"):  # which tells when the first one has been read
            z = jax.lax.psum(z, "d")
        with df.mark("end"):
            return y, z + 1

    def mapped(fun):
        return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=(P("d"), P()), check_vma=False))

    run = mapped(df.dynaflow(fun, scheduler=Streams(), backend="dispatch"))
    for scale in (1, 2, 3):
        close(run(X * scale), mapped(fun)(X * scale))
    assert copied[0] == (([0], [1]) if in_place else ([], [0, 1]))


# -- donated inputs --------------------------------------------------------------------------------------------------

WS = tuple(jnp.linspace(-1, 1, ROW * ROW).reshape(ROW, ROW) * scale for scale in (0.5, 0.25, 0.125))


def train(ws, x):
    """A step of gradient descent."""

    def loss(ws):
        y = x
        for i, w in enumerate(ws):
            with df.mark(f"layer{i}"):
                y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(ws)
    with df.mark("update"):
        return value, tuple(w - 0.1 * g for w, g in zip(ws, gradients, strict=True))


class OnManyStreams(df.OpScheduler):
    """The operators in order, on streams in turn."""

    def schedule(self, ctx):
        count = 0
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=f"s{count % 3}")
                count += 1


def ours(fun, donate=(0,)):
    return jax.jit(
        df.dynaflow(fun, scheduler=OnManyStreams(), backend="dispatch", donate_argnums=donate), donate_argnums=donate
    )


def test_new_weights_lie_where_the_old_ones_were(copied):
    step, ws, want = ours(train), jax.tree.map(jnp.copy, WS), WS
    for i in range(6):
        before = [w.unsafe_buffer_pointer() for w in ws]
        value, ws = step(ws, X * (i + 1))
        expected, want = jax.jit(train)(want, X * (i + 1))
        close((value, ws), (expected, want))
        assert [w.unsafe_buffer_pointer() for w in ws] == before
    assert all(pinned == [0, 1, 2, 3] for _, pinned in copied[:1])
    assert all(not set(copies) & {1, 2, 3} for copies, _ in copied)


def test_weights_that_are_not_donated_stay(copied):
    step = jax.jit(df.dynaflow(train, scheduler=OnManyStreams(), backend="dispatch", donate_argnums=0))
    before = jax.tree.map(np.array, WS)
    for scale in (1, 2, 3):
        close(step(WS, X * scale), jax.jit(train)(WS, X * scale))
    jax.tree.map(np.testing.assert_array_equal, WS, before)


def test_an_input_is_not_written_over_before_its_last_reader(copied):
    def fun(x):
        with df.mark("new"):
            y = jnp.sin(x)
        with df.mark("late"):
            z = x * y.sum()
        return y, z[0]

    for scale in (1, 2, 3):
        close(ours(fun)(X * scale), jax.jit(fun)(X * scale))
    assert copied[0][0] == [0]


def test_an_input_that_is_an_output_too(copied):
    def fun(x):
        with df.mark("new"):
            y = jnp.sin(x)
        return y, x

    for scale in (1, 2):
        close(ours(fun)(X * scale), jax.jit(fun)(X * scale))


def test_inputs_that_change_places():
    def fun(a, b, c):
        with df.mark("new"):
            return b * 2, a + c, c @ c[0], jnp.sin(a)

    arrays = (X, X + 1, X[:, ::-1])
    run = ours(fun, (0, 1, 2))
    for copies in [jax.tree.map(jnp.copy, arrays) for _ in range(3)]:
        close(run(*copies), jax.jit(fun)(*arrays))


def test_kinds_that_are_bytes_in_memory():
    def fun(flag, small, key):
        with df.mark("new"):
            return ~flag, small + 1, jax.random.split(key)[0]

    def arguments():
        return jnp.arange(8) > 3, jnp.arange(8).astype(jnp.float8_e4m3fn), jax.random.key(3)

    got, want = ours(fun, (0, 1, 2))(*arguments()), jax.jit(fun)(*arguments())
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(np.asarray(got[1], np.float32), np.asarray(want[1], np.float32))
    np.testing.assert_array_equal(jax.random.key_data(got[2]), jax.random.key_data(want[2]))


def test_on_several_devices(copied):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def step(ws, x):
        value, gradients = jax.value_and_grad(lambda ws: jnp.mean(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)(ws)
        with df.mark("reduce"):
            gradients = jax.lax.pmean(gradients, "d")
        with df.mark("update"):
            return value[None], tuple(w - g for w, g in zip(ws, gradients, strict=True))

    def mapped(fun):
        inner = jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P("d"), P()), check_vma=False)
        return jax.jit(inner, donate_argnums=0)

    run = mapped(df.dynaflow(step, scheduler=OnManyStreams(), backend="dispatch", donate_argnums=0))
    place = jax.sharding.NamedSharding(mesh, P())
    ws, want = (jax.tree.map(lambda w: jax.device_put(w + 0, place), WS[:2]) for _ in range(2))
    for scale in (1, 2, 3):
        (value, ws), (expected, want) = run(ws, X * scale), mapped(step)(want, X * scale)
        close((value, ws), (expected, want))
    assert {1, 2} <= set(copied[0][1])


# On integers, so that results are exact.
_OPERATIONS = (lambda a, b: a * 3 + b, lambda a, b: a - b[::-1], lambda a, b: a, lambda a, b: jnp.sort(a) ^ b)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_state_is_replaced_in_any_order(data):
    """Operators read old and new values on random streams; every output is one of either."""
    count = data.draw(st.integers(1, 4))
    steps = []
    for i in range(data.draw(st.integers(1, 8))):
        known = st.integers(0, count + i - 1)
        steps.append(data.draw(st.tuples(st.sampled_from(_OPERATIONS), known, known, st.integers(0, 2))))
    outputs = data.draw(st.lists(st.integers(0, count + len(steps) - 1), min_size=count, max_size=count))

    def fun(state):
        values = list(state)
        for i, (operation, a, b, _) in enumerate(steps):
            with df.mark(f"step{i}"):
                values.append(operation(values[a], values[b]))
        return tuple(values[i] for i in outputs)

    class Drawn(df.OpScheduler):
        def schedule(self, ctx):
            while ops := ctx.get_ready_ops():
                for op in ops:
                    name = op.name.split("/")[-1]
                    ctx.execute(op, stream=f"s{steps[int(name[4:])][3] if name[4:].isdigit() else 0}")

    state = tuple(jnp.arange(8 * ROW, dtype=jnp.int32).reshape(8, ROW) * (i + 1) for i in range(count))
    want = tuple(map(jnp.copy, state))
    run = jax.jit(
        df.dynaflow(fun, scheduler=Drawn(), backend="dispatch", donate_argnums=0),
        donate_argnums=data.draw(st.sampled_from([(), 0])),
    )
    for _ in range(3):
        state, want = run(state), fun(want)
        jax.tree.map(np.testing.assert_array_equal, state, want)


@pytest.mark.parametrize(
    ("donate", "says"),
    [(-1, "not -1"), ("state", "not 's'"), ((0, True), "not True"), (3, "names argument 3")],
    ids=str,
)
def test_donate_argnums_are_positions(donate, says):
    with pytest.raises(df.DynaFlowError, match=says):
        df.dynaflow(train, scheduler=OnManyStreams(), donate_argnums=donate)(WS, X)
