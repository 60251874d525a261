"""Simulated plans: laws that hold for every plan and device, and what the steps of real plans are taken for."""

import copy
import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import normal
from scheduling import Do, Split, run_merged

import dynaflow_jax as df
from dynaflow_jax import compat, cost, devices
from dynaflow_jax.cost import Kernel
from dynaflow_jax.details import StepDetails
from dynaflow_jax.errors import DynaFlowError, PlanError
from dynaflow_jax.schedule import OpRef, Step
from dynaflow_jax.simulate import RESOURCES, Predicted, alone_us, phases_of, placed

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
given = hypothesis.given

H200 = devices.H200
CLOSE = 1e-6


# -- laws ------------------------------------------------------------------------------------------------------------

sizes = st.sampled_from([1, 16, 100, 128, 1000, 4096])
kernels = st.one_of(
    st.builds(
        lambda m, n, k: Kernel(
            "dot_general", 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n), "bfloat16", 2, (1, m, n, k)
        ),
        sizes,
        sizes,
        sizes,
    ),
    st.builds(lambda size: Kernel("tanh", 0.0, float(size)), st.integers(1, 10**9)),
    st.builds(lambda size: Kernel("psum", 0.0, 2.0 * size, sent=float(size), hops=1), st.integers(1, 10**8)),
)


def details(name, *kernels, trips=1, body=None):
    figures = [sum(getattr(kernel, field) for kernel in kernels) for field in ("flops", "bytes", "sent")]
    bound = "network" if figures[2] else "compute"
    return StepDetails(name, None, (), (), "bfloat16", bound, *figures, kernels, trips, body)


@st.composite
def plans(draw, streams=("a", "b", "c"), most=12, loops=True, around=""):
    """Steps and what they do: any dependencies on earlier steps, any streams."""
    steps, found = [], []
    for i in range(draw(st.integers(1, most))):
        before = st.lists(st.sampled_from(range(i)), max_size=3, unique=True).map(tuple) if i else st.just(())
        name, stream = f"{around}{i}", draw(st.sampled_from(streams))
        step = Step((OpRef(name, None),), stream, draw(before), draw(before), draw(st.integers(0, 2)))
        if loops and draw(st.integers(0, 5)) == 0:
            body, inner = draw(plans(streams, 4, False, f"{name}."))
            steps.append(dataclasses.replace(step, body=body))
            found.append(details(name, trips=draw(st.integers(1, 5)), body=inner))
        else:
            steps.append(step)
            found.append(details(name, *draw(st.lists(kernels, max_size=3))))
    return tuple(steps), tuple(found)


models = st.sampled_from(devices.DEVICES)


def times(events):
    return {event.name: (event.start_us, event.end_us) for event in events}


@given(plans(streams=("a",)), models)
def test_one_stream_takes_the_sum_of_its_steps(plan, device):
    _, total = placed(*plan, Predicted(device))
    assert total == pytest.approx(sum(alone_us(what, device) for what in plan[1]), rel=CLOSE)


@given(plans(), models)
def test_never_longer_than_one_step_after_the_other(plan, device):
    """So that adding streams to a plan cannot make it slower than it is on one."""
    _, total = placed(*plan, Predicted(device))
    assert total <= sum(alone_us(what, device) for what in plan[1]) * (1 + CLOSE) + CLOSE


@given(plans(loops=False), models)
def test_never_shorter_than_the_critical_path_or_a_resource(plan, device):
    steps, found = plan
    _, total = placed(steps, found, Predicted(device))
    ends, last = [], {}
    for step, what in zip(steps, found, strict=True):
        waits = [ends[i] for i in (*step.reads, *step.after)]
        ends.append(max([*waits, last.get(step.stream, 0.0)]) + alone_us(what, device))
        last[step.stream] = ends[-1]
    assert total >= max(ends) * (1 - CLOSE) - CLOSE
    for i, name in enumerate(RESOURCES):
        used = sum(phase.us * phase.demand[i] for what in found for phase in phases_of(what, device))
        assert total >= used * (1 - CLOSE) - CLOSE, name


@given(plans(), models)
def test_order_is_kept(plan, device):
    steps, found = plan
    events, total = placed(steps, found, Predicted(device))
    assert [event.start_us for event in events] == sorted(event.start_us for event in events)
    for stream in {event.stream for event in events}:
        own = [event for event in events if event.stream == stream]
        assert all(a.end_us <= b.start_us + CLOSE * total for a, b in itertools.pairwise(own))
    at = times(events)
    assert max((end for _, end in at.values()), default=0.0) == pytest.approx(total, rel=CLOSE)
    for step, what in zip(steps, found, strict=True):
        for i in (*step.reads, *step.after):
            if step.body is None and steps[i].body is None:
                assert at[found[i].name][1] <= at[what.name][0] + CLOSE * total


@given(plans(), models, st.floats(1.1, 10))
def test_a_device_that_is_faster_in_all_things_is_faster_by_as_much(plan, device, factor):
    rates = "bf16_flops f32_flops f64_flops int8_flops memory_rate link_rate".split()
    latencies = "link_latency_us kernel_us launch_us".split()
    faster = dataclasses.replace(
        device,
        **{name: getattr(device, name) * factor for name in rates},
        **{name: getattr(device, name) / factor for name in latencies},
    )
    _, before = placed(*plan, Predicted(device))
    _, after = placed(*plan, Predicted(faster))
    assert after == pytest.approx(before / factor, rel=1e-4)


@given(plans(streams=("a",)), models, st.sampled_from("bf16_flops memory_rate link_rate".split()), st.floats(1, 10))
def test_a_faster_part_slows_nothing_down(plan, device, part, factor):
    faster = dataclasses.replace(device, **{part: getattr(device, part) * factor})
    assert placed(*plan, Predicted(faster))[1] <= placed(*plan, Predicted(device))[1] * (1 + CLOSE)


@given(plans(loops=False), models, st.integers(1, 50))
def test_a_loop_is_its_iterations(plan, device, trips):
    once = placed(*plan, Predicted(device))[1]
    step = Step((OpRef("loop", None),), body=plan[0])
    events, total = placed((step,), (details("loop", trips=trips, body=plan[1]),), Predicted(device))
    assert total == pytest.approx(trips * once, rel=CLOSE)
    assert sum(event.flops for event in events) == pytest.approx(trips * sum(what.flops for what in plan[1]))


# -- kernels ---------------------------------------------------------------------------------------------------------


def product(rows, columns, summed, count=1):
    traffic = 2.0 * (rows * summed + summed * columns + rows * columns)
    flops, shape = 2.0 * rows * columns * summed, (1, rows, columns, summed)
    return Kernel("dot_general", flops, traffic, "bfloat16", 2, shape, count=count)


def took(*steps, device=H200):
    """How long steps take, given as (stream, kernel) or (stream, kernel, changes)."""
    made = [
        dataclasses.replace(Step((OpRef(str(i), None),), stream), **dict(*changes))
        for i, (stream, _, *changes) in enumerate(steps)
    ]
    return placed(made, [details(str(i), step[1]) for i, step in enumerate(steps)], Predicted(device))[1]


def test_large_products_reach_what_was_measured():
    """``examples/benchmarks/results/kernels.json``: the plain products of XLA's, as the unfused baseline."""
    for (rows, columns, summed), measured in (((8192, 8192, 8192), 1624.87), ((4096, 4096, 4096), 206.29)):
        assert took(("a", product(rows, columns, summed))) == pytest.approx(measured, rel=0.1)


def test_tiles_come_in_waves():
    """One tile more than there are multiprocessors costs as much as twice as many."""
    one_wave, two_waves = (took(("a", product(128 * tiles, 256, 500))) - H200.kernel_us for tiles in (132, 133))
    assert two_waves > 1.4 * one_wave


def test_small_products_leave_room_for_each_other():
    small, large = product(64, 1024, 500), product(8192, 8192, 8192)
    assert took(("a", small), ("b", small)) < 0.75 * 2 * took(("a", small))
    assert took(("a", large), ("b", large)) > 1.85 * took(("a", large))


def test_an_exchange_hides_behind_a_product_at_a_small_price():
    """As measured with copy engines: 91% of 5652 µs of exchange hidden behind 10849 µs of products."""
    exchange = Kernel("psum", 0.0, 2 * 64 * 2.0**20, sent=64 * 2.0**20, hops=1, count=32)
    products = product(8192, 8192, 8192, count=7)
    alone, beside = took(("a", products)), took(("a", products), ("b", exchange))
    hidden = 1 - (beside - alone) / took(("b", exchange))
    assert 0.85 < hidden < 0.97


def test_launches_queue_up():
    tiny = Kernel("add", 0.0, 64.0, count=100)
    assert took(("a", tiny)) == pytest.approx(100 * H200.kernel_us, rel=0.01)
    for streams in ("ab", "abcd"):
        launches = 100 * len(streams) * H200.launch_us
        assert took(*((stream, tiny) for stream in streams)) == pytest.approx(launches, rel=0.01)


def test_few_multiprocessors_are_slower_and_leave_the_others():
    large = product(8192, 8192, 8192)
    assert took(("a", large, {"sm_budget": 33})) > 3.5 * took(("a", large))
    assert took(("a", large, {"sm_budget": 66}), ("b", large, {"sm_budget": 66})) < 1.1 * took(
        ("a", large, {"sm_budget": 66})
    )


def test_priority_goes_first():
    large, details_of = product(4096, 4096, 4096), details
    steps = [Step((OpRef(name, None),), name, priority=priority) for name, priority in (("low", 0), ("high", 1))]
    events, _ = placed(steps, [details_of(step.stream, large) for step in steps], Predicted(H200))
    assert times(events)["high"][1] == pytest.approx(took(("a", large)))
    assert times(events)["low"][1] > times(events)["high"][1]


# -- what operators are taken for --------------------------------------------------------------------------------------


def itemized(fun, *args, axes=()):
    closed = jax.make_jaxpr(fun)(*args)
    return cost.itemized(closed.eqns, closed.jaxpr.outvars, dict(axes))


X = normal(64, 128)
SIZE = X.nbytes


def test_products_are_kernels_with_shapes():
    first, second, third = itemized(lambda x: jnp.tanh(x @ x.T * 2) @ x, X)
    assert first.matmul == (1, 64, 64, 128)
    assert second.flops == 0  # tanh, which the next product reads
    assert third.matmul == (1, 64, 128, 64)
    batched = itemized(lambda x, y: jnp.einsum("bij,bkj->bik", x, y), normal(3, 4, 5), normal(3, 6, 5))
    assert sorted(batched[0].matmul) == [3, 4, 5, 6]
    for kernel in (first, batched[0]):
        batch, rows, columns, summed = kernel.matmul
        assert kernel.flops == 2 * batch * rows * columns * summed


def test_convolutions_are_products():
    (kernel,) = itemized(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        normal(2, 8, 8, 3),
        normal(3, 3, 3, 16),
    )
    assert kernel.matmul == (1, 2 * 6 * 6, 16, 27)
    assert kernel.flops == 2 * 2 * 6 * 6 * 16 * 27


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("fun", [rms_norm, jax.nn.standardize, lambda x: x - x.max(-1, keepdims=True)])
def test_norms_are_one_kernel_that_reads_once(fun):
    (kernel,) = itemized(fun, X)
    assert kernel.bytes == pytest.approx(2 * SIZE, rel=0.01)


def test_reductions_over_rows_are_kernels_of_their_own():
    assert len(itemized(lambda x: x - x.mean(0), X)) == 2


def test_gathers_go_into_what_reads_them():
    index = jnp.arange(8)
    (kernel,) = itemized(lambda x: jnp.tanh(x[index]), X)
    assert kernel.bytes == pytest.approx(2 * SIZE / 8, rel=0.05)


def test_loops_repeat_their_kernels():
    def fun(x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x.T @ x), None), x, None, length=7)[0]

    assert [kernel.count for kernel in itemized(fun, X)] == [7, 7, 7]


def test_fused_attention_counts_what_it_computes():
    q = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
    (kernel,) = (k for k in itemized(compat.cudnn_attention, q, q, q) if k.flops)
    assert kernel.flops == 2 * 2 * 2 * 4 * 64 * 64 * 32 / 2
    assert kernel.bytes < 5 * 2 * 64 * 4 * 32 * 2


def test_pallas_kernels_cost_what_they_say_or_what_their_grid_does():
    def kernel(x, y):
        y[...] = x[...] @ x[...].T

    def call(**options):
        spec = pl.BlockSpec((32, 32), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct((128, 32), jnp.float32)
        return itemized(
            pl.pallas_call(kernel, out, grid=(4,), in_specs=[spec], out_specs=spec, **options), normal(128, 32)
        )

    assert call()[0].flops == 4 * 2 * 32**3
    estimate = pl.CostEstimate(flops=123, bytes_accessed=456, transcendentals=0)
    assert call(cost_estimate=estimate)[0].flops == 123


@pytest.mark.parametrize(
    ("collective", "devices", "sent", "hops"),
    [
        (lambda x: jax.lax.psum(x, "i"), 2, SIZE, 1),
        (lambda x: jax.lax.psum(x, "i"), 4, 2 * SIZE * 3 / 4, 2),
        (lambda x: jax.lax.pmax(x, "i"), 2, SIZE, 1),
        (lambda x: jax.lax.all_gather(x, "i"), 4, 3 * SIZE, 1),
        (lambda x: jax.lax.psum_scatter(x, "i", tiled=True), 4, SIZE * 3 / 4, 1),
        (lambda x: jax.lax.all_to_all(x, "i", 0, 0, tiled=True), 4, SIZE * 3 / 4, 1),
        (lambda x: jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]), 2, SIZE, 1),
        (lambda x: jax.lax.psum(x, "i"), 1, 0, 0),
    ],
)
def test_collectives_send(collective, devices, sent, hops):
    closed = jax.make_jaxpr(collective, axis_env=[("i", devices)])(X)
    found = cost.itemized(closed.eqns, closed.jaxpr.outvars, {"i": devices})
    assert sum(kernel.sent for kernel in found) == sent
    assert sum(kernel.hops for kernel in found) == hops


# -- plans -------------------------------------------------------------------------------------------------------------


def mlp(w, x):
    with df.mark("up"):
        x = jnp.tanh(x @ w)
    with df.mark("down"):
        return x @ w.T


W, ROWS = normal(16, 32), normal(8, 16)


def planned(scheduler, fun=mlp, args=(W, ROWS), axes=(None, 0)):
    return df.dynaflow(fun, scheduler=scheduler, batch_axes=axes).plan(*args)


def test_steps_know_their_own_rows():
    found = {what.name: what for what in planned(Split(6, 2)).details}
    assert found["up[0]"].outputs == ("f32[6,32]",)
    assert found["up[1]"].outputs == ("f32[2,32]",)
    assert found["up[1]"].micro_batch == 1
    assert found["up[0]"].kernels[0].flops == 2 * 6 * 16 * 32 == 3 * found["up[1]"].kernels[0].flops
    assert found["up[0]"].dtype == "float32"


def test_merged_steps_have_the_joined_size():
    (up, down) = planned(Do(run_merged, 6, 2)).details
    assert up.outputs == ("f32[8,32]",)
    assert up.micro_batch is None
    assert up.kernels[0].matmul == (1, 8, 32, 16)
    assert down.kernels[0].matmul == (1, 8, 16, 32)


def replacement(x, w):
    return (jnp.tanh(x @ w) @ w.T,)


def test_replaced_steps_skip_what_lies_between():
    def replaced(ctx):
        while ops := ctx.get_ready_ops():
            later = [op for op in ctx.all_ops() if op.micro_batch == ops[0].micro_batch]
            ctx.execute(later, fn=replacement)

    apart, (together,) = planned(df.strategies.Sequential()).details, planned(Do(replaced)).details
    assert together.flops == sum(what.flops for what in apart)
    between = 8 * 32 * 4  # written by one operator, read by the other
    assert together.bytes == sum(what.bytes for what in apart) - 2 * between
    assert len(together.kernels) == 1


def test_grouped_steps_are_one_unit():
    def grouped(ctx):
        ctx.execute([op for op in ctx.all_ops() if op.micro_batch == 0])
        ctx.execute([op for op in ctx.all_ops() if op.micro_batch == 1])

    first, second = planned(Do(grouped, 4, 4)).details
    assert first.flops == second.flops == sum(what.flops for what in planned(Split(4, 4)).details) / 2
    assert first.name == "up[0] + down[0]"


def looped(w, x):
    def body(x, _):
        return mlp(w, x), None

    return jax.lax.scan(body, x, None, length=5)[0]


def test_loops_count_their_trips():
    (loop,) = planned(Split(4, 4), looped).details
    assert loop.trips == 5
    assert [what.name for what in loop.body] == ["up[0]", "up[1]", "down[0]", "down[1]"]
    assert loop.flops == 5 * sum(what.flops for what in loop.body)
    timeline = planned(Split(4, 4), looped).simulate("H200")
    assert len(timeline.events) == 4
    assert timeline.total_us == pytest.approx(5 * planned(Split(4, 4)).simulate("H200").total_us)


def test_random_draws_are_the_whole_batch():
    def dropped(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    plan = planned(Split(4, 4), dropped, (jax.random.key(0), ROWS))
    assert plan.simulate("H200").total_us > 0
    draw = next(what for what in plan.details if what.micro_batch is None)
    assert draw.kernels


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 (virtual) devices")
@pytest.mark.parametrize("outside", [True, False])
def test_communication_is_one_devices(outside):
    """Whether ``shard_map`` is around the schedule or inside it."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mapping = {"mesh": mesh, "in_specs": (P(None, "d"), P()), "out_specs": P()}

    def own(w, x):
        return jax.lax.psum(mlp(w, x), "d")

    plans = []
    if outside:
        flow = df.dynaflow(own, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), backend="xla")

        def inside(*args):
            plans.append(flow.plan(*args))
            return flow(*args)

        jax.eval_shape(jax.shard_map(inside, **mapping), W, ROWS)
        found = plans[0].details
    else:
        plans.append(planned(df.strategies.NanoFlow(2), jax.shard_map(own, **mapping)))
        (whole,) = plans[0].details
        found = whole.body
    assert [what.bound for what in found if what.sent] == ["network"] * 2
    assert {what.sent for what in found} == {0, 4 * 16 * 4}
    assert found[0].kernels[0].matmul == (1, 4, 16, 16)
    assert {event.bound for event in plans[0].simulate("H200").events} >= {"network"}


def test_a_sharded_batch_is_one_devices_share():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows = jax.device_put(ROWS, jax.sharding.NamedSharding(mesh, P("d")))
    (sharded, _), (whole, _) = (planned(df.strategies.Sequential(), args=(W, x)).details for x in (rows, ROWS))
    assert sharded.flops == whole.flops / 2
    assert sharded.kernels[0].matmul == (1, 4, 32, 16)


def test_plans_from_json_have_to_meet_their_function():
    plan = planned(Split(4, 4))
    loaded = df.Plan.from_json(plan.to_json())
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    for ask in (lambda: loaded.details, lambda: loaded.simulate("H200"), lambda: df.step_us(loaded, "H200")):
        with pytest.raises(PlanError, match="Apply it to the function"):
            ask()
    again = planned(loaded)
    assert again == plan
    assert again.details == plan.details


def test_details_are_worked_out_when_asked_for():
    plan = planned(Split(4, 4))
    assert "details" not in vars(plan)
    assert plan.details is plan.details


def test_plans_can_be_copied_and_sent():
    plan = planned(Split(4, 4))
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        with pytest.raises(PlanError, match="Apply it"):
            assert other.details
    assert plan.details
    sent = pickle.loads(pickle.dumps(plan))
    assert sent.details == plan.details
    assert sent.simulate("H200") == plan.simulate("H200")
    with pytest.raises(PlanError, match="say which one"):
        sent.simulate()


def test_devices_are_named_or_given():
    plan = planned(Split(4, 4))
    assert plan.simulate().device == "CPU"
    assert plan.simulate("H200") == plan.simulate(H200) == df.simulate(plan, "NVIDIA H200")
    assert df.step_us(plan, "H200") == plan.simulate("H200").total_us
    with pytest.raises(DynaFlowError, match="No device model"):
        plan.simulate("abacus")


def test_timelines_are_of_the_plan():
    plan = planned(df.strategies.NanoFlow(2, concurrent=True))
    timeline = plan.simulate("H200")
    assert timeline.streams == plan.streams
    assert timeline.title == plan.strategy
    assert not timeline.measured
    assert sorted(event.name for event in timeline.events) == sorted(map(str, plan.steps))
    assert timeline.overlap_us > 0
    assert "predicted" in timeline.show()


# -- against measurements ----------------------------------------------------------------------------------------------


def test_predictions_are_near_what_was_measured(tmp_path):
    """Layers that communicate, and chains of small kernels, which launching dominates, but for one."""
    root, path = Path(__file__).parents[1], tmp_path / "predicted.json"
    command = [sys.executable, "-m", "examples.benchmarks.predicted", f"--json={path}"]
    done = subprocess.run(command, cwd=root, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors: dict[str, list[float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        errors.setdefault(row["benchmark"], []).append(abs(row["error"]))
    assert max(errors["tp_overlap"] + errors["ep_overlap"]) <= 0.15
    *chains, farthest = sorted(errors["launch_overhead"] + errors["branches"] + errors["one_gpu"])
    assert max(chains) <= 0.16  # four branches: the model lets them start at once, a graph one after the other
    assert farthest <= 0.6  # XLA makes fewer kernels of products with as few rows as it has
