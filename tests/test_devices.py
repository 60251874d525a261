"""Device models: found by the names that JAX gives devices, and sane."""

import dataclasses

import pytest

from dynaflow_jax import cost, devices
from dynaflow_jax.errors import DynaFlowError


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("gpu", "NVIDIA H200", "NVIDIA H200"),
        ("gpu", "NVIDIA H100 80GB HBM3", "NVIDIA H100"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("gpu", "NVIDIA L4", "NVIDIA L4"),
        ("gpu", "Tesla T4", "NVIDIA T4"),
        ("gpu", "NVIDIA L40S", "NVIDIA H100"),  # no L4
        ("gpu", "a device of the future", "NVIDIA H100"),
        ("tpu", "TPU v4", "TPU v4"),
        ("tpu", "TPU v5 lite", "TPU v5 lite"),
        ("tpu", "TPU v5", "TPU v5"),
        ("tpu", "TPU v6 lite", "TPU v6 lite"),
        ("tpu", "TPU v99", "TPU v5 lite"),
        ("cpu", "cpu", "CPU"),
        ("cpu", "Intel", "CPU"),
    ],
)
def test_found_by_what_jax_calls_them(platform, kind, name):
    assert devices.find(platform, kind).name == name


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200", "L4", "cpu", "tpu", "gpu", "TPU v5p"])
def test_found_by_what_people_call_them(name):
    assert name.lower().removeprefix("nvidia ") in devices.named(name).name.lower() or name in ("gpu", "tpu")


def test_unknown_names_are_refused():
    with pytest.raises(DynaFlowError, match="A device is a DeviceModel or the name of one, such as 'H200', not 3"):
        devices.named(3)
    with pytest.raises(DynaFlowError, match=r"No device model is called 'H900'; there are NVIDIA H200, .*, CPU\."):
        devices.named("H900")


def test_names_are_found_again():
    for device in devices.DEVICES:
        assert devices.named(device.name) is device


def test_numbers_are_sane():
    for device in devices.DEVICES:
        for field in dataclasses.fields(device):
            assert field.name == "name" or getattr(device, field.name) > 0, (device.name, field.name)
        assert device.f64_flops <= device.f32_flops <= device.bf16_flops <= device.int8_flops
        assert max(device.matmul_fraction, device.memory_fraction, device.share, device.exchange_share) <= 1
        assert device.launch_us <= device.kernel_us


def test_rates_by_type():
    device = devices.H200
    assert device.flops(1) == device.int8_flops
    assert device.flops(2) == device.bf16_flops
    assert device.flops(4) == device.flops(2, is_integer=True) == device.flops(4, is_integer=True) == device.f32_flops
    assert device.flops(8) == device.f64_flops


def test_costs_have_no_numbers_of_their_own():
    device = devices.find("gpu", "NVIDIA A100-SXM4-80GB")
    assert cost.ridge("gpu", "NVIDIA A100-SXM4-80GB") == device.ridge
    assert cost.seconds(device.bf16_flops, 0, "gpu", "NVIDIA A100-SXM4-80GB") == 1
    assert cost.seconds(0, device.memory_rate, "gpu", "NVIDIA A100-SXM4-80GB") == 1
