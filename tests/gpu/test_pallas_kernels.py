"""The Pallas kernels on a GPU: the reference's results, again and again (a race shows now and then only)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    add_rms_norm,
    all_gather_matmul,
    grouped_matmul,
    matmul_reduce_scatter,
    matmul_silu,
    mixed_attention,
    persistent_matmul,
    rms_norm,
)

TIMES = 20


def normal(seed, *shape, scale=1.0, dtype=jnp.bfloat16):
    return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * scale).astype(dtype)


def assert_close(got, want, tolerance):
    """Within ``tolerance`` of the largest magnitude, the scale of the rounding errors of sums."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert float(np.abs(a - b).max()) <= tolerance * float(np.abs(b).max())


def check(module, kernel, args, tolerance=2**-7, reference=None):
    """The kernel's results are the reference's the first time, and the same bits every time."""
    wanted = jax.jit(reference or module.reference)(*args)
    call = jax.jit(kernel)
    first = call(*args)
    assert_close(first, wanted, tolerance)
    for _ in range(TIMES):
        for a, b in zip(jax.tree.leaves(call(*args)), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(a, b)


def needs(support):
    if not support:
        pytest.skip(support.reason)


@pytest.mark.parametrize("rows", [1, 16, 300, 5000])
@pytest.mark.parametrize("width", [128, 4096, 5120, 8192])
@pytest.mark.parametrize("partials", [0, 2])
def test_add_rms_norm(rows, width, partials):
    x, residual, *rest = (normal(i, rows, width) for i in range(2 + partials))
    args = (x, residual, normal(9, width), *rest)
    needs(add_rms_norm.supports(*args))
    check(add_rms_norm, add_rms_norm.add_rms_norm, args)


@pytest.mark.parametrize("rows", [1, 300, 5000])
@pytest.mark.parametrize("width", [128, 4096, 5120])
def test_rms_norm(rows, width):
    args = normal(0, rows, width), normal(9, width)
    needs(rms_norm.supports(*args))
    check(rms_norm, rms_norm.rms_norm, args)


@pytest.mark.parametrize("tiles", persistent_matmul.TILES)
@pytest.mark.parametrize("sms", [None, 40])
def test_persistent_matmul(tiles, sms):
    args = normal(0, 1024, 1024), normal(1, 1024, 1536, scale=1024**-0.5)
    needs(persistent_matmul.supports(*args, tiles=tiles))
    kernel = functools.partial(persistent_matmul.persistent_matmul, tiles=tiles, num_sms=sms)
    check(persistent_matmul, kernel, args)


@pytest.mark.parametrize("tokens", [8, 4096])
def test_matmul_silu(tokens):
    args = normal(0, 1024, 1024), normal(1, 1024, 1024, scale=1024**-0.5), normal(2, tokens, 2048)
    needs(matmul_silu.supports(*args))
    check(matmul_silu, matmul_silu.matmul_silu, args)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "lengths", "tuning"),
    [
        (128, 4, 4, 64, [1], {}),
        (1024, 32, 8, 128, [0, 1, 63, 64, 65, 1000, 2048, 2047], {}),
        (1024, 32, 8, 128, [2048] * 64, {"tiles": 4, "chunks": 3, "part": 256}),
        (384, 10, 1, 128, [2048, 0, 777], {"tiles": 2, "chunks": 6, "part": 64}),
        (4096, 16, 8, 64, [0] * 8, {}),
    ],
)
def test_mixed_attention(tokens, heads, kv_heads, head_dim, lengths, tuning):
    rows = len(lengths)
    keys, caches = (2, tokens, kv_heads, head_dim), (rows, 2048, kv_heads, head_dim)
    prompts = normal(0, 2, tokens, heads, head_dim), normal(1, *keys), normal(2, *keys)
    decode = normal(3, rows, heads, head_dim), normal(4, *caches), normal(5, *caches), jnp.array(lengths, jnp.int32)
    tuning = mixed_attention.Tuning(**tuning)
    needs(mixed_attention.supports(*prompts, *decode, tuning=tuning))
    kernel = functools.partial(mixed_attention.mixed_attention, tuning=tuning)
    check(mixed_attention, kernel, (*prompts, *decode), 2**-6)


def test_grouped_matmul():
    sizes = jnp.array([300, 0, 1, 723], jnp.int32)
    args = normal(0, 1024, 512), normal(1, 4, 512, 256, scale=512**-0.5), sizes
    needs(grouped_matmul.supports(*args))
    check(grouped_matmul, grouped_matmul.grouped_matmul, args)


def over_all_devices(fun, in_specs, out_specs):
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    own = functools.partial(fun, axis_name="d")
    return mesh, jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def check_over_all_devices(module, kernel, args, in_specs, out_specs):
    mesh, program = over_all_devices(kernel, in_specs, out_specs)
    _, reference = over_all_devices(module.reference, in_specs, out_specs)
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, in_specs, strict=True)]
    check(module, program, placed, 2**-6, reference)


def test_matmul_reduce_scatter():
    devices = jax.device_count()
    a, b = normal(0, 1024, 512 * devices), normal(1, 512 * devices, 1024, scale=0.03)
    types = jax.ShapeDtypeStruct((1024, 512), a.dtype), jax.ShapeDtypeStruct((512, 1024), a.dtype)
    needs(matmul_reduce_scatter.supports(*types, devices=max(2, devices)))
    kernel = matmul_reduce_scatter.matmul_reduce_scatter
    check_over_all_devices(matmul_reduce_scatter, kernel, (a, b), (P(None, "d"), P("d")), P("d"))


def test_all_gather_matmul():
    devices = jax.device_count()
    a, b = normal(0, 512 * devices, 1024), normal(1, 1024, 1024 * devices, scale=0.03)
    types = jax.ShapeDtypeStruct((512, 1024), a.dtype), jax.ShapeDtypeStruct((1024, 1024), a.dtype)
    needs(all_gather_matmul.supports(*types, devices=max(2, devices)))
    kernel = all_gather_matmul.all_gather_matmul
    check_over_all_devices(all_gather_matmul, kernel, (a, b), (P("d"), P(None, "d")), P(None, "d"))
