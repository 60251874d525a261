"""RMSNorm (arXiv 1910.07467) in one pass over memory: what a layer begins with where the sum before it is elsewhere."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax

from pallas_kernels import add_rms_norm, mosaic
from pallas_kernels.add_rms_norm import Tuning
from pallas_kernels.support import Support, differentiable, first_reason, hardware_reason


def reference(x: jax.Array, weight: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """What the kernel computes, in plain JAX; see `rms_norm`."""
    return add_rms_norm.normalized(x, weight, x.dtype, eps)


def supports(x: Any, weight: Any, *, device: Any = None) -> Support:
    """Whether the kernel can run on a device with arrays (or types) like these."""
    limits = supports_shapes(x, weight)
    hardware = hardware_reason(device, ("9.", "10.")) if limits else None
    return first_reason(limits.reason, hardware)


def supports_shapes(x: Any, weight: Any) -> Support:
    """Whether the kernel can be compiled for arrays (or types) like these, on whatever machine."""
    return add_rms_norm.supports_shapes(x, x, weight)


def key(x: Any, weight: Any) -> tuple[int, ...]:
    """Rows and width: the shape by which measurements are kept."""
    del weight
    return math.prod(x.shape[:-1]), x.shape[-1]


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float = 1e-6, tuning: Tuning | None = None, interpret: bool = False
) -> jax.Array:
    """``x / sqrt(mean(x**2) + eps) * weight``, along the last axis, in float32. Differentiable in both arrays.

    Args:
      x: ``[..., width]``, bfloat16, float16 or float32; any number of rows. ``width`` is a multiple of 128.
      weight: ``[width]``.
      eps: added to the mean square.
      tuning: how rows are laid over the device; chosen by their number if left out.
      interpret: simulate the kernel on the CPU.

    Returns:
      The normalized rows, like ``x``.

    Raises:
      KernelError: if shapes or dtypes are not supported.
    """
    supports_shapes(x, weight).require("rms_norm")
    kernel = functools.partial(_run, eps=eps, tuning=tuning, interpret=interpret)
    return differentiable(kernel, functools.partial(reference, eps=eps))(x, weight)


def _run(x: jax.Array, weight: jax.Array, *, eps: float, tuning: Tuning | None, interpret: bool) -> jax.Array:
    out = mosaic.outputs_of(functools.partial(reference, eps=eps), x, weight)
    return add_rms_norm.normalize_rows((x,), weight, (out,), eps, tuning, interpret, "rms_norm")[0]
