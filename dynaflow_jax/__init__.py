"""DynaFlow for JAX: what a model computes, and how the device runs it, as two separate decisions."""

from dynaflow_jax import collectives, errors, strategies
from dynaflow_jax.annotate import SplitFunc, SplitModule, mark
from dynaflow_jax.errors import (
    BatchMixingError,
    DispatchWarning,
    DynaFlowError,
    PlanError,
    RuleError,
    RuleWarning,
    ScheduleError,
    SplitError,
)
from dynaflow_jax.graph import Operator, OpGraph
from dynaflow_jax.plan import Plan
from dynaflow_jax.schedule import InputInfo, OpScheduler, ScheduleContext, ScheduledOperator, Step
from dynaflow_jax.transform import DynaFlow, dynaflow

__version__ = "0.1.0"

__all__ = [
    "BatchMixingError",
    "DispatchWarning",
    "DynaFlow",
    "DynaFlowError",
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
    "collectives",
    "dynaflow",
    "errors",
    "mark",
    "strategies",
]
