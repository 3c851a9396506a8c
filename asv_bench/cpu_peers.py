"""LayerNorm backward on the CPU (dx, dw, db in float32) against PyTorch's operator, in one process.

    python asv_bench/cpu_peers.py [--threads N] [--calls N]

The two take turns, with the same arrays and the same number of threads. Each turn begins with a call that is not
timed: PyTorch's threads keep spinning for some milliseconds after a call, and a turn should pay for its own threads
only. `add` is NumPy's z = x + dy into given memory, on one thread: the machine's pace on a pass as simple as can be.

Exit status: 0 if every ratio of medians is within its bound, 1 if one is not, 2 if the comparison cannot be made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

BOUNDS = {(4096, 1024): 1.2, (4096, 4096): 1.2, (1024, 16384): 1.2, (32768, 256): 3.0}
TIMED_CALLS_A_TURN = 3


def main() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=positive, default=cores, help="threads for either (default: all cores)")
    parser.add_argument("--calls", type=positive, default=45, help="timed calls of each (default: 45)")
    options = parser.parse_args()
    os.environ["CUPYNORM_NUM_THREADS"] = str(options.threads)
    try:
        import torch

        import cupynorm
    except ImportError as error:
        print(f"cpu_peers: cannot import {error.name}; torch and cupynorm must be installed", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    print(f"NumPy {np.__version__}, PyTorch {torch.__version__}, threads: {options.threads}\n")
    print("| M x N | cupynorm ms | PyTorch ms | ratio | bound | | add ms |")
    print("|---|---|---|---|---|---|---|")
    missed = False
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
        ratio = our_time / peer_time
        missed |= ratio > bound
        print(
            f"| {rows}x{columns} | {our_time * 1e3:.2f} | {peer_time * 1e3:.2f} | {ratio:.2f} | {bound:.1f} "
            f"| {'missed' if ratio > bound else 'ok'} | {add_time * 1e3:.2f} |",
            flush=True,
        )
    return int(missed)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; at least 1 is needed")
    return value


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


if __name__ == "__main__":
    sys.exit(main())
