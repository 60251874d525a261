"""A matmul that passes the other devices' rows on while it multiplies those it has.

The all-gather of tensor parallelism fused into the GEMM behind it, as in FLUX (arXiv 2406.06858, section 4) and the
collective matmul of Wang et al. (ASPLOS 2023): the tiles of the left operand that a device multiplies go on to its
neighbour from shared memory, where they are anyway. The kernel is JAX's own ``collective_matmul_mgpu``, which does it
with ordinary stores to the peers' memory; this module adds what a strategy needs: limits, tilings and a reference.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, persistent_matmul
from pallas_kernels.support import Support, alone_reason, dtype_reason, first_reason, peers_reason

try:
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as shipped
except ImportError as error:
    shipped: Any = None
    _MISSING: str | None = f"JAX {jax.__version__} ships no collective matmul ({error})"
else:
    _MISSING = None

_DTYPES = (jnp.bfloat16, jnp.float16)
_ROWS, _COLUMNS, _DEPTH = 128, 256, 64  # of a block's tile
_STAGES = 4


def reference(a: jax.Array, b: jax.Array, *, axis_name: Hashable) -> jax.Array:
    """What the kernel computes, in plain JAX; inside ``shard_map``, see `all_gather_matmul`."""
    return persistent_matmul.reference(lax.all_gather(a, axis_name, tiled=True), b)


def supports(a: Any, b: Any, *, devices: int = 2, device: Any = None) -> Support:
    """Whether the kernel can run on ``devices`` devices of one process with arrays (or types) like these on each."""
    limits = _limits(a, b, devices)
    return first_reason(limits.reason, peers_reason(device, mosaic.HOPPER, devices) if limits else None)


def key(a: Any, b: Any, *, devices: int) -> tuple[int, ...]:
    """``m, k, n`` of one device's operands, and devices: the shape by which measurements are kept."""
    return (*a.shape, b.shape[1], devices)


def _limits(a: Any, b: Any, devices: int) -> Support:
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return Support(f"[rows, k] @ [k, n] is wanted, not {tuple(a.shape)} @ {tuple(b.shape)}")
    (rows, k), n = a.shape, b.shape[1]
    whole = rows % _ROWS == 0 and n % _COLUMNS == 0 and k % _DEPTH == 0 and k >= _DEPTH * _STAGES
    return first_reason(
        _MISSING or mosaic.missing_reason("remote_ref"),
        dtype_reason("a", a, _DTYPES),
        None if a.dtype == b.dtype else f"a is {a.dtype} and b is {b.dtype}",
        alone_reason(devices),
        None if whole else f"[{rows}, {k}] @ [{k}, {n}] is not made of whole tiles of {_ROWS} x {_COLUMNS} x {_DEPTH}",
    )


def all_gather_matmul(a: jax.Array, b: jax.Array, *, axis_name: Hashable, panel: int = 8) -> jax.Array:
    """``all_gather(a) @ b``, gathered while it is multiplied; inside ``shard_map``. For inference.

    The mesh must have this one axis and hold all devices, of one process and linked; and every one must call it. There
    is no interpreter for peers' memory: tests on the CPU use `reference`.

    Args:
      a: ``[rows, k]``, bfloat16 or float16: this device's rows of the left operand.
      b: ``[k, n]``, of the same dtype: its columns of the right one.
      axis_name: the mesh axis to gather over.
      panel: width, in tiles, of the panels in which the product is computed.

    Returns:
      ``[devices * rows, n]``, of the operands' dtype: all rows of the product, this device's columns.

    Raises:
      KernelError: if shapes, dtypes or the mesh are not supported.
    """
    limits = _limits(a, b, lax.axis_size(axis_name))
    others = [name for name, size in jax.sharding.get_abstract_mesh().shape.items() if name != axis_name and size > 1]
    first_reason(limits.reason, f"the mesh has other axes: {others}" if others else None).require("all_gather_matmul")
    axis = shipped.MatmulDimension
    config = shipped.TuningConfig(
        tile_m=_ROWS,
        tile_n=_COLUMNS // 2,
        tile_k=_DEPTH,
        max_concurrent_steps=_STAGES,
        grid_minor_dim=axis.N,
        grid_tile_width=panel,
        wg_dimension=axis.N,
    )
    return shipped.all_gather_lhs_matmul(a, b, axis_name, config=config, dtype=a.dtype)
