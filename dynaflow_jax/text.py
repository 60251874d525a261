"""Numbers and tables as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def si(value: float) -> str:
    """A number with three digits and a prefix, for a unit to follow."""
    for factor, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {suffix}"
    return f"{value:.0f} "


def table(rows: Sequence[Sequence[str]], right: Iterable[int] | None = None) -> list[str]:
    """Rows as lines, the first as their head; by default all columns but the first are aligned at the right."""
    columns = max(map(len, rows))
    right = set(range(1, columns) if right is None else right)
    rows = [(*row, *[""] * (columns - len(row))) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(columns)]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def shown(value: Any, most: int = 60) -> str:
    """Any value for an error message, whatever its ``repr`` does."""
    try:
        text = repr(value)
    except Exception:  # too many digits or levels for Python, or the value's own
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= most else text[: most - 1] + "…"
