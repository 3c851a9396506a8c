"""Launches with attributes that CuPy's own launch does not offer: clusters, and overlap with the kernel before.

A thin layer over cuLaunchKernelEx and cuOccupancyMaxActiveClusters of the CUDA driver library
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EXEC.html).
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import cupy

_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


ReadyLaunch = tuple[_LaunchConfig, Callable[[], int]]

_attributes_lock = threading.Lock()


class Arguments:
    """The struct that a kernel takes by value, in memory that its launches read: addresses first, then what is fixed.

    `layout` is that of the whole struct, as in Python's struct module; `fill` takes the addresses.
    """

    def __init__(self, layout: str, *fixed: Any) -> None:
        size = struct.calcsize(layout)
        addresses = len(struct.unpack(layout, bytes(size))) - len(fixed)
        memory = ctypes.create_string_buffer(struct.pack(layout, *[0] * addresses, *fixed), size)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        self.fill = functools.partial(struct.Struct(f"{addresses}P").pack_into, memory, 0)


class Launch:
    """One kernel with its block, dynamic shared memory and attributes. The kernel takes one struct by value.

    Immutable once made, so usable from several threads at once.
    """

    def __init__(
        self,
        kernel: Any,
        threads: int,
        grid: tuple[int, int] = (1, 1),
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
        overlaps_previous: bool = False,
    ) -> None:
        make_context_current()
        self._kernel = kernel  # keeps the module loaded
        self._function = ctypes.c_void_p(kernel.kernel.ptr)
        with _attributes_lock:  # launches of one kernel with different needs share its attribute
            if shared_bytes > kernel.max_dynamic_shared_size_bytes:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
        if cluster > _PORTABLE_CLUSTER:
            cupy.cuda.driver.funcSetAttribute(kernel.kernel.ptr, _NON_PORTABLE_CLUSTER, 1)
        attributes = []
        if cluster > 1:
            attributes.append(_LaunchAttribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1)))
        if overlaps_previous:
            attributes.append(_LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,)))
        self._attributes = (_LaunchAttribute * len(attributes))(*attributes)
        self._config = _LaunchConfig((*grid, 1), (threads, 1, 1), shared_bytes, None, self._attributes, len(attributes))

    def ready(self, arguments: Arguments, x: int, y: int = 1) -> ReadyLaunch:
        """The launch over a grid, reading these arguments; usable as long as both live, by one thread at a time."""
        config = _LaunchConfig.from_buffer_copy(self._config)
        config.grid[:] = (x, y, 1)
        # Every object of the call is made here, once: that is half of what the call costs.
        call = functools.partial(
            _library().cuLaunchKernelEx, ctypes.byref(config), self._function, arguments.pointers, None
        )
        return config, call

    def blocks_at_once(self, multiprocessors: int) -> int:
        """How many blocks the whole device holds at the same time."""
        config = self._config
        occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        blocks = int(occupancy(self._kernel.kernel.ptr, config.block[0], config.shared_bytes))
        return max(1, blocks) * multiprocessors

    def clusters_at_once(self) -> int:
        """How many clusters the whole device holds at the same time: fewer than its multiprocessors suggest."""
        clusters = ctypes.c_int()
        _check(
            _library().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), self._function, ctypes.byref(self._config))
        )
        return max(1, clusters.value)


def launch_all(launches: Iterable[ReadyLaunch], stream: int) -> None:
    """Launch one after the other on a stream, given by its pointer."""
    for config, call in launches:
        config.stream = stream
        if status := call():
            _check(status)


class PerThread(threading.local):
    """What each thread has one of its own, made by `make` when the thread first asks for it, with a current context."""

    def __init__(self, make: Callable[[], Any]) -> None:
        make_context_current()
        self.own = make()


_thread = threading.local()


def make_context_current() -> None:
    """The driver, unlike the runtime, does not make a context current in a thread that has none yet."""
    if not getattr(_thread, "has_context", False):
        runtime = cupy.cuda.runtime
        runtime.setDevice(runtime.getDevice())
        _thread.has_context = True


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
