"""Where events of one stream go that overlap: each into the first row in which there is room."""

from __future__ import annotations

import math

from dynaflow_jax.timeline import Event, Timeline
from dynaflow_jax.visualize.palette import BOUNDS


def nanoseconds(us: float) -> int:
    """A time at the resolution of pictures and traces; events that overlap by less do not count as overlapping."""
    return round(us * 1000)


def place(timeline: Timeline) -> tuple[list[str], list[tuple[Event, int]]]:
    """The streams of a timeline, and its events by start, each with its row among those of its stream.

    Streams that only events name come last.

    Raises:
      ValueError: if an event ends before it starts, at no finite time, or has an unknown bound.
    """
    ends: dict[str, list[int]] = {stream: [] for stream in timeline.streams}
    found = []
    for event in sorted(timeline.events, key=lambda event: (event.start_us, event.end_us)):
        _check(event)
        rows = ends.setdefault(event.stream, [])
        start, end = nanoseconds(event.start_us), nanoseconds(event.end_us)
        row = next((i for i, busy_until in enumerate(rows) if busy_until <= start), len(rows))
        rows[row : row + 1] = [end]
        found.append((event, row))
    return list(ends), found


def _check(event: Event) -> None:
    numbers = (event.start_us, event.end_us, event.flops, event.bytes)
    if not all(map(math.isfinite, numbers)) or event.end_us < event.start_us:
        raise ValueError(
            f"The event {event.name!r} cannot be drawn: it runs from {event.start_us} to {event.end_us} µs, with "
            f"{event.flops} FLOP and {event.bytes} bytes."
        )
    if event.bound not in BOUNDS:
        raise ValueError(f"The event {event.name!r} has the bound {event.bound!r}; there are {', '.join(BOUNDS)}.")
