"""Switch: several plans in one compiled program, one of which runs, as a scalar says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dynaflow_jax.errors import DynaFlowError


class Switch:
    """Makes a plan with each of several strategies, and picks between the plans in every call.

    A strategy decides when a function is traced, by shapes; what a batch really holds (tokens that are no padding,
    say) is known in the call only. All plans are compiled once, into one program. Takes the place of a strategy::

        crowded = lambda params, tokens, lengths: lengths.sum() >= 4096
        flow = df.dynaflow(fun, scheduler=df.strategies.Switch([Sequential(), NanoFlow()], crowded), ...)

    An index that the host knows (of Python or NumPy: made of shapes, static arguments or NumPy arrays) is looked at
    when the function is called or traced, and only the plan that it names is compiled. A scalar of JAX's picks at run
    time: differentiated, mapped and sharded as ``jax.lax.switch`` is. Mapped with one scalar for each element, all
    plans run and their results are selected from. Inside ``shard_map``, devices that communicate have to pick the
    same plan. On a GPU, XLA copies a conditional's scalar to the host, which waits for it before it launches the
    plan (where XLA does not record the conditional into a command buffer; around a dispatched plan it does not). So a
    scalar that the host could know is better left on the host.

    Args:
      strategies: strategies, or plans to run again; for a function that is the same whichever of them runs.
      select: from the function's arguments, as in its call, to the index of a strategy: an integer without axes, or
        a boolean, of which ``False`` is the first. An index out of range is clamped: below 0 is the first strategy,
        above the last is the last.

    Raises:
      DynaFlowError: if there are no strategies, one of them is a ``Switch``, or ``select`` is not a function.
    """

    def __init__(self, strategies: Iterable[Any], select: Callable[..., Any]):
        if not isinstance(strategies, Iterable):
            raise DynaFlowError(f"Switch takes a list of strategies, not {strategies!r}.")
        self.strategies = tuple(strategies)
        self.select = select
        if not self.strategies:
            raise DynaFlowError("Switch was given no strategy; it picks between several.")
        if any(isinstance(strategy, Switch) for strategy in self.strategies):
            raise DynaFlowError(
                "A Switch inside a Switch: list all strategies in one, and have its select count through them."
            )
        if not callable(select):
            raise DynaFlowError(f"select must be a function of the scheduled function's arguments, not {select!r}.")

    def __repr__(self) -> str:
        return f"Switch({list(self.strategies)}, select={getattr(self.select, '__name__', self.select)})"
