"""Memory that processes of one host share: of the host, and of its GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

from dynaflow_jax.errors import DynaFlowError
from dynaflow_jax.runtime import extension

_BLOCK_BYTES = 2 << 20
"""What CUDA's memory is a multiple of: a block that is smaller would be shared together with its neighbours."""


class Segment:
    """Memory of the host, zeroed, that other processes may map.

    It has no name in any file system, so that nothing of it is left when the last process that has it is gone, however
    that ends.

    Attributes:
      size: bytes.
      address: where it is in this process.
    """

    def __init__(self, size: int):
        self._file = os.memfd_create("dynaflow", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file).atexit = False
        os.ftruncate(self._file, size)
        self._map(self._file, size)

    @classmethod
    def open(cls, where: dict[str, int]) -> Segment:
        """Another process's memory.

        Args:
          where: the other process's ``where()``.

        Raises:
          DynaFlowError: if it cannot be reached.
        """
        path = f"/proc/{where['pid']}/fd/{where['file']}"
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DynaFlowError(f"memory of process {where['pid']} cannot be opened: {error}") from error
        try:
            if os.fstat(file).st_ino != where["inode"]:
                raise DynaFlowError(f"{path} is not what process {where['pid']} means by it: they see other processes.")
            self = cls.__new__(cls)
            self._map(file, where["size"])
        finally:
            os.close(file)
        return self

    def where(self) -> dict[str, int]:
        """How other processes find it, while this object lives."""
        return {"pid": os.getpid(), "file": self._file, "inode": os.fstat(self._file).st_ino, "size": self.size}

    def _map(self, file: int, size: int) -> None:
        self.size = size
        self._mapped = mmap.mmap(file, size)
        self._bytes = (ctypes.c_uint8 * size).from_buffer(self._mapped)
        self.address = ctypes.addressof(self._bytes)

    def word(self, offset: int) -> int:
        """Four of its bytes, as a number."""
        return ctypes.c_uint32.from_address(self.address + offset).value


class Blocks:
    """Memory of GPUs that other processes may open.

    It is not freed before the process ends: to free what another process has open is undefined, and to ask every one to
    close it first would take a meeting. What is given back is used again.
    """

    def __init__(self) -> None:
        self._free: list[Block] = []
        self._lock = threading.Lock()

    def take(self, device: int, size: int) -> Block:
        """A zeroed block of at least a size in bytes."""
        size = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        with self._lock:
            fitting = [block for block in self._free if block.device == device and size <= block.size <= 4 * size]
            block = min(fitting, key=lambda block: block.size, default=None)
            if block is not None:
                self._free.remove(block)
        if block is not None:
            extension.module.cuda_clear_shared(device, block.address, block.size)
            return block
        return Block(device, size, *extension.module.cuda_allocate_shared(device, size))

    def give_back(self, block: Block) -> None:
        """Takes back a block that no process writes to any more."""
        with self._lock:
            self._free.append(block)


class Block:
    """Memory of a GPU that other processes may open.

    Attributes:
      device: its ordinal.
      size: bytes.
      address: where it is in this process.
      handle: by which other processes open it.
    """

    def __init__(self, device: int, size: int, address: int, handle: bytes):
        self.device, self.size, self.address, self.handle = device, size, address, handle


blocks = Blocks()


_addresses: dict[tuple[int, bytes], int] = {}  # of blocks that were opened
_opening = threading.Lock()


def opened(device: int, handle: bytes) -> int:
    """The address at which a device reaches another process's block; once opened, it stays so."""
    with _opening:
        if (device, handle) not in _addresses:
            _addresses[device, handle] = extension.module.cuda_open_shared(device, handle)
        return _addresses[device, handle]


def host() -> str:
    """What processes have in common that can open each other's memory: the host, as started, and its processes."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    processes = ""
    with contextlib.suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")
    return f"{os.uname().nodename} {boot} {processes}"
