"""Splitting values into micro-batches and joining them again.

A batch that is sharded over ``shards`` devices is split within every shard: each micro-batch takes the same share of
each, so rows never move between devices. Consecutive global rows would put whole micro-batches on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.batch.state import ONE, Invariant, N, Rows, Scale, State, Total, is_zero
from dynaflow_jax.errors import SplitError
from dynaflow_jax.text import shown

Own: TypeAlias = Rows | np.ndarray | jax.Array | None
"""What a micro-batch has of a value: its rows, an array of its own, or all of it."""


def check_sizes(sizes: Any, batch_size: int, shards: int, strategy: str) -> tuple[int, ...]:
    """The sizes of the micro-batches that a strategy asks for, checked."""
    asked = sizes
    try:
        # More than there are rows cannot be right, and might have no end.
        listed = itertools.islice(sizes, batch_size + 1)
        sizes = tuple(int(size) if int(size) == size else None for size in listed)
    except (TypeError, ValueError, OverflowError):
        sizes = (None,)
    if not sizes or any(size is None or size < 1 for size in sizes):
        raise SplitError(
            f"{strategy}.split must return positive sizes of micro-batches, such as [4, 4]; not {shown(asked)}."
        )
    if len(sizes) > batch_size:
        raise SplitError(f"{strategy}.split returned more sizes than the batch has rows, which is {batch_size}.")
    if sum(sizes) != batch_size:
        raise SplitError(
            f"{strategy}.split returned {shown(list(sizes))}, which adds up to {shown(sum(sizes))}; the batch has "
            f"{batch_size} rows."
        )
    if bad := [size for size in sizes if size % shards]:
        raise SplitError(
            f"{strategy}.split returned {list(sizes)}, but the batch is sharded over {shards} devices and is split "
            f"within every shard: each size must be a multiple of {shards}, and {bad[0]} is not."
        )
    return sizes


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Where each micro-batch starts."""
    return tuple(itertools.accumulate(sizes, initial=0))[:-1]


def take(value: Any, rows: Rows, batch_size: int, offset: int, size: int, shards: int = 1) -> Any:
    """The rows ``offset : offset + size`` of a value (of every shard, the corresponding share of them)."""
    axis, outer, inner = rows.axis, *_layout(value, rows, batch_size)
    if rows.uniform and (shards == 1 or inner == 0):  # any will do, of the right number
        return jax.lax.slice_in_dim(value, 0, value.shape[axis] * size // batch_size, axis=axis)
    if (present := value.shape[axis] // (outer * inner)) != batch_size:  # inside shard_map: one shard's rows
        local = batch_size // present
        batch_size, offset, size, shards = present, offset // local, size // local, 1
    if outer == 1 and shards == 1:
        return jax.lax.slice_in_dim(value, offset * inner, (offset + size) * inner, axis=axis)
    shape = value.shape
    blocks = (outer, shards, batch_size // shards, inner)
    blocked = jnp.reshape(value, (*shape[:axis], *blocks, *shape[axis + 1 :]))
    part = jax.lax.slice_in_dim(blocked, offset // shards, (offset + size) // shards, axis=axis + 2)
    # Where sharding is part of the type, merging axes does not say by itself what the result's is.
    sharding = compat.explicit_sharding(value)
    return jnp.reshape(part, (*shape[:axis], outer * size * inner, *shape[axis + 1 :]), out_sharding=sharding)


def _layout(value: Any, rows: Rows, count: int) -> tuple[int, int]:
    """How often the axis runs through ``count`` rows, and in blocks of how many elements; of 0 if that cannot be said.

    Elements that are all alike do not say it themselves, and need not be a multiple of the rows.
    """
    if not rows.uniform:
        return rows.outer, rows.inner
    return 1, 0 if value.shape[rows.axis] % count else value.shape[rows.axis] // count


def own(value: Any, how: Own, batch_size: int, offset: int, size: int, shards: int = 1) -> Any:
    """What the micro-batch of the rows ``offset : offset + size`` has of a value."""
    return (
        take(value, how, batch_size, offset, size, shards) if isinstance(how, Rows) else value if how is None else how
    )


def join(parts: Sequence[Any], rows: Rows, sizes: Sequence[int], shards: int = 1) -> Any:
    """The rows of several micro-batches as one value; the inverse of ``take``."""
    if len(parts) == 1:
        return parts[0]
    axis, outer, inner = rows.axis, *_layout(parts[0], rows, sizes[0])
    if (outer == 1 and shards == 1) or inner == 0:
        return jax.lax.concatenate(parts, axis)
    shape = parts[0].shape
    blocked = [
        jnp.reshape(part, (*shape[:axis], outer, shards, size // shards, inner, *shape[axis + 1 :]))
        for part, size in zip(parts, sizes, strict=True)
    ]
    whole = jax.lax.concatenate(blocked, axis + 2)
    sharding = compat.explicit_sharding(parts[0])
    return jnp.reshape(whole, (*shape[:axis], outer * sum(sizes) * inner, *shape[axis + 1 :]), out_sharding=sharding)


# -- values between operators, when some run on several micro-batches at once --------------------------------------


def merge_problem(state: State, aval: Any) -> str | None:
    """Why a value cannot be joined over micro-batches for a merged operator; ``None`` if it can."""
    if not isinstance(state, (Invariant, Rows, Total)) or getattr(state, "pieces", None):
        return f"is {state}"
    scale = getattr(state, "scale", ONE)
    if not is_zero(state) and any(symbol != N for symbol, _ in scale):
        return f"is {state}, a scale that each micro-batch has its own"
    if scale and not is_zero(state) and not jnp.issubdtype(aval.dtype, jnp.inexact):
        return f"is {state}, of whole numbers"
    return None


def merge(parts: Sequence[Any], state: State, sizes: Sequence[int]) -> Any:
    """What an operator on the joined batch reads, from what each micro-batch has.

    A value that carries a power of the number of rows (the cotangents of a mean, say) is rescaled to the joined
    number; partial sums are added.
    """
    joined = sum(sizes)
    degree = _degree(getattr(state, "scale", ONE))
    scaled = [_scale(part, joined / size, degree) for part, size in zip(parts, sizes, strict=True)]
    if isinstance(state, Rows):
        return join(scaled, state, sizes)
    if isinstance(state, Total):
        total = scaled[0]
        for part in scaled[1:]:
            total = total + part
        return total
    return scaled[0]


def unmerge(value: Any, state: State, sizes: Sequence[int]) -> list[Any]:
    """What each micro-batch goes on with, from the result of an operator on the joined batch."""
    joined = sum(sizes)
    degree = _degree(getattr(state, "scale", ONE))
    parts = []
    for offset, size in zip(offsets(sizes), sizes, strict=True):
        part = take(value, state, joined, offset, size) if isinstance(state, Rows) else value
        if not isinstance(state, Total):
            part = _scale(part, size / joined, degree)
        elif degree:  # each gets its share by rows, which makes the mean of the micro-batches' means the mean
            part = _scale(part, size / joined, degree + 1)
        elif offset:  # any shares will do that add up, and all and nothing add up exactly
            part = jnp.zeros_like(value)
        parts.append(part)
    return parts


def _degree(scale: Scale) -> int:
    return dict(scale).get(N, 0)


def _scale(value: Any, ratio: float, degree: int) -> Any:
    return value if degree == 0 or ratio == 1 else value * jnp.asarray(ratio**degree, value.dtype)


# -- outputs -------------------------------------------------------------------------------------------------------


def mean(parts: Sequence[Any], weights: Sequence[Any]) -> Any:
    """The mean of the parts, weighted.

    A part of weight zero counts for nothing, even if it is the ``0 / 0`` of a micro-batch whose rows are all masked.
    """
    dtype = jnp.promote_types(parts[0].dtype, jnp.float32)
    total = sum(weights[1:], start=weights[0])
    shares = [part * jnp.asarray(weight / total, dtype) for part, weight in zip(parts, weights, strict=True)]
    if not isinstance(total, int):
        shares = [jnp.where(weight == 0, 0, share) for weight, share in zip(weights, shares, strict=True)]
    found = sum(shares[1:], start=shares[0])
    if not isinstance(total, int):
        found = jnp.where(total == 0, parts[0], found)
    return found.astype(parts[0].dtype)
