"""The ways to run a function that ``Auto`` chooses between, and the choice: as measured, or as predicted."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jaxlib import version as jaxlib_version

from dynaflow_jax import cache, compat
from dynaflow_jax.call import Call
from dynaflow_jax.errors import DispatchWarning, DynaFlowError, PlanError, TuningWarning, warn_user
from dynaflow_jax.lowering.choice import Choice
from dynaflow_jax.options import Options
from dynaflow_jax.plan import Plan
from dynaflow_jax.program import Program, from_jaxpr
from dynaflow_jax.schedule import OpScheduler, Step
from dynaflow_jax.simulate import step_us
from dynaflow_jax.strategies.auto import Auto
from dynaflow_jax.strategies.sequential import Sequential
from dynaflow_jax.transform import DynaFlow, Resolved
from dynaflow_jax.version import __version__

MARGIN = 0.03
"""By how much a plan that was never measured has to be predicted faster than the unscheduled function."""

UNSCHEDULED = "unscheduled"
"""The name of the first candidate: the function as it is."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a function at one set of shapes.

    Attributes:
      index: among the candidates; 0 is the unscheduled function.
      strategy: the strategy.
      backend: what its plan is lowered to, ``"xla"`` or ``"dispatch"``.
      plan: the plan; ``None`` if there is none.
      predicted_us: how long a call is predicted to take, in microseconds.
      dropped: why it is out of the question; empty if it is not.
    """

    index: int
    strategy: OpScheduler
    backend: str
    plan: Plan | None = None
    predicted_us: float = float("inf")
    dropped: str = ""

    @property
    def name(self) -> str:
        """The strategy and the backend, as text."""
        return f"{self.strategy!r}, {self.backend}" if self.index else UNSCHEDULED


class AutoDynaFlow(DynaFlow):
    """A function for which a strategy, or none, is chosen for each set of shapes; made by ``dynaflow``.

    Attributes:
      auto: what to choose between.
      strategies: the candidates.
      measured: choices that were measured in this process, by key.
    """

    def __init__(self, auto: Auto, strategies: Sequence[OpScheduler], fun: Callable[..., Any], options: Options):
        super().__init__(fun, Sequential(), options)
        self.auto = auto
        self.strategies = tuple(strategies)
        self.measured: dict[str, cache.Entry] = {}
        # Programs that were compiled from a dispatched plan need it for as long as this function lives.
        self._alternatives: dict[tuple[int, str], DynaFlow] = {}
        self._alternatives_lock = threading.Lock()

    def candidates(self, *args: Any, **kwargs: Any) -> tuple[Candidate, ...]:
        """All ways to run the function on arguments of these shapes, with predicted times; nothing is measured."""
        return Candidates(self, self._call(args, kwargs)).all

    def adopt(self, key: str, entry: cache.Entry) -> None:
        """Has what is traced from here on run as measured."""
        self.measured[key] = entry
        with self._lock:
            self._cache.clear()

    def scheduled_by(self, strategy: OpScheduler, backend: str) -> DynaFlow:
        """The same function with one strategy."""
        return DynaFlow(self.fun, strategy, dataclasses.replace(self.options, backend=backend))

    def alternative(self, candidate: Candidate) -> DynaFlow:
        """The function as a candidate schedules it, kept."""
        name = candidate.index, candidate.backend
        with self._alternatives_lock:
            if name not in self._alternatives:
                self._alternatives[name] = self.scheduled_by(candidate.strategy, candidate.backend)
            return self._alternatives[name]

    def __repr__(self) -> str:
        return f"dynaflow({getattr(self.fun, '__name__', self.fun)}, scheduler={self.auto!r})"

    def _resolved(self, call: Call, like: Resolved | None = None) -> Resolved:
        return self._kept(call, lambda: Candidates(self, call).chosen())


class Unscheduled(Resolved):
    """A function at one set of shapes, left as it is; its plan says in which order its operators stand in it."""

    def call(self, leaves: Sequence[Any]) -> Any:
        """Evaluates the function as it was traced."""
        outs = self._as_traced(list(self.constants), list(leaves))
        return jax.tree.unflatten(self.splitting.whole.out_tree, outs)

    @functools.cached_property
    def _as_traced(self) -> Callable[..., Any]:
        return jax.jit(self._unscheduled, inline=True)


class Candidates:
    """The ways to run a function at one set of shapes.

    Attributes:
      flow: the function.
      unscheduled: the function as it is.
      about: what a measured choice is for, as plain data.
      key: what it is kept under.
    """

    def __init__(self, flow: AutoDynaFlow, call: Call):
        self.flow = flow
        self.call = call
        self.unscheduled = Unscheduled(flow.scheduled_by(Sequential(), "xla"), call)
        self.about = self._about()
        self.key = cache.key_of(self.about)

    @functools.cached_property
    def backends(self) -> tuple[str, ...]:
        """What plans may be lowered to."""
        if self.flow.options.backend != "auto":
            return (self.flow.options.backend,)
        return ("xla", "dispatch") if self.unscheduled.info.platform == "gpu" else ("xla",)

    @functools.cached_property
    def listed(self) -> tuple[Candidate, ...]:
        """All candidates, without plans."""
        pairs = [(strategy, backend) for strategy in self.flow.strategies for backend in self.backends]
        rest = [Candidate(i, strategy, backend) for i, (strategy, backend) in enumerate(pairs, 1)]
        return Candidate(0, Sequential(), "xla"), *rest

    @functools.cached_property
    def all(self) -> tuple[Candidate, ...]:
        """All candidates, with plans and predicted times; those that are out of the question say why."""
        plan = self.unscheduled.plan
        first = dataclasses.replace(self.listed[0], plan=plan, predicted_us=predicted_us(plan, "xla"))
        seen: dict[Any, Candidate] = {_program(plan, "xla"): first}
        plans: dict[int, Plan | str] = {}
        found = [first]
        for candidate in self.listed[1:]:
            which = id(candidate.strategy)
            if which not in plans:
                plans[which] = self._planned(candidate.strategy)
            plan = plans[which]
            if isinstance(plan, str):
                found.append(dataclasses.replace(candidate, dropped=plan))
                continue
            candidate = dataclasses.replace(candidate, plan=plan, predicted_us=predicted_us(plan, candidate.backend))
            same = seen.setdefault(_program(plan, candidate.backend), candidate)
            if same is not candidate:
                candidate = dataclasses.replace(candidate, dropped=f"the same as {same.name}")
            found.append(candidate)
        return tuple(found)

    def resolved(self, candidate: Candidate, flow: DynaFlow | None = None) -> Resolved:
        """The function as a candidate runs it.

        Args:
          candidate: one of these.
          flow: the function with its strategy; by default the one that ``flow`` keeps.

        Raises:
          DynaFlowError: if it cannot be run so, a plan that cannot be dispatched included.
        """
        if not candidate.index:
            return self.unscheduled
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DispatchWarning)
            resolved = (flow or self.flow.alternative(candidate))._resolved(self.call, self.unscheduled)
        if candidate.backend == "dispatch" and not resolved.is_dispatched:
            raise DynaFlowError(resolved.choice.why)
        return resolved

    def chosen(self) -> Resolved:
        """What was measured as the fastest, or, if nothing was measured, is predicted to be."""
        entry = self.flow.measured.get(self.key) or cache.load(self.key)
        found = entry and self._as_measured(entry)
        return found or self._as_predicted()

    def fits(self, entry: cache.Entry) -> Candidate | None:
        """The candidate that a measured choice names; ``None`` if it is not the one that was measured."""
        if entry.candidate >= len(self.listed):
            return None
        candidate = self.listed[entry.candidate]
        strategy = repr(candidate.strategy) if candidate.index else None
        return candidate if (strategy, candidate.backend) == (entry.strategy, entry.backend) else None

    def _as_measured(self, entry: cache.Entry) -> Resolved | None:
        candidate = self.fits(entry)
        if candidate is None:
            return None
        try:
            resolved = self.resolved(candidate)
            if entry.plan is not None and Plan.from_json(entry.plan) != resolved.plan:
                raise PlanError(f"{candidate.name} makes another plan now")
        except DynaFlowError as error:
            warn_user(f"{self.flow!r} does not run as measured: {error} df.tune measures anew.", TuningWarning)
            return None
        figures = f"{UNSCHEDULED} takes {entry.unscheduled_us:.1f} µs"
        if candidate.index:
            figures = f"{candidate.name} takes {entry.chosen_us:.1f} µs, {figures}"
        return _because(resolved, f"of {len(entry.measured_us)} candidates it was measured as the best: {figures}")

    def _as_predicted(self) -> Resolved:
        usable = [candidate for candidate in self.all if not candidate.dropped]
        for candidate in sorted(usable, key=lambda c: c.predicted_us):
            if candidate.predicted_us > (1 - MARGIN) * usable[0].predicted_us:
                break
            try:
                resolved = self.resolved(candidate)
            except DynaFlowError:
                continue
            gain = usable[0].predicted_us / candidate.predicted_us
            return _because(resolved, f"{candidate.name} is predicted to be {gain:.2f} times as fast as the function")
        why = f"no candidate is predicted to be {MARGIN:.0%} faster than the function as it is; df.tune measures"
        return _because(self.unscheduled, why)

    def _planned(self, strategy: OpScheduler) -> Plan | str:
        """A strategy's plan, or why there is none."""
        try:
            return self.flow.scheduled_by(strategy, "xla")._resolved(self.call, self.unscheduled).plan
        except DynaFlowError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"

    def _about(self) -> dict[str, Any]:
        resolved, flow, given = self.unscheduled, self.flow, self.flow.options
        layout, plan = resolved.layout, resolved.plan
        axes = zip(layout.avals, layout.axes, strict=True)
        assert plan.origin is not None
        return {
            "function": getattr(flow.fun, "__qualname__", type(flow.fun).__name__),
            "device": resolved.info.device_kind,
            "versions": {"jax": jax.__version__, "jaxlib": jaxlib_version.__version__, "dynaflow_jax": __version__},
            "arguments": [f"{aval.str_short()}{'' if axis is None else f' batch {axis}'}" for aval, axis in axes],
            "graph": f"{plan.fingerprint} {_digest(resolved.unopened.program)}",
            "mesh": [[str(name), size] for name, size in plan.origin.axes.items()],
            "shards": layout.shards,
            "candidates": [_described(strategy) for strategy in flow.strategies],
            "options": [
                list(self.backends),
                given.rng,
                given.unroll,
                repr(given.context),
                list(given.allow_batch_mixing),
            ],
        }


def predicted_us(plan: Plan, backend: str) -> float:
    """How long a call is predicted to take in microseconds.

    Streams run at once if the plan is dispatched. As one XLA program it is as if there were one: XLA keeps the order,
    and has not been seen to hide communication.
    """
    if backend == "xla":
        plan = dataclasses.replace(plan, steps=_on_one_stream(plan.steps))
    return step_us(plan)


def _program(plan: Plan, backend: str) -> Any:
    """Equal for plans that run alike; XLA runs whatever stands in one order alike, on however many streams."""
    return plan.sizes, _on_one_stream(plan.steps) if backend == "xla" else plan.steps, backend


def _on_one_stream(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(
        dataclasses.replace(step, stream="compute", body=None if step.body is None else _on_one_stream(step.body))
        for step in steps
    )


def _because(resolved: Resolved, why: str) -> Resolved:
    """The same, saying why it was chosen."""
    resolved.choice = Choice(resolved.choice.dispatch, why)
    return resolved


def _described(strategy: OpScheduler) -> str:
    """A strategy as text: its class, how it calls itself, and its plain attributes, which that may leave out.

    And those of the strategies that it is made of.
    """
    kind = type(strategy)
    plain = sorted(
        (name, _described(value) if isinstance(value, OpScheduler) else value)
        for name, value in vars(strategy).items()
        if isinstance(value, (int, float, str, type(None), OpScheduler))
    )
    return f"{kind.__module__}.{kind.__qualname__} {strategy!r} {plain}"


def _digest(program: Program) -> str:
    """Identifies what a program computes, by primitives and shapes, wherever rules and marks cut it."""
    digest = hashlib.sha256()
    for line in _equations(program):
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def _equations(program: Program) -> Iterator[str]:
    for eqn in program.eqns:
        yield f"{eqn.primitive.name} {[var.aval.str_short() for var in eqn.outvars]}\n"
        for name, jaxpr in compat.sub_jaxprs(eqn):
            yield f"{name}:\n"
            yield from _equations(from_jaxpr(jaxpr))
