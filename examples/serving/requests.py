"""Requests as they arrive at a server: of changing length and number, and the same ones every time."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Request:
    """One text to be continued.

    Attributes:
      arrives: the step of the serving loop at which it is there.
      prompt: its tokens, ``int32[tokens]``.
      new_tokens: how many tokens it wants.
      tokens: those it got so far.
    """

    arrives: int
    prompt: np.ndarray
    new_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)


def synthetic(
    count: int, vocab: int, prompt: tuple[int, int], new_tokens: tuple[int, int], burst: int, seed: int = 0
) -> list[Request]:
    """Requests that arrive in bursts, with pauses between them.

    Args:
      count: how many.
      vocab: how many tokens there are.
      prompt: fewest and most tokens of a prompt.
      new_tokens: fewest and most tokens that a request wants.
      burst: most requests that arrive in one step.
      seed: the same seed gives the same requests.
    """
    rng, found, step = np.random.default_rng(seed), [], 0
    while len(found) < count:
        for _ in range(min(int(rng.integers(1, burst + 1)), count - len(found))):
            text = rng.integers(0, vocab, int(rng.integers(prompt[0], prompt[1] + 1)), dtype=np.int32)
            found.append(Request(step, text, int(rng.integers(new_tokens[0], new_tokens[1] + 1))))
        step += int(rng.integers(1, new_tokens[1] + 1))
    return found
