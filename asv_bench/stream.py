"""What moving the data of a pass takes, without its arithmetic, on a CUDA device:

    python asv_bench/stream.py [--forward] [--sizes MB,…] [--csv FILE]

The triad z = x + dy is thousands of short blocks, which the hardware hands out as multiprocessors become free. The
backward kernels are a fixed number of blocks on each multiprocessor, each with its share of the rows fixed beforehand,
since the order of sums in dw must not depend on who was faster. (The forward pass, which has no such sums, draws its
last steps; in long launches of RMSNorm's backward pass, and some of LayerNorm's, blocks that are ahead wait.) Here such
blocks (stream.cu) take x and dy in steps, by bulk copies into a ring in shared memory that holds some steps, its
stages, and write z = x + dy:

    steps given out  static: block b takes steps b, b + blocks, …; paced: the same, but blocks count their steps, and
                     who would begin a step more than one ahead of the average waits; drawn: step b, and then what it
                     draws from a counter, one step ahead; where there is something to count, the call first zeroes the
                     counter, in its time
    z written by     stores: 16 bytes by a thread; bulk: one copy of a step, of what the threads left in x's place

"static" with steps of 16 KB and 3 stages is the kernels' own way, "paced" much like that of long launches (which count
in another way, and let a block be two ahead); "drawn" beside them says what fixed shares cost. Each way's z is
checked; then it is timed as in `cupynorm.bench`. Data is three tensors, rounded down to whole steps; "blocks" are those
on a multiprocessor; "of triad" is the triad's time over the call's.

With --forward it is a forward pass's data: z = x + x, two tensors of as many bytes (so 25 MB are 16.7), and "of copy",
the time of a copy from device to device over the call's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cupynorm import bench, report

SIZES = (25.0, 100.0, 1000.0)
SOURCE = Path(__file__).with_suffix(".cu").as_posix()  # absolute, so that it is not looked for in kernels_cu/
THREADS = 256 + 32  # those that add, and the warp of the one that copies


class Way(NamedTuple):
    """One line of the table."""

    given_out: str = "static"
    written_by: str = "stores"
    step_bytes: int = 16384  # of each array
    stages: int = 3
    blocks: int = 1  # on a multiprocessor
    arrays: int = 2  # that are read: x and dy; 1: x alone

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.arrays * self.step_bytes

    @property
    def definitions(self) -> tuple[str, ...]:
        switches = tuple(
            f"{name}={value:d}"
            for name, value in {
                "ARRAYS": self.arrays,
                "DRAWN": self.given_out == "drawn",
                "PACED": self.given_out == "paced",
                "BULK": self.written_by == "bulk",
            }.items()
        )
        return (*switches, f"STEP_BYTES={self.step_bytes}", f"STAGES={self.stages}", f"BLOCKS={self.blocks}")

    @property
    def cells(self) -> list[str]:
        return [self.given_out, self.written_by, *map(str, (self.step_bytes // 1024, self.stages, self.blocks))]


WAYS = (
    Way(stages=2),
    Way(),
    Way(stages=6),
    Way(step_bytes=4096, stages=12),
    Way(step_bytes=4096, stages=4, blocks=4),
    Way(written_by="bulk"),
    Way(written_by="bulk", stages=6),
    Way("paced"),
    Way("paced", "bulk"),
    Way("drawn"),
    Way("drawn", step_bytes=4096, stages=4, blocks=4),
    Way("drawn", "bulk"),
)
FORWARD_WAYS = tuple(
    Way(*way, arrays=1)
    for way in (
        ("static", "stores", 16384, 3),
        ("static", "stores", 16384, 6),
        ("static", "stores", 4096, 8, 2),
        ("static", "bulk", 16384, 6),
        ("static", "bulk", 4096, 8, 2),
        ("drawn", "stores", 16384, 3),
        ("drawn", "stores", 16384, 6),
        ("drawn", "stores", 8192, 4, 2),
        ("drawn", "bulk", 16384, 6),
        ("drawn", "bulk", 8192, 8),
    )
)
STEP_BYTES = max(way.step_bytes for way in WAYS + FORWARD_WAYS)  # a multiple of each


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("stream.py", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    from roofline import copy_seconds_per_byte

    from cupynorm import cli

    head = ["steps given out", "z written by", "step KB", "stages", "blocks"]
    other = "copy" if options.forward else "triad"  # what they are set beside
    head += [f"{size:g} MB: {what}" for size in options.sizes for what in ("us", f"of {other}")]
    with ExitStack() as files:
        target = cli.writable(files, "--csv", options.csv)
        cupy = cli.needed_cupy()
        if int(cupy.cuda.Device().compute_capability) < 90:
            raise cli.UsageError("bulk copies need compute capability 9.0")
        nothing = bench.time_call(lambda: None, cupy)
        ways = FORWARD_WAYS if options.forward else WAYS
        data = [tensors(cupy, size, ways[0].arrays) for size in options.sizes]
        if options.forward:
            others = [2 * x.nbytes * copy_seconds_per_byte(cupy, x.nbytes) for x, _, _ in data]
        else:
            others = [bench.measure_triad(x.nbytes // 2, "float16", cupy).seconds for x, _, _ in data]
        lines = []
        for way in report.progress(ways, lambda way: " ".join(way.cells)):
            seconds = [way_seconds(cupy, way, *arrays) for arrays in data]
            lines.append(way.cells)
            for time, of_other in zip(seconds, others, strict=True):
                lines[-1] += [f"{time * 1e6:.1f}", f"{of_other / time:.3f}"]
        if target:
            report.write_rows(target, head, lines)
    times = [f"{size:g} MB {seconds * 1e6:.1f} us" for size, seconds in zip(options.sizes, others, strict=True)]
    words = f"a call that does nothing reads {nothing * 1e6:.1f} us, the {other} {', '.join(times)}"
    print(f"{bench.device_name(cupy)}; {words}\n")
    print(report.table(head, lines))
    return 0


def tensor_bytes(megabytes: float) -> int:
    """Of each of the three tensors: whole steps, rounded down."""
    return round(megabytes * 1e6) // (3 * STEP_BYTES) * STEP_BYTES


def tensors(xp: Any, megabytes: float, arrays: int) -> tuple[Any, Any, Any]:
    """x, dy, which is x where that is all that is read, and z in 32-bit words. The factors and their sums are such that
    no two words of x + dy are alike."""
    number = xp.arange(tensor_bytes(megabytes) // 4, dtype=np.uint32)
    x = number * np.uint32(0x9E3779B1)
    return x, x if arrays == 1 else number * np.uint32(0x85EBCA76), number


def way_seconds(cupy: Any, way: Way, x: Any, dy: Any, z: Any) -> float:
    call = call_of(cupy, way, x, dy, z)
    z.fill(0)
    call()
    if not bool((z == x + dy).all()):
        raise RuntimeError(f"z is not x + dy: {' '.join(way.cells)}")
    return bench.time_call(call, cupy)


def call_of(cupy: Any, way: Way, x: Any, dy: Any, z: Any) -> Callable[[], None]:
    from cupynorm.cuda import module

    kernel = module.kernel(SOURCE, "stream", way.definitions)
    kernel.max_dynamic_shared_size_bytes = way.ring_bytes
    blocks = way.blocks * cupy.cuda.Device().attributes["MultiProcessorCount"]
    counter = cupy.zeros(1, np.uint32)
    arguments = (x, dy, z, np.int32(x.nbytes // way.step_bytes), counter)

    def call() -> None:
        if way.given_out != "static":
            counter.data.memset_async(0, counter.nbytes)
        kernel((blocks,), (THREADS,), arguments, shared_mem=way.ring_bytes)

    return call


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from cupynorm import cli

    def megabytes(text: str) -> float:
        size = cli.positive(text, float)
        if not tensor_bytes(size):
            raise argparse.ArgumentTypeError(f"got {text!r}; at least a step, {3e-6 * STEP_BYTES:g} MB, is needed")
        return size

    def sizes(text: str) -> tuple[float, ...]:
        return tuple(dict.fromkeys(map(megabytes, text.split(","))))

    parser = cli.Parser(prog="stream.py", description="Time moving a pass's data, without its arithmetic.")
    parser.add_argument("--forward", action="store_true", help="the forward pass's data, beside a copy")
    parser.add_argument("--sizes", type=sizes, default=SIZES, metavar="MB,...", help="default: 25,100,1000")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
