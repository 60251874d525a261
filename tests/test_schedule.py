"""What a strategy may do, and what it is told when it may not."""

import copy
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import run, same
from scheduling import Do, W, X, layer, looped, loss, run_merged, run_rest

import dynaflow_jax as df
from dynaflow_jax import schedule as schedule_module

WANT = layer(W, X)


def plan_of(do, *sizes, fun=layer, **options):
    options.setdefault("batch_axes", (None, 0))
    return df.dynaflow(fun, scheduler=Do(do, *(sizes or (4, 4))), **options).plan(W, X)


def result_of(do, *sizes, fun=layer, **options):
    options.setdefault("batch_axes", (None, 0))
    return run(df.dynaflow(fun, scheduler=Do(do, *(sizes or (4, 4))), **options), W, X)


def shown(plan):
    return [str(step) for step in plan.steps]


def first(ctx, **options):
    return ctx.execute(ctx.get_ready_ops()[0], **options)


# -- errors --------------------------------------------------------------------------------------------------------


def executes_twice(ctx):
    op = ctx.get_ready_ops()[0]
    ctx.execute(op)
    ctx.execute(op)


def executes_everything_and_goes_on(ctx):
    run_rest(ctx)
    while True:
        ctx.get_ready_ops()


ERRORS = {
    "never": (lambda ctx: None, r"never executed a[0], a[1], b[0], b[1]. Loop until ctx.get_ready_ops() is empty"),
    "not all": (first, "never executed a[1], b[0], b[1]."),
    "twice": (executes_twice, "a[0] was executed before (step 0); every operator runs exactly once"),
    "twice at once": (lambda ctx: ctx.execute(ctx.get_ready_ops()[:1] * 2), "a[0] was executed before; every"),
    "before its inputs": (lambda ctx: ctx.execute(ctx.all_ops()[3]), "b[1] was executed before its inputs: a[1]"),
    "in the wrong order": (lambda ctx: ctx.execute(ctx.all_ops()[2::-2]), "b[0] was executed before its inputs: a[0]"),
    "nothing": (lambda ctx: ctx.execute([]), "called with no operator"),
    "None": (lambda ctx: ctx.execute(None), "takes operators that ctx.get_ready_ops returned, not None"),
    "a name": (lambda ctx: ctx.execute("a"), "takes operators that ctx.get_ready_ops returned, not 'a'"),
    "a number": (lambda ctx: ctx.execute(0), "takes operators that ctx.get_ready_ops returned, not 0"),
    "of the graph": (lambda ctx: ctx.execute(ctx.graph["a"]), "takes operators that ctx.get_ready_ops returned"),
    "lists in lists": (lambda ctx: ctx.execute([ctx.get_ready_ops()]), "takes operators that ctx.get_ready_ops"),
    "stream": (lambda ctx: first(ctx, stream=1), "a[0]: a stream is a name such as 'compute', not 1"),
    "no stream": (lambda ctx: first(ctx, stream=""), "a[0]: a stream is a name"),
    "sm_budget": (lambda ctx: first(ctx, sm_budget=0), "a[0]: sm_budget is a positive number of multiprocessors"),
    "sm_budget True": (lambda ctx: first(ctx, sm_budget=True), "a[0]: sm_budget is a positive number"),
    "priority": (lambda ctx: first(ctx, priority="high"), "a[0]: priority is a whole number of 32 bits, not 'high'"),
    "huge priority": (lambda ctx: first(ctx, priority=2**31), "a[0]: priority is a whole number of 32 bits, not 2147"),
    "huge sm_budget": (lambda ctx: first(ctx, sm_budget=2**31), "a[0]: sm_budget is a positive number of multiproc"),
    "too long to show": (lambda ctx: first(ctx, stream=10**5_000), "not <int that cannot be shown>"),
    "endless list": (lambda ctx: ctx.execute(itertools.repeat(ctx.all_ops()[0])), "More than 4 operators were listed"),
    "endless after": (lambda ctx: first(ctx, after=itertools.count()), "More than 4 operators were listed"),
    "after the future": (lambda ctx: first(ctx, after=ctx.all_ops()[1]), "a[0]: after= names a[1], which was not"),
    "after itself": (lambda ctx: first(ctx, after=ctx.all_ops()[0]), "a[0]: after= names a[0], which was not"),
    "after a name": (lambda ctx: first(ctx, after="a"), "a[0]: after= takes operators, or steps"),
    "after a number": (lambda ctx: first(ctx, after=[0]), "a[0]: after= takes operators, or steps"),
    "after an empty step": (lambda ctx: first(ctx, after=df.Step(())), "a[0]: after= names"),
    "micro-batch": (lambda ctx: ctx.get_ready_ops(2), "There is no micro-batch 2; there are 2, from 0"),
    "micro-batch -1": (lambda ctx: ctx.get_ready_ops(micro_batch=-1), "There is no micro-batch -1"),
    "micro-batch name": (lambda ctx: ctx.get_ready_ops("a"), "There is no micro-batch 'a'"),
    "endless": (executes_everything_and_goes_on, "Nothing is left: leave the loop"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_operator(case, monkeypatch):
    monkeypatch.setattr(schedule_module, "_PATIENCE", 100)
    do, message = ERRORS[case]
    with pytest.raises(df.ScheduleError, match=re.escape(message)) as caught:
        plan_of(do)
    assert re.search(r"Do\(\) was scheduling the top level, after \d+ steps", caught.value.__notes__[0])


def test_endless_loops_are_found(monkeypatch):
    monkeypatch.setattr(schedule_module, "_PATIENCE", 100)

    def waits(ctx):
        first(ctx)
        while ctx.get_ready_ops():
            pass

    with pytest.raises(df.ScheduleError, match=r"asked 100 times .* without executing anything. a\[1\] is: execute it"):
        plan_of(waits)


def test_operators_and_steps_of_another_plan_are_refused():
    kept = []
    plan_of(lambda ctx: (kept.append((ctx.get_ready_ops()[0], first(ctx))), run_rest(ctx)))
    ((op, step),) = kept
    with pytest.raises(df.ScheduleError, match=re.escape("a[0] belongs to another region or plan")):
        plan_of(lambda ctx: ctx.execute(op))
    with pytest.raises(df.ScheduleError, match=re.escape("a[0] belongs to another region or plan")):
        plan_of(lambda ctx: (first(ctx), first(ctx, after=op)))
    with pytest.raises(
        df.ScheduleError, match=re.escape("a[1]: after= names a[0], which was not executed yet, or not by")
    ):
        plan_of(lambda ctx: (first(ctx), first(ctx, after=step)))


def test_errors_of_the_strategy_itself_pass_through():
    def fails(ctx):
        first(ctx)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        plan_of(fails)
    assert caught.value.__notes__ == ["Do() was scheduling the top level, after 1 steps."]


def test_a_caught_error_leaves_no_trace():
    def tries(ctx):
        for wrong in (ctx.all_ops()[3], ctx.all_ops()):
            with pytest.raises(df.ScheduleError):
                ctx.execute(wrong, stream="")
        run_rest(ctx)

    assert plan_of(tries) == plan_of(run_rest)


def test_strategies_cannot_spoil_the_context():
    def spoils(ctx):
        ctx.get_ready_ops().clear()
        ctx.all_ops().clear()
        ctx.sizes = (1, 1)
        for name in ("flops", "micro_batch", "operator"):
            with pytest.raises(df.ScheduleError, match=r"a\[0\] cannot be changed"):
                setattr(ctx.get_ready_ops()[0], name, 1)
        with pytest.raises(AttributeError, match="nonsense"):
            _ = ctx.get_ready_ops()[0].nonsense
        run_rest(ctx)

    assert plan_of(spoils) == plan_of(run_rest)


def test_a_copy_of_an_operator_is_the_operator():
    def copies(ctx):
        for i, op in enumerate(ctx.all_ops()):
            ctx.execute((copy.copy, copy.deepcopy)[i % 2](op))

    assert plan_of(copies) == plan_of(run_rest)


@pytest.mark.parametrize(
    "odd", [np.arange(3), "0", 0.5, 2, -1, [0], 10**5_000, object()], ids=lambda odd: type(odd).__name__
)
def test_what_is_no_micro_batch(odd):
    with pytest.raises(df.ScheduleError, match="There is no micro-batch"):
        plan_of(lambda ctx: ctx.get_ready_ops(odd))


# -- what is ready -------------------------------------------------------------------------------------------------


def test_ready_operators():
    def looks(ctx):
        names = lambda ops: [str(op.ref) for op in ops]  # noqa: E731
        assert names(ctx.get_ready_ops()) == ["a[0]", "a[1]"]
        assert names(ctx.get_ready_ops(1)) == ["a[1]"]
        assert names(ctx.all_ops()) == ["a[0]", "a[1]", "b[0]", "b[1]"]
        assert (ctx.num_micro_batches, ctx.sizes, ctx.path) == (2, (3, 5), ())
        op = ctx.get_ready_ops(micro_batch=1)[0]
        assert (op.name, op.key, op.micro_batch, op.bound, op.phase) == ("a", "a", 1, "memory", "forward")
        assert [aval.shape for aval in op.inputs] == [(5, 4), (4, 4)]
        assert [aval.shape for aval in op.outputs] == [(5, 4)]
        assert op.flops == 2 * 5 * 4 * 4
        ctx.execute(op)
        assert names(ctx.get_ready_ops()) == ["a[0]", "b[1]"]
        while ops := ctx.get_ready_ops(micro_batch=1):
            ctx.execute(ops[0])
        assert names(ctx.get_ready_ops()) == ["a[0]"]
        run_rest(ctx)
        assert not ctx.get_ready_ops()

    plan_of(looks, 3, 5)


def test_steps_say_what_they_read():
    def waits(ctx):
        a0, a1, b0, b1 = ctx.all_ops()
        step = ctx.execute(a0, stream="one", priority=2, sm_budget=16)
        ctx.execute(a1, stream="two", after=step)
        ctx.execute(b1, stream="two", after=[a0, step])
        ctx.execute(b0, after=b1)

    steps = plan_of(waits).steps
    assert [(step.reads, step.after, step.stream) for step in steps] == [
        ((), (), "one"),
        ((), (0,), "two"),
        ((1,), (0,), "two"),
        ((0,), (2,), "compute"),
    ]
    assert (steps[0].priority, steps[0].sm_budget) == (2, 16)
    same(result_of(waits), WANT)


# -- merged --------------------------------------------------------------------------------------------------------


def merges(batches, only=lambda op: True):
    """Merges operators over some of the micro-batches."""

    def do(ctx):
        while ops := ctx.get_ready_ops():
            together = [op for op in ops if op.key == ops[0].key and op.micro_batch in batches and only(op)]
            ctx.execute(together if len(together) > 1 else ops[0])

    return do


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (2, 5, 1)], ids=str)
def test_merged_over_all(sizes):
    names = ",".join(map(str, range(len(sizes))))
    assert shown(plan_of(run_merged, *sizes)) == [f"a[{names}]", f"b[{names}]"]
    same(result_of(run_merged, *sizes), WANT)
    same(result_of(run_merged, *sizes, fun=looped, out_axes=(0, 1)), looped(W, X))


@pytest.mark.parametrize("batches", [(0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("phase", ["forward", "backward", "both"])
def test_merged_training_steps(batches, phase):
    """The cotangents of a mean are rescaled on the way into a merged operator, and its gradients on the way out."""
    step = jax.value_and_grad(loss)
    do = merges(batches, lambda op: phase in (op.phase, "both"))
    same(result_of(do, 2, 5, 1, fun=step, out_axes="mean"), step(W, X))
    total = jax.value_and_grad(lambda w, x: layer(w, x).sum())
    same(result_of(do, 2, 5, 1, fun=total, out_axes="sum"), total(W, X))


def test_merged_in_any_order():
    def backwards(ctx):
        ctx.execute(ctx.get_ready_ops()[::-1])
        run_rest(ctx)

    same(result_of(backwards, 3, 5), WANT)


def test_what_cannot_be_merged_says_why():
    def fun(w, x):
        with df.mark("most"):
            most = x.max()
        with df.mark("scale"):
            return x * most

    with pytest.raises(df.ScheduleError) as caught:
        plan_of(run_merged, fun=fun, allow_batch_mixing="*")
    assert str(caught.value) == (
        "most cannot be merged over micro-batches [0, 1]: it gives a value float32[] that is different in every "
        "micro-batch. Execute it for each micro-batch."
    )

    def masked(w, x):
        with df.mark("count"):
            count = x[:, 0].sum()
        with df.mark("divide"):
            return x.sum() / count

    with pytest.raises(df.ScheduleError, match="cannot be merged"):
        plan_of(run_merged, fun=masked, out_axes="mean", batch_axes=(None, 0), weights=lambda w, x: x[:, 0].sum())


def test_loops_and_draws_run_once():
    def together(ctx):
        ctx.execute(ctx.all_ops())

    with pytest.raises(df.ScheduleError, match=r"scan is a loop or shard_map .* neither merged, grouped nor replaced"):
        plan_of(lambda ctx: ctx.execute(ctx.get_ready_ops(), fn=lambda *args: args), fun=looped)

    def noisy(w, x):
        return layer(w, x) * jax.random.uniform(jax.random.key(0), x.shape)

    with pytest.raises(df.ScheduleError, match="draws random numbers for the whole batch: it can be neither"):
        plan_of(together, fun=noisy)


# -- grouped and replaced ------------------------------------------------------------------------------------------


def test_grouped():
    def groups(ctx):
        a0, a1, b0, b1 = ctx.all_ops()
        ctx.execute([a0, b0])
        ctx.execute([a1, b1], stream="other")

    assert shown(plan_of(groups)) == ["a[0] + b[0]", "a[1] + b[1]"]
    same(result_of(groups, 3, 5), WANT)
    same(result_of(lambda ctx: ctx.execute(ctx.all_ops()), 3, 5), WANT)


def fused(x, w):
    """One function in place of both operators of ``layer``."""
    return (jnp.tanh(x @ w),)


def replaces(fn):
    def do(ctx):
        for m in range(ctx.num_micro_batches):
            ctx.execute([op for op in ctx.all_ops() if op.micro_batch == m], fn=fn)

    return do


def test_replaced():
    seen = []

    def do(ctx):
        ops = [op for op in ctx.all_ops() if op.micro_batch == 1]
        seen.append([[aval.shape for aval in of(ops)] for of in (ctx.inputs_of, ctx.outputs_of)])
        seen.append([[aval.shape for aval in of(ops[0])] for of in (ctx.inputs_of, ctx.outputs_of)])
        replaces(fused)(ctx)

    assert shown(plan_of(do, 3, 5)) == ["fused(a[0] + b[0])", "fused(a[1] + b[1])"]
    assert seen == [[[(5, 4), (4, 4)], [(5, 4)]], [[(5, 4), (4, 4)], [(5, 4)]]]
    same(result_of(replaces(fused), 3, 5), WANT)
    same(result_of(replaces(lambda x, w: jnp.tanh(x @ w)), 3, 5), WANT)  # a single output needs no tuple
    same(result_of(replaces(lambda x, w: 0 * x), 3, 5), 0 * WANT)  # and is used, not looked at


def test_a_replaced_operator_over_several_micro_batches():
    def do(ctx):
        ctx.execute(ctx.get_ready_ops(), fn=lambda x, w, y, v: (x @ w, y @ v))  # its inputs, for each micro-batch
        run_rest(ctx)

    same(result_of(do, 3, 5), WANT)


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda x, w: jnp.ones(3), df.ScheduleError, "returned float32[3] for inputs float32[4,4], float32[4,4]; the"),
        (lambda x, w: (x, x), df.ScheduleError, "returned float32[4,4], float32[4,4] for inputs"),
        (lambda x, w: x.astype(jnp.bfloat16), df.ScheduleError, "returned bfloat16[4,4] for inputs"),
        (lambda x, w: None, df.ScheduleError, "returned nothing for inputs"),
        (3, df.ScheduleError, "fn=3 in place of a[0] + b[0] is not callable"),
        (lambda x: x, TypeError, "takes 1 positional argument but 2 were given"),
        (lambda x, w: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda x, w: "text", df.ScheduleError, "returned what is no array: "),
    ],
)
def test_wrong_replacements(fn, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        plan_of(replaces(fn))
    if error is not df.ScheduleError:
        note = "fn='<lambda>' in place of a[0] + b[0] failed on inputs of shapes float32[4,4], float32[4,4]."
        assert note in caught.value.__notes__


@pytest.mark.parametrize("later", [lambda y: (y[:-1],), lambda y: (y, y), lambda y: (), lambda y: "text"])
def test_a_replacement_that_returns_something_else_later(later):
    """What was checked when it was scheduled is checked again when it is lowered."""
    returned = iter([lambda y: (y,)] * 2)

    def fn(x, w):
        return next(returned, later)(jnp.tanh(x @ w))

    with pytest.raises(df.ScheduleError, match=r"fn='fn' in place of a\[0\] \+ b\[0\] returned"):
        result_of(replaces(fn))


def test_a_replacement_before_its_inputs_is_refused():
    with pytest.raises(df.ScheduleError, match=re.escape("b[0] was executed before its inputs: a[0]")):
        plan_of(lambda ctx: ctx.execute(ctx.all_ops()[2], fn=lambda x: x))


# -- loops ---------------------------------------------------------------------------------------------------------


def test_loops_are_entered():
    seen = []

    def do(ctx):
        seen.append((ctx.path, [str(op.ref) for op in ctx.get_ready_ops()]))
        run_rest(ctx)

    def nested(w, x):
        return jax.lax.scan(lambda x, _: (looped(w, x)[0], None), x, None, length=2)[0]

    plan = plan_of(do, fun=nested)
    assert seen == [((), ["scan"]), (("scan",), ["scan"]), (("scan", "scan"), ["a[0]", "a[1]"])]
    (outer,) = plan.steps
    (inner,) = outer.body
    assert [str(step) for step in inner.body][:4] == ["a[0]", "a[1]", "b[0]", "b[1]"]
    same(result_of(do, 3, 5, fun=nested), nested(W, X))


def test_errors_inside_loops_say_where():
    with pytest.raises(df.ScheduleError, match=re.escape("never executed a[0], a[1], b[0], b[1]")) as caught:
        plan_of(lambda ctx: None if ctx.path else run_rest(ctx), fun=looped)
    assert "in the body of scan" in str(caught.value)
    assert "was scheduling the body of scan" in caught.value.__notes__[0]
    kept = []

    def escapes(ctx):
        if ctx.path:
            kept.extend(ctx.all_ops())
            run_rest(ctx)
        else:
            first(ctx)
            ctx.execute(kept[0])

    with pytest.raises(df.ScheduleError, match=re.escape("a[0] belongs to another region")):
        plan_of(escapes, fun=looped)


def reversed_scan(w, x):
    def step(c, s):
        c = layer(w, c) + s
        return c, c[:, 0]

    return jax.lax.scan(step, x, jnp.arange(7.0), reverse=True)


def without_carry(w, x):
    return jax.lax.scan(lambda _, s: (None, layer(w, x) * s), None, jnp.arange(7.0))[1]


def rows_as_xs(w, x):
    stacked = jnp.stack([x, x + 1, x * 2, x - 3, x])
    return jax.lax.scan(lambda c, x: (c + 1, layer(w, x)), 0, stacked)


def without_xs(w, x):
    return jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=7)[0]


@pytest.mark.parametrize("unroll", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("fun", [reversed_scan, without_carry, rows_as_xs, without_xs])
def test_loops_unrolled(fun, unroll):
    """Lengths of 5 and 7, which most of these numbers do not divide."""
    same(result_of(run_rest, 3, 5, fun=fun, unroll=unroll), fun(W, X))


def test_unrolling_shows_several_iterations_at_once():
    inside = []

    def do(ctx):
        if ctx.path:
            inside.append(sum(op.name == "a" for op in ctx.graph))
        run_rest(ctx)

    plan_of(do, fun=without_xs, unroll=3)
    assert 3 in inside


def test_gradients_of_loops():
    step = jax.value_and_grad(lambda w, x: looped(w, x)[0].mean())
    for do in (run_rest, run_merged):
        same(result_of(do, 3, 5, fun=step, out_axes="mean"), step(W, X))


# -- identity ------------------------------------------------------------------------------------------------------


def test_random_valid_schedules_give_the_result():
    step = jax.value_and_grad(loss)
    for seed in range(5):
        rng = np.random.default_rng(seed)

        def shuffles(ctx, rng=rng):
            while ops := ctx.get_ready_ops():
                ctx.execute(ops[rng.integers(len(ops))], stream=str(rng.integers(3)))

        same(result_of(shuffles, 2, 3, 3, fun=step, out_axes="mean"), step(W, X))
