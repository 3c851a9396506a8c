"""asv_bench/stream.py, as far as it goes without a GPU: its kernels compile, fit and are given whole steps; its table
and errors, on NumPy arrays."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import roofline
import stream
from helpers import assert_one_line_of_error, exit_status

from cupynorm import bench, cli

every_way = pytest.mark.parametrize(
    "way",
    [*stream.WAYS, *stream.FORWARD_WAYS],
    ids=lambda way: "-".join([*way.cells, "xy" if way.arrays == 2 else "x"]),
)


@every_way
def test_every_way_compiles_without_spills(way: stream.Way) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    from compiling import compile_variant

    from cupynorm.cuda.config.variants import Variant

    spills, wrong = compile_variant((9, 0), Variant(stream.SOURCE, ("stream",), way.definitions))
    assert not wrong, "\n".join(wrong)
    assert not spills


def test_the_ways_differ_and_their_blocks_fit() -> None:
    for ways, count in ((stream.WAYS, 12), (stream.FORWARD_WAYS, 10)):
        assert len({way.definitions for way in ways}) == len({tuple(way.cells) for way in ways}) == count
    assert stream.Way("drawn", "bulk", 4096, 4, 2).definitions == (
        "ARRAYS=2",
        "DRAWN=1",
        "PACED=0",
        "BULK=1",
        "STEP_BYTES=4096",
        "STAGES=4",
        "BLOCKS=2",
    )
    for way in (*stream.WAYS, *stream.FORWARD_WAYS):
        # of 9.0: 227 KB of shared memory for a block, 228 KB and 2048 threads on a multiprocessor; a block's barriers
        # and what is kept back for the system take less than 2 KB
        assert way.ring_bytes <= 226 << 10
        assert way.blocks * (way.ring_bytes + 2048) <= 228 << 10
        assert way.blocks * stream.THREADS <= 2048
        assert stream.STEP_BYTES % way.step_bytes == 0


@pytest.mark.parametrize(
    ("megabytes", "steps"),
    [(0.049151, 0), (0.049152, 1), (0.098303, 1), (25.0, 508), (100.0, 2034), (1000.0, 20345)],
)
def test_sizes_are_rounded_down_to_whole_steps(megabytes: float, steps: int) -> None:
    assert stream.tensor_bytes(megabytes) == 16384 * steps


@pytest.mark.parametrize("arrays", [1, 2])
def test_no_two_words_are_alike(arrays: int) -> None:
    x, dy, z = stream.tensors(np, 1.0, arrays)
    assert (x is dy) == (arrays == 1)
    assert x.nbytes == dy.nbytes == z.nbytes == stream.tensor_bytes(1.0)
    assert x.dtype == dy.dtype == z.dtype == np.uint32
    for words in (x, dy, x + dy):
        assert np.unique(words).size == words.size


@pytest.mark.parametrize("given_out", ["static", "paced", "drawn"])
def test_what_is_launched(given_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynorm.cuda import module

    way = stream.Way(given_out, step_bytes=4096, stages=4, blocks=2)
    seen: list[Any] = []

    class Kernel:
        max_dynamic_shared_size_bytes = 0

        def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
            assert shared_mem == self.max_dynamic_shared_size_bytes == 4 * 2 * 4096
            seen.append((grid, block, *arguments))

    def compiled(*given: Any) -> Any:
        assert given == (stream.SOURCE, "stream", way.definitions)
        return Kernel()

    counter = SimpleNamespace(nbytes=4, data=SimpleNamespace(memset_async=lambda *what: seen.append(what)))
    device = SimpleNamespace(attributes={"MultiProcessorCount": 132})
    cuda = SimpleNamespace(Device=lambda: device)
    monkeypatch.setattr(module, "kernel", compiled)
    cupy = SimpleNamespace(zeros=lambda *_: counter, cuda=cuda)
    x, dy, z = (np.zeros(6 * 1024, np.uint32) for _ in range(3))
    call = stream.call_of(cupy, way, x, dy, z)
    assert seen == []
    call()
    assert seen[:-1] == ([(0, 4)] if given_out != "static" else [])
    grid, block, *arguments = seen[-1]
    assert (grid, block) == ((264,), (288,))
    steps = arguments.pop(3)
    assert (steps, steps.dtype) == (6, np.int32)
    assert all(one is other for one, other in zip(arguments, (x, dy, z, counter), strict=True))


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """NumPy behind a stand-in for CuPy. A call reads 10 us, the triad 9 and nothing 2; nothing is really timed."""
    device = SimpleNamespace(compute_capability="90")
    cupy = SimpleNamespace(arange=np.arange, cuda=SimpleNamespace(Device=lambda: device))

    def add(cupy: Any, way: stream.Way, x: Any, dy: Any, z: Any) -> Callable[[], Any]:
        return lambda: np.add(x, dy, out=z)

    def triad(elements: int, dtype: str, xp: Any) -> bench.Triad:
        assert elements * np.dtype(dtype).itemsize % stream.STEP_BYTES == 0
        return bench.Triad(9e-6, 3 * elements * np.dtype(dtype).itemsize)

    def seconds(function: Callable[[], Any], xp: Any) -> float:
        return 2e-6 if function() is None else 10e-6

    monkeypatch.setattr(cli, "usable_cupy", lambda: (cupy, ""))
    monkeypatch.setattr(bench, "device_name", lambda xp: "stand-in")
    monkeypatch.setattr(bench, "time_call", seconds)
    monkeypatch.setattr(bench, "measure_triad", triad)
    monkeypatch.setattr(stream, "call_of", add)
    monkeypatch.setattr(roofline, "copy_seconds_per_byte", lambda cupy, nbytes: 8e-6 / (2 * nbytes))
    return device


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize(
    ("option", "ways", "beside", "microseconds", "part"),
    [([], stream.WAYS, "triad", "9.0", "0.900"), (["--forward"], stream.FORWARD_WAYS, "copy", "8.0", "0.800")],
    ids=["backward", "forward"],
)
def test_table(
    option: list[str],
    ways: tuple[stream.Way, ...],
    beside: str,
    microseconds: str,
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "stream.csv"
    assert exit_status(stream.main, [*option, "--sizes", "0.1,0.5,0.1", "--csv", str(target)]) == 0
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [list(line.values()) for line in lines] == [[*way.cells, "10.0", part, "10.0", part] for way in ways]
    assert list(lines[0])[4:] == [
        "blocks",
        "0.1 MB: us",
        f"0.1 MB: of {beside}",
        "0.5 MB: us",
        f"0.5 MB: of {beside}",
    ]
    device, empty, _, _, *rows = capsys.readouterr().out.splitlines()
    others = f"the {beside} 0.1 MB {microseconds} us, 0.5 MB {microseconds} us"
    assert device == f"stand-in; a call that does nothing reads 2.0 us, {others}"
    assert empty == ""
    assert [row.split()[:5] for row in rows] == [way.cells for way in ways]


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize("arrays", [1, 2])
def test_a_wrong_z_is_not_timed(arrays: int, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def call_of(cupy: Any, way: stream.Way, x: Any, dy: Any, z: Any) -> Callable[[], None]:
        def call() -> None:
            np.add(x, dy, out=z)
            z[wrong] += 1

        return call

    monkeypatch.setattr(stream, "call_of", call_of)
    monkeypatch.setattr(bench, "time_call", lambda *_: pytest.fail("timed"))
    with pytest.raises(RuntimeError, match="z is not x \\+ dy: static bulk 16 3 1"):
        stream.way_seconds(np, stream.Way(written_by="bulk", arrays=arrays), *stream.tensors(np, 0.1, arrays))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "25,x"], ["--sizes", "'x'"]),
        (["--sizes", "0"], ["--sizes", "'0'"]),
        (["--sizes", "nan"], ["--sizes", "nan"]),
        (["--sizes", "25,0.04"], ["--sizes", "'0.04'", "0.049152 MB"]),
        (["--sizes", ""], ["--sizes"]),
        (["--csv", "missing/stream.csv"], ["--csv", "missing"]),
        (["--csv", "."], ["--csv", "not a regular file"]),
        (["--frobnicate"], ["--frobnicate"]),
        ([], ["a CUDA device and CuPy are needed", "none here"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "usable_cupy", lambda: (None, "none here"))
    assert exit_status(stream.main, arguments) == 2
    assert_one_line_of_error(capsys, words)
    assert list(tmp_path.iterdir()) == []


def test_an_older_device_is_told_so(
    on_a_device: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_device.compute_capability = "89"
    assert exit_status(stream.main, ["--csv", str(tmp_path / "stream.csv")]) == 2
    assert capsys.readouterr() == ("", "stream.py: bulk copies need compute capability 9.0\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@every_way
def test_each_way_adds(way: stream.Way) -> None:
    """With fewer steps than blocks, too, and call after call."""
    import cupy

    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("bulk copies need compute capability 9.0")
    for megabytes in (0.1, 3.0, 40.0):
        x, dy, z = stream.tensors(cupy, megabytes, way.arrays)
        call = stream.call_of(cupy, way, x, dy, z)
        for _ in range(3):
            z.fill(0)
            call()
            assert bool((z == x + dy).all())
