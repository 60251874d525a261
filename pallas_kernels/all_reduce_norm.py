"""All-reduce, residual and RMSNorm in one kernel that reads the peers' memory, for small messages.

TokenWeave (arXiv 2505.11329, section 4) fuses the all-reduce of tensor parallelism with what follows it. For the few
tokens of a decoding step the one-shot form is the fastest: every device reads the peers' partial sums itself, row by
row over NVLink, adds its residual and normalizes while the row is in registers. Nothing is reduced twice over the
link, no result is written to be read again, and one launch replaces a collective and a fused loop. Plain loads and
stores only; no multicast.

Two handshakes keep it safe. Before the launch all devices wait for each other (Mosaic GPU adds that to a kernel that
refers to other devices' memory), so the partial sums are there; and a block does not finish before its counterparts
have read the rows that they share, so no device reuses memory that another still reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import add_rms_norm, mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.support import Support, alone_reason, first_reason, peers_reason

_NAMES = ("remote_ref", "SemaphoreType")
_BLOCKS_PER_SM = 2  # all blocks must be resident at once, since they wait for those of other devices


def reference(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *, axis_name: Hashable, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """What the kernel computes, in plain JAX; inside ``shard_map``, see `all_reduce_norm`."""
    total = lax.psum(x.astype(jnp.float32), axis_name)
    normed, total = add_rms_norm.reference(total, residual, weight, eps=eps)
    return normed.astype(x.dtype), total


def supports(x: Any, residual: Any, weight: Any, *, devices: int = 2, device: Any = None) -> Support:
    """Whether the kernel can run on ``devices`` devices of one process with arrays (or types) like these on each."""
    limits = _limits(x, residual, weight, devices)
    return first_reason(limits.reason, peers_reason(device, mosaic.HOPPER, devices) if limits else None)


def key(x: Any, residual: Any, weight: Any, *, devices: int) -> tuple[int, ...]:
    """Rows, width, devices: the shape by which measurements are kept."""
    return math.prod(x.shape[:-1]), x.shape[-1], devices


def _limits(x: Any, residual: Any, weight: Any, devices: int) -> Support:
    return first_reason(
        mosaic.missing_reason(*_NAMES),
        add_rms_norm.supports_shapes(x, residual, weight).reason,
        alone_reason(devices),
    )


def all_reduce_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    axis_name: Hashable,
    eps: float = 1e-6,
    num_blocks: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``h = psum(x) + residual``, and its RMSNorm; inside ``shard_map``. For inference: it has no derivative.

    All devices of the mesh must belong to one process and be linked (NVLink, or PCIe with peer access), and every one
    must call it. Sums are taken in float32 in the order of the devices, so that all get the same bits. There is no
    interpreter for peers' memory: tests on the CPU use `reference`.

    Args:
      x: ``[..., width]``, this device's partial sums: bfloat16, float16 or float32.
      residual: like ``x``, the same on every device; may have another dtype.
      weight: ``[width]``.
      axis_name: the mesh axis to reduce over.
      eps: added to the mean square.
      num_blocks: of the grid; at most two for each multiprocessor, which is what is taken if left out.

    Returns:
      The normalized rows, of ``x``'s dtype, and ``h``, of ``residual``'s: the same on every device of the axis.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    peers = lax.axis_size(axis_name)
    _limits(x, residual, weight, peers).require("all_reduce_norm")
    width = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    most = _BLOCKS_PER_SM * mosaic.num_sms()
    blocks = min(rows, most if num_blocks is None else min(num_blocks, most))
    vector = next(n for n in (8, 4, 2, 1) if width % (128 * n) == 0)

    def body(x_ref: Any, residual_ref: Any, weight_ref: Any, normed_ref: Any, total_ref: Any, done: Any) -> None:
        ids = [mosaic.peer(axis_name, i) for i in range(peers)]

        def load(ref: Any) -> jax.Array:
            return plgpu.layout_cast(ref[...], plgpu.Layout.WG_STRIDED((width,), vector))

        @plgpu.nd_loop((rows,), collective_axes="block")
        def _row(info: Any) -> None:
            (row,) = info.index
            parts = [load(plgpu.remote_ref(x_ref, i).at[row]) for i in ids]
            total = functools.reduce(lambda a, b: a + b, [part.astype(jnp.float32) for part in parts])
            total = (total + load(residual_ref.at[row]).astype(jnp.float32)).astype(total_ref.dtype)
            total_ref[row] = total
            h = total.astype(jnp.float32)
            scale = lax.rsqrt(jnp.sum(h * h) / width + eps)
            normed_ref[row] = (h * scale * load(weight_ref).astype(jnp.float32)).astype(normed_ref.dtype)

        for i in ids:
            pl.semaphore_signal(done, device_id=i)
        pl.semaphore_wait(done, peers, decrement=False)

    kernel = mosaic.launch(
        body,
        mosaic.outputs_of(
            functools.partial(reference, axis_name=axis_name, eps=eps),
            x.reshape(rows, width),
            residual.reshape(rows, width),
            weight,
        ),
        grid=blocks,
        scratch={"done": plgpu.SemaphoreType.REGULAR},
        name="all_reduce_norm",
        approx_math=True,
    )
    normed, total = kernel(x.reshape(rows, width), residual.reshape(rows, width), weight)
    return normed.reshape(x.shape), total.reshape(x.shape)
