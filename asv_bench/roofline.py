"""How close each N comes to the memory limit: `python asv_bench/roofline.py`, on a CUDA device.

For every N, and for data of 25 MB, 100 MB and 1 GB (three tensors of the size of x), one call of the public function is
timed as in `cupynorm.bench` and held against a bound. T is the time of the triad z = x + dy, scaled to the bytes that
the work needs:

    rmsnorm_backward            at most T / 0.975 + 2 us
    layernorm_backward with db  at most T / 0.97 + 2.5 us
    both, data under 25 MB      at most T + 2.5 us
    forward                     at least 0.96 of the bandwidth of a copy from device to device
"""

from __future__ import annotations

import argparse
import csv
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cupynorm import bench, report

COLUMNS = (
    128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336,
    16384, 20480, 32768, 65536, 131072, 262144,
)  # fmt: skip
SIZES = (25, 100, 1000)
HEAD = ["op", "rows x N", "dtype x/w", "us", "T us", "T/time", "bound us", "meets"]


def main() -> int:
    options = parse()
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, no device: each raises its own kind
        print(f"roofline.py: a CUDA device and CuPy are needed: {error}", file=sys.stderr)
        return 2
    itemsize = bench.dtype_of(options.dtype).itemsize
    cases = [
        bench.case(op, max(1, round(size * 1e6 / (3 * columns * itemsize))), columns, options.dtype, options.w_dtype)
        for op in options.ops
        for size in options.sizes
        for columns in options.only
    ]
    rows = []
    for case in report.progress(cases, lambda case: f"{case.op} {case.shape}"):
        measured = bench.measure_case(case, xp=cupy)
        limit = bound_seconds(measured, cupy)
        meets = "yes" if measured.seconds <= limit else "no"
        times = [f"{seconds * 1e6:.1f}" for seconds in (measured.seconds, measured.triad_seconds, limit)]
        rows.append([case.op, case.shape, case.dtypes, *times[:2], f"{measured.fraction:.3f}", times[2], meets])
    print(f"{bench.device_name(cupy)}; a call that does nothing reads {measured.empty_seconds * 1e6:.1f} us\n")
    print(report.table(HEAD, rows))
    print(f"\n{sum(row[-1] == 'yes' for row in rows)} of {len(rows)} meet their bound")
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([HEAD, *rows])
    return 0


def bound_seconds(measured: bench.Measurement, cupy: Any) -> float:
    case = measured.case
    if not case.backward:
        return copy_seconds_per_byte(cupy, case.rows * case.columns * case.dtype.itemsize) * case.bytes / 0.96
    if 3 * case.rows * case.columns * case.dtype.itemsize < 24e6:  # 25 MB, rows rounded
        return measured.triad_seconds + 2.5e-6
    share, constant = (0.97, 2.5e-6) if case.norm == "layernorm" else (0.975, 2e-6)
    return measured.triad_seconds / share + constant


@cache
def copy_seconds_per_byte(cupy: Any, nbytes: int) -> float:
    source, target = cupy.zeros(nbytes, np.uint8), cupy.empty(nbytes, np.uint8)
    seconds = bench.time_call(lambda: target.data.copy_from_device_async(source.data, nbytes), cupy)
    return seconds / (2 * nbytes)


def parse() -> argparse.Namespace:
    def listed(convert: Any) -> Any:
        return lambda text: tuple(convert(item) for item in text.split(","))

    parser = argparse.ArgumentParser(description="Time the norms against the memory limit, for many N.")
    parser.add_argument(
        "--ops", nargs="+", choices=bench.OPS, default=bench.OPS[:2], metavar="OP", help=", ".join(bench.OPS)
    )
    parser.add_argument(
        "--sizes", type=listed(float), default=SIZES, metavar="MB,…", help="data in MB; default 25,100,1000"
    )
    parser.add_argument("--only", type=listed(int), default=COLUMNS, metavar="N,…", help="only these N")
    parser.add_argument("--dtype", choices=bench.DTYPES, default="bfloat16")
    parser.add_argument("--w-dtype", choices=bench.DTYPES, help="default: float32, float64 with float64")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
