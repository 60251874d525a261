"""One process of several that run plans together; ``test_multihost.py`` starts them, and says which of these scenes.

Says a line for each thing that was right. Meshes reach over the devices of all processes.
"""

import os
import signal
import sys
import time
import warnings

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax import compat
from dynaflow_jax.runtime import binder, host, processes, sharing


def strategies():
    """The strategies, each with a model that needs it."""
    import models_parallel as models  # computes, which has to wait until the processes know of each other

    strategies = df.strategies
    return {
        "NanoFlow": (models.tensor_parallel(), strategies.NanoFlow()),
        "TokenWeave": (models.tensor_parallel(rows=24), strategies.TokenWeave(tile=8, min_rows=16)),
        "SingleBatchOverlap": (models.tensor_parallel(), strategies.SingleBatchOverlap()),
        "DualBatchOverlap": (models.tensor_parallel(), strategies.DualBatchOverlap()),
        "GradientBuckets": (models.data_parallel(), strategies.GradientBuckets(1500)),
        "ParameterPrefetch": (models.fully_sharded(), strategies.ParameterPrefetch()),
        "AsyncTensorParallel": (models.sequence_parallel(), strategies.AsyncTensorParallel()),
        "Comet": (models.expert_parallel(), strategies.Comet()),
    }


COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "i"), P()),
    "pmax": (lambda x: lax.pmax(x, "i"), P()),
    "all_gather": (lambda x: lax.all_gather(x, "i", axis=1, tiled=True), P("i")),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True), P("i")),
    "all_to_all": (lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True), P("i")),
    "ppermute": (lambda x: lax.ppermute(x, "i", [(0, 1), (1, 0)]), P("i")),
    "ppermute to one": (lambda x: lax.ppermute(x, "i", [(0, 1)]), P("i")),
    "a sum of sums": (lambda x: lax.psum(lax.psum(x, "i") * x, "i"), P()),
}


def say(line):
    """Not to the standard output, where threads of XLA's collectives write in the middle of lines."""
    with open(os.environ["SAID"], "a", encoding="utf-8") as file:
        print(line, file=file)


def equal(got, want, name, **tolerance):
    """Asserts that what this process has of two results is equal."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for mine, whole in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_allclose(mine.data, whole.data, err_msg=name, **({"rtol": 0} | tolerance))


def sharded(fun, out=None, **axes):
    """A function of rows that are sharded over all devices, as it is and dispatched."""
    axes = axes or {"i": jax.device_count()}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    flow = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend="dispatch")
    specs = {"mesh": mesh, "in_specs": P(tuple(axes)), "out_specs": P() if out is None else out, "check_vma": False}
    return jax.jit(jax.shard_map(fun, **specs)), jax.jit(jax.shard_map(flow, **specs))


def rows(seed=0, columns=24):
    """Small whole numbers, whose sums are exact in every order."""
    return np.random.default_rng(seed).integers(-8, 8, (8 * jax.device_count(), columns)).astype(np.float32)


def collectives(rank):
    """Every collective, many times, at new and at old addresses."""
    del rank
    warnings.simplefilter("error", df.DispatchWarning)
    for name, (fun, out) in COLLECTIVES.items():
        plain, flow = sharded(fun, out)
        for seed in range(4):
            x = rows(seed)
            equal(flow(x), plain(x), name)
        say(name)
    # Whoever gets nothing from a device must not be ahead of it: here nobody but one neighbour does.
    plain, flow = sharded(lambda x: lax.ppermute(x, "i", [(0, 1)]) + 1, P("i"))
    x = rows()
    want = plain(x)
    for _ in range(300):
        got = flow(x).block_until_ready()
    equal(got, want, "many")
    say("many")
    # A sum of two steps, and groups that are a part of the mesh.
    plain, flow = sharded(lambda x: lax.psum(x, "i"))
    large = rows(columns=1 << 15)
    equal(flow(large), plain(large), "large")
    if jax.device_count() % 2 == 0 and jax.device_count() > 2:
        plain, flow = sharded(lambda x: lax.psum(x, "b"), P("a"), a=2, b=jax.device_count() // 2)
        for seed in range(3):
            equal(flow(rows(seed)), plain(rows(seed)), "groups")
    say("large")


def every_strategy(rank):
    """Every distributed strategy is dispatched, and right."""
    del rank
    warnings.simplefilter("error", df.DispatchWarning)
    devices = jax.device_count()
    for name, (model, strategy) in strategies().items():
        args = jax.tree.map(np.asarray, model.args)
        flow = df.dynaflow(model.fun, scheduler=strategy, backend="dispatch", batch_axes=model.axes)
        run = jax.jit(model.mapped(devices, flow))
        want = jax.jit(model.mapped(devices))(*args)
        for _ in range(3):
            equal(run(*args), want, name, rtol=2e-5, atol=2e-5)
        said = model.inside(devices, flow.explain)
        assert f"the devices of {jax.process_count()} processes write to each other's memory" in said, said
        say(name)
    experts()
    say("experts")


def experts():
    """A mixture of experts, one on each device: ``shard_map`` inside of what is scheduled."""
    import models_moe
    from models import normal

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), (models_moe.AXIS,), axis_types=(AxisType.Auto,))
    params = jax.tree.map(np.asarray, models_moe.parameters(2, devices))
    x = np.asarray(normal(4 * devices, models_moe.TOKENS, models_moe.WIDTH, seed=3))
    fun = models_moe.stack(models_moe.moe_layer, mesh, params)
    overlap = df.strategies.DualBatchOverlap()
    flow = df.dynaflow(fun, scheduler=overlap, backend="dispatch", batch_axes=(None, 0))
    run = jax.jit(flow)
    want = jax.jit(fun)(params, x)
    for _ in range(3):
        equal(run(params, x), want, "experts", rtol=2e-5, atol=2e-5)


def different_hosts(rank):
    """Across hosts, plans are lowered to XLA, whose collectives reach further, and say so."""
    sharing.host = lambda: f"host{rank} boot{rank}"
    devices, count = jax.device_count(), jax.process_count()
    for name, (model, strategy) in strategies().items():
        args = jax.tree.map(np.asarray, model.args)
        flow = df.dynaflow(model.fun, scheduler=strategy, backend="dispatch", batch_axes=model.axes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = jax.jit(model.mapped(devices, flow))(*args)
        warned = [str(w.message) for w in caught if issubclass(w.category, df.DispatchWarning)]
        assert warned, f"{name} was dispatched"
        assert all(f"of a program of {count} processes" in text for text in warned), warned
        assert all("on different hosts (host0, host1)" in text for text in warned), warned
        assert f"program of {count} processes" in model.inside(devices, flow.explain)
        equal(got, jax.jit(model.mapped(devices))(*args), name, rtol=2e-5, atol=2e-5)
        say(name)
    # What runs on one device of this process is dispatched all the same.
    alone = df.dynaflow(lambda x: x * 2, scheduler=df.strategies.Sequential(), backend="dispatch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", df.DispatchWarning)
        np.testing.assert_array_equal(jax.jit(alone)(np.ones(4, np.float32)), 2)
        assert "Lowering: dispatched" in alone.explain(np.ones(4, np.float32))


def part_of_the_devices(rank):
    """A mesh of some devices is not dispatched: which processes would have to take part is not known."""
    mesh = jax.make_mesh((jax.local_device_count(),), ("i",), axis_types=(AxisType.Auto,), devices=jax.local_devices())
    fun = lambda x: lax.psum(x, "i")  # noqa: E731
    flow = df.dynaflow(fun, scheduler=df.strategies.SingleBatchOverlap(), backend="dispatch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = jax.jit(jax.shard_map(flow, mesh=mesh, in_specs=P("i"), out_specs=P()))(rows())
    assert any("has not all of their" in str(w.message) for w in caught), caught
    count = jax.local_device_count()
    np.testing.assert_array_equal(got, rows().reshape(count, -1, 24).sum(0))
    say(rank)


def _failing(flow, x):
    """How a call fails, and after how many seconds."""
    began = time.monotonic()
    try:
        jax.block_until_ready(flow(x))
    except Exception as error:
        return str(error), time.monotonic() - began
    raise AssertionError("nothing failed")


def killed(rank):
    """A process that is killed in the middle is missed by the others."""
    _, flow = sharded(lambda x: lax.psum(lax.psum(x, "i") * x, "i"))
    x = rows()
    jax.block_until_ready(flow(x))
    if rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    error, seconds = _failing(flow, x)
    assert "process 1 (devices [" in error, error
    assert "has ended" in error, error
    assert seconds < 20, seconds
    again, seconds = _failing(flow, x)
    assert "has ended" in again, again
    assert seconds < 1, seconds
    say("missed")
    os._exit(0)  # jax.distributed would wait for the other


def failing(rank):
    """What goes wrong in one process before its part of a run is an error of the others too."""
    if rank == 1:

        def add(*_, **__):
            raise RuntimeError("no room here")

        host.HostBinding.add = add
    _, flow = sharded(lambda x: lax.psum(x, "i"))
    error, seconds = _failing(flow, rows())
    assert "no room here" in error, error
    assert rank == 1 or "process 1 (devices [" in error, error
    assert seconds < 20, seconds
    say("told")


def late(rank):
    """A process that lives but does not come is not waited for without end."""
    processes.ALIVE_TIMEOUT_S = 3.0
    _, flow = sharded(lambda x: lax.psum(x, "i"))
    x = rows()
    jax.block_until_ready(flow(x))
    if rank == 0:
        error, seconds = _failing(flow, x)
        assert "process 1 (devices [" in error, error
        assert "did not answer within 3 s" in error, error
        assert 2 < seconds < 20, seconds
        compat.tell_processes("test/over", "yes")
    else:
        assert compat.told_by_process("test/over", 60)
        error, _ = _failing(flow, x)
        assert "process 0 (devices [" in error, error
        assert "did not answer within 3 s" in error, error
    say("given up")


def other_plans(rank):
    """A process that comes with another plan is not taken for one with this plan."""
    processes.ALIVE_TIMEOUT_S = 3.0
    _, flow = sharded(
        lambda x: lax.psum(x * 2 if rank else lax.all_gather(x, "i", axis=1), "i"), P("i") if not rank else P()
    )
    error, _ = _failing(flow, rows())
    assert "all processes have to run the same programs in the same order" in error, error
    say("told apart")


SCENES = (
    collectives,
    every_strategy,
    different_hosts,
    part_of_the_devices,
    killed,
    failing,
    late,
    other_plans,
)


def main(rank, count, port, scene):
    binder.TIMEOUT_S = 10.0
    jax.distributed.initialize(f"localhost:{port}", int(count), int(rank))
    assert jax.process_count() == int(count)
    next(f for f in SCENES if f.__name__ == scene)(int(rank))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
