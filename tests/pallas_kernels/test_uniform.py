"""Every kernel has the same names, and its keys are those of the table."""

import importlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import measured

HELPERS = {"hopper", "in_place", "measured", "mosaic", "support"}
KERNELS = sorted({module.name for module in pkgutil.iter_modules(pallas_kernels.__path__)} - HELPERS)


def b(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


KEYS = {
    "add_rms_norm": ((b(2, 8, 256), b(2, 8, 256), b(256), b(2, 8, 256)), {}, (16, 256, 1)),
    "all_gather_matmul": ((b(512, 1024), b(1024, 256)), {"devices": 2}, (512, 1024, 256, 2)),
    "grouped_matmul": ((b(1024, 512), b(8, 512, 256), b(8)), {}, (1024, 512, 256, 8)),
    "matmul_reduce_scatter": ((b(512, 1024), b(1024, 256)), {"devices": 2}, (512, 1024, 256, 2)),
    "matmul_silu": ((b(512, 1024), b(1024, 256), b(64, 2048)), {}, (512, 1024, 256, 64, 1024)),
    "mixed_attention": (
        (*[b(1, 256, 8, 64)] * 3, b(3, 8, 64), b(3, 512, 2, 64), b(3, 512, 2, 64), b(3)),
        {},
        (3, 512, 1, 256, 8, 2, 64),
    ),
    "rms_norm": ((b(2, 8, 256), b(256)), {}, (16, 256)),
    "persistent_matmul": ((b(512, 1024), b(1024, 256)), {}, (512, 1024, 256)),
}


def test_every_kernel_is_here():
    assert sorted(KEYS) == KERNELS


@pytest.mark.parametrize("name", KERNELS)
def test_names_and_keys(name):
    module = importlib.import_module(f"pallas_kernels.{name}")
    for attribute in ("reference", "supports", "key", name):
        assert callable(getattr(module, attribute)), attribute
        assert getattr(module, attribute).__doc__, attribute
    assert module.__doc__
    assert "arXiv" in module.__doc__
    args, options, key = KEYS[name]
    assert module.key(*args, **options) == key


def test_the_shipped_table_names_kernels_by_their_keys():
    for name, devices in measured.load().items():
        name = name.removesuffix(measured.IN_PLACE)
        assert name in KERNELS
        for shapes in devices.values():
            assert all(len(shape.split("x")) == len(KEYS[name][2]) for shape in shapes)
