"""Writes the tables of the documentation from what the benchmarks measured.

    python -m examples.benchmarks.tables [--check]

A benchmark run with ``--json=examples/benchmarks/results/NAME.json`` leaves its numbers there. A page has a place for
a benchmark, between ``<!-- trace_cost -->`` and ``<!-- /trace_cost -->``; its table goes there, one for each file of
that benchmark (another device, another version of JAX). Where there is no file, the place says how to make one.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).parents[2]
PAGES = tuple(ROOT / "docs" / f"{name}.md" for name in ("measured", "kernels"))
RESULTS = Path(__file__).parent / "results"

_CHECK = flags.DEFINE_bool("check", False, "Change nothing; fail if the tables are not those of the results.")

Row = Mapping[str, Any]


def main(argv: Sequence[str]) -> None:
    del argv
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        try:
            found = render(text, load(RESULTS))
        except ValueError as error:
            sys.exit(f"{page.name}: {error}")
        if found == text:
            print(f"{page.name}: the tables are those of the results.")
        elif _CHECK.value:
            sys.exit(f"{page.name}: the tables are out of date; run python -m examples.benchmarks.tables")
        else:
            page.write_text(found, encoding="utf-8")
            print(f"{page.name}: wrote the tables.")


def load(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The results in a folder, by benchmark, in the order of their files' names; none if there is no folder."""
    results: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            results.setdefault(data["benchmark"], []).append(data)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name} holds no benchmark's results: {error!r}") from error
    return results


def render(text: str, results: Mapping[str, Sequence[Row]]) -> str:
    """A page with its tables."""

    def place(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise ValueError(f"there is a place for {name!r}; there are tables of {', '.join(TABLES)}")
        tables = [f"{heading(data)}\n\n{TABLES[name](data['rows'])}" for data in results.get(name, ())]
        command = f"python -m examples.benchmarks.{name} --json=examples/benchmarks/results/{name}.json"
        body = "\n\n".join(tables) or f"No results kept yet. To measure:\n`{command}`"
        return f"<!-- {name} -->\n{body}\n<!-- /{name} -->"

    return re.sub(r"<!-- (?P<name>\w+) -->\n.*?<!-- /(?P=name) -->", place, text, flags=re.DOTALL)


def heading(data: Row) -> str:
    """Where and when something was measured."""
    if data["benchmark"] == "predicted":
        return f"Predicted on a {data['device']}, JAX {data['versions']['jax']}, {data['date']}:"
    return f"Measured on {data['device']}, JAX {data['versions']['jax']}, {data['date']}:"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def trace_cost(rows: Sequence[Row]) -> str:
    """What a trace and a call cost at each depth."""
    header = (
        "layers",
        "JAX: trace, lower, compile",
        "dynaflow's own work",
        "share",
        "call, split by hand",
        "in order",
        "unordered",
        "equal programs",
    )
    cells = []
    for row in rows:
        jax_s = row["jax_trace_s"] + row["jax_lower_s"] + row["jax_compile_s"]
        by_hand = row["by_hand_us"]
        cells.append(
            (
                row["case"].removeprefix("layers-"),
                f"{jax_s:.2f} s",
                f"{row['own_share'] * jax_s:.2f} s",
                f"{row['own_share']:.0%}",
                f"{by_hand / 1e3:.2f} ms",
                f"{row['ours_us'] / by_hand:.3f}",
                f"{row['unordered_us'] / by_hand:.3f}",
                f"±{row['apart'] / 2:.1%}",
            )
        )
    return table(header, cells)


def one_gpu(rows: Sequence[Row]) -> str:
    """Dispatched plans against the best that XLA does with the same function."""
    header = ("case", "XLA's best", "which", "dispatched", "times as fast", "one half alone", "same bits")
    cells = []
    for row in rows:
        best, ours, limit = row["best_xla_us"], row["ours_us"], row["limit_us"]
        ratio = f"{best / ours:.2f}"
        same = "yes" if row["equal"] else "no"
        cells.append((row["case"], f"{best:.0f} µs", row["best_xla"], f"{ours:.0f} µs", ratio, f"{limit:.0f} µs", same))
    return table(header, cells)


STRATEGIES = {
    "tp": {
        "k=1": "NanoFlow(1, concurrent=True)",
        "k=2": "NanoFlow(2, concurrent=True)",
        "k=2, in turns": "NanoFlow(2)",
    },
    "ep": {
        "one": "SingleBatchOverlap()",
        "two pieces": "Comet()",
        "three pieces": "Comet(3)",
        "five pieces": "Comet(5)",
        "two": "DualBatchOverlap()",
        "two, concurrent": "DualBatchOverlap(concurrent=True)",
    },
    "ddp": {
        "25 MiB": "GradientBuckets()",
        "200 MiB": "GradientBuckets(200 << 20)",
        "25 MiB, updates beside": 'GradientBuckets(update_stream="update")',
    },
    "fsdp": {
        "1 ahead": "ParameterPrefetch()",
        "2 ahead": "ParameterPrefetch(2)",
        "2 ahead, updates beside": 'ParameterPrefetch(2, update_stream="update")',
    },
}
"""What a benchmark's short names of its strategies mean."""


def overlap(rows: Sequence[Row]) -> str:
    """Communication behind compute, against the best that XLA does and against no communication at all."""
    rows = sorted(rows, key=lambda row: -int(row["case"].rpartition("-")[2]))
    return hiding("tokens", rows, lambda case: case.rpartition("-")[2])


def systems(rows: Sequence[Row]) -> str:
    """The same, of models nobody here wrote."""
    return hiding("case", rows, lambda case: case)


def hiding(first: str, rows: Sequence[Row], label: Callable[[str], str]) -> str:
    """A table of communication that is hidden; the first column has what ``label`` makes of a case."""
    header = (
        first,
        "XLA's best",
        "which",
        "dispatched",
        "strategy",
        "times as fast",
        "at most",
        "communication hidden",
        "same bits, or largest relative difference",
    )
    cells = []
    for row in rows:
        kind = row["case"].rpartition("-")[0]
        best, ours, limit = row["best_xla_us"], row["ours_us"], row["limit_us"]
        strategy = STRATEGIES.get(kind, {}).get(row["ours"])
        cells.append(
            (
                label(row["case"]),
                f"{best:.0f} µs",
                row["best_xla"],
                f"{ours:.0f} µs",
                f"`{strategy}`" if strategy else row["ours"],
                f"{best / ours:.3f}",
                f"{best / limit:.3f}",
                "" if row["hidden"] is None else f"{row['hidden']:.0%}",
                "same bits" if row["equal"] else f"{row['difference']:.1e}",
            )
        )
    return table(header, cells)


def end_to_end(rows: Sequence[Row]) -> str:
    """Tokens per second of a whole model, against the best that XLA does and against no communication at all."""
    header = ("case", "XLA's best", "which", "dispatched", "times as fast", "at most", "tokens/s", "XLA's tokens/s")
    cells = []
    for row in rows:
        best, ours, limit = row["best_xla_us"], row["ours_us"], row["limit_us"]
        times = (f"{best:.0f} µs", row["best_xla"], f"{ours:.0f} µs", f"{best / ours:.3f}", f"{best / limit:.3f}")
        rates = (f"{row['ours_tokens_per_s']:.0f}", f"{row['best_xla_tokens_per_s']:.0f}")
        cells.append((row["case"], *times, *rates))
    return table(header, cells)


def serving(rows: Sequence[Row]) -> str:
    """Tokens per second of the serving loop, against the best that XLA does."""
    header = ("GPUs", "XLA's best", "which", "plan picked by", "times as fast", "tokens/s", "XLA's tokens/s")
    header = (*header, "batches whole", "batches split", "tokens that differ")
    cells = []
    for row in rows:
        best, ours = row["best_xla_us"], row["ours_us"]
        times = (f"{best / 1e6:.2f} s", row["best_xla"], row["ours"], f"{best / ours:.3f}")
        rates = (f"{row['ours_tokens_per_s']:.0f}", f"{row['best_xla_tokens_per_s']:.0f}")
        counts = (f"{row['idle']}", f"{row['busy']}", f"{row['difference']:.1%}")
        cells.append((row["case"].removeprefix("serving-"), *times, *rates, *counts))
    return table(header, cells)


def auto(rows: Sequence[Row]) -> str:
    """What Auto chose, measured once more against the function as it is."""
    header = ("model", "chosen", "as chosen", "unscheduled", "times as fast", "spread", "slower beyond noise")
    cells = []
    for row in rows:
        times = (f"{row['ours_us']:.0f} µs", f"{row['unscheduled_us']:.0f} µs", f"{row['ratio']:.3f}")
        chosen = row["chosen"] if row["chosen"] == "unscheduled" else f"`{row['chosen']}`"
        cells.append((row["case"], chosen, *times, f"{row['spread_us']:.0f} µs", "yes" if row["slower"] else "no"))
    return table(header, cells)


def predicted(rows: Sequence[Row]) -> str:
    """Times that the cost model predicts, against measured ones."""
    header = ("case", "strategy", "predicted", "measured", "off by")
    cells = []
    for row in rows:
        what = row["strategy"] if row["what"] == "ours" else row["what"]
        times = (f"{row['predicted_us']:.0f} µs", f"{row['measured_us']:.0f} µs", f"{row['error']:+.0%}")
        cells.append((row["case"], f"`{what}`", *times))
    return table(header, cells)


def kernels(rows: Sequence[Row]) -> str:
    """Pallas kernels against the best that XLA does with the operators that they replace."""
    header = ("kernel", "shape", "XLA's best", "which", "kernel's best", "tuning", "times as fast", "at most", "agrees")
    cells = []
    for row in rows:
        kernel, _, shape = row["case"].partition("-")
        best, ours, limit = row["best_xla_us"], row["ours_us"], row["limit_us"]
        cells.append(
            (
                f"`{kernel}`",
                shape.replace("x", "×"),
                f"{best:.1f} µs",
                row["best_xla"],
                f"{ours:.1f} µs",
                row["ours"],
                f"{best / ours:.3f}",
                f"{best / limit:.3f}" if limit else "",
                "yes" if row["equal"] else "no",
            )
        )
    return table(header, cells)


def launch_overhead(rows: Sequence[Row]) -> str:
    """What dispatching costs where there is nothing to overlap, and what calls leave in memory."""
    header = ("case", "XLA's best", "dispatched", "ratio", "meant to be at most")
    cells = []
    for row in rows:
        if "calls" in row:
            host, device = (
                f"{row[f'{where}_growth_bytes'] / 1024:+.0f} KiB, {where} (at most "
                f"{row[f'{where}_limit_bytes'] / 1024:.0f})"
                for where in ("host", "device")
            )
            cells.append((f"memory after {row['calls']} calls", "", f"{host}; {device}", "", ""))
            continue
        name = row["case"].removeprefix("step-")
        if name.startswith("host-"):
            name = f"host's time for a call, {name.removeprefix('host-').replace('-', ' ')}"
        limit = f"{row['limit']:.2f}" if "limit" in row else f"{row['most_us']:.0f} µs"
        times = (f"{row['best_xla_us']:.0f} µs", f"{row['ours_us']:.0f} µs", f"{row['ratio']:.2f}")
        cells.append((name, *times, limit))
    return table(header, cells)


def branches(rows: Sequence[Row]) -> str:
    """Independent branches against each of XLA's ways, as times as fast."""
    ways = {"default": "XLA", "no-command-buffers": "XLA without command buffers", "concurrent": "XLA with CONCURRENT"}
    header = ("branches", "dispatched", "one alone", *(f"times as fast as {way}" for way in ways.values()), "same bits")
    cells = []
    for row in rows:
        ratios = []
        for way in ways:
            least = f" (meant to be at least {row['targets'][way]})" if way in row["targets"] else ""
            ratios.append(f"{row[f'{way}_us'] / row['ours_us']:.2f}{least}")
        name, same = row["case"].removeprefix("branches-"), "yes" if row["equal"] else "no"
        cells.append((name, f"{row['ours_us']:.0f} µs", f"{row['limit_us']:.0f} µs", *ratios, same))
    return table(header, cells)


def with_kernels(rows: Sequence[Row]) -> str:
    """Models with kernels in their operators, against the best that XLA does."""
    header = ("model", "XLA's best", "which", "with kernels", "lowered to", "times as fast", "at most", "difference")
    cells = []
    for row in rows:
        best, ours = row["best_xla_us"], row["ours_us"]
        ratios = (f"{best / ours:.3f}", f"{best / row['limit_us']:.3f}")
        times = (f"{best:.0f} µs", row["best_xla"], f"{ours:.0f} µs", row["ours"])
        cells.append((row["case"], *times, *ratios, f"{row['difference']:.1e}"))
    return table(header, cells)


def memory(rows: Sequence[Row]) -> str:
    """Peak memory of a forward pass."""
    header = ("case", "XLA", "dispatched", "of which arguments", "ratio", "meant to be at most")
    cells = []
    for row in rows:
        sizes = [f"{row[key] / 2**20:.0f} MiB" for key in ("xla_bytes", "ours_bytes", "argument_bytes")]
        ratio = f"{row['ours_bytes'] / row['xla_bytes']:.3f}" if row["xla_bytes"] else ""
        cells.append((row["case"].replace("-", " "), *sizes, ratio, f"{row['limit']:.2f}"))
    return table(header, cells)


def fresh_inputs(rows: Sequence[Row]) -> str:
    """Whether dispatched plans gave the right results every time."""
    header = (
        "model",
        "operators",
        "calls",
        "equal to one stream, bit by bit",
        "largest difference from XLA",
        "at most",
    )
    cells = []
    for row in rows:
        numbers = (f"{row['operators']}", f"{row['calls']}", f"{row['equal']}")
        cells.append((row["case"], *numbers, f"{row['difference']:.1e}", f"{row['limit']:.1e}"))
    return table(header, cells)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "trace_cost": trace_cost,
    "tp_overlap": overlap,
    "ep_overlap": overlap,
    "ddp_overlap": overlap,
    "fsdp_overlap": overlap,
    "end_to_end": end_to_end,
    "systems": systems,
    "serving": serving,
    "auto": auto,
    "predicted": predicted,
    "kernels": kernels,
    "with_kernels": with_kernels,
    "one_gpu": one_gpu,
    "launch_overhead": launch_overhead,
    "branches": branches,
    "memory": memory,
    "fresh_inputs": fresh_inputs,
}

if __name__ == "__main__":
    app.run(main)
