"""Types as they lie in memory: what buffers are exchanged in between XLA and a plan's partitions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat


def physical(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type in memory: keys are bits, a boolean is a byte, and so is whatever is smaller or no standard."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return bits.shape, np.dtype(bits.dtype)
    return tuple(aval.shape), np.dtype(byte_for(aval.dtype) or aval.dtype)


def to_bits(value: Any) -> Any:
    """A value as it lies in memory."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    byte = byte_for(value.dtype)
    if byte is None:
        return value
    if jnp.issubdtype(value.dtype, jnp.floating):
        value = jax.lax.bitcast_convert_type(value, f"uint{jnp.finfo(value.dtype).bits}")
    return value.astype(byte)


def from_bits(value: Any, aval: Any) -> Any:
    """A value of a type, from what lies in memory."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return compat.wrap_key_data(value, aval.dtype)
    if byte_for(aval.dtype) is None:
        return value
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value.astype(f"uint{jnp.finfo(aval.dtype).bits}"), aval.dtype)
    return value.astype(aval.dtype)


def byte_for(dtype: Any) -> Any:
    """The type of the byte that holds an element of a type that buffers are not exchanged in, if it is of that kind."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.uint8 if jnp.finfo(dtype).bits <= 8 else None
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8
    return None
