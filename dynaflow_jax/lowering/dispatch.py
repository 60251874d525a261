"""Lowering a plan to one custom call, whose handler launches compiled partitions on streams (see ``xla_ffi``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dynaflow_jax import compat, cost
from dynaflow_jax.batch.outputs import Join
from dynaflow_jax.batch.outputs import join as join_outputs
from dynaflow_jax.batch.region import Region
from dynaflow_jax.batch.split import Own, offsets, take
from dynaflow_jax.batch.state import Rows
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.lowering import communication
from dynaflow_jax.lowering.bits import from_bits, physical, to_bits
from dynaflow_jax.lowering.builder import Builder
from dynaflow_jax.lowering.steps import Slot, Values, call_of
from dynaflow_jax.lowering.tasks import Entry, Expr, Term
from dynaflow_jax.program import Program, trace
from dynaflow_jax.runtime.binder import Binder
from dynaflow_jax.runtime.work import ALIGNMENT, Where, Work
from dynaflow_jax.schedule import Step

MAX_STEPS = 4096
"""A loop is dispatched iteration by iteration; with more steps than this it is not worth its captures."""

_EDGE = Where("compute")  # where inputs are split and outputs joined
_BESIDE = Where("network")  # where operators communicate that compute at the same time


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a dispatched function.

    Attributes:
      avals: their types.
      own: for each micro-batch, what it has of each.
      moving: whether each is likely to be at another address in every call.
      donated: whether each one's memory is free to be an output's.
      shards: over how many devices the batch is sharded.
      weights: from a micro-batch's inputs to its weight in means, or ``None``.
      mesh: the sizes of the mesh axes around the function, outermost first; empty on a single device.
      in_place: whether devices may read what others have computed where it is.
    """

    avals: Sequence[Any]
    own: Sequence[Sequence[Own]]
    moving: Sequence[bool]
    donated: Sequence[bool]
    shards: int
    weights: Callable[[Sequence[Any]], Any] | None
    mesh: Mapping[str, int]
    in_place: bool


def build(
    name: str,
    platform: str,
    region: Region,
    steps: Sequence[Step],
    inputs: Inputs,
    joins: Sequence[Join],
    outputs: Sequence[Any],
) -> Work:
    """Everything that a plan runs, as modules of their own and as exchanges between devices.

    Args:
      name: the function's name.
      platform: ``"cpu"`` or ``"cuda"``.
      region: the operators of every micro-batch.
      steps: the plan's.
      inputs: the function's.
      joins: how its outputs are made of the micro-batches'.
      outputs: types of its outputs.

    Raises:
      DynaFlowError: naming the operator that cannot be compiled on its own: it calls back to the host, say.
    """
    builder = Builder(name, platform, inputs.avals, inputs.mesh, inputs.in_place)
    rows = _split(builder, region.sizes, inputs)
    env: dict[Slot, Term] = {}
    for m, variant in enumerate(region.variants):
        values: list[Term] = [] if variant.index is None else [builder.constant(np.uint32(m))]
        values += rows[m]
        env.update(zip([(m, var) for var in variant.graph.program.invars], values, strict=True))
    _Steps(builder, inputs.shards).run(region, steps, env)
    parts = [
        [_term(builder, atom, m, env) for atom in variant.graph.program.outvars]
        for m, variant in enumerate(region.variants)
    ]
    _join(builder, region.sizes, inputs, joins, outputs, parts, rows)
    return builder.work(inputs.moving, inputs.donated)


def build_region(
    name: str,
    platform: str,
    region: Region,
    steps: Sequence[Step],
    values: Values,
    mesh: Mapping[str, int],
    *,
    in_place: bool,
) -> tuple[Work, list[Any], list[Any]]:
    """Everything that the body of a ``shard_map`` runs, on one of its devices.

    Args:
      name: the function's name.
      platform: ``"cpu"`` or ``"cuda"``.
      region: the operators of every micro-batch.
      steps: the plan's for this region.
      values: what the micro-batches' programs start from; one and the same object where they have it in common.
      mesh: the sizes of the mesh axes, outermost first.
      in_place: whether devices may read what others have computed where it is.

    Returns:
      The work; its operands, each once; and the types of its results, one micro-batch's after the other's.
    """
    operands = list({id(value): value for own in values for value in own}.values())
    index_of = {id(value): i for i, value in enumerate(operands)}
    builder = Builder(name, platform, [jax.typeof(value) for value in operands], mesh, in_place)
    env: dict[Slot, Term] = {}
    for m, (variant, own) in enumerate(zip(region.variants, values, strict=True)):
        found = [builder.inputs[index_of[id(value)]] for value in own]
        env.update(zip([(m, var) for var in variant.graph.program.invars], found, strict=True))
    _Steps(builder, 1).run(region, steps, env)
    avals = []
    for m, variant in enumerate(region.variants):
        for atom in variant.graph.program.outvars:
            avals.append(atom.aval)
            builder.output([builder.in_memory(_term(builder, atom, m, env), atom.aval, "output", _EDGE)], atom.aval)
    # What all micro-batches read are weights, mostly, which stay where they are.
    common = set.intersection(*({id(value) for value in own} for own in values))
    split = len(values) > 1
    return builder.work([split and id(value) not in common for value in operands]), operands, avals


def partitioned_axes(avals: Iterable[Any]) -> tuple[str, ...]:
    """The mesh axes over which XLA may partition a function of inputs of some types, traced here.

    Those of the mesh in use, or, where there is none, of the mesh that an input is on. (Inside ``shard_map`` that says
    nothing: a weight that the function closes over is still of the type that it has outside.)
    """
    if compat.mesh_sizes():
        return compat.partitioned_axes()
    for aval in avals:
        mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
        if mesh is not None:
            with jax.sharding.use_abstract_mesh(mesh):
                if axes := compat.partitioned_axes():
                    return axes
    return ()


def _term(builder: Builder, atom: Any, m: int, env: Mapping[Slot, Term]) -> Term:
    """The value of a variable or literal of a micro-batch's program."""
    return builder.constant(np.asarray(atom.val, atom.aval.dtype)) if compat.is_literal(atom) else env[m, atom]


# -- inputs and outputs ----------------------------------------------------------------------------------------------


def _split(builder: Builder, sizes: Sequence[int], inputs: Inputs) -> list[list[int]]:
    """For each micro-batch, the values of the inputs: what it has of each."""
    rows = [list(builder.inputs) for _ in sizes]
    if len(sizes) == 1:
        return rows
    spans = list(zip(offsets(sizes), sizes, strict=True))
    cut: list[tuple[int, int, Rows]] = []  # parts that do not lie end to end in memory, or not where XLA wants them
    for m, (own, (offset, size)) in enumerate(zip(inputs.own, spans, strict=True)):
        for i, how in enumerate(own):
            aval = inputs.avals[i]
            if isinstance(how, Rows):
                shape, dtype = physical(aval)
                row = how.inner * int(np.prod(shape[1:], dtype=int)) * dtype.itemsize
                apart = how.axis or how.outer > 1 or inputs.shards > 1
                if apart or any(row * start % ALIGNMENT for start, _ in spans):
                    cut.append((m, i, how))
                    continue
                part = compat.resized(aval, 0, size * how.inner)
                rows[m][i] = builder.value(part, within=(builder.inputs[i], row * offset))
            elif how is not None:
                rows[m][i] = builder.constant(how)
    if cut:
        sources = list(dict.fromkeys(i for _, i, _ in cut))

        def split(*values: Any) -> list[Any]:
            whole = dict(zip(sources, values, strict=True))
            return [take(whole[i], how, sum(sizes), *spans[m], inputs.shards) for m, i, how in cut]

        avals = [compat.resized(inputs.avals[i], how.axis, how.outer * sizes[m] * how.inner) for m, i, how in cut]
        made = builder.task("split", split, [builder.inputs[i] for i in sources], avals, _EDGE)
        for (m, i, _), value in zip(cut, made, strict=True):
            rows[m][i] = value
    return rows


def _join(
    builder: Builder,
    sizes: Sequence[int],
    inputs: Inputs,
    joins: Sequence[Join],
    outputs: Sequence[Any],
    parts: Sequence[Sequence[Term]],
    rows: Sequence[Sequence[int]],
) -> None:
    """The outputs, from those of the micro-batches."""
    batches = range(len(sizes))
    computed = [i for i, how in enumerate(joins) if len(sizes) > 1 and not _lies_end_to_end(how, inputs.shards)]
    made: dict[int, int] = {}
    if computed:
        terms: list[Term] = [parts[m][i] for m in batches for i in computed]
        weighed = [] if inputs.weights is None else [value for own in rows for value in own]

        def join(*values: Any) -> list[Any]:
            count = len(computed)
            outs = [list(values[m * count : (m + 1) * count]) for m in batches]
            weights = None
            if inputs.weights is not None:
                own = values[len(sizes) * count :]
                each = len(own) // len(sizes)
                weights = [inputs.weights(own[m * each : (m + 1) * each]) for m in batches]
            return join_outputs([joins[i] for i in computed], outs, sizes, inputs.shards, weights)

        values = builder.task("join", join, [*terms, *weighed], [outputs[i] for i in computed], _EDGE)
        made = dict(zip(computed, values, strict=True))
    for i, how in enumerate(joins):
        if i in made:
            builder.output([made[i]], outputs[i])
            continue
        own = [parts[m][i] for m in batches] if how.how == "rows" else [parts[0][i]]
        # A literal output of the function has a type of its own; parts have the output's, but for their rows.
        avals = [outputs[i]] if len(own) == 1 else [compat.resized(outputs[i], 0, size) for size in sizes]
        values = [builder.in_memory(t, a, "output", _EDGE) for t, a in zip(own, avals, strict=True)]
        builder.output(values, outputs[i])


def _lies_end_to_end(how: Join, shards: int) -> bool:
    """Whether an output's parts only have to be copied beside each other."""
    if how.how == "first":
        return True
    return how.how == "rows" and how.rows is not None and how.rows.axis == 0 and how.rows.outer == 1 and shards == 1


# -- steps -----------------------------------------------------------------------------------------------------------


class _Steps:
    """Adds the operations of steps to a builder."""

    def __init__(self, builder: Builder, shards: int):
        self.builder = builder
        self.shards = shards
        self._count = 0

    def run(self, region: Region, steps: Sequence[Step], env: dict[Slot, Term]) -> None:
        """Adds the operations of a region's steps; ``env`` holds the values of variables and is added to."""
        last: list[Entry | None] = []  # of each step's operations
        for step in steps:
            self._count += 1
            if self._count > MAX_STEPS:
                raise DynaFlowError(
                    f"{step} belongs to loops of more than {MAX_STEPS} steps in all, each of which would be captured "
                    "by itself."
                )
            before = len(self.builder.entries)
            after = [found for i in step.after if (found := last[i]) is not None]
            if step.body is not None:
                self._loop(region, step, env)
            else:
                self._step(region, step, env, after)
            last.append(self.builder.entries[-1] if len(self.builder.entries) > before else None)

    def _step(self, region: Region, step: Step, env: dict[Slot, Term], after: Sequence[Entry]) -> None:
        where = Where(step.stream, step.priority, step.sm_budget)
        first = step.operators[0]
        plain = step.fn is None and not step.is_merged and first.micro_batch is not None
        ops = [(ref.micro_batch or 0, region.variants[ref.micro_batch or 0].graph[ref.key]) for ref in step.operators]
        if plain and any(communication.communicates(eqn) for _, op in ops for eqn in op.program.eqns):
            for m, op in ops:
                values = {var: env[m, var] for var in op.program.invars}
                found = self._equations(op.program, values, str(step), where, after)
                env.update(zip([(m, var) for var in op.program.outvars], found, strict=True))
            return
        call = call_of(region, step, _no_region, self.shards)
        terms, avals = [env[slot] for slot in call.reads], [var.aval for _, var in call.writes]
        if self.builder.mesh and not plain and first.micro_batch is not None:  # what it does is not in the graph
            program, constants = trace(call.compute, [_struct(var) for _, var in call.reads], self.builder.mesh)
            if any(map(communication.communicates, program.eqns)):
                known = [self.builder.constant(np.asarray(constant)) for constant in constants]
                values = dict(zip(program.invars, [*known, *terms], strict=True))
                found = self._equations(program, values, str(step), where, after)
                env.update(zip(call.writes, found, strict=True))
                return
        products = sum(cost.products(op.program.eqns) for _, op in ops)
        made = self.builder.task(str(step), call.compute, terms, avals, where, after, products)
        env.update(zip(call.writes, made, strict=True))

    def _equations(
        self,
        program: Program,
        env: dict[Any, Term],
        name: str,
        where: Where,
        after: Sequence[Entry],
        beside: Where | None = None,
    ) -> list[Term]:
        """Adds a program's equations: collectives as exchanges, and what lies between them as tasks.

        Tasks do not wait for exchanges whose results they do not need. Where that leaves something to compute during
        an exchange, the exchanges run on another stream than the rest: ``beside``.
        """
        builder, pending = self.builder, []
        beside = beside or (_BESIDE if _overlaps(program) else where)
        waits_for: dict[Any, frozenset[int]] = {}  # by variable, the collectives that it depends on
        waited: frozenset[int] = frozenset()  # those that the pending equations depend on
        last_read = {var: i for i, eqn in enumerate(program.eqns) for var in eqn.invars if not compat.is_literal(var)}
        last_read.update((var, len(program.eqns)) for var in program.outvars if not compat.is_literal(var))

        def value(atom: Any) -> Term:
            return builder.constant(np.asarray(atom.val, atom.aval.dtype)) if compat.is_literal(atom) else env[atom]

        def flush(position: int) -> None:
            made = {var for eqn in pending for var in eqn.outvars}
            read = dict.fromkeys(v for e in pending for v in e.invars if not compat.is_literal(v) and v not in made)
            given = [v for e in pending for v in e.outvars if last_read.get(v, -1) >= position]
            if given:
                jaxpr = compat.closed_jaxpr(list(read), given, list(pending))
                compute = lambda *values: compat.call_jaxpr(jaxpr, values, "operator")  # noqa: E731
                terms, avals = [env[var] for var in read], [var.aval for var in given]
                products = cost.products(pending)
                env.update(zip(given, builder.task(name, compute, terms, avals, where, after, products), strict=True))
            pending.clear()

        for i, eqn in enumerate(program.eqns):
            sources = frozenset[int]().union(*(waits_for.get(v, ()) for v in eqn.invars if not compat.is_literal(v)))
            if not communication.communicates(eqn):
                if pending and sources != waited:
                    flush(i)
                waited = sources
                waits_for.update(dict.fromkeys(eqn.outvars, sources))
                if (term := _scaled(eqn, env) or _in_place(builder, eqn, env)) is not None:
                    env[eqn.outvars[0]] = term
                else:
                    pending.append(eqn)
                continue
            flush(i)
            operands = [value(atom) for atom in eqn.invars]
            if communication.is_collective(eqn):
                results = communication.emit(builder, eqn, operands, name, beside, after)
            else:
                inner = _called(eqn, name)
                values = dict(zip(inner.invars, operands, strict=True))
                results = self._equations(inner, values, name, where, after, beside)
            waits_for.update(dict.fromkeys(eqn.outvars, sources | {i} if cost.communicates(eqn) else sources))
            env.update(zip(eqn.outvars, results, strict=True))
        flush(len(program.eqns))
        return [value(atom) for atom in program.outvars]

    def _loop(self, region: Region, step: Step, env: dict[Slot, Term]) -> None:
        """A ``scan``, iteration by iteration: what is captured once per iteration is compiled once for all."""
        (ref,) = step.operators
        ops = [variant.graph[ref.key] for variant in region.variants]
        eqns = [op.program.eqns[-1] for op in ops]
        if eqns[0].primitive.name != "scan":
            raise DynaFlowError(f"{step} is a {eqns[0].primitive.name} inside the function: put dynaflow inside it.")
        builder, body, outer = self.builder, region.body(ops[0].index), self.builder.scope
        num_consts, num_carry = compat.scan_partition(eqns[0])
        length, reverse = eqns[0].params["length"], eqns[0].params["reverse"]
        inputs = [self._operands(op, m, step, env) for m, op in enumerate(ops)]
        carries = [values[num_consts : num_consts + num_carry] for values in inputs]
        stacks: list[list[Sequence[Term]]] = [[] for _ in ops]  # by micro-batch and iteration
        for i in reversed(range(length)) if reverse else range(length):
            builder.scope = (*outer, self._count, i)
            inner: dict[Slot, Term] = {}
            for m, variant in enumerate(body.variants):
                invars = variant.graph.program.invars
                slices = [
                    self._slice(value, var.aval, i)
                    for value, var in zip(
                        inputs[m][num_consts + num_carry :], invars[num_consts + num_carry :], strict=True
                    )
                ]
                values = [*inputs[m][:num_consts], *carries[m], *slices]
                inner.update(zip([(m, var) for var in invars], values, strict=True))
            self.run(body, step.body or (), inner)
            for m, variant in enumerate(body.variants):
                outs = [_term(builder, atom, m, inner) for atom in variant.graph.program.outvars]
                avals = [atom.aval for atom in variant.graph.program.outvars]
                stays = [*_fresh(outs[:num_carry], carries[m]), *(False for _ in outs[num_carry:])]
                where = Where(step.stream)
                kept = [
                    term if stay else builder.in_memory(term, aval, str(step), where)
                    for term, aval, stay in zip(outs, avals, stays, strict=True)
                ]
                carries[m], ys = kept[:num_carry], kept[num_carry:]
                stacks[m].append(ys)
        builder.scope = outer
        for m, (op, eqn) in enumerate(zip(ops, eqns, strict=True)):
            rows = stacks[m][::-1] if reverse else stacks[m]
            ys = [Expr(tuple(column), lambda *parts: jax.numpy.stack(parts)) for column in zip(*rows, strict=True)]
            made = dict(zip(eqn.outvars, [*carries[m], *ys], strict=True))
            env.update(((m, var), made[var]) for var in op.program.outvars)

    def _operands(self, op: Any, m: int, step: Step, env: Mapping[Slot, Term]) -> list[Term]:
        """What a micro-batch's loop starts from; the loop's operator evaluates small constants for itself."""
        values: dict[Any, Term] = {var: env[m, var] for var in op.program.invars}
        *constants, eqn = op.program.eqns
        if constants:
            outvars = tuple(v for e in constants for v in e.outvars if not compat.is_dropped(v))
            program = Program(op.program.invars, outvars, tuple(constants))
            found = self._equations(program, dict(values), str(step), Where(step.stream), ())
            values.update(zip(outvars, found, strict=True))
        return [
            self.builder.constant(np.asarray(atom.val, atom.aval.dtype)) if compat.is_literal(atom) else values[atom]
            for atom in eqn.invars
        ]

    def _slice(self, stacked: Term, aval: Any, i: int) -> Term:
        """One iteration's share of what a loop walks over."""
        if isinstance(stacked, Expr):
            return Expr(stacked.reads, lambda *values: stacked.compute(*values)[i])
        shape, dtype = physical(aval)
        return self.builder.part(stacked, aval, i * int(np.prod(shape, dtype=int)) * dtype.itemsize)


def _fresh(carries: Sequence[Term], before: Sequence[Term]) -> list[bool]:
    """For each carry of a loop, whether the next iteration may take it as it is, an expression too.

    It reads sums in its own kernels then, as layers do that are no loop. But what iterations make of an expression that
    they were given would grow by a multiplication in each of them, and with it the modules that read it.
    """
    given = [term for term in before if isinstance(term, Expr)]
    read = {term.reads for term in given}
    return [isinstance(term, int) or term in given or term.reads not in read for term in carries]


def _scaled(eqn: Any, env: Mapping[Any, Term]) -> Expr | None:
    """An expression multiplied with or divided by a number, as an expression too.

    So that the mean of what arrives from other devices is no kernel on the stream that it arrives on.
    """
    variables = [atom for atom in eqn.invars if not compat.is_literal(atom)]
    if eqn.primitive.name not in ("mul", "div", "convert_element_type") or len(variables) != 1:
        return None
    term = env.get(variables[0])
    if not isinstance(term, Expr):
        return None

    def scaled(*values: Any) -> Any:
        (result,) = compat.bind(
            eqn, *(atom.val if compat.is_literal(atom) else term.compute(*values) for atom in eqn.invars)
        )
        return result

    return Expr(term.reads, scaled)


def _in_place(builder: Builder, eqn: Any, env: Mapping[Any, Term]) -> int | None:
    """A part of a value that is in memory anyway, or such a value under another shape, where it is.

    So that a share of the weights, say, is not copied: XLA would do so for a product that is a call of a library.
    """
    if eqn.primitive.name not in ("slice", "reshape") or compat.is_literal(eqn.invars[0]):
        return None
    (atom, *sizes), (out,) = eqn.invars, eqn.outvars
    term, (shape, dtype) = env.get(atom), physical(atom.aval)
    if not isinstance(term, int) or not builder.stays(term) or sizes or shape != atom.aval.shape:
        return None
    if eqn.params.get("dimensions") is not None:  # a transposition as well
        return None
    offset = 0
    if eqn.primitive.name == "slice":
        starts, kept = eqn.params["start_indices"], out.aval.shape
        cut = next((axis for axis, size in enumerate(kept) if size != shape[axis]), 0)
        strided = any(stride != 1 for stride in eqn.params["strides"] or ())
        if strided or kept[cut + 1 :] != shape[cut + 1 :] or any(size != 1 for size in kept[:cut]) or not all(kept):
            return None
        offset = int(np.ravel_multi_index(starts, shape)) * dtype.itemsize
    return builder.value(out.aval, within=(term, offset)) if offset % ALIGNMENT == 0 else None


def _overlaps(program: Program) -> bool:
    """Whether there is something to compute during a collective: neither before it nor with its result."""
    before: dict[Any, int] = {}  # by variable, a bit mask of the equations that it depends on
    masks: list[int] = []
    for i, eqn in enumerate(program.eqns):
        mask = 0
        for var in eqn.invars:
            mask |= 0 if compat.is_literal(var) else before.get(var, 0)
        masks.append(mask)
        before.update(dict.fromkeys(eqn.outvars, mask | 1 << i))
    moving = [i for i, eqn in enumerate(program.eqns) if cost.communicates(eqn)]
    computing = [i for i, eqn in enumerate(program.eqns) if i not in moving and cost.flops(eqn)]
    return any(not (masks[i] >> k | masks[k] >> i) & 1 for i in moving for k in computing)


def _struct(var: Any) -> Any:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _no_region(*_: Any) -> Any:
    raise AssertionError("loops are unrolled before their steps are called")


def _called(eqn: Any, name: str) -> Program:
    """The program of a call that communicates inside."""
    bodies = [body for _, body in compat.sub_jaxprs(eqn)]
    if len(bodies) != 1 or len(compat.open_jaxpr(bodies[0]).invars) != len(eqn.invars) or compat.consts_of(bodies[0]):
        raise DynaFlowError(f"{name} communicates inside {eqn.primitive.name}, which is not dispatched.")
    if eqn.primitive.name in ("scan", "while", "cond", "shard_map"):
        raise DynaFlowError(f"{name} communicates inside {eqn.primitive.name}: mark an operator inside it.")
    inner = compat.open_jaxpr(bodies[0])
    return Program(tuple(inner.invars), tuple(inner.outvars), tuple(inner.eqns))


# -- the call --------------------------------------------------------------------------------------------------------


def call(binder: Binder, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The custom call, in the current trace.

    Args:
      binder: the plan's.
      outputs: types of the results.
      inputs: arrays.
    """
    binder.enter()
    operands = [to_bits(x) for x in inputs]
    if binder.work.mesh:
        # Axes of one device count for nothing, and may be among those that shard_map leaves to XLA.
        axes = tuple(axis for axis, size in binder.work.mesh.items() if size > 1)
        operands.append(jax.lax.axis_index(axes) if axes else np.int32(0))
    types = [compat.retyped(aval, *physical(aval)) for aval in outputs]
    aliases = {donor: output for output, donor in binder.work.donors.items()}
    dispatch = jax.ffi.ffi_call("dynaflow_dispatch", types, input_output_aliases=aliases)
    results = dispatch(*operands, plan=np.int64(binder.plan))
    return [from_bits(result, aval) for result, aval in zip(results, outputs, strict=True)]
