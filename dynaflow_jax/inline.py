"""Opening nested calls as far as a boundary lies inside them, so that one flat program holds all that is to be cut.

Calls (``jit``, ``remat``, ``custom_vjp``, ...) without a boundary inside stay single equations. Loops and
``shard_map`` with one inside become *regions*: one equation whose body is a program to be scheduled in turn.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import compat
from dynaflow_jax.annotate import Label, Rules, is_call
from dynaflow_jax.cost import COLLECTIVES
from dynaflow_jax.errors import SplitError
from dynaflow_jax.program import Program

REGIONS = frozenset({"scan", "shard_map"})
# Opening these loses something that differentiating the result from outside would need.
_CUSTOM_DERIVATIVE = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}) | compat.REMAT
CALLS = compat.CALLS | _CUSTOM_DERIVATIVE
"""Calls that are opened where there is a boundary inside."""
DRAWS = frozenset({"random_bits", "random_split", "random_gamma", "threefry2x32", "rng_bit_generator"})
"""Primitives that draw random numbers; what draws over the batch is drawn outside the micro-batches."""

# Names under which versions of JAX know one primitive.
_ALIASES = (
    frozenset({"psum", "psum2", "psum_invariant"}),
    frozenset({"all_gather", "all_gather_invariant"}),
    frozenset({"psum_scatter", "reduce_scatter"}),
    compat.REMAT,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the model an equation comes from.

    Attributes:
      key: tells operators apart: equal for equations that belong together, ``None`` outside every mark and rule.
      label: the innermost label, if any.
      path: the user's and the modules' own scopes around the label (around the equation if there is none).
      phase: ``"forward"``, ``"backward"``, or ``"recompute"`` for what ``remat`` evaluates again.
    """

    key: Any
    label: Label | None
    path: tuple[str, ...]
    phase: str


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An equation and its place.

    Attributes:
      eqn: the equation.
      place: where it comes from.
      body: for a region, the flat program of its body; the equation holds the same as a jaxpr.
      draw: for a random draw over the batch, the equation that makes it for the whole batch.
      twin: the same equation at another size. Whatever depends on how large things are goes by it, so that a program
        is cut alike at every batch size.
    """

    eqn: Any
    place: Place
    body: Flat | None = None
    draw: Any = None
    twin: Any = None

    @property
    def sized(self) -> Any:
        """The equation that decides where it matters how large something is."""
        return self.eqn if self.twin is None else self.twin


@dataclasses.dataclass(frozen=True)
class Unopened:
    """A call, such as a ``while`` loop, inside which nothing can be scheduled.

    Attributes:
      where: the primitive, and the line of the user's that made it.
      marks: names of the marks inside it.
    """

    where: str
    marks: tuple[str, ...]


class Boundary(enum.IntEnum):
    """What lies inside a jaxpr that asks for opening it."""

    NONE = 0
    FOUND = 1  # a collective, or a random draw
    NAMED = 2  # a mark, or what a rule names


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A program whose boundaries all lie at its own level or in the bodies of its regions.

    Attributes:
      program: the equations.
      nodes: the same equations with their places.
      opened: names of the calls with derivative rules of their own (``custom_vjp``, ``remat``, ...) that were opened.
      unopened: calls with marks or rules' targets inside that cannot be opened, such as ``while`` and ``cond``.
    """

    program: Program
    nodes: tuple[Node, ...]
    opened: tuple[str, ...] = ()
    unopened: tuple[Unopened, ...] = ()


def with_twins(flat: Flat, other: Flat) -> Flat:
    """A program that will be cut just as the same program at another size."""
    if len(flat.nodes) != len(other.nodes):
        raise SplitError("The program has other equations at another batch size, and cannot be split for that.")
    nodes = []
    for node, twin in zip(flat.nodes, other.nodes, strict=True):
        body = node.body
        if body is not None and twin.body is not None:
            body = with_twins(body, twin.body)
        nodes.append(dataclasses.replace(node, body=body, twin=twin.eqn))
    return dataclasses.replace(flat, nodes=tuple(nodes))


def inline(
    program: Program, constants: Sequence[Any], rules: Rules, *, draws: bool, unroll: int = 1
) -> tuple[Flat, tuple[Any, ...]]:
    """Opens what has to be opened.

    Args:
      program: a traced program; its first inputs are ``constants``.
      constants: their values.
      rules: the partition rules.
      draws: whether calls that draw random numbers are opened too.
      unroll: how many iterations of a loop with boundaries inside become one.

    Returns:
      The flat program, whose leading inputs are its constants, and the values of those.
    """
    inliner = _Inliner(rules, draws, unroll)
    flat = inliner.flat(program, ())
    extra = tuple(inliner.hoisted.items())
    invars = (*(var for _, (var, _) in extra), *flat.program.invars)
    program = dataclasses.replace(flat.program, invars=invars)
    return dataclasses.replace(flat, program=program), (*(value for _, (_, value) in extra), *constants)


class _Inliner:
    def __init__(self, rules: Rules, draws: bool, unroll: int):
        self.rules = rules
        self.draws = draws
        self.unroll = unroll
        self.unrolled: list[Any] = []  # bodies of loops that are as they should be
        self.funcs = dict(rules.funcs)
        self.hoisted: dict[int, tuple[Any, Any]] = {}  # constants of nested jaxprs, as inputs of the program
        self._boundaries: dict[int, tuple[Any, Boundary]] = {}
        self._places: dict[Any, Place] = {}
        self.calls = 0

    def flat(self, program: Program, scopes: tuple[Any, ...]) -> Flat:
        """Opens a program whose surroundings have the given scopes."""
        level = _Level(self, scopes)
        level.run(program.eqns, {}, (), None)
        eqns, outvars = _live(
            level.nodes, [level.env.get(var, var) if not compat.is_literal(var) else var for var in program.outvars]
        )
        return Flat(
            Program(program.invars, tuple(outvars), tuple(node.eqn for node in eqns)),
            tuple(eqns),
            tuple(dict.fromkeys(level.opened)),
            tuple(dict.fromkeys(level.unopened)),
        )

    def boundary(self, jaxpr: Any) -> Boundary:
        """What lies inside a jaxpr: a label, a rule's target, a collective or (if asked for) a random draw."""
        inner = compat.open_jaxpr(jaxpr)
        if (known := self._boundaries.get(id(inner))) is None:
            known = (inner, max(map(self._boundary_at, inner.eqns), default=Boundary.NONE))
            self._boundaries[id(inner)] = known  # holding the jaxpr keeps its id from being used again
        return known[1]

    def _boundary_at(self, eqn: Any) -> Boundary:
        place = self.place((), compat.scopes(compat.name_stack(eqn)))
        if place.label is not None or self.func_rule(eqn) is not None:
            return Boundary.NAMED
        name = eqn.primitive.name
        found = name in COLLECTIVES or (self.draws and name in DRAWS)
        inside = max((self.boundary(body) for _, body in compat.sub_jaxprs(eqn)), default=Boundary.NONE)
        return max(inside, Boundary.FOUND if found else Boundary.NONE)

    def marks_in(self, jaxpr: Any) -> Iterator[str]:
        """The names of the marks inside a jaxpr."""
        for eqn in compat.open_jaxpr(jaxpr).eqns:
            label = self.place((), compat.scopes(compat.name_stack(eqn))).label
            if label is not None and label.rule is None:
                yield label.name
            for _, body in compat.sub_jaxprs(eqn):
                yield from self.marks_in(body)

    def func_rule(self, eqn: Any) -> int | None:
        """The rule that names this equation's primitive, or the function that it calls."""
        for index, rule in self.funcs.items():
            names = {eqn.primitive.name, _called_name(eqn)}
            if rule.target in names or any(rule.target in alias and alias & names for alias in _ALIASES):
                return index
        return None

    def to_unroll(self, eqn: Any) -> bool:
        """Whether a loop is still to be unrolled."""
        body = compat.open_jaxpr(eqn.params["jaxpr"])
        return self.unroll > 1 and eqn.params["length"] > 1 and all(body is not done for done in self.unrolled)

    def place(self, outer: tuple[Any, ...], scopes: tuple[Any, ...]) -> Place:
        """The place of an equation, from the scopes of the calls around it and its own."""
        cached = self._places.get((outer, scopes))
        if cached is None:
            cached = self._places[outer, scopes] = self._place(outer + scopes)
        return cached

    def _place(self, scopes: tuple[Any, ...]) -> Place:
        backward = any(name == "transpose" for name, is_transform in scopes if is_transform)
        phase = "backward" if backward else "forward"
        if backward and any(name == "rematted_computation" for name, _ in scopes):
            phase = "recompute"
        # Call sites stand among the scopes as integers, and as scopes: they tell two calls of one jaxpr apart.
        for depth in range(len(scopes) - 1, -1, -1):
            name, is_transform = scopes[depth]
            if is_transform or not isinstance(name, str):
                continue
            label = Label.decode(name) if name.startswith("df:") else self._named(name)
            if label is not None:
                around = (entry for entry, _ in scopes[:depth] if isinstance(entry, int) or is_call(entry))
                sites = tuple(dict.fromkeys(around))
                if label.rule is not None and not name.startswith("df:"):
                    sites = (*sites, *(entry for entry, _ in scopes[:depth] if isinstance(entry, str)))
                return Place((sites, name, phase), label, _plain(scopes[:depth]), phase)
        return Place(None, None, _plain(scopes), phase)

    def _named(self, scope: str) -> Label | None:
        for index, rule in self.funcs.items():
            if scope == rule.target:
                return rule.label(index)
        return None


_JAX_SCOPES = frozenset({"rematted_computation", "checkpoint", "while", "body", "cond", "closed_call"})


def _plain(scopes: tuple[Any, ...]) -> tuple[str, ...]:
    """The scopes that users and modules opened, without what JAX and this library add; repetitions once."""
    path: list[str] = []
    for name, is_transform in scopes:
        own = is_transform or not isinstance(name, str) or name.startswith("df:") or name in _JAX_SCOPES
        if not own and path[-1:] != [name]:
            path.append(name)
    return tuple(path)


class _Level:
    """The equations of one region, while they are being collected."""

    def __init__(self, inliner: _Inliner, scopes: tuple[Any, ...]):
        self.inliner = inliner
        self.outer = scopes
        self.env: dict[Any, Any] = {}
        self.nodes: list[Node] = []
        self.opened: list[str] = []
        self.unopened: list[Unopened] = []

    def run(self, eqns: Sequence[Any], env: dict[Any, Any], scopes: tuple[Any, ...], stack: Any) -> None:
        """Appends equations; ``env`` renames the variables of an opened jaxpr, ``stack`` is its caller's name stack."""
        inliner, renames = self.inliner, stack is not None
        for eqn in eqns:
            own = compat.scopes(compat.name_stack(eqn))
            bodies = [body for _, body in compat.sub_jaxprs(eqn)] if eqn.params else []
            boundary = max(map(inliner.boundary, bodies), default=Boundary.NONE)
            if renames:
                invars = [var if compat.is_literal(var) else env.get(var, var) for var in eqn.invars]
            else:
                invars = [var if compat.is_literal(var) else self.env.get(var, var) for var in eqn.invars]
            name = eqn.primitive.name
            full_stack = stack + compat.name_stack(eqn) if renames else None
            rule = inliner.func_rule(eqn) if inliner.funcs else None
            if boundary and name in CALLS and _fits(bodies[0], eqn):
                if rule is not None:  # what is no operator of its own inside still belongs to what the rule names
                    own = (*own, (inliner.funcs[rule].label(rule).encode(), False))
                self._open(eqn, bodies[0], invars, env if renames else self.env, scopes + own, full_stack)
                continue
            if boundary and name == "scan" and inliner.to_unroll(eqn):
                unrolled = _unrolled(eqn, inliner.unroll, inliner.unrolled)
                self._open(eqn, unrolled, invars, env if renames else self.env, scopes + own, full_stack)
                continue
            outvars = eqn.outvars
            if renames:
                outvars = [compat.new_var(var.aval) if not compat.is_dropped(var) else var for var in eqn.outvars]
                env.update((old, new) for old, new in zip(eqn.outvars, outvars, strict=True) if old is not new)
            place = inliner.place(self.outer + scopes, own)
            if rule is not None:
                label = inliner.funcs[rule].label(rule)
                place = Place(("func", len(self.nodes)), label, place.path, place.phase)
            elif place.label is None and name in COLLECTIVES:
                place = Place(("collective", len(self.nodes)), None, place.path, place.phase)
            params, body = None, None
            if boundary and name in REGIONS:
                around = self.outer + scopes + own
                params, invars, body = self._region(eqn, bodies[0], invars, around)
                self.opened.extend(body.opened)
                self.unopened.extend(body.unopened)
                place = Place(("region", len(self.nodes)), place.label, place.path, place.phase)
            elif boundary is Boundary.NAMED:
                marks = dict.fromkeys(mark for body in bodies for mark in inliner.marks_in(body))
                self.unopened.append(
                    Unopened(f"{name} at {compat.source_line(eqn) or 'an unknown line'}", tuple(marks))
                )
            if renames or params is not None or any(a is not b for a, b in zip(invars, eqn.invars, strict=False)):
                eqn = compat.replace_eqn(eqn, invars=invars, outvars=outvars, params=params, name_stack=full_stack)
            self.nodes.append(Node(eqn, place, body))

    def _open(self, eqn: Any, body: Any, invars: list[Any], env: dict[Any, Any], scopes: Any, stack: Any) -> None:
        inner = compat.open_jaxpr(body)
        name = eqn.primitive.name
        stack = compat.name_stack(eqn) if stack is None else stack
        if name in _CUSTOM_DERIVATIVE and not eqn.params.get("differentiated", False):
            self.opened.append(_called_name(eqn) or name)
        if (
            name in compat.REMAT
            and eqn.params.get("differentiated")
            and _prevents_cse(eqn.params.get("prevent_cse", True))
        ):
            # What remat's own lowering does: without it the compiler would find the first computation and keep it.
            invars = self._emit(jax.lax.optimization_barrier, invars, scopes, stack)
        elif "in_shardings" in eqn.params:
            invars = self._constrain(invars, eqn.params["in_shardings"], scopes, stack)
        hoisted = [self._hoist(value) for value in compat.consts_of(body)]
        inner_env = dict(zip(compat.all_invars(body), (*hoisted, *invars), strict=True))
        if not any(is_call(scope) for scope, _ in compat.scopes(compat.name_stack(eqn))):
            self.inliner.calls += 1
            scopes = (*scopes, (self.inliner.calls, False))
        self.run(inner.eqns, inner_env, scopes, stack)
        outs = [var if compat.is_literal(var) else inner_env.get(var, var) for var in inner.outvars]
        if "out_shardings" in eqn.params:
            outs = self._constrain(outs, eqn.params["out_shardings"], scopes, stack)
        env.update(zip(eqn.outvars, outs, strict=True))

    def _constrain(self, atoms: list[Any], shardings: Sequence[Any], scopes: Any, stack: Any) -> list[Any]:
        """Keeps the shardings that an opened ``jit`` gave its inputs or outputs."""
        result = list(atoms)
        for i, sharding in enumerate(shardings):
            if isinstance(sharding, jax.sharding.Sharding) and not compat.is_literal(atoms[i]):
                constrain = lambda x, s=sharding: [jax.lax.with_sharding_constraint(x[0], s)]  # noqa: E731
                result[i] = self._emit(constrain, [atoms[i]], scopes, stack)[0]
        return result

    def _emit(self, fun: Any, atoms: list[Any], scopes: Any, stack: Any) -> list[Any]:
        """Appends the equations of a small function of our own."""
        keep = [i for i, atom in enumerate(atoms) if not compat.is_literal(atom)]
        closed = jax.make_jaxpr(lambda *xs: fun(list(xs)))(*(atoms[i].aval for i in keep))
        inner = compat.open_jaxpr(closed)
        env = dict(zip(inner.invars, (atoms[i] for i in keep), strict=True))
        self.run(inner.eqns, env, scopes, stack)
        result = list(atoms)
        for i, var in zip(keep, inner.outvars, strict=True):
            result[i] = env.get(var, var)
        return result

    def _hoist(self, value: Any) -> Any:
        hoisted = self.inliner.hoisted
        if id(value) not in hoisted:
            hoisted[id(value)] = (compat.new_var(jax.typeof(value)), value)
        return hoisted[id(value)][0]

    def _region(self, eqn: Any, body: Any, invars: list[Any], scopes: Any) -> tuple[dict[str, Any], list[Any], Flat]:
        """The parameters and inputs of a region's equation once its body is flat."""
        inner = compat.open_jaxpr(body)
        outside = set(self.inliner.hoisted)
        program = Program(compat.all_invars(body), tuple(inner.outvars), tuple(inner.eqns))
        flat = self.inliner.flat(program, (*scopes, (f"body{len(self.nodes)}", True)))
        # Constants of calls inside the body are inputs of the whole program, so the region has to pass them in.
        new = [entry for key, entry in self.inliner.hoisted.items() if key not in outside]
        new += [self.inliner.hoisted[key] for key in outside if _reads(flat.nodes, self.inliner.hoisted[key][0])]
        own = [self._hoist(value) for value in compat.consts_of(body)]
        passed = [*(var for var, _ in new), *own]
        if passed:
            fresh = {var: compat.new_var(var.aval) for var, _ in new}
            flat = _substitute(flat, fresh)
            program = dataclasses.replace(flat.program, invars=(*fresh.values(), *flat.program.invars))
            flat = dataclasses.replace(flat, program=program)
        return compat.region_params(eqn, flat.program, len(passed)), [*passed, *invars], flat


def _unrolled(eqn: Any, factor: int, done: list[Any]) -> Any:
    """A jaxpr that does what a ``scan`` does, with ``factor`` iterations in each of its own.

    Each iteration is a call, so that the places in it can be told apart; what remains is a loop of single ones.
    """
    params = eqn.params
    body, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    factor = min(factor, length)
    num_consts, num_carry = compat.scan_partition(eqn)

    def iteration(consts, carry, x):
        outs = compat.call_jaxpr(body, [*consts, *carry, *x], "iteration")
        return outs[:num_carry], outs[num_carry:]

    def loop(*args):
        consts, carry, xs = args[:num_consts], list(args[num_consts:][:num_carry]), args[num_consts + num_carry :]

        def several(carry, x):
            ys: list[Any] = [None] * factor
            for i in reversed(range(factor)) if reverse else range(factor):
                carry, ys[i] = iteration(consts, carry, [leaf[i] for leaf in x])
            return carry, [jnp.stack(leaves) for leaves in zip(*ys, strict=True)]

        single, main = length % factor, length - length % factor
        start = single if reverse else 0  # the main part runs first
        chunks = [leaf[start : start + main].reshape(-1, factor, *leaf.shape[1:]) for leaf in xs]
        carry, ys = jax.lax.scan(several, carry, chunks, length=main // factor, reverse=reverse)
        ys = [leaf.reshape(main, *leaf.shape[2:]) for leaf in ys]
        if single:
            rest = [leaf[:single] if reverse else leaf[main:] for leaf in xs]
            step = lambda carry, x: iteration(consts, carry, x)  # noqa: E731
            carry, last = jax.lax.scan(step, carry, rest, length=single, reverse=reverse)
            parts = [(b, a) if reverse else (a, b) for a, b in zip(ys, last, strict=True)]
            ys = [jnp.concatenate(pair) for pair in parts]
        return [*carry, *ys]

    closed = jax.make_jaxpr(loop)(*(var.aval for var in eqn.invars))
    for inner in closed.eqns:
        if inner.primitive.name == "scan":
            done.append(compat.open_jaxpr(inner.params["jaxpr"]))
    return closed


def _substitute(flat: Flat, env: dict[Any, Any]) -> Flat:
    def rename(eqn: Any) -> Any:
        return compat.replace_eqn(
            eqn, invars=[var if compat.is_literal(var) else env.get(var, var) for var in eqn.invars]
        )

    nodes = tuple(dataclasses.replace(node, eqn=rename(node.eqn)) for node in flat.nodes)
    outvars = tuple(var if compat.is_literal(var) else env.get(var, var) for var in flat.program.outvars)
    program = Program(flat.program.invars, outvars, tuple(node.eqn for node in nodes))
    return dataclasses.replace(flat, program=program, nodes=nodes)


def _reads(nodes: Sequence[Node], var: Any) -> bool:
    return any(var is atom for node in nodes for atom in node.eqn.invars)


def _fits(body: Any, eqn: Any) -> bool:
    return len(compat.open_jaxpr(body).invars) == len(eqn.invars) and len(body.out_avals) == len(eqn.outvars)


def _prevents_cse(value: Any) -> bool:
    return any(value) if isinstance(value, tuple) else bool(value)


def _called_name(eqn: Any) -> str | None:
    """The name of the function that an equation calls, if it calls one."""
    name = eqn.params.get("name")
    if isinstance(name, str):
        return name
    for _, body in compat.sub_jaxprs(eqn):
        return compat.function_name(body)
    return None


def _live(nodes: Sequence[Node], outvars: list[Any]) -> tuple[list[Node], list[Any]]:
    """The nodes that an output or an effect needs."""
    needed = {var for var in outvars if not compat.is_literal(var)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.eqn.effects or any(var in needed for var in node.eqn.outvars):
            kept.append(node)
            needed.update(var for var in node.eqn.invars if not compat.is_literal(var))
    return kept[::-1], outvars
