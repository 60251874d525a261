"""Binding a plan's work to devices and to the addresses of one call: compiled, captured, and told to the executor."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import arrivals, cuda, extension, host, private, processes
from dynaflow_jax.runtime.binding import Binding, Shared, Team, naming
from dynaflow_jax.runtime.work import Exchange, Partition, Work

# A capture's number is told to the extension just before its module runs, so only one may be under way.
_capturing = threading.RLock()

TIMEOUT_S = 60.0
"""How long devices wait for one another before a run fails."""

Call = tuple[int, Sequence[int], Sequence[int]]
"""A call of one device: its ordinal, and the addresses of the inputs and outputs."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """When a command of a program ran, in a run of one device.

    Attributes:
      operator: the operators that it belongs to.
      kind: ``"launch"``, ``"copy"``, ``"signal"``, ``"await"`` or ``"sum"``.
      stream: the name of its stream.
      to_peer: whether it copies to another device.
      bytes: what it reads and writes, for a launch or sum; what it copies, for a copy.
      begin_us: when it began, in microseconds from the start of the run.
      end_us: when it ended.
    """

    operator: str
    kind: str
    stream: str
    to_peer: bool
    bytes: int
    begin_us: float
    end_us: float


class Binder:
    """Binds one plan's work, for every device and set of addresses that it is called with.

    Attributes:
      work: what to bind.
      platform: ``"cpu"`` or ``"cuda"``.
      devices: the ordinals of the devices of this process that may call.
      job: the processes whose devices run the plan together; ``None`` if all devices are of this one.
      plan: the executor's number of the plan.
      timed: whether the executor takes the time of every command, which costs a little itself.

    Inputs are read and large outputs written in place, at their address; a call that brings others is bound again. What
    keeps changing its address is copied from then on: an input that is split at its second address, weights and outputs
    at their third.

    With ``DYNAFLOW_SERIAL=1`` in the environment, the same operations run one after the other: equal results then tell
    a rounding (another fusion, another matrix product) from a race.
    """

    def __init__(
        self,
        work: Work,
        platform: str,
        devices: Sequence[int],
        job: processes.Job | None = None,
        capacity: int = 4,
        timed: bool = False,
    ):
        self.work = work
        self.timed = timed
        self.devices = devices
        self.platform = platform
        self.job = job if work.mesh else None
        local = work.participants if self.job is None else len(devices)
        self.plan = extension.module.create_plan(self.bind, capacity, local, TIMEOUT_S, across=self.job is not None)
        self._free = extension.module.free_plan
        self._moving = [False] * len(work.inputs)
        self._moving_outputs = [False] * len(work.outputs)
        self._seen: dict[int, list[Call]] = {}  # earlier bindings, by device
        self._executables: dict[tuple[str, str, int], Any] = {}
        self._layout = arrivals.layout(work)
        self._serial = os.environ.get("DYNAFLOW_SERIAL", "0") not in ("", "0")
        self._teams: dict[int, Team] = {}  # by device
        self._name = ""  # by which other processes know the plan

    def another(self, *, timed: bool = False) -> Binder:
        """A plan of the same work, compiled once for both, for another place in a program that calls it."""
        made = Binder(self.work, self.platform, self.devices, self.job, timed=timed)
        made._executables, made._serial = self._executables, self._serial
        return made

    def enter(self) -> None:
        """Says that a program that is traced calls the plan; in all processes that run it, in the same order."""
        if self.job is not None and not self._name:
            self._name = self.job.number(_identity(self.work, self._layout))

    def close(self) -> None:
        """Frees the plan; runs under way finish first."""
        self._free(self.plan)

    def bind(self, calls: Sequence[Call]) -> None:
        """Adds programs for the devices of a run and the addresses of their inputs.

        The executor calls this when it has none, with the calls of all devices that run the plan together.
        """
        if self.work.mesh and not self._teams:
            with _explaining_memory(self.work.name):
                self._meet(calls)  # not while capturing: other processes may be met in another order
        with _capturing, _explaining_memory(self.work.name):
            moved = [self._note(call) for call in calls]
            if any(moved):
                extension.module.forget_programs(self.plan)  # their memory is better used
            bindings = {device: self._binding(device, inputs, outputs) for device, inputs, outputs in calls}
            with _forgetting(bindings.values()):
                others = {b.team.rank: b for b in bindings.values() if b.team is not None}
                # Operation by operation on all devices, since devices may read what others have computed.
                for index in range(len(self.work.operations)):
                    for binding in bindings.values():
                        binding.step(index, others)
                keep = [binding.owners() for binding in bindings.values()]
                for binding in bindings.values():
                    binding.add(self.plan, keep, self.timed)

    def prepare(self, device: int, inputs: Sequence[int]) -> None:
        """Adds a program ahead of the first call, which brings other rows, and so probably at other addresses.

        Where its outputs will be nobody knows yet, so they are copied there.
        """
        self._moving = list(self.work.moving)
        self.bind([(device, inputs, [])])

    def rehearse(self) -> None:
        """Compiles every partition, and captures it on memory of no meaning, to find out whether all can be.

        Compiling has to happen here: in a call, XLA holds a lock on the device that compiling for it wants too.
        """
        with _capturing, jax.ensure_compile_time_eval(), _explaining_memory(self.work.name):  # a trace may be under way
            for device in self.devices if self.platform == "cuda" else (0,):
                for operation in self.work.operations:
                    if isinstance(operation, Partition):
                        self._executable(operation, device)
            if self.platform == "cuda":
                binding = self._binding(self.devices[0], None, [])
                with _forgetting([binding]):
                    for index in range(len(self.work.operations)):
                        binding.step(index, {})

    def times(self) -> dict[int, list[Ran]]:
        """When the commands of the last run ran, by device, once it is over; only of a plan that is ``timed``."""
        module, streams = extension.module, [*self.work.streams, *self.work.copying]
        found = {}
        for device, _ in module.plan_stats(self.plan)["programs"]:
            found[device] = [
                Ran(
                    command["operator"],
                    command["kind"],
                    streams[command["stream"]],
                    command["kind"] == "copy" and command["device"] != 0,
                    command["bytes"],
                    command["begin_us"],
                    command["end_us"],
                )
                for command in module.run_times(self.plan, device)
            ]
        return found

    def _binding(self, device: int, inputs: Sequence[int] | None, outputs: Sequence[int]) -> Binding:
        made = host.HostBinding if self.platform == "cpu" else cuda.CudaBinding
        team = None if inputs is None else self._teams.get(device)
        known = outputs or [None] * len(self.work.outputs)
        fixed = [None if moving else address for address, moving in zip(known, self._moving_outputs, strict=True)]
        serial, executables = self._serial, self._executable
        return made(self.work, device, inputs, fixed, self._moving, team, serial, executables=executables)

    def _note(self, call: Call) -> bool:
        """Keeps the addresses of a call; says whether an input or output turns out to move."""
        device, inputs, outputs = call
        seen = self._seen.setdefault(device, [])
        before = [*self._moving, *self._moving_outputs]
        seen.append((device, tuple(inputs), tuple(outputs)))
        for i in range(len(inputs)):
            # For weights twice elsewhere is a habit, once may be a new set of them.
            if len({old[i] for _, old, _ in seen}) > (1 if self.work.moving[i] else 2):
                self._moving[i] = True
        for i in {output for output, _ in self.work.placed.values()} - set(self.work.donors):
            if len({old[i] for _, _, old in seen if old}) > 2:
                self._moving_outputs[i] = True
        return [*self._moving, *self._moving_outputs] != before

    def _meet(self, calls: Sequence[Call]) -> None:
        """Who is who in the mesh, as the last input of each device's call says; and the memory they share."""
        rank_of: dict[int, int] = {}
        for device, inputs, _ in calls:
            rank_of[device] = (
                host.read_int32(inputs[-1]) if self.platform == "cpu" else cuda.read_int32(device, inputs[-1])
            )
        if self.job is not None:
            self._teams = processes.meet(self.job, self._name, self.plan, rank_of, self._layout, self.work.participants)
            return
        devices = tuple(sorted(rank_of, key=rank_of.__getitem__))
        if sorted(rank_of.values()) != list(range(self.work.participants)):
            raise DynaFlowError(f"devices {[*devices]} say that they are {sorted(rank_of.values())} in the mesh.")
        shared, keep = zip(*map(self._shared, devices), strict=True)
        alone = (-1,) * len(devices)
        self._teams = {
            device: Team(rank, devices, alone, shared, self._layout, keep) for rank, device in enumerate(devices)
        }

    def _shared(self, device: int) -> tuple[Shared, Any]:
        def allocate(size: int) -> tuple[int, Any]:
            return host.allocate(size) if self.platform == "cpu" else cuda.allocate(device, size)

        (memory, owner), (flags, flags_owner) = allocate(self._layout.size), allocate(4 * self._layout.num_flags)
        return Shared(memory, flags), (owner, flags_owner)

    def _executable(self, partition: Partition, device: int) -> Any:
        """The executable of a partition, one for all whose modules are equal; compiled once for all devices."""
        stream = partition.where.stream if self.platform == "cuda" else ""
        key = (partition.key, stream, device)
        if key not in self._executables:
            client = private.client(self.platform, device, stream)
            same = next((found for (known, *_), found in self._executables.items() if known == partition.key), None)
            with naming(partition.name, "compiled"):
                self._executables[key] = self._compile(partition, client) if same is None else client.load(same)
        return self._executables[key]

    def _compile(self, partition: Partition, client: private.Client) -> Any:
        """Compiles the first form of a partition that a capture can hold."""
        executable = client.compile(partition.module)
        if self.platform != "cuda":
            return executable
        text = compat.scheduled_text(executable)
        for other in partition.others:
            if not cuda.outside_of_capture(text):
                break
            executable = client.compile(other())
            text = compat.scheduled_text(executable)
        cuda.check_capturable(text, partition.name)
        return executable


def _identity(work: Work, layout: arrivals.Layout) -> str:
    """What plans have in common that can run together: what each process expects of the others."""
    values = [(operation.name, len(operation.reads), len(operation.writes)) for operation in work.operations]
    exchanges = [
        (
            op.axes,
            op.pattern.name,
            op.pairs,
            op.rows,
            [(work.values[i].shape, str(work.values[i].dtype)) for i in op.writes],
        )
        for op in work.operations
        if isinstance(op, Exchange)
    ]
    said = repr((work.name, dict(work.mesh), values, exchanges, layout))
    return f"{work.name}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _forgetting(bindings: Iterable[Binding]) -> Iterator[None]:
    """Lets go of what bindings hold only until their programs are added."""
    try:
        yield
    finally:
        for binding in bindings:
            binding.forget()


@contextlib.contextmanager
def _explaining_memory(name: str) -> Iterator[None]:
    """Says of an allocation that failed where the memory would have come from, and what to do.

    It is an error in a call, not a warning: XLA has compiled the program without the computation that the custom call
    stands for. Keeping that as well, to branch to, would cost its memory in every call, and a wait for the condition.
    """
    try:
        yield
    except Exception as error:
        if not compat.is_out_of_memory(error):
            raise
        raise DynaFlowError(
            f"There is no memory left to dispatch {name}: {error}. A dispatched plan keeps its values in memory of its "
            "own beside JAX's, a pool for each stream. Let JAX take less (XLA_PYTHON_CLIENT_MEM_FRACTION), lower the "
            "rows of the micro-batches or the number of streams, or pass backend='xla'; flow.prepare(...) ahead of "
            "the first call falls back to XLA by itself."
        ) from error
