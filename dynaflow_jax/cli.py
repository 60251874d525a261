"""The command line: what a schedule of a function is, and what it gains.

``main`` returns the exit status: 0 if all is well, 1 for something that is wrong with what was named (one line says
what), 2 for a command line that cannot be understood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from absl import flags

from dynaflow_jax import arguments, compat, devices
from dynaflow_jax.annotate import Rule, Rules
from dynaflow_jax.candidates import AutoDynaFlow
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.profile import profile
from dynaflow_jax.simulate import step_us
from dynaflow_jax.strategies.auto import Auto
from dynaflow_jax.strategies.switch import Switch
from dynaflow_jax.strategies.with_kernels import WithKernels
from dynaflow_jax.switched import SwitchedDynaFlow
from dynaflow_jax.text import table
from dynaflow_jax.timeline import compare
from dynaflow_jax.transform import DynaFlow, Resolved, dynaflow
from dynaflow_jax.tune import is_faster, spread, take_turns, tune
from dynaflow_jax.visualize import to_perfetto

_PROGRAM = "python -m dynaflow_jax"


def main(argv: Sequence[str]) -> int:
    """Runs one command.

    Args:
      argv: the words after the program's name.

    Returns:
      The exit status.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if argv else 2
    command = _COMMANDS.get(argv[0])
    if command is None:
        return _fail(2, f"there is no command {argv[0]!r}; there are {', '.join(_COMMANDS)}")
    values = _flags(command)
    try:
        _, *rest = values([_PROGRAM, *argv[1:]])
    except flags.Error as error:
        return _fail(2, f"{error}; {_PROGRAM} {argv[0]} --help lists the flags")
    if _given(values, "help"):
        print(_help(argv[0], command, values))
        return 0
    if len(rest) != 1:
        given = f"{len(rest)} were given" if rest else "none was"
        return _fail(2, f"{argv[0]} takes one module:function, {given}; {_PROGRAM} {argv[0]} --help has examples")
    try:
        with _short_warnings():
            command.run(values, rest[0])
    except BrokenPipeError:
        raise
    except Exception as error:
        if _given(values, "traceback"):
            traceback.print_exc()
        return _fail(1, _one_line(error, rest[0]))
    return 0


def _fail(code: int, message: str) -> int:
    print(f"{_PROGRAM}: {message.rstrip('.')}.", file=sys.stderr)
    return code


def _one_line(error: Exception, target: str) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines())
    if isinstance(error, DynaFlowError):
        return text
    return f"{target}: {type(error).__name__}: {text[:300] or 'no message'} (--traceback shows where)"


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"{_PROGRAM}: warning: {message}", file=sys.stderr)
        yield


# -- flags -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Command:
    """One command.

    Attributes:
      run: does it, given flags and ``module:function``.
      summary: what it does, in a line.
      about: the rest of that.
      flags: defines its own flags.
      examples: command lines, without the program's name.
    """

    run: Callable[[flags.FlagValues, str], None]
    summary: str
    about: str
    flags: tuple[Callable[[flags.FlagValues], object], ...]
    examples: tuple[str, ...]


def _flags(command: _Command) -> flags.FlagValues:
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may stand behind module:function
    for define in (*_COMMON, *command.flags):
        define(values)
    return values


def _text(name: str, about: str, default: str | None = None) -> Callable[[flags.FlagValues], object]:
    return lambda values: flags.DEFINE_string(name, default, about, flag_values=values)


def _switch(name: str, about: str, short: str | None = None) -> Callable[[flags.FlagValues], object]:
    return lambda values: flags.DEFINE_bool(name, False, about, flag_values=values, short_name=short)


def _seconds(default: float | None) -> Callable[[flags.FlagValues], object]:
    about = "For how many seconds to measure."
    return lambda values: flags.DEFINE_float("budget_s", default, about, lower_bound=1e-3, flag_values=values)


def _backend(values: flags.FlagValues) -> object:
    about = "What the plan is lowered to."
    return flags.DEFINE_enum("backend", None, ["auto", "xla", "dispatch"], about, flag_values=values)


_COMMON = (
    _text("shapes", "Types of the arguments, as in 'f32[8,128] bf16[4,4]'; arrays are filled with random numbers."),
    _text("args", "module:factory, a function without arguments that returns the tuple of arguments."),
    _text("rules", "Partition rules, as in \"SplitFunc('psum'), SplitModule('mlp')\"."),
    _text("batch_axes", "Where the batch is in each argument, as in 'None, 0' or \"{'x': 0}\"."),
    _text("out_axes", "What becomes of the micro-batches' outputs: mean, sum, or an axis."),
    _backend,
    _switch("kernels", "Use kernels of pallas_kernels in operators, where they were measured faster."),
    _switch("json", "Print JSON in place of text."),
    _switch("traceback", "Show where an error came from."),
    _switch("help", "Show this.", "h"),
)
_STRATEGY = _text("strategy", "A strategy of df.strategies with literal arguments, as in 'NanoFlow(micro_batches=2)'.")


def _overview() -> str:
    lines = [
        f"usage: {_PROGRAM} COMMAND module:function [flags]",
        "",
        "What a schedule of a function is and gains.",
        "",
    ]
    lines += [f"  {name:8} {command.summary}" for name, command in _COMMANDS.items()]
    return "\n".join([*lines, "", f"{_PROGRAM} COMMAND --help has flags and examples."])


def _help(name: str, command: _Command, values: flags.FlagValues) -> str:
    lines = [f"usage: {_PROGRAM} {name} module:function [flags]", "", command.summary, ""]
    lines += textwrap.wrap(command.about + " " + _TARGET, 100)
    lines += ["", "flags:"]
    for flag in sorted((values[key] for key in {values[key].name for key in values}), key=lambda flag: flag.name):
        default = f" (default: {flag.default})" if flag.default not in (None, False) else ""
        words = textwrap.wrap(f"{flag.help}{default}", 84)
        lines += [f"  --{flag.name:12}{words[0]}", *(" " * 16 + line for line in words[1:])]
    return "\n".join([*lines, "", "examples:", *(f"  {_PROGRAM} {name} {text}" for text in command.examples)])


_TARGET = (
    "module:function names a function, or what df.dynaflow made of one, in a module that can be imported from here. "
    "Its arguments come from --shapes, if they are arrays, or from --args. A plain function is scheduled by Auto if "
    "--strategy does not say otherwise. Exit status: 0, 1 for an error in what was named, 2 for wrong usage."
)


# -- what is named ---------------------------------------------------------------------------------------------------


def _given(values: flags.FlagValues, name: str) -> Any:
    """A flag's value; ``None`` where the command does not have it."""
    return values[name].value if name in values else None


def _flow(values: flags.FlagValues, target: str, scheduler: Any = None) -> DynaFlow:
    """The scheduled function: as named, with what flags say otherwise."""
    found = arguments.load(target, "the function")
    if isinstance(getattr(found, "__wrapped__", None), DynaFlow):  # under jax.jit
        found = found.__wrapped__
    if not callable(found):
        raise DynaFlowError(f"{target} is {found!r:.60}, not a function.")
    given: dict[str, Any] = {}
    if text := _given(values, "strategy"):
        scheduler = arguments.strategy(text)
    if scheduler is not None:
        given["scheduler"] = scheduler
    if (text := _given(values, "rules")) is not None:
        given["rules"] = arguments.rules(text)
    for name in ("batch_axes", "out_axes"):
        if (text := _given(values, name)) is not None:
            given[name] = arguments.literal(text, f"--{name}")
    if _given(values, "backend") is not None:
        given["backend"] = _given(values, "backend")
    options: dict[str, Any] = _options(found) if isinstance(found, DynaFlow) else {"scheduler": Auto()}
    if _given(values, "kernels"):
        given["scheduler"] = _with_kernels(given.get("scheduler", options["scheduler"]))
    if isinstance(found, DynaFlow):
        return dynaflow(found.fun, **options | given) if given else found
    return dynaflow(found, **options | given)


def _with_kernels(scheduler: Any) -> Any:
    """A strategy that does the same with kernels."""
    from pallas_kernels import Kernels  # which imports Mosaic GPU, for a second

    if isinstance(scheduler, Auto):
        return scheduler.with_kernels(Kernels())
    if isinstance(scheduler, Switch):
        return Switch([_with_kernels(strategy) for strategy in scheduler.strategies], scheduler.select)
    return scheduler if isinstance(scheduler, WithKernels) else WithKernels(scheduler, Kernels())


def _options(flow: DynaFlow) -> dict[str, Any]:
    """How a function was scheduled, as arguments of ``dynaflow``."""
    scheduler: Any = flow.scheduler
    if isinstance(flow, SwitchedDynaFlow):
        scheduler = flow.switch
    elif isinstance(flow, AutoDynaFlow):
        scheduler = flow.auto
    return {**vars(flow.options), "scheduler": scheduler, "rules": _listed(flow.options.rules)}


def _listed(rules: Rules) -> tuple[Rule, ...]:
    """Rules as they were given."""
    tuples = {members[0]: members for members in rules.sequences}
    inside = {i for members in rules.sequences for i in members[1:]}
    return tuple(
        tuple(rules.atoms[j] for j in tuples[i]) if i in tuples else atom
        for i, atom in enumerate(rules.atoms)
        if i not in inside
    )


def _arguments(values: flags.FlagValues, target: str) -> tuple[Any, ...]:
    shapes, factory = _given(values, "shapes"), _given(values, "args")
    if (shapes is None) == (factory is None):
        what = "both --shapes and --args say" if shapes is not None else "nothing says"
        raise DynaFlowError(
            f"{target}: {what} what its arguments are: pass --shapes 'f32[8,128] i32[8]', or --args module:factory."
        )
    return arguments.shapes(shapes) if shapes is not None else arguments.made(factory)


def _resolved(flow: DynaFlow, args: tuple[Any, ...]) -> list[Resolved]:
    """What was decided: once, or for each strategy of a ``Switch``."""
    flows = flow.alternatives if isinstance(flow, SwitchedDynaFlow) else (flow,)
    return [one._resolve(args, {})[0] for one in flows]


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DynaFlowError(f"{path!r} cannot be written: {error.strerror}.") from None
    print(f"wrote {path}", file=sys.stderr)


# -- commands --------------------------------------------------------------------------------------------------------


def _explain(values: flags.FlagValues, target: str) -> None:
    flow, args = _flow(values, target), _arguments(values, target)
    if not _given(values, "json"):
        print(flow.explain(*args))
        return
    found = _resolved(flow, args)
    operators = [
        {
            "key": op.key,
            "name": op.name,
            "module": op.module_path,
            "phase": op.phase,
            "tags": sorted(op.tags),
            "flops": float(op.flops),
            "bytes": float(op.bytes),
            "bound": op.bound,
            "reads": list(op.predecessors),
        }
        for op in found[0].graph
    ]
    plans = [
        {
            "plan": json.loads(one.plan.to_json()),
            "predicted_us": step_us(one.plan),
            "dispatched": one.is_dispatched,
            "why": one.choice.why,
        }
        for one in found
    ]
    print(json.dumps({"function": target, "operators": operators, "plans": plans}, indent=1))


def _plan(values: flags.FlagValues, target: str) -> None:
    name = _given(values, "device")
    device = None if name is None else devices.named(name)
    flow, args = _flow(values, target), _arguments(values, target)
    files = [flag for flag in ("html", "perfetto") if _given(values, flag) is not None]
    plans = [one.plan for one in _resolved(flow, args)]
    if len(plans) > 1 and (files or _given(values, "json")):
        flag = "json" if _given(values, "json") else files[0]
        raise DynaFlowError(f"{target} has {len(plans)} plans, and --{flag} takes one: pick it with --strategy.")
    if _given(values, "svg") is not None:
        _write(_given(values, "svg"), flow.graph(*args).to_svg())
    if _given(values, "html") is not None:
        _write(_given(values, "html"), plans[0].to_html(device))
    if _given(values, "perfetto") is not None:
        _write(_given(values, "perfetto"), to_perfetto(plans[0].simulate(device)))
    if _given(values, "json"):
        print(plans[0].to_json())
        return
    print("\n\n".join(f"{plan.show()}\n\n{plan.simulate(device).show()}" for plan in plans))


def _profile(values: flags.FlagValues, target: str) -> None:
    flow, args = _flow(values, target), arguments.arrays(_arguments(values, target))
    measured, plan = profile(flow, *args), flow.plan(*args)
    predicted = plan.simulate()
    if _given(values, "html") is not None:
        _write(_given(values, "html"), plan.to_html(timeline=measured))
    if _given(values, "perfetto") is not None:
        _write(_given(values, "perfetto"), to_perfetto(predicted, measured))
    if _given(values, "json"):
        figures = {
            "function": target,
            "device": measured.device,
            "dispatched": flow._resolve(args, {})[0].is_dispatched,
            "measured_us": measured.total_us,
            "predicted_us": predicted.total_us,
            "overlap_us": measured.overlap_us,
            "busy_us": {stream: measured.busy_us(stream) for stream in measured.streams},
            "events": [dataclasses.asdict(event) for event in measured.events],
        }
        print(json.dumps(figures, indent=1))
        return
    print(f"{measured.show()}\n\n{compare(predicted, measured)}")


def _tune(values: flags.FlagValues, target: str) -> None:
    text = _given(values, "candidates")
    scheduler = None if text is None else Auto(arguments.candidates(text))
    flow, args = _flow(values, target, scheduler), _arguments(values, target)
    if not isinstance(flow, AutoDynaFlow):
        options = _options(flow)
        options["scheduler"] = _with_kernels(Auto()) if _given(values, "kernels") else Auto()
        flow = dynaflow(flow.fun, **options)
    found = tune(flow, *arguments.arrays(args), budget_s=_given(values, "budget_s"), force=_given(values, "force"))
    print(found.to_json() if _given(values, "json") else found.show())


def _bench(values: flags.FlagValues, target: str) -> None:
    flow, args = _flow(values, target), arguments.arrays(_arguments(values, target))
    start = time.perf_counter()
    funs = {0: _call(flow.fun, args), 1: _call(flow, args)}
    times = take_turns(funs, start + _given(values, "budget_s"))
    took = {i: median(one) for i, one in times.items()}
    verdict = "no difference beyond noise"
    if is_faster(times[1], times[0]):
        verdict = "faster beyond noise"
    elif is_faster(times[0], times[1]):
        verdict = "slower beyond noise"
    ratio, kind = took[0] / took[1], compat.device()[1]
    names = ("unscheduled", ", ".join(plan.strategy for plan in flow.plans(*args)))
    if _given(values, "json"):
        rows = [{"name": n, "us": took[i], "spread_us": spread(times[i])} for i, n in enumerate(names)]
        print(json.dumps({"function": target, "device": kind, "rows": rows, "ratio": ratio, "verdict": verdict}))
        return
    rows = [
        ("", "median µs", "spread µs"),
        *((n, f"{took[i]:.1f}", f"{spread(times[i]):.1f}") for i, n in enumerate(names)),
    ]
    print("\n".join(table(rows)))
    print(f"\n{target} on {kind}: {ratio:.3f} times as fast as unscheduled, {verdict}")


def _call(fun: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    """A compiled call; what is no array among the arguments is static."""
    leaves, tree = jax.tree.flatten(args)
    moving = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))}

    def whole(moving: dict[int, Any]) -> Any:
        return fun(*jax.tree.unflatten(tree, [moving.get(i, leaf) for i, leaf in enumerate(leaves)]))

    compiled = jax.jit(whole)
    return lambda: compiled(moving)


_COMMANDS = {
    "explain": _Command(
        _explain,
        "Show the operators of a function, its plan, and how that is lowered and why.",
        "Nothing is run; shapes are enough.",
        (_STRATEGY,),
        (
            "my.model:step --shapes 'f32[64,64] f32[8,64]' --batch_axes 'None, 0' --strategy NanoFlow",
            "my.model:flow --args my.model:example --json",
        ),
    ),
    "plan": _Command(
        _plan,
        "Show what runs when on which stream, and how long it is predicted to take.",
        "Nothing is run; the device that is predicted for need not be there. --json prints the plan in the form that "
        "df.Plan.from_json reads.",
        (
            _STRATEGY,
            _text("device", "The device to predict for, as in H200; by default the one that is there."),
            _text("html", "A file for the plan as a page."),
            _text("perfetto", "A file for the plan as a trace, for ui.perfetto.dev."),
            _text("svg", "A file for a picture of the operators."),
        ),
        (
            "my.model:step --shapes 'bf16[4096,4096] bf16[8192,4096]' --batch_axes 'None, 0' "
            "--strategy 'NanoFlow(micro_batches=4)' --device H200",
            "my.model:flow --args my.model:example --html plan.html --perfetto plan.json --svg operators.svg",
            "my.model:flow --args my.model:example --json > plan.json",
        ),
    ),
    "profile": _Command(
        _profile,
        "Measure when what runs on which stream, beside what is predicted.",
        "A dispatched plan is measured as it runs (--backend dispatch does so on CPU too), any other one step by step.",
        (
            _STRATEGY,
            _text("html", "A file for the plan as a page, with what was measured."),
            _text("perfetto", "A file for both as a trace, for ui.perfetto.dev."),
        ),
        (
            "my.model:flow --args my.model:example --backend dispatch",
            "my.model:step --shapes 'f32[64,64] f32[8,64]' --batch_axes 'None, 0' --strategy NanoFlow --json",
        ),
    ),
    "tune": _Command(
        _tune,
        "Measure which strategy is the fastest, and keep the choice for df.strategies.Auto.",
        "A choice that was kept before is shown, unless --force measures again. A strategy that the function has "
        "already is left aside.",
        (
            _text("candidates", "Strategies to try, as in 'NanoFlow(2), DualBatchOverlap()'; by default all."),
            _seconds(None),
            _switch("force", "Measure again what was measured before."),
        ),
        (
            "my.model:flow --args my.model:example",
            "my.model:step --shapes 'f32[64,64] f32[8,64]' --batch_axes 'None, 0' --budget_s 30 --force",
        ),
    ),
    "bench": _Command(
        _bench,
        "Time a scheduled function against the unscheduled one, in turns.",
        "Both are compiled by jax.jit, and called several times in a turn if they are short.",
        (_STRATEGY, _seconds(5.0)),
        (
            "my.model:flow --args my.model:example",
            "my.model:step --shapes 'f32[64,64] f32[8,64]' --batch_axes 'None, 0' --strategy 'NanoFlow(2)' --json",
        ),
    ),
}
