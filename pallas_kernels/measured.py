"""Where each kernel measured faster than what XLA does: a table by device and shape.

The benchmarks `kernels` and `with_kernels` write it (`--update_table`). A strategy asks `worthwhile` before it puts a
kernel in place of operators; what was never measured is not worthwhile.
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
IN_PLACE = " in place"
"""What the table adds to a kernel's name for whole models with the kernel, against the same models without it."""


@functools.cache
def _shipped() -> Mapping[str, Any]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def worthwhile(kernel: str, device_kind: str, shape: Sequence[int], table: Mapping[str, Any] | None = None) -> bool:
    """Whether a kernel measured faster on a device at a shape; see ``speedup``."""
    return (speedup(kernel, device_kind, shape, table) or 0.0) >= MARGIN


def worthwhile_in_place(
    kernel: str, device_kind: str, shape: Sequence[int], table: Mapping[str, Any] | None = None
) -> bool:
    """The same inside of a model, where XLA may fuse with what is around: measured there, or else by itself."""
    found = speedup(kernel + IN_PLACE, device_kind, shape, table)
    return worthwhile(kernel, device_kind, shape, table) if found is None else found >= MARGIN


def speedup(
    kernel: str, device_kind: str, shape: Sequence[int], table: Mapping[str, Any] | None = None
) -> float | None:
    """How many times as fast as XLA a kernel measured on a device at a shape; ``None`` if it never was.

    Args:
      kernel: its name, such as ``"add_rms_norm"``.
      device_kind: as ``jax.Device.device_kind`` says it.
      shape: the ``key`` of the kernel's module, rows first. Only rows are interpolated: between two measured numbers of
        rows, the slower one counts; beyond the ends the nearest does, up to twice as many or half as few.
      table: of measurements; the shipped one if left out.
    """
    measured = (_shipped() if table is None else table).get(kernel, {}).get(device_kind, {})
    rows, *rest = shape
    speedups = {}
    for key, found in measured.items():
        first, *others = map(int, key.split("x"))
        if others == list(rest):
            speedups[first] = found
    below = max((n for n in speedups if n <= rows), default=None)
    above = min((n for n in speedups if n >= rows), default=None)
    if below is None and (above is None or above > 2 * rows):
        return None
    if above is None and (below is None or rows > 2 * below):
        return None
    return min(speedups[n] for n in (below, above) if n is not None)


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
