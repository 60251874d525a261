"""The notebooks run from their first cell to their last, are small, and show what they print now."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

from examples.notebooks.execute import HERE, NOTEBOOKS, ROOT, first_cells

# Cells run as a notebook runs them, without a notebook: what stands alone on a cell's last line is shown.
RUNNER = """
import ast, json, sys
namespace = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
        if value is not None:
            assert not hasattr(value, "_repr_html_") or value._repr_html_().startswith("<")
"""
CHANGES = re.compile(r"\d+ kB")  # of HTML, whose style may change


def contents(path):
    return json.loads(path.read_text(encoding="utf-8"))


def sources(notebook):
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(notebook):
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_prints(path):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "DYNAFLOW_BACKEND": "auto"}
    env.pop("XLA_FLAGS", None)
    text = json.dumps(sources(contents(path)))
    ran = subprocess.run([sys.executable, "-c", RUNNER], input=text, cwd=HERE, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    kept = CHANGES.sub("", printed(contents(path)))
    assert CHANGES.sub("", ran.stdout) == kept, "python -m examples.notebooks.execute"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_installs_from_the_repository(path):
    notebook = contents(path)
    assert path.stat().st_size < 300_000
    assert not [o for cell in notebook["cells"] for o in cell.get("outputs", ()) if o["output_type"] == "error"]
    written = json.dumps(notebook)
    first_cells(notebook, path.name)
    assert json.dumps(notebook) == written, "python -m examples.notebooks.execute"
    with contextlib.redirect_stdout(None):
        exec("".join(notebook["cells"][1]["source"]), {})  # does nothing where the library is installed


def test_there_are_notebooks():
    assert {"quickstart", "write_a_strategy", "overlap_on_a_gpu"} <= {path.stem for path in NOTEBOOKS}
