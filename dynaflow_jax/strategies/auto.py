"""Auto: the strategy that was measured as the fastest, or none where none is faster than the function as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.schedule import OpScheduler
from dynaflow_jax.strategies.async_tensor_parallel import AsyncTensorParallel
from dynaflow_jax.strategies.comet import Comet
from dynaflow_jax.strategies.dual_batch_overlap import DualBatchOverlap
from dynaflow_jax.strategies.gradient_buckets import GradientBuckets
from dynaflow_jax.strategies.nano_flow import NanoFlow
from dynaflow_jax.strategies.parameter_prefetch import ParameterPrefetch
from dynaflow_jax.strategies.sequential import Sequential
from dynaflow_jax.strategies.single_batch_overlap import SingleBatchOverlap
from dynaflow_jax.strategies.switch import Switch
from dynaflow_jax.strategies.token_weave import TokenWeave
from dynaflow_jax.strategies.with_kernels import WithKernels
from dynaflow_jax.substitution import Finder


class Auto:
    """Chooses for each set of shapes between several strategies, and leaving the function as it is.

    Nothing can be measured while JAX traces a function. So measuring is a step of its own, ``df.tune``, which keeps
    its choice on disk; every trace afterwards, in this process or another one, looks the choice up. Until then the
    cost model chooses, and only what it predicts to be at least 3% faster than the function as it is. Takes the place
    of a strategy::

        flow = df.dynaflow(fun, scheduler=df.strategies.Auto(), batch_axes=(None, 0))
        print(df.tune(flow, params, tokens))  # once for each set of shapes; takes budget_s seconds
        step = jax.jit(flow)

    A strategy is chosen only if it was measured faster than the function by more than 2% and by more than the times
    spread, and that twice. Otherwise the function runs as if ``dynaflow`` were not there. Each strategy is tried with
    both backends where there are both (``backend="auto"`` on CUDA). Choices are kept in the folder that the
    environment variable ``DYNAFLOW_CACHE_DIR`` names, by default the user's cache folder: for a kind of device,
    versions of JAX and of this library, shapes, operators, and candidates. A strategy of your own is recognized by its
    ``repr``, its class and its plain attributes: together they should say what it depends on.

    Args:
      candidates: strategies, or plans to run again; by default every built-in one that needs no arguments, and
        ``NanoFlow`` with two and four micro-batches. Leaving the function as it is is a candidate always.
      budget_s: how many seconds ``df.tune`` may take, compiling included. The unscheduled function is compiled and
        measured in any case, and whatever is being compiled when the time is over is not interrupted.
      keep: how many candidates, the best by the cost model, are measured beside the unscheduled function.
      kernels: what to look for in operators, as ``WithKernels`` takes it; every strategy is then a candidate with
        kernels too, where some are found.

    Raises:
      DynaFlowError: if an argument makes no sense.
    """

    def __init__(
        self,
        candidates: Iterable[Any] | None = None,
        *,
        budget_s: float = 10.0,
        keep: int = 4,
        kernels: Finder | Iterable[Finder] | None = None,
    ):
        if candidates is not None and (isinstance(candidates, str) or not isinstance(candidates, Iterable)):
            raise DynaFlowError(f"Auto takes a list of strategies, not {candidates!r}.")
        self._are_default = candidates is None
        self.candidates: tuple[Any, ...] = _defaults() if candidates is None else tuple(candidates)
        if any(isinstance(candidate, (Auto, Switch)) for candidate in self.candidates):
            raise DynaFlowError("Auto chooses between strategies that make one plan: neither Auto nor Switch.")
        if type(keep) is not int or keep < 1:
            raise DynaFlowError(f"keep is a positive whole number of candidates, not {keep!r}.")
        self.budget_s = checked_budget(budget_s)
        self.keep = keep
        self.kernels = kernels
        self._without_kernels = self.candidates
        if kernels is not None:
            strategies = [candidate for candidate in self.candidates if isinstance(candidate, OpScheduler)]
            self.candidates += tuple(WithKernels(strategy, kernels) for strategy in strategies)

    def with_kernels(self, kernels: Finder | Iterable[Finder]) -> Auto:
        """The same choice, and each strategy with kernels too."""
        candidates = None if self._are_default else self._without_kernels
        return Auto(candidates, budget_s=self.budget_s, keep=self.keep, kernels=kernels)

    def __repr__(self) -> str:
        candidates = "" if self._are_default else repr(list(self.candidates))
        kernels = f"kernels={self.kernels!r}" if self._are_default and self.kernels is not None else ""
        return f"Auto({candidates}{kernels})"


def checked_budget(budget_s: Any) -> float:
    """How many seconds tuning may take.

    Raises:
      DynaFlowError: if that is no number above zero.
    """
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s > 0:
        raise DynaFlowError(f"budget_s is a number of seconds above zero, not {budget_s!r}.")
    return float(budget_s)


def _defaults() -> tuple[Any, ...]:
    return (
        Sequential(),
        SingleBatchOverlap(),
        NanoFlow(2),
        NanoFlow(4),
        NanoFlow(2, concurrent=True),
        NanoFlow(4, concurrent=True),
        DualBatchOverlap(),
        DualBatchOverlap(concurrent=True),
        TokenWeave(),
        Comet(),
        AsyncTensorParallel(),
        GradientBuckets(),
        ParameterPrefetch(),
    )
