"""Holding values back until other values are there, in a way that the compiler keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import compat


def hold(values: Sequence[Any], waited: Sequence[Any]) -> list[Any]:
    """``values``, such that nothing that reads them runs before ``waited`` is computed.

    Keys and tokens cannot be held back, nor waited for; they pass through.
    """
    held = [i for i, value in enumerate(values) if can_wait(value)]
    waited = [value for value in waited if can_wait(value)]
    result = list(values)
    if not held or not waited:
        return result
    if compat.drops_barriers():
        for i in held:
            result[i] = _depend(values[i], waited)
        return result
    passed, _ = jax.lax.optimization_barrier(([values[i] for i in held], waited))
    for i, value in zip(held, passed, strict=True):
        result[i] = value
    return result


def can_wait(value: Any) -> bool:
    """Whether a value is an array of numbers."""
    dtype = getattr(value, "dtype", None)
    return (
        dtype is not None
        and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        and dtype != jax.dtypes.float0
        and value.size > 0
    )


# XLA's CPU compiler in JAX 0.10 drops optimization barriers before it schedules, and keeps nothing but dependencies of
# data. So there a zero is made of what is waited for, such that the compiler does not see that it is one, and combined
# with the value's bits: one pass over the value, fused into whatever makes or reads it.


def _depend(value: Any, waited: Sequence[Any]) -> Any:
    axes = compat.manual_axes(value)
    bits = [_first_bits(other) for other in waited if compat.manual_axes(other) <= axes and _has_bits(other)]
    if not bits or not _has_bits(value):  # better no order than no program
        return jax.lax.optimization_barrier((value, list(waited)))[0]
    combined = bits[0]
    for other in bits[1:]:
        combined = combined | other
    # Leading zeros of 32 bits number at most 32, so that the seventh bit of their count is never set.
    return _with_zero(value, jax.lax.shift_right_logical(jax.lax.clz(combined), jnp.uint32(6)))


def _has_bits(value: Any) -> bool:
    """Whether single elements of a value can be looked at as whole numbers: not complex, nor sharded by type."""
    return (value.dtype.kind in "biuf" or value.dtype == jnp.bfloat16) and compat.explicit_sharding(value) is None


def _unsigned(dtype: Any) -> Any:
    return jnp.dtype(f"uint{8 * dtype.itemsize}")


def _first_bits(value: Any) -> Any:
    first = jax.lax.slice(value, (0,) * value.ndim, (1,) * value.ndim).reshape(())
    if value.dtype != jnp.bool_:
        first = jax.lax.bitcast_convert_type(first, _unsigned(value.dtype))
    return first.astype(jnp.uint32)


@jax.custom_jvp
def _with_zero(value: Any, zero: Any) -> Any:
    if value.dtype == jnp.bool_:
        return value | (zero != 0)
    bits = jax.lax.bitcast_convert_type(value, _unsigned(value.dtype))
    return jax.lax.bitcast_convert_type(bits | zero.astype(bits.dtype), value.dtype)


@_with_zero.defjvp
def _with_zero_jvp(primals, tangents):  # pyright: ignore[reportUnusedFunction]
    return _with_zero(*primals), tangents[0]
