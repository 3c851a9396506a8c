"""How close each shape comes to the memory limit, on a CUDA device:

    python asv_bench/roofline.py [--set NAME,…] [--ops OP …] [--only N,…] [--csv FILE]

One call of the public function is timed as in `cupynorm.bench` and held against a bound. T is the time of the triad
z = x + dy, scaled to the bytes that the work needs; data is three tensors of the size of x:

    rmsnorm_backward                                    at most T / 0.975 + 2 us
    layernorm_backward with db                          at most T / 0.97 + 2.5 us
    both, data under 25 MB                              at most T + 2.5 us
    both, where 16-byte accesses do not line up         at most T / 0.90 + 3 us
    forward                                             at least 0.96 of the bandwidth of a copy from device to device,
                                                        of whole 64 KiB

The sets:

    sizes     25 N, each with data of 25 MB, 100 MB and 1 GB (--sizes, --only, --dtype, --w-dtype, --dy-dtype and --gap
              change that)
    dtypes    float16 with float32 w, and all float32: four N, the same data
    pytorch   the shapes that PyTorch's own norm benchmark names
    triton    the 30 rows of Triton's layer-norm tutorial: 4096 rows, all float16
    odd       N that is odd, and rows at odd strides or starts, with data of 100 MB and 1 GB (--sizes)
    small     data under 25 MB, down to one row
    forward   both forward passes, the same N, with data of 100 MB and 1 GB (--sizes)

With --dx-alone the backward passes are asked for dx alone; T counts what they would write of dw and db, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cupynorm import bench, report

COLUMNS = (
    128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336,
    16384, 20480, 32768, 65536, 131072, 262144,
)  # fmt: skip
FEW_COLUMNS = (1024, 4096, 16384, 65536)
ODD_COLUMNS = (129, 1001, 2047, 4095, 8191, 12289, 16385, 65537)
SIZES = (25.0, 100.0, 1000.0)
LARGE_SIZES = (100.0, 1000.0)
PYTORCH = (
    *((32768, columns) for columns in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)),
    *((16384, 131072), (8192, 262144), (576000, 384), (576000, 512), (1152000, 384), (1152000, 512)),
)
SMALL = tuple(
    (rows, columns) for columns in (128, *FEW_COLUMNS) for rows in (1, 8, 64, 512) if rows * columns < 4 << 20
)
LAYOUTS = ((1, 0), (0, 1), (3, 1))  # elements between rows, elements before the first
BOUNDS = {"rmsnorm": (0.975, 2e-6), "layernorm": (0.97, 2.5e-6)}  # share of the triad, and seconds beside that
# Of a copy, whole ones of these: an H200 copies other than whole 4 or 8 KiB more slowly (33 MB by 11%, 333 MB by 2).
COPY_GRAIN = 64 << 10
MOST_COLUMNS = 1 << 30  # of problem.py, which older trees have without it
HEAD = ["op", "rows x N", "dtype x/w", "layout", "us", "T us", "T/time", "bound us", "meets"]


@dataclass(frozen=True)
class Row:
    """One line of the table; `gap` elements lie between rows and `start` before the first."""

    case: bench.Case
    gap: int = 0
    start: int = 0
    dx_alone: bool = False
    dy_dtype: np.dtype[Any] | None = None  # None: x's

    @property
    def output_mask(self) -> tuple[bool, ...] | None:
        """The argument of that name, of a backward function."""
        return (True, *(False for _ in self.case.output_names[1:])) if self.dx_alone else None

    @property
    def data_bytes(self) -> int:
        return 3 * self.case.rows * self.case.columns * self.case.dtype.itemsize + self._more_of_dy

    @property
    def bytes(self) -> int:
        """What the work needs to read and write at the least."""
        return self.case.bytes + self._more_of_dy

    def triad_seconds(self, measured: bench.Measurement) -> float:
        """Of as many bytes."""
        return measured.triad_seconds * (self.bytes / self.case.bytes)

    @property
    def dy_itemsize(self) -> int:
        return self.dy_dtype.itemsize if self.dy_dtype else self.case.dtype.itemsize

    @property
    def _more_of_dy(self) -> int:
        """Bytes that dy has more than x."""
        return self.case.rows * self.case.columns * (self.dy_itemsize - self.case.dtype.itemsize)

    @property
    def alignment(self) -> int:
        """Every row of x and dy begins at a multiple of so many bytes: of 16, or of a lower power of two."""
        bits = (self.case.columns + self.gap | self.start) * min(self.case.dtype.itemsize, self.dy_itemsize) | 16
        return bits & -bits

    @property
    def layout(self) -> str:
        layout = f"stride N+{self.gap}, start {self.start}" if self.gap or self.start else "dense"
        layout += f", dy {self.dy_dtype.name}" if self.dy_dtype else ""
        return f"{layout}, dx alone" if self.dx_alone else layout


def rows_for(megabytes: float, columns: int, itemsize: float) -> int:
    return max(1, round(megabytes * 1e6 / (3 * columns * itemsize)))


def by_data(
    op: str,
    columns: Sequence[int],
    sizes: Sequence[float],
    dtype: Any,
    w_dtype: Any = None,
    gap: int = 0,
    dy_dtype: Any = None,
) -> Iterator[Row]:
    x, dy = (bench.dtype_of(each) for each in (dtype, dy_dtype or dtype))
    itemsize = (2 * x.itemsize + dy.itemsize) / 3
    for size in sizes:
        for n in columns:
            case = bench.case(op, rows_for(size, n, itemsize), n, dtype, w_dtype)
            yield Row(case, gap, dy_dtype=None if dy == x else dy)


def odd(op: str, options: argparse.Namespace) -> Iterator[Row]:
    sizes = options.sizes or LARGE_SIZES
    for row in by_data(op, options.only or ODD_COLUMNS, sizes, options.dtype, options.w_dtype):
        yield row
    for row in by_data(op, options.only or FEW_COLUMNS, sizes, options.dtype, options.w_dtype):
        for gap, start in LAYOUTS:
            yield Row(row.case, gap, start)


def named(op: str, shapes: Sequence[tuple[int, int]], options: argparse.Namespace, *dtypes: str) -> Iterator[Row]:
    for rows, columns in shapes:
        if not options.only or columns in options.only:
            yield Row(bench.case(op, rows, columns, *(dtypes or (options.dtype, options.w_dtype))))


# name: which ops it is about, and its rows for one of them
SETS: dict[str, tuple[str, Callable[[str, argparse.Namespace], Iterator[Row]]]] = {
    "sizes": (
        "_backward",
        lambda op, o: by_data(op, o.only or COLUMNS, o.sizes or SIZES, o.dtype, o.w_dtype, o.gap, o.dy_dtype),
    ),
    "dtypes": (
        "_backward",
        lambda op, o: (
            row
            for dtype in ("float16", "float32")
            for row in by_data(op, o.only or FEW_COLUMNS, o.sizes or SIZES, dtype)
        ),
    ),
    "pytorch": ("_backward", lambda op, o: named(op, PYTORCH, o)),
    "triton": (
        "layernorm_backward",
        lambda op, o: named(op, [(4096, columns) for columns in range(1024, 16384, 512)], o, "float16", "float16"),
    ),
    "odd": ("_backward", odd),
    "small": ("_backward", lambda op, o: named(op, SMALL, o)),
    "forward": (
        "_forward",
        lambda op, o: by_data(op, o.only or COLUMNS, o.sizes or LARGE_SIZES, o.dtype, o.w_dtype, o.gap),
    ),
}


def rows_of(options: argparse.Namespace) -> list[Row]:
    """What the options of `add_row_options` choose. Raises UsageError where that is nothing."""
    from cupynorm import cli

    chosen = [row for name in options.set for row in rows_of_set(name, options)]
    if not chosen:
        raise cli.UsageError("nothing to measure: no set that was chosen has such ops, sizes and N")
    return list(dict.fromkeys(chosen))


def rows_of_set(name: str, options: argparse.Namespace) -> Iterator[Row]:
    ending, rows = SETS[name]
    for op in options.ops:
        if op.endswith(ending) and (op.endswith("_backward") or not options.dx_alone):
            yield from (replace(row, dx_alone=options.dx_alone) for row in rows(op, options))


def inputs_of(row: Row, xp: Any) -> dict[str, Any]:
    """The arguments of the row's function by name, x and dy with its gap and start."""
    inputs = bench.make_inputs(row.case, xp)
    if row.dy_dtype:
        inputs["dy"] = inputs["dy"].astype(row.dy_dtype)
    if row.gap or row.start:
        inputs |= {name: spread(inputs[name], row, xp) for name in ("x", "dy") if name in inputs}
    return inputs | ({"output_mask": row.output_mask} if row.dx_alone else {})


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("roofline.py", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    from cupynorm import cli

    chosen = rows_of(options)
    with ExitStack() as files:
        target = cli.writable(files, "--csv", options.csv)
        cupy = cli.needed_cupy()
        lines = []
        for row in report.progress(chosen, lambda row: f"{row.case.op} {row.case.shape}"):
            measured = bench.measure_case(row.case, inputs_of(row, cupy), xp=cupy)
            limit = bound_seconds(row, measured, cupy)
            meets = "yes" if measured.seconds <= limit else "no"
            triad_seconds = row.triad_seconds(measured)
            times = [f"{seconds * 1e6:.1f}" for seconds in (measured.seconds, triad_seconds, limit)]
            case, share = row.case, f"{triad_seconds / measured.seconds:.3f}"
            lines.append([case.op, case.shape, case.dtypes, row.layout, *times[:2], share, times[2], meets])
        if target:
            report.write_rows(target, HEAD, lines)
    print(f"{bench.device_name(cupy)}; a call that does nothing reads {measured.empty_seconds * 1e6:.1f} us\n")
    print(report.table(HEAD, lines))
    met = {row for row, line in zip(chosen, lines, strict=True) if line[-1] == "yes"}
    print(f"\n{len(met)} of {len(lines)} meet their bound{of_sets(met, options)}")
    return 0


def of_sets(met: set[Row], options: argparse.Namespace) -> str:
    """How many rows of each set that was chosen meet their bound, if there are several; some may be in two."""
    rows = {name: set(rows_of_set(name, options)) for name in options.set}
    counts = [f"{name} {len(met & of_set)} of {len(of_set)}" for name, of_set in rows.items() if of_set]
    return ": " + ", ".join(counts) if len(counts) > 1 else ""


def spread(array: Any, row: Row, xp: Any) -> Any:
    """The same numbers, with the row's gap and start."""
    rows, columns = array.shape
    memory = xp.empty(row.start + rows * (columns + row.gap), array.dtype)
    view = memory[row.start :].reshape(rows, columns + row.gap)[:, :columns]
    view[...] = array
    return view


def bound_seconds(row: Row, measured: bench.Measurement, cupy: Any) -> float:
    case = row.case
    if not case.backward:
        return copy_seconds_per_byte(cupy, case.rows * case.columns * case.dtype.itemsize) * case.bytes / 0.96
    triad_seconds = row.triad_seconds(measured)
    if row.alignment < 16:
        return triad_seconds / 0.90 + 3e-6
    if row.data_bytes < 24e6:  # 25 MB, rows rounded
        return triad_seconds + 2.5e-6
    share, constant = BOUNDS[case.norm]
    return triad_seconds / share + constant


@cache
def copy_seconds_per_byte(cupy: Any, nbytes: int) -> float:
    nbytes = -(-nbytes // COPY_GRAIN) * COPY_GRAIN
    source, target = cupy.zeros(nbytes, np.uint8), cupy.empty(nbytes, np.uint8)
    seconds = bench.time_call(lambda: target.data.copy_from_device_async(source.data, nbytes), cupy)
    return seconds / (2 * nbytes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from cupynorm import cli

    parser = cli.Parser(prog="roofline.py", description="Time the norms against the memory limit.")
    add_row_options(parser)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    return parser.parse_args(arguments)


def listed(convert: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """The type of an option that takes several, with commas between. (Here: compare.py runs with older cli.py, too.)"""
    return lambda text: tuple(dict.fromkeys(convert(item) for item in text.split(",")))


def columns(text: str) -> int:
    from cupynorm import cli

    number = cli.positive(text, int)
    if number > MOST_COLUMNS:
        raise argparse.ArgumentTypeError(f"got {text!r}; N of at most {MOST_COLUMNS} is needed")
    return int(number)


def add_row_options(parser: argparse.ArgumentParser) -> None:
    """Which rows: for all scripts that go through the same shapes."""
    from cupynorm import cli

    def megabytes(text: str) -> float:
        return cli.positive(text, float)

    def set_name(text: str) -> str:
        if text != "all" and text not in SETS:
            raise argparse.ArgumentTypeError(f"unknown set {text!r}; one of {', '.join(SETS)}, all is needed")
        return text

    def sets(text: str) -> tuple[str, ...]:
        names: tuple[str, ...] = listed(set_name)(text)
        return tuple(SETS) if "all" in names else names

    parser.add_argument("--set", type=sets, default=("sizes",), metavar="NAME,...", help=f"{', '.join(SETS)}, all")
    parser.add_argument("--ops", nargs="+", type=cli.op, default=bench.OPS, metavar="OP", help=", ".join(bench.OPS))
    words = "default: 25,100,1000, in the sets odd and forward 100,1000"
    parser.add_argument("--sizes", type=listed(megabytes), metavar="MB,...", help=words)
    parser.add_argument("--only", type=listed(columns), metavar="N,...", help="only these N")
    parser.add_argument("--dtype", type=cli.dtype, default="bfloat16", help="where a set has no own; default: bfloat16")
    parser.add_argument("--w-dtype", type=cli.dtype, help="default: float32, float64 with float64")
    words = "where dy has another type than x, in the set sizes"
    parser.add_argument("--dy-dtype", type=cli.dtype, help=words)
    words = "so many elements lie between rows of x and dy in the sets sizes and forward"
    parser.add_argument(
        "--gap", type=lambda text: 0 if text == "0" else columns(text), default=0, metavar="ELEMENTS", help=words
    )
    words = "backward calls that want neither dw nor db, whose bytes T counts nevertheless"
    parser.add_argument("--dx-alone", action="store_true", help=words)


if __name__ == "__main__":
    sys.exit(main())
