"""These tests need a CUDA device, and ``JAX_PLATFORMS=cuda,cpu`` (the others set it to ``cpu``)."""

import jax
import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "/gpu/" in str(item.fspath):
            # A plan that is lowered to XLA is right as well, and no test of what is dispatched.
            item.add_marker(pytest.mark.filterwarnings("error::dynaflow_jax.errors.DispatchWarning"))
            if jax.default_backend() != "gpu":
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: JAX_PLATFORMS=cuda,cpu pytest tests/gpu"))
