"""Launch choices: a pure function of the problem and the device, needing no GPU.

What fixes the order of a row's sums (route, vector width, threads and blocks that share a row) depends on the row and
its layout alone, never on how many rows come with it: so a row's dx and y have the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..problem import FLOAT_NAMES, NormProblem

WARP = 32
CLUSTERS = (1, 2, 4, 8, 16)
STAGED_THREADS = 128  # of a block whose groups leave the choice
# Rows of a ring: the one at work, the one before (its place is filled again when the row at work is done), the next
# (its sums are needed early), and at least one on its way. More than five gained nothing at any N.
STAGED_LEAST_STAGES = 4
STAGED_STAGES = 5
SPLIT_THREADS = 256
SMALL_BLOCK = 256  # threads of a block whose groups are warps or parts of warps
WORKSPACE_BYTES = 64 << 20
REDUCTION_SHARED_BYTES = 10 << 10  # left free for a block of the final reduction, which is launched early
STATIC_SHARED_BYTES = 1024  # more than the direct and split kernels declare

BACKWARD_ARGUMENTS = "9P4q6i"  # struct BackwardArguments in backward.cuh
FORWARD_ARGUMENTS = "6P3qd4i"  # struct ForwardArguments in forward.cu
PARTIALS_ARGUMENTS = "4Pq2i"  # struct PartialsArguments in partials.cu

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
ELEMENT_CODES = {None: 0, "float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}  # enum ElementCode in element.cuh


@dataclass(frozen=True)
class Device:
    """What launch choices depend on."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # that one block may have
    driver: int = 12030  # version, as in 12030 for 12.3

    @property
    def has_clusters(self) -> bool:
        """Bulk asynchronous copies, clusters and remote stores into shared memory."""
        return self.compute_capability >= (9, 0)

    @property
    def overlaps_launches(self) -> bool:
        """A kernel may be launched while the one before still runs, also in a captured graph (from driver 12.3 on)."""
        return self.compute_capability >= (9, 0) and self.driver >= 12030

    @property
    def largest_cluster(self) -> int:
        """16 needs a device that allows clusters beyond the portable 8."""
        return {9: 16, 10: 16}.get(self.compute_capability[0], 8) if self.has_clusters else 1


@dataclass(frozen=True)
class BackwardConfig:
    """How one backward problem runs: see the head of the source file for what the words mean."""

    route: str  # "direct", "staged" or "split": backward_<route>.cu
    definitions: tuple[str, ...]
    threads: int
    group_threads: int
    slab_columns: int
    slabs: int
    cluster: int = 1
    stages: int = 0
    shared_bytes: int = 0

    @property
    def groups(self) -> int:
        return self.threads // self.group_threads


@dataclass(frozen=True)
class ForwardConfig:
    kernel: str  # "forward_direct" or "forward_swept"
    definitions: tuple[str, ...]
    threads: int
    group_threads: int

    @property
    def groups(self) -> int:
        return self.threads // self.group_threads


def compute_itemsize(x_name: str) -> int:
    return 8 if x_name == "float64" else 4


def columns_per_thread(x_name: str, route: str, vector: bool) -> int:
    """The staged route keeps no x and dy in registers, which leaves room for more vectors (not for single columns)."""
    columns = 32 if route == "staged" and vector else 16
    return columns // 2 if x_name == "float64" else columns


def staged_max_threads(x_name: str, vector: bool) -> int:
    """kMaxThreads of backward_staged.cu: what leaves a thread the registers that it needs."""
    return 256 if x_name == "float64" else 8192 // columns_per_thread(x_name, "staged", vector)


def vector_width(*names: str) -> int:
    """Elements of a vector access: those of 16 bytes in the smallest type."""
    return 16 // min(ITEMSIZE[name] for name in names)


def backward_config(problem: NormProblem, aligned: bool, device: Device) -> BackwardConfig:
    """Choose the backward kernels; `aligned` says that every row of x, dy and dx starts at a multiple of 16 bytes."""
    x, dy = problem.x_dtype.name, _name(problem.dy_dtype)
    vector = vector_width(x, dy) if aligned and problem.columns % vector_width(x, dy) == 0 else 1
    definitions = _backward_definitions(problem.norm, x, dy, problem.want_db, vector > 1, _reserved_of(problem))
    per_thread = columns_per_thread(x, "direct", vector > 1)
    outer_bytes = _column_sums_bytes(problem, per_thread)

    if problem.columns <= WARP * per_thread:
        lanes = _power_of_two_at_least(_divide_up(problem.columns, per_thread if vector > 1 else 1), WARP)
        return _direct(problem, definitions, SMALL_BLOCK, lanes)
    if device.has_clusters and x == dy:
        staged = _staged(problem, vector, definitions, device)
        if staged is not None:
            return staged
    threads = _whole_warps(_divide_up(problem.columns, per_thread))
    fits = outer_bytes * threads + STATIC_SHARED_BYTES <= device.shared_bytes
    if fits and threads <= direct_max_threads(x, dy, vector > 1):
        return _direct(problem, definitions, threads, threads)
    slab = SPLIT_THREADS * per_thread
    return BackwardConfig(
        route="split",
        definitions=(*definitions, f"-DCOLUMNS_PER_THREAD={per_thread}"),
        threads=SPLIT_THREADS,
        group_threads=SPLIT_THREADS,
        slab_columns=slab,
        slabs=_divide_up(problem.columns, slab),
        shared_bytes=outer_bytes * SPLIT_THREADS,
    )


def direct_max_threads(x: str, dy: str, vector: bool) -> int:
    """kMaxThreads of backward_direct.cu."""
    return 512 if vector and ITEMSIZE[x] == ITEMSIZE[dy] == 2 else 256


def _direct(problem: NormProblem, definitions: tuple[str, ...], threads: int, group: int) -> BackwardConfig:
    per_thread = columns_per_thread(problem.x_dtype.name, "direct", "-DVECTOR=1" in definitions)
    return BackwardConfig(
        route="direct",
        definitions=(*definitions, f"-DCOLUMNS_PER_THREAD={per_thread}"),
        threads=threads,
        group_threads=group,
        slab_columns=problem.columns,
        slabs=1,
        shared_bytes=_column_sums_bytes(problem, per_thread) * threads,
    )


def _column_sums_bytes(problem: NormProblem, per_thread: int) -> int:
    """Shared memory that each thread needs for the second level of dw and db."""
    return per_thread * compute_itemsize(problem.x_dtype.name) * (2 if problem.want_db else 1)


def _staged(problem: NormProblem, vector: int, definitions: tuple[str, ...], device: Device) -> BackwardConfig | None:
    """The smallest cluster whose blocks have room for a ring of enough rows; None where not even the largest has.

    Blocks of 128 threads, two on a multiprocessor, where a row leaves room for that, else one block: on an H200 at
    400 MB of data, N=1024, bfloat16, two blocks of 128 threads took 110 us (RMSNorm) and 112 us (LayerNorm), one of
    256 took 113 and 116. At N=8192, 16384 and 65536 no larger cluster than the smallest was over 1% faster.
    """
    name = problem.x_dtype.name
    per_thread = columns_per_thread(name, "staged", vector > 1)
    max_threads = staged_max_threads(name, vector > 1)
    outer_bytes = _column_sums_bytes(problem, per_thread)
    free_bytes = device.shared_bytes - (REDUCTION_SHARED_BYTES if device.overlaps_launches else 0)
    for cluster in CLUSTERS:
        slab = _divide_up(_divide_up(problem.columns, cluster), vector) * vector
        group = _whole_warps(_divide_up(slab, per_thread))
        if cluster > device.largest_cluster or group > max_threads or (cluster - 1) * slab >= problem.columns:
            continue
        groups = max(1, STAGED_THREADS // group) if cluster == 1 else 1
        threads = groups * group
        row_bytes = 2 * _divide_up(slab * ITEMSIZE[name] + (0 if vector > 1 else 32), 128) * 128
        static_bytes = 2560 + 4 * max_threads // WARP * cluster * 2 * compute_itemsize(name)
        for blocks in (2, 1) if cluster == 1 else (1,):
            stages = (free_bytes // blocks - static_bytes - outer_bytes * threads) // (row_bytes * groups)
            if stages >= STAGED_LEAST_STAGES:
                stages = min(STAGED_STAGES, stages)
                return BackwardConfig(
                    route="staged",
                    definitions=(*definitions, f"-DCOLUMNS_PER_THREAD={per_thread}", f"-DCLUSTER={cluster}"),
                    threads=threads,
                    group_threads=group,
                    slab_columns=slab,
                    slabs=cluster,
                    cluster=cluster,
                    stages=stages,
                    shared_bytes=outer_bytes * threads + row_bytes * groups * stages,
                )
    return None


def partial_rows(config: BackwardConfig, problem: NormProblem, blocks_at_once: int) -> int:
    """How many row walkers (blocks, clusters, or blocks of one slab) run, each with a partial row of dw and db.

    `blocks_at_once` is how many blocks (clusters) the device holds at the same time.
    """
    walkers = _divide_up(blocks_at_once, config.slabs) if config.route == "split" else blocks_at_once
    bytes_a_row = problem.columns * compute_itemsize(problem.x_dtype.name) * (2 if problem.want_db else 1)
    walkers = min(walkers, max(1, WORKSPACE_BYTES // 2 // bytes_a_row), _divide_up(problem.rows, config.groups))
    return max(1, walkers)


# Clusters that an H100 or H200 with 132 multiprocessors holds at once, one block on each, by cluster size.
_CLUSTERS_OF_132 = {2: 66, 4: 30, 8: 15, 16: 7}


def clusters_at_once(reported: int, cluster: int, device: Device) -> int:
    """How many clusters walk the rows, given what the driver reports for this very unit.

    Units of one model differ in which multiprocessors are switched off, and so in what they report; the walkers
    set the order of the sums in dw and db, which are to be the same on all of them.
    """
    usual = _CLUSTERS_OF_132.get(cluster) if device.multiprocessors == 132 else None
    return reported if usual is None else usual * max(1, round(reported / usual))


def sums_walkers(config: BackwardConfig, problem: NormProblem, device: Device) -> int:
    """Blocks that walk rows in the first sweep of the split route: 8 for a multiprocessor, no partial rows to pay."""
    return max(1, min(problem.rows, _divide_up(8 * device.multiprocessors, config.slabs)))


def partials_threads(rows: int) -> int:
    """Threads of a block of the final reduction: few enough to fit beside the kernel before, where rows are few."""
    return 256 if rows <= 160 else 1024


def forward_config(problem: NormProblem, aligned: bool) -> ForwardConfig:
    """Choose the forward kernel; `aligned` says that every row of x and y starts at a multiple of 16 bytes."""
    x = problem.x_dtype.name
    vector = vector_width(x) if aligned and problem.columns % vector_width(x) == 0 else 1
    definitions = _forward_definitions(problem.norm, x, vector > 1, _reserved_of(problem))
    per_thread = columns_per_thread(x, "direct", vector > 1)
    if problem.columns <= WARP * per_thread:
        lanes = _power_of_two_at_least(_divide_up(problem.columns, per_thread if vector > 1 else 1), WARP)
        return ForwardConfig("forward_direct", definitions, SMALL_BLOCK, lanes)
    threads = _whole_warps(_divide_up(problem.columns, per_thread))
    max_threads = forward_max_threads(vector > 1)
    if threads <= max_threads:
        return ForwardConfig("forward_direct", definitions, threads, threads)
    return ForwardConfig("forward_swept", definitions, max_threads, max_threads)


def forward_max_threads(vector: bool) -> int:
    """kMaxThreads of forward.cu."""
    return 512 if vector else 256


def partials_definitions(compute_name: str, accumulate: bool = False) -> tuple[str, ...]:
    return (f"-DCOMPUTE_TYPE={compute_name}", f"-DACCUMULATE={int(accumulate)}", _argument_bytes(PARTIALS_ARGUMENTS))


def triad_definitions(x_name: str, streaming: bool) -> tuple[str, ...]:
    return (f"-DELEMENT={x_name}", f"-DSTREAMING={int(streaming)}")


@dataclass(frozen=True)
class Variant:
    """One compilation: a source file, its kernels, its definitions."""

    file: str
    kernels: tuple[str, ...]
    definitions: tuple[str, ...]


def variants(compute_capability: tuple[int, int]) -> Iterator[Variant]:
    """Every compilation that the functions above can ask for on a device of this compute capability."""
    device = Device(compute_capability, multiprocessors=1, shared_bytes=0)
    for norm, x, dy, want_db, vector in product(
        ("rmsnorm", "layernorm"), FLOAT_NAMES, FLOAT_NAMES, (False, True), (False, True)
    ):
        definitions = _backward_definitions(norm, x, dy, want_db, vector)
        direct = (*definitions, f"-DCOLUMNS_PER_THREAD={columns_per_thread(x, 'direct', vector)}")
        yield Variant("backward_direct.cu", ("backward_direct",), direct)
        yield Variant("backward_split.cu", ("backward_split_sums", "backward_split_apply"), direct)
        if device.has_clusters and x == dy:
            staged = (*definitions, f"-DCOLUMNS_PER_THREAD={columns_per_thread(x, 'staged', vector)}")
            for cluster in CLUSTERS:
                if cluster <= device.largest_cluster:
                    yield Variant("backward_staged.cu", ("backward_staged",), (*staged, f"-DCLUSTER={cluster}"))
    for norm, x, vector in product(("rmsnorm", "layernorm"), FLOAT_NAMES, (False, True)):
        yield Variant("forward.cu", ("forward_direct", "forward_swept"), _forward_definitions(norm, x, vector))
    for compute_name in ("float32", "float64"):
        yield Variant("partials.cu", ("reduce_partials",), partials_definitions(compute_name))
    for x, streaming in product(FLOAT_NAMES, (False, True)):
        yield Variant("triad.cu", ("triad",), triad_definitions(x, streaming))


def _reserved(weight_offset: bool = False, per_head: bool = False, add_residual: bool = False) -> tuple[str, ...]:
    return (
        f"-DWEIGHT_OFFSET={int(weight_offset)}",
        f"-DPER_HEAD={int(per_head)}",
        f"-DADD_RESIDUAL={int(add_residual)}",
    )


def _reserved_of(problem: NormProblem) -> tuple[str, ...]:
    add_residual = problem.residual or problem.dresidual_out
    return _reserved(problem.weight_offset != 0.0, problem.heads > 1, add_residual)


def _backward_definitions(
    norm: str, x: str, dy: str, want_db: bool, vector: bool, reserved: tuple[str, ...] = _reserved()
) -> tuple[str, ...]:
    return (
        f"-DLAYER_NORM={int(norm == 'layernorm')}",
        f"-DX_TYPE={x}",
        f"-DDY_TYPE={dy}",
        f"-DWANT_DB={int(want_db)}",
        f"-DVECTOR={int(vector)}",
        *reserved,
        _argument_bytes(BACKWARD_ARGUMENTS),
    )


def _forward_definitions(norm: str, x: str, vector: bool, reserved: tuple[str, ...] = _reserved()) -> tuple[str, ...]:
    return (
        f"-DLAYER_NORM={int(norm == 'layernorm')}",
        f"-DX_TYPE={x}",
        f"-DVECTOR={int(vector)}",
        *reserved,
        _argument_bytes(FORWARD_ARGUMENTS),
    )


def _argument_bytes(layout: str) -> str:
    import struct

    return f"-DARGUMENT_BYTES={struct.calcsize(layout)}"


def _name(dtype: np.dtype[Any] | None) -> str:
    assert dtype is not None
    return dtype.name


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _whole_warps(threads: int) -> int:
    return _divide_up(threads, WARP) * WARP


def _power_of_two_at_least(n: int, most: int) -> int:
    return min(most, 1 << (n - 1).bit_length())
