"""RMSNorm alone against its reference, its derivative, and its program for a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from kernel_checks import arrays, assert_within_rounding, lowered_for_cuda

from pallas_kernels.add_rms_norm import Tuning
from pallas_kernels.rms_norm import reference, rms_norm, supports
from pallas_kernels.support import KernelError

S = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("shape", "dtype", "tuning"),
    [
        ((2, 256), jnp.bfloat16, None),
        ((1, 128), jnp.float32, None),
        ((2, 1, 384), jnp.float16, None),
        ((3, 256), jnp.bfloat16, Tuning(rows=3, keep_weight=True)),
        ((5, 256), jnp.float32, Tuning(rows=2)),
    ],
)
def test_equals_the_reference(shape, dtype, tuning):
    args = arrays(S(shape, dtype), S(shape[-1:], jnp.float32))
    got, want = rms_norm(*args, tuning=tuning, interpret=True), jax.jit(reference)(*args)
    assert_within_rounding(got, want, ulps=8 if dtype == jnp.float32 else 1.01)


def test_the_derivative_is_that_of_the_reference():
    args = arrays(S((3, 256), jnp.float32), S((256,), jnp.float32))
    cotangent = arrays(S((3, 256), jnp.float32), seed=1)[0]
    got = jax.vjp(functools.partial(rms_norm, interpret=True), *args)[1](cotangent)
    for a, b in zip(got, jax.vjp(reference, *args)[1](cotangent), strict=True):
        assert_within_rounding(a, b, ulps=8)


@pytest.mark.parametrize("rows", [1, 4096])
def test_lowers_for_a_gpu(rows):
    _, kernels = lowered_for_cuda(rms_norm, S((rows, 4096), jnp.bfloat16), S((4096,), jnp.float32))
    assert kernels == 1


def test_limits_are_told():
    with pytest.raises(KernelError, match="rms_norm: rows must have a multiple of 128 elements"):
        rms_norm(jnp.ones((2, 100)), jnp.ones(100))
    assert not supports(S((2, 256), jnp.float32), S((256,), jnp.float32), device=jax.devices("cpu")[0])
