"""A region: one level of program that is scheduled as a whole, for all micro-batches together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from dynaflow_jax.batch.state import ONE, State, Symbol, Total, symbols
from dynaflow_jax.errors import SplitError
from dynaflow_jax.graph import Operator, OpGraph


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A function's operators at one batch size.

    Attributes:
      graph: the operators.
      states: what is known of every variable when the batch is split; empty for the whole batch.
      index: the variable that takes the micro-batch's index, if random draws fold it in.
    """

    graph: OpGraph
    states: Mapping[Any, State]
    index: Any = None

    @functools.cached_property
    def factors(self) -> frozenset[Symbol]:
        """The sums over the micro-batch that other values were multiplied with or divided by."""
        scales = {getattr(state, "scale", ONE) for state in self.states.values()}
        return frozenset(symbol for scale in scales for symbol in symbols(scale))

    def is_factor(self, state: State) -> bool:
        """Whether a value may be one of ``factors``, under whatever name it has inside a loop or outside."""
        own = set(symbols(state.factor or ONE)) if isinstance(state, Total) else ()
        return any(used is symbol or used.region is not symbol.region for symbol in own for used in self.factors)


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """The top level of a function, or the body of a loop or ``shard_map`` in it.

    Attributes:
      sizes: rows of each micro-batch.
      variants: each micro-batch's operators; the same object for equal sizes.
      variant_of: the operators at another size, for those that run on several micro-batches at once.
      path: keys of the operators around it, outermost first.
      axes: sizes of the mesh axes of the ``shard_map``s among those.
    """

    sizes: tuple[int, ...]
    variants: tuple[Variant, ...]
    variant_of: Callable[[int], Variant]
    path: tuple[str, ...] = ()
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        first = [op.key for op in self.graph]
        for size, variant in zip(self.sizes, self.variants, strict=True):
            keys = [op.key for op in variant.graph]
            if keys != first:
                odd = next((a or b for a, b in zip(keys, first, strict=False) if a != b), None)
                odd = odd or (keys + first)[min(len(keys), len(first))]
                raise SplitError(
                    f"At {size} rows the function has other operators than at {self.sizes[0]}, from {odd!r} on: its "
                    "program depends on the batch size, so micro-batches of different sizes cannot be scheduled."
                )

    @property
    def graph(self) -> OpGraph:
        """The operators, as the first micro-batch has them."""
        return self.variants[0].graph

    def operator(self, index: int, micro_batch: int | None) -> Operator:
        """A micro-batch's own operator."""
        return self.variants[micro_batch or 0].graph.operators[index]

    def body(self, index: int) -> Region:
        """The region inside a loop or ``shard_map``."""

        def inner(variant: Variant) -> Variant:
            graph = variant.graph.operators[index].body
            assert graph is not None
            return Variant(graph, variant.states, None)

        bodies: dict[int, Variant] = {}
        variants = tuple(bodies.setdefault(id(variant), inner(variant)) for variant in self.variants)
        op = self.graph.operators[index]
        mesh = op.program.eqns[-1].params.get("mesh")
        axes = {**self.axes, **({} if mesh is None else mesh.shape)}
        return Region(self.sizes, variants, lambda size: inner(self.variant_of(size)), (*self.path, op.key), axes)
