"""The table of where kernels measured faster."""

import json
from pathlib import Path

import pytest

from pallas_kernels import measured

TABLE = {"k": {"gpu": {"16x4096": 1.5, "256x4096": 1.2, "1024x4096": 0.9, "16x8192": 1.01}}}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16, 4096), True),
        ((100, 4096), True),  # between two that were faster
        ((256, 4096), True),
        ((512, 4096), False),  # between a faster and a slower one
        ((1024, 4096), False),
        ((8, 4096), True),  # half as few
        ((4, 4096), False),  # too far from what was measured
        ((4096, 4096), False),
        ((16, 8192), False),  # within the spread
        ((16, 1234), False),  # never measured
    ],
)
def test_worthwhile(shape, expected):
    assert measured.worthwhile("k", "gpu", shape, TABLE) is expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((16, 4096), False),  # slower inside of a model, whatever it does by itself
        ((64, 4096), True),  # there too far from what was measured, so by itself
        ((1024, 4096), True),  # and the other way round
        ((16, 1234), False),
    ],
)
def test_worthwhile_in_place(shape, expected):
    table = TABLE | {"k in place": {"gpu": {"16x4096": 0.99} if shape[0] < 1024 else {"1024x4096": 1.1}}}
    assert measured.worthwhile_in_place("k", "gpu", shape, table) is expected


def test_of_two_measurements_the_slower_one_counts():
    assert measured.speedup("k", "gpu", (100, 4096), TABLE) == 1.2
    assert measured.speedup("k", "gpu", (8, 4096), TABLE) == 1.5
    assert measured.speedup("k", "gpu", (4, 4096), TABLE) is None


def test_other_kernels_and_devices_are_not_worthwhile():
    assert not measured.worthwhile("other", "gpu", (16, 4096), TABLE)
    assert not measured.worthwhile("k", "other", (16, 4096), TABLE)


def test_recording_adds_and_replaces():
    table = measured.recorded({}, "k", "gpu", (16, 4096), 1.23456)
    assert table == {"k": {"gpu": {"16x4096": 1.235}}}
    assert measured.recorded(table, "k", "gpu", (16, 4096), 0.5) == {"k": {"gpu": {"16x4096": 0.5}}}
    assert table["k"]["gpu"]["16x4096"] == 1.235


def test_it_is_kept(tmp_path):
    measured.save(TABLE, tmp_path / "table.json")
    assert measured.load(tmp_path / "table.json") == TABLE


def results(name):
    return json.loads((Path(__file__).parents[2] / f"examples/benchmarks/results/{name}.json").read_text())


def test_the_shipped_table_says_what_the_kept_results_of_models_say():
    kept = results("with_kernels")
    for row in kept["rows"]:
        faster = row["equal"] and row["best_xla_us"] / row["ours_us"] >= measured.MARGIN
        for shape in row["shapes"]:
            assert measured.worthwhile_in_place(row["kernel"], kept["device"], shape) is faster, row["case"]


def test_the_shipped_table_says_what_the_kept_results_say():
    kept = results("kernels")
    for row in kept["rows"]:
        kernel, _, shape = row["case"].partition("-")
        if "-" in shape:  # a variant, such as one with a budget of multiprocessors
            continue
        faster = row["equal"] and row["best_xla_us"] / row["ours_us"] >= measured.MARGIN
        assert measured.worthwhile(kernel, kept["device"], [int(n) for n in shape.split("x")]) is faster, row["case"]


def test_the_shipped_table_is_well_formed():
    for devices in json.loads(measured.PATH.read_text()).values():
        for shapes in devices.values():
            for shape, speedup in shapes.items():
                assert all(part.isdigit() for part in shape.split("x"))
                assert speedup > 0
