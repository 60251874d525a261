"""Builds the API reference from the docstrings: ``python docs/reference.py [FOLDER]``, by default ``build/docs``."""

import sys
from pathlib import Path

import pdoc

MODULES = (
    "dynaflow_jax",
    # How it is made: for readers of the code, not for users.
    *(f"!dynaflow_jax.{name}" for name in ("batch", "compat", "inline", "lowering", "program", "runtime", "text")),
    "pallas_kernels",
)


def main() -> None:
    """Writes the pages."""
    root = Path(__file__).parents[1]
    sys.path.insert(0, str(root))
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=Path(sys.argv[1]) if len(sys.argv) > 1 else root / "build" / "docs")


if __name__ == "__main__":
    main()
