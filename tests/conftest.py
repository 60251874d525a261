"""What every test shares: where JAX runs, how long hypothesis may look, and which lowering is tested."""

import os

import pytest

# Before jax is imported. Tests of a GPU set JAX_PLATFORMS themselves.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

try:
    from hypothesis import HealthCheck, Phase, settings
except ImportError:  # the property tests are skipped
    pass
else:
    _common = {
        "deadline": None,
        "print_blob": True,
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    }
    # Of these, properties get the share that they ask for; see test_properties.cases.
    settings.register_profile("ci", max_examples=70, **_common)
    settings.register_profile("long", max_examples=2_000, **_common)
    settings.register_profile("hunt", max_examples=100, phases=[Phase.generate], **_common)
    settings.register_profile("quick", max_examples=20, phases=[Phase.generate], **_common)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    config.addinivalue_line("markers", "xla_lowering: about the program that XLA is given, which dispatched plans lack")


def pytest_collection_modifyitems(config, items):
    """``DYNAFLOW_BACKEND=dispatch`` tests the dispatcher, without what is true of the lowering to XLA alone."""
    if os.environ.get("DYNAFLOW_BACKEND") == "dispatch":
        from dynaflow_jax.runtime import extension

        if extension.module is None:
            for item in items:
                item.add_marker(pytest.mark.skip(reason="the extension was not built"))
        of_one = [item for item in items if item.get_closest_marker("xla_lowering")]
        items[:] = [item for item in items if not item.get_closest_marker("xla_lowering")]
        config.hook.pytest_deselected(items=of_one)
