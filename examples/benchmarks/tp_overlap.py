"""Two GPUs: a tensor-parallel block stack, its all-reduces hidden behind the other micro-batch, against XLA.

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.tp_overlap [--quick] [--json=FILE] [--cases=8192,...]

Six layers of Llama's shape (width 4096, hidden 14336, bfloat16) with two ``psum`` each, inside ``shard_map``. XLA's
best of: the whole batch and two halves by hand; by default, with the latency-hiding scheduler, and without command
buffers. The limit is the same function without communication. Contenders take turns in one process; medians.

``--quick`` is for a machine without a GPU: small sizes, few calls, the host twin; its numbers mean nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.benchmarks.keep import keep
from examples.benchmarks.overlap import XLA, attention, contend, layers, mesh_of, normal
from examples.benchmarks.parallel import Exchange, Layer, mlp, tensor_parallel

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_CASES = flags.DEFINE_list("cases", None, "Tokens of the cases to measure; all by default.")


def halves(ws: Sequence[Layer], x: jax.Array, *, reduce: Exchange, head: int) -> jax.Array:
    """The same, split by hand for XLA's scheduler."""
    parts = jnp.split(x, 2)
    for qkv, out, up, down in ws:
        ys = [attention(part, qkv, out, head) for part in parts]
        parts = [part + reduce(y) for part, y in zip(parts, ys, strict=True)]
        ys = [mlp(part, up, down) for part in parts]
        parts = [part + reduce(y) for part, y in zip(parts, ys, strict=True)]
    return jnp.concatenate(parts)


def main(argv: Sequence[str]) -> None:
    del argv
    mesh = mesh_of("tp")
    width, hidden, head, depth = (64, 96, 16, 2) if _QUICK.value else (4096, 14336, 128, 6)
    cases = ((4, 8), (2, 4)) if _QUICK.value else ((32, 512), (16, 512), (8, 512), (4, 256), (2, 128))
    specs = [(P(None, "tp"), P("tp", None), P(None, "tp"), P("tp", None))] * depth
    shapes = ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))
    ws = layers(mesh, shapes, specs[0], depth)
    rows = []
    for batch, tokens in cases:
        if _CASES.value and str(batch * tokens) not in _CASES.value:
            continue
        x = normal(mesh, (batch, tokens, width), P(), 99, 1.0)
        rows.append(measure(mesh, specs, ws, x, head))
        keep(_JSON.value, "tp_overlap", rows)


def measure(mesh: Any, specs: Any, ws: Any, x: jax.Array, head: int) -> dict[str, Any]:
    tokens = x.shape[0] * x.shape[1]

    def mapped(fun: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
        inner = jax.shard_map(fun, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)
        return jax.jit(inner, compiler_options=options)

    total = functools.partial(jax.lax.psum, axis_name="tp")
    whole = functools.partial(tensor_parallel, reduce=total, head=head)
    split = functools.partial(halves, reduce=total, head=head)
    ours = {}
    strategies = {f"k={k}": df.strategies.NanoFlow(k, concurrent=True) for k in (1, 2)}
    for name, strategy in (strategies | {"k=2, in turns": df.strategies.NanoFlow(2)}).items():
        ours[name] = mapped(df.dynaflow(whole, scheduler=strategy, batch_axes=(None, 0), backend="dispatch"))
    theirs = {f"whole, {name}": mapped(whole, options) for name, options in XLA.items()}
    theirs |= {f"halves, {name}": mapped(split, XLA[name]) for name in ("default", "latency hiding")}
    limit = mapped(functools.partial(tensor_parallel, reduce=lambda y: y, head=head))
    rounds, calls = (1, 2) if _QUICK.value else (5, max(4, min(40, 100_000 // tokens)))
    reference = {name: f"{'whole' if name == 'k=1' else 'halves'}, default" for name in ours}
    return contend(f"tp-{tokens}", ours, theirs, limit, reference, (ws, x), rounds, calls)


if __name__ == "__main__":
    app.run(main)
