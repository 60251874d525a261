"""A matmul of one micro-batch beside the gated activation of another, in one persistent kernel.

NanoFlow (arXiv 2408.12757, sections 3 and 4.2) runs compute-bound and memory-bound operators of different micro-batches
at the same time. Kernels on two streams do so only as far as the hardware finds room for both, and a GEMM that fills
the registers and the shared memory of every multiprocessor leaves none. Here the two share each block instead: two
warpgroups keep the tensor cores busy, one fetches their operands, and a fourth computes ``silu(gate) * up`` with the
issue slots, the memory bandwidth and the corner of shared memory that the matmul leaves idle.

The gain is bounded by the shorter of the two: at most ``1 + t_silu / t_matmul`` where the matmul is the longer one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import hopper, mosaic, persistent_matmul
from pallas_kernels.mosaic import plgpu
from pallas_kernels.support import Support, differentiable, dtype_reason, first_reason, hardware_reason

_DTYPES = (jnp.bfloat16, jnp.float16)
_ACTIVATION = hopper.PRODUCER + 1  # the index of the warpgroup that computes the activation
# Fewer stages than a matmul takes alone. Warpgroups split the columns: with 512 threads in a block, ptxas refuses a
# wgmma instruction 256 columns wide.
_TILES = hopper.Tiles(m=128, n=256, stages=3, split="n", minor="n")


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the two share a multiprocessor.

    Attributes:
      tiles: of the matmul.
      rows, columns: of the piece of the activation that is computed at a time.
      depth: pieces of the activation that are in flight.
      registers: per thread, of the warpgroups that multiply, fetch, and compute the activation (all four warpgroups
        share 512 per thread of one).
    """

    tiles: hopper.Tiles = _TILES
    rows: int = 8
    columns: int = 256
    depth: int = 4
    registers: tuple[int, int, int] = (192, 32, 96)

    def smem_bytes(self, itemsize: int) -> int:
        """Shared memory of a block, in bytes."""
        return self.tiles.smem_bytes(itemsize) + 3 * self.depth * self.rows * self.columns * itemsize


WIDE = Tuning()
SQUARE = Tuning(tiles=hopper.Tiles(m=128, n=128, stages=4, split="m"), registers=(152, 40, 168))
_LONG = 1500  # operations of the matmul for each byte that the activation moves


def choose(a: Any, b: Any, gate_up: Any) -> Tuning:
    """The tuning for arrays (or types) like these.

    While both are busy, wide tiles spare the memory. A matmul that is long beside the activation is alone most of the
    time, with fewer stages than it would have if it were always alone; small tiles suffer least from that.
    """
    operations = 2 * a.shape[0] * a.shape[1] * b.shape[1]
    moved = gate_up.size * gate_up.dtype.itemsize * 3 // 2
    fits = not persistent_matmul.supports_shapes(a, b, WIDE.tiles).reason
    return WIDE if fits and operations < _LONG * moved else SQUARE


def reference(a: jax.Array, b: jax.Array, gate_up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the kernel computes, in plain JAX; see `matmul_silu`."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return persistent_matmul.reference(a, b), (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def supports(a: Any, b: Any, gate_up: Any, *, tuning: Tuning | None = None, device: Any = None) -> Support:
    """Whether the kernel can run on a device with arrays (or types) like these."""
    limits = _limits(a, b, gate_up, tuning)
    return first_reason(limits.reason, hardware_reason(device, mosaic.HOPPER) if limits else None)


def key(a: Any, b: Any, gate_up: Any) -> tuple[int, ...]:
    """``m, k, n``, tokens, width of the activation: the shape by which measurements are kept."""
    return (*a.shape, b.shape[1], gate_up.shape[0], gate_up.shape[1] // 2)


def _limits(a: Any, b: Any, gate_up: Any, tuning: Tuning | None) -> Support:
    if len(a.shape) != 2 or len(b.shape) != 2:
        return persistent_matmul.supports_shapes(a, b, None)
    tuning = tuning or choose(a, b, gate_up)
    if len(gate_up.shape) != 2 or gate_up.shape[0] % tuning.rows or gate_up.shape[1] % (2 * tuning.columns):
        return Support(
            f"gate_up is to be [tokens, 2 * width], whole pieces of {tuning.rows} tokens and {tuning.columns} columns, "
            f"not {tuple(gate_up.shape)}"
        )
    return first_reason(
        persistent_matmul.supports_shapes(a, b, tuning.tiles).reason,
        dtype_reason("gate_up", gate_up, _DTYPES),
        None if tuning.smem_bytes(2) < hopper.SMEM_BYTES else f"{tuning} exceeds the shared memory",
    )


def matmul_silu(
    a: jax.Array,
    b: jax.Array,
    gate_up: jax.Array,
    *,
    num_sms: int | None = None,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``a @ b`` and ``silu(gate) * up`` at the same time, both with float32 arithmetic inside. Differentiable.

    Args:
      a: ``[m, k]``, bfloat16 or float16.
      b: ``[k, n]``, of the same dtype.
      gate_up: ``[tokens, 2 * width]``, bfloat16 or float16: the gate's columns, then those of what it gates.
      num_sms: on at most this many multiprocessors; all if left out.
      tuning: how the two share a multiprocessor; chosen by the shapes if left out.
      interpret: simulate the kernel on the CPU.

    Returns:
      The product ``[m, n]``, of ``a``'s dtype, and the activation ``[tokens, width]``, of ``gate_up``'s.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    _limits(a, b, gate_up, tuning).require("matmul_silu")
    tuning = tuning or choose(a, b, gate_up)
    sms = mosaic.num_sms() if num_sms is None else num_sms
    run = functools.partial(_run, tuning=tuning, sms=sms, interpret=interpret)
    return differentiable(run, reference)(a, b, gate_up)


def _run(a: jax.Array, b: jax.Array, gate_up: jax.Array, *, tuning: Tuning, sms: int, interpret: bool) -> Any:
    tiles = tuning.tiles

    def body(a_ref: Any, b_ref: Any, gate_up_ref: Any, out_ref: Any, activation_ref: Any, **scratch: Any) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg < hopper.CONSUMERS)
        def _multiply() -> None:
            hopper.consume(tiles, a_ref, b_ref, hopper.store_to(out_ref), scratch, tuning.registers[0])

        @pl.when(wg == hopper.PRODUCER)
        def _fetch() -> None:
            hopper.produce(tiles, a_ref, b_ref, scratch, tuning.registers[1])

        @pl.when(wg == _ACTIVATION)
        def _activate() -> None:
            _activation(tuning, gate_up_ref, activation_ref, scratch, interpret)

    piece = (tuning.depth, tuning.rows, tuning.columns)
    queues = {name: plgpu.SMEM(piece, gate_up.dtype) for name in ("gates", "ups", "results")}
    return mosaic.launch(
        body,
        mosaic.outputs_of(reference, a, b, gate_up),
        grid=sms,
        warpgroups=_ACTIVATION + 1,
        scratch=tiles.scratch(a.dtype) | queues | {"loaded": plgpu.Barrier(num_arrivals=2, num_barriers=tuning.depth)},
        interpret=interpret,
        name="matmul_silu",
        approx_math=True,
    )(a, b, gate_up)


def _activation(tuning: Tuning, gate_up: Any, out: Any, scratch: dict[str, Any], interpret: bool) -> None:
    """What the fourth warpgroup does: its block's share of the pieces, ``depth`` of them in flight."""
    change = tuning.registers[2]
    plgpu.set_max_registers(change, action="decrease" if change < 128 else "increase")
    tokens, width = out.shape
    rows, columns, depth = tuning.rows, tuning.columns, tuning.depth
    across = width // columns
    pieces = tokens // rows * across
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    gates, ups, results, loaded = (scratch[name] for name in ("gates", "ups", "results", "loaded"))

    def place(i: Any) -> tuple[Any, Any]:
        index = i * blocks + block
        return lax.div(index, across) * rows, lax.rem(index, across) * columns

    def fetch(i: Any) -> None:
        row, column = place(i)
        slot = lax.rem(i, depth)
        source = gate_up.at[pl.ds(row, rows)]
        plgpu.copy_gmem_to_smem(source.at[:, pl.ds(column, columns)], gates.at[slot], loaded.at[slot])
        plgpu.copy_gmem_to_smem(source.at[:, pl.ds(width + column, columns)], ups.at[slot], loaded.at[slot])

    own = lax.div(pieces - block + blocks - 1, blocks)

    @pl.loop(0, lax.min(own, jnp.int32(depth)))
    def _begin(i: Any) -> None:
        fetch(i)

    layout = plgpu.Layout.WG_STRIDED((rows, columns), vec_size=8)

    @pl.loop(0, own)
    def _piece(i: Any) -> None:
        slot = lax.rem(i, depth)
        plgpu.barrier_wait(loaded.at[slot])
        gate, up = gates[slot], ups[slot]
        if not interpret:
            gate, up = plgpu.layout_cast(gate, layout), plgpu.layout_cast(up, layout)
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        # A reciprocal square root is one instruction, a division is many, and this warpgroup's instructions count.
        root = lax.rsqrt(1.0 + jnp.exp(-gate))
        result = (gate * root * root * up).astype(out.dtype)
        # The copy that last used this slot of the results has read it.
        plgpu.wait_smem_to_gmem(depth - 1, wait_read_only=True)
        results[slot] = result
        plgpu.commit_smem()
        row, column = place(i)
        plgpu.copy_smem_to_gmem(results.at[slot], out.at[pl.ds(row, rows), pl.ds(column, columns)])

        @pl.when(i + depth < own)
        def _next() -> None:
            fetch(i + depth)

    plgpu.wait_smem_to_gmem(0)
