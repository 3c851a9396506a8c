"""The command line: what it prints, its exit status, what it leaves on disk. On NumPy, small sizes."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_one_line_of_error

import cupynorm
from cupynorm import __main__ as command_line
from cupynorm import accuracy, bench, cli, report

ONE = ["bench", "--op", "rmsnorm_backward", "--shape", "16x64", "--dtype", "float32", "--device", "numpy"]


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return started([sys.executable, "-m", "cupynorm", *arguments], cwd)


def run_in_a_shell(line: str) -> subprocess.CompletedProcess[str]:
    """Arguments, and where output goes."""
    return started(["sh", "-c", f"{shlex.quote(sys.executable)} -m cupynorm {line}"])


def started(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(cupynorm.__file__).parent.parent)}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False)


def main_in_process(*arguments: str) -> int:
    """The exit status, whether returned or raised by argparse."""
    try:
        return command_line.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)


# --- the main job -----------------------------------------------------------------------------------------


def test_main_job_checks_everything_and_prints_one_table() -> None:
    done = run("--quick", "--device", "numpy")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar where stderr is no terminal
    lines = done.stdout.splitlines()
    assert "NumPy arrays" in lines[0]
    head = next(line for line in lines if line.startswith("op "))
    for column in ("rows x N", "dtype x/w", "time ms", "GB/s", "of triad", "error", "verdict"):
        assert column in head
    verdicts = [line for line in lines if re.match(r"(rms|layer)norm_(for|back)ward +\d+x\d+ ", line)]
    assert {line.split()[0] for line in verdicts} == set(bench.OPS)
    assert {"float32", "float16/float32", "bfloat16/float32"} == {line.split()[2] for line in verdicts}
    assert all(line.endswith("ok") for line in verdicts)
    assert lines[-1] == f"{len(verdicts)} of {len(verdicts)} cases agree with float64."


@pytest.mark.parametrize("broken_output", [0, 1])
def test_wrong_result_fails(
    broken_output: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = cupynorm.rmsnorm_backward

    def broken(*args: object, **options: object) -> tuple[object, ...]:
        results = honest(*args, **options)  # type: ignore[arg-type]
        results[broken_output][..., 3] *= 2
        return results

    monkeypatch.setattr(cupynorm, "rmsnorm_backward", broken)
    assert main_in_process("--quick", "--device", "numpy") == 1
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if re.match(r"\w+norm_\w+ward +\d", line)]
    for line in rows:
        assert line.endswith("FAIL" if line.startswith("rmsnorm_backward") else "ok"), line
    failure = next(line for line in out.splitlines() if line.startswith("FAIL rmsnorm_backward 128x256 float32"))
    assert f"{('dx', 'dw')[broken_output]} is off by" in failure


def test_nan_fails() -> None:
    case = bench.case("layernorm_forward", 5, 64)
    inputs = bench.make_inputs(case)
    y, mean, rstd = bench.call(case, inputs)
    y[2, 3] = np.nan
    errors = {error.name: error for error in accuracy.check(case, inputs, (y, mean, rstd))}
    assert not errors["y"].ok
    assert errors["mean"].ok
    assert errors["rstd"].ok
    assert accuracy.worst(list(errors.values())).name == "y"


def test_check_in_pieces_agrees_with_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.case("layernorm_backward", 37, 64, "float32")
    inputs = bench.make_inputs(case)
    outputs = bench.call(case, inputs)
    whole = accuracy.check(case, inputs, outputs)
    monkeypatch.setattr(accuracy, "_PIECE", 5 * 64)
    for one, other in zip(whole, accuracy.check(case, inputs, outputs), strict=True):
        assert one.name == other.name
        assert one.error == pytest.approx(other.error, rel=1e-6)


@pytest.mark.gpu
def test_main_job_on_cuda() -> None:
    done = run("--quick", "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compute capability" in done.stdout.splitlines()[0]
    assert "time us" in done.stdout


# --- info -------------------------------------------------------------------------------------------------


def test_info_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user whom nobody knows has none, in a container, say."""
    pytest.importorskip("cupy")
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Path.expanduser() then raises
    assert main_in_process("info") == 0
    assert "~/.cupy/kernel_cache" in capsys.readouterr().out


def test_info_names_versions_and_places(tmp_path: Path) -> None:
    done = run("info", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert found["cupynorm"].startswith(cupynorm.__version__)
    assert found["numpy"] == np.__version__
    count, folder = re.fullmatch(r"(\d+) files in (.*)", found["kernels_cu"]).groups()  # type: ignore[union-attr]
    assert int(count) == len(list(Path(folder).glob("*.cu*"))) > 0


# --- bench ------------------------------------------------------------------------------------------------


def test_bench_measures_every_combination(tmp_path: Path) -> None:
    target = tmp_path / "figures.csv"
    done = run(
        "bench", "--op", "rmsnorm_backward", "layernorm_forward", "--shape", "16x64", "--shape", "8x100",
        "--dtype", "float32", "float64", "--device", "numpy", "--csv", str(target),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    cases = {(row["op"], row["rows"], row["columns"], row["dtype"], row["w_dtype"]) for row in rows}
    assert cases == {
        (op, rows, columns, dtype, dtype)
        for op in ("rmsnorm_backward", "layernorm_forward")
        for rows, columns in (("16", "64"), ("8", "100"))
        for dtype in ("float32", "float64")
    }
    for row in rows:
        seconds, triad, fraction = (float(row[name]) for name in ("seconds", "triad_seconds", "fraction"))
        assert fraction == pytest.approx(triad / seconds, rel=1e-2)
        assert float(row["gbps"]) == pytest.approx(int(row["bytes"]) / seconds / 1e9, rel=0.1, abs=0.01)
    assert list(tmp_path.iterdir()) == [target]
    assert done.stdout.count("rmsnorm_backward") == 4


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((2.5, 3), "float32", TypeError, "integer"),
        ((2, 1 << 31), "float32", ValueError, "1073741824"),
        ((2, 0), "float32", ValueError, "empty"),
        ((2, 3), "float8", ValueError, "float8"),
    ],
)
def test_cases_that_are_none(shape: tuple[int, int], dtype: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bench.case("rmsnorm_forward", *shape, dtype)


def test_bytes_that_the_work_needs() -> None:
    rows, columns = 32768, 4096
    x = rows * columns
    case = bench.case("rmsnorm_backward", rows, columns, "bfloat16", "float32")
    assert case.bytes == 3 * 2 * x + 2 * 4 * columns + 4 * rows  # x dy dx, w dw, rstd
    case = bench.case("layernorm_backward", rows, columns, "float32")
    assert case.bytes == 3 * 4 * x + 3 * 4 * columns + 2 * 4 * rows  # … and db, which needs no b; mean
    case = bench.case("layernorm_forward", rows, columns, "float16", has_bias=True)
    assert case.bytes == 2 * 2 * x + 2 * 4 * columns + 2 * 4 * rows  # x y, w b, mean rstd


def test_what_cases_and_timers_refuse() -> None:
    for name in (None, 5, "int32"):
        with pytest.raises(ValueError, match="unknown dtype"):
            bench.dtype_of(name)
    with pytest.raises(TypeError, match="has_bias: got 'no'"):
        bench.case("rmsnorm_backward", 4, 8, has_bias="no")  # type: ignore[arg-type]
    for repeats in (0, -1):
        with pytest.raises(ValueError, match="repeats: got"):
            bench.measure("rmsnorm_forward", 4, 8, repeats=repeats)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "figures.png"
    assert main_in_process(*ONE, "--shape", "8x100", "4x100", "--plot", str(target)) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    target = tmp_path / "figures.csv"
    target.touch(mode=0o600)
    assert main_in_process(*ONE, "--csv", str(target)) == 0
    assert target.stat().st_mode & 0o777 == 0o600
    assert target.stat().st_size > 0


def test_links_that_go_round_in_circles(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, other = tmp_path / "one.png", tmp_path / "other.png"
    one.symlink_to(other)
    other.symlink_to(one)
    assert main_in_process(*ONE, "--csv", str(one), "--plot", str(other)) == 0
    assert one.read_text(encoding="utf-8").startswith("op,rows,")
    assert other.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "softmax"], ["--op", "softmax", "rmsnorm_backward"]),
        (["--shape", "16by64"], ["--shape", "16by64", "32768x4096"]),
        (["--shape", "16x"], ["--shape", "'16x'"]),
        (["--shape", "0x64"], ["--shape", "0x64", "at least 1"]),
        (["--shape", "8x8", "--csv", "folder/"], ["--csv", "'folder/'", "name of a file"]),
        (["--shape", "-1x64"], ["--shape"]),
        (["--shape", "99999999x99999999"], ["--shape", "2^40"]),
        (["--shape", "1x1073741825"], ["--shape", "1073741824"]),
        (["--dtype", "int32"], ["--dtype", "int32", "bfloat16"]),
        (["--w-dtype", "double"], ["--w-dtype", "double", "float64"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--csv", "missing/figures.csv"], ["--csv", "missing"]),
        (["--csv", "."], ["--csv", "not a regular file"]),
        (["--plot", "missing/figures.png"], ["--plot", "missing"]),
        (["--plot", "figures.docx"], ["--plot", "figures.docx", ".png"]),
        (["--csv", "one.png", "--plot", "one.png"], ["--csv", "--plot", "one.png"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure_case", lambda *_, **__: pytest.fail("measured before the input was checked"))
    assert main_in_process(*ONE, *arguments) == 2
    assert_one_line_of_error(capsys, words)
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_threads_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUPYNORM_NUM_THREADS", "many")
    assert main_in_process("--quick", "--device", "numpy") == 2
    assert_one_line_of_error(capsys, ["CUPYNORM_NUM_THREADS", "'many'"])
    assert main_in_process("info") == 0
    assert "CUPYNORM_NUM_THREADS: got 'many'" in capsys.readouterr().out


@pytest.mark.parametrize("others", [["info"], ONE])
def test_quick_is_the_main_jobs(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main_in_process("--quick", *others) == 2
    assert_one_line_of_error(capsys, ["--quick"])


def test_bench_needs_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    position = ONE.index("--shape")
    assert main_in_process(*ONE[:position], *ONE[position + 2 :]) == 2
    assert_one_line_of_error(capsys, ["--shape"])


def test_bench_has_all_functions_and_bfloat16_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_in_process("bench", "--shape", "16x64", "--device", "numpy") == 0
    lines = capsys.readouterr().out.splitlines()
    of_cases = [line.split()[:3] for line in lines if "16x64 " in line and line.split()[0] in bench.OPS]
    assert of_cases == [[op, "16x64", "bfloat16/float32"] for op in bench.OPS]


def test_bench_without_bfloat16_takes_float32(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert main_in_process("bench", "--op", "rmsnorm_forward", "--shape", "16x64", "--device", "numpy") == 0
    assert "16x64     float32" in capsys.readouterr().out


def test_errors_name_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options in (["--csv", str(tmp_path / "no" / "file.csv")], ["--dtype", "int32"]):
        assert main_in_process("bench", "--shape", "16x64", *options) == 2
        assert capsys.readouterr().err.startswith("python -m cupynorm bench: argument ")


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_in_process("frobnicate") == 2
    error = capsys.readouterr().err
    assert "frobnicate" in error
    assert len(error.splitlines()) == 1


def test_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main_in_process(*ONE, "--plot", str(tmp_path / "figures.png")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["plot_formats", "try_plot"])
def test_pictures_that_cannot_be_drawn_here(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As .pgf, which needs LaTeX, or with settings that matplotlib refuses: found before anything is measured."""
    pytest.importorskip("matplotlib")

    def refuse(*_: str) -> None:
        raise RuntimeError("'xelatex' not found")

    monkeypatch.setattr(report, name, refuse)
    monkeypatch.setattr(bench, "measure_case", lambda *_, **__: pytest.fail("measured before the input was checked"))
    assert main_in_process(*ONE, "--plot", str(tmp_path / "figures.png"), "--csv", str(tmp_path / "f.csv")) == 2
    assert_one_line_of_error(capsys, ["--plot", "matplotlib", "'xelatex' not found"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no signals of this kind here")
def test_a_process_that_is_told_to_end_leaves_no_file(tmp_path: Path) -> None:
    """By SIGTERM, as `timeout` does."""
    command = [sys.executable, "-m", "cupynorm", "bench", "--shape", "8192x4096", "--device", "numpy", "--csv", "f.csv"]
    environment = os.environ | {"PYTHONPATH": str(Path(cupynorm.__file__).parent.parent)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as one:
        deadline = time.monotonic() + 60
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
        one.terminate()
        assert one.wait(60) == 143
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """Also if it had this process's number; names may be as long as they can be."""
    target = tmp_path / ("f" * 251 + ".csv")
    for _ in range(2):
        left = tmp_path / f".{target.name[:100]}.{os.getpid()}.0.part"
        left.touch()
        with report.replaced(target) as part:
            part.write_text("figures")
        assert target.read_text() == "figures"
        assert {*tmp_path.iterdir()} == {left, target}


def test_bfloat16_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert main_in_process(*ONE, "--dtype", "bfloat16") == 2
    assert "pip install ml_dtypes" in capsys.readouterr().err


def test_failure_while_measuring_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "figures.csv"
    target.write_text("older figures")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(bench, "measure_case", fail)
    assert main_in_process(*ONE, "--csv", str(target)) == 1
    assert target.read_text() == "older figures"
    assert list(tmp_path.iterdir()) == [target]


# --- pieces -----------------------------------------------------------------------------------------------


class Terminal:
    """A stderr that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_progress_shows_how_far_it_is_and_vanishes() -> None:
    terminal = Terminal()
    assert list(report.progress("abcd", lambda item: f"item {item}", terminal)) == list("abcd")  # type: ignore[arg-type]
    assert "[" + "." * 20 + "] 1/4 item a" in terminal.text
    assert "[" + "#" * 15 + "." * 5 + "] 4/4 item d" in terminal.text
    assert terminal.text.endswith("\r\x1b[K")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
def test_progress_fits_its_own_terminal() -> None:
    """Whatever stdout is."""
    import fcntl
    import struct
    import termios

    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, 30, 0, 0))
    with os.fdopen(reader, "rb", 0) as shown, os.fdopen(writer, "w") as terminal:
        items = report.progress("ab", lambda item: "word " * 20, terminal)
        next(items)
        text = shown.read(1000).decode().rpartition("\x1b[K[")[2]
    assert len(text) == 28


@pytest.mark.parametrize("command", ["info", "--quick --device numpy"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_full_disk_is_one_line(command: str) -> None:
    done = run_in_a_shell(f"{command} >/dev/full")
    assert done.returncode == 1
    assert re.fullmatch(r"python -m cupynorm.*: .*No space left on device\n", done.stderr)


@pytest.mark.parametrize(
    ("command", "status"), [("info", 0), ("--quick --device numpy", 0), ("bench --op none --shape 1x1", 2)]
)
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
@pytest.mark.skipif(os.name != "posix", reason="needs a shell that closes files")
def test_processes_may_be_started_without_stdout_or_stderr(command: str, status: int, closed: str) -> None:
    done = run_in_a_shell(f"{command} {closed}")
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (closed == "2>&-" and status == 0)
    assert bool(done.stderr) == (closed == ">&-" and status == 2)


def test_cuda_that_does_not_answer_is_said_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    xp, line = cli.pick_device(None)
    assert xp is np
    assert "NumPy arrays" in line
    assert "because CuPy" in line


def test_time_call_calls_as_often_as_asked() -> None:
    calls: list[int] = []
    assert bench.time_call(lambda: calls.append(1), np, repeats=7) > 0
    assert len(calls) == 8  # and one warm-up


def test_triad_has_no_more_threads_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    pools = bench.ThreadPoolExecutor
    monkeypatch.setattr(bench, "ThreadPoolExecutor", lambda threads: started.append(threads) or pools(threads))
    for asked, most in (("999999999", os.cpu_count()), ("1", 1)):
        monkeypatch.setenv("CUPYNORM_NUM_THREADS", asked)
        bench._measure_triad.cache_clear()
        assert bench.measure_triad(1 << 18, np.dtype(np.float32), np, repeats=1).seconds > 0
        assert started.pop() == most


@pytest.mark.parametrize("stdout", [None, io.StringIO()])
def test_failures_where_stdout_is_no_file(
    stdout: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise FileNotFoundError(2, "No such file or directory", "missing")

    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.guarded("program", fail) == 1
    assert capsys.readouterr().err == "program: [Errno 2] No such file or directory: 'missing'\n"


def test_failures_leave_stdout_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        print("before")
        raise FileNotFoundError(2, "No such file or directory", "missing")

    assert cli.guarded("program", fail) == 1
    print("behind", flush=True)
    assert capfd.readouterr().out == "before\nbehind\n"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", bench.DTYPES)
@pytest.mark.parametrize("elements", [1, 7, 4099, 9 << 20])
def test_triad_adds(dtype: str, elements: int) -> None:
    import cupy

    x, dy = (bench._normal((elements,), bench.dtype_of(dtype), 0.0, seed, cupy) for seed in range(2))
    z = cupy.full_like(x, np.nan)
    bench.cuda_triad(cupy, x, dy, z)()
    wide = np.promote_types(dtype, np.float32) if dtype != "bfloat16" else np.float32
    assert bool((z == (x.astype(wide) + dy.astype(wide)).astype(x.dtype)).all())


@pytest.mark.gpu
def test_normal_numbers_are_normal() -> None:
    import cupy

    values = bench._normal((1 << 25,), np.dtype(np.float32), 0.5, 3, cupy)
    assert bool(cupy.isfinite(values).all())
    assert float(values.mean()) == pytest.approx(0.5, abs=2e-3)
    assert float(values.std()) == pytest.approx(1.0, abs=2e-3)
    assert float((values[1:] * values[:-1]).mean()) == pytest.approx(
        0.25, abs=2e-3
    )  # neighbours know nothing of each other


@pytest.mark.gpu
def test_time_on_cuda_leaves_out_the_host() -> None:
    import time

    import cupy

    array = cupy.empty(1 << 10, np.float32)

    def slow_host() -> None:
        time.sleep(1e-3)
        array.fill(1)

    # The device is kept busy while the host sleeps, so that only the fill is timed.
    assert bench.time_call(slow_host, cupy, repeats=10) < 5e-4
