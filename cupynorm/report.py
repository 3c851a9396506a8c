"""What people look at: the table, the progress bar, CSV and the picture."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from .bench import Measurement

Lines = dict[str, list[tuple[int, float]]]  # by label: N and GB/s
TRIAD = "triad z = x + dy"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns under their heads: the three that name the case to the left, figures to the right."""
    body = list(rows)
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[:3] = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, body)])


def progress(items: Sequence[Any], describe: Any, stream: TextIO | None = None) -> Iterator[Any]:
    """Goes through the items; where the stream (stderr) is a terminal, a bar says how far it is."""
    stream = stream or sys.stderr
    if stream is None or not stream.isatty():  # None: a process may be started without
        yield from items
        return
    start = time.monotonic()
    try:
        for done, item in enumerate(items):
            bar = ("#" * (20 * done // len(items))).ljust(20, ".")
            left = (time.monotonic() - start) / done * (len(items) - done) if done else 0
            note = f", {math.ceil(left)} s left" if done else ""
            text = f"[{bar}] {done + 1}/{len(items)} {describe(item)}{note}"
            stream.write(f"\r\x1b[K{text[: _terminal_columns(stream) - 1]}")
            stream.flush()
            yield item
    finally:
        stream.write("\r\x1b[K")
        stream.flush()


def _terminal_columns(stream: TextIO) -> int:
    """Of the terminal behind this stream, whatever stdout is."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):  # it has no file, say
        columns = 0
    return columns or shutil.get_terminal_size().columns


def timing_head(device_is_cuda: bool) -> list[str]:
    return ["op", "rows x N", "dtype x/w", "time us" if device_is_cuda else "time ms", "GB/s", "of triad"]


def timing_cells(m: Measurement, device_is_cuda: bool) -> list[str]:
    seconds = f"{m.seconds * 1e6:.1f}" if device_is_cuda else f"{m.seconds * 1e3:.2f}"
    return [m.case.op, m.case.shape, m.case.dtypes, seconds, gbps(m.gbps), f"{m.fraction:.3f}"]


def gbps(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def real_path(path: Path) -> Path:
    """Behind symbolic links; Path.resolve() has no name for those that go round in circles."""
    return Path(os.path.realpath(path))


def _new_file_beside(path: Path) -> Path:
    """Of a name that is free: a process that was killed may have left one with this process's number."""
    for attempt in itertools.count():
        part = path.with_name(f".{path.name[:100]}.{os.getpid()}.{attempt}.part")
        with suppress(FileExistsError):
            part.touch(exist_ok=False)
            return part
    raise AssertionError("unreachable")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A new file to write into, which takes the path's place once all went well and vanishes if not.

    Made at once, so that a path that cannot be written raises OSError before any work.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is there and is not a regular file")
    path = real_path(path)
    if path.exists() and not os.access(path, os.W_OK):
        raise OSError(f"{path} is write-protected")
    part = _new_file_beside(path)
    try:
        if path.exists():
            shutil.copymode(path, part)
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


CSV_HEAD = (
    "op rows columns dtype w_dtype has_bias device seconds bytes gbps "
    "fraction triad_seconds triad_gbps empty_seconds".split()
)  # fmt: skip


def write_csv(path: Path, measurements: Iterable[Measurement]) -> None:
    """One line for each measurement; `triad_seconds` is scaled to the bytes that the work needs."""
    write_rows(
        path,
        CSV_HEAD,
        (
            [
                *(m.case.op, m.case.rows, m.case.columns, m.case.dtype.name, m.case.w_dtype.name, int(m.case.has_bias)),
                *(m.device, f"{m.seconds:.9f}", m.case.bytes, f"{m.gbps:.2f}", f"{m.fraction:.4f}"),
                *(f"{m.triad_seconds:.9f}", f"{m.triad.gbps:.2f}", f"{m.empty_seconds:.9f}"),
            ]
            for m in measurements
        ),
    )


def write_rows(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """The rows of a table as CSV, under its head."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])


def plot_formats() -> set[str]:
    """File name endings that matplotlib knows. Raises ImportError without it."""
    from matplotlib.figure import Figure

    return set(Figure().canvas.get_supported_filetypes())


def try_plot(file_format: str) -> None:
    """Raises what matplotlib does where it cannot write that: some formats need other programs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.text(0, 0, "N")
    figure.savefig(io.BytesIO(), format=file_format)


def write_plot(path: Path, measurements: Sequence[Measurement], file_format: str) -> None:
    """GB/s against N, a line for each op and dtype, the triad as the ceiling."""
    lines: Lines = {}
    ceilings: dict[str, dict[int, float]] = {}
    rows_by_columns: dict[int, set[int]] = {}
    for m in measurements:
        rows_by_columns.setdefault(m.case.columns, set()).add(m.case.rows)
    one_line_each = all(len(rows) == 1 for rows in rows_by_columns.values())
    for m in measurements:
        label = f"{m.case.op}, {m.case.dtypes}"
        if not one_line_each:
            label += f", {m.case.rows} rows"
        lines.setdefault(label, []).append((m.case.columns, m.gbps))
        triads = ceilings.setdefault(m.case.dtype.name, {})
        triads[m.case.columns] = max(triads.get(m.case.columns, 0.0), m.triad.gbps)
    labels = {name: f"{TRIAD}, {name}" if len(ceilings) > 1 else TRIAD for name in ceilings}
    draw(
        path,
        file_format,
        f"cupynorm on {measurements[0].device}",
        lines,
        {labels[name]: list(triads.items()) for name, triads in ceilings.items()},
    )


def draw(path: Path, file_format: str, title: str, lines: Lines, ceilings: Lines, remark: str = "") -> None:
    """Lines of (N, GB/s) under their ceilings, N on a logarithmic axis; readable in black and white."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for number, (label, points) in enumerate(ceilings.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            color="0.65", linewidth=3.0 - 0.8 * number, label=label, marker="_", markersize=14,
        )  # fmt: skip
    for number, (label, points) in enumerate(lines.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            color=("black", "0.4")[number // 4 % 2], linestyle=("-", "--", ":", "-.")[number % 4],
            marker="osD^vPX*"[number % 8], markersize=6, label=label,
        )  # fmt: skip
    columns = sorted({n for points in (*lines.values(), *ceilings.values()) for n, _ in points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(columns))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(n) for n in columns], rotation=45 if len(columns) > 8 else 0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N, elements in a row")
    axes.set_ylabel("GB/s of the bytes that the work needs")
    axes.set_title(title)
    if remark:
        figure.supxlabel(remark, fontsize="x-small", color="0.3")
    axes.grid(color="0.9")
    figure.legend(fontsize="small", loc="outside right upper")  # beside the axes: inside it would hide points
    figure.savefig(path, format=file_format, dpi=150)
