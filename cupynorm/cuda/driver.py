"""Kernels that take one struct by value: its memory, launches, and how many blocks run at once.

What CuPy does not offer, cuOccupancyMaxActiveClusters, is called in the CUDA driver library
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__OCCUPANCY.html).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

import cupy

_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_NON_PORTABLE_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_INVALID_CLUSTER_SIZE = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE


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


_HEAD_START = 0.012  # seconds: what the first kernel from the disk cache takes, or more
_attributes_lock = threading.Lock()


class Arguments:
    """The struct that a kernel takes by value, in memory that its launches read.

    First come the addresses of a call's arrays, `calls` of them, which `fill` takes; then those in the workspace, which
    `fill_workspace` takes; then what is fixed. `layout` is that of the whole struct, as in Python's struct module.
    `workspace` is where that workspace lies, for those who fill it in.
    """

    def __init__(self, layout: str, calls: int, *fixed: Any) -> None:
        size = struct.calcsize(layout)
        addresses = len(struct.unpack(layout, bytes(size))) - len(fixed)
        memory = ctypes.create_string_buffer(struct.pack(layout, *[0] * addresses, *fixed), size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
        self.address = ctypes.addressof(self._pointers)  # as a launch wants it: of the list of a kernel's parameters
        of_call, of_workspace = struct.Struct(f"{calls}P"), struct.Struct(f"{addresses - calls}P")
        self.fill = functools.partial(of_call.pack_into, memory, 0)
        self.fill_workspace = functools.partial(of_workspace.pack_into, memory, of_call.size)
        self.workspace = 0


class Launch:
    """One kernel with its block, dynamic shared memory and cluster, which it was compiled with.

    Immutable once made, so usable from several threads at once.
    """

    def __init__(self, kernel: Any, threads: int, *, shared_bytes: int = 0, cluster: int = 1) -> None:
        make_context_current()
        self._kernel = kernel
        self._threads, self._shared_bytes, self._cluster = threads, shared_bytes, cluster
        with _attributes_lock:  # launches of one kernel with different needs share its attribute
            if shared_bytes > kernel.max_dynamic_shared_size_bytes:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
        if cluster > _PORTABLE_CLUSTER:
            cupy.cuda.driver.funcSetAttribute(kernel.kernel.ptr, _NON_PORTABLE_CLUSTER, 1)

    def over(self, x: int, y: int = 1, cooperative: bool = False) -> Callable[[int, int, int], None]:
        """The launch over a grid; to be called with a stream, the address of the arguments, and 0."""
        block = (self._threads, 1, 1)
        if cooperative:
            launch = cupy.cuda.driver.launchCooperativeKernel
            of_grid = functools.partial(launch, self._kernel.kernel.ptr, x, y, 1, *block, self._shared_bytes)
            return lambda stream, arguments, _: of_grid(stream, arguments)
        return functools.partial(
            cupy.cuda.driver.launchKernel, self._kernel.kernel.ptr, x, y, 1, *block, self._shared_bytes
        )

    def blocks_at_once(self, multiprocessors: int) -> int:
        """How many blocks the whole device holds at the same time."""
        occupancy = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        return max(1, int(occupancy(self._kernel.kernel.ptr, self._threads, self._shared_bytes))) * multiprocessors

    @functools.cached_property
    def clusters_at_once(self) -> int:
        """How many clusters the whole device holds at the same time: fewer than its multiprocessors suggest.

        0 where it is a part of a device, say, or has no group of multiprocessors that is large enough.
        """
        attribute = _LaunchAttribute(_CLUSTER_DIMENSION, 0, (self._cluster, 1, 1))
        config = _LaunchConfig(
            (self._cluster, 1, 1), (self._threads, 1, 1), self._shared_bytes, None, ctypes.pointer(attribute), 1
        )
        clusters = ctypes.c_int()
        function = ctypes.c_void_p(self._kernel.kernel.ptr)
        status = _library().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), function, ctypes.byref(config))
        if status == _INVALID_CLUSTER_SIZE:
            return 0
        _check(status)
        return clusters.value


class PerThread(threading.local):
    """What each thread has of its own, made by `make` when the thread first asks for it, with a current context: one,
    which is in `spare` unless somebody has it. Who asks meanwhile, as a signal's handler may, `make`s another.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.spare: list[Any] = []
        make_context_current()
        self.spare.append(make())


def load_together(*makes: Callable[[], Any]) -> None:
    """Call functions that make kernels, and load these on the current device.

    Most of NVRTC's work on two programs goes on at the same time (12.9, two cores: two of 0.45 s each take 0.50), so
    threads do all but the last. Each starts alone, for if CuPy's disk cache has the kernel it is there soon, and two
    threads would take longer for two such kernels than one. What goes wrong there shows when the function is called
    again.
    """
    device = cupy.cuda.runtime.getDevice()

    def load(make: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            cupy.cuda.runtime.setDevice(device)
            make().kernel  # noqa: B018

    *others, last = makes
    threads = [threading.Thread(target=load, args=(make,)) for make in others]
    try:
        for make, thread in zip(others, threads, strict=True):
            try:
                thread.start()
            except RuntimeError:  # none can: there are too many, or the interpreter ends
                load(make)
            else:
                thread.join(_HEAD_START)
        last().kernel  # noqa: B018
    finally:
        for thread in threads:
            if thread.ident:
                thread.join()


_thread = threading.local()


def make_context_current() -> None:
    """The driver, unlike the runtime, does not make a context current in a thread that has none yet."""
    if not getattr(_thread, "has_context", False):
        runtime = cupy.cuda.runtime
        if not cupy.cuda.driver.ctxGetCurrent():
            runtime.setDevice(runtime.getDevice())
        _thread.has_context = True


def allow_capture_elsewhere() -> int:
    """What this thread asks the driver or waits for ends no capture of another's, as it else would one in the driver's
    "global" mode. Returns the thread's mode before."""
    return _exchange_capture_mode(2)  # CU_STREAM_CAPTURE_MODE_RELAXED


def _exchange_capture_mode(mode: int) -> int:
    exchanged = ctypes.c_int(mode)
    _check(_library().cuThreadExchangeStreamCaptureMode(ctypes.byref(exchanged)))
    return exchanged.value


def is_done(stream: int) -> bool:
    """Whether a stream, by its pointer, has no more work to do; it must not be one that is being captured."""
    before = allow_capture_elsewhere()
    try:
        return bool(_library().cuStreamQuery(ctypes.c_void_p(stream)) != _NOT_READY)
    finally:
        _exchange_capture_mode(before)


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
