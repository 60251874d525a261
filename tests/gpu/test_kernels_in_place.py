"""Kernels in place of what operators compute, on a Hopper GPU, whichever way the plan is lowered."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynaflow_jax as df
from dynaflow_jax.errors import DispatchWarning
from pallas_kernels import Kernels

WIDTH = 512


def dense(weights, x):
    """Layers of an addition, a norm and a matmul; the first norm is of no sum in its operator."""
    h, residual = x, jnp.ones_like(x)
    for i, (scale, w) in enumerate(weights):
        with df.mark(f"layer_{i}"):
            residual = h + residual
            f = residual.astype(jnp.float32)
            normed = (f * jax.lax.rsqrt(jnp.mean(f * f, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)
            h = jnp.tanh(normed @ w)
    return h + residual


def experts(sizes):
    def fun(weights, x):
        with df.mark("experts"):
            return jax.lax.ragged_dot(x, weights, jnp.asarray(sizes, jnp.int32))

    return fun


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / shape[-2] ** 0.5


def kernels_of(flow, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DispatchWarning)
        return {step.fn.__name__ for step in flow.plan(*args).steps if step.fn is not None}


def close(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


@pytest.mark.parametrize("backend", ["xla", "dispatch"])
def test_norms(backend):
    weights = [(1 + normal(i, 1, WIDTH)[0].astype(jnp.float32), normal(9 + i, WIDTH, WIDTH)) for i in range(3)]
    scheduler = df.strategies.WithKernels(df.strategies.NanoFlow(concurrent=True), Kernels(everywhere=True))
    flow = df.dynaflow(dense, scheduler=scheduler, batch_axes=(None, 0), backend=backend)
    x = normal(99, 64, 16, WIDTH)
    assert kernels_of(flow, weights, x) == {"add_rms_norm"}
    run = jax.jit(flow)
    for seed in range(5):
        x = normal(seed, 64, 16, WIDTH)
        close(run(weights, x), jax.jit(dense)(weights, x))


@pytest.mark.parametrize("backend", ["xla", "dispatch"])
@pytest.mark.parametrize("sizes", [(100, 0, 300, 112), (100, 0, 50, 1), (0, 0, 0, 0)], ids=["all", "some", "none"])
def test_grouped_matmuls(backend, sizes):
    """Rows of no group are zeros, as ``ragged_dot`` has it."""
    weights, x = normal(0, 4, WIDTH, 256), normal(1, 512, WIDTH)
    scheduler = df.strategies.WithKernels(df.strategies.Sequential(), Kernels(everywhere=True))
    flow = df.dynaflow(experts(sizes), scheduler=scheduler, batch_axes=(None, None), backend=backend)
    assert kernels_of(flow, weights, x) == {"grouped_matmul"}
    got, want = jax.jit(flow)(weights, x), jax.jit(experts(sizes))(weights, x)
    if any(sizes):
        close(got, want)
    assert not np.any(np.asarray(got[sum(sizes) :], np.float32))


def test_gradients_from_outside():
    weights = [(jnp.ones(WIDTH), normal(9 + i, WIDTH, WIDTH)) for i in range(2)]
    scheduler = df.strategies.WithKernels(df.strategies.Sequential(), Kernels(everywhere=True))
    flow, x = df.dynaflow(dense, scheduler=scheduler, batch_axes=(None, 0), backend="xla"), normal(1, 64, WIDTH)
    got, want = (
        jax.jit(jax.grad(lambda w, f=f: (f(w, x).astype(jnp.float32) ** 2).mean()))(weights) for f in (flow, dense)
    )
    jax.tree.map(close, got, want)


@pytest.mark.parametrize(("width", "faster"), [(4096, False), (8192, True)])
def test_by_default_only_what_was_measured_faster(width, faster):
    """In whole models if there are such numbers, as for a width of 4096; else by itself."""
    kind = jax.devices()[0].device_kind
    weights = [(jnp.ones(width), normal(0, width, width))]
    scheduler = df.strategies.WithKernels(df.strategies.Sequential(), Kernels())
    flow = df.dynaflow(dense, scheduler=scheduler, batch_axes=(None, 0), backend="xla")
    found = kernels_of(flow, weights, normal(1, 4096, width))
    assert found == ({"add_rms_norm"} if faster and "H200" in kind else set())
