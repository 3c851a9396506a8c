"""Trees side by side: the same calls, timed in turn, on a CUDA device or with NumPy:

    python asv_bench/compare.py TREE TREE … [--set NAME,…] [--ops OP …] [--only N,…] [--rounds N] [--csv FILE]

A TREE is a commit, or `.` for this checkout as it lies there; behind a colon, it may set launch choices, constants of
cupynorm/cuda/config, to Python literals:

    python asv_bench/compare.py HEAD~1 . ".:STAGED_RING_BYTES=131072,LEAD_BYTES=98304" --only 4096

How long a call takes also depends on where in memory its arrays lie: on an H100, at 25 MB, by up to 3%, on an H200,
forward, 50 to 100 MB, by up to 6%. With --same-out all calls of a row write to the same arrays (`out=`). But another
tree, or launch choice, may need other memory beside them, so that all arrays of the next row lie elsewhere; with
--places N each row is timed with its arrays at N places, the same for all trees and rounds as far as may be, and its
time is the median.

With --multiprocessors N the device has no more than these, and all of its memory (occupy.py): 92 of an H100's 132, with
sizes as much smaller, stand in for an H200.

The rows are those of roofline.py. In each round every tree has its turn, in a process of its own; what a tree reads is
the median over the rounds, each of which is a median itself. Machines drift: compare within a row, and look at
`spread`, how far the rounds of the first tree lie apart.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm import bench, report

if TYPE_CHECKING:
    from roofline import Row

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("cupynorm", "kernels_cu")


class Tree(NamedTuple):
    """What is compared: a commit or ".", and constants of the launch choices; in words as they were given."""

    words: str
    commit: str
    settings: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("compare.py", lambda: run(options, sys.argv[1:] if arguments is None else arguments))


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    import occupy
    from roofline import rows_of

    from cupynorm import cli

    rows = rows_of(options)
    if options.turn is not None:
        xp, _ = cli.pick_device(options.device)
        settings = options.trees[options.turn].settings
        seconds_of_rows = seconds_of(rows, settings, xp, options.multiprocessors, options.same_out, options.places)
        print(json.dumps([str(Path(bench.__file__).resolve()), seconds_of_rows]))
        return 0
    with ExitStack() as files:
        target = cli.writable(files, "--csv", options.csv)
        xp, _ = cli.pick_device(options.device)
        if options.multiprocessors:
            occupy.check(xp, options.multiprocessors)
        names = list(map(str, range(1, len(options.trees) + 1)))
        arguments = [*arguments, "--device", "numpy" if xp.__name__ == "numpy" else "cuda"]  # the same for all
        seconds: list[list[list[float]]] = all_turns(__file__, options, arguments)
        head = ["op", "rows x N", "dtype x/w", "layout", *(f"{name}: us" for name in names)]
        head += [*(f"{name}: faster" for name in names[1:]), "spread"]
        lines = [line(row, [[times[number] for times in tree] for tree in seconds]) for number, row in enumerate(rows)]
        if target:
            report.write_rows(target, head, lines)
    print(bench.device_name(xp))
    for name, tree in zip(names, options.trees, strict=True):
        print(f"{name}: {tree.words}")
    print(f"\n{report.table(head, lines)}")
    return 0


def all_turns(script: str, options: argparse.Namespace, arguments: Sequence[str]) -> list[list[list[Any]]]:
    """Of each tree and round, what a script with the options of `add_tree_options` says of each row."""
    with ExitStack() as files:
        folders = [files.enter_context(checked_out(tree.commit)) for tree in options.trees]
        said: list[list[list[Any]]] = [[] for _ in folders]
        turns = [turn for _ in range(options.rounds) for turn in range(len(folders))]
        for turn in report.progress(turns, lambda turn: f"tree {turn + 1}"):
            said[turn].append(one_turn(script, folders[turn], turn, arguments))
    return said


def line(row: Row, seconds: Sequence[Sequence[float]]) -> list[str]:
    """Of one row, the times of each tree's rounds: medians, gains on the first tree, the range of that one's rounds."""
    first, *others = (statistics.median(times) for times in seconds)
    spread = (max(seconds[0]) - min(seconds[0])) / first
    case = row.case
    return [
        *(case.op, case.shape, case.dtypes, row.layout),
        *(f"{time * 1e6:.1f}" for time in (first, *others)),
        *(f"{100 * (first / time - 1):+.1f}%" for time in others),
        f"{100 * spread:.1f}%",
    ]


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the sources of a commit; this checkout for "."."""
    from cupynorm import cli

    if commit == ".":
        yield ROOT
        return
    packed = subprocess.run(["git", "archive", commit, *SOURCES], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise cli.UsageError(f"argument TREE: {cli.first_line(Exception(packed.stderr.decode()))}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def one_turn(script: str, folder: Path, turn: int, arguments: Sequence[str]) -> list[Any]:
    """What a script says of each row in a process that finds the folder's cupynorm."""
    from cupynorm import cli

    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    if folder != ROOT:  # kernels are cached by the folder of their sources, which is gone afterwards
        environment["CUPY_CACHE_DIR"] = str(folder / "kernels")
    command = [sys.executable, script, *arguments, "--turn", str(turn)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise cli.UsageError(f"tree {turn + 1} fails: {last}")
    package, of_rows = json.loads(done.stdout.splitlines()[-1])
    if not Path(package).is_relative_to(folder.resolve()):
        raise cli.UsageError(f"tree {turn + 1} fails: {sys.executable} finds cupynorm in {package}")
    return list(of_rows)


def set_constants(settings: dict[str, Any]) -> None:
    """Of the launch choices of this process's cupynorm: a package, whose modules have names from each other (in older
    trees one module). What was computed from a constant when its module was imported does not change with it."""
    from cupynorm import cli
    from cupynorm.cuda import config

    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{config.__name__}.")]
    for name, value in settings.items():
        having = [module for module in modules if hasattr(module, name)]
        if not having:
            raise cli.UsageError(f"cupynorm/cuda/config has no {name}")
        for module in having:
            setattr(module, name, value)


def seconds_of(
    rows: Sequence[Row],
    settings: dict[str, Any],
    xp: Any,
    multiprocessors: int | None = None,
    same_out: bool = False,
    places: int = 1,
) -> list[float]:
    import occupy

    set_constants(settings)
    if multiprocessors:
        occupy.shrink(multiprocessors)

    def at_a_place(row: Row, bytes_before: int) -> float:
        if xp.__name__ == "cupy":
            xp.get_default_memory_pool().free_all_blocks()  # else arrays lie where others did
        before = xp.empty(bytes_before, xp.uint8)
        seconds = seconds_of_row(row, xp, multiprocessors, same_out)
        del before
        return seconds

    at_places = []
    for row in rows:
        sizes = random.Random(row.case.shape)  # the same for all trees
        at_places.append([at_a_place(row, sizes.randrange(1 << 28) if places > 1 else 0) for _ in range(places)])
    return [statistics.median(seconds) for seconds in at_places]


def seconds_of_row(row: Row, xp: Any, multiprocessors: int | None, same_out: bool) -> float:
    import occupy
    from roofline import inputs_of

    inputs = inputs_of(row, xp)
    if same_out:
        inputs["out"] = bench.call(row.case, inputs)

    def call() -> Any:
        return bench.call(row.case, inputs)

    if multiprocessors:
        bench.time_call(call, xp, 1)  # so that nothing is loaded, and no memory is freed, while blocks are kept
    with occupy.occupied(xp, multiprocessors) if multiprocessors else nullcontext():
        return bench.time_call(call, xp)


def tree_of(text: str) -> Tree:
    """COMMIT or COMMIT:NAME=VALUE,…"""
    commit, _, settings = text.partition(":")
    try:
        call = ast.parse(f"dict({settings})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise argparse.ArgumentTypeError(f"got {text!r}; COMMIT or COMMIT:NAME=VALUE,… is needed") from None
    return Tree(text, commit, values)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from cupynorm import cli

    parser = cli.Parser(prog="compare.py", description="Time the same calls with several trees, in turn.")
    add_tree_options(parser)
    parser.add_argument("--device", choices=("cuda", "numpy"), help="default: CUDA, if it is there")
    words = "write all of a row's results to the same arrays; default: each call allocates its own"
    parser.add_argument("--same-out", action="store_true", help=words)
    words = "of a row's arrays in memory, of whose times the median counts; default: 1"
    parser.add_argument("--places", type=lambda text: cli.positive(text, int), default=1, metavar="N", help=words)
    words = "that the device is to have, on CUDA; default: all"
    parser.add_argument("--multiprocessors", type=lambda text: cli.positive(text, int), metavar="N", help=words)
    return parser.parse_args(arguments)


def add_tree_options(parser: argparse.ArgumentParser) -> None:
    """Which trees and rows: for all scripts that go through them in turn."""
    from roofline import add_row_options

    from cupynorm import cli

    words = "a commit or '.', and launch choices behind a colon"
    parser.add_argument("trees", nargs="+", type=tree_of, metavar="TREE", help=words)
    add_row_options(parser)
    parser.add_argument("--rounds", type=lambda text: cli.positive(text, int), default=3, help="default: 3")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)


if __name__ == "__main__":
    sys.exit(main())
