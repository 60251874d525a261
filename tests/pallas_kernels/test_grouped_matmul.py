"""The experts' matmul against its reference, its program for a GPU, and its limits."""

import functools

import jax
import jax.numpy as jnp
import pytest
from kernel_checks import arrays, assert_within_rounding, lowered_for_cuda

from pallas_kernels.grouped_matmul import grouped_matmul, reference, supports
from pallas_kernels.support import KernelError

S = jax.ShapeDtypeStruct


def operands(rows=512, k=256, n=256, groups=4, dtype=jnp.bfloat16):
    return S((rows, k), dtype), S((groups, k, n), dtype), S((groups,), jnp.int32)


def test_the_reference_multiplies_each_row_with_its_groups_weights():
    x, weights = arrays(*operands(rows=12, k=16, n=8, groups=3)[:2])
    sizes = jnp.array([5, 0, 7], jnp.int32)
    want = jnp.concatenate([jnp.matmul(x[:5], weights[0]), jnp.matmul(x[5:], weights[2])])
    assert_within_rounding(reference(x, weights, sizes), want, 1.01)


def test_equals_the_reference_with_groups_of_any_size():
    x, weights = arrays(*operands(rows=256, k=128, n=128, groups=3)[:2])
    sizes = jnp.array([50, 0, 206], jnp.int32)
    got = grouped_matmul(x, weights, sizes, stages=2, interpret=True)
    assert_within_rounding(got, reference(x, weights, sizes), 1.01)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1000, 32768])
def test_lowers_for_a_gpu(rows, dtype):
    _, kernels = lowered_for_cuda(grouped_matmul, *operands(rows, 4096, 1536, 32, dtype))
    assert kernels == 1


def test_lowers_for_a_gpu_when_differentiated():
    def loss(x, weights, sizes):
        return jnp.sum(grouped_matmul(x, weights, sizes).astype(jnp.float32) ** 2)

    _, kernels = lowered_for_cuda(jax.grad(loss, argnums=(0, 1)), *operands())
    assert kernels == 1


@pytest.mark.parametrize("mapped", [(0, None, None), (0, 0, 0)])
def test_mapped_over_another_axis(mapped):
    """Which ``ragged_dot`` is only if all three are."""
    x, weights = arrays(*operands(rows=128, k=64, n=128, groups=2)[:2])
    xs, sizes = jnp.stack([x, 2 * x]), jnp.array([28, 100], jnp.int32)
    args = [
        jnp.stack([value, value]) if axis == 0 and i else value
        for i, (axis, value) in enumerate(zip(mapped, (xs, weights, sizes), strict=True))
    ]
    got = jax.vmap(functools.partial(grouped_matmul, interpret=True), mapped)(*args)
    assert_within_rounding(got, jnp.stack([reference(each, weights, sizes) for each in xs]), 1.01)
    assert lowered_for_cuda(jax.vmap(grouped_matmul, mapped), *args)[1] == 0


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (operands(k=100), "k = 100"),
        (operands(n=100), "n = 100"),
        (operands(rows=64), "fewer than 128 rows"),
        (operands(groups=65), "at most 64"),
        (operands(dtype=jnp.float32), "x is float32"),
        ((*operands()[:2], S((3,), jnp.int32)), r"sizes has shape \(3,\) for 4 groups"),
        ((*operands()[:2], S((4,), jnp.uint32)), "sizes is uint32"),
        ((operands()[0], S((4, 128, 256), jnp.bfloat16), operands()[2]), "are wanted"),
    ],
)
def test_limits_are_told(types, message):
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(grouped_matmul, *types)
    assert not supports(*types)


def test_hardware_is_told():
    assert "NVIDIA GPU" in supports(*operands()).reason
