"""What every part of the fuzzer needs: a limit on time, and equality with the unscheduled function."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np


class Hang(BaseException):
    """A case took so long that it counts as endless. No ``Exception``, so that nobody catches it on the way."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupts what takes longer. Other threads than the main one cannot be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise Hang(f"Nothing came of it in {seconds} s.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def same(got: Any, want: Any) -> None:
    """Equal up to rounding: micro-batches may sum in another order."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def told(error: Exception, outcome: str) -> str:
    """The outcome, if the error's message says more than a word."""
    assert len(str(error)) > 10, repr(error)
    return outcome
