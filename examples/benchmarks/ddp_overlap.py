"""Two GPUs: a data-parallel training step, its gradients reduced behind the backward pass, against XLA.

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.ddp_overlap [--quick] [--json=FILE] [--cases=2048,...]

Four layers of Llama's shape (width 4096, hidden 14336, bfloat16; 1.9 GB of gradients), inside ``shard_map``: each GPU
has all weights and rows of its own, and every gradient is averaged by a ``psum`` of its own. XLA's best of: by default,
with the latency-hiding scheduler, without command buffers, and with the combiners of collectives switched off. The
limit is the same function without communication, whose gradients are in memory before they are applied, as those that
arrive are; so is the fully sharded step's. All donate the weights, whose memory the new ones take. Contenders take
turns in one process; medians. Tokens are counted per GPU.

``--quick`` is for a machine without a GPU: small sizes, few calls, the host twin; its numbers mean nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app, flags
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.benchmarks import training
from examples.benchmarks.keep import keep
from examples.benchmarks.overlap import contend, layers, mesh_of, normal

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_CASES = flags.DEFINE_list("cases", ["2048"], "Tokens per GPU of the cases to measure: 1024, 2048, 4096.")


def main(argv: Sequence[str]) -> None:
    del argv
    mesh = mesh_of("dp")
    width, hidden, head, depth = training.sizes(_QUICK.value)
    cases = ((2, 8),) if _QUICK.value else ((2, 512), (4, 512), (8, 512))
    ws = layers(mesh, training.shapes(width, hidden), (P(),) * 4, depth)
    rows = []
    for batch, tokens in cases:
        if not _QUICK.value and str(batch * tokens) not in _CASES.value:
            continue
        x = normal(mesh, (2 * batch, tokens, width), P("dp"), 99, 1.0)
        rows.append(measure(mesh, ws, x, head))
        keep(_JSON.value, "ddp_overlap", rows)


def measure(mesh: Any, ws: Any, x: jax.Array, head: int) -> dict[str, Any]:
    tokens = x.shape[0] * x.shape[1] // 2

    def mapped(fun: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
        specs, outs = (P(), P("dp")), (P("dp"), P())
        inner = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
        return training.Trained(jax.jit(inner, compiler_options=options, donate_argnums=0), ws)

    mean = functools.partial(df.collectives.all_reduce, axis_name="dp", op="mean")
    whole = functools.partial(training.step, reduce=mean, head=head)
    strategies = {
        "25 MiB": df.strategies.GradientBuckets(),
        "200 MiB": df.strategies.GradientBuckets(200 << 20),
        "25 MiB, updates beside": df.strategies.GradientBuckets(update_stream="update"),
    }
    ours = {
        name: mapped(df.dynaflow(whole, scheduler=strategy, backend="dispatch", donate_argnums=0))
        for name, strategy in strategies.items()
    }
    theirs = {name: mapped(whole, options) for name, options in training.OPTIONS.items()}
    limit = mapped(functools.partial(training.step, reduce=jax.lax.optimization_barrier, head=head))
    rounds, calls = (1, 2) if _QUICK.value else (5, 10)
    return contend(f"ddp-{tokens}", ours, theirs, limit, dict.fromkeys(ours, "default"), (x,), rounds, calls)


if __name__ == "__main__":
    app.run(main)
