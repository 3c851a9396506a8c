"""What the CUDA kernels compute, checked without a GPU: on_cpu.py says how, and what it cannot say."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import fake_device
import numpy as np
import pytest
from grid import Case, far, make_case
from helpers import DEFAULT_EPS, DTYPES, NORMS, Tensors, assert_same_bits, backward, forward, spoilt
from on_cpu import COMPILER, KernelsOnCpu, as_cpp, values
from test_numerics import check_backward, check_forward
from test_promises import some_rows

import cupynorm

config = pytest.importorskip("cupynorm.cuda.config")
module = pytest.importorskip("cupynorm.cuda.module")
pytest.importorskip("cupy", reason="launches are those of CuPy's arrays")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def monkeypatch_of_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@pytest.fixture(scope="module")
def shared_device(monkeypatch_of_module: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> KernelsOnCpu:
    return KernelsOnCpu(monkeypatch_of_module, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def device(shared_device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch) -> KernelsOnCpu:
    """Compiled kernels stay; the device is new, of compute capability 9.0, with 132 multiprocessors."""
    from cupynorm import dispatch
    from cupynorm.cuda import launch

    launch.device_of.cache_clear()
    dispatch.plan_of.cache_clear()
    return shared_device


def on_device(device: KernelsOnCpu, tensors: Tensors, gap: int = 0) -> Tensors:
    """The same numbers as CuPy's arrays, with so many elements between the rows of x and twice as many between those
    of dy, all bits set, which are no numbers."""

    def put(name: str, array: Any) -> Any:
        if array is None:
            return None
        if name in ("x", "dy") and gap:
            rows, columns = array.shape
            memory = device.array((rows, columns + (gap if name == "x" else 2 * gap)), array.dtype)
            values(memory).view(np.uint8)[...] = 0xFF
            placed = memory[:, :columns]
            device.ends_with(placed)  # behind the last row nothing may be read
        else:
            placed = device.array(array.shape, array.dtype)
        values(placed)[...] = array
        return placed

    return Tensors(**{name: put(name, array) for name, array in vars(tensors).items()})


def run(device: KernelsOnCpu, results: tuple[Any, ...], *kernels: str) -> tuple[Any, ...]:
    """The results, once the kernels that were launched have run, each of which must have one of these names."""
    ran = device.run()
    assert all(name.startswith((*kernels, "widen_w")) for name in ran), ran
    assert any(name.startswith(kernels) for name in ran)
    return tuple(None if array is None else values(array).copy() for array in results)


def case_of(norm: str, rows: int, columns: int, x: str = "bfloat16", dy: str = "", w: str | None = "float32") -> Case:
    return Case(norm, rows, columns, x, w, dy or x, has_bias=norm == "layernorm")


def check_both(device: KernelsOnCpu, case: Case, kernels: tuple[str, str], gap: int = 0) -> None:
    tensors = make_case(np, case)
    placed = on_device(device, tensors, gap)
    results = backward(case.norm, placed, has_bias=case.has_bias)
    check_backward(case, tensors, run(device, results, kernels[0]))
    if case.x == case.dy:
        check_forward(case, tensors, run(device, forward(case.norm, placed), kernels[1]))


STAGED = ("backward_staged", "forward_staged")
BACKWARD = ("backward_staged", "backward_few_rows")
FORWARD = ("forward_staged", "forward_few_rows")


def without_kernels_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on few rows take the kernels for many."""
    from cupynorm import dispatch

    for name in ("few_rows_blocks", "forward_few_rows"):
        monkeypatch.setattr(config, name, lambda *_: None)
    dispatch.plan_of.cache_clear()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "types", "gap"),
    [
        (300, 128, ("bfloat16", "", "float32"), 0),
        (3, 256, ("bfloat16", "", "float32"), 0),
        (70, 384, ("bfloat16", "", "bfloat16"), 0),
        (33, 768, ("bfloat16", "", None), 0),
        (40, 1024, ("bfloat16", "", "float32"), 8),
        (5, 4096, ("bfloat16", "", "float32"), 0),
        (7, 3072, ("bfloat16", "", None), 0),
        (4, 6144, ("bfloat16", "", "float32"), 0),
        (3, 5120, ("bfloat16", "", "float32"), 0),
        (3, 7168, ("bfloat16", "", "float32"), 0),
        (2, 8192, ("bfloat16", "", "bfloat16"), 0),
        (12, 1001, ("bfloat16", "", "float32"), 0),
        (200, 33, ("bfloat16", "", "float32"), 0),
        (60, 129, ("bfloat16", "", None), 0),
        (61, 147, ("bfloat16", "", "float32"), 0),
        (30, 300, ("bfloat16", "", "float32"), 0),
        (20, 350, ("bfloat16", "", "bfloat16"), 0),
        (20, 601, ("bfloat16", "", "float32"), 0),
        (20, 350, ("float32", "", "float32"), 0),
        (20, 512, ("float32", "", "float32"), 0),
        (9, 1280, ("float32", "bfloat16", "float32"), 0),
        (9, 1792, ("float32", "", "float32"), 0),
        (9, 1024, ("bfloat16", "", "float64"), 0),
        (9, 1001, ("float32", "", "bfloat16"), 0),
        (5, 256, ("float64", "", "bfloat16"), 0),
        (600, 8, ("float64", "bfloat16", "float32"), 0),
        (7, 640, ("float64", "", "float64"), 0),
        (70, 512, ("bfloat16", "", "float32"), 40),
        (90, 128, ("bfloat16", "", "bfloat16"), 8),
        (50, 384, ("bfloat16", "", None), 16),
        (60, 129, ("bfloat16", "", "float32"), 1),
        (40, 300, ("bfloat16", "", "float32"), 20),
        (80, 33, ("bfloat16", "", "float32"), 7),
        (30, 512, ("float32", "bfloat16", "float32"), 4),
        (30, 500, ("float32", "", "float32"), 1),
        (30, 640, ("bfloat16", "", "float32"), 1),
        (20, 1100, ("bfloat16", "", None), 21),
        (20, 700, ("float32", "", "float32"), 3),
        (20, 1040, ("float64", "", "float64"), 4),  # 96 threads
    ],
)
def test_few_rows(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    norm: str,
    rows: int,
    columns: int,
    types: tuple[str, str, str | None],
    gap: int,
) -> None:
    """One or two steps of each walker, dw and db by column blocks, as where they have no kernel of their own."""
    without_kernels_for_few_rows(monkeypatch)
    check_both(device, case_of(norm, rows, columns, *types), STAGED, gap)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "types", "gap"),
    [
        (300, 601, ("float32", "", "float32"), 7),
        (40, 1601, ("float32", "bfloat16", "float32"), 15),
        (300, 301, ("float64", "", "float32"), 3),
        (300, 1001, ("float32", "", "float32"), 0),
    ],
)
def test_rows_on_compute_capability_12(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    norm: str,
    rows: int,
    columns: int,
    types: tuple[str, str, str],
    gap: int,
) -> None:
    """Off 16 bytes a block has several rows there whose threads are no whole warps' kernels: gaps are asked for."""
    for attribute, value in ((75, 12), (76, 0), (97, 101376)):
        monkeypatch.setitem(fake_device.ATTRIBUTES, attribute, value)
    without_kernels_for_few_rows(monkeypatch)
    check_both(device, case_of(norm, rows, columns, *types), STAGED, gap)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "types", "gap", "blocks"),
    [
        (1, 8, ("bfloat16", "", "float32"), 0, 1),
        (5, 128, ("bfloat16", "", "bfloat16"), 0, 1),  # 32 rows to a block, five there
        (17, 384, ("bfloat16", "", None), 8, 3),
        (3, 1000, ("bfloat16", "", "float32"), 0, 3),  # idle lanes
        (2, 1536, ("bfloat16", "", "float64"), 16, 2),
        (1, 5000, ("bfloat16", "", "bfloat16"), 0, 1),
        (2, 12288, ("bfloat16", "", "float32"), 0, 2),
        (9, 512, ("float32", "", "float32"), 4, 3),
        (2, 4096, ("float32", "", "bfloat16"), 0, 2),
        (3, 640, ("float64", "", "float32"), 2, 3),
    ],
)
def test_few_rows_of_the_forward_pass(
    device: KernelsOnCpu,
    norm: str,
    rows: int,
    columns: int,
    types: tuple[str, str, str | None],
    gap: int,
    blocks: int,
) -> None:
    """By their own kernel."""
    case = case_of(norm, rows, columns, *types)
    tensors = make_case(np, case)
    results = forward(norm, on_device(device, tensors, gap))
    assert device.launched[-1].grid[0] == blocks
    check_forward(case, tensors, run(device, results, "forward_few_rows"))


def placed(device: KernelsOnCpu, array: Any, gap: int, start: int) -> Any:
    """The same rows with so many elements between them and before the first, all bits of which are set."""
    rows, columns = array.shape
    memory = device.array((rows * (columns + gap) + start,), array.dtype)
    values(memory).view(np.uint8)[...] = 0xFF
    view = memory[start:].reshape(rows, columns + gap)[:, :columns]
    values(view)[...] = array
    device.ends_with(view)
    return view


# Of x, dy and what is written: elements between rows, and before the first; and how they are read (ODD_ROWS).
STARTS = (
    *((((0, 0),) * 3, 1, 1), (((0, 1),) * 3, 1, 1), (((2, 1),) * 3, 1, 1)),
    *((((0, 1), (0, 1), (0, 0)), 2, 2), (((1, 0), (1, 0), (0, 0)), 2, 2)),
    *((((1, 0), (2, 0), (0, 0)), 3, 2), (((3, 0), (2, 1), (0, 1)), 3, 2)),
)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("rows", "columns"), [(150, 129), (40, 1001), (75, 2047), (75, 1301), (90, 4099), (90, 8191)])
def test_odd_rows_have_the_same_bits_wherever_they_start(
    small_device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, norm: str, rows: int, columns: int
) -> None:
    """Also alone, and far from others; nothing is read behind the last, or written beside them. With an odd number of
    multiprocessors each walker's rows start alike, too."""
    device = small_device
    monkeypatch.setitem(fake_device.ATTRIBUTES, 16, 3)
    case = case_of(norm, rows, columns)
    tensors = make_case(np, case)
    found = []
    far = 3 if columns <= 512 else 1
    for (of_x, of_dy, of_out), *ways in (*STARTS, (((9 * columns, 1),) * 3, far, far)):
        mine = replace(on_device(device, tensors), x=placed(device, tensors.x, *of_x))
        mine = replace(mine, dy=placed(device, tensors.dy, *of_dy))
        dx, y = (placed(device, np.full_like(tensors.x, np.nan), *of_out) for _ in range(2))
        outs = (dx, *[None] * (1 + case.has_bias)), (y, *[None] * (1 + (norm == "layernorm")))
        gradients = backward(norm, mine, has_bias=case.has_bias, out=outs[0])
        names = device.run()
        results = forward(norm, mine, out=outs[1])
        for name, way in zip((*names, *device.run()), ways, strict=True):
            assert f"ODD_ROWS={way}" in name, (name, of_x, of_dy, of_out)
        for array in (dx, y):
            memory = values(array.base)
            beside = np.ones(memory.size, bool)
            beside[of_out[1] :].reshape(rows, -1)[:, :columns] = False
            assert (memory.view(np.uint16)[beside] == 0xFFFF).all(), "written beside the rows"
        found.append(tuple(values(array).copy() for array in (gradients[0], *results)))
        assert_same_bits(found[-1], found[0])
        if len(found) == 1:
            check_backward(case, tensors, tuple(values(array).copy() for array in gradients))
    alone = Tensors(**{k: v if v is None or k in "wb" else v[7:8] for k, v in vars(tensors).items()})
    mine = replace(on_device(device, alone), x=placed(device, alone.x, 0, 1), dy=placed(device, alone.dy, 0, 1))
    results = backward(norm, mine, has_bias=case.has_bias)[:1]
    device.run()
    results += forward(norm, mine)
    device.run()
    assert_same_bits(tuple(values(array) for array in results), tuple(array[7:8] for array in found[0]))


# Elements between rows of x and of dy, and before the first of both.
PLACES_IN_LINES = ((64, 64, 0), (0, 0, 0), (8, 8, 0), (8, 24, 8), (64, 64, 8), (64, 16, 40))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "name"),
    [
        (80, 576, "bfloat16"),  # a warp
        (50, 3072, "bfloat16"),
        (40, 4096, "bfloat16"),
        (30, 5056, "bfloat16"),  # 40 columns a thread
        (30, 7168, "bfloat16"),  # LayerNorm: 28
        (30, 8128, "bfloat16"),
        (50, 1536, "float32"),
    ],
)
def test_rows_have_the_same_bits_wherever_in_lines_of_memory_they_start(
    small_device: KernelsOnCpu, norm: str, rows: int, columns: int, name: str
) -> None:
    """In vectors, of many steps; lanes without a column, and blocks whose teams have parts of a row. What lies beside
    the rows is no number."""
    case = case_of(norm, rows, columns, name)
    tensors = make_case(np, case)
    found: list[tuple[Any, ...]] = []
    for x_gap, dy_gap, start in PLACES_IN_LINES:
        x, dy = (placed(small_device, a, gap, start) for a, gap in ((tensors.x, x_gap), (tensors.dy, dy_gap)))
        mine = replace(on_device(small_device, tensors), x=x, dy=dy)
        gradients = backward(norm, mine, has_bias=case.has_bias)
        (ran,) = small_device.run()
        results = forward(norm, mine)
        (ran_forward,) = small_device.run()
        itemsize = tensors.x.dtype.itemsize
        for words, gaps in ((ran, (x_gap, dy_gap)), (ran_forward, (x_gap,))):
            leaves = any((columns + gap) * itemsize % 128 for gap in gaps) or start * itemsize % 32
            assert ("OFF_LINES=1" in words) == bool(leaves), (words, x_gap, dy_gap, start)
        found.append(tuple(values(array).copy() for array in (gradients[0], *results)))
        assert_same_bits(found[-1], found[0])
        check_backward(case, tensors, tuple(values(array).copy() for array in gradients))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "types", "row_blocks", "column_blocks", "column_threads"),
    [
        (1, 8, ("bfloat16", "", "float32"), 1, 1, 0),
        (1, 128, ("bfloat16", "", "bfloat16"), 1, 1, 0),
        (1, 1000, ("bfloat16", "", None), 1, 0, 0),
        (1, 4096, ("bfloat16", "", "float32"), 1, 4, 0),
        (1, 8192, ("bfloat16", "", "float64"), 1, 64, 16),  # two vectors a thread; w is converted first, dw afterwards
        (1, 4000, ("float32", "bfloat16", "bfloat16"), 1, 63, 16),
        (1, 6144, ("float32", "", "float32"), 1, 12, 0),  # four vectors, LayerNorm six
        (1, 2048, ("float64", "", "float64"), 1, 8, 0),
        (3, 384, ("bfloat16", "", "float32"), 2, 24, 2),  # of 24 columns, two rows to a block, and one
        (77, 96, ("float32", "", "bfloat16"), 20, 12, 2),
        (1000, 40, ("bfloat16", "", "float32"), 24, 3, 2),
        (250, 8, ("float64", "bfloat16", "float32"), 4, 1, 8),
        (9, 7168, ("bfloat16", "", "float32"), 9, 56, 16),
        (60, 3000, ("bfloat16", "", "bfloat16"), 60, 47, 8),
        (5, 2048, ("bfloat16", "float32", "float32"), 5, 64, 8),
        # Where a thread has all vectors of one of backward_staged.cu's: 40 columns, LayerNorm's 24 and 28.
        (1, 2560, ("bfloat16", "", "float32"), 1, 3, 0),
        (9, 1280, ("bfloat16", "", "bfloat16"), 9, 40, 4),
        (5, 5000, ("bfloat16", "", "float32"), 5, 40, 16),
        (2, 5120, ("float32", "", "float32"), 2, 40, 32),
        (3, 1500, ("float32", "", "bfloat16"), 3, 47, 8),
        (2, 6904, ("bfloat16", "", "float32"), 2, 54, 16),
        # The same where there are more rows.
        (69, 4096, ("bfloat16", "", "float32"), 69, 64, 8),
    ],
)
def test_few_rows_by_their_own_kernel(
    device: KernelsOnCpu,
    norm: str,
    rows: int,
    columns: int,
    types: tuple[str, str, str | None],
    row_blocks: int,
    column_blocks: int,
    column_threads: int,
) -> None:
    """Some lanes without a column, blocks with fewer rows than there is room for, rows with gaps."""
    case = case_of(norm, rows, columns, *types)
    tensors = make_case(np, case)
    for gap in (0, 40)[: 2 if columns > 600 else 1]:  # with such gaps shorter rows take the direct route
        results = backward(norm, on_device(device, tensors, gap), has_bias=case.has_bias)
        named = device.launched[-1].named()
        if case.w or case.has_bias:
            assert (named.row_blocks, named.column_blocks) == (row_blocks, column_blocks or 1)
            assert named.column_threads == column_threads
        assert named.whole_threads or (rows, columns) != (69, 4096)
        check_backward(case, tensors, run(device, results, "backward_few_rows"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mask", [(True, False, True), (True, True, False), (True, False, False)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1024), (30, 1024)])
def test_few_rows_write_what_is_wanted(
    device: KernelsOnCpu, norm: str, rows: int, columns: int, mask: tuple[bool, ...]
) -> None:
    """The same bits as all together, also into memory that starts off 16 bytes."""
    case = case_of(norm, rows, columns)
    mask = mask[: 2 + case.has_bias]
    tensors = make_case(np, case)
    placed = on_device(device, tensors)
    expected = run(device, backward(norm, placed, has_bias=case.has_bias), "backward_few_rows")
    for start in (0, 1):
        out, memories = [], []
        for array, wanted in zip(expected, mask, strict=True):
            if not wanted or array.ndim > 1:
                out.append(device.array(array.shape, array.dtype) if wanted else None)
                continue
            memory = device.array((columns + 4,), array.dtype)
            values(memory)[...] = 7
            memories.append(memory)
            out.append(memory[start : start + columns])
        results = backward(norm, placed, has_bias=case.has_bias, output_mask=mask, out=tuple(out))
        got = run(device, results, "backward_few_rows")
        assert_same_bits(got, tuple(a if w else None for a, w in zip(expected, mask, strict=True)))
        for memory in memories:
            assert (np.delete(values(memory), slice(start, start + columns)) == 7).all(), "written beside the array"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "column_blocks", "column_threads", "row_parts"),
    [
        (150, 4096, 43, 12, 1),  # four threads are left over
        (150, 4096, 64, 8, 1),
        (130, 7168, 45, 20, 1),  # 16 threads, and in the last slice four
        (200, 5120, 54, 12, 1),
        (70, 8192, 43, 24, 1),  # more sums than threads
        (9_000, 128, 64, 8, 32),
        (3_600, 392, 56, 8, 8),  # in the last slice one thread
        (1_450, 1024, 64, 8, 4),
    ],
)
def test_slices_of_any_width(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    norm: str,
    rows: int,
    columns: int,
    column_blocks: int,
    column_threads: int,
    row_parts: int,
) -> None:
    """dw and db by column blocks whose threads side by side are a power of two, or not; by several for a slice."""
    without_kernels_for_few_rows(monkeypatch)
    most = dict.fromkeys((False, True), column_blocks)
    aim = dict.fromkeys((False, True), dict.fromkeys((False, True), (column_blocks, 0, column_blocks)))
    monkeypatch.setattr("cupynorm.cuda.config.column_blocks.AIMED_COLUMN_BLOCKS", aim)
    monkeypatch.setattr("cupynorm.cuda.config.column_blocks.BROKEN_LINES", 1)
    monkeypatch.setattr("cupynorm.cuda.config.column_blocks.WIDER_SLICES_BYTES", 0)
    monkeypatch.setattr("cupynorm.cuda.config.column_blocks.FAST_MOST_AIMED_40", most)
    case = case_of(norm, rows, columns)
    tensors = make_case(np, case)
    results = backward(norm, on_device(device, tensors), has_bias=case.has_bias)
    named = device.launched[-1].named()
    assert (named.column_blocks, named.column_threads, named.row_parts) == (column_blocks, column_threads, row_parts)
    assert named.row_threads == 256 // column_threads
    check_backward(case, tensors, run(device, results, "backward_staged"))


@pytest.mark.parametrize(("name", "w"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize(
    ("rows", "columns", "gap"), [(2000, 128, 0), (2000, 128, 8), (3600, 392, 0), (3600, 392, 8), (1450, 1024, 0)]
)
@pytest.mark.parametrize("norm", NORMS)
def test_blocks_that_share_rows(
    device: KernelsOnCpu, norm: str, rows: int, columns: int, gap: int, name: str, w: str
) -> None:
    """With all masks, in turn; counters are zero afterwards, and dx has the same bits."""
    case = case_of(norm, rows, columns, name, "", w)
    tensors = make_case(np, case)
    placed = on_device(device, tensors, gap)
    masks = [(True, True), (True, False), (True, True)]
    if case.has_bias:
        masks = [(True, True, True), (True, False, True), (True, True, False), (True, True, True)]
    first: tuple[Any, ...] = ()
    for mask in masks:
        results = backward(norm, placed, has_bias=case.has_bias, output_mask=mask)
        named = device.launched[-1].named()
        shares = getattr(named, "row_parts", 1) > 1  # dx alone of 128 columns is the kernel's for few rows
        # Nor does float32 where LayerNorm sums dw without db.
        assert shares == (mask[-1] if name == "float32" else any(mask[1:]))
        ran = run(device, results, *BACKWARD)
        if shares:
            assert not np.ctypeslib.as_array(
                (ctypes.c_ubyte * config.STEP_COUNTERS_BYTES).from_address(named.meeting)
            ).any()
        first = first or ran
        assert_same_bits(ran[:1], first[:1])
        check_backward(case, tensors, tuple(b if a is None else a for a, b in zip(ran, first, strict=True)))


def walkers_sum_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little data there is."""
    monkeypatch.setattr("cupynorm.cuda.config.column_blocks._most_bytes", lambda *_: 0)


@pytest.mark.parametrize(
    ("rows", "columns", "name", "multiprocessors", "gangs", "blocks", "by_column_blocks"),
    [
        (23, 81928, "bfloat16", 22, 2, 11, False),  # all entries are used again
        (3, 81928, "bfloat16", 132, 3, 11, True),
        (4, 262152, "bfloat16", 33, 1, 33, False),  # two warps read
        (9, 131080, "float32", 66, 2, 33, False),
        (7, 262152, "bfloat16", 65, 1, 65, False),  # three
        (5, 262152, "float32", 98, 1, 98, False),  # all four
        # off 16 bytes: single columns, four an access
        (23, 81931, "bfloat16", 22, 2, 11, False),
        (9, 131076, "bfloat16", 34, 2, 17, False),
        (5, 131073, "float32", 66, 2, 33, False),
    ],
)
def test_gangs(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    columns: int,
    name: str,
    multiprocessors: int,
    gangs: int,
    blocks: int,
    by_column_blocks: bool,
) -> None:
    """One norm after the other by the same memory; blocks of a gang run at the same time and wait for each other. Of
    memory as slow as an H100's, where gangs take the shortest rows, too."""
    monkeypatch.setitem(fake_device.ATTRIBUTES, 16, multiprocessors)
    monkeypatch.setitem(fake_device.ATTRIBUTES, 36, fake_device.ATTRIBUTES[36] * multiprocessors // 132 * 2 // 3)
    monkeypatch.setattr(device.cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 1)
    if not by_column_blocks:
        walkers_sum_columns(monkeypatch)
    for norm in ("layernorm", "rmsnorm", "layernorm"):
        case = case_of(norm, rows, columns, name)
        tensors = make_case(np, case)
        results = backward(norm, on_device(device, tensors), has_bias=case.has_bias)
        (launched,) = device.launched
        named = launched.named()
        assert launched.cooperative
        assert (named.partial_rows, launched.grid[0] - named.column_blocks) == (gangs, gangs * blocks)
        assert (named.column_blocks > 0) == by_column_blocks
        ran = run(device, results, "backward_staged")
        check_backward(case, tensors, ran)
        before, left = (ctypes.c_uint * 2).from_address(named.sums)
        assert left == 0
        assert before > 0


@pytest.fixture
def small_device(device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch) -> KernelsOnCpu:
    """Two multiprocessors: walkers have many steps, rings are filled again, column sums reach their second level."""
    monkeypatch.setitem(fake_device.ATTRIBUTES, 16, 2)
    walkers_sum_columns(monkeypatch)
    return device


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "name", "gap"),
    [
        (2500, 128, "bfloat16", 0),
        (1300, 256, "bfloat16", 0),
        (900, 384, "bfloat16", 0),
        (333, 1024, "bfloat16", 0),
        (200, 1536, "bfloat16", 0),
        (80, 4096, "bfloat16", 0),
        (64, 7168, "bfloat16", 0),
        (90, 1001, "bfloat16", 0),
        (1500, 65, "bfloat16", 0),
        (700, 257, "bfloat16", 0),
        (500, 383, "bfloat16", 0),
        (300, 513, "bfloat16", 0),
        (200, 1792, "float32", 0),
        (2501, 128, "bfloat16", 8),
        (901, 384, "bfloat16", 32),
        (801, 512, "bfloat16", 8),
        (1501, 65, "bfloat16", 3),
        (701, 257, "bfloat16", 100),
        (301, 513, "bfloat16", 5),
        (200, 1024, "bfloat16", 1),
        *((700, 300, "bfloat16", 0), (700, 300, "bfloat16", 4), (2000, 36, "bfloat16", 0), (500, 150, "bfloat16", 0)),
        *((333, 1004, "bfloat16", 0), (80, 4098, "bfloat16", 2), (900, 50, "float32", 0)),
    ],
)
def test_many_steps(small_device: KernelsOnCpu, norm: str, rows: int, columns: int, name: str, gap: int) -> None:
    check_both(small_device, case_of(norm, rows, columns, name), STAGED, gap)


@pytest.mark.parametrize("x", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("rows", "columns", "gap", "kernel"),
    [
        *((1, 384, 0, "forward_few_rows"), (150, 96, 0, "forward_staged"), (150, 384, 0, "forward_staged")),
        *((40, 768, 0, "forward_staged"), (150, 300, 0, "forward_staged"), (30, 1001, 0, "forward_staged")),
        *((20, 4096, 0, "forward_staged"), (150, 96, 400, "forward_direct")),
    ],
)
def test_rows_far_from_zero(
    small_device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    x: str,
    rows: int,
    columns: int,
    gap: int,
    kernel: str,
) -> None:
    """By each kernel."""
    if "few" not in kernel:
        without_kernels_for_few_rows(monkeypatch)
    case = far(x, rows, columns)
    tensors = make_case(np, case)
    check_forward(case, tensors, run(small_device, forward(case.norm, on_device(small_device, tensors, gap)), kernel))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("columns", [9000, 8201])
def test_w_of_any_type_for_rows_that_are_read_twice(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, norm: str, columns: int
) -> None:
    """As where it is too long to be converted first."""
    for attribute, value in {75: 8, 16: 4, 97: 166912}.items():
        monkeypatch.setitem(fake_device.ATTRIBUTES, attribute, value)
    monkeypatch.setattr(config.backward, "KEPT_BYTES", 0)
    case = case_of(norm, 5, columns, "bfloat16", "float32", "float64")
    tensors = make_case(np, case)
    results = backward(norm, on_device(device, tensors), has_bias=case.has_bias)
    assert all(config.ANY_W in launch.definitions for launch in device.launched)
    check_backward(case, tensors, run(device, results, "backward_split"))


@pytest.mark.parametrize("columns", [9000, 8201])
def test_rows_far_from_zero_that_are_read_twice(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """In vectors and by single elements, on compute capability 8.0; the last part of a row has few columns."""
    for attribute, value in {75: 8, 16: 4, 97: 166912}.items():
        monkeypatch.setitem(fake_device.ATTRIBUTES, attribute, value)
    case = far("bfloat16", 5, columns)
    tensors = make_case(np, case)
    check_forward(case, tensors, run(device, forward(case.norm, on_device(device, tensors)), "forward_split"))


# Rows, columns, what lies between rows, and the kernel: of a warp or less, of several warps, in vectors and by single
# elements, few of them, with large gaps, and of several blocks on compute capability 8.0.
WIDE_ROWS = [
    *((150, 96, 0, "forward_staged"), (60, 512, 0, "forward_staged"), (20, 4096, 0, "forward_staged")),
    *((30, 1001, 0, "forward_staged"), (2, 512, 0, "forward_few_rows"), (150, 96, 400, "forward_direct")),
    *((4, 9000, 0, "forward_split"), (4, 8201, 0, "forward_split")),
    *((50, 2044, 0, "forward_wide"), (21, 3072, 0, "forward_wide"), (11, 3844, 0, "forward_wide")),  # float32 alone
]


class Wide(NamedTuple):
    """Rows of one of these kinds, and LayerNorm's results for such an array, by its kernel."""

    rows: int
    columns: int
    forward: Callable[[Any], tuple[Any, ...]]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def outliers(self) -> tuple[Any, Any]:
        """One for each row, in turn the first, the middle one and the last of those from which it may be counted."""
        rows = np.arange(self.rows)
        return rows, np.array([0, self.columns // 2, self.columns - 1])[rows % 3]


@pytest.fixture(params=WIDE_ROWS, ids=str)
def wide(request: pytest.FixtureRequest, device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch) -> Wide:
    rows, columns, gap, kernel = request.param
    if kernel == "forward_split":
        for attribute, value in {75: 8, 16: 4, 97: 166912}.items():
            monkeypatch.setitem(fake_device.ATTRIBUTES, attribute, value)
    elif kernel == "forward_wide":
        share_all_rows(monkeypatch, device, 4 if columns < 2048 else 3 if columns < 3800 else 2)
    elif "few" not in kernel:
        without_kernels_for_few_rows(monkeypatch)

    def forward_of(x: Any) -> tuple[Any, ...]:
        if kernel == "forward_wide" and x.dtype == np.float64:
            pytest.skip("no such kernel")
        placed = device.array((rows, columns + gap), x.dtype)[:, :columns]
        values(placed)[...] = x
        return run(device, cupynorm.layernorm_forward(placed), kernel)

    return Wide(rows, columns, forward_of)


@pytest.mark.parametrize("x", ["float32", "float64"])
def test_wide_types_lose_nothing_far_from_zero(wide: Wide, x: str) -> None:
    """At a mean of 10⁴ deviations, also of a row with one element that lies as far from the others, but is none of the
    three that tell where it lies, rstd has a few roundings, and y none of the mean's."""
    epsilon = np.finfo(x).eps
    array = (np.random.default_rng(1).standard_normal(wide.shape) + 1e4).astype(x)
    array[0, 1] += 1e4
    y, mean, rstd = wide.forward(array)
    exact, exact_mean, exact_rstd = exact_forward(array)
    np.testing.assert_allclose(mean, exact_mean, rtol=2 * epsilon)
    np.testing.assert_allclose(rstd, exact_rstd, rtol=4 * epsilon)
    np.testing.assert_allclose(y, exact, rtol=4 * epsilon, atol=8 * epsilon)


def exact_forward(array: Any) -> tuple[Any, Any, Any]:
    wide = array.astype(np.longdouble)
    mean = wide.mean(1)
    rstd = 1 / np.sqrt(wide.var(1) + np.longdouble(DEFAULT_EPS["layernorm"]))
    return tuple(result.astype(np.float64) for result in ((wide - mean[:, None]) * rstd[:, None], mean, rstd))


def test_an_outlier_among_the_three_costs_what_the_mean_rounds_off(wide: Wide) -> None:
    """Far from zero such a row is not counted from one of its elements, and y is off by the sums' roundings, which are
    those of numbers as large as the mean."""
    array = (np.random.default_rng(4).standard_normal(wide.shape) + 1e4).astype(np.float32)
    array[wide.outliers()] *= 1.2
    y, mean, rstd = wide.forward(array)
    exact, exact_mean, exact_rstd = exact_forward(array)
    rounding = 4 * np.finfo(np.float32).eps
    np.testing.assert_allclose(mean, exact_mean, rtol=rounding)
    np.testing.assert_allclose(rstd, exact_rstd, rtol=1e-4)
    others = abs(array - 1e4) < 10
    errors = np.where(others, y - exact, 0)
    assert (abs(errors) <= 1e-4 * abs(exact) + rounding * (exact_mean * exact_rstd)[:, None]).all()


@pytest.mark.parametrize("outlier", [30.0, 1e3, 1e6])
def test_one_element_costs_the_others_nothing(wide: Wide, outlier: float) -> None:
    """Wherever it lies."""
    array = np.random.default_rng(3).standard_normal(wide.shape).astype(np.float32)
    array[wide.outliers()] = outlier
    y, _, rstd = wide.forward(array)
    exact, _, exact_rstd = exact_forward(array)
    np.testing.assert_allclose(rstd, exact_rstd, rtol=5e-7)
    others = abs(array) < 10
    errors = np.where(others, y - exact, 0)
    assert (np.linalg.norm(errors, axis=1) <= 3e-7 * np.linalg.norm(np.where(others, exact, 0), axis=1)).all()


@pytest.mark.parametrize("x", ["float32", "float64"])
def test_constant_rows_of_wide_types_are_exact(wide: Wide, x: str) -> None:
    """Whatever the constant: its mean is itself, and y is zero."""
    powers = 10.0 ** (np.arange(wide.rows) % 12 - 4)
    constants = (np.random.default_rng(2).standard_normal(wide.rows) * powers).astype(x)
    array = np.repeat(constants[:, None], wide.columns, axis=1)
    y, mean, rstd = wide.forward(array)
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(mean, constants)
    np.testing.assert_allclose(rstd, DEFAULT_EPS["layernorm"] ** -0.5, rtol=4 * np.finfo(x).eps)


def test_roots_are_rounded_once(small_device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """root_of() of forward.cuh, from an approximation that is off by a unit (on_cpu.py): to half a unit and little more
    up to 1e30, to less than a unit up to 1e37. Rows of one number and zeros, whose mean square is rounded once."""
    without_kernels_for_few_rows(monkeypatch)
    tensors = make_case(np, far("float32", 400, 64))
    x = np.zeros_like(tensors.x)
    x[:, 0] = 10.0 ** np.linspace(-17.4, 18.9, len(x))
    tensors = on_device(small_device, replace(tensors, x=x))
    rstd = run(small_device, cupynorm.rmsnorm_forward(tensors.x, eps=0.0), "forward_staged")[-1]
    squares = (x[:, 0] * x[:, 0] / np.float32(64)).astype(np.float64)
    errors = np.abs(rstd * np.sqrt(squares) - 1)
    assert errors[squares < 1e30].max() < 1.02 * 2.0**-24
    assert errors.max() < 2.0**-23


@pytest.mark.parametrize("columns", [2304, 6144, 6152])
def test_16_bit_rows_of_several_warps_lose_nothing_far_from_zero(
    small_device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """At a thousand, where numbers of bfloat16 are multiples of four, with deviations of one and a half: their sums are
    exact, and rstd has its own roundings alone, six or so; were warps' means used as they are rounded, over 40."""
    without_kernels_for_few_rows(monkeypatch)
    case = far("bfloat16", 200, columns)
    tensors = make_case(np, case)
    tensors = replace(tensors, x=(tensors.x.astype(np.float32) + 800).astype(tensors.x.dtype))
    rstd = run(small_device, forward(case.norm, on_device(small_device, tensors)), "forward_staged")[-1]
    variance = tensors.x.astype(np.float64).var(1)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(variance + DEFAULT_EPS["layernorm"]), rtol=6 * 2.0**-24)


@pytest.mark.parametrize(
    ("rows", "columns", "kernel"),
    [(1, 384, "forward_few_rows"), (150, 664, "forward_staged"), (40, 6144, "forward_staged")],
)
def test_constant_rows_have_no_variance(
    small_device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, kernel: str
) -> None:
    """Of 16 bits, which are not counted from one of them: where squares count as 0, but not what is put back, a row's
    may come out below 0: rstd is large, and no NaN."""
    if "few" not in kernel:
        without_kernels_for_few_rows(monkeypatch)
    in_16_bits = np.geomspace(1e-16, 1e-10, rows).astype(DTYPES["bfloat16"])
    values = in_16_bits.astype(np.float32)
    x = np.ascontiguousarray(np.broadcast_to(in_16_bits[:, None], (rows, columns)))
    x = on_device(small_device, Tensors(x, None, None, None, None, None)).x
    _, mean, rstd = run(small_device, cupynorm.layernorm_forward(x, eps=0.0), kernel)
    assert (rstd > 1e3 / values).all()
    assert (abs(mean - values) <= 1e-6 * values).all()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "name", "gap", "leads"),
    [
        (2500, 128, "bfloat16", 0, (5, 4)),
        (1801, 384, "bfloat16", 0, (3, 0)),
        (801, 512, "float32", 0, (7, 5)),  # as where it is fast,
        (2501, 128, "bfloat16", 8, (9, 0)),  # and with gaps
        (401, 1024, "bfloat16", 0, (5, 4)),
        (160, 4096, "bfloat16", 0, (5, 4)),
    ],
)
def test_where_memory_is_slow(
    small_device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    norm: str,
    rows: int,
    columns: int,
    name: str,
    gap: int,
    leads: tuple[int, int],
) -> None:
    """LayerNorm's rows of a warp or less draw steps, too, without gaps; backward, walkers have less lead."""
    monkeypatch.setitem(fake_device.ATTRIBUTES, 36, 30000)  # kHz
    case = case_of(norm, rows, columns, name)
    tensors = make_case(np, case)
    placed = on_device(small_device, tensors, gap)
    results = forward(norm, placed)
    drawn = small_device.launched[-1].named().drawn_steps
    assert (drawn > 0) == (not gap or norm == "rmsnorm")
    check_forward(case, tensors, run(small_device, results, "forward_staged"))
    results = backward(norm, placed, has_bias=case.has_bias)
    assert small_device.launched[-1].named().lead == leads[norm == "layernorm"]
    check_backward(case, tensors, run(small_device, results, "backward_staged"))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((4001, 128), (1999, 512), (1011, 768), (1012, 768), (900, 1024), (901, 1024), (203, 4096), (101, 7168)),
        *((901, 1004), (203, 4098)),
    ],
)
@pytest.mark.parametrize("sums", [True, False])
def test_who_keeps_pace_leaves_counters_of_zero(
    small_device: KernelsOnCpu, norm: str, rows: int, columns: int, sums: bool
) -> None:
    """Every step is counted, in each place, of walks of even lengths and odd ones; else the next launch waits. Also
    where dx alone is wanted, and walkers do not meet."""
    tensors = make_case(np, case_of(norm, rows, columns))
    mask = (True, sums, sums) if norm == "layernorm" else (True, sums)
    results = backward(norm, on_device(small_device, tensors), has_bias=norm == "layernorm", output_mask=mask)
    arguments = small_device.launched[-1].named()
    assert arguments.lead > 0
    assert ("DX_ALONE=1" in small_device.launched[-1].definitions) != sums
    run(small_device, results, "backward_staged")
    counters = (ctypes.c_char * config.STEP_COUNTERS_BYTES).from_address(arguments.meeting)
    assert not any(bytes(counters))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("many", "columns", "x"),
    [
        (1200, 128, "bfloat16"),
        (600, 512, "float32"),
        (480, 1000, "bfloat16"),
        (280, 1536, "bfloat16"),
        (140, 4000, "bfloat16"),
        (130, 7168, "bfloat16"),
        (66, 5000, "bfloat16"),
        (40, 2048, "float64"),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, norm: str, many: int, columns: int, x: str
) -> None:
    """Few rows, by their own kernel, and many, with other groups, column blocks and walkers."""
    from cupynorm import dispatch

    tensors = make_case(np, case_of(norm, many, columns, x))
    parts = []
    for rows in (many, 17, 3, 1, *((90,) if columns == 4000 else ())):
        part = {name: a[:rows] if a is not None and name not in ("w", "b") else a for name, a in vars(tensors).items()}
        placed = on_device(device, Tensors(**part))
        dx = run(device, backward(norm, placed), BACKWARD[rows < many])[0]
        with monkeypatch.context() as as_for_many:
            if rows == many:
                without_kernels_for_few_rows(as_for_many)
            kernels = FORWARD if rows == 90 else (FORWARD[rows < many],)
            parts.append((dx, *run(device, forward(norm, placed), *kernels)))
        dispatch.plan_of.cache_clear()
    for few in parts[1:]:
        assert_same_bits(few, tuple(array[: len(few[0])] for array in parts[0]))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("columns", "few"),
    [(128, True), (1024, True), (128, False), (1024, False), (1001, False), (300, False), (1004, False)],
)
def test_a_nan_stays_in_its_row(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, norm: str, columns: int, few: bool
) -> None:
    case = case_of(norm, 40, columns)
    tensors = make_case(np, case)
    if not few:
        without_kernels_for_few_rows(monkeypatch)
    expected = run(device, backward(norm, on_device(device, tensors)), BACKWARD[few])
    spoilt_tensors = replace(tensors, x=spoilt(tensors.x, (7, 5), np.nan))
    got = run(device, backward(norm, on_device(device, spoilt_tensors)), BACKWARD[few])
    others = np.arange(40) != 7
    assert_same_bits((got[0][others],), (expected[0][others],))
    assert np.isnan(got[0][7].astype(np.float32)).all()
    assert_same_bits((np.delete(got[1], 5),), (np.delete(expected[1], 5),))
    assert np.isnan(got[1][5])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "kernels"),
    [
        (50, 128, ("backward_direct", "forward_direct")),
        (40, 1000, ("backward_direct", "forward_direct")),
        (5, 9000, ("backward_split", "forward_split")),
        (2, 65539, ("backward_split", "forward_split")),  # single elements
        (1, 65544, ("backward_split", "forward_split")),  # in vectors
    ],
)
def test_without_the_features_of_newer_devices(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    norm: str,
    rows: int,
    columns: int,
    kernels: tuple[str, str],
) -> None:
    """Compute capability 8.0."""
    for attribute, value in {75: 8, 16: 4, 97: 166912}.items():
        monkeypatch.setitem(fake_device.ATTRIBUTES, attribute, value)
    check_both(device, case_of(norm, rows, columns), kernels)


def test_no_more_threads_at_once_than_kernels_have_registers_for(tmp_path: Path) -> None:
    """kThreadsAtOnce of backward_staged.cu, by its own source, beside what is asked for."""
    source = (module.source_directory() / "backward_staged.cu").read_text(encoding="utf-8")
    start, end = "constexpr int kColumnBytes", "constexpr int kThreadsAtOnce"
    constants = source[source.index(start) : source.index(";", source.index(end)) + 1]
    cases = [
        (capability, x, norm, db, vector, per_thread)
        for capability, x, norm, db, vector in product(
            (9, 10, 12), ("bfloat16", "float32", "float64"), NORMS, *[(False, True)] * 2
        )
        for per_thread in ((8, 16) if x == "float64" else (12, 16, 20, 24, 28, 32, 36, 40))
    ]
    lines = ["#include <cstdio>", "constexpr int kMaxThreads = 256;"]
    for number, (capability, x, norm, db, vector, per_thread) in enumerate(cases):
        whole_warps = per_thread > config.common.columns_per_thread(x)
        lines += [
            f"namespace case_{number} {{",
            "#undef __CUDA_ARCH__",
            "#undef VECTOR",
            f"#define __CUDA_ARCH__ {100 * capability}",
            f"#define VECTOR {int(vector)}",
            f"constexpr int kColumnsPerThread = {per_thread};",
            f"constexpr bool kWantDb = {int(db)}, kWholeWarps = {int(whole_warps)};",
            f"constexpr bool kLayerNorm = {int(norm == 'layernorm')}, kSumsColumns = true, kGang = false;",
            f"struct X {{ char bytes[{config.common.ITEMSIZE[x]}]; }};",
            f"struct Compute {{ char bytes[{config.common.compute_itemsize(x)}]; }};",
            constants,
            "}",
        ]
    shown = (f'std::printf("%d\\n", case_{number}::kThreadsAtOnce);' for number in range(len(cases)))
    lines += ["int main() {", *shown, "}"]
    program = tmp_path / "program"
    program.with_suffix(".cpp").write_text("\n".join(lines), encoding="utf-8")
    subprocess.run([str(COMPILER), "-std=c++17", f"{program}.cpp", "-o", str(program)], check=True)
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
    for case, most in zip(cases, found, strict=True):
        capability, x, norm, db, vector, per_thread = case
        device, kind = config.Device((capability, 0), 132, 232448), (norm, x, x, db, vector)
        assert config.backward._threads_at_once(kind, per_thread, device) <= int(most), case
        accesses = config.common.SINGLE, config.common.ODD_IN_WORDS
        split = config.backward._Split(kind, per_thread, 32, 1, 32 * per_thread, True, False, False, *accesses, start=0)
        if config.backward._takes_many_warps(split, device):
            assert int(most) == 32 * config.backward.MANY_WARPS, case


def test_what_is_written_in_place_of_ptx() -> None:
    text = (
        'asm volatile("bar.sync 1, %0;" ::"r"(f(threads) + 1) : "memory");\n'
        'asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));\n'
        'if (x) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");\n'
        "extern __shared__ __align__(128) char shared[];"
    )
    barrier, conversion, load, shared = as_cpp(text).splitlines()
    assert barrier == "{ on_cpu::bar_sync(1, f(threads) + 1); }"
    assert conversion.startswith("/*")
    assert conversion.endswith("*/;")
    assert load == "if (x) { value = on_cpu::read_anew<uint64_t>(&word); }"
    assert shared == "auto* const shared = on_cpu::shared;"


def test_a_kernel_that_waits_for_ever_or_leaves_its_memory_is_noticed(tmp_path: Path) -> None:
    """In a process of its own, which it ends."""
    for body, words in (
        ("if (threadIdx.x) __syncthreads();", "all threads wait for ever"),
        ("Barrier{shared_address(shared)}.init(1); bulk_copy(shared_address(shared) + a, &a, 16, {});", "off 16 bytes"),
    ):
        program = tmp_path / "program"
        text = f"""
#include "cuda.h"
#include "pipeline.h"
void kernel(const int& a) {{ auto* const shared = on_cpu::shared; {body} }}
int main() {{ int a = 8; on_cpu::launch(kernel, a, 1, 1, 64, 1024); }}
"""
        program.with_suffix(".cpp").write_text(text)
        include = Path(__file__).with_name("on_cpu")
        command = [str(COMPILER), "-std=c++20", "-w", f"-I{include}", f"{program}.cpp", "-o", str(program)]
        subprocess.run(command, check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert words in done.stderr


def share_all_rows(monkeypatch: pytest.MonkeyPatch, device: KernelsOnCpu, multiprocessors: int) -> None:
    """A device with so many, and memory as fast for each as an H200's, of which all blocks share each row."""
    from cupynorm.cuda.config import wide

    monkeypatch.setitem(fake_device.ATTRIBUTES, 16, multiprocessors)
    monkeypatch.setitem(fake_device.ATTRIBUTES, 36, fake_device.ATTRIBUTES[36] * multiprocessors // 132)
    monkeypatch.setattr(device.cupy.cuda.driver, "occupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 1)
    monkeypatch.setattr(wide, "WIDE_LEAST_BLOCKS", 1)
    monkeypatch.setattr(wide, "FORWARD_WIDE_LEAST_COLUMNS", dict.fromkeys((2, 4), dict.fromkeys(NORMS, 1)))


@pytest.mark.parametrize(
    ("columns", "multiprocessors", "step_rows", "name", "w"),
    [
        (4096, 4, 8, "bfloat16", "float32"),  # two groups
        (4088, 4, 8, "bfloat16", "bfloat16"),  # a vector is missing; rows do not all begin at whole lines
        (6144, 3, 4, "bfloat16", "float32"),
        (4616, 3, 4, "bfloat16", None),  # threads without a column
        (2048, 4, 8, "float32", "float32"),
        (2044, 4, 8, "float32", "float32"),  # rows do not all begin at whole lines
        (2308, 3, 4, "float32", None),  # rows do not all begin at whole lines, and threads have no column
        (3844, 2, 2, "float32", "float32"),  # the same, of two vectors
        (6148, 2, 1, "float32", "float32"),  # by sixteen warps
        (2116, 2, 4, "float32", "float32"),  # of four rows
        (4164, 2, 2, "float32", "float32"),  # by sixteen warps of two rows; sums in shared memory
        (7160, 2, 2, "bfloat16", "bfloat16"),  # two vectors, LayerNorm's sums in shared memory
        (4232, 2, 4, "bfloat16", "float32"),  # the same of four rows; most warps have one vector
        (8328, 2, 2, "bfloat16", None),  # by sixteen warps, LayerNorm a row at a time; sums in shared memory
        # two steps behind: the first two for LayerNorm, the third for RMSNorm, the last where db is summed
        (12808, 2, 1, "bfloat16", None),
        (4744, 2, 4, "bfloat16", None),
        (9480, 2, 2, "bfloat16", None),
        (4744, 2, 2, "float32", None),
    ],
)
def test_rows_that_all_blocks_share(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    multiprocessors: int,
    step_rows: int,
    name: str,
    w: str | None,
) -> None:
    """One norm after the other by the same memory: few rows, and so many that entries are used again, and the ring;
    and as many as are added up at once, and one more."""
    from cupynorm.cuda.config import wide

    share_all_rows(monkeypatch, device, multiprocessors)
    first: dict[str, Any] = {}
    launches = []
    for norm, rows in product(NORMS, (17 * step_rows + 3, 1, step_rows, 2 * step_rows + 1, 16, 17)):
        case = case_of(norm, rows, columns, name, w=w)
        tensors = some_rows(make_case(np, replace(case, rows=17 * step_rows + 3)), slice(rows))
        results = backward(norm, on_device(device, tensors), has_bias=case.has_bias)
        (launched,) = device.launched
        assert launched.cooperative
        assert launched.grid[0] == multiprocessors
        ran = run(device, results, "backward_wide")
        check_backward(case, tensors, ran)
        assert_same_bits(ran[:1], (first.setdefault(norm, ran[0])[:rows],))
        exchange = launched.named().exchange
        launches.append(ctypes.c_uint.from_address(exchange).value)
        region = exchange + 128 + launches[-1] % 2 * (wide.wide_exchange_bytes() - 128) // 2  # the next launch's
        assert not np.ctypeslib.as_array(
            (ctypes.c_ubyte * ((wide.wide_exchange_bytes() - 128) // 2)).from_address(region)
        ).any()
    assert np.diff(launches).tolist() == [1] * (len(launches) - 1)


@pytest.mark.parametrize(
    ("columns", "multiprocessors", "step_rows", "name", "w"),
    [
        (4096, 4, 4, "bfloat16", "float32"),
        (4088, 4, 4, "bfloat16", "bfloat16"),  # a vector is missing; rows do not all begin at whole lines
        (4616, 3, 4, "bfloat16", None),  # threads without a column
        (7168, 2, 4, "bfloat16", "float64"),  # two vectors
        (10248, 2, 2, "bfloat16", None),  # four, of which threads have three, or two
        (2044, 3, 4, "float32", "float32"),  # rows do not all begin at whole lines
        (2308, 3, 4, "float32", "bfloat16"),  # rows do not all begin at whole lines, and threads have no column
        (3844, 2, 4, "float32", "float32"),  # the same, of two vectors
        (6148, 2, 2, "float32", "float32"),
    ],
)
def test_rows_that_all_blocks_share_forward(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    multiprocessors: int,
    step_rows: int,
    name: str,
    w: str | None,
) -> None:
    """As backward, and in turn with that, by the same memory."""
    share_all_rows(monkeypatch, device, multiprocessors)
    first: dict[str, Any] = {}
    launches = []
    for norm, rows in product(NORMS, (33 * step_rows + 3, 1, step_rows, 2 * step_rows + 1)):
        case = case_of(norm, rows, columns, name, w=w)
        tensors = some_rows(make_case(np, replace(case, rows=33 * step_rows + 3)), slice(rows))
        placed = on_device(device, tensors)
        results = forward(norm, placed)
        (launched,) = device.launched
        assert launched.cooperative
        assert launched.grid[0] == multiprocessors
        ran = run(device, results, "forward_wide")
        check_forward(case, tensors, ran)
        for whole, part in zip(first.setdefault(norm, ran), ran, strict=True):
            assert_same_bits((part,), (whole[:rows],))
        other = case_of(norm, 9, 2048 * multiprocessors)
        check_both(device, other, ("backward_wide", "forward_wide"))
        launches.append(ctypes.c_uint.from_address(launched.named().exchange).value)
    assert np.diff(launches).tolist() == [3] * (len(launches) - 1)


@pytest.mark.parametrize(
    ("columns", "name", "rows"),
    [
        *((3844, "float32", 13), (4744, "float32", 11), (4232, "bfloat16", 21)),  # do not all begin at whole lines
        (3840, "float32", 13),
    ],
)
def test_no_warp_is_too_late(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, columns: int, name: str, rows: int
) -> None:
    """A last step that has room for another row, and is in a place of the ring where one was before."""
    share_all_rows(monkeypatch, device, 2)
    case = case_of("layernorm", rows, columns, name)
    tensors = make_case(np, case)
    for want_dx in (True, False):
        found = []
        for device.late_warp in (-1, 0, 1, 2, 7):
            mask = (want_dx, True, True)
            results = backward(case.norm, on_device(device, tensors), has_bias=True, output_mask=mask)
            launched = device.launched[-1]
            stages = next(int(text[12:]) for text in launched.definitions if text.startswith("WIDE_STAGES="))
            assert launched.named().steps > stages
            found.append(run(device, results, "backward_wide"))
        for late in found[1:]:
            assert_same_bits(late, found[0])


@pytest.mark.parametrize(
    ("columns", "name"),
    [(7160, "bfloat16"), (4232, "bfloat16"), (8328, "bfloat16"), (4744, "float32")],
)
def test_sums_in_shared_memory_are_those_in_registers(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, columns: int, name: str
) -> None:
    """What they have lost, too: over so few rows it shows in no tolerance, but in bits."""
    from cupynorm import dispatch
    from cupynorm.cuda.config import wide

    share_all_rows(monkeypatch, device, 2)
    found = []
    for shared_totals in (True, False):
        if not shared_totals:
            of_registers = {
                sums_db: {size: {shape._replace(shared_totals=False): least for shape, least in shapes.items()}}
                for sums_db, of_size in wide.WIDE_LEAST_COLUMNS.items()
                for size, shapes in of_size.items()
                if size == DTYPES[name].itemsize
            }
            monkeypatch.setattr(wide, "WIDE_LEAST_COLUMNS", of_registers)
        dispatch.plan_of.cache_clear()
        shared = False
        for norm in NORMS:
            case = case_of(norm, 83, columns, name)
            tensors = make_case(np, case)
            results = backward(norm, on_device(device, tensors), has_bias=case.has_bias)
            shared |= "WIDE_SHARED_TOTALS=1" in device.launched[-1].definitions
            found.append(run(device, results, "backward_wide"))
        assert shared == shared_totals
    for one, other in zip(found[: len(NORMS)], found[len(NORMS) :], strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("columns", [7168, 4088])
def test_16_bit_rows_that_all_blocks_share_lose_nothing_far_from_zero(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """As rows of several warps."""
    share_all_rows(monkeypatch, device, 4 if columns < 4096 else 2)
    case = far("bfloat16", 100, columns)
    tensors = make_case(np, case)
    tensors = replace(tensors, x=(tensors.x.astype(np.float32) + 800).astype(tensors.x.dtype))
    rstd = run(device, forward(case.norm, on_device(device, tensors)), "forward_wide")[-1]
    variance = tensors.x.astype(np.float64).var(1)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(variance + DEFAULT_EPS["layernorm"]), rtol=6 * 2.0**-24)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("columns", "multiprocessors", "x"),
    [
        *((4096, 4, "bfloat16"), (6144, 3, "bfloat16"), (2308, 3, "float32")),
        *((3844, 2, "float32"), (6148, 2, "float32")),  # two vectors, sixteen warps
        # Sums in shared memory: dx alone by more stages than LayerNorm's with db, and, the second, than RMSNorm's with
        # dw. Where LayerNorm's dx is wanted without db, the second has two rows a step, not one, and other bits but by
        # two blocks, whose sums come in one order.
        *((4744, 2, "float32"), (9480, 2, "bfloat16")),
    ],
)
def test_rows_that_all_blocks_share_and_what_is_not_wanted(
    device: KernelsOnCpu, monkeypatch: pytest.MonkeyPatch, norm: str, columns: int, multiprocessors: int, x: str
) -> None:
    """Results that are left out change no bit of the others; dw and db may start off 16 bytes, and be of any type."""
    share_all_rows(monkeypatch, device, multiprocessors)
    case = case_of(norm, 21, columns, x)
    tensors = make_case(np, case)
    placed = on_device(device, tensors)
    names = ("dx", "dw", "db")[: 2 + case.has_bias]
    everything = run(device, backward(norm, placed, has_bias=case.has_bias), "backward_wide")
    for wanted in product((True, False), repeat=len(names)):
        if not any(wanted):
            continue
        mask = {"has_bias": case.has_bias, "output_mask": wanted}
        ran = run(device, backward(norm, placed, **mask), "backward_wide")
        for asked, one, other in zip(wanted, ran, everything, strict=True):
            assert (one is not None) == asked
            if asked:
                assert_same_bits((one,), (other,))
    for name, offset in (("float32", 1), ("float64", 0), ("bfloat16", 1)):
        dtype = DTYPES[name]
        w = device.array(placed.w.shape, dtype)
        values(w)[...] = tensors.w
        out = [device.array(placed.x.shape, placed.x.dtype)]
        out += [device.array((columns + offset,), dtype)[offset:] for _ in names[1:]]
        results = backward(norm, replace(placed, w=w), has_bias=case.has_bias, out=tuple(out))
        check_backward(
            replace(case, w=name),
            replace(tensors, w=values(w).copy()),
            run(device, results, "backward_wide"),
        )


@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("columns", "multiprocessors", "name"),
    [
        *((4096, 4, "bfloat16"), (3072, 3, "float32")),
        # sums in shared memory: sixteen warps with a row, or two, eight with four
        *((8328, 2, "bfloat16"), (4744, 2, "float32"), (4232, 2, "bfloat16")),
    ],
)
def test_an_infinite_element_where_all_blocks_share_rows(
    device: KernelsOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    norm: str,
    columns: int,
    multiprocessors: int,
    name: str,
    value: float,
) -> None:
    """Its column's sums are infinite, though what each addition loses then is not a number; others keep their bits."""
    share_all_rows(monkeypatch, device, multiprocessors)
    case = case_of(norm, 40, columns, name)
    clean = make_case(np, case)
    expected = run(device, backward(norm, on_device(device, clean), has_bias=True), "backward_wide")
    for row, column in ((2, 5), (39, columns - 1)):
        for array in ("x", "dy"):
            dirty = replace(clean, **{array: spoilt(getattr(clean, array), (row, column), value)})
            got = run(device, backward(norm, on_device(device, dirty), has_bias=True), "backward_wide")
            rows_left, columns_left = np.arange(40) != row, np.arange(columns) != column
            assert_same_bits((got[0][rows_left],), (expected[0][rows_left],))
            assert not np.isfinite(got[0][row].astype(np.float32)).any()
            for sums, sums_expected, reached in zip(got[1:], expected[1:], (True, array == "dy"), strict=True):
                assert_same_bits((sums[columns_left],), (sums_expected[columns_left],))
                assert bool(np.isinf(sums[column])) == (reached and bool(np.isinf(value)))
                assert bool(np.isnan(sums[column])) == (reached and bool(np.isnan(value)))
