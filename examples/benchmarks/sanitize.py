"""A small plan on three streams, for NVIDIA's compute-sanitizer.

    JAX_PLATFORMS=cuda compute-sanitizer --tool memcheck python -m examples.benchmarks.sanitize
    JAX_PLATFORMS=cuda compute-sanitizer --tool racecheck python -m examples.benchmarks.sanitize

Three chains that read one another's results, so that streams wait for each other and memory is used again; its results
are compared with XLA's, and it fails if they differ. Elsewhere it runs on the host twin.
"""

import sys
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import app, flags

import dynaflow_jax as df
from dynaflow_jax.errors import DispatchWarning

_CALLS = flags.DEFINE_integer("calls", 5, "Calls with fresh inputs, the last two with other weights.", lower_bound=3)


def braid(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Three strands; after each layer every one takes in its neighbour."""
    strands = [x, x + 1, x - 1]
    for w in ws:
        products = []
        for i, strand in enumerate(strands):
            with df.mark(f"strand {i}"):
                products.append(jnp.tanh(strand @ w + strand.mean(-1, keepdims=True)))
        mixed = []
        for i in range(3):
            with df.mark(f"strand {i}"):
                mixed.append(products[i] + products[i - 1] / 2)
        strands = mixed
    with df.mark("strand 0"):
        return sum(strands, start=jnp.zeros_like(x))


class Strands(df.OpScheduler):
    """A stream for each strand."""

    def schedule(self, ctx: df.ScheduleContext) -> None:
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op, stream=op.name if op.name.startswith("strand") else "strand 0")


def main(argv: Sequence[str]) -> None:
    del argv
    ws = [jax.random.normal(key, (64, 64)) / 8 for key in jax.random.split(jax.random.key(0), 3)]
    flow = df.dynaflow(braid, scheduler=Strands(), backend="dispatch")
    run, plain = jax.jit(flow), jax.jit(braid)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DispatchWarning)
        streams = len(flow.plan(ws, jnp.zeros((32, 64))).streams)
        worst = 0.0
        for call in range(_CALLS.value):
            if call == _CALLS.value - 2:
                ws = [w * 0.5 for w in ws]  # elsewhere in memory: the plan is bound again
            x = jax.random.normal(jax.random.key(call + 1), (32, 64))
            got, want = run(ws, x), plain(ws, x)
            worst = max(worst, float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)))
    print(f"{_CALLS.value} calls on {streams} streams; largest relative difference from XLA {worst:.2e}", flush=True)
    if streams != 3 or not worst < 1e-2:  # three layers of products in TF32
        sys.exit("sanitize: the plan is not what it should be, or its results are wrong")


if __name__ == "__main__":
    app.run(main)
