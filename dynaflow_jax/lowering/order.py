"""Holding values back until other values are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def hold(values: Sequence[Any], waited: Sequence[Any]) -> list[Any]:
    """``values``, such that nothing that reads them runs before ``waited`` is computed.

    Keys and tokens cannot be held back, nor waited for; they pass through.

    XLA's CPU compiler in JAX 0.10 drops optimization barriers before it schedules, so there the order is only in the
    program that it is given. (A dependency of data in disguise would be kept, but costs minutes of compile time.)
    """
    held = [i for i, value in enumerate(values) if can_wait(value)]
    waited = [value for value in waited if can_wait(value)]
    result = list(values)
    if held and waited:
        passed, _ = jax.lax.optimization_barrier(([values[i] for i in held], waited))
        for i, value in zip(held, passed, strict=True):
            result[i] = value
    return result


def can_wait(value: Any) -> bool:
    """Whether a value is an array of numbers."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return dtype != jax.dtypes.float0
