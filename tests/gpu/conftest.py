"""These tests need a CUDA device, and ``JAX_PLATFORMS=cuda,cpu`` (the others set it to ``cpu``)."""

import jax
import pytest


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if "/gpu/" in str(item.fspath):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: JAX_PLATFORMS=cuda,cpu pytest tests/gpu"))
