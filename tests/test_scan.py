"""asv_bench/scan.py, as far as it goes without a GPU: the grids that it tries, its table, errors."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scan
from fake_device import FakeDevice
from helpers import DTYPES, NORMS, assert_one_line_of_error, exit_status

from cupynorm import bench, cli, dispatch

config = pytest.importorskip("cupynorm.cuda.config")
ON_H200 = config.Device((9, 0), 132, 232448, 4916)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def inputs_of(device: FakeDevice, norm: str, rows: int, columns: int, dtype: str) -> dict[str, Any]:
    """With arrays for the results, as `scan` adds them."""
    shapes = {"x": (rows, columns), "dy": (rows, columns)}
    inputs = {name: device.array(shape, DTYPES[dtype]) for name, shape in shapes.items()}
    inputs |= {"w": device.array((columns,)), "rstd": device.array((rows,))}
    out = [device.array((rows, columns), DTYPES[dtype]), device.array((columns,))]
    if norm == "layernorm":
        inputs["mean"] = device.array((rows,))
        out.append(device.array((columns,)))
    return inputs | {"out": tuple(out)}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"), [(2035, 1024, "float32"), (1017, 4096, "float16"), (254, 16384, "float32")]
)
def test_every_grid_is_launched_as_it_is_named(
    device: FakeDevice, norm: str, rows: int, columns: int, dtype: str
) -> None:
    usual, plan_of = config.walkers.column_blocks_grid, dispatch.plan_of
    case = bench.case(f"{norm}_backward", rows, columns, dtype)
    inputs = inputs_of(device, norm, rows, columns, dtype)
    plans = scan.plans_of(case, inputs, (32, 64))
    dispatch.plan_of = plan_of
    assert config.walkers.column_blocks_grid is usual
    kinds = [kind for _, kind in plans.values()]
    assert sum("chosen" in kind for kind in kinds) == 1
    assert sum("none" in kind for kind in kinds) == 1
    assert len(plans) > 2
    for grid, (plan, _) in plans.items():
        dispatch.plan_of = plan
        try:
            bench.call(case, inputs)
        finally:
            dispatch.plan_of = plan_of
        named = device.launched[-1].named()
        assert (named.partial_rows, named.column_blocks, named.row_parts) == (
            grid.walkers,
            grid.column_blocks,
            grid.row_parts,
        )
        assert named.column_threads == grid.column_threads
        assert plan.cache_info().misses == 1, "timed as it was planned"


def test_few_rows_have_no_grid(device: FakeDevice) -> None:
    plan_of = dispatch.plan_of
    case = bench.case("rmsnorm_backward", 8, 1024, "float16")
    try:
        assert scan.plans_of(case, inputs_of(device, "rmsnorm", 8, 1024, "float16"), (32, 64)) == {}
    finally:
        dispatch.plan_of = plan_of


@pytest.mark.parametrize("columns", [384, 1024, 4096, 5120, 16384, 32768])
def test_grids_have_room(columns: int) -> None:
    from test_config import at_once_on_h200, backward

    for norm in NORMS:
        problem = backward(columns, "float32", "float32", rows=2000, norm=norm)
        chosen = config.backward_config(problem, True, ON_H200)
        at_once = at_once_on_h200(chosen)
        found = list(scan.grids(chosen, problem, at_once, ON_H200, scan.BLOCKS))
        assert found
        for grid in found:
            assert grid.walkers * chosen.slabs + grid.column_blocks <= at_once * chosen.slabs
            assert grid.column_blocks % chosen.cluster == 0
            assert grid.column_threads <= chosen.threads
            slices = -(-columns // (4 * grid.column_threads))
            assert 0 <= grid.column_blocks - slices * grid.row_parts < chosen.cluster
            assert grid.row_parts == 1 or (chosen.slabs == 1 and grid.column_threads >= scan.SHARED_LEAST_THREADS)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import roofline

    grids = [config.Grid(100), config.Grid(68, 64, 4), config.Grid(52, 80, 32, 10)]
    kinds = dict(zip(grids, ("none", "chosen", ""), strict=True))
    times = {"none": 17.5, "chosen": 21.0, "": 17.1}
    monkeypatch.setattr(scan, "scan", lambda *_: [scan.Timed(grid, kind, times[kind]) for grid, kind in kinds.items()])
    monkeypatch.setattr(cli, "usable_cupy", lambda: (np, ""))
    monkeypatch.setattr(roofline, "bound_seconds", lambda row, whole, cupy: 2 * whole.triad_seconds)
    target = tmp_path / "scan.csv"
    given = ["--only", "32", "--sizes", "0.01", "--dtype", "float32", "--csv", str(target)]
    assert exit_status(scan.main, given) == 0
    out = capsys.readouterr().out
    assert "68+64 (4, 1)" in out
    assert "52+80 (32, 10)" in out
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["grid"], line["kind"], line["us"]) for line in lines[:3]] == [
        ("100", "none", "17.50"),
        ("68+64 (4, 1)", "chosen", "21.00"),
        ("52+80 (32, 10)", "", "17.10"),
    ]
    assert len(lines) == 6, "both norms"
    assert scan.summary([scan.Timed(grids[0], "chosen none", 5.0)]) == ["5.0", "5.0", "100", "5.0", "100"]
    assert scan.summary([]) == ["", "", "", "", ""]


def test_other_sums_are_an_error() -> None:
    ones = np.ones((3, 4), np.float32)
    scan.check_same(ones, ones * np.float32(1 + 2e-7), np)
    for other in (ones * np.float32(1 + 2e-6), ones * np.nan):
        with pytest.raises(ArithmeticError, match=r"shape \(3, 4\) differs"):
            scan.check_same(ones, other, np)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "0"], "0"), (["--blocks", "x"], "'x'"), (["--rounds", "0"], "0"), (["--dtype", "int8"], "int8")],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(scan.main, arguments) == 2
    assert message in capsys.readouterr().err


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "usable_cupy", lambda: (None, "none here"))
    assert exit_status(scan.main, []) == 2
    assert_one_line_of_error(capsys, ["a CUDA device and CuPy are needed: none here"])
