"""One GPU: two micro-batches on two streams against one XLA program, and against what each costs alone.

    JAX_PLATFORMS=cuda python -m examples.benchmarks.one_gpu [--json=FILE]

Contenders take turns in one process; medians. XLA's best of: the whole batch, the batch split by hand, either with
command buffers on, off or concurrent.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import dynaflow_jax as df
from examples.benchmarks.keep import keep
from examples.benchmarks.timing import OPTIONS, medians

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")


class TwoStreams(df.OpScheduler):
    """Two halves, each on a stream of its own."""

    def split(self, info: df.InputInfo) -> Sequence[int]:
        return [info.batch_size // 2] * 2

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=f"half{op.micro_batch}")


def chain(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Small products one after the other: latency-bound."""
    for i, w in enumerate(ws):
        with df.mark(f"product_{i // 4}"):
            x = jnp.tanh(x @ w)
    return x


def main(argv: Sequence[str]) -> None:
    del argv
    rows = []
    for batch, width, depth in ((64, 1024, 16), (256, 1024, 16), (1024, 1024, 16), (256, 4096, 8), (4096, 4096, 8)):
        rows.append(measure(batch, width, depth))
    keep(_JSON.value, "one_gpu", rows)


def measure(batch: int, width: int, depth: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), depth + 1)
    ws = [jax.random.normal(key, (width, width), jnp.bfloat16) / width**0.5 for key in keys[:-1]]
    x = jax.random.normal(keys[-1], (batch, width), jnp.bfloat16)

    def halves(ws: Any, x: jax.Array) -> jax.Array:
        return jnp.concatenate([chain(ws, half) for half in jnp.split(x, 2)])

    flow = df.dynaflow(chain, scheduler=TwoStreams(), batch_axes=(None, 0), backend="dispatch")
    funs: dict[str, Callable[..., Any]] = {"ours": jax.jit(flow)}
    for name, options in OPTIONS.items():
        funs[f"whole, {name}"] = jax.jit(chain, compiler_options=options)
        funs[f"halves, {name}"] = jax.jit(halves, compiler_options=options)
    funs["one half"] = jax.jit(chain)
    arguments = {name: (ws, x[: batch // 2] if name == "one half" else x) for name in funs}
    equal = bool(jnp.array_equal(funs["ours"](ws, x), funs["halves, default"](ws, x)))
    times = medians(funs, arguments)
    best = min((name for name in funs if name not in ("ours", "one half")), key=times.__getitem__)
    row = {
        "case": f"chain-{batch}x{width}x{depth}",
        "best_xla_us": times[best],
        "best_xla": best,
        "ours_us": times["ours"],
        "limit_us": times["one half"],
        "equal": equal,
    }
    print(
        f"{row['case']:20s} XLA {row['best_xla_us']:8.1f} µs ({best}), ours {row['ours_us']:8.1f} µs, one half alone "
        f"{row['limit_us']:8.1f} µs, ratio {row['best_xla_us'] / row['ours_us']:.3f}, equal {equal}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    app.run(main)
