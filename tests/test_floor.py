"""asv_bench/floor.py, as far as it goes without a GPU: its kernel compiles and takes what is packed for it."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import floor
import pytest


def test_the_kernel_compiles_and_takes_what_is_packed() -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    from cupy.cuda import nvrtc

    from cupynorm.cuda import module

    source = module.source(floor.SOURCE, ())
    assert module.source_digest() in source
    size = struct.calcsize(floor.LAYOUT)
    source += f'static_assert(sizeof(FloorArguments) == {size}, "the same struct");\n'
    program = nvrtc.createProgram(source, "floor.cu", (), ())
    try:
        nvrtc.compileProgram(program, ("-arch=sm_90", *module.compile_options()))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))


def test_the_bounds_are_those_of_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "step_us", lambda cupy, norm, columns, blocks, last: 3.0 + last)
    monkeypatch.setattr(floor.bench, "measure_triad", lambda *_: SimpleNamespace(seconds=9.75e-6))
    device = SimpleNamespace(attributes={"MultiProcessorCount": 132})
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device))
    assert floor.line(cupy, "rmsnorm", 256) == [
        "rmsnorm",
        "256",
        "132",
        "3.0",
        "4.0",
        "5.0",
        "6.0",
        "9.8",
        "11.8",
        "12.0",
    ]
