"""Chains of products: what the GPU benchmarks run where only the time of many kernels in a row matters."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import dynaflow_jax as df


def weights(width: int, depth: int, seed: int = 0) -> list[jax.Array]:
    """``depth`` matrices, bfloat16, that keep the size of what they multiply."""
    keys = jax.random.split(jax.random.key(seed), depth)
    return [jax.random.normal(key, (width, width), jnp.bfloat16) / width**0.5 for key in keys]


def rows(count: int, width: int, seed: int = 1) -> jax.Array:
    """``[count, width]``, bfloat16."""
    return jax.random.normal(jax.random.key(seed), (count, width), jnp.bfloat16)


def chain(ws: Sequence[jax.Array], x: jax.Array, name: str = "products") -> jax.Array:
    """Products one after the other, four to an operator."""
    for first in range(0, len(ws), 4):
        with df.mark(name):
            for w in ws[first : first + 4]:
                x = jnp.tanh(x @ w)
    return x


def branches(wss: Sequence[Sequence[jax.Array]], xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Chains that do not depend on each other: the operators of branch ``i`` are named ``branch i``."""
    return [chain(ws, x, f"branch {i}") for i, (ws, x) in enumerate(zip(wss, xs, strict=True))]


class StreamForEachName(df.OpScheduler):
    """No splitting; operators of one name share a stream."""

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=op.name)


class StreamForEachMicroBatch(df.OpScheduler):
    """Micro-batches of equal size, each on a stream of its own; or all on one, for comparison."""

    def __init__(self, micro_batches: int = 2, streams: int = 2):
        self.micro_batches, self.streams = micro_batches, streams

    def split(self, info: df.InputInfo) -> Sequence[int]:
        return [info.batch_size // self.micro_batches] * self.micro_batches

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=f"stream {(op.micro_batch or 0) % self.streams}")
