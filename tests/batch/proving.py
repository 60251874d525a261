"""Check what the proof says of a function against what happens: run it whole, run it in micro-batches, and join."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dynaflow_jax.batch.proof import Analysis, analyse
from dynaflow_jax.batch.state import Invariant, N, Rows, State, Total
from dynaflow_jax.program import trace

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
    if analysis.draws:
        return analysis
    fun = jax.jit(fun)
    whole = jax.tree.leaves(fun(*args))
    pieces = []
    for i in range(0, batch, part):
        cut = [piece_of(arg, axis, i, i + part, batch) for arg, axis in zip(args, in_axes, strict=True)]
        pieces.append(jax.tree.leaves(fun(*cut)))
    for i, state in enumerate(analysis.outputs):
        if type(state) in (Rows, Total, Invariant) and factor(state, 2) is not None:
            got = joined(state, [piece[i] for piece in pieces], batch, part)
            np.testing.assert_allclose(got, np.asarray(whole[i], np.float64), rtol=2e-4, atol=2e-4, err_msg=str(state))
    return analysis


def reasons(analysis: Analysis) -> str:
    return "; ".join(str(site) for site in analysis.mixing)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def integers(high, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, size=shape), jnp.int32)
