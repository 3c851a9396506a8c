"""The kernels of kernels_cu/ on the CPU: what they compute, checked on machines without a GPU.

A public function is called on the device of fake_device.py, which notes its launches; each is then carried out by the
kernel's own source, compiled as C++ for the CPU with the launch's own definitions, grid, block, shared memory and
arguments. In place of CUDA stand on_cpu/cuda.h and, for bulk copies and barriers, on_cpu/pipeline.h. PTX is taken out:
single statements that matter are written here as C++, the others (hints, prefetches, fences) are left away. So float16,
which is converted by PTX, and clusters are not there, and time and the order in which memory is seen say nothing.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from collections import deque
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDevice, struct_of

HERE = Path(__file__).with_name("on_cpu")
COMPILER = shutil.which("g++")
# FMA is not contracted: a sum's order is compared bit by bit between kernels that the compiler may treat differently.
# -O1, for most of the time is the compiler's: three groups of 111 tests take 179 s, by -O2 244.
OPTIONS = (
    *("-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-fno-strict-aliasing", "-ffp-contract=off"),
    "-fno-gnu-unique",  # else libraries share static variables of one name, also where they are a thread's own in one
    f"-I{HERE}",
    # What lies beside an array is no register of a GPU, and no access of one may be misaligned.
    *("-fsanitize=bounds,alignment", "-fsanitize-undefined-trap-on-error"),
)

# PTX that has an effect here, by what it begins with; $1, $2 are its operands, in the order in which they are written.
MEANINGS = {
    "mov.f32 %0, %1": "$1 = $2;",
    "rsqrt.approx.ftz.f32 %0, %1": "$1 = 1.0000001f / std::sqrt($2);",
    "mov.f64 %0, %1": "$1 = $2;",
    "ld.global.f32 %0, [%1]": "$1 = *($2);",
    "ld.global.f64 %0, [%1]": "$1 = *($2);",
    "ld.global.v4.f32 {%0, %1, %2, %3}, [%4]": "$1 = ($5)[0]; $2 = ($5)[1]; $3 = ($5)[2]; $4 = ($5)[3];",
    "ld.relaxed.gpu.global.u32 %0, [%1]": "$1 = on_cpu::read_anew<unsigned>($2);",
    "ld.relaxed.gpu.global.u64 %0, [%1]": "$1 = on_cpu::read_anew<uint64_t>($2);",
    "ld.acquire.gpu.global.u64 %0, [%1]": "$1 = on_cpu::read_anew<uint64_t>($2);",
    "ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2]": "$1 = on_cpu::read_anew<uint64_t>($3); "
    "$2 = on_cpu::read_anew<uint64_t>(($3) + 8);",
    "ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2]": "$1 = on_cpu::read_anew<unsigned>($3); "
    "$2 = on_cpu::read_anew<unsigned>(($3) + 4);",
    "st.relaxed.gpu.global.u32 [%0], %1": "on_cpu::write((unsigned*)($1), $2);",
    "st.relaxed.gpu.global.v2.u32 [%0], {%1, %2}": "on_cpu::write((unsigned*)($1), $2); "
    "on_cpu::write((unsigned*)(($1) + 4), $3);",
    "st.relaxed.gpu.global.u64 [%0], %1": "on_cpu::write((uint64_t*)($1), $2);",
    "st.relaxed.gpu.global.v2.u64 [%0], {%1, %2}": "on_cpu::write((uint64_t*)($1), $2); "
    "on_cpu::write((uint64_t*)(($1) + 8), $3);",
    "red.relaxed.gpu.global.add.u64 [%0], 1": "on_cpu::add($1, 1);",
    "atom.acq_rel.gpu.global.add.u64 %0, [%1], %2": "$1 = on_cpu::add($2, $3);",
    "atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2": "$1 = on_cpu::add_up_to($2, $3);",
    "atom.relaxed.gpu.global.add.u32 %0, [%1], 1": "$1 = on_cpu::add($2, 1);",
    "ld.volatile.shared.u32 %0, [%1]": "$1 = *reinterpret_cast<const unsigned*>($2);",
    "bar.sync 1, %0": "on_cpu::bar_sync(1, $1);",
}
STATEMENT = re.compile(r"\basm\b(?: volatile)?\s*\(((?:[^()\"]|\"[^\"]*\"|\((?:[^()]|\([^()]*\))*\))*)\);")


class KernelsOnCpu(FakeDevice):
    """A device on which kernels run, if `run` is called after the call that launched them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        super().__init__(monkeypatch)
        from cupynorm import arrays
        from cupynorm.cuda import driver

        self._folder = folder
        self._compiled: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self._shapes: dict[int, tuple[int, int]] = {}  # of each, threads and bytes of shared memory
        over = driver.Launch.over

        def noted(launch: Any, x: int, y: int = 1, cooperative: bool = False) -> Any:
            self._shapes[launch._kernel.kernel.ptr] = launch._threads, launch._shared_bytes
            return over(launch, x, y, cooperative)

        monkeypatch.setattr(driver.Launch, "over", noted)
        monkeypatch.setattr(arrays.device_home(), "empty_pair", self._new_pair)
        self.functions: list[int] = []  # of each launch so far
        self.late_warp = -1  # of each block, that goes on only when nobody else of the block can
        self._alive: list[Any] = []  # arrays made since the kernels ran last, which run later than a device's would
        self._bounds: deque[tuple[int, int]] = deque(maxlen=64)  # of the arrays made last
        self._workspaces: deque[tuple[int, int]] = deque(maxlen=64)  # of the memory that calls keep for the next

    def array(self, *arguments: Any, **options: Any) -> Any:
        self._alive.append(super().array(*arguments, **options))
        self._bounds.append(ends_of(self._alive[-1]))
        return self._alive[-1]

    def _new_pair(self, shape: tuple[int, ...], dtype: Any, apart: int) -> tuple[Any, Any]:
        """In memory with ends of their own."""
        return self._new(shape, dtype), self._new(shape, dtype)

    def _allocate(self, allocator: str, size: int) -> Any:
        memory = super()._allocate(allocator, size)
        self._workspaces.append(self._bounds.pop())
        return memory

    def ends_with(self, view: Any) -> None:
        """What lies in the array made last, but behind this view of it, is not to be read."""
        self._bounds[-1] = ends_of(view)

    def _launch(self, function: int, *others: int) -> None:
        super()._launch(function, *others)
        self.functions.append(function)

    def run(self) -> list[str]:
        """Carries out the launches since the last time; returns what kernels these were, and their definitions."""
        ran = []
        for launched, function in zip(self.launched, self.functions, strict=True):
            file, name, definitions = self._kernels[function - 1]
            assert "CLUSTER=1" in definitions or not any(text.startswith("CLUSTER=") for text in definitions)
            threads, shared_bytes = self._shapes[function]
            arguments = ctypes.create_string_buffer(launched.arguments, len(launched.arguments))
            library = self._library(file, name, definitions)
            arrays = [*self._bounds, *self._workspaces]
            bounds = (ctypes.c_ulonglong * (2 * len(arrays)))(*chain.from_iterable(arrays))
            if hasattr(library, "know_arrays"):  # a kernel that copies in bulk
                library.know_arrays(bounds, len(arrays))
            library.run(arguments, *launched.grid[:2], threads, shared_bytes, self.late_warp)
            ran.append(" ".join((name, *definitions)))
        self.launched.clear()
        self.functions.clear()
        self._alive.clear()
        return ran

    def _library(self, *kernel: Any) -> Any:
        if kernel not in self._compiled:
            file, name, definitions = kernel
            struct = struct_of(name)[1]
            lines = ["#define BLOCKS_AT_ONCE"] if "GANG=1" in definitions or name.endswith("_wide") else []
            lines += ['#include "cuda.h"', *(f"#define {text.replace('=', ' ', 1)}" for text in definitions)]
            lines += [as_cpp(source(file, set()))]
            lines += ['extern "C" void run(const void* arguments, int x, int y, int threads, int bytes, int late) {']
            lines += ["on_cpu::late_warp = late;"]
            lines += [f"on_cpu::launch({name}, *static_cast<const {struct}*>(arguments), x, y, threads, bytes);", "}"]
            path = self._folder / f"{len(self._compiled)}.cpp"
            path.write_text("\n".join(lines), encoding="utf-8")
            library = path.with_suffix(".so")
            compile_cpp("-include", self._standard, path, "-o", library)
            self._compiled[kernel] = ctypes.CDLL(str(library))
        return self._compiled[kernel]

    @functools.cached_property
    def _standard(self) -> Path:
        """A header that g++ finds compiled: a third of a kernel's time were the system's headers."""
        header = self._folder / "standard.h"
        header.write_text(f'#include "{HERE / header.name}"\n', encoding="utf-8")
        compile_cpp("-x", "c++-header", header, "-o", f"{header}.gch")
        return header


def compile_cpp(*arguments: Any) -> None:
    command = [str(COMPILER), *OPTIONS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


def ends_of(array: Any) -> tuple[int, int]:
    """The first and the last address of a CuPy array of the stand-in's."""
    reach = sum(stride * (extent - 1) for stride, extent in zip(array.strides, array.shape, strict=True))
    return array.data.ptr, array.data.ptr + reach + array.dtype.itemsize - 1


def values(array: Any) -> np.ndarray[Any, Any]:
    """The same as NumPy's, over the same memory."""
    first, last = ends_of(array)
    memory = (ctypes.c_char * (last + 1 - first)).from_address(first)
    return np.ndarray(array.shape, array.dtype, memory, strides=array.strides)


def source(file: str, seen: set[str]) -> str:
    """A file of kernels_cu/ with what it includes, each once, and on_cpu/pipeline.h in place of pipeline.cuh."""
    from cupynorm.cuda import module

    lines = []
    for line in (module.source_directory() / file).read_text(encoding="utf-8").splitlines():
        included = re.match(r'#include "(.*)"', line)
        if included and included[1] not in seen:
            seen.add(included[1])
            stand_in = included[1] == "pipeline.cuh"
            lines.append('#include "pipeline.h"' if stand_in else source(included[1], seen))
        elif not included and line != "#pragma once":
            lines.append(line)
    return "\n".join(lines)


def as_cpp(text: str) -> str:
    """Without PTX and without dynamic shared memory of CUDA's."""
    text = re.sub(r"extern __shared__ [^;]*\bshared\[\];", "auto* const shared = on_cpu::shared;", text)
    return STATEMENT.sub(lambda match: meaning(match[1]), text)


def meaning(statement: str) -> str:
    """Of what stands between the brackets of an asm statement."""
    instructions = "".join(re.findall(r'"([^"]*)"', statement.split("\n", 1)[0].split(":")[0]))
    for start, written in MEANINGS.items():
        if statement.lstrip().lstrip('"').startswith(start):
            operands = re.findall(r'"[=+]?[a-z]"\s*\(((?:[^()]|\([^()]*\))*)\)', statement)
            for number, operand in enumerate(operands, 1):
                written = written.replace(f"${number}", operand)
            return f"{{ {written} }}"
    return f"/* {instructions[:40]} */;".replace("\n", " ")
