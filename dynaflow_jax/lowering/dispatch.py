"""Lowering a plan to one custom call, whose handler launches compiled partitions on streams (see ``xla_ffi``)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.batch.outputs import Join
from dynaflow_jax.batch.outputs import join as join_outputs
from dynaflow_jax.batch.region import Region
from dynaflow_jax.batch.split import offsets, take
from dynaflow_jax.batch.state import Rows
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.lowering import xla
from dynaflow_jax.lowering.steps import Slot, Values, call_of
from dynaflow_jax.runtime.binding import Binder
from dynaflow_jax.runtime.work import ALIGNMENT, Partition, Value, Work
from dynaflow_jax.schedule import Step

_numbers = itertools.count(1)  # of captures


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a dispatched function.

    Attributes:
      avals: their types.
      axes: the batch axis of each, or ``None``.
      shards: over how many devices the batch is sharded.
      weights: from a micro-batch's inputs to its weight in means, or ``None``.
    """

    avals: Sequence[Any]
    axes: Sequence[int | None]
    shards: int
    weights: Callable[[Sequence[Any]], Any] | None


class Builder:
    """Puts a plan's work together: compiled modules, and the values that go between them.

    Args:
      name: the function's name.
      platform: ``"cpu"`` or ``"cuda"``.
      avals: types of the inputs.
    """

    def __init__(self, name: str, platform: str, avals: Sequence[Any]):
        self.name = name
        self.platform = platform
        self.avals: list[Any] = []  # of values, as programs see them
        self.values: list[Value] = []
        self.partitions: list[Partition] = []
        self.outputs: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.inputs = [self.value(aval, source=(i, 0)) for i, aval in enumerate(avals)]

    def value(self, aval: Any, source: tuple[int, int] | None = None, constant: Any = None) -> int:
        """A new value of a type."""
        shape, dtype = _physical(aval)
        self.avals.append(aval)
        self.values.append(Value(shape, dtype, source, constant))
        return len(self.values) - 1

    def constant(self, value: Any) -> int:
        """A value that is known."""
        value = np.asarray(value)
        return self.value(jax.ShapeDtypeStruct(value.shape, value.dtype), constant=value)

    def atom(self, atom: Any, m: int, env: dict[Slot, int]) -> int:
        """The value of an output of a micro-batch's program."""
        return self.constant(np.asarray(atom.val, atom.aval.dtype)) if compat.is_literal(atom) else env[m, atom]

    def partition(
        self, name: str, fun: Callable[..., Sequence[Any]], reads: Sequence[int], writes: Sequence[int], **where: Any
    ) -> int:
        """A new partition that computes ``fun`` from values to values; returns its index."""
        number = None if self.platform == "cpu" else next(_numbers)
        avals = [self.avals[i] for i in reads]

        def physical(*args: Any) -> list[Any]:
            return [_to_bits(x) for x in fun(*map(_from_bits, args, avals))]

        body = physical if number is None else _captured(physical, number)
        shapes = [jax.ShapeDtypeStruct(self.values[i].shape, self.values[i].dtype) for i in reads]
        try:
            # Arguments that a partition does not use stay arguments, so that its signature is what it reads.
            module = compat.module_bytecode(jax.jit(body, keep_unused=True).lower(*shapes))
        except Exception as error:
            raise DynaFlowError(f"{name} cannot be compiled on its own: {error}") from error
        if compat.has_host_callback(module):
            raise DynaFlowError(f"{name} calls back to the host.")
        self.partitions.append(
            Partition(name=name, reads=tuple(reads), writes=tuple(writes), module=module, capture=number, **where)
        )
        return len(self.partitions) - 1

    def output(self, parts: Sequence[int]) -> None:
        """The next output: values end to end."""
        spans = list(itertools.accumulate((self.values[i].size for i in parts), initial=0))
        self.outputs.append((spans[-1], tuple(zip(parts, spans[:-1], strict=True))))

    def work(self, moving: Sequence[bool]) -> Work:
        """What was put together."""
        sizes = tuple(self.values[i].size for i in self.inputs)
        if not all(value.size for value in self.values):
            raise DynaFlowError("a value without elements has no address.")
        return Work(self.name, tuple(self.values), tuple(self.partitions), sizes, tuple(moving), tuple(self.outputs))


def build(
    name: str,
    platform: str,
    region: Region,
    steps: Sequence[Step],
    inputs: Inputs,
    joins: Sequence[Join],
    outputs: Sequence[Any],
) -> Work:
    """Everything that a plan runs, as modules of their own.

    Args:
      name: the function's name.
      platform: ``"cpu"`` or ``"cuda"``.
      region: the operators of every micro-batch.
      steps: the plan's.
      inputs: the function's.
      joins: how its outputs are made of the micro-batches'.
      outputs: types of its outputs.

    Raises:
      DynaFlowError: naming the operator that cannot be compiled on its own: it communicates between devices, say.
    """
    builder = Builder(name, platform, inputs.avals)
    rows = _split(builder, region.sizes, inputs)
    env: dict[Slot, int] = {}
    for m, variant in enumerate(region.variants):
        values = [] if variant.index is None else [builder.constant(np.uint32(m))]
        values += rows[m]
        env.update(zip([(m, var) for var in variant.graph.program.invars], values, strict=True))
    _add_steps(builder, region, steps, env, inputs.shards)
    parts = [
        [builder.atom(atom, m, env) for atom in variant.graph.program.outvars]
        for m, variant in enumerate(region.variants)
    ]
    _join(builder, region.sizes, inputs, joins, outputs, parts, rows)
    return builder.work([axis is not None for axis in inputs.axes])


def _split(builder: Builder, sizes: Sequence[int], inputs: Inputs) -> list[list[int]]:
    """For each micro-batch, the values of the inputs: its rows of those that have a batch axis."""
    rows = [list(builder.inputs) for _ in sizes]
    if len(sizes) == 1:
        return rows
    spans = list(zip(offsets(sizes), sizes, strict=True))
    cut: list[int] = []  # inputs whose parts do not lie end to end in memory, or not where XLA wants them
    for i, axis in enumerate(inputs.axes):
        if axis is None:
            continue
        value, aval = builder.values[builder.inputs[i]], inputs.avals[i]
        row = value.size // max(value.shape[0], 1) if value.shape else 0
        in_place = axis == 0 and inputs.shards == 1 and not any(row * offset % ALIGNMENT for offset, _ in spans)
        for m, (offset, size) in enumerate(spans):
            source = (i, row * offset) if in_place else None
            rows[m][i] = builder.value(compat.resized(aval, axis, size), source)
        if not in_place:
            cut.append(i)
    if cut:

        def split(*values: Any) -> list[Any]:
            axes = [Rows(inputs.axes[i] or 0) for i in cut]
            return [
                take(value, axis, sum(sizes), offset, size, inputs.shards)
                for offset, size in spans
                for value, axis in zip(values, axes, strict=True)
            ]

        reads = [builder.inputs[i] for i in cut]
        builder.partition("split", split, reads, [rows[m][i] for m in range(len(sizes)) for i in cut], stream="compute")
    return rows


def _add_steps(builder: Builder, region: Region, steps: Sequence[Step], env: dict[Slot, int], shards: int) -> None:
    """One partition for every step; ``env`` holds the values of variables and is added to."""
    indices: list[int] = []

    def run_region(region: Region, steps: Sequence[Step], inputs: Values) -> Values:
        return xla.run(region, steps, inputs, shards)

    for step in steps:
        call = call_of(region, step, run_region, shards)
        slots = [env[slot] for slot in call.reads]
        reads = list(dict.fromkeys(slots))
        writes = [builder.value(var.aval) for _, var in call.writes]

        def compute(*values: Any, call=call, slots=slots, reads=reads) -> Sequence[Any]:
            found = dict(zip(reads, values, strict=True))
            return call.compute(*(found[slot] for slot in slots))

        env.update(zip(call.writes, writes, strict=True))
        where = {"stream": step.stream, "priority": step.priority, "sm_budget": step.sm_budget}
        after = tuple(indices[i] for i in step.after)
        indices.append(builder.partition(str(step), compute, reads, writes, after=after, **where))


def _join(
    builder: Builder,
    sizes: Sequence[int],
    inputs: Inputs,
    joins: Sequence[Join],
    outputs: Sequence[Any],
    parts: Sequence[Sequence[int]],
    rows: Sequence[Sequence[int]],
) -> None:
    """The outputs, from those of the micro-batches."""
    computed = [i for i, how in enumerate(joins) if len(sizes) > 1 and not _lies_end_to_end(how, inputs.shards)]
    made: dict[int, int] = {}
    if computed:
        made = {i: builder.value(outputs[i]) for i in computed}
        batches = range(len(sizes))
        reads = list(dict.fromkeys(parts[m][i] for m in batches for i in computed))
        if inputs.weights is not None:
            reads = list(dict.fromkeys([*reads, *(value for own in rows for value in own)]))

        def join(*values: Any) -> list[Any]:
            found = dict(zip(reads, values, strict=True))
            outs = [[found[parts[m][i]] for i in computed] for m in batches]
            weights = None
            if inputs.weights is not None:
                weights = [inputs.weights([found[value] for value in rows[m]]) for m in batches]
            return join_outputs([joins[i] for i in computed], outs, sizes, inputs.shards, weights)

        builder.partition("join", join, reads, list(made.values()), stream="compute")
    for i, how in enumerate(joins):
        if i in made:
            builder.output([made[i]])
        elif how.how == "rows" and len(sizes) > 1:
            builder.output([own[i] for own in parts])
        else:
            builder.output([parts[0][i]])


def _lies_end_to_end(how: Join, shards: int) -> bool:
    """Whether an output's parts only have to be copied beside each other."""
    if how.how == "first":
        return True
    return how.how == "rows" and how.rows is not None and how.rows.axis == 0 and how.rows.outer == 1 and shards == 1


def call(binder: Binder, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The custom call, in the current trace.

    Args:
      binder: the plan's.
      outputs: types of the results.
      inputs: arrays.
    """
    physical = [jax.ShapeDtypeStruct(*_physical(aval)) for aval in outputs]
    dispatch = jax.ffi.ffi_call("dynaflow_dispatch", physical)
    results = dispatch(*map(_to_bits, inputs), plan=np.int64(binder.plan))
    return [_from_bits(result, aval) for result, aval in zip(results, outputs, strict=True)]


def _captured(fun: Callable[..., Sequence[Any]], number: int) -> Callable[..., list[Any]]:
    """A function whose kernels are captured when it runs: a capture begins before the first and ends after the last."""
    token = jax.ShapeDtypeStruct((), jnp.int32)
    begin = jax.ffi.ffi_call("dynaflow_capture_begin", token, has_side_effect=True)
    end = jax.ffi.ffi_call("dynaflow_capture_end", token, has_side_effect=True)

    def captured(*args: Any) -> list[Any]:
        started = begin(*args, id=np.int64(number))
        args, started = jax.lax.optimization_barrier((args, started))
        results = jax.lax.optimization_barrier(list(fun(*args)))
        return [*results, end(*results, id=np.int64(number))]

    return captured


def _physical(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type in memory: keys are bits, and a boolean is a byte."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return bits.shape, np.dtype(bits.dtype)
    return tuple(aval.shape), np.dtype(aval.dtype)


def _to_bits(value: Any) -> Any:
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def _from_bits(value: Any, aval: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return compat.wrap_key_data(value, aval.dtype)
    return value
