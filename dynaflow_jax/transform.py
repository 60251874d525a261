"""``dynaflow``: a function and a strategy, joined into a function that runs as the strategy says."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp

from dynaflow_jax import compat, cost
from dynaflow_jax.annotate import Rule, is_labelling
from dynaflow_jax.batch import outputs as batch_outputs
from dynaflow_jax.batch import split as batch_split
from dynaflow_jax.batch.derive import Underivable
from dynaflow_jax.batch.region import Region, Variant
from dynaflow_jax.call import Call, names_of
from dynaflow_jax.derivatives import instead_of, with_derivative_of
from dynaflow_jax.errors import BatchMixingError, DispatchWarning, DynaFlowError, SplitError, warn_user
from dynaflow_jax.graph import OpGraph
from dynaflow_jax.lowering import dispatch, xla
from dynaflow_jax.lowering.choice import Choice, choose
from dynaflow_jax.lowering.steps import RunRegion, Values
from dynaflow_jax.options import Options
from dynaflow_jax.plan import Plan, Replay, make_plan
from dynaflow_jax.runtime import extension, processes
from dynaflow_jax.runtime.binder import Binder
from dynaflow_jax.runtime.processes import Job
from dynaflow_jax.runtime.work import Work
from dynaflow_jax.schedule import InputInfo, OpScheduler, Step, run_strategy
from dynaflow_jax.splitting import Splitting, Traced, traced
from dynaflow_jax.strategies.auto import Auto
from dynaflow_jax.strategies.switch import Switch

_CACHE_SIZE = 64  # resolved functions kept per dynaflow call, least recently used first out


def dynaflow(
    fun: Callable[..., Any],
    *,
    scheduler: OpScheduler | Plan | Switch | Auto,
    rules: Iterable[Rule] = (),
    batch_axes: Any = None,
    out_axes: Any = None,
    weights: Callable[..., Any] | None = None,
    rng: Literal["exact", "per_micro_batch"] = "exact",
    allow_batch_mixing: str | Sequence[str] = (),
    batch_shards: int | None = None,
    backend: str = "auto",
    unroll: int = 1,
    context: Any = None,
    donate_argnums: int | Sequence[int] = (),
) -> DynaFlow:
    """Runs a function's operators as a strategy schedules them.

    The result has the signature and the results of ``fun``, and composes with ``jit``, ``grad`` (inside and
    outside), ``vmap``, ``shard_map``, ``remat``, ``scan``, donation and ``custom_vjp``. Everything is decided when it
    is traced: once for each set of shapes, mesh and context; as with ``jit``, what ``fun`` closes over is read then.
    Inside another scheduled function the result is ``fun`` itself: the strategy around it schedules its operators.
    After DynaFlow (arXiv 2605.21603).

    Example::

        step = jax.jit(df.dynaflow(model.apply, scheduler=df.strategies.NanoFlow(), batch_axes=(None, 0)))
        logits = step(params, tokens)

    Args:
      fun: the function: of arrays, or pytrees of them; other arguments (strings, numbers, flags) are static.
      scheduler: the strategy, a ``Plan`` to run again, a ``Switch`` between several of them, or ``Auto``, the fastest.
      rules: partition rules, beside the marks in the model.
      batch_axes: where the batch is in the arguments, in the manner of ``vmap``'s ``in_axes`` (a pytree prefix of the
        positional arguments), or a dict by parameter name. ``None`` everywhere: no splitting.
      out_axes: how the micro-batches' outputs become the function's: a pytree prefix of an axis (joined there),
        ``"mean"`` (weighted by rows, or by ``weights``), ``"sum"``, or a function of the list of parts. ``None``:
        joined along the axis where the batch is, or taken as it is if it does not depend on the batch.
      weights: for ``"mean"``: a function of a micro-batch's arguments that gives its weight, for means over masked or
        padded rows; for instance ``lambda params, tokens, mask: mask.sum()``. They are the weights of every such mean
        among the outputs, which therefore must be over the same rows; a mean over all rows needs none. What is
        differentiated from outside is then the unscheduled function, as a micro-batch without weight has no derivative.
      rng: ``"exact"`` draws random numbers for the whole batch once, so that dropout is what it would be;
        ``"per_micro_batch"`` folds the micro-batch's index into the keys, which saves memory.
      allow_batch_mixing: operators, module paths or primitives that may mix rows of the batch (batch statistics, the
        capacity of experts), each then within its micro-batch. ``"*"`` allows everything.
      batch_shards: over how many devices the batch is sharded, so that it is split within every shard. Found by
        itself where JAX tells: from arrays and types with a sharding, and from ``shard_map`` and sharding
        constraints on the arguments; not for arguments of a ``jit`` that leaves sharding to the compiler.
      backend: ``"xla"`` keeps order inside the program that XLA compiles; ``"dispatch"`` launches compiled operators on
        streams of their own, from one custom call (CUDA, and CPU threads as its twin); ``"auto"`` dispatches on CUDA
        where several streams have something to hide: communication, or the launching of many small kernels. What
        cannot be dispatched is lowered to XLA, with a warning. The environment variable ``DYNAFLOW_BACKEND`` says
        what ``"auto"`` means.
      unroll: how many iterations of a loop a strategy sees at once.
      context: anything hashable that the strategy should know: a phase, a load, a kind of hardware.
      donate_argnums: positional arguments whose arrays are not needed after the call, as ``jax.jit`` is told too (which
        does not pass it on). A dispatched plan then computes new values, a train state's say, in the memory of the old;
        without it they are copied there.

    Returns:
      The scheduled function; its methods ``graph``, ``plan`` and ``explain`` show what was decided.
    """
    if isinstance(fun, DynaFlow):
        raise DynaFlowError("The function is scheduled by dynaflow already; wrap the original one.")
    if not callable(fun):
        raise DynaFlowError(f"dynaflow takes a function, not {fun!r}.")
    if isinstance(scheduler, Switch):
        strategies = [_strategy(choice, f"strategy {i} of Switch") for i, choice in enumerate(scheduler.strategies)]
    elif isinstance(scheduler, Auto):
        strategies = [_strategy(choice, f"candidate {i} of Auto") for i, choice in enumerate(scheduler.candidates)]
    else:
        strategies = [_strategy(scheduler, "scheduler")]
    options = Options.checked(
        rules=rules,
        batch_axes=batch_axes,
        out_axes=out_axes,
        weights=weights,
        rng=rng,
        allow_batch_mixing=allow_batch_mixing,
        batch_shards=batch_shards,
        backend=backend,
        unroll=unroll,
        context=context,
        donate_argnums=donate_argnums,
    )
    if isinstance(scheduler, Switch):
        from dynaflow_jax.switched import SwitchedDynaFlow  # which extends what is defined here, like the next

        return SwitchedDynaFlow(scheduler, [DynaFlow(fun, strategy, options) for strategy in strategies])
    if isinstance(scheduler, Auto):
        from dynaflow_jax.candidates import AutoDynaFlow

        return AutoDynaFlow(scheduler, strategies, fun, options)
    return DynaFlow(fun, strategies[0], options)


def _strategy(scheduler: Any, what: str) -> OpScheduler:
    """What was given as a strategy, as one."""
    if isinstance(scheduler, type) and issubclass(scheduler, (OpScheduler, Switch, Auto)):
        raise DynaFlowError(f"{what}={scheduler.__name__} is a class; pass an instance: {scheduler.__name__}(...).")
    if not isinstance(scheduler, (OpScheduler, Plan)):
        others = ", a Switch or Auto" if what == "scheduler" else ""
        raise DynaFlowError(f"{what} must be an OpScheduler or a Plan{others}, not {scheduler!r}.")
    return Replay(scheduler) if isinstance(scheduler, Plan) else scheduler


class DynaFlow:
    """A scheduled function; made by ``dynaflow``."""

    def __init__(self, fun: Callable[..., Any], scheduler: OpScheduler, options: Options):
        self.fun = fun
        self.scheduler = scheduler
        self.options = options
        self._cache: OrderedDict[Any, Resolved] = OrderedDict()
        self._lock = threading.Lock()
        self._parameters = names_of(fun)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as scheduled."""
        if is_labelling():
            return self.fun(*args, **kwargs)
        call = self._call(args, kwargs)
        call.check_values()
        return self._resolved(call).call(call.leaves)

    def graph(self, *args: Any, **kwargs: Any) -> OpGraph:
        """The operators of the function on the whole batch; arguments may be ``jax.ShapeDtypeStruct``."""
        return self._resolve(args, kwargs)[0].graph

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What was decided for arguments of these shapes."""
        return self._resolve(args, kwargs)[0].plan

    def plans(self, *args: Any, **kwargs: Any) -> tuple[Plan, ...]:
        """All plans for arguments of these shapes: one, or those that a ``Switch`` picks from."""
        return (self._resolve(args, kwargs)[0].plan,)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """The operators, the plan, and how it is lowered and why, as text."""
        return self._resolve(args, kwargs)[0].explain()

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Does ahead of the first call what a dispatched plan does at it: binds the plan to these arrays' addresses.

        Without it the first call takes that long, as does one with weights at other addresses. Compiling is done when
        the function is traced, in either case; a plan that is lowered to XLA has nothing more to prepare. What cannot
        be bound, for want of memory say, is lowered to XLA from here on, with a warning; only what was traced before
        stays dispatched.

        Args:
          args: arrays, as for a call; those that are not split (weights) are expected where they are now.
          kwargs: likewise.
        """
        resolved, call = self._resolve(args, kwargs)
        resolved.prepare(call.leaves)

    def __repr__(self) -> str:
        return f"dynaflow({getattr(self.fun, '__name__', self.fun)}, scheduler={self.scheduler!r})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # So that a method of a class can be scheduled like a function.
        return self if instance is None else _Bound(self, instance)

    def own(self, binder: Binder) -> None:
        """Keeps a dispatched plan for as long as this function lives: programs compiled from it name it."""
        # At exit the extension frees all plans itself, and is the first to know.
        weakref.finalize(self, binder.close).atexit = False

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call.of(args, kwargs, self._parameters, self.options)

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Resolved, Call]:
        call = self._call(args, kwargs)
        return self._resolved(call), call

    def _resolved(self, call: Call, like: Resolved | None = None) -> Resolved:
        """What was decided for arguments of these shapes; with the trace of ``like``, another strategy's, if given."""
        return self._kept(call, lambda: Resolved(self, call, like and like.unopened, warn=like is None))

    def _kept(self, call: Call, make: Callable[[], Any]) -> Any:
        """What was made for arguments of these shapes before, or is made now."""
        key = (call.signature, compat.trace_context())
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
        if found is None:
            found = make()
            # What closes over a value of a trace in progress must not outlive it.
            if not any(compat.is_tracer(value) for value in found.constants):
                with self._lock:
                    self._cache[key] = found
                    while len(self._cache) > _CACHE_SIZE:
                        self._cache.popitem(last=False)
        return found


class _Bound:
    """A scheduled method of an object."""

    def __init__(self, flow: DynaFlow, instance: Any):
        self.__wrapped__ = functools.partial(flow, instance)
        self.graph = functools.partial(flow.graph, instance)
        self.plan = functools.partial(flow.plan, instance)
        self.plans = functools.partial(flow.plans, instance)
        self.explain = functools.partial(flow.explain, instance)
        self.prepare = functools.partial(flow.prepare, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


class Resolved:
    """A function at one set of shapes, with all that was decided for it.

    Attributes:
      region: the operators of the micro-batches.
      plan: what runs when.
      choice: how it is lowered.
      constants: values that the function closes over, the first inputs of every program.
      splitting: the programs of the whole batch and of the micro-batches.
      unopened: the whole batch's program, as traced.
    """

    def __init__(
        self,
        flow: DynaFlow,
        call: Call,
        unopened: Traced | None = None,
        *,
        derive: bool = True,
        warn: bool = True,
    ):
        """Decides everything.

        Args:
          flow: the function and how to schedule it.
          call: arguments of the shapes to decide for.
          unopened: the whole batch's program, if a `Resolved` for these shapes has it already.
          derive: whether the micro-batches' programs are derived from that, where they can be; otherwise they are
            traced.
          warn: whether to warn of rules and marks without effect.
        """
        self.flow = flow
        self.batch_size = call.batch_size() or None  # an empty batch is not split
        if self.batch_size is not None and self.batch_size % (flow.options.batch_shards or 1):
            raise SplitError(
                f"batch_shards={flow.options.batch_shards} does not divide the batch of {self.batch_size} rows."
            )
        self.layout = dataclasses.replace(call, leaves=[])
        platform, kind = compat.device()
        unopened = unopened or traced(flow, self.layout)
        if self.layout.shards == 1 and self.batch_size is not None:
            shards = unopened.shards(call.axes)
            # Only a hint: a batch that does not divide is split by consecutive rows.
            self.layout = dataclasses.replace(self.layout, shards=1 if self.batch_size % shards else shards)
        struct = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # noqa: E731
        avals = call.arguments([struct(aval) for aval in call.avals])
        mesh = jax.sharding.get_abstract_mesh()
        self.info = InputInfo(
            self.batch_size or 1,
            avals,
            platform,
            kind,
            None if mesh.empty else mesh,
            flow.options.context,
            self.layout.shards,
            call.row_bytes(),
        )
        strategy = flow.scheduler
        sizes = (self.batch_size or 1,)
        if self.batch_size is not None:
            try:
                asked = strategy.split(self.info)
            except Exception as error:
                error.add_note(f"{strategy!r} was splitting a batch of {self.batch_size} rows.")
                raise
            sizes = batch_split.check_sizes(asked, self.batch_size, self.layout.shards, repr(strategy))
        split = len(sizes) > 1
        self.unopened = unopened
        self.splitting = Splitting(
            flow, self.layout, self.batch_size, unopened, cost.ridge(platform, kind), split=split, warn=warn
        )
        self.constants = self.splitting.whole.constants
        if split and derive:
            self.splitting.derive(sizes)
        try:
            self.region, self.plan = self._schedule(sizes)
        except Underivable:  # at a size that only the strategy asked for
            self.splitting.give_up_deriving()
            self.region, self.plan = self._schedule(sizes)
        self._joins = self.splitting.how_to_join(sizes)
        self._owns = self.splitting.owns(sizes)
        self._run = jax.jit(functools.partial(self._evaluate, None), inline=True)
        self.choice = choose(flow.options.backend, platform, kind, self.region, self.plan.steps)
        self._binder: Binder | None = None
        self._run_dispatched: Callable[..., Any] | None = None
        if self.choice.dispatch and self._can_dispatch(platform):
            self._dispatch_all(platform)

    @property
    def is_dispatched(self) -> bool:
        """Whether the plan is a custom call, at least inside ``shard_map``."""
        return self._run_dispatched is not None

    def explain(self) -> str:
        """The operators, the plan, and how it is lowered and why, as text."""
        found = f"{self.region.graph.table()}\n\n{self.plan.show()}\n\nLowering: {self.choice}"
        splits = type(self.flow.scheduler).split is not OpScheduler.split
        if splits and all(axis is None for axis in self.layout.axes):
            found += "\n\nNot split: batch_axes says of no argument where its rows are."
        return found

    @property
    def graph(self) -> OpGraph:
        """The operators on the whole batch."""
        return self.splitting.graph

    def _schedule(self, sizes: tuple[int, ...]) -> tuple[Region, Plan]:
        """The operators of the micro-batches, and what the strategy does with them."""
        variant = self.splitting.variant
        variants = tuple(map(variant, sizes)) if len(sizes) > 1 else (Variant(self.graph, {}),)
        region, strategy = Region(sizes, variants, variant), self.flow.scheduler
        if isinstance(strategy, Replay):
            strategy.plan.validate(region, self.info)
            return region, strategy.plan.made_for(region, self.info)
        return region, make_plan(run_strategy(strategy, region, self.info), region, repr(strategy), self.info)

    def _can_dispatch(self, platform: str) -> bool:
        """Whether there is a dispatcher."""
        if problem := extension.unavailable_because(platform):
            if self.flow.options.backend == "dispatch":
                raise DynaFlowError(f"backend='dispatch': {problem}.")
            self.choice = Choice(False, problem)
            return False
        extension.register(extension.platform_of(platform))
        return True

    def _dispatch_all(self, platform: str) -> None:
        """Has the plan run on streams of its own: all of it, or what is inside ``shard_map``.

        What is around ``shard_map``, its loops too, is left to XLA, which partitions it.
        """
        where = extension.platform_of(platform)
        if xla.holds_shard_map(self.region, self.plan.steps):
            region = functools.partial(self._dispatched_region, where)
            self._run_dispatched = functools.partial(self._evaluate, region)
            return
        self._binder = self._bound(functools.partial(self._work, where), where)
        if self._binder is not None:
            self._run_dispatched = functools.partial(self._dispatch, self._binder)

    def _work(self, where: str, job: Job | None) -> Work:
        """What a dispatched plan consists of."""
        flow, layout = self.flow, self.layout
        count = len(self.constants)

        def weights(values: Sequence[Any]) -> Any:
            args, kwargs = layout.arguments(values[count:])
            assert flow.options.weights is not None
            return batch_outputs.checked_weight(flow.options.weights(*args, **kwargs))

        self._check_on_one_device()
        inputs = dispatch.Inputs(
            [var.aval for var in self.splitting.whole.flat.program.invars],
            self._owns,
            [False for _ in self.constants] + [axis is not None for axis in layout.axes],
            [False for _ in self.constants] + list(layout.donated),
            layout.shards,
            None if flow.options.weights is None else weights,
            compat.mesh_sizes(),
            in_place=job is None,
        )
        outputs = self._outputs
        with compat.no_mesh():
            return dispatch.build(self._name, where, self.region, self.plan.steps, inputs, self._joins, outputs)

    @functools.cached_property
    def _outputs(self) -> list[Any]:
        """Types of the outputs; what a function makes of the parts (``out_axes``) is its own business."""
        if not any(map(callable, jax.tree.leaves(self.flow.options.out_axes))):
            return [atom.aval for atom in self.splitting.whole.flat.program.outvars]
        leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in self.layout.avals]
        return [compat.aval_of(out) for out in jax.eval_shape(self._run, list(self.constants), leaves)]

    @property
    def _name(self) -> str:
        return getattr(self.flow.fun, "__name__", "function")

    def _bound(self, make: Callable[[Job | None], Work], where: str, timed: bool = False) -> Binder | None:
        """A binder of work, compiled; ``None`` if that cannot be, whatever the reason is: there is another way."""
        try:
            job = processes.of_mesh(where)
            binder = Binder(make(job), where, compat.device_ordinals(), job, timed=timed)
        except Exception as error:
            self._fall_back(error)
            return None
        try:
            binder.rehearse()
        except Exception as error:
            binder.close()
            self._fall_back(error)
            return None
        if binder.job is not None:
            count = len(binder.job.others) + 1
            why = f"{self.choice.why}; the devices of {count} processes write to each other's memory on this host"
            self.choice = Choice(True, why)
        if not timed:
            self.flow.own(binder)
        return binder

    def _dispatched_region(
        self,
        where: str,
        region: Region,
        steps: Sequence[Step],
        values: Values,
        timed: list[Binder] | None = None,
    ) -> Values:
        """The body of a ``shard_map``, dispatched by each of its devices; its binder goes into ``timed``, if given."""
        operands, avals = [], []

        def make(job: Job | None) -> Work:
            if axes := compat.partitioned_axes():
                raise DynaFlowError(
                    f"its shard_map leaves the mesh axes {', '.join(axes)} to XLA, to partition it over."
                )
            mesh = compat.mesh_sizes()
            with compat.no_mesh():
                work, *rest = dispatch.build_region(
                    self._name, where, region, steps, values, mesh, in_place=job is None
                )
            operands[:], avals[:] = rest
            return work

        binder = self._bound(make, where, timed is not None)
        if binder is None:
            return xla.run(region, steps, values)
        if timed is not None:
            timed.append(binder)
        results = iter(dispatch.call(binder, avals, operands))
        return [[next(results) for _ in variant.graph.program.outvars] for variant in region.variants]

    def _check_on_one_device(self) -> None:
        """Raises if XLA is to partition the function: it would gather all rows on every device for a custom call."""
        inputs = (var.aval for var in self.splitting.whole.flat.program.invars)
        axes = compat.partitioned_axes() if self.layout.shards > 1 else dispatch.partitioned_axes(inputs)
        if axes or self.layout.shards > 1:
            over = f"the mesh axes {', '.join(axes)}" if axes else f"{self.layout.shards} devices"
            raise DynaFlowError(f"XLA partitions it over {over}, and a dispatched plan runs inside shard_map only.")
        if self.layout.spread is not None:
            raise DynaFlowError(
                f"{self.layout.spread} lies on several devices in parts, so that XLA partitions the function, and a "
                "dispatched plan runs inside shard_map only."
            )

    def _fall_back(self, error: Exception) -> None:
        """Lowers to XLA what could not be dispatched."""
        self.choice = Choice(False, f"it cannot be dispatched: {error}")
        warn_user(f"{self.flow!r} is not dispatched but lowered to XLA: {error}", DispatchWarning)

    def prepare(self, leaves: Sequence[Any]) -> None:
        """Binds the plan to the addresses of these arrays, if it is dispatched."""
        binder = self._binder
        if binder is None:
            return
        if binder.work.mesh:
            raise DynaFlowError(f"{self.flow!r}.prepare: a plan of several devices is bound at its first call.")
        values = [*self.constants, *leaves]
        if not all(isinstance(value, jax.Array) and not compat.is_tracer(value) for value in values):
            raise DynaFlowError(f"{self.flow!r}.prepare takes arrays of JAX's, whose addresses it asks for.")
        (device,) = values[0].devices() if values else [None]
        try:
            binder.prepare(compat.ordinal(device), [compat.address(value) for value in values])
        except Exception as error:
            self._binder = self._run_dispatched = None
            self._fall_back(error)

    def _dispatch(self, binder: Binder, constants: list[Any], leaves: list[Any]) -> list[Any]:
        if binder.work.mesh:
            # Two calls of one program must not be taken for each other by devices that meet in them.
            binder = binder.another()
            self.flow.own(binder)
        return dispatch.call(binder, self._outputs, [*constants, *leaves])

    def timed(self, binders: list[Binder]) -> Callable[[list[Any], list[Any]], list[Any]]:
        """The function as it is dispatched, with the time of every command taken.

        Args:
          binders: gets the binders that a call runs, at the latest when it is traced; whoever asks closes them.

        Returns:
          A function of the values that the function closes over and of its arrays, to be traced once.
        """
        if self._binder is not None:
            binder = self._binder.another(timed=True)
            binders.append(binder)
            return lambda constants, leaves: dispatch.call(binder, self._outputs, [*constants, *leaves])
        where = extension.platform_of(self.info.platform)
        return functools.partial(self._evaluate, functools.partial(self._dispatched_region, where, timed=binders))

    def call(self, leaves: Sequence[Any]) -> Any:
        """Evaluates the plan on arrays of the shapes it was made for."""
        run = self._run
        # A micro-batch without weight is left out of a mean, and its derivative is not a number all the same.
        weighted = self.flow.options.weights is not None and len(self.region.sizes) > 1
        if self.region.graph.opened or weighted:
            run = with_derivative_of(self._run, self._unscheduled)
        elif self.splitting.derivation is not None and self.splitting.derivation.custom:
            run = with_derivative_of(self._run, lambda *values: self._differentiable(*values))
        if self._run_dispatched is not None:
            run = instead_of(run, self._run_dispatched)
        outs = run(list(self.constants), list(leaves))
        return jax.tree.unflatten(self.splitting.whole.out_tree, outs)

    @functools.cached_property
    def _differentiable(self) -> Callable[..., Any]:
        """The same, with traced micro-batches; the unscheduled function where there are none.

        Calls with derivative rules of their own (``custom_jvp``) hold them as functions for the shapes that were
        traced. In a derived program these are the whole batch's.
        """
        flow = copy.copy(self.flow)
        flow.options = dataclasses.replace(
            flow.options, backend="xla"
        )  # what a dispatched plan is differentiated through
        try:
            return Resolved(flow, self.layout, self.unopened, derive=False, warn=False)._run
        except (BatchMixingError, SplitError):  # as with arrays that the function closes over, and that have rows
            return self._unscheduled

    def _unscheduled(self, constants: list[Any], leaves: list[Any]) -> list[Any]:
        # The program, not the function, which may close over values that are differentiated: they are its constants.
        program, own = self.unopened.program, constants[len(constants) - len(self.unopened.constants) :]
        jaxpr = compat.closed_jaxpr(program.invars, program.outvars, program.eqns, "unscheduled")
        return jex_core.jaxpr_as_fun(jaxpr)(*own, *leaves)

    def _evaluate(self, run_region: RunRegion | None, constants: list[Any], leaves: list[Any]) -> list[Any]:
        return self.evaluate(functools.partial(xla.run, run_region=run_region), constants, leaves)

    def evaluate(self, run: Callable[..., Values], constants: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """The function's outputs.

        Args:
          run: runs the plan's steps: ``lowering.xla.run``, or what takes and returns the same.
          constants: values that the function closes over.
          leaves: its arrays.
        """
        sizes, shards = self.region.sizes, self.layout.shards
        if len(sizes) == 1:
            return run(self.region, self.plan.steps, [[*constants, *leaves]], shards)[0]
        parts, arguments = [], []
        for m, (offset, size) in enumerate(zip(batch_split.offsets(sizes), sizes, strict=True)):
            own = [
                batch_split.own(value, how, sum(sizes), offset, size, shards)
                for value, how in zip([*constants, *leaves], self._owns[m], strict=True)
            ]
            index = [jnp.uint32(m)] if self.region.variants[m].index is not None else []
            arguments.append(own[len(constants) :])
            parts.append([*index, *own])
        outs = run(self.region, self.plan.steps, parts, shards)
        weights = None
        if self.flow.options.weights is not None:
            weights = []
            for rows in arguments:
                args, kwargs = self.layout.arguments(rows)
                weights.append(batch_outputs.checked_weight(self.flow.options.weights(*args, **kwargs)))
        return batch_outputs.join(self._joins, outs, sizes, shards, weights)
