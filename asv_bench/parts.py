"""What the parts of a backward call take, on a CUDA device: the same calls with parts of their kernels left out.

    python asv_bench/parts.py [--only N,…] [--sizes MB,…] [--csv FILE]

Copies of this checkout are altered in backward_staged.cu, and each is timed in a process of its own, as in
`cupynorm.bench`. What altered kernels compute is wrong, and nobody looks at it:

    whole        as it is
    no sums      no first halves, and no wait for a row's sums: dw and db are zeros, which go the same way in the end
    copies       beside that x + dy in place of dx, no w, no statistics: what moving the data takes by the same ring
    arithmetic   nothing is copied into the ring, nor waited for, nor counted for pace: all of the arithmetic, on
                 whatever lies there

"dx" is a call that asks for dx alone, by the kernel that adds nothing up; what a whole call takes beyond that is
the price of dw and db, and of pace where that is kept (from 12 steps a walker on, LayerNorm from 24). "bound" is what
roofline.py holds a whole call against. Where blocks of their own sum dw and db (little data; column_blocks.cuh), these
do as always. Few rows (backward_few_rows.cu) have a kernel in which nothing is left out: their parts all take as long.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cupynorm import bench, report

ALTERED = "kernels_cu/backward_staged.cu"
OPS = ("rmsnorm_backward", "layernorm_backward")
COLUMNS, SIZES = (1024, 4096, 16384), (25.0, 100.0)

NO_SUMS = (
    ("exchange.collect(j, before.posted, asked)", "Sums<Compute>{Compute(0), Compute(0)}"),
    (
        """            if (now.active) {
                staged_row(now.place, j).for_each_vector(at, [&](int k, XVector x, DyVector dy, bool holds) {
                    keep_held(x, held.of(k, holds));
                    keep_held(dy, held.of(k, holds));
                    first_half<true, kSumsColumns>(chains, &column_sums, k, x, dy, w, now.row);
                });
            }
            const Sums<Compute> partial = sum_chains<kLayerNorm>(chains, at);
            if constexpr (kGang) exchange.settle(j - kBehind, asked);
            now.posted = exchange.post(partial, j, share.thread);
""",
        "            now.posted = sum_chains<kLayerNorm>(chains, at);\n",
    ),
    ("        if constexpr (kGang) exchange.send(j, walk.end);\n", ""),
)
COPIES = (
    (
        """const XVector packed = second_half(k, x, dy, w, before.row, coefficients);
                writer.put<true>(dx, at, k, packed, before.active, holds);""",
        """XVector sum;
                const auto *a = reinterpret_cast<const unsigned*>(x.words);
                const auto *b = reinterpret_cast<const unsigned*>(dy.words);
#pragma unroll
                for (int i = 0; i < XVector::kBytes / 4; ++i) reinterpret_cast<unsigned*>(sum.words)[i] = a[i] + b[i];
                writer.put<true>(dx, at, k, sum, before.active, holds);""",
    ),
    ("now.row = statistics.of(a, first_row, walk.step, j);", "now.row.rstd = 1;"),
    ("    statistics.load_next(a, first_row, walk.step, 0);\n", ""),
    (
        "    const ColumnsAhead w_ahead(state, block, a.w, a.w_code, shared, ahead_bytes);\n",
        "",
    ),
    ("    w_ahead.wait();\n    w.load(w_ahead.source, a.w_code, own);\n", ""),
)
ARITHMETIC = (
    ("now.active = ring.wait(now.place) && j < own_count;", "now.active = j < own_count;"),
    ("ring.start<kFirstSteps>(walk, x_part, dy_part);", "ring.start<0>(walk, x_part, dy_part);"),
    ("    ring.start_others<kFirstSteps>(walk, x_part, dy_part);\n", ""),
    (
        "        if (writes) ring.fill_again(before.place, walk, j - kBehind, pace, x_part, dy_part);\n",
        "        __syncwarp();\n",
    ),
)


class Part(NamedTuple):
    """A copy of the kernels: each text of the file, which is there once, is replaced by another."""

    name: str
    edits: tuple[tuple[str, str], ...] = ()

    def of(self, source: str) -> str:
        for before, after in self.edits:
            if source.count(before) != 1:
                raise ValueError(f"{ALTERED} does not have this once, which parts.py replaces: {before.strip()!r}")
            source = source.replace(before, after)
        return source


PARTS = (
    Part("whole"),
    Part("no sums", NO_SUMS),
    Part("copies", NO_SUMS + COPIES),
    Part("arithmetic", ARITHMETIC),
)
HEAD = ["op", "rows x N", "T us", "bound us"]
HEAD += [f"{part.name}: {what}" for part in PARTS for what in ("us", "dx us")]


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("parts.py", lambda: run(options, sys.argv[1:] if arguments is None else arguments))


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from compare import one_turn
    from roofline import bound_seconds, by_data, inputs_of

    from cupynorm import cli

    rows = [row for op in OPS for row in by_data(op, options.only, options.sizes, "bfloat16")]
    cupy = cli.needed_cupy()
    if options.turn is not None:
        times = [both_us(row.case, inputs_of(row, cupy), cupy) for row in rows]
        print(json.dumps([str(Path(bench.__file__).resolve()), times]))
        return 0
    with ExitStack() as files:
        target = cli.writable(files, "--csv", options.csv)
        measured = []
        for part in report.progress(PARTS, lambda part: part.name):
            with altered(part) as folder:
                measured.append(one_turn(__file__, folder, PARTS.index(part), arguments))
        lines = []
        for row, *parts in zip(rows, *measured, strict=True):
            whole = bench.measure_case(row.case, inputs_of(row, cupy), xp=cupy)
            limits = (whole.triad_seconds * 1e6, bound_seconds(row, whole, cupy) * 1e6)
            times = [time for both in parts for time in both]
            lines.append([row.case.op, row.case.shape, *(f"{time:.1f}" for time in (*limits, *times))])
        if target:
            report.write_rows(target, HEAD, lines)
    print(f"{bench.device_name(cupy)}; bfloat16, w in float32\n")
    print(report.table(HEAD, lines))
    return 0


@contextmanager
def altered(part: Part) -> Iterator[Path]:
    """A folder with a copy of this checkout's sources, altered."""
    from compare import ROOT, SOURCES

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in SOURCES:
            shutil.copytree(ROOT / source, folder / source)
        path = folder / ALTERED
        path.write_text(part.of(path.read_text(encoding="utf-8")), encoding="utf-8")
        yield folder


def both_us(case: bench.Case, inputs: dict[str, Any], cupy: Any) -> list[float]:
    """Of the call, and of one that asks for dx alone."""
    from roofline import Row

    masks = ({}, {"output_mask": Row(case, dx_alone=True).output_mask})
    return [bench.time_call(lambda mask=mask: bench.call(case, inputs | mask), cupy) * 1e6 for mask in masks]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from roofline import columns, listed

    from cupynorm import cli

    megabytes = listed(lambda text: cli.positive(text, float))
    parser = cli.Parser(prog="parts.py", description="Time backward calls with parts of their kernels left out.")
    parser.add_argument(
        "--only", type=listed(columns), default=COLUMNS, metavar="N,...", help="default: 1024,4096,16384"
    )
    parser.add_argument("--sizes", type=megabytes, default=SIZES, metavar="MB,...", help="default: 25,100")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
