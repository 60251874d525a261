"""The proof that splitting a batch does not change the result.

The function's program is there twice, for the full batch and for a micro-batch (derived from the other, see `derive`,
or traced), and the two are walked in lock step, into every program inside them. `analyse` gives each variable of the
micro-batch's program a state (see `state`) by one rule per primitive (see `rules` and `nested`); where a rule finds
that rows of the batch are mixed, or there is no rule, it notes a `MixingSite` and goes on. Nothing is proven by sizes
alone, so a batch of 8 next to 8 heads is no problem.

What is proven, for each output: ``Rows`` of scale one are the micro-batches' outputs joined along the axis,
``Total`` is their sum once each part is multiplied by its scale, and ``Invariant`` is any of them. A scale other than
one is the caller's to judge: ``Total(1/n)`` is a mean weighted by rows, ``Rows(1/n)`` are rows that each micro-batch
divides by its own size. A micro-batch of a sharded batch takes the same share of every shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dynaflow_jax import compat
from dynaflow_jax.annotate import Label
from dynaflow_jax.batch.nested import OPAQUE
from dynaflow_jax.batch.rules import RULES, Mixing, changed_axes, shape
from dynaflow_jax.batch.state import (
    INVARIANT,
    VARIES,
    ZERO,
    Invariant,
    N,
    RowIndex,
    Rows,
    State,
    Symbol,
    Total,
    is_one_scale,
    scale,
)
from dynaflow_jax.program import Program, from_jaxpr


@dataclasses.dataclass(frozen=True)
class MixingSite:
    """A place where splitting the batch is not proven harmless.

    Attributes:
      eqn: the equation of the micro-batch's program; None if an input, an output or a constant is at fault.
      primitive: the name of its primitive, or ``interface``.
      reason: what it does, in one clause: "reduces over the batch with max".
      source: the line of the user's code, as `compat.source_line` has it.
      name_stack: the scopes around the equation, outermost first, those of enclosing equations included.
      guards: whether it is an operation on a sum over the batch and a constant, such as guards a division by the sum.
    """

    eqn: Any
    primitive: str
    reason: str
    source: str
    name_stack: tuple[tuple[str, bool], ...]
    guards: bool = False

    def __str__(self) -> str:
        entries = [name for name, is_transform in self.name_stack if not is_transform]
        scopes = "/".join(label.name if (label := Label.decode(name)) else name for name in entries)
        inside, source = (f" in {scopes}" if scopes else ""), (f" ({self.source})" if self.source else "")
        return f"{self.primitive}{inside} {self.reason}{source}"


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What is known of a program when its batch is split.

    Attributes:
      states: by variable of the micro-batch's program and of the programs inside it. A variable of a jaxpr that is
        called several times with different states is ``Varies``.
      outputs: the states of the program's outputs.
      mixing: the places where splitting is not proven harmless, less those that were allowed.
      draws: the equations of the micro-batch's program that draw over the batch with one key for all rows, wherever
        they are; all their inputs are ``Invariant``.
    """

    states: Mapping[Any, State]
    outputs: tuple[State, ...]
    mixing: tuple[MixingSite, ...]
    draws: tuple[Any, ...]

    @property
    def proven(self) -> bool:
        """Whether nothing mixes the batch but what was allowed."""
        return not self.mixing


def analyse(
    full: Program,
    part: Program,
    in_axes: Sequence[int | State | None],
    batch_size: int,
    part_size: int,
    allow: Callable[[MixingSite], bool] = lambda _: False,
    *,
    consts: tuple[Sequence[Any], Sequence[Any]] = ((), ()),
) -> Analysis:
    """Find out what splitting the batch does to every value of a program.

    Args:
      full: the program at the full batch.
      part: the same function's program at a micro-batch.
      in_axes: the batch axis of each input, or None, or its state; one entry per input, of which leading constants may
        be left out.
      batch_size: the number of rows of the full batch.
      part_size: the number of rows of the micro-batch.
      allow: whether to let a mixing site pass. Its outputs go on as rows along the axis that has the batch's size, if
        there is one; a maximum or a sum of a total and a constant, as guards a division, goes on as the total.
      consts: the values of the leading constants, for both programs; without them, constants of one shape are taken to
        be equal.
    """
    ctx = ProofContext(batch_size, part_size, allow)
    num_consts = len(part.invars) - len(in_axes)
    states: list[State] = []
    for i, (f, p) in enumerate(zip(full.invars, part.invars, strict=True)):
        try:
            if i < num_consts:
                values = (consts[0][i], consts[1][i]) if consts[1] else (None, None)
                states.append(ctx.checked(f, p, ctx.constant(*values)))
            else:
                states.append(ctx.input(f, p, in_axes[i - num_consts]))
        except Mixing as mixing:
            what = f"the constant {f.aval.str_short()}" if i < num_consts else f"input {i - num_consts}"
            ctx.report(None, f"of the program: {what} {mixing}")
            states.append(ctx.guess(f, p))
    outputs = ctx.walk(full, part, states, [True] * len(part.outvars))
    for i, state in enumerate(outputs):
        if type(state) is Rows and state.pieces is not None:
            ctx.report(None, f"of the program: output {i} holds rows sharded differently from how they came in")
    return Analysis(ctx.states, tuple(outputs), tuple(ctx.sites.values()), tuple(ctx.draws.values()))


class ProofContext:
    """The walk over the two programs, and what rules may ask of it.

    Attributes:
      regions: the loop bodies, branches and ``shard_map`` bodies around the current equation, outermost first.
      shards: the mesh axes over which the batch is sharded in the current ``shard_map``.
      used: of the equation that is being opened, which outputs anybody reads.
    """

    def __init__(self, batch_size: int, part_size: int, allow: Callable[[MixingSite], bool]) -> None:
        self.batch_size, self.part_size, self.allow = batch_size, part_size, allow
        self.states: dict[Any, State] = {}
        self.sites: dict[Any, MixingSite] = {}
        self.draws: dict[int, Any] = {}
        self.regions: list[Any] = [None]
        self.shards: tuple[Any, ...] = ()
        self.used: Sequence[bool] = ()
        self._num_shards = 1
        self._path: tuple[tuple[str, bool], ...] = ()
        self._source = ""  # of the equation around: what JAX's own functions trace once has no line of the user's
        self._quiet = 0  # mixing is not reported: the values are not read, or came out of mixing themselves
        self._rehearsals = 0  # states are not recorded: a loop has not settled yet
        self._deciding = 0  # inside a branch or a loop of unknown length
        self._closed: list[str] = []  # the calls around that stay as they are

    # -- for rules ------------------------------------------------------------------------------------------------

    def rows_within(self, size: int) -> int:
        """How many rows an axis of this size holds, at the micro-batch."""
        rows = self.part_size // self._num_shards
        return rows if rows and size % rows == 0 else size

    def draw(self, eqn: Any) -> None:
        """Note a random draw over the batch."""
        if self._deciding:
            raise Mixing("draws over the batch inside a branch, or inside a loop of unknown length")
        if self._closed:
            raise Mixing(f"draws over the batch inside {self._closed[-1]}, which is not opened to draw once for all")
        self.draws[id(eqn)] = eqn

    def report(self, eqn: Any, reason: str, guards: bool = False) -> bool:
        """Note a mixing site, unless it is allowed; returns whether it is."""
        if eqn is None:
            site = MixingSite(None, "interface", reason, "", self._path)
        else:
            scopes = self._path + compat.scopes(compat.name_stack(eqn))
            site = MixingSite(eqn, eqn.primitive.name, reason, compat.source_line(eqn) or self._source, scopes, guards)
        allowed = self.allow(site)
        if not (allowed or self._quiet):
            self.sites.setdefault((id(eqn), reason, site.name_stack), site)  # a loop is walked more than once
        return allowed

    def guess(self, full: Any, part: Any) -> State:
        """The state of a value of unknown origin, by its shape: for going on after mixing."""
        if len(shape(full)) == len(shape(part)):
            axes = changed_axes(full, part)
            if len(axes) == 1 and self._in_ratio(shape(full)[axes[0]], shape(part)[axes[0]]):
                size = shape(part)[axes[0]]
                return Rows(axes[0], inner=size // self.rows_within(size) if size else 1)
        return VARIES

    def enter(self, eqn: Any, full: Any, part: Any, states: Sequence[State], used: Sequence[bool]) -> list[State]:
        """Walk the program inside an equation:."""
        programs = from_jaxpr(full), from_jaxpr(part)
        values = [compat.consts_of(jaxpr) for jaxpr in (full, part)]
        of_consts: list[State] = []
        if len(programs[0].invars) != len(programs[1].invars):
            raise Mixing("depends on the batch size in its structure")
        num_consts = len(programs[1].invars) - len(states)
        for i in range(num_consts):
            pair = (values[0][i], values[1][i]) if i < min(map(len, values)) else (None, None)
            of_consts.append(self.checked(programs[0].invars[i], programs[1].invars[i], self.constant(*pair)))
        saved = self._path, self._source, self.used
        self._source = compat.source_line(eqn) or self._source
        self._path = self._path + compat.scopes(compat.name_stack(eqn))
        try:
            return self.walk(*programs, [*of_consts, *states], used)
        finally:
            self._path, self._source, self.used = saved

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Walk without recording states. Mixing is: a later walk may find no more than that a value varies."""
        self._rehearsals += 1
        try:
            yield
        finally:
            self._rehearsals -= 1

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Inside a program that may run any number of times."""
        self._deciding += 1
        try:
            yield
        finally:
            self._deciding -= 1

    @contextlib.contextmanager
    def closed(self, eqn: Any) -> Iterator[None]:
        """Inside a call that stays one equation, whatever is in it."""
        self._closed.append(eqn.primitive.name)
        try:
            yield
        finally:
            self._closed.pop()

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Inside a program whose values differ from run to run, or from device to device."""
        self.regions.append(object())
        try:
            yield
        finally:
            self.regions.pop()

    @contextlib.contextmanager
    def sharded(self, names: tuple[Any, ...], count: int) -> Iterator[None]:
        """Inside the program of one device, which holds one of ``count`` shares of the batch."""
        saved = self.shards, self._num_shards
        self.shards, self._num_shards = self.shards + names, self._num_shards * count
        try:
            yield
        finally:
            self.shards, self._num_shards = saved

    # -- leaves ---------------------------------------------------------------------------------------------------

    def input(self, full: Any, part: Any, axis: int | State | None) -> State:
        """The state of an input with the given batch axis."""
        if isinstance(axis, State):
            return self.checked(full, part, axis)
        if axis is None:
            if shape(full) != shape(part):
                raise Mixing("changes its shape with the batch, but has no batch axis")
            return INVARIANT
        axis %= len(shape(part)) or 1
        inner, rest = divmod(shape(part)[axis], self.part_size)
        if rest or changed_axes(full, part) not in ([axis], []):
            raise Mixing(f"does not have the size of the batch along axis {axis}")
        return self.checked(full, part, Rows(axis, inner=inner))

    def constant(self, full: Any, part: Any) -> State:
        """The state of a constant, from its values in the two programs."""
        if full is part:
            return INVARIANT
        if compat.is_tracer(full) or compat.is_tracer(part):
            raise Mixing("is not the same object in the two traces")
        f, p = np.asarray(full), np.asarray(part)
        if f.shape == p.shape:
            if np.array_equal(f, p, equal_nan=jnp.issubdtype(p.dtype, jnp.inexact)):
                return INVARIANT if p.any() else ZERO
            for degree in (1, -1, 2, -2):
                if _proportional(f, p, (self.batch_size / self.part_size) ** degree):
                    return Invariant(scale(N, degree))
            raise Mixing("depends on the batch size, and not in proportion")
        axes = [axis for axis, (n, m) in enumerate(zip(f.shape, p.shape, strict=False)) if n != m]
        if f.ndim == p.ndim and len(axes) == 1:
            row_f, row_p = f.take([0], axes[0]), p.take([0], axes[0])
            if np.array_equal(row_f, row_p) and (f == row_f).all() and (p == row_p).all():
                return Rows(axes[0], uniform=True, zero=not p.any())
            if all(v.ndim == 1 and np.array_equal(v, np.arange(len(v))) for v in (f, p)):
                return RowIndex(0)
        raise Mixing("depends on the batch size")

    # -- the walk -------------------------------------------------------------------------------------------------

    def walk(self, full: Program, part: Program, states: Sequence[State], used: Sequence[bool]) -> list[State]:
        """Walk two programs in lock step, from the states of the inputs to those of the outputs."""
        known = {var: _named(var, state, self.regions[-1]) for var, state in zip(part.invars, states, strict=True)}
        twins = dict(zip(full.invars, part.invars, strict=True))
        live = _live(part, used)
        apart = None  # the first equation from which the programs are not the same
        for f, p in itertools.zip_longest(full.eqns, part.eqns):
            states_in = None if f is None or p is None else self._inputs(f, p, known, twins)
            if states_in is None or f is None or p is None:
                apart = p or part.eqns[-1] if part.eqns else f
                break
            dead = not p.effects and live.isdisjoint(p.outvars)
            self._quiet += dead
            known.update(zip(p.outvars, self._equation(f, p, states_in, live), strict=True))
            self._quiet -= dead
            twins.update(zip(f.outvars, p.outvars, strict=True))
        if apart is not None:
            self.report(apart, "is not the same operation at both sizes: the program itself depends on the batch size")
        outs = []
        for f, p in zip(full.outvars, part.outvars, strict=True):
            if compat.is_literal(f) and compat.is_literal(p):
                outs.append(self._literal(f, p) or VARIES)
            elif not compat.is_literal(f) and not compat.is_literal(p) and twins.get(f) is p:
                outs.append(known[p])
            else:
                if apart is None:
                    self.report(part.eqns[-1] if part.eqns else None, "returns something else at another batch size")
                outs.append(self.guess(f, p))
        if not self._rehearsals:
            for var, state in known.items():
                self.states[var] = state if self.states.get(var, state) == state else VARIES
        return outs

    def _inputs(self, full: Any, part: Any, known: Mapping[Any, State], twins: Mapping[Any, Any]) -> list[State] | None:
        """The states of an equation's inputs; None if the two equations are not one operation on the same values."""
        if full.primitive is not part.primitive and full.primitive.name != part.primitive.name:
            return None
        if len(full.invars) != len(part.invars) or len(full.outvars) != len(part.outvars):
            return None
        states = []
        for f, p in zip(full.invars, part.invars, strict=True):
            if isinstance(p, compat.Literal):
                if not isinstance(f, compat.Literal):
                    return None
                states.append(self._literal(f, p))
            elif isinstance(f, compat.Literal) or twins.get(f) is not p:
                return None
            else:
                states.append(known[p])
        return states

    def _literal(self, full: Any, part: Any) -> State | None:
        """The state of a literal; None if it depends on the batch size in no simple way."""
        f, p = full.val, part.val
        try:
            if f == p:
                return INVARIANT if p else ZERO
        except ValueError:  # not a number but an array
            pass
        try:
            return self.constant(f, p)
        except Mixing:
            return None

    def _equation(self, full: Any, part: Any, states: Sequence[Any], live: set[Any]) -> Sequence[State]:
        """The states of an equation's outputs."""
        try:
            if any(state is None for state in states):
                raise Mixing("uses a constant that depends on the batch size, and not in proportion")
            region = self.regions[-1]
            outs = self._apply(full, part, states, live)
            return [
                _named(p, self.checked(f, p, out), region)
                for f, p, out in zip(full.outvars, part.outvars, outs, strict=True)
            ]
        except Mixing as mixing:
            guarded = [state for state in states if type(state) is Total]
            guards = part.primitive.name in _GUARDS and len(guarded) == 1
            guards = guards and all(type(state) in (Total, Invariant) for state in states)
            if self.report(part, str(mixing), guards) and guards:
                return guarded
            return [self.guess(f, p) for f, p in zip(full.outvars, part.outvars, strict=True)]

    def _apply(self, full: Any, part: Any, states: Sequence[State], live: set[Any]) -> Sequence[State]:
        """Apply the rule of an equation's primitive."""
        name = part.primitive.name
        rule = RULES.get(name)
        if rule is not None and rule.opens:
            self.used = [var in live for var in part.outvars]
            return rule.apply(self, full, part, states)  # pyright: ignore[reportReturnType]
        if any(state is VARIES for state in states):
            # As if it were the same everywhere: whatever comes of it is as good as the mixing it came out of.
            self._quiet += 1
            try:
                outs = self._apply(full, part, [INVARIANT if state is VARIES else state for state in states], live)
                return [VARIES if type(out) is Invariant else out for out in outs]
            except Mixing:
                return [self.guess(f, p) for f, p in zip(full.outvars, part.outvars, strict=True)]
            finally:
                self._quiet -= 1
        differing = _differing(full.params, part.params)
        if rule is None:
            invariant = all(type(state) is Invariant and is_one_scale(state) for state in states)
            if not invariant or differing or part.effects:
                raise Mixing(OPAQUE.get(name, f"is not known: no rule for primitive '{name}'"))
            return [INVARIANT] * len(part.outvars)
        if differing and not rule.sized.issuperset(differing):
            parameter = next(key for key in differing if key not in rule.sized)
            raise Mixing(f"depends on the batch size: its parameter '{parameter}' does")
        if not rule.positions and any(type(state) is RowIndex for state in states):
            raise Mixing("uses the position of a row in the batch")
        outs = rule.apply(self, full, part, states)
        return [outs] * len(part.outvars) if isinstance(outs, State) else outs

    def checked(self, full: Any, part: Any, state: Any) -> State:
        """The state, if it is one that a value of these two shapes can have."""
        f, p = shape(full), shape(part)
        if type(state) in (Rows, RowIndex):
            axis = state.axis
            right = len(f) == len(p) > axis and self._in_ratio(f[axis], p[axis])
            right = right and f[:axis] == p[:axis] and f[axis + 1 :] == p[axis + 1 :]
        else:
            right = f == p or state is VARIES
        if not right:
            raise Mixing(f"has the shapes {f} and {p} at the two batch sizes, which the proof cannot explain")
        return state

    def _in_ratio(self, full: int, part: int) -> bool:
        return full * self.part_size == part * self.batch_size


_GUARDS = frozenset({"add", "clamp", "max", "select_n", "sub"})


def _named(var: Any, state: State, region: Any) -> State:
    """A sum over the batch that is a single number becomes a factor of its own."""
    if type(state) is Total and state.factor is None and math.prod(shape(var)) == 1:
        return Total(state.scale, scale(Symbol(var, region)))
    return state


def _live(program: Program, used: Sequence[bool]) -> set[Any]:
    """The variables that the outputs in use, or effects, depend on."""
    live = {var for var, wanted in zip(program.outvars, used, strict=True) if wanted and not compat.is_literal(var)}
    for eqn in reversed(program.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(var for var in eqn.invars if not compat.is_literal(var))
    return live


def _differing(full: Mapping[str, Any], part: Mapping[str, Any]) -> list[str]:
    """The parameters of an equation that are not equal in the two traces."""
    try:
        if full == part:
            return []
    except ValueError:  # arrays among them
        pass
    return [key for key, value in part.items() if key not in full or not _equal(full[key], value)]


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    try:
        return bool(a == b)
    except ValueError:
        return False


def _proportional(full: np.ndarray, part: np.ndarray, ratio: float) -> bool:
    """Whether one constant is a multiple of the other, up to rounding."""
    if not jnp.issubdtype(part.dtype, jnp.number):
        return False
    tolerance = 4 * float(jnp.finfo(part.dtype).eps) if jnp.issubdtype(part.dtype, jnp.inexact) else 0.0
    if part.dtype.kind == "V":  # bfloat16, say: NumPy computes with what it knows
        full, part = full.astype(np.float64), part.astype(np.float64)
    if tolerance > 1 / 16:  # of numbers this coarse, too many would be proportional up to rounding
        tolerance = 0.0
    return bool(np.allclose(full, part * ratio, rtol=tolerance, atol=0))
