"""A matmul that leaves multiprocessors free for what runs beside it.

A persistent kernel whose grid is the budget: NanoFlow (arXiv 2408.12757, section 4.2) and TileLink
(arXiv 2503.20313, section 4) give compute and communication disjoint shares of the multiprocessors, so that neither
waits for a wave of the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import hopper, mosaic
from pallas_kernels.support import Support, differentiable, dtype_reason, first_reason, hardware_reason

_DTYPES = (jnp.bfloat16, jnp.float16)
REGISTERS = (232, 40)  # of the warpgroups that multiply, and of the one that fetches

TILES = (
    hopper.Tiles(m=256, n=128, stages=4, split="m", minor="n"),
    hopper.Tiles(m=128, n=256, stages=4, split="m", minor="n"),
    hopper.Tiles(m=128, n=128, stages=6, split="m"),
)
"""The tilings tried for a shape, in order, until one divides it and fills the device."""


def reference(a: jax.Array, b: jax.Array) -> jax.Array:
    """What the kernel computes, in plain JAX."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def supports(a: Any, b: Any, *, tiles: hopper.Tiles | None = None, device: Any = None) -> Support:
    """Whether the kernel can run on a device with arrays (or types) like these."""
    limits = supports_shapes(a, b, tiles)
    return first_reason(limits.reason, hardware_reason(device, mosaic.HOPPER) if limits else None)


def key(a: Any, b: Any) -> tuple[int, ...]:
    """``m, k, n``: the shape by which measurements are kept."""
    return (*a.shape, b.shape[1])


def supports_shapes(a: Any, b: Any, tiles: hopper.Tiles | None) -> Support:
    """Whether the kernel can be compiled for arrays (or types) like these, on whatever machine."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return Support(f"[m, k] @ [k, n] is wanted, not {tuple(a.shape)} @ {tuple(b.shape)}")
    fits = [(tiles or one).reason(a.shape[0], b.shape[1], a.shape[1]) for one in ((tiles,) if tiles else TILES)]
    return first_reason(
        mosaic.missing_reason(),
        dtype_reason("a", a, _DTYPES),
        None if a.dtype == b.dtype else f"a is {a.dtype} and b is {b.dtype}",
        None if None in fits else fits[-1],
        None if tiles is None or tiles.smem_bytes(2) < hopper.SMEM_BYTES else "the tiles exceed the shared memory",
    )


def choose(m: int, n: int, k: int, sms: int) -> hopper.Tiles:
    """The tiling for a shape: the one with the least work in the last, partly filled wave; ties to the larger tile."""
    fits = [tiles for tiles in TILES if tiles.reason(m, n, k) is None]

    def waves(tiles: hopper.Tiles) -> float:
        return -(-(m // tiles.m) * (n // tiles.n) // sms) * tiles.m * tiles.n

    return min(fits, key=waves)


def persistent_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    num_sms: int | None = None,
    tiles: hopper.Tiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``a @ b`` on at most ``num_sms`` multiprocessors, accumulated in float32. Differentiable.

    Args:
      a: ``[m, k]``, bfloat16 or float16.
      b: ``[k, n]``, of the same dtype.
      num_sms: the budget; all multiprocessors if left out.
      tiles: how the product is cut; chosen by its shape if left out.
      interpret: simulate the kernel on the CPU.

    Returns:
      ``[m, n]``, of the operands' dtype.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    supports_shapes(a, b, tiles).require("persistent_matmul")
    sms = mosaic.num_sms() if num_sms is None else num_sms
    tiles = tiles or choose(a.shape[0], b.shape[1], a.shape[1], sms)
    run = functools.partial(_run, tiles=tiles, sms=sms, interpret=interpret)
    return differentiable(run, reference)(a, b)


def _run(a: jax.Array, b: jax.Array, *, tiles: hopper.Tiles, sms: int, interpret: bool) -> jax.Array:
    def body(a_ref: Any, b_ref: Any, out_ref: Any, **scratch: Any) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg < hopper.CONSUMERS)
        def _multiply() -> None:
            hopper.consume(tiles, a_ref, b_ref, hopper.store_to(out_ref), scratch, REGISTERS[0])

        @pl.when(wg == hopper.PRODUCER)
        def _fetch() -> None:
            hopper.produce(tiles, a_ref, b_ref, scratch, REGISTERS[1])

    blocks = (a.shape[0] // tiles.m) * (b.shape[1] // tiles.n)
    return mosaic.launch(
        body,
        mosaic.outputs_of(reference, a, b),
        grid=min(sms, blocks),
        warpgroups=hopper.CONSUMERS + 1,
        scratch=tiles.scratch(a.dtype),
        interpret=interpret,
        name="persistent_matmul",
    )(a, b)
