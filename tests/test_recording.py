"""A dispatched plan's profile: what ran when in a real run, by operator and stream."""

import glob
import gzip
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import normal
from profiled import CASES, ROWS, W, looped, mlp, needs_devices
from scheduling import Do

import dynaflow_jax as df
from dynaflow_jax.recording import _grouped, _medians, _slowest
from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime.binder import Ran
from dynaflow_jax.timeline import joined_from

pytestmark = pytest.mark.skipif(extension.module is None, reason="the extension is not built")


def apart(ctx):
    """Every operator on a stream of its own kind, so that each is a partition."""
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, stream=op.name)


CASES = CASES | {"apart": (mlp, Do(apart, 4, 4))}


def leaves(details, trips=1):
    for what in details:
        if what.body is None:
            yield what, trips
        else:
            yield from leaves(what.body, trips * what.trips)


def dispatched(fun, scheduler, **options):
    return df.dynaflow(fun, scheduler=scheduler, batch_axes=(None, 0), backend="dispatch", **options)


@pytest.mark.parametrize("name", CASES)
def test_every_operator_is_named(name):
    fun, scheduler = CASES[name]
    flow = dispatched(fun, scheduler)
    timeline, plan = df.profile(flow, W, ROWS, calls=2), flow.plan(W, ROWS)
    assert timeline.measured
    assert timeline.title == plan.strategy
    steps = {what.name for what, _ in leaves(plan.details)}
    named = {part for event in timeline.events for part in joined_from(event.name, steps)}
    assert named == steps
    others = {event.name for event in timeline.events if not joined_from(event.name, steps)}
    loops = {what.name for what in plan.details if what.body is not None}  # what their results are put together by
    assert all(re.fullmatch(r"(in|out)put \d+|split|join|output", other) for other in others - loops), others
    assert sum(event.flops for event in timeline.events) == pytest.approx(
        sum(what.flops * trips for what, trips in leaves(plan.details))
    )
    assert df.compare(plan.simulate("H200"), timeline)
    assert df.visualize.to_perfetto(plan.simulate("H200"), timeline)
    assert plan.to_html("H200", timeline=timeline)


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_in_order(name):
    fun, scheduler = CASES[name]
    flow = dispatched(fun, scheduler)
    timeline = df.profile(flow, W, ROWS, calls=3)
    assert min(event.start_us for event in timeline.events) == 0
    for stream in timeline.streams:
        own = [event for event in timeline.events if event.stream == stream]
        assert all(event.duration_us >= 0 for event in own)
        assert all(before.end_us <= after.start_us for before, after in itertools.pairwise(own))
        gaps = sum(end - start for start, end in timeline.gaps(stream))
        assert timeline.busy_us(stream) + gaps == pytest.approx(timeline.total_us)


def test_a_loop_has_its_iterations():
    flow = dispatched(looped, df.strategies.Sequential())
    timeline, plan = df.profile(flow, W, ROWS, calls=1), flow.plan(W, ROWS)
    names = [event.name for event in timeline.events if "layer" in event.name]
    assert len(names) == 3
    (line,) = [line for line in df.compare(plan.simulate("H200"), timeline).splitlines() if line.startswith(names[0])]
    total = sum(event.duration_us for event in timeline.events if event.name == names[0])
    assert f"{total:.1f}" in line


def test_streams_overlap_where_nothing_is_between_them():
    """Spans, not speed: both streams are under way at once even if they share a core."""
    w, x = normal(512, 512), normal(512, 512)

    def chain(w, x):
        with df.mark("chain"):
            for _ in range(8):
                x = jnp.tanh(x @ w)
        return x

    concurrent = df.profile(dispatched(chain, df.strategies.NanoFlow(2, concurrent=True)), w, x, calls=5)
    assert len(concurrent.streams) == 2
    assert concurrent.overlap_us > 0.2 * concurrent.total_us
    serial = df.profile(dispatched(chain, df.strategies.Sequential()), w, x, calls=5)
    assert serial.overlap_us == 0
    assert serial.busy_us() > 0.2 * serial.total_us


def test_what_reads_the_other_stream_does_not_overlap_it():
    flow = df.dynaflow(mlp, scheduler=Do(apart, 8), batch_axes=(None, 0), backend="dispatch")
    timeline = df.profile(flow, W, ROWS, calls=3)
    up, down = (next(e for e in timeline.events if e.name == f"{name}[0]") for name in ("up", "down"))
    assert up.stream != down.stream
    assert up.end_us <= down.start_us


@needs_devices
@pytest.mark.parametrize("rows", [8, 32])
def test_exchanges_and_what_runs_beside_them(rows):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    w, x = normal(256, 512), normal(rows, 256)

    def fun(w, x):
        @jax.shard_map(mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=P(), check_vma=False)
        def inside(w, x):
            y = jax.lax.psum(mlp(w, x), "d")
            with df.mark("after"):
                return jnp.sin(y) + x

        return inside(w, x)

    flow = dispatched(fun, df.strategies.NanoFlow(2), rules=[df.SplitFunc("psum")])
    timeline, plan = df.profile(flow, w, x, calls=2), flow.plan(w, x)
    steps = {what.name for what, _ in leaves(plan.details)}
    assert {part for e in timeline.events for part in joined_from(e.name, steps)} == steps
    sums = [event for event in timeline.events if event.name.startswith("psum")]
    assert [event.name for event in sums] == ["psum[0]", "psum[1]"]
    assert {(event.bound, event.stream) for event in sums} == {("network", "network")}
    assert timeline.bytes_moved[1] == rows * 256 * 4  # each device sends the other its part of the sum
    (start,) = [event for event in timeline.events if event.name == "start"]
    assert start.end_us <= sums[0].start_us
    assert sums[0].start_us > 0


def test_what_is_lowered_to_xla_is_measured_step_by_step():
    flow = df.dynaflow(mlp, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), backend="xla")
    names = {event.name for event in df.profile(flow, W, ROWS, calls=1).events}
    assert names == {"up[0]", "up[1]", "down[0]", "down[1]"}


def test_a_profile_leaves_nothing_behind():
    flow = dispatched(mlp, df.strategies.Sequential())
    flow(W, ROWS)
    made, freed = [], []
    create, free = extension.module.create_plan, extension.module.free_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension.module, "create_plan", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
        patch.setattr(extension.module, "free_plan", lambda plan: (freed.append(plan), free(plan))[1])
        df.profile(flow, W, ROWS, calls=1)
    assert made
    assert freed == made


def test_partitions_are_ranges_of_a_trace(tmp_path):
    flow = dispatched(mlp, Do(apart, 4, 4))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(jax.jit(flow)(W, ROWS))
    (trace,) = glob.glob(f"{tmp_path}/**/*.trace.json.gz", recursive=True)
    with gzip.open(trace) as file:
        recorded = file.read()
    for name in ("up[0]", "up[1]", "down[0]", "down[1]"):
        assert f'"name":"{name}"'.encode() in recorded


def ran(operator, kind, begin, end, stream="network", size=0, to_peer=False):
    return Ran(operator, kind, stream, to_peer, size, begin, end)


def test_exchanges_are_put_together():
    commands = [
        ran("a", "copy", 0, 1, to_peer=True),
        ran("x", "launch", 0, 1, "compute"),
        ran("a", "signal", 1, 2),
        ran("a", "await", 2, 3),
        ran("a", "await", 3, 4),
        ran("a", "copy", 4, 5, to_peer=True),  # the next iteration's
        ran("a", "await", 5, 6),
        ran("b", "await", 6, 7),
        ran("b", "launch", 7, 8),
        ran("b", "launch", 8, 9),
    ]
    shown = [[command.kind for command in group] for group in _grouped(commands)]
    assert shown == [
        ["copy", "signal", "await", "await"],
        ["launch"],
        ["copy", "await"],
        ["await"],
        ["launch"],
        ["launch"],
    ]


def test_medians_are_of_the_program_that_ran_last():
    runs = [[ran("a", "copy", 0, 9), ran("b", "launch", 9, 10)], [ran("b", "launch", 1, 4)], [ran("b", "launch", 3, 8)]]
    assert _medians(runs) == [ran("b", "launch", 2, 6)]


def test_of_several_devices_the_slowest_is_shown():
    runs = [{0: [ran("a", "launch", 0, 5)], 1: [ran("a", "launch", 0, 7)]}] * 3
    assert _slowest(runs) == [ran("a", "launch", 0, 7)]
