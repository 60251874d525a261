"""The documentation is built from docstrings without a warning, and the strategies' pages show what is so now."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dynaflow_jax as df

ROOT = Path(__file__).parents[1]


def run(*arguments):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_strategies_pages_are_up_to_date():
    ran = run("-m", "docs.make_pages", "--check")
    assert ran.returncode == 0, f"python -m docs.make_pages\n{ran.stdout}{ran.stderr}"


def test_every_strategy_has_a_page():
    titles = {path.read_text(encoding="utf-8").splitlines()[0] for path in (ROOT / "docs" / "strategies").glob("*.md")}
    assert titles == {f"# {name}" for name in df.strategies.__all__}


def test_the_reference_is_built_without_warnings(tmp_path):
    pytest.importorskip("pdoc")
    ran = run("-W", "error::UserWarning", "docs/reference.py", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "dynaflow_jax.html", "dynaflow_jax/strategies.html", "pallas_kernels.html"} <= pages
