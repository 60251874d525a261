"""The parts of a warp-specialised matmul for Hopper, for kernels that run it beside something else.

One warpgroup fetches tiles of the operands with the tensor memory accelerator (TMA), two multiply them (``wgmma``);
queues of ``stages`` tiles in shared memory join them. The blocks are persistent: each computes every ``grid``-th tile
of the product, and the fetching warpgroup runs ahead from one tile into the next, so that the epilogue of a tile and
the first fetches of the next overlap. (JAX's ``hopper_matmul_mgpu`` empties its queues between tiles, and takes all
registers of the multiprocessor.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic import plgpu

SMEM_BYTES = 227 * 1024
"""Shared memory that a block may use, on Hopper."""
CONSUMERS = 2
"""Warpgroups that multiply: their index on the axis ``"wg"`` is 0 and 1, and that of the one that fetches is 2."""
PRODUCER = CONSUMERS


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut.

    Attributes:
      m, n: rows and columns of the product that a block computes at a time.
      k: the contraction, per stage.
      stages: tiles of the operands that are in flight.
      split: the axis of a tile that the two multiplying warpgroups share out.
      minor: the axis along which consecutive blocks' tiles lie, in panels ``panel`` tiles wide (for L2 reuse).
      slots: pieces of the result, per multiplying warpgroup, that are on their way to memory.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    stages: int = 4
    split: Literal["m", "n"] = "n"
    minor: Literal["m", "n"] = "m"
    panel: int = 8
    slots: int = 2

    @property
    def wg_m(self) -> int:
        """Rows of the product that one warpgroup computes at a time."""
        return self.m // CONSUMERS if self.split == "m" else self.m

    @property
    def wg_n(self) -> int:
        """Columns of the product that one warpgroup computes at a time."""
        return self.n // CONSUMERS if self.split == "n" else self.n

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory for operands and results, in bytes."""
        return itemsize * (self.stages * self.k * (self.m + self.n) + CONSUMERS * self.slots * _PIECE * _PIECE)

    def reason(self, m: int, n: int, k: int) -> str | None:
        """Why a product ``[m, k] @ [k, n]`` cannot be cut like this; ``None`` if it can."""
        if m % self.m or n % self.n or k % self.k:
            return f"[{m}, {k}] @ [{k}, {n}] is not made of whole tiles of {self.m} x {self.n} x {self.k}"
        if k < self.k * self.stages:
            return f"the contraction over {k} is shorter than {self.stages} stages of {self.k}"
        return None

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Scratch types, to be passed on to `produce` and `consume`."""
        return {
            "a_queue": plgpu.SMEM((self.stages, self.m, self.k), dtype, transforms=_transforms(self.k, dtype)),
            "b_queue": plgpu.SMEM((self.stages, self.k, self.n), dtype, transforms=_transforms(self.n, dtype)),
            "pieces": plgpu.SMEM((CONSUMERS, self.slots, _PIECE, _PIECE), dtype, transforms=_transforms(_PIECE, dtype)),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=self.stages),
        }


_PIECE = 64  # results leave in squares of this size


def _transforms(minor: int, dtype: Any) -> tuple[Any, ...]:
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(minor * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _each_tile(tiles: Tiles, m: int, n: int, first_row: Any, body: Any) -> None:
    """``body(row, column, local_index)`` for each of this block's tiles of the product, in the order of the queues."""
    shape = (m // tiles.m, n // tiles.n)

    @plgpu.nd_loop((shape[0] * shape[1],), collective_axes="block")
    def _tile(info: Any) -> None:
        (index,) = info.index
        row, column = plgpu.planar_snake(index, shape, 0 if tiles.minor == "m" else 1, tiles.panel)
        if first_row is not None:
            row = lax.rem(row + lax.div(first_row, tiles.m), shape[0])
        body(row * tiles.m, column * tiles.n, info.local_index)


def produce(tiles: Tiles, a: Any, b: Any, scratch: dict[str, Any], registers: int, *, first_row: Any = None) -> None:
    """What the fetching warpgroup does: keeps the queues full, over all of this block's tiles.

    Args:
      tiles: how the product is cut.
      a: ``[m, k]`` in global memory.
      b: ``[k, n]`` in global memory.
      scratch: the references of `Tiles.scratch`.
      registers: to keep, per thread.
      first_row: of the product, at which the order of the tiles begins (it goes round); a multiple of ``tiles.m``.
    """
    plgpu.set_max_registers(registers, action="decrease")
    (m, k), (_, n) = a.shape, b.shape
    steps = k // tiles.k
    full, empty = scratch["full"], scratch["empty"]

    def fetch(row: Any, column: Any, local: Any) -> None:
        def step(i: Any, _: Any) -> None:
            slot = lax.rem(local * steps + i, tiles.stages)
            ks = pl.ds(i * tiles.k, tiles.k)
            plgpu.barrier_wait(empty.at[slot])
            plgpu.copy_gmem_to_smem(a.at[pl.ds(row, tiles.m), ks], scratch["a_queue"].at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(b.at[ks, pl.ds(column, tiles.n)], scratch["b_queue"].at[slot], full.at[slot])

        lax.fori_loop(0, steps, step, None)

    _each_tile(tiles, m, n, first_row, fetch)
    # Every slot is given back once more than it is filled: at the start.
    for slot in range(tiles.stages):
        plgpu.barrier_wait(empty.at[slot])


def consume(
    tiles: Tiles,
    a: Any,
    b: Any,
    store: Callable[[Any, Any, Any], None],
    scratch: dict[str, Any],
    registers: int,
    *,
    first_row: Any = None,
) -> None:
    """What the multiplying warpgroups do: accumulate in float32, round, and send the result off by TMA.

    Args:
      tiles: how the product is cut.
      a: ``[m, k]`` in global memory (for its shape).
      b: ``[k, n]`` in global memory (for its shape).
      store: sends a piece of the result off: ``store(piece, row, column)`` starts an asynchronous copy of a square in
        shared memory; see `store_to`.
      scratch: the references of `Tiles.scratch`.
      registers: to take, per thread.
      first_row: as in `produce`.
    """
    plgpu.set_max_registers(registers, action="increase")
    (m, k), (_, n) = a.shape, b.shape
    steps = k // tiles.k
    wg = lax.axis_index("wg")
    full, empty, pieces = scratch["full"], scratch["empty"], scratch["pieces"]
    for slot in range(tiles.stages):
        plgpu.barrier_arrive(empty.at[slot])
    row_offset = wg * tiles.wg_m if tiles.split == "m" else 0
    column_offset = wg * tiles.wg_n if tiles.split == "n" else 0

    def multiply(row: Any, column: Any, local: Any) -> None:
        def accumulate(acc: Any) -> None:
            def step(i: Any, _: Any) -> None:
                slot = lax.rem(local * steps + i, tiles.stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(
                    acc,
                    scratch["a_queue"].at[slot, pl.ds(row_offset, tiles.wg_m)],
                    scratch["b_queue"].at[slot, :, pl.ds(column_offset, tiles.wg_n)],
                )
                # One product stays in flight; the slot of the one before it is free.
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)
                def _free() -> None:
                    plgpu.barrier_arrive(empty.at[lax.rem(local * steps + i - 1, tiles.stages)])

            lax.fori_loop(0, steps, step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[lax.rem(local * steps + steps - 1, tiles.stages)])
            result = acc[...].astype(pieces.dtype)
            for i in range(tiles.wg_m // _PIECE):
                for j in range(tiles.wg_n // _PIECE):
                    slot = (i * (tiles.wg_n // _PIECE) + j) % tiles.slots
                    # The copy that last used this piece has read it.
                    plgpu.wait_smem_to_gmem(tiles.slots - 1, wait_read_only=True)
                    pieces[wg, slot] = result[i * _PIECE : (i + 1) * _PIECE, j * _PIECE : (j + 1) * _PIECE]
                    plgpu.commit_smem()
                    store(pieces.at[wg, slot], row + row_offset + i * _PIECE, column + column_offset + j * _PIECE)

        pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((tiles.wg_m, tiles.wg_n), jnp.float32))

    _each_tile(tiles, m, n, first_row, multiply)
    plgpu.wait_smem_to_gmem(0)


def store_to(out: Any) -> Callable[[Any, Any, Any], None]:
    """The ``store`` of `consume` that puts the pieces into ``out``, ``[m, n]`` in global memory."""

    def store(piece: Any, row: Any, column: Any) -> None:
        rows, columns = piece.shape
        plgpu.copy_smem_to_gmem(piece, out.at[pl.ds(row, rows), pl.ds(column, columns)])

    return store
