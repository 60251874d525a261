"""What the property tests found once, each as its whole kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_jax as df


class Split(df.OpScheduler):
    """Given sizes; merged, if asked, as far as the operators of the micro-batches can be."""

    def __init__(self, *sizes, merge=()):
        self.sizes = sizes
        self.merge = merge

    def split(self, info):
        return self.sizes

    def schedule(self, ctx):
        while ready := ctx.get_ready_ops():
            same = [op for op in ready if op.key == ready[0].key and op.micro_batch in self.merge]
            ctx.execute(same if len(same) > 1 else ready[0])


def same(fun, args, scheduler, batch_axes, **kwargs):
    got = jax.jit(df.dynaflow(fun, scheduler=scheduler, batch_axes=batch_axes, **kwargs))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, fun(*args))


ROWS = jnp.arange(7 * 4.0).reshape(7, 4)


@pytest.mark.parametrize("merge", [(), (0, 2), (0, 1), (0, 1, 2)], ids=str)
def test_operators_are_named_alike_at_every_size(merge):
    """The heaviest equation of an operator is another one when rows are few: the work on weights or that on rows."""

    def fun(w, x):
        return jnp.clip(w, -2, 2), -x  # 5 numbers against 4 to 28

    same(fun, (jnp.arange(5.0) - 3, ROWS), Split(3, 1, 3, merge=merge), (None, 0))


@pytest.mark.parametrize("merge", [(), (0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("in_loop", [False, True], ids=["", "in a loop"])
def test_constants_are_cut_alike_at_every_size(merge, in_loop):
    """Small constants belong to the operators that read them, large ones do not: small and large at one size."""
    width = (1 << 16) // 4
    x = jnp.arange(7.0)[:, None]

    def layer(x):
        with df.mark("layer"):
            zeros = jnp.zeros((x.shape[0], width))
        with df.mark("other"):
            return x + (zeros + x).sum(1, keepdims=True) + zeros[:, :1]

    def fun(x):
        return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0] if in_loop else layer(x)

    same(fun, (x,), Split(1, 5, 1, merge=merge), 0)


@pytest.mark.parametrize("values", [(2, 2.0, True), (True, 1, 1.0), (0.0, -0.0), ("a", b"a")], ids=str)
def test_static_arguments_are_told_apart(values):
    """Also those that Python holds equal."""
    x = jnp.arange(1, 5)

    def fun(x, static):
        return x * 2 if static == "a" else x if static == b"a" else 1 / (x * static)

    flow = df.dynaflow(fun, scheduler=Split(1, 3), batch_axes=(0, None))
    for value in values + values:
        got, want = flow(x, value), fun(x, value)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_rows_that_are_all_alike_and_scaled_by_the_batch_size():
    """The gradient of a mean with respect to rows, where it is the same for every row."""
    fun = jax.grad(lambda x: -x.mean())
    np.testing.assert_array_equal(df.dynaflow(fun, scheduler=Split(3, 4), batch_axes=0)(ROWS), fun(ROWS))
    pair = lambda x: (fun(x), x.sum())  # noqa: E731
    flow = df.dynaflow(pair, scheduler=Split(3, 4), batch_axes=0, out_axes=(None, sum))
    with pytest.raises(df.BatchMixingError, match="scales its rows by its own size"):
        flow.plan(ROWS)


@pytest.mark.parametrize("axis", [1, -1, None])
def test_rows_that_are_all_alike_are_joined_where_asked(axis):
    flow = df.dynaflow(lambda x: jnp.ones((2, x.shape[0])), scheduler=Split(3, 4), batch_axes=0, out_axes=axis)
    np.testing.assert_array_equal(flow(ROWS), np.ones((2, 7)))
    wrong = df.dynaflow(flow.fun, scheduler=Split(3, 4), batch_axes=0, out_axes=0)
    with pytest.raises(df.SplitError, match="rows are on axis 1"):
        wrong.plan(ROWS)


CALLS = {"plain": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint, "relu": lambda f: lambda x: jax.nn.relu(f(x))}
DIFFERENTIATED = {
    "grad": lambda loss: jax.grad(loss)(1.5),
    "grad of jit": lambda loss: jax.grad(jax.jit(loss))(1.5),
    "second derivative": lambda loss: jax.grad(jax.grad(loss))(1.5),
    "vmap of grad": lambda loss: jax.vmap(jax.grad(loss))(jnp.arange(3.0)),
    "grad of scan": lambda loss: jax.grad(
        lambda k: jax.lax.scan(lambda c, w: (c + loss(k * w), None), 0.0, jnp.arange(3.0))[0]
    )(1.0),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("differentiate", DIFFERENTIATED)
@pytest.mark.parametrize("sizes", [(3, 4), (7,)], ids=str)
def test_values_that_the_function_closes_over_are_differentiated(call, differentiate, sizes):
    """Also where a call with a derivative of its own was opened, so that the unscheduled function is differentiated."""

    def loss_of(schedule):
        def loss(w):
            def layer(x):
                with df.mark("a"):
                    y = jnp.sin(x * w)
                with df.mark("b"):
                    return y * w

            return schedule(lambda x: CALLS[call](layer)(x).sum())(ROWS)

        return loss

    rules = [df.SplitFunc("max")] if call == "relu" else []
    options = {"scheduler": Split(*sizes), "batch_axes": 0, "out_axes": "sum", "rules": rules}
    scheduled = loss_of(lambda fun: df.dynaflow(fun, **options))
    got, want = (DIFFERENTIATED[differentiate](loss) for loss in (scheduled, loss_of(lambda fun: fun)))
    np.testing.assert_allclose(got, want, rtol=1e-4)  # sums of 28 numbers in another order, some of which cancel


TOTALS = {
    "float32": lambda x: x.sum(),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).sum(),
    "int32": lambda x: x.astype(jnp.int32).sum(0),
    "counts": lambda x: (x > 3).sum(0),
    "used linearly": lambda x: x.sum(0) * 2 - (x > 3).sum(),
    "nothing": lambda x: 0 * x.sum(),
}


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("merge", [(0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_sums_of_merged_operators_are_exact(total, merge):
    """However a sum over several micro-batches is given back to them, the parts add up to it, bit by bit."""

    def fun(x):
        with df.mark("total"):
            y = TOTALS[total](x)
        with df.mark("after"):
            return y + y

    schedule = Split(3, 1, 3, merge=merge)
    same(fun, (jnp.arange(28.0).reshape(7, 4) % 5,), schedule, 0, out_axes="sum")
    plan = df.dynaflow(fun, scheduler=schedule, batch_axes=0, out_axes="sum").plan(ROWS)
    assert any(step.is_merged for step in plan.steps)


FACTORS = {
    "plain": lambda count, mask: count(mask),
    "doubled": lambda count, mask: 2 * count(mask) / 2,
    "in jit": lambda count, mask: jax.jit(count)(mask),
    "out of a loop": lambda count, mask: jax.lax.scan(lambda c, _: (c + count(mask), None), 0.0, length=2)[0] / 2,
    "into a loop": lambda count, mask: count(mask),
}


@pytest.mark.parametrize("factor", FACTORS)
def test_sums_that_divide_are_not_merged(factor):
    """A masked mean: what a micro-batch's sum is divided by must be its own count, or its weight is another."""

    def count(mask):
        with df.mark("count"):
            return mask.sum()

    def fun(x, mask):
        total = FACTORS[factor](count, mask)
        with df.mark("sum"):
            summed = (x * mask).sum()
        if factor == "into a loop":
            return jax.lax.scan(lambda c, _: (c + summed / total / 2, None), 0.0, length=2)[0]
        return summed / total

    x, mask = jnp.arange(7.0), jnp.array([1.0, 1, 0, 1, 0, 0, 1])
    options = {"batch_axes": 0, "out_axes": "mean", "weights": lambda x, mask: mask.sum()}
    np.testing.assert_allclose(df.dynaflow(fun, scheduler=Split(3, 1, 3), **options)(x, mask), fun(x, mask), rtol=1e-6)
    with pytest.raises(df.ScheduleError, match="count cannot be merged"):
        df.dynaflow(fun, scheduler=Split(3, 1, 3, merge=(0, 1)), **options)(x, mask)


@pytest.mark.parametrize("sizes", [[7, 0], [3, 3], [8], [3, 4, -1, 1], []], ids=str)
def test_plans_of_another_batch_are_refused_as_plans(sizes):
    text = df.dynaflow(jnp.sin, scheduler=Split(3, 4), batch_axes=0).plan(ROWS).to_json()
    damaged = text.replace("[\n  3,\n  4\n ]", str(sizes))
    assert damaged != text

    def run():
        df.dynaflow(jnp.sin, scheduler=df.Plan.from_json(damaged), batch_axes=0).plan(ROWS)

    with pytest.raises(df.PlanError):
        run()


CHECKPOINTED = {
    "linear": lambda w, x: x + x,
    "product": lambda w, x: x @ w,
    "activation": lambda w, x: jnp.tanh(x @ w) @ w.T,
    "loop": lambda w, x: jax.lax.scan(lambda c, _: (c - x, None), x, length=1)[0],
    "jit": lambda w, x: jax.jit(lambda x: jnp.sin(x) @ w)(x),
}


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("block", CHECKPOINTED)
def test_derivatives_of_what_is_computed_again(block, where):
    """What ``jax.checkpoint`` leaves of a block's first evaluation is a call of a kind of its own since JAX 0.11."""
    w, x = jnp.linspace(-1, 1, 16).reshape(4, 4), ROWS / 28

    def loss(w, x):
        with df.mark("block"):
            x = jax.checkpoint(CHECKPOINTED[block])(w, x)
        return (x * x).sum()

    want = jax.value_and_grad(loss, (0, 1))(w, x)
    options = {"scheduler": Split(3, 4), "batch_axes": (None, 0)}
    if where == "inside":
        flow = df.dynaflow(jax.value_and_grad(loss, (0, 1)), out_axes=("sum", ("sum", 0)), **options)
    else:
        flow = jax.value_and_grad(df.dynaflow(loss, out_axes="sum", **options), (0, 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), flow(w, x), want)


@jax.custom_vjp
def traced(x):
    """The identity, with which a micro-batch's program is traced and not derived."""
    return x


traced.defvjp(lambda x: (x, None), lambda _, g: (g,))
AT_SIZES = {
    "sum or mean": (lambda x, n: x.sum() / n, "sum"),
    "mean or sum": (lambda x, n: x.sum() / n, "mean"),
    "rows": (lambda x, n: x / n, None),
    "number": (lambda x, n: jnp.float32(n), None),
}


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4), (1, 5, 1)], ids=str)
@pytest.mark.parametrize("kind", AT_SIZES)
def test_outputs_that_mean_something_else_at_every_size(kind, sizes):
    """What is proven of the first micro-batch's output is not what is proven of the others'."""
    fun, how = AT_SIZES[kind]

    def both(x):
        rows = traced(x)
        return rows, fun(rows, x.shape[0] if x.shape[0] <= 3 else 7)

    flow = df.dynaflow(both, scheduler=Split(*sizes), batch_axes=0, out_axes=(0, how))
    with pytest.raises(df.BatchMixingError, match="for micro-batches of one size, and for those of another"):
        flow(ROWS)


def fails(x):
    assert x.shape[0] == 7
    return x


def looks_up(x):
    return x * {7: 1.0}[x.shape[0]]


def refuses(x):
    if x.shape[0] != 7:
        raise RuntimeError("seven rows")
    return x


@pytest.mark.parametrize(
    ("fun", "said"), [(fails, "AssertionError"), (looks_up, "KeyError: 3"), (refuses, "seven rows")]
)
def test_functions_that_fail_on_fewer_rows(fun, said):
    """Whatever they raise, the strategy asked for these rows; what is derived can still be differentiated."""
    flow = df.dynaflow(lambda x: fun(traced(x)), scheduler=Split(3, 4), batch_axes=0)
    with pytest.raises(df.SplitError, match=f"takes 7 rows, but not the 3 of a micro-batch: .*{said}"):
        flow(ROWS)
    flow = df.dynaflow(lambda x: jax.nn.relu(fun(x)), scheduler=Split(3, 4), batch_axes=0)
    np.testing.assert_array_equal(jax.grad(lambda x: flow(x).sum())(ROWS), ROWS > 0)


def masked(w, x, mask):
    return (((x @ w) ** 2).mean(-1) * mask).sum() / mask.sum()


MASKS = [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1], [0, 1, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), jax.jacfwd])
def test_derivatives_of_micro_batches_without_weight(mask, transform):
    """Their part is 0 / 0, and so is its derivative, whatever it is multiplied with."""
    w, mask = jnp.eye(4), jnp.array(mask, float)
    options = {"batch_axes": (None, 0, 0), "out_axes": "mean", "weights": lambda w, x, mask: mask.sum()}
    flow = df.dynaflow(masked, scheduler=Split(3, 4), **options)
    for args in ((w, ROWS / 28, mask), (w + 1, ROWS / 7, mask)):
        np.testing.assert_allclose(transform(flow)(*args), transform(masked)(*args), rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("size", [lambda x: x.shape[0], lambda x: jnp.float32(x.shape[0])])
def test_means_over_all_rows_beside_weighted_ones(mask, size):
    """Weights are those of the masked mean alone."""
    mask = jnp.array(mask, float)
    fun = lambda w, x, mask: (masked(w, x, mask), traced(x).sum() / size(x), x.mean(0))  # noqa: E731
    options = {"batch_axes": (None, 0, 0), "out_axes": "mean", "weights": lambda w, x, mask: mask.sum()}
    for sizes in ((3, 4), (1, 4, 2)):
        got = df.dynaflow(fun, scheduler=Split(*sizes), **options)(jnp.eye(4), ROWS, mask)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, fun(jnp.eye(4), ROWS, mask))


@pytest.mark.parametrize("merge", [(), (0, 2), (0, 1, 2)], ids=str)
def test_several_elements_alike_for_each_row(merge):
    """As many zeros as there are tokens say nothing of how many belong to a row."""

    def fun(w, x):
        with df.mark("a"):
            zeros = jnp.zeros((x.shape[0] * 2, 2)) + w
        with df.mark("b"):
            return (zeros * 2 + x.reshape(-1, 2)).reshape(x.shape), zeros

    same(fun, (jnp.arange(2.0), ROWS), Split(3, 1, 3, merge=merge), (None, 0))


@pytest.mark.parametrize("merge", [(), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("call", [lambda x: x, traced], ids=["derived", "traced"])
def test_draws_for_tokens(merge, call):
    """A draw may have several elements for each row, as dropout on all tokens one after the other has."""

    def fun(key, x):
        tokens = call(x).reshape(-1, 2)
        tokens = tokens * jax.random.bernoulli(key, 0.5, tokens.shape)
        return tokens.reshape(x.shape), jax.random.bits(key, (x.shape[0] * 3, 2))

    same(fun, (jax.random.key(0), ROWS), Split(3, 1, 3, merge=merge), (None, 0))
