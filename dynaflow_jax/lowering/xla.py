"""Lowering a plan to XLA: the operators in the plan's order, with ordering constraints inside every stream.

The reference for every other lowering, the one that can be differentiated, and the one used where there is no
dispatcher. Order is kept by optimization barriers: what a step reads passes through a barrier together with the
results of the step before it on the same stream. Where a step reads those results anyway there is nothing to add.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.batch.region import Region
from dynaflow_jax.batch.split import merge, offsets, take, unmerge
from dynaflow_jax.batch.state import INVARIANT, Invariant, Rows
from dynaflow_jax.graph import Operator
from dynaflow_jax.schedule import OpRef, Step, external_inputs, external_outputs

Env = dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The values that a region starts from.

    Attributes:
      parts: for each micro-batch, a value for each input of its program.
      whole: for each input of the full batch's program, its value where all micro-batches agree; what the shared
        operators read. ``None`` where they do not.
    """

    parts: Sequence[Sequence[Any]]
    whole: Sequence[Any]


def run(region: Region, steps: Sequence[Step], inputs: Inputs, shards: int = 1) -> list[list[Any]]:
    """Evaluates a region in the current trace.

    Returns:
      For each micro-batch, the outputs of its program.
    """
    return _Run(region, inputs, shards).run(steps)


class _Run:
    def __init__(self, region: Region, inputs: Inputs, shards: int):
        self.region = region
        self.shards = shards
        self.whole: Env = {}
        if region.shared is not None:
            self.whole.update(zip(region.shared.program.invars, inputs.whole, strict=True))
        self.envs: list[Env] = [
            dict(zip(variant.graph.program.invars, values, strict=True))
            for variant, values in zip(region.variants, inputs.parts, strict=True)
        ]
        # What a step reads of these is not held back by a barrier: it is there from the start for every micro-batch.
        self.free = [
            {v for v in variant.graph.program.invars if isinstance(variant.states.get(v, INVARIANT), Invariant)}
            for variant in region.variants
        ]
        self.offsets = offsets(region.sizes)
        self.results: list[list[Any]] = []  # for each step, what it gave
        self.known: list[int] = []  # for each step, a bit mask of the steps that are over when it is
        self.tail: dict[str, int] = {}  # for each stream, its last step

    def run(self, steps: Sequence[Step]) -> list[list[Any]]:
        for step in steps:
            if step.body is not None:
                results = self.run_region(step)
            elif step.fn is not None:
                results = self.run_replaced(step)
            elif step.is_merged:
                results = self.run_merged(step)
            else:
                results = self.run_operators(step)
            self.results.append([value for value in results if _can_wait(value)])
        outputs = []
        for env, variant in zip(self.envs, self.region.variants, strict=True):
            outvars = variant.graph.program.outvars
            outputs.append([var.val if compat.is_literal(var) else env[var] for var in outvars])
        return outputs

    # -- order -----------------------------------------------------------------------------------------------------

    def ordered(self, step: Step, reads: list[tuple[bool, Any]]) -> list[Any]:
        """What a step reads, held back until the steps that must come first are over.

        Args:
          step: the step.
          reads: values, and whether each is there from the start.
        """
        known = 0
        for i in step.reads:
            known |= self.known[i] | 1 << i
        streams = self.tail if step.body is not None else {step.stream}
        first = [i for i in (*(self.tail[s] for s in streams if s in self.tail), *step.after) if not known >> i & 1]
        for i in first:
            known |= self.known[i] | 1 << i
        index = len(self.known)
        self.known.append(known)
        self.tail.update(dict.fromkeys(streams, index))
        self.tail[step.stream] = index
        values = [value for _, value in reads]
        waited = [value for i in dict.fromkeys(first) for value in self.results[i]]
        held = [i for i, (free, value) in enumerate(reads) if not free and _can_wait(value)]
        held = held or [i for i, value in enumerate(values) if _can_wait(value)]
        if waited and held:
            passed, _ = jax.lax.optimization_barrier(([values[i] for i in held], waited))
            for i, value in zip(held, passed, strict=True):
                values[i] = value
        return values

    def read(self, ref: OpRef, op: Operator) -> list[tuple[bool, Any]]:
        """The inputs of an operator; rows of what was drawn for the whole batch are taken here."""
        if self.is_shared(ref):
            return [(True, self.whole[var]) for var in op.program.invars]
        m = ref.micro_batch or 0
        return [(var in self.free[m], self.value(m, var)) for var in op.program.invars]

    def value(self, m: int, var: Any) -> Any:
        """The value of a variable of a micro-batch."""
        env = self.envs[m]
        if var not in env:
            draw = next(draw for draw in self.region.variants[m].graph.draws if draw.part is var)
            rows = draw.rows if isinstance(draw.rows, Rows) else None
            whole = self.whole[draw.full]
            size, total = self.region.sizes[m], sum(self.region.sizes)
            assert rows is not None
            env[var] = take(whole, rows, total, self.offsets[m], size, self.shards)
        return env[var]

    def write(self, ref: OpRef, op: Operator, values: Sequence[Any]) -> None:
        env = self.whole if self.is_shared(ref) else self.envs[ref.micro_batch or 0]
        env.update(zip(op.program.outvars, values, strict=True))

    def is_shared(self, ref: OpRef) -> bool:
        return ref.micro_batch is None and ref.key.startswith("draws:")

    def operator(self, ref: OpRef) -> Operator:
        if self.is_shared(ref):
            assert self.region.shared is not None
            return self.region.shared[ref.key]
        return self.region.variants[ref.micro_batch or 0].graph[ref.key]

    # -- steps -----------------------------------------------------------------------------------------------------

    def run_operators(self, step: Step) -> list[Any]:
        """One operator, or several one after the other."""
        if len(step.operators) == 1:
            (ref,) = step.operators
            op = self.operator(ref)
            results = compat.call_jaxpr(op.jaxpr, self.ordered(step, self.read(ref, op)), op.name)
            self.write(ref, op, results)
            return results
        reads = external_inputs(self.region, step.operators)
        held = self.ordered(step, [(m is None or var in self.free[m], self.value(m or 0, var)) for m, var in reads])
        inside = dict(zip(reads, held, strict=True))
        results = []
        for ref in step.operators:
            op = self.operator(ref)
            args = [
                inside.get((ref.micro_batch, var), value)
                for var, (_, value) in zip(op.program.invars, self.read(ref, op), strict=True)
            ]
            values = compat.call_jaxpr(op.jaxpr, args, op.name)
            self.write(ref, op, values)
            results += values
        return results

    def run_merged(self, step: Step) -> list[Any]:
        """One operator on the joined rows of several micro-batches."""
        batches = [ref.micro_batch or 0 for ref in step.operators]
        sizes = [self.region.sizes[m] for m in batches]
        joined = self.region.variant_of(sum(sizes)).graph[step.operators[0].key]
        ops = [self.operator(ref) for ref in step.operators]
        states = [self.region.variants[m].states for m in batches]
        reads = []
        for position in range(len(joined.program.invars)):
            variables = [op.program.invars[position] for op in ops]
            state = states[0].get(variables[0], INVARIANT)
            value = merge([self.value(m, v) for m, v in zip(batches, variables, strict=True)], state, sizes)
            reads.append((variables[0] in self.free[batches[0]], value))
        results = compat.call_jaxpr(joined.jaxpr, self.ordered(step, reads), joined.name)
        for position, value in enumerate(results):
            state = states[0].get(ops[0].program.outvars[position], INVARIANT)
            for m, op, part in zip(batches, ops, unmerge(value, state, sizes), strict=True):
                self.envs[m][op.program.outvars[position]] = part
        return results

    def run_replaced(self, step: Step) -> list[Any]:
        """A function in place of operators."""
        assert step.fn is not None
        reads = external_inputs(self.region, step.operators)
        free = [m is None or var in self.free[m] for m, var in reads]
        values = [self.whole[var] if m is None else self.value(m, var) for m, var in reads]
        results = jax.tree.leaves(step.fn(*self.ordered(step, list(zip(free, values, strict=True)))))
        for (m, var), value in zip(external_outputs(self.region, step.operators), results, strict=True):
            (self.whole if m is None else self.envs[m])[var] = value
        return results

    # -- loops and shard_map ---------------------------------------------------------------------------------------

    def run_region(self, step: Step) -> list[Any]:
        """A loop or ``shard_map`` over all micro-batches at once."""
        (ref,) = step.operators
        batches = range(len(self.region.sizes))
        ops = [self.region.variants[m].graph[ref.key] for m in batches]
        eqns = [op.program.eqns[-1] for op in ops]
        reads = [entry for op, m in zip(ops, batches, strict=True) for entry in self.read(OpRef(ref.key, m), op)]
        values = iter(self.ordered(step, reads))
        for op, env in zip(ops, self.envs, strict=True):
            for var in op.program.invars:
                env[var] = next(values)
        # Small constants that the equation reads are part of the operator.
        local: list[Env] = []
        for op, env in zip(ops, self.envs, strict=True):
            scope = {var: env[var] for var in op.program.invars}
            for eqn in op.program.eqns[:-1]:
                args = [v.val if compat.is_literal(v) else scope[v] for v in eqn.invars]
                scope.update(zip(eqn.outvars, compat.bind(eqn, *args), strict=True))
            local.append(scope)
        inputs = [
            [var.val if compat.is_literal(var) else scope[var] for var in eqn.invars]
            for eqn, scope in zip(eqns, local, strict=True)
        ]
        body = self.region.body(ops[0].index)
        assert step.body is not None
        emit = _scan if eqns[0].primitive.name == "scan" else _shard_map
        with compat.scope_of(eqns[0]):
            outputs = emit(eqns, inputs, lambda x: run(body, step.body or (), x, self.shards))
        results = []
        for op, eqn, env, outs in zip(ops, eqns, self.envs, outputs, strict=True):
            made = dict(zip(eqn.outvars, outs, strict=True))
            env.update((var, made[var]) for var in op.program.outvars)
            results += [made[var] for var in op.program.outvars]
        return results


Body = Callable[[Inputs], list[list[Any]]]


def _can_wait(value: Any) -> bool:
    """Whether a barrier can hold a value back: keys and tokens it cannot."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and dtype != jax.dtypes.float0


def _common(values: Sequence[Any]) -> bool:
    """Whether all micro-batches have one and the same value."""
    return all(value is values[0] for value in values)


def _scan(eqns: Sequence[Any], inputs: Sequence[Sequence[Any]], body: Body) -> list[list[Any]]:
    """One ``scan`` whose iteration is that of every micro-batch."""
    params = eqns[0].params
    num_consts, num_carry = compat.scan_partition(eqns[0])
    count, batches = len(inputs[0]), range(len(inputs))
    common = [p for p in range(count) if not num_consts <= p < num_consts + num_carry]
    common = [p for p in common if _common([inputs[m][p] for m in batches])]
    own = [p for p in range(count) if p not in set(common)]
    consts = [p for p in own if p < num_consts]
    carries = [p for p in own if num_consts <= p < num_consts + num_carry]
    xs = [p for p in own if p >= num_consts + num_carry]
    shared_xs = [p for p in common if p >= num_consts]

    def iteration(carry, x):
        shared_x, own_x = x
        parts = []
        for m in batches:
            values: dict[int, Any] = {p: inputs[m][p] for p in (*consts, *common) if p < num_consts}
            values.update(zip(shared_xs, shared_x, strict=True))
            values.update(zip(carries, carry[m], strict=True))
            values.update(zip(xs, own_x[m], strict=True))
            parts.append([values[p] for p in range(count)])
        outs = body(Inputs(parts, parts[0]))
        return tuple(out[:num_carry] for out in outs), tuple(out[num_carry:] for out in outs)

    init = tuple([inputs[m][p] for p in carries] for m in batches)
    slices = ([inputs[0][p] for p in shared_xs], tuple([inputs[m][p] for p in xs] for m in batches))
    carry, ys = jax.lax.scan(
        iteration, init, slices, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [[*carry[m], *ys[m]] for m in batches]


def _shard_map(eqns: Sequence[Any], inputs: Sequence[Sequence[Any]], body: Body) -> list[list[Any]]:
    """One ``shard_map`` whose body is that of every micro-batch."""
    count, batches = len(inputs[0]), range(len(inputs))
    in_specs, out_specs = eqns[0].params["in_specs"], eqns[0].params["out_specs"]
    common = [p for p in range(count) if _common([inputs[m][p] for m in batches])]
    own = [p for p in range(count) if p not in set(common)]

    def inside(shared, parts):
        values = []
        for m in batches:
            found = dict(zip(common, shared, strict=True)) | dict(zip(own, parts[m], strict=True))
            values.append([found[p] for p in range(count)])
        return tuple(map(tuple, body(Inputs(values, values[0]))))

    specs = ([in_specs[p] for p in common], tuple([in_specs[p] for p in own] for _ in batches))
    mapped = compat.shard_map_like(eqns[0], inside, specs, tuple(tuple(out_specs) for _ in batches))
    outs = mapped([inputs[0][p] for p in common], tuple([inputs[m][p] for p in own] for m in batches))
    return [list(out) for out in outs]
