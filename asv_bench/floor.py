"""What the final reduction of dw and db costs on its own, beside a triad's time, on a CUDA device:

    python asv_bench/floor.py

A kernel that reads no rows (floor.cu, with kernels_cu/reduction.cuh) is timed as in `cupynorm.bench`, cut short after
each step: nothing; all blocks have started; each has written a partial row and met the others; all partial rows are
added up. The last less the second is what the reduction adds to a call that has read its last row, unless it is hidden
behind other work. "least" is the triad's time at 25 MB and that; "bound" what roofline.py holds a call against.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupynorm import bench, report

STEPS = ("empty kernel", "started", "met", "added up")
HEAD = ["norm", "N", "partial rows", *(f"{step} us" for step in STEPS), "T us", "least us", "bound us"]
LAYOUT = "5P6i"  # struct FloorArguments
COLUMNS = (256, 1024, 4096)
SOURCE = Path(__file__).with_suffix(".cu").as_posix()  # absolute, so that it is not looked for in kernels_cu/


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    cli.Parser(prog="floor.py", description="Time the final reduction alone.").parse_args(arguments)
    return cli.guarded("floor.py", run)


def run() -> int:
    from cupynorm import cli

    cupy = cli.needed_cupy()
    lines = [line(cupy, norm, columns) for norm in ("rmsnorm", "layernorm") for columns in COLUMNS]
    nothing = bench.time_call(lambda: None, cupy) * 1e6
    print(f"{bench.device_name(cupy)}; a call that does nothing reads {nothing:.1f} us\n")
    print(report.table(HEAD, lines))
    return 0


def line(cupy: Any, norm: str, columns: int) -> list[str]:
    from roofline import BOUNDS

    blocks = cupy.cuda.Device().attributes["MultiProcessorCount"]
    empty, started, met, added_up = (step_us(cupy, norm, columns, blocks, step) for step in range(len(STEPS)))
    triad = bench.measure_triad(round(25e6 / 6), bench.dtype_of("float16"), cupy).seconds * 1e6
    share, constant = BOUNDS[norm]
    times = (empty, started, met, added_up, triad, triad + added_up - started, triad / share + constant * 1e6)
    return [norm, str(columns), str(blocks), *(f"{time:.1f}" for time in times)]


def step_us(cupy: Any, norm: str, columns: int, blocks: int, last: int) -> float:
    """Of the kernel, cut short after STEPS[last]."""
    from cupynorm.cuda import config, module

    threads, outputs = 256, 2 if norm == "layernorm" else 1
    partials = cupy.empty((2, blocks, config.partial_row_stride(columns)), np.float32)
    sums = cupy.zeros((2, columns), np.float32)
    meeting = cupy.zeros(config.meeting_bytes(blocks), np.uint8)
    problem: Any = SimpleNamespace(columns=columns, want_dw=True, want_db=outputs == 2)
    row_threads = config.reduction_row_threads(threads, blocks, blocks, problem)
    addresses = [array.data.ptr for array in (*partials, *sums, meeting)]
    if outputs == 1:
        addresses[3] = 0
    packed = struct.pack(LAYOUT, *addresses, columns, blocks, row_threads, config.ELEMENT_CODES["float32"], last, 0)
    kernel = module.kernel(SOURCE, "floor_of_reduction")
    given = np.frombuffer(packed, np.dtype((np.void, len(packed))))[0]
    seconds = bench.time_call(lambda: kernel((blocks,), (threads,), (given,), shared_mem=32 * threads), cupy)
    if last == len(STEPS) - 1 and not bool((sums[:outputs] == blocks).all()):
        raise RuntimeError("the partial rows do not add up")
    return seconds * 1e6


if __name__ == "__main__":
    sys.exit(main())
