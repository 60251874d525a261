"""A progress bar of one line, for terminals; anything else is spared it."""

import sys
import time
from typing import TextIO


class Bar:
    """Shows what part of a number of tokens is there, and how many come in a second.

    Args:
      total: the number.
      label: what is going on.
      stream: where to; nothing is written unless that is a terminal.
    """

    def __init__(self, total: int, label: str, stream: TextIO = sys.stderr):
        self.total = total
        self.label = label
        self.stream = stream
        self._shown = stream.isatty()
        self._start = self._last = time.perf_counter()

    def update(self, done: int) -> None:
        """Draws the bar anew, at most ten times a second."""
        now = time.perf_counter()
        if not self._shown or (now - self._last < 0.1 and done < self.total):
            return
        self._last = now
        filled = 30 * done // self.total
        rate = done / max(now - self._start, 1e-9)
        bar = "#" * filled + "." * (30 - filled)
        self.stream.write(f"\r{self.label:>24} [{bar}] {done}/{self.total} tokens, {rate:,.0f} a second ")
        self.stream.flush()

    def close(self) -> None:
        """Clears the line."""
        if self._shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
