"""Decoders of systems nobody here wrote, at any size: as they are, and as one device computes its share of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from examples.benchmarks.training import same
from examples.integrations import with_linen, with_nnx
from examples.integrations.check import Sizes

AXIS = "gpus"
"""The mesh axis over which parameters are shared."""

Reduce = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A system's decoder.

    Attributes:
      params: random.
      apply: from ``params`` and tokens ``int32[rows, tokens]`` to logits ``[rows, tokens, vocabulary]``.
      shared: the same from one device's share of the parameters, with a function that adds up the devices' parts.
    """

    params: Any
    apply: Callable[[Any, jax.Array], Any]
    shared: Callable[[Any, jax.Array, Reduce], Any]


def share(sizes: Sizes, devices: int) -> Sizes:
    """One device's: its heads and hidden units."""
    return dataclasses.replace(sizes, heads=sizes.heads // devices, hidden=sizes.hidden // devices)


def linen(sizes: Sizes, devices: int, dtype: Any = jnp.bfloat16) -> Model:
    """Flax Linen's decoder, whose blocks' outputs an interceptor adds up over so many devices."""
    model, part = with_linen.Decoder(sizes), with_linen.Decoder(share(sizes, devices))
    params = nn.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))

    def shared(params: Any, tokens: jax.Array, reduce: Reduce) -> Any:
        def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            out = call(*args, **kwargs)
            block = context.module.name in ("self_attention", "mlp") and context.method_name == "__call__"
            return reduce(out) if block else out

        with nn.intercept_methods(interceptor):
            return part.apply(params, tokens)

    return Model(_cast(params, dtype), model.apply, shared)


class Reduced(nnx.Module):
    """A module whose output the devices add up."""

    def __init__(self, inner: nnx.Module, reduce: Reduce):
        self.inner = inner
        self.reduce = reduce

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self.reduce(self.inner(*args, **kwargs))


def nnx_decoder(sizes: Sizes, devices: int, dtype: Any = jnp.bfloat16) -> Model:
    """Flax NNX's decoder, whose blocks are replaced by ones that add up their outputs over so many devices."""

    def decoder(sizes: Sizes) -> nnx.Module:
        made = with_nnx.Decoder(sizes, nnx.Rngs(0))
        # Not the type of the parameters that it was made with: all that follows is computed in it.
        made.embed.dtype = None
        return made

    definition, params = nnx.split(decoder(sizes))
    part = nnx.graphdef(nnx.eval_shape(lambda: decoder(share(sizes, devices))))

    def apply(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(definition, params)(tokens)

    def shared(params: Any, tokens: jax.Array, reduce: Reduce) -> jax.Array:
        model = nnx.merge(part, params)
        for layer in model.layers:
            layer.attention, layer.ffn = Reduced(layer.attention, reduce), Reduced(layer.ffn, reduce)
        return model(tokens)

    return Model(_cast(params, dtype), apply, shared)


@functools.partial(jax.jit, static_argnums=1)
def _cast(params: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda w: w.astype(dtype), params)


SYSTEMS = {"linen": linen, "nnx": nnx_decoder}
"""What makes a model, by the system's name."""


def share_of(params: Any) -> Any:
    """How tensor parallelism shards parameters: heads and hidden units; everything else is the same on all devices.

    The biases behind the sums are among that, and so added as often as there are devices; these are zeros.
    """
    axes = dict.fromkeys(("query", "key", "value"), -2) | {"gate": -1, "up": -1}  # of kernels and biases
    rows = {"out": -3, "down": -2}  # of kernels

    def spec(path: Any, w: jax.Array) -> P:
        names = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value").split("/")
        axis = (axes | rows if names[-1] == "kernel" else axes).get(names[-2])
        return P() if axis is None else P(*[None] * (w.ndim + axis), AXIS)

    return jax.tree_util.tree_map_with_path(spec, params)


def step(
    apply: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    tokens: jax.Array,
    *,
    devices: int = 1,
    reduce: Reduce = same,
) -> tuple[jax.Array, Any]:
    """Cross entropy of the next token, and its gradients.

    Args:
      apply: the model.
      params: all of them.
      tokens: this device's rows, ``int32[rows, tokens + 1]``.
      devices: how many there are, if the sum over them is to be the mean over all rows.
      reduce: from a gradient to the sum over all devices.

    Returns:
      This device's share of the loss, of shape (1,), and the gradients.
    """

    def loss(params: Any) -> jax.Array:
        logits = apply(params, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() / devices

    value, gradients = jax.value_and_grad(loss)(params)
    return value[None], jax.tree.map(reduce, gradients)
