"""What ``dynaflow`` is told beside the function and the strategy, checked."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dynaflow_jax.annotate import Rule, Rules
from dynaflow_jax.errors import DynaFlowError


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """The options of ``dynaflow``, whose docstring says what they mean."""

    rules: Rules
    batch_axes: Any
    out_axes: Any
    weights: Callable[..., Any] | None
    rng: str
    allow_batch_mixing: tuple[str, ...]
    batch_shards: int | None
    backend: str
    unroll: int
    context: Any
    donate_argnums: tuple[int, ...]

    @staticmethod
    def checked(
        *,
        rules: Iterable[Rule],
        batch_axes: Any,
        out_axes: Any,
        weights: Any,
        rng: str,
        allow_batch_mixing: str | Sequence[str],
        batch_shards: int | None,
        backend: str,
        unroll: int,
        context: Any,
        donate_argnums: int | Sequence[int],
    ) -> Options:
        """The options as given; with ``backend="auto"``, the environment's ``DYNAFLOW_BACKEND``.

        Raises:
          DynaFlowError: naming the first that is nothing of its kind.
        """
        if rng not in ("exact", "per_micro_batch"):
            raise DynaFlowError(f"rng must be 'exact' or 'per_micro_batch', not {rng!r}.")
        asked = "backend"
        if backend == "auto" and (backend := os.environ.get("DYNAFLOW_BACKEND", backend)) != "auto":
            asked = "the environment variable DYNAFLOW_BACKEND"
        if backend not in ("auto", "xla", "dispatch"):
            raise DynaFlowError(f"{asked} must be 'auto', 'xla' or 'dispatch', not {backend!r}.")
        for name, number in (("batch_shards", 1 if batch_shards is None else batch_shards), ("unroll", unroll)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise DynaFlowError(f"{name} is a positive whole number, not {number!r}.")
        if weights is not None and not callable(weights):
            raise DynaFlowError(f"weights must be a function of the arguments of fun, not {weights!r}.")
        names = allow_batch_mixing
        names = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)
        if bad := [name for name in names if not isinstance(name, str)]:
            raise DynaFlowError(f"allow_batch_mixing takes names of operators, modules or primitives, not {bad[0]!r}.")
        try:
            hash(context)
        except TypeError:
            raise DynaFlowError(f"context must be hashable, and {context!r} is not.") from None
        donated = tuple(donate_argnums) if isinstance(donate_argnums, Iterable) else (donate_argnums,)
        if bad := [n for n in donated if not isinstance(n, int) or isinstance(n, bool) or n < 0]:
            raise DynaFlowError(f"donate_argnums takes positions of arguments, from 0, not {bad[0]!r}.")
        return Options(
            rules=Rules.of(rules),
            batch_axes=batch_axes,
            out_axes=out_axes,
            weights=weights,
            rng=rng,
            allow_batch_mixing=names,
            batch_shards=batch_shards,
            backend=backend,
            unroll=unroll,
            context=context,
            donate_argnums=donated,
        )
