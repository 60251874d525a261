"""Graphs of operators as SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dynaflow_jax.visualize import palette
from dynaflow_jax.visualize.layout import Layout, arrange
from dynaflow_jax.visualize.text import escape, shorten

_PAD = 14.0  # around a picture, and inside a group
_LINE = 17.0  # between lines of text
_CHARACTER = 7.3  # of the fixed-width font, at 12 px; its widest common face
_LONGEST = 40  # characters of a line
_STRAIGHT = 0.5  # pixels by which a line may lean and count as vertical

_STYLE = """
.df{background:var(--paper);font:12px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace}
.df text{fill:var(--ink);white-space:pre}
.df .edge{fill:none;stroke:var(--soft);stroke-width:1.2}
.df .tip{fill:var(--soft)}
.df .group{fill:var(--lane);stroke:var(--soft);stroke-dasharray:5 4}
.df .compute{fill:var(--compute);stroke:var(--compute-edge)}
.df .memory{fill:var(--memory);stroke:var(--memory-edge)}
.df .network{fill:var(--network);stroke:var(--network-edge)}
.df .node:hover>rect{stroke-width:2.5}
"""


@dataclasses.dataclass(frozen=True)
class Node:
    """A box of a graph.

    Attributes:
      name: its first line.
      bound: ``"compute"``, ``"memory"`` or ``"network"``: its colour, and part of its second line.
      detail: the rest of its second line.
      title: what is shown of it under the mouse, and read to those who do not see it.
      reads: indices of the nodes before it that it reads.
      body: the nodes inside it, for a loop.
    """

    name: str
    bound: str
    detail: str = ""
    title: str = ""
    reads: tuple[int, ...] = ()
    body: tuple[Node, ...] | None = None


def draw_graph(nodes: Sequence[Node], title: str) -> str:
    """A graph as SVG, from top to bottom; what is inside a loop is drawn inside its box.

    Args:
      nodes: the nodes, each after those that it reads.
      title: the title of the picture.
    """
    layout, sizes, content = _level(nodes)
    width, height = max(layout.width, 300.0) + 2 * _PAD, layout.height + 3 * _PAD + _LINE
    left = (width - layout.width) / 2
    legend = "".join(
        f'<rect class="{bound}" x="{_PAD + 100 * i + 0.5:g}" y="{_PAD:g}" width="16" height="12" rx="2"/>'
        f'<text x="{_PAD + 100 * i + 22:g}" y="{_PAD + 10:g}">{bound}</text>'
        for i, bound in enumerate(palette.BOUNDS)
    )
    body = _draw(nodes, layout, sizes, content, left, 2 * _PAD + _LINE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="df" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><title>{escape(title)}</title>'
        f"<style>{palette.css('.df')}{_STYLE}</style>{legend}{body}</svg>\n"
    )


_Level = tuple[Layout, list[tuple[float, float]], list["_Level | None"]]


def _level(nodes: Sequence[Node]) -> _Level:
    """The layout of nodes, the sizes of their boxes, and the same of what is inside each."""
    inside = [_level(node.body) if node.body else None for node in nodes]
    sizes = [_size(node, level) for node, level in zip(nodes, inside, strict=True)]
    return arrange(sizes, [node.reads for node in nodes]), sizes, inside


def _size(node: Node, inside: _Level | None) -> tuple[float, float]:
    width = max(len(line) for line in _lines(node)) * _CHARACTER + _PAD
    height = 2 * _LINE + 10
    if inside is not None:
        width = max(width, inside[0].width + 2 * _PAD)
        height += inside[0].height + _PAD
    return width, height


def _lines(node: Node) -> tuple[str, str]:
    detail = f"{node.bound}  {node.detail}" if node.detail else node.bound
    return shorten(node.name, _LONGEST), shorten(detail, _LONGEST)


def _draw(
    nodes: Sequence[Node],
    layout: Layout,
    sizes: Sequence[tuple[float, float]],
    content: Sequence[_Level | None],
    left: float,
    top: float,
) -> str:
    found = []
    for source, target, points in layout.edges:
        path = _path([(x + left, y + top) for x, y in points])
        name = f"{nodes[source].name} → {nodes[target].name}"
        found.append(f"<g><title>{escape(name)}</title>{path}</g>")
    for node, (x, y), (width, height), inside in zip(nodes, layout.corners, sizes, content, strict=True):
        x, y = x + left, y + top
        kind = escape(node.bound) if inside is None else "group"
        lines = "".join(
            f'<text x="{x + _PAD / 2:.1f}" y="{y + 5 + _LINE * (i + 0.75):.1f}">{escape(line)}</text>'
            for i, line in enumerate(_lines(node))
        )
        found.append(
            f'<g class="node"><title>{escape(node.title or node.name)}</title>'
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"/>'
            f"{lines}</g>"
        )
        if inside is not None and node.body is not None:
            inner, inner_sizes, inner_content = inside
            start = x + (width - inner.width) / 2
            found.append(_draw(node.body, inner, inner_sizes, inner_content, start, y + 2 * _LINE + 10))
    return "".join(found)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A line that leaves and enters layers vertically, with an arrow head at its end."""
    (x, y), (end, tip) = points[0], points[-1]
    parts = [f"M{x:.1f} {y:.1f}"]
    for i, (next_x, next_y) in enumerate(points[1:]):
        if abs(next_x - x) < _STRAIGHT:
            straight = points[i + 2 : i + 3]
            if not straight or abs(straight[0][0] - x) >= _STRAIGHT:  # one line as far as it goes
                parts.append(f"L{x:.1f} {next_y:.1f}")
        else:
            middle = (y + next_y) / 2
            parts.append(f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    head = f"M{end - 4:.1f} {tip - 7:.1f}L{end + 4:.1f} {tip - 7:.1f}L{end:.1f} {tip:.1f}Z"
    return f'<path class="edge" d="{"".join(parts)}"/><path class="tip" d="{head}"/>'
