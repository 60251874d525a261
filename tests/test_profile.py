"""Profiling: every step is timed once, on the values that it gets, and names arrive where they are looked for."""

import glob
import gzip
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from profiled import CASES, ROWS, W, looped, mlp, needs_devices

import dynaflow_jax as df
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.profile import StepTimer, profile


def leaves(steps):
    """The steps that are no loops."""
    return [leaf for step in steps for leaf in (leaves(step.body) if step.body is not None else [step])]


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_an_event(name):
    fun, scheduler = CASES[name]
    flow = df.dynaflow(fun, scheduler=scheduler, batch_axes=(None, 0))
    timeline, plan = profile(flow, W, ROWS, calls=2), flow.plan(W, ROWS)
    assert timeline.measured
    assert timeline.device == jax.devices()[0].device_kind
    steps = leaves(plan.steps)
    assert sorted((e.name, e.stream) for e in timeline.events) == sorted((str(s), s.stream) for s in steps)
    assert timeline.total_us > 0
    for stream in plan.streams:
        own = [event for event in timeline.events if event.stream == stream]
        assert [event.name for event in own] == [str(step) for step in steps if step.stream == stream]
    assert df.compare(plan.simulate("H200"), timeline)


@pytest.mark.parametrize("name", CASES)
def test_steps_run_on_the_values_of_a_call(name):
    """One by one they give what the function gives."""
    fun, scheduler = CASES[name]
    flow = df.dynaflow(fun, scheduler=scheduler, batch_axes=(None, 0))
    resolved, call = flow._resolve((W, ROWS), {})
    got = resolved.evaluate(StepTimer(1).run, resolved.constants, call.leaves)
    for one, other in zip(got, jax.tree.leaves(fun(W, ROWS)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@needs_devices
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("shape", [{"d": 2}, {"d": 2, "e": 2}])
def test_inside_shard_map_all_devices_run_a_step(check, shape):
    count = int(np.prod(list(shape.values())))
    kinds = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds, devices=jax.devices()[:count])

    def fun(w, x):
        @jax.shard_map(mesh=mesh, in_specs=(P(None, "d"), P()), out_specs=P(), check_vma=check)
        def inside(w, x):
            x = x + jax.lax.psum(mlp(w, x), "d")
            return x + looped_inside(x)

        return inside(w, x)

    def looped_inside(x):
        def body(x, _):
            with df.mark("layer"):
                return jnp.sin(x), None

        return jax.lax.scan(body, x, None, length=3)[0]

    flow = df.dynaflow(fun, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0))
    resolved, call = flow._resolve((W, ROWS), {})
    (got,) = resolved.evaluate(StepTimer(1).run, resolved.constants, call.leaves)
    np.testing.assert_allclose(got, jax.jit(fun)(W, ROWS), rtol=1e-5, atol=1e-5)
    timeline = profile(flow, W, ROWS, calls=1)
    assert sorted(event.name for event in timeline.events) == sorted(map(str, leaves(flow.plan(W, ROWS).steps)))
    assert {event.bound for event in timeline.events if event.stream == "network"} == {"network"}


def test_a_loop_takes_its_first_iteration_as_often_as_it_runs():
    flow = df.dynaflow(looped, scheduler=df.strategies.Sequential())
    timeline = profile(flow, W, ROWS, calls=1)
    inside = [event for event in timeline.events if event.name in ("layer[0]", "add[0]")]
    (loop,) = (what for what in flow.plan(W, ROWS).details if what.body is not None)
    assert [event.flops for event in inside] == [loop.trips * what.flops for what in loop.body]


@pytest.mark.parametrize(
    ("flow", "args", "message"),
    [
        (jax.jit(mlp), (W, ROWS), r"without jax.jit around it"),
        (mlp, (W, ROWS), r"takes what dynaflow returned"),
        (
            df.dynaflow(mlp, scheduler=df.strategies.Sequential()),
            (W, jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)),
            r"takes arrays; x is ShapeDtypeStruct",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(flow, args, message):
    with pytest.raises(DynaFlowError, match=message):
        profile(flow, *args)


@pytest.mark.parametrize("calls", [0, 1.5, True])
def test_calls_are_counted(calls):
    with pytest.raises(DynaFlowError, match="calls is a positive whole number"):
        profile(df.dynaflow(mlp, scheduler=df.strategies.Sequential()), W, ROWS, calls=calls)


def test_compared_side_by_side():
    flow = df.dynaflow(mlp, scheduler=df.strategies.NanoFlow(2, concurrent=True), batch_axes=(None, 0))
    predicted, measured = flow.plan(W, ROWS).simulate("H200"), profile(flow, W, ROWS, calls=1)
    text = df.compare(predicted, measured)
    head, *lines = text.splitlines()
    assert head.endswith(f"predicted on NVIDIA H200, measured on {measured.device}")
    for event in measured.events:
        (line,) = [line for line in lines if line.startswith(f"{event.name} ")]
        assert f"{event.duration_us:.1f}" in line
    for stream in measured.streams:
        assert sum(line.startswith(f"{stream} ") for line in lines) == 1
    assert "first µs" in df.compare(predicted, predicted)
    assert measured.show().splitlines()[0].endswith(f"measured: {measured.total_us:.1f} µs")


def test_names_of_operators_reach_the_compiled_program():
    run = jax.jit(df.dynaflow(mlp, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), backend="xla"))
    names = set(re.findall(r'op_name="([^"]*)"', run.lower(W, ROWS).compile().as_text()))
    for name in ("up", "down"):
        assert any(f"({name})" in found for found in names), names


def test_steps_are_ranges_of_a_trace(tmp_path):
    """What ``jax.profiler`` records: the names of steps when they are timed, and of operators in the program."""
    flow = df.dynaflow(mlp, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0))
    with jax.profiler.trace(tmp_path):
        profile(flow, W, ROWS, calls=1)
        jax.block_until_ready(jax.jit(flow)(W, ROWS))
    (trace,) = glob.glob(f"{tmp_path}/**/*.trace.json.gz", recursive=True)
    with gzip.open(trace) as file:
        recorded = set(re.findall(rb'"name":"([^"]*)"', file.read()))
    for step in flow.plan(W, ROWS).steps:
        assert str(step).encode() in recorded
