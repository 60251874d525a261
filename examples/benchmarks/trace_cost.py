"""What dynaflow costs when a function is traced, and that it costs nothing when it is called.

    python -m examples.benchmarks.trace_cost [--layers=8,16,32,64] [--json=FILE]

For each depth of a small Llama: the time of dynaflow's own work (tracing at the micro-batch's size, inlining, proof,
cutting, scheduling, emitting) beside JAX's trace, lowering and compilation of the unscheduled function; then the time
of a call against a jitted function that splits the batch by hand in the same way. One program compiled twice can differ
by some per cent for as long as the process lives, so each function is compiled several times and all their calls count;
the last column is how far apart the programs by hand are.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import dynaflow_jax as df
from examples.benchmarks.keep import keep
from examples.benchmarks.llama import Config, Llama

_LAYERS = flags.DEFINE_list("layers", ["8", "16", "32", "64"], "Depths of the model.")
_REPEATS = flags.DEFINE_integer(
    "repeats", 5, "Fresh traces and compilations of each; the median counts.", lower_bound=1
)
_CALLS = flags.DEFINE_integer("calls", 40, "Timed calls of each program.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")

ROWS, TOKENS = 8, 32


def main(argv: Sequence[str]) -> None:
    del argv
    print("           JAX's own            dynaflow's share                              calls")
    print(
        "layers   trace  compile     trace  lower   compile    own work / JAX      by hand   dynaflow   ratio   equal"
    )
    rows = [measure(int(layers)) for layers in _LAYERS.value]
    keep(_JSON.value, "trace_cost", rows)


def measure(layers: int) -> dict[str, Any]:
    model = Llama(Config(layers))
    ids = jnp.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 256
    params = jax.jit(model.init)(jax.random.key(0), ids)

    def flow() -> Callable[..., Any]:
        return df.dynaflow(model.apply, scheduler=df.strategies.NanoFlow(), batch_axes=(None, 0))

    def by_hand(params: Any, ids: jax.Array) -> jax.Array:
        first, second = jnp.split(ids, 2)
        return jnp.concatenate([model.apply(params, first), model.apply(params, second)])

    def fresh(fun: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, ids: fun(params, ids)  # so that no cache of JAX knows it

    plain, ours = [], []
    by_hands, flows = [], []
    for _ in range(_REPEATS.value):
        plain.append(build(fresh(model.apply), params, ids)[:3])
        *taken, compiled = build(flow(), params, ids)
        ours.append(taken)
        flows.append(compiled)
        by_hands.append(build(fresh(by_hand), params, ids)[3])
    trace, lower, compile_ = (statistics.median(t[i] for t in plain) for i in range(3))
    our_trace, our_lower, our_compile = (statistics.median(t[i] for t in ours) for i in range(3))
    # JAX would trace and lower the function anyway; what comes on top is ours.
    own = (our_trace + our_lower) - (trace + lower)
    share = own / (trace + lower + compile_)
    times = calls([*by_hands, *flows], params, ids)
    hand_us, ours_us = (statistics.median(chain(*part)) for part in (times[: _REPEATS.value], times[_REPEATS.value :]))
    alike = [statistics.median(taken) for taken in times[: _REPEATS.value]]
    apart = max(alike) / min(alike) - 1
    equal = bool(jnp.array_equal(by_hands[0](params, ids), flows[0](params, ids)))
    print(
        f"{layers:6d}  {trace + lower:5.2f} s  {compile_:5.2f} s   {our_trace:5.2f} s {our_lower:5.2f} s  "
        f"{our_compile:5.2f} s   {own:5.2f} s  {share:6.1%}     {hand_us:7.0f} µs {ours_us:7.0f} µs   "
        f"{ours_us / hand_us:.3f} {apart:7.1%}",
        flush=True,
    )
    return {
        "case": f"layers-{layers}",
        "jax_trace_s": trace,
        "jax_lower_s": lower,
        "jax_compile_s": compile_,
        "dynaflow_trace_s": our_trace,
        "dynaflow_lower_s": our_lower,
        "dynaflow_compile_s": our_compile,
        "own_share": share,
        "by_hand_us": hand_us,
        "ours_us": ours_us,
        "apart": apart,
        "equal": equal,
    }


def build(fun: Callable[..., Any], *args: Any) -> tuple[float, float, float, Callable[..., Any]]:
    """Seconds to trace, to lower and to compile, and what was compiled."""
    gc.collect()  # so that none pays for what others left behind
    start = time.perf_counter()
    traced = jax.jit(fun).trace(*args)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    return traced_at - start, lowered_at - traced_at, time.perf_counter() - lowered_at, compiled


def calls(funs: Sequence[Callable[..., Any]], *args: Any) -> list[list[float]]:
    """Microseconds of each call of each, in turns in one process.

    Who begins is drawn anew in every turn: in a fixed order, equal programs differ by what the one before left behind.
    """
    for fun in funs:
        for _ in range(3):
            jax.block_until_ready(fun(*args))
    times: list[list[float]] = [[] for _ in funs]
    draw = random.Random(0)
    for _ in range(_CALLS.value):
        for fun, taken in draw.sample([*zip(funs, times, strict=True)], len(funs)):
            start = time.perf_counter()
            jax.block_until_ready(fun(*args))
            taken.append((time.perf_counter() - start) * 1e6)
    return times


if __name__ == "__main__":
    app.run(main)
