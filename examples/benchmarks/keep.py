"""Keeps a benchmark's numbers as JSON, in the form from which the tables of the documentation are made."""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import dynaflow_jax as df


def keep(path: str | None, benchmark: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the rows with what they were measured on; ``path`` None keeps nothing."""
    if path is None:
        return
    data = {
        "benchmark": benchmark,
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "dynaflow_jax": df.__version__},
        "date": datetime.date.today().isoformat(),
        "rows": list(rows),
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
