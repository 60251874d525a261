"""Auto: what is measured, chosen and kept, and that the function as it is stays unless something is really faster."""

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
from models import ROWS, WIDTH, Stack, initialised, normal, same

import dynaflow_jax as df
from dynaflow_jax import cache, strategies
from dynaflow_jax.candidates import MARGIN, Candidates, predicted_us
from dynaflow_jax.tune import LEAST_GAIN, Contest, Progress, choose, is_faster, spread, take_turns

ROOT = Path(__file__).parents[1]
FEW = [strategies.NanoFlow(2), strategies.NanoFlow(3)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Choices of a test are its own, whatever this machine's user has measured."""
    path = tmp_path / "choices"
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(path))
    return path


def layers(w, x):
    for _ in range(2):
        with df.mark("up"):
            h = jnp.tanh(x @ w)
        with df.mark("down"):
            x = x + h @ w.T
    return x


W = normal(WIDTH, 2 * WIDTH, seed=1)


def automatic(fun=layers, candidates=FEW, axes=(None, 0), **options):
    return df.dynaflow(fun, scheduler=strategies.Auto(candidates, budget_s=0.2), batch_axes=axes, **options)


def contest(flow, *args, measure):
    """What is chosen if measuring gives this."""
    return Contest(candidates_of(flow, *args), 60, measure).run()


def candidates_of(flow, *args):
    return Candidates(flow, flow._call(args, {}))


def adopted(flow, *args, index, plan=None, backend="xla", **changed):
    """Has a function run as if a candidate had been measured as the best."""
    found = candidates_of(flow, *args)
    chosen = found.all[index]
    strategy = repr(chosen.strategy) if index else None
    entry = cache.Entry(index, strategy, backend, {"0": 2.0, "1": 1.0}, 2.0, 1.0, plan or chosen.plan.to_json())
    entry = cache.Entry(**{**vars(entry), **changed})
    assert cache.save(found.key, entry) is not None
    return entry


# -- deciding --------------------------------------------------------------------------------------------------------


def around(middle, width=0.0, count=9):
    """Times with a median, and all of them inside a width."""
    return [middle + width * (i / (count - 1) - 0.5) for i in range(count)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({0: around(100)}, 0),
        ({0: around(100), 1: around(50)}, 1),
        ({0: around(100), 1: around(50), 2: around(40)}, 2),
        ({0: around(100), 1: around(100)}, 0),
        ({0: around(100), 1: around(101)}, 0),
        ({0: around(100), 1: around(98.01)}, 0),  # not by more than 2%
        ({0: around(100), 1: around(97.9)}, 1),
        ({0: around(100, 40), 1: around(85)}, 0),  # the unscheduled function's times spread more
        ({0: around(100), 1: around(85, 40)}, 0),  # or the candidate's
        ({0: around(100, 20), 1: around(85, 20)}, 1),
        ({0: around(100), 1: around(40, 150), 2: around(90)}, 2),  # the noisy one is passed over
    ],
)
def test_only_what_is_faster_beyond_noise_is_chosen(times, chosen):
    assert choose(times) == chosen


def test_the_choice_is_never_slower_than_the_unscheduled_function():
    random = np.random.default_rng(0)
    for _ in range(300):
        times = {i: random.gamma(4.0, random.uniform(5, 50), size=9).tolist() for i in range(4)}
        chosen = choose(times)
        assert np.median(times[chosen]) <= np.median(times[0])
        if chosen:
            gain = np.median(times[0]) - np.median(times[chosen])
            assert gain > LEAST_GAIN * np.median(times[0])
            assert gain > max(spread(times[0]), spread(times[chosen]))


def test_times_of_equal_functions_choose_neither():
    random = np.random.default_rng(1)
    wins = sum(is_faster(random.normal(100, 5, 9), random.normal(100, 5, 9)) for _ in range(500))
    assert wins <= 10  # and twice in a row, as tune asks, one in thousands


class Fake:
    """Functions whose calls take as long as they are told, on a clock of their own."""

    def __init__(self, **seconds):
        self.now, self.calls = 0.0, []
        self.funs = {int(name[1:]): self._fun(int(name[1:]), took) for name, took in seconds.items()}

    def _fun(self, name, took):
        def call():
            self.calls.append(name)
            self.now += took if isinstance(took, float) else took(self)
            return ()

        return call

    def clock(self):
        return self.now


def test_contenders_take_turns_until_time_is_up():
    fake, rounds = Fake(_0=1e-3, _1=5e-4), []
    times = take_turns(fake.funs, 0.2, clock=fake.clock, progress=lambda done, times: rounds.append(done))
    assert times[0] == pytest.approx([1000.0] * len(times[0]))
    assert times[1] == pytest.approx([500.0] * len(times[1]))
    assert rounds == list(range(1, len(times[0]) + 1))
    assert 0.2 <= fake.now < 0.23
    first, second = [0] * 11, [1] * 21  # ten and twenty calls, after one to warm up
    assert fake.calls[8:72] == [*first, *second, *second, *first]  # the second round the other way round


def test_a_slow_call_leaves_a_contender_no_fewer_calls_a_turn():
    slow_once = lambda fake: 1e-1 if fake.calls.count(1) == 2 else 1e-3  # noqa: E731
    fake = Fake(_0=1e-3, _1=slow_once)
    take_turns(fake.funs, 0.1, clock=fake.clock)
    assert fake.calls.count(0) == fake.calls.count(1)


def test_a_drifting_clock_speed_hits_all_contenders_alike():
    slower = lambda fake: 1e-3 * (1 + fake.now)  # noqa: E731
    fake = Fake(_0=slower, _1=slower)
    assert choose(take_turns(fake.funs, 1.0, clock=fake.clock)) == 0


def test_there_are_enough_rounds_however_short_the_budget():
    fake = Fake(_0=10.0)
    assert len(take_turns(fake.funs, 0.0, clock=fake.clock)[0]) == 7


def test_progress_is_for_terminals_only():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    silent, shown = io.StringIO(), Terminal()
    for stream in (silent, shown):
        progress = Progress("tuning f", stream)
        progress.show("round 1")
        progress.close()
    assert silent.getvalue() == ""
    assert "tuning f: round 1" in shown.getvalue()


# -- before anything is measured -------------------------------------------------------------------------------------


def primitives(fun):
    """Of a function's program, as traced; newer versions of JAX keep the inlined ``jit`` around it."""
    jaxpr = jax.make_jaxpr(fun)(W, ROWS).jaxpr
    if [eqn.primitive.name for eqn in jaxpr.eqns] in (["jit"], ["pjit"]):
        jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_without_a_measurement_the_function_stays_as_it_is():
    flow = automatic()
    assert primitives(flow) == primitives(layers)  # no barriers
    np.testing.assert_array_equal(jax.jit(flow)(W, ROWS), jax.jit(layers)(W, ROWS))
    gradients = [jax.jit(jax.grad(lambda w, fun=fun: fun(w, ROWS).sum()))(W) for fun in (flow, layers)]
    np.testing.assert_array_equal(*gradients)
    assert flow.plan(W, ROWS).sizes == (6,)
    assert "no candidate is predicted to be 3% faster" in flow.explain(W, ROWS)


def test_a_prediction_within_the_margin_does_not_count(monkeypatch):
    flow = automatic()
    for gain, size in ((MARGIN - 0.01, (6,)), (MARGIN + 0.01, (3, 3))):
        predictions = lambda plan, backend, gain=gain: 100 * (1 - gain * (plan.sizes == (3, 3)))  # noqa: E731
        monkeypatch.setattr("dynaflow_jax.candidates.predicted_us", predictions)
        flow = automatic()
        assert flow.plan(W, ROWS).sizes == size
    assert "predicted to be 1.04 times as fast" in flow.explain(W, ROWS)
    same(jax.jit(flow)(W, ROWS), layers(W, ROWS))


def test_as_one_program_streams_do_not_run_at_once():
    def two(x, y):
        with df.mark("a"):
            a = jnp.tanh(x @ x)
        with df.mark("b"):
            return a, jnp.tanh(y @ y)

    class Apart(df.OpScheduler):
        def schedule(self, ctx):
            while ops := ctx.get_ready_ops():
                for op in ops:
                    ctx.execute(op, stream=op.name)

    flow = df.dynaflow(two, scheduler=Apart(), backend="xla")
    plan = flow.plan(normal(512, 512), normal(512, 512))
    assert predicted_us(plan, "dispatch") < predicted_us(plan, "xla")


def test_what_cannot_be_planned_is_dropped_with_its_reason():
    class Lazy(df.OpScheduler):
        def schedule(self, ctx):
            pass

    class TooMany(df.OpScheduler):
        def split(self, info):
            return [info.batch_size, 1]

    def mixing(w, x):
        return (x - x.mean(0)) @ w

    found = automatic(candidates=[Lazy(), TooMany(), *FEW]).candidates(W, ROWS)
    assert [bool(candidate.dropped) for candidate in found] == [False, True, True, False, False]
    assert "ScheduleError: The strategy never executed" in found[1].dropped
    assert "SplitError" in found[2].dropped
    found = automatic(mixing).candidates(W, ROWS)
    assert found[1].dropped.startswith("BatchMixingError")
    same(automatic(mixing)(W, ROWS), mixing(W, ROWS))


def test_equal_plans_are_tried_once():
    found = automatic(candidates=[strategies.Sequential(), strategies.NanoFlow(2), strategies.NanoFlow(2)]).candidates(
        W, ROWS
    )
    assert found[1].dropped == "the same as unscheduled"
    assert found[3].dropped == f"the same as {found[2].name}"


# -- measuring -------------------------------------------------------------------------------------------------------


def test_tune_measures_chooses_and_keeps(folder):
    flow = automatic()
    found = df.tune(flow, W, ROWS)
    assert found.chosen in {contender.name for contender in found.contenders}
    assert found.contenders[0].measured_us == found.unscheduled_us > 0
    assert found.path is not None
    assert found.path.parent == folder
    assert [path.suffix for path in sorted(folder.iterdir())] == [".json", ".lock"]
    again = df.tune(automatic(), W, ROWS)
    assert again.kept
    assert (again.chosen, again.chosen_us, again.path) == (found.chosen, found.chosen_us, found.path)
    assert not df.tune(flow, W, ROWS, force=True).kept
    assert json.loads(found.to_json())["chosen"] == found.chosen
    assert "unscheduled" in str(found)
    assert "measured before" in str(again)
    same(jax.jit(flow)(W, ROWS), layers(W, ROWS))


def test_what_was_chosen_runs_from_the_next_trace_on():
    flow = automatic()
    before = jax.jit(flow)
    before(W, ROWS)
    entry = adopted(flow, W, ROWS, index=2)
    assert flow.plan(W, ROWS).sizes == (6,)  # decided already
    found = df.tune(flow, W, ROWS)
    assert found.kept
    assert found.chosen == "NanoFlow(micro_batches=3), xla"
    assert flow.plan(W, ROWS).sizes == (2, 2, 2)
    assert automatic().plan(W, ROWS).sizes == (2, 2, 2)
    assert f"{entry.chosen_us} µs" in flow.explain(W, ROWS)
    same(jax.jit(flow)(W, ROWS), layers(W, ROWS))
    assert flow.plan(W, ROWS[:4]).sizes == (4,)  # other shapes were not measured


def test_a_candidate_that_fails_when_compiled_is_passed_over(monkeypatch):
    real = Candidates.resolved

    def resolved(self, candidate, flow=None):
        if candidate.index:
            raise MemoryError("none left\nreally")
        return real(self, candidate, flow)

    monkeypatch.setattr(Candidates, "resolved", resolved)
    found = df.tune(automatic(), W, ROWS, budget_s=60)
    assert found.chosen == "unscheduled"
    assert [contender.note for contender in found.contenders[1:]] == ["MemoryError: none left"] * 2


def test_a_gain_that_does_not_come_again_is_not_chosen():
    turns = []

    def fake(funs, deadline, **options):
        turns.append(sorted(funs))
        return {i: around(50.0 if i == 1 and len(turns) == 1 else 100.0) for i in funs}

    found = contest(automatic(), W, ROWS, measure=fake)
    assert turns == [[0, 1, 2], [0, 1]]
    assert found.chosen == "unscheduled"
    assert found.contenders[1].note == "faster at first, not when measured again"


def test_a_gain_that_comes_again_is_chosen():
    fake = lambda funs, deadline, **options: {i: around({0: 100.0, 1: 70.0, 2: 50.0}[i]) for i in funs}  # noqa: E731
    flow = automatic()
    found = contest(flow, W, ROWS, measure=fake)
    assert found.chosen == "NanoFlow(micro_batches=3), xla"
    assert found.speedup == 2.0
    assert flow.plan(W, ROWS).sizes == (2, 2, 2)
    same(jax.jit(flow)(W, ROWS), layers(W, ROWS))
    same(jax.jit(jax.grad(lambda w: flow(w, ROWS).sum()))(W), jax.grad(lambda w: layers(w, ROWS).sum())(W))


def test_only_the_best_by_prediction_are_measured():
    fake = lambda funs, deadline, **options: {i: around(1.0) for i in funs}  # noqa: E731
    auto = strategies.Auto([strategies.NanoFlow(count) for count in (6, 3, 2)], keep=1, budget_s=60)
    found = contest(df.dynaflow(layers, scheduler=auto, batch_axes=(None, 0)), W, ROWS, measure=fake)
    assert [contender.measured_us is None for contender in found.contenders] == [False, True, True, False]
    assert found.contenders[1].note == "predicted to be slower"


def test_linen_models_and_static_arguments():
    model = Stack()
    params = initialised(model)

    def fun(params, x, how):
        return model.apply(params, x) * (2 if how == "twice" else 1)

    flow = automatic(fun, axes=(None, 0, None))
    df.tune(flow, params, ROWS, "twice")
    same(flow(params, ROWS, "twice"), fun(params, ROWS, "twice"))


def test_the_dispatcher_is_a_backend_to_tune_for():
    from dynaflow_jax.runtime import extension

    flow = automatic(backend="dispatch")
    found = df.tune(flow, W, ROWS, budget_s=60)
    if extension.module is None:
        assert found.chosen == "unscheduled"
        assert "backend='dispatch'" in found.contenders[1].note
    else:
        assert found.contenders[1].name == "NanoFlow(micro_batches=2), dispatch"
        assert found.contenders[1].measured_us
    same(jax.jit(flow)(W, ROWS), layers(W, ROWS))


def test_profile_and_composition_of_a_tuned_function():
    flow = automatic()
    adopted(flow, W, ROWS, index=1)
    same(jax.vmap(flow, (None, 0))(W, ROWS[None]), layers(W, ROWS)[None])
    assert df.profile(flow, W, ROWS, calls=1).title == "NanoFlow(micro_batches=2)"
    outer = df.dynaflow(lambda w, x: flow(w, x), scheduler=strategies.NanoFlow(3), batch_axes=(None, 0))
    assert outer.plan(W, ROWS).sizes == (2, 2, 2)  # inside another one it is the function itself


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strategies.Auto("NanoFlow"), "takes a list of strategies"),
        (lambda: strategies.Auto(budget_s=0), "seconds above zero"),
        (lambda: strategies.Auto(keep=0), "positive whole number"),
        (lambda: strategies.Auto([strategies.Auto()]), "neither Auto nor Switch"),
        (lambda: automatic(candidates=[3]), "candidate 0 of Auto must be an OpScheduler"),
        (lambda: df.dynaflow(layers, scheduler=strategies.Auto), "is a class; pass an instance"),
        (lambda: df.tune(df.dynaflow(layers, scheduler=FEW[0]), W, ROWS), "scheduler=df.strategies.Auto"),
        (lambda: df.tune(jax.jit(automatic()), W, ROWS), "without jax.jit around it"),
        (lambda: df.tune(automatic(), W, jax.ShapeDtypeStruct((6, WIDTH), jnp.float32)), "it takes arrays; x is"),
        (lambda: df.tune(automatic(), W, ROWS, budget_s=-1), "seconds above zero"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(df.DynaFlowError, match=message):
        make()


def test_a_plain_function_is_tuned_with_what_is_built_in():
    found = df.tune(layers, W, ROWS, budget_s=0.2)
    assert found.function == "layers"
    assert all(contender.note == "the same as unscheduled" for contender in found.contenders[1:])


# -- on disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"version": 99}', "\0\xff", "[" * 100_000])
def test_a_damaged_file_is_ignored_and_written_anew(folder, text):
    flow = automatic()
    adopted(flow, W, ROWS, index=1)
    (path,) = folder.glob("*.json")
    path.write_text(text, encoding="latin-1")
    with pytest.warns(df.TuningWarning, match="cannot be used"):
        assert flow.plan(W, ROWS).sizes == (6,)
    with pytest.warns(df.TuningWarning, match="cannot be used"):
        assert not df.tune(flow, W, ROWS).kept
    assert cache.load(path.stem) is not None


def test_every_damaged_field_is_noticed(folder):
    flow = automatic()
    adopted(flow, W, ROWS, index=1)
    (path,) = folder.glob("*.json")
    good = json.loads(path.read_text())
    for name, value in good.items():
        others = [other for other in ({}, "?", None, [1], -1, {"a": "b"}, True) if type(other) is not type(value)]
        for other in [*others, ...]:
            changed = {key: old for key, old in good.items() if key != name}
            if (name, other) == ("plan", None) or (name[-3:], type(other)) == ("_us", int):
                continue  # fine
            path.write_text(json.dumps(changed if other is ... else {**changed, name: other}))
            with pytest.warns(df.TuningWarning):
                assert automatic().plan(W, ROWS).sizes == (6,), (name, other)


@pytest.mark.parametrize(
    "changed", [{"candidate": 9}, {"strategy": "NanoFlow(micro_batches=7)"}, {"backend": "dispatch"}]
)
def test_a_choice_of_another_candidate_does_not_count(changed):
    flow = automatic()
    adopted(flow, W, ROWS, index=1, **changed)
    assert flow.plan(W, ROWS).sizes == (6,)
    assert not df.tune(flow, W, ROWS).kept


def test_a_plan_that_the_strategy_no_longer_makes_does_not_count():
    flow = automatic()
    other = df.dynaflow(layers, scheduler=FEW[1], batch_axes=(None, 0)).plan(W, ROWS).to_json()
    adopted(flow, W, ROWS, index=1, plan=other)
    with pytest.warns(df.TuningWarning, match="makes another plan now"):
        assert flow.plan(W, ROWS).sizes == (6,)
    assert not df.tune(flow, W, ROWS).kept


def test_the_key_tells_apart_what_could_run_otherwise():
    def other(w, x):
        for _ in range(2):
            with df.mark("up"):
                h = jnp.sin(x @ w)
            with df.mark("down"):
                x = x + h @ w.T
        return x

    flows = [
        (automatic(), W, ROWS),
        (automatic(), W, ROWS[:4]),
        (automatic(), W.astype(jnp.bfloat16), ROWS.astype(jnp.bfloat16)),
        (automatic(axes=(None, None)), W, ROWS),
        (automatic(other), W, ROWS),
        (automatic(candidates=FEW[:1]), W, ROWS),
        (automatic(candidates=[strategies.NanoFlow(2), strategies.NanoFlow(3, min_rows=2)]), W, ROWS),
        (automatic(rng="per_micro_batch"), W, ROWS),
        (automatic(context="decode"), W, ROWS),
        (automatic(backend="dispatch"), W, ROWS),
        (automatic(rules=[df.SplitFunc("tanh")]), W, ROWS),
    ]
    keys = [candidates_of(*flow).key for flow in flows]
    assert len(set(keys)) == len(keys)
    assert candidates_of(*flows[0]).key == candidates_of(automatic(), W, ROWS).key


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder would be")
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(blocked / "inside"))
    fake = lambda funs, deadline, **options: {i: around(100.0 / (1 + i)) for i in funs}  # noqa: E731
    flow = automatic()
    with pytest.warns(df.TuningWarning, match="not kept"):
        found = contest(flow, W, ROWS, measure=fake)
    assert found.path is None
    assert found.chosen == "NanoFlow(micro_batches=3), xla"
    assert flow.plan(W, ROWS).sizes == (2, 2, 2)  # in this process it counts nevertheless


def test_where_choices_are_kept(monkeypatch, tmp_path):
    assert cache.directory() == Path(os.environ["DYNAFLOW_CACHE_DIR"])
    monkeypatch.delenv("DYNAFLOW_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "dynaflow_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.directory() == Path("/home/me/.cache/dynaflow_jax")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.directory() == Path("/home/me/Library/Caches/dynaflow_jax")


def test_a_lock_that_is_held_is_waited_for(folder):
    with cache.locked("k", 1) as first, cache.locked("k", 0.2) as second:
        assert first
        assert not second
    with cache.locked("k", 0.2) as again:
        assert again


TWO = """
import sys
import dynaflow_jax as df
sys.path.insert(0, "tests")
import test_tune as t
flow = df.dynaflow(t.layers, scheduler=df.strategies.Auto(t.FEW, budget_s=1.0), batch_axes=(None, 0))
print("ready", flush=True)
sys.stdin.readline()
found = df.tune(flow, t.W, t.ROWS)
print(found.kept, found.chosen, found.chosen_us)
"""


def test_two_processes_at_once_measure_once(folder):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", TWO], cwd=ROOT, env=environment, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [process.communicate(timeout=300)[0].split(" ", 1) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(kept for kept, _ in results) == ["False", "True"]
    assert results[0][1] == results[1][1]
    assert len(list(folder.glob("*.json"))) == 1
    assert not list(folder.glob("*.tmp"))
