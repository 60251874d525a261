"""The programmable scheduler: a strategy splits the batch, then orders, places, merges and replaces operators.

After DynaFlow (arXiv 2605.21603, section 4): a strategy is a class with two methods, and runs when a function is
traced, never per step.
"""

from __future__ import annotations

import bisect
import dataclasses
import inspect
import itertools
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.batch.region import Region
from dynaflow_jax.batch.split import merge_problem
from dynaflow_jax.batch.state import INVARIANT
from dynaflow_jax.errors import ScheduleError
from dynaflow_jax.graph import Operator, OpGraph
from dynaflow_jax.text import shown

_PATIENCE = 10_000  # questions without an execute, before a strategy counts as stuck
_MAX_NUMBER = 2**31  # of a priority or a number of multiprocessors, which the executor holds in 32 bits


@dataclasses.dataclass(frozen=True)
class InputInfo:
    """What a strategy may know before it splits the batch.

    Attributes:
      batch_size: rows of the batch; over all shards.
      avals: shapes and dtypes of the arguments, as ``(args, kwargs)``.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      device_kind: such as ``"NVIDIA H200"``.
      mesh: the mesh in effect, or ``None``.
      context: whatever the user passed to ``dynaflow``.
      shards: over how many devices the batch is split already; sizes of micro-batches must be multiples of it.
      row_bytes: bytes of one row, in all arguments that are split.
    """

    batch_size: int
    avals: Any
    platform: str
    device_kind: str
    mesh: Any = None
    context: Any = None
    shards: int = 1
    row_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class OpRef:
    """An operator of a micro-batch, by name.

    Attributes:
      key: the operator's key in its graph.
      micro_batch: which micro-batch, or ``None`` for what runs once for all of them.
    """

    key: str
    micro_batch: int | None

    def __str__(self) -> str:
        return self.key if self.micro_batch is None else f"{self.key}[{self.micro_batch}]"


@dataclasses.dataclass(frozen=True)
class Step:
    """One entry of a plan: what one call of ``ScheduleContext.execute`` asked for.

    Attributes:
      operators: what runs: one operator, or several merged, grouped or replaced.
      stream: the stream it runs on.
      reads: indices of the steps whose results it reads.
      after: indices of further steps that must have finished before it starts.
      priority: of the stream's work; higher runs first where the device can choose.
      sm_budget: at most this many streaming multiprocessors, on devices that can; ``None`` for all.
      fn: the function that replaces the operators, or ``None``.
      body: for a loop or ``shard_map``, the steps inside.
    """

    operators: tuple[OpRef, ...]
    stream: str = "compute"
    reads: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    priority: int = 0
    sm_budget: int | None = None
    fn: Callable[..., Any] | None = None
    body: tuple[Step, ...] | None = None

    @property
    def is_merged(self) -> bool:
        """Whether it runs one operator on several micro-batches joined."""
        return self.fn is None and len(self.operators) > 1 and len({ref.key for ref in self.operators}) == 1

    def __str__(self) -> str:
        names = " + ".join(map(str, self.operators))
        if self.is_merged:
            batches = ",".join(str(ref.micro_batch) for ref in self.operators)
            names = f"{self.operators[0].key}[{batches}]"
        return names if self.fn is None else f"{getattr(self.fn, '__name__', 'fn')}({names})"


class ScheduledOperator:
    """An operator of one micro-batch, as ``ScheduleContext`` hands it out.

    Has every attribute of ``Operator``, and ``micro_batch``: its index, or ``None`` for what runs once for all
    micro-batches (loops, ``shard_map``, random draws).
    """

    __slots__ = ("_context", "micro_batch", "operator")

    def __init__(self, operator: Operator, micro_batch: int | None, context: ScheduleContext):
        for name, value in (("operator", operator), ("micro_batch", micro_batch), ("_context", context)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ScheduleError(f"{self.ref} cannot be changed: a strategy orders operators, it does not edit them.")

    def __copy__(self) -> ScheduledOperator:
        return self

    def __deepcopy__(self, memo: Any) -> ScheduledOperator:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScheduledOperator) and self.ref == other.ref and self._context is other._context

    def __hash__(self) -> int:
        return hash(self.ref)

    @property
    def ref(self) -> OpRef:
        """Its name in the plan."""
        return OpRef(self.operator.key, self.micro_batch)

    def __repr__(self) -> str:
        return f"<{self.ref} {self.operator!r}>"


class OpScheduler:
    """A strategy: subclass it and override one or both methods.

    ``split`` says how many rows each micro-batch gets; ``schedule`` executes every operator of every micro-batch,
    each after its inputs. Loops are entered: ``schedule`` is called once more for the body of each loop and
    ``shard_map`` with operators inside, when the strategy executes it. The defaults do neither: the whole batch, in
    program order, on one stream.

    Strategies should hold no state that changes: plans are cached by the strategy's identity.
    """

    def split(self, info: InputInfo) -> Sequence[int]:
        """The sizes of the micro-batches; they add up to ``info.batch_size``."""
        return [info.batch_size]

    def schedule(self, ctx: ScheduleContext) -> None:
        """Executes every operator, in an order of its choice."""
        while ops := ctx.get_ready_ops():
            for op in ops:
                ctx.execute(op)

    _always_shown: frozenset[str] = frozenset()  # parameters that are shown at their defaults too

    def __repr__(self) -> str:
        """As it was made: parameters of ``__init__`` that are kept under their names, and not at their defaults."""
        given = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, parameter.default)
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name in self._always_shown or repr(value) != repr(parameter.default):
                given.append(f"{name}={getattr(value, '__name__', repr(value))}")
        return f"{type(self).__name__}({', '.join(given)})"


class ScheduleContext:
    """What a strategy sees and does while it schedules one region.

    Attributes:
      info: what is known of the function's inputs.
      sizes: rows of each micro-batch.
      graph: the operators of one micro-batch.
      path: the loops around this region, outermost first; empty at the top level.
    """

    def __init__(self, region: Region, info: InputInfo, enter: Callable[[Region], tuple[Step, ...]]):
        self.info = info
        self.sizes = region.sizes
        self.path = region.path
        self._region = region
        self._enter = enter
        self._steps: list[Step] = []
        self._done: dict[OpRef, int] = {}
        self._ops: dict[OpRef, ScheduledOperator] = {}
        self._order: dict[OpRef, tuple[int, int]] = {}
        self._sources: dict[OpRef, frozenset[OpRef]] = {}
        self._readers: dict[OpRef, list[OpRef]] = {}
        self._waiting: dict[OpRef, int] = {}
        self._ready: list[tuple[tuple[int, int], OpRef]] = []
        self._idle_calls = 0
        self._set_up()

    @property
    def graph(self) -> OpGraph:
        """The operators of one micro-batch."""
        return self._region.graph

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches there are."""
        return len(self.sizes)

    @property
    def steps(self) -> tuple[Step, ...]:
        """What was executed so far."""
        return tuple(self._steps)

    def _set_up(self) -> None:
        region, batches = self._region, range(len(self.sizes))
        for op in region.graph:
            if op.runs_once:
                self._add(op, None, (op.index, 0), {self._ref(i, m) for m in batches for i in op.predecessors})
            else:
                for m in batches:
                    own = region.operator(op.index, m)
                    self._add(own, m, (op.index, m), {self._ref(i, m) for i in own.predecessors})
        for ref, sources in self._sources.items():
            self._waiting[ref] = len(sources)
            for source in sources:
                self._readers.setdefault(source, []).append(ref)
            if not sources:
                bisect.insort(self._ready, (self._order[ref], ref), key=lambda entry: entry[0])

    def _ref(self, index: int, micro_batch: int) -> OpRef:
        op = self._region.graph.operators[index]
        return OpRef(op.key, None if op.runs_once else micro_batch)

    def _add(self, op: Operator, micro_batch: int | None, order: tuple[int, int], sources: Iterable[OpRef]) -> None:
        scheduled = ScheduledOperator(op, micro_batch, self)
        self._ops[scheduled.ref] = scheduled
        self._order[scheduled.ref] = order
        self._sources[scheduled.ref] = frozenset(sources)

    def get_ready_ops(self, micro_batch: int | None = None) -> list[ScheduledOperator]:
        """Operators whose inputs are all scheduled, in program order (an operator's micro-batches side by side).

        Args:
          micro_batch: only those of this micro-batch, and what runs once for all.

        Returns:
          The operators; empty when all are executed (or none of this micro-batch is ready).
        """
        is_index = isinstance(micro_batch, numbers.Integral) and 0 <= micro_batch < len(self.sizes)
        if micro_batch is not None and not is_index:
            raise ScheduleError(f"There is no micro-batch {shown(micro_batch)}; there are {len(self.sizes)}, from 0.")
        self._asked()
        refs = [ref for _, ref in self._ready]
        return [self._ops[ref] for ref in refs if micro_batch is None or ref.micro_batch in (micro_batch, None)]

    def all_ops(self) -> list[ScheduledOperator]:
        """Every operator of every micro-batch, executed or not, in program order."""
        self._asked()
        return [self._ops[ref] for ref in sorted(self._ops, key=self._order.__getitem__)]

    def _asked(self) -> None:
        """Counts questions, so that a loop of questions alone ends."""
        self._idle_calls += 1
        if self._idle_calls > _PATIENCE:
            raise ScheduleError(
                f"The strategy asked {_PATIENCE} times what is ready without executing anything. "
                + (f"{self._ready[0][1]} is: execute it." if self._ready else "Nothing is left: leave the loop.")
            )

    def execute(
        self,
        op_or_ops: ScheduledOperator | Iterable[ScheduledOperator],
        *,
        stream: str = "compute",
        fn: Callable[..., Any] | None = None,
        after: Iterable[ScheduledOperator | Step] | ScheduledOperator | Step = (),
        priority: int = 0,
        sm_budget: int | None = None,
    ) -> Step:
        """Appends a step to the plan.

        Args:
          op_or_ops: one operator; the same operator of several micro-batches, to run *merged* on their joined rows;
            several operators, to run as one unit in the order given; or, with ``fn``, any operators to *replace*.
          stream: where it runs; a name of your choice. Steps of a stream run in the order of the plan.
          fn: a function that takes the replaced operators' inputs (``inputs_of`` lists them) and returns a tuple of
            their outputs (``outputs_of``), such as a fused kernel. For predictions it is one kernel, or what it says
            itself (``cost.Itemized``).
          after: operators or steps that must have finished first, beyond those whose results are read.
          priority: higher runs first where the device can choose.
          sm_budget: at most this many streaming multiprocessors, on devices that can.

        Returns:
          The step; good for ``after=``.

        Raises:
          ScheduleError: naming the operator, if it was executed before or its inputs were not, if ``fn`` does not
            return what the operators do, or if an argument makes no sense.
        """
        ops = self._listed(op_or_ops)
        refs = tuple(self._checked(op) for op in ops)
        if not refs:
            raise ScheduleError("ctx.execute was called with no operator.")
        if not isinstance(stream, str) or not stream:
            raise ScheduleError(f"{refs[0]}: a stream is a name such as 'compute', not {shown(stream)}.")
        is_budget = type(sm_budget) is int and 1 <= sm_budget < _MAX_NUMBER
        if sm_budget is not None and not is_budget:
            raise ScheduleError(
                f"{refs[0]}: sm_budget is a positive number of multiprocessors, not {shown(sm_budget)}."
            )
        if type(priority) is not int or not -_MAX_NUMBER < priority < _MAX_NUMBER:
            raise ScheduleError(f"{refs[0]}: priority is a whole number of 32 bits, not {shown(priority)}.")
        reads = self._check_inputs(refs)
        step = Step(refs, stream, reads, self._indices(after, refs[0]), priority, sm_budget, fn)
        once = [op for op in ops if op.operator.runs_once]
        if once and (len(ops) > 1 or fn is not None):
            what = "draws random numbers for the whole batch"
            if once[0].operator.body is not None:
                what = "is a loop or shard_map (schedule is called for the operators inside)"
            raise ScheduleError(f"{once[0].ref} {what}: it can be neither merged, grouped nor replaced.")
        if fn is not None:
            self._check_replacement(fn, refs)
        elif step.is_merged:
            self._check_merge(ops)
        if once and once[0].operator.body is not None:
            body = self._region.body(once[0].operator.index)
            step = dataclasses.replace(step, body=self._enter(body))
        for ref in refs:
            self._done[ref] = len(self._steps)
            if self._waiting[ref] == 0:
                del self._ready[bisect.bisect_left(self._ready, self._order[ref], key=lambda entry: entry[0])]
        for ref in refs:
            for reader in self._readers.get(ref, ()):
                self._waiting[reader] -= 1
                if self._waiting[reader] == 0 and reader not in self._done:
                    bisect.insort(self._ready, (self._order[reader], reader), key=lambda entry: entry[0])
        self._steps.append(step)
        self._idle_calls = 0
        return step

    def _listed(self, value: Any) -> tuple[Any, ...]:
        """One operator or step, or several, as a tuple."""
        if not isinstance(value, Iterable) or isinstance(value, str):
            return (value,)
        most = len(self._ops)
        found = tuple(itertools.islice(value, most + 1))
        if len(found) > most:
            raise ScheduleError(
                f"More than {most} operators were listed, which is how many there are: {shown(found[0])}, ..."
            )
        return found

    def _checked(self, op: Any) -> OpRef:
        if not isinstance(op, ScheduledOperator):
            raise ScheduleError(f"ctx.execute takes operators that ctx.get_ready_ops returned, not {shown(op)}.")
        if op._context is not self:
            raise ScheduleError(f"{op.ref} belongs to another region or plan; execute what this ctx hands out.")
        return op.ref

    def _check_inputs(self, refs: tuple[OpRef, ...]) -> tuple[int, ...]:
        reads: set[int] = set()
        before: set[OpRef] = set()
        for ref in refs:
            if ref in self._done or ref in before:
                step = f" (step {self._done[ref]})" if ref in self._done else ""
                raise ScheduleError(f"{ref} was executed before{step}; every operator runs exactly once.")
            if missing := [s for s in self._sources[ref] if s not in self._done and s not in before]:
                missing.sort(key=self._order.__getitem__)
                raise ScheduleError(f"{ref} was executed before its inputs: {', '.join(map(str, missing))}.")
            reads.update(self._done[source] for source in self._sources[ref] if source in self._done)
            before.add(ref)
        return tuple(sorted(reads))

    def _indices(self, after: Any, ref: OpRef) -> tuple[int, ...]:
        found = []
        for item in self._listed(after):
            if isinstance(item, ScheduledOperator):
                index = self._done.get(self._checked(item))
            elif isinstance(item, Step):
                index = self._done.get(item.operators[0]) if item.operators else None
                if index is not None and self._steps[index] is not item:
                    index = None
            else:
                raise ScheduleError(
                    f"{ref}: after= takes operators, or steps that ctx.execute returned; not {shown(item)}."
                )
            if index is None:
                name = item.ref if isinstance(item, ScheduledOperator) else item
                raise ScheduleError(f"{ref}: after= names {name}, which was not executed yet, or not by this ctx.")
            found.append(index)
        return tuple(sorted(set(found)))

    def inputs_of(self, ops: ScheduledOperator | Iterable[ScheduledOperator]) -> list[Any]:
        """Shapes and dtypes of what a function gets that replaces ``ops``.

        In the order in which they first read it: ``x @ w`` reads ``x``, then ``w``, whatever the order of the model's
        own arguments. Two of one shape can be swapped unnoticed.
        """
        refs = self._refs(ops)
        return [var.aval for _, var in external_inputs(self._region, refs)]

    def outputs_of(self, ops: ScheduledOperator | Iterable[ScheduledOperator]) -> list[Any]:
        """Shapes and dtypes of what a function must return that replaces ``ops``, in order."""
        return [var.aval for _, var in external_outputs(self._region, self._refs(ops))]

    def jaxpr_of(self, ops: ScheduledOperator | Iterable[ScheduledOperator]) -> Any:
        """What ``ops`` compute, as a closed jaxpr from what ``inputs_of`` lists to what ``outputs_of`` lists.

        For strategies that make a replacement out of the operators themselves.

        Args:
          ops: operators of one micro-batch, each after those of them that it reads.

        Raises:
          ScheduleError: if they are of several micro-batches, or run once for all.
        """
        listed = self._listed(ops)
        refs = self._refs(listed)
        if len({ref.micro_batch for ref in refs}) != 1 or any(op.operator.runs_once for op in listed):
            raise ScheduleError(f"{' + '.join(map(str, refs))} are no operators of one micro-batch.")
        invars = [var for _, var in external_inputs(self._region, refs)]
        outvars = [var for _, var in external_outputs(self._region, refs)]
        graph = self._region.variants[refs[0].micro_batch or 0].graph
        eqns = [eqn for ref in refs for eqn in graph[ref.key].program.eqns]
        return compat.closed_jaxpr(invars, outvars, eqns, refs[0].key)

    def _refs(self, ops: Any) -> tuple[OpRef, ...]:
        return tuple(self._checked(op) for op in self._listed(ops))

    def _check_replacement(self, fn: Callable[..., Any], refs: tuple[OpRef, ...]) -> None:
        name = replacement_name(fn, refs)
        if not callable(fn):
            raise ScheduleError(f"{name} is not callable.")
        inputs = [var.aval for _, var in external_inputs(self._region, refs)]
        outputs = [var.aval for _, var in external_outputs(self._region, refs)]
        shapes = ", ".join(aval.str_short() for aval in inputs)
        try:
            compat.shapes_of(lambda *values: results_of(fn, values, outputs, name), inputs, self._region.axes)
        except Exception as error:
            error.add_note(f"{name} failed on inputs of shapes {shapes}.")
            raise

    def _check_merge(self, ops: tuple[ScheduledOperator, ...]) -> None:
        for op in ops:
            variant = self._region.variants[op.micro_batch or 0]
            for what, variables in (("reads", op.program.invars), ("gives", op.program.outvars)):
                for var in variables:
                    state = variant.states.get(var, INVARIANT)
                    problem = merge_problem(state, var.aval)
                    if what == "gives" and variant.is_factor(state):
                        problem = "is a sum over its rows, which other values are divided by or multiplied with"
                    if problem:
                        raise ScheduleError(
                            f"{op.key} cannot be merged over micro-batches {[o.micro_batch for o in ops]}: it {what} "
                            f"a value {var.aval.str_short()} that {problem}. Execute it for each micro-batch."
                        )

    def check_complete(self) -> None:
        """Raises ``ScheduleError`` if an operator was never executed."""
        if missing := sorted((ref for ref in self._ops if ref not in self._done), key=self._order.__getitem__):
            names = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            where = f" in the body of {'/'.join(self.path)}" if self.path else ""
            raise ScheduleError(
                f"The strategy never executed {names}{where}. "
                "Loop until ctx.get_ready_ops() is empty: executing an operator makes others ready."
            )


def replacement_name(fn: Callable[..., Any], refs: Iterable[OpRef]) -> str:
    """A function and the operators that it replaces, for messages."""
    return f"fn={shown(getattr(fn, '__name__', fn))} in place of {' + '.join(map(str, refs))}"


def results_of(fn: Callable[..., Any], values: Sequence[Any], outputs: Sequence[Any], name: str) -> list[Any]:
    """What a function returns that replaces operators, checked: it might differ from one call to the next.

    Args:
      fn: the function.
      values: its arguments.
      outputs: shapes and dtypes that it has to return.
      name: of the function and the operators, for messages.

    Raises:
      ScheduleError: if it returns anything else.
    """
    results = jax.tree.leaves(fn(*values))
    try:
        got = [compat.aval_of(result) for result in results]
    except TypeError as error:
        raise ScheduleError(f"{name} returned what is no array: {error}") from error
    if [(aval.shape, aval.dtype) for aval in got] != [(aval.shape, aval.dtype) for aval in outputs]:
        returned, read, expected = (
            ", ".join(aval.str_short() for aval in avals) or "nothing"
            for avals in (got, map(compat.aval_of, values), outputs)
        )
        raise ScheduleError(f"{name} returned {returned} for inputs {read}; the operators return {expected}.")
    return results


def external_inputs(region: Region, refs: Sequence[OpRef]) -> list[tuple[int, Any]]:
    """The variables that a group of operators reads from outside it, with their micro-batches, each once."""
    made: set[tuple[int, Any]] = set()
    found: dict[tuple[int, Any], None] = {}
    for ref in refs:
        m = ref.micro_batch or 0
        op = region.variants[m].graph[ref.key]
        found.update(((m, var), None) for var in op.program.invars if (m, var) not in made)
        made.update((m, var) for var in op.program.outvars)
    return list(found)


def external_outputs(region: Region, refs: Sequence[OpRef]) -> list[tuple[int, Any]]:
    """The variables of a group of operators that something outside it reads, with their micro-batches."""
    found: list[tuple[int, Any]] = []
    for m in dict.fromkeys(ref.micro_batch or 0 for ref in refs):
        own = [ref.key for ref in refs if (ref.micro_batch or 0) == m]
        graph = region.variants[m].graph
        read = {var for var in graph.program.outvars if not compat.is_literal(var)}
        inside = set(own)
        for index in {i for key in own for i in graph.successors[graph[key].index]}:
            if graph.operators[index].key not in inside:
                read.update(graph.operators[index].program.invars)
        found += [(m, var) for key in own for var in graph[key].program.outvars if var in read]
    return found


def run_strategy(strategy: OpScheduler, region: Region, info: InputInfo) -> tuple[Step, ...]:
    """Has a strategy schedule a region and the regions inside it.

    Raises:
      ScheduleError: if it leaves out an operator, or asks for something impossible.
    """

    def enter(region: Region) -> tuple[Step, ...]:
        ctx = ScheduleContext(region, info, enter)
        try:
            strategy.schedule(ctx)
            ctx.check_complete()
        except Exception as error:
            where = f"the body of {'/'.join(region.path)}" if region.path else "the top level"
            error.add_note(f"{strategy!r} was scheduling {where}, after {len(ctx.steps)} steps.")
            raise
        return ctx.steps

    return enter(region)
