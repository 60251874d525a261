"""How much device memory a forward pass of 32 layers takes, dispatched and as one XLA program.

    JAX_PLATFORMS=cuda python -m examples.benchmarks.memory [--quick] [--json=FILE]

Each way runs in a process of its own, and what counts is the most that its allocators ever gave out: JAX's own, and
for a dispatched plan the pools of its streams too (their peaks added up, although they need not fall together).
Autotuning is off, since the buffers that the compiler tries kernels on would count as well.

``--quick`` is for a machine without a GPU: small sizes, the host twin; the CPU's allocator tells no numbers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import dynaflow_jax as df
from dynaflow_jax.runtime import private
from examples.benchmarks import chains
from examples.benchmarks.keep import keep
from examples.benchmarks.llama import Config, Llama

_JSON = flags.DEFINE_string("json", None, "Where to keep the numbers.")
_QUICK = flags.DEFINE_bool("quick", False, "Whether only to see that it works.")
_WAYS = flags.DEFINE_list("ways", ["xla", "dispatched"], "What to compare: of xla, dispatched, and two-streams.")
_ONE = flags.DEFINE_string("one", None, "Internal: measure this way in this process and print it as JSON.")

LIMIT = 1.10  # of dispatched / XLA


def main(argv: Sequence[str]) -> None:
    del argv
    if _ONE.value:
        print(json.dumps(measure(_ONE.value)))
        return
    found = {way: in_own_process(way) for way in _WAYS.value}
    xla = found.pop("xla")
    rows = []
    for way, mine in found.items():
        row = {"case": f"{way}-{mine['layers']}-layers", "xla_bytes": xla["peak"], "ours_bytes": mine["peak"]}
        row |= {"argument_bytes": mine["arguments"], "limit": LIMIT}
        row["difference"] = float(abs(np.asarray(mine["sample"]) - np.asarray(xla["sample"])).max())
        row["equal"] = not row["difference"]
        ratio = f"{mine['peak'] / xla['peak']:.3f}" if xla["peak"] else "unknown on this platform"
        print(
            f"{row['case']:22s} XLA {mib(xla['peak'])}, ours {mib(mine['peak'])}, of which arguments "
            f"{mib(mine['arguments'])}; ours / XLA {ratio} (limit {LIMIT:.2f}), largest difference of the sampled "
            f"results {row['difference']:.3g}",
            flush=True,
        )
        rows.append(row)
    keep(_JSON.value, "memory", rows)


def mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def in_own_process(way: str) -> dict[str, Any]:
    """What another process finds out."""
    command = [sys.executable, "-m", "examples.benchmarks.memory", f"--one={way}", *(["--quick"] * _QUICK.value)]
    flags_of_xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environment = os.environ | {"XLA_FLAGS": flags_of_xla, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(way: str) -> dict[str, Any]:
    """Runs the model one way; returns the bytes at the peak and of the arguments, and some results."""
    config = Config(2) if _QUICK.value else Config(32, width=2048, heads=16, hidden=5632, vocab=8192)
    rows, tokens = (4, 8) if _QUICK.value else (8, 1024)
    model = Llama(config)
    ids = jnp.arange(rows * tokens).reshape(rows, tokens) % config.vocab
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids)
    # Made on the host and by repetition: drawn on the device they would count, and gigabytes take long to draw.
    few = (np.random.default_rng(0).standard_normal((1 << 16) + 1, np.float32) * 0.02).astype(jnp.bfloat16)
    params = jax.tree.map(lambda leaf: jax.device_put(np.resize(few, leaf.shape)), shapes)
    schedulers = {"dispatched": df.strategies.Sequential(), "two-streams": chains.StreamForEachMicroBatch()}
    run, streams = jax.jit(model.apply), []
    if way != "xla":
        flow = df.dynaflow(model.apply, scheduler=schedulers[way], batch_axes=(None, 0), backend="dispatch")
        run, streams = jax.jit(flow), [*{*flow.plan(params, ids).streams, "compute"}]
    logits = run(params, ids)
    for _ in range(3):
        logits = run(params, ids).block_until_ready()
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    stats = [jax.local_devices()[0].memory_stats() or {}]
    stats += [private.client(platform, 0, stream).memory_stats() for stream in streams]
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((params, ids)))
    sample = np.asarray(logits[0, -1, :64], np.float32).tolist()
    peak = sum(found.get("peak_bytes_in_use", 0) for found in stats)
    return {"layers": config.layers, "peak": peak, "arguments": arguments, "sample": sample}


if __name__ == "__main__":
    app.run(main)
