"""asv_bench/compare.py, assembly.py and counters.py: trees side by side, timed and compiled, and what a stand-in for
Nsight Compute reports. And how floor.py, parts.py and scan.py refuse what they cannot do."""

from __future__ import annotations

import csv
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import assembly
import compare
import compiling
import counters
import floor
import numpy as np
import parts
import pytest
import roofline
import scan
from fake_device import FakeDevice
from helpers import assert_one_line_of_error, exit_status

from cupynorm import bench, cli

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--only", "32", "--sizes", "0.01", "--dtype", "float32"]


# --- compare.py -------------------------------------------------------------------------------------------


def test_trees_are_timed_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[int] = []

    def one_turn(script: str, folder: Path, turn: int, arguments: list[str]) -> list[float]:
        assert script == compare.__file__
        assert folder == ROOT
        turns.append(turn)
        return [1e-6 * (turn + 1) * (10 + len(turns) // 3)] * 2

    monkeypatch.setattr(compare, "one_turn", one_turn)
    target = tmp_path / "trees.csv"
    trees = [".", ".:MOST_LEAD=3"]
    assert exit_status(compare.main, [*trees, *TINY, "--device", "numpy", "--csv", str(target)]) == 0
    assert turns == [0, 1, 0, 1, 0, 1]
    out = capsys.readouterr().out.splitlines()
    assert out[1:3] == ["1: .", "2: .:MOST_LEAD=3"]
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["op"] for line in lines] == ["rmsnorm_backward", "layernorm_backward"]
    # Tree 1 read 10, 11, 11 us in its turns, tree 2 20, 22, 24.
    assert {(line["1: us"], line["2: us"], line["2: faster"], line["spread"]) for line in lines} == {
        ("11.0", "22.0", "-50.0%", "9.1%")
    }


@pytest.mark.parametrize("words", [".", ".:MOST_LEAD=3,MOST_LEAD_OF_STAGES={3: 1}", "HEAD"])
def test_a_tree_is_timed_by_a_process_of_its_own(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if words == "HEAD" and not ((ROOT / ".git").exists() and shutil.which("git")):
        pytest.skip("needs git and its history")
    assert exit_status(compare.main, [words, *TINY, "--device", "numpy", "--rounds", "1"]) == 0
    *_, one, another = capsys.readouterr().out.splitlines()
    assert one.split()[:2] == ["rmsnorm_backward", "26x32"]
    assert another.split()[:2] == ["layernorm_backward", "26x32"]
    assert float(one.split()[4]) > 0


def test_settings_reach_the_launch_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all modules that have the name."""
    from cupynorm.cuda import config

    for module in (config.common, config.backward, config.walkers):
        monkeypatch.setattr(module, "STEP_COUNTERS", 2)
    monkeypatch.setattr(config.backward, "MOST_LEAD", 2)
    (row,) = roofline.rows_of(compare.parse([".", *TINY, "--ops", "rmsnorm_backward"]))
    assert len(compare.seconds_of([row], {"MOST_LEAD": 5, "STEP_COUNTERS": 8}, np)) == 1
    assert config.backward.MOST_LEAD == 5
    assert {module.STEP_COUNTERS for module in (config.common, config.backward, config.walkers)} == {8}


@pytest.mark.parametrize("same_out", [False, True])
def test_results_lie_where_they_lay_if_asked(same_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of all calls of a row are kept here, so no two that were allocated lie at one address."""
    calls: dict[str, list[Any]] = {}
    real = compare.bench.call

    def call(case: bench.Case, inputs: dict[str, Any]) -> Any:
        results = real(case, inputs)
        calls.setdefault(case.op, []).append(results)
        return results

    monkeypatch.setattr(compare.bench, "call", call)
    options = compare.parse([".", *TINY, "--set", "sizes,forward", *(["--same-out"] if same_out else [])])
    rows = roofline.rows_of(options)
    assert len(compare.seconds_of(rows, {}, np, same_out=options.same_out)) == len(rows) == 4
    assert set(calls) == {"rmsnorm_backward", "layernorm_backward", "rmsnorm_forward", "layernorm_forward"}
    for results in calls.values():
        places = {tuple(array.ctypes.data for array in of_one) for of_one in results}
        assert len(results) > 12
        assert len(places) == (1 if same_out else len(results))


def test_a_row_is_timed_at_several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory before its arrays that is of the same sizes in every tree; its time is the median."""
    taken: list[int] = []
    real = np.empty

    def empty(shape: Any, dtype: Any = float, **options: Any) -> Any:
        if dtype is np.uint8:
            taken.append(shape)
        return real(shape, dtype, **options)

    seconds = iter([3.0, 9.0, 5.0, 2.0, 4.0, 6.0, 7.0])
    monkeypatch.setattr(np, "empty", empty)
    monkeypatch.setattr(compare, "seconds_of_row", lambda *_: next(seconds))
    options = compare.parse([".", *TINY, "--ops", "rmsnorm_backward", "--places", "3"])
    (row,) = roofline.rows_of(options)
    for expected in (5.0, 4.0):
        assert compare.seconds_of([row], {}, np, places=options.places) == [expected]
    assert taken[:3] == taken[3:]
    assert len({*taken}) == 3
    assert compare.seconds_of([row], {}, np) == [7.0]
    assert taken[6:] == [0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["TREE"]),
        ([".:MOST_LEAD"], ["TREE", "MOST_LEAD", "NAME=VALUE"]),
        ([".:MOST_LEAD=os.getcwd()"], ["TREE", "os.getcwd"]),
        ([".:**{}"], ["TREE", "**{}"]),
        ([".", "--rounds", "0"], ["--rounds", "0"]),
        ([".", "--only", "7"], ["nothing to measure"]),
        (["no-such-commit", *TINY], ["TREE", "no-such-commit"]),
        ([".:NO_SUCH_CHOICE=1", *TINY], ["tree 1", "NO_SUCH_CHOICE"]),
        ([".", *TINY, "--csv", "missing/trees.csv"], ["--csv", "missing"]),
        ([".", *TINY, "--multiprocessors", "92"], ["--multiprocessors", "CUDA"]),
        ([".", *TINY, "--multiprocessors", "0"], ["--multiprocessors", "0"]),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "--only" in arguments and "7" in arguments:
        arguments = [*arguments, "--set", "triton"]
    assert exit_status(compare.main, [*arguments, "--device", "numpy"]) == 2
    assert_one_line_of_error(capsys, words)


# --- assembly.py ------------------------------------------------------------------------------------------

FORWARD = ["--set", "forward", "--sizes", "100", "--ops", "rmsnorm_forward"]


def test_what_trees_compile_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of N=4096 two kernels, of which one is the usual; N=8192, in 8 warps of 32 columns, takes that again."""
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    target = tmp_path / "trees.csv"
    trees = [".", ".", ".:FORWARD_COLUMNS_PER_THREAD={'rmsnorm': {24: (1, 2, 4, 8), 40: (1, 2, 4, 8)}}"]
    arguments = [*trees, *FORWARD, "--only", "4096,8192", "--rounds", "1", "--csv", str(target)]
    assert exit_status(assembly.main, arguments) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [f"{i}: {tree}" for i, tree in enumerate(trees, 1)]
    with target.open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert (line["rows x N"], line["2: same"], line["3: same"]) == ("4069x4096", "yes", "no")
    assert line["1: registers"] == line["2: registers"] != line["3: registers"]
    assert 64 < int(line["1: registers"]) < 255
    assert line["1: spills"] == "0"
    assert float(line["1: s"]) > 0


@pytest.mark.parametrize(
    "options",
    [
        ["--set", "sizes"],
        ["--set", "odd"],
        ["--set", "dtypes"],
        ["--set", "triton"],
        ["--set", "forward", "--only", "256,1001,4096,9999,16384"],
        ["--set", "sizes,forward", "--dtype", "float64", "--only", "512,4096,65536"],
        ["--set", "sizes,forward", "--w-dtype", "bfloat16", "--only", "1024,8191"],
        ["--set", "sizes,odd", "--dx-alone", "--only", "384,1024,4096"],
    ],
)
def test_the_kernel_of_a_row_is_the_one_that_its_call_launches(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the launches of the public functions, on a device that is none."""
    device = FakeDevice(monkeypatch)
    asked: list[tuple[str, tuple[str, ...]]] = []
    make = device._kernel

    def kernel(file: str, name: str, definitions: tuple[str, ...] = ()) -> Any:
        asked.append((file, definitions))
        return make(file, name, definitions)

    monkeypatch.setattr("cupynorm.cuda.launch.kernel", kernel)
    rows = roofline.rows_of(compare.parse([".", "--sizes", "1,300", *options]))
    for row in rows[:: max(1, len(rows) // 8)]:
        case = row.case
        itemsize, columns = case.dtype.itemsize, case.columns
        memory = device.array((columns + row.start,), case.dtype)  # no kernel runs, so one row is enough
        x = device.cupy.ndarray(
            (case.rows, columns),
            case.dtype,
            memory.data + row.start * itemsize,
            strides=((columns + row.gap) * itemsize, itemsize),
        )
        inputs = {"x": x, "w": device.array((columns,), case.w_dtype)}
        statistics = ("mean", "rstd") if case.norm == "layernorm" else ("rstd",)
        statistic = "float64" if case.dtype == np.float64 else "float32"
        if case.backward:
            inputs |= {"dy": x, "output_mask": row.output_mask}
            inputs |= {name: device.array((case.rows,), statistic) for name in statistics}
        elif case.norm == "layernorm":
            inputs["b"] = inputs["w"]
        asked.clear()
        bench.call(case, inputs)
        assert assembly.kernels_of(row) == tuple(asked[: len(assembly.kernels_of(row))]), row


def test_a_line_for_each_kernel() -> None:
    """The fastest of the rounds, spills as they are, and what is the same as in the first tree."""
    rows = roofline.rows_of(compare.parse([".", *FORWARD, "--only", "1024,2048,4096"]))
    usual = assembly.Made("one", "aaa", 100, 24, 2, 0.5)
    slower, other = usual._replace(seconds=0.75), assembly.Made("one", "bbb", 90, 0, 0, 0.25)
    assert assembly.least([slower, usual]) == usual
    longer = usual._replace(kernel="two")
    lines = list(assembly.lines_of(rows, [[usual, longer, usual], [usual, longer, usual], [other, longer, other]]))
    assert [line[1] for line in lines] == ["16276x1024", "8138x2048"]
    assert lines[0][4:12] == ["0.50", "100", "24", "2", "0.50", "100", "24", "2"]
    assert lines[0][12:] == ["0.25", "90", "0", "0", "yes", "no"]
    assert lines[1][-2:] == ["yes", "yes"]


def test_a_changed_instruction_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a source that is compiled with the same definitions; a comment does not."""
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    from cupynorm.cuda import module

    texts = ["float x = *p;", "float x = *p; /* the same */", "float x = 2 * *p;"]
    made = []
    for text in texts:
        monkeypatch.setattr(
            module, "source", lambda *_, t=text: f'extern "C" __global__ void k(float* p) {{ {t} *p = x + 1; }}'
        )
        made.append(assembly.compile_kernel("k.cu", ("N=1",)))
    assert made[0].instructions == made[1].instructions != made[2].instructions
    assert {each.spilled for each in made} == {0}
    assert all(4 < each.registers < 32 for each in made)


def test_kernels_are_compiled_as_cupy_does_it() -> None:
    """What CuPy adds to the options, as its source says it."""
    compiler = pytest.importorskip("cupy.cuda.compiler")
    text = Path(compiler.__file__).read_text(encoding="utf-8")
    assert assembly.OPTIONS_OF_CUPY == compiling.OPTIONS_OF_CUPY
    for option in assembly.OPTIONS_OF_CUPY:
        assert f"options += ('{option}',)" in text, "CuPy compiles in another way now"


def test_instructions_are_all_that_is_compared() -> None:
    """Of an ELF file whose sections are .text.one, .data, .text.two and the names of these."""
    names = b"\0.text.two\0.data\0.text.one\0.shstrtab\0"
    parts = {b".text.two": b"222", b".data": b"ddd", b".text.one": b"1", b".shstrtab": names}
    body, table = b"", b""
    for name, content in parts.items():
        table += struct.pack("2I4Q24x", names.index(name), 1, 0, 0, 64 + len(body), len(content))
        body += content
    header = struct.pack("40xQ10x3H", 64 + len(body), 64, len(parts), len(parts) - 1)
    assert list(assembly.instructions(header + body + table)) == [b".text.one\x001", b".text.two\x00222"]


def encoded(opcode: int, to: int, *registers: int, scoreboard: int = 7, waits: int = 0) -> bytes:
    """An instruction: what it writes, up to three registers that it reads, what it sets and what it waits for."""
    first, second, third = (*registers, *(assembly.RZ,) * 3)[:3]
    low = opcode | 7 << 12 | to << 16 | first << 24 | second << 32
    return struct.pack("<2Q", low, third | scoreboard << 46 | 7 << 49 | waits << 52)


ADD = 0x221


@pytest.mark.parametrize(
    ("use", "moved"),
    [
        (encoded(assembly.MOVE, 4, assembly.RZ, 62, waits=0b100), 1),
        (encoded(assembly.MULTIPLY_ADD, 4, assembly.RZ, assembly.RZ, 62, waits=0b110), 1),
        (encoded(assembly.MULTIPLY_ADD, 4, 5, 6, 62, waits=0b100), 0),  # a product and the sum
        (encoded(assembly.MOVE, 4, assembly.RZ, 63, waits=0b100), 0),  # another register
        (encoded(assembly.MOVE, 4, assembly.RZ, 62, waits=0b010), 0),  # waits for something else
        (encoded(ADD, 4, 62, 62, waits=0b100), 0),
        (encoded(ADD, 4, 1, 1) * 9 + encoded(assembly.MOVE, 4, assembly.RZ, 62, waits=0b100), 0),  # late
        (encoded(ADD, 4, 62, 1, waits=0b100) + encoded(assembly.MOVE, 5, assembly.RZ, 62, waits=0b100), 0),
        (b"", 0),
    ],
)
def test_loads_that_are_moved_at_once(use: bytes, moved: int) -> None:
    """Into register 62, by scoreboard 2, with another instruction between it and what waits; beside it one by none."""
    load = encoded(assembly.LOAD, 62, 8, scoreboard=2)
    silent = encoded(assembly.LOAD, 62, 8) + encoded(assembly.MOVE, 4, assembly.RZ, 62, waits=0b111111)
    assert assembly.loads_moved(load + encoded(ADD, 9, 1, 1) + use) == moved
    assert assembly.loads_moved(silent) == 0


@pytest.mark.parametrize("op", ["rmsnorm_backward", "layernorm_backward"])
@pytest.mark.parametrize("columns", ["128", "4096"])
def test_no_load_is_waited_for_to_be_moved(op: str, columns: str) -> None:
    """Statistics are asked for ahead of their rows. As first written, each batch was waited for (NVRTC 12.9)."""
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    (row,) = roofline.rows_of(compare.parse([".", "--set", "sizes", "--sizes", "1000", "--ops", op, "--only", columns]))
    _, binary, _ = assembly.binary_of(*assembly.kernels_of(row)[0])
    (code,) = (text.split(b"\0", 1)[1] for text in assembly.instructions(binary) if text.startswith(b".text.b"))
    assert len(list(assembly.loads_of(assembly.words_of(code)))) > 20
    assert assembly.loads_moved(code) == 0


def test_what_cannot_be_compiled_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(assembly.main, [".:NO_SUCH_CHOICE=1", *FORWARD, "--only", "128"]) == 2
    assert_one_line_of_error(capsys, ["tree 1", "NO_SUCH_CHOICE"])


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


# --- floor.py, parts.py, scan.py --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (parts, ["--only", "0"], "0"),
        (parts, ["--sizes", "x"], "'x'"),
        (parts, ["--sizes", "25,"], "''"),
        (scan, ["--only", "0"], "0"),
        (scan, ["--blocks", "x"], "'x'"),
        (scan, ["--rounds", "0"], "0"),
        (scan, ["--dtype", "int8"], "int8"),
    ],
)
def test_bad_arguments(script: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(script.main, arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("script", [floor, parts, scan])
def test_without_a_device_it_says_so(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "usable_cupy", lambda: (None, "none here"))
    assert exit_status(script.main, []) == 2
    assert_one_line_of_error(capsys, ["a CUDA device and CuPy are needed: none here"])


# --- all scripts ------------------------------------------------------------------------------------------


WITH_OPTIONS = [path for path in (ROOT / "asv_bench").glob("*.py") if "Parser(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", sorted(WITH_OPTIONS), ids=lambda path: str(path.name))
def test_help_needs_no_more_than_ascii(path: Path) -> None:
    if path.name == "cpu_peers.py":
        pytest.importorskip("torch")
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(path), "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("roofline.py", ["--sizes", "1e13"], "at most 2^40"),
        ("roofline.py", ["--sizes", "0"], "a number above 0 is needed"),
        ("roofline.py", ["--gap", "-1"], "a number above 0 is needed"),
        ("cpu_peers.py", ["--threads", "9999999999"], "at most 1024"),
        ("cpu_peers.py", ["--calls", "none"], "a number above 0 is needed"),
    ],
)
def test_numbers_that_scripts_refuse(script: str, options: list[str], words: str) -> None:
    if script == "cpu_peers.py":
        pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "asv_bench" / script), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr
