"""Text that a picture may hold: names that came from anywhere, and durations."""

from __future__ import annotations

import html
import re

# XML 1.0 allows no lone surrogates, neither U+FFFE nor U+FFFF, and hardly any control characters.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def plain(text: str) -> str:
    """Text without what XML and UTF-8 cannot hold, which is shown as a question mark in a diamond."""
    return _FORBIDDEN.sub("\ufffd", text)


def escape(text: str) -> str:
    """Text for an element or a quoted attribute of HTML or XML."""
    return html.escape(plain(text))


def shorten(text: str, length: int) -> str:
    """Text of at most ``length`` characters; what is left out is at its start, since names differ at their end."""
    return text if len(text) <= length else "…" + text[len(text) - length + 1 :]


def duration(us: float) -> str:
    """Microseconds with a unit that suits them: ``"12.3 ms"``."""
    us = round(us, 3) + 0.0  # to the nanosecond; the sum makes -0 zero
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= factor:
            return f"{us / factor:.3g} {unit}"
    return f"{us:.3g} µs"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent: ``"87%"``."""
    return f"{abs(part / whole) if whole else 0.0:.0%}"
