"""Damage, at random: to JSON data, to text and to bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

ODD_TEXT = (
    "",
    " ",
    "\t\n",
    "a/b",
    "/",
    "//",
    "..",
    "a.b:c",
    "a[0]",
    "a{b}#0",
    "df:a{}#0r1",
    "%41%zz",
    "^(a|b)*$",
    r"\d+",
    "(",
    "[",
    "*",
    "+?",
    "naïve",
    "演算子",
    "\U0001f600",
    "\u202e\u200b",
    "\x00",
    "\x1b[31m",
    "\ud800",
    "<script>alert(1)</script>",
    "'\"\\",
    "]]>&amp;",
    "jvp(a)",
    "transpose(jvp(a))",
    "None",
    "a" * 5_000,
)
"""Names and patterns that mean something to regular expressions, name stacks, files, terminals, HTML or encodings."""

# Written as text, since they cannot be written as data: more digits than Python reads, and deeper than it recurses.
_STEP = '{"run":[["a",0]],"stream":"s","body":['
_RAW = {
    "@digits": "9" * 5_000,
    "@lists": "[" * 3_000 + "]" * 3_000,
    "@objects": '{"a":' * 2_000 + "0" + "}" * 2_000,
    **{f"@steps{depth}": _STEP * depth + "]}" * depth for depth in (5, 100, 300, 480, 3_000)},
}

_VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    -(2**63),
    2**64,
    10**4_000,
    1.0,
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [0],
    [None, None],
    ["a", 0],
    {"": ""},
    *_RAW,
    *ODD_TEXT,
)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Every container with every key or index of it."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    found = [(data, key) for key in keys]
    for _, key in list(found):
        found += _places(data[key])
    return found


def change(rng: random.Random, data: Any, values: tuple[Any, ...] = ()) -> None:
    """Makes one change somewhere inside JSON data.

    Args:
      rng: where chance comes from.
      data: an object or a list; changed in place.
      values: what may be put in, beside what is odd anywhere.
    """
    places = _places(data)
    if not places:
        return
    # Fields near the top are few, and matter as much as those of the steps.
    here, key = rng.choice(places if rng.random() < 0.7 else [p for p in places if p[0] is data] or places)
    what = rng.randrange(8)
    if what == 0:
        del here[key]
    elif what == 1 and isinstance(here, list):
        here.insert(rng.randrange(len(here) + 1), copy.deepcopy(here[key]))
    elif what == 2 and isinstance(here, list):
        rng.shuffle(here)
    elif what == 3 and isinstance(here, list):
        other = rng.randrange(len(here))
        here[key], here[other] = here[other], here[key]
    elif what == 4:
        there, other = rng.choice(places)
        here[key] = copy.deepcopy(there[other]) if _has(there, other) else None
    elif what == 5:
        here[key] = rng.choice(([here[key]], {str(key): here[key]}))
    elif what == 6 and isinstance(here, dict):
        here[rng.choice(("reads", "after", "priority", "sm_budget", "fn", "body", *ODD_TEXT))] = rng.choice(_VALUES)
    elif isinstance(here[key], int) and rng.random() < 0.5:
        here[key] = here[key] + rng.choice((-1, 1, 2))
    else:
        here[key] = rng.choice(values + _VALUES if rng.random() < 0.5 or not values else values)


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def json_text(rng: random.Random, data: Any, values: tuple[Any, ...] = ()) -> str:
    """JSON data as text, damaged in one to three places, now and then in the text itself.

    Args:
      rng: where chance comes from.
      data: JSON data; left as it is.
      values: what may be put in, beside what is odd anywhere.
    """
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        change(rng, data, values)
    text = json.dumps(data, ensure_ascii=rng.random() < 0.5)
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text if rng.random() < 0.9 else str(sequence(rng, text, lambda: rng.choice('[]{}",:0e-\\u\x00')))


def sequence(rng: random.Random, data: Any, element: Callable[[], Any]) -> Any:
    """Text or bytes with a piece changed, cut out, put in, repeated or moved."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 1, 2, 4, 8, 40)))
    piece, new = data[start:end], element()
    return rng.choice(
        (
            data[:start],
            data[:start] + data[end:],
            data[:start] + new + data[end:],
            data[:start] + new + data[start:],
            data[:end] + piece + data[end:],
            data[end:] + piece + data[:start],
        )
    )
