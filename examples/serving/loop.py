"""Continuous batching: requests join the batch when they arrive and leave it when they have their tokens."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable

import jax
import numpy as np

from examples.serving.engine import Batch, Engine, bucket
from examples.serving.requests import Request

_AHEAD = 2  # steps that are launched before the tokens of an earlier one are read


@dataclasses.dataclass
class Report:
    """What serving took.

    Attributes:
      seconds: from the first prompt to the last token.
      tokens: tokens that were generated.
      prompt_tokens: tokens of prompts that were read.
      steps: how often the batch was decoded.
      rows: steps by the bucket's rows.
    """

    seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens, by the second."""
        return self.tokens / self.seconds


def serve(
    engine: Engine, requests: Iterable[Request], max_rows: int, progress: Callable[[int], None] = lambda done: None
) -> Report:
    """Serves requests, each with the tokens that it would get alone.

    In every step those that have arrived are read, as far as the batch has room, and join it; then each row gets a
    token; then those that have enough leave. The batch moves to another bucket when it is full, and when three
    quarters of it are empty. How many tokens a request gets is known from the start, so no step waits for a token.

    Args:
      engine: what runs on the devices.
      requests: in the order of their arrival; their ``tokens`` are added to.
      max_rows: most requests in a batch; a power of two.
      progress: is told how many tokens there are.

    Returns:
      What it took.

    Raises:
      ValueError: if a request wants more than the cache has room for.
    """
    requests, room = list(requests), engine.config.capacity
    for request in requests:
        if max(bucket(len(request.prompt), least=8), len(request.prompt) + request.new_tokens) > room:
            raise ValueError(
                f"A prompt of {len(request.prompt)} tokens (in its bucket) and {request.new_tokens} new ones do not "
                f"fit into a cache of {room}: give the decoder a larger capacity."
            )
    waiting, unread = deque(requests), deque[tuple[jax.Array, list[tuple[int, Request]]]]()
    rows: list[Request | None] = []
    left: dict[int, int] = {}  # tokens that each row's request still lacks
    batch: Batch | None = None
    report, start, now = Report(), time.perf_counter(), 0

    def note(token: jax.Array, of: list[tuple[int, Request]]) -> None:
        unread.append((token, of))
        while len(unread) > _AHEAD:
            read()

    def read() -> None:
        token, of = unread.popleft()
        values = np.asarray(token)
        for row, request in of:
            request.tokens.append(int(values[row]))
        report.tokens += len(of)
        progress(report.tokens)

    while waiting or left:
        if not left and waiting[0].arrives > now:
            now = waiting[0].arrives
        come = []
        while waiting and waiting[0].arrives <= now and len(left) + len(come) < max_rows:
            come.append(waiting.popleft())
        if come:
            new = engine.prefill([request.prompt for request in come])
            report.prompt_tokens += sum(len(request.prompt) for request in come)
            note(new.token, list(enumerate(come)))
            batch, rows = _with_room(engine, batch, rows, len(left) + len(come))
            free = [row for row, request in enumerate(rows) if request is None][: len(come)]
            batch = new if batch is None else engine.insert(batch, new, free)
            for row, request in zip(free, come, strict=True):
                if request.new_tokens > 1:
                    rows[row], left[row] = request, request.new_tokens - 1
        if left:
            assert batch is not None
            batch = engine.decode(batch, len(left))
            report.steps += 1
            report.rows[len(rows)] = report.rows.get(len(rows), 0) + 1
            note(batch.token, [(row, request) for row, request in enumerate(rows) if request is not None])
            for row in [row for row, more in left.items() if more == 1]:
                rows[row] = None
            left = {row: more - 1 for row, more in left.items() if more > 1}
            if left and 4 * len(left) <= len(rows) and engine.rows(len(left)) < len(rows):
                batch, rows, left = _compact(engine, batch, rows, left)
        now += 1
    while unread:
        read()
    report.seconds = time.perf_counter() - start
    return report


def _with_room(
    engine: Engine, batch: Batch | None, rows: list[Request | None], wanted: int
) -> tuple[Batch | None, list[Request | None]]:
    """The batch in a bucket for so many requests, if it has no room for them; no batch, if it is empty."""
    size = engine.rows(wanted)
    if batch is None or not any(rows):
        return None, [None] * size
    if size <= len(rows):
        return batch, rows
    return engine.take(batch, [*range(len(rows)), *([-1] * (size - len(rows)))]), rows + [None] * (size - len(rows))


def _compact(
    engine: Engine, batch: Batch, rows: list[Request | None], left: dict[int, int]
) -> tuple[Batch, list[Request | None], dict[int, int]]:
    """The batch in the smallest bucket that holds its requests."""
    kept = sorted(left)
    moved: list[Request | None] = [None] * engine.rows(len(kept))
    moved[: len(kept)] = [rows[row] for row in kept]
    return engine.take(batch, kept), moved, {i: left[row] for i, row in enumerate(kept)}
