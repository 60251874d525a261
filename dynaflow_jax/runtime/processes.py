"""The processes of a job that run plans together: who they are, and what they tell each other beforehand.

``jax.distributed`` has a store of keys and values that all of its processes reach. Through it they say where their
memory is; from then on they only use that memory, and the store is not needed any more.

All processes are assumed to trace the same calls of dispatched functions in the same order, as JAX assumes of the
programs that they run: that is how they know which plan of one process belongs to which of another.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import extension, sharing
from dynaflow_jax.runtime.arrivals import Layout
from dynaflow_jax.runtime.binding import Shared, Team
from dynaflow_jax.runtime.work import ALIGNMENT

ALIVE_TIMEOUT_S = 600.0
"""How long a process that is alive is waited for: it may be compiling, or writing a checkpoint.

One that has failed or ended is not waited for.
"""

_NOTICE = 1024
"""Bytes in which the executor says that this process's part of a plan has failed."""

_NOTICES = 1 << 14
"""How many plans may have one at a time; they take memory once they are written to."""


@dataclasses.dataclass(frozen=True)
class Process:
    """Another process.

    Attributes:
      name: for messages.
      watch: a file that becomes readable when it has ended.
    """

    name: str
    watch: int


class Job:
    """The processes of one host that run this program together, as seen from one of them.

    Attributes:
      platform: ``"cpu"`` or ``"cuda"``.
      others: the other processes, by index.
      notices: for each process, by index, memory with its notices: what it says of its part of each plan.
    """

    def __init__(self, platform: str, others: Mapping[int, Process], notices: Mapping[int, sharing.Segment]):
        self.platform = platform
        self.others = others
        self.notices = notices
        self._numbers = collections.Counter[str]()
        self._free = collections.deque(range(_NOTICES))

    def number(self, kind: str) -> str:
        """The next name of a kind, by which all processes know the same plan."""
        self._numbers[kind] += 1
        return f"{kind}/{self._numbers[kind]}"

    def take_notice(self) -> int:
        """The offset of a notice of this process that no plan has."""
        if not self._free:
            raise DynaFlowError(f"more than {_NOTICES} plans of several processes are in use.")
        return _NOTICE * self._free.popleft()

    def give_back(self, notice: int, taken: Sequence[sharing.Block]) -> None:
        """Takes back what a plan has used, to use it again, unless the plan has failed.

        After a run that has not failed nobody writes to a device's memory any more: all that others were to send it has
        arrived, or the run would not be over.
        """
        if self.notices[jax.process_index()].word(notice):
            return
        for block in taken:
            sharing.blocks.give_back(block)
        self._free.append(notice // _NOTICE)

    def exchange(self, key: str, own: Any) -> dict[int, Any]:
        """What all processes say under a key, by index; waits for it.

        Raises:
          DynaFlowError: naming the process that says nothing.
        """
        return _exchange(f"{self.platform}/{key}", own, self.others)


def of_mesh(platform: str) -> Job | None:
    """The processes that the mesh which is in use where this is traced spans; ``None`` if it spans this one only.

    Args:
      platform: ``"cpu"`` or ``"cuda"``.

    Raises:
      DynaFlowError: if their devices cannot run a plan together, and why.
    """
    mesh = compat.mesh_sizes()
    if not mesh or jax.process_count() == 1:
        return None
    named = ", ".join(f"{name}={size}" for name, size in mesh.items())
    where = f"the mesh ({named}) is of a program of {jax.process_count()} processes, "
    # Which devices a mesh has is not known where a function inside ``shard_map`` is traced, only how many.
    if math.prod(mesh.values()) != jax.device_count():
        raise DynaFlowError(
            f"{where}and has not all of their {jax.device_count()} devices, so that it is not known which processes "
            "would have to run the plan together; XLA's collectives are used instead."
        )
    try:
        return job(platform)
    except DynaFlowError as error:
        raise DynaFlowError(f"{where}and {error}; XLA's collectives are used instead.") from error


_introducing = threading.Lock()


def job(platform: str) -> Job:
    """The job, if all of its processes can reach each other's memory; waits for them at the first call.

    Args:
      platform: ``"cpu"`` or ``"cuda"``.

    Raises:
      DynaFlowError: if they cannot, on all processes alike.
    """
    with _introducing:
        found = _introduced(platform)
    if isinstance(found, str):
        raise DynaFlowError(found)
    return found


@functools.cache
def _introduced(platform: str) -> Job | str:
    """The job, or why its processes cannot run plans together: found by trying, and agreed on."""
    devices = compat.local_ordinals() if platform == "cuda" else []
    own: dict[str, Any] = {"host": sharing.host()}
    notices: dict[int, sharing.Segment] = {}
    taken: list[sharing.Block] = []
    others: dict[int, Process] = {}
    problem = ""
    try:
        notices[jax.process_index()] = sharing.Segment(_NOTICE * _NOTICES)
        taken += [sharing.blocks.take(device, 1) for device in devices]
        own["segment"] = notices[jax.process_index()].where()
        own["blocks"] = [block.handle.hex() for block in taken]
    except Exception as error:  # the others wait to hear of it
        problem = f"process {jax.process_index()} has nothing to share: {error}"
    try:
        entries = _exchange(f"{platform}/introduction", own, {})
    except DynaFlowError as error:
        return str(error)
    try:
        for index, entry in entries.items():
            if index == jax.process_index() or problem:
                continue
            if entry["host"] != own["host"]:
                here, there = own["host"].split()[0], entry["host"].split()[0]
                raise DynaFlowError(
                    f"processes {jax.process_index()} and {index} are on different hosts ({here}, {there})"
                )
            if "blocks" not in entry:
                raise DynaFlowError(f"process {index} has nothing to share")
            notices[index] = sharing.Segment.open(entry["segment"])
            others[index] = Process(f"process {index}", os.pidfd_open(entry["segment"]["pid"]))
            for device in devices:
                for handle in entry["blocks"]:
                    sharing.opened(device, bytes.fromhex(handle))
    except Exception as error:
        problem = f"{error}"
    try:
        problems = _exchange(f"{platform}/reached", problem, others)
    except DynaFlowError as error:
        return str(error)
    for block in taken:
        sharing.blocks.give_back(block)
    return next(filter(None, (problems[index] for index in sorted(problems))), None) or Job(platform, others, notices)


def meet(
    job: Job, name: str, plan: int, rank_of: Mapping[int, int], layout: Layout, participants: int
) -> dict[int, Team]:
    """The teams of this process's devices in a plan, by ordinal, once all processes have come to it.

    Args:
      job: the processes.
      name: by which all know the plan.
      plan: its number in the executor of this process.
      rank_of: from the ordinal of each device of this process to its position in the mesh.
      layout: of the memory that devices share.
      participants: how many devices there are in the mesh.

    Raises:
      DynaFlowError: if a process does not come, or devices disagree on who is who.
    """
    size = -(-layout.size // ALIGNMENT) * ALIGNMENT
    whole = -(-(size + 4 * layout.num_flags) // ALIGNMENT) * ALIGNMENT
    on_host = job.platform == "cpu"
    segment = sharing.Segment(whole * len(rank_of)) if on_host else None
    notice = job.take_notice()
    places: dict[str, Any] = {}
    taken = []
    for i, (device, rank) in enumerate(rank_of.items()):
        if on_host:
            places[str(rank)] = whole * i
            continue
        taken.append(sharing.blocks.take(device, whole))
        places[str(rank)] = taken[-1].handle.hex()
    said = {"segment": segment.where() if segment else None, "notice": notice, "devices": places}
    entries = job.exchange(name, said)
    segments = {jax.process_index(): segment} if segment else {}
    segments |= {i: sharing.Segment.open(e["segment"]) for i, e in entries.items() if on_host and i in job.others}
    owners = sorted((int(rank), i, place) for i, entry in entries.items() for rank, place in entry["devices"].items())
    if [rank for rank, _, _ in owners] != list(range(participants)):
        raise DynaFlowError(f"devices say that they are {[rank for rank, _, _ in owners]} in a mesh of {participants}.")
    numbers = {index: number for number, index in enumerate(job.others)}
    devices_of = {index: sorted(map(int, entry["devices"])) for index, entry in entries.items()}
    keep = Keeper([*segments.values()])
    weakref.finalize(keep, job.give_back, notice, taken).atexit = False
    told = [
        (
            f"{process.name} (devices {devices_of[index]} of the mesh)",
            process.watch,
            job.notices[index].address + entries[index]["notice"],
        )
        for index, process in job.others.items()
    ]
    own_notice = job.notices[jax.process_index()].address + notice
    extension.module.set_peers(plan, own_notice, told, ALIVE_TIMEOUT_S, keep)
    own = {rank: device for device, rank in rank_of.items()}
    block_of = {block.device: block for block in taken}

    def address(device: int, rank: int, index: int, place: Any) -> int:
        if on_host:
            return segments[index].address + place
        return block_of[own[rank]].address if rank in own else sharing.opened(device, bytes.fromhex(place))

    teams = {}
    for device, me in rank_of.items():
        begins = [address(device, *owner) for owner in owners]
        teams[device] = Team(
            me,
            tuple(own.get(rank) for rank, _, _ in owners),
            tuple(numbers.get(index, -1) for _, index, _ in owners),
            tuple(Shared(begin, begin + size) for begin in begins),
            layout,
            keep,
        )
    return teams


class Keeper:
    """Keeps memory that processes share in a plan, for as long as it lives.

    Args:
      segments: of all processes.
    """

    def __init__(self, segments: Sequence[sharing.Segment]):
        self._segments = segments


def _exchange(key: str, own: Any, others: Mapping[int, Process]) -> dict[int, Any]:
    """See ``Job.exchange``; of processes that are not among ``others`` nothing tells whether they are alive."""
    me = jax.process_index()
    compat.tell_processes(f"dynaflow/{key}/{me}", json.dumps(own))
    found = {me: own}
    for index in range(jax.process_count()):
        if index == me:
            continue
        deadline = time.monotonic() + ALIVE_TIMEOUT_S
        while index not in found:
            seconds = min(1.0, deadline - time.monotonic())
            if seconds <= 0:
                raise DynaFlowError(
                    f"process {index} said nothing of {key} within {ALIVE_TIMEOUT_S:.0f} s: all processes have to run "
                    "the same programs in the same order"
                )
            ended = index in others and _has_ended(others[index])
            said = compat.told_by_process(f"dynaflow/{key}/{index}", seconds)
            if said is not None:
                found[index] = json.loads(said)
            elif ended:
                raise DynaFlowError(f"{others[index].name} has ended")
    return found


def _has_ended(process: Process) -> bool:
    poll = select.poll()
    poll.register(process.watch, select.POLLIN)
    return bool(poll.poll(0))
