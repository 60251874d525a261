"""The GPU's benchmarks run: here on the host twin with tiny sizes, and what they keep makes tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaflow_jax.runtime import extension
from examples.benchmarks import tables

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(extension.module is None, reason="the extension was not built")


def run(name, *flags):
    """A benchmark's output, from a process of its own: each has flags of the same names.

    That a plan is lowered to XLA instead of being dispatched is an error.
    """
    strict = ["-W", "error:dynaflow(:UserWarning"]  # how the warning begins; its class cannot be named here
    command = [sys.executable, *strict, "-m", f"examples.benchmarks.{name}", *flags, "--verbosity=-1"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("launch_overhead", ["step-16x32x8", "host-4-layers", "growth-200-calls"]),
        ("branches", ["branches-2x8x32x8", "branches-4x8x32x8"]),
        ("memory", ["dispatched-2-layers"]),
        ("with_kernels", ["dense-128", "experts-64"]),
        ("fresh_inputs", ["llama", "minilm", "chain", "branches"]),
    ],
)
def test_it_runs_and_its_table_is_written(name, cases, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    path = tmp_path / f"{name}.json"
    printed = run(name, "--quick", f"--json={path}")
    kept = json.loads(path.read_text())
    assert [row["case"] for row in kept["rows"]] == cases
    for row in kept["rows"]:
        assert row.get("equal", True) in (True, row.get("calls"))
    assert len(printed.splitlines()) == len(cases)
    assert "WRONG" not in printed
    text = tables.render(f"<!-- {name} -->\n<!-- /{name} -->\n", tables.load(tmp_path))
    header, rule, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == len(cases)
    assert {line.count("|") for line in (header, rule, *lines)} == {header.count("|")}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_training_steps_overlap(name, tmp_path, monkeypatch):
    """The same gradients as XLA's, up to the rounding of bfloat16 where XLA fuses otherwise."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    path = tmp_path / "kept.json"
    printed = run(f"{name}_overlap", "--quick", f"--json={path}")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["case"] == f"{name}-16"
    assert row["difference"] < 2**-8
    assert printed.startswith(row["case"])


def test_plans_that_communicate_get_fresh_inputs_too(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    names = ["tensor parallel", "expert parallel", "sharded weights"]
    lines = run("fresh_inputs", "--quick", "--calls=2", f"--cases={','.join(names)}").splitlines()
    assert [line.partition(" 2 calls, 2 equal")[0].strip() for line in lines] == names
    assert all("as it must be" in line for line in lines)


def test_a_whole_model_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    path = tmp_path / "kept.json"
    run("end_to_end", "--quick", f"--json={path}")
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == ["prefill-16", "decode-4"]
    assert max(row["difference"] for row in rows) < 2**-7
    text = tables.render("<!-- end_to_end -->\n<!-- /end_to_end -->\n", tables.load(tmp_path))
    assert text.count("\n| ") == 2 + len(rows)


def test_systems_as_they_are(tmp_path, monkeypatch):
    """One case with a loop of layers and one without; the others differ in neither."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    path, cases = tmp_path / "kept.json", ["linen-train-16", "nnx-forward-32"]
    run("systems", "--quick", f"--json={path}", f"--cases={','.join(cases)}")
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == cases
    assert max(row["difference"] for row in rows) < 32 * 2**-23  # as in examples.integrations.check
    text = tables.render("<!-- systems -->\n<!-- /systems -->\n", tables.load(tmp_path))
    assert text.count("\n| ") == 2 + len(rows)


def test_the_serving_loop_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    path = tmp_path / "kept.json"
    run("serving", "--quick", f"--json={path}", "--cases=serving-2")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["case"] == "serving-2"
    assert row["equal"]
    assert row["idle"]
    assert row["ours_tokens_per_s"] > 0
    text = tables.render("<!-- serving -->\n<!-- /serving -->\n", tables.load(tmp_path))
    assert text.count("\n| ") == 3


def test_the_plan_for_the_sanitizer():
    assert run("sanitize").startswith("5 calls on 3 streams; largest relative difference from XLA")
