"""Two GPUs: expert-parallel layers, their all-to-alls hidden behind other experts or micro-batches, against XLA.

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.ep_overlap [--quick] [--json=FILE] [--cases=8192,...]

Four layers of attention and a mixture of 32 experts (width 4096, hidden 1536, eight experts a token, bfloat16), with
balanced routing inside groups of tokens as in GShard (arXiv 2006.16668, section 2.2): one ``all_to_all`` takes tokens
to the experts' devices, another brings them back. XLA's best of: the whole batch and two halves by hand; by default,
with the latency-hiding scheduler, and without command buffers. The limit is the same function without communication.
Contenders take turns in one process; medians. Tokens are counted per GPU.

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
from examples.benchmarks.parallel import (
    Exchange,
    Layer,
    combine,
    dispatch,
    exchanges,
    expert_parallel,
    experts,
    routes,
    stays,
)

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_CASES = flags.DEFINE_list("cases", None, "Tokens per GPU of the cases to measure; all by default.")


def halves(ws: Sequence[Layer], x: jax.Array, *, there: Exchange, back: Exchange, routing: Any, head: int) -> jax.Array:
    """The same, split by hand for XLA's scheduler."""
    places, found = routing
    parts = list(jnp.split(x, 2))
    for qkv, out, up, down in ws:
        parts = [part + attention(part, qkv, out, head) for part in parts]
        ys = [there(dispatch(part, places)) for part in parts]
        ys = [back(experts(y, up, down)) for y in ys]
        parts = [combine(part, y, found) for part, y in zip(parts, ys, strict=True)]
    return jnp.concatenate(parts)


def main(argv: Sequence[str]) -> None:
    del argv
    mesh = mesh_of("ep")
    width, hidden, count, chosen, head, depth = (64, 32, 8, 2, 16, 2) if _QUICK.value else (4096, 1536, 32, 8, 128, 4)
    cases = ((2, 8),) if _QUICK.value else ((16, 512), (4, 512), (8, 512), (2, 256))
    specs = [(P(), P(), P("ep"), P("ep"))] * depth
    shapes = ((width, 3 * width), (width, width), (count, width, 2 * hidden), (count, hidden, width))
    ws = layers(mesh, shapes, specs[0], depth)
    rows = []
    for groups, tokens in cases:
        if _CASES.value and str(groups * tokens) not in _CASES.value:
            continue
        x = normal(mesh, (2 * groups, tokens, width), P("ep"), 99, 1.0)
        rows.append(measure(mesh, specs, ws, x, routes(tokens, count, chosen), head))
        keep(_JSON.value, "ep_overlap", rows)


def measure(mesh: Any, specs: Any, ws: Any, x: jax.Array, routing: Any, head: int) -> dict[str, Any]:
    tokens = x.shape[0] * x.shape[1] // 2

    def mapped(fun: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
        inner = jax.shard_map(fun, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"), check_vma=False)
        return jax.jit(inner, compiler_options=options)

    own: dict[str, Any] = {**exchanges("ep"), "routing": routing, "head": head}
    whole, split = functools.partial(expert_parallel, **own), functools.partial(halves, **own)
    ours = {}
    strategies = {
        "one": df.strategies.SingleBatchOverlap(),
        "two pieces": df.strategies.Comet(),
        "three pieces": df.strategies.Comet(3),
        "five pieces": df.strategies.Comet(5),
        "two": df.strategies.DualBatchOverlap(),
        "two, concurrent": df.strategies.DualBatchOverlap(concurrent=True),
    }
    for name, strategy in strategies.items():
        ours[name] = mapped(df.dynaflow(whole, scheduler=strategy, batch_axes=(None, 0), backend="dispatch"))
    theirs = {f"whole, {name}": mapped(whole, options) for name, options in XLA.items()}
    theirs["halves, default"] = mapped(split)

    alone = {
        "there": functools.partial(stays, to_experts=True),
        "back": functools.partial(stays, to_experts=False),
    }
    limit = mapped(functools.partial(expert_parallel, **(own | alone)))
    rounds, calls = (1, 2) if _QUICK.value else (5, max(4, min(30, 50_000 // tokens)))
    reference = {
        name: f"{'halves' if isinstance(strategy, df.strategies.DualBatchOverlap) else 'whole'}, default"
        for name, strategy in strategies.items()
    }
    return contend(f"ep-{tokens}", ours, theirs, limit, reference, (ws, x), rounds, calls)


if __name__ == "__main__":
    app.run(main)
