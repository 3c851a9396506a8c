"""Launch choices are a pure function: checked here for every device generation without a GPU."""

from __future__ import annotations

import functools
import importlib
import math
import operator
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_cuda_runtime import LENGTHS, SHARED, rows_of
from test_promises import concurrent_cases, containment_cases

from cupynorm.cuda import config, module
from cupynorm.cuda.config.variants import variants
from cupynorm.problem import NormProblem

# Multiprocessors, shared memory a block and GB/s of memory of a T4, A100, H200, H100, B200 and an RTX 5090.
DEVICES = {
    "sm_75": config.Device((7, 5), 40, 65536, 320),
    "sm_80": config.Device((8, 0), 108, 166912, 2039),
    "sm_90": config.Device((9, 0), 132, 232448, 4916),
    "sm_90_slow": config.Device((9, 0), 132, 232448, 3352),
    "sm_100": config.Device((10, 0), 148, 232448, 8000),
    "sm_120": config.Device((12, 0), 170, 101376, 1792),
}
DTYPES = {name: np.dtype(name) for name in ("float16", "float32", "float64")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
# Rows off 16 bytes that are read in several elements at a time, in parts of warps, in warps, and in clusters.
UNALIGNED = (36, 50, 70, 132, 178, 300, 340, 516, 700, 1004, 1500, 2500, 4098, 4100, 12292, 20004, 40004, 131068)
# These, and every power of two and its neighbours: where one route ends and the next begins.
POWERS = [1 << k for k in range(19)]
COLUMNS = sorted(
    {n + d for n in POWERS for d in (-1, 0, 1, 8) if 1 <= n + d <= 262144}
    | {768, 1792, 3584, 7168, 14336, 20480, 28672, 262143, *UNALIGNED}
)
ALIGNMENTS = (16, 8, 4, 2)


def backward(columns: int, x: str, dy: str, rows: int = 4096, norm: str = "layernorm") -> NormProblem:
    return NormProblem(
        norm=norm,
        direction="backward",
        rows=rows,
        columns=columns,
        x_dtype=DTYPES[x],
        dy_dtype=DTYPES[dy],
        w_dtype=DTYPES["float32"],
        b_dtype=None,
        x_row_stride=columns,
        dy_row_stride=columns,
        out_row_stride=columns,
        copies=frozenset(),
        want_dx=True,
        want_dw=True,
        want_db=norm == "layernorm",
    )


ELSEWHERE = pytest.mark.usefixtures("without_wide_rows")


def forward_of(problem: NormProblem) -> NormProblem:
    return replace(problem, direction="forward", dy_dtype=None, dy_row_stride=0)


def blocks_at_once(chosen: config.BackwardConfig | config.ForwardConfig, device: config.Device) -> int:
    """On one multiprocessor, by their shared memory."""
    return device.shared_bytes // (chosen.shared_bytes + config.backward.STATIC_SHARED_BYTES)


def defined(chosen: config.BackwardConfig | config.ForwardConfig, name: str) -> int:
    (value,) = (text.removeprefix(f"{name}=") for text in chosen.definitions if text.startswith(f"{name}="))
    return int(value)


def odd_way(chosen: config.BackwardConfig | config.ForwardConfig) -> int:
    """ODD_ROWS of element.cuh; 0: these are no odd rows."""
    return next((int(text[-1]) for text in chosen.definitions if text.startswith("ODD_ROWS=")), 0)


def takes_part(definitions: tuple[str, ...]) -> bool:
    """Whether kernels know the lanes of a row that takes a warp or less when they are compiled."""
    return any(text.startswith("PART_OF_WARP=") for text in definitions)


def team_threads(vector: bool, column_bytes: int) -> int:
    """kTeamThreads of staged.cuh, 1 where there are no teams. A team of several groups is whole, or the block."""
    if not vector or column_bytes < 128:
        return 1
    return 64 if column_bytes % 128 == 0 else 128


def at_once_on_h200(chosen):
    """Blocks of at most 256 threads on each multiprocessor, or clusters or gangs of such a block on each: as the driver
    says."""
    if chosen.gang:
        return 132 // chosen.slabs
    if chosen.cluster == 1:
        return 132 * max(1, config.common.STAGED_MAX_THREADS // chosen.threads)
    return config.walkers._CLUSTERS_OF_132[chosen.cluster]


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return DEVICES[request.param]


@functools.cache
def compiled_for(device):
    return {(v.file, v.definitions) for v in variants(device.compute_capability)}


@pytest.mark.parametrize(("norm", "rows"), [("layernorm", 4096), ("rmsnorm", 4096), ("rmsnorm", 1 << 20)])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("dy", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
def test_backward_configs_hold_their_rows(device, x, dy, alignment, norm, rows):
    compiled = compiled_for(device)
    for columns, (x_gap, dy_gap) in product(COLUMNS, ((0, 0), (8, 0), (0, 16))):
        problem = replace(
            backward(columns, x, dy, rows, norm), x_row_stride=columns + x_gap, dy_row_stride=columns + dy_gap
        )
        chosen = config.backward_config(problem, alignment, device)
        at = f"{columns} columns, {x_gap} and {dy_gap} between rows: {chosen}"
        vector = "VECTOR=1" in chosen.definitions
        assert (chosen.slabs - 1) * chosen.slab_columns < columns <= chosen.slabs * chosen.slab_columns, at
        per_thread = defined(chosen, "COLUMNS_PER_THREAD")
        assert chosen.slab_columns <= chosen.group_threads * per_thread, at
        assert chosen.threads % chosen.group_threads == 0, at
        assert chosen.threads % 32 == 0, at
        assert chosen.group_threads % 32 == 0 or 32 % chosen.group_threads == 0, at
        assert chosen.shared_bytes + config.backward.STATIC_SHARED_BYTES <= device.shared_bytes, at
        assert (f"backward_{chosen.route}.cu", chosen.definitions) in compiled, at
        assert chosen.shared_bytes >= 32 * chosen.threads, f"the final reduction has no room: {at}"
        if chosen.route == "staged":
            assert device.has_clusters, at
            assert config.backward.STAGED_LEAST_STAGES <= chosen.stages <= config.common.STAGED_MOST_STAGES, at
            assert chosen.threads <= config.common.STAGED_MAX_THREADS, at
            assert chosen.groups == 1 or chosen.slabs == 1, at
            blocks = device.shared_bytes // (chosen.alone_shared_bytes + config.backward.STATIC_SHARED_BYTES)
            assert blocks == blocks_at_once(chosen, device), f"of both kinds as many on a multiprocessor: {at}"
            assert chosen.alone_shared_bytes <= chosen.shared_bytes, at
            assert chosen.slabs == chosen.cluster or (chosen.gang and chosen.cluster == 1), at
            team = team_threads(vector, per_thread * config.common.compute_itemsize(x))
            whole_teams = chosen.threads < team or chosen.threads % team == 0
            assert chosen.groups == 1 or chosen.group_threads >= team or whole_teams, at
        if chosen.route == "direct":
            assert chosen.threads <= defined(chosen, "MAX_THREADS"), at
        if vector:
            width = config.common.vector_width(x, dy)
            assert alignment == 16, at
            assert columns % width == 0, at
            assert chosen.slab_columns % width == 0, at


@pytest.mark.parametrize(
    ("columns", "name", "cluster", "per_thread"),
    [
        (7168, "bfloat16", 1, 28),
        (14336, "float16", 2, 28),
        (28672, "bfloat16", 4, 28),
        (57344, "bfloat16", 8, 32),  # not timed
        (896, "bfloat16", 1, 28),
        (3584, "bfloat16", 1, 28),
        (7160, "bfloat16", 1, 28),  # some lanes have fewer
        (6152, "bfloat16", 1, 28),  # more than 24 cover
        (7176, "bfloat16", 1, 32),  # more than 28 cover
        (14328, "bfloat16", 2, 32),  # in pairs where they are all there
        (13312, "bfloat16", 2, 32),
        (28656, "float16", 4, 28),
        (25600, "bfloat16", 4, 28),
        (1792, "float32", 1, 28),
        (3584, "float32", 1, 28),
        (7168, "float32", 1, 28),
        (7160, "float32", 2, 32),
        (14336, "float32", 2, 28),  # its blocks have all their shared memory in use
        (14328, "float32", 4, 32),
        (28672, "float32", 8, 32),  # four blocks have no room
        (896, "float32", 1, 32),  # of one warp
    ],
)
def test_28_columns_a_thread_in_place_of_32(columns, name, cluster, per_thread):
    """In vectors, of LayerNorm with db; where they nearly fill lanes of few blocks, it keeps pace. Where x and dy
    differ, and on other devices, as ever; RMSNorm where some lanes have fewer."""
    hopper = DEVICES["sm_90"]
    chosen = config.backward_config(backward(columns, name, name), 16, hopper)
    assert (chosen.route, chosen.cluster, defined(chosen, "COLUMNS_PER_THREAD")) == ("staged", cluster, per_thread)
    if per_thread == 28:
        filled = chosen.slab_columns / (28 * chosen.group_threads)
        assert (chosen.lead > 0) == (filled >= (0.87 if chosen.group_threads == 32 else 0.925) and cluster <= 2)
        assert name != "float32" or columns == 28 * chosen.group_threads * cluster
        assert name == "float32" or chosen.threads == 256
    problem = backward(columns, name, name)
    others = {
        "rmsnorm": config.backward_config(replace(problem, norm="rmsnorm", want_db=False), 16, hopper),
        "without db": config.backward_config(replace(problem, want_db=False), 16, hopper),
        "mixed": config.backward_config(
            backward(columns, name, "float16" if name == "float32" else "float32"), 16, hopper
        ),
        "another device": config.backward_config(problem, 16, DEVICES["sm_120"]),
    }
    assert {which: defined(other, "COLUMNS_PER_THREAD") for which, other in others.items()} == {
        which: 16 if other.route != "staged" else 28 if (columns, which) == (6152, "rmsnorm") else 32
        for which, other in others.items()
    }


@pytest.mark.parametrize(
    ("columns", "per_thread", "paced"),
    [
        (776, 32, True),  # of one warp
        *((n, 28, True) for n in (1544, 1664, 3080, 3328, 6152, 6656)),
        *((n, 32, True) for n in (1672, 1792, 3336, 6664)),  # nearly filled
        (12320, 32, True),  # of two blocks
    ],
)
def test_rmsnorm_has_28_columns_a_thread_where_lanes_are_idle(columns, per_thread, paced):
    """In one block, on compute capability 9.0 where memory is fast."""
    problem = backward(columns, "bfloat16", "bfloat16", 1 << 20, "rmsnorm")
    for device, expected in (("sm_90", per_thread), ("sm_90_slow", 32), ("sm_100", 32)):
        chosen = config.backward_config(problem, 16, DEVICES[device])
        assert (defined(chosen, "COLUMNS_PER_THREAD"), chosen.lead > 0) == (expected, paced), device


@pytest.mark.parametrize(
    ("norm", "columns", "name", "cluster", "per_thread", "paced"),
    [
        *(("layernorm", n, "bfloat16", 1, 44, True) for n in (1288, 1408, 2568, 2816, 5128, 5632, 10248, 11264)),
        *(("layernorm", n, "float16", cluster, 44, True) for n, cluster in ((20488, 2), (22528, 2), (45056, 4))),
        *(("layernorm", n, "bfloat16", 8, 44, True) for n in (81928, 90112)),
        *(("layernorm", n, "bfloat16", 16, 44, False) for n in (163848, 180224)),
        *(("rmsnorm", n, "bfloat16", 8, 44, True) for n in (81928, 90112)),
        *(("rmsnorm", n, "float16", 8, 48, True) for n in (90120, 98304)),
        *(("rmsnorm", n, "bfloat16", 8, 52, True) for n in (98312, 106496)),
        *(("rmsnorm", n, "bfloat16", 8, 56, True) for n in (106504, 113664)),
        *(("rmsnorm", n, "bfloat16", 16, 40, False) for n in (131080, 163840)),
        *(("rmsnorm", n, "bfloat16", 16, 44, True) for n in (163848, 180224)),
        *(("rmsnorm", n, "bfloat16", 16, 48, True) for n in (180232, 196608)),
        *(("rmsnorm", n, "float16", 16, 52, True) for n in (196616, 212992)),
        *(("rmsnorm", n, "bfloat16", 16, 56, True) for n in (213000, 221184)),
    ],
)
@ELSEWHERE
def test_more_than_40_columns_a_thread_where_memory_is_fast(norm, columns, name, cluster, per_thread, paced):
    """Of x and dy of one 16-bit type in vectors, LayerNorm with db, on compute capability 9.0; else fewer, as where
    memory is slow."""
    problem = backward(columns, name, name, 1 << 20, norm)
    chosen = config.backward_config(problem, 16, DEVICES["sm_90"])
    assert (chosen.cluster, chosen.per_thread, chosen.gang) == (cluster, per_thread, False)
    assert (chosen.lead > 0) == ("PACED=1" in chosen.definitions) == paced
    assert chosen.threads == 256  # also in long launches, where less is in flight otherwise
    others = [config.backward_config(problem, 16, DEVICES[device]) for device in ("sm_90_slow", "sm_100")]
    others.append(config.backward_config(backward(columns, name, "float32", 1 << 20, norm), 16, DEVICES["sm_90"]))
    others.append(config.backward_config(replace(problem, x_row_stride=columns + 1), 2, DEVICES["sm_90"]))
    if norm == "layernorm":
        others.append(config.backward_config(replace(problem, want_db=False), 16, DEVICES["sm_90"]))
    assert all(other.per_thread <= 40 for other in others)


@pytest.mark.parametrize(
    ("name", "columns", "per_thread", "lanes"),
    [
        ("bfloat16", 16, 16, 1),
        ("bfloat16", 17, 16, 2),
        *(("bfloat16", columns, 12, 4) for columns in (33, 47)),
        *(("float16", columns, 16, 4) for columns in (48, 49)),  # from an odd element on 48 take one more
        ("bfloat16", 65, 12, 8),
        ("float16", 97, 16, 8),
        *(("bfloat16", columns, 20, 8) for columns in (129, 159)),
        *(("float16", columns, 24, 8) for columns in (160, 161)),
        ("bfloat16", 193, 16, 16),
        *(("bfloat16", columns, 20, 16) for columns in (257, 319)),
        *(("float16", columns, 24, 16) for columns in (320, 321, 383)),
        *(("bfloat16", columns, 16, 32) for columns in (384, 385, 512)),
        *(("float32", columns, 16, lanes) for columns, lanes in ((33, 4), (65, 8), (257, 32), (350, 32))),
        *(("float64", columns, 8, lanes) for columns, lanes in ((33, 8), (129, 32))),
    ],
)
def test_short_rows_off_16_bytes_leave_few_lanes_without_a_column(name, columns, per_thread, lanes):
    for problem in (backward(columns, name, name), backward(columns, name, name, norm="rmsnorm")):
        chosen = config.backward_config(problem, 2, DEVICES["sm_90"])
        assert (defined(chosen, "COLUMNS_PER_THREAD"), chosen.group_threads) == (per_thread, lanes)
        usual = 8 if name == "float64" else 16
        assert takes_part(chosen.definitions) == (per_thread != usual)
    mixed = config.backward_config(
        backward(columns, name, "float64" if name != "float64" else "float32"), 2, DEVICES["sm_90"]
    )
    assert defined(mixed, "COLUMNS_PER_THREAD") == usual


@pytest.mark.parametrize(
    ("name", "columns", "per_thread", "lanes", "threads_at_once"),
    [
        ("bfloat16", 17, 16, 2, 256),  # few lanes
        ("bfloat16", 33, 12, 4, 512),
        ("float16", 129, 20, 8, 512),
        ("float16", 161, 24, 8, 384),
        ("bfloat16", 193, 16, 16, 512),
        ("bfloat16", 257, 20, 16, 512),
        *(("float16", columns, 24, 16, 384) for columns in (321, 383)),
        ("float16", 384, 16, 32, 512),
        ("bfloat16", 511, 16, 32, 512),
        ("float32", 33, 16, 4, 256),
        ("float32", 65, 12, 8, 512),
        ("float32", 257, 20, 16, 512),
        ("float32", 350, 12, 32, 512),
        ("float32", 450, 16, 32, 256),
        ("float64", 129, 8, 32, 256),
    ],
)
def test_short_rows_off_16_bytes_in_the_forward_pass(name, columns, per_thread, lanes, threads_at_once):
    for norm in ("rmsnorm", "layernorm"):
        chosen = config.forward_config(forward_of(backward(columns, name, name, norm=norm)), 2, DEVICES["sm_90"])
        assert (defined(chosen, "COLUMNS_PER_THREAD"), chosen.group_threads) == (per_thread, lanes)
        assert chosen.threads * blocks_at_once(chosen, DEVICES["sm_90"]) == threads_at_once


@pytest.mark.parametrize(
    ("columns", "per_thread", "group", "cluster"),
    [
        *((columns, 20, 32, 1) for columns in (513, 640)),
        *((columns, 24, 32, 1) for columns in (641, 768)),
        (769, 28, 32, 1),
        (897, 32, 32, 1),
        (1025, 36, 32, 1),
        (1153, 40, 32, 1),
        (1281, 24, 64, 1),
        (3001, 24, 128, 1),
        *((columns, 32, 128, 1) for columns in (4001, 4087)),
        *((columns, 36, 128, 1) for columns in (4089, 4095)),  # four warps of 1024 have no room where a row is shifted
        (6001, 24, 256, 1),
        (8191, 36, 256, 1),
        (16385, 36, 256, 2),
        (65537, 36, 256, 8),
    ],
)
def test_rows_off_16_bytes_fill_the_lanes_of_their_warps(columns, per_thread, group, cluster):
    for norm in ("rmsnorm", "layernorm"):
        for chosen in (
            config.backward_config(backward(columns, "bfloat16", "bfloat16", norm=norm), 2, DEVICES["sm_90"]),
            config.forward_config(
                forward_of(backward(columns, "bfloat16", "bfloat16", norm=norm)), 2, DEVICES["sm_90"]
            ),
        ):
            found = defined(chosen, "COLUMNS_PER_THREAD"), chosen.group_threads, chosen.cluster
            assert found == (per_thread, group, cluster), (norm, chosen)
    other = config.backward_config(backward(columns, "bfloat16", "bfloat16"), 2, DEVICES["sm_120"])
    assert defined(other, "COLUMNS_PER_THREAD") == 16


@pytest.mark.parametrize(
    ("norm", "columns", "per_thread", "group", "cluster"),
    [
        *(("layernorm", columns, 28, 128, 2) for columns in (6145, 6212, 7160)),
        *(("layernorm", columns, 32, 128, 2) for columns in (7200, 8001)),
        ("layernorm", 12289, 28, 128, 4),
        ("layernorm", 30001, 32, 128, 8),
        ("layernorm", 57001, 28, 128, 16),
        ("layernorm", 98305, 28, 256, 16),  # more than clusters of sixteen there are not
        ("rmsnorm", 6209, 28, 128, 2),
        ("rmsnorm", 8001, 32, 256, 1),
        ("rmsnorm", 15001, 32, 128, 4),
        ("rmsnorm", 60001, 32, 128, 16),
    ],
)
def test_forward_off_16_bytes_more_blocks_of_four_warps(norm, columns, per_thread, group, cluster):
    problem = forward_of(backward(columns, "bfloat16", "bfloat16", norm=norm))
    alignment = 2 if columns % 2 else 8
    chosen = config.forward_config(problem, alignment, DEVICES["sm_90"])
    assert (defined(chosen, "COLUMNS_PER_THREAD"), chosen.group_threads, chosen.cluster) == (per_thread, group, cluster)
    newer = config.forward_config(problem, alignment, DEVICES["sm_100"])
    assert newer.group_threads == 256
    single = config.forward_config(forward_of(backward(columns, "float32", "float32", norm=norm)), 4, DEVICES["sm_90"])
    assert single.group_threads == 256


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("x", DTYPES)
def test_blocks_of_several_rows_expect_the_gaps_between_them(name: str, x: str) -> None:
    """By ROW_GAPS or, off 16 bytes, as kernels of whole warps do (kHasGaps of staged.cuh)."""
    several = 0
    for columns, gap, norm in product((*range(1, 2100, 7), *UNALIGNED), (1, 8, 20), ("rmsnorm", "layernorm")):
        of_no_gaps = backward(columns, x, x, norm=norm)
        problem = replace(of_no_gaps, x_row_stride=columns + gap, dy_row_stride=columns + gap)
        row_bytes, stride_bytes = (n * DTYPES[x].itemsize for n in (columns, columns + gap))
        alignment = math.gcd(16, row_bytes, stride_bytes)
        forward_problem = forward_of(problem)
        for chosen in (
            config.backward_config(problem, alignment, DEVICES[name]),
            config.forward_config(forward_problem, alignment, DEVICES[name]),
        ):
            is_staged = chosen.stages > 0
            if not is_staged or chosen.groups == 1:
                continue
            several += 1
            per_thread = defined(chosen, "COLUMNS_PER_THREAD")
            part = takes_part(chosen.definitions)
            whole_warps = not part and per_thread > config.common.columns_per_thread(x)
            copes = whole_warps if "VECTOR=0" in chosen.definitions else False
            assert copes or "ROW_GAPS=1" in chosen.definitions, (columns, gap, norm, chosen)
    assert several > 20 or not DEVICES[name].has_clusters


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("most_cluster", [1, 2, 4, 8])
def test_forward_rows_that_the_largest_cluster_holds_are_not_split(most_cluster, norm):
    device = DEVICES["sm_90"]._replace(most_cluster=most_cluster)
    for columns in range(513, 8192 * most_cluster, 211):
        problem = forward_of(backward(columns, "bfloat16", "bfloat16", norm=norm))
        chosen = config.forward_config(problem, 2 if columns % 2 else 8, device)
        assert chosen.kernel == "forward_staged", columns


@pytest.mark.parametrize(
    ("name", "columns", "alignment", "device", "elements"),
    [
        *(("bfloat16", columns, 8, "sm_90", 4) for columns in (4, 300, 304, 1004, 12292, 131068)),
        *(("float16", columns, 16, "sm_90_slow", 4) for columns in (300, 4100)),  # with gaps between rows
        *(("bfloat16", columns, 4, "sm_100", 2) for columns in (2, 150, 300, 304, 4098)),
        *(("bfloat16", 150, alignment, "sm_120", 2) for alignment in (4, 8, 16)),
        *(("bfloat16", columns, 16, "sm_90", 1) for columns in (129, 1001, 304)),  # 304: vectors
        *(("bfloat16", columns, 2, "sm_90", 1) for columns in (300, 4100)),
        *(("float32", columns, 8, "sm_90", 2) for columns in (50, 510, 512)),
        *(("float32", columns, 8, "sm_90", 1) for columns in (51, 514, 4098)),
        ("float32", 50, 4, "sm_90", 1),
        ("float64", 50, 8, "sm_90", 1),
        ("bfloat16", 300, 8, "sm_80", 1),
    ],
)
def test_rows_off_16_bytes_are_read_in_as_many_elements_as_they_allow(name, columns, alignment, device, elements):
    """Short rows with large gaps between them, which take the direct route, too: else their bits would be others."""
    for norm, gap in product(("rmsnorm", "layernorm"), (0, 64 * columns)):
        problem = replace(backward(columns, name, name, norm=norm), x_row_stride=columns + gap)
        for chosen in (
            config.backward_config(problem, alignment, DEVICES[device]),
            config.forward_config(forward_of(problem), alignment, DEVICES[device]),
        ):
            assert config.common.narrow_of(chosen.definitions) == elements, (norm, gap, chosen)
            vectors = alignment == 16 and columns % 8 == 0
            assert ("VECTOR=1" in chosen.definitions) == vectors
    backward_of = functools.partial(backward, columns, name)
    for problem in (backward_of("float64" if name != "float64" else "float32"), backward_of(name)):
        chosen = config.backward_config(problem, alignment, DEVICES[device])
        of_one_type = problem.x_dtype == problem.dy_dtype
        assert config.common.narrow_of(chosen.definitions) == (elements if of_one_type else 1)
        if of_one_type and not vectors:
            assert config.column_blocks.vector_of(chosen, problem) == elements


@pytest.mark.parametrize(
    ("columns", "alignment", "backward_lanes", "forward_lanes"),
    [
        (20, 8, (16, 2), (16, 2)),
        (36, 8, (20, 2), (20, 2)),
        (38, 4, (12, 4), (12, 4)),
        (68, 8, (20, 4), (20, 4)),
        (66, 4, (20, 4), (12, 8)),
        (132, 8, (20, 8), (20, 8)),
        (150, 4, (20, 8), (20, 8)),
        (178, 4, (12, 16), (24, 8)),
        (180, 8, (12, 16), (24, 8)),
        (300, 8, (20, 16), (20, 16)),
        (340, 8, (12, 32), (24, 16)),
        (500, 8, (16, 32), (16, 32)),
    ],
)
def test_short_rows_of_several_elements_an_access(columns, alignment, backward_lanes, forward_lanes):
    """Columns a thread and lanes. The forward pass has as many threads however few lanes hold a row."""
    for norm in ("rmsnorm", "layernorm"):
        problem = backward(columns, "bfloat16", "bfloat16", norm=norm, rows=1 << 20)
        chosen = config.backward_config(problem, alignment, DEVICES["sm_90"])
        assert (chosen.per_thread, chosen.group_threads) == backward_lanes
        chosen = config.forward_config(forward_of(problem), alignment, DEVICES["sm_90"])
        assert (defined(chosen, "COLUMNS_PER_THREAD"), chosen.group_threads) == forward_lanes
        threads = chosen.threads * blocks_at_once(chosen, DEVICES["sm_90"])
        assert threads == (384 if forward_lanes[0] == 24 else 512)


@pytest.mark.parametrize(
    ("columns", "per_thread", "rmsnorm", "layernorm"),
    [
        (300, 20, False, False),
        (516, 20, True, False),
        (700, 24, True, False),
        (1004, 32, True, True),
        (2500, 40, True, True),
        (4100, 36, True, True),
        (12292, 28, True, False),
    ],
)
def test_longer_rows_of_several_elements_an_access_keep_pace(columns, per_thread, rmsnorm, layernorm):
    for norm, paced in (("rmsnorm", rmsnorm), ("layernorm", layernorm)):
        problem = backward(columns, "bfloat16", "bfloat16", norm=norm, rows=1 << 20)
        chosen = config.backward_config(problem, 8, DEVICES["sm_90"])
        assert chosen.per_thread == per_thread
        assert ("PACED=1" in chosen.definitions, chosen.lead > 0) == (paced, paced)
        of_elements = config.backward_config(problem, 2, DEVICES["sm_90"])
        assert odd_way(of_elements) or of_elements.lead == 0


def test_rmsnorm_forward_has_as_many_threads_in_several_elements_as_in_vectors():
    """Timed in 16-bit types; LayerNorm takes as long."""
    for columns, alignment, norm, threads in (
        (4098, 4, "rmsnorm", 384),
        (4098, 4, "layernorm", 256),
        (4097, 2, "rmsnorm", 384),
        (65537, 2, "rmsnorm", 256),
        (2052, 8, "rmsnorm", 384),
    ):
        chosen = config.forward_config(
            forward_of(backward(columns, "bfloat16", "bfloat16", norm=norm)), alignment, DEVICES["sm_90"]
        )
        assert chosen.threads * blocks_at_once(chosen, DEVICES["sm_90"]) == threads, (columns, norm)


def test_rows_start_at_multiples_of_what_their_strides_and_addresses_share() -> None:
    launch = pytest.importorskip("cupynorm.cuda.launch", exc_type=ImportError)
    for columns, x_stride, out_stride, offset, expected in (
        (304, 304, 304, 0, 16),
        (300, 300, 300, 0, 8),
        (300, 304, 304, 0, 16),
        (300, 304, 300, 0, 8),
        (300, 302, 300, 0, 4),
        (304, 304, 304, 4, 4),
        (304, 304, 304, 8, 8),
        (304, 304, 304, 8 | 2, 2),
        (129, 129, 129, 0, 2),
    ):
        strides = {"x_row_stride": x_stride, "dy_row_stride": x_stride, "out_row_stride": out_stride}
        problem = replace(backward(columns, "bfloat16", "bfloat16"), **strides)
        for offsets in product((0, offset), repeat=3):
            if functools.reduce(operator.or_, offsets) == offset:
                assert launch._alignment(problem, offsets, [0]) == expected, (columns, x_stride, out_stride, offsets)
        # w and b matter only where they would be read in vectors.
        assert launch._alignment(problem, [0, offset, 0], [2, 0]) == min(8, expected)
    wide = replace(backward(300, "bfloat16", "float32"), dy_row_stride=301)
    assert launch._alignment(wide, [0, 0, 0], [0]) == 4


@pytest.mark.parametrize(
    ("offsets", "strides", "backward_way", "forward_way"),
    [
        ((0, 0, 0), (301, 301, 301), 1, 1),
        ((2, 2, 2), (300, 300, 300), 1, 1),
        ((2, 6, 14), (302, 300, 304), 1, 1),
        ((2, 2, 0), (301, 301, 301), 2, 2),
        ((0, 0, 0), (301, 301, 300), 2, 2),
        ((0, 2, 0), (301, 301, 301), 3, 1),
        ((0, 0, 0), (301, 302, 301), 3, 1),
        ((0, 0, 2), (301, 302, 301), 3, 2),
    ],
)
def test_odd_rows_are_read_in_words_where_they_start_alike(offsets, strides, backward_way, forward_way) -> None:
    """x and dy at the same half of a word; dx, or y, there or not."""
    launch = pytest.importorskip("cupynorm.cuda.launch", exc_type=ImportError)
    named = dict(zip(("x_row_stride", "dy_row_stride", "out_row_stride"), strides, strict=True))
    problem = replace(backward(300, "bfloat16", "bfloat16"), **named)
    assert launch._odd_access(problem, offsets).odd == backward_way
    assert launch._odd_access(forward_of(problem), (offsets[0], offsets[2])).odd == forward_way
    assert launch._odd_access(replace(problem, want_dx=False), offsets).odd == (3 if backward_way == 3 else 1)
    # A single row has no stride that counts.
    ways = [
        launch._odd_access(replace(problem, rows=1), offsets).odd
        for problem in (problem, backward(300, "float16", "float16"))
    ]
    assert ways[0] == ways[1]


def columns_of_warps(columns: int, warps: int) -> list[int]:
    """WarpColumns of columns.cuh."""
    each, rest = divmod((columns + 1) // 2, warps)
    ends = [min(columns, 2 * ((warp + 1) * each + min(warp + 1, rest))) for warp in range(warps)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("which", ["sm_90", "sm_90_slow", "sm_100"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_odd_rows_come_in_pairs(name, which):
    """All of a thread's pairs are columns but in the first and the last two or three: what the kernels take for
    granted. And a row is split alike however its company lies, so that it has the same bits."""
    device, full_warps = DEVICES[which], (512, 640, 768, 896, 1024, 1152, 1280)
    ends = {n + m for n in (33, 48, 64, 96, 128, 160, 192, 256, 320, *range(384, 1300, 128)) for m in (-1, 0, 1)}
    warps_of_row = (2, 4, 8, 16, 32, 64, 128)
    ends |= {warps * n * 32 + m for warps in warps_of_row for n in range(20, 44, 4) for m in (-9, -2, -1, 0, 1, 9)}
    lengths = ends | {*range(1, 1300, 31), *range(1300, 42000, 2003), *range(42001, 170000, 8005)}
    for columns, norm in product(sorted(lengths), ("rmsnorm", "layernorm")):
        dense = backward(columns, name, name, norm=norm, rows=1 << 16)
        splits = set[tuple[int, ...]]()
        for gap, odd in product((0, 1, 2, 9 * columns), config.common.ODD):
            problem = replace(dense, x_row_stride=columns + gap, dy_row_stride=columns + gap)
            for chosen in (
                config.backward_config(problem, 2, device, odd),
                config.forward_config(forward_of(problem), 2, device, odd),
            ):
                of_backward = isinstance(chosen, config.BackwardConfig)
                direct = chosen.route == "direct" if of_backward else chosen.kernel == "forward_direct"
                way, most_warps = odd_way(chosen), 32 if of_backward else 128
                pairs = 33 <= (columns | 1) <= most_warps * (32 * 40 - 2) + 1 and columns not in full_warps
                assert (way > 0) == pairs, (columns, gap, odd)
                if not pairs:
                    continue
                each, threads = defined(chosen, "COLUMNS_PER_THREAD"), chosen.group_threads
                splits.add((of_backward, each, threads, chosen.cluster if not direct else 1))
                assert way == (3 if direct else odd.odd), (columns, gap, odd)
                whole = each > 16 and not takes_part(chosen.definitions)
                lanes, warps, last_pairs = min(threads, 32), max(1, threads // 32), 3 if whole else 2
                slab = columns if direct else chosen.slab_columns
                for first in range(0, columns, slab):
                    for held in columns_of_warps(min(slab, columns - first), warps):
                        assert lanes * (each // 2 - last_pairs) <= held // 2, chosen
                        assert held | 1 <= lanes * each, chosen
                if not direct:
                    slack = config.common.ODD_SLACK_BYTES
                    assert slack >= 4 * lanes * last_pairs
                    row_bytes = config.common.part_bytes(name, False, chosen.groups * slab)
                    ring_bytes = chosen.stages * row_bytes + slack
                    assert chosen.shared_bytes >= ring_bytes
                    assert not of_backward or chosen.alone_shared_bytes >= ring_bytes + slab * 4
        assert len({split[0] for split in splits}) == len(splits), columns


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 131, 132])
@pytest.mark.parametrize("columns", [33, 129, 1001, 1301, 2047, 8191, 12289, 33001, 65537, 131073])
def test_the_rows_of_a_walker_start_alike(columns, multiprocessors):
    """Of odd rows that are read by words: from one step to the next an even number of rows, or there is no next."""
    device = DEVICES["sm_90"]._replace(multiprocessors=multiprocessors)
    found = 0
    for rows, want_dx, norm in product((1, 2, 3, 4, 5, 9, 131, 530, 20001), (True, False), ("rmsnorm", "layernorm")):
        problem = replace(backward(columns, "bfloat16", "bfloat16", rows=rows, norm=norm), want_dx=want_dx)
        chosen = config.backward_config(problem, 2, device)
        of_forward = config.forward_config(forward_of(problem), 2, device)
        at_once = max(1, multiprocessors * blocks_at_once(chosen, device) // chosen.cluster)
        walkers = config.grid(chosen, problem, at_once, device).walkers
        forward_walkers = config.forward_walkers(of_forward, rows, at_once, device)
        for one, number in ((chosen, walkers), (of_forward, forward_walkers)):
            if odd_way(one) in (1, 2):
                found += 1
                assert number * one.groups % 2 == 0 or number * one.groups >= rows, (rows, norm, one)
    assert found or columns > 8191


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "device", "warps"),
    [
        ("rmsnorm", 16650, 1001, "sm_90", 12),
        ("rmsnorm", 166500, 897, "sm_90", 12),
        ("rmsnorm", 4162, 1001, "sm_90", 8),  # few steps
        ("rmsnorm", 166500, 1001, "sm_90_slow", 8),
        ("rmsnorm", 166500, 1001, "sm_100", 8),
        ("layernorm", 166500, 1001, "sm_90", 8),
        ("rmsnorm", 81420, 2047, "sm_90", 8),
        ("rmsnorm", 166500, 1100, "sm_90", 8),  # 36 columns a thread
        ("rmsnorm", 166500, 801, "sm_90", 8),  # 28
    ],
)
def test_rows_of_one_warp_off_16_bytes_have_more_warps_where_memory_is_fast(norm, rows, columns, device, warps):
    chosen = config.backward_config(backward(columns, "bfloat16", "bfloat16", rows=rows, norm=norm), 2, DEVICES[device])
    assert chosen.threads * blocks_at_once(chosen, DEVICES[device]) == 32 * warps


@pytest.mark.parametrize(
    ("norm", "columns", "name", "stages"),
    [
        ("rmsnorm", 8191, "bfloat16", (4, 3)),
        ("rmsnorm", 9001, "float16", (4, 3)),
        ("rmsnorm", 33001, "bfloat16", (4, 3)),
        ("rmsnorm", 4095, "bfloat16", (3, 3)),
        ("rmsnorm", 10001, "bfloat16", (4, 3)),
        *(("rmsnorm", columns, "bfloat16", (4, 3)) for columns in (892, 3556, 7105, 28420)),  # lengths before have four
        *(("rmsnorm", columns, "bfloat16", (4, 4)) for columns in (7000, 28001)),
        ("rmsnorm", 1401, "bfloat16", (3, 3)),  # 24 columns a thread
        ("rmsnorm", 65537, "bfloat16", (4, 3)),
        ("rmsnorm", 130052, "bfloat16", (4, 4)),  # where memory is slow a gang, as these have everywhere
        ("rmsnorm", 8191, "float32", (3, 3)),
        ("layernorm", 1001, "bfloat16", (4, 3)),
        ("layernorm", 4095, "bfloat16", (4, 3)),
        ("layernorm", 16385, "bfloat16", (4, 3)),
        ("layernorm", 3001, "bfloat16", (3, 3)),  # 24
        ("layernorm", 701, "bfloat16", (3, 3)),
        ("layernorm", 7105, "float16", (4, 3)),
        ("layernorm", 65537, "bfloat16", (4, 3)),
    ],
)
def test_a_stage_more_off_16_bytes_where_memory_is_fast(norm, columns, name, stages):
    problem = backward(columns, name, name, norm=norm)
    found = tuple(config.backward_config(problem, 2, DEVICES[which]).stages for which in ("sm_90", "sm_90_slow"))
    assert found == stages


def apart(columns: int, name: str, rows: int, norm: str, gap: int = 64) -> NormProblem:
    dense = backward(columns, name, name, rows=rows, norm=norm)
    return replace(dense, x_row_stride=columns + gap, dy_row_stride=columns + gap)


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "name", "gap", "fast", "slow"),
    [
        # blocks of one warp: one to four on a multiprocessor, in long launches all
        ("rmsnorm", 1302, 768, "bfloat16", 64, 261, 261),
        ("rmsnorm", 1562, 640, "bfloat16", 64, 391, 391),
        ("layernorm", 4069, 1024, "bfloat16", 64, 509, 509),
        ("rmsnorm", 9000, 768, "bfloat16", 64, 1000, 500),
        ("rmsnorm", 16276, 1024, "bfloat16", 64, 1018, 526),
        ("layernorm", 48828, 1024, "bfloat16", 64, 1039, 1039),
        ("layernorm", 260417, 640, "bfloat16", 8, 1056, 528),  # no pace
        ("rmsnorm", 3255, 640, "float32", 64, 465, 465),
        # of two: one to three
        ("rmsnorm", 1465, 2048, "bfloat16", 64, 367, 367),
        ("rmsnorm", 4069, 2048, "bfloat16", 64, 370, 370),
        ("layernorm", 8138, 1536, "bfloat16", 64, 509, 388),
        ("rmsnorm", 24414, 2048, "bfloat16", 64, 520, 520),
        # of four
        ("layernorm", 2713, 3072, "bfloat16", 64, 247, 247),
        # off 16 bytes
        ("rmsnorm", 4163, 1001, "bfloat16", 201, 528, 528),
        ("rmsnorm", 16650, 1001, "bfloat16", 201, 1056, 1056),
    ],
)
def test_walkers_of_rows_that_lie_apart(norm, rows, columns, name, gap, fast, slow):
    problem = apart(columns, name, rows, norm, gap)
    for device, expected in ((DEVICES["sm_90"], fast), (DEVICES["sm_90_slow"], slow)):
        chosen = config.backward_config(problem, 16 if columns % 8 == 0 else 2, device)
        at_once = 132 * blocks_at_once(chosen, device)
        assert (chosen.groups, config.grid(chosen, problem, at_once, device)) == (1, config.Grid(expected)), device


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "name", "expected"),
    [
        ("rmsnorm", 1100, 1024, "bfloat16", True),  # one warp
        ("rmsnorm", 1101, 1024, "bfloat16", False),
        ("layernorm", 1400, 1536, "bfloat16", True),  # two
        ("layernorm", 1401, 1536, "bfloat16", False),
        ("layernorm", 1200, 1536, "float32", False),
        ("layernorm", 1356, 3072, "bfloat16", True),  # four
        ("rmsnorm", 2001, 3072, "bfloat16", False),
    ],
)
def test_column_blocks_beside_rows_that_lie_apart(norm, rows, columns, name, expected):
    """Of at most APART_ROWS; rows without gaps have them here in any case."""
    device = DEVICES["sm_90_slow"]
    problem = apart(columns, name, rows, norm)
    chosen = config.backward_config(problem, 16, device)
    found = config.grid(chosen, problem, 132 * blocks_at_once(chosen, device), device)
    assert (found.column_blocks > 0) == expected
    dense = backward(columns, name, name, rows=rows, norm=norm)
    chosen = config.backward_config(dense, 16, device)
    assert config.grid(chosen, dense, 132 * blocks_at_once(chosen, device), device).column_blocks > 0


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "expected"),
    [
        ("layernorm", 781, 1280, True),  # one warp: at any number of a thread's rows
        ("layernorm", 977, 1024, True),
        ("layernorm", 1360, 1536, True),  # two
        ("layernorm", 1200, 3584, True),  # four: at no more than of other rows
        ("layernorm", 1721, 3584, False),
        ("rmsnorm", 1721, 3584, True),
    ],
)
def test_column_blocks_beside_rows_that_lie_apart_where_memory_is_fast(norm, rows, columns, expected):
    device = DEVICES["sm_90"]
    problem = apart(columns, "bfloat16", rows, norm)
    chosen = config.backward_config(problem, 16, device)
    found = config.grid(chosen, problem, 132 * blocks_at_once(chosen, device), device)
    assert (found.column_blocks > 0) == expected


@pytest.mark.parametrize(
    ("norm", "columns", "name", "gap", "dense", "blocks"),
    [
        ("rmsnorm", 640, "bfloat16", 64, 3, 8),
        ("layernorm", 640, "bfloat16", 64, 4, 8),
        ("layernorm", 1001, "bfloat16", 201, 3, 8),
        ("rmsnorm", 1536, "bfloat16", 64, 3, 6),  # two warps
    ],
)
def test_forward_blocks_of_rows_that_lie_apart(norm, columns, name, gap, dense, blocks):
    for distance, expected in ((0, dense), (gap, blocks)):
        problem = forward_of(apart(columns, name, 4096, norm, distance))
        chosen = config.forward_config(problem, 16 if columns % 8 == 0 else 2, DEVICES["sm_90"])
        assert blocks_at_once(chosen, DEVICES["sm_90"]) == expected


@pytest.mark.parametrize(
    ("norm", "columns", "name", "gaps", "fast", "slow", "dense"),
    [
        ("rmsnorm", 640, "bfloat16", (8, 64), 1 / 8, 1 / 8, 1 / 4),  # steps of 1280 bytes
        ("layernorm", 640, "bfloat16", (8, 64), 0, 1 / 8, 1 / 4),
        ("layernorm", 1024, "bfloat16", (8, 64), 1 / 8, 1 / 4, 1 / 2),
        ("rmsnorm", 1024, "bfloat16", (8, 64), 1 / 8, 1 / 4, 3 / 4),
        ("layernorm", 1472, "bfloat16", (8, 64), 1 / 8, 1 / 4, 1 / 4),  # just under 3 KB
        ("rmsnorm", 1536, "bfloat16", (8, 64), 1 / 8, 3 / 8, 1 / 4),
        ("layernorm", 1536, "bfloat16", (8, 64), 1 / 4, 3 / 8, 1 / 4),
        ("rmsnorm", 1984, "bfloat16", (8, 64), 1 / 8, 3 / 8, 1 / 4),  # just under 4 KB
        ("rmsnorm", 2048, "bfloat16", (8, 64), 1 / 4, 1 / 2, 3 / 4),
        ("layernorm", 1024, "float32", (8, 64), 1 / 4, 1 / 2, 1 / 2),
        ("rmsnorm", 4096, "bfloat16", (8, 64), 3 / 4, 1 / 2, 3 / 4),  # long enough
        ("layernorm", 1001, "bfloat16", (201,), 0, 1 / 8, 1 / 4),  # off 16 bytes
        ("rmsnorm", 1501, "bfloat16", (201,), 1 / 8, 1 / 4, 1 / 4),
    ],
)
def test_what_is_drawn_of_rows_that_lie_apart(norm, columns, name, gaps, fast, slow, dense):
    """One counter hands out the steps, which here are of one row: of short ones less is drawn."""
    aligned = columns % 8 == 0
    for gap, (device, expected) in product(gaps, (("sm_90", fast), ("sm_100", fast), ("sm_90_slow", slow))):
        problem = forward_of(apart(columns, name, 100_000, norm, gap))
        chosen = config.forward_config(problem, 16 if aligned else 2, DEVICES[device])
        assert chosen.threads == chosen.group_threads
        assert chosen.drawn_part == expected, (device, gap)
    problem = forward_of(apart(columns, name, 100_000, norm, 0))
    assert config.forward_config(problem, 16 if aligned else 2, DEVICES["sm_90"]).drawn_part == dense


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(125000, 4, 0), (31250, 8, 0), (15625, 16, 64), (31250, 16, 0), (31250, 32, 64), (65104, 32, 0), (97656, 64, 64)],
)
def test_column_blocks_of_float32s_shortest_rows(rows, columns, expected):
    """FLOAT32_ROWS: lanes that a short row leaves idle sum nothing."""
    problem = backward(columns, "float32", "float32", rows=rows)
    chosen = config.backward_config(problem, 16, DEVICES["sm_90_slow"])
    assert config.grid(chosen, problem, 132, DEVICES["sm_90_slow"]).column_blocks == expected


def beside_lines(chosen: config.BackwardConfig | config.ForwardConfig) -> tuple[str, ...]:
    """Definitions, but for where in the ring rows lie, which no bits hang on."""
    return tuple(text for text in chosen.definitions if text != "OFF_LINES=1")


def what_orders_a_rows_sums(chosen: config.BackwardConfig) -> tuple[object, ...]:
    return chosen.route, beside_lines(chosen), chosen.group_threads, chosen.slab_columns, chosen.slabs, chosen.cluster


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("x", DTYPES)
def test_what_orders_a_rows_sums_does_not_depend_on_the_number_of_rows(device, x, alignment, norm):
    for columns in COLUMNS:
        many = config.backward_config(backward(columns, x, x, 1 << 20, norm), alignment, device)
        for rows in (1, 2, 3, 5, 8, 100):
            few = config.backward_config(backward(columns, x, x, rows, norm), alignment, device)
            assert what_orders_a_rows_sums(few) == what_orders_a_rows_sums(many), (columns, rows)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("name", DTYPES)
def test_no_number_of_rows_needs_another_kernel(name, norm):
    """With and without gaps, wherever in lines of memory rows lie: as compiling takes long."""
    lengths = (520, 600, 640, 760, 1000, 1032, 1264, 1296, 1520, 1864, 2032, 2056, 2208, 3304, 3920, 4032, 4080, 4448)
    for device, columns, gap, start in product(("sm_90", "sm_90_slow"), (*lengths, 8136, 16376), (0, 8, 64), (0, 16)):
        many = replace(apart(columns, name, 1 << 20, norm, gap), want_db=norm == "layernorm")
        forward = replace(forward_of(many), x_row_stride=columns + gap)
        asked_for = {
            (
                config.backward_config(replace(many, rows=rows), 16, DEVICES[device], start=start).definitions,
                config.forward_config(replace(forward, rows=rows), 16, DEVICES[device], start=start).definitions,
            )
            for rows in (1, 2, 3, 5, 8, 100, 2000, 5000, 10_000, 50_000, 1 << 20)
        }
        assert len(asked_for) == 1, (device, columns, gap, start)


def test_a_staged_block_has_no_more_groups_than_rows_but_whole_warps():
    hopper = DEVICES["sm_90"]
    for columns, rows, groups in (
        (4096, 1, 1), (4096, 2, 2), (4096, 1 << 20, 2),  # of 128 threads
        (1024, 1, 1), (1024, 3, 4), (1024, 1 << 20, 8),  # of 32
        (128, 1, 4), (128, 5, 8), (128, 1 << 20, 32),  # of 8
    ):  # fmt: skip
        chosen = config.backward_config(backward(columns, "bfloat16", "bfloat16", rows), 16, hopper)
        assert chosen.groups == groups, (columns, rows)
        assert chosen.threads % 32 == 0


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("x", DTYPES)
def test_gaps_between_long_rows_change_neither_the_kernel_nor_the_order_of_sums(device, x, alignment):
    """Without gaps a block takes several rows; room for these is no reason for another cluster. Where rows of more than
    a warp have the kernels of shorter ones, on compute capability 12, small gaps have kernels of their own."""
    for columns in (n for n in COLUMNS if n > 513):
        dense = backward(columns, x, x)
        gaps = replace(dense, x_row_stride=columns + 16)
        one, another = (config.backward_config(problem, alignment, device) for problem in (dense, gaps))
        as_short_rows = device.compute_capability[0] == 12 and "ROW_GAPS=1" in another.definitions
        asks = {"ROW_GAPS=1"} if as_short_rows else set()
        assert set(beside_lines(another)) - set(beside_lines(one)) == asks, columns
        assert set(beside_lines(one)) <= set(beside_lines(another)), columns
        assert one.group_threads == another.group_threads, columns
        assert one.slab_columns == another.slab_columns, columns


@pytest.mark.parametrize("x", DTYPES)
def test_partials_stay_within_the_workspace(device, x):
    for columns in COLUMNS:
        problem = backward(columns, x, x, rows=1 << 24)
        chosen = config.backward_config(problem, 16, device)
        walkers = config.walkers.partial_rows(chosen, problem, 2048 // chosen.cluster, device)
        assert walkers >= 1
        if walkers > 1:
            assert walkers * columns * 2 * config.common.compute_itemsize(x) <= config.walkers.WORKSPACE_BYTES


def test_no_more_walkers_than_rows(device):
    for rows in (1, 2, 7, 131, 132, 133):
        problem = backward(4096, "bfloat16", "bfloat16", rows=rows)
        chosen = config.backward_config(problem, 16, device)
        walkers = config.walkers.partial_rows(chosen, problem, 1000, device)
        assert (walkers - 1) * chosen.groups < rows


def test_walkers_left_out_make_nobody_take_a_step_more():
    """Nor would one less do, unless a quarter were left out; of many steps nobody is."""
    for steps, walkers in product(
        (1, 7, 131, 132, 133, 265, 407, 1357, 2035, 47 * 132, 48 * 132), (1, 7, 15, 66, 132, 264)
    ):
        even, each = config.walkers._evenly(steps, walkers), -(-steps // walkers)
        assert 3 / 4 * walkers <= even <= walkers, (steps, walkers)
        assert -(-steps // even) == each, (steps, walkers)
        if each >= 48:
            assert even == walkers, (steps, walkers)
        elif even > 1 and even < walkers:
            assert -(-steps // (even - 1)) > each, (steps, walkers)


def test_walkers_are_left_out_where_it_was_measured():
    device = DEVICES["sm_90"]
    rows = 4069  # two a step
    problem = backward(4096, "bfloat16", "bfloat16", rows=rows)
    for aligned, expected in ((True, 128), (False, 132)):
        chosen = config.backward_config(problem, 16 if aligned else 2, device)
        assert config.grid(chosen, problem, 132, device).walkers == expected

    def forward_walkers(columns: int, at_once: int, rows: int) -> int:
        forward = replace(
            backward(columns, "bfloat16", "bfloat16"), direction="forward", dy_dtype=None, dy_row_stride=0
        )
        return config.forward_walkers(config.forward_config(forward, 16, device), rows, at_once, device)

    assert forward_walkers(4096, 396, rows) == 396  # several blocks share a multiprocessor
    assert forward_walkers(10240, 132, 2035) == 128
    assert forward_walkers(10240, 132, 2200) == 132  # 130 would take 17 steps each, too, but the last ones are drawn
    assert forward_walkers(65536, 33, 254) == 32
    assert forward_walkers(8192, 132, 5) == 5


@pytest.mark.parametrize(("columns", "at_once"), [(8191, 132), (12289, 66), (33001, 30)])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_an_even_number_of_walkers_takes_no_more_steps(norm, columns, at_once):
    """Forward, odd rows, where none are drawn: as few steps as with as many walkers as there may be."""
    device = DEVICES["sm_90"]
    for rows in range(2, 12 * at_once):
        problem = forward_of(backward(columns, "bfloat16", "bfloat16", rows=rows, norm=norm))
        chosen = config.forward_config(problem, 2, device)
        walkers = config.forward_walkers(chosen, rows, at_once, device)
        if not config.forward_steps(chosen, rows, walkers)[2]:
            assert -(-rows // walkers) == -(-rows // min(at_once, rows)), rows
            assert walkers % 2 == 0 or walkers >= rows, rows


@pytest.mark.parametrize(
    ("name", "norm", "lead_of_two", "lead_of_four", "lead_of_eight"),
    [
        *(("sm_90_slow", "rmsnorm", 4, 4, 4), ("sm_90_slow", "layernorm", 4, 4, 4)),
        *(("sm_90", "rmsnorm", 6, 6, 6), ("sm_90", "layernorm", 6, 10, 0)),
    ],
)
@ELSEWHERE
def test_clusters_with_40_to_56_columns_a_thread_keep_pace_forward(
    name, norm, lead_of_two, lead_of_four, lead_of_eight
):
    """With 40 and 48 they have three stages in long launches, too."""
    device = DEVICES[name]
    for columns, cluster in (
        *((18440, 2), (20480, 2), (24576, 2), (40960, 4), (49152, 4), (81920, 8), (163840, 16)),
        *((28672, 2), (57344, 4), (114688, 8), (229376, 16)),
    ):
        for rows in (64, 8192):
            problem = forward_of(backward(columns, "bfloat16", "bfloat16", rows=rows, norm=norm))
            chosen = config.forward_config(problem, 16, device)
            lead = {2: lead_of_two, 4: lead_of_four}.get(cluster, lead_of_eight)
            stages = 2 if columns % 14336 == 0 and rows > 64 else 3
            assert (chosen.cluster, chosen.lead) == (cluster, lead), columns
            assert chosen.stages >= stages, columns
            assert ("PACED=1" in chosen.definitions) == (lead > 0), columns
    for columns, cluster in ((18432, 2), (36864, 4)):  # 36 columns a thread of LayerNorm keep none
        chosen = config.forward_config(forward_of(backward(columns, "float16", "float16", norm=norm)), 16, device)
        expected = (40, True) if norm == "rmsnorm" else (36, False)
        per_thread = defined(chosen, "COLUMNS_PER_THREAD")
        assert (chosen.cluster, per_thread, chosen.lead > 0) == (cluster, *expected), columns
    of_float32 = config.forward_config(forward_of(backward(40960, "float32", "float32", norm=norm)), 16, device)
    assert (of_float32.cluster, defined(of_float32, "COLUMNS_PER_THREAD"), of_float32.lead) == (4, 40, 0)


@pytest.mark.parametrize(
    ("columns", "alignment", "threads", "cluster", "stages"),
    [
        *((8191, 2, 256, 1, (3, 3)), (4095, 2, 128, 1, (2, 3)), (4100, 8, 128, 1, (2, 3)), (1001, 2, 32, 1, (2, 2))),
        *(
            (16388, 8, 256, 2, (3, 3)),
            (32769, 2, 256, 4, (3, 3)),
            (20004, 8, 256, 2, (3, 3)),
            (65540, 8, 256, 8, (3, 3)),
        ),
    ],
)
def test_stages_of_rows_off_16_bytes_in_long_forward_launches(columns, alignment, threads, cluster, stages):
    """RMSNorm, LayerNorm."""
    for norm, expected in zip(("rmsnorm", "layernorm"), stages, strict=True):
        problem = forward_of(backward(columns, "bfloat16", "bfloat16", rows=(1 << 27) // columns, norm=norm))
        chosen = config.forward_config(problem, alignment, DEVICES["sm_90"])
        assert (chosen.group_threads, chosen.cluster, chosen.stages, chosen.lead) == (threads, cluster, expected, 0)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_short_rows_are_those_that_leave_a_warp_columns_to_read(norm, aligned):
    """Of single columns; as columns.cuh, which then asks for each of them."""
    found = {
        columns: "SHORT_ROWS=1" in config.backward_config(problem, 16 if aligned else 2, DEVICES["sm_90"]).definitions
        for columns in (129, 512, 513, 1000, 1023, 1024, 1025, 1279, 1280, 1281, 4095, 10241, 65537, 131073, 262145)
        for problem in [backward(columns, "bfloat16", "bfloat16", norm=norm)]
    }
    assert not any(found.values()), "in pairs, or as long as their warps"
    mixed = backward(1000, "bfloat16", "float16", norm=norm)
    chosen = config.backward_config(mixed, 16 if aligned else 2, DEVICES["sm_90"])
    assert ("SHORT_ROWS=1" in chosen.definitions) == (not aligned)


@pytest.mark.parametrize(("x", "dy"), [*((x, x) for x in DTYPES), ("float32", "bfloat16"), ("bfloat16", "float64")])
def test_no_warp_reads_single_columns_that_are_not_there(device, x, dy):
    """What kernels compiled without SHORT_ROWS take for granted: all blocks have as many columns as a warp reads."""
    lengths = [*range(1, 2700, 7), *range(2701, 300000, 1553), *(n + m for n in LENGTHS for m in (-1, 1))]
    for columns, norm in product(lengths, ("rmsnorm", "layernorm")):
        chosen = config.backward_config(backward(columns, x, dy, norm=norm), 2, device)
        per_thread = chosen.per_thread
        part = takes_part(chosen.definitions)
        if (
            chosen.route == "staged"
            and per_thread > config.common.columns_per_thread(x)
            and not (part or odd_way(chosen))
        ):
            last = columns - (chosen.slabs - 1) * chosen.slab_columns
            reads_beyond = min(last, chosen.slab_columns) < 32 * per_thread
            assert ("SHORT_ROWS=1" in chosen.definitions) == reads_beyond, (columns, norm)
        else:
            assert "SHORT_ROWS=1" not in chosen.definitions, (columns, norm)


def bytes_with_more_rows(problem, chosen, device, width):
    """Up to which column blocks have FAST_MORE_ROWS times as many rows; `width`: elements of an access."""
    blocks, x, dy = config.column_blocks, problem.x_dtype, problem.dy_dtype
    short = problem.columns <= 32 * config.common.columns_per_thread(x.name)
    wide_dy = dy.itemsize > config.common.compute_itemsize(x.name)
    if not device.has_fast_memory or not problem.want_dx or short or wide_dy:
        return 0
    vector, with_db = "VECTOR=1" in chosen.definitions, problem.want_db or x != dy
    if problem.x_row_stride + problem.dy_row_stride > (2 if vector else 2.2) * problem.columns:
        return 0
    if not vector and x != dy:
        return blocks.FAST_TWO_TYPES_OFF_16_BYTES if chosen.slabs == 1 else 0
    if not vector:
        return blocks.FAST_OFF_16_BYTES[x.itemsize, width][with_db]
    if x.itemsize != dy.itemsize:
        if chosen.group_threads == 32 or chosen.slabs > 8:
            return 0
        full = chosen.threads == 256 or chosen.groups > 1
        gains = full and (problem.norm == "layernorm" or x.itemsize > dy.itemsize)
        return blocks.FAST_TWO_SIZES_BYTES[problem.norm] if gains else blocks.FAST_TWO_SIZES_ROWS_BYTES
    return blocks.FAST_FLOAT64_BYTES[with_db] if x == dy == np.float64 else 0


@pytest.mark.parametrize("want_dx", [True, False])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("x", "dy"), [*((x, x) for x in DTYPES), ("float64", "bfloat16"), ("float32", "float16")])
def test_column_blocks_take_all_columns(device, x, dy, alignment, want_dx):
    """By whole clusters, or blocks, that run beside the walkers, none idle, with room for what their threads add up."""
    found = 0
    shared = 0
    rows_and_columns = [*product(COLUMNS, (1, 2, 60, 500)), *product((n for n in COLUMNS if n < 4000), (2000, 9000))]
    for (columns, rows), gap, norm in product(rows_and_columns, (0, 16), ("rmsnorm", "layernorm")):
        problem = backward(columns, x, dy, rows=rows, norm=norm)
        problem = replace(problem, want_dx=want_dx, x_row_stride=columns + gap)
        chosen = config.backward_config(problem, alignment, device)
        for together in (1, 2, 3):
            row_blocks = chosen.slabs if chosen.route == "staged" else 1
            at_once = max(1, together * device.multiprocessors // row_blocks - 1)
            grid = config.grid(chosen, problem, at_once, device)
            if not grid.column_blocks:
                assert shape_of(chosen, grid) == (config.walkers.partial_rows(chosen, problem, at_once, device), 0, 0)
                continue
            found += 1
            assert chosen.route == "staged"
            assert grid.column_blocks % chosen.cluster == 0
            if want_dx:
                assert 1 <= grid.walkers <= -(-rows // chosen.groups)
                assert grid.walkers * chosen.slabs + grid.column_blocks <= at_once * chosen.slabs
            else:
                assert grid.walkers == 0
            width = config.column_blocks.vector_of(chosen, problem)
            column_threads = grid.column_threads
            assert 1 <= column_threads <= chosen.threads
            slices = -(-columns // (column_threads * width))
            if grid.row_parts > 1:
                shared += 1
                assert grid.column_blocks == slices * grid.row_parts
                assert slices <= config.common.STEP_COUNTERS * 32, "a counter for each"
            assert slices * grid.row_parts > grid.column_blocks - chosen.cluster, "a cluster of blocks without a column"
            slice_bytes = column_threads * width * min(DTYPES[x].itemsize, DTYPES[dy].itemsize)
            sectors, part = divmod(slice_bytes, config.column_blocks.SECTOR_BYTES)
            assert part == 0
            vector = "VECTOR=1" in chosen.definitions
            usual = DTYPES[x].itemsize == DTYPES[dy].itemsize == 2 and vector and chosen.slabs <= 4 and want_dx
            if sectors & (sectors - 1) and chosen.threads % column_threads:
                assert usual
                assert sectors % 2 == 0
                assert sectors >= config.column_blocks.OTHER_SLICES_LEAST_SECTORS
            with_db = norm == "layernorm" or x != dy
            blocks, slow = config.column_blocks, device.has_slow_memory
            limits = blocks.COLUMN_BLOCK_ROWS_ALONE
            if want_dx:
                limits = (blocks.COLUMN_BLOCK_ROWS if usual else blocks.COLUMN_BLOCK_ROWS_ELSE)[slow][with_db]
            float32 = x == dy == "float32" and vector and chosen.slabs <= 8 and not chosen.gang and want_dx
            if usual and chosen.groups == 1 and (slow or not with_db or chosen.threads < 256):
                limits = (float("inf"),) * 3
            if float32:
                limits = (blocks.FLOAT32_ROWS * min(1, columns / (8 * sectors)),) * 3
            few = usual and grid.row_parts == 1 and sectors > 2 and chosen.groups > 1
            if few and grid.column_blocks <= blocks.FEW_COLUMN_BLOCKS:
                limits = (blocks.FEW_COLUMN_BLOCKS_ROWS[slow][with_db],) * 3
            counts = 4 / 3 if x == dy and DTYPES[x].itemsize > 2 else 1  # two types: x is the larger
            if config.common.data_bytes(problem) <= bytes_with_more_rows(problem, chosen, device, width):
                limits = tuple(limit * blocks.FAST_MORE_ROWS for limit in limits)
            thread_rows = -(-rows * column_threads // (chosen.threads * grid.row_parts))
            thread_rows *= -(-slices * grid.row_parts // grid.column_blocks)
            assert thread_rows * counts <= limits[min(sectors, 3) - 1]
            numbers = column_threads * width * (2 if norm == "layernorm" else 1) + 16 // config.common.compute_itemsize(
                x
            )
            row_threads = chosen.threads // column_threads
            assert row_threads * numbers * config.common.compute_itemsize(x) <= chosen.alone_shared_bytes
    assert bool(found) == device.has_clusters
    sharing = alignment == 16 and want_dx and (DTYPES[x].itemsize == DTYPES[dy].itemsize == 2 or x == dy == "float32")
    assert bool(shared) == (device.has_clusters and sharing)


@pytest.mark.parametrize(
    ("norm", "columns", "megabytes", "x", "dy", "has"),
    [
        *(("layernorm", n, 3, "bfloat16", "bfloat16", True) for n in (1001, 2047)),
        *(
            (norm, n, 6, "bfloat16", "bfloat16", True)
            for norm in ("rmsnorm", "layernorm")
            for n in (4095, 12289, 16385)
        ),
        *((norm, n, 9, "float16", "float16", True) for norm in ("rmsnorm", "layernorm") for n in (4095, 8191, 12289)),
        *(
            (norm, n, 18, "bfloat16", "bfloat16", False)
            for norm in ("rmsnorm", "layernorm")
            for n in (1001, 2047, 4095, 8191)
        ),
        *(
            (norm, n, 6, "float32", "float32", True)
            for norm in ("rmsnorm", "layernorm")
            for n in (1001, 2047, 8191, 16385)
        ),
        *(
            (norm, n, 9, x, "float32" if x == "bfloat16" else "bfloat16", True)
            for norm in ("rmsnorm", "layernorm")
            for x in ("bfloat16", "float32")
            for n in (2047, 4095)
        ),
        ("rmsnorm", 12289, 12, "bfloat16", "float32", False),  # in clusters, of two types
    ],
)
def test_few_rows_of_single_columns_have_column_blocks_where_memory_is_fast(norm, columns, megabytes, x, dy, has):
    """Without gaps or with small ones; in none of these cases where memory is slow."""
    found = []
    row_bytes = columns * (2 * DTYPES[x].itemsize + DTYPES[dy].itemsize)
    problem = backward(columns, x, dy, rows=round(megabytes * 1e6 / row_bytes), norm=norm)
    for name, gap, expected in (
        ("sm_90", 0, has),
        ("sm_90_slow", 0, False),
        ("sm_90", 8, has),
        ("sm_90", columns, False),
    ):
        one = replace(problem, x_row_stride=columns + gap, dy_row_stride=columns + gap)
        chosen = config.backward_config(one, 2, DEVICES[name])
        grid = config.grid(chosen, one, DEVICES[name].multiprocessors // chosen.slabs, DEVICES[name])
        found.append((name, gap, grid.column_blocks > 0, expected))
    assert not [each for each in found if each[2] != each[3]]


MORE_COLUMN_BLOCKS = [
    # norm, columns, MB, types of x and dy, alignment, whether there are column blocks where memory is fast, and slow
    ("layernorm", 4100, 18, "bfloat16", "bfloat16", 8, True, False),
    ("rmsnorm", 33004, 25, "bfloat16", "bfloat16", 8, True, False),
    ("layernorm", 2050, 12, "float16", "float16", 4, True, False),
    ("rmsnorm", 2050, 18, "float16", "float16", 4, False, False),
    ("rmsnorm", 2047, 12, "float64", "float64", 8, True, False),
    ("layernorm", 1536, 25, "float64", "float64", 16, True, False),
    ("layernorm", 4096, 50, "float32", "bfloat16", 16, True, False),
    ("rmsnorm", 4096, 50, "float32", "bfloat16", 16, True, False),
    ("rmsnorm", 4096, 50, "bfloat16", "float32", 16, False, False),
    ("layernorm", 1024, 50, "float32", "bfloat16", 16, False, False),  # a warp
    ("layernorm", 24576, 50, "float32", "bfloat16", 16, False, False),  # 192 threads
    ("layernorm", 98304, 43, "float32", "bfloat16", 16, False, False),  # sixteen blocks
    ("layernorm", 262144, 6, "float32", "float32", 16, False, True),  # gangs, as those of 16 bits
    ("rmsnorm", 262144, 18, "float32", "float32", 16, True, True),
    ("layernorm", 81920, 25, "float32", "float32", 16, True, False),
]


@pytest.mark.parametrize(("norm", "columns", "megabytes", "x", "dy", "alignment", "fast", "slow"), MORE_COLUMN_BLOCKS)
@ELSEWHERE
def test_column_blocks_where_they_were_timed_last(norm, columns, megabytes, x, dy, alignment, fast, slow):
    row_bytes = columns * (2 * DTYPES[x].itemsize + DTYPES[dy].itemsize)
    problem = backward(columns, x, dy, rows=round(megabytes * 1e6 / row_bytes), norm=norm)
    for name, expected in (("sm_90", fast), ("sm_90_slow", slow)):
        chosen = config.backward_config(problem, alignment, DEVICES[name])
        grid = config.grid(chosen, problem, DEVICES[name].multiprocessors // chosen.slabs, DEVICES[name])
        assert (grid.column_blocks > 0) == expected, name


@pytest.mark.parametrize(
    ("columns", "name", "threads", "column_threads"),
    [
        (1536, "float64", 96, 16),  # four sectors: powers of two come first
        (24576, "float64", 192, 192),
        (40960, "float32", 160, 160),
        (57344, "float32", 224, 224),
        (114688, "float32", 224, 224),  # a slice of these is not enough for a block
    ],
)
@ELSEWHERE
def test_slices_are_as_wide_as_blocks_of_any_number_of_threads(columns, name, threads, column_threads):
    problem = backward(columns, name, name, rows=6, norm="rmsnorm")
    chosen = config.backward_config(problem, 16, DEVICES["sm_90"])
    found = config.column_blocks._column_blocks(chosen, problem, 64)
    assert (chosen.threads, found.column_threads) == (threads, column_threads)


@pytest.mark.parametrize("name", ["sm_90", "sm_90_slow"])
def test_the_gpu_tests_have_blocks_that_share_rows(name):
    """test_blocks_that_share_rows of test_cuda_runtime.py."""
    for (rows, columns), norm in product(SHARED, ("rmsnorm", "layernorm")):
        problem = backward(columns, "bfloat16", "bfloat16", rows=rows, norm=norm)
        chosen = config.backward_config(problem, 16, DEVICES[name])
        found = config.grid(chosen, problem, 264 if columns <= 512 else 132, DEVICES[name])
        assert found.row_parts > 1, (rows, columns, norm)


@pytest.mark.parametrize(
    ("name", "rows", "columns", "cluster", "column_blocks", "slices"),
    [
        *product(("sm_90", "sm_90_slow"), (10,), (262144,), (32,), (64,), (128,)),
        ("sm_90_slow", 15, 262144, 32, 64, 128),
        ("sm_90_slow", 1, 262144, 32, 96, 128),
        *product(("sm_90", "sm_90_slow"), (3,), (163840,), (20,), (80,), (80,)),
        *product(("sm_90", "sm_90_slow"), (60,), (65536,), (8,), (64,), (64,)),
    ],
)
@ELSEWHERE
def test_the_longest_rows_have_column_blocks(name, rows, columns, cluster, column_blocks, slices):
    """Also where there are more slices than blocks: a block of these takes one after the other."""
    problem = backward(columns, "bfloat16", "bfloat16", rows=rows)
    chosen = config.backward_config(problem, 16, DEVICES[name])
    found = config.grid(chosen, problem, 132 // chosen.slabs, DEVICES[name])
    assert (chosen.slabs, found.column_blocks) == (cluster, column_blocks)
    assert columns == slices * found.column_threads * 8, "a thread of these sums eight columns"


def shape_of(chosen, grid):
    """Walkers, column blocks, and threads of one of these that share a column."""
    return grid.walkers, grid.column_blocks, grid.column_threads and chosen.threads // grid.column_threads


ON_H200 = [
    # norm, rows, columns, x, dy, aligned, what the driver says of these kernels, walkers, column blocks, row threads
    ("rmsnorm", 1017, 4096, "bfloat16", "bfloat16", True, 132, (89, 43, 21)),  # so many that walkers end with them,
    ("layernorm", 1017, 4096, "bfloat16", "bfloat16", True, 132, (89, 43, 21)),
    ("layernorm", 512, 4096, "bfloat16", "bfloat16", True, 132, (100, 32, 16)),  # whose threads have as many batches,
    ("layernorm", 448, 4096, "bfloat16", "bfloat16", True, 132, (89, 43, 21)),  # or fewer
    ("layernorm", 163, 9216, "bfloat16", "bfloat16", True, 132, (96, 72, 8)),
    ("layernorm", 256, 8192, "bfloat16", "bfloat16", True, 132, (89, 43, 10)),  # in whole lines
    ("layernorm", 300, 7168, "bfloat16", "bfloat16", True, 132, (87, 45, 12)),
    ("layernorm", 581, 7168, "bfloat16", "bfloat16", True, 132, (76, 56, 16)),
    ("layernorm", 2035, 2048, "bfloat16", "bfloat16", True, 132, (84, 48, 16)),  # several share a slice's rows,
    ("layernorm", 1628, 2560, "bfloat16", "bfloat16", True, 132, (72, 60, 16)),
    ("layernorm", 1204, 5120, "bfloat16", "bfloat16", True, 132, (78, 54, 21)),
    ("layernorm", 390, 5120, "bfloat16", "bfloat16", True, 132, (78, 54, 21)),
    ("layernorm", 1760, 4736, "bfloat16", "bfloat16", True, 132, (82, 50, 21)),
    ("layernorm", 531, 19456, "bfloat16", "bfloat16", True, 66, (40, 52, 5)),  # 62 MB
    ("layernorm", 753, 19456, "bfloat16", "bfloat16", True, 66, (63, 0, 0)),  # 88 MB
    ("layernorm", 505, 20480, "bfloat16", "bfloat16", True, 66, (39, 54, 5)),
    ("layernorm", 716, 20480, "bfloat16", "bfloat16", True, 66, (66, 0, 0)),
    ("layernorm", 160, 28672, "bfloat16", "bfloat16", True, 30, (16, 56, 4)),  # 27 MB, of four blocks with 28 columns
    ("layernorm", 360, 28672, "bfloat16", "bfloat16", True, 30, (30, 0, 0)),  # 62 MB
    ("layernorm", 430, 14336, "bfloat16", "bfloat16", True, 66, (38, 56, 8)),  # 37 MB, of two
    ("layernorm", 581, 14336, "bfloat16", "bfloat16", True, 66, (65, 0, 0)),  # 50 MB
    ("layernorm", 581, 13824, "bfloat16", "bfloat16", True, 66, (44, 44, 6)),  # with 32
    ("rmsnorm", 200, 23808, "bfloat16", "bfloat16", True, 30, (18, 48, 4)),  # 29 MB, with 24
    ("rmsnorm", 350, 23808, "bfloat16", "bfloat16", True, 30, (30, 0, 0)),  # 50 MB
    ("rmsnorm", 200, 28672, "bfloat16", "bfloat16", True, 30, (20, 40, 2)),  # 34 MB, with 32 and idle lanes
    ("rmsnorm", 290, 28672, "bfloat16", "bfloat16", True, 30, (29, 0, 0)),  # 50 MB
    ("rmsnorm", 290, 32768, "bfloat16", "bfloat16", True, 30, (22, 32, 2)),  # where none are idle
    ("rmsnorm", 716, 20480, "bfloat16", "bfloat16", True, 66, (46, 40, 4)),
    ("rmsnorm", 1400, 10240, "bfloat16", "bfloat16", True, 132, (92, 40, 8)),
    ("rmsnorm", 397, 32768, "bfloat16", "bfloat16", True, 30, (29, 0, 0)),  # but not of other clusters
    ("rmsnorm", 1682, 6144, "bfloat16", "bfloat16", True, 132, (84, 48, 16)),
    ("rmsnorm", 602, 10240, "bfloat16", "bfloat16", True, 132, (92, 40, 8)),
    ("rmsnorm", 244, 4096, "bfloat16", "bfloat16", True, 132, (100, 32, 16)),  # fewer with less data,
    ("rmsnorm", 1017, 5120, "bfloat16", "bfloat16", True, 132, (92, 40, 16)),  # of whole lines,
    ("layernorm", 98, 5120, "bfloat16", "bfloat16", True, 132, (49, 40, 16)),  # not fewer, where these are few,
    ("layernorm", 63, 4096, "bfloat16", "bfloat16", True, 132, (32, 64, 32)),  # and not where all steps have a walker,
    ("rmsnorm", 1200, 1024, "bfloat16", "bfloat16", True, 132, (68, 64, 128)),  # nor of a sector,
    ("rmsnorm", 244, 4096, "float32", "float32", True, 132, (68, 64, 16)),  # nor of larger types,
    ("layernorm", 100, 8191, "bfloat16", "bfloat16", False, 132, (68, 64, 2)),  # nor off 16 bytes,
    ("rmsnorm", 64, 65536, "bfloat16", "bfloat16", True, 15, (7, 64, 2)),  # nor in larger clusters
    ("rmsnorm", 127, 32768, "bfloat16", "bfloat16", True, 30, (22, 32, 2)),
    ("layernorm", 10, 262144, "bfloat16", "bfloat16", True, 4, (2, 64, 1)),  # gangs
    ("layernorm", 16, 262144, "bfloat16", "bfloat16", True, 4, (4, 0, 0)),  # of 25 MB
    ("rmsnorm", 16, 262144, "bfloat16", "bfloat16", True, 4, (4, 0, 0)),
    ("layernorm", 4, 262144, "bfloat16", "bfloat16", True, 4, (1, 0, 0)),  # of few rows
    ("layernorm", 5, 262144, "bfloat16", "bfloat16", True, 4, (2, 64, 1)),
    ("rmsnorm", 2, 262144, "bfloat16", "bfloat16", True, 4, (1, 0, 0)),
    ("rmsnorm", 3, 262144, "bfloat16", "bfloat16", True, 4, (2, 64, 1)),
    ("layernorm", 1, 139264, "bfloat16", "bfloat16", True, 7, (1, 0, 0)),  # or one, where each block has one slice
    ("layernorm", 3, 139264, "bfloat16", "bfloat16", True, 7, (3, 68, 1)),
    ("layernorm", 5, 524288, "bfloat16", "bfloat16", True, 2, (2, 0, 0)),  # none where each would have four
    ("layernorm", 1, 131072, "bfloat16", "bfloat16", True, 7, (1, 0, 0)),  # clusters of sixteen
    ("rmsnorm", 1, 131072, "bfloat16", "bfloat16", True, 7, (1, 64, 1)),
    ("layernorm", 30, 131072, "bfloat16", "bfloat16", True, 7, (3, 64, 1)),
    ("layernorm", 39, 131072, "bfloat16", "bfloat16", True, 7, (7, 0, 0)),  # 31 MB
    ("layernorm", 10, 180224, "bfloat16", "bfloat16", True, 7, (7, 0, 0)),  # with 44 columns
    ("rmsnorm", 10, 180224, "bfloat16", "bfloat16", True, 7, (3, 64, 1)),
    ("layernorm", 16, 90120, "bfloat16", "bfloat16", True, 11, (7, 45, 1)),
    ("layernorm", 1356, 3072, "bfloat16", "bfloat16", True, 132, (84, 48, 32)),  # of 256 threads, not 128
    ("layernorm", 428, 9216, "bfloat16", "bfloat16", True, 132, (84, 96, 10)),  # of 128 threads, two together
    ("layernorm", 428, 9728, "bfloat16", "bfloat16", True, 132, (81, 51, 10)),  # of 256
    ("layernorm", 407, 10240, "bfloat16", "bfloat16", True, 132, (78, 54, 10)),
    ("layernorm", 203, 20480, "bfloat16", "bfloat16", True, 66, (39, 54, 5)),
    ("layernorm", 48, 3072, "bfloat16", "bfloat16", True, 132, (24, 48, 32)),
    ("layernorm", 100, 5120, "float32", "float32", True, 132, (92, 40, 4)),  # with few rows one on each,
    ("layernorm", 1000, 640, "bfloat16", "bfloat16", True, 264, (92, 40, 64)),  # and where few are enough
    ("rmsnorm", 4069, 1024, "bfloat16", "bfloat16", True, 132, (68, 64, 16)),  # several share a slice's rows,
    ("layernorm", 3255, 1280, "bfloat16", "bfloat16", True, 132, (52, 80, 16)),  # a power of two of these,
    ("rmsnorm", 2604, 1152, "bfloat16", "bfloat16", True, 132, (60, 72, 16)),
    ("rmsnorm", 3255, 1280, "bfloat16", "bfloat16", True, 132, (82, 50, 8)),  # or wider slices
    ("rmsnorm", 2600, 1280, "bfloat16", "bfloat16", True, 132, (52, 80, 16)),  # 20 MB
    ("layernorm", 4650, 896, "bfloat16", "bfloat16", True, 132, (76, 56, 16)),
    ("rmsnorm", 2404, 832, "bfloat16", "bfloat16", True, 132, (76, 56, 16)),
    ("layernorm", 9301, 448, "bfloat16", "bfloat16", True, 264, (152, 112, 32)),  # short rows: more than 90 blocks,
    ("rmsnorm", 9301, 448, "bfloat16", "bfloat16", True, 264, (152, 112, 32)),
    ("layernorm", 3348, 448, "bfloat16", "bfloat16", True, 264, (208, 56, 32)),  # but not of 9 MB,
    ("layernorm", 6510, 640, "bfloat16", "bfloat16", True, 264, (164, 100, 16)),  # of any number,
    ("layernorm", 16276, 256, "bfloat16", "bfloat16", True, 264, (168, 96, 32)),
    ("rmsnorm", 6510, 640, "bfloat16", "bfloat16", True, 264, (164, 100, 16)),  # without db where lanes are idle,
    ("rmsnorm", 4688, 640, "bfloat16", "bfloat16", True, 264, (184, 80, 16)),  # but not of 18 MB
    ("layernorm", 10706, 576, "bfloat16", "bfloat16", True, 264, (165, 99, 16)),  # 37 MB, idle lanes
    ("layernorm", 8759, 704, "bfloat16", "bfloat16", True, 264, (244, 0, 0)),
    ("rmsnorm", 8049, 704, "bfloat16", "bfloat16", True, 264, (165, 99, 16)),
    ("layernorm", 4037, 1032, "bfloat16", "bfloat16", True, 132, (60, 72, 16)),
    ("layernorm", 3906, 128, "float32", "float32", True, 132, (68, 64, 32)),  # of one line
    ("rmsnorm", 10417, 96, "float32", "float32", True, 264, (168, 96, 32)),
    ("layernorm", 7812, 64, "float32", "float32", True, 132, (68, 64, 32)),
    ("rmsnorm", 5208, 192, "float32", "float32", True, 264, (168, 96, 32)),
    ("layernorm", 8138, 256, "float32", "float32", True, 132, (68, 64, 16)),  # of two, in longer rows, and
    ("layernorm", 6250, 160, "float32", "float32", True, 264, (168, 96, 16)),  # of two, where five make no 96 blocks
    ("rmsnorm", 814, 2560, "float32", "float32", True, 132, (72, 60, 4)),  # of four
    ("rmsnorm", 7600, 1024, "bfloat16", "bfloat16", True, 132, (119, 0, 0)),  # but not so many
    ("rmsnorm", 32, 65536, "float32", "float32", True, 7, (7, 0, 0)),
    ("rmsnorm", 2713, 1536, "bfloat16", "bfloat16", True, 132, (84, 48, 64)),  # few enough for larger blocks alone,
    ("layernorm", 1682, 3072, "bfloat16", "bfloat16", True, 132, (84, 48, 32)),
    ("layernorm", 1356, 1536, "float32", "float32", True, 264, (168, 96, 8)),
    ("rmsnorm", 1302, 384, "bfloat16", "bfloat16", True, 132, (108, 24, 64)),
    ("layernorm", 3906, 768, "bfloat16", "bfloat16", True, 264, (168, 96, 16)),  # but not of a warp, with db
    ("layernorm", 5208, 384, "bfloat16", "bfloat16", True, 264, (168, 96, 16)),
    ("rmsnorm", 16276, 256, "bfloat16", "bfloat16", True, 264, (200, 64, 32)),
    ("layernorm", 60000, 128, "bfloat16", "bfloat16", True, 264, (235, 0, 0)),
    ("rmsnorm", 763, 4096, "bfloat16", "float32", True, 132, (68, 64, 16)),  # types of two sizes
    ("rmsnorm", 3052, 1024, "bfloat16", "float32", True, 132, (128, 0, 0)),
]


@pytest.mark.parametrize(("norm", "rows", "columns", "x", "dy", "aligned", "at_once", "expected"), ON_H200)
@ELSEWHERE
def test_column_blocks_of_an_h200(norm, rows, columns, x, dy, aligned, at_once, expected):
    """What is said beside the constants of column_blocks.py."""
    problem = backward(columns, x, dy, rows=rows, norm=norm)
    chosen = config.backward_config(problem, 16 if aligned else 2, DEVICES["sm_90"])
    assert shape_of(chosen, config.grid(chosen, problem, at_once, DEVICES["sm_90"])) == expected


@pytest.mark.parametrize(
    ("name", "rows", "columns", "column_threads"),
    [("sm_90", 512, 4096, 16), ("sm_90", 163, 9216, 16), ("sm_90_slow", 116, 7168, 20)],
)
def test_slices_are_widened_by_a_third_at_most(name, rows, columns, column_threads):
    problem, device = backward(columns, "bfloat16", "bfloat16", rows=rows, norm="layernorm"), DEVICES[name]
    chosen = config.backward_config(problem, 16, device)
    assert config.grid(chosen, problem, 132, device).column_threads == column_threads


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "fast", "slow"),
    [
        ("layernorm", 1750, 4096, True, True),  # 43 MB
        ("layernorm", 2017, 4096, True, True),  # 50 MB
        ("layernorm", 1356, 6144, True, True),  # 24 columns a thread
        ("layernorm", 2713, 3072, False, True),
        ("rmsnorm", 1506, 4096, True, True),  # 37 MB, 71 rows of a thread
        ("rmsnorm", 1750, 4096, True, True),
        ("rmsnorm", 2700, 4096, False, False),  # 66 MB
        ("rmsnorm", 3255, 1280, True, True),  # several share a slice's rows
        ("rmsnorm", 2800, 1280, True, True),
        ("layernorm", 4650, 896, True, True),
        ("layernorm", 4069, 1024, True, True),
        ("layernorm", 9000, 1024, False, False),  # 55 MB
        ("layernorm", 1823, 2560, True, True),
        ("layernorm", 1470, 2560, True, True),
        ("layernorm", 1007, 6144, True, True),  # 63, beside walkers with one
        ("rmsnorm", 1750, 2560, True, True),
        ("rmsnorm", 700, 10240, True, True),
        ("layernorm", 3000, 4096, False, True),  # 74 MB
        ("layernorm", 2000, 8192, False, True),  # 98 MB
        ("layernorm", 2300, 8192, False, False),
        ("rmsnorm", 2000, 8192, False, True),
        ("rmsnorm", 2000, 7168, False, False),  # idle lanes
    ],
)
def test_column_blocks_where_memory_is_slow(norm, rows, columns, fast, slow):
    problem = backward(columns, "bfloat16", "bfloat16", rows=rows, norm=norm)
    for name, expected in (("sm_90", fast), ("sm_90_slow", slow)):
        chosen = config.backward_config(problem, 16, DEVICES[name])
        found = config.grid(chosen, problem, 132, DEVICES[name])
        assert (found.column_blocks > 0) == expected, (name, found)


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "at_once", "expected"),
    [
        ("layernorm", 391, 2560, 132, (92, 40, 8)),  # 12 MB
        ("rmsnorm", 781, 1280, 132, (92, 40, 16)),
        ("layernorm", 2604, 384, 264, (168, 96, 16)),
        ("rmsnorm", 73, 20480, 30, (20, 40, 1)),  # 18 MB
        ("layernorm", 293, 5120, 132, (92, 40, 4)),
        ("rmsnorm", 1465, 1024, 132, (68, 64, 8)),  # large steps
        ("rmsnorm", 2035, 1024, 132, (128, 0, 0)),  # 25 MB
        ("layernorm", 64, 32768, 15, (7, 64, 1)),
        ("layernorm", 1628, 1280, 132, (72, 60, 8)),
        ("layernorm", 31, 65536, 8, (8, 0, 0)),  # clusters of sixteen: by the rows of a thread
        ("rmsnorm", 365, 7168, 132, (122, 0, 0)),  # 31 MB
        ("layernorm", 631, 4096, 132, (68, 64, 8)),
        ("layernorm", 602, 5120, 132, (121, 0, 0)),  # 37 MB
        ("layernorm", 8138, 512, 132, (68, 64, 16)),  # 50 MB
        ("layernorm", 339, 12288, 66, (42, 48, 4)),
        ("layernorm", 170, 24576, 30, (18, 48, 2)),
        ("rmsnorm", 145, 28672, 30, (29, 0, 0)),
        ("layernorm", 5208, 96, 264, (163, 96, 32)),  # slices of one line
        ("layernorm", 43403, 96, 264, (227, 0, 0)),  # 50 MB, with idle lanes,
        ("layernorm", 37326, 96, 264, (168, 96, 32)),  # 43 MB
        ("layernorm", 32552, 128, 132, (68, 64, 32)),  # and without
        ("rmsnorm", 23111, 128, 132, (68, 64, 32)),  # 35.5 MB
        ("rmsnorm", 23438, 128, 132, (123, 0, 0)),  # 36 MB
        ("layernorm", 814, 2560, 132, (52, 80, 8)),
    ],
)
def test_column_blocks_in_float32(norm, rows, columns, at_once, expected):
    """What is said beside FLOAT32_BYTES."""
    problem = backward(columns, "float32", "float32", rows=rows, norm=norm)
    chosen = config.backward_config(problem, 16, DEVICES["sm_90_slow"])
    assert shape_of(chosen, config.grid(chosen, problem, at_once, DEVICES["sm_90_slow"])) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "at_once", "want_dx", "expected"),
    [
        (254, 16384, 66, False, (0, 128, 16)),  # twice as many as beside walkers,
        (814, 5120, 132, False, (0, 80, 32)),
        (127, 32768, 30, False, (0, 64, 4)),  # but not in larger clusters,
        (64, 65536, 15, False, (0, 64, 2)),
        (81, 65536, 15, False, (14, 0, 0)),  # and with fewer rows
        (3000, 1024, 132, False, (125, 0, 0)),
        (2000, 2560, 132, False, (125, 0, 0)),
        (1017, 4096, 132, True, (89, 43, 21)),  # LayerNorm without db
        (1040, 4096, 132, True, (130, 0, 0)),
    ],
)
def test_column_blocks_without_dx_or_db(rows, columns, at_once, want_dx, expected):
    problem = replace(backward(columns, "bfloat16", "bfloat16", rows=rows), want_dx=want_dx, want_db=not want_dx)
    chosen = config.backward_config(problem, 16, DEVICES["sm_90"])
    assert shape_of(chosen, config.grid(chosen, problem, at_once, DEVICES["sm_90"])) == expected


def test_one_row_has_column_blocks_where_its_sums_are_narrowed_or_it_is_long():
    """Where it has no kernel of its own; without dx in any case."""
    for columns, w, aligned, want_dx, expected in (
        (1280, "float32", True, False, 80),
        (1024, "float32", False, True, 0),
        (1024, "bfloat16", False, True, 64),
        (4096, "float32", False, True, 64),
        (16384, "float32", True, True, 64),
    ):
        problem = replace(
            backward(columns, "bfloat16", "bfloat16", rows=1), w_dtype=DTYPES[w], want_dx=want_dx, want_db=want_dx
        )
        chosen = config.backward_config(problem, 16 if aligned else 2, DEVICES["sm_90"])
        assert config.few_rows_blocks(chosen, problem, True, DEVICES["sm_90"]) is None
        found = config.grid(chosen, problem, 132 // chosen.slabs, DEVICES["sm_90"])
        assert found.column_blocks == expected, (columns, w, aligned)


@pytest.mark.parametrize(("x", "dy"), [*((x, x) for x in DTYPES), ("float64", "bfloat16"), ("float32", "float16")])
def test_few_rows_fit_their_blocks(device, x, dy):
    """Each block's rows and columns are there, in memory that it may have, and all blocks run at the same time."""
    found = 0

    def source_of(name: str) -> str:
        return (module.source_directory() / name).read_text(encoding="utf-8")

    source = source_of("backward_few_rows.cu")
    many, most_threads = config.few_rows.FEW_ROWS_MANY_COLUMNS, config.few_rows.FEW_ROWS_MOST_THREADS
    assert f"kBlockThreads = kColumnsPerThread > {many} ? kMaxThreads : kMostThreads;" in source
    assert f"kMostThreads = {most_threads[False]};" in source
    assert "kHasBoth = kSumsByVector && kWholeWarps && sizeof(X) == 2 && sizeof(Dy) == 2;" in source
    assert f"kMaxThreads = {most_threads[True]};" in source_of("staged.cuh")
    assert f"kSumsByVector = VECTOR && kColumnsPerThread <= {many} &&" in source_of("backward.cuh")
    assert f"kSumVectors = {config.few_rows.FEW_ROWS_SUM_VECTORS};" in source
    least_gap = 16 // min(DTYPES[x].itemsize, DTYPES[dy].itemsize)
    for columns, rows, norm, gap in product(COLUMNS, (1, 2, 60, 250, 1000), ("rmsnorm", "layernorm"), (0, least_gap)):
        problem = replace(backward(columns, x, dy, rows=rows, norm=norm), x_row_stride=columns + gap)
        chosen = config.backward_config(problem, 16, device)
        few = config.few_rows_blocks(chosen, problem, True, device)
        definitions = config.few_rows_definitions(chosen)
        if few is None:
            continue
        found += 1
        assert ("backward_few_rows.cu", definitions) in compiled_for(device)
        assert not {"PACED=1", "ROW_GAPS=1", "SHORT_ROWS=1", "GANG=1"} & set(definitions)
        (own,) = (int(text.partition("=")[2]) for text in definitions if text.startswith("VECTORS_A_THREAD="))
        wide = config.common.access_width(x, dy)
        vector = wide if chosen.per_thread % wide == 0 else wide // 2
        of_row = chosen.group_threads * chosen.per_thread // vector // own  # threads
        whole_warps = chosen.per_thread > config.common.columns_per_thread(x) and not takes_part(definitions)
        # Those of backward_staged.cu, in any case or where there are more rows (kHasBoth).
        in_turn = norm == "layernorm" and x in ("float16", "bfloat16") and chosen.per_thread in (24, 28)
        always = chosen.per_thread > 32 or (in_turn and whole_warps)
        whole = few.whole_threads
        assert whole >= always
        if whole and not always:
            assert whole_warps
            assert DTYPES[x].itemsize == DTYPES[dy].itemsize == 2
            own, of_row = chosen.per_thread // vector, chosen.group_threads
        most = 256 if chosen.per_thread > 32 else 512
        assert few.threads % 32 == 0
        assert few.block_rows * of_row <= few.threads <= most
        assert of_row == chosen.group_threads if whole else own in (1, 2, 4)
        assert own == 1 or few.threads == max(of_row, 128 if whole else 0)
        assert own * of_row * vector >= columns
        assert (few.row_blocks - 1) * few.block_rows < rows <= few.row_blocks * few.block_rows
        assert few.row_blocks + few.column_blocks <= device.multiprocessors * (most // few.threads)
        entry = config.common.compute_itemsize(x)
        room = 0 if whole else 2 * entry * own * -(-few.threads // of_row) * of_row
        if rows == 1 and x != "float64":  # whose w, of float32, is a third type
            assert (few.column_threads, few.row_threads) == (0, 0)
            assert few.threads >= 128
            assert 0 <= few.column_blocks * 128 * vector - columns < 128 * vector
        else:
            width = few.column_threads * wide
            assert 0 <= few.column_blocks * width - columns < width
            assert few.column_blocks <= 64
            assert width * min(DTYPES[x].itemsize, DTYPES[dy].itemsize) % 32 == 0
            assert 8 * few.row_threads >= rows
            room = max(room, few.row_threads * (entry * width * (1 + problem.want_db) + 16))
        assert room <= few.shared_bytes <= device.shared_bytes - config.backward.STATIC_SHARED_BYTES
    assert (found > 0) == device.has_clusters


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "x", "expected"),
    [
        # threads, rows of a block, blocks with rows, column blocks, threads of these side by side
        ("rmsnorm", 1, 128, "bfloat16", (128, 1, 1, 1, 0)),
        ("layernorm", 1, 8192, "bfloat16", (512, 1, 1, 8, 0)),
        ("rmsnorm", 64, 128, "bfloat16", (128, 8, 8, 8, 2)),
        ("rmsnorm", 512, 128, "bfloat16", (128, 8, 64, 8, 2)),
        ("rmsnorm", 513, 128, "bfloat16", (256, 16, 33, 8, 2)),
        ("rmsnorm", 1024, 128, "bfloat16", (256, 16, 64, 8, 2)),
        ("rmsnorm", 1025, 128, "bfloat16", None),
        ("layernorm", 264, 512, "float16", (128, 2, 132, 32, 2)),
        ("layernorm", 464, 1024, "bfloat16", (128, 1, 464, 64, 2)),
        ("layernorm", 465, 1024, "bfloat16", None),
        ("layernorm", 64, 4096, "bfloat16", (512, 1, 64, 64, 8)),
        ("layernorm", 69, 4096, "bfloat16", (128, 1, 69, 64, 8)),  # all four, where there are more rows
        ("rmsnorm", 128, 4096, "float16", (128, 1, 128, 64, 8)),
        ("layernorm", 129, 4096, "bfloat16", None),
        ("layernorm", 69, 4096, "float32", None),
        ("layernorm", 34, 8192, "bfloat16", (512, 1, 34, 64, 16)),  # two vectors a thread
        ("layernorm", 35, 8192, "bfloat16", (256, 1, 35, 64, 16)),
        ("layernorm", 129, 8192, "bfloat16", None),
        ("rmsnorm", 128, 3072, "bfloat16", (128, 1, 128, 48, 8)),
        ("layernorm", 19, 7168, "bfloat16", (256, 1, 19, 56, 16)),  # all seven of a thread of backward_staged.cu's
        ("layernorm", 128, 7168, "bfloat16", (256, 1, 128, 56, 16)),
        ("layernorm", 129, 7168, "bfloat16", None),
        ("layernorm", 87, 1536, "bfloat16", (128, 1, 87, 48, 4)),  # all three, and two warps more for the sums
        ("rmsnorm", 8, 5120, "bfloat16", (128, 1, 8, 40, 16)),  # all five
        ("layernorm", 64, 5120, "bfloat16", (128, 1, 64, 40, 16)),
        ("layernorm", 65, 5120, "bfloat16", None),
        ("rmsnorm", 3, 10240, "bfloat16", (256, 1, 3, 40, 32)),
        ("rmsnorm", 32, 5120, "float32", (128, 1, 32, 40, 32)),  # all ten
        ("rmsnorm", 8, 16384, "bfloat16", None),
        ("rmsnorm", 68, 2048, "float32", (512, 1, 68, 64, 8)),
        ("rmsnorm", 68, 1024, "float64", (512, 1, 68, 64, 8)),
    ],
)
def test_few_rows_on_an_h200(norm, rows, columns, x, expected):
    problem = backward(columns, x, x, rows=rows, norm=norm)
    for name in ("sm_90", "sm_90_slow"):
        few = config.few_rows_blocks(config.backward_config(problem, 16, DEVICES[name]), problem, True, DEVICES[name])
        found = few and (few.threads, few.block_rows, few.row_blocks, few.column_blocks, few.column_threads)
        assert found == expected


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "x", "threads"),
    [
        ("rmsnorm", 4488, 4096, "bfloat16", 128),  # 36.8 MB of x
        ("layernorm", 17000, 1024, "float16", 32),
        ("layernorm", 2553, 7168, "bfloat16", 256),
        ("rmsnorm", 4489, 4096, "bfloat16", None),
        ("rmsnorm", 343, 5120, "bfloat16", 128),  # 40 columns a thread
        ("rmsnorm", 344, 5120, "bfloat16", None),
        ("rmsnorm", 140, 10240, "bfloat16", None),
        ("rmsnorm", 4488, 4096, "float32", None),
        ("rmsnorm", 20000, 256, "bfloat16", None),  # a row takes a part of a warp
    ],
)
def test_dx_alone_of_more_rows_on_an_h200(norm, rows, columns, x, threads):
    """Each block has one row, and ends; not where memory is slow, and not beside dw or db."""
    both = backward(columns, x, x, rows=rows, norm=norm)
    alone = replace(both, want_dw=False, want_db=False)
    for name, problem in (("sm_90", alone), ("sm_90_slow", alone), ("sm_90", both)):
        few = config.few_rows_blocks(config.backward_config(problem, 16, DEVICES[name]), problem, True, DEVICES[name])
        if threads is None or problem is both or name != "sm_90":
            assert few is None
            continue
        assert (few.threads, few.block_rows, few.row_blocks) == (threads, 1, rows)
        assert (few.column_blocks, few.shared_bytes, few.whole_threads) == (0, 0, True)


def test_few_rows_need_dx_and_vectors(device):
    for columns, change in product((128, 1024), ({"want_dx": False}, {"want_dw": False, "want_db": False}, {})):
        problem = replace(backward(columns, "float16", "float16", rows=9), **change)
        for aligned in (False, True):
            chosen = config.backward_config(problem, 16 if aligned else 2, device)
            few = config.few_rows_blocks(chosen, problem, True, device)
            assert (few is not None) == (aligned and problem.want_dx and device.has_clusters)
            assert few is None or (few.column_blocks > 0) == problem.want_dw


@pytest.mark.parametrize("x", DTYPES)
def test_few_rows_of_the_forward_pass_fit_their_blocks(device, x):
    """All rows are there, in blocks that run at the same time; in vectors, and of a block each, or several to one."""
    found = 0
    source = (module.source_directory() / "forward_few_rows.cu").read_text(encoding="utf-8")
    (first, most), (second, more) = config.few_rows.FORWARD_FEW_ROWS_THREADS.items()
    chosen_by = f"kBytesOfThread <= {first} ? {most} : kBytesOfThread <= {second} ? {more} : kMaxThreads;"
    assert f"kThreadsAtOnce = {chosen_by}" in source
    itemsize, compute = DTYPES[x].itemsize, config.common.compute_itemsize(x)
    for columns, rows, norm, gap in product(COLUMNS, (1, 2, 60, 250, 1000, 9000), ("rmsnorm", "layernorm"), (0, 8)):
        problem = replace(forward_of(backward(columns, x, x, rows, norm)), x_row_stride=columns + gap)
        for aligned in (True, False):
            chosen = config.forward_config(problem, 16 if aligned else 2, device)
            few = config.forward_few_rows(chosen, problem, device)
            if few is None:
                continue
            found += 1
            assert chosen.kernel == "forward_staged"
            assert aligned
            definitions = few.definitions
            assert definitions == config.forward_few_rows_definitions(chosen.definitions)
            assert ("forward_few_rows.cu", definitions) in compiled_for(device)
            assert not {"PACED=1", "ROW_GAPS=1", "DRAW_SHORT_ROWS=1"} & set(definitions)
            group, per_thread = chosen.group_threads, defined(chosen, "COLUMNS_PER_THREAD")
            whole = per_thread > config.common.columns_per_thread(x) and not takes_part(definitions)
            of_block = 1 if whole else few.threads // group
            assert few.threads % 32 == 0
            assert few.threads == group if whole else few.threads <= 128
            assert group * per_thread >= columns
            assert (few.blocks - 1) * of_block < rows <= few.blocks * of_block
            bytes_of_thread = per_thread * (2 * compute + itemsize)
            threads = most if bytes_of_thread <= first else more if bytes_of_thread <= second else 256
            assert few.blocks <= device.multiprocessors * (threads // few.threads)
    assert (found > 0) == device.has_clusters


@pytest.mark.parametrize(
    ("norm", "rows", "columns", "x", "expected"),
    [
        # threads, blocks
        ("rmsnorm", 1, 128, "bfloat16", (32, 1)),
        ("layernorm", 33, 128, "bfloat16", (128, 2)),  # 32 rows to a block
        ("layernorm", 7000, 128, "bfloat16", (128, 219)),
        ("layernorm", 8000, 128, "bfloat16", None),
        ("rmsnorm", 4000, 128, "bfloat16", (128, 125)),
        ("rmsnorm", 5000, 128, "bfloat16", None),
        ("rmsnorm", 148, 4096, "bfloat16", (128, 148)),
        ("rmsnorm", 149, 4096, "bfloat16", None),
        ("layernorm", 41, 4096, "bfloat16", (128, 41)),
        ("layernorm", 42, 4096, "bfloat16", None),
        ("rmsnorm", 594, 1024, "float16", (32, 594)),
        ("rmsnorm", 3, 12288, "bfloat16", (256, 3)),
        ("rmsnorm", 1, 16384, "bfloat16", None),  # in clusters
        ("layernorm", 1, 16384, "bfloat16", (256, 1)),
        ("rmsnorm", 74, 4096, "float32", (128, 74)),
        ("layernorm", 10, 1024, "float64", (64, 10)),
    ],
)
def test_few_rows_of_the_forward_pass_on_an_h200(norm, rows, columns, x, expected):
    problem = forward_of(backward(columns, x, x, rows, norm))
    for name in ("sm_90", "sm_90_slow"):
        few = config.forward_few_rows(config.forward_config(problem, 16, DEVICES[name]), problem, DEVICES[name])
        assert (few and (few.threads, few.blocks)) == expected


def test_w_of_a_third_type_has_its_kernels_among_the_variants(device):
    for x in DTYPES:
        assert ("widen_w.cu", config.widening_definitions(x)) in compiled_for(device)


@pytest.mark.parametrize(("multiprocessors", "expected"), [(132, (68, 64, 16)), (78, (46, 32, 8)), (36, (20, 16, 4))])
def test_fewer_column_blocks_on_a_small_device(multiprocessors, expected):
    device = config.Device((9, 0), multiprocessors, 232448)
    problem = backward(4096, "float32", "float32", rows=150, norm="rmsnorm")
    chosen = config.backward_config(problem, 16, device)
    assert shape_of(chosen, config.grid(chosen, problem, multiprocessors, device)) == expected


def test_the_gpu_tests_have_launches_with_and_without_column_blocks():
    device = DEVICES["sm_90"]
    for columns, aligned in [*((n, True) for n in LENGTHS), *((n - 5, False) for n in LENGTHS if n < 10000)]:
        for many in (False, True):
            problem = backward(columns, "bfloat16", "bfloat16", rows=rows_of(columns, many))
            chosen = config.backward_config(problem, 16 if aligned else 2, device)
            if chosen.route == "wide":
                continue  # it has neither partial rows nor column blocks
            at_once = at_once_on_h200(chosen)
            assert (config.grid(chosen, problem, at_once, device).column_blocks == 0) == many, (columns, many)


def test_nan_and_threads_are_tried_with_and_without_column_blocks():
    """The cases of test_promises.py."""
    device = DEVICES["sm_90"]

    def kinds(cases):
        for case in cases:
            problem = backward(case.columns, case.x, case.dy, rows=case.rows, norm=case.norm)
            chosen = config.backward_config(
                problem, 16 if case.columns * DTYPES[case.x].itemsize % 16 == 0 else 2, device
            )
            at_once = at_once_on_h200(chosen)
            yield case.columns, case.norm, config.grid(chosen, problem, at_once, device).column_blocks > 0

    found = list(kinds(containment_cases("cupy")))
    for columns, norm, _ in found:
        assert {(columns, norm, True), (columns, norm, False)} <= set(found), (columns, norm)
    assert {with_blocks for *_, with_blocks in kinds(concurrent_cases())} == {True, False}


@pytest.mark.parametrize("multiprocessors", [16, 36, 48, 70, 78, 108])
def test_column_blocks_leave_walkers_enough(multiprocessors):
    """Of a small device, or a part of a large one, not all are taken from those that walk along the rows."""
    device = config.Device((9, 0), multiprocessors, 232448)
    for columns, rows in product((128, 1024, 4096, 8192, 16384, 65536), (1, 8, 64, 400, 512)):
        problem = backward(columns, "bfloat16", "bfloat16", rows=rows)
        chosen = config.backward_config(problem, 16, device)
        for a_multiprocessor in (1, 2):
            at_once = max(1, multiprocessors * a_multiprocessor // chosen.slabs)
            found = config.grid(chosen, problem, at_once, device)
            steps = -(-rows // chosen.groups)
            if found.column_blocks:
                assert found.walkers >= min(steps, multiprocessors // chosen.slabs * 5 // 13)


def test_much_data_has_no_column_blocks(device):
    for columns in (128, 1024, 4096, 16384, 262144):
        problem = backward(columns, "bfloat16", "bfloat16", rows=150_000_000 // 6 // columns)
        chosen = config.backward_config(problem, 16, device)
        assert config.grid(chosen, problem, max(1, 132 // chosen.slabs), device).column_blocks == 0


def test_the_final_reduction_is_shared_out():
    """What one block waits for: few slices, few partial rows of each; and two threads' columns in a slice at least."""
    for threads, blocks, rows, columns, norm in (
        (128, 264, 264, 4096, "rmsnorm"),
        (128, 264, 264, 4096, "layernorm"),
        (256, 264, 264, 128, "rmsnorm"),
        (384, 132, 132, 12289, "layernorm"),
        (256, 120, 15, 65536, "rmsnorm"),
        (256, 128, 4, 262144, "layernorm"),
        (256, 128, 1, 1 << 20, "layernorm"),
        (32, 3, 3, 1, "rmsnorm"),
        (128, 2, 2, 1 << 20, "rmsnorm"),
    ):
        problem = backward(columns, "bfloat16", "bfloat16", norm=norm)
        row_threads = config.reduction_row_threads(threads, blocks, rows, problem)
        used = 1 << (threads.bit_length() - 1)
        assert row_threads & (row_threads - 1) == 0
        assert 1 <= row_threads <= used // 2
        outputs = 2 if norm == "layernorm" else 1
        slices = outputs * -(-columns // (used // row_threads * config.walkers.REDUCTION_RUN))
        loads = -(-slices // blocks) * -(-rows // row_threads)
        least = outputs * columns * rows / config.walkers.REDUCTION_RUN / (blocks * used)
        assert loads <= 3 * least + 12, (threads, blocks, rows, columns, row_threads)


def test_rows_that_fit_on_chip_are_read_once():
    """Only rows beyond shared memory of the largest cluster (or of a block's registers without clusters) are split."""
    hopper, ampere = DEVICES["sm_90"], DEVICES["sm_80"]

    def route(columns, x, device, aligned=True):
        return config.backward_config(backward(columns, x, x), 16 if aligned else 2, device).route

    assert {route(n, "bfloat16", hopper) for n in (1024, 8192, 65536, 90112)} == {"staged"}
    assert {route(n, "bfloat16", hopper) for n in (131072, 262144)} == {"wide"}
    assert {route(n, "bfloat16", hopper, aligned=False) for n in (1001, 8191, 65535, 131071)} == {"staged"}
    assert {route(n, "float32", hopper) for n in (1024, 8192, 49152)} == {"staged"}
    assert {route(n, "float32", hopper) for n in (65536, 131072, 262144, 540672)} == {"wide"}
    assert route(262144, "float64", hopper) == "split"
    assert {route(n, "bfloat16", ampere) for n in (128, 1024, 8192)} == {"direct"}
    assert route(16384, "bfloat16", ampere) == "split"


@pytest.mark.parametrize(
    ("names", "x", "dy", "aligned", "columns"),
    [
        ("sm_90 sm_100", "bfloat16", "bfloat16", True, 1081344),
        ("sm_90 sm_100", "float32", "float32", True, 524288),
        ("sm_90 sm_100", "bfloat16", "bfloat16", False, 1081344),
        ("sm_90 sm_100", "bfloat16", "float16", True, 131072),
        ("sm_90 sm_100", "bfloat16", "float64", False, 80000),
        ("sm_90 sm_100", "float32", "float64", False, 80000),
        ("sm_90 sm_100", "float32", "float32", False, 524288),
        ("sm_90 sm_100", "float64", "float64", False, 54000),
        ("sm_120", "bfloat16", "bfloat16", False, 32768),
        ("sm_120", "float32", "float32", False, 23808),
        ("sm_120", "float64", "float64", True, 11520),
        ("sm_120", "float64", "float64", False, 11520),
        ("sm_120", "bfloat16", "float32", False, 28160),
        ("sm_120", "float32", "float64", False, 16384),
        ("sm_75 sm_80", "float32", "bfloat16", True, 7680),
        ("sm_75 sm_80", "float64", "float64", True, 3840),
        ("sm_75 sm_80", "float32", "bfloat16", False, 6144),
        ("sm_75 sm_80", "float64", "float64", False, 3072),
    ],
)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_the_lengths_of_the_notes_are_read_once(norm, names, x, dy, aligned, columns):
    notes = (Path(__file__).parent.parent / "asv_bench" / "NOTES.md").read_text(encoding="utf-8")
    assert str(columns) in notes.partition("## Long rows")[2].partition("\n## ")[0]
    for name in names.split():
        assert (
            config.backward_config(backward(columns, x, dy, norm=norm), 16 if aligned else 2, DEVICES[name]).route
            != "split"
        )


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("x", DTYPES)
def test_forward_configs_hold_their_rows(device, x, alignment):
    compiled = compiled_for(device)
    for columns, gap in product(COLUMNS, (0, 8)):
        problem = replace(
            backward(columns, x, x), direction="forward", dy_dtype=None, dy_row_stride=0, x_row_stride=columns + gap
        )
        chosen = config.forward_config(problem, alignment, device)
        at = f"{columns} columns, {gap} between rows: {chosen}"
        vector = "VECTOR=1" in chosen.definitions
        per_thread = defined(chosen, "COLUMNS_PER_THREAD")
        assert (chosen.file, chosen.definitions) in compiled, at
        assert chosen.threads % chosen.group_threads == 0, at
        assert chosen.threads % 32 == 0, at
        if chosen.kernel == "forward_staged":
            assert device.has_clusters, at
            assert chosen.threads <= config.common.STAGED_MAX_THREADS, at
            assert chosen.slab_columns <= chosen.group_threads * per_thread, at
            assert (chosen.cluster - 1) * chosen.slab_columns < columns <= chosen.cluster * chosen.slab_columns, at
            assert chosen.groups == 1 or chosen.cluster == 1, at
            short = columns <= 32 * config.common.columns_per_thread(x)
            near = not vector and columns + gap <= config.common.MOST_COPIED_GAPS_LONG * columns
            whole_warps = per_thread > config.common.columns_per_thread(x) and not takes_part(chosen.definitions)
            asks_for_gaps = gap > 0 and chosen.cluster == 1 and (short or near) and not whole_warps
            assert ("ROW_GAPS=1" in chosen.definitions) == asks_for_gaps, at
            assert chosen.groups == 1 or gap == 0 or short or not vector, at
            assert 2 <= chosen.stages <= config.common.STAGED_MOST_STAGES, at
            assert chosen.shared_bytes + config.backward.STATIC_SHARED_BYTES <= device.shared_bytes, at
        elif chosen.kernel == "forward_wide":
            assert chosen.slab_columns <= chosen.group_threads * per_thread, at
            assert (chosen.slabs - 1) * chosen.slab_columns < columns <= chosen.slabs * chosen.slab_columns, at
        elif chosen.kernel == "forward_split_apply":
            assert chosen.threads == chosen.group_threads == 256, at
            assert chosen.slab_columns == 256 * per_thread, at
            assert 1 < chosen.slabs == -(-columns // chosen.slab_columns), at
        else:
            assert chosen.threads <= config.forward.forward_max_threads(vector), at
            assert columns <= chosen.group_threads * per_thread, at


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("x", ["bfloat16", "float16", "float32"])
def test_b_in_shared_memory_and_the_ring_have_room(device, x, norm):
    """As kBInShared of forward_staged.cu; the memory that a launch asks for holds b of each thread, and the ring."""
    lengths = (8, 128, 513, 768, 1024, 1280, 1536, 2048, 3072, 4096, 5120, 8192, 16384, 65536)
    for columns, aligned, rows in product(lengths, (True, False), (1, 4096)):
        problem = backward(columns, x, x, rows, norm=norm)
        problem = forward_of(problem)
        chosen = config.forward_config(problem, 16 if aligned else 2, device)
        if chosen.kernel != "forward_staged":
            continue
        per_thread, itemsize = defined(chosen, "COLUMNS_PER_THREAD"), DTYPES[x].itemsize
        few = {"VECTOR=1", "CLUSTER=1"} <= set(chosen.definitions) and not takes_part(chosen.definitions)
        shares = norm == "layernorm" and itemsize == 2 and few and 16 < per_thread <= 32
        shares &= device.compute_capability < (12, 0)
        b_bytes = chosen.threads * per_thread * 4 if shares else 0
        step_bytes = chosen.groups * chosen.slab_columns * itemsize
        assert b_bytes + chosen.stages * step_bytes <= chosen.shared_bytes, (columns, aligned, rows)


@pytest.mark.parametrize(
    ("norm", "name", "columns", "per_thread", "threads", "blocks"),
    [
        ("layernorm", "bfloat16", 768, 24, 128, 4),
        ("layernorm", "bfloat16", 1536, 24, 128, 4),
        ("layernorm", "bfloat16", 2048, 32, 128, 3),
        ("layernorm", "bfloat16", 4096, 32, 128, 3),
        ("layernorm", "bfloat16", 896, 28, 128, 3),
        ("layernorm", "bfloat16", 1792, 56, 128, 2),
        ("layernorm", "bfloat16", 6144, 24, 256, 2),
        ("layernorm", "bfloat16", 7168, 56, 128, 2),
        ("layernorm", "bfloat16", 8192, 64, 128, 2),
        ("layernorm", "bfloat16", 9216, 36, 256, 1),
        ("layernorm", "bfloat16", 12288, 48, 256, 1),
        ("layernorm", "bfloat16", 14336, 56, 256, 1),
        ("rmsnorm", "bfloat16", 2304, 36, 128, 3),
        ("rmsnorm", "bfloat16", 7168, 56, 128, 2),
        ("rmsnorm", "bfloat16", 14336, 56, 256, 1),
        ("rmsnorm", "bfloat16", 1536, 24, 128, 3),
        ("rmsnorm", "bfloat16", 6144, 48, 128, 2),
        ("rmsnorm", "bfloat16", 12288, 48, 256, 1),
        # off 16 bytes
        ("layernorm", "bfloat16", 1201, 40, 128, 2),
        ("layernorm", "bfloat16", 1501, 24, 128, 4),
        ("layernorm", "float16", 4095, 36, 128, 2),
        ("layernorm", "float16", 4001, 32, 128, 3),
        ("layernorm", "bfloat16", 6001, 24, 256, 2),
        ("layernorm", "float32", 1501, 24, 128, 3),
        ("layernorm", "float32", 4095, 32, 128, 2),
        ("rmsnorm", "bfloat16", 1501, 24, 128, 3),
        ("rmsnorm", "bfloat16", 4001, 32, 128, 3),
        ("rmsnorm", "float32", 4095, 32, 128, 2),
    ],
)
def test_forward_blocks_of_an_h200(norm, name, columns, per_thread, threads, blocks):
    device = DEVICES["sm_90"]
    problem = forward_of(backward(columns, name, name, norm=norm))
    chosen = config.forward_config(problem, 16 if columns % 8 == 0 else 2, device)
    assert (defined(chosen, "COLUMNS_PER_THREAD"), chosen.threads, chosen.cluster) == (per_thread, threads, 1)
    assert blocks_at_once(chosen, device) == blocks


@pytest.mark.parametrize("name", ["sm_90", "sm_90_slow"])
def test_walks_and_drawn_steps_cover_all_rows(name):
    """Each row is in one walk or in a step that is drawn; in long launches, a part of what the walkers would take."""
    for columns in (128, 384, 768, 1024, 4096, 6144, 16384, 65536):
        problem = backward(columns, "bfloat16", "bfloat16", norm="rmsnorm")
        problem = forward_of(problem)
        chosen = config.forward_config(problem, 16, DEVICES[name])
        assert (chosen.drawn_part > 0) == (columns < 16384), columns
        layernorm = config.forward_config(replace(problem, norm="layernorm"), 16, DEVICES[name])
        assert (layernorm.drawn_part > 0) == (columns < 32768), columns
        for walkers, steps, more in product((1, 30, 528), (1, 15, 16, 17, 100, 1000), (-1, 0, 1)):
            rows = walkers * steps * chosen.groups + more
            own, walk_rows, drawn_steps = config.forward_steps(chosen, rows, walkers)
            all_steps = -(-rows // chosen.groups)
            assert (drawn_steps > 0) == (chosen.drawn_part > 0 and all_steps >= chosen.drawn_steps * walkers)
            if drawn_steps:
                assert walk_rows == walkers * own * chosen.groups
                assert (drawn_steps - 1) * chosen.groups < rows - walk_rows <= drawn_steps * chosen.groups
                assert drawn_steps <= all_steps * chosen.drawn_part + walkers + 1
                assert chosen.stages <= own  # no step that the ring begins with is drawn
            else:
                assert (own, walk_rows) == (all_steps // walkers, rows)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_steps_are_left_to_be_drawn_where_the_kernel_draws(norm, name, device):
    """As kDraws of forward_staged.cu, kWholeWarps of columns.cuh; else their rows would stay unwritten."""
    source = (module.source_directory() / "forward_staged.cu").read_text(encoding="utf-8")
    assert "kDraws = !kClustered && (kWholeWarps || !kLayerNorm || DRAW_SHORT_ROWS);" in source
    for columns, aligned in product((1, 8, 96, 129, 256, 384, 512, 513, 1001, 2048, 4096, 12288, 65536), (True, False)):
        problem = backward(columns, name, name, norm=norm)
        problem = forward_of(problem)
        chosen = config.forward_config(problem, 16 if aligned else 2, device)
        definitions = dict(text.split("=") for text in chosen.definitions)
        per_thread = int(definitions["COLUMNS_PER_THREAD"])
        whole_warps = not takes_part(chosen.definitions) and per_thread > (8 if name == "float64" else 16)
        staged = chosen.kernel == "forward_staged" and definitions["CLUSTER"] == "1"
        draws = whole_warps or norm == "rmsnorm" or "DRAW_SHORT_ROWS" in definitions
        assert (chosen.drawn_part > 0) == (staged and draws), (columns, aligned)


def test_long_launches_have_less_in_flight():
    """float32 and float64, in vectors, of one type; with few rows, off 16 bytes or of two types there is as much."""
    device = DEVICES["sm_90"]
    for columns, name, dy_name, aligned in (
        *((1024, "float32", "float32", True), (4096, "float32", "float32", True), (512, "float64", "float64", True)),
        *((1537, "float32", "float32", False), (1024, "bfloat16", "float32", True), (8192, "float32", "float32", True)),
    ):
        long, short = (
            config.backward_config(backward(columns, name, dy_name, rows, "rmsnorm"), 16 if aligned else 2, device)
            for rows in (400_000, 6_000)
        )
        limited = aligned and name == dy_name and columns < 8192  # of 8192 a block has one group already
        assert (long != short) == limited, (columns, name, dy_name)
        assert (long.cluster, long.group_threads, long.definitions) == (
            short.cluster,
            short.group_threads,
            short.definitions,
        )
        if limited:
            step = 2 * config.common.part_bytes(name, True, long.groups * columns)
            blocks = device.shared_bytes // (long.shared_bytes + 1024)
            assert blocks * config.backward.STAGED_LEAST_STAGES * step <= config.backward.STAGED_MOST_RING_BYTES, (
                columns,
                name,
            )


PACE_LENGTHS = (
    *(8, 16, 24, 96, 256, 384, 512, 768, 1001, 1024, 3072, 4096, 5120),
    *(7168, 14336, 16384, 20480, 32768, 65536, 262144),
)
PACED_LAYERNORM = {
    "float16": (16, 256, 384, 512, 768, 1024, 3072, 4096, 5120, 7168, 14336, 16384, 20480, 32768, 65536, 262144),
    "bfloat16": (16, 256, 384, 512, 768, 1024, 3072, 4096, 5120, 7168, 14336, 16384, 20480, 32768, 65536, 262144),
    "float32": (16, 24, 96, 256, 384, 512, 768, 1024, 3072, 4096, 5120, 7168, 14336, 16384, 20480, 32768, 262144),
    "float64": (384, 512, 768, 1024, 3072),
}


@pytest.mark.parametrize(
    ("norm", "columns", "name", "per_thread", "cluster", "paced"),
    [
        ("rmsnorm", 9216, "bfloat16", 40, 1, True),
        ("rmsnorm", 10240, "bfloat16", 40, 1, True),
        ("rmsnorm", 20480, "float16", 40, 2, True),
        ("rmsnorm", 10240, "float32", 40, 2, True),  # one block has no room
        ("layernorm", 8448, "bfloat16", 40, 1, False),
        ("layernorm", 9600, "bfloat16", 40, 2, True),
        ("layernorm", 9608, "bfloat16", 40, 1, True),
        ("layernorm", 10240, "bfloat16", 40, 1, True),
        ("layernorm", 10248, "bfloat16", 44, 1, True),
        ("layernorm", 10240, "float32", 40, 2, True),
        ("layernorm", 19456, "bfloat16", 40, 2, True),
        ("layernorm", 20480, "bfloat16", 40, 2, True),
        ("layernorm", 36864, "bfloat16", 40, 4, True),
        ("layernorm", 40960, "bfloat16", 40, 4, True),
        *(("rmsnorm", 24 * 256 * cluster, "bfloat16", 24, cluster, True) for cluster in (1, 2, 4, 8)),
        *(("layernorm", 24 * 256 * cluster, "bfloat16", 24, cluster, cluster <= 2) for cluster in (1, 2, 4, 8)),
        ("rmsnorm", 81920, "bfloat16", 40, 8, True),
        ("layernorm", 81920, "bfloat16", 40, 8, True),
    ],
)
def test_long_rows_fill_the_lanes_of_their_blocks(norm, columns, name, per_thread, cluster, paced):
    """In vectors, of one type. With db LayerNorm keeps pace where its loop is fast enough for fewer multiprocessors."""
    chosen = config.backward_config(backward(columns, name, name, norm=norm), 16, DEVICES["sm_90"])
    assert (chosen.route, chosen.cluster, defined(chosen, "COLUMNS_PER_THREAD")) == ("staged", cluster, per_thread)
    assert (chosen.lead > 0) == ("PACED=1" in chosen.definitions) == paced


def test_how_many_blocks_share_layernorms_rows_of_40_columns_a_thread():
    """As few as have room, but more where a block would have 8449 to 9600 columns alone, or where memory is slow."""
    expected = {
        "fast": {8448: 1, 8456: 2, 9600: 2, 9608: 1, 10240: 1, 17024: 2, 20480: 2},
        "slow": {8448: 1, 8456: 2, 9600: 2, 10232: 2, 10240: 1, 17024: 4, 20480: 4},
    }
    for memory, columns in ((memory, n) for memory, found in expected.items() for n in found):
        device = DEVICES["sm_90" if memory == "fast" else "sm_90_slow"]
        chosen = config.backward_config(backward(columns, "bfloat16", "bfloat16"), 16, device)
        assert chosen.cluster == expected[memory][columns], (memory, columns)


GANGS = [
    (81928, "bfloat16", 11, 7488),
    (90120, "bfloat16", 12, 7552),
    (98304, "float16", 12, 8192),
    (113664, "bfloat16", 14, 8128),
    (163840, "bfloat16", 20, 8192),
    (225280, "bfloat16", 33, 6848),  # four gangs of the fewest blocks would leave 20 multiprocessors
    (262144, "bfloat16", 32, 8192),
    (262152, "bfloat16", 33, 8000),
    (300000, "bfloat16", 44, 6848),
    (548864, "bfloat16", 132, 4160),
    (1 << 20, "bfloat16", 128, 8192),
    (132 * 8192, "bfloat16", 132, 8192),
    (131072, "float32", 32, 4096),
    (128 * 4096, "float32", 128, 4096),
]
# Where memory is fast clusters have more columns a thread, and hold these.
FAST_CLUSTERS = {"rmsnorm": (81928, 90120, 98304, 113664, 163840), "layernorm": (81928,)}


@pytest.mark.parametrize(
    ("device", "norm", "columns", "name", "blocks", "slab"),
    [
        (device, norm, *case)
        for device, norm, case in product(("sm_90", "sm_90_slow"), ("rmsnorm", "layernorm"), GANGS)
        if device != "sm_90" or case[0] not in FAST_CLUSTERS[norm]
    ],
)
@ELSEWHERE
def test_rows_that_eight_blocks_do_not_hold_go_to_gangs(device, norm, columns, name, blocks, slab):
    hopper = DEVICES[device]
    chosen = config.backward_config(backward(columns, name, name, norm=norm), 16, hopper)
    assert (chosen.route, chosen.gang, chosen.slabs, chosen.slab_columns) == ("staged", True, blocks, slab)
    assert {"GANG=1", "CLUSTER=1", "PACED=1", "COLUMNS_PER_THREAD=32"} <= set(chosen.definitions)
    assert chosen.threads == chosen.group_threads == 512 // DTYPES[name].itemsize
    slow = {2: 5, 4: 6}[DTYPES[name].itemsize]
    assert (chosen.lead, chosen.stages) == (slow if device == "sm_90_slow" else 0, 4)
    assert slab * DTYPES[name].itemsize % 128 == 0
    assert 132 // blocks * blocks >= 0.9 * 132
    assert blocks <= chosen.threads  # each reads the sums of one: gang.cuh
    # One block on a multiprocessor, with room for what it declares.
    assert 2 * (chosen.shared_bytes + 1024) > hopper.shared_bytes
    static = config.common.staged_static_bytes(name, 1)
    assert chosen.shared_bytes + static <= hopper.shared_bytes


# Of rows that all blocks share, by whether db is summed: bytes of an element, columns, the warps that share a block's
# part of a row, its rows of a step, its columns, and blocks; or zeros, where they do not.
NOT_WIDE = 0, 0, 0, 0
WIDE = {
    db: (
        *((2, 109824, *NOT_WIDE), (2, 109832, 4, 8, 896, 123), (2, 122880, 4, 8, 960, 128)),
        *((2, 126728, 4, 8, 1024, 124), (2, 131072, 4, 8, 1024, 128), (2, 135168, 4, 8, 1024, 132)),
        *((2, 135176, *NOT_WIDE), (2, 194304, *NOT_WIDE), (2, 194312, 8, 4, 1536, 127), (2, 196608, 8, 4, 1536, 128)),
        *((2, 229376, 8, 4, 1792, 128), (2, 262144, 8, 4, 2048, 128), (2, 262152, 8, 4, 2048, 129)),
        *((2, 270336, 8, 4, 2048, 132), (2, 270344, 8, 4, 2112, 129), (2, 321024, 8, 4, 2432, 132)),
        *((4, 54912, *NOT_WIDE), (4, 54916, 4, 8, 448, 123), (4, 65536, 4, 8, 512, 128), (4, 67584, 4, 8, 512, 132)),
        *((4, 67588, 8, 4, 544, 125), (4, 98304, 8, 4, 768, 128), (4, 131072, 8, 4, 1024, 128)),
        *((4, 135168, 8, 4, 1024, 132), (4, 135172, 8, 4, 1056, 129), (4, 168960, 8, 4, 1280, 132)),
        *((4, 168964, 8, 2, 1312, 129), (4, 262144, 8, 2, 2016, 131), (4, 270336, 8, 2, 2048, 132)),
        *((4, 270340, 16, 2, 2080, 130), (4, 337920, 16, 2, 2560, 132), (4, 337924, 16, 1, 2592, 131)),
        *((4, 524288, 16, 1, 4000, 132), (4, 540672, 16, 1, 4096, 132), (4, 540676, *NOT_WIDE)),
        *longest,
    )
    for db, longest in {
        False: (
            *((2, 321032, 8, 2, 2496, 129), (2, 540672, 8, 2, 4096, 132), (2, 540680, 16, 2, 4160, 130)),
            *((2, 743424, 16, 2, 5632, 132), (2, 743432, 16, 1, 5696, 131), (2, 1081344, 16, 1, 8192, 132)),
            (2, 1081352, *NOT_WIDE),
        ),
        True: (
            *((2, 371712, 8, 4, 2816, 132), (2, 371720, 8, 2, 2880, 130), (2, 540672, 8, 2, 4096, 132)),
            *((2, 540680, 16, 1, 4160, 130), (2, 937728, 16, 1, 7104, 132), (2, 937736, *NOT_WIDE)),
        ),
    }.items()
}
# Whether a kernel has the second level of its columns' sums in shared memory: bytes of an element, db, warps, rows.
SHARED_TOTALS = {
    *((2, True, 8, 4), (2, True, 8, 2), (2, True, 16, 1), (2, False, 16, 2)),
    *((4, False, 16, 2), (4, True, 16, 2)),
}


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    ("db", "itemsize", "columns", "warps", "step_rows", "slab", "blocks"),
    [(db, *case) for db in WIDE for case in WIDE[db]],
)
def test_rows_that_all_blocks_share(norm, db, itemsize, columns, warps, step_rows, slab, blocks):
    """In vectors of one type, of 16 bits or float32, where memory is as fast as an H200's, on as many multiprocessors:
    any number of rows, dx alone as beside dw."""
    hopper = DEVICES["sm_90"]
    for name, rows in product(("bfloat16", "float16") if itemsize == 2 else ("float32",), (1, 17, 1 << 20)):
        problem = replace(backward(columns, name, name, rows, norm), want_db=db)
        chosen = config.backward_config(problem, 16, hopper)
        assert (chosen.route == "wide") == (warps > 0)
        alone = config.backward_config(replace(problem, want_dw=False, want_db=False), 16, hopper)
        apart = config.backward_config(
            replace(problem, x_row_stride=columns + 8, dy_row_stride=columns + 64), 16, hopper
        )
        assert apart.route == chosen.route
        assert alone.route == chosen.route or (db and not warps)  # dx alone does not ask for db
        assert alone.route == "split" or config.DX_ALONE in alone.definitions
        assert config.DX_ALONE not in chosen.definitions
        if not warps:
            continue
        assert (chosen.group_threads, chosen.slab_columns, chosen.slabs) == (warps * 32, slab, blocks)
        # Orders of a row's sums, and so its bits, are those of the columns alone.
        assert chosen.step_rows == apart.step_rows == step_rows
        assert (apart.group_threads, apart.slab_columns) == (warps * 32, slab)
        two_vectors = chosen.per_thread * itemsize == 32
        shared = two_vectors and (itemsize, db, warps, step_rows) in SHARED_TOTALS
        assert ("WIDE_SHARED_TOTALS=1" in chosen.definitions) == shared
        sums = (1 + db) * shared
        assert config.few_rows_blocks(chosen, problem, True, hopper) is None
        lines_are_left = [columns * itemsize % 128 != 0, True]
        for one, leaves in zip((chosen, apart), lines_are_left, strict=True):
            check_blocks_that_share_all_rows(one, 2, name, leaves, sums=sums)
        check_blocks_that_share_all_rows(alone, 2, name, lines_are_left[0])
        of_dw = config.backward_config(replace(problem, want_db=False), 16, hopper)
        for shape in ("threads", "group_threads", "step_rows", "slab_columns", "slabs", "per_thread"):
            assert getattr(alone, shape) == getattr(of_dw, shape)
        assert "WIDE_SHARED_TOTALS=1" not in alone.definitions
        stage_bytes = 2 * alone.step_rows * (slab * itemsize + 128)
        assert alone.stages == min(6, (224 << 10) // stage_bytes) >= of_dw.stages
        others = [
            config.backward_config(problem, 8, hopper),
            *(
                config.backward_config(backward(columns, name, other, rows, norm), 16, hopper)
                for other in {"bfloat16", "float16", "float32", "float64"} - {name}
            ),
            config.backward_config(backward(columns, "float64", "float64", rows, norm), 16, hopper),
            config.backward_config(problem, 16, hopper._replace(multiprocessors=119, memory_gbps=5000)),
            *(config.backward_config(problem, 16, DEVICES[other]) for other in ("sm_90_slow", "sm_100", "sm_120")),
        ]
        assert all(other.route != "wide" for other in others)


def check_blocks_that_share_all_rows(chosen, arrays, name, leaves, words=0, sums=0):
    """Of a backward or a forward kernel through whose ring so many arrays go, and words of 16 bytes of each row; behind
    it lie so many sums of each column, and what they have lost."""
    hopper, itemsize = DEVICES["sm_90"], DTYPES[name].itemsize
    assert (chosen.file if arrays == 1 else f"backward_{chosen.route}.cu", chosen.definitions) in compiled_for(hopper)
    assert ("OFF_LINES=1" in chosen.definitions) == leaves
    assert chosen.slab_columns <= chosen.group_threads * defined(chosen, "COLUMNS_PER_THREAD")
    assert chosen.slab_columns * itemsize % 128 == 0
    assert defined(chosen, "ROW_WARPS") * 32 == chosen.group_threads
    assert defined(chosen, "WIDE_WARPS") * 32 == chosen.threads
    assert chosen.step_rows == chosen.threads // chosen.group_threads * defined(chosen, "WIDE_ROWS")
    place_bytes = chosen.step_rows * arrays * (chosen.slab_columns * itemsize + 128 * leaves)
    place_bytes += -(-chosen.step_rows * words * 16 // 128) * 128
    assert chosen.stages == defined(chosen, "WIDE_STAGES")
    assert chosen.stages > defined(chosen, "WIDE_BEHIND") + 1
    assert 1 <= chosen.lag < defined(chosen, "WIDE_BEHIND")  # a block that reads a step's sums so late has posted them
    assert chosen.shared_bytes >= chosen.stages * place_bytes + sums * chosen.slab_columns * 8
    static = 3 << 10  # more than the kernel declares
    assert chosen.shared_bytes + static <= hopper.shared_bytes
    assert 2 * (chosen.shared_bytes + 1024) > hopper.shared_bytes + 1024  # one block on a multiprocessor
    laps, most_entry_bytes = defined(chosen, "WIDE_LAPS"), 16 if chosen.step_rows <= 2 else 8  # kEntryBytes of wide.cuh
    assert laps & (laps - 1) == 0
    assert laps * chosen.step_rows * 132 * most_entry_bytes <= defined(chosen, "WIDE_REGION_BYTES")


@pytest.mark.parametrize(
    ("norm", "itemsize", "columns", "vectors", "slab", "blocks"),
    [
        *(("rmsnorm", 2, 262136, 0, 0, 0), ("rmsnorm", 2, 262144, 1, 2048, 128), ("layernorm", 2, 229368, 0, 0, 0)),
        *(("layernorm", 2, 229376, 1, 1792, 128), ("layernorm", 2, 262152, 1, 2048, 129)),
        *(
            (norm, *case)
            for norm in ("rmsnorm", "layernorm")
            for case in (
                *((2, 270336, 1, 2048, 132), (2, 270344, 2, 2112, 129), (2, 540672, 2, 4096, 132)),
                *((2, 540680, 4, 4160, 130), (2, 1081344, 4, 8192, 132), (2, 1081352, 0, 0, 0)),
                *((4, 131072, 0, 0, 0), (4, 131076, 1, 1024, 129), (4, 135168, 1, 1024, 132)),
                *((4, 135172, 2, 1056, 129), (4, 270336, 2, 2048, 132), (4, 270340, 4, 2080, 130)),
                *((4, 540672, 4, 4096, 132), (4, 540676, 0, 0, 0)),
            )
        ),
    ],
)
def test_rows_that_all_blocks_share_forward(norm, itemsize, columns, vectors, slab, blocks):
    """As backward; what clusters hold stays with these, but for the longest."""
    hopper = DEVICES["sm_90"]
    for name, rows in product(("bfloat16", "float16") if itemsize == 2 else ("float32",), (1, 17, 1 << 20)):
        problem = forward_of(backward(columns, name, name, rows, norm))
        chosen = config.forward_config(problem, 16, hopper)
        assert (chosen.kernel == "forward_wide") == (vectors > 0)
        if not vectors:
            continue
        assert (chosen.slab_columns, chosen.slabs) == (slab, blocks)
        assert defined(chosen, "COLUMNS_PER_THREAD") * itemsize == vectors * 16
        apart = config.forward_config(replace(problem, x_row_stride=columns + 8), 16, hopper)
        words = 3 if norm == "layernorm" and itemsize == 4 else 0
        for one, leaves in ((chosen, columns * itemsize % 128 != 0), (apart, True)):
            check_blocks_that_share_all_rows(one, 1, name, leaves, words)
        others = [
            config.forward_config(problem, 8, hopper),
            config.forward_config(forward_of(backward(columns, "float64", "float64", rows, norm)), 16, hopper),
            config.forward_config(problem, 16, hopper._replace(multiprocessors=119, memory_gbps=5000)),
            *(config.forward_config(problem, 16, DEVICES[other]) for other in ("sm_90_slow", "sm_100", "sm_120")),
        ]
        assert all(other.kernel != "forward_wide" for other in others)


@pytest.mark.parametrize(("norm", "mega"), [("rmsnorm", 36), ("layernorm", 72)])
def test_what_all_blocks_share_leaves_the_cache_first_where_it_is_little(norm, mega):
    problem = forward_of(backward(1 << 19, "bfloat16", "bfloat16", mega // 2, norm))
    assert config.forward_wide_reads_once(problem)
    assert not config.forward_wide_reads_once(replace(problem, rows=problem.rows + 1))


@pytest.mark.parametrize(
    ("norm", "name", "columns", "lag"),
    [
        *(("rmsnorm", "bfloat16", 131072, 2), ("rmsnorm", "bfloat16", 122880, 1), ("rmsnorm", "float16", 229376, 2)),
        *(("layernorm", "bfloat16", 131072, 1), ("layernorm", "bfloat16", 122880, 1)),
        *(("layernorm", "float16", 229376, 1), ("layernorm", "bfloat16", 262144, 2)),
        *(("rmsnorm", "float32", 57344, 2), ("layernorm", "float32", 65536, 1), ("layernorm", "float32", 81920, 2)),
        *(("rmsnorm", "bfloat16", 278528, 2), ("rmsnorm", "bfloat16", 524288, 2), ("layernorm", "bfloat16", 278528, 2)),
        *(("layernorm", "bfloat16", 360448, 1), ("layernorm", "bfloat16", 524288, 2)),  # the first has four stages
        *(
            ("layernorm", "bfloat16", 802816, 2),
            ("layernorm", "float16", 917504, 1),
            ("layernorm", "float32", 393216, 2),
        ),
    ],
)
def test_how_late_blocks_read_the_sums_of_all(norm, name, columns, lag):
    problem = backward(columns, name, name, norm=norm)
    chosen = config.backward_config(problem, 16, DEVICES["sm_90"])
    assert chosen.route == "wide"
    assert chosen.lag == lag


def test_what_blocks_exchange_that_share_all_rows_is_kept():
    assert config.wide_exchange_bytes() <= config.KEPT_WIDE_BYTES


# On either side of each length that the notes name: the blocks of a cluster, or 0 for gangs, where memory is fast.
FAST_EDGES = {
    ("rmsnorm", "bfloat16"): {81920: 8, 113664: 8, 113672: 16, 131072: 16, 131080: 16, 221184: 16, 225280: 0},
    ("layernorm", "float16"): {
        **{81920: 8, 90112: 8, 90120: 0, 113664: 0, 113672: 16, 131072: 16, 131080: 0},
        **{163840: 0, 163848: 16, 180224: 16, 180232: 0},
    },
    ("rmsnorm", "float32"): {65024: 8, 65032: 16, 128512: 16, 128520: 0},
    ("layernorm", "float32"): {56832: 8, 56840: 16, 112128: 16, 112136: 0},
}


@pytest.mark.parametrize(("norm", "name"), FAST_EDGES)
@ELSEWHERE
def test_clusters_of_sixteen_stand_beside_gangs_where_memory_is_fast(norm, name):
    """From 14 KB of a row for each block on; where it is slow, clusters of eight alone."""
    for columns, fast in FAST_EDGES[norm, name].items():
        for device, blocks in (("sm_90", fast), ("sm_90_slow", 8 if fast == 8 and columns <= 81920 else 0)):
            chosen = config.backward_config(backward(columns, name, name, norm=norm), 16, DEVICES[device])
            assert (chosen.gang, chosen.cluster) == (blocks == 0, blocks or 1), (columns, device)


@pytest.mark.parametrize(
    ("device", "multiprocessors"), [("sm_90_slow", 16), ("sm_90_slow", 26), ("sm_90", 20), ("sm_90", 31)]
)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_clusters_of_sixteen_take_what_too_few_multiprocessors_have_no_gang_for(device, multiprocessors, norm):
    """In vectors and off 16 bytes; not two readings."""
    hopper = DEVICES[device]
    small = hopper._replace(multiprocessors=multiprocessors, memory_gbps=hopper.memory_gbps * multiprocessors // 132)
    assert small.has_slow_memory == (device == "sm_90_slow")
    for columns, name, aligned in (
        *((112000, "float32", True), (100001, "float32", False)),  # 28 and 25 blocks of a gang
        *((131072, "bfloat16", True), (131064, "bfloat16", False), (90120, "float16", True)),
    ):
        chosen = config.backward_config(backward(columns, name, name, norm=norm), 16 if aligned else 2, small)
        needed = -(-columns * DTYPES[name].itemsize // (config.backward.GANG_STEP_BYTES // 2))
        eight = columns == 90120 and (device, norm) == ("sm_90", "rmsnorm")  # with 48 columns a thread
        gang = needed <= multiprocessors and (device == "sm_90_slow" or columns == 90120) and not eight
        assert (chosen.route, chosen.gang) == ("staged", gang), (columns, name, aligned)
        assert chosen.cluster == (8 if eight else 1 if gang else 16), (columns, name, aligned)


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_the_last_block_of_a_gang_has_as_many_columns_as_a_warp_reads(name):
    """As kernels for gangs off 16 bytes take for granted. Blocks are shortest where a gang takes all of a device, and
    the last one where each block's columns are rounded up: by 7, with 127 multiprocessors, to 1025."""
    most = config.backward.GANG_STEP_BYTES // (2 * DTYPES[name].itemsize)
    found = []
    for multiprocessors in (*range(32, 160, 9), 126, 127, 128, 129, 132):
        device = DEVICES["sm_90_slow"]._replace(multiprocessors=multiprocessors)
        whole = range(most * (multiprocessors // 2) + 1, most * multiprocessors, max(1, most // 3))
        for columns in {n + m for n in (262144, 258048, *whole) for m in (1, 17, 1001)}:
            chosen = config.backward_config(backward(columns, name, name, norm="rmsnorm"), 2, device)
            if chosen.gang:
                found.append(columns - (chosen.slabs - 1) * chosen.slab_columns)
    assert len(found) > 1000
    assert min(found) >= 32 * config.backward.GANG_COLUMNS_PER_THREAD


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    ("multiprocessors", "most_cluster", "columns"), [(14, 1, 25428), (3, 16, 24001), (132, 2, 30001)]
)
def test_gangs_take_odd_rows_as_single_columns(norm, multiprocessors, most_cluster, columns):
    """Where a device holds no cluster that would take them in pairs."""
    device = DEVICES["sm_90"]._replace(multiprocessors=multiprocessors, most_cluster=most_cluster, memory_gbps=0)
    problem = replace(backward(columns, "bfloat16", "bfloat16", norm=norm), want_db=norm == "layernorm")
    chosen = config.backward_config(replace(problem, x_row_stride=columns | 1), 2, device)
    assert chosen.gang
    assert odd_way(chosen) == 0
    assert ("backward_staged.cu", chosen.definitions) in compiled_for(DEVICES["sm_90"])


@pytest.mark.parametrize(
    ("device", "norm", "x", "dy", "columns", "cluster", "slab"),
    [
        # Whole lines where kernels take rows as they lie in lines: 64 columns of 16 bits, 32 of float32.
        ("sm_90", "rmsnorm", "bfloat16", "bfloat16", 65472, 8, 8192),
        ("sm_90", "rmsnorm", "float32", "float32", 128512, 16, 8032),
        ("sm_90", "layernorm", "float32", "float32", 13352, 2, 6688),
        # Else in clusters of four and more, of the smaller type, if there is room for them.
        ("sm_90", "rmsnorm", "bfloat16", "float32", 8872, 2, 4440),
        ("sm_90", "rmsnorm", "bfloat16", "float32", 101952, 16, 6400),
        ("sm_90", "layernorm", "float32", "float64", 43264, 16, 2720),
        ("sm_90", "rmsnorm", "float64", "float64", 62400, 16, 3904),
        ("sm_90", "rmsnorm", "float64", "float64", 62976, 16, 3936),
        ("sm_90", "layernorm", "float64", "float64", 54784, 16, 3424),
        ("sm_90", "layernorm", "float64", "float64", 7096, 2, 3552),
        ("sm_120", "rmsnorm", "float64", "float64", 13056, 8, 1632),
        ("sm_120", "layernorm", "float64", "float64", 11648, 8, 1456),
    ],
)
@ELSEWHERE
def test_how_many_columns_a_block_of_a_cluster_has(device, norm, x, dy, columns, cluster, slab):
    chosen = config.backward_config(backward(columns, x, dy, norm=norm), 16, DEVICES[device])
    assert (chosen.route, chosen.gang, chosen.cluster, chosen.slab_columns) == ("staged", False, cluster, slab)


@ELSEWHERE
def test_gangs_are_no_larger_than_the_device_and_of_one_type():
    hopper = DEVICES["sm_90"]
    for columns, x, dy, aligned, norm in (
        (132 * 8192 + 8, "bfloat16", "bfloat16", True, "rmsnorm"),
        (128 * 4096 + 8, "float32", "float32", True, "layernorm"),  # more blocks than a block has threads
        (262144, "float64", "float64", True, "rmsnorm"),
        (262144, "bfloat16", "float32", True, "layernorm"),
        (132 * 8192 + 2, "float16", "float16", False, "rmsnorm"),
    ):
        chosen = config.backward_config(backward(columns, x, dy, norm=norm), 16 if aligned else 2, hopper)
        assert (chosen.route, chosen.gang) == ("split", False), (columns, x, dy, aligned)
    for device in (DEVICES["sm_80"], DEVICES["sm_120"], hopper._replace(multiprocessors=31)):
        assert not config.backward_config(backward(262144, "bfloat16", "bfloat16"), 16, device).gang
    assert config.backward_config(
        backward(262144, "bfloat16", "bfloat16"), 16, hopper._replace(multiprocessors=32)
    ).gang


@pytest.mark.parametrize(
    ("file_name", "least"),
    [
        ("backward_staged.cu", min(config.backward.STAGED_LEAST_STAGES, config.backward.GANG_STAGES)),
        ("forward_staged.cu", config.forward.FORWARD_STAGED_LEAST_STAGES),
    ],
)
def test_a_ring_has_room_for_the_steps_that_are_asked_for_first(file_name, least):
    text = (module.source_directory() / file_name).read_text(encoding="utf-8")
    (steps,) = re.findall(r"constexpr int kFirstSteps = (?:.*\?)?([ \d:]+);", text)
    assert 1 <= max(map(int, re.findall(r"\d", steps))) <= least


def test_kernels_and_launches_agree_on_what_gangs_exchange():
    """128 bytes before the entries, and eight of sixteen bytes for each block."""
    source = (module.source_directory() / "gang.cuh").read_text(encoding="utf-8")
    assert "kGangSlots = 4, kGangEntries = 8;" in source
    assert "struct alignas(128) GangMemory" in source
    assert [config.exchange_bytes(blocks) for blocks in (0, 1, 132)] == [128, 128 + 8 * 16, 128 + 132 * 8 * 16]
    assert f"kKeptBytes = {config.KEPT_EXCHANGE_BYTES >> 10} << 10;" in source
    assert config.exchange_bytes(255) == config.KEPT_EXCHANGE_BYTES


@pytest.mark.parametrize(
    ("norm", "columns", "name", "per_thread", "short", "long"),
    [
        *((norm, 4096, "bfloat16", 32, 3, 2) for norm in ("rmsnorm", "layernorm")),
        *(("layernorm", 768 << i, "bfloat16", 24, 3, 2) for i in range(3)),
        ("rmsnorm", 2560, "bfloat16", 40, 3, 2),
        ("layernorm", 2560, "bfloat16", 40, 3, 3),
        ("layernorm", 2560, "float32", 40, 3, 2),
        ("layernorm", 12288, "bfloat16", 48, 3, 2),
        ("layernorm", 8192, "bfloat16", 64, 3, 3),
        ("layernorm", 20480, "bfloat16", 40, 3, 3),  # a cluster
        ("layernorm", 384, "bfloat16", 24, 3, 3),  # of a part of a warp
        ("rmsnorm", 384, "bfloat16", 24, 2, 2),
        ("layernorm", 256, "bfloat16", 32, 2, 2),
    ],
)
def test_forward_has_more_in_flight_where_each_walker_has_few_steps(norm, columns, name, per_thread, short, long):
    """And LayerNorm in any case where it gained: at least so many stages, more where these take less than a ring is to
    take."""
    hopper = DEVICES["sm_90"]
    problem = forward_of(backward(columns, name, name, norm=norm))
    few, many = (config.forward_config(replace(problem, rows=rows), 16, hopper) for rows in (1000, 1 << 22))
    for chosen, least in ((few, short), (many, long)):
        assert defined(chosen, "COLUMNS_PER_THREAD") == per_thread
        step = config.common.part_bytes(name, True, chosen.groups * chosen.slab_columns)
        blocks = hopper.shared_bytes // (chosen.shared_bytes + 1024)
        assert chosen.stages == max(least, config.forward.FORWARD_STAGED_RING_BYTES // (blocks * step))
    assert replace_stages(few) == replace_stages(many)


def replace_stages(chosen: config.ForwardConfig) -> config.ForwardConfig:
    return chosen._replace(stages=0, shared_bytes=0)


@pytest.mark.parametrize(
    ("columns", "cluster", "per_thread", "paced"),
    [
        (14592, 2, 32, True),  # not full
        (16384, 2, 32, True),
        (25600, 2, 56, True),
        (28672, 2, 56, True),
        (29696, 4, 32, False),
        (32768, 4, 32, True),
        (57344, 4, 56, True),
        (58368, 8, 32, False),
        (131072, 8, 64, True),
        (163840, 16, 40, True),
        (196608, 16, 48, True),
        (262144, 16, 64, True),
    ],
)
@ELSEWHERE
def test_which_clusters_keep_pace_in_the_forward_pass_of_rmsnorm(columns, cluster, per_thread, paced):
    problem = backward(columns, "bfloat16", "bfloat16", norm="rmsnorm")
    problem = forward_of(problem)
    chosen = config.forward_config(problem, 16, DEVICES["sm_90"])
    assert (chosen.cluster, defined(chosen, "COLUMNS_PER_THREAD"), chosen.lead > 0) == (cluster, per_thread, paced)
    assert ("PACED=1" in chosen.definitions) == paced


@pytest.mark.parametrize("device", ["sm_75", "sm_80"])
@pytest.mark.parametrize("name", DTYPES)
def test_nobody_keeps_pace_without_clusters(name, device):
    for norm, columns in product(("rmsnorm", "layernorm"), PACE_LENGTHS):
        assert config.backward_config(backward(columns, name, name, norm=norm), 16, DEVICES[device]).lead == 0


@pytest.mark.parametrize("name", DTYPES)
def test_who_keeps_pace(name):
    """On an H200, if lanes are filled: RMSNorm's backward pass, LayerNorm's where it gained; forward, clusters."""
    hopper = DEVICES["sm_90"]
    for norm, columns in product(("rmsnorm", "layernorm"), PACE_LENGTHS):
        problem = backward(columns, name, name, norm=norm)
        chosen = config.backward_config(problem, 16, hopper)
        wanted = chosen.route == "staged" and columns % 8 == 0 and columns >= config.common.columns_per_thread(name)
        wanted &= norm == "rmsnorm" or columns in PACED_LAYERNORM[name]
        wanted |= (
            odd_way(chosen) > 0 and chosen.per_thread > (16 if norm == "rmsnorm" else 28) and chosen.group_threads == 32
        )
        assert (chosen.lead > 0) == (wanted and not chosen.gang), (norm, columns)
        forward = forward_of(problem)
        chosen = config.forward_config(forward, 16, hopper)
        of_16_bits = name in ("float16", "bfloat16")
        wanted = of_16_bits and columns in (20480, 32768, 65536)
        if norm == "rmsnorm" and name != "float64":
            paced = (16384, 32768, 65536, 262144, 20480 if of_16_bits else 14336)
            wanted = columns in paced and chosen.kernel == "forward_staged"
        assert (chosen.lead > 0) == wanted, (norm, columns)


# By norm and type: lengths that keep pace where memory is fast, that do not, and that keep it where it is slow.
PACED_OR_NOT = {
    ("rmsnorm", "bfloat16"): (
        (640, 680, 840, 1440, 2904, 4000, 5800, 11600, 24576, 28000, 32000, 35200, 49152, 60000, 80000, 128000, 131072),
        (520, 600, 1352, 2704, 5400, 10800, 21600, 24000, 26000, 43200, 48000, 52000, 70400, 114688, 122880),
        (520, 600, 1352, 10800, 21600, 26000, 48000, 52000, 80000),
    ),
    ("rmsnorm", "float32"): (
        (776, 1960, 3400, 4400, 6704, 8800, 13000, 20480, 32000, 36864, 40000, 64000, 98304, 114688, 128000),
        (1704, 1800, 3200, 17600, 18432, 35200, 73728, 81920),
        (1704, 3200, 17600, 35200),
    ),
    ("layernorm", "bfloat16"): (
        (
            *(696, 784, 904, 920, 1728, 1840, 2040, 3456, 3592, 4000, 4088, 5952, 6656, 7040, 7160, 7176, 8184),
            *(1088, 2176, 5632, 14080, 14592, 15040, 28736, 30720, 32512, 63488, 64512),
        ),
        (
            *(648, 664, 1472, 1520, 1600, 2064, 2168, 3056, 3200, 4112, 5888, 6272, 8448, 11776, 12032, 12544, 13312),
            *(24576, 26624, 28672, 57408, 60416, 62464, 118784, 131072),
        ),
        (768, 1088, 1792, 2064, 2168, 2176, 4096, 4112, 8192, 8448, 9216, 14336, 16384, 32768, 65536),
    ),
    ("layernorm", "float32"): (
        (768, 960, 1952, 2816, 3072, 3712, 4064, 6144, 6656, 7296, 8072, 9216, 12288, 13568, 15104, 20224, 30720),
        (1664, 1840, 1888, 3328, 17408, 19456, 28672, 36864, 38912, 65536, 73728, 81920),
        (1024, 4096, 5120, 8192, 16384, 65536, 81920),
    ),
}


@pytest.mark.parametrize(("norm", "name"), PACED_OR_NOT)
@ELSEWHERE
def test_pace_is_kept_where_lanes_are_nearly_filled(norm, name):
    """By what was timed where memory is fast; elsewhere LayerNorm's only where they are as good as filled."""
    paced, unpaced, slow_paced = PACED_OR_NOT[norm, name]
    for columns in (*paced, *unpaced, *slow_paced):
        problem = backward(columns, name, name, 1 << 20, norm)
        fast, slow, other = (
            config.backward_config(problem, 16, DEVICES[device]) for device in ("sm_90", "sm_90_slow", "sm_120")
        )
        assert (fast.lead > 0) == ("PACED=1" in fast.definitions), columns
        if fast.gang:
            continue
        assert (fast.lead > 0) == (columns in paced or columns not in unpaced), columns
        if not slow.gang and norm == "layernorm":
            nearly = slow.slab_columns >= 0.99 * slow.per_thread * slow.group_threads
            assert nearly or ("PACED=1" in slow.definitions) == (columns in slow_paced), columns
            assert columns not in slow_paced or "PACED=1" in slow.definitions, columns
        elif not slow.gang:
            assert "PACED=1" in slow.definitions, columns
        assert norm == "layernorm" or other.cluster == 16 or other.route == "split" or other.lead > 0, columns


@pytest.mark.parametrize(("columns", "cluster", "paced"), [(65536, 8, True), (81920, 16, False), (131072, 16, True)])
def test_two_types_of_16_bits_keep_pace_by_what_threads_have_of_columns(columns, cluster, paced):
    """As types of two sizes: in clusters of sixteen only where all columns are there."""
    chosen = config.backward_config(backward(columns, "float16", "bfloat16"), 16, DEVICES["sm_90"])
    assert (chosen.cluster, chosen.lead > 0, "PACED=1" in chosen.definitions) == (cluster, paced, paced)


def forward_least_steps(chosen, norm, name, device):
    """From which on clusters keep pace: of 16-bit types sooner where memory is fast, LayerNorm's with nearly filled
    lanes."""
    per_thread = config.common.columns_of(chosen.definitions)
    filled = chosen.slab_columns / (per_thread * chosen.group_threads)
    timed = device.compute_capability == (9, 0) and not device.has_slow_memory and DTYPES[name].itemsize == 2
    if not timed or (norm == "layernorm" and filled < 0.93):
        return 48
    return 12 if norm == "rmsnorm" and per_thread in (40, 48) else 24


@pytest.mark.parametrize(
    ("norm", "columns", "name", "which", "steps"),
    [
        ("rmsnorm", 19456, "bfloat16", "sm_90", 12),  # 40 columns a thread
        ("rmsnorm", 24576, "float16", "sm_90", 12),  # 48
        ("rmsnorm", 16384, "bfloat16", "sm_90", 24),  # 32
        ("layernorm", 20480, "bfloat16", "sm_90", 24),
        ("layernorm", 20992, "bfloat16", "sm_90", 48),  # idle lanes
        ("layernorm", 65536, "float16", "sm_90", 24),
        ("rmsnorm", 8192, "float32", "sm_90", 48),
        ("rmsnorm", 19456, "bfloat16", "sm_100", 48),
    ],
)
def test_forward_clusters_keep_pace_from_so_many_steps_on(norm, columns, name, which, steps):
    chosen = config.forward_config(forward_of(backward(columns, name, name, norm=norm)), 16, DEVICES[which])
    assert chosen.paced_steps == steps


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_pace_is_kept_where_the_kernel_is_compiled_to(norm, name, device):
    """In vectors, forward in clusters alone. LayerNorm's blocks that share a multiprocessor have several counters."""
    for columns, aligned in product(PACE_LENGTHS, (True, False)):
        problem = backward(columns, name, name, norm=norm)
        forward = forward_of(problem)
        for chosen in (
            config.backward_config(problem, 16 if aligned else 2, device),
            config.forward_config(forward, 16 if aligned else 2, device),
        ):
            if not chosen.lead:
                idle = norm == "layernorm" and {"COLUMNS_PER_THREAD=64", "CLUSTER=16"} <= set(chosen.definitions)
                gang = "GANG=1" in chosen.definitions and not device.has_slow_memory
                assert "PACED=1" not in chosen.definitions or gang or (idle and chosen.kernel == "forward_staged")
                continue
            assert "PACED=1" in chosen.definitions, (columns, aligned)
            gang = "GANG=1" in chosen.definitions
            assert "VECTOR=1" in chosen.definitions or odd_way(chosen) or gang, (columns, aligned)
            part = (
                norm == "layernorm" and "COLUMNS_PER_THREAD=24" in chosen.definitions and takes_part(chosen.definitions)
            )
            slow = device.has_slow_memory and DTYPES[name].itemsize == 2 and not gang
            usual = config.backward.SLOW_PACE_LEAST_STEPS if slow else config.backward.PACE_LEAST_STEPS[norm]
            least = 48 if part else usual
            if isinstance(chosen, config.ForwardConfig):
                least = forward_least_steps(chosen, norm, name, device)
            assert config.pace(chosen, least * chosen.groups, 1)[0] == chosen.lead
            assert config.pace(chosen, (least - 1) * chosen.groups, 1)[0] == 0
            if isinstance(chosen, config.ForwardConfig):
                assert (chosen.cluster > 1, chosen.step_counters, chosen.drawn_part) == (True, 1, 0)
            else:
                several = norm == "layernorm" and 2 * (chosen.shared_bytes + 1024) <= device.shared_bytes
                assert chosen.step_counters == (config.common.STEP_COUNTERS if several else 1), (columns, aligned)
                assert (
                    "PACED=1"
                    in config.backward_config(replace(problem, rows=1), 16 if aligned else 2, device).definitions
                )
        mixed = config.backward_config(backward(columns, name, "float64", norm=norm), 16 if aligned else 2, device)
        assert mixed.lead == 0 or name == "float64", (columns, aligned)


# Of 32 columns a thread, and of 16: rows that leave no more than a quarter of the columns free for which threads find
# room, of two types of 16 bits an eighth, in clusters of sixteen none, and others.
TWO_TYPES_PACED = {
    "float32": ((256, 1000, 1536, 3072, 4096, 6144, 12288, 49152, 131072), (264, 1280, 2560, 4608, 5120, 40960, 98304)),
    "float64": ((128, 1000, 1536, 2048, 4096, 6144, 24576, 65536), (136, 1280, 2560, 5120, 9216, 40960, 49152)),
    "float16": ((256, 1000, 4096, 7168, 131072), (264, 1280, 1536, 2560, 3072, 4608, 6144, 12288, 49152, 98304)),
}


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    ("x", "dy"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16"), ("float64", "float32")],
)
def test_x_and_dy_of_two_types_keep_pace_where_threads_have_columns(norm, x, dy):
    """If memory is fast, rows come in vectors, and dy is no wider than the arithmetic."""
    of_16_bits = DTYPES[x].itemsize == DTYPES[dy].itemsize
    paced, unpaced = TWO_TYPES_PACED["float16" if of_16_bits else "float64" if x == "float64" else "float32"]
    for columns in (*paced, *unpaced):
        problem = backward(columns, x, dy, norm=norm)
        fast = config.backward_config(problem, 16, DEVICES["sm_90"])
        assert fast.cluster == 1 or columns > 4096
        assert (fast.lead > 0) == ("PACED=1" in fast.definitions) == (columns in paced), columns
        assert ("backward_staged.cu", fast.definitions) in compiled_for(DEVICES["sm_90"])
        slow = config.backward_config(problem, 16, DEVICES["sm_90_slow"])
        off_16 = config.backward_config(problem, 2, DEVICES["sm_90"])
        wide = config.backward_config(backward(columns, "bfloat16", "float64", norm=norm), 16, DEVICES["sm_90"])
        for other in (off_16, wide, *([] if of_16_bits else [slow])):
            assert (other.lead, "PACED=1" in other.definitions) == (0, False), columns
        if of_16_bits:  # there as one type
            filled = slow.slab_columns >= 0.99 * slow.per_thread * slow.group_threads and slow.cluster < 16
            short = slow.per_thread == 16 and (norm == "layernorm" or slow.group_threads == 32)
            assert (slow.lead > 0) == (short or (norm == "layernorm" and filled)), columns


@pytest.mark.parametrize(
    ("norm", "columns", "name", "quarters"),
    [
        ("rmsnorm", 256, "bfloat16", 9),  # two blocks of 16 KB a step
        ("rmsnorm", 1536, "bfloat16", 5),  # five stages of 24 KB
        ("rmsnorm", 7168, "bfloat16", 6),  # four of 28 KB
        ("rmsnorm", 4096, "bfloat16", 7),  # three of 32 KB
        ("rmsnorm", 32, "bfloat16", 9),
        ("layernorm", 32, "bfloat16", 7),
        ("layernorm", 4096, "bfloat16", 7),  # four of 32 KB
        ("layernorm", 3072, "bfloat16", 9),  # 24 columns a thread
        ("layernorm", 5120, "bfloat16", 6),  # 40 KB
        ("layernorm", 14336, "bfloat16", 8),  # 28 columns a thread
        ("layernorm", 384, "bfloat16", 9),
        ("layernorm", 3584, "float32", 7),
        ("layernorm", 14336, "float32", 5),
        ("layernorm", 32768, "bfloat16", 8),  # clusters of four
        ("rmsnorm", 20480, "bfloat16", 6),  # two blocks of 20 KB
        ("rmsnorm", 24576, "bfloat16", 9),  # five of 24 KB in clusters of four
        ("rmsnorm", 131072, "bfloat16", 6),  # of sixteen
        ("layernorm", 262144, "float32", 0),  # gangs
        ("rmsnorm", 16384, "float32", 4),
        ("layernorm", 4096, "float32", 5),
        ("layernorm", 16384, "float32", 7),
    ],
)
@ELSEWHERE
def test_a_walker_of_larger_steps_has_fewer_before_the_others(norm, columns, name, quarters):
    assert config.backward_config(backward(columns, name, name, 1 << 20, norm), 16, DEVICES["sm_90"]).lead == quarters


@pytest.mark.parametrize(
    ("norm", "columns", "name", "long", "short"),
    [
        *(("layernorm", columns, "bfloat16", 4, 3) for columns in (1024, 2048, 4096, 8192, 16384)),
        ("layernorm", 4096, "float16", 4, 3),
        ("layernorm", 16384, "float32", 4, 3),
        ("layernorm", 8192, "float32", 4, 3),
        ("rmsnorm", 32768, "bfloat16", 4, 3),
        ("rmsnorm", 6144, "bfloat16", 5, 4),
        ("rmsnorm", 12288, "float16", 5, 4),
        ("layernorm", 7168, "bfloat16", 4, 4),
        ("layernorm", 32768, "bfloat16", 4, 3),
        ("layernorm", 5120, "bfloat16", 3, 3),  # from here on: would lose, or have no room for one more
        ("layernorm", 512, "bfloat16", 3, 3),
        ("rmsnorm", 512, "bfloat16", 3, 3),
        ("rmsnorm", 4096, "bfloat16", 3, 3),
    ],
)
def test_more_is_in_flight_where_pace_is_kept(norm, columns, name, long, short):
    """In launches so long that it is, where no column blocks sum dw and db; nothing else depends on that here."""
    hopper = DEVICES["sm_90"]
    chosen = config.backward_config(backward(columns, name, name, 1 << 20, norm), 16, hopper)
    walkers, groups = at_once_on_h200(chosen), chosen.groups
    least = config.backward.PACE_LEAST_STEPS[norm]
    for steps, stages in ((least, long), (least - 1, short)):
        problem = backward(columns, name, name, steps * walkers * groups, norm)
        chosen = config.backward_config(problem, 16, hopper)
        assert (chosen.stages, chosen.groups) == (stages, groups)
        assert config.walkers.partial_rows(chosen, problem, walkers, hopper) == walkers
        kept = config.pace(chosen, problem.rows, walkers)[0] > 0
        assert kept == (steps == least and "PACED=1" in chosen.definitions)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("columns", "row_threads"), [(384, 16), (768, 32), (1536, 64), (3072, 128)])
def test_rows_of_24_columns_a_thread_have_larger_blocks_where_pace_is_kept(columns, row_threads, norm):
    """One of eight warps on a multiprocessor, where there are two of four else, of the same kernel. LayerNorm's short
    rows keep pace in longer launches."""
    part = norm == "layernorm" and row_threads < config.common.WARP
    steps = config.common.LONG_LEAST_STEPS if part else config.backward.PACE_LEAST_STEPS[norm]
    long = steps * 132 * 256 // row_threads
    for rows, name, want_db in (
        (long, "bfloat16", True),
        (long, "float16", True),
        (long - 256 // row_threads, "bfloat16", True),
        (long, "bfloat16", False),
        (long, "float32", True),
    ):
        if norm == "rmsnorm" and not want_db:
            continue
        problem = backward(columns, name, name, rows, norm)
        problem = replace(problem, want_db=want_db and norm == "layernorm")
        chosen = config.backward_config(problem, 16, DEVICES["sm_90"])
        if name == "float32":
            assert ("COLUMNS_PER_THREAD=24" in chosen.definitions) == (columns > 384)
            assert columns == 384 or chosen.threads < 256
            continue
        large = rows == long and want_db
        assert (chosen.threads, chosen.group_threads) == (256 if large else 128, row_threads), (rows, name)
        assert chosen.stages == (5 if large else 4)
        assert chosen.step_counters == (1 if norm == "rmsnorm" or large else config.common.STEP_COUNTERS)
        assert "PACED=1" in chosen.definitions


@pytest.mark.parametrize("rows", [1 << 20, 4096, 100])
@pytest.mark.parametrize("columns", [384, 768, 1536, 3072, 6144, 12288, 32768, 262144])
@ELSEWHERE
def test_calls_for_dx_alone_have_the_blocks_of_others(columns, rows):
    """They keep pace, too, by a kernel of their own, in short launches by that of walkers beside column blocks."""
    problem = backward(columns, "bfloat16", "bfloat16", rows, "rmsnorm")
    one, other = (
        config.backward_config(replace(problem, want_dw=want_dw), 16, DEVICES["sm_90"]) for want_dw in (True, False)
    )
    assert "PACED=1" in one.definitions
    assert other.definitions == (*one.definitions, "DX_ALONE=1")
    assert (other.group_threads, other.slab_columns, other.slabs) == (one.group_threads, one.slab_columns, one.slabs)
    if rows == 1 << 20:  # with few, blocks are larger beside column blocks
        assert other == one._replace(definitions=other.definitions)
    assert config.few_rows_definitions(other) == config.few_rows_definitions(one)
    assert set(one.unpaced_definitions) == set(other.definitions) - {"PACED=1"}
    assert other.unpaced_definitions == one.unpaced_definitions


@pytest.mark.parametrize(
    ("norm", "columns", "gap", "stages"),
    [
        ("layernorm", 4096, 0, 3),  # two rows in a block
        ("layernorm", 4096, 64, 3),  # two blocks on a multiprocessor
        *(("layernorm", columns, gap, 4) for columns in (8192, 16384, 32768) for gap in (0, 64)),
        ("layernorm", 12288, 0, 4),  # 24 columns a thread
        *(("rmsnorm", columns, 0, 3) for columns in (4096, 8192, 16384)),
        ("rmsnorm", 32768, 0, 4),
    ],
)
def test_rings_of_long_rows_without_db(norm, columns, gap, stages):
    """Steps of 32 KB, of 24 KB with fewer columns: a stage more where that gained, in long launches for dx alone."""
    problem = backward(columns, "bfloat16", "bfloat16", 1 << 20, norm)
    stride = columns + gap
    problem = replace(problem, want_dw=False, want_db=False, x_row_stride=stride, dy_row_stride=stride)
    chosen, short = (
        config.backward_config(replace(problem, rows=rows), 16, DEVICES["sm_90"]) for rows in (1 << 20, 300)
    )
    assert chosen.stages == stages
    assert short.stages == (4 if columns == 12288 else 3)


@pytest.mark.parametrize("columns", [520, 768])
def test_blocks_beside_others_have_no_more_in_flight(columns):
    """Rows with gaps, of a warp each: eight blocks on a multiprocessor."""
    problem = backward(columns, "bfloat16", "bfloat16", 1 << 20, "rmsnorm")
    problem = replace(problem, x_row_stride=columns + 8, dy_row_stride=columns + 8)
    long, short = (
        config.backward_config(replace(problem, rows=rows), 16, DEVICES["sm_90"]) for rows in (1 << 20, 4096)
    )
    assert (long.threads, long.stages) == (32, short.stages)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("columns", "blocks"), [(640, 8), (1024, 8), (2048, 4), (4096, 2), (8192, 1)])
def test_many_blocks_count_their_steps_in_several_places(norm, columns, blocks):
    """Rows with gaps, one of each block; of so many rows that pace is kept."""
    problem = backward(columns, "bfloat16", "bfloat16", 1 << 22, norm)
    problem = replace(problem, x_row_stride=columns + 8, dy_row_stride=columns + 8)
    chosen = config.backward_config(problem, 16, DEVICES["sm_90"])
    assert blocks_at_once(chosen, DEVICES["sm_90"]) == blocks
    several = blocks > (2 if norm == "rmsnorm" else 1)
    assert chosen.step_counters == (config.common.STEP_COUNTERS if several else 1)
    together = replace(problem, x_row_stride=columns, dy_row_stride=columns)
    usual = config.backward_config(together, 16, DEVICES["sm_90"])
    assert norm == "layernorm" or usual.step_counters == 1
    assert beside_lines(usual) == beside_lines(chosen)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_short_row_is_held_alike_with_gaps_between_rows(norm, name, device):
    """By as many lanes, each with as many columns: the order of its sums."""
    for columns in range(8, 513, 8):
        together = backward(columns, name, name, norm=norm)
        apart = replace(together, x_row_stride=columns + 8, dy_row_stride=columns + 8)
        for choose in (config.backward_config, config.forward_config):
            one, other = (choose(problem, True, device) for problem in (together, apart))
            assert one.group_threads == other.group_threads, (columns, choose)
            assert defined(one, "COLUMNS_PER_THREAD") == defined(other, "COLUMNS_PER_THREAD"), (columns, choose)
            assert takes_part(one.definitions) == takes_part(other.definitions), (columns, choose)


@pytest.mark.parametrize(
    ("norm", "columns", "x_gap", "dy_gap", "route"),
    [
        ("rmsnorm", 512, 0, 0, "staged"),
        ("rmsnorm", 512, 64, 64, "staged"),  # strides 1.125 times as long as rows
        ("rmsnorm", 512, 128, 128, "direct"),
        ("rmsnorm", 512, 128, 0, "staged"),  # on average
        ("rmsnorm", 512, 256, 0, "direct"),
        ("layernorm", 512, 256, 256, "staged"),
        ("layernorm", 512, 264, 256, "direct"),
        ("rmsnorm", 512, 1, 0, "staged"),  # off 16 bytes
        ("rmsnorm", 300, 450, 450, "staged"),
        ("layernorm", 300, 451, 450, "direct"),
        ("rmsnorm", 640, 1, 1, "staged"),  # of whole warps
        ("layernorm", 1024, 3, 1, "staged"),
        ("rmsnorm", 512, -512, 0, "direct"),  # the same row again and again
        ("rmsnorm", 512, -1024, 0, "direct"),  # from the last to the first
        ("rmsnorm", 512, -504, 512, "direct"),  # rows that overlap
    ],
)
def test_short_rows_with_small_gaps_share_copies(norm, columns, x_gap, dy_gap, route):
    problem = backward(columns, "bfloat16", "bfloat16", 1 << 20, norm)
    problem = replace(problem, x_row_stride=columns + x_gap, dy_row_stride=columns + dy_gap)
    aligned = all(n % 8 == 0 for n in (columns, x_gap, dy_gap))
    chosen = config.backward_config(problem, 16 if aligned else 2, DEVICES["sm_90"])
    assert chosen.route == route
    assert ("ROW_GAPS=1" in chosen.definitions) == (route == "staged" and (x_gap, dy_gap) != (0, 0) and columns <= 512)
    if route == "staged":
        assert chosen.groups > 1
        strides = problem.x_row_stride, problem.dy_row_stride
        step = sum(
            config.common.part_bytes("bfloat16", aligned, (chosen.groups - 1) * each + columns) for each in strides
        )
        outer = config.backward._column_sums_bytes(problem, defined(chosen, "COLUMNS_PER_THREAD")) * chosen.threads
        assert chosen.stages * step + outer <= chosen.shared_bytes, "the gaps have room"
        assert chosen.stages * step + 4 * columns <= chosen.alone_shared_bytes, "and w on its way"


@pytest.mark.parametrize(
    ("columns", "gap", "several"), [(640, 8, False), (640, 1, True), (640, 65, False), (641, 0, True)]
)
def test_rows_of_whole_warps_with_gaps_share_copies_off_16_bytes_alone(columns, gap, several):
    """And then without another kernel, beside one for rows that leave whole lines."""
    dense = backward(columns, "bfloat16", "bfloat16", 1 << 20, "rmsnorm")
    problem = replace(dense, x_row_stride=columns + gap, dy_row_stride=columns + gap)
    aligned = columns % 8 == gap % 8 == 0
    chosen = config.backward_config(problem, 16 if aligned else 2, DEVICES["sm_90"])
    assert (chosen.groups > 1) == several
    assert beside_lines(chosen) == beside_lines(config.backward_config(dense, 16 if aligned else 2, DEVICES["sm_90"]))


@pytest.mark.parametrize("most", [0, 1, 2, 3, 6, 8, 12, 16])
def test_counts_of_blocks_leave_out_no_power_of_two(most):
    """Three, then two: a third of the threads fewer, not two thirds."""
    tried = config.common.counts_to_try(most)
    assert tried[0] == max(1, most)
    assert list(tried) == sorted(tried, reverse=True)
    assert {1 << power for power in range(5) if 1 << power <= most} <= set(tried)


@pytest.mark.parametrize(
    ("columns", "blocks"), [(640, 3), (661, 2), (735, 2), (1290, 2), (1513, 2), (2561, 2), (3071, 2)]
)
def test_float32_off_16_bytes_has_as_many_blocks_as_have_room(columns, blocks):
    chosen = config.backward_config(backward(columns, "float32", "float32", 1 << 20, "rmsnorm"), 2, DEVICES["sm_90"])
    assert blocks_at_once(chosen, DEVICES["sm_90"]) == blocks


def test_data_of_the_size_of_the_cache_is_read_once():
    """x, dy and dx together count, each with its own type."""
    least, most = config.walkers.READ_ONCE_BYTES
    for dy, itemsizes in (("bfloat16", 6), ("float32", 8)):
        rows = [
            size // (1024 * itemsizes) for size in (least - 1, least + 1024 * itemsizes, most, most + 1024 * itemsizes)
        ]
        chosen = [config.reads_once(backward(1024, "bfloat16", dy, rows=number)) for number in rows]
        assert chosen == [False, True, True, False]


def test_two_types_have_accesses_of_the_larger_and_rows_that_are_whole_in_both():
    """Of dy no more than of the arithmetic's type."""
    of_types = {
        ("bfloat16", "float32"): 4,
        ("float32", "float16"): 4,
        ("float64", "bfloat16"): 2,
        ("float32", "float64"): 4,
    }
    assert {types: config.common.access_width(*types) for types in of_types} == of_types
    assert config.common.access_width("bfloat16", "bfloat16") == 8
    assert config.common.vector_width("bfloat16", "float32") == 8
    assert config.common.vector_width("float32", "float64") == 4
    assert config.common.vector_width("float64") == 2


@pytest.mark.parametrize(
    ("multiprocessors", "gbps", "slow"),
    [
        (132, 4916, False),  # an H200
        (132, 0, False),  # unknown
        (132, 3352, True),  # an H100 with HBM3,
        (114, 2039, True),  # with HBM2e,
        (132, 3938, True),  # of an H100 NVL
        (148, 8000, False),  # a B200
        (1, 4916, False),  # a part of a device
    ],
)
def test_which_memory_is_slow(multiprocessors, gbps, slow):
    assert config.Device((9, 0), multiprocessors, 232448, gbps).has_slow_memory == slow


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@ELSEWHERE
def test_slow_memory_changes_no_sum_of_a_row(norm, name):
    """Kernels, but for steps that are drawn and pace, and how they split rows are the same, whatever the memory; but
    not backward where, as it is fast, clusters of sixteen stand in for gangs, a thread has over 40 columns, or fewer
    blocks share LayerNorm's rows of 40."""
    fast, slow = DEVICES["sm_90"], DEVICES["sm_90_slow"]
    for columns, aligned, rows in product(COLUMNS, (True, False), (1, 300, 1 << 16)):
        problem = backward(columns, name, name, rows, norm)
        chosen = [config.backward_config(problem, 16 if aligned else 2, device) for device in (fast, slow)]
        differ = (chosen[1].gang and chosen[0].cluster == 16) or chosen[0].per_thread > 40
        differ |= norm == "layernorm" and chosen[0].per_thread == 40 and 2 * chosen[0].cluster == chosen[1].cluster
        for other in () if differ else chosen:
            numbers = "lead", "paced_steps", "stages", "shared_bytes", "alone_shared_bytes", "threads", "step_counters"
            same = dict.fromkeys(numbers, 0)
            by_memory = odd_way(other) or ("VECTOR=1" in other.definitions and DTYPES[name].itemsize <= 4)
            paced = {"PACED=1"} if by_memory else set()
            kept = [[text for text in one.definitions if text not in paced] for one in (other, chosen[0])]
            assert kept[0] == kept[1], (columns, aligned)
            same["definitions"] = ()
            assert other._replace(**same) == chosen[0]._replace(**same), (columns, aligned)
        chosen = [config.forward_config(forward_of(problem), 16 if aligned else 2, device) for device in (fast, slow)]
        large, per_thread = (
            chosen[0].cluster >= (4 if norm == "rmsnorm" else 8),
            defined(chosen[0], "COLUMNS_PER_THREAD"),
        )
        by_memory = large and (per_thread == 32 if norm == "rmsnorm" else per_thread in (40, 48))
        others = ("DRAW_SHORT_ROWS=1", *(("PACED=1",) if by_memory else ()))
        kept = [[text for text in one.definitions if text not in others] for one in chosen]
        assert kept[0] == kept[1]
        assert chosen[0][3:5] == chosen[1][3:5], "threads of a block and of a row"


@pytest.mark.parametrize(
    ("norm", "columns", "name", "quarters"),
    [
        ("rmsnorm", 256, "bfloat16", 5),  # not nine
        ("rmsnorm", 4096, "bfloat16", 5),  # not seven
        ("rmsnorm", 7168, "float16", 4),  # not six
        ("rmsnorm", 1536, "bfloat16", 3),  # not five
        ("layernorm", 3072, "bfloat16", 4),  # not nine
        ("layernorm", 4096, "float16", 4),  # not seven
        ("layernorm", 5120, "bfloat16", 3),  # not six
        ("rmsnorm", 16384, "float32", 4),  # as where it is fast
        ("layernorm", 16384, "float32", 7),
        ("rmsnorm", 131072, "bfloat16", 5),
    ],
)
def test_where_memory_is_slow_a_walker_has_fewer_steps_before_the_others(norm, columns, name, quarters):
    problem = backward(columns, name, name, 1 << 20, norm)
    assert config.backward_config(problem, 16, DEVICES["sm_90_slow"]).lead == quarters


def test_where_memory_is_slow_rows_with_gaps_of_a_warp_or_less_keep_their_lead():
    """Eight blocks on a multiprocessor, or several rows to a block; of rows of two warps there are four.

    Where memory is fast blocks of one warp have no lead.
    """
    for norm, columns in product(("rmsnorm", "layernorm"), (128, 512, 1024, 2048)):
        stride = columns + 8
        problem = replace(
            backward(columns, "bfloat16", "bfloat16", 1 << 18, norm), x_row_stride=stride, dy_row_stride=stride
        )
        fast, slow = (config.backward_config(problem, 16, DEVICES[name]) for name in ("sm_90", "sm_90_slow"))
        usual, of_two_warps = (9, 5) if norm == "rmsnorm" else (7, 4)
        leads = {128: (usual, usual), 512: (usual, usual), 1024: (0, 7), 2048: (7, of_two_warps)}
        assert (fast.lead, slow.lead) == leads[columns], (norm, columns)
        assert (slow.paced_steps == fast.paced_steps) == (columns <= 1024), (norm, columns)


def test_where_memory_is_slow_steps_are_drawn_from_ten_steps_on():
    """Whatever the ring holds; but where that has its least stages, so many steps are not drawn."""
    device = DEVICES["sm_90_slow"]
    for norm, columns, steps in product(("rmsnorm", "layernorm"), range(64, 4097, 8), (10, 12, 15)):
        problem = forward_of(backward(columns, "bfloat16", "bfloat16", 1 << 20, norm))
        chosen = config.forward_config(problem, 16, device)
        if chosen.kernel != "forward_staged" or not chosen.drawn_part:
            continue
        walkers = device.multiprocessors * blocks_at_once(chosen, device)
        chosen = config.forward_config(replace(problem, rows=steps * walkers * chosen.groups), 16, device)
        usual = config.forward_config(replace(problem, rows=steps * walkers * chosen.groups), 16, DEVICES["sm_90"])
        drawn_steps = config.forward_steps(chosen, steps * walkers * chosen.groups, walkers)[2]
        assert drawn_steps > 0 or usual.stages > steps * chosen.drawn_part, (norm, columns, steps, chosen.stages)


@pytest.mark.parametrize(
    ("columns", "rows", "blocks"), [(4096, 1017, (43, 64)), (4096, 488, (43, 43)), (32768, 127, (44, 52))]
)
def test_where_memory_is_slow_walkers_are_few_and_column_blocks_many(columns, rows, blocks):
    problem = backward(columns, "bfloat16", "bfloat16", rows)
    found = []
    for name in ("sm_90", "sm_90_slow"):
        chosen = config.backward_config(problem, 16, DEVICES[name])
        found.append(config.grid(chosen, problem, 30 if chosen.cluster > 1 else 132, DEVICES[name]).column_blocks)
    assert tuple(found) == blocks


@pytest.mark.parametrize(
    ("norm", "columns", "x", "gap", "slow_part", "fast_part"),
    [
        ("layernorm", 16, "bfloat16", 0, 1 / 2, None),
        ("layernorm", 128, "bfloat16", 0, 1 / 2, 1 / 2),
        ("layernorm", 512, "bfloat16", 0, 1 / 2, 1 / 2),
        ("layernorm", 384, "bfloat16", 0, 1 / 2, 1 / 4),  # 24 columns
        ("layernorm", 128, "bfloat16", 8, 0, 0),
        ("layernorm", 40, "float32", 0, 1 / 2, None),
        ("layernorm", 48, "float32", 0, 1 / 2, 1 / 4),  # 24 columns a thread
        ("layernorm", 64, "float32", 0, 1 / 2, 3 / 4),
        ("layernorm", 512, "float32", 0, 1 / 4, 1 / 4),  # alone on a multiprocessor
        ("layernorm", 512, "float32", 8, 0, 0),
        ("layernorm", 4096, "bfloat16", 0, 1 / 2, 1 / 2),
        ("layernorm", 6144, "bfloat16", 0, 1 / 2, 1 / 4),  # 24 columns a thread
        ("layernorm", 10240, "bfloat16", 0, 1 / 4, 1 / 4),
        ("layernorm", 14336, "bfloat16", 0, 1 / 4, 1 / 4),
        ("layernorm", 15360, "bfloat16", 0, 1 / 4, 1 / 8),  # idle lanes
        ("rmsnorm", 4096, "bfloat16", 0, 1 / 2, 3 / 4),
        ("rmsnorm", 4088, "bfloat16", 0, 1 / 2, 1 / 4),
        ("rmsnorm", 4096, "float64", 0, 1 / 4, 1 / 8),
        ("rmsnorm", 3072, "bfloat16", 0, 1 / 2, 1 / 4),  # 24 columns
        ("rmsnorm", 7168, "bfloat16", 0, 1 / 2, 3 / 4),
        ("rmsnorm", 7680, "bfloat16", 0, 1 / 4, 1 / 8),
        ("rmsnorm", 8192, "bfloat16", 0, 1 / 4, 3 / 8),
        ("rmsnorm", 128, "bfloat16", 0, 1 / 2, 3 / 4),
        ("rmsnorm", 128, "float64", 0, 1 / 2, 1 / 2),
        ("rmsnorm", 24, "bfloat16", 0, 1 / 2, 1 / 4),  # steps of 6 KB
        ("rmsnorm", 129, "bfloat16", 0, 1 / 2, 1 / 4),  # of 4 KB
        ("rmsnorm", 257, "float32", 0, 1 / 2, 3 / 4),  # of 8 KB
        ("rmsnorm", 32768, "bfloat16", 0, 0, 0),
    ],
)
def test_steps_that_are_drawn(norm, columns, x, gap, slow_part, fast_part):
    """Where memory is slow and fast; None: not by the same kernel, and nothing is drawn."""
    problem = replace(forward_of(backward(columns, x, x, 4069, norm)), x_row_stride=columns + gap)
    alignment = 16 if columns % 8 == 0 else 2
    slow, fast = (config.forward_config(problem, alignment, DEVICES[name]) for name in ("sm_90_slow", "sm_90"))
    alone = blocks_at_once(fast, DEVICES["sm_90"]) == 1
    assert (slow.drawn_part, slow.drawn_steps) == (slow_part, 10)
    assert (fast.drawn_part, fast.drawn_steps) == (fast_part or 0, 16 if alone or alignment < 16 else 12)
    short = norm == "layernorm" and columns <= 512 and not gap
    assert ("DRAW_SHORT_ROWS=1" in slow.definitions) == short
    assert ("DRAW_SHORT_ROWS=1" in fast.definitions) == (short and fast_part is not None)


@pytest.mark.parametrize(
    ("name", "columns", "per_thread", "lanes"),
    [
        *(("bfloat16", 16, 16, 1), ("bfloat16", 24, 16, 2), ("bfloat16", 32, 16, 2), ("bfloat16", 48, 24, 2)),
        *(("bfloat16", 64, 16, 4), ("bfloat16", 128, 32, 4), ("bfloat16", 256, 32, 8), ("bfloat16", 512, 32, 16)),
        *(("float32", 24, 16, 2), ("float32", 32, 16, 2), ("float32", 64, 32, 2), ("float32", 512, 16, 32)),
    ],
)
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_short_rows_of_vectors_in_the_forward_pass(norm, name, columns, per_thread, lanes):
    """No fewer than four lanes have 32 columns of a row each, in float32 two: so far apart they would meet in banks."""
    chosen = config.forward_config(forward_of(backward(columns, name, name, norm=norm)), 16, DEVICES["sm_90"])
    assert (defined(chosen, "COLUMNS_PER_THREAD"), chosen.group_threads) == (per_thread, lanes)
    assert takes_part(chosen.definitions) == (per_thread != 16)
    if takes_part(chosen.definitions):
        assert defined(chosen, "PART_OF_WARP") == lanes


@pytest.mark.parametrize("x", DTYPES)
def test_kernels_that_know_the_lanes_of_a_row_have_as_many(x):
    """kOneWarp of staged.cuh: and in vectors no row of as few columns a thread takes more than a warp."""
    lengths = (*range(1, 530), *range(536, 3000, 104), 4096, 12288, 40960, 262144)
    for device, columns, norm, alignment in product(DEVICES.values(), lengths, ("rmsnorm", "layernorm"), (16, 2)):
        problem = backward(columns, x, x, norm=norm)
        other = backward(columns, x, "float64" if x == "float32" else "float32", norm=norm)
        for chosen in (
            config.backward_config(problem, alignment, device),
            config.backward_config(other, alignment, device),
            config.forward_config(forward_of(problem), alignment, device),
        ):
            at = (device.compute_capability, columns, norm, alignment, chosen.definitions)
            if takes_part(chosen.definitions):
                assert defined(chosen, "PART_OF_WARP") == chosen.group_threads <= 32, at
            elif "VECTOR=1" in chosen.definitions and any(text.startswith("CLUSTER=") for text in chosen.definitions):
                few = defined(chosen, "COLUMNS_PER_THREAD") <= config.common.columns_per_thread(x)
                assert not few or chosen.group_threads <= 32, at


@pytest.mark.parametrize(("rows", "stages"), [(2000, 3), (4069, 4), (16384, 4), (40690, 2)])
def test_where_memory_is_slow_the_forward_pass_has_more_in_flight_in_short_launches(rows, stages):
    """RMSNorm, N=4096, three blocks of a row each on a multiprocessor, from ten to 48 steps of each walker."""
    problem = forward_of(backward(4096, "bfloat16", "bfloat16", rows, "rmsnorm"))
    assert config.forward_config(problem, 16, DEVICES["sm_90_slow"]).stages == stages
    assert config.forward_config(problem, 16, DEVICES["sm_90"]).stages == (2 if rows > 10000 else 3)
    assert config.forward_config(replace(problem, norm="layernorm"), 16, DEVICES["sm_90_slow"]).stages in (2, 3)


def test_what_was_measured_stands_under_names_that_are_there() -> None:
    """asv_bench/CHOICES.md: a section for each module, with a heading for each group of constants or function."""
    text = (Path(__file__).parent.parent / "asv_bench" / "CHOICES.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    missing, headings = [], 0
    for section in sections:
        stem, _, text_of_module = section.partition(".py\n")
        assert text_of_module.lstrip().startswith("### ")
        module_of_choices = importlib.import_module(f"cupynorm.cuda.config.{stem}")
        for heading in re.findall(r"^### (.*)$", section, flags=re.MULTILINE):
            headings += 1
            names = re.findall(r"`(\w+)(?:\(\))?`", heading)
            assert names, heading
            missing += [f"{stem}.{name}" for name in names if not hasattr(module_of_choices, name)]
    assert headings > 50
    assert not missing
