"""Dispatched plans on the host twin: the executor's worker threads run executables of a private CPU client."""

import gc
import subprocess
import sys
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax.errors import DispatchWarning
from dynaflow_jax.lowering.modules import Module
from dynaflow_jax.lowering.tasks import Task
from dynaflow_jax.runtime import cuda, extension, host, private
from dynaflow_jax.runtime.binder import Binder
from dynaflow_jax.runtime.work import Where

pytestmark = pytest.mark.skipif(extension.module is None, reason="the extension was not built")


class Streams(df.OpScheduler):
    def __init__(self, *sizes, streams=2):
        self.sizes, self.streams = sizes, streams

    def split(self, info):
        return self.sizes or [info.batch_size]

    def schedule(self, ctx):
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=f"s{(op.micro_batch or 0) % self.streams}")


def model(ws, x):
    for w in ws:
        with df.mark("up"):
            h = jnp.tanh(x @ w)
        with df.mark("down"):
            x = x + h @ w.T
    return x


WS = [jax.random.normal(jax.random.key(i), (16, 32)) * 0.2 for i in range(2)]
X = jax.random.normal(jax.random.key(9), (8, 16))


def dispatched(fun=model, *sizes, **options):
    options.setdefault("batch_axes", (None, 0))
    flow = df.dynaflow(fun, scheduler=Streams(*sizes), backend="dispatch", **options)

    def strictly(*args):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DispatchWarning)
            return jax.jit(flow)(*args)

    return strictly


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize("sizes", [(), (4, 4), (3, 5), (1, 2, 5)], ids=str)
def test_results(sizes):
    run = dispatched(model, *sizes)
    for scale in (1.0, 2.0, 3.0):
        close(run(WS, X * scale), model(WS, X * scale))


def test_new_weights_are_noticed():
    run = dispatched(model, 4, 4)
    for scale in (1.0, 0.5, 2.0, 3.0, 1.0):
        ws = [w * scale for w in WS]
        close(run(ws, X), model(ws, X))


def test_rows_on_another_axis_and_outputs_of_every_kind():
    def fun(w, x):
        y = model([w], x.T)
        return {"rows": y.T, "sum": (y**2).sum(), "mean": y.mean(), "weights": w * 2, "input": x, "one": 1.0}

    out_axes = {"rows": None, "sum": "sum", "mean": "mean", "weights": None, "input": None, "one": None}
    close(dispatched(fun, 3, 5, batch_axes=(None, 1), out_axes=out_axes)(WS[0], X.T), fun(WS[0], X.T))


def test_training_step():
    step = jax.value_and_grad(lambda ws, x: (model(ws, x) ** 2).mean())
    close(dispatched(step, 3, 5, out_axes="mean")(WS, X), step(WS, X))


def test_it_is_differentiated_and_mapped_over_as_lowered_to_xla():
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    loss = lambda fun: lambda ws: (fun(ws, X) ** 2).mean()  # noqa: E731
    close(jax.jit(jax.grad(loss(flow)))(WS), jax.grad(loss(model))(WS))
    close(jax.vmap(flow, (None, 0))(WS, jnp.stack([X, X * 2])), jnp.stack([model(WS, X), model(WS, X * 2)]))


@pytest.mark.parametrize("wrt", [0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, lambda f, wrt: jax.grad(jax.checkpoint(f), wrt)])
def test_differentiating_steps_that_are_held_back(wrt, transform):
    """On one stream, steps wait for each other at optimization barriers, which also hold what is not differentiated."""

    class OneStream(Streams):
        def schedule(self, ctx):
            while ops := ctx.get_ready_ops():
                for op in reversed(ops):
                    ctx.execute(op)

    flow = df.dynaflow(model, scheduler=OneStream(4, 4), batch_axes=(None, 0), backend="dispatch")
    total = lambda fun: lambda ws, x: (fun(ws, x) ** 2).mean()  # noqa: E731
    close(transform(total(flow), wrt)(WS, X), transform(total(model), wrt)(WS, X))


def test_dropout_is_exact():
    def drop(key, x):
        with df.mark("drop"):
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    run = dispatched(drop, 3, 5)
    for seed in range(3):
        np.testing.assert_array_equal(run(jax.random.key(seed), X), drop(jax.random.key(seed), X))


def test_loops():
    def looped(ws, x):
        return jax.lax.scan(lambda x, w: (model([w], x), None), x, ws)[0]

    close(dispatched(looped, 4, 4)(jnp.stack(WS), X), model(WS, X))


def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    flow = df.dynaflow(model, scheduler=Streams(1, 1), batch_axes=(None, 0), backend="dispatch")
    for check in (True, False):
        mapped = jax.shard_map(flow, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DispatchWarning)
            close(jax.jit(mapped)(WS, X), model(WS, X))


def test_what_xla_partitions_is_lowered_to_xla():
    """A custom call would have every row gathered on every device."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch", batch_shards=4)
    with pytest.warns(DispatchWarning, match=r"XLA partitions it over 4 devices, and .* inside shard_map only"):
        compiled = jax.jit(flow).lower(WS, x).compile()
    assert "all-gather" not in compiled.as_text()
    close(compiled(WS, x), model(WS, X))
    assert "one XLA program, since it cannot be dispatched: XLA partitions" in flow.explain(WS, x)
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    with jax.set_mesh(mesh), pytest.warns(DispatchWarning, match="over the mesh axes data"):
        jax.jit(flow).lower(WS, X)


@pytest.mark.parametrize("spec", [P(), P("data")], ids=["replicated", "sharded"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("devices", [1, 4])
def test_a_mesh_that_only_arguments_know_of(devices, kind, spec):
    """Types do not tell whether what XLA is to partition is sharded or the same on every device."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    x, ws = jax.device_put(X, NamedSharding(mesh, spec)), jax.device_put(WS, NamedSharding(mesh, P()))
    if devices == 1:
        close(dispatched()(ws, x), model(WS, X))
        return
    flow = df.dynaflow(model, scheduler=Streams(), batch_axes=(None, 0), backend="dispatch")
    with pytest.warns(DispatchWarning, match="over (the mesh axes data|4 devices), and .* inside shard_map only"):
        compiled = jax.jit(flow).lower(ws, x).compile()
    assert "all-gather" not in compiled.as_text()
    close(compiled(ws, x), model(WS, X))


class Memory:
    """The host twin's memory: has room for so many more values, or for any number."""

    def __init__(self, monkeypatch):
        self.room = None
        real = host.HostBinding.allocate

        def allocate(own, size):
            if self.room is not None:
                if not self.room:
                    raise MemoryError(f"no room for {size} bytes")
                self.room -= 1
            return real(own, size)

        monkeypatch.setattr(host.HostBinding, "allocate", allocate)


ADVICE = r"no memory left to dispatch model: (.|\n)*XLA_PYTHON_CLIENT_MEM_FRACTION(.|\n)*backend='xla'"


@pytest.mark.parametrize("room", [0, 1])
def test_without_memory_a_call_says_what_to_do_and_the_next_one_runs(room, monkeypatch):
    memory = Memory(monkeypatch)
    run = dispatched(model, 4, 4)
    memory.room = room
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=ADVICE):
            run(WS, X).block_until_ready()
    memory.room = None
    for scale in (1, 2):  # at its second address the input turns out to move
        close(run(WS, X * scale), model(WS, X * scale))
    memory.room = room  # what is bound needs none; other weights do
    close(run(WS, X * 3), model(WS, X * 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match=ADVICE):
        run([w * 2 for w in WS], X).block_until_ready()
    close(run(WS, X), model(WS, X))


def test_an_input_is_read_in_place_until_it_moves():
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    run = jax.jit(flow)
    rows = [X, X * 2, X * 3]  # all alive, so at addresses of their own

    def bindings():
        (resolved,) = flow._cache.values()
        stats = extension.module.plan_stats(resolved._binder.plan)
        return stats["misses"], len(stats["programs"])

    for _ in range(3):
        close(run(WS, X), model(WS, X))
    assert bindings() == (1, 1)
    for x in rows * 2:
        close(run(WS, x), model(WS, x))
    assert bindings() == (2, 1)  # copied from its second address on, and the first program is gone


def test_without_memory_prepare_falls_back(monkeypatch):
    memory = Memory(monkeypatch)
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    assert flow.explain(WS, X).endswith("Lowering: dispatched, since the backend is 'dispatch'")
    memory.room = 2
    with pytest.warns(DispatchWarning, match=ADVICE):
        flow.prepare(WS, X)
    close(jax.jit(flow)(WS, X), model(WS, X))
    assert "dynaflow_dispatch" not in jax.jit(flow).lower(WS, X).as_text()
    assert "one XLA program, since it cannot be dispatched: There is no memory" in flow.explain(WS, X)


def test_without_memory_at_the_trace_it_falls_back(monkeypatch):
    def compile(self, module):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")

    monkeypatch.setattr(private.Client, "compile", compile)
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    with pytest.warns(DispatchWarning, match=ADVICE):
        close(jax.jit(flow)(WS, X), model(WS, X))


def test_callbacks_are_lowered_to_xla():
    def calls_back(ws, x):
        with df.mark("host"):
            x = jax.pure_callback(lambda x: np.asarray(x) * 2, x, x)
        return model(ws, x)

    flow = df.dynaflow(calls_back, scheduler=Streams(), batch_axes=(None, 0), backend="dispatch")
    with pytest.warns(DispatchWarning, match="host"):
        close(jax.jit(flow)(WS, X), model(WS, X * 2))


EMPTY = {
    "computed": lambda ws, x: jnp.tanh(x[:, :0]),
    "of weights": lambda ws, x: ws[0][:0] * 2,
    "of known numbers": lambda ws, x: jnp.zeros((0, 3)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_values_without_elements_are_lowered_to_xla(name):
    """The warning says whose they are; those that stay within an operator do not matter."""

    def fun(ws, x):
        x = model(ws, x)
        with df.mark("op"):
            empty = EMPTY[name](ws, x)
            return x + empty.sum(), empty

    close(dispatched(lambda ws, x: fun(ws, x)[0])(WS, X), model(WS, X))
    flow = df.dynaflow(fun, scheduler=Streams(), batch_axes=(None, 0), backend="dispatch", out_axes=(0, None))
    with pytest.warns(
        DispatchWarning, match="op.* reads or gives a value without elements, float32.*0.*, which has no"
    ):
        close(jax.jit(flow)(WS, X), fun(WS, X))


def test_an_error_without_a_text_is_named():
    def fails(*_):
        raise NotImplementedError

    task = Task("op", Where("compute"), (), (), (), fails)
    with pytest.raises(df.DynaFlowError, match=r"op cannot be compiled on its own: NotImplementedError\(\)"):
        Module(task, [], [], (), []).on_host()


def test_order_between_streams_is_kept_on_request():
    class Chained(Streams):
        def schedule(self, ctx):
            last = ()
            while ops := ctx.get_ready_ops():
                op = ops[-1]
                last = ctx.execute(op, stream=f"s{op.micro_batch}", after=last)

    flow = df.dynaflow(model, scheduler=Chained(4, 4), batch_axes=(None, 0), backend="dispatch")
    close(jax.jit(flow)(WS, X), model(WS, X))


def test_two_threads():
    runs = [dispatched(model, 4, 4), dispatched(model, 2, 6)]
    xs = [X * (k + 1) for k in range(3)]
    want = [[np.asarray(run(WS, x)) for x in xs] for run in runs]
    failed = []

    def work(i):
        for k in range(15):
            if not np.array_equal(np.asarray(runs[i % 2](WS, xs[k % 3])), want[i % 2][k % 3]):
                failed.append((i, k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_plan_is_freed_with_its_function():
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    jax.jit(flow)(WS, X).block_until_ready()
    (resolved,) = flow._cache.values()
    plan = resolved._binder.plan
    assert extension.module.plan_stats(plan)["runs"] == 1
    del flow, resolved
    jax.clear_caches()
    gc.collect()
    with pytest.raises(extension.module.DispatchError, match=f"{plan}"):
        extension.module.plan_stats(plan)


def test_functions_dropped_before_their_runs_begin(monkeypatch):
    """XLA runs a call when its inputs are there; until then the plan is needed, though nobody else holds it."""
    ready, freed, results = threading.Event(), [], []
    bind = Binder.bind
    with monkeypatch.context() as patch:
        patch.setattr(Binder, "bind", lambda self, calls: (ready.wait(60), bind(self, calls)))
        waiting = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
        # Beside work, since XLA's CPU client runs what it takes to be cheap before it returns.
        late, _ = jax.jit(lambda x: (waiting(WS, x), x.T @ x @ x.T @ x))(X)
    for k in range(3):
        flow = df.dynaflow(model, scheduler=Streams(2 + k, 6 - k), batch_axes=(None, 0), backend="dispatch")
        results.append(jax.jit(flow)(WS, late))
        (resolved,) = flow._cache.values()
        weakref.finalize(resolved._binder, freed.append, k)
        del flow, resolved
    jax.clear_caches()
    gc.collect()
    assert not freed
    assert not any(result.is_ready() for result in results)
    ready.set()
    for result in results:
        close(result, model(WS, model(WS, X)))
    jax.clear_caches()
    gc.collect()
    assert sorted(freed) == [0, 1, 2]


def test_compiled_programs_outlive_their_function():
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    run = jax.jit(flow).lower(WS, X).compile()
    del flow
    jax.clear_caches()
    gc.collect()
    for k in range(3):  # at addresses that want programs of their own, too
        rows = X + k
        close(run(WS, rows), model(WS, rows))


LEAVING = """
import sys, time
import jax, jax.numpy as jnp
import dynaflow_jax as df
from dynaflow_jax.runtime.binder import Binder

fun, w, x = lambda w, x: jnp.tanh(x @ w) @ w, jnp.eye(64), jnp.ones((64, 64))
halves = lambda: df.dynaflow(fun, scheduler=df.strategies.NanoFlow(), batch_axes=(None, 0), backend="dispatch")
bind = Binder.bind
Binder.bind = lambda self, calls: (time.sleep(0.5), bind(self, calls))
flow = halves()
y, _ = jax.jit(lambda w, x: (flow(w, x), x.T @ x @ x))(w, x)
z = [jax.jit(halves())(w, y) for _ in range(2)]
if sys.argv[1] == "dropped":
    del flow
"""


@pytest.mark.parametrize("function", ["kept", "dropped"])
def test_leaving_the_process_while_calls_run_and_wait(function):
    left = subprocess.run([sys.executable, "-c", LEAVING, function], capture_output=True, text=True, timeout=120)
    assert (left.returncode, left.stderr) == (0, "")


def test_prepare():
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    flow.prepare(WS, X)
    other_rows = X * 2
    close(jax.jit(flow)(WS, other_rows), model(WS, other_rows))
    (resolved,) = flow._cache.values()
    assert extension.module.plan_stats(resolved._binder.plan)["misses"] == 0
    with pytest.raises(df.DynaFlowError, match="prepare takes arrays"):
        flow.prepare(WS, np.asarray(X))
    df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="xla").prepare(WS, X)  # nothing to do


def test_the_environment_says_what_auto_means(monkeypatch):
    monkeypatch.setenv("DYNAFLOW_BACKEND", "dispatch")
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0))
    close(flow(WS, X), model(WS, X))
    (resolved,) = flow._cache.values()
    assert extension.module.plan_stats(resolved._binder.plan)["runs"] == 1
    monkeypatch.setenv("DYNAFLOW_BACKEND", "fastest")
    with pytest.raises(df.DynaFlowError, match="not 'fastest'"):
        df.dynaflow(model, scheduler=Streams(4, 4))


def test_it_survives_cleared_caches():
    flow = df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")
    run = jax.jit(flow)
    run(WS, X)
    jax.clear_caches()
    close(run(WS, X), model(WS, X))


def test_without_the_extension(monkeypatch):
    monkeypatch.delenv("DYNAFLOW_BACKEND", raising=False)
    monkeypatch.setattr(extension, "module", None)
    with pytest.raises(df.DynaFlowError, match="not built"):
        df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0), backend="dispatch")(WS, X)
    close(df.dynaflow(model, scheduler=Streams(4, 4), batch_axes=(None, 0))(WS, X), model(WS, X))


MODULE = """HloModule x
ENTRY %main (a: f32[8]) -> (f32[8], s32[]) {
  %a = f32[8]{0} parameter(0)
  %begin = s32[] custom-call(%a), custom_call_target="dynaflow_capture_begin"
  %t = (f32[8]{0}, s32[]) tuple(%a, %begin)
  %f = f32[8]{0} fusion(%a), kind=kLoop
  %end = s32[] custom-call(%f), custom_call_target="dynaflow_capture_end"
  ROOT %out = (f32[8]{0}, s32[]) tuple(%f, %end)
}
"""


def test_what_a_capture_would_miss_is_refused():
    cuda.check_capturable(MODULE, "op")
    many = "f32[8]{0}, " * 5
    for marker, added in (
        ("  %begin", "  %c = f32[8]{0} copy(%a)\n"),
        ("  ROOT", "  %c = f32[8]{0} copy(%f)\n"),
        ("  ROOT", f"  %c = ({many}/*index=5*/f32[8]{{0}}) fusion(%f), kind=kInput\n"),
    ):
        with pytest.raises(df.DynaFlowError, match="XLA moved an instruction out of the capture: %c"):
            cuda.check_capturable(MODULE.replace(marker, added + marker), "op")
    fused = MODULE.replace('custom-call(%f), custom_call_target="dynaflow_capture_end"', "fusion(%f), calls=%c")
    for name, culprit in (("%end", "the end of the capture"), ("%dynamic_slice_fusion", "%dynamic_slice_fusion")):
        with pytest.raises(df.DynaFlowError, match=f"XLA moved an instruction out of the capture: {culprit}"):
            cuda.check_capturable(fused.replace("%end", name), "op")
    with pytest.raises(df.DynaFlowError, match="op cannot be captured: it holds a while"):
        cuda.check_capturable(MODULE.replace("  %f", "  %w = (f32[8]{0}, s32[]) while(%t)\n  %f", 1), "op")


@pytest.mark.parametrize(("streams", "expected"), [(1, 1), (2, 8), (4, 16)])
def test_modules_beside_each_other_stay_short(streams, expected):
    """A device takes one module's kernels after the other, so that a long one would keep the other streams waiting."""

    def branches(xs):
        found = []
        for branch, x in enumerate(xs):
            for _ in range(8):  # operators, of two products each
                with df.mark(f"branch{branch}"):
                    x = jnp.tanh(jnp.tanh(x @ WS[0]) @ WS[0].T)
            found.append(x)
        return found

    class StreamOfEach(df.OpScheduler):
        def schedule(self, ctx):
            while ops := ctx.get_ready_ops():
                for op in ops:
                    ctx.execute(op, stream=op.name)

    flow = df.dynaflow(branches, scheduler=StreamOfEach(), backend="dispatch")
    close(jax.jit(flow)([X] * streams), branches([X] * streams))
    (resolved,) = flow._cache.values()
    assert len(resolved._binder.work.operations) == expected
