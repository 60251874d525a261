"""Experts between two all-to-alls, a few at a time: some compute while the tokens of others travel.

In expert parallelism one ``all_to_all`` brings tokens to the devices of their experts, and another one brings back what
came out. Experts do not depend on each other, so both exchanges and what lies between them can be cut along the
experts, as Comet does (arXiv 2502.19811, section 3.1: along the dimension that is independent on both sides), and Tutel
along the tokens (arXiv 2206.03382, section 4.2). Cut along the experts, every weight is read once, and products keep
their rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dynaflow_jax import compat, cost
from dynaflow_jax.batch.derive import Derivation, Underivable
from dynaflow_jax.batch.proof import analyse
from dynaflow_jax.batch.split import join, offsets, take
from dynaflow_jax.batch.state import Rows, State
from dynaflow_jax.cost import Kernel
from dynaflow_jax.inline import Flat, Node, Place
from dynaflow_jax.program import Program, from_jaxpr


class ExpertPipeline:
    """The function that a jaxpr is, with its experts in pieces; see `pipelined`."""

    __name__ = "expert_pipeline"

    def __init__(self, program: Program, parts: _Parts, stage: _Stage):
        self._program = program
        self._parts = parts
        self._stage = stage

    def __repr__(self) -> str:
        return f"ExpertPipeline(sizes={self._stage.sizes})"

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The jaxpr's outputs. All pieces are sent off first, and each goes back as soon as it is computed."""
        parts, stage = self._parts, self._stage
        env: dict[Any, Any] = dict(zip(self._program.invars, args, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else env[atom]

        def evaluate(eqns: Sequence[Any]) -> None:
            for eqn in eqns:
                env.update(zip(eqn.outvars, compat.bind(eqn, *map(value, eqn.invars)), strict=True))

        evaluate(parts.before)
        sizes, experts = stage.sizes, sum(stage.sizes)
        spans = list(zip(offsets(sizes), sizes, strict=True))
        tokens = value(parts.there.invars[0])
        own = [take(tokens, stage.sent, experts, *span) for span in spans]  # all by whatever computes the tokens
        arrived = [compat.bind(parts.there, piece)[0] for piece in own]
        returned = []
        for span, piece in zip(spans, arrived, strict=True):
            given = [
                take(value(var), state, experts, *span) if isinstance(state, Rows) else value(var)
                for var, state in zip(parts.between.invars, stage.given, strict=False)
            ]
            returned += compat.bind(parts.back, *compat.call_jaxpr(stage.jaxprs[span[1]], [*given, piece], "experts"))
        env[parts.back.outvars[0]] = join(returned, stage.returned, sizes)
        evaluate(parts.behind)
        return tuple(map(value, self._program.outvars))

    def kernels(self, axes: Mapping[str, int]) -> list[Kernel]:
        """What it asks of a device: what travels beside a piece is a part of that piece's largest kernel.

        Args:
          axes: sizes of the mesh axes that it communicates over.
        """
        parts, sizes = self._parts, self._stage.sizes
        shares = [size / sum(sizes) for size in sizes]
        there, back = (cost.itemized([eqn], eqn.outvars, axes) for eqn in (parts.there, parts.back))
        found = cost.itemized(parts.before, [*parts.there.invars, *parts.between.invars], axes)
        found += [_part(kernel, shares[0]) for kernel in there]
        for size, following, preceding in zip(sizes, [*shares[1:], 0.0], [0.0, *shares[:-1]], strict=True):
            inner = compat.open_jaxpr(self._stage.jaxprs[size])
            own = cost.itemized(inner.eqns, inner.outvars, axes)
            if own:
                largest = max(range(len(own)), key=lambda i: own[i].flops)
                beside = sum(k.sent * following for k in there) + sum(k.sent * preceding for k in back)
                own[largest] = dataclasses.replace(own[largest], sent=beside)
            found += own
        found += [_part(kernel, shares[-1]) for kernel in back]
        return found + cost.itemized(parts.behind, self._program.outvars, axes)


def _part(exchange: Kernel, share: float) -> Kernel:
    return dataclasses.replace(exchange, bytes=exchange.bytes * share, sent=exchange.sent * share)


def pipelined(jaxpr: Any, pieces: int) -> ExpertPipeline | None:
    """What a jaxpr computes, with its experts in pieces.

    The axis of the experts is found by itself: one of what the first exchange brings that the weights have too, and
    along which all that lies between the exchanges is proven to be independent, as a batch is before it is split.

    Args:
      jaxpr: a closed jaxpr without constants, of a function inside ``jax.shard_map``.
      pieces: how many; fewer if a device has fewer experts. Of three and more the first and the last are half as
        large as the others, since it is their way there and back that nothing hides.

    Returns:
      A function with the jaxpr's inputs and outputs, and equal results as far as products of fewer experts at a time
      give the same; ``None`` unless the jaxpr's collectives are two ``all_to_all`` with experts between them that can
      be told apart, and of which nothing but the second exchange reads: no backward pass, say. Calls with a
      ``custom_jvp`` or ``custom_vjp`` (``jax.nn.relu``, for one) cannot be told apart.
    """
    program = from_jaxpr(jaxpr)
    if (parts := _Parts.of(program)) is None:
        return None
    # An axis may merely happen to fit, and divide some of what is read; the experts' divides most of the weights.
    stage = max(_stages(parts, pieces), key=lambda stage: stage.weights, default=None)
    return None if stage is None else ExpertPipeline(program, parts, stage)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A program around its two exchanges.

    Attributes:
      there: the exchange that brings tokens to the experts.
      back: the one that brings them back.
      before: what does not need the first one, and is not read between the two only (a weight's conversion, say).
      between: what the second one sends, of what the first one brings.
      behind: what needs the second one.
    """

    there: Any
    back: Any
    before: tuple[Any, ...]
    between: Program
    behind: tuple[Any, ...]

    @classmethod
    def of(cls, program: Program) -> _Parts | None:
        """The parts, if there are two exchanges and nothing but the second one takes what lies between them."""
        exchanges = [eqn for eqn in program.eqns if cost.communicates(eqn)]
        if len(exchanges) != 2 or not all(map(_is_plain, exchanges)):
            return None
        there, back = exchanges
        after_there, after_back = _depending(program, there), _depending(program, back)
        behind = [eqn for eqn in program.eqns if id(eqn) in after_back]
        rest = [eqn for eqn in program.eqns if eqn is not there and eqn is not back and id(eqn) not in after_back]
        taken = {atom for eqn in (there, *behind) for atom in _variables(eqn.invars)} | set(_variables(program.outvars))
        between, before = [], []
        for eqn in reversed(rest):
            if id(eqn) in after_there or not taken.intersection(eqn.outvars):
                between.insert(0, eqn)
            else:
                before.insert(0, eqn)
                taken.update(_variables(eqn.invars))
        inside = {var for eqn in (there, *between) for var in eqn.outvars}
        if id(back) not in after_there or inside & taken:
            return None
        given = dict.fromkeys(atom for eqn in between for atom in _variables(eqn.invars) if atom not in inside)
        program = Program((*given, *there.outvars), tuple(back.invars), tuple(between))
        return cls(there, back, tuple(before), program, tuple(behind))


def _depending(program: Program, source: Any) -> set[int]:
    """The ids of the equations that need what one gives."""
    known, found = set(source.outvars), set[int]()
    for eqn in program.eqns:
        if known.intersection(_variables(eqn.invars)):
            found.add(id(eqn))
            known.update(eqn.outvars)
    return found


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return (atom for atom in atoms if not compat.is_literal(atom))


def _is_plain(eqn: Any) -> bool:
    return eqn.primitive.name == "all_to_all" and eqn.params["axis_index_groups"] is None


@dataclasses.dataclass(frozen=True)
class _Stage:
    """A way to do it.

    Attributes:
      sizes: how many of a device's experts each piece has.
      sent: where the experts are in what the first exchange sends.
      given: what a piece has of the inputs of what lies between the exchanges, less the last one.
      returned: where the experts are in what the second exchange brings.
      jaxprs: what lies between the exchanges, for a piece of a size.
      weights: bytes of those inputs that are divided.
    """

    sizes: tuple[int, ...]
    sent: Rows
    given: tuple[State, ...]
    returned: Rows
    jaxprs: Mapping[int, Any]
    weights: int


_NOWHERE = Place(None, None, (), "forward")


def _stages(parts: _Parts, pieces: int) -> Iterator[_Stage]:
    """The stages along all axes that allow it, with weights for each piece."""
    between = parts.between
    arrived = between.invars[-1].aval
    flat = Flat(between, tuple(Node(eqn, _NOWHERE) for eqn in between.eqns))
    for axis, experts in enumerate(arrived.shape):
        sent, sizes = _sent_axis(parts.there, axis), _sizes(experts, pieces)
        if sent is None or len(sizes) < 2:
            continue
        try:
            derivation = Derivation(flat, [axis], experts)
            programs = {size: derivation.at(size).program for size in sizes}
        except Underivable:
            continue
        given = derivation.constants
        divided = [v.aval for v, state in zip(between.invars, given, strict=False) if isinstance(state, Rows)]
        found = [analyse(between, part, [*given, axis], experts, size) for size, part in programs.items()]
        returned = _returned_axis(parts.back, found[0].outputs[0])
        independent = all(each.proven and not each.draws for each in found) and not derivation.custom
        if divided and independent and returned is not None:
            jaxprs = {n: compat.closed_jaxpr(p.invars, p.outvars, p.eqns, "experts") for n, p in programs.items()}
            yield _Stage(sizes, sent, given, returned, jaxprs, sum(map(cost.size_of, divided)))


def _sizes(experts: int, pieces: int) -> tuple[int, ...]:
    """How many experts each piece has."""
    pieces = min(experts, pieces)
    shares = [1 if i in (0, pieces - 1) else 2 for i in range(pieces)]
    ends = [round(experts * end / sum(shares)) for end in itertools.accumulate(shares)]
    return tuple(end - start for start, end in itertools.pairwise([0, *ends]))


def _sent_axis(there: Any, axis: int) -> Rows | None:
    """Where an axis of what an exchange brings is in what it sends; ``None`` if that is put together of all devices."""
    split, concat, tiled = (there.params[name] for name in ("split_axis", "concat_axis", "tiled"))
    if axis == concat:
        return None
    if tiled:
        return Rows(axis, outer=_devices(there) if axis == split else 1)
    axis -= axis > concat
    return Rows(axis + (axis >= split))


def _returned_axis(back: Any, state: State) -> Rows | None:
    """Where the axis of what an exchange sends is in what it brings; ``None`` if it is cut up for all devices."""
    split, concat, tiled = (back.params[name] for name in ("split_axis", "concat_axis", "tiled"))
    if type(state) is not Rows or state != Rows(state.axis) or state.axis == split:
        return None
    if tiled:
        return Rows(state.axis, outer=_devices(back) if state.axis == concat else 1)
    axis = state.axis - (state.axis > split)
    return Rows(axis + (axis >= concat))


def _devices(exchange: Any) -> int:
    """Between how many devices, if it splits one axis and puts parts together along another."""
    (sent,), (brought,), split = exchange.invars, exchange.outvars, exchange.params["split_axis"]
    return sent.aval.shape[split] // brought.aval.shape[split]
