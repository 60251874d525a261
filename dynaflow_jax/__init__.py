"""DynaFlow for JAX: what a model computes, and how the device runs it, as two separate decisions."""

from dynaflow_jax import collectives, devices, errors, strategies, visualize
from dynaflow_jax.annotate import SplitFunc, SplitModule, mark
from dynaflow_jax.details import StepDetails
from dynaflow_jax.devices import DeviceModel
from dynaflow_jax.errors import (
    BatchMixingError,
    DispatchWarning,
    DynaFlowError,
    PlanError,
    RuleError,
    RuleWarning,
    ScheduleError,
    SplitError,
    TuningWarning,
)
from dynaflow_jax.graph import Operator, OpGraph
from dynaflow_jax.plan import Plan
from dynaflow_jax.profile import profile
from dynaflow_jax.schedule import InputInfo, OpScheduler, ScheduleContext, ScheduledOperator, Step
from dynaflow_jax.simulate import simulate, step_us
from dynaflow_jax.timeline import Event, Timeline, compare
from dynaflow_jax.transform import DynaFlow, dynaflow
from dynaflow_jax.tune import Tuning, tune
from dynaflow_jax.version import __version__

__all__ = [
    "BatchMixingError",
    "DeviceModel",
    "DispatchWarning",
    "DynaFlow",
    "DynaFlowError",
    "Event",
    "InputInfo",
    "OpGraph",
    "OpScheduler",
    "Operator",
    "Plan",
    "PlanError",
    "RuleError",
    "RuleWarning",
    "ScheduleContext",
    "ScheduleError",
    "ScheduledOperator",
    "SplitError",
    "SplitFunc",
    "SplitModule",
    "Step",
    "StepDetails",
    "Timeline",
    "Tuning",
    "TuningWarning",
    "__version__",
    "collectives",
    "compare",
    "devices",
    "dynaflow",
    "errors",
    "mark",
    "profile",
    "simulate",
    "step_us",
    "strategies",
    "tune",
    "visualize",
]
