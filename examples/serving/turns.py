"""The same requests served by several engines, in turns."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from examples.serving.bar import Bar
from examples.serving.engine import Engine
from examples.serving.loop import Report, serve
from examples.serving.requests import Request


@dataclasses.dataclass
class Served:
    """What became of the requests with one engine.

    Attributes:
      reports: of every round but the first one, in which programs are compiled.
      tokens: of each request.
    """

    reports: list[Report] = dataclasses.field(default_factory=list)
    tokens: list[list[int]] = dataclasses.field(default_factory=list)


def turns(
    engines: Mapping[str, Engine], requests: Callable[[], Sequence[Request]], max_rows: int, rounds: int
) -> dict[str, Served]:
    """Serves with each engine in turn, round by round, and shows a bar.

    Args:
      engines: by name; ``picked`` is that of the last round afterwards.
      requests: makes them, the same ones every time.
      max_rows: most requests in a batch; a power of two.
      rounds: how many after the first one.
    """
    served = {name: Served() for name in engines}
    for turn in range(rounds + 1):
        for name, engine in engines.items():
            own = requests()
            engine.picked.update(idle=0, busy=0)
            total = sum(request.new_tokens for request in own)
            bar = Bar(total, f"{name}, {f'round {turn}' if turn else 'compiling'}")
            report = serve(engine, own, max_rows, bar.update)
            bar.close()
            served[name].tokens = [request.tokens for request in own]
            if turn:
                served[name].reports.append(report)
    return served
