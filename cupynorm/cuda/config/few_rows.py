"""Few rows: what backward_few_rows.cu and forward_few_rows.cu take, and their blocks."""

from __future__ import annotations

from typing import NamedTuple

from ...problem import NormProblem
from .column_blocks import COLUMN_BLOCKS, SECTOR_BYTES
from .common import (
    DX_ALONE,
    ITEMSIZE,
    OFF_LINES,
    STAGED_MAX_THREADS,
    WARP,
    BackwardConfig,
    Device,
    ForwardConfig,
    access_width,
    argument_bytes,
    columns_of,
    columns_per_thread,
    compute_itemsize,
    compute_name,
    divide_up,
    has_whole_warps,
    in_whole_warps,
)

# struct FewRowsArguments in backward_few_rows.cu, by the type of the arithmetic.
FEW_ROWS_ARGUMENTS = {"float32": "8P3q3IH2Bf?B4H2x", "float64": "8P3q3IH2Bd?B4H6x"}

# Of a block, and of those that a multiprocessor has at once (kBlockThreads): where a thread of backward_staged.cu has
# over so many columns, and else.
FEW_ROWS_MANY_COLUMNS, FEW_ROWS_MOST_THREADS = 32, {True: STAGED_MAX_THREADS, False: 512}

# A thread has as few vectors as may be (an H100, LayerNorm, 1x4096, with two 5.9 us, with one 5.7), but all of a thread
# of backward_staged.cu where these share a sum (_sums_by_vector).
FEW_ROWS_VECTORS = (1, 2, 4)

# Where rows take a warp or less, the fewer of these with which no thread of a column block has many rows.
FEW_ROWS_SHORT_THREADS = (128, 256)

# Of a column block's thread (an H100, N=128, in blocks of 256 threads, 800 rows, 6.2 each: 6.7 → 6.4 us; 1600: 7.9 →
# 8.4).
FEW_ROWS_SUMMED = 8
FEW_ROWS_SUM_VECTORS = 128  # kSumVectors

# dx alone, of 16-bit types in whole warps, on compute capability 9.0 where memory is fast: also more rows than run at
# once, up to so many bytes of x for each multiprocessor, by whether a thread of backward_staged.cu has over
# FEW_ROWS_MANY_COLUMNS; these by so many threads at most (50 MB, 2048: 18.1 → 17.0 us, LayerNorm 18.2 → 17.1; but 300
# MB 76.7 → 77.9, and 5120, which gains at 10 MB, 25 MB 11.2 → 12.2).
FEW_ROWS_ALONE_BYTES, FEW_ROWS_ALONE_MANY_COLUMNS_THREADS = {False: 272 << 10, True: 26 << 10}, 128

# Forward, threads on a multiprocessor that leave each the registers that it needs, by bytes of w, b and x of a thread:
# kThreadsAtOnce of forward_few_rows.cu.
FORWARD_FEW_ROWS_THREADS = {240: 512, 320: 384}
FORWARD_FEW_ROWS_SHORT_THREADS = 128  # of a block, where rows take a warp or less

# Forward, up to so many bytes of x for each multiprocessor, of rows of a warp or less, and of whole warps (an H100,
# RMSNorm, 65x4096 6.3 → 5.7 us, 244x4096 7.1 → 7.4; LayerNorm, 33x4096 6.3 → 6.1, 52x5120 6.4 → 6.6).
FORWARD_FEW_ROWS_BYTES = {"rmsnorm": (9 << 10,) * 2, "layernorm": (15 << 10, 5 << 9)}


class FewRows(NamedTuple):
    """A launch of backward_few_rows.cu."""

    threads: int
    shared_bytes: int
    block_rows: int
    row_blocks: int
    column_blocks: int
    column_threads: int  # of these; 0: they have a single row
    log2_lanes: int  # of a warp of backward_staged.cu, that would share a row
    warps: int  # of its warps, likewise
    whole_threads: bool  # a thread has all vectors of one of backward_staged.cu

    @property
    def row_threads(self) -> int:
        return self.threads // self.column_threads if self.column_threads else 0


class _Split(NamedTuple):
    """How a row is split over threads."""

    vector: int  # columns: kVector of backward.cuh
    own: int  # vectors of a thread
    threads: int
    whole: bool  # these are all vectors of a thread of backward_staged.cu


def few_rows_definitions(config: BackwardConfig) -> tuple[str, ...] | None:
    """Of the kernel for few rows as these, the same for any M; None where there is none."""
    split = _split(config)
    return few_rows_definitions_of(config.definitions, split.own) if split else None


def few_rows_definitions_of(definitions: tuple[str, ...], own: int) -> tuple[str, ...]:
    """Where backward_staged.cu has these, and a thread so many vectors of a row."""
    kept = (text for text in definitions if text not in ("PACED=1", "ROW_GAPS=1", OFF_LINES, DX_ALONE))
    layout = FEW_ROWS_ARGUMENTS[compute_name(_types(definitions)[0])]
    return (*kept, f"VECTORS_A_THREAD={own}", f"FEW_ROWS_{argument_bytes(layout)}")


def few_rows_vectors(definitions: tuple[str, ...]) -> set[int]:
    """Those that a thread may have, where backward_staged.cu has these definitions."""
    groups = [int(text.partition("=")[2]) for text in definitions if text.startswith("PART_OF_WARP=")]
    if not groups and columns_of(definitions) <= columns_per_thread(_types(definitions)[0]):
        groups = [1 << power for power in range(6)]  # that share a warp
    elif not groups:
        groups = list(range(WARP, STAGED_MAX_THREADS + 1, WARP))
    found = (_split_of(definitions, group) for group in groups)
    return {split.own for split in found if split}


def few_rows_blocks(config: BackwardConfig, problem: NormProblem, aligned_sums: bool, device: Device) -> FewRows | None:
    """None where backward_few_rows.cu does not pay; `aligned_sums`: dw and db start at multiples of 16 bytes.

    With dw or db it pays where all of its blocks run at the same time (an H100, 64x4096 6.7 → 6.2 us, 192x2048 6.8 →
    6.5, but 264x2048 7.2 → 8.9). Blocks of which a thread has two or four vectors count as often. Of more rows, of
    16-bit types in whole warps, a thread has all vectors of one of backward_staged.cu (LayerNorm, 69x4096 6.9 → 6.4,
    126x4096 7.6 → 7.3; dx alone, 200x4096 7.9 → 7.3); dx alone has it for more rows still: FEW_ROWS_ALONE_BYTES. Rows
    of a warp or less: of a column block's thread at most FEW_ROWS_SUMMED.
    """
    split = _split(config)
    if split is None or not problem.want_dx:
        return None
    whole = split
    if not split.whole and _has_both(config):
        whole = _Split(split.vector, config.per_thread // split.vector, config.group_threads, whole=True)
    if problem.rows <= _most_threads(config.per_thread) * device.multiprocessors:
        for each in dict.fromkeys((split, whole)):
            if found := _fitting(each, config, problem, aligned_sums, device):
                return found
    if not (problem.want_dw or problem.want_db) and _has_both(config) and device.is_fast_9_0:
        many = config.per_thread > FEW_ROWS_MANY_COLUMNS
        fits = not many or whole.threads <= FEW_ROWS_ALONE_MANY_COLUMNS_THREADS
        bytes_of_x = problem.rows * problem.columns * ITEMSIZE[problem.x_dtype.name]
        if fits and bytes_of_x <= FEW_ROWS_ALONE_BYTES[many] * device.multiprocessors:
            return _blocks(whole, config, problem, aligned_sums, whole.threads)
    return None


def _fitting(
    split: _Split, config: BackwardConfig, problem: NormProblem, aligned_sums: bool, device: Device
) -> FewRows | None:
    """Blocks that all run at the same time."""
    for threads in (split.threads,) if _has_whole_warps(config) else FEW_ROWS_SHORT_THREADS:
        found = _blocks(split, config, problem, aligned_sums, threads)
        if found.row_threads * FEW_ROWS_SUMMED >= problem.rows or not found.column_threads:
            at_once = device.multiprocessors * (_most_threads(config.per_thread) // found.threads)
            weight = 1 if split.whole else split.own
            return found if weight * found.row_blocks + found.column_blocks <= at_once else None
    return None


def _blocks(
    split: _Split, config: BackwardConfig, problem: NormProblem, aligned_sums: bool, most_threads: int
) -> FewRows:
    """Of so many threads, or as many as the rows need."""
    rows = max(1, min(problem.rows, most_threads // split.threads))
    sums = problem.want_dw or problem.want_db
    alone = problem.rows == 1 and aligned_sums and problem.parameter_dtype in (problem.x_dtype, problem.compute_dtype)
    threads = max(in_whole_warps(rows * split.threads), FEW_ROWS_SUM_VECTORS if sums and (alone or split.whole) else 0)
    itemsize = compute_itemsize(problem.x_dtype.name)
    entries = split.own * divide_up(threads, split.threads) * split.threads
    shared_bytes = 0 if split.whole else 2 * itemsize * entries
    blocks = column_threads = 0
    if sums and alone:
        blocks = divide_up(problem.columns, FEW_ROWS_SUM_VECTORS * split.vector)
    elif sums:
        types = _types(config.definitions)
        vector = access_width(*types)
        column_threads = SECTOR_BYTES // (vector * min(ITEMSIZE[name] for name in types))
        while divide_up(problem.columns, column_threads * vector) > COLUMN_BLOCKS:
            column_threads *= 2
        blocks = divide_up(problem.columns, column_threads * vector)
        entries = column_threads * vector * (2 if problem.want_dw and problem.want_db else 1)
        shared_bytes = max(shared_bytes, threads // column_threads * (itemsize * entries + 16))
    lanes = min(config.group_threads, WARP)
    return FewRows(
        threads=threads,
        shared_bytes=shared_bytes,
        block_rows=rows,
        row_blocks=divide_up(problem.rows, rows),
        column_blocks=blocks,
        column_threads=column_threads,
        log2_lanes=lanes.bit_length() - 1,
        warps=config.group_threads // lanes,
        whole_threads=split.whole,
    )


def _split(config: BackwardConfig) -> _Split | None:
    if config.route != "staged" or "VECTOR=1" not in config.definitions or config.slabs > 1:
        return None
    return _split_of(config.definitions, config.group_threads)


def _split_of(definitions: tuple[str, ...], group_threads: int) -> _Split | None:
    """Of rows that so many threads of backward_staged.cu would share."""
    x, dy = _types(definitions)
    per_thread = columns_of(definitions)
    wide = access_width(x, dy)  # kWideVector of backward.cuh
    vector = wide // 2 if per_thread % wide else wide
    if not _sums_by_vector("LAYER_NORM=1" in definitions, x, (per_thread, group_threads)):
        return _Split(vector, per_thread // vector, group_threads, whole=True)
    vectors = group_threads * per_thread // vector
    for own in FEW_ROWS_VECTORS:
        if vectors <= own * FEW_ROWS_MOST_THREADS[False] and (own == 1 or vectors % (own * WARP) == 0):
            return _Split(vector, own, vectors // own, whole=False)
    return None


def _sums_by_vector(layernorm: bool, x: str, held: tuple[int, int]) -> bool:
    """kSumsByVector of backward.cuh, of vectors and of blocks that have whole rows."""
    in_turn = layernorm and has_whole_warps(x, held) and ITEMSIZE[x] == 2 and held[0] in (24, 28)
    return held[0] <= FEW_ROWS_MANY_COLUMNS and not in_turn


def _most_threads(per_thread: int) -> int:
    return FEW_ROWS_MOST_THREADS[per_thread > FEW_ROWS_MANY_COLUMNS]


def _has_whole_warps(config: BackwardConfig) -> bool:
    return has_whole_warps(_types(config.definitions)[0], (config.per_thread, config.group_threads))


def _has_both(config: BackwardConfig) -> bool:
    """16-bit types in whole warps: kHasBoth of backward_few_rows.cu, where vectors have sums of their own."""
    return _has_whole_warps(config) and all(ITEMSIZE[name] == 2 for name in _types(config.definitions))


def _types(definitions: tuple[str, ...]) -> tuple[str, str]:
    """Of x and dy."""
    of_name = dict(text.split("=") for text in definitions)
    return of_name["X_TYPE"], of_name["DY_TYPE"]


class ForwardFewRows(NamedTuple):
    """A launch of forward_few_rows.cu."""

    definitions: tuple[str, ...]
    threads: int
    blocks: int


def forward_few_rows_definitions(definitions: tuple[str, ...]) -> tuple[str, ...] | None:
    """Of the kernel for few rows where forward_staged.cu has these, the same for any M; None where there is none."""
    if not {"VECTOR=1", "CLUSTER=1"} <= set(definitions):
        return None
    return tuple(text for text in definitions if text not in ("ROW_GAPS=1", "DRAW_SHORT_ROWS=1", OFF_LINES))


def forward_few_rows(config: ForwardConfig, problem: NormProblem, device: Device) -> ForwardFewRows | None:
    """None where forward_few_rows.cu does not pay, or not all of its blocks run at the same time."""
    definitions = forward_few_rows_definitions(config.definitions)
    if definitions is None:
        return None
    x, group, per_thread = problem.x_dtype.name, config.group_threads, columns_of(config.definitions)
    whole = has_whole_warps(x, (per_thread, group))
    bytes_of_x = problem.rows * problem.columns * ITEMSIZE[x]
    if bytes_of_x > FORWARD_FEW_ROWS_BYTES[problem.norm][whole] * device.multiprocessors:
        return None
    rows = 1 if whole else min(problem.rows, FORWARD_FEW_ROWS_SHORT_THREADS // group)
    threads, blocks = in_whole_warps(rows * group), divide_up(problem.rows, rows)
    bytes_of_thread = per_thread * (2 * compute_itemsize(x) + ITEMSIZE[x])
    at_once = next((n for most, n in FORWARD_FEW_ROWS_THREADS.items() if bytes_of_thread <= most), STAGED_MAX_THREADS)
    fits = blocks <= device.multiprocessors * (at_once // threads)
    return ForwardFewRows(definitions, threads, blocks) if fits else None
