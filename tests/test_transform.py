"""`dynaflow` as users call it: arguments right and wrong, outputs, caching, and composition with JAX's transforms."""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import same
from scheduling import Do, Split, W, X, layer, looped, loss, run_rest

import dynaflow_jax as df

WANT = layer(W, X)
ARRAY = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def flow_of(fun=layer, *sizes, **options):
    options.setdefault("batch_axes", (None, 0))
    return df.dynaflow(fun, scheduler=Split(*(sizes or (3, 5))), **options)


def of_rows(fun, *sizes, **options):
    return flow_of(fun, *sizes, batch_axes=0, **options)


def total(x):
    return x.sum()


# -- batch_axes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes", [(None, 0), [None, 0], (None, -2), {"x": 0}, {"w": None, "x": 0}, (None, np.int64(0))], ids=str
)
def test_forms_of_batch_axes(axes):
    same(flow_of(batch_axes=axes)(W, X), WANT)


@pytest.mark.parametrize("axes", [(None, {"x": {"y": 0}}), (None, {"x": 0}), ({"w": None}, {"x": 0}), {"b": {"x": 0}}])
def test_batch_axes_of_nested_arguments(axes):
    def fun(p, b):
        return layer(p["w"], b["x"]["y"])

    same(flow_of(fun, batch_axes=axes)({"w": W}, {"x": {"y": X}}), WANT)


def test_batch_axes_of_keywords():
    flow = flow_of(batch_axes={"x": 0})
    same(flow(W, x=X), WANT)
    same(flow(x=X, w=W), WANT)

    def keyword_only(*, x, w):
        return layer(w, x)

    same(flow_of(keyword_only, batch_axes={"x": 0})(w=W, x=X), WANT)


def test_other_axes_than_the_first():
    same(flow_of(lambda w, x: layer(w, x.T).T, batch_axes=(None, 1))(W, X.T), WANT.T)


@pytest.mark.parametrize("axes", [None, (None, None), {}, {"x": None}], ids=str)
def test_nothing_is_split_without_a_batch_axis(axes):
    flow = flow_of(batch_axes=axes)
    assert len(flow.plan(W, X).sizes) == 1
    same(flow(W, X), WANT)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (0, "w has 4 rows and x has 8"),
        ((None, 2), "gives x the axis 2; it has 2 axes"),
        ((None, -3), "gives x the axis -3"),
        ((None, True), "gives x the axis True"),
        ((None, 0.0), "gives x the axis 0.0"),
        ((None, "x"), "gives x the axis 'x'"),
        ("x", "gives w the axis 'x'"),
        ((None, 0, 0), "has 3 entries, the call has 2 positional"),
        ((0,), "has 1 entry, the call has 2"),
        ({"y": 0}, "names 'y', which is not among the arguments: w, x"),
        ({0: 0}, "names 0, which is not among the arguments"),
        ((None, {"z": 0}), "does not fit the arguments"),
    ],
    ids=str,
)
def test_wrong_batch_axes(axes, message):
    with pytest.raises(df.SplitError, match=re.escape(message)):
        flow_of(batch_axes=axes).plan(W, X)


def test_wrong_batch_axes_of_nested_arguments_and_keywords_are_named():
    flow = flow_of(lambda p, b: b["x"] @ p["w"], batch_axes=(None, {"x": 3}))
    with pytest.raises(df.SplitError, match=re.escape("gives b['x'] the axis 3")):
        flow.plan({"w": W}, {"x": X})
    with pytest.raises(df.SplitError, match="also names arguments given by keyword"):
        flow_of(batch_axes=(None, 0)).plan(W, x=X)
    with pytest.raises(df.SplitError, match=r"gives argument 1 the axis 2"):
        flow_of(lambda *args: layer(*args), batch_axes=(None, 2)).plan(W, X)


@pytest.mark.parametrize("value", [2.0, True, "text"], ids=str)
def test_what_is_not_an_array_has_no_rows(value):
    with pytest.raises(df.SplitError, match=f"gives s the axis 0, but it is {value!r}, not an array"):
        of_rows(lambda x, s: x).plan(X, value)
    with pytest.raises(df.SplitError, match="gives s the axis 0; it has 0 axes"):
        of_rows(lambda x, s: x).plan(X, jnp.float32(2))


# -- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [2, 2.0, True, None, "two", (2, "x"), {"n": 2}, [2, 3], len], ids=str)
def test_static_arguments(static):
    def fun(x, s):
        return x * (s if isinstance(s, (int, float)) else len(str(s)))

    got = flow_of(fun, batch_axes=(0, None))(X, static)
    same(got, fun(X, static))
    assert got.dtype == fun(X, static).dtype


def test_static_arguments_must_be_hashable():
    with pytest.raises(df.DynaFlowError, match="argument s is set: neither an array nor hashable"):
        flow_of(lambda x, s: x, batch_axes=(0, None))(X, {1, 2})


def test_numpy_arrays_and_scalars():
    same(flow_of()(np.asarray(W), np.asarray(X)), WANT)
    same(flow_of()(np.asarray(W, np.float64), np.asarray(X, np.float64)), WANT)
    same(flow_of(lambda x, s: x * s, batch_axes=(0, None))(X, np.float32(2)), X * 2)


def test_empty_trees():
    same(of_rows(lambda x, s, t: x * 2)(X, {}, None), X * 2)
    assert of_rows(lambda x: ())(X) == ()
    assert of_rows(lambda x: None)(X) is None


def test_shapes_in_place_of_arrays():
    flow = flow_of()
    assert flow.plan(W, ARRAY) == flow.plan(W, X)
    assert [op.name for op in flow.graph(W, ARRAY)] == ["a", "b"]
    text = flow.explain(W, ARRAY)
    assert text.splitlines()[0].split()[:2] == ["#", "operator"]
    assert "2 micro-batches of 3 + 5 rows" in text
    with pytest.raises(df.DynaFlowError, match="argument x is a ShapeDtypeStruct"):
        flow(W, ARRAY)
    assert jax.eval_shape(flow, W, ARRAY) == ARRAY


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
@pytest.mark.parametrize("strategy", ["Sequential", "NanoFlow", "DualBatchOverlap", "SingleBatchOverlap"])
def test_small_batches(rows, strategy):
    flow = df.dynaflow(layer, scheduler=getattr(df.strategies, strategy)(), batch_axes=(None, 0))
    same(flow(W, X[:rows]), layer(W, X[:rows]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 4), r"\[3, 4\], which adds up to 7; the batch has 8 rows"),
        ((-3, 11), r"positive sizes of micro-batches, such as \[4, 4\]; not \(-3, 11\)"),
        ((8, 0), "positive sizes"),
        ((2.5, 5.5), "positive sizes"),
        ((float("nan"),), "positive sizes"),
        ((float("inf"),), "positive sizes"),
        (("a",), "positive sizes"),
        ((None, 8), "positive sizes"),
    ],
    ids=str,
)
def test_wrong_sizes(sizes, message):
    with pytest.raises(df.SplitError, match=rf"Split\(\).split .*{message}"):
        flow_of(layer, *sizes).plan(W, X)


@pytest.mark.parametrize("answer", [None, 8, [], "44"], ids=str)
def test_split_must_return_sizes(answer):
    strategy = Split()
    strategy.sizes = answer
    with pytest.raises(df.SplitError, match=r"Split\(\).split must return positive sizes"):
        df.dynaflow(layer, scheduler=strategy, batch_axes=(None, 0)).plan(W, X)


def test_a_failing_split_says_what_it_was_asked():
    class Fails(df.OpScheduler):
        def split(self, info):
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        df.dynaflow(layer, scheduler=Fails(), batch_axes=(None, 0)).plan(W, X)
    assert caught.value.__notes__ == ["Fails() was splitting a batch of 8 rows."]


def test_what_a_strategy_knows_before_it_splits():
    seen = []

    class Asks(df.OpScheduler):
        def split(self, info):
            seen.append(info)
            return [info.batch_size]

    flow = df.dynaflow(layer, scheduler=Asks(), batch_axes={"x": 0}, context=("decode", 3))
    flow.plan(W, x=X)
    (info,) = seen
    assert (info.batch_size, info.platform, info.context, info.mesh, info.shards) == (8, "cpu", ("decode", 3), None, 1)
    (w,), kwargs = info.avals
    assert (w.shape, kwargs["x"].shape) == ((4, 4), (8, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": df.strategies.NanoFlow}, "is a class; pass an instance: NanoFlow(...)"),
        ({"scheduler": None}, "must be an OpScheduler or a Plan, a Switch or Auto, not None"),
        ({"scheduler": "NanoFlow"}, "must be an OpScheduler or a Plan"),
        ({"backend": "cuda"}, "backend must be 'auto', 'xla' or 'dispatch', not 'cuda'"),
        ({"rng": "fast"}, "rng must be 'exact' or 'per_micro_batch', not 'fast'"),
        ({"unroll": 0}, "unroll is a positive whole number, not 0"),
        ({"unroll": True}, "unroll is a positive whole number, not True"),
        ({"batch_shards": 0}, "batch_shards is a positive whole number, not 0"),
        ({"batch_shards": True}, "batch_shards is a positive whole number, not True"),
        ({"weights": 3}, "weights must be a function"),
        ({"allow_batch_mixing": 3}, "allow_batch_mixing takes names"),
        ({"allow_batch_mixing": ["a", 3]}, "allow_batch_mixing takes names of operators, modules or primitives, not 3"),
        ({"context": {1}}, "context must be hashable"),
        ({"allow_batch_mixing": None}, "allow_batch_mixing takes names of operators, modules or primitives, not None"),
        ({"rules": "psum"}, "A rule is a df.SplitModule, a df.SplitFunc or a tuple of them, not 'psum'"),
        ({"rules": None}, "A rule is a df.SplitModule, a df.SplitFunc or a tuple of them, not None"),
        ({"donate_argnums": None}, "donate_argnums takes positions of arguments, from 0, not None"),
        ({"donate_argnums": (0, "x")}, "donate_argnums takes positions of arguments, from 0, not 'x'"),
    ],
    ids=str,
)
def test_wrong_options(options, message):
    with pytest.raises(df.DynaFlowError, match=re.escape(message)):
        df.dynaflow(layer, **{"scheduler": Split(8), **options})


def test_a_wrong_backend_of_the_environment_is_named_as_such(monkeypatch):
    monkeypatch.setenv("DYNAFLOW_BACKEND", "cuda")
    with pytest.raises(df.DynaFlowError, match="variable DYNAFLOW_BACKEND must be 'auto', 'xla' or 'dispatch'"):
        flow_of()


def test_shards_that_do_not_divide_the_batch():
    with pytest.raises(df.SplitError, match="batch_shards=3 does not divide the batch of 8 rows"):
        flow_of(batch_shards=3).plan(W, X)


def test_it_is_said_that_nothing_is_split():
    """A strategy that splits, and no argument that has rows: most likely an oversight."""
    said = "Not split: batch_axes says of no argument where its rows are."
    assert said in df.dynaflow(layer, scheduler=df.strategies.NanoFlow()).explain(W, X)
    assert said not in df.dynaflow(layer, scheduler=df.strategies.Sequential()).explain(W, X)
    assert said not in flow_of().explain(W, X)


@pytest.mark.parametrize("axes", [0, (0,), [0]], ids=str)
def test_axes_of_positional_arguments_where_all_are_given_by_keyword(axes):
    with pytest.raises(df.SplitError, match="batch_axes"):
        flow_of(batch_axes=axes).plan(w=W, x=X)


class Stateful(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(4))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return x * self.scale[...]


def test_state_that_would_be_lost():
    """What a function changes in place of returning it would not come out of the trace."""
    flow = df.dynaflow(lambda model, x: model(x), scheduler=Split(4, 4), batch_axes=(None, 0))
    with pytest.raises(df.DynaFlowError, match=r"the function changes model\.calls.*, a part of its argument"):
        flow(Stateful(), X)

    def returned(definition, state, x):
        model = nnx.merge(definition, state)
        return model(x), nnx.state(model, nnx.Variable)

    definition, state = nnx.split(Stateful())
    flow = df.dynaflow(returned, scheduler=df.strategies.Sequential())
    y, new = flow(definition, state, X)
    same(y, X)
    assert new["calls"][...] == 1


def test_containers_of_the_function_are_its_own():
    """As under ``jax.jit``, a dictionary is made anew for the function, which may take it apart."""

    def fun(batch):
        x = batch.pop("x")
        batch["y"] = x
        return jnp.sin(x)

    given = {"x": X}
    same(of_rows(fun)(given), jnp.sin(X))
    assert given.keys() == {"x"}


def test_an_optimizer_that_uses_the_gradient_of_the_batch():
    """Each micro-batch would take a step of its own: the message says what to schedule instead."""

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean(layer(w, x) ** 2))(w)
        return w - 0.1 * gradient / jnp.sqrt(jnp.sum(gradient**2))

    with pytest.raises(df.BatchMixingError) as caught:
        df.dynaflow(step, scheduler=Split(4, 4), batch_axes=(None, 0), out_axes="mean")(W, X)
    assert "apply the optimizer to its result, outside" in str(caught.value)
    with pytest.raises(df.BatchMixingError) as caught:
        of_rows(lambda x: x - x.mean(0))(X)
    assert "apply the optimizer" not in str(caught.value)


def test_wrong_functions():
    with pytest.raises(df.DynaFlowError, match="scheduled by dynaflow already"):
        flow_of(flow_of())
    with pytest.raises(df.DynaFlowError, match="takes a function, not 3"):
        flow_of(3)
    with pytest.raises(df.DynaFlowError, match=re.escape("output['t'] of the function is 'text', not an array")):
        of_rows(lambda x: {"t": "text"}).plan(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        flow_of()(W, X, z=1)


def test_kinds_of_functions():
    same(of_rows(functools.partial(layer, W))(X), WANT)
    same(flow_of(jax.jit(layer), batch_axes={"x": 0})(W, X), WANT)
    same(of_rows(jnp.sin)(X), jnp.sin(X))
    assert flow_of().__name__ == "layer"
    assert repr(flow_of()) == "dynaflow(layer, scheduler=Split())"


class Model:
    def __init__(self, w):
        self.w = w

    @functools.partial(df.dynaflow, scheduler=Split(3, 5), batch_axes={"x": 0})
    def apply(self, x):
        return layer(self.w, x)


def test_methods():
    one, two = Model(W), Model(2 * W)
    same(one.apply(X), WANT)
    same(jax.jit(two.apply)(X), layer(2 * W, X))
    same(one.apply(x=X), WANT)
    assert one.apply.plan(X) == Model.apply.plan(two, ARRAY)
    assert [op.name for op in one.apply.graph(X)] == ["a", "b"]
    assert "3 + 5 rows" in one.apply.explain(ARRAY)


# -- outputs -------------------------------------------------------------------------------------------------------


def masked_mean(x, mask):
    return (x * mask[:, None]).sum() / mask.sum()


def test_outputs_found_by_themselves():
    def fun(w, x):
        y = x @ w
        return {"rows": y, "twice": (y, y), "turned": y.T, "input": x, "weights": w, "ones": jnp.ones(8), "number": 3.0}

    same(flow_of(fun)(W, X), jax.jit(fun)(W, X))


def test_outputs_joined_as_told():
    def fun(x):
        return {
            "rows": x + 1,
            "of": {"sum": x.sum(), "per column": x.sum(0)},
            "mean": x.mean(),
            "count": jnp.sum(x > 0),
        }

    axes = {"rows": None, "of": "sum", "mean": "mean", "count": "sum"}
    same(of_rows(fun, out_axes=axes)(X), fun(X))
    same(of_rows(lambda x: (x.T, x), out_axes=[-1, 0])(X), (X.T, X))
    largest = of_rows(lambda x: x.max(), out_axes=lambda parts: jnp.stack(parts).max(), allow_batch_mixing="*")
    same(largest(X), X.max())
    # Their own shape, and none that the function's output had.
    sums_of_each = of_rows(total, 2, 6, out_axes=lambda parts: jnp.stack(parts), allow_batch_mixing="*")
    same(jax.jit(sums_of_each)(X), jnp.stack([X[:2].sum(), X[2:].sum()]))


@pytest.mark.parametrize(
    ("fun", "axes", "error", "message"),
    [
        (total, None, df.SplitError, "output is a sum over the batch: .* as it is a sum over the rows: out_axes='sum'"),
        (jnp.mean, None, df.SplitError, "as it is a mean over the rows: out_axes='mean'"),
        (jnp.mean, "sum", df.BatchMixingError, "as it is a mean over the rows: out_axes='mean'"),
        (total, "mean", df.BatchMixingError, "as it is a sum over the rows: out_axes='sum'"),
        (total, 0, df.SplitError, "out_axes=0 for output, .*: it has no rows to join there"),
        (jnp.sin, "mean", df.BatchMixingError, "has rows of the batch on axis 0: they would be added up"),
        (jnp.sin, 1, df.SplitError, "out_axes=1 for output, whose rows are on axis 0"),
        (jnp.sin, -4, df.SplitError, "out_axes=-4 for output, whose rows are on axis 0"),
        (jnp.sin, "average", df.SplitError, "gives output 'average'; it takes an axis, 'mean', 'sum' or a function"),
        (jnp.sin, False, df.SplitError, "gives output False; it takes an axis"),
        (jnp.sin, 0.5, df.SplitError, "gives output 0.5"),
        (jnp.sin, (0, 0), df.SplitError, "out_axes does not fit the outputs"),
        (lambda x: {"a": (x, x.sum())}, None, df.SplitError, r"output\['a'\]\[1\] is a sum"),
        (
            lambda x: (x, x, x.sum()),
            (0, "sum"),
            df.SplitError,
            "does not fit the outputs(.|\n)*length 2(.|\n)*length 3",
        ),
    ],
)
def test_wrong_out_axes(fun, axes, error, message):
    with pytest.raises(error, match=message):
        of_rows(fun, out_axes=axes).plan(X)


def test_rows_that_each_micro_batch_scales_are_refused():
    """Where a micro-batch is what the function makes of it, because a function of the parts is asked for."""
    fun = lambda x: (jax.grad(lambda x: x.mean())(x), x.sum())  # noqa: E731
    with pytest.raises(df.BatchMixingError, match="scales its rows by its own size"):
        of_rows(fun, out_axes=(None, sum)).plan(X)


def test_out_axes_are_checked_where_nothing_is_split_too():
    with pytest.raises(df.SplitError, match="gives output 'average'"):
        of_rows(total, 8, out_axes="average").plan(X)


def test_wrong_functions_of_parts():
    with pytest.raises(TypeError) as caught:
        of_rows(total, out_axes=lambda a, b: a)(X)
    assert "The function that out_axes gives output failed; it gets the list of 2 parts." in caught.value.__notes__
    with pytest.raises(df.SplitError, match="out_axes gives output returned None, not an array"):
        of_rows(total, out_axes=lambda parts: None)(X)


def test_means_of_whole_numbers_are_refused_not_rounded():
    with pytest.raises(df.SplitError, match="output, which holds int32: their mean would be rounded"):
        of_rows(lambda x: x.max(), out_axes="mean", allow_batch_mixing="*").plan(jnp.arange(8))


def test_means_of_small_floats_are_added_up_in_float32():
    x = jnp.linspace(0, 1, 64).reshape(8, 8).astype(jnp.bfloat16)
    got = of_rows(jnp.mean, 1, 2, 1, 1, 3, out_axes="mean")(x)
    assert got.dtype == jnp.bfloat16
    assert got == x.mean()


MASKS = {
    "uneven": [1, 0, 0, 1, 1, 0, 1, 1],
    "none in the first": [0, 0, 0, 1, 0, 0, 0, 1],
    "fractions": [0.1, 2, 0.7, 0, 1, 1, 3, 1],
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bool_])
def test_masked_means(mask, dtype):
    """Weighted by what each micro-batch's mask sums to; an empty micro-batch's 0 / 0 counts for nothing."""
    mask = jnp.asarray(MASKS[mask]).astype(dtype)
    options = {"out_axes": "mean", "weights": lambda x, mask: mask.sum()}
    same(of_rows(masked_mean, **options)(X, mask), masked_mean(X, mask))
    inside = jax.value_and_grad(lambda w, x, mask: masked_mean(layer(w, x), mask))
    flow = flow_of(inside, **options | {"weights": lambda w, x, mask: mask.sum()}, batch_axes=(None, 0, 0))
    same(flow(W, X, mask), inside(W, X, mask))


def test_masked_means_without_any_row():
    options = {"out_axes": "mean", "weights": lambda x, mask: mask.sum(), "allow_batch_mixing": "max"}
    assert jnp.isnan(of_rows(masked_mean, **options)(X, jnp.zeros(8)))
    guarded = lambda x, mask: (x * mask[:, None]).sum() / jnp.maximum(mask.sum(), 1)  # noqa: E731
    assert of_rows(guarded, **options)(X, jnp.zeros(8)) == 0
    with pytest.raises(df.BatchMixingError, match=r"allow_batch_mixing=(.|\n)*out_axes='mean' and weights= a function"):
        of_rows(guarded).plan(X, jnp.zeros(8))


def test_masked_means_need_weights():
    with pytest.raises(df.BatchMixingError, match="out_axes='mean' and weights= a function of them"):
        of_rows(masked_mean, out_axes="mean").plan(X, X[:, 0])


@pytest.mark.parametrize("weights", [lambda x: x, lambda x: None, lambda x: "1", lambda x: jnp.ones((1,))])
def test_wrong_weights(weights):
    with pytest.raises(df.SplitError, match=re.escape("one number for each micro-batch, such as mask.sum()")):
        of_rows(jnp.mean, out_axes="mean", weights=weights)(X)


# -- when it is traced ---------------------------------------------------------------------------------------------


class Counted:
    """A model that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, w, x):
        self.traces += 1
        return layer(w, x)


def test_repeated_calls_do_not_trace_again():
    fun = Counted()
    flow = df.dynaflow(fun, scheduler=Split(4, 4), batch_axes=(None, 0))
    flow(W, X)
    before = fun.traces
    assert before == 1  # the batch; the micro-batch's program is derived
    for _ in range(3):
        flow(W + 1, X - 1)
        flow.plan(W, X)
        jax.jit(flow)(W, X)
        jax.grad(lambda w: flow(w, X).sum())(W)
    assert fun.traces == before
    flow(W, X.astype(jnp.bfloat16))
    assert fun.traces == before + 1


def test_the_cache_is_bounded():
    flow = flow_of(lambda x, n: x + n, batch_axes=(0, None))
    for n in range(80):
        flow.plan(X, n)
    assert len(flow._cache) <= 64


def test_arrays_and_tracers_that_the_function_closes_over():
    def outer(w, x):
        return flow_of(lambda x: layer(w, x), batch_axes=0)(x)

    same(jax.jit(outer)(W, X), WANT)
    same(jax.grad(lambda w: outer(w, X).sum())(W), jax.grad(lambda w: layer(w, X).sum())(W))
    box = [W]
    flow = of_rows(lambda x: layer(box[0], x))

    def through(w, x):
        box[0] = w
        return flow(x)

    for scale in (1.0, 2.0):  # a fresh tracer every time, under one and the same scheduled function
        same(jax.jit(lambda w, x: through(w, x) * 1)(W * scale, X), layer(W * scale, X))
        same(jax.vmap(through, (0, None))(jnp.stack([W, W * scale]), X)[1], layer(W * scale, X))


def test_nothing_leaks():
    with jax.checking_leaks():
        flow = flow_of(loss, out_axes="mean")
        same(jax.jit(jax.grad(flow))(W, X), jax.grad(loss)(W, X))
        same(
            jax.jit(jax.grad(lambda w, x: of_rows(lambda x: loss(w, x), out_axes="mean")(x)))(W, X),
            jax.grad(loss)(W, X),
        )
        same(jax.jit(jax.vmap(flow, (0, None)))(jnp.stack([W, W]), X)[0], loss(W, X))


def test_threads():
    flow = flow_of()
    errors, start = [], threading.Barrier(8)

    def work(i):
        try:
            start.wait()
            own = flow_of(lambda w, x: layer(w, x) + i)
            for rows in (8, 8):
                same(flow(W, X[:rows]), WANT)
                same(own(W, X[:rows]), WANT + i)
                same(jax.jit(lambda w, x: own(w, x) * 2)(W, X), (WANT + i) * 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_64_bit_mode_and_back():
    flow, mean = flow_of(), flow_of(loss, out_axes="mean")
    w, x = np.asarray(W, np.float64), np.asarray(X, np.float64)
    assert flow(w, x).dtype == jnp.float32
    with jax.enable_x64(True):
        assert flow(w, x).dtype == jnp.float64
        same(mean(w, x), loss(w, x), 1e-12)
        same(jax.grad(mean)(w, x), jax.grad(loss)(w, x), 1e-12)
    same(flow(w, x), WANT)


def test_without_jit():
    with jax.disable_jit():
        same(flow_of()(W, X), WANT)
        same(jax.grad(flow_of(loss, out_axes="mean"))(W, X), jax.grad(loss)(W, X))
        same(flow_of(looped)(W, X), looped(W, X))


# -- composition ---------------------------------------------------------------------------------------------------

MEAN = flow_of(loss, out_axes="mean")
ROWS = flow_of()
STACKED = jnp.stack([W, 2 * W])


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, m: jax.jit(f)(W, X),
        lambda f, m: jax.jit(jax.jit(lambda w, x: f(w, x) + 1))(W, X),
        lambda f, m: jax.grad(m)(W, X),
        lambda f, m: jax.value_and_grad(m, (0, 1))(W, X),
        lambda f, m: jax.vmap(f, (0, None))(STACKED, X),
        lambda f, m: jax.vmap(f, (None, 1), 1)(W, jnp.stack([X, X * 2], 1)),
        lambda f, m: jax.vmap(jax.grad(m), (0, None))(STACKED, X),
        lambda f, m: jax.grad(jax.checkpoint(m))(W, X),
        lambda f, m: jax.lax.scan(lambda c, _: (f(W, c), c.sum()), X, None, 3),
        lambda f, m: jax.grad(lambda w: jax.lax.scan(lambda c, _: (f(w, c), None), X, None, 3)[0].sum())(W),
        lambda f, m: jax.lax.cond(True, lambda x: f(W, x), lambda x: x, X),
        lambda f, m: jax.lax.fori_loop(0, 2, lambda _, x: f(W, x), X),
        lambda f, m: jax.jvp(lambda w: f(w, X), (W,), (W + 1,)),
        lambda f, m: jax.linearize(lambda w: f(w, X), W)[1](W),
        lambda f, m: jax.jacrev(f)(W, X),
        lambda f, m: jax.jacfwd(f)(W, X),
        lambda f, m: jax.hessian(lambda s: m(s * W, X))(1.0),
    ],
)
def test_transforms_of_a_scheduled_function(transform):
    same(transform(ROWS, MEAN), transform(layer, loss), 1e-4)


@jax.custom_vjp
def custom(w, x):
    return layer(w, x)


custom.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda saved, g: (3 * saved[0], 5 * g))


@pytest.mark.parametrize(
    "fun",
    [
        jax.value_and_grad(loss),
        jax.value_and_grad(jax.checkpoint(loss)),
        jax.value_and_grad(jax.jit(loss)),
        jax.value_and_grad(lambda w, x: jax.vmap(layer, (None, 0))(w, x[:, None]).mean()),
        jax.value_and_grad(lambda w, x: looped(w, x)[0].mean()),
        jax.value_and_grad(lambda w, x: jax.lax.cond(w[0, 0] > 9, layer, lambda w, x: x @ w, w, x).mean()),
    ],
)
@pytest.mark.filterwarnings("ignore::dynaflow_jax.RuleWarning")
def test_training_steps_inside(fun):
    same(flow_of(fun, out_axes="mean")(W, X), fun(W, X))


@pytest.mark.parametrize("sizes", [(8,), (3, 5)], ids=str)
def test_derivatives_of_the_users_own(sizes):
    """``custom_vjp`` counts, although it was opened to schedule what is inside."""
    flow = flow_of(custom, *sizes)
    same(flow(W, X), WANT)
    got, want = (jax.grad(lambda w, x, f=f: f(w, x).sum(), (0, 1))(W, X) for f in (flow, custom))
    same(got, want)


def test_a_scheduled_function_inside_another_is_scheduled_by_that():
    inner = df.dynaflow(layer, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0))
    flow = flow_of(lambda w, x: jax.jit(inner)(w, x) + 1)
    inner(W, X)
    jax.jit(inner)(W, X)
    same(flow(W, X), WANT + 1)
    assert [op.name for op in flow.graph(W, X)] == ["a", "b", "add"]
    mean = df.dynaflow(loss, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), out_axes="mean")
    same(jax.grad(flow_of(lambda w, x: mean(w, x), out_axes="mean"))(W, X), jax.grad(loss)(W, X))


# -- mixing across the batch ---------------------------------------------------------------------------------------


def centred(x):
    with jax.named_scope("norm"), df.mark("stats"):
        return x - x.max(0)


def test_mixing_is_refused_by_operator_and_line():
    with pytest.raises(df.BatchMixingError) as caught:
        of_rows(centred).plan(X)
    message = str(caught.value)
    assert "batch of 8 rows into micro-batches of 3" in message
    assert "reduce_max in norm/stats reduces over the batch with max" in message
    assert "test_transform.py:" in message
    assert "allow_batch_mixing=('stats',)" in message


@pytest.mark.parametrize("name", ["stats", "norm", "reduce_max", "*"])
def test_mixing_is_allowed_by_name(name):
    want = jnp.concatenate([centred(X[:3]), centred(X[3:])])
    same(of_rows(centred, allow_batch_mixing=name)(X), want)
    same(of_rows(centred, allow_batch_mixing=["other", name])(X), want)


@pytest.mark.parametrize("name", ["stat", "norm/other", "sub", "max", ""])
def test_mixing_is_not_allowed_by_another_name(name):
    with pytest.raises(df.BatchMixingError, match="stats"):
        of_rows(centred, allow_batch_mixing=name).plan(X)


@pytest.mark.parametrize(
    "fun", [lambda x: jnp.sort(x, 0), lambda x: jnp.cumsum(x, 0), lambda x: x[::-1], lambda x: x @ x.T, jnp.argmax]
)
def test_more_that_mixes(fun):
    with pytest.raises(df.BatchMixingError, match=r"test_transform.py|argmax"):
        of_rows(fun, out_axes=lambda parts: parts[0]).plan(X)


# -- random numbers ------------------------------------------------------------------------------------------------


def noisy(key, x):
    with df.mark("dropout"):
        return x * jax.random.bernoulli(key, 0.5, x.shape)


def test_dropout_is_that_of_the_whole_batch():
    flow = flow_of(noisy)
    same(flow(jax.random.key(3), X), noisy(jax.random.key(3), X), 0)
    same(flow(jax.random.PRNGKey(3), X), noisy(jax.random.PRNGKey(3), X), 0)


def test_dropout_per_micro_batch():
    x = jnp.ones((64, 64))
    flow = df.dynaflow(noisy, scheduler=Split(32, 32), batch_axes=(None, 0), rng="per_micro_batch")
    out = flow(jax.random.key(0), x)
    assert 0.45 < out.mean() < 0.55
    assert 0.4 < (out[:32] == out[32:]).mean() < 0.6  # not the same bits, and no other relation
    same(flow(jax.random.key(0), x), out, 0)
    assert 0.4 < (flow(jax.random.key(1), x) == out).mean() < 0.6


# -- what a call costs ---------------------------------------------------------------------------------------------


def test_a_compiled_step_never_enters_python():
    calls = []
    flow = df.dynaflow(layer, scheduler=Do(lambda ctx: calls.append(ctx) or run_rest(ctx), 3, 5), batch_axes=(None, 0))
    step = jax.jit(flow)
    for _ in range(3):
        step(W, X)
    assert len(calls) == 1
