"""The host twin: partitions are executables of a private CPU client, run by the executor's worker threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_jax.runtime import extension, private
from dynaflow_jax.runtime.binding import Binding
from dynaflow_jax.runtime.work import ALIGNMENT, Partition, Value


class HostBinding(Binding):
    """A program of worker threads.

    Args:
      args: see ``Binding``.
      executables: from a partition to its executable.
    """

    platform = "cpu"

    def __init__(self, *args: Any, executables: Callable[[Partition, int], Any]):
        super().__init__(*args)
        self._executables = executables
        self._client = private.client("cpu", 0, "")
        self._free: dict[int, list[int]] = {}  # addresses whose values nobody reads any more, by size
        self._functions: list[Callable[[], None]] = []

    def allocate(self, size: int) -> int:
        """See ``Binding``."""
        address, owner = allocate(size)
        self.keep.append(owner)
        return address

    def place(self, value: Any) -> int:
        """See ``Binding``."""
        address = self.allocate(value.nbytes)
        np.copyto(_array(value.shape, value.dtype, address), value)
        return address

    def make(self, partition: Partition) -> None:
        """See ``Binding``."""
        places = self.places(partition)
        for i in partition.writes:
            size = self.work.values[i].size
            if i in places:
                self.assign(i, places[i])
                continue
            # What still runs on another stream may read it: the executor orders the two by their addresses.
            self.assign(i, self._free[size].pop() if self._free.get(size) else self.allocate(size))
        self._functions.append(self._function(self._client, partition))

    def drop(self, value: int) -> None:
        """See ``Binding``."""
        if _is_computed(self.work.values[value]):
            self._free.setdefault(self.work.values[value].size, []).append(self.at(value))

    def add(self, plan: int, keep: Sequence[Any], timed: bool) -> None:
        """See ``Binding``."""
        blob = self.encode(range(len(self._functions)), timed)
        extension.module.add_host_program(
            plan,
            self.device,
            blob,
            self._functions,
            order_overlaps=True,
            timed=timed,
            processes=self.processes(),
            keep_alive=[keep, self.team],
        )

    def _function(self, client: private.Client, partition: Partition) -> Callable[[], None]:
        """Runs a partition on its values' memory."""
        executable = self._executables(partition, 0)
        values = self.work.values
        reads = [(values[i], self.at(i)) for i in partition.reads]
        targets = [_array(values[i].shape, values[i].dtype, self.at(i)) for i in partition.writes]

        def run() -> None:
            with jax.profiler.TraceAnnotation(partition.name):
                results = client.run(executable, [self.view(client, value, address) for value, address in reads])
                for target, result in zip(targets, results, strict=True):
                    np.copyto(target, np.asarray(result))

        return run


def allocate(size: int) -> tuple[int, Any]:
    """Aligned memory, zeroed: its address, and what owns it."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    return -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT, memory


def read_int32(address: int) -> int:
    """A number in memory."""
    return ctypes.c_int32.from_address(address).value


def _is_computed(value: Value) -> bool:
    return value.input is None and value.constant is None and value.rank is None and not value.arrives


def _array(shape: Sequence[int], dtype: np.dtype, address: int) -> np.ndarray:
    """Host memory as an array."""
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = (ctypes.c_uint8 * size).from_address(address)
    return np.ctypeslib.as_array(data).view(dtype).reshape(shape)
