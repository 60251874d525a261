"""The C++ extension, if it was built."""

from __future__ import annotations

import functools
from typing import Any

import jax

try:
    from dynaflow_jax import _dispatch  # pyright: ignore[reportAttributeAccessIssue]

    _missing = ""
except ImportError as error:
    _dispatch: Any = None
    _missing = str(error)

module: Any = _dispatch


@functools.cache
def register() -> None:
    """Makes the extension's handlers known to XLA; once per process."""
    for name, platform, handler in module.handlers():
        jax.ffi.register_ffi_target(name, handler, platform=platform)


def unavailable_because(platform: str) -> str:
    """Why plans cannot be dispatched on a platform; empty if they can."""
    if module is None:
        return f"the extension is not built ({_missing}): reinstall dynaflow-jax where there is a C++20 compiler"
    if platform == "cpu":
        return ""
    if platform in ("gpu", "cuda"):
        return module.cuda_unavailable_because()
    return f"there is no dispatcher for {platform}"
