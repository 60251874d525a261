"""Which lowering ``backend="auto"`` takes, and that ``explain`` says it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from scheduling import Do, W, X, layer

import dynaflow_jax as df
from dynaflow_jax import cost
from dynaflow_jax.lowering.choice import SMALL_KERNEL, choose

H200 = ("gpu", "NVIDIA H200")


def by_batch(ctx):
    """A stream for each micro-batch."""
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, stream=f"half {op.micro_batch}")


def by_tag(ctx):
    """A stream for communication."""
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, stream="network" if "network" in op.tags else "compute")


def on_one_stream(ctx):
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op)


def merged(ctx):
    """Micro-batches joined again, on two streams all the same."""
    for number in range(2):
        ops = ctx.get_ready_ops()
        ctx.execute([op for op in ops if op.key == ops[0].key], stream=f"s{number}")


def chosen(fun, do, *args, backend="auto", device=H200, sizes=(4, 4)):
    flow = df.dynaflow(fun, scheduler=Do(do, *sizes), batch_axes=(None, 0), backend="xla")
    resolved, _ = flow._resolve(args, {})
    return choose(backend, *device, resolved.region, resolved.plan.steps)


def chain(width, rows, depth, each):
    """Shapes and a function of a latency-bound chain of products, so many to an operator."""

    def fun(ws, x):
        for i in range(0, depth, each):
            with df.mark("products"):
                for w in ws[i : i + each]:
                    x = jnp.tanh(x @ w)
        return x

    ws = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16)] * depth
    return fun, ws, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize(
    ("rows", "width", "depth", "dispatch"),
    [(64, 1024, 16, True), (1024, 1024, 16, False), (256, 4096, 8, False), (4096, 4096, 8, False)],
)
def test_small_kernels_are_dispatched_and_large_ones_are_not(rows, width, depth, dispatch, each):
    """As measured by examples/benchmarks/one_gpu.py on an H200: the first gained, the others lost."""
    fun, ws, x = chain(width, rows, depth, each)
    choice = chosen(fun, by_batch, ws, x, sizes=(rows // 2, rows // 2))
    assert choice.dispatch is dispatch
    assert f"{2 * depth} kernels with" in choice.why
    assert ("launching dominates" if dispatch else "too large for launching to matter") in str(choice)


def test_one_stream_is_never_dispatched():
    choice = chosen(layer, on_one_stream, W, X)
    assert not choice.dispatch
    assert str(choice) == "one XLA program, since all steps are on one stream"


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms_are_never_dispatched_to_unasked(platform):
    choice = chosen(layer, by_batch, W, X, device=(platform, platform))
    assert not choice.dispatch
    assert platform in choice.why


@pytest.mark.parametrize("backend", ["xla", "dispatch"])
@pytest.mark.parametrize("do", [on_one_stream, by_batch])
def test_what_is_asked_for_is_chosen(backend, do):
    for device in (H200, ("cpu", "cpu")):
        choice = chosen(layer, do, W, X, backend=backend, device=device)
        assert choice.dispatch is (backend == "dispatch")
        assert repr(backend) in choice.why


def parallel_layer():
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=(P(None, "model"), P()), out_specs=P())
    def parallel(w, x):
        with df.mark("product"):
            y = jnp.tanh(x @ w) @ w.T
        with df.mark("reduce"):
            return jax.lax.psum(y, "model")

    return parallel


def test_communication_is_worth_hiding_however_large_the_rest():
    parallel = parallel_layer()
    w, x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32), jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    choice = chosen(parallel, by_tag, w, x, sizes=(4096, 4096))
    assert str(choice) == "dispatched, since reduce communicates, which other streams can hide"
    assert not chosen(parallel, on_one_stream, w, x, sizes=(4096, 4096)).dispatch


@pytest.mark.parametrize(("sizes", "dispatch"), [((16,), False), ((256,), True), ((8, 8), True)], ids=str)
def test_small_exchanges_that_nothing_hides_are_left_to_xla(sizes, dispatch):
    """As measured by examples/benchmarks/end_to_end.py and tp_overlap.py on two H200s, at 128 KiB and 2 MiB."""
    w, x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((sum(sizes), 4096), jnp.bfloat16)
    choice = chosen(parallel_layer(), by_tag, w, x, sizes=sizes)
    assert choice.dispatch is dispatch
    assert ("reduce communicates" in choice.why) is dispatch


def test_what_is_inside_loops_counts_as_often_as_it_runs():
    def looped(w, x):
        return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=7)[0]

    assert "28 kernels" in chosen(looped, by_batch, W, X).why


def test_merged_operators_are_launched_once():
    assert "2 kernels" in chosen(layer, merged, W, X).why


def test_the_limit_is_on_the_average():
    """Two products of which one is large, and its bytes are the time."""
    assert cost.seconds(0, 4.8e12, *H200) == 1
    assert cost.seconds(2 * 989e12, 4.8e12, *H200) == 2
    rows = 8 * int(SMALL_KERNEL * 4.8e12 / 4 / 4 / 8)  # a matrix of four columns that takes so long to read
    for n, dispatch in ((rows // 2, True), (rows * 2, False)):
        x = jax.ShapeDtypeStruct((n, 4), jnp.float32)
        assert chosen(layer, by_batch, W, x, sizes=(n // 2, n // 2)).dispatch is dispatch


def test_explain_says_what_was_chosen_and_why():
    auto = df.dynaflow(layer, scheduler=Do(by_batch, 4, 4), batch_axes=(None, 0), backend="xla")
    assert auto.explain(W, X).splitlines()[-1] == "Lowering: one XLA program, since the backend is 'xla'"


def test_explain_says_why_auto_does_not_dispatch_here(monkeypatch):
    monkeypatch.delenv("DYNAFLOW_BACKEND", raising=False)
    auto = df.dynaflow(layer, scheduler=Do(by_batch, 4, 4), batch_axes=(None, 0))
    last = auto.explain(W, X).splitlines()[-1]
    assert last == "Lowering: one XLA program, since streams run at once on CUDA only, and this is cpu"
