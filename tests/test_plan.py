"""A plan is data: it prints, compares, hashes, is saved and loaded, and runs again as the same program."""

import json

import jax
import jax.numpy as jnp
import pytest
from models import same
from scheduling import Do, Split, W, X, layer, looped, loss, lowered, run_merged, run_rest

import dynaflow_jax as df


def fused(x, w):
    """In place of ``layer``."""
    return jnp.tanh(x @ w)


def replaces(ctx):
    ops = ctx.all_ops()
    ctx.execute(ops[::2], fn=fused, stream="a", priority=1)
    ctx.execute(ops[1::2], fn=fused, stream="b", after=ops[0], sm_budget=8)


def two_streams(ctx):
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, stream="network" if op.name == "b" else "compute")


STEP = jax.value_and_grad(loss)
CASES = {
    "simple": (layer, Split(3, 5), {}),
    "whole": (layer, Split(8), {}),
    "streams": (layer, Do(two_streams, 4, 4), {}),
    "merged": (STEP, Do(run_merged, 3, 5), {"out_axes": "mean"}),
    "grouped": (layer, Do(lambda ctx: ctx.execute(ctx.all_ops()), 3, 5), {}),
    "replaced": (layer, Do(replaces, 4, 4), {}),
    "loop": (looped, Do(two_streams, 3, 5), {}),
    "training in a loop": (jax.grad(lambda w, x: looped(w, x)[0].mean()), Split(3, 5), {"out_axes": "mean"}),
    "draws": (lambda w, x: layer(w, x) * jax.random.uniform(jax.random.key(0), x.shape), Split(3, 5), {}),
}


def flow_of(case, scheduler=None):
    fun, strategy, options = CASES[case]
    return df.dynaflow(fun, scheduler=scheduler or strategy, batch_axes=(None, 0), **options)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded(case):
    plan = flow_of(case).plan(W, X)
    again = flow_of(case).plan(W, X)
    assert plan == again
    assert hash(plan) == hash(again)
    assert plan is not again
    text = plan.to_json()
    assert text == again.to_json()
    loaded = df.Plan.from_json(text)
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert loaded.show() == plan.show()
    replayed = flow_of(case, loaded)
    assert replayed.plan(W, X) == plan
    assert lowered(replayed, W, X) == lowered(flow_of(case), W, X)


def test_a_plan_runs():
    plan = flow_of("streams").plan(W, X)
    same(flow_of("streams", plan)(W, X), layer(W, X))
    same(jax.grad(lambda w: flow_of("streams", plan)(w, X).sum())(W), jax.grad(lambda w: layer(w, X).sum())(W))


def test_different_plans_differ():
    plans = [flow_of(case).plan(W, X) for case in CASES]
    assert len(set(plans)) == len(plans)
    assert flow_of("simple").plan(W, X) != flow_of("simple").plan(W, X[:, ::-1].astype(jnp.bfloat16))


# -- as text -------------------------------------------------------------------------------------------------------


def test_shown_on_one_stream():
    assert flow_of("simple").plan(W, X).show(width=8) == (
        "Plan of Split(): 2 micro-batches of 3 + 5 rows, 4 steps, 1 stream\ncompute\n--------\na[0]\na[1]\nb[0]\nb[1]"
    )
    assert str(flow_of("whole").plan(W, X)).startswith("Plan of Split(): not split, 2 steps, 1 stream\n")


def test_shown_on_two_streams():
    """What can run at once stands side by side."""
    assert flow_of("streams").plan(W, X).show(width=8) == (
        "Plan of Do(): 2 micro-batches of 4 + 4 rows, 4 steps, 2 streams\n"
        "compute   network\n"
        "--------  --------\n"
        "a[0]\n"
        "a[1]      b[0]\n"
        "          b[1]"
    )
    assert flow_of("replaced").plan(W, X).show(width=12).splitlines()[1:] == [
        "a             b",
        "------------  ------------",
        "…[0] + b[0])",
        "              …[1] + b[1])",
    ]


def test_shown_in_columns_as_wide_as_the_longest_name(monkeypatch):
    plan = flow_of("replaced").plan(W, X)
    assert plan.show() == str(plan)
    assert plan.show().splitlines()[2] == "  ".join(["-" * max(map(len, map(str, plan.steps)))] * 2)
    assert "…" not in plan.show()
    monkeypatch.setenv("COLUMNS", "12")
    assert plan.show() == plan.show(width=12)


def test_shown_with_a_loop():
    def fun(w, x):
        x, _ = jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=5)
        with df.mark("head"):
            return x * 2

    flow = df.dynaflow(fun, scheduler=Do(two_streams, 4, 4), batch_axes=(None, 0))
    assert flow.plan(W, X).show(width=8) == (
        "Plan of Do(): 2 micro-batches of 4 + 4 rows, 7 steps, 2 streams\n"
        "compute   network\n"
        "--------  --------\n"
        "scan:\n"
        "  a[0]\n"
        "  a[1]      b[0]\n"
        "            b[1]\n"
        "head[0]\n"
        "head[1]"
    )


def test_steps_as_text():
    def steps(case):
        return [str(step) for step in flow_of(case).plan(W, X).steps]

    assert steps("merged")[:2] == ["a[0,1]", "b[0,1]"]
    assert steps("grouped") == ["a[0] + a[1] + b[0] + b[1]"]
    assert steps("replaced") == ["fused(a[0] + b[0])", "fused(a[1] + b[1])"]


# -- plans that do not fit -----------------------------------------------------------------------------------------


def test_plans_for_something_else_are_refused():
    plan = flow_of("simple").plan(W, X)
    with pytest.raises(df.PlanError, match=r"splits a batch into \[3, 5\] rows; this one has 7"):
        flow_of("simple", plan).plan(W, X[:7])
    with pytest.raises(
        df.PlanError, match=r"made for other operators .*: the model, its marks, the rules or the shapes"
    ):
        flow_of("training in a loop", plan).plan(W, X)
    with pytest.raises(df.PlanError, match="made for other operators"):
        flow_of("simple", plan).plan(W.astype(jnp.bfloat16), X)


def changed(case, change):
    """A plan whose JSON was edited."""
    data = json.loads(flow_of(case).plan(W, X).to_json())
    change(data)
    return df.Plan.from_json(json.dumps(data))


EDITS = {
    "never executed b": lambda data: data["steps"].pop(),
    "executed before": lambda data: data["steps"].append(data["steps"][0]),
    "executed before its inputs": lambda data: data.update(steps=[{**s, "reads": []} for s in data["steps"][::-1]]),
    "runs c[0], which the function does not have": lambda data: data["steps"][0].update(run=[["c", 0]]),
    "runs a[7], which the function does not have": lambda data: data["steps"][0].update(run=[["a", 7]]),
    "runs a, which the function does not have": lambda data: data["steps"][0].update(run=[["a", None]]),
    "says it reads steps (0, 1); it reads (0,)": lambda data: data["steps"][2].update(reads=[0, 1]),
    "has steps inside, and should not": lambda data: data["steps"][0].update(body=[]),
    "sm_budget is a positive number": lambda data: data["steps"][0].update(sm_budget=-1),
    "a stream is a name": lambda data: data["steps"][0].update(stream=""),
    "this one has 8": lambda data: data.update(sizes=[3, 6]),
    "[5, 3]": lambda data: data.update(sizes=[5, 3]),
    "fingerprint": lambda data: data.update(fingerprint="0"),
}


@pytest.mark.parametrize("message", EDITS)
def test_edited_plans_are_refused(message):
    plan = changed("simple", EDITS[message])
    with pytest.raises(df.PlanError) as caught:
        flow_of("simple", plan).plan(W, X)
    assert message in str(caught.value) or message == "[5, 3]"


def test_edited_loops_and_replacements_are_refused():
    with pytest.raises(df.PlanError, match=r"never executed .* in the body of scan"):
        flow_of("loop", changed("loop", lambda data: data["steps"][0]["body"].pop())).plan(W, X)
    wrong = df.Plan.from_json(flow_of("replaced").plan(W, X).to_json(), {f"{__name__}:fused": lambda x, w: x[0]})
    with pytest.raises(df.PlanError, match=r"in place of a\[0\] \+ b\[0\] returned"):
        flow_of("replaced", wrong).plan(W, X)


# -- JSON that is damaged ------------------------------------------------------------------------------------------

DAMAGES = {
    "plan lacks 'steps'": lambda data: data.pop("steps"),
    "plan lacks 'version'": lambda data: data.pop("version"),
    "version 99; this library reads version 1": lambda data: data.update(version=99),
    "plan.version must be a whole number, not True": lambda data: data.update(version=True),
    "plan.strategy must be text, not 3": lambda data: data.update(strategy=3),
    "plan.sizes must be a list, not 8": lambda data: data.update(sizes=8),
    "plan.sizes must list the rows of each micro-batch": lambda data: data.update(sizes=[]),
    "plan.sizes must hold whole numbers, not 3.5": lambda data: data.update(sizes=[3.5]),
    "plan.steps[1] must be an object, not 'a'": lambda data: data["steps"].__setitem__(1, "a"),
    "plan.steps[0] lacks 'run'": lambda data: data["steps"][0].pop("run"),
    "plan.steps[0].run is empty": lambda data: data["steps"][0].update(run=[]),
    "plan.steps[0].run must hold pairs [operator, micro-batch]": lambda data: data["steps"][0].update(run=["a"]),
    "plan.steps[0].run must hold whole numbers, not 'x'": lambda data: data["steps"][0].update(run=[["a", "x"]]),
    "plan.steps[0].stream must be text, not None": lambda data: data["steps"][0].update(stream=None),
    "plan.steps[0].reads must hold whole numbers": lambda data: data["steps"][0].update(reads=["0"]),
    "plan.steps[0] has an unknown field 'color'": lambda data: data["steps"][0].update(color="red"),
    "plan.steps[1].reads names step 1, which does not come": lambda data: data["steps"][1].update(reads=[0, 1]),
    "plan.steps[2].after names step -1, which does not come": lambda data: data["steps"][2].update(after=[-1]),
    "plan.steps[0].priority has a number of more than 64": lambda data: data["steps"][0].update(priority=2**63),
    "plan.sizes has a number of more than 64 bits": lambda data: data.update(sizes=[9 * 10**4_299] * 12),
    "plan.steps[0].body[0] must be an object": lambda data: data["steps"][0].update(body=[0]),
    "plan.steps[0].fn names 'nowhere:f', which is not found": lambda data: data["steps"][0].update(fn="nowhere:f"),
    "plan.steps[0].fn names 'jax:__name__', which is not a": lambda data: data["steps"][0].update(fn="jax:__name__"),
    "plan.steps[0].fn names 'builtins:dict', which is not a": lambda data: data["steps"][0].update(fn="builtins:dict"),
    "plan.steps[0].fn names 'builtins:exit', which no plan": lambda data: data["steps"][0].update(fn="builtins:exit"),
    "plan.steps[0].fn names 'posix:_exit', which no plan": lambda data: data["steps"][0].update(fn="posix:_exit"),
    "plan.steps[0].fn names 'jax:jit', which no plan": lambda data: data["steps"][0].update(fn="jax:jit"),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_damaged_json_says_where(message):
    with pytest.raises(df.PlanError) as caught:
        changed("simple", DAMAGES[message])
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, None, b"\xff"], ids=lambda t: repr(t)[:9])
def test_what_is_no_plan(text):
    with pytest.raises(df.PlanError):
        df.Plan.from_json(text)


def test_plans_that_are_nested_too_deep():
    """Deeper than functions nest loops, and deeper than Python shows values."""
    step = '{"run": [["a", 0]], "stream": "s", "body": ['
    head = '{"version": 1, "strategy": "s", "fingerprint": "f", "sizes": [8], "steps": ['
    for depth in (100, 300, 3_000):
        with pytest.raises(df.PlanError, match=r"64 levels deep|not JSON"):
            df.Plan.from_json(head + step * depth + "]}" * depth + "]}")
        with pytest.raises(df.PlanError, match=r"whole numbers|too deep|not JSON"):
            df.Plan.from_json(head.replace("8", "[" * depth + "]" * depth) + "]}")


def test_a_replacement_that_fails_is_the_plan_that_does_not_fit():
    def broken(x, w):
        raise ZeroDivisionError("of the function")

    plan = df.Plan.from_json(flow_of("replaced").plan(W, X).to_json(), {f"{__name__}:fused": broken})
    with pytest.raises(df.PlanError, match=r"step 0 .*the function in place of the operators failed: of the function"):
        flow_of("replaced", plan)(W, X)


def test_truncated_json():
    text = flow_of("loop").plan(W, X).to_json()
    for end in range(0, len(text), 37):
        with pytest.raises(df.PlanError):
            df.Plan.from_json(text[:end])


def test_functions_without_a_name_cannot_be_saved():
    def do(ctx):
        ctx.execute(ctx.all_ops(), fn=lambda x, w: jnp.tanh(x @ w))

    plan = df.dynaflow(layer, scheduler=Do(do), batch_axes=(None, 0)).plan(W, X)
    with pytest.raises(df.PlanError, match="has no name to find it by"):
        plan.to_json()


def test_functions_given_by_name():
    text = flow_of("replaced").plan(W, X).to_json()
    other = lambda x, w: 2 * jnp.tanh(x @ w)  # noqa: E731
    plan = df.Plan.from_json(text, {f"{__name__}:fused": other})
    same(flow_of("replaced", plan)(W, X), 2 * layer(W, X))


def test_strategies_are_not_asked_again():
    calls = []

    def do(ctx):
        calls.append(ctx)
        run_rest(ctx)

    plan = df.dynaflow(layer, scheduler=Do(do, 4, 4), batch_axes=(None, 0)).plan(W, X)
    df.dynaflow(layer, scheduler=plan, batch_axes=(None, 0))(W, X)
    assert len(calls) == 1
