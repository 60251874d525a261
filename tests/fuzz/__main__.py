"""Looks for crashes, hangs and wrong results for as long as asked: ``python -m tests.fuzz --seconds=600``.

Each part gets an equal share of the time. A failure prints the part and the case, which ``--part`` and ``--case`` run
again alone.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import random
import sys
import time
import traceback

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from . import plans, programs, rules, strategies
from .check import limited

PARTS = {"plans": plans.case, "programs": programs.case, "rules": rules.case, "strategies": strategies.case}
_LIMIT_S = 60  # far beyond any case


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all parts together")
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--case", type=int, help="only this one")
    options = parser.parse_args()
    parts = {options.part: PARTS[options.part]} if options.part else PARTS
    failures = 0
    for name, case in parts.items():
        outcomes: collections.Counter[str] = collections.Counter()
        found: dict[str, int] = {}
        end = time.monotonic() + options.seconds / len(parts)
        cases = itertools.count(options.seed) if options.case is None else [options.case]
        for number in cases:
            try:
                with limited(_LIMIT_S):
                    outcomes[case(random.Random(number))] += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                outcomes["FAILED"] += 1
                where = traceback.extract_tb(error.__traceback__)[-1]
                if (kind := f"{type(error).__name__} at {where.name}:{where.lineno}") not in found:
                    found[kind] = number
                    print(f"{name}, case {number}: {kind}", file=sys.stderr)
                    traceback.print_exc(limit=-8)
            if time.monotonic() > end:
                break
        failures += outcomes["FAILED"]
        print(f"{name}: {outcomes.total()} cases: {dict(outcomes.most_common())}", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
