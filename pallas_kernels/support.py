"""What every kernel says about its limits, and how it refuses what lies outside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax.errors import DynaFlowError


class KernelError(DynaFlowError):
    """A kernel was called with what it does not support."""


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a kernel can run, as a truth value, and in ``reason`` why not."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def require(self, kernel: str) -> None:
        """Raises ``KernelError`` with the reason, if there is one."""
        if self.reason:
            raise KernelError(f"{kernel}: {self.reason}. Its supports() tells beforehand; reference() has no limits.")


def first_reason(*reasons: str | None) -> Support:
    """The first of several objections, if any."""
    return Support(next((reason for reason in reasons if reason), ""))


def hardware_reason(device: Any, capabilities: tuple[str, ...]) -> str | None:
    """Why a device cannot run a kernel that was compiled for some compute capabilities; ``None`` if it can.

    Args:
      device: a ``jax.Device``; ``None`` for the default one.
      capabilities: prefixes of the compute capabilities that can, such as ``("9.",)`` for Hopper.
    """
    device = jax.devices()[0] if device is None else device
    if device.platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, and {device} is not one (interpret mode runs on the CPU)"
    found = str(getattr(device, "compute_capability", "unknown"))
    if not found.startswith(capabilities):
        wanted = " or ".join(f"{prefix}x" if prefix.endswith(".") else prefix for prefix in capabilities)
        return f"it needs compute capability {wanted}, and {device.device_kind} has {found}"
    return None


def alone_reason(devices: int) -> str | None:
    """Why a kernel that reaches into the memory of other devices makes no sense; ``None`` if there are others."""
    return None if devices > 1 else "there is no other device along the axis: use the kernel without communication"


def peers_reason(device: Any, capabilities: tuple[str, ...], devices: int) -> str | None:
    """As `hardware_reason`, for a kernel that reaches into the memory of other devices: all of one process."""
    if (reason := hardware_reason(device, capabilities)) is not None:
        return reason
    local, every = jax.local_device_count(), jax.device_count()
    if devices == local == every:
        return None
    return (
        f"a mesh of all devices is needed, all of one process: {devices} are asked for, this process has {local}, and "
        f"there are {every}"
    )


def dtype_reason(name: str, value: Any, dtypes: tuple[Any, ...]) -> str | None:
    """Why an array's dtype is not among those supported; ``None`` if it is."""
    if any(value.dtype == dtype for dtype in dtypes):
        return None
    return f"{name} is {value.dtype}, and only {', '.join(jnp.dtype(dtype).name for dtype in dtypes)} are supported"


def differentiable(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` whose derivative is the one of ``reference``, a function of the same arrays and results.

    XLA compiles the backward pass from the reference. What the kernel saves by fusing the forward pass does not
    depend on it, and XLA's own kernels are as good there.
    """

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return kernel(*args)

    def forward(*args: Any) -> Any:
        return kernel(*args), args

    def backward(args: Any, cotangents: Any) -> Any:
        return jax.vjp(reference, *args)[1](cotangents)

    call.defvjp(forward, backward)
    return call


def mapped_as(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, which ``jax.vmap`` maps as it maps ``reference``, a function of the same arrays and results."""
    call = jax.custom_batching.custom_vmap(kernel)

    @call.def_vmap
    def mapped(size: int, is_mapped: Sequence[bool], *given: Any) -> Any:
        # All of them: JAX does not map every function over some (``ragged_dot``, say).
        args = [x if each else jnp.broadcast_to(x, (size, *x.shape)) for x, each in zip(given, is_mapped, strict=True)]
        results = jax.vmap(reference)(*args)
        return results, jax.tree.map(lambda _: True, results)

    return call
