"""Tables of the documentation: written from the benchmarks' results, and written again without a change."""

import pytest

import dynaflow_jax as df
from examples.benchmarks import tables

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
        assert eval(f"strategies.{name}", {"strategies": df.strategies})


def test_the_table_of_kernels():
    row = OVERLAP | {"case": "matmul_silu-2x3x4", "ours": "wide", "equal": True}
    found = tables.kernels([row, row | {"limit_us": None, "equal": False}]).splitlines()
    assert found[2] == "| `matmul_silu` | 2×3×4 | 30.0 µs | whole, default | 20.0 µs | wide | 1.500 | 2.000 | yes |"
    assert found[3].endswith("| 1.500 |  | no |")


def test_results_that_are_missing_damaged_or_unknown(tmp_path):
    assert tables.load(tmp_path / "nowhere") == {}
    assert tables.load(tmp_path) == {}
    with pytest.raises(ValueError, match="nothing"):
        tables.render("<!-- nothing -->\n<!-- /nothing -->", {})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        tables.load(tmp_path)
