"""Random draws over the batch, taken out of the micro-batches.

Dropout on a micro-batch must use the very bits that the whole batch would use. So a draw whose shape contains the
batch becomes an *input* of the micro-batch's program, and a *shared* program, run once, draws for the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.batch.state import State
from dynaflow_jax.inline import Draw, Flat, Node
from dynaflow_jax.program import Program


def extract(part: Flat, full: Flat, states: Mapping[Any, State], draws: frozenset[int]) -> Flat:
    """Takes the draws out of a micro-batch's program, aligned equation by equation with the full batch's.

    Args:
      part: the micro-batch's program.
      full: the full batch's program, of the same structure.
      states: the state of every variable of ``part``.
      draws: identities of the equations of ``part`` that draw over the batch.

    Returns:
      ``part`` without its draws, with a ``shared`` program that makes them; likewise in the bodies of its regions.
    """
    kept: list[Node] = []
    found: list[Draw] = []
    for node, full_node in zip(part.nodes, full.nodes, strict=True):
        if id(node.eqn) in draws:
            outs = zip(node.eqn.outvars, full_node.eqn.outvars, strict=True)
            found += [Draw(var, whole, states[var]) for var, whole in outs if not compat.is_dropped(var)]
            continue
        if node.body is not None and full_node.body is not None:
            node = dataclasses.replace(node, body=extract(node.body, full_node.body, states, draws))
        kept.append(node)
    program = Program(part.program.invars, part.program.outvars, tuple(node.eqn for node in kept))
    shared = _shared(full, found) if found else None
    return dataclasses.replace(part, program=program, nodes=tuple(kept), shared=shared, draws=tuple(found))


def _shared(full: Flat, draws: list[Draw]) -> Flat:
    """The part of the full batch's program that its draws need."""
    outputs = tuple(draw.full for draw in draws)
    needed = set(outputs)
    nodes: list[Node] = []
    for node in reversed(full.nodes):
        if any(var in needed for var in node.eqn.outvars):
            nodes.append(node)
            needed.update(var for var in node.eqn.invars if not compat.is_literal(var))
    nodes.reverse()
    return Flat(Program(full.program.invars, outputs, tuple(n.eqn for n in nodes)), tuple(nodes))


def fold_in_index(flat: Flat, draws: frozenset[int]) -> tuple[Flat, Any]:
    """A micro-batch's program whose draws fold the micro-batch's index into their keys, and its index variable."""
    index = compat.new_var(jax.core.ShapedArray((), jax.numpy.uint32.dtype))
    return _fold(flat, draws, index, hand_down=False), index


def _fold(flat: Flat, draws: frozenset[int], index: Any, *, hand_down: bool) -> Flat:
    nodes: list[Node] = []
    inner = compat.new_var(index.aval) if hand_down else index
    for node in flat.nodes:
        if id(node.eqn) in draws:
            key, *rest = node.eqn.invars
            folded = jax.make_jaxpr(_fold_key)(key.aval, index.aval)
            env = dict(zip(compat.all_invars(folded), (key, inner), strict=True))
            for eqn in folded.eqns:
                nodes.append(dataclasses.replace(node, eqn=_rename(eqn, env, node.eqn)))
            out = env[folded.jaxpr.outvars[0]]
            node = dataclasses.replace(node, eqn=compat.replace_eqn(node.eqn, invars=[out, *rest]))
        elif node.body is not None:
            body = _fold(node.body, draws, index, hand_down=True)
            if body is not node.body:
                params = compat.region_params(node.eqn, body.program, 1)
                eqn = compat.replace_eqn(node.eqn, invars=[inner, *node.eqn.invars], params=params)
                node = Node(eqn, node.place, body)
        nodes.append(node)
    if all(a is b for a, b in zip(nodes, flat.nodes, strict=False)) and len(nodes) == len(flat.nodes):
        return flat
    invars = (inner, *flat.program.invars)
    program = Program(invars, flat.program.outvars, tuple(node.eqn for node in nodes))
    return dataclasses.replace(flat, program=program, nodes=tuple(nodes))


def _fold_key(key: Any, index: Any) -> Any:
    if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(key, index)
    # Raw bits, as a draw below the level of typed keys takes them.
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), index))


def _rename(eqn: Any, env: dict[Any, Any], like: Any) -> Any:
    invars = [var if compat.is_literal(var) else env.get(var, var) for var in eqn.invars]
    outvars = [compat.new_var(var.aval) for var in eqn.outvars]
    env.update(zip(eqn.outvars, outvars, strict=True))
    return compat.replace_eqn(eqn, invars=invars, outvars=outvars, name_stack=compat.name_stack(like))
