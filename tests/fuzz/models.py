"""Small functions for the fuzzer, and plans of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dynaflow_jax as df

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32) / 2
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32)


def layer(w, x):
    """Two operators."""
    with df.mark("a"):
        y = x @ w
    with df.mark("b", tags={"per_token"}):
        return jnp.tanh(y)


def looped(w, x):
    """The layer in a loop, and an operator behind it."""
    x, sums = jax.lax.scan(lambda x, _: ((y := layer(w, x)), y.sum(1)), x, None, length=3)
    with df.mark("head"):
        return x * 2, sums


def branches(w, x):
    """Two branches and their sum."""
    with df.mark("left"):
        left = jnp.sin(x) @ w
    with df.mark("right"):
        right = jnp.cos(x) @ w
    with df.mark("sum"):
        return left + right


def fused(x, w):
    """In place of ``layer``."""
    return (jnp.tanh(x @ w),)


class Scheduled(df.OpScheduler):
    """Sizes, and a function in place of ``schedule``."""

    def __init__(self, do: Callable[[Any], None], *sizes: int):
        self.do = do
        self.sizes = sizes

    def split(self, info):
        return self.sizes or [info.batch_size]

    def schedule(self, ctx):
        self.do(ctx)


def in_order(ctx):
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, stream="second" if op.name == "b" else "first")


def merged(ctx):
    while ops := ctx.get_ready_ops():
        same = [op for op in ops if op.key == ops[0].key]
        ctx.execute(same if len(same) > 1 else same[0])


def replaced(ctx):
    ops = ctx.all_ops()
    first = ctx.execute(ops[::2], fn=fused, stream="first", priority=1)
    ctx.execute(ops[1::2], fn=fused, stream="second", after=first, sm_budget=8)


LOSS = jax.value_and_grad(lambda w, x: (layer(w, x) ** 2).mean())
FUNCTIONS: dict[str, tuple[Callable[..., Any], df.OpScheduler, dict[str, Any]]] = {
    "layer": (layer, Scheduled(in_order, 3, 5), {}),
    "whole": (layer, Scheduled(in_order), {}),
    "merged": (layer, Scheduled(merged, 4, 4), {}),
    "replaced": (layer, Scheduled(replaced, 4, 4), {}),
    "branches": (branches, Scheduled(merged, 2, 6), {}),
    "loop": (looped, Scheduled(in_order, 4, 4), {}),
    "training": (LOSS, Scheduled(in_order, 3, 5), {"out_axes": "mean"}),
}
