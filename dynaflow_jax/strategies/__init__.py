"""Built-in strategies, each in a file of its own that is short enough to be the tutorial for the next."""

from dynaflow_jax.strategies.async_tensor_parallel import AsyncTensorParallel
from dynaflow_jax.strategies.auto import Auto
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

__all__ = [
    "AsyncTensorParallel",
    "Auto",
    "Comet",
    "DualBatchOverlap",
    "GradientBuckets",
    "NanoFlow",
    "ParameterPrefetch",
    "Sequential",
    "SingleBatchOverlap",
    "Switch",
    "TokenWeave",
    "WithKernels",
]
