"""Models that communicate: tensor and sequence parallel, fully sharded, data parallel; as functions of one device.

Each is a function for the inside of ``jax.shard_map`` over the axis ``d``, with arguments and how they are sharded.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import normal

import dynaflow_jax as df
from dynaflow_jax.errors import DispatchWarning

AXIS, WIDTH, HIDDEN, ROWS, TOKENS = "d", 8, 16, 8, 8


@dataclasses.dataclass(frozen=True)
class Model:
    """A function of one device of several.

    Attributes:
      fun: the function.
      args: its arguments, whole.
      in_specs: how they are sharded.
      out_specs: how its results are.
      axes: the batch axes of the arguments.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    in_specs: Any
    out_specs: Any
    axes: Any = None

    def mapped(self, devices, fun=None, check=False):
        """The function, or another in its place, on so many devices."""
        mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        specs = {"mesh": mesh, "in_specs": self.in_specs, "out_specs": self.out_specs, "check_vma": check}
        return jax.shard_map(fun or self.fun, **specs)

    def scheduled(self, devices, scheduler, backend, check=False, **options):
        """The function as a strategy schedules it, and what that strategy decided."""
        flow = df.dynaflow(self.fun, scheduler=scheduler, backend=backend, batch_axes=self.axes, **options)
        mapped = jax.jit(self.mapped(devices, flow, check))
        plan = self.inside(devices, flow.plan, check)

        def run(*args):
            with warnings.catch_warnings():
                warnings.simplefilter("error", DispatchWarning)
                return mapped(*args)

        return run, plan

    def inside(self, devices, ask, check=False):
        """What a function says of the arguments as they are on a device."""
        said = []

        def asked(*args):
            said.append(ask(*args))
            return self.fun(*args)

        jax.eval_shape(self.mapped(devices, asked, check), *self.args)
        return said[0]

    def work(self, devices, scheduler):
        """What the function is dispatched to."""
        flow = df.dynaflow(self.fun, scheduler=scheduler, backend="dispatch", batch_axes=self.axes)
        return self.inside(devices, lambda *args: flow._resolve(args, {})[0]._binder.work)

    def check(self, devices, scheduler, backend, check=False, **options):
        """Compares the scheduled function with the function; returns the plan."""
        run, plan = self.scheduled(devices, scheduler, backend, check, **options)
        want = jax.jit(self.mapped(devices, check=check))(*self.args)
        for _ in range(3):
            close(run(*self.args), want)
        return plan

    def gradient(self, argument=0):
        """The gradient of the mean square of the results with respect to an argument, with the value."""

        def loss(*args):
            return jnp.mean(self.fun(*args) ** 2)

        def step(*args):
            value, gradient = jax.value_and_grad(loss, argument)(*args)
            return value[None], gradient

        return dataclasses.replace(self, fun=step, out_specs=(P(AXIS), self.in_specs[argument]))


def close(got, want):
    """Equal up to the rounding of sums in another order."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def weights(layers, *shapes):
    return [tuple(normal(*shape, seed=10 * i + j) / 3 for j, shape in enumerate(shapes)) for i in range(layers)]


def mlp(x, up, down):
    return jax.nn.silu(x @ up) @ down


def tensor_parallel(layers=2, rows=ROWS):
    """Columns, then rows of the weights on each device; sums behind every layer."""

    def fun(ws, x):
        for up, down in ws:
            with df.mark("mlp"):
                y = mlp(x, up, down)
            x = x + df.collectives.all_reduce(y, AXIS)
        return x

    specs = [(P(None, AXIS), P(AXIS))] * layers
    args = (weights(layers, (WIDTH, HIDDEN), (HIDDEN, WIDTH)), normal(rows, WIDTH, seed=99))
    return Model(fun, args, (specs, P()), P(), (None, 0))


def sequence_parallel(layers=2):
    """Tensor parallel, with the tokens sharded between the layers: attention and a gated MLP (Megatron-LM's)."""

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)

    def fun(ws, x):
        for qkv, out, gate, up, down in ws:
            with df.mark("norm"):
                y = norm(x)
            y = df.collectives.all_gather(y, AXIS, axis=1)
            with df.mark("attention"):
                q, k, v = jnp.split(y @ qkv, 3, axis=-1)
                y = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2)) @ v @ out
            y = df.collectives.reduce_scatter(y, AXIS, axis=1)
            with df.mark("norm"):
                x = x + y
                y = norm(x)
            y = df.collectives.all_gather(y, AXIS, axis=1)
            with df.mark("mlp"):
                y = (jax.nn.silu(y @ gate) * (y @ up)) @ down
            x = x + df.collectives.reduce_scatter(y, AXIS, axis=1)
        return x

    column, row = P(None, AXIS), P(AXIS)
    specs = [(column, row, column, column, row)] * layers
    shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    args = (weights(layers, *shapes), normal(2, TOKENS, WIDTH, seed=99))
    return Model(fun, args, (specs, P(None, AXIS)), P(None, AXIS), (None, 0))


def updated(ws, gradients):
    """Weights after a step of gradient descent; an operator for each layer, so that none waits for the others'."""
    found = []
    for layer, gradient in zip(ws, gradients, strict=True):
        with df.mark("update"):
            found.append(tuple(w - 0.1 * g for w, g in zip(layer, gradient, strict=True)))
    return found


def fully_sharded(layers=4, again=None):
    """A training step on parameters of which each device has a part.

    Args:
      layers: how many.
      again: whether the backward pass gathers the parameters again: ``None``, ``"checkpoint"`` or ``"custom_vjp"``.
    """

    def gathered(shards):
        return [df.collectives.all_gather(shard, AXIS) for shard in shards]

    def block(ws, x):
        with df.mark("mlp"):
            return x + mlp(x, *ws)

    def layer(shards, x):
        return block(gathered(shards), x)

    def backward(kept, cotangent):
        shards, x = kept
        ws, of_x = jax.vjp(block, gathered(shards), x)[1](cotangent)
        return tuple(df.collectives.reduce_scatter(w, AXIS) for w in ws), of_x

    gathering_twice = jax.custom_vjp(layer)
    gathering_twice.defvjp(lambda shards, x: (layer(shards, x), (shards, x)), backward)
    used = {None: layer, "checkpoint": jax.checkpoint(layer), "custom_vjp": gathering_twice}[again]

    def loss(ws, x):
        for shards in ws:
            x = used(shards, x)
        with df.mark("loss"):
            return jnp.mean(x**2)

    def step(ws, x):
        value, gradients = jax.value_and_grad(loss)(ws, x)
        return value[None], updated(ws, gradients)

    specs = [(P(AXIS), P(AXIS))] * layers
    args = (weights(layers, (WIDTH, HIDDEN), (HIDDEN, WIDTH)), normal(ROWS, WIDTH, seed=99))
    return Model(step, args, (specs, P(AXIS)), (P(AXIS), specs))


def data_parallel(layers=4):
    """A training step on parameters of which each device has all, and rows of its own."""

    def loss(ws, x):
        for up, down in ws:
            with df.mark("mlp"):
                x = x + mlp(x, up, down)
        with df.mark("loss"):
            return jnp.mean(x**2)

    def step(ws, x):
        value, gradients = jax.value_and_grad(loss)(ws, x)
        gradients = jax.tree.map(lambda g: df.collectives.all_reduce(g, AXIS, op="mean"), gradients)
        return value[None], updated(ws, gradients)

    args = (weights(layers, (WIDTH, HIDDEN), (HIDDEN, WIDTH)), normal(ROWS, WIDTH, seed=99))
    return Model(step, args, (P(), P(AXIS)), (P(AXIS), P()))


def expert_parallel(layers=2, experts=8, rows=ROWS):
    """Tokens of each device in the order of all experts; one exchange takes them there, another one back."""

    def fun(ws, x):
        for mix, up, bias, down in ws:
            with df.mark("mix"):
                y = jnp.einsum("ecd,df->ecf", x, mix)
            y = df.collectives.all_to_all(y, AXIS, split_axis=0, concat_axis=1)
            with df.mark("experts"):
                y = jax.nn.silu(jnp.einsum("ecd,edf->ecf", y, up) + bias[:, None])
                y = jnp.einsum("ecf,efd->ecd", y, down)
            y = df.collectives.all_to_all(y, AXIS, split_axis=1, concat_axis=0)
            with df.mark("add"):
                x = x + y
        return x

    shapes = ((WIDTH, WIDTH), (experts, WIDTH, HIDDEN), (experts, HIDDEN), (experts, HIDDEN, WIDTH))
    specs = [(P(), P(AXIS), P(AXIS), P(AXIS))] * layers
    args = (weights(layers, *shapes), normal(experts, rows, WIDTH, seed=99))
    return Model(fun, args, (specs, P(None, AXIS)), P(None, AXIS))
