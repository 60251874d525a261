"""Rules and marks with odd names and patterns: each is refused with a ``RuleError``, or does as it says."""

from __future__ import annotations

import functools
import html.parser
import random
import re
import warnings
import xml.etree.ElementTree
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import dynaflow_jax as df

from .check import same, told
from .models import X, in_order
from .mutate import ODD_TEXT

_PIECES = (
    "a",
    "b",
    "/",
    ".",
    "*",
    "+",
    "?",
    "^",
    "$",
    "|",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "\\",
    "#",
    ":",
    "@",
    " ",
    "é",
    "0",
)
_NOT_TEXT: tuple[Any, ...] = (None, 0, 1.5, b"a", ["a"], ("a",), {"a"}, object, lambda x: x, nn.Dense, re.compile("a"))


def _text(rng: random.Random) -> Any:
    """A name, a pattern or, now and then, no text."""
    if rng.random() < 0.1:
        return rng.choice(_NOT_TEXT)
    if rng.random() < 0.4:
        return rng.choice(ODD_TEXT)
    return "".join(rng.choice(_PIECES) for _ in range(rng.choice((1, 2, 3, 6, 12))))


class Block(nn.Module):
    """Modules with names of choice, and a mark."""

    names: tuple[str, ...]
    mark: str
    tags: frozenset[str]

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            x = jnp.tanh(nn.Dense(4, name=name)(x))
            with df.mark(self.mark, tags=self.tags):
                x = jnp.sin(x) * 2
        return x


class _Parser(html.parser.HTMLParser):
    """Notes scripts that a name has put into a page."""

    injected = False

    def handle_data(self, data: str) -> None:
        self.injected |= self.lasttag == "script" and data.startswith("alert(1)")


@functools.cache
def _variables(names: tuple[str, ...]) -> Any:
    return jax.jit(Block(names, "m", frozenset()).init)(jax.random.key(0), X)


# Flax and JAX write names as UTF-8.
_NAMES = tuple(text for text in ODD_TEXT if text.strip() and "\ud800" not in text and len(text) < 100)


def _rule(rng: random.Random) -> Any:
    kind = rng.choice((df.SplitModule, df.SplitFunc))
    options = {}
    if rng.random() < 0.3:
        options["name"] = _text(rng)
    if rng.random() < 0.3:
        options["tags"] = rng.choice((_text(rng), [_text(rng)], (), set(ODD_TEXT[:6])))
    if rng.random() < 0.1:
        return rng.choice(((), (kind("tanh"),), [kind("tanh")], _text(rng), None))
    targets = ("Dense_0", ".*", "tanh", "dot_general", "sin", r"Dense_\d", "", "add")
    return kind(rng.choice(targets) if rng.random() < 0.5 else _text(rng), **options)


def case(rng: random.Random) -> str:
    """One model with rules."""
    names = (rng.choice(_NAMES),) if rng.random() < 0.4 else ("Dense_0",)
    mark = _text(rng)
    tags = rng.choice(((), (), _text(rng), [_text(rng)]))
    try:
        df.mark(mark, tags=tags)
        rules = [_rule(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
        flow_of = functools.partial(df.dynaflow, scheduler=_Halves(), batch_axes=(None, 0))
        tags = frozenset((tags,) if isinstance(tags, str) else tags)
        model = Block(names, mark, tags)
        flow = flow_of(model.apply, rules=rules)
    except df.RuleError as error:
        return told(error, "refused")
    try:
        variables = _variables(names)
        want = jax.jit(model.apply)(variables, X)
    except Exception:  # a name that Flax or JAX refuses, without us
        return "no model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", df.RuleWarning)
        try:
            got = flow(variables, X)
        except df.RuleError as error:
            return told(error, "refused at the call")
    same(got, want)
    plan, graph = flow.plan(variables, X), flow.graph(variables, X)
    marked = [op for op in graph if op.name == mark]
    if not rules:
        assert marked, (mark, [op.name for op in graph])
        assert all(op.tags == tags for op in marked)
    assert df.Plan.from_json(plan.to_json()) == plan
    assert flow.explain(variables, X)
    page = _Parser()
    page.feed(plan.to_html())
    assert not page.injected
    xml.etree.ElementTree.fromstring(graph.to_svg())
    return "ran"


class _Halves(df.OpScheduler):
    """Two micro-batches."""

    def split(self, info):
        return [4, 4]

    def schedule(self, ctx):
        in_order(ctx)
