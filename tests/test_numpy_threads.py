"""NumPy arrays: the threads that help a call, also where they cannot be had; none is at work once a call is over."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gpu_record import ROOT

import cupynorm
from cupynorm import numpy_backend

SHAPE = (4096, 1024)


@pytest.fixture
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four, of pools that no other test has."""
    monkeypatch.setenv("CUPYNORM_NUM_THREADS", "4")
    numpy_backend._pool.cache_clear()
    yield
    numpy_backend._pool.cache_clear()


def before_blocks(monkeypatch: pytest.MonkeyPatch, ready: Callable[[bool], None]) -> None:
    """Has everyone who works for this thread's calls say so before each chunk; True: this thread itself."""
    caller, blocks = threading.current_thread(), numpy_backend._Tiling.blocks

    def blocks_of(tiling: numpy_backend._Tiling, chunk: int) -> Iterator[slice]:
        ready(threading.current_thread() is caller)
        return blocks(tiling, chunk)

    monkeypatch.setattr(numpy_backend._Tiling, "blocks", blocks_of)


@pytest.mark.usefixtures("own_threads")
def test_calls_of_all_sizes_share_their_threads() -> None:
    """Though they take one, two or three of them, at other times."""
    before = {*threading.enumerate()}  # those of pools that are gone may not have ended yet
    for rows in (4096, 64, 16, 48, 24, 8, 32, 256, 4096):
        cupynorm.rmsnorm_forward(np.ones((rows, 4096), np.float32))
    assert numpy_backend._pool.cache_info().misses == 1
    threads = [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("cupynorm")]
    assert 1 <= len(threads) <= 3


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("refused", [1, 2])
def test_threads_that_cannot_be_started_are_not_missed(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """The system refuses the first or the second: those there are do the work, and stop with the call."""
    start, asked, all_asked = threading.Thread.start, [], threading.Event()

    def start_some(thread: threading.Thread) -> None:
        if thread.name.startswith("cupynorm"):
            asked.append(thread)
            if len(asked) == refused:
                raise RuntimeError("can't start new thread")
        start(thread)

    x = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    expected, _ = cupynorm.rmsnorm_forward(x)
    numpy_backend._pool.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", start_some)
    # A helper is at work until the caller has asked for all: one that is through would be asked again.
    before_blocks(monkeypatch, lambda is_caller: all_asked.set() if is_caller else all_asked.wait(30) and None)
    y = np.empty_like(x)
    cupynorm.rmsnorm_forward(x, out=(y, None))
    assert len(asked) == refused
    np.testing.assert_array_equal(y, expected)
    y[...] = 7
    time.sleep(0.3)
    assert (y == 7).all()


@pytest.mark.usefixtures("own_threads")
def test_an_error_of_a_helper_is_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised by the call, when all who work for it have stopped; no array lives longer for it."""
    at_work = threading.Event()
    x, y = np.ones(SHAPE, np.float32), np.empty(SHAPE, np.float32)

    def fail(is_caller: bool) -> None:
        if is_caller:
            at_work.wait(30)
        else:
            at_work.set()
            raise MemoryError("no room")

    before_blocks(monkeypatch, fail)
    gc.disable()
    try:
        with pytest.raises(MemoryError, match="no room"):
            cupynorm.rmsnorm_forward(x, out=(y, None))
        y[...] = 7
        time.sleep(0.3)
        assert (y == 7).all()
        alive = weakref.ref(x)
        del x
        assert alive() is None
    finally:
        gc.enable()


def lock_is_lost() -> RuntimeError:
    """What a condition says if it is interrupted where it has just given back its lock."""
    error = RuntimeError("cannot release un-acquired lock")
    error.__context__ = KeyboardInterrupt("first")
    return error


@pytest.mark.parametrize("first", [KeyboardInterrupt("first"), lock_is_lost()], ids=["interrupt", "lock"])
def test_helpers_have_stopped_however_often_one_interrupts(monkeypatch: pytest.MonkeyPatch, first: Exception) -> None:
    helpers = numpy_backend._Helpers(lambda: None)
    helpers._busy = 1
    raised: list[BaseException] = [first, KeyboardInterrupt("second"), KeyboardInterrupt("third")]

    def wait_for(over: Callable[[], bool]) -> bool:
        if raised:
            raise raised.pop(0)
        helpers._busy = 0
        return over()

    monkeypatch.setattr(helpers._changed, "wait_for", wait_for)
    with pytest.raises(KeyboardInterrupt, match="first"):
        helpers.dismiss()
    assert helpers._busy == 0


@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.parametrize("when", ["atexit", "in a thread that outlives the main one"])
@pytest.mark.parametrize("before", ["", "cupynorm.rmsnorm_forward(x)"], ids=["first call", "later call"])
def test_calls_while_the_interpreter_ends(when: str, before: str, threads: str) -> None:
    code = f"""
import atexit, threading, time
import numpy as np
import cupynorm

x = np.ones({SHAPE}, np.float32)
{before}

def call(seconds=0.0):
    time.sleep(seconds)
    y, rstd = cupynorm.rmsnorm_forward(x)
    print(float(y.min()), float(y.max()))

if {when == "atexit"}:
    atexit.register(call)
else:
    threading.Thread(target=call, args=(0.3,)).start()
"""
    environment = os.environ | {"CUPYNORM_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    least, most = map(float, done.stdout.split())
    assert 0.999 < least <= most <= 1


@pytest.mark.parametrize("setting", ["abc", "0", "-1", "1.5", pytest.param("9" * 5000, id="many digits")])
def test_a_number_of_threads_that_is_none(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("CUPYNORM_NUM_THREADS", setting)
    with pytest.raises(ValueError, match="CUPYNORM_NUM_THREADS") as raised:
        cupynorm.rmsnorm_forward(np.ones(SHAPE, np.float32))
    assert len(str(raised.value)) < 200
