"""The command line: what it prints, what it writes, and what it says of whatever cannot be."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import dynaflow_jax as df
from dynaflow_jax import arguments, cli
from dynaflow_jax.cli import main
from dynaflow_jax.runtime import extension

ROOT = Path(__file__).parents[1]

MODULE = """
import jax
import jax.numpy as jnp
import dynaflow_jax as df


def step(w, x):
    with df.mark("up"):
        h = x @ w
    with df.mark("act"):
        h = jnp.tanh(h)
    return h @ w


flow = df.dynaflow(step, scheduler=df.strategies.NanoFlow(), batch_axes=(None, 0))
jitted = jax.jit(flow)
ruled = df.dynaflow(
    lambda x: jnp.tanh(x * 2) + 1,
    scheduler=df.strategies.Sequential(),
    rules=[df.SplitFunc("mul"), (df.SplitFunc("tanh"), df.SplitFunc("add"))],
)
switched = df.dynaflow(
    step,
    scheduler=df.strategies.Switch([df.strategies.Sequential(), df.strategies.NanoFlow()], lambda w, x: x.sum() > 0),
    batch_axes=(None, 0),
)
automatic = df.dynaflow(step, scheduler=df.strategies.Auto([df.strategies.NanoFlow()]), batch_axes=(None, 0))
number = 3


class Holder:
    inner = staticmethod(step)


def powered(x, power):
    return x**power


def example():
    return jnp.ones((8, 8)), jnp.ones((4, 8))


def large():
    return jnp.ones((512, 512)), jnp.ones((512, 512))


def with_static():
    return jnp.ones(4), 2


def one():
    return jnp.ones(4)


def failing():
    raise RuntimeError("no data\\nat all")
"""

SHAPES = ["--shapes", "f32[8,8] f32[4,8]"]
SPLIT = [*SHAPES, "--batch_axes", "None, 0", "--strategy", "NanoFlow(micro_batches=2)"]
FLOW = ["toy_cli:flow", "--args", "toy_cli:example"]


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_cli.py").write_text(MODULE)
    (tmp_path / "broken_cli.py").write_text("import toy_cli\nraise ValueError('half done')\n")
    (tmp_path / "lacking_cli.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "leaving_cli.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DYNAFLOW_CACHE_DIR", str(tmp_path / "choices"))
    yield tmp_path
    for name in ("toy_cli", "broken_cli", "lacking_cli", "leaving_cli"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(capsys):
    """Runs a command; gives its exit status, standard output and standard error."""

    def call(*argv):
        status = main(argv)
        return status, *capsys.readouterr()

    return call


def done(result):
    status, out, err = result
    assert status == 0, err
    return out


# -- explain, plan and profile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [["toy_cli:step", *SPLIT], FLOW, ["toy_cli:jitted", "--args=toy_cli:example"]])
def test_explain(run, target):
    import toy_cli

    assert done(run("explain", *target)).strip() == toy_cli.flow.explain(*toy_cli.example()).strip()


def test_explain_as_json(run):
    data = json.loads(done(run("explain", *FLOW, "--json")))
    assert [op["name"] for op in data["operators"]] == ["up", "act", "dot_general"]
    assert data["operators"][1]["reads"] == [0]
    (plan,) = data["plans"]
    assert plan["plan"]["sizes"] == [2, 2]
    assert plan["predicted_us"] > 0
    assert not plan["dispatched"]


def test_plan(run):
    out = done(run("plan", *FLOW, "--device", "H200"))
    assert "Plan of NanoFlow(micro_batches=2): 2 micro-batches of 2 + 2 rows" in out
    assert "on NVIDIA H200, predicted" in out


def test_plan_as_json_is_read_again(run):
    import toy_cli

    plan = df.Plan.from_json(done(run("plan", *FLOW, "--json")))
    assert plan == toy_cli.flow.plan(*toy_cli.example())


@pytest.mark.parametrize("backend", ["xla", "dispatch"])
def test_profile(run, backend):
    if backend == "dispatch" and extension.module is None:
        pytest.skip("the extension is not built")
    # Steps by themselves are measured less what a call takes that does nothing: of small ones all of it, at times.
    flow = ["toy_cli:flow", "--args", "toy_cli:large"]
    out = done(run("profile", *flow, "--backend", backend))
    assert "NanoFlow(micro_batches=2) on cpu, measured: " in out
    assert "predicted on CPU, measured on cpu" in out
    found = json.loads(done(run("profile", *flow, "--backend", backend, "--json")))
    assert found["dispatched"] == (backend == "dispatch")
    assert found["measured_us"] > 0
    assert found["predicted_us"] > 0
    for name in ("up[0]", "act[0]", "dot_general[1]"):
        assert any(name in event["name"] for event in found["events"])


def test_files_of_a_profile(run, tmp_path):
    html, trace = tmp_path / "profile.html", tmp_path / "profile.json"
    done(run("profile", *FLOW, "--html", str(html), "--perfetto", str(trace)))
    assert "Measured" in html.read_text(encoding="utf-8")
    named = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "process_name"]
    assert [event["args"]["name"].split(": ")[0] for event in named] == ["CPU, predicted", "cpu, measured"]


def test_files_of_a_plan(run, tmp_path):
    files = {name: tmp_path / f"plan.{name}" for name in ("html", "perfetto", "svg")}
    status, out, err = run("plan", *FLOW, "--json", *(f"--{name}={path}" for name, path in files.items()))
    assert status == 0
    json.loads(out)  # files are told of elsewhere
    assert err.count("wrote") == 3
    assert files["html"].read_text(encoding="utf-8").startswith("<!")
    assert json.loads(files["perfetto"].read_text(encoding="utf-8"))["traceEvents"]
    assert files["svg"].read_text(encoding="utf-8").startswith("<svg")


def test_flags_say_otherwise_than_the_function(run):
    out = done(run("explain", *FLOW, "--strategy", "NanoFlow(4)", "--rules", "SplitFunc('tanh', name='squash')"))
    assert "4 micro-batches" in out
    assert "squash" in out
    assert "not split" in done(run("plan", *FLOW, "--batch_axes=None"))
    assert "rules" not in done(run("plan", "toy_cli:Holder.inner", *SPLIT, "--backend=xla"))


def test_with_kernels(run):
    """Whatever schedules the function, with kernels in it; on CPU none is used."""
    example = ["--args", "toy_cli:example", "--kernels"]
    assert "Plan of WithKernels(NanoFlow(micro_batches=2), Kernels())" in done(run("plan", *FLOW, "--kernels"))
    out = done(run("explain", "toy_cli:switched", *example))
    assert "WithKernels(Sequential(), Kernels())" in out
    assert "WithKernels(NanoFlow(micro_batches=2), Kernels())" in out
    for target in ("toy_cli:automatic", "toy_cli:step"):
        assert "unscheduled" in done(run("tune", target, *example, "--budget_s", "1"))
    assert "WithKernels(" in done(run("bench", *FLOW, "--kernels", "--budget_s", "0.1"))


def test_what_flags_do_not_say_stays(run):
    """Rules too, tuples among them."""
    import toy_cli

    graph = toy_cli.ruled.graph(jnp.ones(4))
    out = done(run("explain", "toy_cli:ruled", "--shapes=f32[4]", "--strategy=SingleBatchOverlap", "--json"))
    assert [op["name"] for op in json.loads(out)["operators"]] == [op.name for op in graph]
    assert any("+" in op.name for op in graph)


def test_a_plain_function_is_scheduled_by_auto(run):
    assert "df.tune measures" in done(run("explain", "toy_cli:step", *SHAPES))


def test_all_plans_of_a_switch(run):
    assert done(run("plan", "toy_cli:switched", *SHAPES)).count("Plan of ") == 2
    assert len(json.loads(done(run("explain", "toy_cli:switched", *SHAPES, "--json")))["plans"]) == 2
    assert "--json takes one" in run("plan", "toy_cli:switched", *SHAPES, "--json")[2]
    assert done(run("plan", "toy_cli:switched", *SHAPES, "--strategy=Sequential", "--json"))


# -- tune and bench --------------------------------------------------------------------------------------------------


def test_tune_measures_once(run):
    first = json.loads(done(run("tune", *FLOW, "--candidates", "NanoFlow(2)", "--budget_s=0.5", "--json")))
    assert not first["kept"]
    assert [contender["name"] for contender in first["contenders"]] == ["unscheduled", "NanoFlow(micro_batches=2), xla"]
    assert "measured before" in done(run("tune", *FLOW, "--candidates", "NanoFlow(2)"))
    assert "measured before" not in done(run("tune", *FLOW, "--candidates=NanoFlow(2)", "--budget_s=0.5", "--force"))


def test_what_was_tuned_is_what_auto_finds(run):
    done(run("tune", "toy_cli:automatic", "--args=toy_cli:example", "--budget_s=0.5"))
    assert "it was measured as the best" in done(run("explain", "toy_cli:automatic", "--args=toy_cli:example"))


def test_bench(run):
    data = json.loads(done(run("bench", "toy_cli:step", *SPLIT, "--budget_s=0.2", "--json")))
    assert [row["name"] for row in data["rows"]] == ["unscheduled", "NanoFlow(micro_batches=2)"]
    assert data["ratio"] == pytest.approx(data["rows"][0]["us"] / data["rows"][1]["us"])
    assert "times as fast as unscheduled" in done(run("bench", *FLOW, "--budget_s=0.2"))
    assert done(run("bench", "toy_cli:powered", "--args=toy_cli:with_static", "--budget_s=0.2"))


# -- help and wrong usage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["explain", "plan", "tune", "bench"])
def test_help_has_flags_and_examples(run, command):
    out = done(run(command, "--help"))
    assert f"usage: python -m dynaflow_jax {command} module:function" in out
    assert "--shapes" in out
    assert "examples:" in out
    assert done(run(command, "-h")) == out
    assert command in done(run("--help"))
    assert ("--html" in out) == (command == "plan")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["build"], "there is no command 'build'"),
        (["plan"], "takes one module:function, none was"),
        (["plan", "a:b", "c:d"], "takes one module:function, 2 were given"),
        (["plan", "a:b", "--colour"], "Unknown command line flag 'colour'"),
        (["explain", "a:b", "--html=x"], "Unknown command line flag 'html'"),
        (["bench", "a:b", "--backend=gpu"], "xla|dispatch"),
        (["tune", "a:b", "--budget_s=soon"], "budget_s"),
        (["tune", "a:b", "--budget_s=0"], "budget_s"),
    ],
)
def test_wrong_usage(run, argv, message):
    status, out, err = run(*argv)
    assert (status, out) == (2, "")
    assert message in err
    assert run()[0] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["toy_cli"], "'toy_cli' for the function is not of the form module:function"),
        (["toy_cli.py:step"], "'toy_cli.py:step' for the function is not of the form module:function"),
        (["./toy_cli:step"], "not of the form module:function"),
        (["nowhere.at_all:step", *SHAPES], "There is no module 'nowhere'"),
        (["lacking_cli:step", *SHAPES], "No module named 'not_installed_anywhere'"),
        (["broken_cli:step", *SHAPES], "Importing 'broken_cli' for the function fails: ValueError: half done"),
        (["leaving_cli:step", *SHAPES], "Importing 'leaving_cli' for the function fails: SystemExit"),
        (["toy_cli:stop", *SHAPES], "'toy_cli' has no 'stop', which the function 'toy_cli:stop' names; it has step"),
        (["toy_cli:number", *SHAPES], "toy_cli:number is 3, not a function"),
        (["toy_cli:step"], "nothing says what its arguments are: pass --shapes"),
        (["toy_cli:step", *SHAPES, "--args=toy_cli:example"], "both --shapes and --args"),
        (["toy_cli:step", "--args=toy_cli:nothing"], "has no 'nothing', which --args"),
        (["toy_cli:step", "--args=toy_cli:one"], "returned ArrayImpl, not a tuple of the arguments"),
        (["toy_cli:step", "--args=toy_cli:failing"], "fails: RuntimeError: no data at all"),
        (["toy_cli:step", "--args=toy_cli:number"], "names a function that returns the arguments"),
        (["toy_cli:step", "--shapes", "f32[8,8] x32[4,8]"], "'x32[4,8]' has no dtype"),
        (["toy_cli:step", "--shapes", "f32 f32[4,8]"], "'f32' has no sizes"),
        (["toy_cli:step", "--shapes", "f32[8,8] !"], "'!' is no shape"),
        (["toy_cli:step", "--shapes", "f32[8,,8]"], "needs whole numbers between commas"),
        (["toy_cli:step", "--shapes="], "--shapes is empty"),
        (["toy_cli:step", "--shapes", "f32[8,8] f32[4,9]"], "TypeError: dot_general requires"),
        (["toy_cli:step", "--shapes", "f32[8,8]"], "TypeError"),
        (["toy_cli:step", *SHAPES, "--strategy", "Nano()"], "'Nano' is unknown; there are AsyncTensorParallel, Auto"),
        (["toy_cli:step", *SHAPES, "--strategy", "Switch"], "'Switch' is unknown"),
        (["toy_cli:step", *SHAPES, "--strategy", "NanoFlow(two)"], "have to be literals"),
        (["toy_cli:step", *SHAPES, "--strategy", "NanoFlow(**{})"], "NanoFlow"),
        (["toy_cli:step", *SHAPES, "--strategy", "NanoFlow(rows=2)"], "unexpected keyword argument 'rows'"),
        (["toy_cli:step", *SHAPES, "--strategy", "NanoFlow(0)"], "positive whole numbers"),
        (["toy_cli:step", *SHAPES, "--strategy", "NanoFlow("], "no name with literal arguments"),
        (["toy_cli:step", *SHAPES, "--rules", "SplitFunk('a')"], "'SplitFunk' is unknown"),
        (["toy_cli:step", *SHAPES, "--batch_axes", "None 0"], "is no literal"),
        (["toy_cli:step", *SHAPES, "--batch_axes", "None, 7"], "batch_axes gives x the axis 7"),
        (["toy_cli:step", *SHAPES, "--device", "H900"], "No device model is called 'H900'; there are NVIDIA H200"),
        (["toy_cli:step", *SHAPES, "--html", "nowhere/plan.html"], "'nowhere/plan.html' cannot be written"),
    ],
)
def test_errors_are_one_line_that_names_the_culprit(run, argv, message):
    status, out, err = run("plan", *argv)
    assert (status, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1, err


def test_traceback_shows_where(run):
    status, _, err = run("plan", "toy_cli:step", "--shapes", "f32[8,8]", "--traceback")
    assert status == 1
    assert "Traceback" in err


def test_nothing_is_evaluated(run, tmp_path):
    harm = f"__import__('pathlib').Path({str(tmp_path / 'harm')!r}).touch()"
    for flag in ("--strategy", "--rules", "--batch_axes", "--out_axes"):
        for text in (harm, f"NanoFlow({harm})", f"SplitFunc({harm})", f"[{harm}]", f"NanoFlow[{harm}]"):
            assert run("plan", "toy_cli:step", *SHAPES, flag, text)[0] == 1
    assert not (tmp_path / "harm").exists()


# -- text as values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("f32[8,128] bf16[4,4]", [("float32", (8, 128)), ("bfloat16", (4, 4))]),
        (" i32[] , u8[0] ; pred[2]", [("int32", ()), ("uint8", (0,)), ("bool", (2,))]),
        (
            "int8[2, 3]\nfloat16[1] s16[4] bool[1]",
            [("int8", (2, 3)), ("float16", (1,)), ("int16", (4,)), ("bool", (1,))],
        ),
        ("c64[1] float8_e4m3fn[2]", [("complex64", (1,)), ("float8_e4m3fn", (2,))]),
    ],
)
def test_shapes(text, types):
    assert [(struct.dtype.name, struct.shape) for struct in arguments.shapes(text)] == types


def test_arrays_of_shapes():
    real, count, kept = arguments.arrays((*arguments.shapes("bf16[64] i32[3]"), "static"))
    assert (real.dtype, count.dtype, kept) == (jnp.bfloat16, jnp.int32, "static")
    assert 0.3 < float(jnp.std(real.astype(jnp.float32))) < 3
    assert not count.any()


def test_strategies_and_rules():
    assert repr(arguments.strategy("NanoFlow(3, concurrent=True)")) == "NanoFlow(micro_batches=3, concurrent=True)"
    assert repr(arguments.strategy(" Sequential ")) == "Sequential()"
    assert list(map(repr, arguments.candidates("NanoFlow(4), TokenWeave"))) == [
        "NanoFlow(micro_batches=4)",
        "TokenWeave()",
    ]
    assert arguments.rules("SplitFunc('psum', tags={'network'}), (SplitModule('norm'), SplitModule('up'))") == (
        df.SplitFunc("psum", tags={"network"}),
        (df.SplitModule("norm"), df.SplitModule("up")),
    )
    assert arguments.rules("[(SplitFunc('a'), SplitFunc('b'))]") == ((df.SplitFunc("a"), df.SplitFunc("b")),)
    assert arguments.literal("mean", "--out_axes") == "mean"


# -- as a program ----------------------------------------------------------------------------------------------------


def program(folder, *argv, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "dynaflow_jax", *argv]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=300, **options)


def test_the_program_finds_modules_of_the_current_folder(tmp_path):
    result = program(tmp_path, "plan", *FLOW, "--device=H100")
    assert result.returncode == 0, result.stderr
    assert "on NVIDIA H100, predicted" in result.stdout
    assert result.stderr == ""


def test_the_program_returns_its_status(tmp_path):
    wrong, failing = program(tmp_path, "plan"), program(tmp_path, "plan", "toy_cli:nope", *SHAPES)
    assert (wrong.returncode, failing.returncode) == (2, 1)
    assert failing.stderr.startswith("python -m dynaflow_jax: 'toy_cli' has no 'nope'")
    assert failing.stderr.count("\n") == 1


def test_a_reader_may_stop_early(tmp_path):
    command = f"{sys.executable} -m dynaflow_jax explain {' '.join(FLOW)} | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_function_that_is_scheduled_anew_keeps_all_options():
    given = {
        "rules": (df.SplitFunc("tanh"),),
        "batch_axes": (None, 0),
        "out_axes": 0,
        "weights": lambda w, x: x.shape[0],
        "rng": "per_micro_batch",
        "allow_batch_mixing": ("sort",),
        "batch_shards": 1,
        "backend": "xla",
        "unroll": 2,
        "context": "decode",
        "donate_argnums": (1,),
    }
    flow = df.dynaflow(lambda w, x: jnp.tanh(x @ w), scheduler=df.strategies.Sequential(), **given)
    kept = cli._options(flow)
    assert kept.keys() == inspect.signature(df.dynaflow).parameters.keys() - {"fun"}
    assert {name: kept[name] for name in given} == given
