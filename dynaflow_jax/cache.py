"""What was measured, on disk: one JSON file for each function, set of shapes, device and list of candidates.

Files are replaced as a whole, so that a reader never sees half of one. Whatever goes wrong with the disk is a warning,
and the caller goes on with what it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dynaflow_jax.errors import TuningWarning, warn_user

try:
    import fcntl
except ImportError:  # not on Windows: two processes may then measure at once, which costs time and precision only
    fcntl = None

_VERSION = 1
_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Entry:
    """A measured choice.

    Attributes:
      candidate: which of the candidates; 0 is the unscheduled function.
      strategy: that candidate's strategy, as text; ``None`` for the unscheduled function.
      backend: ``"xla"`` or ``"dispatch"``.
      measured_us: median microseconds of a call, of every candidate that was measured, by number and name.
      unscheduled_us: those of the unscheduled function.
      chosen_us: those of the choice.
      plan: the choice's plan as JSON; ``None`` where it cannot be saved, or is not needed.
      about: what the choice is for, for people who look at the file.
    """

    candidate: int
    strategy: str | None
    backend: str
    measured_us: Mapping[str, float]
    unscheduled_us: float
    chosen_us: float
    plan: str | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def key_of(about: Mapping[str, Any]) -> str:
    """The name of the choice for what ``about`` says: plain data that JSON can hold."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def directory() -> Path:
    """Where choices are kept: ``DYNAFLOW_CACHE_DIR``, or a folder in the platform's cache folder for the user."""
    if chosen := os.environ.get("DYNAFLOW_CACHE_DIR"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        base = os.path.join(os.path.expanduser("~"), "Library", "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or os.path.join(os.path.expanduser("~"), ".cache")) / "dynaflow_jax"


def path_of(key: str) -> Path:
    """The file of a choice."""
    return directory() / f"{key}.json"


def load(key: str) -> Entry | None:
    """The choice that was kept under a key; ``None`` if there is none, or, with a warning, if its file is damaged."""
    path = path_of(key)
    try:
        return _entry(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        warn_user(f"The measured choice in {path} cannot be used: {error}. df.tune writes it anew.", TuningWarning)
        return None


def _entry(data: Any) -> Entry:
    """What a file holds.

    Raises:
      ValueError: if that is no choice.
    """
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int or version != _VERSION:
        raise ValueError(f"it is not of version {_VERSION}")
    try:
        entry = Entry(**{field.name: data[field.name] for field in dataclasses.fields(Entry)})
    except KeyError as error:
        raise ValueError(f"it lacks {error}") from None
    strategy, plan = (type(value) in (str, type(None)) for value in (entry.strategy, entry.plan))
    is_candidate = type(entry.candidate) is int and entry.candidate >= 0 and entry.backend in ("xla", "dispatch")
    if not is_candidate or not strategy or (entry.strategy is None) != (entry.candidate == 0):
        raise ValueError("it names no candidate")
    if not plan or not isinstance(entry.about, dict) or not isinstance(entry.measured_us, dict):
        raise ValueError("its plan, its times or what it is about is of another type")
    if not all(type(us) in (int, float) for us in (*entry.measured_us.values(), entry.unscheduled_us, entry.chosen_us)):
        raise ValueError("its times are no numbers")
    return entry


def save(key: str, entry: Entry) -> Path | None:
    """Keeps a choice; returns its file, or ``None``, with a warning, if it cannot be written."""
    path, temporary = path_of(key), None
    data = {"version": _VERSION, **vars(entry)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{key}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        warn_user(
            f"The measured choice is used in this process, but not kept: {error}. Let DYNAFLOW_CACHE_DIR name a folder "
            "that can be written.",
            TuningWarning,
        )
        return None
    return path


@contextlib.contextmanager
def locked(key: str, timeout_s: float) -> Iterator[bool]:
    """Waits until no other process measures for a key; gives whether that is sure.

    The lock is the operating system's, and so goes with the process that holds it, however that ends.

    Args:
      key: of the choice.
      timeout_s: after how many seconds to go on without.
    """
    with contextlib.ExitStack() as stack:
        try:
            path_of(key).parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(directory() / f"{key}.lock", "a", encoding="utf-8"))
        except OSError:
            yield False
            return
        yield _lock(file.fileno(), timeout_s)


def _lock(handle: int, timeout_s: float) -> bool:
    if fcntl is None:
        return False
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:  # some network file systems have no locks
            return False
        else:
            return True
