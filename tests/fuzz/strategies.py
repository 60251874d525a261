"""Strategies that misbehave: each gets an error that names the culprit, or its own back, or does no harm."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import dynaflow_jax as df
from dynaflow_jax import schedule

from .check import same, told
from .models import FUNCTIONS, W, X, fused, in_order
from .mutate import ODD_TEXT


class OwnError(Exception):
    """What a strategy raises itself."""


class Unshowable:
    """What cannot be printed."""

    def __repr__(self):
        raise OwnError("no repr")


class Unlucky:
    """What fails wherever it is used."""

    def __getattr__(self, name):
        raise OwnError(name)

    def __iter__(self):
        raise OwnError("iter")


def recursive(*_):
    return recursive()


_NONSENSE = (
    None,
    True,
    0,
    -1,
    3,
    2**40,
    0.5,
    float("nan"),
    float("inf"),
    1j,
    [],
    {},
    (),
    [None],
    [[]],
    "op",
    b"op",
    object,
    print,
    np.arange(3),
    np.float32(1),
    jnp.ones(2),
    *ODD_TEXT[:8],
)

_UNSHOWABLE = (10**5_000, Unshowable())

# -- split ----------------------------------------------------------------------------------------------------------

_SIZES = (
    *_NONSENSE,
    [8.0],
    [4.5, 3.5],
    [float("nan"), 8],
    [4, -4, 8],
    [0, 8],
    [8, 0],
    [4, 4, 4],
    [3, 3],
    ["4", "4"],
    "44",
    [10**5_000],
    [10**4_299 * 9] * 7,
    [Unshowable()],
    *_UNSHOWABLE,
    [np.int8(4), np.uint64(4)],
    np.array([4, 4]),
    np.array([[4, 4]]),
    [True] * 8,
    {4: 4},
    iter([4, 4]),
    map(int, "44"),
    [1] * 100_000,
    lambda: [4, 4],
)
# What cannot be made in advance, since it has no end.
_ENDLESS = (itertools.count, lambda: itertools.repeat(0), lambda: itertools.repeat(1), lambda: itertools.repeat("4"))

# -- schedule -------------------------------------------------------------------------------------------------------


def asks_for_ever(ctx, rng):
    while True:
        rng.choice((ctx.get_ready_ops, ctx.all_ops, lambda: ctx.get_ready_ops(0)))()


def asks_for_ever_after_all(ctx, rng):
    in_order(ctx)
    while True:
        ctx.get_ready_ops()


def catches_everything(ctx, rng):
    """Goes on after every error."""
    for _ in range(50):
        for op in ctx.all_ops():
            with contextlib.suppress(df.DynaFlowError):
                ctx.execute(rng.choice((op, [op, op], [], None, [None, op])), stream=rng.choice(("a", "", None)))


def does_nothing(ctx, rng):
    pass


def forgets(ctx, rng):
    ops = ctx.get_ready_ops()
    for op in ops[: rng.randrange(len(ops) + 1)]:
        ctx.execute(op)


def runs_twice(ctx, rng):
    op = ctx.get_ready_ops()[0]
    again = rng.choice(([op, op], op))
    ctx.execute(again)
    ctx.execute(op)


def runs_backwards(ctx, rng):
    for op in reversed(ctx.all_ops()):
        ctx.execute(op)


def runs_at_random(ctx, rng):
    ops = ctx.all_ops()
    while ops:
        some = [ops.pop(rng.randrange(len(ops))) for _ in range(min(len(ops), rng.choice((1, 1, 2, 3))))]
        ctx.execute(some if len(some) > 1 else some[0], stream=rng.choice(("a", "b")))


def raises(ctx, rng):
    ctx.execute(ctx.get_ready_ops()[0])
    raise OwnError("raises")


def recurses(ctx, rng):
    recursive()


def schedules_itself(ctx, rng):
    for op in ctx.get_ready_ops():
        ctx.execute(op)
    schedules_itself(ctx, rng)


def executes_nonsense(ctx, rng):
    ctx.execute(rng.choice((*_NONSENSE, *_UNSHOWABLE)))


def endless(ctx, rng):
    op = ctx.get_ready_ops()[0]
    ctx.execute(rng.choice((itertools.repeat(op), itertools.cycle(ctx.all_ops()), itertools.count())))


def odd_keywords(ctx, rng):
    name = rng.choice(("stream", "fn", "after", "priority", "sm_budget"))
    for op in ctx.all_ops():
        ctx.execute(op, **{name: rng.choice((*_NONSENSE, *_UNSHOWABLE, itertools.count(), *ODD_TEXT))})


def mutates_lists(ctx, rng):
    while ops := ctx.get_ready_ops():
        op = ops[0]
        for found in (ops, ctx.all_ops(), ctx.inputs_of(op), ctx.outputs_of(op)):
            rng.choice((found.clear, found.reverse, lambda found=found: found.extend([None] * 3)))()
        ctx.execute(op)


def mutates_context(ctx, rng):
    """Writes to whatever it can reach without an underscore."""
    names = ("sizes", "path", "info", "graph", "steps", "micro_batches")
    with contextlib.suppress(AttributeError):
        setattr(ctx, rng.choice(names), rng.choice(((), (1,) * 9, None, "x")))
    in_order(ctx)


def mutates_operators(ctx, rng):
    op = rng.choice(ctx.all_ops())
    name, value = rng.choice(("micro_batch", "operator", "name", "key", "_context")), rng.choice((None, 0, 1, 99, "b"))
    setattr(op, name, value)
    in_order(ctx)


def mutates_info(ctx, rng):
    """Empties the lists and dictionaries of the arguments' shapes."""
    args, kwargs = ctx.info.avals
    for found in (args, kwargs, *args):
        if isinstance(found, (list, dict)):
            found.clear()
    in_order(ctx)


def copies(ctx, rng):
    for op in ctx.all_ops():
        ctx.execute(rng.choice((copy.copy, copy.deepcopy, lambda op: op))(op))


def pickles(ctx, rng):
    with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):  # what cannot be saved
        pickle.dumps(ctx.all_ops())
    in_order(ctx)


_kept: list[Any] = []


def keeps(ctx, rng):
    """Executes operators and waits for steps of an earlier call."""
    _kept.extend(ctx.all_ops())
    old = rng.choice(_kept)
    step = ctx.execute(ctx.get_ready_ops()[0], after=rng.choice((old, ())))
    if rng.random() < 0.2:
        _kept.append(step)
    ctx.execute(old)
    in_order(ctx)


def waits_for_itself(ctx, rng):
    for op in ctx.all_ops():
        ctx.execute(op, after=rng.choice((op, ctx.all_ops(), ctx.steps, schedule.Step((op.ref,)))))


def merges_oddly(ctx, rng):
    for op in ctx.get_ready_ops():
        ctx.execute([op] * rng.choice((1, 2, 3)) + rng.sample(ctx.all_ops(), min(2, len(ctx.all_ops()))))
    in_order(ctx)


def looks_odd_up(ctx, rng):
    odd = rng.choice((*_NONSENSE, *_UNSHOWABLE, *ODD_TEXT))
    rng.choice((ctx.get_ready_ops, ctx.inputs_of, ctx.outputs_of, ctx.jaxpr_of))(odd)
    in_order(ctx)


def _changing(x, *rest):
    """Returns other shapes, and then another number of them, from call to call."""
    _changing.calls += 1
    out = fused(x, *rest)
    return {0: out, 1: (out[0][:-1],), 2: (*out, *out), 3: out}[_changing.calls % 4]


_changing.calls = 0


def _raising(*args):
    raise OwnError("fn")


_REPLACEMENTS: tuple[Callable[..., Any], ...] = (
    fused,
    lambda *args: None,
    lambda *args: (),
    lambda *args: args,
    lambda *args: "text",
    lambda *args: object(),
    lambda *args: {"a": args[0]},
    lambda *args: (fused(*args)[0].astype(jnp.bfloat16),),
    lambda *args: (fused(*args)[0][None],),
    lambda *args: float(args[0].sum()),
    lambda *args: iter(args),
    lambda x, *rest: (x.at[0].set(jnp.nan),) * 2,
    lambda: 0,
    lambda *args: recursive(),
    _raising,
    _changing,
    Unlucky(),
    dict,
    np.sin,
)


def replaces(ctx, rng):
    ops = ctx.all_ops()
    fn = rng.choice(_REPLACEMENTS)
    ctx.execute(ops[::2], fn=fn)
    ctx.execute(ops[1::2], fn=fn)


def leaks(ctx, rng):
    """Keeps a value that is being traced, and gives it back later."""
    held: list[Any] = []

    def first(*args):
        held.append(fused(*args)[0])
        return (held[rng.choice((0, -1))],)

    ops = ctx.all_ops()
    ctx.execute(ops[::2], fn=first)
    ctx.execute(ops[1::2], fn=first)


SCHEDULES = (
    asks_for_ever,
    asks_for_ever_after_all,
    catches_everything,
    does_nothing,
    forgets,
    runs_twice,
    runs_backwards,
    runs_at_random,
    raises,
    recurses,
    schedules_itself,
    executes_nonsense,
    endless,
    odd_keywords,
    mutates_lists,
    mutates_context,
    mutates_operators,
    mutates_info,
    copies,
    pickles,
    keeps,
    waits_for_itself,
    merges_oddly,
    looks_odd_up,
    replaces,
    leaks,
)
# May fail in the way their own replacements do.
OWN = (OwnError, RecursionError, jax.errors.JAXTypeError, jax.errors.UnexpectedTracerError, TypeError)
WITH_FN = (replaces, leaks, odd_keywords)
OWN_OF = {raises: (OwnError,), recurses: (RecursionError,)}


class Misbehaving(df.OpScheduler):
    """Splits and schedules as it was told."""

    def __init__(self, sizes: Any, do: Callable[..., None], seed: int):
        self.sizes = sizes
        self.do = do
        self.seed = seed

    def split(self, info):
        return self.sizes

    def schedule(self, ctx):
        self.do(ctx, random.Random(self.seed))


@functools.cache
def _wanted(name: str) -> Any:
    return jax.jit(FUNCTIONS[name][0])(W, X)


def run(name: str, strategy: df.OpScheduler, own: tuple[type[BaseException], ...]) -> str:
    """Runs a function with a strategy that misbehaves.

    Args:
      name: the function, a key of ``FUNCTIONS``.
      strategy: the strategy.
      own: errors that come from the strategy.

    Returns:
      What became of it.
    """
    fun, _, options = FUNCTIONS[name]
    flow = df.dynaflow(fun, scheduler=strategy, batch_axes=(None, 0), **options)
    try:
        with mock.patch.object(schedule, "_PATIENCE", 200):
            got = flow(W, X)
    except df.DynaFlowError as error:
        return told(error, "refused")
    except own:
        return "its own error"
    if any(step.fn for step in flow.plan(W, X).steps):  # its values are not checked, but their shapes are
        want = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), _wanted(name))
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), got) == want
    else:
        same(got, _wanted(name))
    return "ran"


def case(rng: random.Random) -> str:
    """One strategy that misbehaves."""
    name = rng.choice(["layer", "branches", "loop", "training"])
    if rng.random() < 0.3:
        sizes = rng.choice(_ENDLESS)() if rng.random() < 0.2 else rng.choice(_SIZES)
        outcome = run(name, Misbehaving(sizes, lambda ctx, _: in_order(ctx), 0), ())
        return f"split: {outcome}"
    do = rng.choice(SCHEDULES)
    own = OWN if do in WITH_FN else OWN_OF.get(do, ())
    strategy = Misbehaving(rng.choice(([8], [4, 4], [3, 5], [2, 2, 4])), do, rng.randrange(2**30))
    return f"schedule: {run(name, strategy, own)}"
