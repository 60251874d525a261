"""The serving loop on one GPU and two: plans that follow the load, against the same loop as XLA runs it best.

    JAX_PLATFORMS=cuda,cpu python -m examples.benchmarks.serving [--quick] [--json=FILE] [--cases=serving-2]

The loop of ``examples/serving``: requests arrive in bursts of up to 32, are read, and join a batch of 16 or 32 rows
until they have their tokens. Eight layers of the decoder (width 2048, 16 heads, hidden 5632, vocabulary 32000,
bfloat16), on two GPUs tensor-parallel; prompts of 257 to 512 tokens, up to 128 new ones for each of 128 requests. A
batch with few tokens is left whole, one with many is split in two, from 2048 tokens on or, on one GPU, from 16 (so when
decoding, too): by ``Switch`` in one program, or by the server between two.

XLA's best of: by default, with the latency-hiding scheduler (two GPUs) and without command buffers. Contenders take
turns in one process; medians of the time for all requests. ``difference`` is the share of tokens that are not those of
XLA by default: one rounding that tips the choice between two tokens changes all that follow. There is no limit here.

``--quick`` is for a machine without a GPU: small sizes, two contenders, one round; its numbers mean nothing.
"""

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from absl import app, flags

from examples.attention.decoder import Config
from examples.benchmarks.keep import keep
from examples.benchmarks.overlap import XLA
from examples.serving.engine import Engine
from examples.serving.requests import synthetic
from examples.serving.turns import Served, turns

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_WAYS = flags.DEFINE_list("ways", ["switch", "context"], "What picks our plans; each compiles programs of its own.")
_CASES = flags.DEFINE_list("cases", None, "The cases to measure: serving-1, serving-2; all by default.")

OPTIONS = {1: ("default", "no command buffers"), 2: ("default", "latency hiding", "no command buffers")}
"""XLA's, by how many devices there are."""
OURS = {1: (("switch", 16), ("context", 2048)), 2: (("switch", 2048), ("context", 2048))}
"""What picks a plan, and the tokens from which on a batch is split, likewise."""


def main(argv: Sequence[str]) -> None:
    del argv
    rows = []
    for devices in (1, 2):
        case = f"serving-{devices}"
        if not _CASES.value or case in _CASES.value:
            rows.append(measure(case, devices))
            keep(_JSON.value, "serving", rows)


def measure(case: str, devices: int) -> dict[str, Any]:
    if _QUICK.value:
        config = Config(layers=1, width=32, heads=4, head_dim=8, hidden=48, vocab=64, capacity=32)
        requests = functools.partial(synthetic, 8, 64, (9, 16), (1, 6), 4)
        scale, least_rows, max_rows, rounds = 64, 2, 4, 1
    else:
        config = Config(layers=8, width=2048, heads=16, head_dim=128, hidden=5632, vocab=32000, capacity=1024)
        requests = functools.partial(synthetic, 128, 32000, (257, 512), (1, 128), 32)
        scale, least_rows, max_rows, rounds = 1, 16, 32, 3
    engine = functools.partial(Engine, config, devices=devices, dtype=jnp.bfloat16, least_rows=least_rows)
    names, ways = OPTIONS[devices], [way for way in OURS[devices] if way[0] in _WAYS.value]
    if _QUICK.value:
        names, ways = names[:1], ways[:1]
    theirs = {name: engine("plain", compiler_options=XLA[name]) for name in names}
    ours = {f"{how}, from {tokens}": engine(how, max(4, tokens // scale)) for how, tokens in ways}
    served = turns(theirs | ours, requests, max_rows, rounds)
    seconds = {name: statistics.median(report.seconds for report in own.reports) for name, own in served.items()}
    best, own = min(theirs, key=seconds.__getitem__), min(ours, key=seconds.__getitem__)
    tokens, differences = served[own].reports[-1].tokens, {name: differing(served, name) for name in ours}
    print(
        f"{case} XLA {tokens / seconds[best]:.0f} tokens/s ({best}), ours {tokens / seconds[own]:.0f} ({own}: "
        f"{ours[own].picked['idle']} idle, {ours[own].picked['busy']} busy); ratio {seconds[best] / seconds[own]:.3f}, "
        f"differences {', '.join(f'{d:.1e}' for d in differences.values())}\n    "
        + ", ".join(f"{name} {tokens / taken:.0f}" for name, taken in seconds.items()),
        flush=True,
    )
    return {
        "case": case,
        "best_xla_us": round(seconds[best] * 1e6, 1),
        "best_xla": best,
        "ours_us": round(seconds[own] * 1e6, 1),
        "ours": own,
        "limit_us": None,
        "hidden": None,
        "difference": max(differences.values()),
        "equal": not any(differences.values()),
        "best_xla_tokens_per_s": tokens / seconds[best],
        "ours_tokens_per_s": tokens / seconds[own],
        **ours[own].picked,
    }


def differing(served: dict[str, Served], name: str) -> float:
    """The share of tokens that are not those of XLA by default."""
    pairs = zip(served[name].tokens, served["default"].tokens, strict=True)
    same = [a == b for got, want in pairs for a, b in zip(got, want, strict=True)]
    return 1 - sum(same) / len(same)


if __name__ == "__main__":
    app.run(main)
