"""Costs, beside what XLA's own analysis says of the compiled function."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from models import normal

import dynaflow_jax as df
from dynaflow_jax import cost

WITHIN = 0.05


def analysed(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile()
    found = compiled.cost_analysis()
    assert found is not None
    return found["flops"], found["bytes accessed"], compiled.as_text()


def estimated(fun, *args):
    graph = df.dynaflow(fun, scheduler=df.strategies.Sequential()).graph(*args)
    return sum(op.flops for op in graph), sum(op.bytes for op in graph)


def compare(fun, *args, traffic=True):
    flops, moved, text = analysed(fun, *args)
    our_flops, our_bytes = estimated(fun, *args)
    assert our_flops == pytest.approx(flops, rel=WITHIN)
    narrow = any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(args))
    if traffic and not (narrow and " f32[" in text):  # some CPU compilers compute bfloat16 in float32
        assert our_bytes == pytest.approx(moved, rel=WITHIN)


def perceptron(dtype):
    def f(x, up, b, down, c):
        with df.mark("up"):
            x = jax.nn.gelu(x @ up + b)
        with df.mark("down"):
            return x @ down + c

    shapes = (128, 256), (256, 1024), (1024,), (1024, 256), (256,)
    return f, [normal(*shape, dtype=dtype) * 0.05 for shape in shapes]


class Block(nn.Module):
    """A transformer layer whose matrix products dominate."""

    dtype: object

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        with df.mark("attention"):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(8, dtype=self.dtype)(y)
        with df.mark("ffn"):
            y = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y))


class Convolutions(nn.Module):
    dtype: object
    padding: str = "VALID"
    strides: int = 1

    @nn.compact
    def __call__(self, x):
        for features in (32, 64):
            with df.mark("conv"):
                x = nn.relu(nn.Conv(features, (3, 3), self.strides, padding=self.padding, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x.reshape(x.shape[0], -1))


def loss(model):
    return lambda variables, x: (model.apply(variables, x).astype(jnp.float32) ** 2).mean()


def filled(model, x):
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1, x.dtype), shapes)


DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])


@DTYPES
def test_perceptron(dtype):
    fun, args = perceptron(dtype)
    compare(fun, *args)


@DTYPES
def test_transformer_layer(dtype):
    x, model = normal(4, 32, 512, dtype=dtype), Block(dtype)
    compare(model.apply, filled(model, x), x, traffic=dtype == jnp.float32)


def test_gradient_of_a_transformer_layer():
    x, model = normal(2, 16, 512), Block(jnp.float32)
    compare(jax.grad(loss(model)), filled(model, x), x, traffic=False)


@DTYPES
def test_convolutions(dtype):
    x, model = normal(4, 16, 16, 16, dtype=dtype), Convolutions(dtype)
    compare(model.apply, filled(model, x), x)


@pytest.mark.parametrize(("padding", "strides"), [("SAME", 1), ("SAME", 2), ("VALID", 2)])
def test_padding_and_strides_do_no_work(padding, strides):
    x, model = normal(2, 15, 15, 8), Convolutions(jnp.float32, padding, strides)
    compare(model.apply, filled(model, x), x, traffic=False)
    compare(jax.grad(loss(model)), filled(model, x), x, traffic=False)


@pytest.mark.parametrize(
    "subscripts", ["bik,bkj->bij", "bqhd,bkhd->bhqk", "bhqd,bhkd->bhqk", "bhqk,bkhd->bqhd", "ij,kj->ik", "ji,jk->ik"]
)
def test_products(subscripts):
    sizes = dict(zip("bqkhdij", (2, 64, 32, 8, 32, 64, 32), strict=True))
    lhs, rhs = subscripts.split("->")[0].split(",")
    args = [normal(*(sizes[c] for c in operand)) for operand in (lhs, rhs)]
    flops, *_ = analysed(lambda a, b: jnp.einsum(subscripts, a, b), *args)
    assert estimated(lambda a, b: jnp.einsum(subscripts, a, b), *args)[0] == pytest.approx(flops, rel=WITHIN)


def test_operands_out_of_order_are_moved_first():
    def f(a, b):
        return jnp.einsum("bqhd,bkhd->bhqk", a, b)

    compare(f, normal(2, 64, 8, 32), normal(2, 64, 8, 32))


def traffic(fun, *args):
    closed = jax.make_jaxpr(fun)(*args)
    return cost.traffic(closed.eqns, closed.jaxpr.outvars)


X = normal(64, 64)
SIZE = 64 * 64 * 4


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: jnp.cos(x * 2 + 1), 2 * SIZE),  # fused
        (lambda x: jax.jit(jnp.cos)(x * 2), 2 * SIZE),  # through calls
        (lambda x: x.reshape(-1), 0),  # a view
        (lambda x: lax.optimization_barrier(x), 0),
        (lambda x: (x * 2).reshape(-1), 2 * SIZE),
        (lambda x: (x * x).sum(), SIZE + 4),  # fused into the reduction
        (lambda x: jnp.cos(x[:8]), 2 * SIZE / 8),  # reads only the rows
        (lambda x: (x * 2) @ x, 2 * SIZE + 3 * SIZE),  # a product reads from memory
        (lambda x: (x @ x).T, 3 * SIZE),  # written transposed
    ],
)
def test_traffic(fun, expected):
    assert traffic(fun, X) == expected


def test_expensive_results_are_kept_and_cheap_ones_computed_again():
    def softmax(x):
        y = jnp.exp(x)
        return y / y.sum(-1, keepdims=True)

    rows = 64 * 4
    assert traffic(softmax, X) == 2 * SIZE + (SIZE + rows) + (SIZE + rows + SIZE)

    def square(x):
        y = x + 1
        return y / y.sum(-1, keepdims=True)

    assert traffic(square, X) == (SIZE + rows) + (SIZE + rows + SIZE)


def test_lookups_read_what_they_return():
    table = jnp.ones((1000, 16))
    ids = jnp.arange(4)
    assert traffic(lambda t, i: lax.gather(t, i[:, None], GATHER, (1, 16)), table, ids) == 2 * 4 * 16 * 4 + 4 * 4


GATHER = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))


def test_loops_count_their_iterations():
    w = normal(5, 64, 64)
    flops, _, _ = analysed(lambda w, x: x @ w[0], w, X)

    def f(w, x):
        return lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    (op,) = df.dynaflow(f, scheduler=df.strategies.Sequential()).graph(w, X)
    assert op.flops == 5 * flops
    assert op.bytes == 5 * 3 * SIZE


def test_branches_count_as_the_dearest():
    (eqn,) = jax.make_jaxpr(lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x + 1, x))(True, X).eqns[-1:]
    assert cost.flops(eqn) == 2 * 64**3


def test_bounds():
    w = normal(1024, 1024)

    def f(w, x):
        with df.mark("product"):
            y = x @ w
        with df.mark("add"):
            return y + x

    graph = df.dynaflow(f, scheduler=df.strategies.Sequential()).graph(w, w)
    assert [op.bound for op in graph] == ["compute", "memory"]
    assert cost.ridge("gpu", "NVIDIA H200") == pytest.approx(206, rel=1e-3)
    assert cost.ridge("cpu", "cpu") == 12
    assert cost.ridge("gpu", "a device of the future") > 0


def test_sizes():
    aval = jax.make_jaxpr(lambda k: k)(jax.random.key(0)).in_avals[0]
    assert cost.bytes_of(aval) > 0
    assert cost.bytes_of(jax.make_jaxpr(lambda x: x)(jnp.ones((2, 3), jnp.bfloat16)).in_avals[0]) == 12


def test_kernels():
    """At the least: products, and what the compiler has to run apart; elementwise work goes into them."""

    def kernels(fun, *args):
        return cost.kernels(jax.make_jaxpr(fun)(*args).eqns)

    x = normal(8, 8)
    assert kernels(lambda x: jnp.tanh(x) * 2, x) == 1
    assert kernels(lambda x: jnp.tanh(x @ x) * 2 @ x, x) == 2
    assert kernels(lambda x: lax.scan(lambda x, _: (jnp.tanh(x @ x) @ x, None), x, None, length=5)[0], x) == 10
    assert kernels(lambda x: jax.jit(lambda x: jax.nn.gelu(x @ x) @ x)(x) @ x, x) == 3


def test_seconds():
    """The slower of what memory and arithmetic take, on the device that it is asked for."""
    assert cost.seconds(0, 4.8e12, "gpu", "NVIDIA H200") == 1
    assert cost.seconds(2 * 989e12, 4.8e12, "gpu", "NVIDIA H200") == 2
    assert cost.seconds(0, 3.35e12, "gpu", "a device that nobody knows") == 1
    assert cost.seconds(1, 1, "cpu", "cpu") > cost.seconds(1, 1, "gpu", "NVIDIA H100")
