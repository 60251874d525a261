"""Random draws over the batch: made once for all micro-batches, or once for each with a key of its own.

Dropout on a micro-batch must use the very bits that the whole batch would use. So a draw whose shape contains the
batch becomes an operator that runs once, with the whole batch's shape, and of which every micro-batch takes its rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dynaflow_jax import compat
from dynaflow_jax.errors import BatchMixingError
from dynaflow_jax.inline import Flat, Node
from dynaflow_jax.program import Program

Draws = frozenset[tuple[int, ...]]
"""Where the draws are: indices of nodes, through the bodies of regions. The same for every batch size."""


def locate(flat: Flat, equations: Sequence[Any]) -> Draws:
    """Where given equations of a program are.

    Raises:
      BatchMixingError: if one is inside a call that is not opened, where each micro-batch would draw for itself.
    """
    wanted = {id(eqn): eqn for eqn in equations}
    missing = dict(wanted)

    def search(flat: Flat, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
        found = []
        for i, node in enumerate(flat.nodes):
            if id(node.eqn) in wanted:
                missing.pop(id(node.eqn), None)
                found.append((*prefix, i))
            elif node.body is not None:
                found += search(node.body, (*prefix, i))
        return found

    found = frozenset(search(flat, ()))
    for eqn in missing.values():
        raise BatchMixingError(
            f"{eqn.primitive.name} at {compat.source_line(eqn) or 'an unknown line'} draws random numbers for the "
            "whole batch, inside a call that cannot be opened to draw them once: the batch cannot be split."
        )
    return found


def draw_once(part: Flat, full: Flat, draws: Draws, prefix: tuple[int, ...] = ()) -> Flat:
    """A micro-batch's program whose draws are those of the whole batch.

    Args:
      part: the micro-batch's program.
      full: the whole batch's, of the same structure.
      draws: where the draws are.
      prefix: where ``part`` is, for the bodies of regions.
    """
    nodes = []
    for i, (node, whole) in enumerate(zip(part.nodes, full.nodes, strict=True)):
        here = (*prefix, i)
        if here in draws:
            # What a draw reads does not depend on the batch: any micro-batch has it.
            eqn = compat.replace_eqn(whole.eqn, invars=node.eqn.invars)
            node = dataclasses.replace(node, draw=eqn, place=dataclasses.replace(node.place, key=("draw", i)))
        elif node.body is not None and whole.body is not None:
            node = dataclasses.replace(node, body=draw_once(node.body, whole.body, draws, here))
        nodes.append(node)
    return dataclasses.replace(part, nodes=tuple(nodes))


def draw_separately(flat: Flat, draws: Draws) -> tuple[Flat, Any]:
    """A micro-batch's program whose draws fold the micro-batch's index into their keys, and the index variable."""
    index = compat.new_var(jax.make_jaxpr(lambda x: x)(jnp.uint32(0)).in_avals[0])
    return _fold(flat, draws, index, ()), index


def _fold(flat: Flat, draws: Draws, index: Any, prefix: tuple[int, ...]) -> Flat:
    nodes: list[Node] = []
    for i, node in enumerate(flat.nodes):
        here = (*prefix, i)
        if here in draws:
            key, *rest = node.eqn.invars
            folded = jax.make_jaxpr(_fold_key)(key.aval, index.aval)
            env = dict(zip(compat.all_invars(folded), (key, index), strict=True))
            nodes += [dataclasses.replace(node, eqn=_rename(eqn, env, node.eqn)) for eqn in folded.eqns]
            key = env[compat.open_jaxpr(folded).outvars[0]]
            node = dataclasses.replace(node, eqn=compat.replace_eqn(node.eqn, invars=[key, *rest]))
        elif node.body is not None and any(path[: len(here)] == here for path in draws):
            inner = compat.new_var(index.aval)
            body = _fold(node.body, draws, inner, here)
            eqn = compat.replace_eqn(
                node.eqn,
                invars=[index, *node.eqn.invars],
                params=compat.region_params(node.eqn, body.program, 1),
            )
            node = dataclasses.replace(node, eqn=eqn, body=body)
        nodes.append(node)
    program = Program((index, *flat.program.invars), flat.program.outvars, tuple(node.eqn for node in nodes))
    return dataclasses.replace(flat, program=program, nodes=tuple(nodes))


def _fold_key(key: Any, index: Any) -> Any:
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(key, index)
    # Raw bits, as a draw below the level of typed keys takes them.
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key), index))


def _rename(eqn: Any, env: dict[Any, Any], like: Any) -> Any:
    invars = [var if compat.is_literal(var) else env.get(var, var) for var in eqn.invars]
    outvars = [compat.new_var(var.aval) for var in eqn.outvars]
    env.update(zip(eqn.outvars, outvars, strict=True))
    return compat.replace_eqn(eqn, invars=invars, outvars=outvars, name_stack=compat.name_stack(like))
