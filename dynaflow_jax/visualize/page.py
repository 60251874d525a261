"""Timelines as one HTML page that needs nothing else: no network, no server, no library."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from dynaflow_jax.timeline import Timeline
from dynaflow_jax.visualize import palette
from dynaflow_jax.visualize.rows import place
from dynaflow_jax.visualize.text import duration, escape, plain, share


def to_html(*timelines: Timeline) -> str:
    """Timelines as a page of HTML.

    A lane for each stream, a box for each step, coloured by what bounds it; hovering, tapping or the arrow keys show
    a step's shapes, operations, bytes and rates; it can be zoomed, searched, printed, and read as a table.
    Several timelines, such as a predicted and a measured one, stand one above the other on the same axis.

    Args:
      *timelines: what to draw.

    Raises:
      ValueError: if an event ends before it starts, at no finite time, or has an unknown bound.
    """
    labels = [_label(timeline, timelines) for timeline in timelines]
    data = [_columns(*pair) for pair in zip(timelines, labels, strict=True)]
    # In ASCII, and without what could end the element or start a comment in it.
    shared = {"bounds": palette.BOUNDS, "tones": _tones(timelines)}
    text = json.dumps({**shared, "timelines": data}, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
    title = ", ".join(dict.fromkeys(timeline.title for timeline in timelines)) or "No timeline"
    devices = ", ".join(dict.fromkeys(timeline.device for timeline in timelines))
    style, script = palette.css(":root") + _asset("page.css"), _asset("page.js")
    # Only what is in this page may run or be loaded, whatever a name may hold.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    sections = "".join(
        _section(k, timeline, label, _against(timeline, timelines))
        for k, (timeline, label) in enumerate(zip(timelines, labels, strict=True))
    )
    tables = '<div class="scroll" tabindex="0" role="region" aria-label="Steps"></div>' * len(timelines)
    count = sum(len(timeline.events) for timeline in timelines)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="soft">{escape(devices)}</p>
</header>
<nav aria-label="View">
<div class="group control">
<button type="button" id="out" aria-label="Zoom out" title="Zoom out (-)">−</button>
<button type="button" id="in" aria-label="Zoom in" title="Zoom in (+)">+</button>
<button type="button" id="fit" title="Show everything (0)">Fit</button>
</div>
{_switches(timelines, labels)}<input class="control find" id="find" type="search" placeholder="Find steps" \
aria-label="Find steps by name">
{_legend(timelines)}</nav>
<main>
{sections}</main>
<p class="soft control" id="how">Drag to pan; pinch<span class="keys"> or Ctrl + wheel</span> to zoom. \
<span class="keys">Keys: ← → ↑ ↓ choose a step, Enter zooms to it, + − 0 zoom, Shift + ← → pan.</span></p>
<details><summary>Table of steps ({count})</summary>{tables}</details>
<noscript><p>The picture and the table need JavaScript.</p></noscript>
<div id="tip" role="tooltip" hidden></div>
<div id="said" class="sr" aria-live="polite"></div>
<script type="application/json" id="data">{text}</script>
<script>{script}</script>
</body>
</html>
"""


def inline(page: str, title: str, height: int) -> str:
    """A page or picture as a fragment for notebooks, in a frame of its own, so that several do not clash.

    Args:
      page: HTML or SVG.
      title: what a screen reader says of the frame.
      height: of the frame, in pixels.
    """
    return (
        f'<iframe srcdoc="{escape(page)}" title="{escape(title)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )


def height(*timelines: Timeline) -> int:
    """The height in pixels that the page of timelines takes on a desktop, up to where it is better scrolled."""
    lanes = sum(62 * len(timeline.streams) for timeline in timelines)
    return min(260 + 130 * len(timelines) + lanes, 640)


def _label(timeline: Timeline, among: tuple[Timeline, ...]) -> str:
    """What tells a timeline from the others."""
    kind = "Measured" if timeline.measured else "Predicted"
    same = [other for other in among if other.measured == timeline.measured]
    return kind if len(same) == 1 else f"{kind}: {plain(timeline.title)}"


def _against(timeline: Timeline, among: tuple[Timeline, ...]) -> Timeline | None:
    """The prediction that a measured timeline is compared with."""
    predicted = [other for other in among if not other.measured and other.total_us]
    return predicted[0] if timeline.measured and len(predicted) == 1 else None


def _section(index: int, timeline: Timeline, label: str, predicted: Timeline | None) -> str:
    streams, _ = place(timeline)
    total = timeline.total_us
    idle, overlap = total - timeline.busy_us(), timeline.overlap_us
    compared = f" ({total / predicted.total_us:.2f} × predicted)" if predicted else ""
    totals = {
        "Step time": duration(total) + compared,
        "Overlap": f"{duration(overlap)} ({share(overlap, total)})",
        "Idle": f"{duration(idle)} ({share(idle, total)})",
        "Steps": str(len(timeline.events)),
    }
    items = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in totals.items())
    # The picture says this too, at each lane.
    items += "".join(
        f'<div class="sr"><dt>{escape(stream)}</dt><dd>{share(timeline.busy_us(stream), total)} busy</dd></div>'
        for stream in streams
    )
    chart = (
        f'<div class="chart" tabindex="0" role="application" aria-roledescription="timeline" '
        f'aria-label="{escape(label)} timeline" aria-describedby="how"><canvas></canvas></div>'
        if timeline.events
        else '<p class="empty">Nothing runs.</p>'
    )
    head = f'<h2>{escape(label)}</h2>\n<dl class="totals">{items}</dl>'
    return f'<section id="timeline-{index}">\n{head}\n{chart}\n</section>\n'


def _switches(timelines: tuple[Timeline, ...], labels: list[str]) -> str:
    if len(timelines) < 2:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" data-shows="timeline-{k}" checked> {escape(label)}</label>'
        for k, label in enumerate(labels)
    )
    return f'<div class="group control">{boxes}</div>\n'


def _legend(timelines: tuple[Timeline, ...]) -> str:
    batches = {event.micro_batch for timeline in timelines for event in timeline.events} - {None}
    items = [f'<li><canvas data-bound="{bound}" aria-hidden="true"></canvas>{bound}</li>' for bound in palette.BOUNDS]
    tones = _tones(timelines)
    for tone in range(tones):
        numbers = sorted(batch for batch in batches if batch is not None and batch % tones == tone)
        text = ", ".join(map(str, numbers[:4])) + " …" * (len(numbers) > 4)
        items.append(f'<li><canvas data-tone="{tone}" aria-hidden="true"></canvas>micro-batch {text}</li>')
    return f'<ul class="legend" aria-label="Legend">{"".join(items)}</ul>\n'


def _tones(timelines: tuple[Timeline, ...]) -> int:
    """How many tones tell micro-batches apart; beyond four they repeat, and one batch alone needs none."""
    batches = {event.micro_batch for timeline in timelines for event in timeline.events} - {None}
    return min(max(len(batches), 2), 4) if len(batches) > 1 else 0


def _columns(timeline: Timeline, label: str) -> dict[str, Any]:
    """The events column by column, every text once."""
    streams, placed = place(timeline)
    events = [event for event, _ in placed]
    names, shapes = _Table(), _Table()
    number = {stream: i for i, stream in enumerate(streams)}
    return {
        "label": label,
        "total": _number(timeline.total_us),
        "streams": list(map(plain, streams)),
        "busy": [share(timeline.busy_us(stream), timeline.total_us) for stream in streams],
        "name": [names.index(plain(event.name)) for event in events],
        "names": names.values,
        "shape": [shapes.index(plain(", ".join(event.outputs))) for event in events],
        "shapes": shapes.values,
        "stream": [number[event.stream] for event in events],
        "row": [row for _, row in placed],
        "start": [_number(event.start_us) for event in events],
        "end": [_number(event.end_us) for event in events],
        "bound": [palette.BOUNDS.index(event.bound) for event in events],
        "flops": [_number(event.flops) for event in events],
        "bytes": [_number(event.bytes) for event in events],
        "batch": [event.micro_batch for event in events],
    }


class _Table:
    """Values by index, each once."""

    def __init__(self):
        self._indices: dict[Hashable, int] = {}

    @property
    def values(self) -> list[Any]:
        return list(self._indices)

    def index(self, value: Hashable) -> int:
        return self._indices.setdefault(value, len(self._indices))


def _number(value: float) -> float:
    """To the nanosecond, or the thousandth, in as few characters as possible."""
    value = round(float(value), 3)
    return int(value) if value.is_integer() else value


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
