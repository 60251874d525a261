"""Where each kernel measured faster than what XLA does: a table by device and shape.

`examples/benchmarks/kernels.py --update-table` writes it. A strategy asks `worthwhile` before it puts a kernel in place
of operators; what was never measured is not worthwhile.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("measured.json")
MARGIN = 1.02
"""A kernel counts as faster from this speedup on; less is within the spread of measurements."""


@functools.cache
def _shipped() -> Mapping[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def worthwhile(kernel: str, device_kind: str, shape: Sequence[int], table: Mapping[str, Any] | None = None) -> bool:
    """Whether a kernel measured faster on a device at a shape.

    Args:
      kernel: its name, such as ``"add_rms_norm"``.
      device_kind: as ``jax.Device.device_kind`` says it.
      shape: the ``key`` of the kernel's module, rows first. Only rows are interpolated: between two measured numbers of
        rows, both must have been faster; beyond the ends the nearest decides, up to twice as many or half as few.
      table: of measurements; the shipped one if left out.
    """
    measured = (_shipped() if table is None else table).get(kernel, {}).get(device_kind, {})
    rows, *rest = shape
    speedups = {}
    for key, speedup in measured.items():
        first, *others = map(int, key.split("x"))
        if others == list(rest):
            speedups[first] = speedup
    below = max((n for n in speedups if n <= rows), default=None)
    above = min((n for n in speedups if n >= rows), default=None)
    if below is None and (above is None or above > 2 * rows):
        return False
    if above is None and (below is None or rows > 2 * below):
        return False
    return all(speedups[n] >= MARGIN for n in (below, above) if n is not None)


def recorded(
    table: Mapping[str, Any], kernel: str, device_kind: str, shape: Sequence[int], speedup: float
) -> dict[str, Any]:
    """The table with one measurement more (or one replaced)."""
    new = json.loads(json.dumps(table))
    new.setdefault(kernel, {}).setdefault(device_kind, {})["x".join(map(str, shape))] = round(speedup, 3)
    return new


def load(path: Path = PATH) -> dict[str, Any]:
    """The table as it is kept."""
    return json.loads(path.read_text(encoding="utf-8"))


def save(table: Mapping[str, Any], path: Path = PATH) -> None:
    """Keeps a table."""
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
