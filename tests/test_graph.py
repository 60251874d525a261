"""Operators: convex, complete, in order, and readable."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import ROWS, WIDTH, Stack, initialised, leaves, names, normal, same, scheduled

import dynaflow_jax as df
from dynaflow_jax import compat

SEQUENTIAL = df.strategies.Sequential()


def graph_of(fun, *args, rules=()):
    return df.dynaflow(fun, scheduler=SEQUENTIAL, rules=rules).graph(*args)


def scope(name):
    return jax.named_scope(name)


A, B, C = (df.SplitFunc(name) for name in "abc")


# -- what every graph must be --------------------------------------------------------------------------------------


def check_graph(graph):
    """Convex operators that cover the program once, with the dependencies that their variables say they have."""
    made_by = {var: op.index for op in graph for var in op.program.outvars}
    made_inside = {}
    constants = set()
    for op in graph:
        own = set()
        for eqn in op.program.eqns:
            for var in eqn.invars:
                assert compat.is_literal(var) or var in own or var in op.program.invars
            own.update(eqn.outvars)
        assert set(op.program.outvars) <= own
        for var in own:
            if var in made_inside:  # a small constant, evaluated by every reader
                constants.add(var)
            made_inside[var] = op.index
        sources = {made_by[var] for var in op.program.invars if var in made_by}
        assert sources == set(op.predecessors)
        # In an order that respects dependencies, every operator only reads earlier ones: so all are convex.
        assert all(source < op.index for source in sources)
        assert set(op.program.invars) <= set(graph.program.invars) | set(made_by)
        if op.body is not None:
            check_graph(op.body)
    needed = {var for eqn in graph.program.eqns for var in eqn.outvars}
    assert needed == set(made_inside)
    read = {v for op in graph for eqn in op.program.eqns for v in eqn.invars if not compat.is_literal(v)}
    for var in constants:
        assert var not in made_by
        assert var in read
    assert len({op.key for op in graph}) == len(graph)
    assert [op.index for op in graph] == list(range(len(graph)))
    for op in graph:
        assert all(op.index in graph[reader].predecessors for reader in graph.successors[op.index])
        assert graph[op.key] is op


def evaluate(graph, *args):
    env = dict(zip(graph.program.invars, args, strict=True))
    for op in graph:
        outs = jax.core.eval_jaxpr(op.jaxpr.jaxpr, (), *(env[var] for var in op.program.invars))
        env.update(zip(op.program.outvars, outs, strict=True))
    return [var.val if compat.is_literal(var) else env[var] for var in graph.program.outvars]


def test_random_programs():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    # A node of a random DAG: two earlier nodes, and the mark, rule or nothing that it stands under.
    nodes = st.lists(
        st.tuples(st.integers(0, 99), st.integers(0, 99), st.sampled_from("mnab..")), min_size=1, max_size=14
    )

    @hypothesis.settings(max_examples=150, deadline=None)
    @hypothesis.given(nodes, st.booleans())
    def check(nodes, grad):
        marks = {name: df.mark(name) for name in "mn"}

        def f(x):
            values = [x]
            for i, (left, right, label) in enumerate(nodes):
                a, b = values[left % len(values)], values[right % len(values)]
                if label in marks:
                    with marks[label]:
                        values.append(jnp.sin(a) + b * i)
                elif label in "ab":
                    with scope(label):
                        values.append(jnp.sin(a) + b * i)
                else:
                    values.append(jnp.cos(a) - b + jnp.arange(3.0))
            return sum(values[-3:])

        fun = jax.grad(lambda x: f(x).sum()) if grad else f
        x = jnp.arange(3.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", df.RuleWarning)
            graph = graph_of(fun, x, rules=[A, B])
            check_graph(graph)
            np.testing.assert_allclose(evaluate(graph, x)[0], fun(x), rtol=1e-4, atol=1e-4)
            try:
                joined = graph_of(fun, x, rules=[(A, B)])
            except df.RuleError as error:
                assert "cuts through a dependency" in str(error)  # noqa: PT017
            else:
                check_graph(joined)
                assert len(joined) <= len(graph)

    check()


@pytest.mark.parametrize("training", [False, True])
def test_graphs_of_a_model(training):
    model, variables = Stack(), initialised(Stack())

    def loss(variables, x):
        return (model.apply(variables, x) ** 2).mean()

    check_graph(graph_of(jax.value_and_grad(loss) if training else model.apply, variables, ROWS))


def test_outside_work_separates_equations_of_one_scope():
    def f(x):
        with scope("a"):
            x = jnp.sin(x)
        x = x + 1
        with scope("a"):
            return jnp.cos(x)

    graph = scheduled(f, ROWS, axes=0, rules=[A])
    assert names(graph) == ["a", "add", "a"]
    assert [op.key for op in graph] == ["a", "add", "a~2"]


def test_dead_equations_are_left_out():
    def f(x):
        with df.mark("dead"):
            jnp.sin(x)
        with df.mark("alive"):
            return jnp.cos(x)

    assert names(scheduled(f, ROWS, axes=0)) == ["alive"]


def test_small_constants_make_no_operator():
    def f(x):
        positions = jnp.arange(WIDTH) * 2.0
        with df.mark("first"):
            y = x + positions
        with df.mark("second"):
            return y * positions

    graph = scheduled(f, ROWS, axes=0)
    assert names(graph) == ["first", "second"]
    check_graph(graph_of(f, ROWS))


def test_an_output_that_is_an_input_or_a_constant():
    def f(x):
        with df.mark("double"):
            return x, 3.0, jnp.zeros(2), x * 2

    assert names(scheduled(f, ROWS, axes=0)) == ["double"]


def test_nothing_to_schedule():
    assert len(scheduled(lambda x: x, ROWS, axes=0)) == 0


# -- collectives ---------------------------------------------------------------------------------------------------


def test_collectives_are_operators_of_their_own_outside_marks():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    def body(x, w):
        x = jax.lax.psum(jnp.sin(x @ w), "d") + 1
        with df.mark("fused", tags={"mine"}):
            x = jax.lax.pmax(x * 2, "d")
        return jax.lax.all_gather(x, "d", axis=1, tiled=True)

    specs = {"in_specs": (P(None, "d"), P("d")), "out_specs": P(), "check_vma": False}
    fun = jax.shard_map(body, mesh=mesh, **specs)
    graph = scheduled(fun, ROWS, normal(WIDTH, WIDTH), axes=(0, None))
    network = [op for op in leaves(graph) if "network" in op.tags]
    assert len(network) == 3
    assert all(op.bound == "network" for op in network)
    assert network[0].name.startswith("psum")
    assert [(op.name, sorted(op.tags)) for op in network[1:]] == [
        ("fused", ["mine", "network"]),
        ("all_gather", ["network"]),
    ]


# -- neighbours ----------------------------------------------------------------------------------------------------


def chain(*labels):
    """Under each label a sine, with unlabelled glue between them."""

    def f(x):
        for label in labels:
            with scope(label):
                x = jnp.sin(x)
            x = x + 1
        return x

    return f


def test_neighbours_are_joined_with_what_lies_between():
    graph = scheduled(chain("a", "b"), ROWS, axes=0, rules=[(A, B)])
    assert names(graph) == ["a+b", "add"]
    assert len(graph[0].program.eqns) == 3
    named = df.SplitFunc("b", name="fused", tags={"t"})
    graph = scheduled(chain("a", "b"), ROWS, axes=0, rules=[(A, named)])
    assert names(graph) == ["fused", "add"]
    assert graph["fused"].tags == {"t"}


def test_three_neighbours():
    graph = scheduled(chain("a", "b", "c"), ROWS, axes=0, rules=[(A, B, C)])
    assert names(graph) == ["a+b+c", "add"]
    check_graph(graph_of(chain("a", "b", "c"), ROWS, rules=[(A, B, C)]))


def test_a_sequence_that_is_not_complete_is_not_joined():
    with pytest.warns(
        df.RuleWarning, match=r"SplitFunc\('a'\), SplitFunc\('b'\), SplitFunc\('c'\)\) matched no neighb"
    ):
        graph = scheduled(chain("a", "b", "a", "c"), ROWS, axes=0, rules=[(A, B, C)])
    assert "a" in names(graph)


def test_neighbours_repeated_in_layers():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.RMSNorm()(x)

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(3):
                y = nn.Dense(WIDTH, name=f"dense_{i}")(x)
                x = x + Norm(name=f"norm_{i}")(jnp.tanh(y) * 2)
            return x

    variables = initialised(Layers())
    rules = [(df.SplitModule(nn.Dense), df.SplitModule(Norm))]
    graph = scheduled(Layers().apply, variables, ROWS, axes=(None, 0), rules=rules)
    assert names(graph) == ["dense_0+norm_0", "add", "dense_1+norm_1", "add", "dense_2+norm_2", "add"]

    def loss(variables, x):
        return (Layers().apply(variables, x) ** 2).mean()

    graph = scheduled(jax.value_and_grad(loss), variables, ROWS, axes=(None, 0), out_axes="mean", rules=rules)
    assert names(graph).count("dense_0+norm_0") >= 1


def test_neighbours_around_a_third():
    def f(x):
        with scope("a"):
            y = jnp.sin(x)
        with df.mark("between"):
            z = y * 2
        with scope("b"):
            return y + z

    with pytest.raises(df.RuleError, match=r"cuts through a dependency: the operator 'between' lies between"):
        graph_of(f, ROWS, rules=[(A, B)])


def test_no_neighbours():
    with pytest.warns(df.RuleWarning, match="matched no neighbours"):
        graph = graph_of(lambda x: (chain("a")(x), chain("b")(x)), ROWS, rules=[(A, B)])
    assert {"a", "b"} <= set(names(graph))


# -- reading it ----------------------------------------------------------------------------------------------------


def table_example(w, x):
    with df.mark("project", tags={"compute"}):
        y = x @ w
    with jax.named_scope("decoder"), df.mark("activate"):
        y = jnp.tanh(y + 1)
    return y.sum()


def test_table():
    graph = graph_of(table_example, jnp.ones((256, 256)), jnp.ones((256, 256)))
    assert graph.table().splitlines() == [
        "#  operator    module   tags       FLOP  bytes  bound    reads",
        "--------------------------------------------------------------",
        "0  project              compute  33.6 M  786 k  compute",
        "1  activate    decoder           65.5 k  524 k  memory   0",
        "2  reduce_sum                    65.5 k  262 k  memory   1",
    ]
    assert repr(graph) == f"OpGraph of 3 operators\n{graph.table()}"
    assert repr(graph[0]) == "Operator(0: project, tags={compute}, 33.6 MFLOP, 786 kB, compute-bound)"


def test_looking_up_operators():
    graph = graph_of(table_example, jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert graph["decoder/activate"].module_path == "decoder"
    assert [op.index for op in graph] == [0, 1, 2] == list(range(len(graph)))
    with pytest.raises(KeyError, match=r"No operator 'nix'; there are project, decoder/activate, reduce_sum"):
        graph["nix"]
    assert [aval.shape for aval in graph[0].inputs] == [(4, 4), (4, 4)]
    assert [aval.shape for aval in graph[0].outputs] == [(4, 4)]
    same(evaluate(graph, jnp.ones((4, 4)), jnp.ones((4, 4)))[0], table_example(jnp.ones((4, 4)), jnp.ones((4, 4))))


# -- what depends on what ------------------------------------------------------------------------------------------


def test_reductions_behind_the_backward_pass_and_what_waits_for_them():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def loss(ws, x):
        for i, w in enumerate(ws):
            with df.mark(f"layer_{i}"):
                x = jnp.tanh(x @ w)
            x = df.collectives.all_reduce(x, "x")  # the backward pass depends on it
        return jnp.mean(x**2)

    def step(ws, x):
        gradients = [df.collectives.all_reduce(g, "x") for g in jax.grad(loss)(ws, x)]
        updated = []
        for i, (w, g) in enumerate(zip(ws, gradients, strict=True)):
            with df.mark(f"update_{i}"):
                updated.append(w - g)
        return updated

    args = [jnp.eye(8)] * 2, jnp.ones((16, 8))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P(), check_vma=False)
    (region,) = (op for op in graph_of(mapped, *args) if op.body is not None)
    graph = region.body
    names = {graph[i].key for i in graph.reductions}
    assert all(name.startswith("all_reduce") for name in names)
    assert len(names) == 2
    waits = graph.behind(graph.reductions)
    assert {graph[i].key for i in waits} == {"update_0", "update_1"}
    assert [len(waits[graph[f"update_{i}"].index]) for i in range(2)] == [1, 1]
    assert graph.behind({graph["update_0"].index}) == {}
    first = graph["layer_0"].index
    assert set(graph.behind({first})) == {op.index for op in graph if op.index > first and op.key != "layer_0"}


def test_without_a_backward_pass_there_are_no_reductions():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    total = jax.shard_map(
        lambda x: df.collectives.all_reduce(jnp.sin(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    (region,) = (op for op in graph_of(total, jnp.ones((16, 8))) if op.body is not None)
    assert not region.body.reductions
