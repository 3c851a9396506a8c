"""A CUDA device that is none: real CuPy arrays over host memory, and a driver that notes launches but runs nothing.

For tests of the path from a call to its launches on machines without a GPU. CuPy itself must be installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

# An H200's: compute capability 9.0, multiprocessors, shared memory of a block, kHz of the memory and bits of its bus.
ATTRIBUTES = {75: 9, 76: 0, 16: 132, 97: 232448, 36: 3201000, 37: 6144}


class Launched(NamedTuple):
    kernel: str
    grid: tuple[int, ...]
    stream: int
    arguments: bytes
    cooperative: bool = False
    definitions: tuple[str, ...] = ()

    def fields(self) -> tuple[Any, ...]:
        return struct.unpack(layout_of(self.kernel, self.definitions), self.arguments)

    def named(self) -> SimpleNamespace:
        """The arguments by their names in the kernels' sources."""
        names = _names_of_arguments(*struct_of(self.kernel))
        return SimpleNamespace(**dict(zip(names, self.fields(), strict=True)))


def layout_of(kernel: str, definitions: tuple[str, ...]) -> str:
    from cupynorm.cuda import config

    x_type = next((text.partition("=")[2] for text in definitions if text.startswith("X_TYPE=")), "float32")
    layouts = {
        "BackwardArguments": config.BACKWARD_ARGUMENTS,
        "FewRowsArguments": config.FEW_ROWS_ARGUMENTS[config.common.compute_name(x_type)],
        "ForwardArguments": config.FORWARD_ARGUMENTS,
        "WideArguments": config.WIDE_ARGUMENTS,
        "WideForwardArguments": config.FORWARD_WIDE_ARGUMENTS,
        "WideningArguments": config.WIDENING_ARGUMENTS,
    }
    return layouts[struct_of(kernel)[1]]


def struct_of(kernel: str) -> tuple[str, str]:
    """The file of kernels_cu/ that has the struct which a kernel takes, and the struct's name."""
    if kernel == "backward_few_rows":
        return "backward_few_rows.cu", "FewRowsArguments"
    if kernel == "backward_wide":
        return "backward_wide.cu", "WideArguments"
    if kernel == "forward_wide":
        return "forward_wide.cu", "WideForwardArguments"
    if kernel == "widen_w":
        return "widen_w.cu", "WideningArguments"
    direction = kernel.partition("_")[0]
    return f"{direction}.cuh", f"{direction.capitalize()}Arguments"


@functools.cache
def _names_of_arguments(file: str, name: str) -> list[str]:
    from cupynorm.cuda import module

    source = (module.source_directory() / file).read_text(encoding="utf-8")
    struct = source.partition(f"struct {name} {{\n")[2].partition("\n};")[0]
    lines = (line.partition("//")[0] for line in struct.partition("\n\n")[0].splitlines())
    return [name for line in lines for name in re.findall(r"(\w+)[,;]", line)]


class FakeStream:
    """As CuPy's, but that to make it the current one is the device's to do: `use`."""

    def __init__(self, ptr: int = 0, capturing: bool = False) -> None:
        self.ptr, self.capturing = ptr, capturing

    def is_capturing(self) -> bool:
        return self.capturing


class FakeDevice:
    """What a test sees and sets: launches so far, allocations so far, the current device and stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cupy: Any = pytest.importorskip("cupy")
        from cupynorm import arrays, dispatch
        from cupynorm.cuda import driver, launch, streams

        self.launched: list[Launched] = []
        self.allocated: list[tuple[str, int]] = []  # by which allocator, bytes
        self.zeroed: list[tuple[int, int]] = []  # address, bytes
        self.current = 0
        self.stream = FakeStream()  # the current one, of devices that have no other among `streams`
        self.streams: dict[int, FakeStream] = {}
        self.error: Exception | None = None  # what launches raise
        self.status = 0  # what the driver library returns
        self.capture_mode = 0
        self.busy: set[int] = set()  # streams with work to do, by their pointers
        self.asked: list[int] = []  # those of which it was asked whether they have
        self._kernels: list[tuple[str, str, tuple[str, ...]]] = []  # file, name, definitions

        runtime = self.cupy.cuda.runtime
        for name, replacement in {
            "getDevice": lambda: self.current,
            "setDevice": lambda device: None,
            "deviceGetAttribute": lambda attribute, device: ATTRIBUTES[attribute],
            "memsetAsync": lambda address, value, size, stream: self.zeroed.append((address, size)),
        }.items():
            monkeypatch.setattr(runtime, name, replacement)
        monkeypatch.setattr(self.cupy.cuda, "Device", self._device)
        monkeypatch.setattr(self.cupy.cuda, "get_current_stream", lambda device=-1: self._stream_of(device))
        monkeypatch.setattr(self.cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 2)
        monkeypatch.setattr(self.cupy.cuda.driver, "funcSetAttribute", lambda *_: None)
        monkeypatch.setattr(self.cupy.cuda.driver, "ctxGetCurrent", lambda: 1)
        monkeypatch.setattr(self.cupy.cuda.driver, "launchKernel", self._launch)
        monkeypatch.setattr(self.cupy.cuda.driver, "launchCooperativeKernel", self._launch_cooperative)
        monkeypatch.setattr(driver, "_library", lambda: self)
        monkeypatch.setattr(launch, "kernel", self._kernel)
        monkeypatch.setattr(launch, "_load", launch._load.__wrapped__)
        monkeypatch.setattr(launch, "prepare", lambda device_id: None)
        monkeypatch.setattr(launch, "_kept", launch._KeptMemory())
        monkeypatch.setattr(streams, "_kept", {})
        monkeypatch.setattr(streams, "_LOOKED_AT", 1)
        monkeypatch.setattr(streams, "_look_at", 1)
        monkeypatch.setattr(launch, "_alloc", lambda size: self._allocate("pool", size))
        monkeypatch.setattr(launch, "_malloc_async", lambda size: self._allocate("graph", size))
        monkeypatch.setattr(launch, "_current_stream", lambda: self._stream_of(-1))
        monkeypatch.setattr(FakeStream, "use", self._use(), raising=False)
        monkeypatch.setattr(arrays.device_home(), "empty", self._new)
        monkeypatch.setattr(arrays.device_home(), "_alloc", lambda size: self._allocate("result", size))
        monkeypatch.setattr(arrays.device_home(), "current_device", lambda: self.current)
        monkeypatch.setattr(launch, "device_of", functools.cache(launch.device_of.__wrapped__))
        plans = functools.lru_cache(maxsize=dispatch.plan_of.cache_info().maxsize, typed=True)
        monkeypatch.setattr(dispatch, "plan_of", plans(dispatch.plan_of.__wrapped__))

    def _stream_of(self, device: int) -> Any:
        return self.streams.get(self.current if device < 0 else device, self.stream)

    def _use(self) -> Any:
        def use(stream: FakeStream) -> None:
            if self.current in self.streams:
                self.streams[self.current] = stream
            else:
                self.stream = stream

        return use

    # --- arrays ---

    def array(self, shape: tuple[int, ...], dtype: Any = "float32", device: int = 0, offset: int = 0) -> Any:
        """A CuPy array, said to be on a device, that starts so many bytes after a multiple of 512."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        memory = np.zeros(size + 1024, np.uint8)
        start = -memory.ctypes.data % 512 + offset
        unowned = self.cupy.cuda.UnownedMemory(memory.ctypes.data, len(memory), memory, device)
        return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(unowned, start))

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = self.array(shape, dtype, self.current)
        self.allocated.append(("result", array.nbytes))
        return array

    def _allocate(self, allocator: str, size: int) -> Any:
        self.allocated.append((allocator, size))
        return self.array((size,), np.uint8, self.current).data

    @contextlib.contextmanager
    def _device(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    # --- kernels and the driver library ---

    def _kernel(self, file: str, name: str, definitions: tuple[str, ...] = ()) -> Any:
        self._kernels.append((file, name, definitions))
        return SimpleNamespace(kernel=SimpleNamespace(ptr=len(self._kernels)), max_dynamic_shared_size_bytes=0)

    def _launch(self, function: int, x: int, y: int, z: int, *block_shared_stream_pointers: int) -> None:
        if self.error:
            raise self.error
        *_, stream, pointers, _ = block_shared_stream_pointers
        _, name, definitions = self._kernels[function - 1]
        memory = ctypes.c_void_p.from_address(pointers).value
        arguments = ctypes.string_at(memory, struct.calcsize(layout_of(name, definitions)))
        self.launched.append(Launched(name, (x, y, z), stream, arguments, definitions=definitions))

    def _launch_cooperative(self, function: int, *others: int) -> None:
        self._launch(function, *others, 0)
        self.launched[-1] = self.launched[-1]._replace(cooperative=True)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.capture_mode, mode._obj.value = mode._obj.value, self.capture_mode
        return 0

    def cuStreamQuery(self, stream: Any) -> int:
        assert self.capture_mode == 2, "it would end another thread's capture"
        self.asked.append(stream.value)
        return 600 if stream.value in self.busy else self.status

    def cuOccupancyMaxActiveClusters(self, clusters: Any, function: Any, config: Any) -> int:
        clusters._obj.value = 30
        return self.status

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = b"made up"
        return 0
