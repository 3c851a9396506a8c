"""What the profiler's counters say of each shape's kernels, and of the triad beside them, on a CUDA device:

    python asv_bench/counters.py [--set NAME,…] [--ops OP …] [--only N,…] [--ncu PATH] [--csv FILE]

The rows are those of roofline.py. Nsight Compute (ncu) runs each kernel several times, with cold caches and at the
device's own clocks, and reads:

    us            the kernel alone, without what an event pair adds
    needs MB      what the work needs to read and write
    read, written MB  between L2 cache and memory; what a small call writes may stay in the cache
    memory %      bytes to and from memory, of what the memory could move in that time
    issue %       cycles in which a scheduler issued an instruction, of all
    warps         resident on a multiprocessor, on average, while any was
    registers     of a thread
    per element   instructions of a thread for each element of x
    least busy %  cycles of the multiprocessor that was busy for the shortest time, of those of the longest
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynorm import bench, report

if TYPE_CHECKING:
    from roofline import Row

METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__bytes.sum.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.per_cycle_active",
    "launch__registers_per_thread",
    "smsp__inst_executed.sum",
    "sm__cycles_active.min",
    "sm__cycles_active.max",
)
KERNELS = "regex:^(backward|forward|triad|widen)"
HEAD = [
    *("op", "rows x N", "kernel", "us", "needs MB", "read MB", "written MB", "memory %", "issue %", "warps"),
    *("registers", "per element", "least busy %"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("counters.py", lambda: run(options, sys.argv[1:] if arguments is None else arguments))


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from roofline import rows_of

    from cupynorm import cli

    rows = rows_of(options)
    with ExitStack() as files:
        target = None if options.profiled else cli.writable(files, "--csv", options.csv)
        cupy = cli.needed_cupy()
        if options.profiled:
            call_each(rows, cupy)
            return 0
        if shutil.which(options.ncu) is None:
            raise cli.UsageError(f"argument --ncu: {options.ncu} is not a program; Nsight Compute is needed")
        lines = list(table(rows, read(profile(options.ncu, arguments))))
        if target:
            report.write_rows(target, HEAD, lines)
    print(f"{bench.device_name(cupy)}\n")
    print(report.table(HEAD, lines))
    return 0


def call_each(rows: Sequence[Row], cupy: Any) -> None:
    """One call of each row, and of its triad, under the profiler; before it one that is not, which compiles."""
    from roofline import inputs_of

    for row in rows:
        inputs = inputs_of(row, cupy)
        x, dy, z = (cupy.ones(row.case.rows * row.case.columns, row.case.dtype) for _ in range(3))
        triad = bench.cuda_triad(cupy, x, dy, z)
        for profiled in (False, True):
            cupy.cuda.get_current_stream().synchronize()
            if profiled:
                cupy.cuda.runtime.profilerStart()
            bench.call(row.case, inputs)
            triad()
            cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.runtime.profilerStop()


def profile(ncu: str, arguments: Sequence[str]) -> str:
    """What ncu writes of this script, run again with `--profiled`."""
    from cupynorm import cli

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += ["--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off"]
        command += ["--kernel-name", KERNELS, "--metrics", ",".join(METRICS)]
        command += [sys.executable, __file__, "--profiled", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = log.read_text(encoding="utf-8") if log.exists() else ""
    errors = [line for line in (text + done.stdout).splitlines() if line.startswith("==ERROR==")]
    if done.returncode or errors:
        raise cli.UsageError(f"{ncu} failed: {[*errors, *done.stderr.strip().splitlines()[-1:], 'no reason given'][0]}")
    return text


def read(text: str) -> list[dict[str, str]]:
    """The kernels that ncu speaks of, in order: name and metrics, without the line of units."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    table = csv.DictReader(line for line in lines[start:] if not line.startswith("=="))
    return [kernel for kernel in table if kernel["ID"]]


def table(rows: Sequence[Row], kernels: Sequence[dict[str, str]]) -> Iterator[list[str]]:
    """A line for each kernel: those of the row's call, and then its triad, which ends the row."""
    from cupynorm import cli

    left = iter(rows)
    row = next(left)
    for kernel in kernels:
        is_triad = kernel["Kernel Name"].partition("(")[0] == "triad"
        yield cells(row, kernel, is_triad)
        if is_triad:
            row = next(left, None)  # type: ignore[assignment]  # no kernel follows the last row's triad
    if row is not None:
        raise cli.UsageError(f"ncu saw no triad after {row.case.op} {row.case.shape}: it lost kernels")


def cells(row: Row, kernel: dict[str, str], is_triad: bool) -> list[str]:
    time, read_, written, memory, issue, warps, registers, instructions, least, most = (
        number(kernel.get(metric, "")) for metric in METRICS
    )
    elements = row.case.rows * row.case.columns
    needed = 3 * elements * row.case.dtype.itemsize if is_triad else row.bytes
    return [
        *(row.case.op, row.case.shape, kernel["Kernel Name"].partition("(")[0], f"{time / 1e3:.1f}"),
        *(f"{megabytes / 1e6:.1f}" for megabytes in (needed, read_, written)),
        *(f"{memory:.1f}", f"{issue:.1f}", f"{warps:.1f}", f"{registers:.0f}"),
        *(f"{instructions * 32 / elements:.1f}", f"{100 * least / most:.1f}"),
    ]


def number(text: str) -> float:
    """NaN for a metric that this ncu does not have."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from roofline import add_row_options

    from cupynorm import cli

    parser = cli.Parser(prog="counters.py", description="Read the profiler's counters of the norms' kernels.")
    add_row_options(parser)
    parser.add_argument("--ncu", default="ncu", metavar="PATH", help="Nsight Compute; default: ncu")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
