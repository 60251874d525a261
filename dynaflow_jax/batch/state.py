"""What is known of a value once its batch is split: the states that the proof computes with.

Write ``F`` for a value in the run over the full batch and ``P`` for the same value in a run over one micro-batch.

==================  =================================================================================================
``Invariant(s)``    ``P`` equals ``F``
``Rows(axis, s)``   ``P`` holds the micro-batch's own rows of ``F``, along ``axis``
``Total(s)``        the sum of all ``P`` is ``F``
``RowIndex(axis)``  ``P`` counts the rows of the micro-batch from zero, ``F`` those of the batch
``Varies()``        nothing is known: ``P`` came out of an operation that mixes rows
==================  =================================================================================================

The first three hold once ``F`` and ``P`` are divided by a *scale*: a product of powers of the number of rows (``n``)
and of sums over the batch. The mean over the batch is ``Total(1/n)``: a sum, once both sides are multiplied by their
number of rows. A masked mean is ``Total(1/t)`` with ``t`` the sum of the mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Symbol:
    """A sum over the batch, as a factor of other values. Two symbols are never equal, whatever they sum.

    Attributes:
      var: the variable of the micro-batch's program that held the sum first.
      region: the loop body, branch or ``shard_map`` body inside which the sum has one value; None for the program.
    """

    var: Any
    region: Any = None

    def __str__(self) -> str:
        return "t"


Scale: TypeAlias = frozenset[tuple[Any, int]]
"""Symbols and their exponents; the number of rows is the symbol ``"n"``."""

ONE: Scale = frozenset()
N = "n"


def scale(symbol: Any, exponent: int = 1) -> Scale:
    """One symbol to a power."""
    return frozenset([(symbol, exponent)]) if exponent else ONE


def times(a: Scale, b: Scale) -> Scale:
    """The product of two scales."""
    if not b:
        return a
    if not a:
        return b
    product = dict(a)
    for symbol, exponent in b:
        product[symbol] = product.get(symbol, 0) + exponent
    return frozenset((symbol, exponent) for symbol, exponent in product.items() if exponent)


def power(a: Scale, exponent: int) -> Scale:
    """A scale to an integer power."""
    return frozenset((symbol, e * exponent) for symbol, e in a) if exponent else ONE


def is_positive(a: Scale) -> bool:
    """Whether a scale is positive for certain: the number of rows is, the sign of a sum is not known."""
    return all(symbol == N for symbol, _ in a)


def is_real(a: Scale) -> bool:
    """Whether a scale is a real number for certain."""
    return not any(jnp.issubdtype(symbol.var.aval.dtype, jnp.complexfloating) for symbol in symbols(a))


def symbols(a: Scale) -> Iterable[Symbol]:
    """The sums over the batch among a scale's symbols."""
    return (symbol for symbol, _ in a if symbol != N)


def describe(a: Scale) -> str:
    """A scale as text: ``n``, ``1/n``, ``1/t``, ``n^2/t``."""
    parts = sorted((str(symbol), exponent) for symbol, exponent in a)
    above, below = (
        "".join(name if abs(e) == 1 else f"{name}^{abs(e)}" for name, e in parts if (e > 0) is wanted)
        for wanted in (True, False)
    )
    return f"{above or '1'}/{below}" if below else above or "1"


def _scaled(text: str, a: Scale) -> str:
    return f"{text}, scaled by {describe(a)}" if a else text


@dataclasses.dataclass(frozen=True)
class State:
    """What is known of a value when its batch is split."""


@dataclasses.dataclass(frozen=True)
class Invariant(State):
    """The same for every micro-batch as for the full batch.

    Attributes:
      scale: what both are to be divided by first.
      zero: whether the value is known to be zero everywhere, and so agrees with anything.
    """

    scale: Scale = ONE
    zero: bool = False

    def __str__(self) -> str:
        return "zero" if self.zero else _scaled("independent of the batch", self.scale)


@dataclasses.dataclass(frozen=True)
class Rows(State):
    """Rows of the batch along an axis, each a function of the same row of the batched inputs.

    The axis holds ``outer * rows * inner`` elements in this order: ``(B, S, D)`` reshaped to ``(B * S, D)`` has rows
    that are blocks of ``inner = S``; joining two batches end to end gives ``outer = 2``.

    Attributes:
      axis: the axis of the rows.
      scale: what each row is to be divided by first.
      outer: how many times the axis runs through all rows.
      inner: how many neighbours along the axis belong to one row.
      uniform: whether all elements along the axis are equal; ``outer`` and ``inner`` then mean nothing.
      zero: whether the value is known to be zero everywhere.
      pieces: if a ``shard_map`` returned the rows that each device holds as pieces of another kind of array (as the
        residuals of its derivative are), the mesh axes along the axis, and those over which the batch is sharded.
    """

    axis: int
    scale: Scale = ONE
    outer: int = 1
    inner: int = 1
    pieces: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None
    uniform: bool = False
    zero: bool = False

    def __str__(self) -> str:
        text = f"rows on axis {self.axis}"
        if self.inner != 1:
            text += f" in blocks of {self.inner}"
        if self.outer != 1:
            text += f", {self.outer} times over"
        if self.pieces is not None:
            text += ", in pieces by device"
        return _scaled(text, self.scale)


@dataclasses.dataclass(frozen=True)
class Total(State):
    """A sum over the rows of the batch: the micro-batches hold the parts of it.

    Attributes:
      scale: what the whole and each part are to be divided by first.
      factor: the same value seen as a factor, if it is a single number or copies of one: what the value is to be
        divided by to be independent of the batch. Plays no role in comparisons.
    """

    scale: Scale = ONE
    factor: Scale | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return _scaled("a sum over the batch", self.scale)


@dataclasses.dataclass(frozen=True)
class RowIndex(State):
    """The position of each row, counted inside the micro-batch: good for nothing but picking that very row.

    Attributes:
      axis: the axis of the rows.
      columns: if the value is a table of index vectors, which entries along its last axis are positions.
      data: in such a table, how the rows of the other entries lie.
      shifted: whether the number of rows has been added, as the wrap-around of negative indices does.
    """

    axis: int
    columns: tuple[bool, ...] | None = None
    data: Rows | None = None
    shifted: bool = False

    def __str__(self) -> str:
        return f"positions of rows on axis {self.axis}"


@dataclasses.dataclass(frozen=True)
class Varies(State):
    """Different in every micro-batch, with no proven relation to the full batch."""

    def __str__(self) -> str:
        return "different in every micro-batch"


INVARIANT = Invariant()
ZERO = Invariant(zero=True)
VARIES = Varies()


def is_zero(state: State) -> bool:
    """Whether a value is known to be zero everywhere."""
    return getattr(state, "zero", False)


def is_one_scale(state: State) -> bool:
    """Whether a state holds as it stands, without a scale."""
    return is_zero(state) or getattr(state, "scale", ONE) == ONE
