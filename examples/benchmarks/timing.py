"""What the GPU benchmarks measure with: XLA's ways to run a function, turns, and what is in memory."""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-command-buffers": {"xla_gpu_enable_command_buffer": ""},
    "concurrent": {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT", "xla_gpu_graph_min_graph_size": 1},
}
"""Compiler options under which XLA may run small kernels faster, or several at once."""


def medians(
    funs: dict[str, Callable[..., Any]], arguments: dict[str, Sequence[Any]], rounds: int = 7, calls: int = 30
) -> dict[str, float]:
    """Median microseconds of a call, contenders in turns; the first turn is to warm up."""
    times: dict[str, list[float]] = {name: [] for name in funs}
    for turn in range(rounds + 1):
        for name, fun in funs.items():
            jax.block_until_ready(fun(*arguments[name]))
            start = time.perf_counter()
            result = None
            for _ in range(calls):
                result = fun(*arguments[name])
            jax.block_until_ready(result)
            if turn:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: round(statistics.median(taken), 1) for name, taken in times.items()}


def host_medians(
    funs: dict[str, Callable[..., Any]], arguments: dict[str, Sequence[Any]], rounds: int = 30, calls: int = 12
) -> dict[str, float]:
    """Median microseconds until a call returns, contenders in turns.

    Calls come in bursts, short enough that none waits for the device to take an earlier one.
    """
    times: dict[str, list[float]] = {name: [] for name in funs}
    for turn in range(rounds + 1):
        for name, fun in funs.items():
            jax.block_until_ready(fun(*arguments[name]))
            results = []
            start = time.perf_counter()
            for _ in range(calls):
                results.append(fun(*arguments[name]))
            taken = time.perf_counter() - start
            jax.block_until_ready(results)
            if turn:
                times[name].append(taken / calls * 1e6)
    return {name: round(statistics.median(taken), 1) for name, taken in times.items()}


def host_bytes() -> int:
    """Memory of this process that is resident, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def device_bytes() -> int:
    """Memory of the first device that anybody has taken, in bytes; 0 where there is no CUDA device.

    Asked of the driver, so that it counts every client of this process, graphs and modules too.
    """
    if jax.default_backend() != "gpu":
        return 0
    cuda = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    for error in (
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxPushCurrent_v2(context),
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        cuda.cuCtxPopCurrent_v2(ctypes.byref(context)),
        cuda.cuDevicePrimaryCtxRelease_v2(0),
    ):
        if error:
            raise RuntimeError(f"the CUDA driver does not say how much memory is free: error {error}")
    return total.value - free.value
