"""The matmuls that communicate: their references, programs for GPUs, and limits.

That the kernels give their references' results is checked on GPUs, as for the all-reduce.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from kernel_checks import arrays, assert_within_rounding, lowered_for_cuda

from dynaflow_jax import compat
from pallas_kernels import all_gather_matmul as gather
from pallas_kernels import matmul_reduce_scatter as scatter
from pallas_kernels import persistent_matmul as plain
from pallas_kernels.support import KernelError

S = jax.ShapeDtypeStruct


def over(shape, axis, fun, in_specs, out_specs, check_vma=True):
    names = tuple("abc"[: len(shape)])
    count = 1
    for size in shape:
        count *= size
    axes = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[:count], axis_types=axes)
    own = functools.partial(fun, axis_name=axis)
    return jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def scattered(shape, axis, fun, **options):
    return over(shape, axis, fun, (P(None, axis), P(axis)), P(axis), **options)


def gathered(shape, axis, fun, **options):
    return over(shape, axis, fun, (P(axis), P(None, axis)), P(None, axis), **options)


def test_the_references_are_the_products():
    a, b = arrays(S((64, 128), jnp.float16), S((128, 64), jnp.float16))
    want = jax.jit(plain.reference)(a, b)
    assert_within_rounding(jax.jit(gathered((4,), "a", gather.reference))(a, b), want, 1.01)
    # Here four partial sums are rounded each, and then added.
    assert_within_rounding(jax.jit(scattered((4,), "a", scatter.reference))(a, b), want, 8)


def test_partial_sums_come_with_the_devices_own_first():
    a, b = arrays(S((8, 8), jnp.float32), S((8, 4), jnp.float32))

    def parts(a, b, *, axis_name):
        got = scatter.partial_sums(a, b, axis_name=axis_name)
        rows = a.shape[0] // jax.lax.axis_size(axis_name)
        own = jax.lax.dynamic_slice_in_dim(a @ b, jax.lax.axis_index(axis_name) * rows, rows)
        return jnp.sum(got, axis=0), jnp.abs(got[0] - own)

    total, difference = jax.jit(over((4,), "a", parts, (P(None, "a"), P("a")), P("a")))(a, b)
    assert_within_rounding(total, a @ b, 16)
    assert float(difference.max()) == 0


@pytest.mark.parametrize(("shape", "axis"), [((2,), "a"), ((8,), "a"), ((2, 4), "a"), ((2, 4), "b")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_reduce_scatter_lowers_for_gpus(shape, axis, check_vma):
    types = S((2048, 4096), jnp.bfloat16), S((4096, 4096), jnp.bfloat16)
    program = scattered(shape, axis, scatter.matmul_reduce_scatter, check_vma=check_vma)
    if compat.JAX_VERSION < (0, 11):
        with pytest.raises(KernelError, match=r"since JAX 0\.11"):
            lowered_for_cuda(program, *types)
        return
    text, kernels = lowered_for_cuda(program, *types)
    assert kernels == 1
    assert "reduce_scatter" not in text.replace("matmul_reduce_scatter", "")


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ((S((128, 512), jnp.bfloat16), S((512, 256), jnp.bfloat16)), "not made of whole tiles"),
        ((S((4096, 4096), jnp.float32), S((4096, 4096), jnp.float32)), "a is float32"),
    ],
)
def test_limits_are_told(types, message):
    if compat.JAX_VERSION >= (0, 11):
        with pytest.raises(KernelError, match=message):
            jax.eval_shape(scattered((2,), "a", scatter.matmul_reduce_scatter), *types)
    assert not scatter.supports(*types)
    a, b = types
    halves = S((a.shape[0] // 2, a.shape[1]), a.dtype), S((b.shape[0], b.shape[1] // 2), b.dtype)
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(gathered((2,), "a", gather.all_gather_matmul), *types)
    assert not gather.supports(*halves)


def test_other_axes_are_refused_where_the_kernel_ignores_them():
    types = S((4096, 4096), jnp.bfloat16), S((4096, 4096), jnp.bfloat16)
    with pytest.raises(KernelError, match="other axes"):
        jax.eval_shape(gathered((2, 4), "a", gather.all_gather_matmul), *types)


def test_one_device_is_refused():
    types = S((4096, 4096), jnp.bfloat16), S((4096, 4096), jnp.bfloat16)
    for program in (gathered((1,), "a", gather.all_gather_matmul), scattered((1,), "a", scatter.matmul_reduce_scatter)):
        with pytest.raises(KernelError, match="no other device"):
            jax.eval_shape(program, *types)


def test_hardware_is_told():
    types = S((4096, 4096), jnp.bfloat16), S((4096, 4096), jnp.bfloat16)
    assert "NVIDIA GPU" in gather.supports(*types).reason
    expected = "NVIDIA GPU" if compat.JAX_VERSION >= (0, 11) else "since JAX 0.11"
    assert expected in scatter.supports(*types).reason
