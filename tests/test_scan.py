"""asv_bench/scan.py, as far as it goes without a GPU: the grids that it tries, its table, sums that differ."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scan
from fake_device import FakeDevice
from helpers import DTYPES, NORMS, exit_status

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
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, norm: str, rows: int, columns: int, dtype: str
) -> None:
    before = config.walkers.column_blocks_grid, config.backward.has_column_blocks, dispatch.plan_of
    case = bench.case(f"{norm}_backward", rows, columns, dtype)
    inputs = inputs_of(device, norm, rows, columns, dtype)
    plans = scan.plans_of(case, inputs, (32, 64))
    assert (config.walkers.column_blocks_grid, config.backward.has_column_blocks, dispatch.plan_of) == before
    kinds = [kind for _, kind in plans.values()]
    assert sum("chosen" in kind for kind in kinds) == 1
    assert sum("none" in kind for kind in kinds) == 1
    assert len(plans) > 2
    for grid, (plan, _) in plans.items():
        monkeypatch.setattr(dispatch, "plan_of", plan)
        bench.call(case, inputs)
        named = device.launched[-1].named()
        launched = named.partial_rows, named.column_blocks, named.column_threads, named.row_parts
        assert launched == tuple(grid)
        assert plan.cache_info().misses == 1, "timed as it was planned"


@pytest.mark.parametrize("columns", [1536, 3072])
def test_none_has_the_blocks_that_there_would_be(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """24 columns a thread of 16-bit types take larger blocks only where column blocks pay beside them."""
    rows = 25_000_000 // (6 * columns)
    case = bench.case("layernorm_backward", rows, columns, "float16")
    inputs = inputs_of(device, "layernorm", rows, columns, "float16")
    plans = scan.plans_of(case, inputs, ())
    threads = {}
    for grid, (plan, kind) in plans.items():
        monkeypatch.setattr(dispatch, "plan_of", plan)
        bench.call(case, inputs)
        named = device.launched[-1].named()
        threads[kind] = named.groups * named.group_threads
        assert bool(grid.column_blocks) == (kind == "chosen")
    assert threads == {"chosen": 256, "none": 128}


def test_few_rows_have_no_grid(device: FakeDevice) -> None:
    case = bench.case("rmsnorm_backward", 8, 1024, "float16")
    assert scan.plans_of(case, inputs_of(device, "rmsnorm", 8, 1024, "float16"), (32, 64)) == {}


@pytest.mark.parametrize("idle", [False, True])
def test_a_row_is_timed_by_turns_once_it_is_checked(monkeypatch: pytest.MonkeyPatch, idle: bool) -> None:
    """By stand-ins: two plans, of which the second, if idle, writes nothing."""
    before = dispatch.plan_of
    one, other = config.Grid(100), config.Grid(68, 64, 4)
    monkeypatch.setattr(scan, "plans_of", lambda *_: {one: ("one", "none"), other: ("other", "chosen")})
    timed: list[str] = []

    def call(case: bench.Case, inputs: dict[str, Any]) -> Any:
        if "out" not in inputs:
            return (np.ones((2, 8), np.float32), np.ones(8, np.float32))
        for array in inputs["out"] if not (idle and dispatch.plan_of == "other") else ():
            array[...] = 1
        return inputs["out"]

    def time_call(function: Any, xp: Any) -> float:
        timed.append(dispatch.plan_of)
        return (5 if dispatch.plan_of == "one" else 3) * 1e-6 * len(timed)

    monkeypatch.setattr(bench, "call", call)
    monkeypatch.setattr(bench, "time_call", time_call)
    options = scan.parse(["--rounds", "3"])
    case = bench.case("rmsnorm_backward", 2, 8, "float32")
    if idle:
        with pytest.raises(ArithmeticError, match="differs from that of the chosen grid"):
            scan.scan(case, {}, options, np)
    else:
        found = scan.scan(case, {}, options, np)
        assert [(time.grid, time.kind) for time in found] == [(one, "none"), (other, "chosen")]
        assert sorted(timed) == ["one"] * 3 + ["other"] * 3
        assert {frozenset(timed[i : i + 2]) for i in (0, 2, 4)} == {frozenset(("one", "other"))}
        first = [timed.index("one") + 1, timed.index("other") + 1]
        assert [time.microseconds for time in found] == pytest.approx([5 * first[0], 3 * first[1]])
    assert dispatch.plan_of is before


@pytest.mark.parametrize("columns", [384, 1024, 4096, 5120, 16384, 32768])
def test_grids_have_room(columns: int) -> None:
    from test_config import at_once_on_h200, backward

    for norm in NORMS:
        problem = backward(columns, "float32", "float32", rows=2000, norm=norm)
        chosen = config.backward_config(problem, 16, ON_H200)
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
