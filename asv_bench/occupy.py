"""A device with fewer multiprocessors than it has, for compare.py: blocks that do nothing keep the others.

An H100 of 92 multiprocessors has as much memory for each as an H200, and with 0.7 times the rows walkers have as many
steps. There kernels without clusters took what FIGURES.md has for an H200 within some 2%, forward and short rows 5; its
L2 cache is the whole device's, and clusters find less room.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

AT_MOST_NANOSECONDS = 10 * 10**9  # then the blocks leave, whatever became of the process's host side


def check(xp: Any, multiprocessors: int) -> None:
    """Raises UsageError where there are not so many."""
    from cupynorm import cli

    if xp.__name__ == "numpy":
        raise cli.UsageError("argument --multiprocessors: needs CUDA")
    most = xp.cuda.Device().attributes["MultiProcessorCount"]
    if multiprocessors > most:
        raise cli.UsageError(f"argument --multiprocessors: got {multiprocessors}; the device has {most}")


def shrink(multiprocessors: int) -> None:
    """Has this process's launch choices see so many multiprocessors, and the memory of the whole device."""
    from cupynorm.cuda import launch

    device_of = launch.device_of
    launch.device_of = cache(lambda number: device_of(number)._replace(multiprocessors=multiprocessors))


@contextmanager
def occupied(cupy: Any, multiprocessors: int) -> Iterator[None]:
    """While all but so many are kept. Nothing in it may wait for the whole device, as freeing its memory does."""
    device = cupy.cuda.Device()
    shared_bytes = device.attributes["MaxSharedMemoryPerBlockOptin"]
    kernel = _kernel(cupy, device.id)
    kernel.max_dynamic_shared_size_bytes = shared_bytes
    leave = cupy.zeros(1, cupy.int32)
    cupy.cuda.get_current_stream().synchronize()
    keeping, telling = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    blocks = device.attributes["MultiProcessorCount"] - multiprocessors
    if blocks > 0:
        with keeping:
            kernel((blocks,), (32,), (leave, cupy.int64(AT_MOST_NANOSECONDS)), shared_mem=shared_bytes)
        time.sleep(0.002)  # until they are there
    try:
        yield
    finally:
        leave.data.memset_async(1, leave.nbytes, telling)
        keeping.synchronize()


@cache
def _kernel(cupy: Any, device_id: int) -> Any:
    source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    return cupy.RawKernel(source, "occupy")
