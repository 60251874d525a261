"""Measuring what ``Auto`` chooses between, ahead of time, and keeping the choice."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax

from dynaflow_jax import cache, compat
from dynaflow_jax.candidates import AutoDynaFlow, Candidate, Candidates
from dynaflow_jax.errors import DispatchWarning, DynaFlowError, PlanError
from dynaflow_jax.plan import Plan
from dynaflow_jax.strategies.auto import Auto, checked_budget
from dynaflow_jax.text import table
from dynaflow_jax.transform import DynaFlow, dynaflow

LEAST_GAIN = 0.02
"""By how much of its time a plan has to be faster than the unscheduled function to be chosen."""

_LEAST_ROUNDS = 7  # too few for quartiles otherwise
_MOST_ROUNDS = 40
_TURN_S = 1e-2  # as long as one turn of a contender lasts at least: waiting for its end is a small share then
_MOST_CALLS = 100
_LOCK_S = 120.0  # beyond the budget, since compiling is not interrupted

Clock = Callable[[], float]
"""Seconds since some moment."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A candidate and what became of it.

    Attributes:
      name: its strategy and backend.
      predicted_us: how long a call was predicted to take, in microseconds; ``None`` if it has no plan.
      measured_us: the median of what calls took; ``None`` if it was not measured.
      spread_us: the interquartile range of that.
      note: why it was not measured, or not chosen; ``"chosen"`` for the choice.
    """

    name: str
    predicted_us: float | None = None
    measured_us: float | None = None
    spread_us: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What ``tune`` found.

    Attributes:
      function: the function's name.
      device: the kind of device.
      chosen: the choice: a strategy and its backend, or ``"unscheduled"``.
      unscheduled_us: median microseconds of a call of the unscheduled function.
      chosen_us: those of the choice.
      contenders: all candidates; empty if the choice was kept from before.
      kept: whether the choice was measured before, and read from disk.
      path: where it is kept; ``None`` if it could not be.
    """

    function: str
    device: str
    chosen: str
    unscheduled_us: float
    chosen_us: float
    contenders: tuple[Contender, ...] = ()
    kept: bool = False
    path: Path | None = None

    @property
    def speedup(self) -> float:
        """How many times as fast as the unscheduled function the choice is."""
        return self.unscheduled_us / self.chosen_us if self.chosen_us else 1.0

    def show(self) -> str:
        """The candidates as a table, and the choice."""
        rows: list[tuple[str, ...]] = [("candidate", "predicted µs", "measured µs", "spread µs", "")]
        for c in self.contenders:
            rows.append((c.name, *map(_us, (c.predicted_us, c.measured_us, c.spread_us)), c.note))
        how = "measured before" if self.kept else "measured"
        where = f"kept in {self.path}" if self.path else "not kept on disk"
        last = (
            f"{self.function} on {self.device}, {how}: {self.chosen}, {self.chosen_us:.1f} µs; unscheduled "
            f"{self.unscheduled_us:.1f} µs, ratio {self.speedup:.3f}; {where}"
        )
        return "\n".join([*(table(rows, right={1, 2, 3}) if self.contenders else ()), *[""] * bool(rows[1:]), last])

    def to_json(self) -> str:
        """The same as JSON text."""
        data = dataclasses.asdict(self) | {"path": self.path and str(self.path), "speedup": self.speedup}
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        return self.show()


def tune(
    flow: DynaFlow | Callable[..., Any], *args: Any, budget_s: float | None = None, force: bool = False, **kwargs: Any
) -> Tuning:
    """Measures on the default device what ``Auto`` chooses between, for arguments of these shapes; keeps the choice.

    The function as it is and the candidates that the cost model likes best are compiled and take turns. What is the
    fastest is chosen if it beats the function as it is by more than 2% of the medians and by more than the times
    spread, and does so once more against it alone. What is traced afterwards runs so, in this process and in others;
    a ``jax.jit`` that was traced for these shapes before keeps what it has. If another process measures the same, its
    choice is waited for. A line on standard error shows progress if that is a terminal.

    Args:
      flow: what ``dynaflow`` made with ``Auto``; a plain function stands for ``dynaflow(flow, scheduler=Auto())``.
      args: arrays, as for a call.
      budget_s: seconds, compiling included, in place of those that ``Auto`` has.
      force: whether to measure again what was measured before.
      kwargs: arrays, as for a call.

    Returns:
      The choice, with a table of all candidates; see ``Tuning``.

    Raises:
      DynaFlowError: if ``flow`` was not made with ``Auto``, or the arguments are no arrays.
    """
    if not isinstance(flow, DynaFlow):
        if isinstance(getattr(flow, "__wrapped__", None), DynaFlow):
            raise DynaFlowError("tune takes what dynaflow returned, without jax.jit around it: tune(flow, *args).")
        flow = dynaflow(flow, scheduler=Auto())
    if not isinstance(flow, AutoDynaFlow):
        raise DynaFlowError(
            f"{flow!r} has its strategy; tune takes functions made with scheduler=df.strategies.Auto()."
        )
    budget = flow.auto.budget_s if budget_s is None else checked_budget(budget_s)
    call = flow._call(args, kwargs)
    for leaf, name in zip(call.leaves, call.names, strict=True):
        if compat.is_tracer(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            raise DynaFlowError(f"tune runs the function, so it takes arrays; {name} is {leaf!r:.60}.")
    candidates = Candidates(flow, call)
    with cache.locked(candidates.key, budget + _LOCK_S):
        entry = None if force else cache.load(candidates.key) or flow.measured.get(candidates.key)
        if entry is not None and _still_holds(candidates, entry):
            flow.adopt(candidates.key, entry)
            return _kept(candidates, entry)
        return Contest(candidates, budget).run()


def _still_holds(candidates: Candidates, entry: cache.Entry) -> bool:
    """Whether the candidate that was measured is the same one now."""
    candidate = candidates.fits(entry)
    if candidate is None or entry.plan is None:
        return candidate is not None
    return candidates.all[candidate.index].plan == _plan_of(entry.plan)


def _plan_of(text: str) -> Plan | None:
    try:
        return Plan.from_json(text)
    except PlanError:
        return None


def _kept(candidates: Candidates, entry: cache.Entry) -> Tuning:
    path = cache.path_of(candidates.key)
    return Tuning(
        *_titles(candidates),
        candidates.listed[entry.candidate].name,
        entry.unscheduled_us,
        entry.chosen_us,
        kept=True,
        path=path if path.exists() else None,
    )


def _titles(candidates: Candidates) -> tuple[str, str]:
    return str(candidates.about["function"]), candidates.unscheduled.info.device_kind


class Contest:
    """Measures candidates against the unscheduled function.

    Args:
      candidates: the candidates.
      budget_s: seconds, compiling included.
      measure: measures them, as ``take_turns`` does.
      stream: where to show progress.
    """

    def __init__(
        self,
        candidates: Candidates,
        budget_s: float,
        measure: Callable[..., dict[int, list[float]]] | None = None,
        stream: TextIO | None = None,
    ):
        self.candidates = candidates
        self.measure = measure or take_turns
        self.start = time.perf_counter()
        self.budget_s = budget_s
        self.notes: dict[int, str] = {c.index: c.dropped for c in candidates.all if c.dropped}
        self.progress = Progress(f"tuning {candidates.about['function']}", stream or sys.stderr)

    def run(self) -> Tuning:
        """Measures, chooses and keeps the choice."""
        try:
            times, index = self._measured()
        finally:
            self.progress.close()
            gc.collect()  # losers' plans have memory of their own
        chosen = self.candidates.all[index]
        medians = {i: statistics.median(taken) for i, taken in times.items()}
        for i, median in medians.items():
            if i not in (0, index):
                self.notes.setdefault(
                    i, f"{median / medians[0] - 1:+.1%}{'' if median > medians[0] else ', too little'}"
                )
        self.notes[index] = "chosen"
        entry = cache.Entry(
            index,
            repr(chosen.strategy) if index else None,
            chosen.backend,
            {f"{i}: {self.candidates.all[i].name}": round(median, 2) for i, median in medians.items()},
            round(medians[0], 2),
            round(medians[index], 2),
            _json_of(chosen) if index else None,
            self.candidates.about,
        )
        path = cache.save(self.candidates.key, entry)
        self.candidates.flow.adopt(self.candidates.key, entry)
        contenders = tuple(
            Contender(
                c.name,
                None if math.isinf(c.predicted_us) else round(c.predicted_us, 2),
                round(medians[c.index], 2) if c.index in medians else None,
                round(spread(times[c.index]), 2) if c.index in times else None,
                self.notes.get(c.index, ""),
            )
            for c in self.candidates.all
        )
        titles = _titles(self.candidates)
        return Tuning(*titles, chosen.name, entry.unscheduled_us, entry.chosen_us, contenders, False, path)

    def _measured(self) -> tuple[dict[int, list[float]], int]:
        """Microseconds of calls of each candidate, and which is chosen."""
        funs: dict[int, Callable[[], Any]] = {}
        for candidate in self._finalists():
            if candidate.index and self._elapsed() > self.budget_s / 2:
                self.notes[candidate.index] = "no time left to compile it"
                continue
            self.progress.show(f"compiling {candidate.name}")
            try:
                fun = self._compiled(candidate)
            except Exception as error:
                if not candidate.index:
                    raise
                text = str(error).strip() or "no message"
                self.notes[candidate.index] = f"{type(error).__name__}: {text.splitlines()[0]}"
            else:
                funs[candidate.index] = fun
        times = self.measure(funs, self._deadline(0.75), progress=self._show)
        index = choose(times)
        if index:
            pair = {i: funs[i] for i in (0, index)}
            final = self.measure(pair, self._deadline(1.0), progress=self._show)
            times |= final
            if choose(final) != index:
                self.notes[index] = "faster at first, not when measured again"
                index = 0
        return times, index

    def _finalists(self) -> list[Candidate]:
        """The unscheduled function, and what is predicted to be best."""
        first, *others = self.candidates.all
        usable = sorted((c for c in others if not c.dropped), key=lambda c: c.predicted_us)
        keep = self.candidates.flow.auto.keep
        for candidate in usable[keep:]:
            self.notes[candidate.index] = "predicted to be slower"
        return [first, *usable[:keep]]

    def _compiled(self, candidate: Candidate) -> Callable[[], Any]:
        """A call of a candidate, which has been called once."""
        candidates = self.candidates
        flow = candidates.flow.scheduled_by(candidate.strategy, candidate.backend) if candidate.index else None
        resolved, leaves = candidates.resolved(candidate, flow), candidates.call.leaves
        compiled = jax.jit(resolved.call)

        def call(flow: DynaFlow | None = flow) -> Any:  # which holds what a dispatched plan consists of
            return compiled(leaves)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DispatchWarning)
            jax.block_until_ready(call())
        if candidate.index and candidate.backend == "dispatch" and not resolved.choice.dispatch:
            raise DynaFlowError(resolved.choice.why)  # found out inside shard_map
        return call

    def _elapsed(self) -> float:
        return time.perf_counter() - self.start

    def _deadline(self, share: float) -> float:
        return self.start + share * self.budget_s

    def _show(self, rounds: int, times: Mapping[int, Sequence[float]]) -> None:
        medians = {i: statistics.median(taken) for i, taken in times.items()}
        best = min(medians, key=medians.__getitem__)
        name = self.candidates.all[best].name
        self.progress.show(f"round {rounds}, {self._elapsed():.0f} of {self.budget_s:.0f} s, best {name}")


def _json_of(candidate: Candidate) -> str | None:
    try:
        return candidate.plan and candidate.plan.to_json()
    except PlanError:  # a replacement function without a name
        return None


# -- measuring and deciding ------------------------------------------------------------------------------------------


def take_turns(
    funs: Mapping[int, Callable[[], Any]],
    deadline: float,
    *,
    clock: Clock = time.perf_counter,
    progress: Callable[[int, Mapping[int, Sequence[float]]], None] | None = None,
) -> dict[int, list[float]]:
    """Microseconds that calls take, contenders in turns, in changing order.

    Args:
      funs: the contenders; calls return arrays, which are waited for.
      deadline: on the clock; at least seven rounds are measured in any case, at most forty.
      clock: tells the time in seconds.
      progress: is told after every round how many there were, and the times.

    Returns:
      The mean microseconds of a call in each round, of each contender.
    """
    calls: dict[int, int] = {}
    for name, fun in funs.items():
        jax.block_until_ready(fun())  # what the others left in caches counts for nobody
        took = []
        for _ in range(3):  # one by chance slow call would leave it with fewer calls a turn, to share what a turn costs
            start = clock()
            jax.block_until_ready(fun())
            took.append(clock() - start)
        calls[name] = min(_MOST_CALLS, max(1, math.ceil(_TURN_S / max(min(took), 1e-9))))
    times: dict[int, list[float]] = {name: [] for name in funs}
    names = list(funs)
    for done in range(1, _MOST_ROUNDS + 1):
        for name in names if done % 2 else reversed(names):
            fun, result = funs[name], None
            jax.block_until_ready(fun())
            start = clock()
            for _ in range(calls[name]):
                result = fun()
            jax.block_until_ready(result)
            times[name].append((clock() - start) / calls[name] * 1e6)
        if progress:
            progress(done, times)
        if done >= _LEAST_ROUNDS and clock() >= deadline:
            break
    return times


def choose(times: Mapping[int, Sequence[float]]) -> int:
    """The contender to choose: the fastest of those that are faster than contender 0 beyond noise, else that one."""
    medians = {i: statistics.median(taken) for i, taken in times.items()}
    return min((i for i in times if i == 0 or is_faster(times[i], times[0])), key=medians.__getitem__)


def is_faster(times: Sequence[float], baseline: Sequence[float]) -> bool:
    """Whether the medians differ by more than 2% of the baseline's and more than either of the two spreads."""
    gain = statistics.median(baseline) - statistics.median(times)
    return gain > max(LEAST_GAIN * statistics.median(baseline), spread(times), spread(baseline))


def spread(times: Sequence[float]) -> float:
    """The interquartile range; of fewer than two times, anything."""
    if len(times) < 2:
        return math.inf
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first


class Progress:
    """One line that is written again and again, on a terminal; nothing anywhere else."""

    def __init__(self, label: str, stream: TextIO):
        self.label = label
        self.stream = stream
        self._shown = stream.isatty()

    def show(self, text: str) -> None:
        """Writes the line anew."""
        if self._shown:
            self.stream.write(f"\r\x1b[K{self.label}: {text}"[:120])
            self.stream.flush()

    def close(self) -> None:
        """Clears the line."""
        if self._shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
