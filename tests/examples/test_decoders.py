"""Decoders of other systems, shared by devices from outside, compute what the systems compute."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from examples.benchmarks.decoders import AXIS, SYSTEMS, share_of, step
from examples.integrations.check import Sizes, difference

SIZES = Sizes(layers=2, vocabulary=64, width=32, hidden=48, heads=4, head=8)
BOUND = 32 * float(jnp.finfo(jnp.float32).eps)  # sums in another order; see examples/integrations/check.py

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 (virtual) devices")


@pytest.fixture(scope="module", params=SYSTEMS)
def model(request):
    """A system's decoder and its parameters, in float32."""
    model = SYSTEMS[request.param](SIZES, devices=2)
    assert {w.dtype for w in jax.tree.leaves(model.params)} == {jnp.dtype(jnp.bfloat16)}
    return model, jax.tree.map(lambda w: w.astype(jnp.float32), model.params)


def shard_map(fun, specs, outs, checked):
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=checked))


def test_tensor_parallelism(model):
    model, params = model
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 1, SIZES.vocabulary)
    specs = share_of(params)
    shared = [spec for spec in jax.tree.leaves(specs) if spec != P()]
    assert len(shared) > len(jax.tree.leaves(specs)) // 3
    total = functools.partial(jax.lax.psum, axis_name=AXIS)
    fun = shard_map(lambda params, tokens: model.shared(params, tokens, total), (specs, P()), P(), False)
    assert difference(fun(params, tokens), jax.jit(model.apply)(params, tokens)) <= BOUND


@pytest.mark.parametrize("at_use", [True, False])
def test_data_parallelism(model, at_use):
    model, params = model
    tokens = jax.random.randint(jax.random.key(0), (4, 9), 1, SIZES.vocabulary)
    reduce = {} if at_use else {"reduce": functools.partial(jax.lax.psum, axis_name=AXIS)}
    fun = functools.partial(step, model.apply, devices=2, **reduce)
    values, gradients = shard_map(fun, (P(), P(AXIS)), (P(AXIS), P()), at_use)(params, tokens)
    value, whole = jax.jit(functools.partial(step, model.apply))(params, tokens)
    assert difference(values.sum(), value[0]) <= BOUND
    assert difference(gradients, whole) <= BOUND
