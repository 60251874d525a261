"""Parts of what operators compute, computed by other functions, such as kernels."""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from dynaflow_jax import compat, cost
from dynaflow_jax.cost import Kernel


@dataclasses.dataclass(frozen=True)
class Match:
    """A part of a jaxpr that a function can compute.

    Attributes:
      name: of the function, such as ``"add_rms_norm"``.
      fn: takes the values of ``invars`` and returns a sequence of those of ``outvars``, of the same shapes and dtypes.
      invars: variables of the jaxpr, or literals.
      outvars: variables of the jaxpr; none of ``invars`` may depend on them.
    """

    name: str
    fn: Callable[..., Sequence[Any]]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]


Finder = Callable[[Any], Iterable[Match]]
"""Says which parts of an open jaxpr functions could compute, those that it prefers first."""


class Dataflow:
    """What gives and what reads the variables of a jaxpr; for finders.

    Attributes:
      maker: by variable, the equation that gives it; inputs have none.
      readers: by variable, the equations that read it, in program order.
      results: the variables that the jaxpr returns.
    """

    def __init__(self, jaxpr: Any):
        self.maker: dict[Any, Any] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.readers: dict[Any, list[Any]] = {}
        for eqn in jaxpr.eqns:
            for var in dict.fromkeys(_variables(eqn.invars)):
                self.readers.setdefault(var, []).append(eqn)
        self.results = set(_variables(jaxpr.outvars))

    def made_by(self, atom: Any, *primitives: str) -> Any | None:
        """The equation that gives a value, if it is one of these primitives."""
        eqn = None if compat.is_literal(atom) else self.maker.get(atom)
        return eqn if eqn is not None and eqn.primitive.name in primitives else None

    def only_reader(self, var: Any) -> Any | None:
        """The equation that reads a variable, if nothing else does and the jaxpr does not return it."""
        readers = self.readers.get(var, [])
        return readers[0] if len(readers) == 1 and var not in self.results else None


class Substituted:
    """The function that a jaxpr is, with parts of it computed by other functions.

    What no result needs any more is not computed.

    Attributes:
      matches: the parts, and their functions.
      eqns: the equations that are still evaluated.
    """

    def __init__(self, jaxpr: Any, matches: Sequence[Match]):
        self.matches = tuple(matches)
        self._jaxpr = jaxpr
        self._steps = _in_order(jaxpr, self.matches)
        self.eqns = [step for step in self._steps if not isinstance(step, Match)]
        self.__name__ = "+".join(dict.fromkeys(match.name for match in self.matches))

    def __repr__(self) -> str:
        return f"Substituted({self.__name__})"

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The jaxpr's outputs, from its inputs."""
        env: dict[Any, Any] = dict(zip(self._jaxpr.invars, args, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        for step in self._steps:
            values = map(value, step.invars)
            results = step.fn(*values) if isinstance(step, Match) else compat.bind(step, *values)
            env.update(zip(step.outvars, results, strict=True))
        return tuple(map(value, self._jaxpr.outvars))

    def kernels(self, axes: Mapping[str, int]) -> list[Kernel]:
        """What it asks of a device: each part is one kernel, which reads and writes what it must.

        Args:
          axes: sizes of the mesh axes that it may communicate over.
        """
        read = {var for match in self.matches for var in _variables(match.invars)}
        own = cost.itemized(self.eqns, [*self._jaxpr.outvars, *read], axes)
        calls = [match.fn for match in self.matches if isinstance(match.fn, _Call)]
        parts = [match for match in self.matches if not isinstance(match.fn, _Call)]
        left = set(map(id, (*self.eqns, *(call.eqn for call in calls))))
        replaced = [eqn for eqn in self._jaxpr.eqns if id(eqn) not in left]
        flops = sum(kernel.flops * kernel.count for kernel in cost.itemized(replaced, (), axes))
        for match in parts:
            moved = sum(cost.bytes_of(var.aval) for var in (*_variables(match.invars), *match.outvars))
            dtype = match.outvars[0].aval.dtype
            own.append(Kernel(match.name, flops / len(parts), moved, dtype.name, dtype.itemsize))
        return own + [kernel for call in calls for kernel in call.inner.kernels(axes)]


def substituted(jaxpr: Any, finders: Iterable[Finder]) -> Substituted | None:
    """What a jaxpr computes, with what finders find in it computed by their functions.

    Args:
      jaxpr: a jaxpr without constants; calls of ``jit`` and ``jax.checkpoint`` in it are looked into.
      finders: asked one after the other; where two matches give the same value, the first counts.

    Returns:
      A function with the jaxpr's inputs and outputs; ``None`` if nothing was found.
    """
    opened = compat.open_jaxpr(jaxpr)
    found: list[Match] = []
    if any(compat.has_effects(eqn) for eqn in opened.eqns):  # their order is part of what it does
        return None
    finders = tuple(finders)
    for finder in (*finders, lambda jaxpr: _in_calls(jaxpr, finders)):
        for match in finder(opened):
            if {*match.outvars} & {var for other in found for var in other.outvars}:
                continue
            try:
                _in_order(opened, [*found, match])
            except graphlib.CycleError:
                continue  # it needs what it is to give
            found.append(match)
    return Substituted(opened, found) if found else None


_CALLS = frozenset({"jit", "pjit", "eval_jaxpr"}) | compat.REMAT


class _Call:
    """A call of a jaxpr, parts of which are computed by other functions. It stays the kind of call that it is."""

    def __init__(self, eqn: Any, inner: Substituted):
        self.eqn = eqn
        self.inner = inner

    def __call__(self, *args: Any) -> list[Any]:
        """Its results."""
        with compat.scope_of(self.eqn):
            jaxpr = jax.make_jaxpr(self.inner)(*args)
        is_open = compat.open_jaxpr(self.eqn.params["jaxpr"]) is self.eqn.params["jaxpr"]
        params = {**self.eqn.params, "jaxpr": compat.open_jaxpr(jaxpr) if is_open else jaxpr}
        return compat.bind(compat.replace_eqn(self.eqn, params=params), *args)


def _in_calls(jaxpr: Any, finders: Sequence[Finder]) -> Iterator[Match]:
    """The calls of ``jit`` and ``jax.checkpoint`` inside which something is found."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _CALLS or compat.consts_of(eqn.params["jaxpr"]):
            continue
        if (inner := substituted(eqn.params["jaxpr"], finders)) is not None:
            yield Match(inner.__name__, _Call(eqn, inner), tuple(eqn.invars), tuple(eqn.outvars))


def _in_order(jaxpr: Any, matches: Sequence[Match]) -> list[Any]:
    """Matches, and the equations that are needed beside them, each after what it reads."""
    nodes = [*jaxpr.eqns, *matches]
    maker = {var: i for i, node in enumerate(nodes) for var in node.outvars}  # matches last, so that they count
    order: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter()
    waiting, needed = [maker[var] for var in _variables(jaxpr.outvars) if var in maker], set()
    while waiting:
        i = waiting.pop()
        if i not in needed:
            needed.add(i)
            before = [maker[var] for var in _variables(nodes[i].invars) if var in maker]
            order.add(i, *before)
            waiting += before
    return [nodes[i] for i in order.static_order()]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not compat.is_literal(atom)]
