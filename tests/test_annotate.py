"""Marks and rules, as users write them."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import (
    ROWS,
    WIDTH,
    Layer,
    NnxBlock,
    NnxStack,
    Plain,
    Scanned,
    Stack,
    functional,
    initialised,
    leaves,
    names,
    normal,
    same,
    scheduled,
)

import dynaflow_jax as df
from dynaflow_jax.annotate import Label

KEY = jax.random.key(7)
UP = df.SplitModule("up")
DOWN = df.SplitModule("down")


def linen(model, *, rules=(), **options):
    return scheduled(model.apply, initialised(model), ROWS, axes=(None, 0), rules=rules, **options)


def keys(graph):
    return [op.key for op in leaves(graph)]


# -- marks ---------------------------------------------------------------------------------------------------------


def test_mark_as_context():
    def f(x):
        with df.mark("double", tags={"cheap"}):
            x = x * 2
        return jnp.sin(x)

    graph = scheduled(f, ROWS, axes=0)
    assert names(graph) == ["double", "sin"]
    assert graph["double"].tags == {"cheap"}


def test_mark_as_decorator_keeps_what_the_function_says_of_itself():
    @df.mark("double")
    def double(x, *, times=1):
        """Doubles."""
        return x * 2**times

    assert double.__name__ == "double"
    assert double.__doc__ == "Doubles."
    graph = scheduled(lambda x: double(double(x, times=2)), ROWS, axes=0)
    assert keys(graph) == ["double", "double:2"]


def test_innermost_mark_wins():
    def f(x):
        with df.mark("outer"):
            x = x + 1
            with df.mark("inner"):
                x = jnp.sin(x)
            return x * 2

    assert names(scheduled(f, ROWS, axes=0)) == ["outer", "inner", "outer"]


def test_mark_recursive_and_repeated():
    again = df.mark("again")

    @df.mark("down")
    def down(x, n):
        return x if n == 0 else jnp.sin(down(x * 2, n - 1))

    def f(x):
        with again, again:
            x = x + 1
        for _ in range(2):
            with again:
                x = jnp.cos(x)
        return down(x, 2)

    graph = scheduled(f, ROWS, axes=0)
    assert names(graph) == ["again"] * 3 + ["down"] * 3  # the second call of "down" is split by nothing
    assert len(set(keys(graph))) == 6


def test_mark_is_left_after_an_exception():
    again = df.mark("again")

    def f(x):
        for wrong in (True, False):
            try:
                with again:
                    x = x * 2
                    assert not wrong
            except AssertionError:
                x = x + 1
        return jnp.sin(x)

    assert names(scheduled(f, ROWS, axes=0)) == ["again", "add", "again", "sin"]


@pytest.mark.parametrize(
    "name",
    [
        "é/ü 漢字",
        "a/b",
        "a#1{x}",
        "df:a{b}#3",
        " spaces ",
        "x" * 500,
        "%41",
        "jvp(x)",
        "transpose(jvp(x))",
        "two\nlines",
        'a "quoted" \\ name',
    ],
)
def test_any_name_will_do(name):
    def f(x):
        with df.mark(name, tags={"t,1", "{}", name}):
            return x * 2 + 1

    for fun in (f, jax.grad(lambda x: jnp.sin(f(x)).sum())):
        graph = scheduled(fun, ROWS, axes=0)
        assert graph[0].name == name
        assert graph[0].tags == {"t,1", "{}", name}
    same(jax.jit(f)(ROWS), ROWS * 2 + 1)  # outside dynaflow too


def test_labels_round_trip():
    label = Label("a{b}#c/d", frozenset({"x,y", "z"}), 3, 1)
    assert Label.decode(label.encode()) == label
    assert Label.decode("a scope of the user's") is None


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_bad_name(name):
    with pytest.raises(df.RuleError, match=r"df\.mark needs a name"):
        df.mark(name)


@pytest.mark.parametrize("tags", [[""], [1], {None}])
def test_bad_tags(tags):
    with pytest.raises(df.RuleError, match="tags are non-empty strings"):
        df.mark("x", tags=tags)
    with pytest.raises(df.RuleError, match="tags are non-empty strings"):
        df.SplitFunc("psum", tags=tags)


def test_one_tag_may_be_a_string():
    assert df.mark("x", tags="network").tags == {"network"}
    assert df.SplitModule("x", tags="network").tags == {"network"}


def test_mark_refuses_classes():
    with pytest.raises(df.RuleError, match=r"rules=\[df\.SplitModule\(TheClass\)\]"):

        @df.mark("layer")
        class Wrong(nn.Module):
            pass


def test_marks_outside_dynaflow_are_scopes():
    marked = jax.make_jaxpr(Stack().apply)(initialised(Stack()), ROWS)
    plain = jax.make_jaxpr(Stack(Plain).apply)(initialised(Stack()), ROWS)
    assert str(marked) == str(plain)
    assert "df:" not in jax.jit(Stack().apply).lower(initialised(Stack()), ROWS).as_text(debug_info=True)
    same(Stack().apply(initialised(Stack()), ROWS), Stack(Plain).apply(initialised(Stack()), ROWS))


def test_a_jitted_function_traced_before_is_traced_again_with_labels():
    @jax.jit
    def inner(x):
        with df.mark("a"):
            y = jnp.sin(x)
        return y * 2

    inner(ROWS), inner(ROWS[:3])
    graph = scheduled(lambda x: inner(inner(x)), ROWS, axes=0)
    assert names(graph) == ["a", "mul", "a", "mul"]
    inner(ROWS)
    assert "df:" not in inner.lower(ROWS).as_text(debug_info=True)


def test_threads_label_for_themselves():
    """One thread traces for dynaflow, with rules, while another one runs the same modules."""
    model, variables = Stack(Plain), initialised(Stack(Plain))
    stop, failures = threading.Event(), []

    def elsewhere():
        while not stop.is_set():
            text = str(jax.make_jaxpr(model.apply)(variables, ROWS).eqns[0].source_info.name_stack)
            if "df:" in text:
                failures.append(text)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        graphs = [linen(model, rules=[UP]) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert all(keys(graph) == keys(graphs[0]) for graph in graphs)


def test_several_threads_trace_at_once():
    results = {}

    def one(i):
        fun, state = functional(NnxStack(nnx.Rngs(i)))
        results[i] = names(scheduled(fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule(nnx.Linear)]))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert all(found.count("up") == 2 and found.count("head") == 1 for found in results.values())
    assert not hasattr(nnx.Linear.__call__, "__wrapped__")


# -- functions with derivatives of their own -----------------------------------------------------------------------


def sevenfold():
    """A function whose derivative is obviously not the true one, with a mark above it."""

    @df.mark("seven")
    @jax.custom_vjp
    def h(x):
        return jnp.sin(x)

    h.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 7,))
    return h


def sevenfold_inside():
    @jax.custom_vjp
    @df.mark("seven")
    def h(x):
        return jnp.sin(x)

    def backward(x, g):
        with df.mark("seven_backward"):
            return (g * 7,)

    h.defvjp(lambda x: (h(x), x), backward)
    return h


def sevenfold_jvp():
    @df.mark("seven")
    @jax.custom_jvp
    def h(x):
        return jnp.sin(x)

    h.defjvp(lambda x, t: (h(*x), t[0] * 7))
    return h


@pytest.mark.parametrize("make", [sevenfold, sevenfold_inside, sevenfold_jvp])
def test_custom_derivatives_keep_their_rule(make):
    h = make()

    def loss(x):
        return (h(x * 2) ** 2).sum()

    assert "seven" in names(scheduled(lambda x: h(x * 2), ROWS, axes=0))
    graph = scheduled(jax.value_and_grad(loss), ROWS, axes=0, out_axes=("sum", None))
    assert "seven" in names(graph)
    # Differentiated from outside: the mark had to be opened, the rule must not be lost.
    flow = df.dynaflow(loss, scheduler=df.strategies.NanoFlow(2), batch_axes=0, out_axes="sum")
    same(jax.grad(flow)(ROWS), jax.grad(loss)(ROWS))
    same(jax.grad(flow)(ROWS), 2 * 7 * 2 * jnp.sin(ROWS * 2))


def test_mark_around_custom_vjp_labels_its_backward_pass():
    h = sevenfold()
    graph = scheduled(jax.grad(lambda x: (h(x) ** 2).sum()), ROWS, axes=0)
    assert ("seven", "backward") in {(op.name, op.phase) for op in graph}


# -- transformations -----------------------------------------------------------------------------------------------


def marked_layer(w, x):
    with df.mark("layer"):
        return jnp.tanh(x @ w)


@jax.remat
def marked_remat(w, x):
    with df.mark("layer"):
        return jnp.tanh(x @ w)


@jax.remat
def marked_remat_twice(w, x):
    return marked_remat(w, marked_remat(w, x) + 1)


REMATS = {
    "in a row": (lambda w, x: marked_remat(w, marked_remat(w, x) + 1), 2),
    "side by side": (lambda w, x: marked_remat(w, x) + marked_remat(w, 2 * x), 2),
    "nested": (lambda w, x: marked_remat_twice(w, 2 * marked_remat_twice(w, x)), 4),
    "mapped": (jax.vmap(lambda w, x: marked_remat(w, marked_remat(w, x) + 1), in_axes=(None, 0)), 2),
    "jitted": (lambda w, x: jax.jit(marked_remat)(w, marked_remat(w, x)), 2),
}


@pytest.mark.parametrize("kind", REMATS)
def test_calls_of_one_function_under_remat_are_operators_of_their_own(kind):
    """JAX traces such a function once, and what it computes forward is no call any more when it is differentiated."""
    fun, calls = REMATS[kind]
    w = normal(WIDTH, WIDTH) / WIDTH

    def loss(w, x):
        return (fun(w, x) ** 2).mean()

    graph = scheduled(jax.value_and_grad(loss), w, ROWS, axes=(None, 0), out_axes="mean")
    forward = ["layer", *(f"layer:{i}" for i in range(2, calls + 1))]
    assert [op.key for op in graph if op.name == "layer" and op.phase == "forward"] == forward
    if kind != "jitted":  # a call of a jitted function is differentiated as a call, and is another one backward
        backward = [op.key for op in graph if op.name == "layer" and op.phase == "backward"]
        assert set(backward) == {f"{key}.backward" for key in forward}
    assert [op.name for op in scheduled(fun, w, ROWS, axes=(None, 0))].count("layer") == calls


def test_labels_survive_grad_and_remat():
    w = normal(WIDTH, WIDTH)

    def loss(layer):
        return lambda w, x: (layer(w, x + layer(w, x)) ** 2).sum()

    for layer, phases in (
        (marked_layer, ["forward", "backward"]),
        (jax.remat(marked_layer), ["forward", "recompute", "backward"]),
    ):
        graph = scheduled(jax.value_and_grad(loss(layer)), w, ROWS, axes=(None, 0), out_axes="sum")
        found = [op.phase for op in graph if op.name == "layer"]
        assert {phase: found.count(phase) for phase in dict.fromkeys(found)} == dict.fromkeys(phases, 2)
        flow = df.dynaflow(loss(layer), scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), out_axes="sum")
        same(jax.grad(flow)(w, ROWS), jax.grad(loss(layer))(w, ROWS))


def test_forward_and_backward_of_one_entry_share_their_number():
    w = normal(WIDTH, WIDTH)
    fun = jax.value_and_grad(lambda w, x: marked_layer(w, marked_layer(w, x)).sum())
    graph = scheduled(fun, w, ROWS, axes=(None, 0), out_axes="sum")
    found = [key for key in keys(graph) if key.startswith("layer")]
    assert found == ["layer", "layer:2", "layer:2.backward", "layer.backward"]


def test_labels_survive_vjp_and_jvp():
    w = normal(WIDTH, WIDTH)

    def vjp(w, x):
        y, back = jax.vjp(lambda x: marked_layer(w, x), x)
        return y, back(y)

    graph = scheduled(vjp, w, ROWS, axes=(None, 0))
    assert [(op.name, op.phase) for op in graph] == [("layer", "forward"), ("layer", "backward")]
    graph = scheduled(lambda w, x: jax.jvp(lambda x: marked_layer(w, x), (x,), (x,)), w, ROWS, axes=(None, 0))
    assert names(graph) == ["layer"]


def test_labels_survive_vmap():
    w = normal(WIDTH, WIDTH)
    graph = scheduled(jax.vmap(marked_layer, (None, 0)), w, ROWS, axes=(None, 0))
    assert names(graph) == ["layer"]
    experts = jax.vmap(marked_layer, (0, None), 1)
    graph = scheduled(lambda w, x: experts(w, x).sum(1), normal(3, WIDTH, WIDTH), ROWS, axes=(None, 0))
    assert names(graph)[0] == "layer"


def test_labels_survive_scan():
    w = normal(3, WIDTH, WIDTH)

    def f(w, x):
        return jax.lax.scan(lambda x, w: (marked_layer(w, x) + x, x.mean(1)), x, w)

    graph = scheduled(f, w, ROWS, axes=(None, 0))
    assert names(graph)[:2] == ["scan", "layer"]

    def loss(w, x):
        return (f(w, x)[0] ** 2).sum()

    graph = scheduled(jax.value_and_grad(loss), w, ROWS, axes=(None, 0), out_axes="sum")
    assert ("layer", "backward") in [(op.name, op.phase) for op in leaves(graph)]


def test_labels_survive_shard_map():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def body(x, w):
        with df.mark("product"):
            y = x @ w
        y = jax.lax.psum(y, "d")
        with df.mark("activation"):
            return jnp.tanh(y)

    fun = jax.shard_map(body, mesh=mesh, in_specs=(P(None, "d"), P("d", None)), out_specs=P())
    w = normal(WIDTH, WIDTH)
    graph = scheduled(fun, ROWS, w, axes=(0, None))
    assert [op.name for op in graph[0].body] == ["product", graph[0].body[1].name, "activation"]
    assert graph[0].body[1].tags == {"network"}
    assert graph[0].body[1].bound == "network"
    graph = scheduled(jax.value_and_grad(lambda x, w: fun(x, w).sum()), ROWS, w, axes=(0, None), out_axes=("sum", 0))
    assert {("product", "backward"), ("activation", "backward")} <= {(op.name, op.phase) for op in leaves(graph)}


def test_keys_are_unique_and_the_same_for_every_batch_size():
    def f(variables, x):
        return jax.grad(lambda v: (Stack(nn.remat(Layer)).apply(v, x) ** 2).sum())(variables)

    flow = df.dynaflow(f, scheduler=df.strategies.Sequential(), rules=[UP, DOWN])
    found = [keys(flow.graph(initialised(Stack()), normal(n, WIDTH))) for n in (1, 4, 6)]
    assert len(set(found[0])) == len(found[0])
    assert found[0] == found[1] == found[2]


# -- Flax Linen ----------------------------------------------------------------------------------------------------


class Above(nn.Module):
    @df.mark("above")
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)


class Below(nn.Module):
    @nn.compact
    @df.mark("below")
    def __call__(self, x):
        return nn.Dense(WIDTH)(x)


class SetUp(nn.Module):
    def setup(self):
        self.dense = nn.Dense(WIDTH)

    @df.mark("call")
    def __call__(self, x):
        return self.dense(x)

    @df.mark("other")
    def other(self, x):
        return nn.relu(self.dense(x))


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        last = SetUp()
        return last.other(last(Below()(Above()(x))))


def test_marks_on_linen_methods():
    assert names(linen(Mixed())) == ["above", "below", "call", "other"]


@pytest.mark.parametrize("lift", [nn.remat, nn.jit])
def test_lifted_linen_modules(lift):
    model = Stack(lift(Layer))
    assert names(linen(model)).count("wide") == 2
    # nn.jit traces a class once for all its instances, which then go by the first one's name.
    expected = ["layers_0", "layers_0" if lift is nn.jit else "layers_1"]
    assert names(linen(Stack(lift(Plain)), rules=[df.SplitModule(r"layers_\d+")])) == expected
    assert names(linen(Stack(lift(Plain)), rules=[df.SplitModule(Plain)])) == expected
    assert names(linen(Stack(lift(Plain)), rules=[df.SplitModule("layers_0/up")])).count("up") == expected.count(
        "layers_0"
    )

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).mean()

    graph = scheduled(jax.value_and_grad(loss), initialised(model), ROWS, axes=(None, 0), out_axes="mean")
    assert ("wide", "backward") in {(op.name, op.phase) for op in graph}


def test_linen_scan_over_layers():
    graph = linen(Scanned())
    assert graph[0].body is not None
    assert "wide" in names(graph)
    graph = linen(Scanned(layer=Plain), rules=[UP, df.SplitModule("layer/down")])
    assert [name for name in names(graph) if name in ("up", "down")] == ["up", "down"]
    model = Scanned(layer=nn.remat(Layer, prevent_cse=False))

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).mean()

    graph = scheduled(jax.value_and_grad(loss), initialised(model), ROWS, axes=(None, 0), out_axes="mean")
    assert {"forward", "recompute", "backward"} <= {op.phase for op in leaves(graph) if op.name == "wide"}


def test_linen_vmap():
    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            lifted = nn.vmap(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, out_axes=1, axis_size=3
            )
            return lifted(name="experts")(x).mean(1)

    assert names(linen(Experts()))[0] == "wide"
    assert "down" in names(linen(Experts(), rules=[df.SplitModule("experts/down")]))


def test_linen_sequential_and_shared_submodules():
    model = nn.Sequential([nn.Dense(WIDTH), nn.tanh, nn.Dense(WIDTH)])
    assert names(linen(model, rules=[df.SplitModule(nn.Dense)])) == ["layers_0", "tanh", "layers_2"]

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(WIDTH, name="dense")
            return dense(nn.tanh(dense(x)))

    graph = linen(Twice(), rules=[df.SplitModule("dense")])
    assert names(graph) == ["dense", "tanh", "dense"]
    assert len(set(keys(graph))) == 3


def test_linen_custom_vjp():
    class Clipped(nn.Module):
        @nn.compact
        def __call__(self, x):
            def forward(module, x):
                with df.mark("inside"):
                    return module(x)

            def with_residuals(module, x):
                return nn.vjp(forward, module, x)

            def backward(vjp, g):
                parameters, x = vjp(g)
                return jax.tree.map(jnp.sign, parameters), x

            dense = nn.Dense(WIDTH)
            return nn.custom_vjp(forward, forward_fn=with_residuals, backward_fn=backward)(dense, x)

    model = Clipped()
    assert "inside" in names(linen(model))

    def loss(variables, x):
        return model.apply(variables, x).sum()

    flow = df.dynaflow(loss, scheduler=df.strategies.NanoFlow(2), batch_axes=(None, 0), out_axes="sum")
    same(jax.grad(flow)(initialised(model), ROWS), jax.grad(loss)(initialised(model), ROWS))


def test_linen_cache():
    class Remembering(nn.Module):
        @nn.compact
        def __call__(self, x):
            cache = self.variable("cache", "keys", lambda: jnp.zeros((x.shape[0], 4, WIDTH)))
            with df.mark("project"):
                key = nn.Dense(WIDTH, name="key")(x)
            cache.value = jnp.roll(cache.value, -1, axis=1).at[:, -1].set(key)
            with df.mark("attend"):
                return jnp.einsum("btd,bd->bt", cache.value, x)

    model = Remembering()
    variables = initialised(model)

    def step(params, cache, x):
        return model.apply({"params": params, "cache": cache}, x, mutable=["cache"])

    graph = scheduled(step, variables["params"], variables["cache"], ROWS, axes=(None, 0, 0))
    assert {"project", "attend"} <= set(names(graph))


def test_linen_batch_statistics_are_refused_unless_allowed():
    class Normalised(nn.Module):
        @nn.compact
        def __call__(self, x):
            with df.mark("dense"):
                x = nn.Dense(WIDTH)(x)
            return nn.BatchNorm(use_running_average=False, name="norm")(x)

    model = Normalised()
    variables = initialised(model)

    def step(variables, x):
        return model.apply(variables, x, mutable=["batch_stats"])

    two = df.strategies.NanoFlow(2)
    with pytest.raises(df.BatchMixingError, match="Normalised/norm"):
        df.dynaflow(step, scheduler=two, batch_axes=(None, 0))(variables, ROWS)
    flow = df.dynaflow(step, scheduler=two, batch_axes=(None, 0), allow_batch_mixing=["norm"], out_axes=(None, "mean"))
    y, _ = flow(variables, ROWS)
    halves = [step(variables, half)[0] for half in (ROWS[:3], ROWS[3:])]
    same(y, jnp.concatenate(halves))
    # Without splitting there is nothing to allow.
    scheduled(step, variables, ROWS, axes=None, scheduler=df.strategies.Sequential())


def test_linen_dropout_is_exact():
    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("first", "second"):
                with df.mark(name):
                    x = nn.Dropout(0.5, deterministic=False)(nn.Dense(WIDTH)(x))
            return x

    model = Dropping()
    variables = initialised(model)

    def f(variables, x, key):
        return model.apply(variables, x, rngs={"dropout": key})

    assert names(scheduled(f, variables, ROWS, KEY, axes=(None, 0, None))) == ["first", "second"]


# -- Flax NNX ------------------------------------------------------------------------------------------------------


class MarkedBlock(NnxBlock):
    @df.mark("block")
    def __call__(self, x):
        return super().__call__(x)


def test_marks_on_nnx_methods():
    fun, state = functional(NnxStack(nnx.Rngs(0), MarkedBlock))
    assert names(scheduled(fun, state, ROWS, axes=(None, 0)))[:2] == ["block", "block"]


def test_nnx_rules_by_class_and_path():
    fun, state = functional(NnxStack(nnx.Rngs(0)))
    graph = scheduled(fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule(NnxBlock)])
    assert [op.key for op in graph][:2] == ["blocks/0", "blocks/1"]
    graph = scheduled(
        fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule(r"blocks/\d+/up"), df.SplitModule("head")]
    )
    assert [name for name in names(graph) if name in ("up", "head")] == ["up", "up", "head"]
    graph = scheduled(fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule("1/down")])
    assert [op.key for op in graph if op.name == "down"] == ["blocks/1/down"]
    assert not hasattr(NnxBlock.__call__, "__wrapped__")


def test_nnx_inner_jit():
    graphdef, state = nnx.split(NnxStack(nnx.Rngs(0)))

    def f(state, x):
        return nnx.jit(lambda model, x: model(x))(nnx.merge(graphdef, state), x)

    graph = scheduled(f, state, ROWS, axes=(None, 0), rules=[df.SplitModule(nnx.Linear)])
    assert [name for name in names(graph) if name in ("up", "down", "head")] == ["up", "down", "up", "down", "head"]


def test_nnx_scan_over_layers():
    class Deep(nnx.Module):
        def __init__(self, rngs):
            make = nnx.split_rngs(splits=3)(nnx.vmap(NnxBlock, in_axes=(0,), out_axes=0))
            self.blocks = make(rngs)

        def __call__(self, x):
            def step(x, block):
                with df.mark("block"):
                    return block(x)

            return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)

    fun, state = functional(Deep(nnx.Rngs(0)))
    assert "block" in names(scheduled(fun, state, ROWS, axes=(None, 0)))
    graph = scheduled(fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule(nnx.Linear)])
    assert [name for name in names(graph) if name in ("up", "down")] == ["up", "down"]


class Residual(nnx.Module):
    """A layer with two modules of one class and one of another."""

    def __init__(self, rngs):
        self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.after = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.block = NnxBlock(rngs)

    def inside(self, x):
        return self.block(self.after(jnp.tanh(self.mix(self.before(x)))))

    def __call__(self, x):
        return x + self.inside(x)


class Transformed(Residual):
    __call__ = nnx.remat(Residual.__call__)


class TransformedInside(Residual):
    def __call__(self, x):
        return x + nnx.remat(type(self).inside)(self, x)


class Jitted(Residual):
    __call__ = nnx.jit(Residual.__call__)


@pytest.mark.parametrize("layer", [Residual, Transformed, TransformedInside, Jitted])
def test_nnx_copies_are_where_the_original_is(layer):
    """A transformation calls copies of the modules, and JAX may trace it once for all layers."""
    fun, state = functional(NnxStack(nnx.Rngs(0), layer))
    wanted = [f"blocks/{i}/{name}" for i in range(2) for name in ("mix", "block/up", "block/down")]
    for rules in ([df.SplitModule(nnx.Linear)], [df.SplitModule("mix"), df.SplitModule("up|down")]):
        graph = scheduled(fun, state, ROWS, axes=(None, 0), rules=rules)
        assert [key for key in keys(graph) if key in wanted] == wanted
    graph = scheduled(fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule("blocks/1/block/up")])
    assert [op.key for op in graph if op.name == "up"] == ["blocks/1/block/up"]

    def loss(state, x):
        return (fun(state, x) ** 2).mean()

    rules = [df.SplitModule("mix")]
    graph = scheduled(jax.value_and_grad(loss), state, ROWS, axes=(None, 0), out_axes="mean", rules=rules)
    assert {"blocks/0/mix", "blocks/1/mix", "blocks/0/mix.backward", "blocks/1/mix.backward"} <= set(keys(graph))


def test_nnx_copies_that_cannot_be_told_apart_go_by_what_they_have_in_common():
    graph = scheduled(*nnx_norms(), ROWS, axes=(None, 0), rules=[df.SplitModule(nnx.LayerNorm)])
    found = [(op.name, op.module_path) for op in graph if op.name == "LayerNorm"]
    assert found == [("LayerNorm", f"blocks/{i}") for i in (0, 0, 1, 1)]


def nnx_norms():
    return functional(NnxStack(nnx.Rngs(0), Transformed))


def test_nnx_dropout_is_exact_and_state_comes_back():
    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        @df.mark("drop")
        def __call__(self, x):
            return self.drop(self.linear(x))

    graphdef, state = nnx.split(Dropping(nnx.Rngs(0)))

    def f(state, x):
        model = nnx.merge(graphdef, state)
        y = model(x)
        return y, nnx.state(model)

    scheduled(f, state, ROWS, axes=(None, 0))


# -- rules by module -----------------------------------------------------------------------------------------------


def test_split_module_by_class_takes_subclasses():
    class Wider(nn.Dense):
        pass

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Wider(WIDTH, name="b")(jnp.sin(nn.Dense(WIDTH, name="a")(x)))

    assert names(linen(Model(), rules=[df.SplitModule(nn.Dense)])) == ["a", "sin", "b"]
    assert names(linen(Model(), rules=[df.SplitModule(Wider, name="mine", tags={"t"})]))[-1] == "mine"


def test_split_module_by_path():
    model = Stack(Plain, depth=3)
    graph = linen(model, rules=[df.SplitModule(r"layers_\d+/up", tags={"up"})])
    assert [op.key for op in graph if "up" in op.tags] == [f"Stack/layers_{i}/up" for i in range(3)]
    assert names(linen(model, rules=[df.SplitModule("layers_1")])).count("layers_1") == 1
    with pytest.warns(df.RuleWarning, match="matched nothing"):
        linen(model, rules=[df.SplitModule("ayers_1")])  # not in the middle of a component


def test_split_module_of_a_plain_class():
    class Layer:
        def __init__(self, seed):
            self.w = normal(WIDTH, WIDTH, seed=seed)

        def __call__(self, x):
            return jnp.tanh(x @ self.w)

    layers = [Layer(0), Layer(1)]

    def f(x):
        for layer in layers:
            x = layer(x) + x
        return x

    original = Layer.__call__
    graph = scheduled(f, ROWS, axes=0, rules=[df.SplitModule(Layer)])
    assert names(graph) == ["Layer", "add", "Layer", "add"]
    assert Layer.__call__ is original


class Doubled(NnxBlock):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_super_call_is_the_same_operator():
    fun, state = functional(NnxStack(nnx.Rngs(0), Doubled))
    graph = scheduled(fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule(NnxBlock)])
    assert [op.key for op in graph][:2] == ["blocks/0", "blocks/1"]
    assert len(graph) == 3


def test_a_rule_is_told_when_marks_leave_it_nothing():
    fun, state = functional(NnxStack(nnx.Rngs(0), MarkedBlock))
    with pytest.warns(df.RuleWarning, match="marks inside it leave nothing over"):
        graph = scheduled(fun, state, ROWS, axes=(None, 0), rules=[df.SplitModule(NnxBlock)])
    assert names(graph)[:2] == ["block", "block"]


def test_rules_leave_no_trace_after_an_exception():
    class Failing(nnx.Module):
        def __call__(self, x):
            raise ValueError("on purpose")

    call, jvp_call = Failing.__call__, jax.custom_jvp.__call__
    flow = df.dynaflow(
        lambda x: Failing()(x),
        scheduler=df.strategies.Sequential(),
        rules=[df.SplitModule(Failing), df.SplitFunc("relu")],
    )
    with pytest.raises(ValueError, match="on purpose"):
        flow(ROWS)
    assert Failing.__call__ is call
    assert jax.custom_jvp.__call__ is jvp_call


def test_two_traces_nested():
    """A scheduled function inside another one: the inner rules end with it."""
    inner = df.dynaflow(lambda x: nn.relu(x) * 2, scheduler=df.strategies.Sequential(), rules=[df.SplitFunc("relu")])

    def outer(x):
        with df.mark("before"):
            x = x + 1
        x = inner(x)
        with df.mark("after"):
            return x - 1

    graph = scheduled(outer, ROWS, axes=0)
    assert names(graph)[0] == "before"
    assert names(graph)[-1] == "after"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: df.SplitModule(3), "takes a class or a path pattern"),
        (lambda: df.SplitModule("a("), "not a regular expression"),
        (lambda: df.SplitModule("a", name=""), "needs a name"),
        (lambda: df.SplitFunc(3), "takes the name of a primitive or function"),
        (lambda: df.dynaflow(jnp.sin, scheduler=df.strategies.Sequential(), rules=["psum"]), "A rule is a"),
        (lambda: df.dynaflow(jnp.sin, scheduler=df.strategies.Sequential(), rules=[()]), "An empty tuple"),
    ],
)
def test_bad_rules(make, message):
    with pytest.raises(df.RuleError, match=message):
        make()
