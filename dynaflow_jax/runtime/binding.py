"""Binding a plan's work to a device and to the addresses of one call: compiled, captured, and told to the executor."""

from __future__ import annotations

import abc
import contextlib
import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import extension, private
from dynaflow_jax.runtime import program as wire
from dynaflow_jax.runtime.work import ALIGNMENT, Partition, Value, Work

_DLPACK_KIND = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}
_DLPACK_DEVICE = {"cpu": 1, "cuda": 2}

# Captures carry numbers that their modules have compiled in, so two of one plan must not overlap.
_capturing = threading.RLock()


class Binder:
    """Binds one plan's work, for every device and set of addresses that it is called with.

    Attributes:
      work: what to bind.
      platform: ``"cpu"`` or ``"cuda"``.
      devices: the ordinals of the devices that may call.
      plan: the executor's number of the plan.

    Inputs that are not split (weights, mostly) are read in place, at their address; a call that brings others is
    bound again. An input whose address keeps changing is copied into the pool from then on.
    """

    def __init__(self, work: Work, platform: str, devices: Sequence[int], capacity: int = 4):
        self.work = work
        self.devices = devices
        self.platform = platform
        self.plan = extension.module.create_plan(self.bind, capacity)
        self._free = extension.module.free_plan
        self._moving = list(work.moving)
        self._seen: dict[int, list[Sequence[int]]] = {}  # addresses of earlier bindings, by device
        self._executables: dict[tuple[int, int], Any] = {}

    def close(self) -> None:
        """Frees the plan; runs under way finish first."""
        self._free(self.plan)

    def bind(self, device: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Adds a program for a device and the addresses of its inputs; the executor calls this when it has none."""
        del outputs  # written by copies
        with _capturing:
            seen = self._seen.setdefault(device, [])
            for i, address in enumerate(inputs):
                # Twice elsewhere is a habit, once may be a new set of weights.
                if len({old[i] for old in seen} | {address}) > 2:
                    self._moving[i] = True
            seen.append(tuple(inputs))
            bind = _HostBinding if self.platform == "cpu" else _CudaBinding
            bind(self, device, inputs).add()

    def executable(self, client: private.Client, index: int, device: int) -> Any:
        """The executable of a partition."""
        key = (index, device)
        if key not in self._executables:
            partition = self.work.partitions[index]
            with _naming(partition, "compiled"):
                executable = client.compile(partition.module)
            if partition.capture is not None:
                _check_capturable(compat.scheduled_text(executable), partition.name)
            self._executables[key] = executable
        return self._executables[key]

    def rehearse(self) -> None:
        """Compiles every partition, and captures it on memory of no meaning, to find out whether all can be.

        Compiling has to happen here: in a call, XLA holds a lock on the device that compiling for it wants too.
        """
        with _capturing, jax.ensure_compile_time_eval():  # a trace may be under way
            if self.platform == "cpu":
                client = private.client("cpu", 0, "")
                for index in range(len(self.work.partitions)):
                    self.executable(client, index, 0)
                return
            for device in self.devices:
                for number in _CudaBinding(self, device, None).capture():
                    extension.module.free_capture(number)


# What XLA may leave before a capture begins and after it ends: nothing that runs.
_IDLE = frozenset({"parameter", "constant", "bitcast", "get-tuple-element", "tuple"})
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\([^=]*?\)|[^\s(]+) ([\w\-]+)\(", re.MULTILINE)


def _check_capturable(text: str, name: str) -> None:
    """Raises if a compiled module does something that its capture would not see, or that cannot be captured.

    XLA copies what a loop starts from before it does anything else, so a loop's capture would miss that; and a loop or
    branch that asks the device for its condition waits for it, which a capture cannot.
    """
    for opcode in ("while", "conditional", "infeed", "outfeed", "send", "recv"):
        if f" {opcode}(" in text:
            raise DynaFlowError(f"{name} cannot be captured: it holds a {opcode}.")
    inside = False
    for line in text[text.index("\nENTRY ") :].splitlines()[1:]:
        if '"dynaflow_capture_' in line:
            inside = '"dynaflow_capture_begin"' in line
        elif not inside and (found := _INSTRUCTION.match(line)) and found[1] not in _IDLE:
            raise DynaFlowError(f"{name} cannot be captured: XLA moved a {found[1]} out of the capture.")


@contextlib.contextmanager
def _naming(partition: Partition, doing: str) -> Iterator[None]:
    """Adds the operator's name to what goes wrong."""
    try:
        yield
    except Exception as error:
        raise DynaFlowError(f"{partition.name} could not be {doing}: {error}") from error


class _Binding(abc.ABC):
    """One program under construction: addresses of all values, and the commands."""

    def __init__(self, binder: Binder, device: int, inputs: Sequence[int] | None):
        self.binder = binder
        self.work = binder.work
        self.device = device
        self.keep: list[Any] = []
        self.moving = [inputs is None or moving for moving in binder._moving]
        self.bases = list(inputs or [0] * len(self.work.inputs))
        self.address: dict[int, int] = {}
        for i, size in enumerate(self.work.inputs):
            if self.moving[i]:
                self.bases[i] = self.allocate(size)
        for i, value in enumerate(self.work.values):
            if value.source is not None:
                self.address[i] = self.bases[value.source[0]] + value.source[1]
            elif value.constant is not None:
                self.address[i] = self.place(value)

    @abc.abstractmethod
    def allocate(self, size: int) -> int:
        """Memory that lives as long as the program."""

    @abc.abstractmethod
    def place(self, value: Value) -> int:
        """Memory with a constant in it."""

    @abc.abstractmethod
    def add(self) -> None:
        """Completes the program and hands it to the executor."""

    def view(self, client: private.Client, value: Value, address: int) -> Any:
        """A value in memory as a buffer of a private client."""
        kind = 4 if value.dtype.name == "bfloat16" else _DLPACK_KIND[value.dtype.kind]
        bits = 8 * value.dtype.itemsize
        where = _DLPACK_DEVICE["cpu" if self.binder.platform == "cpu" else "cuda"]
        number = 0 if self.binder.platform == "cpu" else self.device
        capsule = extension.module.dlpack_capsule(address, value.shape, kind, bits, where, number)
        return client.view(capsule)

    def range(self, index: int) -> wire.Range:
        """The memory of a value."""
        return wire.Range(wire.MEMORY, 0, self.address[index], self.work.values[index].size)

    def encode(self, captures: Sequence[int]) -> bytes:
        """The program's bytes; the executor adds the events that its reads and writes call for."""
        work = self.work
        names = list(dict.fromkeys(partition.stream for partition in work.partitions)) or ["compute"]
        streams = []
        for name in names:
            own = [partition for partition in work.partitions if partition.stream == name]
            budgets = [p.sm_budget for p in own if p.sm_budget is not None]
            priority = max((p.priority for p in own), default=0)
            streams.append(wire.Stream(priority, min(budgets, default=0)))
        commands = []
        for i, size in enumerate(work.inputs):
            if self.moving[i]:
                source, target = wire.Range(wire.INPUT, i, 0, size), wire.Range(wire.MEMORY, 0, self.bases[i], size)
                commands.append(wire.Command(wire.COPY, 0, f"input {i}", 0, (source,), (target,)))
        waited = {i: event for event, i in enumerate(sorted({i for p in work.partitions for i in p.after}))}
        for i, partition in enumerate(work.partitions):
            stream = names.index(partition.stream)
            for other in partition.after:
                if work.partitions[other].stream != partition.stream:
                    commands.append(wire.Command(wire.WAIT, stream, partition.name, waited[other]))
            reads, writes = map(self.range, partition.reads), map(self.range, partition.writes)
            commands.append(wire.Command(wire.LAUNCH, stream, partition.name, i, tuple(reads), tuple(writes)))
            if i in waited:
                commands.append(wire.Command(wire.RECORD, stream, partition.name, waited[i]))
        written_on = {value: names.index(p.stream) for p in work.partitions for value in p.writes}
        for i, (_, parts) in enumerate(work.outputs):
            for value, offset in parts:
                target = wire.Range(wire.OUTPUT, i, offset, work.values[value].size)
                stream = written_on.get(value, 0)
                commands.append(wire.Command(wire.COPY, stream, f"output {i}", 0, (self.range(value),), (target,)))
        inputs = [wire.Input(size, None if self.moving[i] else self.bases[i]) for i, size in enumerate(work.inputs)]
        outputs = [size for size, _ in work.outputs]
        version = extension.module.PROGRAM_VERSION
        return wire.encode(version, work.name, streams, captures, inputs, outputs, commands)


class _HostBinding(_Binding):
    """The host twin: partitions are executables of a private CPU client, run by the executor's worker threads."""

    def allocate(self, size: int) -> int:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
        self.keep.append(memory)
        return -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT

    def place(self, value: Value) -> int:
        address = self.allocate(value.size)
        np.copyto(_array_at(value, address), value.constant)
        return address

    def add(self) -> None:
        work = self.work
        client = private.client("cpu", 0, "")
        last = work.last_readers()
        free: dict[int, list[int]] = {}  # addresses whose values nobody reads any more, by size
        functions: list[Callable[[], None]] = []
        for index, partition in enumerate(work.partitions):
            for i in partition.writes:
                size = work.values[i].size
                # What still runs on another stream may read it: the executor orders the two by their addresses.
                self.address[i] = free[size].pop() if free.get(size) else self.allocate(size)
            functions.append(self.function(client, index, partition))
            for i in {*partition.reads, *partition.writes}:
                if last[i] == index and work.values[i].source is None and work.values[i].constant is None:
                    free.setdefault(work.values[i].size, []).append(self.address[i])
        blob = self.encode(range(len(functions)))
        extension.module.add_host_program(
            self.binder.plan, self.device, blob, functions, order_overlaps=True, keep_alive=self.keep
        )

    def function(self, client: private.Client, index: int, partition: Partition) -> Callable[[], None]:
        """Runs a partition on its values' memory."""
        executable = self.binder.executable(client, index, 0)
        values = self.work.values
        reads = [(values[i], self.address[i]) for i in partition.reads]
        targets = [_array_at(values[i], self.address[i]) for i in partition.writes]

        def run() -> None:
            results = client.run(executable, [self.view(client, value, address) for value, address in reads])
            for target, result in zip(targets, results, strict=True):
                np.copyto(target, np.asarray(result))

        return run


class _CudaBinding(_Binding):
    """CUDA: partitions are graphs of XLA's own kernels, captured from private clients."""

    def allocate(self, size: int) -> int:
        return self.put(np.zeros(max(size, 1), np.uint8))

    def place(self, value: Value) -> int:
        return self.put(value.constant)

    def put(self, value: np.ndarray) -> int:
        """A copy in the device's memory; nothing may be compiled here, XLA may be running on this very thread."""
        memory = jax.device_put(value, compat.local_device(self.device))
        memory.block_until_ready()
        self.keep.append(memory)
        return memory.unsafe_buffer_pointer()

    def capture(self) -> list[int]:
        """Captures every partition; returns the numbers of the captures."""
        work = self.work
        last = work.last_readers()
        alive: dict[int, Any] = {}
        ids = []
        for index, partition in enumerate(work.partitions):
            client = private.client("cuda", self.device, partition.stream)
            executable = self.binder.executable(client, index, self.device)
            assert partition.capture is not None
            with _naming(partition, "captured"):
                inputs = [self.view(client, work.values[i], self.address[i]) for i in partition.reads]
                results = client.run(executable, inputs)
                for result in results:
                    result.block_until_ready()
                info = extension.module.capture_info(partition.capture)
            ids.append(partition.capture)
            self.keep.append(executable)  # its kernels and constants are the graph's
            for i, result, address in zip(partition.writes, results, info["outputs"], strict=False):
                if result.unsafe_buffer_pointer() != address:
                    raise DynaFlowError(f"{partition.name} could not be captured: XLA copies its results.")
                alive[i], self.address[i] = result, address
            # Dropped memory is taken again by what is captured later; the executor orders the two by address.
            for i in {*partition.reads, *partition.writes}:
                if last[i] == index:
                    alive.pop(i, None)
        self.keep += alive.values()
        return ids

    def add(self) -> None:
        ids = self.capture()
        try:
            blob = self.encode(ids)
            extension.module.add_cuda_program(
                self.binder.plan, [self.device], blob, order_overlaps=True, keep_alive=self.keep
            )
        finally:
            for number in ids:
                extension.module.free_capture(number)


def _array_at(value: Value, address: int) -> np.ndarray:
    """Host memory as an array."""
    data = (ctypes.c_uint8 * value.size).from_address(address)
    return np.ctypeslib.as_array(data).view(value.dtype).reshape(value.shape)
