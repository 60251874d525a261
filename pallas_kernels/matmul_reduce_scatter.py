"""A matmul that sends each device its rows as they are computed.

FLUX (arXiv 2406.06858, section 4) fuses the reduce-scatter of tensor parallelism into the epilogue of the GEMM: a tile
goes to the device that owns its rows as soon as it is done, and NVLink works while the tensor cores compute the next.
Each device begins with the rows of the others and computes its own last, as there, so that only the last tiles'
way is exposed. The partial sums are added afterwards: by XLA, or by `add_rms_norm`, which takes them as ``partials``.

Ordinary stores to the peers' memory; no multicast. Before the launch all devices wait for each other (Mosaic GPU adds
that), so nobody writes into memory that is still in use; and a block ends when its counterparts' tiles have arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import hopper, mosaic, persistent_matmul
from pallas_kernels.mosaic import plgpu
from pallas_kernels.support import Support, alone_reason, first_reason, peers_reason

_NAMES = ("remote_ref", "SemaphoreType")


def reference(a: jax.Array, b: jax.Array, *, axis_name: Hashable) -> jax.Array:
    """What the kernel computes, in plain JAX; inside ``shard_map``, see `matmul_reduce_scatter`."""
    return lax.psum_scatter(persistent_matmul.reference(a, b), axis_name, scatter_dimension=0, tiled=True)


def supports(a: Any, b: Any, *, devices: int = 2, tiles: hopper.Tiles | None = None, device: Any = None) -> Support:
    """Whether the kernel can run on ``devices`` devices of one process with arrays (or types) like these on each."""
    limits = _limits(a, b, devices, tiles)
    return first_reason(limits.reason, peers_reason(device, mosaic.HOPPER, devices) if limits else None)


def key(a: Any, b: Any, *, devices: int) -> tuple[int, ...]:
    """``m, k, n`` of one device's operands, and devices: the shape by which measurements are kept."""
    return (*a.shape, b.shape[1], devices)


def _limits(a: Any, b: Any, devices: int, tiles: hopper.Tiles | None) -> Support:
    reason = (
        alone_reason(devices)
        or mosaic.missing_reason(*_NAMES)
        or mosaic.version_reason(0, 11)
        or persistent_matmul.supports_shapes(a, b, tiles).reason
    )
    if not reason and a.shape[0] % devices:
        reason = f"{a.shape[0]} rows cannot be scattered over {devices} devices"
    if not reason:
        own = jax.ShapeDtypeStruct((a.shape[0] // devices, a.shape[1]), a.dtype)
        reason = persistent_matmul.supports_shapes(own, b, tiles).reason
    return Support(reason)


def matmul_reduce_scatter(
    a: jax.Array,
    b: jax.Array,
    *,
    axis_name: Hashable,
    num_sms: int | None = None,
    tiles: hopper.Tiles | None = None,
    add: bool = True,
) -> jax.Array:
    """``psum_scatter(a @ b)`` along the rows, sent while it is computed; inside ``shard_map``. For inference.

    All devices of the mesh must belong to one process and be linked, and every one must call it. There is no
    interpreter for peers' memory: tests on the CPU use `reference`.

    Args:
      a: ``[m, k]``, bfloat16 or float16: this device's columns of the left operand.
      b: ``[k, n]``, of the same dtype: its rows of the right one.
      axis_name: the mesh axis to reduce over.
      num_sms: on at most this many multiprocessors; all if left out.
      tiles: how the product is cut; chosen by its shape if left out.
      add: whether to add the devices' partial sums.

    Returns:
      ``[m / devices, n]``, of the operands' dtype: this device's rows of the sum. Without ``add``, the partial sums
      ``[devices, m / devices, n]``, this device's own first, each rounded to the dtype.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    peers = lax.axis_size(axis_name)
    _limits(a, b, peers, tiles).require("matmul_reduce_scatter")
    (m, k), n = a.shape, b.shape[1]
    sms = mosaic.num_sms() if num_sms is None else num_sms
    own_rows = m // peers
    cut = tiles or persistent_matmul.choose(own_rows, n, k, sms)

    def body(a_ref: Any, b_ref: Any, parts_ref: Any, *, done: Any, **scratch: Any) -> None:
        wg = lax.axis_index("wg")
        own = lax.axis_index(axis_name)
        # The rows of the next device first, and this one's last.
        first_row = lax.rem(own + 1, peers) * own_rows
        ids = [mosaic.peer(axis_name, lax.rem(own + i, peers)) for i in range(peers)]
        destinations = [parts_ref.at[0]]
        for i in range(1, peers):
            remote = plgpu.remote_ref(parts_ref, ids[i])
            destinations.append(remote.at[peers - i])

        def store(piece: Any, row: Any, column: Any) -> None:
            ahead = lax.rem(lax.div(row, own_rows) - own + peers, peers)
            for i, destination in enumerate(destinations):

                @pl.when(ahead == i)
                def _send(destination: Any = destination) -> None:
                    hopper.store_to(destination)(piece, lax.rem(row, own_rows), column)

        @pl.when(wg < hopper.CONSUMERS)
        def _multiply() -> None:
            registers, _ = persistent_matmul.REGISTERS
            hopper.consume(cut, a_ref, b_ref, store, scratch, registers, first_row=first_row)
            for i in ids[1:]:
                pl.semaphore_signal(done, device_id=i)
            pl.semaphore_wait(done, hopper.CONSUMERS * (peers - 1), decrement=False)

        @pl.when(wg == hopper.PRODUCER)
        def _fetch() -> None:
            _, registers = persistent_matmul.REGISTERS
            hopper.produce(cut, a_ref, b_ref, scratch, registers, first_row=first_row)

    out = mosaic.outputs_of(functools.partial(partial_sums, axis_name=axis_name), a, b)
    parts = mosaic.launch(
        body,
        out,
        grid=min(sms, (m // cut.m) * (n // cut.n)),
        warpgroups=hopper.CONSUMERS + 1,
        scratch=cut.scratch(a.dtype) | {"done": plgpu.SemaphoreType.REGULAR},
        name="matmul_reduce_scatter",
    )(a, b)
    return jnp.sum(parts, axis=0, dtype=jnp.float32).astype(a.dtype) if add else parts


def partial_sums(a: jax.Array, b: jax.Array, *, axis_name: Hashable) -> jax.Array:
    """What the kernel computes without ``add``, in plain JAX."""
    peers, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    pieces = persistent_matmul.reference(a, b).reshape(peers, a.shape[0] // peers, b.shape[1])
    parts = lax.all_to_all(pieces, axis_name, split_axis=0, concat_axis=0)
    return jnp.roll(parts, -own, axis=0)
