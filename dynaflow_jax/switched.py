"""A function that several strategies schedule, one of which is picked in every call; made by ``dynaflow``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from dynaflow_jax import compat
from dynaflow_jax.annotate import is_labelling
from dynaflow_jax.call import Call
from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.graph import OpGraph
from dynaflow_jax.lowering import switch
from dynaflow_jax.plan import Plan
from dynaflow_jax.strategies.switch import Switch
from dynaflow_jax.transform import DynaFlow


class SwitchedDynaFlow(DynaFlow):
    """A function scheduled in several ways, one of which is picked in every call; made by ``dynaflow``.

    Attributes:
      alternatives: the function as each strategy schedules it.
    """

    def __init__(self, scheduler: Switch, alternatives: Sequence[DynaFlow]):
        super().__init__(alternatives[0].fun, alternatives[0].scheduler, alternatives[0].options)
        self.alternatives = tuple(alternatives)
        self.switch = scheduler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as the strategy schedules it that ``select`` names."""
        if is_labelling():
            return self.fun(*args, **kwargs)
        call = self._call(args, kwargs)
        call.check_values()
        index = self._index(args, kwargs)
        known = switch.on_host(index, len(self.alternatives))
        if known is not None:
            return self.alternatives[known]._resolved(call).call(call.leaves)
        return self._several(call).call(index, call.leaves)

    def graph(self, *args: Any, **kwargs: Any) -> OpGraph:
        """The operators of the function on the whole batch: the same for all strategies."""
        return self.alternatives[0].graph(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a call with these arguments runs.

        Raises:
          DynaFlowError: if that depends on the values of arrays, and the arguments have none.
        """
        chosen = self._chosen(args, kwargs)
        if chosen is None:
            raise DynaFlowError(
                f"{self!r}: which plan runs depends on the values of arrays, which these arguments do not have. "
                "The method plans gives all."
            )
        return self.alternatives[chosen].plan(*args, **kwargs)

    def plans(self, *args: Any, **kwargs: Any) -> tuple[Plan, ...]:
        """The plan of every strategy, in the order of the ``Switch``."""
        return tuple(resolved.plan for resolved in self._several(self._call(args, kwargs)).all)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """The operators, the plan and the lowering of every strategy, and which of them runs, as text."""
        chosen, several = self._chosen(args, kwargs), self._several(self._call(args, kwargs)).all
        texts = [f"Plan {i} of {len(several)}\n{resolved.explain()}" for i, resolved in enumerate(several)]
        which = "the one that a scalar names at run time" if chosen is None else f"plan {chosen}"
        return "\n\n".join([*texts, f"These arguments run {which}."])

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Does ahead of the first call what dispatched plans do at it, for every strategy's plan."""
        call = self._call(args, kwargs)
        for resolved in self._several(call).all:
            resolved.prepare(call.leaves)

    def __repr__(self) -> str:
        return f"dynaflow({getattr(self.fun, '__name__', self.fun)}, scheduler={self.switch!r})"

    def _several(self, call: Call) -> _Several:
        return self._kept(call, lambda: _Several(self, call))

    def _index(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``select`` gives."""
        try:
            return self.switch.select(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"{self.switch!r} was selecting a strategy. Its select gets the arguments of the call: under jit, "
                "values are not known yet, so that the index has to be computed: count > 8, not 1 if count > 8 else 0."
            )
            raise

    def _chosen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Which plan a call runs; ``None`` if that depends on values that are not known."""
        call, count, chosen = self._call(args, kwargs), len(self.alternatives), None
        unknown = {i: leaf for i, leaf in enumerate(call.leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}
        if unknown:

            def ask(values: dict[int, Any]) -> None:
                nonlocal chosen
                args, kwargs = call.arguments([values.get(i, leaf) for i, leaf in enumerate(call.leaves)])
                chosen = switch.on_host(self._index(args, kwargs), count)

            jax.eval_shape(ask, unknown)
            return chosen
        index = self._index(args, kwargs)
        chosen = switch.on_host(index, count)
        return chosen if chosen is not None or compat.is_tracer(index) else min(max(int(index), 0), count - 1)


class _Several:
    """A function at one set of shapes, as each strategy of a ``Switch`` schedules it.

    Attributes:
      all: what was decided, for each strategy.
      constants: values that the function closes over.
    """

    def __init__(self, flow: SwitchedDynaFlow, call: Call):
        first, *others = flow.alternatives
        resolved = first._resolved(call)
        self.flow = flow
        self.all = [resolved, *(other._resolved(call, resolved) for other in others)]
        self.constants = [value for one in self.all for value in one.constants]
        self._kept = jax.jit(self._pick, inline=True)

    def call(self, index: Any, leaves: Sequence[Any]) -> Any:
        """Evaluates the plan that a scalar names, on arrays of the shapes that the plans were made for."""
        # What devices meet in must not be shared by two calls of one program, as a traced function is.
        pick = self._pick if any(one.is_dispatched for one in self.all) else self._kept
        return pick(index, list(leaves))

    def _pick(self, index: Any, leaves: list[Any]) -> Any:
        try:
            return switch.pick(index, [one.call for one in self.all], leaves)
        except TypeError as error:
            outs = [jax.eval_shape(one.call, leaves) for one in self.all]
            shapes = [jax.tree.map(lambda out: f"{out.dtype}{list(out.shape)}", out) for out in outs]
            for i, shape in enumerate(shapes):
                if shape != shapes[0]:
                    raise DynaFlowError(
                        f"{self.flow!r}: with strategy 0 the function returns {shapes[0]}, with strategy {i} {shape}. "
                        "out_axes must make the same of the outputs, however many micro-batches there are."
                    ) from error
            raise
