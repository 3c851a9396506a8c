"""asv_bench/peers.py and roofline.py: their tables, files and errors, on NumPy arrays and small sizes."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import peers
import pytest
import record
import roofline
from helpers import assert_one_line_of_error, exit_status

from cupynorm import bench

SMALL = [  # figures may read 0.0
    "--device",
    "numpy",
    "--rows",
    "16",
    "--n",
    "32,48",
    "--repeats",
    "1",
    "--dtype",
    "float32",
]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# --- the table, CSV and the pictures ----------------------------------------------------------------------


def double(inputs: Any) -> Any:
    """A peer that is off by a factor."""
    return lambda: tuple(2 * gradient for gradient in honest(inputs)())


def honest(inputs: Any) -> Any:
    arrays = [inputs.x, inputs.w, inputs.dy, *([inputs.mean] if inputs.is_layernorm else []), inputs.rstd]
    import cupynorm

    return lambda: getattr(cupynorm, inputs.case.op)(*arrays)


def refuses(inputs: Any) -> Any:
    if inputs.columns == 48:
        raise RuntimeError("only 32 columns\nand a long story")
    return honest(inputs)


@pytest.fixture
def fake_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that need no other framework: arrays stay NumPy's."""
    monkeypatch.setattr(peers, "to_torch", lambda array: array)
    monkeypatch.setattr(
        peers,
        "PEERS",
        {
            "honest": (honest, "numpy", "numpy", True),
            "wrong": (double, "numpy", "numpy", True),
            "choosy": (refuses, "numpy", "numpy", True),
            "missing": (honest, "no_such_module", "no-such-package", True),
            "gpu": (honest, "numpy", "numpy", False),
        },
    )


@pytest.mark.usefixtures("fake_peers")
def test_table_csv_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "peers.csv"
    options = ["--peers", "honest,wrong,choosy,missing,gpu", "--csv", str(target)]
    assert exit_status(peers.main, [*SMALL, *options]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split(",")[1].strip() == "CPU"
    assert "commit" in out[1]
    assert f"numpy {np.__version__}" in out[2]
    head, _, *rows = (cells(line) for line in out if line.startswith("|"))
    assert head[:8] == ["op", "M x N", "dtype x/w", "triad", "cupynorm", "honest", "wrong", "choosy"]
    assert [row[:2] for row in rows] == [
        [f"{norm}_backward", f"16x{columns}"] for norm in ("rmsnorm", "layernorm") for columns in (32, 48)
    ]
    for row in rows:
        figures = dict(zip(head, row, strict=True))
        assert float(figures["cupynorm"]) >= 0
        assert float(figures["honest"]) >= 0
        assert figures["wrong"] == "-"
        assert (figures["choosy"] == "-") == (figures["M x N"] == "16x48")
        assert float(figures["cupynorm / best peer"]) > 0
    assert "absent: missing: ModuleNotFoundError: No module named 'no_such_module'" in out
    assert "absent: gpu: needs CUDA" in out
    assert "-: rmsnorm_backward 16x48 float32 choosy: RuntimeError: only 32 columns" in out
    assert any(line.startswith("-: rmsnorm_backward 16x32 float32 wrong: dx is off by 1.0e+00") for line in out)

    lines = target.read_text(encoding="utf-8").splitlines()
    assert lines[:3] == [f"# {line}" for line in out[:3]]
    table = list(csv.DictReader(lines[3:]))
    assert len(table) == 4 * 4
    for line in table:
        assert bool(line["seconds"]) != bool(line["reason"])
        if line["seconds"]:
            assert float(line["gbps"]) == pytest.approx(
                int(line["bytes"]) / float(line["seconds"]) / 1e9, rel=0.1, abs=0.01
            )
            assert float(line["error_dx"]) < 1e-6
    assert list(tmp_path.iterdir()) == [target]


def test_the_fields_shapes() -> None:
    cases = peers.cases_of(peers.parse(["--field"]))
    assert len({(case.op, case.shape, case.dtypes) for case in cases}) == len(cases) == 56
    of_norm = peers.cases_of(peers.parse(["--field", "--norm", "layernorm", "--n", "4096"]))
    assert [(case.shape, case.dtypes) for case in of_norm] == [
        ("32768x4096", "bfloat16/float32"),
        ("4096x4096", "float16"),
    ]


@pytest.mark.usefixtures("fake_peers")
@pytest.mark.parametrize("norms", [["rmsnorm"], ["rmsnorm", "layernorm"]])
def test_pictures(norms: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--norm", *norms, "--peers", "honest,choosy,gpu", "--plot", str(tmp_path / "peers.png")]
    assert exit_status(peers.main, [*SMALL, *options]) == 0
    names = ["peers.png"] if len(norms) == 1 else ["peers-layernorm.png", "peers-rmsnorm.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pytorch_on_the_cpu(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    assert exit_status(peers.main, [*SMALL, "--dtype", dtype, "--peers", "eager,aten"]) == 0
    out = capsys.readouterr().out.splitlines()
    head, _, *rows = (cells(line) for line in out if line.startswith("|"))
    figures = {(row[0], row[1]): dict(zip(head, row, strict=True)) for row in rows}
    assert len(figures) == 4
    for (op, _), row in figures.items():
        assert float(row["eager"]) >= 0
        if op == "layernorm_backward" and dtype == "float32":
            assert float(row["aten"]) >= 0


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "peers.csv"
    target.write_text("older figures")
    monkeypatch.setattr(bench, "measure_triad", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    assert exit_status(peers.main, [*SMALL, "--peers", "aten", "--csv", str(target)]) == 1
    assert target.read_text() == "older figures"
    assert list(tmp_path.iterdir()) == [target]


def test_a_copy_is_of_bytes_that_are_copied_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    xp = SimpleNamespace(zeros=lambda size, dtype: sizes.append(size), empty=lambda size, dtype: sizes.append(size))
    monkeypatch.setattr(roofline.bench, "time_call", lambda function, xp: 1e-6)
    each = roofline.copy_seconds_per_byte.__wrapped__(xp, 33_333_248)
    assert sizes == [33_357_824, 33_357_824]  # 509 times 64 KiB
    assert each == 1e-6 / (2 * 33_357_824)


# --- the roofline's shapes ------------------------------------------------------------------------------


def rooflines_rows(*arguments: str) -> list[Any]:
    rows: list[Any] = roofline.rows_of(roofline.parse(arguments))
    return rows


def test_sets() -> None:
    count = {name: len(rooflines_rows("--set", name)) for name in roofline.SETS}
    assert count["sizes"] == 2 * 25 * 3
    assert count["pytorch"] == 2 * 15
    assert count["triton"] == 30
    assert count["dtypes"] == 2 * 4 * 3 * 2
    assert count["forward"] == 2 * 25 * 2
    assert len(rooflines_rows("--set", "all")) == len(set(rooflines_rows("--set", "all"))) <= sum(count.values())
    assert rooflines_rows() == rooflines_rows("--set", "sizes")
    triton = rooflines_rows("--set", "triton")
    assert [row.case.columns for row in triton] == list(range(1024, 15873, 512))
    assert {(row.case.rows, row.case.dtypes, row.case.has_bias) for row in triton} == {(4096, "float16", True)}
    small = rooflines_rows("--set", "small")
    assert min(row.case.rows for row in small) == 1
    assert max(row.data_bytes for row in small) < 25e6
    assert not any(row.alignment == 16 for row in rooflines_rows("--set", "odd"))
    assert all(row.alignment == 16 for row in rooflines_rows("--set", "pytorch"))
    assert {row.case.columns for row in rooflines_rows("--set", "all", "--only", "4096")} == {4096}
    apart = rooflines_rows("--set", "sizes,forward", "--gap", "64")
    assert [replace(row, gap=0) for row in apart] == rooflines_rows("--set", "sizes,forward")
    of_two_types = rooflines_rows(
        "--dtype", "float32", "--dy-dtype", "bfloat16", "--only", "1001,1004,1024", "--sizes", "6"
    )
    assert {row.alignment for row in of_two_types if row.case.columns != 1024} == {2, 8}
    assert all(abs(row.data_bytes / 6e6 - 1) < 0.01 and row.layout == "dense, dy bfloat16" for row in of_two_types)
    assert {row.bytes - row.case.bytes for row in of_two_types if row.case.columns == 1024} == {-2 * 586 * 1024}
    assert roofline.inputs_of(of_two_types[0], np)["dy"].dtype.name == "bfloat16"
    assert rooflines_rows("--dy-dtype", "bfloat16") == rooflines_rows()
    alone = rooflines_rows("--set", "sizes,forward", "--dx-alone")
    assert [replace(row, dx_alone=False) for row in alone] == rooflines_rows("--set", "sizes")
    assert {row.output_mask for row in alone} == {(True, False), (True, False, False)}
    assert {row.layout for row in apart} == {"stride N+64, start 0"}
    for name in ("sizes", "dtypes", "odd", "forward"):
        megabytes = {
            round(row.data_bytes / 1e6) for row in rooflines_rows("--set", name, "--only", "1001", "--sizes", "6,48")
        }
        assert megabytes == {6, 48}


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("start", [0, 1])
def test_spread_keeps_the_numbers(gap: int, start: int) -> None:
    row = roofline.Row(bench.case("rmsnorm_backward", 5, 7), gap, start)
    numbers = np.arange(35, dtype=np.float32).reshape(5, 7)
    view = roofline.spread(numbers, row, np)
    assert (view == numbers).all()
    assert view.strides == (4 * (7 + gap), 4)
    assert view.ctypes.data - view.base.ctypes.data == 4 * start


def test_rooflines_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from cupynorm import cli

    def measure_case(case: bench.Case, inputs: dict[str, Any], xp: Any) -> bench.Measurement:
        return bench.Measurement(case, "stand-in", 115e-6, bench.Triad(1e-4, case.bytes), 1e-6)

    monkeypatch.setattr(cli, "usable_cupy", lambda: (np, ""))
    monkeypatch.setattr(bench, "make_inputs", lambda case, xp: {"x": np.ones((2, 8)), "dy": np.ones((2, 8))})
    monkeypatch.setattr(bench, "measure_case", measure_case)
    target = tmp_path / "roofline.csv"
    assert (
        exit_status(roofline.main, ["--set", "sizes,odd", "--only", "1024", "--sizes", "100", "--csv", str(target)])
        == 0
    )
    out = capsys.readouterr().out
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    # 115 us against 100 / 0.975 + 2 and 100 / 0.97 + 2.5, and against 100 / 0.90 + 3 off 16-byte boundaries
    assert [(line["layout"] == "dense", line["meets"]) for line in lines if line["op"] == "rmsnorm_backward"] == [
        (True, "no"), (False, "no"), (False, "no"), (False, "no"),
    ]  # fmt: skip
    assert {line["bound us"] for line in lines} == {"104.6", "105.6", "114.1"}
    assert out.count("1024 ") >= len(lines) == 8
    assert out.endswith("0 of 8 meet their bound: sizes 0 of 2, odd 0 of 8\n")


def test_how_many_rows_of_each_set_meet_their_bound() -> None:
    options = roofline.parse(["--set", "sizes,odd,triton", "--sizes", "100", "--only", "1024"])
    met = {row for row in roofline.rows_of(options) if row.gap or row.case.norm == "rmsnorm"}
    assert roofline.of_sets(met, options) == ": sizes 1 of 2, odd 6 of 8, triton 0 of 1"  # N=1024 as it lies is in two
    options = roofline.parse(["--set", "sizes"])
    assert roofline.of_sets(set(), options) == ""


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (peers, ["--norm", "batchnorm"], ["--norm", "batchnorm", "layernorm"]),
        (peers, ["--n", "32x"], ["--n", "32x"]),
        (peers, ["--n", "0"], ["--n", "'0'"]),
        (peers, ["--n", ""], ["--n"]),
        (peers, ["--rows", "-3"], ["--rows", "-3"]),
        (peers, ["--data", "much"], ["--data", "much"]),
        (peers, ["--data", "nan"], ["--data", "nan"]),
        (peers, ["--data", "1", "--rows", "1"], ["--data", "--rows"]),
        (peers, ["--dtype", "int32"], ["--dtype", "int32", "bfloat16"]),
        (peers, ["--w-dtype", "double"], ["--w-dtype", "double", "float64"]),
        (peers, ["--peers", "aten,thunder"], ["--peers", "thunder", "liger"]),
        (peers, ["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (peers, ["--csv", "missing/peers.csv"], ["--csv", "missing"]),
        (peers, ["--csv", "."], ["--csv", "not a regular file"]),
        (peers, ["--plot", "missing/peers.png"], ["--plot", "missing"]),
        (peers, ["--plot", "peers.docx"], ["--plot", "peers.docx", ".png"]),
        (peers, ["--csv", "one.png", "--plot", "one.png"], ["--csv", "--plot", "one.png"]),
        (peers, ["--frobnicate"], ["--frobnicate"]),
        (peers, ["--field", "--dtype", "float32"], ["--field", "--dtype"]),
        (peers, ["--field", "--data", "25"], ["--field", "--data"]),
        (peers, ["--field", "--plot", "peers.png"], ["--field", "--plot"]),
        (peers, ["--field", "--n", "100"], ["--field", "--n"]),
        (roofline, ["--set", "sizes,nothing"], ["--set", "nothing", "pytorch"]),
        (roofline, ["--ops", "softmax"], ["--ops", "softmax", "rmsnorm_backward"]),
        (roofline, ["--sizes", "25,x"], ["--sizes", "x"]),
        (roofline, ["--only", "0"], ["--only", "0"]),
        (roofline, ["--only", "1073741825"], ["--only", "1073741824"]),
        (roofline, ["--dtype", "int32"], ["--dtype", "int32", "bfloat16"]),
        (roofline, ["--csv", "missing/roofline.csv"], ["--csv", "missing"]),
        (record, [], ["COMMIT"]),
        (record, ["HEAD", "--python", "no/such/python"], ["--python", "no/such/python"]),
        (record, ["HEAD", "--machine", "../up"], ["--machine", "../up"]),
        (record, ["HEAD", "--bench", "("], ["--bench", "("]),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    module: ModuleType,
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "time_call", lambda *_, **__: pytest.fail("measured before the input was checked"))
    assert exit_status(module.main, arguments) == 2
    assert_one_line_of_error(capsys, words)
    assert list(tmp_path.iterdir()) == []


def test_the_fields_cases_need_a_gpu_unless_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert exit_status(peers.main, ["--field"]) == 2
    assert_one_line_of_error(capsys, ["a CUDA device and CuPy are needed"])


@pytest.mark.parametrize("options", [[], ["--field"]])
def test_peers_without_bfloat16(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert exit_status(peers.main, options) == 2
    assert_one_line_of_error(capsys, ["ml_dtypes"])


@pytest.mark.parametrize("keeps_others", [False, True])
def test_a_commit_that_is_measured_anew(keeps_others: bool, tmp_path: Path) -> None:
    """Of some benchmarks, it keeps the others' figures."""
    about = {"python": "3.11.7", "numpy": "2.4.6"}
    for name, figure in (("one", 1), ("two", 2), ("one", 3)):
        of_asv = tmp_path / "01234567-existing-path.json"
        result = {"commit_hash": "0123456789", "params": {}, "results": {name: [[figure]]}, "durations": {name: 1.0}}
        of_asv.write_text(json.dumps(result), encoding="utf-8")
        assert record.rename_environment(of_asv, about, keeps_others) == []
    (target,) = tmp_path.iterdir()
    assert target.name == "01234567-existing-py3.11-numpy2.4.6.json"
    found = json.loads(target.read_text(encoding="utf-8"))
    assert found["results"] == {"one": [[3]]} | ({"two": [[2]]} if keeps_others else {})
    assert found["durations"].keys() == found["results"].keys()


def test_benchmarks_that_failed_are_named(tmp_path: Path) -> None:
    """They have no figure; what is not available is NaN."""
    of_asv = tmp_path / "01234567-existing-path.json"
    results = {"benchmarks.A": [None, []], "B": [[1.0, None], []], "C": [[1.0, float("nan")], []], "D": [[2.0], []]}
    of_asv.write_text(json.dumps({"commit_hash": "0123456789", "params": {}, "results": results}), encoding="utf-8")
    assert record.rename_environment(of_asv, {"python": "3.11.7"}, keeps_others=False) == ["A", "B"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize(
    "own_group",
    [
        "{}",
        pytest.param(  # as asv's have
            "dict(preexec_fn=__import__('os').setpgrp)",
            marks=pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no Linux"),
        ),
    ],
    ids=["one group", "a group of its own"],
)
def test_record_ends_what_it_has_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_group: str) -> None:
    """With it, and not only the first process of these."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    inner = f"import time; pipe = open({str(pipe)!r}, 'w'); print('here', file=pipe, flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], **{own_group})"
    wait = subprocess.Popen.wait

    with contextlib.ExitStack() as files:

        def interrupted(process: Any, timeout: float | None = None) -> int:
            monkeypatch.setattr(subprocess.Popen, "wait", wait)
            files.said = files.enter_context(pipe.open())  # type: ignore[attr-defined]
            assert files.said.readline() == "here\n"  # type: ignore[attr-defined]
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            record.run_to_the_end([sys.executable, "-c", outer], {**os.environ})
        assert files.said.read() == ""  # type: ignore[attr-defined]  # it ends when nobody writes any more
        assert time.monotonic() - begin < 30


def test_the_commit_is_of_what_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "cupynorm" / "bench.py"))
    assert peers.commit() == f"unknown: {tmp_path / 'cupynorm'}"


def test_record_names_an_unknown_commit(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("asv")
    assert exit_status(record.main, ["no-such-commit"]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "no-such-commit" in error
