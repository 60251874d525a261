"""The one-kernel all-reduce and norm: its reference, its program for GPUs, and its limits.

No version of JAX simulates another device's memory on the CPU; that the kernel gives the reference's results is
checked on GPUs, by ``tests/gpu`` and before every measurement of ``examples/benchmarks/kernels.py``.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_checks import arrays, lowered_for_cuda

from pallas_kernels import add_rms_norm
from pallas_kernels.all_reduce_norm import all_reduce_norm, reference, supports
from pallas_kernels.support import KernelError

S = jax.ShapeDtypeStruct


def over(shape, axis, fun, check_vma=True):
    """``fun`` over a mesh, with the partial sums of each device along the first axis."""
    names = tuple("abc"[: len(shape)])
    count = int(np.prod(shape))
    mesh = jax.make_mesh(
        shape, names, devices=jax.devices()[:count], axis_types=(jax.sharding.AxisType.Auto,) * len(shape)
    )
    own = functools.partial(fun, axis_name=axis)
    return jax.shard_map(
        lambda x, residual, weight: own(x[0], residual, weight),
        mesh=mesh,
        in_specs=(P(axis), P(), P()),
        out_specs=P(),
        check_vma=check_vma,
    )


def test_the_reference_adds_the_devices_partial_sums():
    x, residual, weight = arrays(S((4, 3, 256), jnp.bfloat16), S((3, 256), jnp.bfloat16), S((256,), jnp.float32))
    got = jax.jit(over((4,), "a", reference))(x, residual, weight)
    want = jax.jit(add_rms_norm.reference)(x[0], residual, weight, *x[1:])
    for a, b in zip(got, want, strict=True):
        # Four partial sums, added in another order in float32, then rounded to eight bits.
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(("shape", "axis"), [((2,), "a"), ((8,), "a"), ((2, 4), "a"), ((2, 4), "b")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_for_gpus(shape, axis, check_vma):
    along = shape["abc".index(axis)]
    types = S((along, 64, 1024), jnp.bfloat16), S((64, 1024), jnp.bfloat16), S((1024,), jnp.bfloat16)
    text, kernels = lowered_for_cuda(over(shape, axis, all_reduce_norm, check_vma), *types)
    assert kernels == 1
    assert "all_reduce" not in text.replace("all_reduce_norm", "")


def test_no_block_waits_for_one_that_cannot_run():
    # However many rows: blocks wait for their counterparts, so all must be resident.
    types = S((2, 4096, 1024), jnp.bfloat16), S((4096, 1024), jnp.bfloat16), S((1024,), jnp.bfloat16)
    program = str(jax.make_jaxpr(over((2,), "a", functools.partial(all_reduce_norm, num_blocks=4096)))(*types))
    assert "grid=(264,)" in program


def test_limits_are_told():
    types = S((2, 64, 100), jnp.bfloat16), S((64, 100), jnp.bfloat16), S((100,), jnp.bfloat16)
    with pytest.raises(KernelError, match="all_reduce_norm: rows must have a multiple of 128"):
        jax.eval_shape(over((2,), "a", all_reduce_norm), *types)
    alone = S((1, 64, 128), jnp.bfloat16), S((64, 128), jnp.bfloat16), S((128,), jnp.bfloat16)
    with pytest.raises(KernelError, match="no other device"):
        jax.eval_shape(over((1,), "a", all_reduce_norm), *alone)
    row = S((64, 128), jnp.bfloat16)
    assert "NVIDIA GPU" in supports(row, row, S((128,), jnp.bfloat16)).reason
