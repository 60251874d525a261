"""Collectives over the axes of ``jax.shard_map``, each an operator of its own in a plan without any rule.

Thin: they are JAX's own under a ``mark``. Used alone they run as XLA's collectives, are differentiable and work across
hosts. In a dispatched plan they become exchanges on the stream that the strategy gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax

from dynaflow_jax.annotate import mark
from dynaflow_jax.errors import DynaFlowError

AxisName = str | tuple[str, ...]
"""A mesh axis, or several, outermost first."""

_REDUCTIONS = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax, "min": jax.lax.pmin}


def all_reduce(
    x: Any, axis_name: AxisName, *, op: Literal["sum", "mean", "max", "min"] = "sum", name: str = "all_reduce"
) -> Any:
    """Combines the devices' arrays element by element; every device gets the result.

    For gradients of replicated parameters under ``jax.shard_map(check_vma=False)``: by default ``jax.grad`` adds these
    up itself, and reducing them again would count them once for each device.

    Args:
      x: an array of any shape, or a pytree of arrays; numbers of any dtype. Complex numbers have no ``"max"`` and
        ``"min"``.
      axis_name: the mesh axis to reduce over, or several.
      op: how to combine. ``"mean"`` divides the sum by the number of devices; ``"max"`` and ``"min"`` have no
        derivative.
      name: the operator's name.

    Returns:
      Arrays of the shapes and dtypes of ``x``, but that booleans are counted, and a mean of integers is floating.

    Raises:
      DynaFlowError: if ``op`` is none of these.
      NameError: from JAX, if there is no such mesh axis here: call it inside ``jax.shard_map``.
    """
    if op not in _REDUCTIONS:
        raise DynaFlowError(f"{name}: op is one of {', '.join(map(repr, _REDUCTIONS))}, not {op!r}.")
    with mark(name, tags={"network"}):
        return _REDUCTIONS[op](x, axis_name)


def all_gather(x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = True, name: str = "all_gather") -> Any:
    """Puts the devices' arrays together; every device gets all of them, in the order of the mesh axis.

    Its derivative is a ``reduce_scatter``.

    Args:
      x: an array, or a pytree of arrays, of any dtype; random keys too.
      axis_name: the mesh axis to gather over, or several, of n devices together.
      axis: the dimension along which they are put together.
      tiled: whether they lie end to end along ``axis``, which gets n times as long; otherwise ``axis`` is a new
        dimension of size n.
      name: the operator's name.

    Returns:
      Arrays of the dtypes of ``x``.

    Raises:
      NameError: from JAX, if there is no such mesh axis here: call it inside ``jax.shard_map``.
    """
    with mark(name, tags={"network"}):
        return jax.lax.all_gather(x, axis_name, axis=axis, tiled=tiled)


def reduce_scatter(
    x: Any, axis_name: AxisName, *, axis: int = 0, tiled: bool = True, name: str = "reduce_scatter"
) -> Any:
    """Adds the devices' arrays up; every device gets one n-th of the sum, in the order of the mesh axis.

    Its derivative is an ``all_gather``.

    Args:
      x: an array, or a pytree of arrays; numbers of any dtype.
      axis_name: the mesh axis to reduce over, or several, of n devices together.
      axis: the dimension that is cut into n parts.
      tiled: whether ``axis`` stays, an n-th as long; otherwise it has size n and is taken away.
      name: the operator's name.

    Returns:
      Arrays of the dtypes of ``x``.

    Raises:
      ValueError: from JAX, if n does not divide the length of ``axis``.
      NameError: from JAX, if there is no such mesh axis here: call it inside ``jax.shard_map``.
    """
    with mark(name, tags={"network"}):
        return jax.lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=tiled)


def all_to_all(
    x: Any, axis_name: AxisName, *, split_axis: int, concat_axis: int, tiled: bool = True, name: str = "all_to_all"
) -> Any:
    """Cuts every device's array into n parts and sends the i-th to the i-th device, which puts together what it gets.

    Its derivative is an ``all_to_all`` the other way.

    Args:
      x: an array, or a pytree of arrays, of any dtype; random keys too.
      axis_name: the mesh axis to exchange over, or several, of n devices together.
      split_axis: the dimension that is cut.
      concat_axis: the dimension along which the parts that arrive are put together, in the order of the mesh axis.
      tiled: whether ``split_axis`` stays, an n-th as long, and ``concat_axis`` gets n times as long; otherwise
        ``split_axis`` has size n and is moved to ``concat_axis``.
      name: the operator's name.

    Returns:
      Arrays of the dtypes of ``x``.

    Raises:
      ValueError: from JAX, if n does not divide the length of ``split_axis``.
      NameError: from JAX, if there is no such mesh axis here: call it inside ``jax.shard_map``.
    """
    with mark(name, tags={"network"}):
        return jax.lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled)


def permute(x: Any, axis_name: AxisName, pairs: Sequence[tuple[int, int]], *, name: str = "permute") -> Any:
    """Sends arrays from device to device.

    Its derivative is the permutation the other way.

    Args:
      x: an array, or a pytree of arrays, of any dtype; random keys too.
      axis_name: the mesh axis whose devices take part, or several.
      pairs: sender and receiver by position; each at most once as either.
      name: the operator's name.

    Returns:
      Arrays of the shapes and dtypes of ``x``; zeros on devices that nobody sends to.

    Raises:
      ValueError: from JAX, if a device is named twice as sender or receiver.
      NameError: from JAX, if there is no such mesh axis here: call it inside ``jax.shard_map``.
    """
    with mark(name, tags={"network"}):
        return jax.lax.ppermute(x, axis_name, list(pairs))
