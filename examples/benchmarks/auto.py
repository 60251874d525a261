"""What ``Auto`` chooses for the example models, and that its choice is not slower than the model as it is.

    python -m examples.benchmarks.auto [--quick] [--json=FILE] [--budget_s=30] [--cases=llama,chain,...]

Every model is tuned afresh; then its choice and the unscheduled function are measured against each other once more, in
turns. A row is ``slower`` if the unscheduled function is faster beyond noise, by the measure that ``Auto`` itself uses
(more than 2% of the medians, and more than either interquartile range): there should be none. With several devices
there are also the layers with experts and with tensor parallelism, over all of them. Weights are random.

``--quick`` is to see that it works: small sizes and little time; its numbers mean nothing.
"""

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax.tune import is_faster, spread, take_turns
from examples.benchmarks import chains, llama, parallel
from examples.benchmarks.keep import keep
from examples.benchmarks.overlap import layers, mesh_of, normal
from examples.minilm.model import Config, MiniLM

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_BUDGET = flags.DEFINE_float("budget_s", 30.0, "Seconds to tune each model.", lower_bound=1e-3)
_CASES = flags.DEFINE_list("cases", None, "The models to measure; all by default.")

Case = tuple[Callable[..., Any], Any, tuple[Any, ...]]
"""A function, where the batch is in its arguments, and those."""


def main(argv: Sequence[str]) -> None:
    del argv
    rows = []
    with tempfile.TemporaryDirectory() as folder:  # what was tuned before is not to be believed here
        os.environ["DYNAFLOW_CACHE_DIR"] = folder
        for name, make in MODELS.items():
            if not _CASES.value or name in _CASES.value:
                for case, model in make(_QUICK.value):
                    rows.append(measure(case, *model))
                    keep(_JSON.value, "auto", rows)
    slower = [row["case"] for row in rows if row["slower"]]
    print(f"{len(rows)} models, {len(slower)} slower beyond noise{': ' if slower else ''}{', '.join(slower)}")


def measure(case: str, fun: Callable[..., Any], axes: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    budget = 1.0 if _QUICK.value else _BUDGET.value
    flow = df.dynaflow(fun, scheduler=df.strategies.Auto(budget_s=budget), batch_axes=axes)
    chosen = df.tune(flow, *arguments).chosen
    calls = [functools.partial(jax.jit(each), *arguments) for each in (fun, flow)]
    times = take_turns(dict(enumerate(calls)), time.perf_counter() + budget / 4)
    plain, ours = statistics.median(times[0]), statistics.median(times[1])
    row = {
        "case": case,
        "chosen": chosen,
        "ours_us": round(ours, 1),
        "unscheduled_us": round(plain, 1),
        "ratio": round(plain / ours, 3),
        "spread_us": round(max(map(spread, times.values())), 1),
        "slower": is_faster(times[0], times[1]),
    }
    print(
        f"{case:24s} {chosen:44s} {ours:9.1f} µs, unscheduled {plain:9.1f} µs, ratio {row['ratio']:.3f}, "
        f"spread {row['spread_us']:.1f} µs{', SLOWER' if row['slower'] else ''}",
        flush=True,
    )
    return row


def llamas(quick: bool) -> Iterator[tuple[str, Case]]:
    for depth, rows, tokens in ((2, 8, 32),) if quick else ((2, 8, 128), (6, 32, 128)):
        model = llama.Llama(llama.Config(depth))
        ids = jnp.zeros((rows, tokens), jnp.int32)
        params = jax.jit(model.init)(jax.random.key(0), ids)
        yield f"llama-{depth}x{rows}x{tokens}", (model.apply, (None, 0), (params, ids))


def minilm(quick: bool) -> Iterator[tuple[str, Case]]:
    small = {"vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96}
    model = MiniLM(Config(**small) if quick else Config())
    for rows, tokens in ((8, 16),) if quick else ((8, 32), (64, 64)):
        ids, mask = jnp.ones((rows, tokens), jnp.int32), jnp.ones((rows, tokens), bool)
        params = jax.jit(model.init)(jax.random.key(0), ids, mask)
        yield f"minilm-{rows}x{tokens}", (model.apply, (None, 0, 0), (params, ids, mask))


def chain(quick: bool) -> Iterator[tuple[str, Case]]:
    sizes = ((16, 32, 8),)
    if not quick:
        sizes = ((64, 1024, 16), (1024, 1024, 16)) + (((4096, 4096, 8),) if jax.default_backend() == "gpu" else ())
    for rows, width, depth in sizes:
        arguments = chains.weights(width, depth), chains.rows(rows, width)
        yield f"chain-{rows}x{width}x{depth}", (chains.chain, (None, 0), arguments)


def branches(quick: bool) -> Iterator[tuple[str, Case]]:
    rows, width, depth = (16, 32, 8) if quick else (128, 1024, 16)
    for count in (2,) if quick else (2, 4):
        arguments = (
            [chains.weights(width, depth, i) for i in range(count)],
            [chains.rows(rows, width, i) for i in range(count)],
        )
        yield f"branches-{count}x{rows}x{width}x{depth}", (chains.branches, (None, 0), arguments)


def experts(quick: bool) -> Iterator[tuple[str, Case]]:
    devices = jax.device_count()
    if devices < 2:
        return
    gpu = jax.default_backend() == "gpu" and not quick
    mesh = mesh_of("ep", devices)
    width, hidden, count, chosen, head, depth = (4096, 1536, 32, 8, 128, 4) if gpu else (64, 32, 8 * devices, 2, 16, 2)
    shapes = ((width, 3 * width), (width, width), (count, width, 2 * hidden), (count, hidden, width))
    specs = [(P(), P(), P("ep"), P("ep"))] * depth
    for groups, tokens in ((4, 512), (16, 512)) if gpu else ((2, 4 * count),):
        model = functools.partial(
            parallel.expert_parallel,
            **parallel.exchanges("ep"),
            routing=parallel.routes(tokens, count, chosen),
            head=head,
        )
        fun = jax.shard_map(model, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"), check_vma=False)
        ws = layers(mesh, shapes, specs[0], depth)
        x = normal(mesh, (devices * groups, tokens, width), P("ep"), 99, 1.0)
        yield f"experts-{groups * tokens}", (fun, (None, 0), (ws, x))


def tensors(quick: bool) -> Iterator[tuple[str, Case]]:
    devices = jax.device_count()
    if devices < 2:
        return
    gpu = jax.default_backend() == "gpu" and not quick
    mesh = mesh_of("tp", devices)
    width, hidden, head, depth = (4096, 14336, 128, 6) if gpu else (16 * devices, 16 * devices, 16, 2)
    shapes = ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))
    specs = [(P(None, "tp"), P("tp", None), P(None, "tp"), P("tp", None))] * depth
    reduce = functools.partial(jax.lax.psum, axis_name="tp")
    model = functools.partial(parallel.tensor_parallel, reduce=reduce, head=head)
    fun = jax.shard_map(model, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)
    for batch, tokens in ((2, 128), (8, 512)) if gpu else ((4, 16),):
        x = normal(mesh, (batch, tokens, width), P(), 99, 1.0)
        yield f"tensors-{batch * tokens}", (fun, (None, 0), (layers(mesh, shapes, specs[0], depth), x))


MODELS: dict[str, Callable[[bool], Iterator[tuple[str, Case]]]] = {
    "llama": llamas,
    "minilm": minilm,
    "chain": chain,
    "branches": branches,
    "experts": experts,
    "tensors": tensors,
}


if __name__ == "__main__":
    app.run(main)
