"""Two GPUs: a fully sharded training step, parameters gathered ahead and gradients scattered behind, against XLA.

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.fsdp_overlap [--quick] [--json=FILE] [--cases=2048,...]

Four layers of Llama's shape (width 4096, hidden 14336, bfloat16; 1.9 GB of weights), inside ``shard_map``: each GPU has
half of every weight and rows of its own. A weight is gathered once and kept for the backward pass, which scatters its
gradient (``SHARD_GRAD_OP`` in the words of PyTorch). XLA's best of: by default, with the latency-hiding scheduler,
without command buffers, and with the combiners of collectives switched off. The limit is the same step on whole weights
without communication, of which each GPU updates its half. Contenders take turns in one process; medians. Tokens are
counted per GPU.

``--quick`` is for a machine without a GPU: small sizes, few calls, the host twin; its numbers mean nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app, flags
from jax.sharding import NamedSharding
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
    ws = layers(mesh, training.shapes(width, hidden), (P("dp"),) * 4, depth)
    rows = []
    for batch, tokens in cases:
        if not _QUICK.value and str(batch * tokens) not in _CASES.value:
            continue
        x = normal(mesh, (2 * batch, tokens, width), P("dp"), 99, 1.0)
        rows.append(measure(mesh, ws, x, head))
        keep(_JSON.value, "fsdp_overlap", rows)


def own_half(w: jax.Array) -> jax.Array:
    """Half of a weight or gradient, of which all has to be there."""
    return jax.lax.optimization_barrier(w)[: w.shape[0] // 2]


def measure(mesh: Any, ws: Any, x: jax.Array, head: int) -> dict[str, Any]:
    tokens = x.shape[0] * x.shape[1] // 2

    def mapped(fun: Callable[..., Any], weights: Any, options: dict[str, Any] | None = None) -> Callable[..., Any]:
        specs, outs = (weights, P("dp")), (P("dp"), P("dp"))
        inner = jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
        return jax.jit(inner, compiler_options=options)

    gather = functools.partial(df.collectives.all_gather, axis_name="dp")
    sharded = functools.partial(training.step, gather=gather, head=head)
    strategies = {
        "1 ahead": df.strategies.ParameterPrefetch(1),
        "2 ahead": df.strategies.ParameterPrefetch(2),
        "2 ahead, updates beside": df.strategies.ParameterPrefetch(2, update_stream="update"),
    }
    ours = {
        name: mapped(df.dynaflow(sharded, scheduler=strategy, backend="dispatch"), P("dp"))
        for name, strategy in strategies.items()
    }
    theirs = {name: mapped(sharded, P("dp"), options) for name, options in training.OPTIONS.items()}
    whole = jax.device_put(ws, NamedSharding(mesh, P()))
    alone = mapped(functools.partial(training.step, own=own_half, head=head), P())
    rounds, calls = (1, 2) if _QUICK.value else (5, 10)
    reference = dict.fromkeys(ours, "default")
    return contend(f"fsdp-{tokens}", ours, theirs, lambda _, x: alone(whole, x), reference, (ws, x), rounds, calls)


if __name__ == "__main__":
    app.run(main)
