"""What dynaflow costs when a function is traced, and that it costs nothing when it is called.

    python -m examples.benchmarks.trace_cost [--layers=8,16,32,64] [--json=FILE]

For each depth of a small Llama: the time of dynaflow's own work (tracing at the micro-batch's size, inlining, proof,
cutting, scheduling, emitting) beside JAX's trace, lowering and compilation of the unscheduled function; then the time
of a call against a jitted function that splits the batch by hand in the same way. Operators of one stream are in order,
those of several are not: the second is what a program by hand leaves to XLA, whose CPU compiler may run both halves at
once. One program compiled twice can differ by some per cent for as long as the process lives, so each function is
compiled several times and all their calls count; the last column is how far apart the programs by hand are.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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

    def flow(concurrent: bool = False) -> Callable[..., Any]:
        return df.dynaflow(model.apply, scheduler=df.strategies.NanoFlow(concurrent=concurrent), batch_axes=(None, 0))

    def by_hand(params: Any, ids: jax.Array) -> jax.Array:
        first, second = jnp.split(ids, 2)
        return jnp.concatenate([model.apply(params, first), model.apply(params, second)])

    def fresh(fun: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, ids: fun(params, ids)  # so that no cache of JAX knows it

    plain, ours = [], []
    programs: dict[str, list[Callable[..., Any]]] = {"by hand": [], "ordered": [], "unordered": []}
    for _ in range(_REPEATS.value):
        plain.append(build(fresh(model.apply), params, ids)[0])
        taken, ordered = build(flow(), params, ids)
        ours.append(taken)
        programs["ordered"].append(ordered)
        programs["by hand"].append(build(fresh(by_hand), params, ids)[1])
        programs["unordered"].append(build(flow(concurrent=True), params, ids)[1])
    trace, lower, compile_ = (statistics.median(t[i] for t in plain) for i in range(3))
    our_trace, our_lower, our_compile = (statistics.median(t[i] for t in ours) for i in range(3))
    # JAX would trace and lower the function anyway; what comes on top is ours.
    own = (our_trace + our_lower) - (trace + lower)
    share = own / (trace + lower + compile_)
    times = calls(programs, params, ids)
    call_us = {name: statistics.median(chain(*taken)) for name, taken in times.items()}
    alike = [statistics.median(taken) for taken in times["by hand"]]
    apart = max(alike) / min(alike) - 1
    hand_us, ours_us, unordered_us = call_us["by hand"], call_us["ordered"], call_us["unordered"]
    results = [same[0](params, ids) for same in programs.values()]
    equal = all(bool(jnp.array_equal(results[0], result)) for result in results)
    print(
        f"{layers:6d}  {trace + lower:5.2f} s  {compile_:5.2f} s   {our_trace:5.2f} s {our_lower:5.2f} s  "
        f"{our_compile:5.2f} s   {own:5.2f} s  {share:6.1%}     {hand_us:7.0f} µs    {ours_us / hand_us:.3f}      "
        f"{unordered_us / hand_us:.3f}  {apart:6.1%}",
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
        "unordered_us": unordered_us,
        "apart": apart,
        "equal": equal,
    }


def build(fun: Callable[..., Any], *args: Any) -> tuple[tuple[float, float, float], Callable[..., Any]]:
    """Seconds to trace, to lower and to compile, and what was compiled."""
    gc.collect()
    gc.freeze()  # so that none pays for looking through what others left behind
    start = time.perf_counter()
    traced = jax.jit(fun).trace(*args)
    traced_at = time.perf_counter()
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    return (traced_at - start, lowered_at - traced_at, time.perf_counter() - lowered_at), compiled


def calls(programs: Mapping[str, Sequence[Callable[..., Any]]], *args: Any) -> dict[str, list[list[float]]]:
    """Microseconds of each call of each program, in turns in one process.

    Who begins is drawn anew in every turn: in a fixed order, equal programs differ by what the one before left behind.
    """
    times: dict[str, list[list[float]]] = {name: [[] for _ in same] for name, same in programs.items()}
    contenders = [pair for name, same in programs.items() for pair in zip(same, times[name], strict=True)]
    for program, _ in contenders:
        for _ in range(3):
            jax.block_until_ready(program(*args))
    draw = random.Random(0)
    for _ in range(_CALLS.value):
        for program, taken in draw.sample(contenders, len(contenders)):
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            taken.append((time.perf_counter() - start) * 1e6)
    return times


if __name__ == "__main__":
    app.run(main)
