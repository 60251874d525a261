"""Check what the proof says of a function against what happens: run it whole, run it in micro-batches, and join."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from dynaflow_jax import compat
from dynaflow_jax.annotate import Rules
from dynaflow_jax.batch.derive import Derivation, Underivable
from dynaflow_jax.batch.proof import Analysis, analyse
from dynaflow_jax.batch.state import Invariant, N, RowIndex, Rows, State, Total
from dynaflow_jax.inline import inline
from dynaflow_jax.program import from_jaxpr, trace

BATCH, PART = 6, 2


def programs(fun, args, in_axes, batch=BATCH, part=PART):
    """The function's programs at both sizes, and its constants. The arguments are those of the full batch."""

    def flat(*args):
        return jax.tree.leaves(fun(*args))

    traces = []
    for rows in (batch, part):
        avals = [rows_of(arg, axis, 0, rows * (arg.shape[axis] // batch) if axis is not None else 0)
                 for arg, axis in zip(args, in_axes, strict=True)]  # fmt: skip
        traces.append(trace(flat, avals))
    return [program for program, _ in traces], tuple(consts for _, consts in traces)


def rows_of(arg, axis, start, stop):
    return arg if axis is None else jax.lax.slice_in_dim(arg, start, stop, axis=axis)


def piece_of(arg, axis, start, stop, batch):
    """As `rows_of`, of an argument whose axis may hold several elements for each row."""
    return arg if axis is None else rows_of(arg, axis, *(i * arg.shape[axis] // batch for i in (start, stop)))


def prove(fun, args, in_axes, batch=BATCH, part=PART, **kwargs) -> Analysis:
    (whole, piece), consts = programs(fun, args, in_axes, batch, part)
    return analyse(whole, piece, in_axes, batch, part, consts=consts, **kwargs)


def factor(state: State, rows: int) -> float | None:
    """What the state's scale is for this many rows; None if sums over the batch are part of it."""
    exponents = dict(state.scale)
    if set(exponents) - {N}:
        return None
    return float(rows) ** exponents.get(N, 0)


def joined(state: State, parts, batch: int, part: int):
    """The full batch's value, as the state promises it from those of the micro-batches."""
    parts = [np.asarray(value, np.float64) / factor(state, part) for value in parts]
    if type(state) is Total:
        value = sum(parts)
    elif type(state) is Rows:
        shape = parts[0].shape
        outer = 1 if state.uniform else state.outer
        split = (*shape[: state.axis], outer, shape[state.axis] // outer, *shape[state.axis + 1 :])
        value = np.concatenate([value.reshape(split) for value in parts], state.axis + 1)
        value = value.reshape(*shape[: state.axis], -1, *shape[state.axis + 1 :])
    else:
        assert type(state) is Invariant, state
        for other in parts[1:]:
            np.testing.assert_allclose(parts[0], other, rtol=1e-4, atol=1e-4)
        value = parts[0]
    return np.zeros_like(value) if getattr(state, "zero", False) else value * factor(state, batch)


def check(fun, args, in_axes, batch=BATCH, part=PART, expect=None, **kwargs) -> Analysis:
    """Prove a function, then hold every output that is proven against the split run."""
    analysis = prove(fun, args, in_axes, batch, part, **kwargs)
    assert not analysis.mixing, [str(site) for site in analysis.mixing]
    if expect is not None:
        assert [str(state) for state in analysis.outputs] == expect
    derived = derive(fun, args, in_axes, batch, part)
    if analysis.draws:
        return analysis
    fun = jax.jit(fun)
    whole = jax.tree.leaves(fun(*args))
    compare(analysis, fun, whole, args, in_axes, batch, part)
    if derived is not None:
        analysis_of_derived, fun, constants, axes = derived
        compare(analysis_of_derived, fun, whole, [*constants, *args], [*axes, *in_axes], batch, part)
    return analysis


def compare(analysis, fun, whole, args, in_axes, batch, part):
    """Holds every output against what its state promises of a function that runs on micro-batches."""
    pieces = []
    for i in range(0, batch, part):
        cut = [piece_of(arg, axis, i, i + part, batch) for arg, axis in zip(args, in_axes, strict=True)]
        pieces.append(jax.tree.leaves(fun(*cut)))
    for i, state in enumerate(analysis.outputs):
        if type(state) in (Rows, Total, Invariant) and factor(state, 2) is not None:
            got = joined(state, [piece[i] for piece in pieces], batch, part)
            np.testing.assert_allclose(got, np.asarray(whole[i], np.float64), rtol=2e-4, atol=2e-4, err_msg=str(state))


def derive(fun, args, in_axes, batch=BATCH, part=PART):
    """The proof of the derived program, and that program as a function; None if there is no such proof.

    The function takes the program's constants, too, which come next, and the axes that they have rows on.

    What is derived has correct types, and is what is traced at the micro-batch's size.
    """
    (whole, piece), consts = programs(fun, args, in_axes, batch, part)
    (full, values), (traced, _) = (
        inline(program, of_program, Rules.of(()), draws=True)
        for program, of_program in zip((whole, piece), consts, strict=True)
    )
    try:
        derivation = Derivation(full, in_axes, batch)
        derived = derivation.at(part)
    except Underivable:
        return None
    program = derived.program
    jaxpr = compat.closed_jaxpr(program.invars, program.outvars, program.eqns)
    jex_core.check_jaxpr(compat.open_jaxpr(jaxpr))
    for states in derivation.proposals(values):
        analysis = analyse(full.program, program, [*states, *in_axes], batch, part)
        if not analysis.mixing:
            break
    else:
        return None
    # Positions count from zero in every micro-batch, so its constant is another one; otherwise it has rows.
    constants = [
        np.arange(part, dtype=v.dtype) if type(s) is RowIndex else v for v, s in zip(values, states, strict=True)
    ]
    axes = [s.axis if type(s) is Rows else None for s in states]
    same_program(full.program, program, traced.program)
    jitted = jax.jit(jex_core.jaxpr_as_fun(jaxpr))
    return analysis, jitted, constants, axes


def same_program(full, derived, traced):
    """The derived program is the traced one, but for constants that know the batch size.

    What was computed of such constants only, without any row, may have kept the size that it has for the whole batch.
    """
    if len(full.eqns) != len(traced.eqns):
        return  # the function itself depends on the batch size
    for whole, own, other in zip(full.eqns, derived.eqns, traced.eqns, strict=True):
        if whole is own:
            continue
        assert own.primitive.name == other.primitive.name
        for before, var, of_traced in zip(whole.outvars, own.outvars, other.outvars, strict=True):
            assert var is before or var.aval.str_short() == of_traced.aval.str_short()
        assert own.params.keys() == other.params.keys()
        for name, value in own.params.items():
            if name in ("shape", "new_sizes", "limit_indices", "slice_sizes"):
                assert tuple(value) == tuple(other.params[name]), (own.primitive.name, name)
        bodies = [[from_jaxpr(jaxpr) for _, jaxpr in compat.sub_jaxprs(eqn)] for eqn in (whole, own, other)]
        for inside in zip(*bodies, strict=True):
            same_program(*inside)


def reasons(analysis: Analysis) -> str:
    return "; ".join(str(site) for site in analysis.mixing)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def integers(high, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, size=shape), jnp.int32)
