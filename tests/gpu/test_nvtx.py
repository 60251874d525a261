"""The NVTX ranges that Nsight Systems shows have the names of operators."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax
import jax.numpy as jnp
import dynaflow_jax as df

def fun(w, x):
    with df.mark("layer_0/attention"):
        x = jnp.tanh(x @ w)
    with df.mark("layer_1/mlp"):
        return jnp.tanh(x @ w)

strategy = df.strategies.NanoFlow(2, concurrent=True)
run = jax.jit(df.dynaflow(fun, scheduler=strategy, batch_axes=(None, 0), backend="dispatch"))
jax.block_until_ready(run(jnp.ones((256, 256)), jnp.ones((512, 256))))
"""


def test_the_capture_of_a_partition_is_a_range_named_by_its_operators(tmp_path: Path):
    """XLA pushes a range for every module that it runs, and modules are named after their operators."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the listener")
    library, names = tmp_path / "listener.so", tmp_path / "names"
    source = Path(__file__).parent / "nvtx_listener.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, source], check=True)
    env = os.environ | {"NVTX_INJECTION64_PATH": str(library), "NVTX_LISTENER_OUT": str(names)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=env, timeout=300)
    found = names.read_text(encoding="utf-8") if names.exists() else ""
    for operator in ("layer_0", "layer_1"):
        assert operator in found, found[:2000]
