"""The fused residual addition and RMSNorm against its reference, against Flax, and in a schedule."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernel_checks import arrays, assert_within_rounding, lowered_for_cuda

import dynaflow_jax as df
from pallas_kernels.add_rms_norm import Tuning, add_rms_norm, reference, supports
from pallas_kernels.support import KernelError

S = jax.ShapeDtypeStruct
simulated = functools.partial(add_rms_norm, interpret=True)


def operands(rows, width, partials=0, dtype=jnp.bfloat16, residual=None, weight=jnp.float32):
    row = S((*rows, width), dtype)
    return row, S(row.shape, residual or dtype), S((width,), weight), *[row] * partials


@pytest.mark.parametrize(
    ("types", "tuning"),
    [
        (operands((2,), 256), None),
        (operands((1,), 128, dtype=jnp.float32), None),
        (operands((1, 2), 384, dtype=jnp.float16), None),
        (operands((3,), 256, partials=1), Tuning(rows=3, keep_weight=True)),
        (operands((2,), 512, partials=2, residual=jnp.float32), Tuning(rows=2)),
    ],
    ids=["bf16", "f32", "f16", "partial", "mixed"],
)
def test_equals_the_reference(types, tuning):
    args = arrays(*types)
    normed, total = simulated(*args, tuning=tuning)
    want_normed, want_total = jax.jit(reference)(*args)
    # The sum is rounded once, and its float32 additions are those of the reference: no difference at all.
    assert jnp.array_equal(total, want_total)
    # The mean square is summed in another order: a float32 rounding error, then rounded to the dtype.
    assert_within_rounding(normed, want_normed, ulps=8 if want_normed.dtype == jnp.float32 else 1.01)


def test_every_row_is_normalized_whatever_the_grid():
    args = arrays(*operands((5,), 256))
    results = [simulated(*args, tuning=tuning) for tuning in (Tuning(1), Tuning(2), Tuning(5, keep_weight=True))]
    for normed, total in results:
        assert jnp.array_equal(total, results[0][1])
        assert jnp.array_equal(normed, results[0][0])


def test_the_derivative_is_that_of_the_reference():
    args = arrays(*operands((3,), 256, partials=1, dtype=jnp.float32))
    cotangents = arrays(S((3, 256), jnp.float32), S((3, 256), jnp.float32), seed=1)
    got = jax.vjp(simulated, *args)[1](tuple(cotangents))
    want = jax.vjp(reference, *args)[1](tuple(cotangents))
    for a, b in zip(got, want, strict=True):
        # The kernel's derivative starts from the rounded sum and adds what comes back to it in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 16, 1000, 16384])
@pytest.mark.parametrize("width", [128, 2048, 4096, 5120, 8192, 16384])
def test_lowers_for_a_gpu(rows, width):
    _, kernels = lowered_for_cuda(add_rms_norm, *operands((rows,), width, partials=1))
    assert kernels == 1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_lowers_for_a_gpu_in_other_dtypes_and_when_differentiated(dtype):
    def loss(*args):
        return sum(jnp.sum(out.astype(jnp.float32)) for out in add_rms_norm(*args))

    _, kernels = lowered_for_cuda(jax.grad(loss, argnums=(0, 1, 2)), *operands((32,), 1024, dtype=dtype))
    assert kernels == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_under_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        add_rms_norm, mesh=mesh, in_specs=(P("d"), P("d"), P()), out_specs=P("d"), check_vma=check_vma
    )
    _, kernels = lowered_for_cuda(sharded, *operands((32,), 1024))
    assert kernels == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: S((3, 128), jnp.bfloat16)}, r"residual has shape \(3, 128\)"),
        ({2: S((128,), jnp.bfloat16)}, r"weight has shape \(128,\)"),
        ({3: S((4, 256), jnp.bfloat16)}, r"partials\[0\] has shape \(4, 256\)"),
        ({0: S((3, 256), jnp.int32)}, "x is int32"),
        (dict.fromkeys((0, 1, 3), S((3, 100), jnp.bfloat16)) | {2: S((100,), jnp.bfloat16)}, "multiple of 128"),
        (dict.fromkeys((0, 1, 3), S((0, 256), jnp.bfloat16)), "no rows"),
    ],
)
def test_limits_are_told(change, message):
    types = [change.get(i, one) for i, one in enumerate(operands((3,), 256, partials=1))]
    with pytest.raises(KernelError, match=message):
        jax.eval_shape(add_rms_norm, *types)
    assert not supports(*types)


def test_hardware_is_told():
    answer = supports(*operands((3,), 256))
    assert not answer
    assert "NVIDIA GPU" in answer.reason


class Layer(nn.Module):
    """A residual layer whose norm sees the sum."""

    @nn.compact
    def __call__(self, x):
        update = nn.Dense(x.shape[-1], name="update")(x)
        with df.mark("residual"):
            x = x + update
        return x, nn.RMSNorm(name="norm")(x)


class Model(nn.Module):
    """Two of them."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x, normed = Layer(name=f"layer_{i}")(x)
            x = x + 0.5 * normed
        return x


class FusedNorm(df.OpScheduler):
    """Puts the kernel in place of every residual addition with the norm behind it."""

    def schedule(self, ctx):
        while ops := ctx.get_ready_ops():
            for op in ops:
                if op.key.endswith("/residual"):
                    norm = op.key.removesuffix("residual") + "norm"
                    pair = [op, next(other for other in ctx.all_ops() if other.key == norm)]
                    ctx.execute(pair, fn=self.fused)
                else:
                    ctx.execute(op)

    @staticmethod
    def fused(x, update, weight):
        normed, total = simulated(update, x, weight)
        return total, normed


def test_a_strategy_puts_it_in_place_of_residual_and_norm():
    x = jax.random.normal(jax.random.key(1), (4, 8, 256))
    model = Model()
    variables = model.init(jax.random.key(0), x)
    flow = df.dynaflow(
        model.apply, scheduler=FusedNorm(), rules=[df.SplitModule(nn.RMSNorm)], batch_axes=(None, 0), backend="xla"
    )
    plan = flow.plan(variables, x)
    assert sum(step.fn is not None for step in plan.steps) == 2
    got, want = jax.jit(flow)(variables, x), jax.jit(model.apply)(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
