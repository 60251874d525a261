"""Layered drawing of directed acyclic graphs, after Sugiyama, Tagawa and Toda (1981).

Layers by longest path; edges over several layers are routed through points on the layers between; order in layers by
barycentres; positions by least squares, with the order kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

_SWEEPS = 6
_STIFF = 1000.0  # how much more a node keeps its place than an edge that passes beside it
_BEND = 10.0  # the width that an edge takes where it passes a layer


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where things are; x to the right, y downwards, from 0.

    Attributes:
      corners: the left top corner of each node.
      edges: for each edge, its end nodes and the points that it passes, from the bottom of the one to the top of the
        other. An edge is vertical from the first of each pair of points to the second, which is as far as its layer
        reaches; the last point stands alone.
      width: of everything.
      height: of everything.
    """

    corners: tuple[tuple[float, float], ...]
    edges: tuple[tuple[int, int, tuple[tuple[float, float], ...]], ...]
    width: float
    height: float


def arrange(
    sizes: Sequence[tuple[float, float]], reads: Sequence[Sequence[int]], gap: float = 24.0, level: float = 34.0
) -> Layout:
    """Positions for nodes and edges.

    Args:
      sizes: width and height of each node.
      reads: for each node, the nodes before it that it reads.
      gap: between neighbours in a layer.
      level: between layers.
    """
    graph = _Layered(sizes, reads)
    graph.order()
    centres = graph.centres(gap)
    tops, heights, y = [], [], 0.0
    for layer in graph.layers:
        heights.append(max(graph.heights[v] for v in layer))
        tops.append(y)
        y += heights[-1] + level
    left = min((c - graph.widths[v] / 2 for v, c in enumerate(centres)), default=0.0)
    right = max((c + graph.widths[v] / 2 for v, c in enumerate(centres)), default=0.0)
    corners = tuple((centres[v] - width / 2 - left, tops[graph.layer[v]]) for v, (width, _) in enumerate(sizes))
    edges = []
    for chain in graph.chains:
        source, target = chain[0], chain[-1]
        points = []
        for v in chain[:-1]:
            x, top = centres[v] - left, tops[graph.layer[v]]
            start = top + graph.heights[v] if v == source else top
            points += [(x, start), (x, top + heights[graph.layer[v]])]
        edges.append((source, target, (*points, (centres[target] - left, tops[graph.layer[target]]))))
    return Layout(corners, tuple(edges), right - left, max(y - level, 0.0))


class _Layered:
    """A graph in layers, with edges cut into pieces of one layer each.

    Attributes:
      nodes: how many nodes there are; what has a higher number is a point that an edge passes.
      widths: of nodes, then of the points that edges pass.
      heights: likewise.
      layer: the layer of each.
      layers: what is in each layer, in order.
      chains: each edge as what it passes, with its two ends.
    """

    def __init__(self, sizes: Sequence[tuple[float, float]], reads: Sequence[Sequence[int]]):
        self.nodes = len(sizes)
        self.widths = [width for width, _ in sizes]
        self.heights = [height for _, height in sizes]
        self.layer = _layers(reads)
        self.chains: list[list[int]] = []
        above: list[list[int]] = [[] for _ in sizes]
        for target, sources in enumerate(reads):
            for source in dict.fromkeys(sources):
                chain = [source]
                for layer in range(self.layer[source] + 1, self.layer[target]):
                    above.append([chain[-1]])
                    chain.append(len(self.layer))
                    self.layer.append(layer)
                    self.widths.append(_BEND)
                    self.heights.append(0.0)
                above[target].append(chain[-1])
                self.chains.append([*chain, target])
        self.above = above
        self.below: list[list[int]] = [[] for _ in above]
        for v, sources in enumerate(above):
            for source in sources:
                self.below[source].append(v)
        self.layers: list[list[int]] = [[] for _ in range(max(self.layer, default=-1) + 1)]
        for v, layer in enumerate(self.layer):
            self.layers[layer].append(v)

    def order(self) -> None:
        """Sorts each layer by the mean position of its neighbours in the one before, downwards and upwards."""
        rank = [0.0] * len(self.layer)
        for sweep in range(_SWEEPS):
            near, layers = (self.above, self.layers) if sweep % 2 == 0 else (self.below, self.layers[::-1])
            for layer in layers:
                mean = {v: _mean([rank[u] for u in near[v]], rank[v]) for v in layer}
                layer.sort(key=mean.__getitem__)
                for i, v in enumerate(layer):
                    rank[v] = (i + 0.5) / len(layer)

    def centres(self, gap: float) -> list[float]:
        """The middle of everything: as near as possible to its neighbours, without changing the order."""
        centre = [0.0] * len(self.layer)
        weight = [_STIFF if v < self.nodes else 1.0 for v in range(len(self.layer))]
        above, below = self._in_line()
        apart = [self._apart(layer, gap) for layer in self.layers]
        down = list(zip(self.layers, apart, strict=True))
        for sweep in range(_SWEEPS):
            near, order = (above, down) if sweep % 2 == 0 else (below, down[::-1])
            if sweep == 0:  # an edge starts below its node
                near = self.above
            for layer, offsets in order:
                wishes = [_mean([centre[u] for u in near[v]], centre[v]) for v in layer]
                shifts = [wish - offset for wish, offset in zip(wishes, offsets, strict=True)]
                shifts = _increasing(shifts, [weight[v] for v in layer])
                for v, shift, offset in zip(layer, shifts, offsets, strict=True):
                    centre[v] = shift + offset
        return centre

    def _apart(self, layer: Sequence[int], gap: float) -> list[float]:
        """How far the members of a layer are from its first at the least."""
        found = [0.0]
        for left, right in itertools.pairwise(layer):
            space = gap if left < self.nodes or right < self.nodes else gap / 6
            found.append(found[-1] + (self.widths[left] + self.widths[right]) / 2 + space)
        return found

    def _in_line(self) -> tuple[list[list[int]], list[list[int]]]:
        """What everything should be in line with, above and below: nodes with nodes, and the points of an edge."""
        above: list[list[int]] = [[] for _ in self.above]
        below: list[list[int]] = [[] for _ in self.above]
        for chain in self.chains:
            for upper, lower in [(chain[0], chain[-1]), *itertools.pairwise(chain[1:-1])]:
                above[lower].append(upper)
                below[upper].append(lower)
        return above, below


def _layers(reads: Sequence[Sequence[int]]) -> list[int]:
    """Longest paths; what reads nothing is moved down to what reads it first, where short edges are easy to follow."""
    layer: list[int] = []
    for sources in reads:
        layer.append(max((layer[s] for s in sources), default=-1) + 1)
    first: dict[int, int] = {}
    for target, sources in enumerate(reads):
        for source in sources:
            first[source] = min(first.get(source, layer[target]), layer[target])
    return [first[v] - 1 if not sources and v in first else layer[v] for v, sources in enumerate(reads)]


def _mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def _increasing(wishes: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The numbers that never decrease and are nearest to the wishes, by weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for wish, weight in zip(wishes, weights, strict=True):
        mean, count = wish, 1
        while pools and pools[-1][0] > mean:
            other, heavy, many = pools.pop()
            mean = (other * heavy + mean * weight) / (heavy + weight)
            weight, count = heavy + weight, many + count
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]
