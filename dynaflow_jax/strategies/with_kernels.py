"""WithKernels: another strategy's schedule, with kernels in place of what they compute faster."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.plan import Plan, Replay
from dynaflow_jax.schedule import InputInfo, OpScheduler, ScheduleContext, ScheduledOperator, Step
from dynaflow_jax.substitution import Finder, substituted


class WithKernels(OpScheduler):
    """Schedules as another strategy does; parts of the operators are then computed by kernels.

    A fused kernel such as TokenWeave's sum, residual and norm (arXiv 2505.11329, section 4) is a few equations in the
    middle of an operator, whatever that is called and however it was cut. So this looks into every operator that the
    strategy executes, for what the kernels say they can compute::

        import pallas_kernels
        scheduler = df.strategies.WithKernels(df.strategies.NanoFlow(), pallas_kernels.Kernels())

    Operators that the strategy merges over micro-batches or replaces itself run as it says. A plan with kernels cannot
    be saved as JSON, since what is left of an operator beside a kernel has no name: save the strategy's own, and run
    that with kernels. Kernels have derivatives for ``jax.grad``, not for ``jax.jvp``.

    Args:
      strategy: which splits the batch and orders the operators; or a plan, to run again.
      kernels: what to look for: ``pallas_kernels.Kernels()``, or functions that take an open jaxpr and return
        ``dynaflow_jax.substitution.Match``es.

    Raises:
      DynaFlowError: if ``strategy`` makes no schedule, or a kernel cannot be called.
    """

    def __init__(self, strategy: OpScheduler | Plan, kernels: Finder | Iterable[Finder]):
        if isinstance(strategy, Plan):
            strategy = Replay(strategy)
        if not isinstance(strategy, OpScheduler):
            raise DynaFlowError(f"WithKernels takes a strategy that makes one plan, not {strategy!r}.")
        finders: Any = (kernels,) if callable(kernels) or isinstance(kernels, str) else kernels
        self.strategy = strategy
        self.kernels: tuple[Finder, ...] = tuple(finders) if isinstance(finders, Iterable) else (finders,)
        for kernel in self.kernels:
            if isinstance(kernel, type):
                name = kernel.__name__
                raise DynaFlowError(f"WithKernels was given the class {name}; pass an instance: {name}(...).")
            if not callable(kernel):
                raise DynaFlowError(f"WithKernels takes pallas_kernels.Kernels() or functions, not {kernel!r}.")

    def split(self, info: InputInfo) -> Sequence[int]:
        """As the other strategy does."""
        return self.strategy.split(info)

    def schedule(self, ctx: ScheduleContext) -> None:
        """As the other strategy does, which is handed a context that replaces operators."""
        self.strategy.schedule(_Replacing(ctx, self.kernels))  # pyright: ignore[reportArgumentType]

    def __repr__(self) -> str:
        kernels = self.kernels[0] if len(self.kernels) == 1 else list(self.kernels)
        return f"WithKernels({self.strategy!r}, {kernels!r})"


class _Replacing:
    """A context that executes operators with kernels in them; otherwise the context that it was made of."""

    def __init__(self, ctx: ScheduleContext, kernels: Sequence[Finder]):
        self._ctx = ctx
        self._kernels = kernels
        self._found: dict[Any, Callable[..., Any] | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def execute(self, op_or_ops: Any, *, fn: Callable[..., Any] | None = None, **options: Any) -> Step:
        """Appends a step to the plan."""
        ops = [op_or_ops] if isinstance(op_or_ops, ScheduledOperator) else op_or_ops
        if fn is None and isinstance(ops, (list, tuple)) and ops:
            fn = self._replacement(ops)
        return self._ctx.execute(op_or_ops, fn=fn, **options)

    def _replacement(self, ops: Sequence[Any]) -> Callable[..., Any] | None:
        if not all(isinstance(op, ScheduledOperator) and not op.runs_once for op in ops):
            return None
        batches = {op.micro_batch for op in ops}
        if len(batches) > 1:
            return None
        # Micro-batches of one size share their operators, and what was found in them.
        name = self._ctx.sizes[batches.pop() or 0], *(op.key for op in ops)
        if name not in self._found:
            self._found[name] = substituted(self._ctx.jaxpr_of(ops), self._kernels)
        return self._found[name]
