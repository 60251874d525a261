"""Models of devices: the few numbers from which the time of a kernel, an exchange or a whole plan is predicted.

Rates are dense ones (without structured sparsity) of the vendors' data sheets. What no data sheet tells was measured
on an H200 (``examples/benchmarks``) and is taken over for the other GPUs, whose kernels come from the same compilers.
"""

from __future__ import annotations

import dataclasses

from dynaflow_jax.errors import DynaFlowError


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A kind of device, as far as a prediction needs it.

    Attributes:
      name: such as ``"NVIDIA H200"``.
      bf16_flops: dense operations per second on 16-bit floating-point numbers.
      f32_flops: likewise on 32-bit numbers, in the precision that XLA multiplies them in (TF32 on Ampere and later).
      f64_flops: likewise on 64-bit numbers.
      int8_flops: likewise on 8-bit numbers.
      memory_rate: bytes per second between the device and its memory.
      link_rate: bytes per second that it sends to one other device, while as many arrive.
      sms: streaming multiprocessors; cores of other devices.
      link_latency_us: what an exchange takes beyond its bytes, with the devices' signals to each other.
      kernel_us: what a kernel takes beyond its work, from the end of what it waits for to its own: launch, ramp, drain.
      launch_us: the least time between the starts of two kernels, on whatever streams.
      matmul_fraction: how much of the rate large matrix products reach on full tiles.
      memory_fraction: how much of the memory's rate large kernels reach.
      share: what a kernel that fills the device leaves of it to another one, as the fraction that it cannot do
        without: 1 means that two such kernels at once take as long as one after the other.
      exchange_share: the fraction of the device that kernels lose while an exchange runs beside them, though copy
        engines do it: memory and power are the same.
    """

    name: str
    bf16_flops: float
    f32_flops: float
    f64_flops: float
    int8_flops: float
    memory_rate: float
    link_rate: float
    sms: int
    link_latency_us: float = 11.0
    kernel_us: float = 2.6
    launch_us: float = 1.67
    matmul_fraction: float = 0.71
    memory_fraction: float = 0.85
    share: float = 0.95
    exchange_share: float = 0.14

    @property
    def ridge(self) -> float:
        """Operations per byte above which the matrix unit, not the memory, is the limit."""
        return self.bf16_flops / self.memory_rate

    def flops(self, itemsize: int, *, is_integer: bool = False) -> float:
        """Operations per second on numbers of so many bytes.

        Args:
          itemsize: bytes of a number.
          is_integer: whether the numbers are integers, for which there are matrix units up to 8 bits only.
        """
        if itemsize <= 1:
            return self.int8_flops
        if itemsize == 2 and not is_integer:
            return self.bf16_flops
        return self.f32_flops if itemsize <= 4 else self.f64_flops


H200 = DeviceModel("NVIDIA H200", 989e12, 494e12, 67e12, 1979e12, 4.8e12, 391e9, 132)
"""NVIDIA H200 SXM. The link is what copy engines reach over NVLink 4, of 450 GB/s each way."""

DEVICES = (
    H200,
    dataclasses.replace(H200, name="NVIDIA H100", memory_rate=3.35e12),  # H100 SXM5 data sheet
    # A100 SXM4 80 GB data sheet; NVLink 3 has 300 GB/s each way.
    DeviceModel("NVIDIA A100", 312e12, 156e12, 19.5e12, 624e12, 2.039e12, 261e9, 108),
    # L4 data sheet (which lists rates with sparsity: twice these); PCIe 4.0 x16.
    DeviceModel("NVIDIA L4", 121e12, 60e12, 0.47e12, 242e12, 0.3e12, 25e9, 58),
    # T4 data sheet: 16-bit rates are those of float16; PCIe 3.0 x16.
    DeviceModel("NVIDIA T4", 65e12, 8.1e12, 0.25e12, 130e12, 0.32e12, 12e9, 40),
    # System architecture pages of Cloud TPU. No kernels are launched inside a program; a link is one ICI link. Float32
    # products take three bfloat16 passes.
    *(
        DeviceModel(
            name,
            bf16,
            bf16 / 3,
            bf16 / 60,
            int8,
            memory,
            link,
            1,
            link_latency_us=1.0,
            kernel_us=0.5,
            launch_us=0.5,
            matmul_fraction=0.8,
            share=1.0,
            exchange_share=0.05,
        )
        for name, bf16, int8, memory, link in (
            ("TPU v4", 275e12, 275e12, 1.228e12, 50e9),
            ("TPU v5 lite", 197e12, 394e12, 0.819e12, 50e9),
            ("TPU v5", 459e12, 918e12, 2.765e12, 100e9),
            ("TPU v5p", 459e12, 918e12, 2.765e12, 100e9),
            ("TPU v6 lite", 918e12, 1836e12, 1.638e12, 100e9),
        )
    ),
    # A server of 16 cores with AVX-512, of no particular make.
    DeviceModel(
        "CPU",
        1.2e12,
        1.2e12,
        0.6e12,
        2.4e12,
        1e11,
        1e10,
        16,
        link_latency_us=20.0,
        kernel_us=2.0,
        launch_us=0.5,
        matmul_fraction=0.7,
        memory_fraction=0.7,
        share=1.0,
    ),
)
"""The kinds of device that are known."""

_DEFAULTS = {"cpu": "CPU", "tpu": "TPU v5 lite", "gpu": "NVIDIA H100"}


def find(platform: str, device_kind: str) -> DeviceModel:
    """The model for a device as JAX names it; the platform's most common kind where there is none of that name.

    Args:
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      device_kind: such as ``"NVIDIA H200"`` or ``"NVIDIA A100-SXM4-80GB"``.
    """
    return _known(device_kind) or named(_DEFAULTS.get(platform, "NVIDIA H100"))


def named(name: str) -> DeviceModel:
    """The model of a kind of device that somebody asks for by name: ``"H200"``, ``"NVIDIA L4"``, ``"cpu"``.

    Raises:
      DynaFlowError: listing the known kinds, if it is none of them.
    """
    if not isinstance(name, str):
        raise DynaFlowError(f"A device is a DeviceModel or the name of one, such as 'H200', not {name!r}.")
    if model := _known(_DEFAULTS.get(name.lower(), name)):
        return model
    known = ", ".join(device.name for device in DEVICES)
    raise DynaFlowError(f"No device model is called {name!r}; there are {known}. Pass a DeviceModel for another one.")


def _known(name: str) -> DeviceModel | None:
    """The model whose name, without its maker's, occurs as words in ``name``; of several the longest."""
    words = f" {name.replace('-', ' ').lower()} "
    fits = [device for device in DEVICES if f" {device.name.lower().removeprefix('nvidia ')} " in words]
    return max(fits, key=lambda device: len(device.name), default=None)
