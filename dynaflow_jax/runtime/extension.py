"""The C++ extension, if it was built."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import jax

module: Any = None
"""The extension, or ``None``."""

_problem = ""
if importlib.util.find_spec("dynaflow_jax._dispatch") is not None:
    try:
        module = importlib.import_module("dynaflow_jax._dispatch")
    except ImportError as error:  # built for another Python, or by a compiler whose library is missing
        _problem = f" ({error})"


@functools.cache
def register(platform: str) -> None:
    """Makes the extension's handlers known to XLA; once per process and platform, ``"cpu"`` or ``"cuda"``."""
    jax.local_devices(backend=platform)  # JAX tells XLA of types after handlers, unless the platform is there already
    where = platform if platform == "cpu" else platform.upper()
    name, registration = module.callee_type(where)
    jax.ffi.register_ffi_type(name, registration, platform=where)
    for name, stages in module.handlers(where):
        jax.ffi.register_ffi_target(name, stages, platform=where)


def platform_of(platform: str) -> str:
    """Where the executor runs what JAX lowers for a platform: ``"cpu"`` or ``"cuda"``."""
    return "cpu" if platform == "cpu" else "cuda"


def unavailable_because(platform: str) -> str:
    """Why plans cannot be dispatched on a platform; empty if they can."""
    if module is None:
        return f"the extension is not built{_problem}: reinstall dynaflow-jax where there is a C++20 compiler"
    if platform == "cpu":
        return ""
    if platform in ("gpu", "cuda"):
        return module.cuda_unavailable_because()
    return f"there is no dispatcher for {platform}"
