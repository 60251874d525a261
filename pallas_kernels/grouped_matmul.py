"""The experts' matmul of a mixture of experts: rows sorted by expert, each group with its own weights.

Comet (arXiv 2502.19811, section 3) and MegaBlocks (arXiv 2211.15841) compute it tile by tile, without padding the
groups to one size. The kernel is JAX's own ``ragged_dot_mgpu``; this module adds what a strategy needs: limits, a
tiling, the derivative and a reference. XLA gathers the tokens into it and scatters its rows, fused with what is
around.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic, support
from pallas_kernels.support import Support, dtype_reason, first_reason, hardware_reason

try:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as shipped
except ImportError as error:
    shipped: Any = None
    _MISSING: str | None = f"JAX {jax.__version__} ships no ragged matmul ({error})"
else:
    _MISSING = None

_DTYPES = (jnp.bfloat16, jnp.float16)
_ROWS, _COLUMNS, _DEPTH = 128, 128, 64  # of a block's tile
_MAX_GROUPS = 64  # the search for a tile's group is unrolled over all of them


def reference(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """What the kernel computes, in plain JAX; see `grouped_matmul`."""
    return lax.ragged_dot(x, weights, sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def supports(x: Any, weights: Any, sizes: Any, *, device: Any = None) -> Support:
    """Whether the kernel can run on a device with arrays (or types) like these."""
    limits = supports_shapes(x, weights, sizes)
    return first_reason(limits.reason, hardware_reason(device, mosaic.HOPPER) if limits else None)


def key(x: Any, weights: Any, sizes: Any) -> tuple[int, ...]:
    """Rows, ``k``, ``n``, groups: the shape by which measurements are kept."""
    return (*x.shape, weights.shape[2], weights.shape[0])


def supports_shapes(x: Any, weights: Any, sizes: Any) -> Support:
    """Whether the kernel can be compiled for arrays (or types) like these, on whatever machine."""
    if len(x.shape) != 2 or len(weights.shape) != 3 or x.shape[1] != weights.shape[1]:
        return Support(f"[rows, k] and [groups, k, n] are wanted, not {tuple(x.shape)} and {tuple(weights.shape)}")
    groups, k, n = weights.shape
    return first_reason(
        _MISSING or mosaic.missing_reason(),
        dtype_reason("x", x, _DTYPES),
        None if x.dtype == weights.dtype else f"x is {x.dtype} and weights are {weights.dtype}",
        dtype_reason("sizes", sizes, (jnp.int32,)),
        None if sizes.shape == (groups,) else f"sizes has shape {tuple(sizes.shape)} for {groups} groups",
        f"there are {groups} groups, and at most {_MAX_GROUPS} are supported" if groups > _MAX_GROUPS else None,
        None
        if k % _DEPTH == 0 and n % _COLUMNS == 0
        else f"k = {k} is no multiple of {_DEPTH}, or n = {n} of {_COLUMNS}",
        None if x.shape[0] >= _ROWS else f"there are fewer than {_ROWS} rows",
    )


def grouped_matmul(
    x: jax.Array, weights: jax.Array, sizes: jax.Array, *, stages: int = 6, panel: int = 8, interpret: bool = False
) -> jax.Array:
    """Each row of ``x`` times the weights of its group. Differentiable in ``x`` and ``weights``.

    Mosaic does not map this kernel over another axis; under ``jax.vmap`` it is ``reference``.

    Args:
      x: ``[rows, k]``, bfloat16 or float16, the rows of group 0, then those of group 1, and so on; at least 128.
      weights: ``[groups, k, n]``, of the same dtype.
      sizes: ``[groups]``, int32: how many rows each group has; they add up to ``rows``.
      stages: tiles of the operands in flight.
      panel: width, in tiles, of the panels in which the product is computed.
      interpret: simulate the kernel on the CPU.

    Returns:
      ``[rows, n]``, of the operands' dtype.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    supports_shapes(x, weights, sizes).require("grouped_matmul")

    @jax.custom_vjp
    @functools.partial(support.mapped_as, reference)
    def call(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        with mosaic.simulation(interpret):
            return shipped.ragged_dot(
                x,
                weights,
                group_sizes=sizes,
                block_m=_ROWS,
                block_n=_COLUMNS,
                block_k=_DEPTH,
                max_concurrent_steps=stages,
                grid_block_n=panel,
            )

    def forward(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> Any:
        return call(x, weights, sizes), (x, weights, sizes)

    def backward(saved: Any, cotangent: jax.Array) -> Any:
        x, weights, sizes = saved
        d_x, d_weights = jax.vjp(functools.partial(reference, sizes=sizes), x, weights)[1](cotangent)
        return d_x, d_weights, None

    call.defvjp(forward, backward)
    return call(x, weights, sizes)
