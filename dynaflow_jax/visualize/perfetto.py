"""Timelines as trace events, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show.

The format is Google's "Trace Event Format": complete events (``X``) with times in microseconds, metadata (``M``) that
names processes and threads, and counters (``C``).
"""

from __future__ import annotations

import json
from typing import Any

from dynaflow_jax.timeline import Event, Timeline, require_timelines, union
from dynaflow_jax.visualize.rows import nanoseconds, place
from dynaflow_jax.visualize.text import plain


def to_perfetto(*timelines: Timeline) -> str:
    """Timelines as the JSON text of a trace.

    Each timeline is a process named by its device; each stream is a thread of it. Events of one stream that overlap
    lie on threads of their own, since a thread can only nest them. A counter says how many streams are busy.

    Args:
      *timelines: what to show, such as a predicted and a measured timeline of the same plan.

    Raises:
      DynaFlowError: if one is no timeline.
      ValueError: if an event ends before it starts, at no finite time, or has an unknown bound.
    """
    require_timelines("to_perfetto", *timelines)
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines, 1):
        events += _process(pid, timeline)
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, allow_nan=False)


def _process(pid: int, timeline: Timeline) -> list[dict[str, Any]]:
    streams, placed = place(timeline)
    kind = "measured" if timeline.measured else "predicted"
    rows = dict.fromkeys((stream, 0) for stream in streams) | dict.fromkeys((e.stream, row) for e, row in placed)
    order = {stream: i for i, stream in enumerate(streams)}
    tids = {key: tid for tid, key in enumerate(sorted(rows, key=lambda key: (order[key[0]], key[1])), 1)}

    def describe(what: str, tid: int, name: str, index: int) -> None:
        for key, value in {"name": plain(name), "sort_index": index}.items():
            found.append({"ph": "M", "name": f"{what}_{key}", "pid": pid, "tid": tid, "args": {key: value}})

    found: list[dict[str, Any]] = []
    describe("process", 0, f"{timeline.device}, {kind}: {timeline.title}", pid)
    for (stream, row), tid in tids.items():
        describe("thread", tid, stream if row == 0 else f"{stream} ({row + 1})", tid)
    for event, row in placed:
        start, end = nanoseconds(event.start_us), nanoseconds(event.end_us)
        found.append(
            {
                "ph": "X",
                "name": plain(event.name),
                "cat": event.bound,
                "pid": pid,
                "tid": tids[event.stream, row],
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "args": _args(event),
            }
        )
    for time, busy in _busy(timeline, streams):
        found.append(
            {"ph": "C", "name": "busy streams", "pid": pid, "tid": 0, "ts": time / 1000, "args": {"streams": busy}}
        )
    return found


def _args(event: Event) -> dict[str, Any]:
    args: dict[str, Any] = {"bound": event.bound, "flops": event.flops, "bytes": event.bytes}
    if event.micro_batch is not None:
        args["micro_batch"] = event.micro_batch
    if event.outputs:
        args["outputs"] = plain(", ".join(event.outputs))
    if event.duration_us > 0:
        args["GFLOP/s"] = event.flops / event.duration_us / 1e3
        args["GB/s"] = event.bytes / event.duration_us / 1e3
    return args


def _busy(timeline: Timeline, streams: list[str]) -> list[tuple[int, int]]:
    """How many streams are busy from which nanosecond on."""
    changes: dict[int, int] = {}
    for stream in streams:
        for start, end in union(timeline.spans(stream)):
            for time, change in ((nanoseconds(start), 1), (nanoseconds(end), -1)):
                changes[time] = changes.get(time, 0) + change
    found, busy = [], 0
    for time in sorted(changes):
        busy += changes[time]
        found.append((time, busy))
    return found
