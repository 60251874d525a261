"""The persistent matmul, alone and beside the activation, against plain JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_checks import arrays, assert_within_rounding, lowered_for_cuda

from pallas_kernels import hopper
from pallas_kernels import matmul_silu as silu
from pallas_kernels import persistent_matmul as plain
from pallas_kernels.support import KernelError

S = jax.ShapeDtypeStruct
SMALL = hopper.Tiles(m=128, n=128, k=64, stages=2, split="m")
# Sums of products in another order; the inputs' products are exact in float32, so that little is lost before rounding.
ULPS = 1.01


def product(m, k, n, dtype=jnp.bfloat16):
    return S((m, k), dtype), S((k, n), dtype)


@pytest.mark.parametrize(
    ("types", "tiles", "sms"),
    [
        (product(128, 128, 128), SMALL, 1),
        (
            product(256, 192, 128, jnp.float16),
            SMALL,
            1,
        ),  # two tiles in a block, and stages that do not divide the steps
        (product(128, 128, 384), dataclasses.replace(SMALL, split="n", minor="n"), 2),
    ],
    ids=["one tile", "tile after tile", "several blocks"],
)
def test_persistent_matmul_equals_the_reference(types, tiles, sms):
    a, b = arrays(*types)
    got = plain.persistent_matmul(a, b, num_sms=sms, tiles=tiles, interpret=True)
    assert_within_rounding(got, jax.jit(plain.reference)(a, b), ULPS)


def test_matmul_silu_equals_the_reference():
    tuning = silu.Tuning(tiles=dataclasses.replace(SMALL, split="n"), rows=8, columns=128, depth=2)
    # Three pieces of the activation for one block, and two for the other: more and fewer than are in flight.
    args = arrays(*product(128, 128, 256), S((40, 256), jnp.bfloat16))
    got = silu.matmul_silu(*args, num_sms=2, tuning=tuning, interpret=True)
    want = jax.jit(silu.reference)(*args)
    assert_within_rounding(got[0], want[0], ULPS)
    assert_within_rounding(got[1], want[1], ULPS)


def test_derivatives_are_those_of_the_references():
    types = (*product(128, 128, 128), S((8, 256), jnp.bfloat16))
    tuning = silu.Tuning(tiles=SMALL, columns=128, depth=1)
    args = arrays(*types)
    cotangents = tuple(arrays(S((128, 128), jnp.bfloat16), S((8, 128), jnp.bfloat16), seed=1))
    kernel = functools.partial(silu.matmul_silu, num_sms=1, tuning=tuning, interpret=True)
    for got, want in zip(
        jax.vjp(kernel, *args)[1](cotangents), jax.vjp(silu.reference, *args)[1](cotangents), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("tiles", plain.TILES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_persistent_matmul_lowers_for_a_gpu(tiles, dtype):
    types = product(2048, 4096, 4096, dtype)
    assert lowered_for_cuda(functools.partial(plain.persistent_matmul, tiles=tiles, num_sms=100), *types)[1] == 1


@pytest.mark.parametrize("n", [4096, 6144, 28672])
def test_matmul_silu_lowers_for_a_gpu(n):
    types = (*product(4096, 4096, n), S((4096, 28672), jnp.bfloat16))
    assert lowered_for_cuda(silu.matmul_silu, *types)[1] == 1


def test_the_grid_is_the_budget():
    types = product(4096, 4096, 4096)
    programs = {
        sms: str(jax.make_jaxpr(functools.partial(plain.persistent_matmul, num_sms=sms))(*types)) for sms in (7, 100)
    }
    for sms, program in programs.items():
        assert f"grid=({sms},)" in program


def test_what_all_blocks_hold_fits_the_multiprocessor():
    assert all(tiles.smem_bytes(2) < hopper.SMEM_BYTES for tiles in plain.TILES)
    for tuning in (silu.WIDE, silu.SQUARE):
        assert tuning.smem_bytes(2) < hopper.SMEM_BYTES
        multiply, fetch, activate = tuning.registers
        assert hopper.CONSUMERS * multiply + fetch + activate <= 512


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ((S((128, 64), jnp.bfloat16), S((128, 128), jnp.bfloat16)), "is wanted"),
        (product(100, 4096, 4096), "not made of whole tiles"),
        (product(4096, 128, 4096), "shorter than"),
        (product(4096, 4096, 4096, jnp.float32), "a is float32"),
        ((S((256, 512), jnp.bfloat16), S((512, 256), jnp.float16)), "b is float16"),
    ],
)
def test_limits_of_the_matmul_are_told(types, message):
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(plain.persistent_matmul, *types)
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(silu.matmul_silu, *types, S((8, 1024), jnp.bfloat16))
    assert not plain.supports(*types)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (S((8, 1000), jnp.bfloat16), "whole pieces"),
        (S((7, 1024), jnp.bfloat16), "whole pieces"),
        (S((8, 1024), jnp.float32), "gate_up is float32"),
    ],
)
def test_limits_of_the_activation_are_told(gate_up, message):
    types = (*product(256, 512, 256), gate_up)
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(silu.matmul_silu, *types)
    assert not silu.supports(*types)


def test_the_tuning_goes_by_how_long_the_matmul_is_beside_the_activation():
    gate_up = S((4096, 28672), jnp.bfloat16)
    assert silu.choose(*product(4096, 4096, 4096), gate_up) is silu.WIDE
    assert silu.choose(*product(4096, 4096, 28672), gate_up) is silu.SQUARE
    assert silu.choose(*product(4096, 4096, 4224), gate_up) is silu.SQUARE  # no whole wide tiles


def test_the_tiling_with_the_least_waste_is_chosen():
    assert plain.choose(8192, 8192, 8192, 132) == plain.TILES[0]
    small = plain.choose(256, 4096, 4096, 132)
    assert small.m * small.n == 128 * 128
