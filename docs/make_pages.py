"""Writes the plans and the measured tables of the strategies' pages: ``python -m docs.make_pages [--check]``.

The text of a page is written by hand. Between ``<!-- plan -->`` and ``<!-- /plan -->`` stands the plan that the
strategy makes of a model of the benchmarks, from shapes alone; between ``<!-- measured -->`` and ``<!-- /measured -->``
what the benchmarks measured where that strategy was the best of those that contended.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import dynaflow_jax as df
from examples.benchmarks import parallel, predicted, tables

HERE = Path(__file__).parent
DEVICE = "H200"


def tensor_parallel(scheduler: df.OpScheduler) -> df.Plan:
    """Two layers of Llama's shape on 8192 tokens."""
    width, hidden = 4096, 14336
    shapes = ((width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width))
    mapping = {
        "mesh": predicted.mesh_of("tp"),
        "in_specs": ([(P(None, "tp"), P("tp", None), P(None, "tp"), P("tp", None))] * 2, P()),
        "out_specs": P(),
    }
    arguments = ([tuple(predicted.array(*shape) for shape in shapes)] * 2, predicted.array(16, 512, width))
    reduce = functools.partial(jax.lax.psum, axis_name="tp")
    whole = functools.partial(parallel.tensor_parallel, reduce=reduce, head=128)
    return predicted.planned(whole, scheduler, arguments, (None, 0), **mapping)


def sequence_parallel(scheduler: df.OpScheduler) -> df.Plan:
    """An MLP between the all-gather and the reduce-scatter of its tokens."""
    tokens, width, hidden = 8192, 4096, 14336

    def mlp(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        y = df.collectives.all_gather(x, "tp")
        with df.mark("up"):
            y = jax.nn.silu(y @ up)
        with df.mark("down"):
            y = y @ down
        return x + df.collectives.reduce_scatter(y, "tp")

    specs = {"in_specs": (P(None, "tp"), P("tp", None), P("tp")), "out_specs": P("tp")}
    arguments = [predicted.array(*shape) for shape in ((width, hidden), (hidden, width), (tokens, width))]
    return predicted.planned(mlp, scheduler, arguments, mesh=predicted.mesh_of("tp"), **specs)


def expert_parallel(scheduler: df.OpScheduler) -> df.Plan:
    """One layer of 32 experts, 16 on each device, on 8192 tokens of each."""
    width, hidden, count, chosen, tokens = 4096, 1536, 32, 8, 512
    shapes = ((width, 3 * width), (width, width), (count, width, 2 * hidden), (count, hidden, width))
    mapping = {
        "mesh": predicted.mesh_of("ep"),
        "in_specs": ([(P(), P(), P("ep"), P("ep"))], P("ep")),
        "out_specs": P("ep"),
    }
    layer = functools.partial(
        parallel.expert_parallel,
        **parallel.exchanges("ep"),
        routing=parallel.routes(tokens, count, chosen),
        head=128,
    )
    arguments = ([tuple(predicted.array(*shape) for shape in shapes)], predicted.array(32, tokens, width))
    return predicted.planned(layer, scheduler, arguments, (None, 0), **mapping)


PLANS: dict[str, tuple[Callable[[df.OpScheduler], df.Plan], df.OpScheduler] | str] = {
    "sequential": (tensor_parallel, df.strategies.Sequential()),
    "nano_flow": (tensor_parallel, df.strategies.NanoFlow()),
    "token_weave": (tensor_parallel, df.strategies.TokenWeave(tile=3, min_rows=16)),
    "async_tensor_parallel": (sequence_parallel, df.strategies.AsyncTensorParallel()),
    "comet": (expert_parallel, df.strategies.Comet()),
    "dual_batch_overlap": (expert_parallel, df.strategies.DualBatchOverlap()),
    "single_batch_overlap": (expert_parallel, df.strategies.SingleBatchOverlap()),
    "gradient_buckets": "The [guide](../guide.md#loops-and-shard_map) shows that of a small training step.",
    "parameter_prefetch": "It is that of a whole training step: too long to show.",
    "switch": "It has the plans of the strategies that it is made of.",
    "auto": "It has the plan of the strategy that it chose.",
    "with_kernels": "It is that of the strategy that it is made of, with kernels in its steps.",
}
"""For each page the model and the strategy whose plan it shows, or what to say in place of one."""

_LINES = 24  # of a plan; what follows repeats


def plan(name: str) -> str:
    """A strategy's plan as text, and what it is predicted to take."""
    chosen = PLANS[name]
    if isinstance(chosen, str):
        return chosen
    make, strategy = chosen
    made = make(strategy)
    lines = made.show().splitlines()
    if len(lines) > _LINES:
        lines = [*lines[:_LINES], f"... ({len(lines) - _LINES} lines more)"]
    model = (make.__doc__ or "").removesuffix(".")
    head = f"{model}; predicted for two {DEVICE}s: {df.step_us(made, DEVICE):.0f} µs"
    if not isinstance(strategy, df.strategies.Sequential):
        head += f", and {df.step_us(make(df.strategies.Sequential()), DEVICE):.0f} µs with `Sequential()`"
    return f"{head}.\n\n```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```"


def measured(name: str) -> str:
    """The rows of the benchmarks in which a strategy was the best of those that contended."""
    strategy = "".join(part.capitalize() for part in name.split("_"))
    found = []
    for results in tables.load(tables.RESULTS).values():
        for data in results:
            rows = [row for row in data["rows"] if _strategy(row).startswith(strategy + "(")]
            if rows and tables.TABLES[data["benchmark"]] is tables.overlap:
                found.append(f"`{data['benchmark']}`. {tables.heading(data)}\n\n{tables.overlap(rows)}")
    return "\n\n".join(found) or "It is the best of those that contended in none of the benchmarks of overlap."


def _strategy(row: dict[str, Any]) -> str:
    return tables.STRATEGIES.get(row["case"].partition("-")[0], {}).get(row.get("ours", ""), "")


def render(text: str, name: str) -> str:
    """A page with its plan and its tables."""
    for part, make in (("plan", plan), ("measured", measured)):
        body = f"<!-- {part} -->\n{make(name)}\n<!-- /{part} -->"
        text, count = re.subn(
            rf"<!-- {part} -->\n.*?<!-- /{part} -->", lambda _, body=body: body, text, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"{name}.md has {count} places for its {part}, not one.")
    return text


def main() -> int:
    """Writes the pages, or checks them."""
    os.environ["COLUMNS"] = "200"  # which is how wide a plan may be shown
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    check, stale = parser.parse_args().check, []
    for name in PLANS:
        path = HERE / "strategies" / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        if (found := render(text, name)) != text:
            stale.append(path.name)
            if not check:
                path.write_text(found, encoding="utf-8")
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'none'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
