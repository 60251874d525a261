"""Batches through the model, how long that takes, and what lies close together."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.minilm.text import Batch

Step = Callable[[Any, np.ndarray, np.ndarray], jax.Array]
"""``(variables, ids, mask) -> embeddings``: ``MiniLM(config).apply``, scheduled or not."""


def embed(step: Step, variables: Any, batches: Sequence[Batch], label: str = "") -> np.ndarray:
    """The embeddings of all sentences, in the order of the text."""
    found: dict[int, np.ndarray] = {}
    for batch in _progress(batches, label):
        found.update(zip(batch.sentences, np.asarray(step(variables, batch.ids, batch.mask)), strict=False))
    return np.stack([found[i] for i in range(len(found))])


def seconds_per_call(steps: Sequence[Step], *args: Any, runs: int = 7) -> list[float]:
    """The median time of each step. They take turns, so that all of them meet the same machine."""
    times: list[list[float]] = [[] for _ in steps]
    for run in range(1 + runs):  # the first to warm up
        for step, taken in zip(steps, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            if run > 0:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


class Pair(NamedTuple):
    """Two sentences and the cosine of the angle between their embeddings."""

    similarity: float
    first: str
    second: str


def closest_pairs(sentences: Sequence[str], embeddings: np.ndarray, count: int = 5, block: int = 1024) -> list[Pair]:
    """The most similar pairs of different sentences, the closest first."""
    position: dict[str, int] = {}
    for i, sentence in enumerate(sentences):
        position.setdefault(sentence, i)
    distinct = list(position)
    vectors = embeddings[list(position.values())]
    pairs: list[Pair] = []
    for start in range(0, len(distinct), block):  # a block of rows at a time: a book has thousands of sentences
        similarity = vectors[start : start + block] @ vectors.T
        similarity[np.tril_indices_from(similarity, k=start)] = -np.inf  # each pair once, and none with itself
        kept = min(count, similarity.size)
        best = np.argpartition(similarity, -kept, axis=None)[-kept:]
        for i, j in zip(*np.unravel_index(best, similarity.shape), strict=True):
            if similarity[i, j] > -np.inf:
                pairs.append(Pair(float(similarity[i, j]), distinct[start + i], distinct[j]))
        pairs = sorted(pairs, reverse=True)[:count]
    return pairs


def _progress(batches: Sequence[Batch], label: str) -> Iterator[Batch]:
    """The batches, and a bar on the terminal while they are worked on."""
    shown = bool(label) and sys.stderr.isatty()
    for done, batch in enumerate(batches, 1):
        yield batch
        if shown:
            bar = "█" * (20 * done // len(batches))
            end = "\n" if done == len(batches) else ""
            print(f"\r{label:<12}{bar:░<20} {done}/{len(batches)} batches", end=end, file=sys.stderr, flush=True)
