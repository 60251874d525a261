"""Two processes, as on two hosts: plans are lowered to XLA, whose collectives reach further, and say so."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynaflow_jax.runtime import extension

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
def test_every_strategy_over_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "multihost.py"), str(rank), "2", str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (printed, complaints) in zip(processes, done, strict=True):
        assert process.returncode == 0, complaints
        assert printed.split()[-7:] == [
            "NanoFlow",
            "TokenWeave",
            "SingleBatchOverlap",
            "DualBatchOverlap",
            "GradientBuckets",
            "ParameterPrefetch",
            "AsyncTensorParallel",
        ]
