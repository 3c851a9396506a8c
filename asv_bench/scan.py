"""Column blocks: several numbers of them, and none, timed by turns in one process on a CUDA device.

    python asv_bench/scan.py [--only N,…] [--sizes MB,…] [--dtype NAME] [--blocks N,…] [--csv FILE]

Where there is little data, blocks of their own sum dw and db down the columns beside those that walk the rows
(column_blocks.cuh). How many, how wide a slice of columns each takes, and whether several share a slice's rows, is
chosen by cupynorm/cuda/config/column_blocks.py, whose limits come from this: "chosen" is what it chooses, "none" a
launch as it would be if there were none, "best" the fastest of all, which the CSV file has one by one. About the
numbers of --blocks are tried, in slices of a power of two of sectors; what is chosen may have slices of other widths.
A grid is walkers + column blocks (threads of a block side by side, and blocks that share a slice). What runs is
checked: any grid must give the sums that the chosen one gives, within what another order of them makes out.

With --multiprocessors N the device has no more than these (occupy.py): 92 of an H100's 132, with 0.7 of the data, stand
in for an H200, but not for rows that clusters share, which then find no room.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm import bench, report

if TYPE_CHECKING:
    from cupynorm.cuda.config import BackwardConfig, Grid
    from cupynorm.problem import NormProblem

OPS = ("rmsnorm_backward", "layernorm_backward")
COLUMNS, SIZES = (512, 1024, 2048, 4096, 8192, 16384), (6.0, 12.0, 25.0, 50.0)
BLOCKS = (32, 40, 48, 56, 64, 72, 80, 96)
SLICE_THREADS = (2, 4, 8, 16, 32, 64, 128)  # of a block, side by side, 16 bytes each
SHARED_LEAST_THREADS = 8  # of a slice that several blocks share: a line of memory
NEAR = 0.13  # what a number of blocks may differ from one that is asked for
SAME_SUMS = 1e-6  # relative
HEAD = ["op", "rows x N", "T us", "bound us", "none us", "chosen us", "chosen", "best us", "best"]
ALL_HEAD = [*HEAD[:4], "grid", "kind", "us"]


class Timed(NamedTuple):
    grid: Grid
    kind: str  # "chosen", "none" or ""
    microseconds: float

    @property
    def words(self) -> str:
        grid = self.grid
        if not grid.column_blocks:
            return str(grid.walkers)
        return f"{grid.walkers}+{grid.column_blocks} ({grid.column_threads}, {grid.row_parts})"


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("scan.py", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    import occupy
    from roofline import bound_seconds, by_data, inputs_of

    from cupynorm import cli

    rows = [row for op in OPS for row in by_data(op, options.only, options.sizes, options.dtype)]
    cupy = cli.needed_cupy()
    if options.multiprocessors:
        occupy.check(cupy, options.multiprocessors)
        occupy.shrink(options.multiprocessors)
    lines, all_lines = [], []
    with ExitStack() as files:
        target = cli.writable(files, "--csv", options.csv)
        for row in report.progress(rows, lambda row: f"{row.case.op} {row.case.shape}"):
            inputs = inputs_of(row, cupy)
            whole = bench.measure_case(row.case, inputs, xp=cupy)
            limits = (whole.triad_seconds * 1e6, bound_seconds(row, whole, cupy) * 1e6)
            start = [row.case.op, row.case.shape, *(f"{limit:.1f}" for limit in limits)]
            timed = scan(row.case, inputs, options, cupy)
            all_lines += [[*start, one.words, one.kind, f"{one.microseconds:.2f}"] for one in timed]
            lines.append([*start, *summary(timed)])
        if target:
            report.write_rows(target, ALL_HEAD, all_lines)
    print(f"{bench.device_name(cupy)}; {rows[0].case.dtypes}\n")
    print(report.table(HEAD, lines))
    return 0


def summary(timed: Sequence[Timed]) -> list[str]:
    none, chosen = (next((one for one in timed if kind in one.kind), None) for kind in ("none", "chosen"))
    best = min(timed, key=lambda one: one.microseconds, default=None)
    found = [f"{none.microseconds:.1f}" if none else ""]
    for one in (chosen, best):
        found += [f"{one.microseconds:.1f}", one.words] if one else ["", ""]
    return found


def scan(case: bench.Case, inputs: dict[str, Any], options: argparse.Namespace, cupy: Any) -> list[Timed]:
    """What each grid takes; nothing where the call has no walkers, as few rows have a kernel of their own."""
    import occupy

    from cupynorm import dispatch

    usual = dispatch.plan_of
    expected = bench.call(case, inputs)
    inputs["out"] = tuple(cupy.empty_like(result) for result in expected)
    try:
        plans = plans_of(case, inputs, options.blocks)
        times: dict[Grid, list[float]] = {grid: [] for grid in plans}
        for plan, _ in plans.values():
            dispatch.plan_of = plan
            for array in inputs["out"]:
                array.fill(float("nan"))  # which stays where a grid writes nothing
            for result, other in zip(expected, bench.call(case, inputs), strict=True):
                check_same(result, other, cupy)
        for _ in range(options.rounds):
            with occupy.occupied(cupy, options.multiprocessors) if options.multiprocessors else nullcontext():
                for grid in random.sample(list(plans), len(plans)):
                    dispatch.plan_of = plans[grid][0]
                    times[grid].append(bench.time_call(lambda: bench.call(case, inputs), cupy) * 1e6)
    finally:
        dispatch.plan_of = usual
    return [Timed(grid, plans[grid][1], min(times[grid])) for grid in plans]


def check_same(result: Any, other: Any, cupy: Any) -> None:
    one, another = (array.astype("float64").ravel() for array in (result, other))
    if not cupy.linalg.norm(one - another) <= SAME_SUMS * cupy.linalg.norm(one):
        raise ArithmeticError(f"an array of shape {result.shape} differs from that of the chosen grid")


def plans_of(case: bench.Case, inputs: dict[str, Any], blocks: Sequence[int]) -> dict[Grid, tuple[Any, str]]:
    """A cache of plans, with one in it, for each grid, and what kind of grid that is."""
    from cupynorm import dispatch
    from cupynorm.cuda.config import backward, walkers

    found: dict[Grid, tuple[Any, str]] = {}
    usual = walkers.column_blocks_grid, backward.has_column_blocks, dispatch.plan_of
    seen: list[Any] = []

    def plan_by(column_blocks_grid: Any, kind: str) -> None:
        def noted(*arguments: Any) -> Any:
            seen[:] = arguments
            return column_blocks_grid(*arguments)

        walkers.column_blocks_grid = noted
        backward.has_column_blocks = (lambda *_: False) if kind == "none" else usual[1]
        dispatch.plan_of = functools.lru_cache(maxsize=1, typed=True)(dispatch.plan_of.__wrapped__)
        bench.call(case, inputs)
        if not seen:
            return
        grid = walkers.grid(*seen)
        plan, kinds = found.get(grid, (dispatch.plan_of, ""))
        found[grid] = plan, f"{kinds} {kind}".strip()

    try:
        plan_by(usual[0], "chosen")
        for grid in list(grids(*seen, blocks)) if seen else ():
            plan_by(lambda *_, grid=grid: grid, "")
        if seen:
            plan_by(lambda *_: None, "none")
    finally:
        walkers.column_blocks_grid, backward.has_column_blocks, dispatch.plan_of = usual
    return found


def grids(
    config: BackwardConfig, problem: NormProblem, blocks_at_once: int, device: Any, blocks: Sequence[int]
) -> Iterator[Grid]:
    """With about so many column blocks, slices of a power of two of sectors, and the walkers that have room beside."""
    from cupynorm.cuda.config import Grid, column_blocks
    from cupynorm.cuda.config.common import divide_up

    if config.route != "staged":
        return
    room = blocks_at_once * config.slabs
    steps = divide_up(problem.rows, config.groups)
    for threads in SLICE_THREADS:
        slices = divide_up(problem.columns, threads * column_blocks.vector_of(config, problem))
        shares = threads >= SHARED_LEAST_THREADS and config.slabs == 1
        for wanted in blocks:
            parts = max(1, round(wanted / slices)) if shares else 1
            if threads > config.threads or abs(slices * parts - wanted) > NEAR * wanted:
                continue
            number = divide_up(slices * parts, config.cluster) * config.cluster
            walkers = min(steps, (room - number) // config.slabs)
            if walkers > 0:
                yield Grid(walkers, number, threads, parts)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from roofline import columns, listed

    from cupynorm import cli

    megabytes, count = ((lambda text, kind=kind: cli.positive(text, kind)) for kind in (float, int))
    parser = cli.Parser(prog="scan.py", description="Time backward calls with several numbers of column blocks.")
    parser.add_argument("--only", type=listed(columns), default=COLUMNS, metavar="N,...", help="default: 512 to 16384")
    parser.add_argument("--sizes", type=listed(megabytes), default=SIZES, metavar="MB,...", help="default: 6,12,25,50")
    parser.add_argument("--dtype", type=cli.dtype, default="bfloat16", help="of x and dy; default: bfloat16")
    parser.add_argument("--blocks", type=listed(count), default=BLOCKS, metavar="N,...", help="about so many are tried")
    parser.add_argument("--rounds", type=count, default=2, metavar="N", help="default: 2")
    words = "that the device is to have; default: all"
    parser.add_argument("--multiprocessors", type=count, metavar="N", help=words)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write all grids there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
