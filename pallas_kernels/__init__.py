"""Kernels that a strategy puts in place of operators, where fusing beats overlapping.

One module for each, and in each the same names:

- ``reference(*arrays)``: what the kernel computes, in plain JAX. The tests' oracle, and what to use elsewhere.
- a function named like the module: the kernel. Its limits are checked when it is traced (``KernelError``). It takes
  ``interpret=True`` to be simulated on the CPU (where it does not reach into other devices' memory), and composes with
  ``jit`` and ``shard_map``, and with ``grad`` where it says so.
- ``supports(*arrays, device=None)``: whether the kernel can run with arrays, or ``ShapeDtypeStruct``s, like these on
  a device. A truth value whose ``reason`` says why not: shapes, dtypes, hardware, or the version of JAX.
- ``key(*arrays)``: the shape by which measurements are kept. ``measured.worthwhile(name, device_kind, key)`` tells
  whether the kernel measured faster than XLA there; what was not measured is not worthwhile.

A kernel enters a schedule as ``ctx.execute(operators, fn=kernel)``, or by itself: ``Kernels()`` finds the places in a
model that some of them can compute, for ``df.strategies.WithKernels`` and ``Auto``. Importing a module needs no GPU.
"""

from pallas_kernels.in_place import Kernels
from pallas_kernels.support import KernelError

__all__ = ["KernelError", "Kernels"]
