"""LayerNorm backward on the CPU (dx, dw, db in float32) against PyTorch's operator, in one process.

    python asv_bench/cpu_peers.py [--threads N] [--calls N] [--passes]

The two take turns, with the same arrays and the same number of threads. Each turn begins with a call that is not
timed: PyTorch's threads keep spinning for some milliseconds after a call, and a turn should pay for its own threads
only. `add` is NumPy's z = x + dy into given memory, on one thread: the machine's pace on a pass as simple as can be.

--passes shows what limits 4096x1024, which is small enough for the caches to matter: NumPy needs a call for every
arithmetic operation, each of them a pass over the block, while PyTorch keeps a row in registers. One thread walks the
blocks with only the calls that the formulas cannot do without, the cheapest found for each. Printed are their times,
the sum, and the sum divided by the threads. That is a floor for this arithmetic in NumPy: it leaves out the sums in
float64, the rescaling of tiny and huge rows, the waiting for the GIL, and all that happens between the calls.

Exit status: 0 if every ratio of medians is within its bound, 1 if one is not, 2 if the comparison cannot be made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray
BOUNDS = {(4096, 1024): 1.2, (4096, 4096): 1.2, (1024, 16384): 1.2, (32768, 256): 3.0}
TIMED_CALLS_A_TURN = 3
PASSES_SHAPE = (4096, 1024)
MOST_THREADS = 1024


def main() -> int:
    try:
        import torch

        import cupynorm
        from cupynorm import cli
    except ImportError as error:
        print(f"cpu_peers: cannot import {error.name}; torch and cupynorm must be installed", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = cli.Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=threads, default=cores, help="threads for either (default: all cores)")
    calls_words = "timed calls of each (default: 45)"
    parser.add_argument("--calls", type=lambda text: cli.positive(text, int), default=45, help=calls_words)
    parser.add_argument("--passes", action="store_true", help="also time NumPy's passes one by one at 4096x1024")
    options = parser.parse_args()
    os.environ["CUPYNORM_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    print(f"NumPy {np.__version__}, PyTorch {torch.__version__}, threads: {options.threads}\n")
    print("| M x N | cupynorm ms | PyTorch ms | ratio | bound | | add ms |")
    print("|---|---|---|---|---|---|---|")
    missed = False
    floor: tuple[dict[str, float], float] | None = None
    for (rows, columns), bound in BOUNDS.items():
        rng = np.random.default_rng(0)
        x, dy = (rng.standard_normal((rows, columns), dtype=np.float32) for _ in range(2))
        w = rng.standard_normal(columns, dtype=np.float32)
        b, z = np.zeros_like(w), np.empty_like(x)
        _, mean, rstd = cupynorm.layernorm_forward(x, w, b)
        tensors = [torch.from_numpy(array) for array in (dy, x, mean[:, None], rstd[:, None], w, b)]

        def ours(x=x, w=w, dy=dy, mean=mean, rstd=rstd) -> object:  # type: ignore[no-untyped-def]
            return cupynorm.layernorm_backward(x, w, dy, mean, rstd)

        def peer(tensors=tensors, columns=columns) -> object:  # type: ignore[no-untyped-def]
            dy, x, mean, rstd, w, b = tensors
            return torch.ops.aten.native_layer_norm_backward(dy, x, [columns], mean, rstd, w, b, [True, True, True])

        def add(x=x, dy=dy, z=z) -> object:  # type: ignore[no-untyped-def]
            return np.add(x, dy, out=z)

        our_time, peer_time, add_time = medians([ours, peer, add], -(-options.calls // TIMED_CALLS_A_TURN))
        if options.passes and (rows, columns) == PASSES_SHAPE:
            floor = (pass_times(x, w, dy, mean, rstd), peer_time)
        ratio = our_time / peer_time
        missed |= ratio > bound
        print(
            f"| {rows}x{columns} | {our_time * 1e3:.2f} | {peer_time * 1e3:.2f} | {ratio:.2f} | {bound:.1f} "
            f"| {'missed' if ratio > bound else 'ok'} | {add_time * 1e3:.2f} |",
            flush=True,
        )
    if floor is not None:
        print_floor(*floor, options.threads)
    return int(missed)


def threads(text: str) -> int:
    from cupynorm import cli

    number = cli.positive(text, int)
    if number > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"got {text!r}; at most {MOST_THREADS} are possible")
    return int(number)


def medians(calls: list[Callable[[], object]], turns: int) -> list[float]:
    """The median time of each call in seconds; the calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        for call, record in zip(calls, times, strict=True):
            call()
            for _ in range(TIMED_CALLS_A_TURN):
                start = time.perf_counter()
                call()
                end = time.perf_counter()
                if turn:  # the first turn warms up
                    record.append(end - start)
    return [statistics.median(record) for record in times]


def pass_times(x: Array, w: Array, dy: Array, mean: Array, rstd: Array) -> dict[str, float]:
    """Seconds that each pass over all of x and dy takes, in blocks of the library's size."""
    from cupynorm.numpy_backend import LARGEST_BLOCK

    rows, columns = x.shape
    mean, rstd, dx = mean[:, None], rstd[:, None], np.empty_like(x)
    block_rows = LARGEST_BLOCK // columns
    room, row = np.empty((block_rows, columns), x.dtype), np.empty((block_rows, 1, columns), x.dtype)
    # Sixteen rows and half of the columns at a time: BLAS would bring in threads of its own for more.
    tiles, sums = (block_rows // 16, 16, 2, columns // 2), row[: block_rows // 16].reshape(-1, 2, 1, columns // 2)
    c = np.ones((block_rows, 1), x.dtype)
    steps: dict[str, Callable[[slice], object]] = {
        "sum dy over rows": lambda b: np.matmul(c[:16, 0], dy[b].reshape(tiles).swapaxes(1, 2), out=sums[:, :, 0]),
        "x - mean": lambda b: np.subtract(x[b], mean[b], out=room),
        "dy * that (into dx)": lambda b: np.multiply(dy[b], room, out=dx[b]),
        "sum it over rows, times rstd": lambda b: np.matmul(
            rstd[b].reshape(-1, 1, 1, 16), dx[b].reshape(tiles).swapaxes(1, 2), out=sums
        ),
        "dot it with w (c1)": lambda b: np.matmul(dx[b, None], w[:, None]),
        "dot dy with w (c2)": lambda b: np.matmul(dy[b, None], w[:, None]),
        "(x - mean) * c1": lambda b: np.multiply(room, c, out=room),
        "+ c2": lambda b: np.add(room, c, out=room),
        "dy * w": lambda b: np.multiply(dy[b], w, out=dx[b]),
        "dy * w - that": lambda b: np.subtract(dx[b], room, out=dx[b]),
        "* rstd": lambda b: np.multiply(dx[b], rstd[b], out=dx[b]),
    }
    walks: dict[str, list[float]] = {name: [] for name in steps}
    buffer_size = np.setbufsize(16)  # as the library does, and for its reason
    for _ in range(20):
        times = dict.fromkeys(steps, 0.0)
        for start in range(0, rows, block_rows):
            for name, step in steps.items():
                before = time.perf_counter()
                step(slice(start, start + block_rows))
                times[name] += time.perf_counter() - before
        for name, seconds in times.items():
            walks[name].append(seconds)
    np.setbufsize(buffer_size)
    return {name: statistics.median(record) for name, record in walks.items()}


def print_floor(times: dict[str, float], peer_time: float, threads: int) -> None:
    rows, columns = PASSES_SHAPE
    print(f"\n| pass over {rows}x{columns}, one thread | ms |\n|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {seconds * 1e3:.2f} |")
    total = sum(times.values())
    print(f"| sum | {total * 1e3:.2f} |")
    floor = total / threads
    print(f"\nfloor, threads {threads}: {floor * 1e3:.2f} ms, {floor / peer_time:.2f} times PyTorch's time")


if __name__ == "__main__":
    sys.exit(main())
