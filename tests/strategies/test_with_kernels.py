"""Strategies with kernels in their operators: the same results, and the same plan but for what the kernels compute."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax import recognition
from dynaflow_jax.strategies import Auto, DualBatchOverlap, NanoFlow, Sequential, Switch, WithKernels
from dynaflow_jax.substitution import Match, Substituted
from pallas_kernels import Kernels, rms_norm

WIDTH = 128
SIMULATED = Kernels(interpret=True)


class Block(nn.Module):
    """A layer with its residual additions and norms, as transformers have them."""

    mark: bool = True

    @nn.compact
    def __call__(self, carry):
        x, residual = carry
        total = x + residual
        h = nn.RMSNorm(name="norm")(total)
        with df.mark("mlp") if self.mark else contextlib.nullcontext():
            h = nn.Dense(WIDTH, name="down")(nn.silu(nn.Dense(2 * WIDTH, name="up")(h)))
        return h, total


class Model(nn.Module):
    """Two blocks, in which norms and additions are between the operators that have a name."""

    @nn.compact
    def __call__(self, x):
        h, residual = x, jnp.zeros_like(x)
        for i in range(2):
            h, residual = Block(name=f"layer_{i}")((h, residual))
        return h + residual


MODEL = Model()
X = jax.random.normal(jax.random.key(0), (4, 8, WIDTH))
PARAMS = MODEL.init(jax.random.key(1), X)


def loop(weight, x):
    def layer(carry, w):
        h, residual = carry
        total = h + residual
        with df.mark("norm"):
            h = total * jax.lax.rsqrt(jnp.mean(total**2, -1, keepdims=True) + 1e-6) * w
        with df.mark("sin"):
            h = jnp.sin(h)
        return (h, total), None

    with df.mark("before"):
        x = jnp.cos(x)
    return jax.lax.scan(layer, (x, jnp.ones_like(x)), weight)[0]


def flow_of(scheduler, fun=MODEL.apply, **options):
    return df.dynaflow(fun, scheduler=scheduler, batch_axes=(None, 0), **options)


def replaced(plan):
    return [step for step in plan.steps if step.fn is not None]


@pytest.mark.parametrize(
    "strategy", [Sequential(), NanoFlow(2), NanoFlow(3, concurrent=True), DualBatchOverlap()], ids=repr
)
def test_every_strategy_takes_kernels(strategy):
    flow = flow_of(WithKernels(strategy, SIMULATED))
    plain, plan = flow_of(strategy).plan(PARAMS, X), flow.plan(PARAMS, X)
    assert [(step.operators, step.stream) for step in plan.steps] == [(s.operators, s.stream) for s in plain.steps]
    assert len(replaced(plan)) == 2 * len(plan.sizes)
    assert all(str(step).startswith("add_rms_norm(") for step in replaced(plan))
    np.testing.assert_allclose(jax.jit(flow)(PARAMS, X), MODEL.apply(PARAMS, X), rtol=1e-5, atol=1e-5)


def test_micro_batches_of_one_size_share_what_was_found():
    calls = []

    def counting(jaxpr):
        calls.extend(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "rsqrt")
        return SIMULATED(jaxpr)

    plan = flow_of(WithKernels(NanoFlow(4), counting)).plan(PARAMS, X)
    assert len(calls) == 2
    first, second, *_ = replaced(plan)
    assert first.fn is second.fn


def test_gradients_from_outside():
    flow = flow_of(WithKernels(NanoFlow(), SIMULATED))
    loss = lambda fun: lambda params: (fun(params, X) ** 2).mean()  # noqa: E731
    got, want = jax.jit(jax.grad(loss(flow)))(PARAMS), jax.grad(loss(MODEL.apply))(PARAMS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_a_training_step_is_scheduled_as_it_would_be_without():
    """The backward pass reads what the kernels do not give."""
    step = jax.value_and_grad(lambda params, x: (MODEL.apply(params, x) ** 2).mean())
    flow = flow_of(WithKernels(NanoFlow(), SIMULATED), step, out_axes="mean")
    plan = flow.plan(PARAMS, X)
    assert plan.steps == flow_of(NanoFlow(), step, out_axes="mean").plan(PARAMS, X).steps
    assert replaced(plan) == []


def test_in_the_body_of_a_loop():
    weight = jnp.ones((3, WIDTH))
    for unroll in (1, 3):
        flow = flow_of(WithKernels(NanoFlow(), SIMULATED), loop, unroll=unroll)
        for got, want in zip(jax.jit(flow)(weight, X), loop(weight, X), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_under_shard_map(inside, check_vma):
    """Devices' own values and those that are the same on all of them meet in a norm."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def fun(weight, x):
        with df.mark("norm"):
            total = x + jnp.ones_like(x)
            h = total * jax.lax.rsqrt(jnp.mean(total**2, -1, keepdims=True) + 1e-6) * weight
        return h, total

    def sharded(fun):
        return jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=check_vma)

    def scheduled(fun):
        return df.dynaflow(fun, scheduler=WithKernels(Sequential(), counting), batch_axes=(None, 0))

    found = []

    def counting(jaxpr):
        matches = list(SIMULATED(jaxpr))
        found.extend(matches)
        return matches

    weight = jnp.linspace(0.5, 1.5, WIDTH)
    got = jax.jit(scheduled(sharded(fun)) if inside else sharded(scheduled(fun)))(weight, X)
    assert [match.name for match in found] == ["add_rms_norm", "rms_norm"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, fun(weight, X))


def test_mapped():
    flow = flow_of(WithKernels(NanoFlow(), SIMULATED))
    xs = jnp.stack([X, 2 * X])
    want = jax.vmap(MODEL.apply, (None, 0))(PARAMS, xs)
    np.testing.assert_allclose(jax.vmap(flow, (None, 0))(PARAMS, xs), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint, lambda fun: jax.checkpoint(jax.jit(fun))])
def test_inside_of_calls(call):
    """Which stay what they are: differentiated from outside, ``jax.checkpoint`` computes its body again."""
    blocks = [call(lambda params, carry: Block(mark=False).apply(params, carry)) for _ in range(2)]
    params = [{"params": PARAMS["params"][f"layer_{i}"]} for i in range(2)]

    def fun(params, x):
        carry = x, jnp.ones_like(x)
        for block, own in zip(blocks, params, strict=True):
            carry = block(own, carry)
        return carry[0]

    def in_plain_jax(jaxpr):  # simulated kernels have effects, which jax.checkpoint does not take
        for found in recognition.norms(jaxpr):
            norm = functools.partial(rms_norm.reference, eps=found.eps)
            yield Match("norm", lambda *args, norm=norm: (norm(*args),), (found.x, found.weight), (found.normed,))

    for strategy in (NanoFlow(), Sequential()):
        flow = df.dynaflow(fun, scheduler=WithKernels(strategy, in_plain_jax), batch_axes=(None, 0))
        assert replaced(flow.plan(params, X))
        np.testing.assert_allclose(jax.jit(flow)(params, X), fun(params, X), rtol=1e-5, atol=1e-5)
        got, want = (jax.grad(lambda p, f=f: (f(p, X) ** 2).mean())(params) for f in (flow, fun))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


class Merging(df.OpScheduler):
    """All micro-batches of an operator in one step."""

    def split(self, info):
        return [info.batch_size // 2] * 2

    def schedule(self, ctx):
        while ops := ctx.get_ready_ops():
            ctx.execute([op for op in ops if op.key == ops[0].key])


class Replacing(df.OpScheduler):
    """Every operator as it is, by a function of its own."""

    def schedule(self, ctx):
        while ops := ctx.get_ready_ops():
            ctx.execute(ops[0], fn=jax.extend.core.jaxpr_as_fun(ctx.jaxpr_of(ops[0])))


@pytest.mark.parametrize("strategy", [Merging(), Replacing()], ids=repr)
def test_what_a_strategy_merges_or_replaces_stays_so(strategy):
    flow = flow_of(WithKernels(strategy, SIMULATED))
    plan = flow.plan(PARAMS, X)
    assert not any(isinstance(step.fn, Substituted) for step in plan.steps)
    np.testing.assert_allclose(jax.jit(flow)(PARAMS, X), MODEL.apply(PARAMS, X), rtol=1e-5, atol=1e-5)


def test_without_places_the_plan_is_the_strategys_own():
    flow = flow_of(WithKernels(NanoFlow(), Kernels()))  # there is no GPU
    assert flow.plan(PARAMS, X).steps == flow_of(NanoFlow()).plan(PARAMS, X).steps


def test_a_plan_with_kernels_is_simulated_with_what_they_move():
    plan = flow_of(WithKernels(Sequential(), SIMULATED)).plan(PARAMS, X)
    own, plain = plan.simulate("H200"), flow_of(Sequential()).plan(PARAMS, X).simulate("H200")
    assert 0 < own.total_us <= plain.total_us
    assert any(event.name.startswith("add_rms_norm(") for event in own.events)


def test_a_plan_with_kernels_says_that_it_cannot_be_saved():
    with pytest.raises(df.PlanError, match="add_rms_norm"):
        flow_of(WithKernels(Sequential(), SIMULATED)).plan(PARAMS, X).to_json()


@pytest.mark.parametrize(("fun", "first"), [(MODEL.apply, PARAMS), (loop, jnp.ones((3, WIDTH)))], ids=["flat", "loop"])
def test_a_saved_plan_runs_with_kernels(fun, first):
    saved = flow_of(NanoFlow(), fun).plan(first, X)
    again = df.Plan.from_json(saved.to_json())
    flow = flow_of(WithKernels(again, SIMULATED), fun)
    plan = flow.plan(first, X)
    steps = [(step.operators, step.stream, step.reads) for step in plan.steps]
    assert steps == [(step.operators, step.stream, step.reads) for step in saved.steps]
    assert replaced(plan) or any(inner.fn is not None for step in plan.steps for inner in step.body or ())
    for got, want in zip(jax.tree.leaves(jax.jit(flow)(first, X)), jax.tree.leaves(fun(first, X)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_plan_of_something_else_is_refused():
    saved = flow_of(NanoFlow(), loop).plan(jnp.ones((3, WIDTH)), X)
    with pytest.raises(df.PlanError, match="which the function does not have"):
        flow_of(WithKernels(saved, SIMULATED)).plan(PARAMS, X)


def test_a_match_that_returns_something_else_is_named():
    def wrong(jaxpr):
        for match in SIMULATED(jaxpr):
            yield Match("wrong", lambda *args: (args[0][:1], args[1]), match.invars, match.outvars)

    with pytest.raises(df.ScheduleError, match=r"wrong.*in place of"):
        flow_of(WithKernels(Sequential(), wrong)).plan(PARAMS, X)


def test_auto_tries_strategies_with_kernels_too(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path))
    auto = Auto([Sequential(), NanoFlow(2)], kernels=SIMULATED, budget_s=0.5)
    flow = flow_of(auto)
    names = [candidate.name for candidate in flow.candidates(PARAMS, X)]
    assert len(names) == 5
    assert [name for name in names if "WithKernels(NanoFlow(micro_batches=2), Kernels(interpret=True))" in name]
    assert not any(c.dropped for c in flow.candidates(PARAMS, X) if "WithKernels" in c.name)
    df.tune(flow, PARAMS, X)
    np.testing.assert_allclose(jax.jit(flow)(PARAMS, X), MODEL.apply(PARAMS, X), rtol=1e-5, atol=1e-5)


def test_auto_drops_candidates_whose_kernels_are_not_used():
    flow = flow_of(Auto([NanoFlow(2)], kernels=Kernels()))
    (dropped,) = [c for c in flow.candidates(PARAMS, X) if "WithKernels" in c.name]
    assert "the same as NanoFlow" in dropped.dropped


def test_one_kernel_by_name():
    assert Kernels(only="rms_norm") == Kernels(only=("rms_norm",))
    with pytest.raises(df.DynaFlowError, match="There is no kernel 'norm' to use in place"):
        Kernels(only="norm")


def test_text_of_auto():
    assert repr(Auto(kernels=Kernels())) == "Auto(kernels=Kernels())"
    assert repr(Auto([NanoFlow()]).with_kernels(Kernels())) == repr(Auto([NanoFlow()], kernels=Kernels()))


@pytest.mark.parametrize(
    ("strategy", "kernels", "message"),
    [
        (NanoFlow, SIMULATED, "takes a strategy that makes one plan"),
        (Auto(), SIMULATED, "takes a strategy that makes one plan"),
        (Switch([NanoFlow()], lambda *args: 0), SIMULATED, "takes a strategy that makes one plan"),
        (NanoFlow(), 3, r"takes pallas_kernels.Kernels\(\) or functions, not 3"),
        (NanoFlow(), [SIMULATED, None], r"takes pallas_kernels.Kernels\(\) or functions, not None"),
        (NanoFlow(), "rms_norm", r"takes pallas_kernels.Kernels\(\) or functions, not 'rms_norm'"),
        (NanoFlow(), Kernels, r"was given the class Kernels; pass an instance: Kernels\(...\)"),
    ],
)
def test_malformed_arguments(strategy, kernels, message):
    with pytest.raises(df.DynaFlowError, match=message):
        WithKernels(strategy, kernels)
