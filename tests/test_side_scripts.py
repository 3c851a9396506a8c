"""asv_bench/compare.py and counters.py: trees side by side, and what a stand-in for Nsight Compute reports."""

from __future__ import annotations

import csv
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import counters
import numpy as np
import pytest
import roofline
from helpers import assert_one_line_of_error, exit_status

from cupynorm import bench, cli

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--only", "32", "--sizes", "0.01", "--dtype", "float32"]


# --- compare.py -------------------------------------------------------------------------------------------


def test_trees_are_timed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[int] = []

    def one_turn(folder: Path, turn: int, arguments: list[str]) -> list[float]:
        assert folder == ROOT
        turns.append(turn)
        return [1e-6 * (turn + 1) * (10 + len(turns) // 3)] * 2

    monkeypatch.setattr(compare, "one_turn", one_turn)
    target = tmp_path / "trees.csv"
    trees = [".", ".:DRAWN_LEAST_STEPS=3"]
    assert exit_status(compare.main, [*trees, *TINY, "--device", "numpy", "--csv", str(target)]) == 0
    assert turns == [0, 1, 0, 1, 0, 1]
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == ["1: .", "2: .:DRAWN_LEAST_STEPS=3"]
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["op"] for line in lines] == ["rmsnorm_backward", "layernorm_backward"]
    # Tree 1 read 10, 11, 11 us in its turns, tree 2 20, 22, 24.
    assert {(line["1: us"], line["2: us"], line["2: faster"], line["spread"]) for line in lines} == {
        ("11.0", "22.0", "-50.0%", "9.1%")
    }


@pytest.mark.parametrize(
    "words", [".", ".:DRAWN_LEAST_STEPS=3,STAGED_SINGLE_COLUMNS_RING_BYTES={'rmsnorm': 1}", "HEAD"]
)
def test_a_tree_is_timed_by_a_process_of_its_own(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if words == "HEAD" and not ((ROOT / ".git").exists() and shutil.which("git")):
        pytest.skip("needs git and its history")
    assert exit_status(compare.main, [words, *TINY, "--device", "numpy", "--rounds", "1"]) == 0
    *_, one, another = capsys.readouterr().out.splitlines()
    assert one.split()[:2] == ["rmsnorm_backward", "26x32"]
    assert another.split()[:2] == ["layernorm_backward", "26x32"]
    assert float(one.split()[4]) > 0


def test_settings_reach_the_launch_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynorm.cuda import config

    monkeypatch.setattr(config, "DRAWN_LEAST_STEPS", 2)
    (row,) = roofline.rows_of(compare.parse([".", *TINY, "--ops", "rmsnorm_backward"]))
    assert len(compare.seconds_of([row], {"DRAWN_LEAST_STEPS": 5}, np)) == 1
    assert config.DRAWN_LEAST_STEPS == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["TREE"]),
        ([".:DRAWN_LEAST_STEPS"], ["TREE", "DRAWN_LEAST_STEPS", "NAME=VALUE"]),
        ([".:DRAWN_LEAST_STEPS=os.getcwd()"], ["TREE", "os.getcwd"]),
        ([".:**{}"], ["TREE", "**{}"]),
        ([".", "--rounds", "0"], ["--rounds", "0"]),
        ([".", "--only", "7"], ["nothing to measure"]),
        (["no-such-commit", *TINY], ["TREE", "no-such-commit"]),
        ([".:NO_SUCH_CHOICE=1", *TINY], ["tree 1", "NO_SUCH_CHOICE"]),
        ([".", *TINY, "--csv", "missing/trees.csv"], ["--csv", "missing"]),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "--only" in arguments and "7" in arguments:
        arguments = [*arguments, "--set", "triton"]
    assert exit_status(compare.main, [*arguments, "--device", "numpy"]) == 2
    assert_one_line_of_error(capsys, words)


# --- counters.py ------------------------------------------------------------------------------------------

# Writes what ncu writes, for a call of two kernels and its triad, once for each of two rows.
STAND_IN = """#!{python}
import sys

metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
assert "--profiled" in sys.argv and "off" == sys.argv[sys.argv.index("--profile-from-start") + 1]
values = {{"gpu__time_duration.sum": "12,345", "launch__registers_per_thread": "96", "sm__cycles_active.min": "60",
          "sm__cycles_active.max": "80", "smsp__inst_executed.sum": "52", "dram__bytes_read.sum": "3200"}}
with open(sys.argv[sys.argv.index("--log-file") + 1], "w") as log:
    print("==PROF== Connected to process 1", file=log)
    {error}
    print(",".join(f'"{{name}}"' for name in ["ID", "Kernel Name", *metrics]), file=log)
    print(",".join('"byte"' if name.startswith("dram") else '""' for name in ["", "", *metrics]), file=log)
    names = ["backward_split_sums", "backward_split_apply(BackwardArguments)", "triad(const float *)"] * 2
    for number, name in enumerate(names[:{kernels}]):
        cells = [str(number), name, *(values.get(metric, "n/a") for metric in metrics)]
        print(",".join(f'"{{cell}}"' for cell in cells), file=log)
"""


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "usable_cupy", lambda: (np, ""))


def stand_in(folder: Path, kernels: int = 6, error: str = "pass") -> str:
    program = folder / "ncu"
    program.write_text(STAND_IN.format(python=sys.executable, kernels=kernels, error=error))
    program.chmod(0o755)
    return str(program)


@pytest.mark.usefixtures("on_a_device")
def test_each_kernel_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "counters.csv"
    assert exit_status(counters.main, [*TINY, "--ncu", stand_in(tmp_path), "--csv", str(target)]) == 0
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    kernels = ["backward_split_sums", "backward_split_apply", "triad"]
    assert [(line["op"], line["kernel"]) for line in lines] == [
        (op, kernel) for op in ("rmsnorm_backward", "layernorm_backward") for kernel in kernels
    ]
    for line in lines:
        # 26 rows of 32 columns; 52 instructions of a warp are two of a thread for each element
        assert (line["us"], line["registers"], line["per element"]) == ("12.3", "96", "2.0")
        assert (line["least busy %"], line["issue %"]) == ("75.0", "nan")
        assert line["read MB"] == "0.0"
    assert capsys.readouterr().out.count("26x32") == 6


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": 5}, ["no triad", "layernorm_backward 26x32"]),
        ({"kernels": 0}, ["no triad", "rmsnorm_backward 26x32"]),
        ({"error": 'print("==ERROR== ERR_NVGPUCTRPERM", file=log)'}, ["ERR_NVGPUCTRPERM"]),
        ({"error": "sys.exit(1)"}, ["failed", "no reason given"]),
    ],
)
def test_what_ncu_does_not_say_is_said_in_one_line(
    options: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_status(counters.main, [*TINY, "--ncu", stand_in(tmp_path, **options)]) == 2
    assert_one_line_of_error(capsys, words)


@pytest.mark.usefixtures("on_a_device")
def test_without_ncu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(counters.main, [*TINY, "--ncu", str(tmp_path / "none")]) == 2
    assert "--ncu" in capsys.readouterr().err


def test_under_the_profiler_each_row_ends_with_its_triad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    runtime = SimpleNamespace(profilerStart=lambda: seen.append("start"), profilerStop=lambda: seen.append("stop"))
    stream = SimpleNamespace(synchronize=lambda: None)
    cupy = SimpleNamespace(ones=np.ones, cuda=SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream))
    monkeypatch.setattr(bench, "cuda_triad", lambda *_: lambda: seen.append("triad"))
    monkeypatch.setattr(bench, "call", lambda case, inputs: seen.append(case.op))
    monkeypatch.setattr(roofline, "inputs_of", lambda row, xp: {})
    monkeypatch.setattr(cli, "usable_cupy", lambda: (cupy, ""))
    target = tmp_path / "counters.csv"
    target.write_text("of the process that profiles")
    assert exit_status(counters.main, [*TINY, "--profiled", "--csv", str(target)]) == 0
    assert target.read_text() == "of the process that profiles"
    assert seen == [
        step
        for op in ("rmsnorm_backward", "layernorm_backward")
        for step in (op, "triad", "start", op, "triad", "stop")
    ]
