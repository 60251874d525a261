"""Private clients: XLA clients of this process beside JAX's own, whose memory nobody else allocates from.

A partition captured from JAX's own client would find its temporaries overwritten by whatever runs next; in a private
client they stay. Every stream has a client of its own, so that partitions that may run at once share no temporaries.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from dynaflow_jax import compat

_lock = threading.Lock()
_MEMORY_FRACTION = 0.3  # of the device, at most; taken as needed


class Client:
    """One private client, seen from one of its devices."""

    def __init__(self, platform: str, device_id: int, lane: str):
        self._client = _client(platform, lane)
        self._device = compat.device_of_client(self._client, device_id)

    def compile(self, bytecode: bytes) -> Any:
        """An executable of a StableHLO module, for this device."""
        return compat.compile_for(self._client, self._device, bytecode)

    def load(self, executable: Any) -> Any:
        """An executable of another device or client, for this device: in milliseconds, where compiling takes longer."""
        return compat.load_for(self._client, self._device, executable)

    def run(self, executable: Any, inputs: Sequence[Any]) -> list[Any]:
        """Runs an executable on buffers of this client."""
        return compat.execute_single(executable, inputs)

    def view(self, capsule: Any) -> Any:
        """Memory of this device as a buffer of this client, without a copy."""
        return compat.buffer_from_dlpack(capsule, self._device)

    def memory_stats(self) -> dict[str, int]:
        """What its allocator says of itself, ``peak_bytes_in_use`` among it; nothing on CPU."""
        return self._device.memory_stats() or {}


def client(platform: str, device_id: int, lane: str) -> Client:
    """The private client of a stream (on CPU one serves all), seen from a device."""
    return Client(platform, device_id, "" if platform == "cpu" else lane)


def _client(platform: str, lane: str) -> Any:
    with _lock:  # making one takes a while, and two of the same would share nothing
        return _make(platform, lane)


@functools.lru_cache(maxsize=32)
def _make(platform: str, lane: str) -> Any:
    del lane
    return compat.make_client(platform, _MEMORY_FRACTION)
