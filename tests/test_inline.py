"""Nested calls are opened as far as a boundary lies inside them, and no further."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import ROWS, WIDTH, leaves, names, normal, same, scheduled

import dynaflow_jax as df

SEQUENTIAL = df.strategies.Sequential()


@jax.jit
def plain(x):
    return jnp.sin(x) * x


@jax.jit
def marked(x):
    with df.mark("inside"):
        y = jnp.sin(x)
    return y * 2


def primitives(op):
    return [eqn.primitive.name for eqn in op.program.eqns]


# -- calls ---------------------------------------------------------------------------------------------------------


def test_calls_without_a_boundary_stay_closed():
    graph = scheduled(lambda x: plain(plain(x)), ROWS, axes=0)
    assert len(graph) == 1
    assert len(primitives(graph[0])) == 2


def test_calls_with_a_boundary_are_opened():
    graph = scheduled(lambda x: marked(plain(x)), ROWS, axes=0)
    assert names(graph) == ["plain", "inside", "mul"]


def test_constants_of_opened_calls_are_hoisted():
    table = normal(WIDTH, WIDTH)

    @jax.jit
    def layer(x):
        with df.mark("inside"):
            return x @ table

    def f(x):
        return jax.lax.scan(lambda c, _: (layer(c), c.sum(1)), layer(x), None, length=2)

    assert "inside" in names(scheduled(f, ROWS, axes=0))


def test_shardings_of_an_opened_jit_are_kept():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("d"))

    def f(x):
        with df.mark("inside"):
            return x * 2

    inner = jax.jit(f, out_shardings=sharding)
    flow = df.dynaflow(lambda x: inner(x) + 1, scheduler=SEQUENTIAL)
    graph = flow.graph(ROWS)
    assert "sharding_constraint" in [name for op in graph for name in primitives(op)]
    same(flow(ROWS), f(ROWS) + 1)


# -- rules by function ---------------------------------------------------------------------------------------------


def test_split_func_by_primitive():
    graph = scheduled(lambda x: jnp.sin(x) * jnp.sin(x + 1), ROWS, axes=0, rules=[df.SplitFunc("sin", tags={"t"})])
    assert [op.name for op in graph if "t" in op.tags] == ["sin", "sin"]


def test_split_func_by_name_and_by_object():
    for target in (plain, "plain"):
        graph = scheduled(lambda x: plain(x + 1) * 2, ROWS, axes=0, rules=[df.SplitFunc(target, name="p")])
        assert names(graph) == ["add", "p", "mul"]


def test_split_func_by_scope():
    def f(x):
        with jax.named_scope("encoder"):
            x = jnp.tanh(x * 2)
        return x + 1

    assert names(scheduled(f, ROWS, axes=0, rules=[df.SplitFunc("encoder")])) == ["encoder", "add"]
    graph = scheduled(jax.grad(lambda x: f(x).sum()), ROWS, axes=0, rules=[df.SplitFunc("encoder")])
    assert ("encoder", "backward") in {(op.name, op.phase) for op in graph}


def test_split_func_that_calls_a_mark_keeps_the_rest():
    graph = scheduled(lambda x: marked(x + 1) - 1, ROWS, axes=0, rules=[df.SplitFunc("marked", tags={"t"})])
    assert [(op.name, sorted(op.tags)) for op in graph] == [
        ("add", []),
        ("inside", []),
        ("marked", ["t"]),
        ("sub", []),
    ]


def test_split_func_survives_grad():
    def loss(x):
        return (plain(x * 2) ** 2).sum()

    graph = scheduled(jax.value_and_grad(loss), ROWS, axes=0, out_axes=("sum", None), rules=[df.SplitFunc(plain)])
    assert [op.phase for op in graph if op.name == "plain"] == ["forward", "backward"]


def custom_vjp():
    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x)

    kernel.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * 7,))
    return kernel


def custom_jvp():
    @jax.custom_jvp
    def kernel(x):
        return jnp.sin(x)

    kernel.defjvp(lambda x, t: (kernel(*x), t[0] * 7))
    return kernel


@pytest.mark.parametrize("make", [custom_vjp, custom_jvp])
def test_split_func_of_a_custom_derivative(make):
    kernel = make()
    call = type(kernel).__call__
    for target in (kernel, "kernel"):
        rules = [df.SplitFunc(target)]
        graph = scheduled(lambda x: kernel(x * 2) + 1, ROWS, axes=0, rules=rules)
        assert names(graph) == ["mul", "kernel", "add"]
        loss = lambda x: (kernel(x * 2) ** 2).sum()  # noqa: E731
        graph = scheduled(jax.value_and_grad(loss), ROWS, axes=0, out_axes=("sum", None), rules=rules)
        assert "kernel" in names(graph)
        flow = df.dynaflow(loss, scheduler=df.strategies.NanoFlow(2), batch_axes=0, out_axes="sum", rules=rules)
        same(jax.grad(flow)(ROWS), jax.grad(loss)(ROWS))
    assert type(kernel).__call__ is call


def test_split_func_of_remat():
    rows = jax.remat(plain)
    assert names(scheduled(lambda x: rows(x) + 1, ROWS, axes=0, rules=[df.SplitFunc("remat")])) == ["remat", "add"]
    assert names(scheduled(lambda x: rows(x) + 1, ROWS, axes=0, rules=[df.SplitFunc("checkpoint")]))[1] == "add"


@pytest.mark.parametrize("name", ["psum", "psum_invariant"])
def test_primitives_match_by_their_other_names(name):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    fun = jax.shard_map(lambda x: jax.lax.psum(x * 2, "d"), mesh=mesh, in_specs=P(None, "d"), out_specs=P())
    graph = scheduled(fun, ROWS, axes=0, rules=[df.SplitFunc(name, tags={"mine"})])
    assert [op.name for op in leaves(graph) if "mine" in op.tags] == [name]


# -- regions, and where there are none -----------------------------------------------------------------------------


def test_scans_are_entered_and_unrolled():
    w = normal(5, WIDTH, WIDTH)

    def f(w, x, reverse=False):
        def body(x, w):
            with df.mark("layer"):
                return jnp.tanh(x @ w), x[:, 0]

        return jax.lax.scan(body, x, w, reverse=reverse)

    for unroll, reverse in ((1, False), (2, False), (2, True), (9, False)):
        fun = lambda w, x, reverse=reverse: f(w, x, reverse)  # noqa: E731
        graph = scheduled(fun, w, ROWS, axes=(None, 0), unroll=unroll)
        longest = max(graph, key=lambda op: 0 if op.body is None else len(op.body))
        assert names(longest.body).count("layer") == min(unroll, 5)


def test_loops_without_a_boundary_stay_closed():
    graph = scheduled(lambda x: jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=2)[0], ROWS, axes=0)
    assert graph[0].body is None


def warned(fun, *args, rules=()):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        df.dynaflow(fun, scheduler=SEQUENTIAL, rules=rules).graph(*args)
    return [w for w in caught if issubclass(w.category, df.RuleWarning)]


def in_a_while(x):
    def body(carry):
        with df.mark("lost"):
            return carry[0] + 1, jnp.sin(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def in_a_cond(x):
    def branch(x):
        with df.mark("lost"):
            return x * 2

    return jax.lax.cond(x[0, 0] > 0, branch, jnp.sin, x)


@pytest.mark.filterwarnings("ignore::dynaflow_jax.RuleWarning")
@pytest.mark.parametrize("fun", [in_a_while, in_a_cond])
@pytest.mark.parametrize("rules", [[], [df.SplitFunc("add")]])
def test_marks_where_nothing_can_be_scheduled(fun, rules):
    (warning,) = warned(lambda x: fun(x + 1), ROWS, rules=rules)
    assert "'lost' inside" in str(warning.message)
    assert "have no effect" in str(warning.message)
    assert warning.filename == __file__
    same(df.dynaflow(fun, scheduler=SEQUENTIAL, rules=rules)(ROWS), fun(ROWS))


def test_draws_in_a_while_are_no_marks():
    assert not warned(lambda x, key: x + jax.random.poisson(key, 3.0, x.shape), ROWS, jax.random.key(0))


def test_collectives_in_a_while_are_no_marks():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def body(x):
        step = lambda c: (c[0] + 1, jax.lax.pmean(c[1], "d"))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]

    fun = jax.shard_map(body, mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"), check_vma=False)
    assert not warned(fun, ROWS)
    (op,) = leaves(df.dynaflow(fun, scheduler=SEQUENTIAL).graph(ROWS))
    assert op.tags == {"network"}


def test_rules_without_effect():
    (warning,) = warned(jnp.sin, ROWS, rules=[df.SplitFunc("psum")])
    assert "SplitFunc('psum') matched nothing" in str(warning.message)
    assert warning.filename == __file__
    (warning,) = warned(in_a_while_unmarked, ROWS, rules=[df.SplitFunc("sin")])
    assert "may lie inside while" in str(warning.message)


def in_a_while_unmarked(x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]
