"""Measuring when each step of a plan runs: a dispatched plan as it runs, any other step by step.

A dispatched plan says itself when it begins and ends what (``dynaflow_jax.recording``). A program that XLA compiled as
one shows no steps any more, and timers inside it would change it. So every step is compiled by itself and timed on the
very values that it gets in a call; its start follows from the plan, as in ``dynaflow_jax.simulate``: a stream is in
order, and a step waits for what it reads. What steps gain from being compiled together, and what they cost each other
when they run at once, is not in that; ``jax.profiler`` shows it, with the names of operators on the device's kernels.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dynaflow_jax import compat, devices
from dynaflow_jax.batch.region import Region
from dynaflow_jax.details import StepDetails
from dynaflow_jax.devices import DeviceModel
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.lowering import xla
from dynaflow_jax.lowering.steps import Slot, Values, call_of, region_inputs, region_outputs
from dynaflow_jax.program import outputs_of
from dynaflow_jax.recording import record
from dynaflow_jax.schedule import Step
from dynaflow_jax.simulate import Path, Phase, bound_on, placed
from dynaflow_jax.switched import SwitchedDynaFlow
from dynaflow_jax.timeline import Timeline
from dynaflow_jax.transform import DynaFlow


def profile(flow: DynaFlow, *args: Any, calls: int = 10, **kwargs: Any) -> Timeline:
    """Measures when the steps of a scheduled function run.

    A plan that is dispatched is called ``calls`` times as it is, and the executor takes the time of every command, with
    events on CUDA and with the clock on the host twin: when it begins and when it ends, in the median, from the start
    of the run. So the timeline has the gaps and the overlap that there were, and beside the plan's steps what the
    executor does for them: ``input i`` and ``output i`` are copies, ``split`` and ``join`` cut the batch and put it
    together. What was compiled as one partition is one event, named ``a + b``; a loop has its iterations one by one. An
    exchange lasts until the last device's part has arrived, and so has the wait for that device in it. Of several
    devices it is the one whose run takes longest. Where a plan is dispatched inside ``shard_map`` only, what XLA runs
    outside is left out. On an H200 the events of a plan of four partitions cost no time that could be told.

    Steps of any other plan are measured each by itself, on the default device: compiled once, called ``calls`` times,
    the median less that of a call that does nothing. In a loop that is the first iteration's, taken as often as the
    loop runs. Inside ``shard_map`` every device runs the step, and it is over when the last one is.

    ``jax.profiler`` records ranges with the names of steps around what this function runs, but for dispatched CUDA
    graphs, which are launched as a whole: there, around the capture of each partition at the first call. Under Nsight
    Systems XLA marks the same capture with NVTX ranges, by the names of its modules, which are the operators'.

    Args:
      flow: the scheduled function, as ``dynaflow`` returns it.
      args: arrays, as for a call.
      calls: of how many calls to take the median.
      kwargs: likewise.

    Returns:
      The timeline, in microseconds, with ``measured`` true. Operations and bytes are estimates, except for bytes that
      the executor copies.

    Raises:
      DynaFlowError: if ``flow`` is not a function with one plan, or the arguments are no arrays.
    """
    if not isinstance(flow, DynaFlow):
        raise DynaFlowError(
            f"profile takes what dynaflow returned, not {flow!r:.60}: profile(flow, *args), without jax.jit around it."
        )
    if isinstance(flow, SwitchedDynaFlow):
        raise DynaFlowError(f"{flow!r} has several plans; profile the function with one strategy at a time.")
    if not isinstance(calls, int) or isinstance(calls, bool) or calls < 1:
        raise DynaFlowError(f"calls is a positive whole number, not {calls!r}.")
    resolved, call = flow._resolve(args, kwargs)
    for leaf, name in zip(call.leaves, call.names, strict=True):
        if compat.is_tracer(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise DynaFlowError(f"profile runs the function, so it takes arrays; {name} is {leaf!r:.60}.")
    if resolved.is_dispatched and (recorded := record(resolved, call.leaves, calls)) is not None:
        return recorded
    timer = StepTimer(calls)
    resolved.evaluate(timer.run, resolved.constants, call.leaves)
    plan, info = resolved.plan, resolved.info
    timing = _Measured(timer.times, devices.find(info.platform, info.device_kind))
    events, _ = placed(plan.steps, plan.details, timing)
    return Timeline(plan.strategy, info.device_kind, True, tuple(events), plan.streams)


class _Measured:
    """Times of steps that were measured."""

    def __init__(self, times: Mapping[Path, float], device: DeviceModel):
        self._times = times
        self._device = device

    def phases(self, path: Path, step: Step, what: StepDetails) -> list[Phase]:
        del step, what
        return [Phase(self._times.get(path, 0.0), (0.0, 0.0, 0.0, 0.0))]

    def bound(self, what: StepDetails) -> str:
        return bound_on(what, self._device)


class _Place:
    """Where steps are compiled: at the top level, or as below inside a ``shard_map``."""

    def compiled(
        self, fun: Callable[..., Sequence[Any]], takes: Sequence[Any], gives: Sequence[Any]
    ) -> Callable[..., list[Any]]:
        """A function of values of some types to values of others, compiled."""
        del takes, gives
        return jax.jit(lambda *values: list(fun(*values)))


class _EachDevice(_Place):
    """Inside a ``shard_map``, whose devices' values are held as one array each, with the devices along a new axis.

    Args:
      eqn: the ``shard_map``.
    """

    def __init__(self, eqn: Any):
        self._eqn = eqn
        # In the order of the mesh, so that a device's values are on that device.
        self._axes = tuple(axis for axis in eqn.params["mesh"].axis_names if axis in eqn.params["newly_manual_axes"])

    def compiled(
        self, fun: Callable[..., Sequence[Any]], takes: Sequence[Any], gives: Sequence[Any]
    ) -> Callable[..., list[Any]]:
        """See ``_Place``."""
        return self._mapped(
            lambda *values: [x[None] for x in fun(*(x[0] for x in values))],
            tuple(map(self._spec, takes)),
            list(map(self._spec, gives)),
        )

    def enter(self, gives: Sequence[Any]) -> Callable[..., list[Any]]:
        """From what the ``shard_map`` takes to what its body reads, of types ``gives``."""
        specs = list(map(self._spec, gives))
        return self._mapped(lambda *values: [x[None] for x in values], tuple(self._eqn.params["in_specs"]), specs)

    def leave(self, takes: Sequence[Any]) -> Callable[..., list[Any]]:
        """From what its body gives, of types ``takes``, to its results."""
        specs = tuple(map(self._spec, takes))
        return self._mapped(lambda *values: [x[0] for x in values], specs, list(self._eqn.params["out_specs"]))

    def _mapped(self, fun: Callable[..., list[Any]], in_specs: Any, out_specs: Any) -> Callable[..., list[Any]]:
        return jax.jit(compat.shard_map_like(self._eqn, fun, in_specs, out_specs))

    def _spec(self, aval: Any) -> PartitionSpec:
        """How the devices' values of a type are spread: one entry for all where its type says that they are equal."""
        if not self._eqn.params["check_vma"]:
            return PartitionSpec(self._axes)
        varying = compat.axes_varied_by(aval)
        return PartitionSpec(tuple(axis for axis in self._axes if axis in varying))


class StepTimer:
    """Runs steps one by one.

    Args:
      calls: how often each is timed.

    Attributes:
      times: of each step, in microseconds.
    """

    def __init__(self, calls: int):
        self.times: dict[Path, float] = {}
        self._calls = calls
        self._shards = 1

    def run(self, region: Region, steps: Sequence[Step], inputs: Values, shards: int = 1) -> Values:
        """Runs a plan's steps on arrays; see ``lowering.xla.run``."""
        self._shards = shards
        return self._region(region, steps, inputs, (), _Place())

    def _region(self, region: Region, steps: Sequence[Step], inputs: Values, around: Path, place: _Place) -> Values:
        env: dict[Slot, Any] = {}
        programs = [variant.graph.program for variant in region.variants]
        for m, (program, values) in enumerate(zip(programs, inputs, strict=True)):
            env.update(zip([(m, var) for var in program.invars], values, strict=True))
        idle = self._idle(place)
        for i, step in enumerate(steps):
            call = call_of(region, step, functools.partial(xla.run, shards=self._shards), self._shards)
            values, path = [env[slot] for slot in call.reads], (*around, i)
            if step.body is not None and region.graph[step.operators[0].key].program.eqns[-1].primitive.name != "scan":
                results = self._shard_map(region, step, values, path)
            else:
                takes, gives = ([var.aval for _, var in slots] for slots in (call.reads, call.writes))
                fun = place.compiled(call.compute, takes, gives)
                if step.body is None:
                    results, took = self._timed(str(step), fun, values)
                    self.times[path] = max(0.0, took - idle)
                else:
                    self._iteration(region, step, values, path, place)
                    results = fun(*values)
            env.update(zip(call.writes, results, strict=True))
        return [outputs_of(program, lambda var, m=m: env[m, var]) for m, program in enumerate(programs)]

    def _timed(self, name: str, fun: Callable[..., Any], values: Sequence[Any]) -> tuple[Any, float]:
        """The results of a function, and the median of its times."""
        results, times = jax.block_until_ready(fun(*values)), []  # compiles
        for _ in range(self._calls):
            with jax.profiler.TraceAnnotation(name):
                start = time.perf_counter()
                jax.block_until_ready(fun(*values))
                times.append(time.perf_counter() - start)
        return results, statistics.median(times) * 1e6

    def _idle(self, place: _Place) -> float:
        """How long a call takes that does nothing."""
        nothing = jax.typeof(jnp.float32(0))
        (value,) = place.compiled(lambda: [jnp.float32(0)], [], [nothing])()
        return self._timed("nothing", place.compiled(lambda x: [x], [nothing], [nothing]), [value])[1]

    def _iteration(self, region: Region, step: Step, values: Sequence[Any], path: Path, place: _Place) -> None:
        """Times the steps inside a loop, in its first iteration."""
        ops = [variant.graph[step.operators[0].key] for variant in region.variants]
        body = region.body(ops[0].index)
        eqns = [op.program.eqns[-1] for op in ops]
        length, reverse = eqns[0].params["length"], eqns[0].params["reverse"]
        if not length:
            return
        whole = sum(compat.scan_partition(eqns[0]))
        takes = [var.aval for op in ops for var in op.program.invars]
        gives = [var.aval for variant in body.variants for var in variant.graph.program.invars]

        def first(*values: Any) -> list[Any]:
            at = length - 1 if reverse else 0
            return [x if i < whole else x[at] for own in region_inputs(ops, values) for i, x in enumerate(own)]

        flat = iter(place.compiled(first, takes, gives)(*values))
        inputs = [[next(flat) for _ in variant.graph.program.invars] for variant in body.variants]
        self._region(body, step.body or (), inputs, path, place)

    def _shard_map(self, region: Region, step: Step, values: Sequence[Any], path: Path) -> list[Any]:
        """Runs the steps inside a ``shard_map``."""
        ops = [variant.graph[step.operators[0].key] for variant in region.variants]
        body = region.body(ops[0].index)
        each = _EachDevice(ops[0].program.eqns[-1])
        programs = [variant.graph.program for variant in body.variants]
        inputs = [
            each.enter([var.aval for var in program.invars])(*own)
            for program, own in zip(programs, region_inputs(ops, values), strict=True)
        ]
        outputs = self._region(body, step.body or (), inputs, path, each)
        results = [
            each.leave([atom.aval for atom in program.outvars])(*own)
            for program, own in zip(programs, outputs, strict=True)
        ]
        return region_outputs(ops, results)
