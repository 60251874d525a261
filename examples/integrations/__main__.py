"""Compare every system that is installed with its schedule, in one table; given a name, explain that system's plan."""

import sys
import time
import warnings
from collections.abc import Sequence

from absl import app, logging

from examples.integrations import check

HEADER = ("system", "version", "lines added", "operators", "forward", "step", "bound", "seconds", "")


def main(argv: Sequence[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # JAX tells of every platform that it looks for
    warnings.simplefilter("ignore", DeprecationWarning)  # the systems' own
    if unknown := [name for name in argv[1:] if name not in check.SYSTEMS]:
        sys.exit(f"There is no system {unknown[0]!r}; there are {', '.join(check.SYSTEMS)}.")
    for name in argv[1:]:
        try:
            system = check.load(name)
        except ImportError as error:
            sys.exit(
                f"{name} cannot be imported: {error}. `make test-integrations SYSTEMS={name}` makes its environment."
            )
        for flow in (system.forward, system.step):
            print(flow.explain(*system.arguments), end="\n\n")
    print(table([HEADER, *map(row, argv[1:] or check.SYSTEMS)]))


def row(name: str) -> tuple[str, ...]:
    """What the table says of a system; differences are relative to the largest entry."""
    start = time.perf_counter()
    try:
        system = check.load(name)
    except ImportError as error:
        return (name, *[""] * (len(HEADER) - 2), f"cannot be imported: {error}")
    graph = system.forward.graph(*system.arguments)
    numbers = (system.forward_difference(), system.step_difference(), system.bound)
    return (
        name,
        f"{system.package} {system.version}",
        str(check.lines_added(name)),
        str(len(check.operators(graph))),
        *(f"{number:.1e}" for number in numbers),
        f"{time.perf_counter() - start:.0f}",
        "" if max(numbers[:2]) <= system.bound else "DIFFERS",
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


if __name__ == "__main__":
    app.run(main)
