"""What dispatching itself costs: a plan of one stream and one micro-batch, which has nothing to overlap.

    JAX_PLATFORMS=cuda python -m examples.benchmarks.launch_overhead [--quick] [--json=FILE]

Three things are measured, contenders in turns in one process, medians:

- steps: a call of about 100 µs and two of more than 1 ms, dispatched, against the best that XLA does with the same
  function with command buffers on, off or concurrent;
- host: how long a call of a captured plan of 32 layers keeps the host, beside a call of the same function as XLA's;
- growth: the memory of the host and of the device before and after 100,000 calls.

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
from examples.benchmarks.timing import OPTIONS, device_bytes, host_bytes, host_medians, medians

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_CALLS = flags.DEFINE_integer("calls", 100_000, "Calls between the two looks at memory.", lower_bound=1)

# Rows, width, depth, and the most that the ratio may be. What is copied, the output, is the larger part of a step the
# shorter it is.
STEPS = ((64, 1024, 16, 1.05), (4096, 4096, 8, 1.00), (4096, 4096, 64, 1.00))
HOST_LIMIT_US = 50.0
# What an allocator may keep for itself, however many calls there were; a byte that every call leaves would show.
HOST_GROWTH_LIMIT, DEVICE_GROWTH_LIMIT = 1 << 20, 0


def main(argv: Sequence[str]) -> None:
    del argv
    steps = [(16, 32, 8, 1.05)] if _QUICK.value else STEPS
    rows = [step(*sizes) for sizes in steps]
    rows.append(host(layers=4 if _QUICK.value else 32))
    rows.append(growth(steps[0], 200 if _QUICK.value else _CALLS.value))
    keep(_JSON.value, "launch_overhead", rows)


def on_one_stream(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function dispatched: the whole batch, one stream."""
    return jax.jit(df.dynaflow(fun, scheduler=df.strategies.Sequential(), backend="dispatch"))


def step(rows: int, width: int, depth: int, limit: float) -> dict[str, Any]:
    """A call of a chain of products, dispatched and as XLA's best."""
    arguments = (chains.weights(width, depth), chains.rows(rows, width))
    funs: dict[str, Callable[..., Any]] = {"ours": on_one_stream(chains.chain)}
    funs |= {name: jax.jit(chains.chain, compiler_options=options) for name, options in OPTIONS.items()}
    equal = bool(jnp.array_equal(funs["ours"](*arguments), funs["default"](*arguments)))
    effort = {"rounds": 2, "calls": 3} if _QUICK.value else {"rounds": 15, "calls": 100 if width < 4096 else 20}
    times = medians(funs, dict.fromkeys(funs, arguments), **effort)
    best = min(OPTIONS, key=times.__getitem__)
    ratio = times["ours"] / times[best]
    name = f"step-{rows}x{width}x{depth}"
    print(
        f"{name:22s} XLA {times[best]:8.1f} µs ({best}), ours {times['ours']:8.1f} µs, ours / XLA {ratio:.3f} "
        f"(limit {limit:.2f}), equal {equal}",
        flush=True,
    )
    row = {"case": name, "best_xla_us": times[best], "best_xla": best, "ours_us": times["ours"]}
    return row | {"limit_us": None, "equal": equal, "ratio": ratio, "limit": limit}


def layered(ws: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Layers whose weights are stacked, so that a call hands over few arrays: two operators each."""
    for up, down in zip(ws["up"], ws["down"], strict=True):
        with df.mark("up"):
            h = jnp.tanh(x @ up)
        with df.mark("down"):
            x = x + h @ down
    return x


def host(layers: int) -> dict[str, Any]:
    """How long a call keeps the host."""
    width = 64
    keys = jax.random.split(jax.random.key(0), 2)
    ws = {n: jax.random.normal(k, (layers, width, width)) / 8 for n, k in zip(("up", "down"), keys, strict=True)}
    x = jax.random.normal(jax.random.key(1), (16, width))
    funs = {"ours": on_one_stream(layered), "xla": jax.jit(layered)}
    equal = bool(jnp.array_equal(funs["ours"](ws, x), funs["xla"](ws, x)))
    times = host_medians(funs, dict.fromkeys(funs, (ws, x)), **({"rounds": 2} if _QUICK.value else {}))
    name = f"host-{layers}-layers"
    print(
        f"{name:22s} XLA {times['xla']:8.1f} µs, ours {times['ours']:8.1f} µs of the host's time a call "
        f"(limit {HOST_LIMIT_US:.0f}), equal {equal}",
        flush=True,
    )
    row = {"case": name, "best_xla_us": times["xla"], "best_xla": "default", "ours_us": times["ours"]}
    row |= {"limit_us": None, "equal": equal}
    return row | {"ratio": times["ours"] / times["xla"], "most_us": HOST_LIMIT_US}


def growth(sizes: Sequence[float], calls: int) -> dict[str, Any]:
    """What calls leave behind in memory."""
    rows, width, depth = map(int, sizes[:3])
    run = on_one_stream(chains.chain)
    ws, x = chains.weights(width, depth), chains.rows(rows, width)

    def burst(number: int) -> None:
        result = None
        for _ in range(number):
            result = run(ws, x)
        jax.block_until_ready(result)

    burst(min(calls, 2000))  # caches and pools fill
    before = host_bytes(), device_bytes()
    for done in range(0, calls, 1000):
        burst(min(1000, calls - done))
    host_growth, device_growth = (now - then for now, then in zip((host_bytes(), device_bytes()), before, strict=True))
    name = f"growth-{calls}-calls"
    print(
        f"{name:22s} host {host_growth / 1024:+.0f} KiB (limit {HOST_GROWTH_LIMIT / 1024:.0f}), device "
        f"{device_growth / 1024:+.0f} KiB (limit {DEVICE_GROWTH_LIMIT / 1024:.0f})",
        flush=True,
    )
    row = {"case": name, "calls": calls, "host_growth_bytes": host_growth, "device_growth_bytes": device_growth}
    return row | {"host_limit_bytes": HOST_GROWTH_LIMIT, "device_limit_bytes": DEVICE_GROWTH_LIMIT}


if __name__ == "__main__":
    app.run(main)
