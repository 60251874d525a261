"""Runs the notebooks and keeps what they print: ``python -m examples.notebooks.execute``; needs nbclient and ipykernel.

The first cells are written too: the badge and the installation name the repository in ``pyproject.toml``.
"""

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOTEBOOKS = tuple(sorted(HERE.glob("*.ipynb")))

_BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
_INSTALL = """\
import importlib.util
import subprocess
import sys

REPOSITORY = "{repository}"  # what pip installs the library from, where it is not installed yet
if importlib.util.find_spec("dynaflow_jax") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", REPOSITORY], check=True)"""


def repository() -> str | None:
    """The repository's address, from ``pyproject.toml``; ``None`` where that has none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository")


def first_cells(notebook: dict[str, Any], name: str) -> None:
    """Writes the badge and the cell that installs."""
    url = repository()
    title, *rest = "".join(notebook["cells"][0]["source"]).splitlines(keepends=True)
    rest = [line for line in rest if _BADGE not in line]
    if url and url.startswith("https://github.com/"):
        path = url.removeprefix("https://github.com/").removesuffix(".git")
        colab = f"https://colab.research.google.com/github/{path}/blob/main/examples/notebooks/{name}"
        rest.insert(0, f"[![Open In Colab]({_BADGE})]({colab})\n")
    notebook["cells"][0]["source"] = [title, *rest]
    install = _INSTALL.format(repository=f"git+{url}" if url else "../..")
    notebook["cells"][1]["source"] = install.splitlines(keepends=True)


def executed(notebook: dict[str, Any]) -> str:
    """The notebook with its outputs, as JSON."""
    import nbclient
    import nbformat

    parsed = nbformat.reads(json.dumps(notebook), as_version=4)
    nbclient.NotebookClient(parsed, timeout=300, resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in parsed["cells"]:
        cell["metadata"] = {}
        if "outputs" in cell:
            cell["outputs"] = joined(cell["outputs"])
    return nbformat.writes(parsed) + "\n"


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs of a cell, with what it printed in several pieces in one: where it is cut differs from run to run."""
    found: list[Any] = []
    for output in outputs:
        if found and output["output_type"] == "stream" and found[-1].get("name") == output["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


def main() -> None:
    # Notebooks are run as they would be on a machine without an accelerator, with this library.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        first_cells(notebook, path.name)
        text = executed(notebook)
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text) // 1000} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
