"""CUDA: partitions are graphs of XLA's own kernels, captured from private clients."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import extension, private
from dynaflow_jax.runtime.binding import Binding, naming, view
from dynaflow_jax.runtime.work import Partition

_numbers = itertools.count(1)  # of captures


class CudaBinding(Binding):
    """A program of captured graphs.

    Args:
      args: see ``Binding``.
      executables: from a partition and a device to its executable.
    """

    platform = "cuda"

    def __init__(self, *args: Any, executables: Callable[[Partition, int], Any]):
        super().__init__(*args)
        self._executables = executables
        self._numbers: list[int] = []  # of the captures
        self._alive: dict[int, Any] = {}  # what owns the memory of values

    def allocate(self, size: int) -> int:
        """See ``Binding``."""
        address, owner = allocate(self.device, size)
        self.keep.append(owner)
        return address

    def place(self, value: Any) -> int:
        """See ``Binding``."""
        memory = _put(self.device, value)
        self.keep.append(memory)
        return memory.unsafe_buffer_pointer()

    def make(self, partition: Partition) -> None:
        """See ``Binding``."""
        self._alive.update(self._captured(partition))

    def owners(self) -> list[Any]:
        """See ``Binding``."""
        return [*self.keep, *self._alive.values()]

    def drop(self, value: int) -> None:
        """See ``Binding``."""
        self._alive.pop(value, None)

    def add(self, plan: int, keep: Sequence[Any], timed: bool) -> None:
        """See ``Binding``."""
        blob = self.encode(self._numbers, timed)
        extension.module.add_cuda_program(
            plan, self.devices(), blob, order_overlaps=True, timed=timed, keep_alive=[keep, self.team]
        )

    def forget(self) -> None:
        """Lets go of the captures, which a program that was added has its share of."""
        for number in self._numbers:
            with contextlib.suppress(extension.module.DispatchError):  # the last one may have failed to begin
                extension.module.free_capture(number)

    def _captured(self, partition: Partition) -> dict[int, Any]:
        """Captures one partition; returns its results, which own their memory unless that was given."""
        client = private.client("cuda", self.device, partition.where.stream)
        executable = self._executables(partition, self.device)
        number = next(_numbers)
        self._numbers.append(number)
        with naming(partition.name, "captured"), jax.profiler.TraceAnnotation(partition.name):
            places = self.places(partition)
            further = [i for i, over in zip(partition.placed, partition.over, strict=True) if over is None]
            operands = [*((i, self.at(i)) for i in partition.reads), *((i, places[i]) for i in further)]
            inputs = [self.view(client, self.work.values[i], address) for i, address in operands]
            extension.module.expect_capture(number)
            results = client.run(executable, inputs)[: len(partition.writes)]
            for result in results:
                result.block_until_ready()
            outputs = extension.module.capture_info(number)["outputs"]
        self.keep.append(executable)  # its kernels and constants are the graph's
        order = [*partition.placed, *(i for i in partition.writes if i not in places)]
        for i, result, address in zip(order, results, outputs, strict=True):
            if result.unsafe_buffer_pointer() != address or places.get(i, address) != address:
                raise DynaFlowError(
                    f"{partition.name} could not be captured: XLA copies its result {self.work.values[i]}."
                )
            self.assign(i, address)
        return dict(zip(order, results, strict=True))


def allocate(device: int, size: int) -> tuple[int, Any]:
    """Zeroed memory of a device: its address, and what owns it."""
    memory = _put(device, np.zeros(max(size, 1), np.uint8))
    return memory.unsafe_buffer_pointer(), memory


def _put(device: int, value: np.ndarray) -> Any:
    """A copy in the device's memory; nothing may be compiled here, XLA may be running on this very thread."""
    memory = jax.device_put(value, compat.local_device(device))
    memory.block_until_ready()
    return memory


def read_int32(device: int, address: int) -> int:
    """A number in the memory of a device."""
    return int(np.asarray(view(private.client("cuda", device, ""), "cuda", device, (), np.dtype(np.int32), address)))


# What XLA may leave before a capture begins and after it ends: nothing that runs.
_IDLE = frozenset({"parameter", "constant", "bitcast", "get-tuple-element", "tuple"})
_COMMENT = re.compile(r"/\*.*?\*/")  # XLA counts the elements of long tuples in comments
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\([^=]*?\)|[^\s(]+) ([\w\-]+)\(", re.MULTILINE)


def outside_of_capture(text: str) -> str | None:
    """The first instruction of a compiled module that runs before its capture begins or after it ends.

    Or the one that has swallowed the end: XLA fuses slices into the custom calls that they are given to.
    """
    lines, inside = text[text.index("\nENTRY ") :].splitlines()[1:], False
    if not any('"dynaflow_capture_end"' in line for line in lines):
        return next((line.strip() for line in lines if "dynamic_slice_fusion" in line), "the end of the capture")
    for line in lines:
        if '"dynaflow_capture_' in line:
            inside = '"dynaflow_capture_begin"' in line
        elif not inside and (found := _INSTRUCTION.match(_COMMENT.sub("", line))) and found[1] not in _IDLE:
            return line.strip()
    return None


def check_capturable(text: str, name: str) -> None:
    """Raises if a compiled module does something that its capture would not see, or that cannot be captured.

    XLA copies what a loop starts from before it does anything else, so a loop's capture would miss that; and a loop or
    branch that asks the device for its condition waits for it, which a capture cannot.
    """
    for opcode in ("while", "conditional", "infeed", "outfeed", "send", "recv"):
        if f" {opcode}(" in text:
            raise DynaFlowError(f"{name} cannot be captured: it holds a {opcode}.")
    if moved := outside_of_capture(text):
        raise DynaFlowError(f"{name} cannot be captured: XLA moved an instruction out of the capture: {moved}")
