"""Strategies and a small model for the tests of the interface."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

import dynaflow_jax as df
from dynaflow_jax.runtime.work import Partition


class Split(df.OpScheduler):
    """Micro-batches of given sizes, in program order."""

    def __init__(self, *sizes):
        self.sizes = sizes

    def split(self, info):
        return self.sizes


class Do(df.OpScheduler):
    """A function in place of ``schedule``."""

    def __init__(self, do, *sizes):
        self._do = do
        self.sizes = sizes

    def split(self, info):
        return self.sizes or [info.batch_size]

    def schedule(self, ctx):
        return self._do(ctx)


def run_rest(ctx):
    """Executes whatever is left, in program order."""
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op)


def run_merged(ctx):
    """Merges each operator over all micro-batches."""
    while ops := ctx.get_ready_ops():
        ctx.execute([op for op in ops if op.key == ops[0].key])


def chains(*names):
    """A function of rows: independent chains of marked operators, named by their first letters."""

    def fun(x):
        ends = {}
        for name in names:
            with df.mark(name):
                ends[name[0]] = jnp.sin(ends.get(name[0], x)) @ jnp.eye(x.shape[1]) + 1
        return tuple(ends.values())

    return fun


W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32) / 2
X = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32)


def layer(w, x):
    """Two operators: ``a``, which multiplies, and ``b``, which does not."""
    with df.mark("a"):
        y = x @ w
    with df.mark("b"):
        return jnp.tanh(y)


def loss(w, x):
    return (layer(w, x) ** 2).mean()


def looped(w, x):
    """The layer five times, with something collected."""

    def step(x, _):
        x = layer(w, x)
        return x, x.sum(1)

    return jax.lax.scan(step, x, None, length=5)


def lowered(flow, *args):
    """All that XLA is given to compile for a function: equal for equal plans, whatever number the dispatcher gave."""
    text = jax.jit(flow).lower(*args).as_text()
    binder = flow._resolve(args, {})[0]._binder
    if binder is None:
        return [text]
    with mlir.make_ir_context():  # as text, which leaves out the lines of source that each was traced at
        operations = binder.work.operations
        modules = [str(mlir.ir.Module.parse(op.module)) for op in operations if isinstance(op, Partition)]
    return [re.sub(r"plan = \d+ : i64", "plan", text), *modules]
