"""How far predictions are off: step times predicted for an H200 without one, against what was measured there.

    JAX_PLATFORMS=cpu python -m examples.benchmarks.predicted [--json=FILE]

Plans are made from shapes alone, for the functions, sizes and strategies of the other benchmarks, and simulated; what
they took on the device is read from ``results``. ``ours`` is the dispatched plan; ``limit`` the same function without
communication, on one stream. Where several plans contended, the one that was best is compared, and whether its
prediction is the best too. One set of constants, in ``dynaflow_jax.devices``, is used for all rows: no row has
constants of its own. Benchmarks of the host's time and of memory have nothing to predict.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from dynaflow_jax import compat
from examples.benchmarks import chains, parallel
from examples.benchmarks.keep import keep

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_DEVICE = flags.DEFINE_string("device", "H200", "The kind of device to predict for.")

TARGET = 0.15
"""The most that a prediction may be off, of what was measured."""

_RESULTS = Path(__file__).with_name("results")

Row = tuple[str, str, dict[str, df.Plan]]
"""A case, which of its times, and the plans that contended for it, by the names that the results have."""


def main(argv: Sequence[str]) -> None:
    del argv
    rows = []
    for benchmark, make in MODELS.items():
        measured = {row["case"]: row for row in json.loads((_RESULTS / f"{benchmark}.json").read_text())["rows"]}
        rows += [compared(benchmark, measured[case], what, plans) for case, what, plans in make()]
    within = sum(abs(row["error"]) <= TARGET for row in rows if row["what"] == "ours")
    count = sum(row["what"] == "ours" for row in rows)
    picks = [row["picked"] == row["best"] for row in rows if "picked" in row]
    print(f"{within} of {count} plans within {TARGET:.0%}")
    print(f"of several plans the best is picked in {sum(picks)} of {len(picks)} cases")
    keep(_JSON.value, "predicted", rows)


def compared(benchmark: str, measured: dict[str, Any], what: str, plans: dict[str, df.Plan]) -> dict[str, Any]:
    """A prediction beside what was measured: of the plan that was the best when measured."""
    best = measured["ours"] if len(plans) > 1 else next(iter(plans))
    predicted = {name: df.step_us(plan, _DEVICE.value) for name, plan in plans.items()}
    took, picked = measured[f"{what}_us"], min(predicted, key=predicted.__getitem__)
    error = predicted[best] / took - 1
    row = {
        "benchmark": benchmark,
        "case": measured["case"],
        "what": what,
        "device": df.devices.named(_DEVICE.value).name,
        "strategy": plans[best].strategy,
        "predicted_us": round(predicted[best], 1),
        "measured_us": took,
        "error": round(error, 3),
    }
    print(
        f"{benchmark:16s} {row['case']:22s} {what:6s} predicted {predicted[best]:8.1f} µs, measured {took:8.1f} µs, "
        f"{error:+6.1%}" + (f"; best {best}, picked {picked}" if len(plans) > 1 else ""),
        flush=True,
    )
    return row | ({"best": best, "picked": picked} if len(plans) > 1 else {})


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def planned(
    fun: Callable[..., Any], scheduler: df.OpScheduler, arguments: Sequence[Any], batch_axes: Any = None, **mapping: Any
) -> df.Plan:
    """The plan of a function; ``mapping`` is of a ``shard_map`` around it."""
    flow = df.dynaflow(fun, scheduler=scheduler, batch_axes=batch_axes, backend="xla")
    if not mapping:
        return flow.plan(*arguments)
    plans = []

    def inside(*values: Any) -> Any:
        plans.append(flow.plan(*values))
        return flow(*values)

    jax.eval_shape(jax.shard_map(inside, check_vma=False, **mapping), *arguments)
    return plans[0]


def launch_overhead() -> Iterator[Row]:
    for rows, width, depth in ((64, 1024, 16), (4096, 4096, 8)):
        arguments = ([array(width, width)] * depth, array(rows, width))
        yield f"step-{rows}x{width}x{depth}", "ours", {"": planned(chains.chain, df.strategies.Sequential(), arguments)}


def branches() -> Iterator[Row]:
    rows, width, depth = 128, 1024, 16
    for count in (2, 4):
        arguments = ([[array(width, width)] * depth] * count, [array(rows, width)] * count)
        case = f"branches-{count}x{rows}x{width}x{depth}"
        yield case, "ours", {"": planned(chains.branches, chains.StreamForEachName(), arguments)}


def one_gpu() -> Iterator[Row]:
    for rows, width, depth in ((64, 1024, 16), (256, 1024, 16), (1024, 1024, 16), (256, 4096, 8), (4096, 4096, 8)):
        arguments = ([array(width, width)] * depth, array(rows, width))
        plan = planned(chains.chain, chains.StreamForEachMicroBatch(), arguments, (None, 0))
        yield f"chain-{rows}x{width}x{depth}", "ours", {"": plan}


def tp_overlap() -> Iterator[Row]:
    width, hidden, head, depth = 4096, 14336, 128, 6
    shapes = ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))
    specs = [(P(None, "tp"), P("tp", None), P(None, "tp"), P("tp", None))] * depth
    ws = [tuple(array(*shape) for shape in shapes)] * depth
    mapping = {"mesh": mesh_of("tp"), "in_specs": (specs, P()), "out_specs": P()}
    own: dict[str, Any] = {"head": head, "attend": compat.cudnn_attention}
    whole = functools.partial(parallel.tensor_parallel, reduce=functools.partial(jax.lax.psum, axis_name="tp"), **own)
    limit = functools.partial(parallel.tensor_parallel, reduce=lambda y: y, **own)
    for batch, tokens in ((32, 512), (16, 512), (8, 512), (4, 256), (2, 128)):
        case, arguments = f"tp-{batch * tokens}", (ws, array(batch, tokens, width))
        strategies = {f"k={k}": df.strategies.NanoFlow(k, concurrent=True) for k in (1, 2)}
        yield case, "ours", {n: planned(whole, s, arguments, (None, 0), **mapping) for n, s in strategies.items()}
        yield case, "limit", {"": planned(limit, df.strategies.Sequential(), arguments, **mapping)}


def ep_overlap() -> Iterator[Row]:
    width, hidden, count, chosen, head, depth = 4096, 1536, 32, 8, 128, 4
    shapes = ((width, 3 * width), (width, width), (count, width, 2 * hidden), (count, hidden, width))
    specs = [(P(), P(), P("ep"), P("ep"))] * depth
    ws = [tuple(array(*shape) for shape in shapes)] * depth
    mapping = {"mesh": mesh_of("ep"), "in_specs": (specs, P("ep")), "out_specs": P("ep")}
    exchanges = parallel.exchanges("ep")
    none = {
        "there": functools.partial(parallel.stays, to_experts=True),
        "back": functools.partial(parallel.stays, to_experts=False),
    }
    strategies = {
        "one": df.strategies.SingleBatchOverlap(),
        "two pieces": df.strategies.Comet(),
        "two": df.strategies.DualBatchOverlap(),
        "two, concurrent": df.strategies.DualBatchOverlap(concurrent=True),
    }
    for groups, tokens in ((16, 512), (8, 512), (4, 512), (2, 256)):
        case, arguments = f"ep-{groups * tokens}", (ws, array(2 * groups, tokens, width))
        own: dict[str, Any] = {"head": head, "attend": compat.cudnn_attention}
        own["routing"] = parallel.routes(tokens, count, chosen)
        whole, limit = (functools.partial(parallel.expert_parallel, **way, **own) for way in (exchanges, none))
        yield case, "ours", {n: planned(whole, s, arguments, (None, 0), **mapping) for n, s in strategies.items()}
        yield case, "limit", {"": planned(limit, df.strategies.Sequential(), arguments, **mapping)}


def mesh_of(axis: str) -> Any:
    """Two devices that need not be there."""
    return jax.sharding.AbstractMesh((2,), (axis,), axis_types=(AxisType.Auto,))


MODELS: dict[str, Callable[[], Iterator[Row]]] = {
    "launch_overhead": launch_overhead,
    "branches": branches,
    "one_gpu": one_gpu,
    "tp_overlap": tp_overlap,
    "ep_overlap": ep_overlap,
}


if __name__ == "__main__":
    app.run(main)
