"""Plans whose JSON is damaged: each is refused, or runs and gives what the function gives."""

from __future__ import annotations

import copy
import functools
import json
import random
from typing import Any

import jax

import dynaflow_jax as df

from .check import same, told
from .models import FUNCTIONS, W, X
from .mutate import ODD_TEXT, json_text

# Names of functions to find: callables that are no replacements, and things that are no functions at all.
_NAMES = ("json:dumps", "json:JSONDecoder", "builtins:exit", "builtins:print", "os:getpid", "posix:_exit", "jax:jit")
_ODD_NAMES = (":", "::", "jax:", ":jit", "jax:numpy.", "os:path", "sys:modules", "jax.numpy:tanh", "builtins:exec")


@functools.cache
def _plan(name: str) -> tuple[df.Plan, Any, Any]:
    """The plan of a function, the plan as data, and what the function gives."""
    fun, strategy, options = FUNCTIONS[name]
    plan = df.dynaflow(fun, scheduler=strategy, batch_axes=(None, 0), **options).plan(W, X)
    return plan, json.loads(plan.to_json()), jax.jit(fun)(W, X)


def _replacements(plan: df.Plan) -> set[Any]:
    return {(step.operators, step.fn) for step in plan.steps if step.fn is not None}


def apply(name: str, text: str) -> str:
    """Loads a plan's text and runs it.

    Args:
      name: the function, a key of ``FUNCTIONS``.
      text: JSON.

    Returns:
      What became of it.
    """
    plan, _, want = _plan(name)
    try:
        loaded = df.Plan.from_json(text)
    except df.PlanError as error:
        return told(error, "damaged")
    assert str(loaded)
    assert isinstance(hash(loaded), int)
    if loaded == plan:
        return "unchanged"
    fun, _, options = FUNCTIONS[name]
    flow = df.dynaflow(fun, scheduler=loaded, batch_axes=(None, 0), **options)
    try:
        got = flow(W, X)
    except df.PlanError as error:
        return told(error, "refused")
    # What a replacement computes is not checked, so another one may compute something else.
    if _replacements(loaded) <= _replacements(plan):
        same(got, want)
    applied = flow.plan(W, X)
    assert df.Plan.from_json(applied.to_json()) == loaded
    assert flow.explain(W, X)
    assert applied._repr_html_()
    return "ran"


def _edit(rng: random.Random, data: Any) -> None:
    """A change that leaves JSON of the right form: the steps in another order, elsewhere, together or twice."""
    steps = data["steps"]
    inner = rng.choice([steps, *(step["body"] for step in steps if step.get("body"))])
    step, other = rng.choice(inner), rng.choice(inner)
    index = inner.index(step)
    edits = {
        "shuffled": lambda: rng.shuffle(inner),
        "neighbours": lambda: inner.insert(max(index - 1, 0), inner.pop(index)),
        "twice": lambda: inner.insert(rng.randrange(len(inner) + 1), step),
        "dropped": lambda: inner.remove(step),
        "stream": lambda: step.update(stream=rng.choice(("first", "second", *ODD_TEXT))),
        "after": lambda: step.update(after=[rng.randrange(-1, index + 2) for _ in range(rng.randrange(4))]),
        "reads": lambda: step.update(reads=[rng.randrange(-1, index + 2) for _ in range(rng.randrange(3))]),
        "priority": lambda: step.update(priority=rng.choice((-1, 0, 3, 2**31, 2**70, 10**4_000))),
        "sm_budget": lambda: step.update(sm_budget=rng.choice((-1, 0, 1, 8, 2**40))),
        "no function": lambda: step.pop("fn", None),
        "function": lambda: step.update(fn=rng.choice((f"{__package__}.models:fused", *_NAMES, *_ODD_NAMES))),
        "together": lambda: step["run"].extend(other["run"]),
        "other micro-batch": lambda: step.update(
            run=[[key, rng.choice((None, 0, 1, 2, -1))] for key, _ in step["run"]]
        ),
        "operators": lambda: rng.shuffle(step["run"]),
        "sizes": lambda: data.update(sizes=rng.choice(([8], [4, 4], [3, 5], [5, 3], [1] * 8, [9, -1], [2, 2, 2, 2]))),
        "huge sizes": lambda: data.update(sizes=[10**4_299 * 9] * rng.choice((1, 2, 12))),
        "strategy": lambda: data.update(strategy=rng.choice(ODD_TEXT)),
        "body": lambda: step.update(body=rng.choice(([], [other], inner))),
    }
    rng.choice(list(edits.values()))()


def case(rng: random.Random) -> str:
    """One damaged plan."""
    name = rng.choice(list(FUNCTIONS))
    plan, data, _ = _plan(name)
    if rng.random() < 0.7:
        edited = copy.deepcopy(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            if edited["steps"]:
                _edit(rng, edited)
                edited = json.loads(text) if (text := _text(edited)) else copy.deepcopy(data)
        return apply(name, json.dumps(edited))
    refs = tuple([ref.key, ref.micro_batch] for step in plan.steps for ref in step.operators)
    values = (*refs, *data["steps"], *_NAMES, *_ODD_NAMES)
    return apply(name, json_text(rng, data, values))


def _text(data: Any) -> str | None:
    """JSON, or ``None`` if the data contains itself."""
    try:
        return json.dumps(data)
    except (ValueError, RecursionError):
        return None
