"""A call finds the plan of an earlier one exactly where nothing but addresses differs; on the way to a CUDA device, by
a device that is none."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import itertools
import os
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_config as of_config
from fake_device import ATTRIBUTES, FakeDevice, FakeStream
from foreign import Foreign
from helpers import DTYPES, NORMS

import cupynorm
from cupynorm import arrays, dispatch, dlpack, problem
from cupynorm.cuda import config

ROWS, COLUMNS = 7000, 1024  # so many rows that blocks meet
Call = dict[str, Any]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def call_of(device: FakeDevice, norm: str, rows: int = ROWS, dtype: str = "float16", **changes: Any) -> Call:
    arrays = {name: device.array((rows, COLUMNS), DTYPES[dtype]) for name in ("x", "dy")}
    arrays |= {"w": device.array((COLUMNS,))}
    arrays |= {name: device.array((rows,)) for name in (("mean", "rstd") if norm == "layernorm" else ("rstd",))}
    return arrays | {"has_bias": True} | changes


def results_of(device: FakeDevice, rows: int = ROWS) -> tuple[Any, Any, Any]:
    return device.array((rows, COLUMNS), "float16"), device.array((COLUMNS,)), device.array((COLUMNS,))


def backward(norm: str, call: Call) -> tuple[Any, ...]:
    return getattr(cupynorm, f"{norm}_backward")(**call)


def plans() -> int:
    """How many there are."""
    return dispatch.plan_of.cache_info().currsize


@pytest.mark.parametrize("norm", NORMS)
def test_the_same_signature_is_validated_once(monkeypatch: Any, device: FakeDevice, norm: str) -> None:
    backward(norm, call_of(device, norm))
    cupynorm.rmsnorm_forward(call_of(device, norm)["x"])
    for name in ("backward_problem", "forward_problem", "check_placement", "ArraySpec"):
        monkeypatch.setattr(dispatch, name, lambda *_, **__: pytest.fail("validated again"))
    dx, dw, db = backward(norm, call_of(device, norm))
    assert (dx.shape, dw.shape, db.shape) == ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,))
    assert (dx.dtype, dw.dtype, db.dtype) == (np.float16, np.float32, np.float32)
    cupynorm.rmsnorm_forward(call_of(device, norm)["x"])
    assert plans() == 2


def test_every_launch_gets_the_addresses_of_its_own_call(device: FakeDevice) -> None:
    for norm in (*NORMS, *NORMS):
        call = call_of(device, norm)
        device.launched.clear()
        results = backward(norm, call)
        (launch,) = device.launched
        got = launch.named()
        for name in ("x", "dy", "w", "mean", "rstd"):
            assert getattr(got, name) == (call[name].data.ptr if name in call else 0)
        assert [got.dx, got.dw, got.db] == [result.data.ptr for result in results]
        assert len({got.dw_partials, got.db_partials, got.dw, got.db, got.meeting, 0}) == 6
        assert got.sums == 0
        assert got.rows == ROWS


def another(device: FakeDevice, norm: str) -> dict[str, Call]:
    """Calls that differ from `call_of` in one thing each."""
    wide = device.array((ROWS, 2 * COLUMNS), "float16")
    changes: dict[str, Call] = {
        "rows": call_of(device, norm, rows=ROWS + 1),
        "dtype": call_of(device, norm, dtype="bfloat16"),
        "dtype of w": {"w": device.array((COLUMNS,), "float64")},
        "stride": {"x": wide[:, :COLUMNS]},
        "shape of x": {name: device.array((1, ROWS, COLUMNS), "float16") for name in ("x", "dy")}
        | {name: device.array((1, ROWS)) for name in ("mean", "rstd") if norm == "layernorm" or name == "rstd"},
        "trailing axis": {"rstd": device.array((ROWS, 1))},
        "alignment": {"x": device.array((ROWS, COLUMNS), "float16", offset=2)},
        "no w": {"w": None},
        "no bias": {"has_bias": False},
        "mask": {"output_mask": (True, False, True)},
        "out": {"out": results_of(device)},
        "part of out": {"out": (None, None, results_of(device)[2])},
    }
    return changes


@pytest.mark.parametrize("norm", NORMS)
def test_anything_else_gets_a_plan_of_its_own(device: FakeDevice, norm: str) -> None:
    backward(norm, call_of(device, norm))
    for count, (name, change) in enumerate(another(device, norm).items(), 2):
        for _ in range(2):
            backward(norm, call_of(device, norm) | change)
            assert plans() == count, name


@pytest.mark.parametrize("norm", NORMS)
def test_where_in_32_bytes_others_than_x_and_dy_start_makes_no_other_plan(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, norm: str
) -> None:
    """No kernel hangs on it: parameters that are packed at multiples of 16 bytes share the launches of others."""
    made: list[Any] = []
    make = dispatch.Plan
    monkeypatch.setattr(dispatch, "Plan", lambda *arguments: made.append(make(*arguments)) or made[-1])

    def arrays(name: str, offset: int) -> Call:
        if name == "out":
            out = device.array((ROWS, COLUMNS), "float16", offset=offset), *results_of(device)[1:]
            return {"out": (*out[:2], device.array((COLUMNS,), offset=offset))}
        given = call_of(device, norm)[name]
        return {name: device.array(given.shape, given.dtype, offset=offset)}

    backward(norm, call_of(device, norm))
    backward(norm, call_of(device, norm) | arrays("out", 0))
    assert len(made) == 2
    for names in ("w", "rstd", "out"), ("out",), ("w",), ("rstd",):
        changes = {key: value for name in names for key, value in arrays(name, 16).items()}
        dx, *_ = backward(norm, call_of(device, norm) | changes)
        assert len(made) == 2, names
        assert device.launched[-1].named().dx == dx.data.ptr
    for count, (name, offset) in enumerate((("x", 16), ("dy", 16), ("w", 4), ("out", 4)), 3):
        backward(norm, call_of(device, norm) | arrays(name, offset))
        assert len(made) == count, name
    memory, (dx, *_) = device.array((2 * COLUMNS,)), results_of(device)
    overlapping = call_of(device, norm) | {"w": memory[4 : COLUMNS + 4], "out": (dx, memory[:COLUMNS], None)}
    with pytest.raises(ValueError, match="overlaps"):
        backward(norm, overlapping)


def test_the_norms_do_not_share_plans(device: FakeDevice) -> None:
    x = device.array((ROWS, COLUMNS), "float16")
    assert len(cupynorm.rmsnorm_forward(x, eps=1e-5)) == 2
    assert len(cupynorm.layernorm_forward(x, eps=1e-5)) == 3
    assert plans() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"has_bias": 1},
        {"weight_offset": False},
        {"accumulate": 0},
        {"output_mask": (1, 1, 1)},
        {"output_mask": [True, 1, True]},
        {"weight_offset": np.zeros(1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", NORMS)
def test_options_that_only_equal_good_ones_are_still_refused(device: FakeDevice, norm: str, change: Call) -> None:
    good = call_of(device, norm, weight_offset=0.0, accumulate=False, output_mask=(True, True, True))
    backward(norm, good)
    with pytest.raises(TypeError, match=next(iter(change))):
        backward(norm, good | change)
    assert len(device.launched) == 1


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("norm", NORMS)
def test_overlaps_are_looked_for_on_every_call(device: FakeDevice, norm: str, position: int) -> None:
    good = call_of(device, norm, out=results_of(device))
    bad = list(good["out"])
    bad[position] = good["x"] if position == 0 else good["w"] if position == 1 else good["out"][1]
    for _ in range(2):
        backward(norm, good)
        launched = len(device.launched)
        with pytest.raises(ValueError, match=rf"^out\[{position}\] \(d.\): overlaps "):
            backward(norm, good | {"out": tuple(bad)})
        assert len(device.launched) == launched
    assert plans() == 1


def test_given_results_come_back_and_others_are_made(device: FakeDevice) -> None:
    backward("layernorm", call_of(device, "layernorm"))  # the stream's first
    for given in itertools.product([True, False], repeat=3):
        out = tuple(array if g else None for array, g in zip(results_of(device), given, strict=True))
        device.allocated.clear()
        results = backward("layernorm", call_of(device, "layernorm", out=out))
        assert [result is array for result, array in zip(results, out, strict=True)] == list(given)
        allocations = (not given[0]) + (not all(given[1:]))  # one for dw and db
        assert [by for by, _ in device.allocated] == ["result"] * allocations


def test_dw_and_db_share_an_allocation_as_mean_and_rstd_do(device: FakeDevice) -> None:
    """Each begins at a multiple of 512 bytes, and has memory of its own."""
    call = call_of(device, "layernorm")
    backward("layernorm", call)  # the stream's first
    device.allocated.clear()
    _, *gradients = backward("layernorm", call)
    x, w = call["x"], call["w"]
    _, *statistics = cupynorm.layernorm_forward(x, w, w)
    for one, other in (gradients, statistics):
        room = -(-one.nbytes // 512) * 512
        assert one.data.ptr % 512 == 0
        assert other.data.ptr - one.data.ptr == room
        assert one.data.mem is other.data.mem
    sizes = (-(-array.nbytes // 512) * 1024 for array in (gradients[0], statistics[0]))
    assert [size for _, size in device.allocated if size != x.nbytes] == list(sizes)


def test_dx_has_an_allocation_of_its_own_where_it_is_as_large_as_dw(device: FakeDevice) -> None:
    """Whoever keeps dw is not to keep dx."""
    x, rstd = device.array((64,)), device.array(())
    dx, dw = cupynorm.rmsnorm_backward(x, x, x, rstd)
    assert dx.data.mem is not dw.data.mem
    dx, dw, db = cupynorm.layernorm_backward(x, x, x, rstd, rstd, output_mask=(True, True, False))
    assert db is None
    assert dx.data.mem is not dw.data.mem


def test_what_no_one_wants_is_neither_made_nor_written(device: FakeDevice) -> None:
    backward("layernorm", call_of(device, "layernorm"))  # the stream's first
    for mask in itertools.product([True, False], repeat=3):
        device.launched.clear()
        device.allocated.clear()
        results = backward("layernorm", call_of(device, "layernorm", output_mask=mask))
        assert tuple(result is not None for result in results) == mask
        kernels = [launch.kernel for launch in device.launched]
        assert len(kernels) == any(mask)
        assert [by for by, _ in device.allocated] == ["result"] * (mask[0] + any(mask[1:]))
        if any(mask):
            assert are_there(device.launched[0], "dx", "dw", "db") == list(mask)
        if any(mask[1:]):
            memory = are_there(device.launched[0], "dw_partials", "db_partials", "meeting")
            assert memory == [*mask[1:], True]
        else:  # dx alone, by a kernel that takes no memory
            assert kernels == ["backward_few_rows"] * mask[0]


def test_launches_go_to_the_current_stream(device: FakeDevice) -> None:
    for pointer in (0, 7, 9, 7):
        device.launched.clear()
        device.stream = FakeStream(pointer)
        backward("rmsnorm", call_of(device, "rmsnorm"))
        assert [launch.stream for launch in device.launched] == [pointer]
    assert plans() == 1


def are_there(launch: Any, *names: str) -> list[bool]:
    return [bool(getattr(launch.named(), name)) for name in names]


def meeting_of(launch: Any) -> int:
    return int(launch.named().meeting)


def counters_of(launch: Any) -> int:
    """Where the memory begins in which blocks meet, and count steps."""
    return meeting_of(launch) if launch.kernel.startswith("backward") else int(launch.named().counters)


def test_a_captured_stream_gets_workspace_of_its_own(device: FakeDevice) -> None:
    """Each graph clears its meeting, too; the stream's own stays as it is."""
    backward("rmsnorm", call_of(device, "rmsnorm", out=results_of(device)))
    device.stream = FakeStream(7)
    meetings: dict[bool, set[int]] = {False: set(), True: set()}
    for capturing, allocated in ((False, ["pool"]), (True, ["graph"]), (True, ["graph"]), (False, [])):
        device.stream.capturing = capturing
        device.allocated.clear()
        device.zeroed.clear()
        backward("rmsnorm", call_of(device, "rmsnorm", out=results_of(device)))
        assert [by for by, _ in device.allocated] == allocated
        assert [address for address, _ in device.zeroed] == [counters_of(device.launched[-1])] * len(allocated)
        meetings[capturing].add(meeting_of(device.launched[-1]))
    assert len(meetings[False]) == 1
    assert not meetings[False] & meetings[True]


def test_where_blocks_meet(device: FakeDevice) -> None:
    """Launches that follow one another meet in one place, cleared once; others do not: other streams, other threads,
    other devices."""
    places = set()
    streams = {pointer: FakeStream(pointer) for pointer in (7, 9)}
    for pointer, rows in ((7, ROWS), (9, ROWS), (7, ROWS), (9, ROWS), (7, ROWS - 1)):
        device.stream = streams[pointer]
        backward("rmsnorm", call_of(device, "rmsnorm", rows=rows, out=results_of(device, rows)))
        places.add((pointer, meeting_of(device.launched[-1])))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backward, "rmsnorm", call_of(device, "rmsnorm")).result()
    places.add((7, meeting_of(device.launched[-1])))
    there = {
        name: device.array(array.shape, array.dtype, device=1)
        for name, array in call_of(device, "rmsnorm").items()
        if name != "has_bias"
    }
    backward("rmsnorm", there)
    places.add((7, meeting_of(device.launched[-1])))
    assert len(places) == len({place for _, place in places}) == 4
    assert sorted(address for address, _ in device.zeroed) == sorted(place for _, place in places)


def launch_kept() -> Any:
    """What this thread keeps on device 0."""
    from cupynorm.cuda import launch

    return launch._kept.on_device[0]


def kept_owners() -> dict[int, Any]:
    """Of that memory, by the streams' pointers, objects that live as long."""
    return {pointer: memory.mem._owner for pointer, (_, _, memory, _) in launch_kept().items()}


def drop(device: FakeDevice, pointer: int, rows: int = ROWS) -> weakref.ref[Any]:
    """A call on a stream that nobody else knows any more."""
    device.stream = stream = FakeStream(pointer)
    backward("rmsnorm", call_of(device, "rmsnorm", rows=rows, out=results_of(device, rows)))
    device.stream = FakeStream()
    return weakref.ref(stream)


def test_workspace_is_kept_for_some_streams(device: FakeDevice) -> None:
    """For each by its pointer, whichever object has it. Then the first goes, of which memory goes before the object
    does under which it was allocated, in whose order it may be given back; a stream stays while it has work to do."""
    pointers = range(7, 7 + config.KEPT_STREAMS)
    streams = [drop(device, pointer) for pointer in pointers]
    again = drop(device, 9)
    assert meeting_of(device.launched[2]) == meeting_of(device.launched[-1])
    assert len(device.zeroed) == config.KEPT_STREAMS
    gone: list[tuple[str, int]] = []
    for pointer, owner in kept_owners().items():
        weakref.finalize(owner, gone.append, ("memory", pointer))
    del owner
    for stream, kind in (*((stream, "stream") for stream in streams), (again, "again")):
        held = stream()
        weakref.finalize(held, gone.append, (kind, held.ptr))
        del held
    assert not gone
    device.busy = {8}
    for pointer in (4, 5, 6):
        drop(device, pointer)
    assert gone[:4] == [("memory", 7), ("stream", 7), ("memory", 8), ("memory", 9)]
    assert sorted(gone[4:]) == [("again", 9), ("stream", 9)]
    assert device.capture_mode == 0
    device.busy = set()
    drop(device, 3)
    assert gone[-3:] == [("stream", 8), ("memory", 10), ("stream", 10)]


@pytest.mark.parametrize("busy", [False, True])
def test_what_a_thread_kept_goes_with_it(device: FakeDevice, busy: bool) -> None:
    """At once, not when the collector of cycles runs; but a stream that has work to do stays, so that none has its
    pointer."""
    device.busy = {7} if busy else set()
    kept: list[Any] = []

    def work() -> None:
        kept.append(drop(device, 7))
        kept.extend(map(weakref.ref, kept_owners().values()))

    gc.disable()
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        stream, owner = kept
        assert owner() is None
        assert (stream() is not None) == busy
    finally:
        gc.enable()


def run_apart(source: str) -> subprocess.CompletedProcess[bytes]:
    """In an interpreter of its own, which can import what tests can."""
    paths = os.pathsep.join(map(str, (Path(__file__).parent, Path(cupynorm.__file__).parent.parent)))
    return subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        timeout=300,
        check=True,
    )


AT_THE_END = """
import pytest
from fake_device import FakeDevice
from test_plan import backward, call_of
patch = pytest.MonkeyPatch()
device = FakeDevice(patch)
backward("rmsnorm", call_of(device, "rmsnorm"))
device.cuStreamQuery = lambda stream: 0
"""


def test_what_is_kept_when_the_interpreter_ends() -> None:
    pytest.importorskip("cupy")
    assert run_apart(AT_THE_END).stderr == b""


def test_a_stream_whose_workspace_is_not_kept_stays_while_it_has_work(monkeypatch: Any, device: FakeDevice) -> None:
    monkeypatch.setattr(config, "KEPT_BYTES", 0)
    stream = drop(device, 7)
    memory = [owner for owner in launch_kept().values() if owner[2] is not None]
    assert not memory
    assert stream() is not None
    device.busy = {7}
    for pointer in range(8, 9 + config.KEPT_STREAMS):
        drop(device, pointer)
    assert 7 not in launch_kept()
    assert stream() is not None
    device.busy = set()
    drop(device, 5)
    assert stream() is None


def test_a_stream_that_is_captured_is_not_asked(device: FakeDevice) -> None:
    """That would end the capture."""
    device.stream = captured = FakeStream(7)
    backward("rmsnorm", call_of(device, "rmsnorm"))
    captured.capturing = True
    for pointer in range(8, 10 + config.KEPT_STREAMS):
        drop(device, pointer)
    assert device.asked == [8, 9]
    captured.capturing = False
    drop(device, 5)
    assert device.asked == [8, 9, 7, 10]


def test_which_streams_are_asked(monkeypatch: Any, device: FakeDevice) -> None:
    """Those that end with their objects: no default stream, none over a bare pointer, none whose capture has failed.
    What has an error has no work any more."""
    from cupynorm.cuda import streams

    class External(FakeStream):
        pass

    class Failed(FakeStream):
        def is_capturing(self) -> bool:
            raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")

    monkeypatch.setattr(device.cupy.cuda, "ExternalStream", External)
    bare = FakeStream(20)
    bare._foreign_stream_ref = arrays.CudaStream(20)  # type: ignore[attr-defined]
    for stream in (*map(FakeStream, range(3)), External(21), Failed(22), bare):
        streams.keep_until_done(stream)
    assert (pointers_of(streams._kept), device.asked) == ([22], [])
    device.status = 700
    streams.keep_until_done(FakeStream(23))
    assert (pointers_of(streams._kept), device.asked) == ([22], [23])


def pointers_of(kept: dict[int, Any]) -> list[int]:
    return [stream.ptr for stream in kept.values()]


class Anothers:
    """Another library's stream, which can be closed, as cuda.core's."""

    def __init__(self, pointer: int) -> None:
        self.pointer: int | None = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        if self.pointer is None:
            raise RuntimeError("Stream has been closed")
        return 0, self.pointer


@pytest.mark.parametrize("pointer", [None, 8])
def test_a_closed_stream_is_not_asked(device: FakeDevice, pointer: int | None) -> None:
    """Another library's: its pointer means nothing any more, or another stream. Until then it is held."""
    from cupynorm.cuda import streams

    stream = FakeStream(7)
    stream._foreign_stream_ref = owner = Anothers(7)  # type: ignore[attr-defined]
    device.busy = {7}
    streams.keep_until_done(stream)
    assert (pointers_of(streams._kept), device.asked) == ([7], [7])
    owner.pointer = pointer
    streams.keep_until_done(FakeStream(0))
    streams.keep_until_done(FakeStream(9))
    assert (pointers_of(streams._kept), device.asked) == ([], [7, 9])


def test_several_objects_of_one_stream_are_held(device: FakeDevice) -> None:
    """One of them is the one with which the stream ends, and it may not be the last."""
    from cupynorm.cuda import streams

    device.busy = {7}
    both = [FakeStream(7), FakeStream(7)]
    for stream in (*both, both[0]):
        streams.keep_until_done(stream)
    assert list(streams._kept.values()) == both


AROUND_A_FORK = """
import os, signal, threading, time
import pytest
from fake_device import FakeDevice, FakeStream
device = FakeDevice(pytest.MonkeyPatch())
from cupynorm.cuda import streams
is_asked = threading.Event()
def ask(stream):
    is_asked.set()
    time.sleep(0.2)
    return 600
device.cuStreamQuery = ask
thread = threading.Thread(target=streams.keep_until_done, args=(FakeStream(7),))
thread.start()
is_asked.wait()
child = os.fork()
if not child:
    signal.alarm(20)  # which ends it
    streams.keep_until_done(FakeStream(8))
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_streams_are_looked_at() -> None:
    """The child, which has no thread that looks at them, waits for none."""
    pytest.importorskip("cupy")
    assert run_apart(AROUND_A_FORK).stdout == b"0\n"


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_memory_goes_back_in_order_of_where_it_came_from(device: FakeDevice, grows: bool, busy: bool) -> None:
    """Of a stream-ordered allocator it does so under the object that was current then: that lives as long."""
    from cupynorm.cuda import launch

    first = drop(device, 7)
    drop(device, 7)
    assert first() is not None
    device.busy = {7} if busy else set()
    if grows:
        launch._Workspace(64, 2 * launch_kept()[7][1]).take(FakeStream(7), launch_kept())
    drop(device, 9)
    drop(device, 10)
    assert (first() is None) == (grows and not busy)


@pytest.mark.parametrize("thread_ends", [False, True])
def test_both_objects_of_a_stream_live_while_it_has_work(device: FakeDevice, thread_ends: bool) -> None:
    """The one that is current, and the one under which memory was allocated: with either the stream may end."""
    from cupynorm.cuda import streams

    def look() -> None:
        for pointer in range(100, 104):
            streams.keep_until_done(FakeStream(pointer))

    def work() -> list[weakref.ref[Any]]:
        objects = [drop(device, 7) for _ in range(2)]
        look()  # the first, which the second took over from, has no work yet
        assert 7 not in pointers_of(streams._kept)
        device.busy = {7}
        return objects

    if thread_ends:
        with ThreadPoolExecutor(1) as pool:
            objects = pool.submit(work).result()
    else:
        objects = work()
        for pointer in range(8, 8 + config.KEPT_STREAMS):
            drop(device, pointer)
    gc.collect()
    assert 7 not in launch_kept()
    assert all(stream() is not None for stream in objects)
    device.busy = set()
    look()
    assert all(stream() is None for stream in objects)


def test_what_is_done_is_let_go_behind_the_lock(device: FakeDevice) -> None:
    """A finalizer may wait for what another thread holds that forks."""
    from cupynorm.cuda import streams

    free: list[bool] = []

    def elsewhere() -> None:
        free.append(streams._lock.acquire(timeout=0))
        if free[-1]:
            streams._lock.release()

    def ask() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    stream = FakeStream(7)
    weakref.finalize(stream, ask)
    streams.keep_until_done(stream)
    del stream
    streams.keep_until_done(FakeStream(8))
    assert free == [True]


def test_how_often_streams_are_looked_at(monkeypatch: Any, device: FakeDevice) -> None:
    """When there are sixteen, and then when there are twice as many as were at work."""
    from cupynorm.cuda import streams

    monkeypatch.setattr(streams, "_LOOKED_AT", 16)
    monkeypatch.setattr(streams, "_look_at", 16)
    device.busy = set(range(100, 140))
    looks = []
    for pointer in range(100, 140):
        streams.keep_until_done(FakeStream(pointer))
        if len(device.asked) > sum(looks):
            looks.append(len(device.asked) - sum(looks))
    assert looks == [16, 32]
    device.busy = {110}
    for pointer in range(140, 164):
        streams.keep_until_done(FakeStream(pointer))
    assert pointers_of(streams._kept) == [110]


def test_a_stream_lives_as_long_as_copies_are_read(monkeypatch: Any, device: FakeDevice) -> None:
    """Of a call, too, that needs no workspace."""
    monkeypatch.setattr(arrays.device_home(), "contiguous", lambda array: device.array(array.shape, array.dtype))
    call = call_of(device, "rmsnorm", rows=64)
    call["x"] = device.array((COLUMNS, 64), "float16").T
    device.busy, device.stream = {7}, FakeStream(7)
    stream = weakref.ref(device.stream)
    backward("rmsnorm", call | {"out": results_of(device, 64)})
    device.stream = FakeStream()
    assert stream() is not None
    assert not launch_kept()


@pytest.mark.parametrize("foreign", [False, True])
def test_another_object_of_a_stream_takes_over(device: FakeDevice, foreign: bool) -> None:
    """It may be the one with which the stream ends, as may the first, unless that is over a bare pointer."""
    from cupynorm.cuda import streams

    first = FakeStream(7)
    if foreign:
        first._foreign_stream_ref = arrays.CudaStream(7)  # type: ignore[attr-defined]
    device.stream, device.busy = first, {7}
    backward("rmsnorm", call_of(device, "rmsnorm"))
    second = drop(device, 7)
    assert meeting_of(device.launched[0]) == meeting_of(device.launched[1])
    assert list(streams._kept.values()) == ([] if foreign else [first])
    assert second() is not None


@pytest.mark.parametrize("context", [0, 5])
def test_a_context_that_a_thread_has_made_current_stays(monkeypatch: Any, device: FakeDevice, context: int) -> None:
    from cupynorm.cuda import driver

    made = []
    monkeypatch.setattr(device.cupy.cuda.driver, "ctxGetCurrent", lambda: context)
    monkeypatch.setattr(device.cupy.cuda.runtime, "setDevice", made.append)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(driver.make_context_current).result()
    assert made == ([] if context else [0])


def test_arguments_are_made_once_for_a_thread(monkeypatch: Any, device: FakeDevice) -> None:
    from cupynorm.cuda import launch

    made = []
    monkeypatch.setattr(launch, "Arguments", lambda *of, own=launch.Arguments: made.append(of) or own(*of))
    for _ in range(3):
        backward("rmsnorm", call_of(device, "rmsnorm"))
        cupynorm.rmsnorm_forward(call_of(device, "rmsnorm")["x"])
    assert len(made) == 2
    device.error = RuntimeError("no launch")
    with pytest.raises(RuntimeError, match="no launch"):
        backward("rmsnorm", call_of(device, "rmsnorm"))
    device.error = None
    for _ in range(2):
        backward("rmsnorm", call_of(device, "rmsnorm"))
    assert len(made) == 3


@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_a_call_in_the_middle_of_another(monkeypatch: Any, device: FakeDevice, direction: str) -> None:
    """As a signal's handler may make it in the same thread: each has arguments of its own."""
    inputs, interrupted = call_of(device, "rmsnorm"), []
    shapes: Any = ((ROWS, COLUMNS), (ROWS,)) if direction == "forward" else ()
    one, other = (tuple(map(device.array, shapes, ("float16", "float32"))) or results_of(device) for _ in range(2))

    def call(out: Any) -> None:
        if direction == "backward":
            backward("rmsnorm", inputs | {"out": out})
        else:
            cupynorm.rmsnorm_forward(inputs["x"], out=out)

    def launch(*arguments: Any) -> None:
        if not interrupted:
            interrupted.append(True)
            call(other)
            call(other)
        device._launch(*arguments)

    monkeypatch.setattr(device.cupy.cuda.driver, "launchKernel", launch)
    for out in (one, one, other):
        call(out)
    written = [getattr(launched.named(), "dx" if direction == "backward" else "y") for launched in device.launched]
    assert written == [out[0].data.ptr for out in (other, other, one, one, other)]


def test_kept_workspace_grows(device: FakeDevice) -> None:
    """The largest call's workspace serves the smaller ones; where blocks meet, nothing else ever lies."""
    for has_bias in (False, True, False):
        backward("rmsnorm", call_of(device, "rmsnorm", has_bias=has_bias))
    small, large, again = (counters_of(launch) for launch in device.launched)
    assert small != large == again
    zeros = config.KEPT_COUNTER_BYTES + config.KEPT_EXCHANGE_BYTES + config.KEPT_WIDE_BYTES
    assert device.zeroed == [(place, zeros) for place in (small, large)]
    for launch in device.launched:
        assert config.meeting_bytes(launch.grid[0]) <= config.KEPT_COUNTER_BYTES
        assert launch.fields()[8] >= counters_of(launch) + zeros


@pytest.mark.parametrize("rows", [3, 900])
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.usefixtures("without_wide_rows")
def test_what_gangs_exchange_is_zero_at_first_and_theirs_alone(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, rows: int, capturing: bool
) -> None:
    """In kept memory between counters and parts, by a cooperative launch whose blocks run at the same time."""
    columns = 262144
    monkeypatch.setattr(device.cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 1)
    device.stream = FakeStream(7, capturing)
    arrays = {name: device.array((rows, columns), "float16") for name in ("x", "dy")}
    arrays |= {"w": device.array((columns,)), "rstd": device.array((rows,))}
    for _ in range(2):
        cupynorm.rmsnorm_backward(**arrays)
    for launch in device.launched:
        assert (launch.kernel, launch.cooperative) == ("backward_staged", True)
        assert launch.grid[0] <= 132
        named = launch.named()
        walkers = named.partial_rows
        assert launch.grid[0] - named.column_blocks == 32 * walkers
        start, size = next((s, n) for s, n in reversed(device.zeroed) if s <= named.sums < s + n)
        assert named.sums % 128 == 0
        assert named.sums + config.exchange_bytes(32 * walkers) <= start + size
        if named.meeting:
            assert start + config.meeting_bytes(launch.grid[0]) <= named.sums
            assert named.dw_partials >= start + size
        if not capturing:
            assert named.sums == start + config.KEPT_COUNTER_BYTES
    assert len(device.zeroed) == (2 if capturing else 1)
    backward("rmsnorm", call_of(device, "rmsnorm"))
    assert not device.launched[-1].cooperative
    cupynorm.rmsnorm_backward(**arrays, output_mask=(False, True))
    assert device.launched[-1].cooperative == bool(device.launched[-1].named().meeting)


@pytest.mark.parametrize("w", ["float32", "float64"])
@pytest.mark.parametrize("capturing", [False, True])
def test_what_all_blocks_exchange_is_zero_at_first_and_theirs_alone(
    monkeypatch: pytest.MonkeyPatch, device: FakeDevice, capturing: bool, w: str
) -> None:
    """In kept memory behind what gangs exchange, and before a w that was widened."""
    monkeypatch.setattr(device.cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 1)
    device.stream = FakeStream(7, capturing)
    for rows, columns, kernel in (
        (3, 262144, "backward_wide"),
        (900, 131072, "backward_wide"),
        (5, 262144, "forward_wide"),
    ):
        arrays = {name: device.array((rows, columns), "float16") for name in ("x", "dy")}
        if kernel == "forward_wide":
            cupynorm.rmsnorm_forward(arrays["x"], device.array((columns,), w))
        else:
            cupynorm.rmsnorm_backward(**arrays, w=device.array((columns,), w), rstd=device.array((rows,)))
        launch = device.launched[-1]
        assert (launch.kernel, launch.cooperative, launch.grid) == (kernel, True, (128, 1, 1))
        named = launch.named()
        start, size = next((s, n) for s, n in reversed(device.zeroed) if s <= named.exchange < s + n)
        assert named.exchange % 128 == 0
        assert named.exchange + config.wide_exchange_bytes() <= start + size
        assert named.exchange == start + config.KEPT_COUNTER_BYTES + config.KEPT_EXCHANGE_BYTES
        if w == "float64" and kernel == "backward_wide":
            assert named.w >= start + size
    assert len(device.zeroed) == (3 if capturing else 1)


def test_a_large_workspace_is_not_kept(device: FakeDevice) -> None:
    from cupynorm.cuda import driver, launch

    kept = launch._Kept()
    for counter_bytes, size in ((64, config.KEPT_BYTES), (config.KEPT_COUNTER_BYTES + 8, 512), (0, config.KEPT_BYTES)):
        workspace = launch._Workspace(counter_bytes, size)
        device.zeroed.clear()
        arguments = driver.Arguments("3P", 1)
        memory = workspace.take(device.stream, kept)
        workspace.fill_in(arguments, memory.ptr)
        assert [entry[1:3] for entry in kept.values()] == [(0, None)]
        assert device.zeroed == ([(memory.ptr, counter_bytes)] if counter_bytes else [])
        assert arguments.workspace == memory.ptr
        _, part, counters = struct.unpack("3P", arguments_of(arguments, 24))
        assert counters == (memory.ptr if counter_bytes else 0)
        assert counter_bytes <= part - memory.ptr == device.allocated[-1][1] - size
    assert launch._Workspace(0, 0).take(device.stream, kept) is None
    assert launch._Workspace(64, 512).take(device.stream, kept) is kept[device.stream.ptr][2]


# So many rows and columns of 16 bits, 137 GB, whose sums by slabs are 136 MB; at these addresses, and their strides.
HUGE_ROWS, HUGE_COLUMNS = (1 << 18) + 1, (1 << 18) + 1
HUGE_STRIDE = HUGE_COLUMNS + 2


def huge_problem(norm: problem.Norm, dy: str | None) -> problem.NormProblem:
    whole = of_config.backward(HUGE_COLUMNS, "bfloat16", dy or "bfloat16", HUGE_ROWS, norm)
    whole = dataclasses.replace(whole, x_row_stride=HUGE_STRIDE)
    if dy:
        return whole
    return dataclasses.replace(of_config.forward_of(whole), want_dx=False, want_dw=False, want_db=False)


def rows_in_turn(device: FakeDevice, norm: problem.Norm, direction: str, statistics: tuple[int, int]) -> Iterator[Any]:
    """The arguments of two kernels at a time, and the rows that came before: four times, and in the end all rows."""
    mean, rstd = statistics
    done, pairs = 0, zip(device.launched[::2], device.launched[1::2], strict=True)
    for sums, apply in pairs:
        assert (sums.kernel, apply.kernel) == (f"{direction}_split_sums", f"{direction}_split_apply")
        assert sums.arguments == apply.arguments
        got = apply.named()
        assert (got.mean, got.rstd) == (mean + 4 * done if norm == "layernorm" else 0, rstd + 4 * done)
        assert got.sums
        assert 2 <= got.rows <= config.WORKSPACE_BYTES // (8 * apply.grid[0])
        yield got, done
        done += got.rows
    assert done == HUGE_ROWS
    assert len(device.launched) == 2 * 4


@pytest.mark.parametrize("norm", NORMS)
def test_a_huge_forward_call_goes_in_several_launches(device: FakeDevice, norm: problem.Norm) -> None:
    """So that its workspace is no larger than others': two kernels over some rows each, which follow one another."""
    from cupynorm.cuda import launch

    x, w, b, y, mean, rstd = range(1 << 40, 7 << 40, 1 << 40)
    statistics = (mean, rstd) if norm == "layernorm" else (rstd,)
    launch.Forward(huge_problem(norm, None), (0, 0), (0, 0))(x, w, b, 0, y, *statistics)
    assert all(size <= config.WORKSPACE_BYTES for _, size in device.allocated)
    assert all(sums.grid == apply.grid for sums, apply in itertools.pairwise(device.launched) if "sums" in sums.kernel)
    for got, done in rows_in_turn(device, norm, "forward", (mean, rstd)):
        assert (got.x, got.y) == (x + 2 * HUGE_STRIDE * done, y + 2 * HUGE_COLUMNS * done)
        assert (got.w, got.b, got.counters) == (w, b, 0)


@pytest.mark.parametrize("w", ["float64", "bfloat16", "float16"])
def test_huge_rows_need_no_more_workspace(device: FakeDevice, w: str) -> None:
    """W is read as it is, and dw and db are summed some columns at a time, each column once."""
    from cupynorm.cuda import launch

    columns = (1 << 29) + 1
    one_row = dataclasses.replace(
        huge_problem("layernorm", "float16"), rows=1, columns=columns, w_dtype=DTYPES[w], x_row_stride=columns
    )
    x, w_address, dy, mean, rstd, dx, dw, db = range(1 << 40, 9 << 40, 1 << 40)
    plan = launch.Backward(one_row, (0, 0, 0), (0,), (0, 0))
    plan(x, w_address, dy, mean, rstd, 0, dx, dw, db)
    assert all(size <= config.WORKSPACE_BYTES for _, size in device.allocated)
    summed = 0
    for launched in device.launched:
        got = launched.named()
        assert launched.kernel != "widen_w"
        assert got.w == w_address
        assert (config.ANY_W in launched.definitions) == (bool(got.dx) and w != "bfloat16")
        if got.dw:
            assert (got.x, got.dy, got.dx) == (x + 2 * summed, dy + 2 * summed, 0)
            assert (got.dw, got.db) == (dw + DTYPES[w].itemsize * summed, db + DTYPES[w].itemsize * summed)
            assert summed % 512 == 0
            summed += got.columns
        elif got.dx:
            assert (got.x, got.dy, got.dx, got.columns) == (x, dy, dx, columns)
    assert summed == columns


def test_w_is_converted_first_where_it_is_short_enough(device: FakeDevice) -> None:
    """Of x's 16 bits, in float32, up to 16 MiB; longer ones the kernels read as they are."""
    from cupynorm.cuda import launch

    whole = dataclasses.replace(huge_problem("rmsnorm", "float16"), rows=3, w_dtype=DTYPES["float64"])
    for columns, converts in ((1 << 22, True), ((1 << 22) + 1, False)):
        of_columns = dataclasses.replace(
            whole, columns=columns, x_row_stride=columns, dy_row_stride=columns, out_row_stride=columns
        )
        device.launched.clear()
        launch.Backward(of_columns, (0, 0, 0), (0,), (0, 0))(64, 128, 192, 0, 256, 0, 320, 384, 0)
        first, *kernels = device.launched if converts else (None, *device.launched)
        assert (first is not None) == converts
        assert [launched.kernel for launched in kernels] == ["backward_split_sums", "backward_split_apply"]
        assert all((config.ANY_W in launched.definitions) != converts for launched in kernels)
        if first is not None:
            assert first.kernel == "widen_w"
            assert {launched.named().w for launched in kernels} == {first.named().widened}
        else:
            assert {launched.named().w for launched in kernels} == {128}


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("x", DTYPES)
def test_no_workspace_is_over_64_mib(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, norm: problem.Norm, x: str, capability: tuple[int, int]
) -> None:
    from cupynorm.cuda import launch

    shared_bytes = {7: 65536, 8: 166912, 9: ATTRIBUTES[97], 12: 101376}[capability[0]]
    for attribute, value in ((75, capability[0]), (76, capability[1]), (97, shared_bytes)):
        monkeypatch.setitem(ATTRIBUTES, attribute, value)
    for columns, gigabytes, dy, w in itertools.product(
        (1, 384, 4099, 65544, 1 << 18, 300001, 1 << 20, 5_000_001, 1 << 27), (0, 1, 90), (x, "bfloat16"), DTYPES
    ):
        rows = max(1, gigabytes * 10**9 // (columns * DTYPES[x].itemsize))
        whole = dataclasses.replace(
            huge_problem(norm, dy), rows=rows, columns=columns, x_dtype=DTYPES[x], w_dtype=DTYPES[w]
        )
        whole = dataclasses.replace(whole, x_row_stride=columns, dy_row_stride=columns, out_row_stride=columns)
        device.allocated.clear()
        of_sums = (1 << 30, 1 << 31) if norm == "layernorm" else (1 << 30, 0)
        launch.Backward(whole, (0, 0, 0), (0,), (0, 0))(64, 64, 64, 64, 64, 0, 64, *of_sums)
        whole = dataclasses.replace(
            whole, direction="forward", dy_dtype=None, want_dx=False, want_dw=False, want_db=False
        )
        launch.Forward(whole, (0, 0), (0, 0))(64, 64, 64, 0, 64, *((64, 64) if norm == "layernorm" else (64,)))
        assert all(size <= 64 << 20 for _, size in device.allocated), (columns, rows, dy, w)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("wants_sums", [True, False])
def test_a_huge_backward_call_goes_in_several_launches(
    device: FakeDevice, norm: problem.Norm, wants_sums: bool
) -> None:
    """Dx of some rows each; then dw and db, which need no sums of rows."""
    from cupynorm.cuda import launch

    x, w, dy, mean, rstd, dx, dw, db = range(1 << 40, 9 << 40, 1 << 40)
    whole = huge_problem(norm, "float16")
    if not wants_sums:
        whole = dataclasses.replace(whole, want_dw=False, want_db=False)
    plan = launch.Backward(whole, (0, 0, 0), (0,), (0, 0))
    outputs = (dx, dw if whole.want_dw else 0, db if whole.want_db else 0)
    plan(x, w, dy, mean if norm == "layernorm" else 0, rstd, 0, *outputs)
    assert all(size <= config.WORKSPACE_BYTES for _, size in device.allocated)
    if wants_sums:
        of_sums = device.launched.pop().named()
        assert (of_sums.x, of_sums.dy, of_sums.dx, of_sums.rows) == (x, dy, 0, HUGE_ROWS)
        assert (of_sums.dw, of_sums.db, of_sums.sums) == (*outputs[1:], 0)
    for got, done in rows_in_turn(device, norm, "backward", (mean, rstd)):
        assert (got.x, got.dy) == (x + 2 * HUGE_STRIDE * done, dy + 2 * HUGE_COLUMNS * done)
        assert (got.dx, got.dw, got.db) == (dx + 2 * HUGE_COLUMNS * done, 0, 0)
        assert got.w == w


def test_a_workspace_for_what_lies_beside_alone(device: FakeDevice) -> None:
    """Kept, it lies behind what counters may take, and is not cleared from call to call; too large, it is not kept."""
    from cupynorm.cuda import launch

    kept = launch._Kept()
    workspace = launch._Workspace(0, 0, beside=1000)
    memory = workspace.take(device.stream, kept)
    assert memory is kept[device.stream.ptr][2]
    assert workspace.beside >= config.KEPT_COUNTER_BYTES
    assert workspace.beside + 1000 <= device.allocated[-1][1]
    zeroed = len(device.zeroed)
    assert workspace.take(device.stream, kept) is memory
    assert len(device.zeroed) == zeroed
    behind = launch._Workspace(64, 2000, beside=1000)
    assert behind.beside >= config.KEPT_COUNTER_BYTES + 2000
    large = launch._Workspace(0, beside=config.KEPT_BYTES)
    assert large.take(device.stream, launch._Kept()) is not None
    assert (large.beside, device.allocated[-1][1]) == (0, config.KEPT_BYTES)


def test_w_is_widened_where_nobody_else_does(device: FakeDevice) -> None:
    """In each stream's memory and each graph's, with few rows and with a meeting, before the main kernel."""
    streams = {pointer: FakeStream(pointer) for pointer in (7, 9)}
    for rows in (48, ROWS):
        places = set()
        for pointer, capturing in ((7, False), (9, False), (7, True)):
            device.stream = streams[pointer]
            device.stream.capturing = capturing
            device.launched.clear()
            call = call_of(device, "rmsnorm", rows=rows) | {"w": device.array((COLUMNS,), "float64")}
            backward("rmsnorm", call)
            assert [launch.stream for launch in device.launched] == [pointer] * 2
            first, second = device.launched
            assert first.kernel == "widen_w"
            assert first.fields()[1] == second.named().w
            places.add(second.named().w)
        assert len(places) == 3


def arguments_of(arguments: Any, size: int) -> bytes:
    """What a launch would read."""
    return ctypes.string_at(ctypes.c_void_p.from_address(arguments.address).value or 0, size)


def test_each_device_has_its_own_plan_and_is_made_current(device: FakeDevice) -> None:
    for number in (0, 1, 0, 1):
        arrays = call_of(device, "rmsnorm")
        there = {
            name: device.array(array.shape, array.dtype, device=number) if name != "has_bias" else array
            for name, array in arrays.items()
        }
        results = backward("rmsnorm", there)
        assert all(result.data.device_id == number for result in results)
        assert device.current == 0
    assert plans() == 2
    with pytest.raises(TypeError, match=r"^dy: is on cuda:1, but x is on cuda:0; .* one device"):
        backward("rmsnorm", arrays | {"dy": there["dy"]})


def test_elements_across_their_boundaries_are_refused(device: FakeDevice) -> None:
    for name, shape in (("x", (ROWS, COLUMNS)), ("rstd", (ROWS,))):
        call = call_of(device, "rmsnorm", dtype="float32")
        backward("rmsnorm", call)
        launched = len(device.launched)
        crooked = device.array(shape, "float32", offset=6)
        with pytest.raises(ValueError, match=rf"^{name}: starts 2 bytes past .* element size, 4"):
            backward("rmsnorm", call | {name: crooked})
        assert len(device.launched) == launched


@pytest.mark.parametrize(
    ("mask", "rows", "dtype", "walkers", "column_blocks"),
    [
        ((True, True, True), 600, "float16", 68, 64),
        ((True, False, True), 600, "float16", 68, 64),
        ((False, True, True), 600, "float16", 0, 64),
        ((True, False, False), 2200, "float32", 264, 0),  # of 16-bit types the kernel for few rows writes dx alone
    ],
)
def test_column_blocks_need_no_memory(
    device: FakeDevice, mask: tuple[bool, ...], rows: int, dtype: str, walkers: int, column_blocks: int
) -> None:
    """They stand behind the row walkers, of which there are none without dx; nobody meets, whatever the type of dw."""
    call = call_of(device, "layernorm", rows=rows, dtype=dtype, output_mask=mask) | {
        "w": device.array((COLUMNS,), dtype)
    }
    backward("layernorm", call)
    (launch,) = device.launched
    assert launch.kernel == "backward_staged"
    assert are_there(launch, "dx", "dw", "db") == list(mask)
    assert not any(are_there(launch, "dw_partials", "db_partials", "sums", "meeting"))
    assert {by for by, _ in device.allocated} <= {"result"}
    assert (launch.named().partial_rows, launch.named().column_blocks) == (walkers, column_blocks)
    assert launch.grid[0] == walkers + column_blocks


def test_column_blocks_that_share_rows_have_counters_and_room_for_their_sums(device: FakeDevice) -> None:
    """Counters, which are zero, and behind what is kept so the sums of each block; one kernel for all masks."""
    for mask, outputs in ((None, 2), ((True, True, False), 1), ((True, False, True), 1)):
        call = {name: device.array((3000, 256), DTYPES["float16"]) for name in ("x", "dy")}
        call |= {"w": device.array((256,)), "mean": device.array((3000,)), "rstd": device.array((3000,))}
        backward("layernorm", call | {"has_bias": True, "output_mask": mask})
        named = device.launched[-1].named()
        slices, part = divmod(named.column_blocks, named.row_parts)
        assert (slices, part, named.row_parts > 1) == (256 // (named.column_threads * 8), 0, True)
        start, size = next((s, n) for s, n in reversed(device.zeroed) if s <= named.meeting < s + n)
        assert named.meeting == start
        assert size >= config.STEP_COUNTERS_BYTES >= 4 * slices
        assert named.sums >= start + size
        assert named.sums + named.column_blocks * named.column_threads * 8 * outputs * 8 <= start + config.KEPT_BYTES
        assert not any(are_there(device.launched[-1], "dw_partials", "db_partials"))
    assert len({launched.kernel for launched in device.launched}) == 1


def test_what_column_blocks_read_again_stays_in_the_cache(device: FakeDevice) -> None:
    for rows, column_blocks, read_once in ((3400, 96, 0), (7000, 0, 1), (9000, 0, 0)):
        backward("layernorm", call_of(device, "layernorm", rows=rows))
        arguments = device.launched[-1].named()
        assert (arguments.read_once, arguments.column_blocks) == (read_once, column_blocks), rows


def test_one_row_off_16_bytes_meets_nobody(device: FakeDevice) -> None:
    """The one walker's partial row is dw. Walkers of many rows meet."""
    for rows, meet in ((1, False), (ROWS, True)):
        call = call_of(device, "rmsnorm", rows=rows) | {"x": device.array((rows, COLUMNS), "float16", offset=2)}
        backward("rmsnorm", call)
        there = are_there(device.launched[-1], "dw_partials", "meeting", "column_blocks")
        assert there == [meet, meet, False]


def test_one_row_off_16_bytes_has_column_blocks_where_dw_is_narrowed(device: FakeDevice) -> None:
    call = call_of(device, "rmsnorm", rows=1) | {"x": device.array((1, COLUMNS), "float16", offset=2)}
    backward("rmsnorm", call | {"w": device.array((COLUMNS,), "float16")})
    assert are_there(device.launched[-1], "dw_partials", "meeting", "column_blocks") == [False, False, True]


@pytest.mark.parametrize(("w_dtype", "apart"), [("float32", False), ("float16", True)])
def test_one_walker_of_the_direct_route_keeps_apart_what_it_narrows(
    device: FakeDevice, w_dtype: str, apart: bool
) -> None:
    """Short rows with large gaps."""
    x, dy = (device.array((2, 256), "float16")[:, :128] for _ in range(2))
    cupynorm.rmsnorm_backward(x, device.array((128,), w_dtype), dy, device.array((2,)))
    assert device.launched[-1].kernel == "backward_direct"
    assert are_there(device.launched[-1], "dw_partials", "meeting", "column_blocks") == [apart, False, False]


@pytest.mark.parametrize(("rows", "few"), [(1, True), (48, True), (464, True), (465, False), (900, False)])
@pytest.mark.parametrize("norm", NORMS)
def test_few_rows_have_a_kernel_of_their_own(device: FakeDevice, norm: str, rows: int, few: bool) -> None:
    """Where all of its blocks run at the same time; it needs no memory."""
    backward(norm, call_of(device, norm, rows=rows))
    (launch,) = device.launched
    assert (launch.kernel == "backward_few_rows") == few
    assert {by for by, _ in device.allocated} <= {"result"}
    if few:
        arguments = launch.named()
        assert launch.grid == (arguments.row_blocks + arguments.column_blocks, 1, 1)
        assert (arguments.rows, arguments.columns, arguments.row_blocks) == (rows, COLUMNS, rows)
        assert (arguments.column_blocks, arguments.column_threads) == ((1, 0) if rows == 1 else (64, 2))
        assert arguments.reciprocal_columns == np.float32(1) / np.float32(COLUMNS)


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True), (False, True, True), (True, False, False)])
@pytest.mark.parametrize("rows", [1, 48])
def test_few_rows_write_what_is_wanted(device: FakeDevice, rows: int, mask: tuple[bool, ...]) -> None:
    """Without dx column blocks sum dw and db alone, by the kernel of more rows."""
    backward("layernorm", call_of(device, "layernorm", rows=rows, output_mask=mask))
    (launch,) = device.launched
    assert are_there(launch, "dx", "dw", "db", "column_blocks") == [*mask, any(mask[1:])]
    assert launch.kernel == ("backward_few_rows" if mask[0] else "backward_staged")


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_two_vectors_fill_blocks(device: FakeDevice, norm: str, name: str) -> None:
    """128 rows to a block of the kernel for few, the most that there may be."""
    for rows in (513, 600, 1024):
        x, dy = (device.array((rows, 8), DTYPES[name]) for _ in range(2))
        statistics = [device.array((rows,))] * (2 if norm == "layernorm" else 1)
        getattr(cupynorm, f"{norm}_backward")(x, device.array((8,)), dy, *statistics)
        launch = device.launched[-1]
        assert launch.kernel == "backward_few_rows"
        assert (launch.named().rows, launch.named().block_rows) == (rows, 128)


@pytest.mark.parametrize(("w", "offset", "alone"), [
    ("float32", 0, True), ("float16", 0, True), ("float64", 0, False), ("bfloat16", 0, False), ("float32", 4, False),
])  # fmt: skip
def test_one_row_has_nothing_to_add_up(device: FakeDevice, w: str, offset: int, alone: bool) -> None:
    """What it adds to dw and db is written as it is, in two types, to multiples of 16 bytes; else by way of a sum."""
    parameter = DTYPES[w]
    out = (None, *(device.array((COLUMNS,), parameter, offset=offset) for _ in range(2)))
    call = call_of(device, "layernorm", rows=1, out=out) | {"w": device.array((COLUMNS,), parameter)}
    backward("layernorm", call)
    assert device.launched[-1].kernel == "backward_few_rows"
    assert are_there(device.launched[-1], "column_threads", "row_threads") == [not alone] * 2


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "widens"),
    [
        ("float16", "float32", False),
        ("float16", "float16", False),
        ("float16", None, False),
        ("float16", "float64", True),
        ("float32", "float16", True),
        ("float32", "float32", False),
        ("float64", "float32", True),
    ],
)
def test_w_of_a_third_type_is_widened_first(
    device: FakeDevice, x_dtype: str, w_dtype: str | None, widens: bool
) -> None:
    """Into memory that nothing else has, in the type of the arithmetic; not without dx, which alone needs w."""
    for rows in (48, 800, 20_000):  # few, with column blocks, and with a meeting
        for want_dx in (True, False):
            device.launched.clear()
            w = None if w_dtype is None else device.array((COLUMNS,), w_dtype)
            wide = "float64" if x_dtype == "float64" else "float32"
            call = call_of(device, "layernorm", rows=rows, dtype=x_dtype, output_mask=(want_dx, True, True)) | {"w": w}
            backward("layernorm", call | {name: device.array((rows,), wide) for name in ("mean", "rstd")})
            *before, launch = device.launched
            arguments = launch.named()
            assert len(before) == (widens and want_dx)
            if not before:
                assert arguments.w == (0 if w is None else w.data.ptr)
                assert arguments.w_code == config.ELEMENT_CODES[w_dtype]
                continue
            source, widened, columns, code = before[0].fields()
            assert before[0].grid == (-(-COLUMNS // 256), 1, 1)
            assert (source, columns, code) == (w.data.ptr, COLUMNS, config.ELEMENT_CODES[w_dtype])
            assert (arguments.w, arguments.w_code) == (widened, config.ELEMENT_CODES[wide])
            assert widened % 512 == 0
            if launch.kernel == "backward_few_rows":
                continue
            others = [arguments.dw_partials, arguments.db_partials, arguments.meeting]
            assert all(not other or other < widened for other in others)
            itemsize = np.dtype(wide).itemsize
            if arguments.db_partials:
                stride = config.partial_row_stride(COLUMNS)
                assert widened >= arguments.db_partials + arguments.partial_rows * stride * itemsize


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("mask", [(True, True, True), (True, True, False), (True, False, True)], ids=str)
def test_one_walker_keeps_apart_what_starts_off_16_bytes(
    device: FakeDevice, mask: tuple[bool, ...], offset: int
) -> None:
    """A partial row for each of dw and db that is wanted, in the workspace; it then adds up as if it had met others."""
    out = (None, *(device.array((COLUMNS,), offset=offset) if wanted else None for wanted in mask[1:]))
    call = call_of(device, "layernorm", rows=1, output_mask=mask, out=out)
    backward("layernorm", call | {"x": device.array((1, COLUMNS), "float16", offset=2)})
    (launch,) = device.launched
    assert are_there(launch, "dw", "db") == list(mask[1:])
    assert are_there(launch, "dw_partials", "db_partials") == [wanted and offset != 0 for wanted in mask[1:]]
    assert are_there(launch, "meeting") == [offset != 0]


@pytest.mark.parametrize("norm", NORMS)
def test_a_long_forward_call_draws_steps_by_a_counter_of_zero(device: FakeDevice, norm: str) -> None:
    """A stream's own is cleared once, a graph's each time; a short call needs none."""
    function = getattr(cupynorm, f"{norm}_forward")
    device.stream = FakeStream(7)
    for rows, capturing, zeroed in (
        (64, False, 0),
        (400_000, False, 1),
        (400_000, False, 0),
        (400_000, True, 1),
        (400_000, True, 1),
        (64, True, 0),
        (400_000, False, 0),
    ):
        device.stream.capturing = capturing
        device.zeroed.clear()
        function(device.array((rows, 1024), "float16"))
        launch = device.launched[-1]
        assert bool(counters_of(launch)) == (rows > 64)
        assert [place for place, _ in device.zeroed] == [counters_of(launch)] * zeroed, (rows, capturing)
        assert all(size >= config.STEP_COUNTERS_BYTES for _, size in device.zeroed)


LONG = [
    ("rmsnorm", 512, 1, True),
    ("rmsnorm", 4096, 1, True),
    ("layernorm", 512, 4, True),
    ("layernorm", 4096, 1, True),
    ("layernorm", 5120, 1, True),
    ("layernorm", 7168, 1, True),
    ("layernorm", 8000, 1, True),  # with lanes nearly filled
    ("layernorm", 6272, 1, False),  # with more idle
]


@pytest.mark.parametrize(("norm", "columns", "counters", "keeps"), LONG)
def test_walkers_of_a_long_backward_call_keep_pace(
    device: FakeDevice, norm: str, columns: int, counters: int, keeps: bool
) -> None:
    """Where the kernels were compiled to. Where blocks do not meet they count, too, in memory of their own."""
    meeting = 42_000_000 // (6 * columns)
    for rows, sums, paced in ((meeting, True, False), (120_000, True, keeps), (120_000, False, True)):
        x, dy = (device.array((rows, columns), "float16") for _ in range(2))
        statistics = [device.array((rows,))] * (2 if norm == "layernorm" else 1)
        mask = (True, sums) if norm == "rmsnorm" else (True, sums, sums)
        getattr(cupynorm, f"{norm}_backward")(x, device.array((columns,)), dy, *statistics, output_mask=mask)
        arguments = device.launched[-1].named()
        assert (arguments.lead > 0) == paced
        assert arguments.step_counters == counters
        assert bool(arguments.meeting) == (paced or (sums and not arguments.column_blocks))
        assert not (arguments.dw_partials or arguments.db_partials) or sums


@pytest.mark.parametrize("sums", [True, False])
def test_a_single_walker_meets_nobody(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, sums: bool) -> None:
    """A gang that takes all multiprocessors: its sums are dw. Where memory is slow it counts its steps, but only if dx
    alone is wanted: counters lie in a meeting's memory, and with sums who has that meets."""
    for attribute, value in ((36, 2619000), (37, 5120)):  # an H100's
        monkeypatch.setitem(ATTRIBUTES, attribute, value)
    monkeypatch.setattr(device.cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 1)
    x, dy = (device.array((20, 524288)) for _ in range(2))
    cupynorm.rmsnorm_backward(x, device.array((524288,)), dy, device.array((20,)), output_mask=(True, sums))
    (launch,) = device.launched
    arguments = launch.named()
    assert arguments.partial_rows == 1
    assert "GANG=1" in launch.definitions
    assert (arguments.lead > 0, bool(arguments.meeting)) == (not sums, not sums)
    assert bool(arguments.dw) == sums
    assert not arguments.dw_partials


def test_no_rows_launch_nothing(device: FakeDevice) -> None:
    dx, dw, db = backward("layernorm", call_of(device, "layernorm", rows=0))
    assert not device.launched
    assert device.zeroed == [(dw.data.ptr, dw.nbytes), (db.data.ptr, db.nbytes)]
    assert dx.shape == (0, COLUMNS)
    y, mean, rstd = cupynorm.layernorm_forward(device.array((0, COLUMNS)))
    assert not device.launched
    assert (y.shape, mean.shape, rstd.shape) == ((0, COLUMNS), (0,), (0,))


def test_threads_use_one_plan_at_once(device: FakeDevice) -> None:
    """Each launch has the addresses of one call, whatever other threads do."""
    calls = [call_of(device, "rmsnorm", out=results_of(device)) for _ in range(8)]
    backward("rmsnorm", calls[0])
    device.launched.clear()

    def work(call: Call) -> None:
        for _ in range(50):
            backward("rmsnorm", call)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, calls))
    own = {(call["x"].data.ptr, call["dy"].data.ptr, call["out"][0].data.ptr) for call in calls}
    seen = [launch.fields() for launch in device.launched if launch.kernel.startswith("backward")]
    assert len(seen) == 400
    assert {(fields[0], fields[1], fields[5]) for fields in seen} == own
    assert plans() == 1


def test_an_error_of_the_driver_comes_up(device: FakeDevice) -> None:
    call = call_of(device, "rmsnorm")
    backward("rmsnorm", call)
    device.error = RuntimeError("launch failed")
    with pytest.raises(RuntimeError, match="launch failed"):
        backward("rmsnorm", call)
    device.error = None
    backward("rmsnorm", call)
    device.status = 700
    with pytest.raises(RuntimeError, match="CUDA driver error 700: made up"):
        cupynorm.rmsnorm_forward(device.array((4, 65536)))


def test_plans_keep_no_array(device: FakeDevice) -> None:
    released = []
    for out in (None, results_of(device)):
        call = call_of(device, "layernorm", out=out)
        results = backward("layernorm", call)
        released += [weakref.ref(array) for array in (*call.values(), *results) if hasattr(array, "data")]
    assert plans() == 2
    del call, out, results
    gc.collect()
    assert [reference() for reference in released] == [None] * len(released)


def test_there_is_a_bound_to_the_plans() -> None:
    bound = dispatch.plan_of.cache_info().maxsize
    assert bound is not None
    layouts = {
        "x": ((1, 8), (32, 4), np.dtype(np.float32), None, 0, False),
        "w": None,
        "b": None,
        "residual": None,
    }
    operation = dispatch.forward_of("rmsnorm")
    for number in range(bound + 100):
        dispatch.plan_of(operation, tuple(layouts.values()), 1.0 + number, 0.0)
    assert dispatch.plan_of.cache_info().currsize == bound
    dispatch.plan_of.cache_clear()


def test_a_refused_call_leaves_no_plan(device: FakeDevice) -> None:
    call = call_of(device, "rmsnorm")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^rstd: "):
            backward("rmsnorm", call | {"rstd": call["w"]})
    assert plans() == 0


@pytest.mark.parametrize("seed", range(20))
def test_overlaps_agree_with_the_memory(seed: int) -> None:
    """The quick look at pairs and the exact answer together say what NumPy says of real memory."""
    random = np.random.default_rng(seed)
    buffer = np.zeros(400, np.float32)
    for _ in range(50):
        arrays = []
        for _ in range(2):
            start, rows, columns = (int(random.integers(low, high)) for low, high in ((0, 120), (1, 5), (1, 6)))
            strides = int(random.integers(-12, 13)), int(random.choice([-2, -1, 1, 2]))
            first = start + 140
            assert 0 <= first + 4 * min(strides[0], 0) + 5 * min(strides[1], 0)
            arrays.append(
                np.lib.stride_tricks.as_strided(buffer[first:], (rows, columns), tuple(4 * s for s in strides))
            )
        specs = [problem.ArraySpec(array.shape, array.strides, array.dtype) for array in arrays]
        addresses = [array.ctypes.data for array in arrays]
        ((output, other, least, most),) = problem.possible_overlaps(specs, 1)
        assert (output, other) == (1, 0)
        may = least < addresses[output] - addresses[other] < most
        assert may == np.may_share_memory(*arrays)
        exact = may and problem.overlap(specs[1], addresses[1], specs[0], addresses[0])
        assert exact == np.shares_memory(*arrays)


def test_out_of_the_wrong_length_is_refused_after_one_of_the_right_length(device: FakeDevice) -> None:
    call = call_of(device, "rmsnorm", out=results_of(device))
    backward("rmsnorm", call)
    for out, has in (((), "0 entries"), ((None,), "1 entry"), (call["out"][:2], "2 entries")):
        with pytest.raises(ValueError, match=rf"^out: has {has}; a tuple of 3"):
            backward("rmsnorm", call | {"out": out})
    with pytest.raises(ValueError, match=r"^out: has 4 entries; a tuple of 3"):
        backward("rmsnorm", call | {"out": (*call["out"], None)})
    with pytest.raises(ValueError, match=r"^out: has 3 entries; a tuple of 2"):
        backward("rmsnorm", call | {"has_bias": False})
    del call["has_bias"]
    assert len(backward("rmsnorm", call | {"out": list(call["out"][:2])})) == 2


def test_contiguous_arrays_are_known_without_their_strides(device: FakeDevice) -> None:
    """What CuPy knows already is not made anew; axes of one element may have any stride, and are contiguous, too."""
    one_row = device.cupy.ndarray((1, COLUMNS), np.float32, device.array((3, COLUMNS)).data, strides=(9999, 4))
    every_second = device.array((6, COLUMNS))[::2]
    cases = device.array((3, COLUMNS)), one_row, device.array((0, COLUMNS)), every_second
    layouts, *_ = arrays.device_home().look(cases, ("x",) * 4, 4)
    assert [layout and layout[1] for layout in layouts] == [None, None, None, (8 * COLUMNS, 4)]
    specs = [dispatch._spec_of(*layout) for layout in layouts if layout]
    assert [spec.strides for spec in specs] == [(4 * COLUMNS, 4), (4 * COLUMNS, 4), (4 * COLUMNS, 4), (8 * COLUMNS, 4)]
    assert specs[0] == (cases[0].shape, cases[0].strides, cases[0].dtype, 0, 0, False)


class TorchOnDevice:
    """Torch whose host tensors say that they lie on the device, and which makes others there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
        self.torch = pytest.importorskip("torch")
        self.device, self.stream = 0, 0  # of all tensors; the current one
        self.asked: list[Any] = []  # the devices on which tensors were made
        empty, torch = self.torch.empty, self.torch

        def on_host(shape: Any, *, dtype: Any, device: Any, **others: Any) -> Any:
            if device.type != "cuda":
                return empty(shape, dtype=dtype, device=device, **others)
            self.asked.append(device)
            return empty(shape, dtype=dtype)

        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == "cpu"))
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: self.device)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", self.stream_of, raising=False)
        monkeypatch.setattr(torch, "empty", on_host)
        monkeypatch.setattr(torch.cuda, "device", device._device)
        monkeypatch.setattr(device.cupy.cuda, "Device", lambda *_: pytest.fail("CuPy's makes a context where none is"))
        of_cupy = device.cupy.cuda.Stream
        monkeypatch.setattr(of_cupy, "null", FakeStream())
        monkeypatch.setattr(
            device.cupy.cuda, "Stream", SimpleNamespace(null=of_cupy.null, from_external=self.stream_like)
        )

    def stream_like(self, other: Any) -> FakeStream:
        version, pointer = other.__cuda_stream__()
        assert version == 0
        stream = FakeStream(pointer)
        stream._foreign_stream_ref = other  # type: ignore[attr-defined]
        return stream

    def stream_of(self, device: int) -> int:
        assert device == self.device
        return self.stream


@pytest.fixture
def on_device(monkeypatch: Any, device: FakeDevice) -> Iterator[TorchOnDevice]:
    arrays.way_in.cache_clear()
    yield TorchOnDevice(monkeypatch, device)
    arrays.way_in.cache_clear()


@pytest.fixture
def torch(on_device: TorchOnDevice) -> Any:
    return on_device.torch


def torch_call(torch: Any) -> Call:
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    return {"x": x, "w": torch.ones(COLUMNS), "dy": x.clone(), "rstd": torch.ones(ROWS)}


def test_tensors_on_the_same_stream_wait_for_nothing(
    monkeypatch: Any, device: FakeDevice, on_device: TorchOnDevice
) -> None:
    """Results are PyTorch's own from the start: nothing is taken of CuPy's pool for them."""
    monkeypatch.setattr(dlpack, "import_from", lambda *_: pytest.fail("a capsule was made"))
    torch, call = on_device.torch, torch_call(on_device.torch)
    dx, dw = backward("rmsnorm", call)
    assert type(dx) is type(dw) is torch.Tensor
    assert (dx.shape, dx.dtype, dw.shape, dw.dtype) == (call["x"].shape, torch.bfloat16, call["w"].shape, torch.float32)
    assert not dx.requires_grad
    (launch,) = device.launched
    addresses = [call[name].data_ptr() for name in ("x", "dy", "w")]
    assert list(launch.fields()[:7]) == [*addresses, 0, call["rstd"].data_ptr(), dx.data_ptr(), dw.data_ptr()]
    assert not [size for allocator, size in device.allocated if allocator == "result"]
    assert on_device.asked == [torch.device("cuda", 0)] * 2
    assert launch.stream == 0


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_the_work_is_on_the_stream_of_torch(device: FakeDevice, on_device: TorchOnDevice, fails: bool) -> None:
    """On the tensors' device, whichever is the current one, also to PyTorch; CuPy's is afterwards what it was."""
    torch, before = on_device.torch, FakeStream(6)
    on_device.device, on_device.stream, device.stream = 1, 5, before
    for _ in range(2):
        backward("rmsnorm", torch_call(torch))
    if fails:
        device.error = RuntimeError("no launch")
        with pytest.raises(RuntimeError, match="no launch"):
            backward("rmsnorm", torch_call(torch))
    device.error = None
    assert (device.stream, device.current) == (before, 0)
    assert {launch.stream for launch in device.launched} == {5}
    assert set(on_device.asked) == {torch.device("cuda", 1)}
    same = FakeStream(5)
    device.streams = {1: same}  # of that device CuPy's is the same one, and stays it
    backward("rmsnorm", torch_call(torch))
    assert device.launched[-1].stream == 5
    assert device.streams == {1: same}
    device.streams, on_device.stream = {}, 0
    backward("rmsnorm", torch_call(torch))
    assert device.launched[-1].stream == 0
    assert device.stream is before


@pytest.mark.parametrize("pointer", [0, 1])
def test_the_default_stream_has_one_object(device: FakeDevice, on_device: TorchOnDevice, pointer: int) -> None:
    assert arrays.device_home().stream_at(pointer) is device.cupy.cuda.Stream.null
    assert arrays.device_home().stream_at(7).ptr == 7


def test_where_something_intercepts_every_function_of_torch(device: FakeDevice, torch: Any) -> None:
    """As torch.set_default_device does, and so each attribute of a tensor; not the look's."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **kwargs or {})

    call, seen = torch_call(torch), []
    with Mode():
        arrived = arrays.way_in(torch.Tensor)([call["x"], call["w"]], ("x", "w"), 2)
        assert not seen
        assert isinstance(arrived[-1], arrays.MadeByTorch)
        results = backward("rmsnorm", call)
    assert seen, "the mode is on again"
    assert device.launched[-1].fields()[5:7] == tuple(result.data_ptr() for result in results)


@pytest.mark.parametrize("layout", ["every second column", "transposed"])
def test_out_tensors_whose_rows_lie_at_no_one_stride_are_written(
    monkeypatch: Any, device: FakeDevice, torch: Any, layout: str
) -> None:
    """By a copy of what the kernels wrote elsewhere."""
    copied = []

    class Target:
        def __init__(self, view: Any) -> None:
            self.view, self.shape = view, view.shape

        def __setitem__(self, key: Any, value: Any) -> None:
            copied.append((self.view.pointer, self.view.strides, value.data.ptr))

    monkeypatch.setattr(arrays.device_home(), "array", lambda view, device: Target(view))
    call = torch_call(torch) | {"x": torch.zeros(ROWS, COLUMNS), "dy": torch.zeros(ROWS, COLUMNS)}
    dx = torch.zeros(ROWS, 2 * COLUMNS)[:, ::2] if layout == "every second column" else torch.zeros(COLUMNS, ROWS).T
    assert backward("rmsnorm", call | {"out": (dx, None)})[0] is dx
    ((pointer, strides, stand_in),) = copied
    assert (pointer, strides) == (dx.data_ptr(), tuple(4 * step for step in dx.stride()))
    assert device.launched[-1].fields()[5] == stand_in != pointer


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
@pytest.mark.parametrize(("framework", "given"), [("other", False), ("other", True), ("jax", False)])
def test_arrays_of_other_frameworks_on_a_device(
    monkeypatch: Any, device: FakeDevice, framework: str, given: bool, fails: bool
) -> None:
    """CuPy's current stream waits for each array; the launch; then all are held, and results are handed over, or what
    was written into is: for that the framework's stream waits."""
    happened: list[Any] = []

    class OnCuda(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 1)

        def __dlpack__(self, *, max_version: Any, stream: int) -> Any:
            happened.append(("waits", stream))
            return self.array.__dlpack__(max_version=max_version)

        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=lambda array: happened.append(("given", array.data.ptr)) or array)

    def launch(*arguments: Any) -> None:
        happened.append("launched")
        device._launch(*arguments)

    def hold(things: Any) -> None:
        happened.append(("held", device.current, things))

    monkeypatch.setattr(device.cupy.cuda.driver, "launchKernel", launch)
    monkeypatch.setattr(arrays.device_home(), "hold", hold)
    monkeypatch.setattr(OnCuda, "__module__", framework)
    device.stream = FakeStream(6)
    x, w, dy, rstd, *out = (OnCuda(np.ones(shape, np.float32)) for shape in ((9, 8), 8, (9, 8), 9, (9, 8), 8))
    call = {"x": x, "w": w, "dy": dy, "rstd": rstd} | ({"out": tuple(out)} if given else {})
    number = 6 if given else 4
    if fails:
        device.error = RuntimeError("no launch")
        with pytest.raises(RuntimeError, match="no launch"):
            backward("rmsnorm", call)
    else:
        results = backward("rmsnorm", call)
    assert happened[: number + 1] == [("waits", 6)] * number + ["launched"]
    kind, current, things = happened[number + 1]
    assert (kind, current) == ("held", 1)
    held, views = (things, [None]) if framework == "jax" else things  # whose arrays' capsules keep from being donated
    assert all(any(array is thing for thing in held) for array in (x, w, dy, rstd, *(out if given else ())))
    capsules = [type(view.owner).__name__ for view in views if view is not None]
    assert capsules == ["PyCapsule"] * (0 if framework == "jax" else number), "memory may be theirs"
    if fails:
        assert len(happened) == number + 2
    else:
        addresses = [array.array.ctypes.data for array in out] if given else [array.data.ptr for array in results]
        assert happened[number + 2 :] == [("given", address) for address in addresses]


def test_tensors_whose_rows_lie_at_no_one_stride(device: FakeDevice, torch: Any) -> None:
    """The few calls that need arrays of CuPy's get them over the tensors' memory, without asking PyTorch."""
    tensors = torch.zeros(2, 6, COLUMNS, dtype=torch.float32)[:, ::2], torch.zeros(COLUMNS), None
    layouts, addresses, views, _ = arrays.way_in(torch.Tensor)(tensors, ("x", "w", "b"), 3)
    for position in (0, 1):
        array = arrays.device_home().array(views[position], 0)
        assert array.data.ptr == addresses[position] == tensors[position].data_ptr()
        assert (array.shape, array.dtype) == (tuple(tensors[position].shape), np.float32)
        assert array.strides == tuple(4 * step for step in tensors[position].stride())
    assert layouts[2] is None


def test_tensors_given_as_out_are_written_in_place(monkeypatch: Any, device: FakeDevice, torch: Any) -> None:
    """On the same stream, too, without a capsule; an entry that is missing is made."""
    monkeypatch.setattr(dlpack, "import_from", lambda *_: pytest.fail("a capsule was made"))
    call = torch_call(torch)
    dx, dw = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), torch.zeros(COLUMNS)
    assert backward("rmsnorm", call | {"out": (dx, dw)}) == (dx, dw)
    results = backward("rmsnorm", call | {"out": (None, dw)})
    assert results[1] is dw
    both, one = device.launched
    assert both.fields()[5:7] == (dx.data_ptr(), dw.data_ptr())
    assert one.fields()[5:7] == (results[0].data_ptr(), dw.data_ptr())
    with pytest.raises(ValueError, match=r"^out\[0\] \(dx\): overlaps x in memory"):
        backward("rmsnorm", call | {"out": (call["x"], None)})
    with pytest.raises(ValueError, match=r"^out\[1\] \(dw\): has shape"):
        backward("rmsnorm", call | {"out": (dx, dx)})
    assert len(device.launched) == 2


def test_what_only_the_longer_way_can_refuse_is_left_to_it(
    monkeypatch: Any, device: FakeDevice, on_device: TorchOnDevice
) -> None:
    """Tensors of a derived class, of types that are not taken, with signs that are not memory's, without memory, not on
    CUDA; other frameworks. Those of another CUDA device are refused like CuPy's."""
    torch, call = on_device.torch, torch_call(on_device.torch)
    look = arrays.way_in(torch.Tensor).__self__._look_directly  # type: ignore[attr-defined]
    parameter = torch.nn.Parameter(call["w"], requires_grad=False)
    assert look([call["x"], call["w"], None, call["x"][:0], call["x"][:, ::2], parameter]) is not None

    class Derived(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    others = {
        "derived": call["w"].as_subclass(Derived),
        "negated": torch.complex(call["w"], call["w"]).conj().imag,
        "NumPy's": np.ones(3, np.float32),
        "under differentiation": torch.ones(3, requires_grad=True),
        "of booleans": torch.ones(3, dtype=torch.bool),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
        "zeros that were not made": torch._efficientzerotensor((3,)),
    }
    for name, other in others.items():
        assert look([call["x"], other]) is None, name
        assert look([other, call["x"]]) is None, name
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: int(self is call["w"]))
    with pytest.raises(TypeError, match=r"^w: is on cuda:1, but x is on cuda:0"):
        backward("rmsnorm", call)
    assert not device.launched


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_where_something_stands_between_torch_and_memory(device: FakeDevice, torch: Any) -> None:
    """A mode, a transform, a tracer: PyTorch would give results without memory, or note how they were made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **kwargs or {})

    call = torch_call(torch)
    look = arrays.way_in(torch.Tensor).__self__._look_directly  # type: ignore[attr-defined]
    seen = []

    def notes(x: Any) -> Any:
        seen.append(look([call["x"]]))
        return x.sum()

    with Mode():
        notes(call["w"])
    torch.func.functionalize(notes)(call["w"])
    torch.func.grad(notes)(call["w"])
    torch.vmap(notes)(call["x"])
    torch.jit.trace(notes, call["w"], check_trace=False)
    assert seen == [None] * 5
    assert look([call["x"]]) is not None


def test_tensors_and_arrays_of_one_layout_share_a_plan(device: FakeDevice, torch: Any) -> None:
    """What a look says of PyTorch's tensors is what it says of CuPy's arrays."""
    for shape in ((ROWS, COLUMNS), (1, COLUMNS), (0, 5), (2, 3, 4), ()):
        for dtype in DTYPES:
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            (of_torch,), *_ = arrays.way_in(torch.Tensor)([tensor], ("x",), 1)
            (of_cupy,), *_ = arrays.device_home().look([device.array(shape, DTYPES[dtype])], ("x",), 1)
            assert of_torch[:4] == of_cupy[:4]
    every_second = torch.zeros(6, COLUMNS, dtype=torch.float32)[::2]
    ((*_, strides, dtype, _, _),), *_ = arrays.way_in(torch.Tensor)([every_second], ("x",), 1)
    assert (strides, dtype) == ((8 * COLUMNS, 4), np.float32)
    with pytest.raises(ValueError, match=r"^rstd: has shape \(7,\)"):
        backward("rmsnorm", torch_call(torch) | {"rstd": torch.ones(7)})


def test_tensors_under_differentiation_are_refused_in_the_words_of_torch(device: FakeDevice, torch: Any) -> None:
    with pytest.raises(TypeError, match=r"^w: .*grad"):
        backward("rmsnorm", torch_call(torch) | {"w": torch.ones(COLUMNS, requires_grad=True)})
    with pytest.raises(TypeError, match=r"^out\[0\] \(dx\): .*grad"):
        backward("rmsnorm", torch_call(torch) | {"out": (torch.zeros(ROWS, COLUMNS, requires_grad=True), None)})
    assert not device.launched


class Work:
    """Of a stream: an event that is over when the test says so."""

    over = threading.Event()
    fails = False

    def __init__(self, block: bool, disable_timing: bool) -> None:
        assert block
        assert disable_timing

    def record(self, stream: Any) -> None:
        self.recorded = stream.ptr

    def synchronize(self) -> None:
        assert self.recorded == 6
        assert self.over.wait(60)
        if self.fails:
            raise RuntimeError("the device fails")


class Thing:
    pass


def wait_until(condition: Any) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_what_is_held_until_the_work_is_done(monkeypatch: Any, device: FakeDevice, fails: bool) -> None:
    """For frameworks that know nothing of CuPy's streams; nobody waits meanwhile. What fails there ends nothing."""
    monkeypatch.setattr(device.cupy.cuda, "Event", Work)
    monkeypatch.setattr(Work, "over", threading.Event())
    monkeypatch.setattr(Work, "fails", fails)
    arrays._held.cache_clear()
    device.stream, home = FakeStream(6), arrays.device_home()
    for _ in range(2):
        Work.over.clear()
        one, two = Thing(), Thing()
        kept = weakref.ref(one), weakref.ref(two)
        home.hold((one, None))
        home.hold([two])
        del one, two
        gc.collect()
        assert all(thing() is not None for thing in kept)
        Work.over.set()
        wait_until(lambda kept=kept: all(thing() is None for thing in kept))
    assert device.capture_mode == 2, "the thread's waiting would end other threads' captures"
    device.stream.capturing = True  # whoever launches the graph keeps its inputs
    one = Thing()
    kept = (weakref.ref(one),)
    home.hold(one)
    del one
    assert kept[0]() is None


def test_where_no_thread_can_be_started_the_host_waits(monkeypatch: Any, device: FakeDevice) -> None:
    monkeypatch.setattr(device.cupy.cuda, "Event", Work)
    monkeypatch.setattr(Work, "over", threading.Event())
    device.stream = FakeStream(6)

    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    arrays._held.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", start)
    waited = []
    monkeypatch.setattr(Work, "synchronize", lambda self: waited.append(self))
    arrays.device_home().hold(Thing())
    assert len(waited) == 1


# --- kernels and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "mask", "alone", "paced"),
    [
        (9000, (True, True), False, True),  # column blocks do not pay
        (300, (True, True), True, False),
        (300, (False, True), True, False),
        (9000, (True, False), True, True),
        (2000, (True, False), True, False),
        (9000, (False, True), False, True),
        (1, (False, True), True, False),
    ],
)
def test_which_kernel_of_three(
    device: FakeDevice, rows: int, mask: tuple[bool, bool], alone: bool, paced: bool
) -> None:
    """Walkers that sum columns have one, those that write dx alone, and column blocks, another. Where dx alone is
    wanted and walkers keep pace, they have one that can."""
    arrays = {name: device.array((rows, 4096)) for name in ("x", "dy")}
    arrays |= {"w": device.array((4096,)), "rstd": device.array((rows,))}
    cupynorm.rmsnorm_backward(**arrays, output_mask=mask)
    launch = device.launched[-1]
    assert ("DX_ALONE=1" in launch.definitions) == alone
    assert ("PACED=1" in launch.definitions) == paced
    assert (launch.named().lead > 0) == paced
    assert bool(launch.named().meeting) == paced
    assert bool(launch.named().dw_partials) == (not alone)


@pytest.mark.parametrize("answer", [0, 912])
@pytest.mark.parametrize(
    ("columns", "x", "dy", "most", "kernel", "blocks"),
    [
        (65536, "float16", "float16", 4, "backward_staged", "GANG=1"),
        (147456, "float16", "float16", 8, "backward_staged", "GANG=1"),
        (147456, "float16", "float16", 16, "backward_staged", "CLUSTER=16"),
        (131072, "float16", "float16", 8, "backward_wide", "ROW_WARPS=4"),
        (32768, "float16", "float16", 2, "backward_staged", "GANG=1"),
        (65536, "float16", "float32", 4, "backward_split_apply", "COLUMNS_PER_THREAD=16"),
    ],
)
def test_a_device_that_holds_no_cluster_so_large(
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    x: str,
    dy: str,
    most: int,
    kernel: str,
    blocks: str,
    answer: int,
) -> None:
    limit_clusters(device, monkeypatch, most, answer)
    arrays = {"x": device.array((40, columns), x), "dy": device.array((40, columns), dy)}
    cupynorm.rmsnorm_backward(**arrays, w=device.array((columns,)), rstd=device.array((40,)))
    assert device.launched[-1].kernel == kernel
    assert blocks in device.launched[-1].definitions


@pytest.mark.usefixtures("without_wide_rows")
@pytest.mark.parametrize(
    ("most", "kernel"), [(16, "forward_staged"), (8, "forward_split_apply"), (1, "forward_split_apply")]
)
def test_a_device_that_holds_no_cluster_so_large_forward(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, most: int, kernel: str
) -> None:
    limit_clusters(device, monkeypatch, most, 0)
    cupynorm.rmsnorm_forward(device.array((40, 262144), "float16"), device.array((262144,)))
    assert device.launched[-1].kernel == kernel


def limit_clusters(device: FakeDevice, monkeypatch: pytest.MonkeyPatch, most: int, answer: int) -> None:
    """Of larger ones the driver says that there is none, or `answer`, an error."""

    def active_clusters(clusters: Any, function: Any, config: Any) -> int:
        fits = config._obj.grid[0] <= most
        clusters._obj.value = 7 if fits else 0
        return 0 if fits else answer

    monkeypatch.setattr(device, "cuOccupancyMaxActiveClusters", active_clusters, raising=False)


def test_nvrtc_is_ready_before_two_threads_need_it(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a device, by compiling an empty program with the options of all others."""
    from cupynorm.cuda import launch, module

    asked: list[Any] = []
    monkeypatch.setattr(launch, "prepare", lambda device_id: asked.append(("prepare", device_id)))
    monkeypatch.setattr(launch, "load_together", lambda *_: asked.append("load"))
    launch._load(0, ("backward_staged", ("A=1",)), ("backward_few_rows", ("B=1",)))
    assert asked == [("prepare", 0), "load"]
    made: list[Any] = []
    program = SimpleNamespace(compile=lambda: made.append("compiled"))
    monkeypatch.setattr(device.cupy, "RawModule", lambda **given: made.append(given) or program)
    module.prepare.cache_clear()
    for _ in range(2):
        module.prepare(7)
    assert made == [{"code": "", "options": module.compile_options()}, "compiled"]
    module.prepare.cache_clear()


@pytest.mark.parametrize(("direction", "kernels"), [("forward", 2), ("backward", 3), ("dx alone", 3)])
@pytest.mark.parametrize("rows", [(3, 6000, 100_000), (100_000, 6000, 3)])
def test_another_number_of_rows_needs_no_other_kernel(
    device: FakeDevice, direction: str, kernels: int, rows: tuple[int, ...]
) -> None:
    asked = []
    for m in rows:
        x, w, statistic = device.array((m, 1024)), device.array((1024,)), device.array((m,))
        if direction == "forward":
            cupynorm.layernorm_forward(x, w, w)
        else:
            mask = (True, False, False) if direction == "dx alone" else None
            cupynorm.layernorm_backward(x, w, x, statistic, statistic, output_mask=mask)
        asked.append(set(device._kernels))
    assert asked == [asked[0]] * len(rows)
    assert len(asked[0]) == kernels
    name = "forward" if direction == "forward" else "backward"
    assert {launch.kernel for launch in device.launched} == {f"{name}_few_rows", f"{name}_staged"}


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_kernels_are_made_at_the_same_time(device: FakeDevice, names: str) -> None:
    from cupynorm.cuda import driver

    all_of_them, made = threading.Barrier(len(names), timeout=20), []

    def make(name: str) -> Any:
        all_of_them.wait()
        made.append(name)
        return SimpleNamespace(kernel=None)

    driver.load_together(*(functools.partial(make, name) for name in names))
    assert sorted(made) == list(names)


def test_what_goes_wrong_with_one_of_several_kernels(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread, it shows when the kernel is asked for; where no thread starts, kernels are made all the same."""
    from cupynorm.cuda import driver

    made = []

    def make(name: str) -> Any:
        made.append(name)
        if name == "wrong":
            raise ValueError(name)
        return SimpleNamespace(kernel=None)

    driver.load_together(lambda: make("wrong"), lambda: make("wrong"), lambda: make("right"))
    with pytest.raises(ValueError, match="wrong"):
        driver.load_together(lambda: make("right"), lambda: make("wrong"))

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    driver.load_together(lambda: make("right"), lambda: make("other"))
    assert made == ["wrong", "wrong", "right", "right", "wrong", "right", "other"]
