"""Functions that run one way and are differentiated, or mapped over, in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero


def instead_of(run: Callable[..., Any], dispatched: Callable[..., Any]) -> Callable[..., Any]:
    """``dispatched`` where it is only called; ``run`` where it is differentiated or mapped over."""
    called = jax.custom_batching.custom_vmap(dispatched)

    @called.def_vmap
    def batched(axis_size, in_batched, *args):  # pyright: ignore[reportUnusedFunction]
        axes = jax.tree.map(lambda mapped: 0 if mapped else None, list(in_batched))
        outs = jax.vmap(run, in_axes=axes, axis_size=axis_size)(*args)
        return outs, jax.tree.map(lambda _: True, outs)

    return with_derivative_of(jax.jit(called, inline=True), run)


def with_derivative_of(run: Callable[..., Any], fun: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the derivative of ``fun``.

    Opening a call to schedule what is inside it loses its own derivative rule (``custom_vjp``), or what it saves on
    memory (``remat``). Neither is lost if the unscheduled function is what gets differentiated.
    """
    scheduled = jax.custom_jvp(run)

    def jvp(primals: Any, tangents: Any) -> Any:
        # With respect to what is differentiated alone. The others' tangents, given as zeros, would meet tangents in
        # optimization barriers, which JAX from 0.11 on cannot transpose then.
        values, tree = jax.tree.flatten(primals)
        given = tree.flatten_up_to(tangents)
        varied = [i for i, tangent in enumerate(given) if not isinstance(tangent, SymbolicZero)]

        def of_varied(*varying: Any) -> Any:
            replaced = dict(zip(varied, varying, strict=True))
            return fun(*jax.tree.unflatten(tree, [replaced.get(i, value) for i, value in enumerate(values)]))

        return jax.jvp(of_varied, [values[i] for i in varied], [given[i] for i in varied])

    scheduled.defjvp(jvp, symbolic_zeros=True)
    return scheduled
