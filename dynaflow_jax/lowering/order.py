"""Holding values back until other values are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import compat


def hold(values: Sequence[Any], waited: Sequence[Any]) -> list[Any]:
    """``values``, such that nothing that reads them runs before ``waited`` is computed.

    Keys and tokens cannot be held back, nor waited for; they pass through. Inside ``shard_map`` a value that is the
    same on every device cannot be held back by one that is not, without becoming one that is not.

    XLA's CPU compiler in JAX 0.10 drops optimization barriers before it schedules, so there the order is only in the
    program that it is given. (A dependency of data in disguise would be kept, but costs minutes of compile time.)
    """
    held = [i for i, value in enumerate(values) if can_wait(value)]
    waited = [value for value in waited if can_wait(value)]
    result = list(values)
    for axes in dict.fromkeys(compat.varying_axes(values[i]) for i in held):
        group = [i for i in held if compat.varying_axes(values[i]) == axes]
        # The derivative of making a value vary is a sum over devices: none is needed of what is only waited for.
        known = [
            value if compat.varying_axes(value) == axes else jax.lax.stop_gradient(value)
            for value in waited
            if compat.varying_axes(value) <= axes
        ]
        if known:
            passed, _ = jax.lax.optimization_barrier(([values[i] for i in group], known))
            for i, value in zip(group, passed, strict=True):
                result[i] = value
    return result


def can_wait_for(value: Any, waited: Sequence[Any]) -> bool:
    """Whether a value can be held back until all of ``waited`` are computed."""
    needed = frozenset().union(*(compat.varying_axes(other) for other in waited if can_wait(other)))
    return can_wait(value) and compat.varying_axes(value) >= needed


def can_wait(value: Any) -> bool:
    """Whether a value is an array of numbers."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return dtype != jax.dtypes.float0
