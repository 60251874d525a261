"""The same decoder with every kind of attention, as it stands and under one strategy, side by side.

Examples:
  python -m examples.attention
  python -m examples.attention --strategy=dual_batch_overlap --tokens=512
  python -m examples.attention --yarn=8 --rows=16
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

import dynaflow_jax as df
from examples.attention.decoder import Config, apply, init
from examples.attention.fastgen import FastGen, Profiled
from examples.attention.full import Attention, Full
from examples.attention.quest import Quest
from examples.attention.rope import RoPE, YaRN
from examples.attention.window import Longformer, StreamingLLM

KINDS: tuple[Attention, ...] = (Full(), Longformer(), StreamingLLM(), Quest(dense_layers=1), FastGen())

STRATEGIES: dict[str, Callable[[], df.OpScheduler]] = {
    "nanoflow": df.strategies.NanoFlow,
    "dual_batch_overlap": df.strategies.DualBatchOverlap,
    "sequential": df.strategies.Sequential,
}

_STRATEGY = flags.DEFINE_enum("strategy", "nanoflow", list(STRATEGIES), "How the operators are scheduled.")
_ROWS = flags.DEFINE_integer("rows", 8, "Rows of the batch.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 96, "Tokens of a prompt; rows are shorter by up to a half.", lower_bound=2)
_YARN = flags.DEFINE_float("yarn", 1.0, "How much longer than trained for YaRN makes the context.", lower_bound=1.0)
_CALLS = flags.DEFINE_integer("calls", 10, "Calls whose median time is shown.", lower_bound=1)

HEAD = ("attention", "phase", "cache of a row", "operators", "difference", "unscheduled", "scheduled")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"there is nothing to do with {argv[1]!r}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of every platform that it looks for
    rows = [HEAD, *(row for kind in KINDS for row in measured(kind))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if not i:
            print("-" * (sum(widths) + 2 * (len(widths) - 1)))
    print(
        f"\n{_ROWS.value} rows of up to {_TOKENS.value} tokens, {STRATEGIES[_STRATEGY.value]()!r}, on "
        f"{jax.devices()[0].device_kind}. The difference is the largest of any logit. Times are medians of "
        f"{_CALLS.value} calls."
    )


def measured(kind: Attention) -> list[tuple[str, ...]]:
    """The lines of one kind: of its prefill and of a step of decoding after it."""
    rope = RoPE() if _YARN.value == 1 else YaRN(scale=_YARN.value)
    config = Config(capacity=2 * _TOKENS.value, attention=kind, rope=rope)
    params, (prefill, decode) = init(config), apply(config)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, config.vocab, (_ROWS.value, _TOKENS.value)), jnp.int32)
    lengths = jnp.asarray(rng.integers(-(-_TOKENS.value // 2), _TOKENS.value + 1, _ROWS.value), jnp.int32)
    prompt = (params, tokens, lengths)
    _, cache = jax.jit(prefill)(*prompt)
    step = (params, tokens[:, 0], lengths, cache)
    lines = []
    for fun, args, axes in ((prefill, prompt, (None, 0, 0)), (decode, step, (None, 0, 0, 0))):
        flow = df.dynaflow(fun, scheduler=STRATEGIES[_STRATEGY.value](), batch_axes=axes)
        plain, scheduled = jax.jit(fun), jax.jit(flow)
        difference = jnp.abs(plain(*args)[0] - scheduled(*args)[0]).max()
        times = [milliseconds(functools.partial(call, *args)) for call in (plain, scheduled)]
        held = cache_size(config, cache) if fun is decode else ""
        count = str(len(flow.graph(*args).operators))
        lines.append(
            (type(kind).__name__, fun.__name__, held, count, f"{difference:.1e}", *(f"{t:.2f} ms" for t in times))
        )
    return lines


def cache_size(config: Config, cache: Any) -> str:
    """How a row's cache grows, and what of it heads have given up."""
    shapes = [bytes_of(config, capacity) for capacity in (config.capacity, 2 * config.capacity)]
    per_token, rest = divmod(shapes[1] - shapes[0], config.capacity)
    text = f"{per_token} B a token" if per_token and not rest else f"{shapes[0]} B at most"
    profiled = [own for own in cache if isinstance(own, Profiled)]
    if profiled:
        tokens = sum(int(own.prompt.sum()) * own.kept.shape[1] for own in profiled)
        text += f", {sum(int(own.kept.sum()) for own in profiled) / tokens:.0%} kept"
    return text


def bytes_of(config: Config, capacity: int) -> int:
    """Bytes of one row's cache with room for so many tokens, in all layers."""
    prefill, _ = apply(Config(capacity=capacity, attention=config.attention))
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    _, cache = jax.eval_shape(prefill, jax.eval_shape(lambda: init(config)), *one)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def milliseconds(call: Callable[[], Any]) -> float:
    """The median time of a compiled call."""
    times = []
    for _ in range(_CALLS.value):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


if __name__ == "__main__":
    app.run(main)
