"""Several processes: on one host they write to each other's memory, on different ones XLA's collectives are used."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynaflow_jax.runtime import extension

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(extension.module is None, reason="the extension was not built"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes share memory on Linux only"),
]


def play(tmp_path, scene, devices=1, count=2):
    """Has processes of some virtual devices each play a scene of ``multihost.py``.

    Returns the exit status and the lines of each process, and what it complained of.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    said = [tmp_path / str(rank) for rank in range(count)]
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "multihost.py"), str(rank), str(count), str(port), scene],
            env=environment | {"SAID": str(said[rank])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        done = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    lines = [file.read_text().splitlines() if file.exists() else [] for file in said]
    return [(p.returncode, own, errors) for p, own, (_, errors) in zip(started, lines, done, strict=True)]


def check(played, lines):
    for status, printed, complaints in played:
        assert status == 0, complaints
        assert printed == lines


STRATEGIES = [
    "NanoFlow",
    "TokenWeave",
    "SingleBatchOverlap",
    "DualBatchOverlap",
    "GradientBuckets",
    "ParameterPrefetch",
    "AsyncTensorParallel",
    "Comet",
]


@pytest.mark.parametrize(("devices", "count"), [(1, 2), (2, 2), (1, 3)])
def test_collectives_of_one_host(devices, count, tmp_path):
    names = ["psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute", "ppermute to one"]
    check(play(tmp_path, "collectives", devices, count), [*names, "a sum of sums", "many", "large"])


@pytest.mark.parametrize("devices", [1, 2])
def test_every_strategy_on_one_host(devices, tmp_path):
    check(play(tmp_path, "every_strategy", devices), [*STRATEGIES, "experts"])


def test_every_strategy_on_two_hosts(tmp_path):
    check(play(tmp_path, "different_hosts", 2), STRATEGIES)


def test_a_mesh_of_some_devices(tmp_path):
    for rank, (status, printed, complaints) in enumerate(play(tmp_path, "part_of_the_devices", 2)):
        assert status == 0, complaints
        assert printed == [str(rank)]


def test_a_process_that_is_killed(tmp_path):
    (status, printed, complaints), (killed, _, _) = play(tmp_path, "killed", 2)
    assert status == 0, complaints
    assert printed == ["missed"]
    assert killed == -signal.SIGKILL


@pytest.mark.parametrize(("scene", "line"), [("failing", "told"), ("late", "given up"), ("other_plans", "told apart")])
def test_a_process_that_does_not_do_its_part(scene, line, tmp_path):
    check(play(tmp_path, scene), [line])


def test_nothing_is_left_of_shared_memory(tmp_path):
    before = set(os.listdir("/dev/shm"))
    play(tmp_path, "killed")
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "dynaflow" in name}
