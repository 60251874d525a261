"""Pictures: timelines as pages of HTML and as traces, graphs as SVG.

This package draws plain data: a ``Timeline``, or ``Node``s. ``graph`` and ``plan`` import it to draw what is theirs;
it knows neither.
"""

from dynaflow_jax.visualize.page import height, inline, to_html
from dynaflow_jax.visualize.perfetto import to_perfetto
from dynaflow_jax.visualize.svg import Node, draw_graph

__all__ = ["Node", "draw_graph", "height", "inline", "to_html", "to_perfetto"]
