"""Mosaic GPU, Pallas' compiler for Hopper and later, as it differs between the supported versions of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dynaflow_jax import compat

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as error:  # a JAX without it: supports() says so
    plgpu: Any = None
    _MISSING: str | None = f"this JAX has no jax.experimental.pallas.mosaic_gpu ({error})"
else:
    _MISSING = None

# What the kernels here use; a version of JAX that renames one of them is told apart by supports().
_NAMES = (
    "kernel",
    "nd_loop",
    "planar_snake",
    "layout_cast",
    "Layout",
    "WGMMAAccumulatorRef",
    "SMEM",
    "Barrier",
    "set_max_registers",
)
HOPPER = ("9.",)


def missing_reason(*names: str) -> str | None:
    """Why this version of JAX cannot compile the kernels (that use further ``names``); ``None`` if it can."""
    if _MISSING is None and (absent := [name for name in (*_NAMES, *names) if not hasattr(plgpu, name)]):
        return f"jax.experimental.pallas.mosaic_gpu of JAX {jax.__version__} lacks {', '.join(absent)}"
    return _MISSING


def version_reason(*oldest: int) -> str | None:
    """Why a kernel that Mosaic GPU compiles only since some version of JAX cannot be used; ``None`` if it can."""
    if oldest <= compat.JAX_VERSION:
        return None
    return f"Mosaic GPU compiles it since JAX {'.'.join(map(str, oldest))}, and this is {jax.__version__}"


def num_sms(device: Any = None) -> int:
    """Streaming multiprocessors of a device (default: the one that programs traced here run on); 132 off the GPU.

    Lowering for a GPU is possible on a machine without one: the count is then that of a Hopper SXM board.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and abstract is not None and abstract.num_cores:
        return abstract.num_cores
    device = jax.devices()[0] if device is None else device
    return getattr(device, "core_count", None) or 132 if device.platform in ("gpu", "cuda") else 132


def simulation(interpret: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which kernels that are traced are simulated on the CPU, with their barriers and copies."""
    return compat.mosaic_interpreter().force_gpu_interpret_mode() if interpret else contextlib.nullcontext()


def launch(
    body: Callable[..., None],
    out: Any,
    *,
    grid: int,
    warpgroups: int = 1,
    scratch: Any = (),
    interpret: bool = False,
    name: str,
    **options: Any,
) -> Callable[..., Any]:
    """A kernel over a one-dimensional grid.

    Args:
      body: gets the references of inputs, outputs and scratch; the grid is the axis ``"block"``, and the
        warpgroups of a block are the axis ``"wg"``.
      out: a ``ShapeDtypeStruct``, or a tuple of them.
      grid: number of blocks.
      warpgroups: of 128 threads each, per block.
      scratch: a sequence or a mapping of scratch types.
      interpret: simulate it on the CPU.
      name: of the kernel, in profiles.
      **options: of ``plgpu.CompilerParams``.
    """
    threads = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    return plgpu.kernel(
        _named(body, name),
        out_type=out,
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **options),
        interpret=compat.mosaic_interpreter().InterpretGPUParams() if interpret else None,
        **threads,
    )


def _named(body: Callable[..., None], name: str) -> Callable[..., None]:
    def call(*refs: Any, **scratch: Any) -> None:
        body(*refs, **scratch)

    call.__name__ = name
    return call


def peer(axis_name: Hashable, index: Any) -> Any:
    """The coordinates in the mesh of the device at ``index`` along one axis, and where this one is along the others."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return tuple(jnp.asarray(index if name == axis_name else lax.axis_index(name), jnp.int32) for name in names)


def outputs_of(reference: Callable[..., Any], *args: Any) -> Any:
    """The types of a kernel's outputs: those of its reference, with the mesh axes over which they vary."""
    outs = jax.eval_shape(reference, *args)
    return jax.tree.map(
        lambda out: jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=out.manual_axis_type), outs
    )
