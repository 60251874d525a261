"""Parts of a jaxpr are computed by other functions, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaflow_jax import compat
from dynaflow_jax.substitution import Dataflow, Match, substituted

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def traced(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def every(primitive, fn, name="mine"):
    """Finds the equations of one primitive."""

    def find(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == primitive:
                yield Match(name, lambda *args: (fn(*args),), tuple(eqn.invars), tuple(eqn.outvars))

    return find


def test_places_are_computed_by_their_functions():
    calls = []

    def tanh(x):
        calls.append(x.shape)
        return jnp.tanh(x) + 1.0

    fun = substituted(traced(lambda x: jnp.tanh(x * 2) + jnp.tanh(x).sum(), X), [every("tanh", tanh)])
    np.testing.assert_allclose(fun(X)[0], (jnp.tanh(X * 2) + 1) + (jnp.tanh(X) + 1).sum(), rtol=1e-6)
    assert calls == [(3, 4)] * 2
    assert fun.__name__ == "mine"
    assert [eqn.primitive.name for eqn in fun.eqns if eqn.primitive.name == "tanh"] == []


def test_nothing_found_is_none():
    assert substituted(traced(jnp.sin, X), [every("tanh", jnp.tanh)]) is None
    assert substituted(traced(jnp.sin, X), []) is None


def test_what_only_a_replaced_part_needed_is_not_computed():
    def whole(jaxpr):
        flow = Dataflow(jaxpr)
        (last,) = jaxpr.outvars
        assert flow.made_by(last, "tanh")
        yield Match("all", lambda x: (jnp.tanh(jnp.sin(x)),), tuple(jaxpr.invars), (last,))

    fun = substituted(traced(lambda x: jnp.tanh(jnp.sin(x)), X), [whole])
    assert fun.eqns == []
    np.testing.assert_array_equal(fun(X)[0], jnp.tanh(jnp.sin(X)))


def test_the_first_place_of_a_value_counts():
    finders = [every("tanh", jnp.tanh, "first"), every("tanh", jnp.cos, "second")]
    fun = substituted(traced(jnp.tanh, X), finders)
    assert fun.__name__ == "first"
    np.testing.assert_array_equal(fun(X)[0], jnp.tanh(X))


def test_a_place_that_needs_what_it_gives_is_not_used():
    def around(jaxpr):  # sin and tanh, and cos between them from outside
        sin, cos, tanh = jaxpr.eqns
        yield Match("no", lambda *args: args, (sin.invars[0], cos.outvars[0]), (sin.outvars[0], tanh.outvars[0]))

    assert substituted(traced(lambda x: jnp.tanh(jnp.cos(jnp.sin(x))), X), [around]) is None


@pytest.mark.parametrize("call", [jax.jit, jax.checkpoint])
def test_calls_are_looked_into_and_stay_calls(call):
    inner = call(lambda x, y: (jnp.tanh(x) + y, y * 2.0))
    jaxpr = traced(lambda x: inner(x, inner(x, 3.0)[1]), X)
    fun = substituted(jaxpr, [every("tanh", lambda x: jnp.tanh(x) + 1.0)])
    np.testing.assert_allclose(fun(X)[0], jnp.tanh(X) + 7.0, rtol=1e-6)
    names = [eqn.primitive.name for eqn in traced(fun, X).eqns]
    assert set(names) == {eqn.primitive.name for eqn in jaxpr.eqns}
    assert fun.__name__ == "mine"
    assert sum(kernel.name == "mine" for kernel in fun.kernels({})) == 2


def test_effects_keep_their_order():
    def noisy(x):
        jax.debug.print("{}", x.sum())
        return jnp.tanh(x)

    assert substituted(traced(noisy, X), [every("tanh", jnp.tanh)]) is None


def test_what_reads_a_variable():
    jaxpr = traced(lambda x: (jnp.sin(x), jnp.sin(x) * jnp.cos(x) ** 2), X).jaxpr
    flow = Dataflow(jaxpr)
    first, second, cos, *_ = (eqn.outvars[0] for eqn in jaxpr.eqns)
    assert flow.only_reader(first) is None  # returned
    assert flow.only_reader(second).primitive.name == "mul"
    assert flow.made_by(cos, "cos").invars[0] is jaxpr.invars[0]
    assert flow.made_by(jaxpr.invars[0], "cos") is None
    assert flow.made_by(second, "cos") is None


@st.composite
def programs(draw):
    """A function of two arrays, and which of its equations are replaced together."""
    operations = draw(
        st.lists(st.tuples(st.sampled_from("sin cos add mul".split()), st.data()), min_size=2, max_size=9)
    )
    steps, count = [], 2
    for name, data in operations:
        operands = data.draw(st.tuples(*[st.integers(0, count - 1)] * (2 if name in ("add", "mul") else 1)))
        steps.append((name, operands))
        count += 1
    outputs = draw(st.lists(st.integers(2, count - 1), min_size=1, max_size=3))
    groups = draw(st.lists(st.sets(st.integers(0, len(steps) - 1), min_size=1, max_size=4), max_size=3))
    return steps, outputs, groups


@given(programs())
def test_any_part_can_be_replaced(program):
    """Groups of equations that cannot be one function, since others lie between them, are left alone."""
    steps, outputs, groups = program

    def fun(x, y):
        values = [x, y]
        for name, operands in steps:
            values.append(getattr(jnp, {"mul": "multiply"}.get(name, name))(*(values[i] for i in operands)))
        return [values[i] for i in outputs]

    def find(jaxpr):
        for group in groups:
            eqns = [jaxpr.eqns[i] for i in sorted(group)]
            given = [var for eqn in eqns for var in eqn.outvars]
            read = tuple(dict.fromkeys(v for eqn in eqns for v in eqn.invars if v not in given))

            def together(*values, eqns=eqns, read=read):
                env = dict(zip(read, values, strict=True))
                for eqn in eqns:
                    env.update(zip(eqn.outvars, compat.bind(eqn, *(env[v] for v in eqn.invars)), strict=True))
                return tuple(env[var] for eqn in eqns for var in eqn.outvars)

            yield Match("part", together, read, tuple(given))

    x, y = np.float32([0.5, -1.5]), np.float32([2.0, 0.25])
    jaxpr = traced(fun, x, y)
    assert len(jaxpr.jaxpr.eqns) == len(steps)
    found = substituted(jaxpr, [find])
    if found is None:
        return
    for got, want in zip(found(x, y), fun(x, y), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_place_is_one_kernel_that_moves_what_it_must(dtype):
    x = jnp.ones((256, 512), dtype)

    def model(x):
        return jnp.sin(x @ jnp.ones((512, 128), dtype))

    fun = substituted(traced(model, x), [every("sin", jnp.sin)])
    kernels = {kernel.name: kernel for kernel in fun.kernels({})}
    assert kernels["mine"].bytes == 2 * 256 * 128 * x.dtype.itemsize
    assert kernels["dot_general"].flops == 2 * 256 * 512 * 128
