"""Independent branches of small products, each on a stream of its own, against XLA.

    JAX_PLATFORMS=cuda python -m examples.benchmarks.branches [--quick] [--json=FILE]

Two and four chains of 16 products of 128x1024x1024, none of which fills the GPU. Contenders take turns in one process;
medians. XLA runs the same function by default, with command buffers off, and with command buffers whose parts may run
at once (``CONCURRENT``). What one branch costs alone is the limit.

``--quick`` is for a machine without a GPU: small sizes, few calls, the host twin; its numbers mean nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import dynaflow_jax as df
from examples.benchmarks import chains
from examples.benchmarks.keep import keep
from examples.benchmarks.timing import OPTIONS, medians

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")

TARGETS = {2: {"default": 1.5, "concurrent": 1.15}, 4: {}}  # the least speed-up against each of XLA's ways


def main(argv: Sequence[str]) -> None:
    del argv
    sizes = (8, 32, 8) if _QUICK.value else (128, 1024, 16)
    keep(_JSON.value, "branches", [measure(count, *sizes) for count in TARGETS])


def measure(count: int, rows: int, width: int, depth: int) -> dict[str, Any]:
    wss = [chains.weights(width, depth, seed) for seed in range(count)]
    xs = [chains.rows(rows, width, seed) for seed in range(count)]
    flow = df.dynaflow(chains.branches, scheduler=chains.StreamForEachName(), backend="dispatch")
    funs: dict[str, Callable[..., Any]] = {"ours": jax.jit(flow)}
    funs |= {name: jax.jit(chains.branches, compiler_options=options) for name, options in OPTIONS.items()}
    funs["alone"] = jax.jit(chains.chain)
    arguments: dict[str, Any] = dict.fromkeys(funs, (wss, xs)) | {"alone": (wss[0], xs[0])}
    got, want = funs["ours"](wss, xs), funs["default"](wss, xs)
    equal = all(bool(jnp.array_equal(a, b)) for a, b in zip(got, want, strict=True))
    times = medians(funs, arguments, **({"rounds": 2, "calls": 3} if _QUICK.value else {"rounds": 15, "calls": 100}))
    best = min(OPTIONS, key=times.__getitem__)
    row = {"case": f"branches-{count}x{rows}x{width}x{depth}", "best_xla_us": times[best], "best_xla": best}
    row |= {"ours_us": times["ours"], "limit_us": times["alone"], "equal": equal}
    row |= {f"{name}_us": times[name] for name in OPTIONS} | {"targets": TARGETS[count]}
    against = ", ".join(
        f"{name} {times[name]:.1f} µs: {times[name] / times['ours']:.3f}"
        + (f" (at least {TARGETS[count][name]})" if name in TARGETS[count] else "")
        for name in OPTIONS
    )
    print(
        f"{count} branches: ours {times['ours']:.1f} µs, one alone {times['alone']:.1f} µs; times as fast as XLA's "
        f"{against}; equal {equal}",
        flush=True,
    )
    return row


if __name__ == "__main__":
    app.run(main)
