"""The strategies of distributed models, on models that need them: results, plans, and what a plan is dispatched to."""

import dataclasses

import jax
import jax.numpy as jnp
import models_parallel as models
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax.collective_matmul import overlapped
from dynaflow_jax.plan import levels
from dynaflow_jax.runtime import arrivals, extension
from dynaflow_jax.runtime.work import Exchange
from dynaflow_jax.strategies import AsyncTensorParallel, GradientBuckets, ParameterPrefetch, TokenWeave

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (virtual) devices")

BACKENDS = [
    "xla",
    pytest.param("dispatch", marks=pytest.mark.skipif(extension.module is None, reason="the extension was not built")),
]
WHOLE_BATCH = dataclasses.replace(models.sequence_parallel(), axes=None)
CASES = {
    "TokenWeave": (models.tensor_parallel(rows=24), TokenWeave(tile=8, min_rows=16)),
    "GradientBuckets": (models.data_parallel(), GradientBuckets(1500)),
    "GradientBuckets, updates beside": (models.data_parallel(), GradientBuckets(1500, update_stream="update")),
    "ParameterPrefetch": (models.fully_sharded(), ParameterPrefetch(1)),
    "ParameterPrefetch, updates beside": (models.fully_sharded(), ParameterPrefetch(1, update_stream="update")),
    "ParameterPrefetch, checkpoint": (models.fully_sharded(2, "checkpoint"), ParameterPrefetch(2)),
    "ParameterPrefetch, gathering again": (models.fully_sharded(3, "custom_vjp"), ParameterPrefetch(1)),
    "AsyncTensorParallel": (models.sequence_parallel(), AsyncTensorParallel()),
    "AsyncTensorParallel, gradient": (WHOLE_BATCH.gradient(), AsyncTensorParallel()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_results(case, devices, backend):
    model, strategy = CASES[case]
    model.check(devices, strategy, backend)


@pytest.mark.parametrize("case", CASES)
def test_results_from_outside_shard_map(case):
    """Where a plan is made for the body of a ``shard_map``, and nothing around the strategy knows of the mesh."""
    model, strategy = CASES[case]
    mapped = model.mapped(2)
    flow = df.dynaflow(mapped, scheduler=strategy, backend="xla", batch_axes=model.axes)
    models.close(jax.jit(flow)(*model.args), jax.jit(mapped)(*model.args))
    inside = next(step.body for step in flow.plan(*model.args).steps if step.body is not None)
    _, plan = model.scheduled(2, strategy, "xla")
    assert [str(step) for step in inside] == [str(step) for step in plan.steps]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["TokenWeave", "AsyncTensorParallel", "AsyncTensorParallel, gradient"])
def test_results_where_jax_checks_what_varies(case, backend):
    model, strategy = CASES[case]
    model.check(2, strategy, backend, check=True)


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
@pytest.mark.parametrize("case", [name for name in CASES if "TokenWeave" not in name and "checkpoint" not in name])
def test_streams_and_one_stream_agree(case, monkeypatch):
    """Bit by bit: the same partitions, overlapped and one after the other."""
    model, strategy = CASES[case]
    results = []
    for serial in ("0", "1"):
        monkeypatch.setenv("DYNAFLOW_SERIAL", serial)
        run, _ = model.scheduled(4, strategy, "dispatch")
        results.append([run(*model.args) for _ in range(10)])
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_differentiated_from_outside():
    """The gradient of a scheduled function, through its replacements."""
    model = WHOLE_BATCH.gradient()
    flow = df.dynaflow(WHOLE_BATCH.fun, scheduler=AsyncTensorParallel(), backend="xla")
    step = dataclasses.replace(WHOLE_BATCH, fun=flow).gradient()
    got, want = (jax.jit(model.mapped(2, fun))(*model.args) for fun in (step.fun, model.fun))
    models.close(got, want)


# -- TokenWeave ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "rows", "shards", "options"),
    [
        ([512, 512], 1024, 1, {}),
        ([640, 460], 1100, 1, {}),
        ([1023], 1023, 1, {}),
        ([16, 8], 24, 1, {"tile": 8, "min_rows": 16}),
        ([8], 8, 1, {"tile": 8, "min_rows": 1}),
        ([32, 16], 48, 2, {"tile": 8, "min_rows": 16}),
        ([24], 24, 2, {"tile": 8, "min_rows": 16}),
        ([5, 4], 9, 1, {"tile": 1}),
    ],
)
def test_sizes_of_token_weave(sizes, rows, shards, options):
    assert list(TokenWeave(**options).split(df.InputInfo(rows, None, "cpu", "cpu", shards=shards))) == sizes


@pytest.mark.parametrize("rows", range(16, 60, 3))
def test_token_weave_cuts_no_tile(rows):
    """Together the parts have as many tiles as the whole batch."""
    sizes = TokenWeave(tile=8, min_rows=16).split(df.InputInfo(rows, None, "cpu", "cpu"))
    assert sum(sizes) == rows
    assert sum(-(-size // 8) for size in sizes) == -(-rows // 8)
    assert abs(sizes[0] - sizes[-1]) <= 8 + 8


def test_token_weave_hides_sums_behind_the_other_part():
    model, strategy = CASES["TokenWeave"]
    _, plan = model.scheduled(2, strategy, "xla")
    line = levels(plan.steps)
    beside = [
        (str(a), str(b))
        for i, a in enumerate(plan.steps)
        for j, b in enumerate(plan.steps)
        if line[i] == line[j] and a.stream == "network" and b.stream == "compute"
    ]
    assert ("all_reduce[0]", "mlp[1]") in beside
    assert ("all_reduce:2[0]", "add[1]") in beside
    assert {step.stream for step in plan.steps if step.operators[0].key.startswith("all_reduce")} == {"network"}


@pytest.mark.parametrize("arguments", [(0,), (128, 0), (1.5,), ("128",), (True,)], ids=str)
def test_wrong_arguments_of_token_weave(arguments):
    with pytest.raises(ValueError, match="TokenWeave needs positive whole numbers, not tile="):
        TokenWeave(*arguments)


# -- GradientBuckets -----------------------------------------------------------------------------------------------


def buckets(plan):
    """For each bucket its operators and, by name, the compute steps before it."""
    found, before = [], []
    for step in plan.steps:
        if step.stream == "network":
            found.append(([ref.key for ref in step.operators], list(before)))
        else:
            before.append(step.operators[0].key)
    return found


def test_buckets_go_while_the_backward_pass_goes_on():
    """The last layers' first, each as soon as it is full and no sooner."""
    model, strategy = CASES["GradientBuckets"]
    _, plan = model.scheduled(2, strategy, "xla")
    (first, before_first), (second, before_second) = buckets(plan)
    assert first == [f"all_reduce:{i}" for i in (5, 6, 7, 8)]
    assert before_first[-2:] == ["mlp:4.backward", "mlp:3.backward"]
    assert second == ["all_reduce", *(f"all_reduce:{i}" for i in (2, 3, 4))]
    assert before_second[-1] == "mlp.backward"


@pytest.mark.parametrize(("bucket_bytes", "count"), [(1, 4), (1024, 4), (1025, 2), (1 << 20, 1)])
def test_sizes_of_buckets(bucket_bytes, count):
    _, plan = models.data_parallel().scheduled(2, GradientBuckets(bucket_bytes), "xla")
    assert len(buckets(plan)) == count


def test_buckets_of_gradients_that_jax_reduces_itself():
    """What ``jax.grad`` makes of replicated parameters where it checks what varies."""

    def step(ws, x):
        def loss(ws, x):
            for up, down in ws:
                with df.mark("mlp"):
                    x = x + models.mlp(x, up, down)
            return jnp.mean(x**2)

        value, gradients = jax.value_and_grad(loss)(ws, x)
        return value[None], gradients

    model = dataclasses.replace(models.data_parallel(), fun=step)
    plan = model.check(2, GradientBuckets(1500), "xla", check=True, rules=[df.SplitFunc("psum", name="reduce")])
    found = buckets(plan)
    assert sum(len(names) for names, _ in found) == 8
    assert len(found) == 2


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
def test_what_the_network_stream_does():
    """It only sends: additions and the division of a mean belong to the update that reads them."""
    operations = models.data_parallel().work(2, GradientBuckets(1500)).operations
    on_network = [operation for operation in operations if operation.where.stream == "network"]
    assert len(on_network) == 8
    assert all(isinstance(operation, Exchange) for operation in on_network)


def test_tensor_parallel_sums_are_no_gradients():
    """Sums that the backward pass goes through are neither postponed nor collected."""
    model = models.tensor_parallel()
    model = dataclasses.replace(model, axes=None).gradient()
    plan = model.check(2, GradientBuckets(1 << 20), "xla")
    assert all(len(step.operators) == 1 for step in plan.steps if step.stream == "network")


UPDATES = ["update:4", "update:3", "update:2", "update"]


STEPS = pytest.mark.parametrize(
    ("model", "strategy"),
    [(models.data_parallel(), GradientBuckets), (models.fully_sharded(), ParameterPrefetch)],
    ids=["GradientBuckets", "ParameterPrefetch"],
)


@STEPS
def test_the_last_gradients_travel_behind_the_first_updates(model, strategy):
    """So the layers are updated in the order in which the backward pass came to them."""
    _, plan = model.scheduled(2, strategy(1), "xla")
    steps = [step.operators[0].key for step in plan.steps if step.stream == "compute"]
    assert [key for key in steps if key.startswith("update")] == UPDATES
    assert max(i for i, key in enumerate(steps) if "backward" in key) < steps.index("update:4")


@STEPS
def test_updates_on_a_stream_of_their_own(model, strategy):
    _, plan = model.scheduled(2, strategy(1, update_stream="update"), "xla")
    assert [step.operators[0].key for step in plan.steps if step.stream == "update"] == UPDATES


def test_a_norm_of_all_gradients_is_waited_for():
    """Updates that read all gradients come behind all of them, and what they read in between does so, too."""

    def step(ws, x):
        value, gradients = jax.value_and_grad(lambda ws: jnp.mean((x @ ws[0] @ ws[1]) ** 2))(ws)
        gradients = [df.collectives.all_reduce(g, models.AXIS, op="mean") for g in gradients]
        with df.mark("norm"):
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        return value[None], models.updated([(w,) for w in ws], [(g / norm,) for g in gradients])

    args = ([models.normal(16, 16, seed=i) for i in range(2)], models.normal(models.ROWS, 16, seed=9))
    model = models.Model(step, args, (P(), P(models.AXIS)), (P(models.AXIS), P()))
    plan = model.check(2, GradientBuckets(1), "xla")
    steps = [step.operators[0].key for step in plan.steps]
    assert steps.index("norm") < steps.index("update")
    assert max(i for i, key in enumerate(steps) if key.startswith("all_reduce")) < steps.index("norm")


# -- ParameterPrefetch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_gathers_start_so_many_operators_before_their_first_use(ahead):
    _, plan = models.fully_sharded().scheduled(2, ParameterPrefetch(ahead), "xla")
    compute = [i for i, step in enumerate(plan.steps) if step.stream == "compute"]
    gathers = [i for i, step in enumerate(plan.steps) if step.operators[0].key.startswith("all_gather")]
    gathers = [i for i in gathers if "backward" not in str(plan.steps[i])]
    assert len(gathers) == 8
    for gather in gathers:
        use = next(k for k, i in enumerate(compute) if gather in plan.steps[i].reads)
        allowed = compute[use - ahead - 1 : use - ahead] if use > ahead else []
        assert list(plan.steps[gather].after) == allowed  # what must be over before it starts
        assert compute[max(use - ahead, 0)] > gather


def test_what_the_backward_pass_gathers_again_is_prefetched():
    model, strategy = CASES["ParameterPrefetch, gathering again"]
    _, plan = model.scheduled(2, strategy, "xla")
    names = [str(step) for step in plan.steps]
    again = [i for i, name in enumerate(names) if name.startswith("all_gather") and "backward" in name]
    compute = [i for i, step in enumerate(plan.steps) if step.stream == "compute"]
    assert len(again) == 6
    for gather in again:
        use = next(k for k, i in enumerate(compute) if gather in plan.steps[i].reads)
        assert list(plan.steps[gather].after) == [compute[use - 2]]


def test_gradients_are_scattered_behind_the_backward_pass():
    _, plan = models.fully_sharded().scheduled(2, ParameterPrefetch(1), "xla")
    names = [str(step) for step in plan.steps]
    assert {step.stream for step in plan.steps if "all_gather" in str(step)} == {"network"}
    for layer in (4, 3, 2):
        scatters = [names.index(f"all_gather:{i}.backward[0]") for i in (2 * layer - 1, 2 * layer)]
        previous = names.index(f"mlp:{layer - 1}.backward[0]" if layer > 2 else "mlp.backward[0]")
        assert all(names.index(f"mlp:{layer}.backward[0]") < i for i in scatters)
        assert all(i < previous for i in scatters) or layer == 2


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
def test_gathered_parameters_share_memory():
    """Dispatched, a parameter arrives where one was that is not needed any more."""
    layers = 12

    def forward(ws, x):
        for shards in ws:
            up, down = (df.collectives.all_gather(shard, models.AXIS) for shard in shards)
            with df.mark("mlp"):
                x = x + models.mlp(x, up, down)
        return x

    model = dataclasses.replace(models.fully_sharded(layers), fun=forward, out_specs=P(models.AXIS))
    work = model.work(2, ParameterPrefetch(1))
    whole = 4 * models.WIDTH * models.HIDDEN  # bytes of one parameter
    assert arrivals.layout(work).size <= 8 * whole < 2 * layers * whole


@pytest.mark.parametrize("ahead", [-1, 1.0, "1", True], ids=repr)
def test_wrong_arguments_of_parameter_prefetch(ahead):
    with pytest.raises(ValueError, match="ParameterPrefetch needs a whole number of operators, not ahead="):
        ParameterPrefetch(ahead)


# -- AsyncTensorParallel -------------------------------------------------------------------------------------------


def test_matmuls_are_joined_with_their_collectives():
    _, plan = WHOLE_BATCH.gradient().scheduled(2, AsyncTensorParallel(), "xla")
    groups = [[ref.key for ref in step.operators] for step in plan.steps if step.fn is not None]
    assert ["all_gather", "attention", "reduce_scatter"] in groups
    assert ["all_gather:2", "mlp", "reduce_scatter:2"] in groups
    assert ["reduce_scatter:2.backward", "mlp.backward", "all_gather:2.backward"] in groups
    assert not any(step.stream == "network" for step in plan.steps)


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
@pytest.mark.parametrize("devices", [2, 4])
def test_the_own_part_is_multiplied_before_the_others_arrive(devices):
    """The exchanges are on a stream of their own, and only the matmul of what arrives waits for it."""

    def fun(w, x):
        y = df.collectives.all_gather(x, models.AXIS)
        with df.mark("matmul"):
            return y @ w

    def back(w, x):
        with df.mark("matmul"):
            y = x @ w
        return df.collectives.reduce_scatter(y, models.AXIS)

    args = (models.normal(8, 8), models.normal(32, 8, seed=1))
    gather = models.Model(fun, args, (P(), P(models.AXIS)), P(None, models.AXIS))
    scatter = models.Model(back, args, (P(), P()), P(models.AXIS))
    for model in (gather, scatter):
        operations = model.work(devices, AsyncTensorParallel()).operations
        exchanges = [op for op in operations if isinstance(op, Exchange)]
        tasks = [op for op in operations if not isinstance(op, Exchange)]
        assert len(exchanges) == devices - 1
        assert {op.where.stream for op in exchanges} == {"network"}
        assert {op.where.stream for op in tasks} == {"compute"}
        arrived = [{value for op in exchanges for value in op.writes} & set(task.reads) for task in tasks]
        if model is gather:
            assert [len(found) for found in arrived[: devices - 1]] == [0, *[1] * (devices - 2)]
        else:
            sent = {op.reads[0] for op in exchanges}
            assert all(sent & set(task.writes) for task in tasks[: devices - 1])
            assert not sent & set(tasks[devices - 1].writes)  # the own share
            assert not any(arrived[:devices])


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
def test_pieces_of_many_layers_share_memory():
    """Two devices hear from each other in every exchange, so what arrives takes the place of what was read."""
    few, many = (
        arrivals.layout(models.sequence_parallel(layers).work(2, AsyncTensorParallel())).size for layers in (4, 8)
    )
    assert few == many


@pytest.mark.parametrize("name", ["contracted", "another use", "another collective", "a scan", "no matmul"])
def test_what_is_not_taken_apart(name):
    """Runs as it is, and is right."""

    def fun(w, x):
        y = df.collectives.all_gather(x, models.AXIS)
        with df.mark("use"):
            if name == "contracted":
                return y.T @ jnp.sin(y)
            if name == "another use":
                return jnp.sin(y) @ w
            if name == "another collective":
                return jax.lax.psum(y @ w, models.AXIS)
            if name == "a scan":
                return jax.lax.scan(lambda c, row: (c, row @ w), 0.0, y)[1]
            return y * 2

    args = (models.normal(8, 8), models.normal(8, 8, seed=1))
    model = models.Model(fun, args, (P(), P(models.AXIS)), P())
    plan = model.check(2, AsyncTensorParallel(), "xla")
    assert all(step.fn is None for step in plan.steps)


@pytest.mark.parametrize(
    "name", ["one use of several", "rows of the right operand", "several matmuls", "batched", "converted", "transposed"]
)
@pytest.mark.parametrize("devices", [2, 4])
def test_what_is_taken_apart(name, devices):
    axis = models.AXIS

    def fun(w, x):
        if name in ("one use of several", "rows of the right operand", "batched"):
            y = df.collectives.all_gather(x, axis, axis=1 if name == "batched" else 0)
            with df.mark("use"):
                if name == "one use of several":
                    return y @ w, jnp.sin(y)
                if name == "rows of the right operand":
                    return jax.lax.dot_general(w, y, (((0,), (1,)), ((), ()))), y
                return y @ w, y
        with df.mark("use"):
            y = x @ w
            if name == "several matmuls":
                y = y + jnp.sin(x) @ w
            if name == "converted":
                y = y.astype(jnp.bfloat16).astype(jnp.float32)
            if name == "transposed":
                y = y.T
        return df.collectives.reduce_scatter(y, axis, axis=1 if name == "transposed" else 0), x

    x = models.normal(2, 8, 8, seed=1) if name == "batched" else models.normal(8, 8, seed=1)
    spec = {"batched": P(None, axis), "several matmuls": P(), "converted": P(), "transposed": P()}.get(name, P(axis))
    scattered = {"transposed": P(None, axis)}.get(name, P(axis)) if spec == P() else P()
    model = models.Model(fun, (models.normal(8, 8), x), (P(), spec), (scattered, P()))
    plan = model.check(devices, AsyncTensorParallel(), "xla")
    assert any(step.fn is not None for step in plan.steps)
    if extension.module is not None:
        model.check(devices, AsyncTensorParallel(), "dispatch")


def test_nothing_to_overlap():
    assert overlapped(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2)))) is None
