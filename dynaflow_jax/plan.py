"""A plan: the resolved physical schedule of a function, as data.

A plan prints, compares, hashes, saves as JSON and loads again; applied to the same function it gives the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import html
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dynaflow_jax import compat
from dynaflow_jax.batch.region import Region
from dynaflow_jax.details import Origin, StepDetails, details_of
from dynaflow_jax.devices import DeviceModel
from dynaflow_jax.errors import DynaFlowError, PlanError, ScheduleError
from dynaflow_jax.graph import OpGraph
from dynaflow_jax.schedule import InputInfo, OpRef, OpScheduler, ScheduleContext, Step
from dynaflow_jax.simulate import simulate
from dynaflow_jax.substitution import Substituted
from dynaflow_jax.timeline import Timeline
from dynaflow_jax.visualize import to_html

_VERSION = 1
_MAX_DEPTH = 64  # of loops inside loops
_MAX_NUMBER = 2**63  # what any language that reads the JSON can hold, and any that prints it


@dataclasses.dataclass(frozen=True)
class Plan:
    """What runs, in which order, on which stream, on which rows.

    Attributes:
      sizes: rows of each micro-batch.
      steps: what runs, in order; see ``Step``.
      strategy: the strategy that made it, as text.
      fingerprint: identifies the operators it was made for.
      origin: the function that it was made for; ``None`` if it comes from JSON and was not applied to one yet. Copies
        in other processes have none either.
    """

    sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    strategy: str
    fingerprint: str
    origin: Origin | None = dataclasses.field(default=None, compare=False, repr=False)

    def made_for(self, region: Region, info: InputInfo) -> Plan:
        """The same plan, which knows the function that it runs."""
        return dataclasses.replace(self, origin=Origin(region, info, compat.mesh_sizes()))

    @functools.cached_property
    def details(self) -> tuple[StepDetails, ...]:
        """What each of ``steps`` does: shapes, operations, bytes, kernels; worked out when asked for.

        Raises:
          PlanError: if the plan does not know the function, as one from JSON.
        """
        if self.origin is None:
            raise PlanError(
                "The plan only knows the names of its steps, not what they do: it comes from JSON. Apply it to the "
                "function: dynaflow(fun, scheduler=plan).plan(*args) gives one that knows."
            )
        return details_of(self.steps, self.origin)

    def simulate(self, device: DeviceModel | str | None = None) -> Timeline:
        """What the plan is predicted to do on a device; see ``dynaflow_jax.simulate``."""
        return simulate(self, device)

    def __getstate__(self) -> dict[str, Any]:
        # Programs do not leave the process.
        return {**self.__dict__, "origin": None}

    @property
    def streams(self) -> tuple[str, ...]:
        """The names of its streams, in order of first use."""
        return tuple(dict.fromkeys(_streams(self.steps)))

    def to_json(self) -> str:
        """The plan as JSON text.

        Raises:
          PlanError: if a replacement function cannot be found again by module and name.
        """
        steps = [_step_to_json(step) for step in self.steps]
        data = {"version": _VERSION, "strategy": self.strategy, "fingerprint": self.fingerprint}
        return json.dumps({**data, "sizes": list(self.sizes), "steps": steps}, indent=1)

    @staticmethod
    def from_json(text: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> Plan:
        """The plan that ``to_json`` wrote.

        Args:
          text: JSON.
          functions: replacement functions by the name in the JSON (``"module:function"``); those that are not given
            are looked up in modules that are imported already (a plan should not decide what gets imported).

        Raises:
          PlanError: if the text is damaged, saying where.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PlanError(f"The plan is not JSON: {error}.") from None
        read = _Reader(functions or {})
        try:
            return Plan._read(read, read.object(data, "plan"))
        except RecursionError:  # while an error was about to show a value
            raise PlanError("The plan holds a value of lists or objects inside each other, too deep to show.") from None

    @staticmethod
    def _read(read: _Reader, data: dict[str, Any]) -> Plan:
        version = read.field(data, "version", int, "plan")
        if version != _VERSION:
            raise PlanError(f"The plan has version {version}; this library reads version {_VERSION}.")
        sizes = tuple(read.integer(size, "plan.sizes") for size in read.field(data, "sizes", list, "plan"))
        if not sizes or min(sizes) < 1:
            raise PlanError(f"plan.sizes must list the rows of each micro-batch, not {list(sizes)}.")
        steps = read.steps(read.field(data, "steps", list, "plan"), "plan.steps")
        strategy = read.field(data, "strategy", str, "plan")
        return Plan(sizes, steps, strategy, read.field(data, "fingerprint", str, "plan"))

    def validate(self, region: Region, info: InputInfo) -> None:
        """Checks that the plan fits a function: every operator once, after its inputs, with nothing left over.

        Raises:
          PlanError: naming the operator and what is wrong.
        """
        if self.sizes != region.sizes:
            raise PlanError(
                f"The plan splits {sum(self.sizes)} rows into {list(self.sizes)}; the function's micro-batches have "
                f"{list(region.sizes)}."
            )
        expected = fingerprint(region)
        if self.fingerprint != expected:
            raise PlanError(
                f"The plan was made for other operators (fingerprint {self.fingerprint}, the function has {expected}): "
                "the model, its marks, the rules or the shapes have changed. Make a new plan."
            )
        try:
            _replay(self.steps, region, info)
        except ScheduleError as error:
            raise PlanError(f"The plan does not fit the function: {error}") from error

    def show(self, width: int | None = None) -> str:
        """The plan as a timeline of text: streams side by side, time downwards.

        Every step takes one line and starts as early as the streams and what it reads allow, so what stands on one
        line can run at once. What is inside a loop is indented below it.

        Args:
          width: characters per stream; by default as many as the longest name has, at most the terminal's.
        """
        split = "not split"
        if len(self.sizes) > 1:
            split = f"{len(self.sizes)} micro-batches of {' + '.join(map(str, self.sizes))} rows"
        count = _count(self.steps)
        head = f"Plan of {self.strategy}: {split}, {count} steps, "
        streams = self.streams
        if width is None:
            names = [*streams, *_texts(self.steps, "")]
            width = min(max(map(len, names), default=1), shutil.get_terminal_size().columns)
        head += f"{len(streams)} stream{'s' * (len(streams) != 1)}"
        lines = [head, "  ".join(name.ljust(width) for name in streams).rstrip()]
        lines.append("  ".join("-" * width for _ in streams))
        lines += _timeline(self.steps, streams, width, "")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.show()

    def to_html(self, device: DeviceModel | str | None = None, timeline: Timeline | None = None) -> str:
        """The plan as a page of HTML: a lane for each stream, a box for each step.

        Args:
          device: the device that the times are predicted for, as for ``simulate``.
          timeline: measured times, which are drawn below the predicted ones.

        Raises:
          PlanError: if there is nothing to draw: the plan does not know what its steps do, and no timeline is given.
        """
        if timeline is None:
            return to_html(self.simulate(device))
        return to_html(timeline) if self.origin is None else to_html(self.simulate(device), timeline)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        if self.origin is None:
            return f"<pre>{html.escape(self.show())}</pre>"
        return self.simulate()._repr_html_()


def _streams(steps: tuple[Step, ...]) -> list[str]:
    found = []
    for step in steps:
        found += _streams(step.body) if step.body is not None else [step.stream]
    return found


def _count(steps: tuple[Step, ...]) -> int:
    return sum(1 + (_count(step.body) if step.body else 0) for step in steps)


def _texts(steps: tuple[Step, ...], indent: str) -> list[str]:
    """What a timeline says of each step that has a stream of its own."""
    found = []
    for step in steps:
        found += [indent + str(step)] if step.body is None else _texts(step.body, indent + "  ")
    return found


def levels(steps: tuple[Step, ...]) -> list[int]:
    """For each step the earliest line of a timeline in which every step takes one line."""
    level: list[int] = []
    last: dict[str, int] = {}
    for step in steps:
        before = [level[i] for i in (*step.reads, *step.after)]
        if step.body is not None:  # a loop occupies every stream
            before += last.values()
        elif step.stream in last:
            before.append(last[step.stream])
        level.append(max(before, default=-1) + 1)
        for stream in _streams((step,)):
            last[stream] = level[-1]
        if step.body is not None:
            last = dict.fromkeys(last, level[-1])
    return level


def _timeline(steps: tuple[Step, ...], streams: tuple[str, ...], width: int, indent: str) -> list[str]:
    lines: list[str] = []
    by_level: dict[int, list[Step]] = {}
    for step, level in zip(steps, levels(steps), strict=True):
        by_level.setdefault(level, []).append(step)
    for level in sorted(by_level):
        loops = [step for step in by_level[level] if step.body is not None]
        cells = {step.stream: step for step in by_level[level] if step.body is None}
        if cells:
            texts = [_fit(indent + str(cells[s]), width) if s in cells else " " * width for s in streams]
            lines.append("  ".join(texts).rstrip())
        for loop in loops:
            lines.append(f"{indent}{loop}:")
            lines += _timeline(loop.body or (), streams, width, indent + "  ")
    return lines


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else "…" + text[1 - width :]


# -- making and checking -------------------------------------------------------------------------------------------


def fingerprint(region: Region) -> str:
    """Identifies the operators of a region: their names, shapes and dependencies at every micro-batch's size."""
    digest = hashlib.sha256()

    def add(graph: OpGraph) -> None:
        for op in graph:
            shapes = [[aval.str_short() for aval in avals] for avals in (op.inputs, op.outputs)]
            digest.update(repr((op.key, op.predecessors, shapes)).encode())
            if op.body is not None:
                add(op.body)

    for variant in region.variants:
        add(variant.graph)
    return digest.hexdigest()[:16]


def make_plan(steps: tuple[Step, ...], region: Region, strategy: str, info: InputInfo) -> Plan:
    """The plan of steps that a strategy chose."""
    return Plan(region.sizes, steps, strategy, fingerprint(region)).made_for(region, info)


def _replay(steps: tuple[Step, ...], region: Region, info: InputInfo) -> None:
    """Executes steps against a fresh context, which knows every rule."""

    def enter(body: Region, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        inner: list[Step] = []
        ctx = ScheduleContext(body, info, lambda region: enter(region, inner[-1].body or ()))
        _execute(steps, ctx, inner.append)
        ctx.check_complete()
        return ctx.steps

    try:
        enter(region, steps)
    except (ScheduleError, PlanError):
        raise
    except DynaFlowError as error:
        raise PlanError(str(error)) from error


def _execute(
    steps: tuple[Step, ...], ctx: ScheduleContext, begin: Callable[[Step], object] = lambda step: None
) -> None:
    """Executes a region's steps; ``begin`` is told each of them before."""
    ops = {op.ref: op for op in ctx.all_ops()}
    for index, step in enumerate(steps):
        begin(step)
        if unknown := [ref for ref in step.operators if ref not in ops]:
            raise PlanError(f"step {index} runs {unknown[0]}, which the function does not have.")
        if bad := [i for i in step.after if not 0 <= i < index]:
            raise PlanError(f"step {index} ({step}) waits for step {bad[0]}, which does not come before it.")
        after = [ctx.steps[i] for i in step.after]
        try:
            made = ctx.execute(
                [ops[ref] for ref in step.operators],
                stream=step.stream,
                fn=step.fn,
                after=after,
                priority=step.priority,
                sm_budget=step.sm_budget,
            )
        except DynaFlowError:
            raise
        except Exception as error:
            if step.fn is None:
                raise
            raise PlanError(f"step {index} ({step}): the function in place of the operators failed: {error}") from error
        if made.reads != step.reads:
            raise PlanError(f"step {index} ({step}) says it reads steps {step.reads}; it reads {made.reads}.")
        if (made.body is None) != (step.body is None):
            raise PlanError(f"step {index} ({step}) has steps inside, and should not, or the other way round.")


class Replay(OpScheduler):
    """A plan in the role of a strategy: the function runs as it says."""

    def __init__(self, plan: Plan):
        self.plan = plan

    def split(self, info: InputInfo) -> tuple[int, ...]:
        """The plan's sizes."""
        sizes = self.plan.sizes
        if sum(sizes) != info.batch_size or any(size % info.shards for size in sizes):
            sharded = f" on {info.shards} devices" if info.shards > 1 else ""
            raise PlanError(
                f"The plan splits a batch into {list(sizes)} rows; this one has {info.batch_size}{sharded}. "
                "Make a plan for this batch."
            )
        return sizes

    def schedule(self, ctx: ScheduleContext) -> None:
        """The plan's steps, or those of the loop that this is the body of."""
        steps = self.plan.steps
        for loop in ctx.path:
            inside = [step.body for step in steps if step.body is not None and step.operators[0].key == loop]
            if not inside:
                raise PlanError(f"The plan has no steps inside {loop}, which the function has.")
            steps = inside[0]
        _execute(steps, ctx)

    def __repr__(self) -> str:
        return self.plan.strategy


# -- JSON ----------------------------------------------------------------------------------------------------------


def _step_to_json(step: Step) -> dict[str, Any]:
    data: dict[str, Any] = {"run": [[ref.key, ref.micro_batch] for ref in step.operators], "stream": step.stream}
    if step.reads:
        data["reads"] = list(step.reads)
    if step.after:
        data["after"] = list(step.after)
    if step.priority:
        data["priority"] = step.priority
    if step.sm_budget is not None:
        data["sm_budget"] = step.sm_budget
    if step.fn is not None:
        data["fn"] = _function_name(step.fn, step)
    if step.body is not None:
        data["body"] = [_step_to_json(inner) for inner in step.body]
    return data


def _function_name(fn: Callable[..., Any], step: Step) -> str:
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if isinstance(fn, Substituted):
        raise PlanError(f"The plan cannot be saved: {step} is made of its operators. Save the plan without kernels.")
    if not module or not name or "<" in name:
        raise PlanError(
            f"The plan cannot be saved: {step} is replaced by {fn!r}, which has no name to find it by. "
            "Use a function at the top level of a module."
        )
    return f"{module}:{name}"


class _Reader:
    """Reads JSON with errors that say where."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]):
        self.functions = functions

    def object(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise PlanError(f"{where} must be an object, not {value!r:.60}.")
        return value

    def field(self, data: dict[str, Any], name: str, kind: type, where: str, default: Any = ...) -> Any:
        if name not in data:
            if default is ...:
                raise PlanError(f"{where} lacks {name!r}.")
            return default
        value = data[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise PlanError(f"{where}.{name} must be {_KIND[kind]}, not {value!r:.60}.")
        return self.integer(value, f"{where}.{name}") if kind is int else value

    def integer(self, value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise PlanError(f"{where} must hold whole numbers, not {value!r:.60}.")
        if not -_MAX_NUMBER <= value < _MAX_NUMBER:
            raise PlanError(f"{where} has a number of more than 64 bits.")
        return value

    def earlier(self, data: dict[str, Any], name: str, index: int, where: str) -> tuple[int, ...]:
        """Indices of steps before the one of that index."""
        found = tuple(self.integer(i, f"{where}.{name}") for i in self.field(data, name, list, where, []))
        if bad := [i for i in found if not 0 <= i < index]:
            raise PlanError(f"{where}.{name} names step {bad[0]}, which does not come before step {index}.")
        return found

    def steps(self, data: list[Any], where: str, depth: int = 0) -> tuple[Step, ...]:
        if depth > _MAX_DEPTH:
            raise PlanError(f"{where[:60]}… is more than {_MAX_DEPTH} levels deep.")
        return tuple(self.step(item, i, f"{where}[{i}]", depth) for i, item in enumerate(data))

    def step(self, value: Any, index: int, where: str, depth: int) -> Step:
        data = self.object(value, where)
        known = {"run", "stream", "reads", "after", "priority", "sm_budget", "fn", "body"}
        if unknown := sorted(set(data) - known):
            raise PlanError(f"{where} has an unknown field {unknown[0]!r}.")
        refs = tuple(self.ref(item, f"{where}.run") for item in self.field(data, "run", list, where))
        if not refs:
            raise PlanError(f"{where}.run is empty.")
        body = self.field(data, "body", list, where, None)
        name = self.field(data, "fn", str, where, None)
        return Step(
            refs,
            self.field(data, "stream", str, where),
            self.earlier(data, "reads", index, where),
            self.earlier(data, "after", index, where),
            self.field(data, "priority", int, where, 0),
            self.field(data, "sm_budget", int, where, None),
            None if name is None else self.function(name, where),
            None if body is None else self.steps(body, f"{where}.body", depth + 1),
        )

    def ref(self, value: Any, where: str) -> OpRef:
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
            raise PlanError(f"{where} must hold pairs [operator, micro-batch], not {value!r:.60}.")
        return OpRef(value[0], None if value[1] is None else self.integer(value[1], where))

    def function(self, name: str, where: str) -> Callable[..., Any]:
        if name in self.functions:
            return self.functions[name]
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(module)
        try:
            for part in path.split("."):
                found = getattr(found, part, None)
            own_name = f"{getattr(found, '__module__', None)}:{getattr(found, '__qualname__', None)}"
        except Exception as error:  # of a module or object that makes its attributes when they are asked for
            raise PlanError(f"{where}.fn names {name!r}, which cannot be looked up: {error}") from error
        if found is None:
            raise PlanError(
                f"{where}.fn names {name!r}, which is not found: import its module first, or pass functions=."
            )
        if not callable(found) or isinstance(found, type):
            raise PlanError(f"{where}.fn names {name!r}, which is not a function.")
        # A plan from somewhere else must not get to call whatever the process has loaded.
        if inspect.isbuiltin(found) or own_name != name:
            raise PlanError(
                f"{where}.fn names {name!r}, which no plan that was saved can hold: it is built into Python, or "
                "defined under another name. Pass it as functions= if it is meant."
            )
        return found


_KIND = {int: "a whole number", str: "text", list: "a list"}
