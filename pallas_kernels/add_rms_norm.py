"""Add partial sums and the residual, and normalize, in one pass over memory.

TokenWeave (arXiv 2505.11329, section 4) fuses the all-reduce with the residual addition and the RMSNorm that follow
it in every transformer layer. This is the part behind the exchange: where copy engines moved the peers' partial sums
here, one kernel adds them, adds the residual and normalizes, and reads and writes each row once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import plgpu
from pallas_kernels.support import Support, dtype_reason, first_reason, hardware_reason

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MAX_WIDTH = 16384  # a row is held in the registers of a warpgroup


def reference(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *partials: jax.Array, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """What the kernel computes, in plain JAX; see `add_rms_norm`."""
    total = sum((part.astype(jnp.float32) for part in (*partials, residual)), x.astype(jnp.float32))
    total = total.astype(residual.dtype)
    return normalized(total, weight, x.dtype, eps), total


def normalized(total: jax.Array, weight: jax.Array, dtype: Any, eps: float) -> jax.Array:
    """The RMSNorm of rows, in plain JAX."""
    h = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + eps)
    return (h * scale * weight.astype(jnp.float32)).astype(dtype)


def supports(x: Any, residual: Any, weight: Any, *partials: Any, device: Any = None) -> Support:
    """Whether the kernel can run on a device with arrays (or types) like these."""
    limits = supports_shapes(x, residual, weight, *partials)
    hardware = hardware_reason(device, ("9.", "10.")) if limits else None
    return first_reason(limits.reason, hardware)


def key(x: Any, residual: Any, weight: Any, *partials: Any) -> tuple[int, ...]:
    """Rows, width, number of partial sums: the shape by which measurements are kept."""
    return math.prod(x.shape[:-1]), x.shape[-1], len(partials)


def supports_shapes(x: Any, residual: Any, weight: Any, *partials: Any) -> Support:
    """Whether the kernel can be compiled for arrays (or types) like these, on whatever machine."""
    width = x.shape[-1] if x.shape else 0
    reasons = [mosaic.missing_reason()]
    for name, value in (("residual", residual), *((f"partials[{i}]", part) for i, part in enumerate(partials))):
        if value.shape != x.shape:
            reasons.append(f"{name} has shape {tuple(value.shape)}, and x has {tuple(x.shape)}")
    if weight.shape != (width,):
        reasons.append(f"weight has shape {tuple(weight.shape)}, and rows have {width} elements")
    if not width or width % 128 or width > _MAX_WIDTH:
        reasons.append(f"rows must have a multiple of 128 elements, at most {_MAX_WIDTH}, not {width}")
    if not math.prod(x.shape):
        reasons.append(f"x of shape {tuple(x.shape)} has no rows")
    values = (x, residual, weight, *partials)
    names = ("x", "residual", "weight", *(f"partials[{i}]" for i in range(len(partials))))
    reasons += [dtype_reason(name, value, _DTYPES) for name, value in zip(names, values, strict=True)]
    return first_reason(*reasons)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How rows are laid over the device.

    Attributes:
      rows: that a block, one warpgroup, normalizes one after the other.
      keep_weight: whether the weight stays in registers from row to row; else it is read again (from the L1 cache),
        and more blocks are resident.
    """

    rows: int = 1
    keep_weight: bool = False

    @classmethod
    def of(cls, rows: int, width: int, sms: int) -> Tuning:
        """The layout for a number of rows: several to a block only where that still gives enough blocks."""
        each = max(1, min(4, rows // (16 * sms)))
        return cls(each, each > 1 and width <= 4096)


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *partials: jax.Array,
    eps: float = 1e-6,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """``h = x + sum(partials) + residual``, and its RMSNorm.

    Sums are taken in float32 and rounded once, to the dtype of ``residual``; the norm is of what that gives.
    Differentiable in all arrays.

    Args:
      x: ``[..., width]``, bfloat16, float16 or float32; any number of rows. ``width`` is a multiple of 128.
      residual: like ``x``; may have another dtype.
      weight: ``[width]``.
      *partials: like ``x``: the partial sums of other devices, say.
      eps: added to the mean square.
      tuning: how rows are laid over the device; chosen by their number if left out.
      interpret: simulate the kernel on the CPU.

    Returns:
      The normalized rows, of ``x``'s dtype, and ``h``, of ``residual``'s.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    supports_shapes(x, residual, weight, *partials).require("add_rms_norm")
    dtypes = [value.dtype for value in (x, residual, *partials)]

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return _run(*args, eps=eps, tuning=tuning, interpret=interpret)

    def forward(*args: Any) -> Any:
        normed, total = call(*args)
        return (normed, total), (total, args[2])

    def backward(saved: Any, cotangents: Any) -> Any:
        # Of the rows only ``total`` is kept; XLA fuses this as well as a kernel could.
        normed = functools.partial(normalized, dtype=dtypes[0], eps=eps)
        d_total, d_weight = jax.vjp(normed, *saved)[1](cotangents[0])
        d_sum = d_total.astype(jnp.float32) + cotangents[1].astype(jnp.float32)
        d_x, d_residual, *d_partials = (d_sum.astype(dtype) for dtype in dtypes)
        return d_x, d_residual, d_weight, *d_partials

    call.defvjp(forward, backward)
    return call(x, residual, weight, *partials)


def _run(
    x: jax.Array, residual: jax.Array, weight: jax.Array, *partials: jax.Array, eps: float, tuning: Any, interpret: bool
) -> Any:
    out = mosaic.outputs_of(functools.partial(reference, eps=eps), x, residual, weight, *partials)
    return normalize_rows((x, *partials, residual), weight, out, eps, tuning, interpret, "add_rms_norm")


def normalize_rows(
    values: Sequence[jax.Array],
    weight: jax.Array,
    out: Sequence[Any],
    eps: float,
    tuning: Tuning | None,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    """The RMSNorm of a sum of arrays; and, if a second one is wanted, the sum.

    Args:
      values: ``[..., width]``, of one shape, added in float32.
      weight: ``[width]``.
      out: types of the results, one or two; of two, the sum is rounded to the second one's before it is normalized.
      eps: added to the mean square.
      tuning: how rows are laid over the device; chosen by their number if ``None``.
      interpret: simulate the kernel on the CPU.
      name: of the kernel, in profiles.
    """
    shape = values[0].shape
    width = shape[-1]
    rows = math.prod(shape[:-1])
    if tuning is None:
        tuning = Tuning.of(rows, width, mosaic.num_sms())
    vector = next(n for n in (8, 4, 2, 1) if width % (128 * n) == 0)

    def body(*refs: Any) -> None:
        value_refs, weight_ref, (normed_ref, *total_refs) = refs[: len(values)], refs[len(values)], refs[-len(out) :]

        def load(ref: Any) -> jax.Array:
            value = ref[...]
            return value if interpret else plgpu.layout_cast(value, plgpu.Layout.WG_STRIDED((width,), vector))

        kept = load(weight_ref) if tuning.keep_weight else None

        @plgpu.nd_loop((rows,), collective_axes="block")
        def _normalize(info: Any) -> None:
            (row,) = info.index
            loaded = [load(ref.at[row]).astype(jnp.float32) for ref in value_refs]
            h = functools.reduce(lambda a, b: a + b, loaded)
            for total_ref in total_refs:
                total_ref[row] = total = h.astype(total_ref.dtype)
                h = total.astype(jnp.float32)
            # One warpgroup to a block, because the scratch memory of a reduction belongs to the block: in JAX up to
            # 0.12 two warpgroups that reduce at the same time overwrite each other's sums.
            scale = lax.rsqrt(jnp.sum(h * h) / width + eps)
            weight = load(weight_ref) if kept is None else kept
            normed_ref[row] = (h * scale * weight.astype(jnp.float32)).astype(normed_ref.dtype)

    kernel = mosaic.launch(
        body,
        tuple(jax.tree.map(lambda type: type.update(shape=(rows, width)), tuple(out))),
        grid=-(-rows // tuning.rows),
        interpret=interpret,
        name=name,
        approx_math=True,
        unsafe_no_auto_barriers=True,  # no memory is both read and written, but by the reduction, which has its own
    )
    results = kernel(*(value.reshape(rows, width) for value in values), weight)
    return tuple(result.reshape(shape) for result in results)
