"""Picking between lowered plans: on the host where the index is known there, by XLA's conditional otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError


def on_host(index: Any, count: int) -> int | None:
    """An index as the host knows it, clamped; ``None`` if it is a scalar on a device, or not known yet.

    Args:
      index: what a ``Switch``'s ``select`` gave.
      count: how many plans there are.

    Raises:
      DynaFlowError: if it is neither an integer nor a boolean, or has axes.
    """
    if isinstance(index, int):  # of any size
        return min(max(int(index), 0), count - 1)
    shape, dtype = np.shape(index), getattr(index, "dtype", None) or np.asarray(index).dtype
    if shape:
        raise DynaFlowError(
            f"select must give one index for the whole batch, not an array of shape {list(shape)}: reduce it, with "
            "max() say."
        )
    if dtype.kind not in "iub":
        what = dtype if compat.is_array(index) else repr(index)
        raise DynaFlowError(f"select must give an integer, the index of a strategy, not {what}.")
    if isinstance(index, jax.Array):
        return None
    return min(max(int(index), 0), count - 1)


def pick(index: Any, plans: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """What the plan gives that a scalar on the device names; all of them are compiled.

    Args:
      index: the scalar; out of range, the nearest plan runs.
      plans: functions of the operands, with results of the same types.
      operands: arrays, or pytrees of them.
    """
    if index.dtype == bool:
        index = index.astype(jnp.int32)
    # Clamped in its own type: a conversion to 32 bits wraps around.
    top = min(len(plans) - 1, int(jnp.iinfo(index.dtype).max))
    return jax.lax.switch(jnp.clip(index, 0, top).astype(jnp.int32), plans, *operands)
