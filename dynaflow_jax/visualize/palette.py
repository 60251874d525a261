"""The colours of all pictures: one for each bound, in light and in dark.

Fills are blue, orange and green after Okabe and Ito ("Color Universal Design", 2008), which people with any of the
common colour deficiencies tell apart; text on them has a contrast of at least 4.5. Pictures repeat the bound as a
pattern or as a word, so that colour is never the only sign.
"""

from __future__ import annotations

BOUNDS = ("compute", "memory", "network")
"""What bounds an operator, in the order of legends."""

LIGHT = {
    "paper": "#ffffff",
    "ink": "#16191d",
    "soft": "#555c64",
    "line": "#d3d8dd",
    "lane": "#f2f4f6",
    "focus": "#b3005e",
    "compute": "#a9d2f3",
    "compute-edge": "#0b5a94",
    "memory": "#ffd993",
    "memory-edge": "#8f5500",
    "network": "#a6e3cc",
    "network-edge": "#00664a",
}
DARK = {
    "paper": "#15181b",
    "ink": "#eef1f3",
    "soft": "#a8b0b8",
    "line": "#3b4249",
    "lane": "#1f2428",
    "focus": "#ff8cc6",
    "compute": "#1c5784",
    "compute-edge": "#7cc3fa",
    "memory": "#755000",
    "memory-edge": "#ffc764",
    "network": "#0b5f46",
    "network-edge": "#62dfb4",
}


def css(selector: str) -> str:
    """Rules that define every colour as a variable, ``--ink`` and so on, for what a selector selects."""
    light, dark = (";".join(f"--{name}:{colour}" for name, colour in theme.items()) for theme in (LIGHT, DARK))
    return (
        f"{selector}{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{{selector}{{{dark}}}}}\n"
        f"@media print{{{selector}{{color-scheme:light;{light}}}}}\n"
    )
