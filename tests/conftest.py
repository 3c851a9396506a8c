"""Options and fixtures that all tests share.

Tests marked `gpu` need a CUDA device and CuPy; elsewhere they are skipped with one reason. Most tests run one body on
both backends: the fixture `xp` is numpy, or cupy under that mark.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_record import Recorder, environment, function_name, functions_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-record", metavar="PATH", type=Path, help="write a record of this run's GPU tests to PATH")
    words = "leave out the GPU tests that this record has"
    parser.addoption("--gpu-record-has", metavar="PART", type=Path, action="append", default=[], help=words)


def pytest_configure(config: pytest.Config) -> None:
    path, parts = config.getoption("--gpu-record"), config.getoption("--gpu-record-has")
    if path is None or hasattr(config, "workerinput"):  # of pytest-xdist's workers, the process beside them records
        return
    if path.resolve() in [part.resolve() for part in parts]:
        raise pytest.UsageError(f"--gpu-record: {path} is a part that this run does not have")
    if reason := gpu_missing():
        raise pytest.UsageError(f"--gpu-record: {reason}")
    config.pluginmanager.register(Recorder(path, environment()), "gpu-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    recorded = {name for part in config.getoption("--gpu-record-has") for name in functions_of(part)}
    left_out = [item for item in items if item.get_closest_marker("gpu") and function_name(item.nodeid) in recorded]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items) - set(left_out)
        items[:] = [item for item in items if item in kept]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := gpu_missing()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def gpu_missing() -> str | None:
    """Why GPU tests cannot run here, or None where they can."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no CUDA libraries, no driver: each raises its own kind
        return f"no usable CUDA device and CuPy: {type(error).__name__}: {error}"
    return None if count else "no usable CUDA device and CuPy: no device"


_MOST_KEPT_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def memory_is_for_all(request: pytest.FixtureRequest) -> Iterator[None]:
    """Behind a GPU test, gives back to the device what CuPy's pool has much of: other processes' tests may need it."""
    yield
    if request.node.get_closest_marker("gpu") is None:
        return
    import cupy

    pool = cupy.get_default_memory_pool()
    if pool.free_bytes() > _MOST_KEPT_BYTES:
        pool.free_all_blocks()


@pytest.fixture
def of_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Has launch choices see a device whose memory is slow, or not."""
    from cupynorm import dispatch
    from cupynorm.cuda import launch

    device_of = launch.device_of

    def pretend(slow: bool) -> None:
        monkeypatch.setattr(launch, "device_of", lambda number: device_of(number)._replace(memory_gbps=int(slow)))
        dispatch.plan_of.cache_clear()

    yield pretend
    dispatch.plan_of.cache_clear()


@pytest.fixture
def without_wide_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has launch choices be as where rows that all blocks could share go elsewhere: what two types, or devices that are
    smaller, have."""
    from cupynorm import dispatch
    from cupynorm.cuda.config import wide

    monkeypatch.setattr(wide, "WIDE_LEAST_BLOCKS", 1 << 30)
    dispatch.plan_of.cache_clear()
    yield
    dispatch.plan_of.cache_clear()


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request: pytest.FixtureRequest) -> Any:
    """numpy, and cupy on machines with a GPU."""
    return importlib.import_module(request.param)
