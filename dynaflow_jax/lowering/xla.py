"""Lowering a plan to XLA: the operators in the plan's order, with ordering constraints inside every stream.

The reference for every other lowering, the one that can be differentiated, and the one used where there is no
dispatcher. Order is kept by optimization barriers: what a step reads passes through a barrier together with the
results of the step before it on the same stream. Where a step reads those results anyway there is nothing to add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.batch.region import Region
from dynaflow_jax.batch.split import merge, offsets, take, unmerge
from dynaflow_jax.batch.state import INVARIANT, Invariant, Rows
from dynaflow_jax.graph import Operator
from dynaflow_jax.lowering.order import can_wait, hold
from dynaflow_jax.schedule import Step, external_inputs, external_outputs

Env = dict[Any, Any]


Values = list[list[Any]]
"""For each micro-batch, a value for each input or output of its program."""


def run(region: Region, steps: Sequence[Step], inputs: Values, shards: int = 1) -> Values:
    """Evaluates a region in the current trace.

    Args:
      region: the operators of every micro-batch.
      steps: a plan's steps for this region.
      inputs: what the micro-batches' programs start from.
      shards: over how many devices the batch is sharded.

    Returns:
      The outputs of the micro-batches' programs.
    """
    return _Run(region, inputs, shards).run(steps)


class _Run:
    def __init__(self, region: Region, inputs: Values, shards: int):
        self.region = region
        self.shards = shards
        self.envs: list[Env] = [
            dict(zip(variant.graph.program.invars, values, strict=True))
            for variant, values in zip(region.variants, inputs, strict=True)
        ]
        # What a step reads of these is not held back by a barrier: it is there from the start for every micro-batch.
        self.free = [
            {v for v in variant.graph.program.invars if isinstance(variant.states.get(v, INVARIANT), Invariant)}
            for variant in region.variants
        ]
        self.results: list[list[Any]] = []  # for each step, what it gave
        self.known: list[int] = []  # for each step, a bit mask of the steps that are over when it is
        self.tail: dict[str, int] = {}  # for each stream, its last step

    def run(self, steps: Sequence[Step]) -> Values:
        for step in steps:
            self.results.append(self.run_step(step))
        outputs = []
        for env, variant in zip(self.envs, self.region.variants, strict=True):
            outvars = variant.graph.program.outvars
            outputs.append([var.val if compat.is_literal(var) else env[var] for var in outvars])
        return outputs

    def run_step(self, step: Step) -> list[Any]:
        """Evaluates a step; returns everything that it computed."""
        if step.body is not None:
            return self.run_region(step)
        if step.fn is not None:
            return self.run_replaced(step)
        if step.is_merged:
            return self.run_merged(step)
        if step.operators[0].micro_batch is None:
            return self.run_draw(step)
        return self.run_operators(step)

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
        if waited:
            held = [i for i, (free, value) in enumerate(reads) if not free and can_wait(value)] or range(len(reads))
            for i, value in zip(held, hold([values[i] for i in held], waited), strict=True):
                values[i] = value
        return values

    def read(self, m: int, op: Operator) -> list[tuple[bool, Any]]:
        """The inputs of a micro-batch's operator, and whether each is there from the start."""
        return [(var in self.free[m], self.envs[m][var]) for var in op.program.invars]

    # -- steps -----------------------------------------------------------------------------------------------------

    def run_operators(self, step: Step) -> list[Any]:
        """One operator, or several one after the other."""
        reads = external_inputs(self.region, step.operators)
        held = self.ordered(step, [(var in self.free[m], self.envs[m][var]) for m, var in reads])
        inside: dict[tuple[int, Any], Any] = dict(zip(reads, held, strict=True))
        results = []
        for ref in step.operators:
            m = ref.micro_batch or 0
            op = self.region.variants[m].graph[ref.key]
            values = compat.call_jaxpr(op.jaxpr, [inside[m, var] for var in op.program.invars], op.name)
            for var, value in zip(op.program.outvars, values, strict=True):
                inside[m, var] = self.envs[m][var] = value
            results += values
        return results

    def run_merged(self, step: Step) -> list[Any]:
        """One operator on the joined rows of several micro-batches."""
        key = step.operators[0].key
        batches = [ref.micro_batch or 0 for ref in step.operators]
        sizes = [self.region.sizes[m] for m in batches]
        joined = self.region.variant_of(sum(sizes)).graph[key]
        ops = [self.region.variants[m].graph[key] for m in batches]
        states = self.region.variants[batches[0]].states
        reads = []
        for variables in zip(*(op.program.invars for op in ops), strict=True):
            parts = [self.envs[m][var] for m, var in zip(batches, variables, strict=True)]
            value = merge(parts, states.get(variables[0], INVARIANT), sizes)
            reads.append((variables[0] in self.free[batches[0]], value))
        results = compat.call_jaxpr(joined.jaxpr, self.ordered(step, reads), joined.name)
        for value, variables in zip(results, zip(*(op.program.outvars for op in ops), strict=True), strict=True):
            parts = unmerge(value, states.get(variables[0], INVARIANT), sizes)
            for m, var, part in zip(batches, variables, parts, strict=True):
                self.envs[m][var] = part
        return results

    def run_replaced(self, step: Step) -> list[Any]:
        """A function in place of operators."""
        assert step.fn is not None
        reads = external_inputs(self.region, step.operators)
        values = self.ordered(step, [(var in self.free[m], self.envs[m][var]) for m, var in reads])
        results = jax.tree.leaves(step.fn(*values))
        for (m, var), value in zip(external_outputs(self.region, step.operators), results, strict=True):
            self.envs[m][var] = value
        return results

    def run_draw(self, step: Step) -> list[Any]:
        """Random numbers for the whole batch, of which every micro-batch takes its rows."""
        key = step.operators[0].key
        op = self.region.graph[key]
        results = compat.call_jaxpr(op.draw_jaxpr, self.ordered(step, self.read(0, op)), op.name)
        total = sum(self.region.sizes)
        for m, (offset, size) in enumerate(zip(offsets(self.region.sizes), self.region.sizes, strict=True)):
            variant = self.region.variants[m]
            own = [var for var in variant.graph[key].program.eqns[-1].outvars if not compat.is_dropped(var)]
            for var, whole in zip(own, results, strict=True):
                rows = variant.states[var]
                assert isinstance(rows, Rows)
                self.envs[m][var] = take(whole, rows, total, offset, size, self.shards)
        return results

    # -- loops and shard_map ---------------------------------------------------------------------------------------

    def run_region(self, step: Step) -> list[Any]:
        """A loop or ``shard_map`` over all micro-batches at once."""
        (ref,) = step.operators
        batches = range(len(self.region.sizes))
        ops = [self.region.variants[m].graph[ref.key] for m in batches]
        eqns = [op.program.eqns[-1] for op in ops]
        reads = [entry for m, op in enumerate(ops) for entry in self.read(m, op)]
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
            outputs = emit(eqns, inputs, lambda values: run(body, step.body or (), values, self.shards))
        results = []
        for op, eqn, env, outs in zip(ops, eqns, self.envs, outputs, strict=True):
            made = dict(zip(eqn.outvars, outs, strict=True))
            env.update((var, made[var]) for var in op.program.outvars)
            results += [made[var] for var in op.program.outvars]
        return results


Body = Callable[[Values], Values]


def _common(values: Sequence[Any]) -> bool:
    """Whether all micro-batches have one and the same value."""
    return all(value is values[0] for value in values)


def _scan(eqns: Sequence[Any], inputs: Values, body: Body) -> Values:
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
        outs = body(parts)
        return tuple(out[:num_carry] for out in outs), tuple(out[num_carry:] for out in outs)

    init = tuple([inputs[m][p] for p in carries] for m in batches)
    slices = ([inputs[0][p] for p in shared_xs], tuple([inputs[m][p] for p in xs] for m in batches))
    carry, ys = jax.lax.scan(
        iteration, init, slices, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [[*carry[m], *ys[m]] for m in batches]


def _shard_map(eqns: Sequence[Any], inputs: Values, body: Body) -> Values:
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
        return tuple(map(tuple, body(values)))

    specs = ([in_specs[p] for p in common], tuple([in_specs[p] for p in own] for _ in batches))
    mapped = compat.shard_map_like(eqns[0], inside, specs, tuple(tuple(out_specs) for _ in batches))
    outs = mapped([inputs[0][p] for p in common], tuple([inputs[m][p] for p in own] for m in batches))
    return [list(out) for out in outs]
