"""asv_bench/occupy.py, as far as it goes without a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import occupy
import pytest
from fake_device import FakeDevice

from cupynorm import cli


def test_the_kernel_compiles() -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    from cupy.cuda import nvrtc

    source = Path(occupy.__file__).with_suffix(".cu").read_text(encoding="utf-8")
    for architecture in ("sm_75", "sm_90"):
        program = nvrtc.createProgram(source, "occupy.cu", (), ())
        try:
            nvrtc.compileProgram(program, (f"-arch={architecture}",))
        except nvrtc.NVRTCError:
            pytest.fail(nvrtc.getProgramLog(program))


def test_launch_choices_see_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of the memory: an H100's is slow for 132 multiprocessors, not for 92."""
    pytest.importorskip("cupy", reason="the launches are made with CuPy")
    FakeDevice(monkeypatch)
    from cupynorm.cuda import launch

    device = launch.device_of(0)._replace(memory_gbps=3352)
    monkeypatch.setattr(launch, "device_of", lambda number: device)
    assert launch.device_of(0).has_slow_memory
    occupy.shrink(92)
    assert launch.device_of(0) == device._replace(multiprocessors=92)
    assert not launch.device_of(0).has_slow_memory


@pytest.mark.parametrize("fails", [False, True])
def test_the_others_are_kept_until_the_end(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    done: list[Any] = []

    class Stream(contextlib.nullcontext[None]):
        def __init__(self, non_blocking: bool) -> None:
            assert non_blocking
            super().__init__()

        def synchronize(self) -> None:
            done.append("waited")

    attributes = {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 232448}
    memory = SimpleNamespace(memset_async=lambda value, size, stream: done.append((value, size)))
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(id=0, attributes=attributes),
        Stream=Stream,
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    cupy: Any = SimpleNamespace(
        cuda=cuda, int32=np.int32, int64=np.int64, zeros=lambda *_: SimpleNamespace(data=memory, nbytes=4)
    )

    class Kernel:
        max_dynamic_shared_size_bytes = 0

        def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], *, shared_mem: int) -> None:
            assert shared_mem == self.max_dynamic_shared_size_bytes == attributes["MaxSharedMemoryPerBlockOptin"]
            done.append(grid)

    kernel = Kernel()
    monkeypatch.setattr(occupy, "_kernel", lambda *_: kernel)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(), occupy.occupied(cupy, 92):
        assert done == [(40,)]
        done.append(1 / (not fails))
    assert done[-2:] == [(1, 4), "waited"]


def test_no_more_than_there_are() -> None:
    cupy: Any = SimpleNamespace(__name__="cupy")
    cupy.cuda = SimpleNamespace(Device=lambda: SimpleNamespace(attributes={"MultiProcessorCount": 132}))
    occupy.check(cupy, 132)
    with pytest.raises(cli.UsageError, match="got 133; the device has 132"):
        occupy.check(cupy, 133)
    with pytest.raises(cli.UsageError, match="needs CUDA"):
        occupy.check(np, 92)
