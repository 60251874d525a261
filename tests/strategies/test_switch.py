"""Several plans in one program: which of them runs, when that is decided, and that nothing else changes."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import normal, same

import dynaflow_jax as df
from dynaflow_jax.strategies import NanoFlow, Sequential, Switch

WEIGHTS, ROWS = (normal(8, 8, seed=1), normal(8, 8, seed=2)), normal(8, 8, seed=3)


@pytest.fixture(autouse=True)
def _dispatched_or_not_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", df.DispatchWarning)
        yield


def model(weights, x, count):
    for w in weights:
        with df.mark("layer"):
            x = jnp.tanh(x @ w) + count / 100
    return x


class Counted:
    """A function that counts its traces."""

    def __init__(self, fun):
        self.fun = fun
        self.traces = 0

    def __call__(self, *args):
        self.traces += 1
        return self.fun(*args)


class Tagged(df.OpScheduler):
    """A strategy that leaves a trace of having run: a callback in place of every operator's result."""

    def __init__(self, ran, name):
        self.ran, self.name = ran, name

    def schedule(self, ctx):
        while ops := ctx.get_ready_ops():
            compute = jax.extend.core.jaxpr_as_fun(ctx.jaxpr_of(ops[0]))

            def replaced(*values, compute=compute):
                jax.debug.callback(lambda: self.ran.append(self.name))
                return tuple(compute(*values))

            ctx.execute(ops[0], fn=replaced)


def flow_of(select, strategies=None, fun=model, **options):
    strategies = strategies or [Sequential(), NanoFlow(2), NanoFlow(4)]
    return df.dynaflow(fun, scheduler=Switch(strategies, select), batch_axes=(None, 0, None), **options)


def by_count(weights, x, count):
    return count.astype(int) // 10


# -- which plan runs, and when that is decided ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_one_program_holds_all_plans_and_a_scalar_picks(dtype):
    fun, select = Counted(model), Counted(lambda weights, x, count: count)
    flow = jax.jit(flow_of(select, fun=fun))
    for count in (0, 1, 2):
        same(flow(WEIGHTS, ROWS, jnp.asarray(count, dtype)), model(WEIGHTS, ROWS, count))
    assert (fun.traces, select.traces, flow._cache_size()) == (1, 1, 1)


@pytest.mark.xla_lowering
@pytest.mark.parametrize(
    ("index", "runs"),
    [(0, 0), (1, 1), (2, 2), (3, 2), (-1, 0), (-(2**31), 0), (2**31 - 1, 2), (np.uint32(2**32 - 1), 2)],
)
@pytest.mark.parametrize("known", ["python", "numpy", "device", "traced"])
def test_the_plan_that_the_index_names_runs_and_no_other(index, runs, known):
    ran = []
    strategies = [Tagged(ran, i) for i in range(3)]
    flow = flow_of(lambda weights, x, which: which, strategies, fun=lambda weights, x, which: x @ weights[0])
    if known == "python":
        index = index if abs(int(index)) < 2**31 - 1 else int(index) * 2**40
        given, call = int(index), flow
    elif known == "numpy":
        given, call = index if isinstance(index, np.generic) else np.int32(index), flow
    else:
        given, call = (
            jnp.asarray(index, getattr(index, "dtype", np.int32)),
            jax.jit(flow) if known == "traced" else flow,
        )
    same(call(WEIGHTS, ROWS, given), ROWS @ WEIGHTS[0])
    jax.effects_barrier()
    assert set(ran) == {runs}


@pytest.mark.parametrize("given", [1, np.int64(1), np.array(1)])
def test_what_the_host_knows_is_decided_there_and_compiles_one_plan(given):
    made = []

    class Noted(Sequential):
        def __init__(self, name):
            self.name = name

        def schedule(self, ctx):
            made.append(self.name)
            super().schedule(ctx)

    flow = flow_of(lambda weights, x, count: given, [Noted("first"), Noted("second")])
    lowered = jax.jit(flow).lower(WEIGHTS, ROWS, jnp.float32(2))
    assert made == ["second"]
    assert "case" not in lowered.as_text()
    same(flow(WEIGHTS, ROWS, jnp.float32(2)), model(WEIGHTS, ROWS, 2.0))


@pytest.mark.parametrize("count", [0, 2])
def test_a_boolean_is_an_index_of_two(count):
    flow = flow_of(lambda weights, x, count: count > 1, [Sequential(), NanoFlow(2)])
    for given in (count, np.float32(count), jnp.float32(count)):
        assert len(flow.plan(WEIGHTS, ROWS, given).sizes) == 1 + (count > 1)
        same(jax.jit(flow)(WEIGHTS, ROWS, given), model(WEIGHTS, ROWS, count))
    same(flow(WEIGHTS, ROWS, count), model(WEIGHTS, ROWS, count))


def test_shapes_and_static_arguments_are_known_to_the_host():
    flow = flow_of(lambda weights, x, count: x.shape[0] // 8, [Sequential(), NanoFlow(2)])
    assert len(flow.plan(WEIGHTS, ROWS[:4], jnp.float32(1)).sizes) == 1
    assert len(flow.plan(WEIGHTS, ROWS, jnp.float32(1)).sizes) == 2
    static = jax.jit(flow_of(lambda weights, x, count: count - 1), static_argnums=2)
    same(static(WEIGHTS, ROWS, 2), model(WEIGHTS, ROWS, 2))


def test_a_single_strategy_and_plans_in_place_of_strategies():
    same(flow_of(by_count, [NanoFlow(2)])(WEIGHTS, ROWS, jnp.float32(3)), model(WEIGHTS, ROWS, 3.0))
    args = (WEIGHTS, ROWS, jnp.float32(20))
    flow = flow_of(by_count)
    plans = [df.Plan.from_json(plan.to_json()) for plan in flow.plans(*args)]
    again = flow_of(by_count, plans)
    assert again.plans(*args) == flow.plans(*args) == tuple(plans)
    same(jax.jit(again)(*args), jax.jit(flow)(*args), tolerance=0)


# -- what was decided ----------------------------------------------------------------------------------------------


def test_plans_are_all_and_plan_is_the_one_that_runs():
    flow = flow_of(by_count)
    args = (WEIGHTS, ROWS)
    assert [len(plan.sizes) for plan in flow.plans(*args, jnp.float32(0))] == [1, 2, 4]
    for count, sizes in ((5, (8,)), (10, (4, 4)), (25, (2, 2, 2, 2)), (99, (2, 2, 2, 2))):
        for scalar in (jnp.float32(count), np.float32(count)):
            assert flow.plan(*args, scalar).sizes == sizes
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    assert flow.plan(*types, np.float32(10)).sizes == (4, 4)
    unknown = jax.ShapeDtypeStruct((), jnp.float32)
    assert flow.plans(*types, unknown) == flow.plans(*args, jnp.float32(0))
    with pytest.raises(df.DynaFlowError, match=r"values of arrays.*method plans gives all"):
        flow.plan(*types, unknown)
    assert [op.name for op in flow.graph(*types, unknown)] == ["layer", "layer"]


def test_explain_shows_every_plan_and_which_of_them_runs():
    flow = flow_of(by_count)
    text = flow.explain(WEIGHTS, ROWS, jnp.float32(10))
    assert [int(i) for i in re.findall(r"^Plan (\d) of 3$", text, re.MULTILINE)] == [0, 1, 2]
    assert text.count("Lowering:") == 3
    assert text.endswith("These arguments run plan 1.")
    unknown = flow.explain(WEIGHTS, ROWS, jax.ShapeDtypeStruct((), jnp.float32))
    assert unknown.endswith("run the one that a scalar names at run time.")
    assert repr(flow).endswith("NanoFlow(micro_batches=4)], select=by_count))")


def test_every_function_has_plans():
    flow = df.dynaflow(model, scheduler=NanoFlow(2), batch_axes=(None, 0, None))
    args = (WEIGHTS, ROWS, jnp.float32(2))
    assert flow.plans(*args) == (flow.plan(*args),)


def test_prepare_prepares_every_plan():
    args = (WEIGHTS, ROWS, jnp.float32(10))
    flow = flow_of(by_count)
    flow.prepare(*args)
    same(jax.jit(flow)(*args), model(*args))


def test_a_method_is_switched_like_a_function():
    class Holder:
        weights = WEIGHTS

        @df.mark("whole")
        def plain(self, x, count):
            return model(self.weights, x, count)

        call = df.dynaflow(
            plain,
            scheduler=Switch([Sequential(), NanoFlow(2)], lambda self, x, count: count.astype(int)),
            batch_axes=(None, 0, None),
        )

    holder = Holder()
    same(holder.call(ROWS, jnp.float32(1)), model(WEIGHTS, ROWS, 1.0))
    assert [len(plan.sizes) for plan in holder.call.plans(ROWS, jnp.float32(1))] == [1, 2]


def test_inside_another_scheduled_function_it_is_the_function():
    inner = flow_of(by_count)
    outer = df.dynaflow(lambda *args: inner(*args), scheduler=NanoFlow(2), batch_axes=(None, 0, None))
    args = (WEIGHTS, ROWS, jnp.float32(10))
    same(jax.jit(outer)(*args), model(*args))
    assert [op.name for op in outer.graph(*args)] == ["layer", "layer"]


# -- with JAX's transformations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1.0, 10.0])
def test_gradients_inside_and_outside(count):
    def loss(weights, x, count):
        return (model(weights, x, count / 10) ** 2).mean()

    args = (WEIGHTS, ROWS, jnp.float32(count))
    want = jax.value_and_grad(loss)(*args)
    strategies = [Sequential(), NanoFlow(2)]
    outside = jax.value_and_grad(flow_of(by_count, strategies, fun=loss, out_axes="mean"))
    same(jax.jit(outside)(*args), want)
    same(outside(*args), want)
    inside = flow_of(by_count, strategies, fun=jax.value_and_grad(loss), out_axes="mean")
    same(jax.jit(inside)(*args), want)


def test_gradient_of_what_is_closed_over():
    def loss(weights, count):
        flow = df.dynaflow(
            lambda x, count: model(weights, x, count),
            scheduler=Switch([Sequential(), NanoFlow(2)], lambda x, count: count.astype(int)),
            batch_axes=(0, None),
        )
        return (flow(ROWS, count) ** 2).mean()

    def plain(weights, count):
        return (model(weights, ROWS, count) ** 2).mean()

    for count in (0.5, 1.0):
        same(jax.jit(jax.grad(loss))(WEIGHTS, jnp.float32(count)), jax.grad(plain)(WEIGHTS, jnp.float32(count)))


def test_mapped_over_the_scalar_and_over_the_rest():
    flow, counts = flow_of(by_count), jnp.asarray([0.0, 10.0, 20.0, 30.0])
    want = jnp.stack([model(WEIGHTS, ROWS, count) for count in counts])
    same(jax.jit(jax.vmap(flow, (None, None, 0)))(WEIGHTS, ROWS, counts), want)
    stack = normal(3, 8, 8, seed=4)
    want = jnp.stack([model(WEIGHTS, rows, 10.0) for rows in stack])
    same(jax.vmap(flow, (None, 0, None))(WEIGHTS, stack, jnp.float32(10)), want)


def test_inside_a_loop_and_under_remat():
    flow = flow_of(by_count)

    def body(x, count):
        return jax.checkpoint(flow)(WEIGHTS, x, count), None

    counts = jnp.asarray([1.0, 10.0, 20.0])
    want = ROWS
    for count in counts:
        want = model(WEIGHTS, want, count)
    same(jax.jit(lambda x: jax.lax.scan(body, x, counts)[0])(ROWS), want)


def test_donated_arguments():
    flow = jax.jit(flow_of(by_count), donate_argnums=1)
    for count in (1.0, 10.0):
        same(flow(WEIGHTS, ROWS + 0, jnp.float32(count)), model(WEIGHTS, ROWS, count))


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_with_shard_map(where, check_vma):
    if jax.device_count() < 2:
        pytest.skip("needs 2 (virtual) devices")
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": ((P(None, "d"), P("d")), P(), P()), "out_specs": P(), "mesh": mesh, "check_vma": check_vma}

    def local(weights, x, count):
        up, down = weights
        with df.mark("ffn"):
            x = jnp.tanh(x @ up) @ down
        return df.collectives.all_reduce(x, "d") * count

    if where == "inside":
        flow = jax.shard_map(flow_of(by_count, fun=local), **specs)
    else:
        flow = flow_of(by_count, fun=jax.shard_map(local, **specs))
    call = jax.jit(flow)
    for count in (1.0, 10.0, 20.0):
        same(call(WEIGHTS, ROWS, jnp.float32(count)), jnp.tanh(ROWS @ WEIGHTS[0]) @ WEIGHTS[1] * count)
    assert call._cache_size() == 1
    twice = jax.jit(lambda weights, x, count: flow(weights, flow(weights, x, count), count))
    want = jnp.tanh(ROWS @ WEIGHTS[0]) @ WEIGHTS[1]
    same(twice(WEIGHTS, ROWS, jnp.float32(1)), jnp.tanh(want @ WEIGHTS[0]) @ WEIGHTS[1])


def test_every_device_picks_for_itself_where_none_waits_for_another():
    if jax.device_count() < 2:
        pytest.skip("needs 2 (virtual) devices")
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    flow = flow_of(lambda weights, x, count: count[0].astype(int) // 10, fun=lambda w, x, c: model(w, x, c[0]))
    mapped = jax.shard_map(flow, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P("d"))
    counts = jnp.asarray([1.0, 10.0])
    want = jnp.concatenate(
        [model(WEIGHTS, rows, count) for rows, count in zip(jnp.split(ROWS, 2), counts, strict=True)]
    )
    same(jax.jit(mapped)(WEIGHTS, ROWS, counts), want)


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategies", "select", "message"),
    [
        ([], by_count, "no strategy"),
        (Sequential(), by_count, "a list of strategies"),
        ([Sequential(), Switch([Sequential()], by_count)], by_count, "a Switch inside a Switch"),
        ([Sequential()], 1, "select must be a function"),
        ([Sequential, NanoFlow()], by_count, r"strategy 0 of Switch=Sequential is a class"),
        ([Sequential(), "NanoFlow"], by_count, "strategy 1 of Switch must be an OpScheduler or a Plan, not 'NanoFlow'"),
    ],
)
def test_malformed_switches(strategies, select, message):
    with pytest.raises(df.DynaFlowError, match=re.compile(message, re.IGNORECASE)):
        flow_of(select, strategies or Switch([], by_count))


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (lambda weights, x, count: count, "an integer, the index of a strategy, not float32"),
        (lambda weights, x, count: 1.0, "an integer, the index of a strategy, not 1.0"),
        (lambda weights, x, count: None, "an integer, the index of a strategy, not None"),
        (lambda weights, x, count: "1", "an integer, the index of a strategy, not '1'"),
        (lambda weights, x, count: x[0].astype(int), r"one index for the whole batch, not an array of shape \[8\]"),
        (lambda weights, x, count: np.array([1]), r"not an array of shape \[1\]"),
    ],
)
@pytest.mark.parametrize("jit", [True, False])
def test_what_select_gives_is_an_integer_without_axes(select, message, jit):
    flow = flow_of(select)
    with pytest.raises(df.DynaFlowError, match=message):
        (jax.jit(flow) if jit else flow)(WEIGHTS, ROWS, jnp.float32(1))
    with pytest.raises(df.DynaFlowError, match=message):
        flow.plan(WEIGHTS, ROWS, jnp.float32(1))


def test_select_that_asks_for_a_value_under_jit_is_told_what_to_do():
    flow = flow_of(lambda weights, x, count: 1 if count > 5 else 0)
    same(flow(WEIGHTS, ROWS, jnp.float32(10)), model(WEIGHTS, ROWS, 10.0))
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.jit(flow)(WEIGHTS, ROWS, jnp.float32(10))
    assert any("the index has to be computed" in note for note in caught.value.__notes__)


def test_strategies_whose_results_differ():
    flow = flow_of(
        by_count, fun=lambda weights, x, count: (x @ weights[0]).sum(), out_axes=lambda parts: jnp.stack(parts)
    )
    with pytest.raises(df.DynaFlowError, match=r"strategy 0 .* float32\[\], with strategy 1 float32\[2\]"):
        jax.jit(flow)(WEIGHTS, ROWS, jnp.float32(1))


def test_types_are_no_values():
    with pytest.raises(df.DynaFlowError, match="is a ShapeDtypeStruct"):
        flow_of(by_count)(WEIGHTS, ROWS, jax.ShapeDtypeStruct((), jnp.float32))


def test_a_mark_without_effect_is_warned_of_once():
    rules = [df.SplitFunc("no_such_function")]
    flow = flow_of(by_count, rules=rules)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        flow.plans(WEIGHTS, ROWS, jnp.float32(1))
    assert [w.category for w in seen] == [df.RuleWarning]
