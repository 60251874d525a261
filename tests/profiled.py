"""What is profiled: small functions and the ways to schedule them."""

import jax
import jax.numpy as jnp
import pytest
from models import normal
from scheduling import Do, Split, run_merged, run_rest

import dynaflow_jax as df

needs_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 (virtual) devices")


def mlp(w, x):
    with df.mark("up"):
        x = jnp.tanh(x @ w)
    with df.mark("down"):
        return x @ w.T


def looped(w, x):
    def body(x, scale):
        with df.mark("layer"):
            x = jnp.tanh(x @ w) @ w.T * scale
        with df.mark("add"):
            return x + 1, x.sum(-1)

    x, ys = jax.lax.scan(body, x, jnp.arange(1.0, 4.0), reverse=True)
    return x, ys.T


def dropped(w, x):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return mlp(w, jnp.where(keep, x, 0))


def replaced(ctx):
    while ops := ctx.get_ready_ops():
        own = [op for op in ctx.all_ops() if op.micro_batch == ops[0].micro_batch]
        ctx.execute(own, fn=lambda x, w: (jnp.tanh(x @ w) @ w.T,))


W, ROWS = normal(16, 32), normal(8, 16)

CASES = {
    "sequential": (mlp, df.strategies.Sequential()),
    "two streams": (mlp, df.strategies.NanoFlow(2, concurrent=True)),
    "uneven": (mlp, Split(5, 3)),
    "merged": (mlp, Do(run_merged, 6, 2)),
    "replaced": (mlp, Do(replaced, 4, 4)),
    "loop": (looped, df.strategies.NanoFlow(2)),
    "draw": (dropped, Do(run_rest, 4, 4)),
}
