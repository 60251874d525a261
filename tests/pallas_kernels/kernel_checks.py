"""What the tests of every kernel share."""

import re

import jax
import numpy as np


def arrays(*types, seed=0):
    """Normally distributed arrays of the given types (``ShapeDtypeStruct``)."""
    rng = np.random.default_rng(seed)
    return [jax.numpy.asarray(rng.normal(size=t.shape), t.dtype) for t in types]


def lowered_for_cuda(fun, *types):
    """The module that a program lowers to for a GPU, on a machine without one; and how many kernels it launches."""
    text = jax.jit(fun).trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    return text, len(re.findall(r"custom_call @mosaic_gpu", text))


def assert_within_rounding(got, want, ulps=1.0):
    """Equal but for ``ulps`` units of the last place of the dtype of ``want``, at the magnitude of each element.

    Sums in another order may round differently: the elements near zero are compared at the magnitude of the largest,
    from which their rounding errors come.
    """
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    epsilon = float(jax.numpy.finfo(want.dtype).eps)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    bound = ulps * epsilon * np.maximum(np.abs(want), np.abs(want).max() * 2**-4)
    np.testing.assert_array_less(np.abs(got - want), bound + 1e-30)
