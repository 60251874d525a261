"""Serve synthetic requests with continuous batching: plain jit beside a schedule that follows the load.

Weights are random and requests made up, the same ones every time. Requests of changing length arrive in bursts, join
the batch, and leave it when they have their tokens. With more than one device the model is sharded over all of them
(tensor parallelism).

Examples:
  python -m examples.serving
  python -m examples.serving --schedule=context --requests=64 --max_rows=16
  python -m examples.serving --layers=8 --width=1024 --heads=16 --hidden=2816 --json
  XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python -m examples.serving
"""

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags, logging

from examples.attention.decoder import Config
from examples.serving.engine import SCHEDULES, Engine, bucket
from examples.serving.requests import Request, synthetic
from examples.serving.turns import turns

_SCHEDULE = flags.DEFINE_enum("schedule", "switch", SCHEDULES[1:], "What picks a plan: a scalar, or the server.")
_REQUESTS = flags.DEFINE_integer("requests", 32, "How many requests arrive.", lower_bound=1)
_MAX_ROWS = flags.DEFINE_integer(
    "max_rows", 8, "Most requests in a batch; rounded up to a power of two.", lower_bound=1
)
_PROMPT = flags.DEFINE_integer("prompt", 32, "Most tokens of a prompt; the fewest are a quarter.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 24, "Most tokens that a request wants; the fewest is 1.", lower_bound=1
)
_BURST = flags.DEFINE_integer("burst", 6, "Most requests that arrive in one step.", lower_bound=1)
_BUSY = flags.DEFINE_integer("busy", 4, "Tokens in a batch from which on it is split in two.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the model.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 64, "Width of the model.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 4, "Heads of attention; the devices have to divide them.", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", 176, "Hidden units; the devices have to divide them.", lower_bound=1)
_DEVICES = flags.DEFINE_integer("devices", None, "Devices to shard the model over; all, if not given.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds after the one that compiles; medians are shown.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of the requests and the weights.")
_JSON = flags.DEFINE_bool("json", False, "Print JSON in place of a table.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"there is nothing to do with {argv[1]!r}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of every platform that it looks for
    devices = _DEVICES.value or jax.device_count()
    problem = f"there are {jax.device_count()} devices, not {devices}" if devices > jax.device_count() else ""
    if _HEADS.value % devices or _HIDDEN.value % devices:
        problem = f"{devices} devices divide neither --heads={_HEADS.value} nor --hidden={_HIDDEN.value} evenly"
    if _WIDTH.value % (2 * _HEADS.value):
        problem = f"--width={_WIDTH.value} is not an even number for each of --heads={_HEADS.value}"
    if problem:
        sys.exit(f"serving: {problem}.")
    found = compare(config(), devices)
    if _JSON.value:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    if not found["same_tokens"]:
        sys.exit("serving: the contenders' tokens differ.")


def config() -> Config:
    """The model that the flags ask for."""
    return Config(
        layers=_LAYERS.value,
        width=_WIDTH.value,
        heads=_HEADS.value,
        head_dim=_WIDTH.value // _HEADS.value,
        hidden=_HIDDEN.value,
        capacity=bucket(bucket(_PROMPT.value, least=8) + _NEW_TOKENS.value),
    )


def requests(vocab: int) -> list[Request]:
    """The requests that the flags ask for."""
    prompt = (max(1, _PROMPT.value // 4), _PROMPT.value)
    return synthetic(_REQUESTS.value, vocab, prompt, (1, _NEW_TOKENS.value), _BURST.value, _SEED.value)


def compare(model: Config, devices: int) -> dict[str, Any]:
    """Serves the same requests with every contender, in turns."""
    engines = {name: Engine(model, name, _BUSY.value, devices, _SEED.value) for name in ("plain", _SCHEDULE.value)}
    served = turns(engines, lambda: requests(model.vocab), bucket(_MAX_ROWS.value), _ROUNDS.value)
    last = served["plain"].reports[-1]
    return {
        "device": jax.devices()[0].device_kind,
        "devices": devices,
        "requests": _REQUESTS.value,
        "tokens": last.tokens,
        "prompt_tokens": last.prompt_tokens,
        "steps": last.steps,
        "steps_by_rows": {str(rows): count for rows, count in sorted(last.rows.items())},
        "picked": dict(engines[_SCHEDULE.value].picked),
        "schedule": _SCHEDULE.value,
        "tokens_per_second": {
            name: round(statistics.median(report.tokens_per_second for report in own.reports), 1)
            for name, own in served.items()
        },
        "same_tokens": served["plain"].tokens == served[_SCHEDULE.value].tokens,
    }


def show(found: dict[str, Any]) -> None:
    rows = ", ".join(f"{count} of {rows}" for rows, count in found["steps_by_rows"].items())
    print(
        f"{found['requests']} requests on {found['devices']} x {found['device']}: {found['prompt_tokens']} tokens "
        f"read, {found['tokens']} generated\n{found['steps']} steps of decoding, by rows of the batch: {rows}\n"
    )
    plain = found["tokens_per_second"]["plain"]
    for name, rate in found["tokens_per_second"].items():
        what = "plain jit" if name == "plain" else f"dynaflow, plan picked by {name}"
        print(f"{what:<32} {rate:>10,.1f} tokens a second  {rate / plain:5.2f} times as fast")
    picked = found["picked"]
    print(
        f"\nBatches by load: {picked['idle']} idle (one plan), {picked['busy']} busy (the other). "
        f"Tokens are {'the same' if found['same_tokens'] else 'NOT the same'}."
    )


if __name__ == "__main__":
    app.run(main)
