"""Built-in strategies, each in a file of its own that is short enough to be the tutorial for the next."""

from dynaflow_jax.strategies.dual_batch_overlap import DualBatchOverlap
from dynaflow_jax.strategies.nano_flow import NanoFlow
from dynaflow_jax.strategies.sequential import Sequential
from dynaflow_jax.strategies.single_batch_overlap import SingleBatchOverlap

__all__ = ["DualBatchOverlap", "NanoFlow", "Sequential", "SingleBatchOverlap"]
