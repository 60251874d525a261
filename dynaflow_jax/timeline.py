"""A timeline: when each step of a plan ran, or is predicted to run, on which stream.

Simulation and profiling make timelines; pictures, tables and traces are drawn from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from typing import Any

from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.text import si, table


@dataclasses.dataclass(frozen=True)
class Event:
    """One step on its stream.

    Attributes:
      name: the step as text, such as ``"layer_0/mlp[1]"``.
      stream: the stream it runs on.
      start_us: when it starts, in microseconds after the first event of the timeline.
      end_us: when it ends.
      bound: ``"compute"``, ``"memory"`` or ``"network"``.
      flops: floating-point operations, estimated.
      bytes: bytes of device memory read and written, or sent for a collective; estimated.
      outputs: shapes and dtypes of its results, such as ``("bf16[8,128]",)``.
      micro_batch: which micro-batch, or ``None`` for several or for what runs once for all of them.
    """

    name: str
    stream: str
    start_us: float
    end_us: float
    bound: str = "compute"
    flops: float = 0.0
    bytes: float = 0.0
    outputs: tuple[str, ...] = ()
    micro_batch: int | None = None

    @property
    def duration_us(self) -> float:
        """How long it takes."""
        return self.end_us - self.start_us


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What ran when.

    Attributes:
      title: what was run: the strategy, or the function.
      device: the kind of device, such as ``"NVIDIA H200"``.
      measured: whether the times were measured; predicted otherwise.
      events: the steps, by start.
      streams: names of the streams, in order of first use in the plan.
    """

    title: str
    device: str
    measured: bool
    events: tuple[Event, ...] = dataclasses.field(repr=False)  # hundreds of them; str() shows them as a table
    streams: tuple[str, ...]

    @property
    def total_us(self) -> float:
        """From the start of the first event to the end of the last."""
        return max((event.end_us for event in self.events), default=0.0)

    def busy_us(self, stream: str | None = None) -> float:
        """How long a stream is busy; for ``None``, how long at least one of them is."""
        return sum(end - start for start, end in union(self.spans(stream)))

    def spans(self, stream: str | None = None) -> list[tuple[float, float]]:
        """Start and end of the events of a stream, or of all."""
        return [(event.start_us, event.end_us) for event in self.events if stream in (None, event.stream)]

    def gaps(self, stream: str) -> list[tuple[float, float]]:
        """When a stream is idle between the start and the end of the timeline."""
        found, idle_from = [], 0.0
        for start, end in [*union(self.spans(stream)), (self.total_us, self.total_us)]:
            if start > idle_from:
                found.append((idle_from, start))
            idle_from = end
        return found

    @property
    def overlap_us(self) -> float:
        """How long at least two streams are busy at once."""
        edges = sorted(edge for stream in self.streams for span in union(self.spans(stream)) for edge in _edges(span))
        total, running, last = 0.0, 0, 0.0
        for time, change in edges:
            total += (time - last) * (running >= 2)
            running, last = running + change, time
        return total

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from dynaflow_jax import visualize  # which draws timelines, and so imports this module

        return visualize.inline(visualize.to_html(self), self.title, visualize.height(self))

    @property
    def bytes_moved(self) -> tuple[float, float]:
        """Bytes of device memory read and written, and bytes sent to other devices; estimated."""
        sent = sum(event.bytes for event in self.events if event.bound == "network")
        return sum(event.bytes for event in self.events) - sent, sent

    def show(self) -> str:
        """A table of the steps and of the streams."""
        rows: list[tuple[str, ...]] = [("step", "stream", "start µs", "µs", "bound", "FLOP", "bytes", "rate")]
        for event in self.events:
            size = (si(event.flops), si(event.bytes))
            rows.append(
                (event.name, event.stream, *_us(event.start_us, event.duration_us), event.bound, *size, _rate(event))
            )
        moved, sent = self.bytes_moved
        lines = [
            f"{self.title} on {self.device}, {self._kind}: {self.total_us:.1f} µs",
            "",
            *table(rows, right={2, 3, 5, 6, 7}),
            "",
            *table([("stream", "busy µs", "busy", "gaps", "longest µs"), *map(self._stream_row, self.streams)]),
            "",
            f"at least two streams busy for {self.overlap_us:.1f} µs, {_share(self.overlap_us, self.total_us)} of it; "
            f"{si(moved)}B through memory, {si(sent)}B sent",
        ]
        return "\n".join(lines)

    @property
    def _kind(self) -> str:
        return "measured" if self.measured else "predicted"

    def _stream_row(self, stream: str) -> tuple[str, ...]:
        gaps, busy = self.gaps(stream), self.busy_us(stream)
        longest = max((end - start for start, end in gaps), default=0.0)
        return stream, *_us(busy), _share(busy, self.total_us), str(len(gaps)), *_us(longest)

    def __str__(self) -> str:
        return self.show()


def require_timelines(caller: str, *values: Any) -> None:
    """Raises if one of these is no timeline.

    Args:
      caller: the function that takes them, for the message.
      *values: what it was given.
    """
    for value in values:
        if not isinstance(value, Timeline):
            raise DynaFlowError(
                f"{caller} takes timelines, as plan.simulate() and df.profile(...) give them, not {value!r:.60}."
            )


def compare(predicted: Timeline, measured: Timeline) -> str:
    """Two timelines of one plan side by side, as a table: each step, each stream, overlap and bytes.

    Args:
      predicted: what ``Plan.simulate`` gives, or any other timeline to compare with.
      measured: what ``profile`` gives. Steps are matched by name and stream, those of one name by their order. What ran
        as one (``a + b``) stands beside the sum of its steps, and a loop's iterations together beside the loop's.

    Raises:
      DynaFlowError: if one is no timeline.
    """
    require_timelines("compare", predicted, measured)
    titles = (predicted._kind, measured._kind) if predicted.measured != measured.measured else ("first", "second")
    rows: list[tuple[str, ...]] = [
        ("step", "stream", f"{titles[0]} µs", f"{titles[1]} µs", "ratio", "bound", "FLOP", "bytes")
    ]
    for pair in _matched(predicted, measured):
        took = [sum(event.duration_us for event in events) if events else None for events in pair]
        shown = pair[1] or pair[0]
        size = (si(sum(event.flops for event in shown)), si(sum(event.bytes for event in shown)))
        rows.append((shown[0].name, shown[0].stream, *map(_maybe, took), _ratio(*took), shown[0].bound, *size))
    rows.append(
        ("total", "", *_us(predicted.total_us, measured.total_us), _ratio(predicted.total_us, measured.total_us))
    )
    streams: list[tuple[str, ...]] = [
        ("stream", f"{titles[0]} busy", f"{titles[1]} busy", f"{titles[0]} idle µs", f"{titles[1]} idle µs")
    ]
    for stream in dict.fromkeys((*measured.streams, *predicted.streams)):
        busy = [timeline.busy_us(stream) for timeline in (predicted, measured)]
        totals = predicted.total_us, measured.total_us
        shares = [_share(part, whole) for part, whole in zip(busy, totals, strict=True)]
        idle = [whole - part for part, whole in zip(busy, totals, strict=True)]
        streams.append((stream, *shares, *_us(*idle)))
    overlaps = [
        f"{_share(t.overlap_us, t.total_us)} {title}" for t, title in zip((predicted, measured), titles, strict=True)
    ]
    moved, sent = measured.bytes_moved
    return "\n".join(
        [
            f"{measured.title}: {predicted._kind} on {predicted.device}, {measured._kind} on {measured.device}",
            "",
            *table(rows, right={2, 3, 4, 6, 7}),
            "",
            *table(streams),
            "",
            f"at least two streams busy: {', '.join(overlaps)}; {si(moved)}B through memory, {si(sent)}B sent",
        ]
    )


def _matched(first: Timeline, second: Timeline) -> list[tuple[list[Event], list[Event]]]:
    """Events of two timelines that stand for the same, in the order of the second; either may have none."""
    left, right = _by_name(first), _by_name(second)
    pairs: list[tuple[list[Event], list[Event]]] = []
    for (name, stream), own in right.items():
        keys = [(part, stream) for part in joined_from(name, {n for n, s in left if s == stream})]
        others = [event for key in keys for event in left.pop(key, ())]
        if len(keys) == 1 and len(others) == len(own):
            pairs += [([a], [b]) for a, b in zip(others, own, strict=True)]
        elif others:
            pairs.append((others, own))
        else:
            pairs += [([], [event]) for event in own]
    return [*pairs, *(([event], []) for own in left.values() for event in own)]


def _by_name(timeline: Timeline) -> dict[tuple[str, str], list[Event]]:
    found: dict[tuple[str, str], list[Event]] = {}
    for event in timeline.events:
        found.setdefault((event.name, event.stream), []).append(event)
    return found


def joined_from(name: str, known: Container[str]) -> list[str]:
    """The names out of which a name such as ``a + b`` was put together, as far as they are known."""
    words, found = name.split(" + "), []
    while words:
        count = next((n for n in range(len(words), 0, -1) if " + ".join(words[:n]) in known), 0)
        if count:
            found.append(" + ".join(words[:count]))
        del words[: count or 1]
    return found


def _us(*times: float) -> list[str]:
    return [f"{time:.1f}" for time in times]


def _maybe(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _ratio(first: float | None, second: float | None) -> str:
    return f"{first / second:.2f}" if first and second else ""


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _rate(event: Event) -> str:
    """What a step reaches of what bounds it."""
    if event.duration_us <= 0:
        return ""
    amount, unit = (event.flops, "FLOP/s") if event.bound == "compute" else (event.bytes, "B/s")
    return f"{si(amount / event.duration_us * 1e6)}{unit}"


def union(spans: Iterable[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Spans that cover the same time without touching each other, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _edges(span: tuple[float, float]) -> tuple[tuple[float, int], tuple[float, int]]:
    return (span[0], 1), (span[1], -1)
