"""Programs for the executor whose bytes are damaged: each is refused with a ``DispatchError``, or is one. None is run.

What crashes here takes the process down, so this is run in one of its own.
"""

from __future__ import annotations

import random
import struct

from dynaflow_jax.runtime import extension
from dynaflow_jax.runtime.program import (
    AWAIT,
    COPY,
    INPUT,
    LAUNCH,
    MEMORY,
    OUTPUT,
    RECORD,
    SIGNAL,
    SUM,
    WAIT,
    Command,
    Input,
    Norm,
    Output,
    Range,
    Stream,
    encode,
)

from .check import told
from .mutate import sequence

_PARTITIONS = 3
_A, _B, _C = (Range(MEMORY, 0, address, 256) for address in (0x10000, 0x20000, 0x30000))
_FLAG = Range(MEMORY, 0, 0x40000, 4)
_CASES = (
    ((Stream(),), (), (), ()),
    (
        (Stream(), Stream(3, 16)),
        (Input(256), Input(256, 0x50000)),
        (Output(256), Output(256, 0x60000)),
        (
            Command(COPY, 0, "input", 0, (Range(INPUT, 0, 0, 256),), (_A,)),
            Command(RECORD, 0, "input", 0),
            Command(LAUNCH, 0, "Model/läyer_0", 0, (_A, Range(INPUT, 1, 0, 256)), (_B,)),
            Command(WAIT, 1, "right", 0),
            Command(LAUNCH, 1, "right", 1, (_A,), (_C,)),
            Command(RECORD, 1, "right", 1),
            Command(WAIT, 0, "join", 1),
            Command(LAUNCH, 0, "join", 2, (_B, _C), (_A,)),
            Command(COPY, 0, "output", 0, (_A,), (Range(OUTPUT, 0, 0, 256),), (4, 64, 64)),
        ),
    ),
    # Without its events, which are found from what overlaps.
    (
        tuple(Stream(priority) for priority in range(8)),
        (Input(256),),
        (Output(256),),
        tuple(Command(LAUNCH, i % 8, f"step {i}", i % 3, (_A,), ((_B, _C, _A)[i % 3],)) for i in range(24)),
    ),
    (
        (Stream(), Stream()),
        (),
        (),
        (
            Command(SIGNAL, 0, "send", 1, (), (_FLAG,)),
            Command(AWAIT, 1, "receive", 1, (), (_FLAG, _A)),
            Command(LAUNCH, 1, "use", 0, (_A,), (_B,)),
            Command(SUM, 1, "add", 0, (_A, _B), (_C,), element=1),
            Command(SUM, 1, "norm", 0, (_A, _A, _B), (_B, _C), norm=Norm(16, 1e-6, True, None, rounds_scale=True)),
        ),
    ),
)
_NUMBERS = (0, 1, 2, 63, 64, 65, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


def case(rng: random.Random) -> str:
    """One damaged program."""
    streams, inputs, outputs, commands = rng.choice(_CASES)
    module = extension.module
    blob = encode(
        module.PROGRAM_VERSION, "fuzz", streams, range(_PARTITIONS), inputs, outputs, commands, rng.choice((1, 2))
    )
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.5:
            blob = sequence(rng, blob, lambda: bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 8)))))
        elif len(blob) > 16:  # a field, most of which are four or eight bytes
            at, number = rng.randrange(12, len(blob) - 4), rng.choice(_NUMBERS)
            blob = blob[:at] + struct.pack("<I", number) + blob[at + 4 :]
    order = rng.random() < 0.5
    plan = module.create_plan()
    try:
        module.add_host_program(plan, 0, blob, [lambda: None] * _PARTITIONS, order_overlaps=order)
    except module.DispatchError as error:
        return told(error, "refused")
    finally:
        module.free_plan(plan)
    try:
        ordered = module.order_overlaps(blob)
    except module.DispatchError:
        if order:
            raise
        return "taken, but cannot be ordered"
    module.check_program(ordered)
    assert module.order_overlaps(ordered) == ordered
    return "taken"
