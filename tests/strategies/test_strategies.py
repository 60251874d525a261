"""The built-in strategies on the models that need them: the same results, and the promised shape of the plan."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import models_moe
import pytest
from jax.sharding import PartitionSpec as P
from models import normal, run, same

import dynaflow_jax as df
from dynaflow_jax.plan import levels
from dynaflow_jax.strategies import DualBatchOverlap, NanoFlow, Sequential, SingleBatchOverlap

STRATEGIES = [Sequential, NanoFlow, DualBatchOverlap, SingleBatchOverlap]
MOE_X = normal(32, models_moe.TOKENS, models_moe.WIDTH, seed=3)


@pytest.fixture(scope="module")
def moe_mesh():
    if jax.device_count() < 8:
        pytest.skip("needs 8 (virtual) devices")
    return jax.make_mesh((8,), (models_moe.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))


# -- a stack of tensor-parallel blocks, as in Llama ---------------------------------------------------------------


def llama_block(p, x):
    """Column-parallel, then row-parallel, then a sum over the devices: once for attention and once for the MLP."""
    with df.mark("attention"):
        q = x @ p["q"]
        y = jax.nn.softmax(q @ jnp.swapaxes(q, -1, -2), axis=-1) @ (x @ p["v"]) @ p["o"]
    with df.mark("sum"):
        y = jax.lax.psum(y, "tensor")
    with df.mark("mlp"):
        x = x + y
        y = jax.nn.silu(x @ p["gate"]) @ p["down"]
    with df.mark("sum"):
        y = jax.lax.psum(y, "tensor")
    with df.mark("residual"):
        return x + y


@pytest.fixture(scope="module")
def llama():
    if jax.device_count() < 2:
        pytest.skip("needs 2 (virtual) devices")
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    column, row = P(None, "tensor"), P("tensor")
    specs = {"q": column, "v": column, "o": row, "gate": column, "down": row}
    params = [{name: normal(8, 8, seed=10 * i + j) / 3 for j, name in enumerate(specs)} for i in range(2)]

    def fun(params, x):
        for p in params:
            x = llama_block(p, x)
        return x

    mapped = jax.shard_map(fun, mesh=mesh, in_specs=([specs] * 2, P()), out_specs=P())
    return mapped, params, normal(8, 3, 8, seed=5)


def scheduled(fun, scheduler, *args):
    """The steps inside ``shard_map``, after checking the result."""
    flow = df.dynaflow(fun, scheduler=scheduler, batch_axes=(None, 0))
    same(run(flow, *args), run(fun, *args))
    (step,) = [step for step in flow.plan(*args).steps if step.body is not None]
    return step.body


def name_of(step):
    return step.operators[0].key.split(":")[0]


def overlapped(steps):
    """Pairs of network and compute steps that stand on one line of the timeline."""
    line = levels(steps)
    return [
        (network, compute)
        for i, network in enumerate(steps)
        for j, compute in enumerate(steps)
        if line[i] == line[j] and network.stream == "network" and compute.stream == "compute"
    ]


def batch_of(step):
    return step.operators[0].micro_batch


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_through_tensor_parallel_blocks(strategy, llama):
    fun, params, x = llama
    flow = df.dynaflow(fun, scheduler=strategy(), batch_axes=(None, 0))
    got, want = (jax.grad(lambda params, f=f: (f(params, x) ** 2).mean()) for f in (flow, fun))
    same(run(got, params), run(want, params))


def test_sequential_has_one_stream(llama):
    fun, params, x = llama
    steps = scheduled(fun, Sequential(), params, x)
    assert {step.stream for step in steps} == {"compute"}
    assert levels(steps) == list(range(len(steps)))
    assert [name_of(step) for step in steps][:5] == ["attention", "sum", "mlp", "sum", "residual"]
    assert {batch_of(step) for step in steps} == {0}


@pytest.mark.parametrize("count", [2, 3])
def test_nano_flow_hides_sums_behind_the_other_micro_batch(count, llama):
    fun, params, x = llama
    steps = scheduled(fun, NanoFlow(count), params, x)
    assert {batch_of(step) for step in steps} == set(range(count))
    network = [step for step in steps if step.stream == "network"]
    assert {name_of(step) for step in network} == {"sum"}
    assert len(network) == 4 * count
    hidden = {id(step) for step, other in overlapped(steps) if batch_of(step) != batch_of(other)}
    assert len(hidden) >= len(network) - count  # all but those of the last layer


@pytest.mark.parametrize(
    ("sizes", "rows", "shards", "options"),
    [
        ([4, 4], 8, 1, {}),
        ([3, 2, 2], 7, 1, {"micro_batches": 3}),
        ([1, 1], 2, 1, {"micro_batches": 5}),
        ([1], 1, 1, {}),
        ([16, 8], 24, 8, {}),
        ([8], 8, 8, {}),
        ([8], 8, 1, {"min_rows": 5}),
        ([4, 4], 8, 1, {"min_rows": 4}),
    ],
)
def test_sizes_of_nano_flow(sizes, rows, shards, options):
    assert list(NanoFlow(**options).split(df.InputInfo(rows, None, "cpu", "cpu", shards=shards))) == sizes


@pytest.mark.parametrize(
    ("sizes", "rows", "shards", "options"),
    [([4, 4], 8, 1, {}), ([4, 3], 7, 1, {}), ([1], 1, 1, {}), ([16, 8], 24, 8, {}), ([8], 8, 1, {"min_rows": 9})],
)
def test_sizes_of_dual_batch_overlap(sizes, rows, shards, options):
    assert list(DualBatchOverlap(**options).split(df.InputInfo(rows, None, "cpu", "cpu", shards=shards))) == sizes


@pytest.mark.parametrize("arguments", [(0,), (2, 0), (2.0,), ("2",), (True,)], ids=str)
def test_wrong_arguments_of_nano_flow(arguments):
    with pytest.raises(ValueError, match="NanoFlow needs positive whole numbers, not micro_batches="):
        NanoFlow(*arguments)


# -- mixtures of experts -------------------------------------------------------------------------------------------


def moe(mesh, layer):
    params = models_moe.parameters(2, 8)
    return models_moe.stack(layer, mesh, params), params


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layer", [models_moe.moe_layer, models_moe.shortcut_layer])
def test_mixtures_of_experts(strategy, layer, moe_mesh):
    fun, params = moe(moe_mesh, layer)
    steps = scheduled(fun, strategy(), params, MOE_X)
    assert {"attention", "dispatch", "experts", "combine"} <= {name_of(step) for step in steps}


def test_dual_batch_overlap_alternates(moe_mesh):
    """While one micro-batch's tokens travel, the other computes; they are half a layer apart."""
    fun, params = moe(moe_mesh, models_moe.moe_layer)
    steps = scheduled(fun, DualBatchOverlap(), params, MOE_X)
    network = [step for step in steps if step.stream == "network"]
    assert {name_of(step) for step in network} == {"dispatch", "combine"}
    turns = [batch_of(step) for step in network]
    assert all(a != b for a, b in itertools.pairwise(turns)), turns
    pairs = overlapped(steps)
    assert pairs
    assert all(batch_of(a) != batch_of(b) for a, b in pairs)
    hidden = {str(a) for a, _ in pairs}
    assert len(hidden) >= len(network) - 2
    beside = {(name_of(a), name_of(b)) for a, b in pairs}
    assert ("dispatch", "attention") in beside or ("dispatch", "add") in beside
    assert ("combine", "experts") in beside


def test_dual_batch_overlap_goes_by_tags_too(moe_mesh):
    """Where the exchange is hidden in something that is no collective, tags say what communicates."""

    def fun(w, x):
        with df.mark("a"):
            x = x @ w
        with df.mark("send", tags={"dispatch"}):
            x = jnp.sin(x)
        with df.mark("b"):
            return x @ w

    plan = df.dynaflow(fun, scheduler=DualBatchOverlap(), batch_axes=(None, 0)).plan(jnp.eye(4), jnp.ones((8, 4)))
    assert plan.streams == ("compute", "network")
    assert [str(step) for step in plan.steps] == ["a[0]", "send[0]", "a[1]", "send[1]", "b[0]", "b[1]"]


def test_single_batch_overlap_starts_communication_first(moe_mesh):
    """The dense branch of the shortcut stands beside the exchanges, without splitting anything."""
    fun, params = moe(moe_mesh, models_moe.shortcut_layer)
    steps = scheduled(fun, SingleBatchOverlap(), params, MOE_X)
    assert {batch_of(step) for step in steps} == {0}
    beside = {(name_of(a), name_of(b)) for a, b in overlapped(steps)}
    assert ("dispatch", "dense") in beside
    assert any(a == "combine" and b.startswith("dense") for a, b in beside)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_a_mixture_of_experts(strategy, moe_mesh):
    fun, params = moe(moe_mesh, models_moe.moe_layer)
    step = jax.value_and_grad(lambda params, x: (fun(params, x) ** 2).mean())
    flow = df.dynaflow(step, scheduler=strategy(), batch_axes=(None, 0), out_axes="mean")
    same(run(flow, params, MOE_X), run(step, params, MOE_X))


# -- as tutorials --------------------------------------------------------------------------------------------------


AROUND_OTHERS = {"Auto", "Switch", "WithKernels"}
STRATEGIES = [name for name in df.strategies.__all__ if name not in AROUND_OTHERS]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_reads_as_a_tutorial(name):
    """At most a page, in a file of its own that says what it is and uses nothing but the public interface.

    And functions that replace operators, which are no part of it.
    """
    strategy = getattr(df.strategies, name)
    source = inspect.getsource(inspect.getmodule(strategy))
    assert len(source.splitlines()) <= 60
    imports = [line for line in source.splitlines() if "dynaflow_jax" in line and line.startswith(("from", "import"))]
    replacements = ("from dynaflow_jax.collective_matmul import ", "from dynaflow_jax.expert_pipeline import ")
    imports = [line for line in imports if not line.startswith(replacements)]
    assert len(imports) == 1
    assert imports[0].startswith("from dynaflow_jax.schedule import ")
    assert inspect.getmodule(strategy).__doc__
    assert strategy.__doc__
    assert all(inspect.getdoc(getattr(strategy, method)) for method in ("split", "schedule"))
    assert repr(strategy()).startswith(strategy.__name__)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (NanoFlow(), "NanoFlow(micro_batches=2)"),
        (NanoFlow(4, min_bytes=8, concurrent=True), "NanoFlow(micro_batches=4, min_bytes=8, concurrent=True)"),
        (DualBatchOverlap(concurrent=True), "DualBatchOverlap(concurrent=True)"),
        (df.strategies.TokenWeave(), "TokenWeave()"),
        (df.strategies.TokenWeave(tile=2, min_rows=3), "TokenWeave(tile=2, min_rows=3)"),
        (df.strategies.Comet(3), "Comet(pieces=3)"),
        (df.strategies.GradientBuckets(5), "GradientBuckets(bucket_bytes=5)"),
        (df.strategies.ParameterPrefetch(3, "updates"), "ParameterPrefetch(ahead=3, update_stream='updates')"),
        (Sequential(), "Sequential()"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_from_the_default_is_shown(strategy, text):
    """Plans are named by it, and measured choices are found by it."""
    assert repr(strategy) == text


def test_strategies_of_users_show_what_they_were_made_with():
    class Own(df.OpScheduler):
        def __init__(self, first, *rest, pick=min, other=1):
            self.first, self.pick = first, pick
            self._other = rest, other

    assert repr(Own(2)) == "Own(first=2)"
    assert repr(Own("a", 3, pick=max, other=5)) == "Own(first='a', pick=max)"


@pytest.mark.parametrize(
    "make",
    [
        lambda: NanoFlow(0),
        lambda: NanoFlow(min_bytes=-1),
        lambda: DualBatchOverlap(min_rows="3"),
        lambda: df.strategies.GradientBuckets("25MB"),
        lambda: df.strategies.GradientBuckets(-1),
        lambda: df.strategies.TokenWeave(0),
    ],
)
def test_impossible_numbers(make):
    with pytest.raises(ValueError, match="needs"):
        make()
