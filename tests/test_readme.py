"""What the README says is true: its examples run and print what it shows, and what it names is there."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

import dynaflow_jax as df
from examples.benchmarks import readme as tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


def fences(text):
    """``(language, body, whether it follows the fence before it directly, line)`` of every fence."""
    end = 0
    for match in FENCE.finditer(text):
        adjacent = not text[end : match.start()].strip()
        yield match["language"], match["body"], adjacent, text[: match.start()].count("\n") + 1
        end = match.end()


def examples(text):
    """``(code, expected output or None, line)`` of every Python example."""
    found = []
    for language, body, adjacent, line in fences(text):
        if language == "python":
            found.append([body, None, line])
        elif language == "text" and adjacent and found:
            found[-1][1] = body
    return found


def section(title):
    """The text under a heading."""
    match = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert match, f"the README has no section {title!r}"
    return match[1]


def trimmed(text):
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def test_every_example_runs_and_prints_what_is_shown():
    namespace = {"__name__": "readme"}
    shown = 0
    for code, expected, line in examples(README):
        printed = io.StringIO()
        compiled = compile("\n" * line + code, "README.md", "exec")  # tracebacks have the README's line numbers
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("error", df.RuleWarning)
            exec(compiled, namespace)
        assert trimmed(printed.getvalue()) == trimmed(expected or ""), f"the example at line {line} prints otherwise"
        shown += expected is not None
    assert shown >= 4, "the README shows what its examples print"


def test_the_first_example_stands_alone_in_twenty_lines():
    code, expected, _ = examples(README)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert expected
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_errors_of_the_table_are_those_of_the_library():
    named = re.findall(r"^\| `(\w+)` \|", section("Errors"), re.MULTILINE)
    kinds = {
        name for name, value in vars(df.errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(named) == kinds
    for name in named:
        assert issubclass(getattr(df.errors, name), (df.DynaFlowError, UserWarning))


def test_names_of_the_library_exist():
    for name in set(re.findall(r"`df\.(\w+(?:\.\w+)*)", README)):
        found = df
        for part in name.split("."):
            assert hasattr(found, part), f"df.{name} is not there"
            found = getattr(found, part)


def test_files_that_are_named_exist():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("https://")]
    rooms = re.findall(r"^([\w/]+(?:\.py)?/?) {2,}\S", section("How it is built"), re.MULTILINE)
    assert links
    assert rooms
    for path in {*links, *rooms}:
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), f"the README names {path}"


def test_modules_import_one_way():
    """Nothing that the README lists imports what it lists below it."""
    chain = re.findall(r"^dynaflow_jax/(\w+)", section("How it is built"), re.MULTILINE)
    rank = {room: i for i, room in enumerate(chain)}
    for room in chain:
        path = ROOT / "dynaflow_jax" / room
        for file in [*path.glob("**/*.py")] or [path.with_suffix(".py")]:
            for imported in re.findall(
                r"^from dynaflow_jax(?:\.(\w+))?.* import (\w+)", file.read_text(), re.MULTILINE
            ):
                below = imported[0] or imported[1]
                assert rank.get(below, -1) <= rank[room], f"{file.name} imports {below}"


def test_tables_are_those_of_the_results():
    assert tables.render(README, tables.load(tables.RESULTS)) == README


ROW = {
    "case": "layers-8",
    "jax_trace_s": 0.5,
    "jax_lower_s": 0.5,
    "jax_compile_s": 3.0,
    "own_share": 0.25,
    "by_hand_us": 2000.0,
    "ours_us": 2010.0,
    "unordered_us": 1990.0,
    "apart": 0.01,
}
RESULT = {"benchmark": "trace_cost", "device": "cpu", "versions": {"jax": "1"}, "date": "2026-01-02", "rows": [ROW]}


def test_a_table_is_written_and_written_again():
    before = "a\n<!-- trace_cost -->\nold\n<!-- /trace_cost -->\nb\n"
    text = tables.render(before, {"trace_cost": [RESULT]})
    assert "| 8 | 4.00 s | 1.00 s | 25% | 2.00 ms | 1.005 | 0.995 | ±0.5% |" in text
    assert "Measured on cpu, JAX 1, 2026-01-02:" in text
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")
    assert tables.render(text, {"trace_cost": [RESULT]}) == text
    assert "No results kept yet" in tables.render(text, {})


def test_the_table_of_one_gpu():
    row = {
        "case": "c",
        "best_xla_us": 30.0,
        "best_xla": "whole, default",
        "ours_us": 20.0,
        "limit_us": 15.0,
        "equal": True,
    }
    assert tables.one_gpu([row]).endswith("| c | 30 µs | whole, default | 20 µs | 1.50 | 15 µs | yes |")


OVERLAP = {
    "case": "tp-256",
    "best_xla_us": 30.0,
    "best_xla": "whole, default",
    "ours_us": 20.0,
    "ours": "k=2",
    "limit_us": 15.0,
    "hidden": 0.667,
    "difference": 0.0123,
    "equal": False,
}


def test_the_tables_of_overlap_begin_with_the_most_tokens():
    same = OVERLAP | {"case": "tp-1024", "ours": "another", "hidden": None, "equal": True}
    lines = tables.overlap([OVERLAP, same]).splitlines()
    assert lines[2] == "| 1024 | 30 µs | whole, default | 20 µs | another | 1.500 | 2.000 |  | same bits |"
    assert lines[3].startswith(
        "| 256 | 30 µs | whole, default | 20 µs | `NanoFlow(2, concurrent=True)` | 1.500 | 2.000 |"
    )
    assert lines[3].endswith("| 67% | 1.2e-02 |")


def test_strategies_of_the_tables_exist():
    for name in (name for names in tables.STRATEGIES.values() for name in names.values()):
        assert eval(f"df.strategies.{name}")


def test_the_table_of_kernels():
    row = OVERLAP | {"case": "matmul_silu-2x3x4", "ours": "wide", "equal": True}
    found = tables.kernels([row, row | {"limit_us": None, "equal": False}]).splitlines()
    assert found[2] == "| `matmul_silu` | 2×3×4 | 30.0 µs | whole, default | 20.0 µs | wide | 1.500 | 2.000 | yes |"
    assert found[3].endswith("| 1.500 |  | no |")


@pytest.mark.parametrize(("kind", "name"), [("tensor", "tp_overlap"), ("expert", "ep_overlap")])
def test_the_gains_it_claims_are_those_of_the_results(kind, name):
    (data,) = tables.load(tables.RESULTS)[name]
    gains = [row["best_xla_us"] / row["ours_us"] for row in data["rows"]]
    claimed = re.search(rf"{kind}-parallel layers (?:are )?(\d\.\d\d) to (\d\.\d\d) times", README)
    assert claimed
    assert [float(number) for number in claimed.groups()] == [
        int(100 * gain) / 100 for gain in (min(gains), max(gains))
    ]


def test_results_that_are_missing_damaged_or_unknown(tmp_path):
    assert tables.load(tmp_path / "nowhere") == {}
    assert tables.load(tmp_path) == {}
    with pytest.raises(ValueError, match="nothing"):
        tables.render("<!-- nothing -->\n<!-- /nothing -->", {})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        tables.load(tmp_path)
