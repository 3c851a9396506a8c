"""What the choices of both passes share: devices, configurations, how a row is split over lanes, warps and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...problem import NormProblem

WARP = 32
CLUSTERS = (1, 2, 4, 8, 16)
STAGED_MOST_TEAMS = 4  # kMaxTeams
MANY_COLUMNS_BYTES = 160  # kManyColumns of columns.cuh: more than these, as the arithmetic has a thread's columns
STAGED_MAX_THREADS = 256  # kMaxThreads of staged.cuh: what leaves a thread the registers that it needs
STAGED_MOST_STAGES = 8  # kMaxStages of staged.cuh
DX_ALONE = "DX_ALONE=1"  # a definition of backward_staged.cu and backward_wide.cu
OFF_LINES = "OFF_LINES=1"  # and of staged.cuh

# Columns a thread where a row takes whole warps, by whether in vectors and by the arithmetic's type, and for how many
# warps that share a row. Several, so that rows of any length fill the lanes; more off 16 bytes, where lanes without a
# column take as long as the others (an H100, 1 GB, LayerNorm, N=601: 447 → 356 us). One alone is for any number.
Columns = dict[int, tuple[int, ...]]
ANY_WARPS = (1, 2, 4, 8)
STAGED_COLUMNS_PER_THREAD: dict[bool, dict[str, Columns]] = {
    True: {"float32": dict.fromkeys((24, 32, 40), ANY_WARPS), "float64": {16: ANY_WARPS}},
    False: {"float32": dict.fromkeys((20, 24, 28, 32, 36, 40), ANY_WARPS), "float64": {16: ANY_WARPS}},
}

# Of rows of a warp or less: columns a thread, beside columns_per_thread(), and on how many lanes at least and at
# most. Those are chosen that cover least beyond the row (short_row()).
PartLanes = dict[int, tuple[int, int]]

# MOST_COPIED_GAPS of backward.py, for larger types and both passes (an H100, float32, 300 MB, N=512 with gaps of 8:
# 121.1 → 111.4 us; 256 with 64: 118.7 → 125.4, not there).
MOST_COPIED_GAPS_LARGE = {True: 1.17, False: 1.25}

# And of rows of whole warps, off 16 bytes; in vectors each block has one of such rows.
MOST_COPIED_GAPS_LONG = 1.1

# Elements of an access of rows that start at multiples of 8 or 4 bytes, not 16, by bytes of x's type (1 GB, LayerNorm,
# N=300 326 → 254 us, forward 292 → 194); of float32 only where a warp or less holds a row (4098: 252 → 262).
NARROW_VECTORS = {2: (4, 2), 4: (2,)}
NARROW_LONG_ITEMSIZE = 2

# Odd rows, which start or end at odd elements, of 16-bit types, come in pairs of columns (ODD_ROWS of element.cuh). All
# but the first and the last two or three of a thread's pairs are full, so not the shortest; nor those of larger
# clusters than so many blocks, by direction. Of clusters of eight and sixteen there is an odd number, so that one is
# idle: forward they gain all the same (1 GB, LayerNorm, 1001: backward 290 → 245 us, forward 229 → 177, 65537 332 →
# 227; backward, by three stages, 289 → 291, RMSNorm 278 → 272, but with gaps of one, 65536, 268 → 278).
ODD_ITEMSIZE, ODD_LEAST_COLUMNS, ODD_MOST_CLUSTER = 2, 33, {"forward": 16, "backward": 4}
ODD_SLACK_BYTES = 384  # three pairs of each lane of a warp

# What the copy engine moves at once (inferred). Where not all rows begin at such a line, those of whole warps in
# vectors have kernels of their own (OFF_LINES of staged.cuh); and of several blocks that share a row each has whole
# lines (1 GB, 65472, with 8184 columns a block and 8192: 271.7, 239.6 us). Where there are no such kernels, so have
# clusters of LINES_LEAST_CLUSTER blocks and more, if they have room for a row in lines (dy of float32, 101952: 271.4 →
# 256.5, but in clusters of two 8872: 250.3 → 267.9). Else each has so many columns, or whole vectors.
LINE_BYTES, LINES_LEAST_CLUSTER, SLAB_UNIT = 128, 4, 8

STAGED_USUAL_COLUMNS_PER_THREAD: dict[str, Columns] = {"float32": {32: ANY_WARPS}, "float64": {16: ANY_WARPS}}
PACE_FORWARD_LEAST_STEPS = LONG_LEAST_STEPS = 48  # of a walker
AS_GOOD_AS_FULL = 0.99  # part of the columns for which a block's lanes have room

SMALL_BLOCK = 256  # threads of a block whose groups are warps or parts of warps
STEP_COUNTERS = 4  # kStepCounters of counters.cuh
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
ELEMENT_CODES = {None: 0, "float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}  # enum ElementCode in element.cuh


class Device(NamedTuple):
    """What launch choices depend on."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # that one block may have
    memory_gbps: int = 0  # between it and its memory, by the clock; 0: unknown
    most_cluster: int = CLUSTERS[-1]  # blocks that it holds together, as far as the driver was asked

    @property
    def has_clusters(self) -> bool:
        """Bulk asynchronous copies, clusters and remote stores into shared memory."""
        return self.compute_capability >= (9, 0)

    @property
    def has_large_shared_memory(self) -> bool:
        """As devices for data centres have: 227 KB for a block and not 99 (compute capability 12)."""
        return (9, 0) <= self.compute_capability < (12, 0)

    @property
    def has_slow_memory(self) -> bool:
        """Clearly less for a multiprocessor than an H200's 37 GB/s, as most choices have it: an H100 has 25.

        Not of compute capability 12, where nothing was timed.
        """
        return 0 < self.memory_gbps < 33 * self.multiprocessors and self.has_large_shared_memory

    @property
    def has_fast_memory(self) -> bool:
        """As an H200, or what was made for data centres and is not known to be slower."""
        return self.has_large_shared_memory and not self.has_slow_memory

    @property
    def is_fast_9_0(self) -> bool:
        """An H200, say, or what has as much memory bandwidth for a multiprocessor."""
        return self.has_fast_memory and self.compute_capability == (9, 0)

    @property
    def largest_cluster(self) -> int:
        """16 needs a device that allows clusters beyond the portable 8.

        No cluster has more blocks than there are multiprocessors, of whose shared memory each may take most.
        """
        of_architecture = {9: 16, 10: 16}.get(self.compute_capability[0], 8) if self.has_clusters else 1
        most = min(of_architecture, self.multiprocessors, self.most_cluster)
        return max(cluster for cluster in CLUSTERS if cluster <= most)


class BackwardConfig(NamedTuple):
    """How one backward problem runs: see the head of the source file for what the words mean."""

    route: str  # "direct", "staged", "split" or "wide": backward_<route>.cu
    definitions: tuple[str, ...]
    threads: int
    group_threads: int
    slab_columns: int
    slabs: int
    cluster: int = 1
    stages: int = 0
    shared_bytes: int = 0
    alone_shared_bytes: int = 0  # staged route: of kernels in which walkers write dx alone
    lead: int = 0  # of a walker, in quarters of a step, where pace is kept
    paced_steps: int = PACE_FORWARD_LEAST_STEPS  # of a walker, from which on it is
    step_counters: int = 1
    gang: bool = False  # the blocks of a row are no cluster
    step_rows: int = 0  # wide route: of all groups
    lag: int = 0  # and how many steps blocks post themselves before they read one

    @property
    def groups(self) -> int:
        return self.threads // self.group_threads

    @property
    def unpaced_definitions(self) -> tuple[str, ...]:
        """Of the staged kernel in which walkers write dx alone and keep no pace: beside column blocks, which sum dw and
        db, and in short launches for dx alone."""
        return for_dx_alone(self.definitions, paced=False)

    @property
    def per_thread(self) -> int:
        """Columns a thread."""
        return columns_of(self.definitions)


class ForwardConfig(NamedTuple):
    """How one forward problem runs: see the head of the source file for what the words mean."""

    file: str
    kernel: str  # "forward_direct", "forward_split_apply", "forward_staged" or "forward_wide"
    definitions: tuple[str, ...]
    threads: int
    group_threads: int
    slab_columns: int = 0
    slabs: int = 1  # split and wide routes
    cluster: int = 1
    stages: int = 0
    shared_bytes: int = 0
    step_rows: int = 0  # wide route: of all groups
    lag: int = 0  # and how many steps blocks post themselves before they read one
    drawn_part: float = 0.0  # of the steps of a long launch,
    drawn_steps: int = 16  # where each walker has so many
    lead: int = 0  # of a walker, in quarters of a step, where pace is kept
    paced_steps: int = PACE_FORWARD_LEAST_STEPS  # of a walker, from which on it is
    step_counters: int = 1

    @property
    def groups(self) -> int:
        return self.threads // self.group_threads


class Grid(NamedTuple):
    """The blocks of a backward launch."""

    walkers: int  # blocks, clusters, gangs, or blocks of one slab, that walk along the rows
    column_blocks: int = 0  # behind them, blocks that sum dw and db (column_blocks.cuh); 0: the walkers do
    column_threads: int = 0  # of a column block, side by side; those that lie so many apart share columns
    row_parts: int = 1  # column blocks that share a slice's rows


def columns_of(definitions: tuple[str, ...]) -> int:
    """Columns a thread of the kernel."""
    (number,) = (text.partition("=")[2] for text in definitions if text.startswith("COLUMNS_PER_THREAD="))
    return int(number)


class Access(NamedTuple):
    """How a kernel reads and writes rows that do not come in vectors: NARROW_VECTOR and ODD_ROWS of element.cuh."""

    elements: int = 1
    odd: int = 0

    @property
    def definitions(self) -> tuple[str, ...]:
        if self.odd:
            return (f"ODD_ROWS={self.odd}",)
        return (f"NARROW_VECTOR={self.elements}",) if self.elements > 1 else ()


SINGLE = Access()
ODD_IN_WORDS, ODD_ACROSS_WORDS, ODD_BY_ELEMENT = ODD = tuple(Access(2, odd=way) for way in (1, 2, 3))


def narrow_of(definitions: tuple[str, ...]) -> int:
    """Elements of an access that all arrays allow, if rows do not come in vectors."""
    return next((n for n in (4, 2) if f"NARROW_VECTOR={n}" in definitions), 1)


def compute_name(x_name: str) -> str:
    """The type of the arithmetic."""
    return "float64" if x_name == "float64" else "float32"


def compute_itemsize(x_name: str) -> int:
    return ITEMSIZE[compute_name(x_name)]


def columns_per_thread(x_name: str) -> int:
    """Of the direct and split routes, and of short rows (but see short_row()): 64 bytes of the arithmetic's type."""
    return 64 // compute_itemsize(x_name)


def vector_width(*names: str) -> int:
    """Elements of which rows in vectors have whole numbers: those of 16 bytes in the smallest type."""
    return 16 // min(ITEMSIZE[name] for name in names)


def access_width(x: str, dy: str) -> int:
    """Elements that a thread has side by side: kWideVector of backward.cuh."""
    return 16 // max(ITEMSIZE[x], min(ITEMSIZE[dy], compute_itemsize(x)))


def access_of(problem: NormProblem, vector: bool, alignment: int, device: Device) -> Access:
    """For rows that start at multiples of so many bytes. Of odd ones ODD_IN_WORDS, in whose place the caller puts what
    their starts allow."""
    x, itemsize, dy = problem.x_dtype.name, problem.x_dtype.itemsize, problem.dy_dtype
    several = accesses(x, None if dy is None else dy.name, vector, device)
    if problem.columns % 2 or alignment == itemsize:
        held = ODD_LEAST_COLUMNS <= odd_span(problem.columns) and problem.columns <= _odd_most_columns(problem)
        return ODD_IN_WORDS if held and not _fills_warp(problem.columns, x) and ODD_IN_WORDS in several else SINGLE
    even = (access for access in several if access not in ODD)
    fitting = (a for a in even if problem.columns % a.elements == alignment % (a.elements * itemsize) == 0)
    access = next(fitting, SINGLE)
    return access if is_short(problem) or has_long_rows(x, access) else SINGLE


def _fills_warp(columns: int, x: str) -> bool:
    """Whether pairs of a row that starts at an odd element take more columns a thread than the row: single elements
    then do as well (an H100 with 92 multiprocessors, 70 MB, LayerNorm, 1024 with gaps of 1: 36.7, in pairs 38.9 us)."""
    return columns in (WARP * n for n in (columns_per_thread(x), *STAGED_COLUMNS_PER_THREAD[False][compute_name(x)]))


def odd_span(columns: int, warps: int = 1) -> int:
    """Columns of the pairs that hold a row, at an odd element one more on either side, rounded up to an odd number; of
    so many warps that of the warp which has most of it (WarpColumns of columns.cuh)."""
    return min(2 * divide_up(divide_up(columns, 2), warps), columns) | 1


def odd_slack_bytes(access: Access) -> int:
    """Of shared memory behind the ring: so far beyond an odd row its lanes may read, which ask for few pairs whether
    they are there."""
    return ODD_SLACK_BYTES if access in ODD else 0


def _odd_most_columns(problem: NormProblem) -> int:
    """That the largest clusters hold of odd rows, eight warps each, and each warp whole pairs."""
    most = max(STAGED_COLUMNS_PER_THREAD[False][compute_name(problem.x_dtype.name)])
    return ODD_MOST_CLUSTER[problem.direction] * STAGED_MAX_THREADS // WARP * (WARP * most - 2)


def starts_alternate(config: BackwardConfig | ForwardConfig) -> bool:
    """Whether only with an even number of walkers the rows of each start at the same half of a word, as kernels that
    read odd rows by words take for granted."""
    by_words = {*ODD_IN_WORDS.definitions, *ODD_ACROSS_WORDS.definitions}
    return config.groups == 1 and not by_words.isdisjoint(config.definitions)


def has_long_rows(x: str, access: Access) -> bool:
    """Whether rows of more than a warp may be accessed so."""
    return access == SINGLE or ITEMSIZE[x] == NARROW_LONG_ITEMSIZE


def accesses(x: str, dy: str | None, vector: bool, device: Device) -> tuple[Access, ...]:
    """Of several elements, the most first; forward dy is None. None of two types, of which there are many, nor of rows
    in vectors, nor where there are no clusters."""
    if vector or dy not in (None, x) or not device.has_clusters:
        return ()
    odd = ODD if ITEMSIZE[x] == ODD_ITEMSIZE and device.has_large_shared_memory else ()
    return *map(Access, NARROW_VECTORS.get(ITEMSIZE[x], ())), *odd


def kernels_sum_db(problem: NormProblem) -> bool:
    """Whether the kernels sum db. Where x and dy differ in type, in any case: it halves the number of such kernels."""
    return problem.want_db or problem.x_dtype != problem.dy_dtype


def rows_share_copies(problem: NormProblem, vector: bool, gaps: dict[bool, dict[str, float]], *strides: int) -> bool:
    """Whether a block may have several rows: they follow one another, or nearly."""
    if not is_short(problem):
        most = 1 if vector else MOST_COPIED_GAPS_LONG
    else:
        most = gaps[vector][problem.norm] if problem.x_dtype.itemsize == 2 else MOST_COPIED_GAPS_LARGE[vector]
    return min(strides) >= problem.columns and sum(strides) <= most * len(strides) * problem.columns


def is_short(problem: NormProblem) -> bool:
    """Whether a warp or less holds a row."""
    return problem.columns <= _short_columns(problem.x_dtype.name)


def _short_columns(x: str) -> int:
    return WARP * columns_per_thread(x)


def have_gaps(problem: NormProblem, *strides: int) -> bool:
    return any(stride != problem.columns for stride in strides)


def asks_for_gaps(problem: NormProblem, held: tuple[int, int], cluster: int, *strides: int) -> bool:
    """ROW_GAPS of staged.cuh, where a block may have several rows: kernels of whole warps expect gaps in any case.
    `held` is what short_row() or staged_threads() chose."""
    return cluster == 1 and have_gaps(problem, *strides) and not has_whole_warps(problem.x_dtype.name, held)


def rows_lie_apart(config: BackwardConfig, problem: NormProblem) -> bool:
    """Whether gaps between rows leave a block one row a step, and so few warps; without gaps it would have several."""
    small = config.route == "staged" and config.slabs == config.groups == 1 and config.threads < STAGED_MAX_THREADS
    return small and have_gaps(problem, problem.x_row_stride, problem.dy_row_stride)


def data_bytes(problem: NormProblem) -> int:
    """Of x, dy and dx, whether it is wanted or not."""
    itemsizes = 2 * problem.x_dtype.itemsize + ITEMSIZE[name_of(problem.dy_dtype)]
    return problem.rows * problem.columns * itemsizes


Kind = tuple[str, str, str, bool, bool]  # norm, types of x and dy, whether db is summed, whether in vectors


def splits(columns: int, most: int, width: int, x: str, dy: str, device: Device) -> Iterator[tuple[int, int]]:
    """Numbers of blocks, up to `most`, that may share a row, and columns of each, in the order in which to try them."""
    for blocks in (n for n in CLUSTERS if n <= most):
        for slab in slabs(columns, blocks, width, x, dy, device):
            if (blocks - 1) * slab < columns:
                yield blocks, slab


def slabs(columns: int, blocks: int, width: int, x: str, dy: str, device: Device) -> list[int]:
    """Columns of a block, those to be preferred first: of one whole vectors; of several that share a row whole lines,
    or SLAB_UNIT, so that off 16 bytes each block's columns of w start at multiples of these."""
    line, unit = LINE_BYTES // 16 * width, max(width, SLAB_UNIT)
    if blocks == 1:
        units = [width]
    elif width > 1 and _copied_by_lines(x, dy, device):
        units = [line]
    else:
        units = [line, unit] if width > 1 and blocks >= LINES_LEAST_CLUSTER else [unit]
    return [divide_up(divide_up(columns, blocks), unit) * unit for unit in units]


def _copied_by_lines(x: str, dy: str, device: Device) -> bool:
    """Whether rows in vectors, of one type of 16 or 32 bits, are split and kept by LINE_BYTES."""
    return x == dy and ITEMSIZE[x] <= 4 and device.has_large_shared_memory


def may_leave_lines(x: str, dy: str, held: tuple[int, int], vector: bool, device: Device) -> bool:
    """Whether there are kernels with OFF_LINES: of rows of whole warps. They are taken where their ring has room beside
    what bits hang on. `held` is what staged_threads() chose."""
    return vector and has_whole_warps(x, held) and _copied_by_lines(x, dy, device)


def leaves_lines(start: int, *strides: int) -> bool:
    """Whether rows do not all begin at whole lines, by the bytes from one to the next, in x and in dy, whatever their
    number; `start`: from a line to x and to dy, as far as it is known."""
    return any(distance % LINE_BYTES for distance in (start, *strides))


Choice = tuple[Columns, ...]  # those to be preferred first


def staged_choice(x: str, dy: str, vector: bool, cluster: int, device: Device) -> Choice:
    """Columns a thread to choose from; rare combinations, of which there are many, have no choice."""
    if not vector and not device.has_large_shared_memory:  # with 32, and db, kernels spill
        return ({columns_per_thread(x): ANY_WARPS},)
    largest = 4 if vector and ITEMSIZE[x] > 2 else 8
    usual = x != dy or cluster > largest or not device.has_large_shared_memory
    return (_usual_columns(x) if usual else several_columns(x, vector, cluster),)


def several_columns(x: str, vector: bool, cluster: int) -> Columns:
    """In place of up to half of the most on eight warps, as clusters have for long rows, there are more on four."""
    several = STAGED_COLUMNS_PER_THREAD[vector][compute_name(x)]
    return {n: warps for n, warps in several.items() if cluster == 1 or 2 * n > max(several)}


def _usual_columns(x: str) -> Columns:
    return STAGED_USUAL_COLUMNS_PER_THREAD[compute_name(x)]


def staged_threads(slab: int, choice: Choice, access: Access) -> tuple[int, int] | None:
    """Columns a thread, and threads that share a row: those with room for the fewest columns, and of these the fewest
    warps, that hold a block's columns of it, if any do."""
    for preferred in choice:
        if len(preferred) > 1:
            options = [(per_thread * warps, warps) for per_thread in preferred for warps in preferred[per_thread]]
            for room, warps in sorted(options):
                columns_of_warp = odd_span(slab, warps) if access in ODD else divide_up(slab, warps)
                if columns_of_warp * warps <= WARP * room:
                    return room // warps, warps * WARP
        else:
            (per_thread,) = preferred
            if (threads := in_whole_warps(divide_up(slab, per_thread))) <= STAGED_MAX_THREADS:
                return per_thread, threads
    return None


def short_row(x: str, columns: int, parts: PartLanes, access: Access) -> tuple[int, int]:
    """The same for a row of one warp or less: on all routes, for the bits of its sums depend on it."""
    columns = odd_span(columns) if access in ODD else columns
    options = {columns_per_thread(x): (1, WARP), **parts}
    held = ((n, _lanes(columns, n)) for n, (_, most) in options.items() if n * most >= columns)
    return min((h for h in held if h[1] >= options[h[0]][0]), key=lambda held: (held[0] * held[1], -held[0]))


def of_choice(parts: PartLanes, choice: Choice, device: Device) -> PartLanes:
    """Nothing where there is no choice."""
    return parts if device.has_clusters and len(choice[0]) > 1 else {}


def takes_part(x: str, held: tuple[int, int]) -> bool:
    """Whether kernels would not expect so many columns a thread for so few lanes."""
    per_thread, group = held
    usual = columns_per_thread(x)
    return per_thread < usual or (group < WARP and per_thread > usual)


def part_lanes(x: str, held: tuple[int, int]) -> int:
    """PART_OF_WARP of columns.cuh: the lanes that share a row, where kernels would expect more; else 0."""
    return held[1] if takes_part(x, held) else 0


def has_whole_warps(x: str, held: tuple[int, int]) -> bool:
    """kWholeWarps of columns.cuh."""
    return held[0] > columns_per_thread(x) and not takes_part(x, held)


def groups_in_block(block_threads: int, group: int, rows: int) -> int:
    """Of a block: whole warps, beyond that no more than rows; one where a group has no power of two of threads.

    Sums of groups without a row would be added up, too: RMSNorm, 1x4096, 7.6 us with two groups, 6.7 with one.
    """
    if group & (group - 1):
        return 1
    wanted = max(_power_of_two_at_least(rows, block_threads), WARP // group)
    return min(max(1, block_threads // group), wanted)


def counts_to_try(most: int) -> tuple[int, ...]:
    """Of blocks on a multiprocessor, or of groups in a block: as many as there should be, then powers of two, … one."""
    most = max(1, most)
    return most, *(1 << power for power in reversed(range((most - 1).bit_length())))


def staged_static_bytes(x_name: str, cluster: int) -> int:
    """What a block takes beside its dynamic shared memory: the system's kilobyte, BlockState, what meet() declares, or
    in the forward pass numbers of steps, and PaceState. In place of BlockState's sums gangs have 128 bytes more, for
    which there is room."""
    barriers = 8 + 16 + 32 * STAGED_MOST_STAGES * STAGED_MOST_TEAMS
    warps = STAGED_MAX_THREADS // WARP * (32 + 8 * cluster * compute_itemsize(x_name))
    return 1024 + divide_up(barriers + warps + 64 + 48, 128) * 128


def _lanes(columns: int, per_thread: int) -> int:
    """Neighbouring threads of a warp that share a row."""
    return _power_of_two_at_least(divide_up(columns, per_thread), WARP)


def part_bytes(name: str, vector: bool, elements: int, teams: int = 0) -> int:
    """RingPart::part_bytes of staged.cuh, of so many teams whose parts may begin anywhere in a line."""
    lead_bytes = LINE_BYTES * (teams if vector else 1)
    return divide_up(elements * ITEMSIZE[name] + lead_bytes, LINE_BYTES) * LINE_BYTES


def place_bytes(vector: bool, *parts: tuple[str, int], teams: int = 0) -> int:
    """The same of a place in the ring, by the parts' types and elements."""
    return sum(part_bytes(name, vector, elements, teams) for name, elements in parts)


def most_teams(x: str, per_thread: int, cluster: int) -> int:
    """kMaxTeams of staged.cuh, of rows of whole warps in vectors."""
    bytes_of_thread = per_thread * compute_itemsize(x)
    if bytes_of_thread < LINE_BYTES or (cluster == CLUSTERS[-1] and bytes_of_thread <= MANY_COLUMNS_BYTES):
        return 1
    return STAGED_MOST_TEAMS if bytes_of_thread % LINE_BYTES == 0 else STAGED_MOST_TEAMS // 2


def triad_definitions(x_name: str, streaming: bool) -> tuple[str, ...]:
    return (f"ELEMENT={x_name}", f"STREAMING={int(streaming)}")


def staged_definitions(
    per_thread: int,
    cluster: int,
    part: int,
    paced: bool,
    short: bool = False,
    gaps: bool = False,
    draws: bool = False,
    access: Access = SINGLE,
    off_lines: bool = False,
) -> tuple[str, ...]:
    switches = {
        "PACED=1": paced,
        "SHORT_ROWS=1": short,
        "ROW_GAPS=1": gaps,
        "DRAW_SHORT_ROWS=1": draws,
        OFF_LINES: off_lines,
    }
    others = (definition for definition, on in switches.items() if on)
    of_block = f"COLUMNS_PER_THREAD={per_thread}", f"CLUSTER={cluster}"
    return *of_block, *part_definitions(part), *others, *access.definitions


def for_dx_alone(definitions: tuple[str, ...], paced: bool) -> tuple[str, ...]:
    """`paced`: walkers keep pace in long launches, where these definitions have it so. In shorter ones a kernel that
    can takes a little longer (an H200, RMSNorm, 25 MB 1.2%, 50 MB 0.3%)."""
    kept = (text for text in definitions if text != DX_ALONE and (paced or text != "PACED=1"))
    return (*kept, DX_ALONE)


def part_definitions(part: int) -> tuple[str, ...]:
    """`part` is what part_lanes() found."""
    return (f"PART_OF_WARP={part}",) if part else ()


def reserved_definitions(
    weight_offset: bool = False, per_head: bool = False, add_residual: bool = False, accumulate: bool = False
) -> tuple[str, ...]:
    return (
        f"WEIGHT_OFFSET={int(weight_offset)}",
        f"PER_HEAD={int(per_head)}",
        f"ADD_RESIDUAL={int(add_residual)}",
        f"ACCUMULATE={int(accumulate)}",
    )


def reserved_of(problem: NormProblem) -> tuple[str, ...]:
    add_residual = problem.residual or problem.dresidual_out
    return reserved_definitions(problem.weight_offset != 0.0, problem.heads > 1, add_residual, problem.accumulate)


def argument_bytes(layout: str) -> str:
    import struct

    return f"ARGUMENT_BYTES={struct.calcsize(layout)}"


def name_of(dtype: np.dtype[Any] | None) -> str:
    assert dtype is not None
    return str(dtype.name)


def divide_up(a: int, b: int) -> int:
    return -(-a // b)


def in_whole_warps(threads: int) -> int:
    return divide_up(threads, WARP) * WARP


def _power_of_two_at_least(n: int, most: int) -> int:
    return min(most, 1 << (n - 1).bit_length())
