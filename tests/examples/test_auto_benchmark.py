"""The benchmark of ``Auto`` runs: here with tiny sizes on two devices of the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick(tmp_path):
    path = tmp_path / "auto.json"
    command = [sys.executable, "-m", "examples.benchmarks.auto", "--quick", f"--json={path}", "--verbosity=-1"]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | flags, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    models = {row["case"].split("-")[0] for row in rows}
    assert models == {"llama", "minilm", "chain", "branches", "experts", "tensors"}
    assert all(row["ours_us"] > 0 and row["chosen"] for row in rows)
    assert f"{len(rows)} models" in done.stdout
