"""The serving loop: every request gets the tokens that it would get alone, however it is batched and scheduled."""

import functools
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.attention.decoder import Config, apply, init
from examples.serving.bar import Bar
from examples.serving.engine import Engine, bucket
from examples.serving.loop import serve
from examples.serving.requests import Request, synthetic

CONFIG = Config(layers=1, width=16, heads=2, head_dim=8, hidden=24, vocab=32, capacity=32)
BUSY, MAX_ROWS = 3, 4
ROOT = Path(__file__).parents[2]


def requests():
    return synthetic(count=9, vocab=CONFIG.vocab, prompt=(1, 8), new_tokens=(1, 9), burst=4, seed=1)


@functools.cache
def alone():
    """The tokens of every request, each prefilled and decoded by itself."""
    params, (prefill, decode) = init(CONFIG), map(jax.jit, apply(CONFIG))
    found = []
    for request in requests():
        text = np.zeros((1, 8), np.int32)
        text[0, : len(request.prompt)] = request.prompt
        logits, cache = prefill(params, text, jnp.asarray([len(request.prompt)]))
        tokens = [int(logits.argmax())]
        for at in range(len(request.prompt), len(request.prompt) + request.new_tokens - 1):
            logits, cache = decode(params, jnp.asarray(tokens[-1:]), jnp.asarray([at]), cache)
            tokens.append(int(logits.argmax()))
        found.append(tokens)
    return found


@pytest.mark.parametrize(("schedule", "devices"), [("plain", 1), ("switch", 1), ("context", 1), ("switch", 2)])
def test_every_request_gets_what_it_would_get_alone(schedule, devices):
    if devices > jax.device_count():
        pytest.skip(f"needs {devices} (virtual) devices")
    engine = Engine(CONFIG, schedule, BUSY, devices)
    served, said = requests(), []
    report = serve(engine, served, MAX_ROWS, said.append)
    assert [request.tokens for request in served] == alone()
    assert said == sorted(said)
    assert said[-1] == report.tokens == sum(request.new_tokens for request in served)
    assert report.prompt_tokens == sum(len(request.prompt) for request in served)
    assert set(report.rows) <= {1, 2, 4}
    assert len(report.rows) > 1  # the batch moved between buckets
    assert all(engine.picked.values())  # and both plans ran

    if schedule != "switch":
        return
    # A second round finds every program compiled.
    programs = {id(jitted): jitted for jitted in (*engine._prefill.values(), *engine._decode.values())}
    before = [jitted._cache_size() for jitted in programs.values()]
    again = requests()
    serve(engine, again, MAX_ROWS)
    assert [request.tokens for request in again] == alone()
    assert [jitted._cache_size() for jitted in programs.values()] == before


def test_few_programs_with_more_padding():
    engine = Engine(CONFIG, "plain", BUSY, least_rows=MAX_ROWS, compiler_options={"xla_cpu_enable_fast_math": False})
    served = requests()
    report = serve(engine, served, MAX_ROWS)
    assert [request.tokens for request in served] == alone()
    assert set(report.rows) == {MAX_ROWS}
    assert engine._decode["busy"]._cache_size() == 1


def test_the_switch_sees_tokens_and_not_padding():
    """A batch of four rows with one request in it is idle; one with four is busy; it is the same program."""
    engine = Engine(CONFIG, "switch", BUSY)
    batch = engine.prefill([np.arange(2, dtype=np.int32)] * 4)
    flow = engine._decode["busy"].__wrapped__
    assert [len(flow.plan(engine.params, *batch, count).sizes) for count in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert [len(plan.sizes) for plan in flow.plans(engine.params, *batch, 1)] == [1, 2]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="larger capacity"):
        serve(Engine(CONFIG, "plain"), [Request(0, np.zeros(20, np.int32), 20)], MAX_ROWS)
    with pytest.raises(ValueError, match="schedule is one of"):
        Engine(CONFIG, "fast")
    with pytest.raises(ValueError, match="do not divide over 3 devices"):
        Engine(CONFIG, "plain", devices=3)


def test_requests_are_the_same_every_time():
    first, second = requests(), requests()
    assert [r.prompt.tolist() for r in first] == [r.prompt.tolist() for r in second]
    assert [r.arrives for r in first] == sorted(r.arrives for r in second)
    assert len({len(r.prompt) for r in first}) > 1
    assert len({r.arrives for r in first}) > 1


@pytest.mark.parametrize(
    ("count", "least", "want"), [(1, 1, 1), (2, 1, 2), (3, 1, 4), (8, 1, 8), (9, 8, 16), (3, 8, 8)]
)
def test_buckets(count, least, want):
    assert bucket(count, least) == want


def test_the_bar_is_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    quiet, terminal = io.StringIO(), Terminal()
    for stream in (quiet, terminal):
        bar = Bar(10, "serving", stream)
        bar.update(10)
        bar.close()
    assert quiet.getvalue() == ""
    assert "[##############################] 10/10 tokens" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()


def command_line(*arguments):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    command = [sys.executable, "-m", "examples.serving", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def test_the_command_line():
    small = ["--requests=4", "--max_rows=2", "--prompt=8", "--new_tokens=4", "--layers=1", "--width=16", "--heads=2"]
    ran = command_line(*small, "--busy=2", "--rounds=1", "--json")
    assert ran.returncode == 0, ran.stderr
    assert "\r" not in ran.stderr
    found = json.loads(ran.stdout)
    assert found["same_tokens"]
    assert found["tokens"] == sum(request.new_tokens for request in synthetic(4, 256, (2, 8), (1, 4), 6))
    assert set(found["tokens_per_second"]) == {"plain", "switch"}
    assert sum(found["picked"].values()) > found["steps"]


def test_help_has_examples_and_mistakes_are_named():
    assert "python -m examples.serving --schedule=context" in command_line("--help").stdout
    wrong = command_line("--heads=3")
    assert wrong.returncode
    assert "--width=64 is not an even number for each of --heads=3" in wrong.stderr
