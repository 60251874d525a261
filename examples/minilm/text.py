"""From a file to batches of word pieces."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_PIECES = 256
"""The most word pieces, the two at the ends included, that the published model looks at."""

BUCKET = 32
"""Batches are padded to a multiple of this many tokens, so that few shapes are compiled."""

# -- file -> sentences ---------------------------------------------------------------------------------------------

_BLANK_LINE = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(
    r"""(?: (?<=[.!?…]) | (?<=[.!?…]["'”’)\]]) ) \s+ (?!["'“‘(\[]?[a-z])  # a stop, a space, and no small letter
      | (?: (?<=[。！？]) (?![」』”’）]) | (?<=[。！？][」』”’）]) ) \s*         # scripts that put no space there
    """,
    re.VERBOSE,
)
_UNFINISHED = re.compile(r"(?:^\W?(?:\d+|[A-Za-z])[.)]|\b(?:e\.g|i\.e|cf|vs|Mr|Mrs|Ms|Dr|[A-Z])\.)$")
"""What ends in a stop and yet opens a sentence or goes on: the number of a list item, an abbreviation, an initial."""


class TextError(ValueError):
    """A file that cannot be embedded, and why."""


def read(path: Path) -> str:
    """The text of a UTF-8 file."""
    if path.is_dir():
        raise TextError(f"{path} is a directory. Name a text file in it.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TextError(f"{path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text (byte {error.start} does not decode).") from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}.") from None


def sentences(text: str) -> list[str]:
    """The sentences of a text. A blank line ends one too, a line break does not; rulers and the like are dropped."""
    found = []
    for paragraph in _BLANK_LINE.split(text):
        sentence = ""
        for piece in _SENTENCE_END.split(" ".join(paragraph.split())):
            sentence = f"{sentence} {piece}".strip()
            if not _UNFINISHED.search(sentence):
                found.append(sentence)
                sentence = ""
        found.append(sentence)
    return [sentence for sentence in found if re.search(r"\w", sentence)]


# -- sentences -> word pieces --------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """One sentence as word pieces, and whether its end was cut off."""

    ids: list[int]
    truncated: bool


def tokenize(lines: Sequence[str], tokenizer_json: Path) -> list[Tokens]:
    """Word pieces of each line, between the model's start and end marks, at most ``MAX_PIECES``."""
    import tokenizers  # at the point of use: only the demo needs it

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    tokenizer.no_padding()  # ``batches`` pads, once it knows what goes together
    tokenizer.enable_truncation(MAX_PIECES)
    return [Tokens(encoded.ids, bool(encoded.overflowing)) for encoded in tokenizer.encode_batch(list(lines))]


# -- word pieces -> batches ----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The arguments of one call of the model, and which sentence each row holds."""

    ids: np.ndarray
    """``[rows, tokens]``, 0 where there is no word piece."""

    mask: np.ndarray
    """``[rows, tokens]``, 1 where there is a word piece."""

    sentences: tuple[int, ...]
    """The positions, in the text, of the first ``len(sentences)`` rows. Rows after that are padding."""


def batches(tokens: Sequence[Tokens], rows: int) -> list[Batch]:
    """Batches of ``rows`` sentences of similar length.

    All have the same number of rows, the last filled up with empty ones; a text of fewer sentences than ``rows`` is one
    batch of just those. Tokens are padded to the longest of the batch, rounded up to a multiple of ``BUCKET``.
    """
    rows = min(rows, len(tokens))
    by_length = sorted(range(len(tokens)), key=lambda i: len(tokens[i].ids))
    return [_batch(tokens, tuple(by_length[i : i + rows]), rows) for i in range(0, len(tokens), rows)]


def _batch(tokens: Sequence[Tokens], chosen: tuple[int, ...], rows: int) -> Batch:
    longest = max(len(tokens[i].ids) for i in chosen)
    ids = np.zeros((rows, -(-longest // BUCKET) * BUCKET), np.int32)
    mask = np.zeros_like(ids)
    for row, i in enumerate(chosen):
        ids[row, : len(tokens[i].ids)] = tokens[i].ids
        mask[row, : len(tokens[i].ids)] = 1
    return Batch(ids, mask, chosen)
