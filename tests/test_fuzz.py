"""A short run of the fuzzer; ``python -m tests.fuzz --seconds=600`` is a long one."""

import os
import pathlib
import random
import subprocess
import sys

import pytest
from fuzz import plans, rules, strategies
from fuzz.check import limited

from dynaflow_jax.runtime import extension

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.xla_lowering
@pytest.mark.parametrize(("part", "seed"), [(plans, 0), (plans, 100), (rules, 0), (strategies, 0), (strategies, 30)])
def test_nothing_but_errors_and_right_results(part, seed):
    outcomes = set()
    for case in range(seed, seed + {plans: 100, rules: 20, strategies: 30}[part]):
        try:
            with limited(60):
                outcomes.add(part.case(random.Random(case)))
        except BaseException as error:
            error.add_note(f"Case {case} of {part.__name__}.")
            raise
    assert any("refused" in outcome for outcome in outcomes)
    assert any("ran" in outcome for outcome in outcomes)


@pytest.mark.parametrize("misbehaves", strategies.SCHEDULES, ids=lambda do: do.__name__)
@pytest.mark.xla_lowering
def test_every_way_to_misbehave(misbehaves):
    own = strategies.OWN if misbehaves in strategies.WITH_FN else strategies.OWN_OF.get(misbehaves, ())
    with limited(60):
        strategies.run("layer", strategies.Misbehaving([4, 4], misbehaves, 0), own)


@pytest.mark.skipif(extension.module is None, reason="the extension was not built")
def test_the_executor_survives_damaged_programs():
    """In a process of its own, so that a crash is a failure of this test alone."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz", "--part=programs", "--seconds=3"]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "'refused'" in ran.stdout
