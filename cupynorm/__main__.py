"""``python -m cupynorm``: run both norms on real sizes, check them against float64, print one table.

``info`` prints versions and devices, ``bench`` measures what the user names.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import cupynorm

from . import bench, cli, report

TRANSFORMER_SIZES = ((16384, 1024), (32768, 4096), (8192, 8192), (4096, 16384))
HOST_SIZES = ((4096, 1024), (2048, 4096), (512, 16384))
QUICK_SIZES = ((128, 256), (33, 1000))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.quick and options.command is not run:
        parser.error("argument --quick: belongs to the command without a name")
    return cli.guarded(options.program, lambda: options.command(options))


# --- the main job -----------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Both norms, forward and backward: checked, timed, one table."""
    from . import accuracy

    xp, explanation = cli.pick_device(options.device)
    cuda = xp is not np
    cases, remark = _main_cases(cuda, options.quick)
    repeats = 5 if options.quick or not cuda else None
    rows, failures, measurements = [], [], []
    for case in report.progress(cases, lambda case: f"{case.op} {case.shape} {case.dtypes}"):
        inputs = bench.make_inputs(case, xp)
        errors = accuracy.check(case, inputs, bench.call(case, inputs), xp)
        failures += [
            f"{case.op} {case.shape} {case.dtypes}: {e.name} is off by {e.error:.2e}; at most {e.bound:.2e} is allowed"
            for e in errors
            if not e.ok
        ]
        measured = bench.measure_case(case, inputs, xp=xp, repeats=repeats)
        measurements.append(measured)
        worst = accuracy.worst(errors)
        verdict = "ok" if all(e.ok for e in errors) else "FAIL"
        rows.append([*report.timing_cells(measured, cuda), f"{worst.error:.1e} {worst.name}", verdict])

    print(explanation)
    print()
    print(report.table([*report.timing_head(cuda), "error", "verdict"], rows))
    print()
    _print_method(cuda, measurements)
    print("error: relative L2 error against float64, of the output that comes nearest its bound. The bound is")
    print(f"  {accuracy.BOUND}.")
    if remark:
        print(remark)
    print()
    for failure in failures:
        print(f"FAIL {failure}")
    agree = sum(row[-1] == "ok" for row in rows)
    print(f"{agree} of {len(rows)} cases agree with float64.")
    return 1 if failures else 0


def _main_cases(cuda: bool, quick: bool) -> tuple[list[bench.Case], str]:
    if quick:
        plan = [("float32", QUICK_SIZES), ("float16", QUICK_SIZES[1:]), ("bfloat16", QUICK_SIZES[1:])]
    elif cuda:
        plan = [("bfloat16", TRANSFORMER_SIZES), ("float16", ((16384, 4096),)), ("float32", ((16384, 4096),))]
    else:
        plan = [("float32", HOST_SIZES), ("bfloat16", ((1024, 4096),)), ("float16", ((1024, 4096),))]
    remark = ""
    try:
        bench.dtype_of("bfloat16")
    except ValueError as error:
        plan = [entry for entry in plan if entry[0] != "bfloat16"]
        remark = f"bfloat16 was left out: {error}"
    cases = [
        bench.case(op, rows, columns, dtype)
        for op in bench.OPS
        for dtype, sizes in plan
        for rows, columns in sizes
    ]  # fmt: skip
    return cases, remark


# --- bench ------------------------------------------------------------------------------------------------


def bench_command(options: argparse.Namespace) -> int:
    """Measure what the user names."""
    cases = [
        bench.case(op, shape[0], shape[1], dtype, options.w_dtype, options.bias)
        for op in options.op or bench.OPS
        for dtype in options.dtype or [_usual_dtype()]
        for shape in options.shape
    ]
    file_format = cli.plot_format(options.plot) if options.plot else ""
    if options.csv and options.plot and report.real_path(options.csv) == report.real_path(options.plot):
        raise cli.UsageError(f"--csv and --plot both name {options.csv}")
    with ExitStack() as files:
        csv_part = cli.writable(files, "--csv", options.csv)
        plot_part = cli.writable(files, "--plot", options.plot)
        xp, explanation = cli.pick_device(options.device)
        cuda = xp is not np
        measurements = [
            bench.measure_case(case, xp=xp)
            for case in report.progress(cases, lambda case: f"{case.op} {case.shape} {case.dtypes}")
        ]
        if csv_part:
            report.write_csv(csv_part, measurements)
        if plot_part:
            report.write_plot(plot_part, measurements, file_format)
    print(explanation)
    print()
    head = [*report.timing_head(cuda), "triad GB/s"]
    print(report.table(head, ([*report.timing_cells(m, cuda), report.gbps(m.triad.gbps)] for m in measurements)))
    print()
    _print_method(cuda, measurements)
    return 0


def _usual_dtype() -> np.dtype[Any]:
    try:
        return bench.dtype_of("bfloat16")
    except ValueError:
        return bench.dtype_of("float32")


def _print_method(cuda: bool, measurements: Sequence[bench.Measurement]) -> None:
    clock = "CUDA events around one call" if cuda else "time.perf_counter around one call"
    fastest = max(measurements, key=lambda m: m.triad.gbps)
    print(f"time: median of single calls, {clock}, caches overwritten before each;")
    print(f"  a call that does nothing reads {measurements[0].empty_seconds * 1e6:.1f} us, which is included.")
    print("GB/s: of the bytes that the work needs, each tensor read or written once.")
    print("of triad: 1 is the speed, byte for byte, of z = x + dy over tensors of the same size on this device,")
    where = f"{fastest.case.shape} {fastest.case.dtype.name}"
    print(f"  which is at most {report.gbps(fastest.triad.gbps)} GB/s here ({where}).")
    if not cuda and any(m.case.dtype.itemsize == 2 for m in measurements):
        print("  For float16 and bfloat16 x and dy are float32 there, which NumPy adds at the speed of memory.")


# --- info -------------------------------------------------------------------------------------------------


def _threads_line() -> str:
    try:
        threads = cli.host_threads()
        return f"{threads} {'thread' if threads == 1 else 'threads'} for this process"
    except cli.UsageError as error:
        return str(error)


def info(options: argparse.Namespace) -> int:
    """Versions, devices, where things lie."""
    lines = [
        ("cupynorm", f"{cupynorm.__version__} in {Path(cupynorm.__file__).parent}"),
        ("kernels_cu", _kernels_folder()),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("numpy", np.__version__),
        ("ml_dtypes", cli.version("ml_dtypes") or "not installed: no bfloat16 in NumPy arrays"),
        ("CPU", _threads_line()),
        *_cuda_lines(),
    ]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name.ljust(width)}  {value}")
    return 0


def _cuda_lines() -> list[tuple[str, str]]:
    try:
        import cupy
    except Exception as error:  # built for another NumPy, it raises a ValueError
        return [("cupy", f"cannot be imported: {cli.first_line(error)}")]
    runtime = cupy.cuda.runtime

    def attempt(read: Any) -> str:
        try:
            return str(read())
        except Exception as error:  # CuPy's own error types, without a driver or a library
            return f"not available: {cli.first_line(error)}"

    def dotted(number: int) -> str:
        return f"{number // 1000}.{number % 1000 // 10}" if number else "none"

    lines = [
        ("cupy", cupy.__version__),
        ("CUDA runtime", attempt(lambda: dotted(cupy.cuda.get_local_runtime_version()))),
        ("CUDA driver", attempt(lambda: dotted(runtime.driverGetVersion()))),
        ("NVRTC", attempt(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion())))),
        ("kernel cache", os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")),
    ]
    try:
        count = runtime.getDeviceCount()
    except Exception as error:
        return [*lines, ("CUDA device", f"none: {cli.first_line(error)}")]
    for device in range(count):
        properties = runtime.getDeviceProperties(device)
        major, minor = properties["major"], properties["minor"]
        with cupy.cuda.Device(device):
            name = bench.device_name(cupy)
        lines.append((
            f"CUDA device {device}",
            f"{name}, compute capability {major}.{minor}, {properties['totalGlobalMem'] / 2**30:.1f} GiB, "
            f"{properties['multiProcessorCount']} SMs, {properties['l2CacheSize'] / 2**20:.0f} MiB L2",
        ))  # fmt: skip
    return lines


def _kernels_folder() -> str:
    from .cuda.module import source_directory

    try:
        folder = source_directory()
    except FileNotFoundError as error:
        return str(error)
    return f"{len(list(folder.glob('*.cu*')))} files in {folder}"


# --- the command line -------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m cupynorm",
        description="Run both norms forward and backward on real sizes, check each against float64, print one table. "
        "Exit status 1 if a check fails.",
    )
    devices = {"choices": ("cuda", "numpy"), "help": "default: CUDA if a device answers, else NumPy"}
    parser.set_defaults(command=run, program=parser.prog)
    parser.add_argument("--version", action="version", version=f"cupynorm {cupynorm.__version__}")
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats: checks, but no useful timings")
    parser.add_argument("--device", **devices)  # type: ignore[arg-type]
    commands = parser.add_subparsers(title="other commands", metavar="COMMAND", parser_class=cli.Parser)

    about = commands.add_parser("info", help="versions, devices, where the kernels and their cache lie")
    about.set_defaults(command=info, program=about.prog)

    measure = commands.add_parser("bench", help="measure the sizes that you name")
    measure.set_defaults(command=bench_command, program=measure.prog)
    several: Any = {"nargs": "+", "action": "extend"}
    measure.add_argument("--op", type=cli.op, metavar="OP", help=f"{', '.join(bench.OPS)}; default: all", **several)
    measure.add_argument(
        "--shape", type=cli.shape, metavar="ROWSxN", help="such as 32768x4096", required=True, **several
    )
    measure.add_argument(
        "--dtype",
        type=cli.dtype,
        metavar="DTYPE",
        help=f"{', '.join(bench.DTYPES)}; default: bfloat16, float32 without ml_dtypes",
        **several,
    )
    measure.add_argument(
        "--w-dtype", type=cli.dtype, metavar="DTYPE", help="of w; default: float32, float64 with float64"
    )
    measure.add_argument("--bias", action=argparse.BooleanOptionalAction, help="default: LayerNorm yes, RMSNorm no")
    measure.add_argument("--device", default=argparse.SUPPRESS, **devices)  # type: ignore[arg-type]
    measure.add_argument("--csv", type=cli.file, metavar="FILE", help="write the figures there")
    measure.add_argument("--plot", type=cli.file, metavar="FILE", help="draw GB/s against N there (needs matplotlib)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
