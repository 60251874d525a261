"""Small models in Flax Linen, Flax NNX and plain JAX, and what it takes to compare a schedule with the model itself."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import dynaflow_jax as df

WIDTH = 8


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


ROWS = normal(6, WIDTH)  # a batch


def scheduled(fun, *args, axes, rules=(), scheduler=None, **options):
    """Runs ``fun`` in two micro-batches, compares with ``fun`` itself, and returns the operators."""
    scheduler = scheduler or df.strategies.NanoFlow(2)
    flow = df.dynaflow(fun, scheduler=scheduler, rules=rules, batch_axes=axes, **options)
    same(run(flow, *args), run(fun, *args))
    return flow.graph(*args)


def run(fun, *args):
    """The value of a function, compiled in a hurry."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fun).lower(*args).compile(options)(*args)


def same(got, want, tolerance=1e-5):
    """Equal up to rounding; keys bit by bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(map(plain, jax.tree.leaves(got)), map(plain, jax.tree.leaves(want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def plain(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def names(graph):
    """Names of the operators, those inside loops after the loop's own."""
    return [name for op in graph for name in (op.name, *(names(op.body) if op.body is not None else ()))]


def leaves(graph):
    """The operators, those inside loops in place of the loops."""
    return [leaf for op in graph for leaf in (leaves(op.body) if op.body is not None else [op])]


# -- Flax Linen ----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A residual block with one mark inside."""

    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        with df.mark("wide"):
            y = nn.tanh(nn.Dense(2 * self.width, name="up")(x))
        return x + nn.Dense(self.width, name="down")(y)


class Plain(nn.Module):
    """The same without a mark."""

    width: int = WIDTH

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(self.width, name="down")(nn.tanh(nn.Dense(2 * self.width, name="up")(x)))


class Stack(nn.Module):
    """Layers one after the other; ``lift`` wraps their class."""

    layer: type = Layer
    depth: int = 2

    @nn.compact
    def __call__(self, x):
        for i in range(self.depth):
            x = self.layer(name=f"layers_{i}")(x)
        return x


class Step(nn.Module):
    """A layer in the form that ``nn.scan`` asks for."""

    layer: type = Layer

    @nn.compact
    def __call__(self, x, _):
        return self.layer(name="layer")(x), None


class Scanned(nn.Module):
    """Layers under ``nn.scan``, with stacked parameters."""

    step: type = Step
    layer: type = Layer
    depth: int = 3

    @nn.compact
    def __call__(self, x):
        loop = nn.scan(self.step, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)
        return loop(self.layer, name="layers")(x, None)[0]


def initialised(model):
    """Variables of a Linen model: random parameters, and ones in the other collections. Compiles nothing."""
    shapes = jax.eval_shape(model.init, {"params": jax.random.key(0), "dropout": jax.random.key(1)}, ROWS)
    leaves, tree = jax.tree.flatten(dict(shapes))
    filled = [normal(*leaf.shape, seed=i) * 0.3 for i, leaf in enumerate(leaves)]
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    return {**ones, "params": jax.tree.unflatten(tree, filled)["params"]}


# -- Flax NNX ------------------------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.tanh(self.up(x)))


class NnxStack(nnx.Module):
    def __init__(self, rngs, block=NnxBlock, depth=2):
        self.blocks = nnx.List([block(rngs) for _ in range(depth)])
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def functional(model):
    """A function of ``(state, x)`` from an NNX model, and the state."""
    graphdef, state = nnx.split(model)
    return (lambda state, x: nnx.merge(graphdef, state)(x)), state
