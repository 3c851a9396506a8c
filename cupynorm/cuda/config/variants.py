"""Every kernel that the launch choices can ask for: what is compiled to know that none spills."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from ...problem import FLOAT_NAMES
from .backward import (
    DIRECT_MAX_THREADS,
    STAGED_FILLING_COLUMNS,
    backward_choice,
    backward_definitions,
    direct_definitions,
    gang_definitions,
    has_short_rows,
    may_fill_lanes,
    may_form_gangs,
    may_keep_pace,
    part_of_warp_lanes,
    split_definitions,
    widening_definitions,
)
from .common import (
    ANY_WARPS,
    CLUSTERS,
    ODD,
    ODD_BY_ELEMENT,
    ODD_MOST_CLUSTER,
    SINGLE,
    SMALL_BLOCK,
    STAGED_MAX_THREADS,
    WARP,
    Access,
    Choice,
    Device,
    Kind,
    PartLanes,
    accesses,
    columns_per_thread,
    compute_name,
    for_dx_alone,
    has_long_rows,
    may_leave_lines,
    staged_definitions,
    triad_definitions,
)
from .few_rows import few_rows_definitions_of, few_rows_vectors, forward_few_rows_definitions
from .forward import (
    direct_forward_definitions,
    forward_choice,
    forward_definitions,
    forward_keeps_pace,
    forward_part_of_warp_lanes,
    may_draw_short_rows,
)
from .wide import (
    FORWARD_WIDE_ARGUMENTS,
    WIDE_ARGUMENTS,
    forward_wide_shapes,
    may_be_wide,
    wide_definitions,
    wide_shapes,
)


class Variant(NamedTuple):
    """One compilation: a source file, its kernels, its definitions."""

    file: str
    kernels: tuple[str, ...]
    definitions: tuple[str, ...]


def variants(compute_capability: tuple[int, int]) -> Iterator[Variant]:
    """Every compilation that launch choices can ask for on a device of this compute capability."""
    device = Device(compute_capability, multiprocessors=CLUSTERS[-1], shared_bytes=0)
    for norm, x, dy, want_db, vector in product(
        ("rmsnorm", "layernorm"), FLOAT_NAMES, FLOAT_NAMES, (False, True), (False, True)
    ):
        if want_db < (x != dy):  # where types differ, kernels sum db in any case
            continue
        definitions = backward_definitions(norm, x, dy, want_db, vector)
        for threads in DIRECT_MAX_THREADS[vector][: 1 if device.has_clusters else None]:
            direct = (*definitions, *direct_definitions(columns_per_thread(x), threads, vector))
            yield Variant("backward_direct.cu", ("backward_direct",), direct)
        for dx_alone in (False,) if want_db else (False, True):
            for shape, off_lines in wide_shapes(x, want_db, dx_alone) if may_be_wide(x, dy, vector, device) else ():
                wide = (*definitions, *wide_definitions(WIDE_ARGUMENTS, x, shape, off_lines))
                of_wide = for_dx_alone(wide, paced=True) if dx_alone else wide
                yield Variant("backward_wide.cu", ("backward_wide",), of_wide)
        for any_w in (False, True):
            split = (*definitions, *split_definitions(columns_per_thread(x), any_w))
            yield Variant("backward_split.cu", ("backward_split_sums", "backward_split_apply"), split)
        kind = (norm, x, dy, want_db, vector)

        def choices(cluster: int, device: Device, kind: Kind = kind) -> Choice:
            filling: Choice = ({STAGED_FILLING_COLUMNS: ANY_WARPS},) if may_fill_lanes(kind, cluster, device) else ()
            return (*backward_choice(kind, cluster, device), *filling)

        parts = part_of_warp_lanes(x, vector, SINGLE, choices(1, device), device)
        for per_thread, lanes in _held(parts):
            direct = (*definitions, *direct_definitions(per_thread, SMALL_BLOCK, vector, lanes))
            yield Variant("backward_direct.cu", ("backward_direct",), direct)
        short_of = functools.partial(has_short_rows, x, vector)
        leaves = functools.partial(may_leave_lines, x, dy, vector=vector, device=device)
        of_staged = functools.partial(_staged_variants, "backward", definitions, x, device, choices, leaves)
        summing = [*of_staged(parts, SINGLE, functools.partial(may_keep_pace, kind, SINGLE), short_of)]
        for access in accesses(x, dy, vector, device):
            parts = part_of_warp_lanes(x, vector, access, choices(1, device), device)
            summing += of_staged(parts, access, functools.partial(may_keep_pace, kind, access), short_of)
            for per_thread, lanes in ((columns_per_thread(x), 0), *_held(parts)) if _may_be_direct(access) else ():
                direct = (*definitions, *direct_definitions(per_thread, SMALL_BLOCK, vector, lanes, access=access))
                yield Variant("backward_direct.cu", ("backward_direct",), direct)
        long_accesses = _long_accesses(x, dy, vector, device)
        for access, off_lines in product(long_accesses, (False, True) if vector else (False,)):
            if may_form_gangs(x, dy, device):
                gang = (*definitions, *gang_definitions(access, off_lines))
                summing.append(Variant("backward_staged.cu", ("backward_staged",), gang))
        yield from summing
        # dx alone asks for kernels that sum db only where x and dy differ in type (kernels_sum_db).
        of_pace = (False,) if want_db and x == dy else (False, True)
        for alone in sorted({for_dx_alone(variant.definitions, paced) for variant in summing for paced in of_pace}):
            yield Variant("backward_staged.cu", ("backward_staged",), alone)
        for few in sorted({few for variant in summing for few in _few_rows_definitions(variant.definitions)}):
            yield Variant("backward_few_rows.cu", ("backward_few_rows",), few)
    for norm, x, vector in product(("rmsnorm", "layernorm"), FLOAT_NAMES, (False, True)):
        definitions = forward_definitions(norm, x, vector)
        routes = (*definitions, *direct_forward_definitions(columns_per_thread(x)))
        yield Variant("forward.cu", ("forward_direct",), routes)
        for access in _long_accesses(x, None, vector, device):
            split = (*definitions, *direct_forward_definitions(columns_per_thread(x), access=access))
            yield Variant("forward_split.cu", ("forward_split_sums", "forward_split_apply"), split)
        for shape, off_lines in forward_wide_shapes(x, norm) if may_be_wide(x, x, vector, device) else ():
            wide = (*definitions, *wide_definitions(FORWARD_WIDE_ARGUMENTS, x, shape, off_lines))
            yield Variant("forward_wide.cu", ("forward_wide",), wide)
        choices = functools.partial(forward_choice, norm, x, vector)
        parts = forward_part_of_warp_lanes(x, vector, SINGLE, choices(1, device), device)
        for per_thread, lanes in _held(parts):
            direct = (*definitions, *direct_forward_definitions(per_thread, lanes))
            yield Variant("forward.cu", ("forward_direct",), direct)

        def paced(
            held: tuple[int, int],
            cluster: int,
            part: float,
            device: Device,
            norm: str = norm,
            x: str = x,
            vector: bool = vector,
        ) -> bool:
            return forward_keeps_pace(norm, x, held, cluster, vector, part, device)

        many: list[Variant] = []
        for access in (SINGLE, *accesses(x, None, vector, device)):
            parts = forward_part_of_warp_lanes(x, vector, access, choices(1, device), device)
            leaves = functools.partial(may_leave_lines, x, x, vector=vector, device=device)
            of_rows = parts, access, paced, lambda *_: False
            many += _staged_variants("forward", definitions, x, device, choices, leaves, *of_rows)
            may_be_direct = access != SINGLE and _may_be_direct(access)
            for per_thread, lanes in ((columns_per_thread(x), 0), *_held(parts)) if may_be_direct else ():
                direct = (*definitions, *direct_forward_definitions(per_thread, lanes, access))
                yield Variant("forward.cu", ("forward_direct",), direct)
        yield from many
        of_few = {forward_few_rows_definitions(variant.definitions) for variant in many}
        for few in sorted(definitions for definitions in of_few if definitions):
            yield Variant("forward_few_rows.cu", ("forward_few_rows",), few)
        if device.has_large_shared_memory and may_draw_short_rows(norm, x, vector):
            for per_thread, lanes in ((columns_per_thread(x), 0), *_held(parts)):
                staged = staged_definitions(per_thread, 1, lanes, paced=False, draws=True)
                yield Variant("forward_staged.cu", ("forward_staged",), (*definitions, *staged))
    for x in sorted({compute_name(x) for x in FLOAT_NAMES}):
        yield Variant("widen_w.cu", ("widen_w",), widening_definitions(x))
    for x, streaming in product(FLOAT_NAMES, (False, True)):
        yield Variant("triad.cu", ("triad",), triad_definitions(x, streaming))


def _long_accesses(x: str, dy: str | None, vector: bool, device: Device) -> list[Access]:
    """Of rows that several blocks share without being a cluster: all start at the same part of an access."""
    even = (access for access in accesses(x, dy, vector, device) if access not in ODD)
    return [SINGLE, *(access for access in even if has_long_rows(x, access))]


def _may_be_direct(access: Access) -> bool:
    """Whether the direct route has rows so accessed."""
    return access not in ODD or access == ODD_BY_ELEMENT


def _lanes_between(least: int, most: int) -> Iterator[int]:
    """Numbers of lanes that may share a row: powers of two."""
    while least <= most:
        yield least
        least *= 2


def _held(parts: PartLanes) -> Iterator[tuple[int, int]]:
    """Columns a thread, and how many lanes then share a row."""
    for per_thread, ends in parts.items():
        for lanes in _lanes_between(*ends):
            yield per_thread, lanes


def _threads_of(per_thread: int, choice: Choice, cluster: int) -> tuple[int, ...]:
    """Of a block's whole warps that may share a row with so many columns a thread; none where these are not chosen."""
    least = 1 if cluster == 1 else STAGED_MAX_THREADS // WARP // 2
    several = (
        each[per_thread] if len(each) > 1 else range(1, ANY_WARPS[-1] + 1) for each in choice if per_thread in each
    )
    return tuple(sorted({warps * WARP for of_each in several for warps in of_each if warps >= least}))


def _few_rows_definitions(definitions: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Of the kernels for few rows beside one of backward_staged.cu."""
    if {"VECTOR=1", "CLUSTER=1"} <= set(definitions) and "GANG=1" not in definitions:
        for own in few_rows_vectors(definitions):
            yield few_rows_definitions_of(definitions, own)


def _staged_variants(
    direction: str,
    definitions: tuple[str, ...],
    x: str,
    device: Device,
    choice_of: Callable[[int, Device], Choice],
    leaves_lines: Callable[[tuple[int, int]], bool],
    parts: PartLanes,
    access: Access,
    paced_of: Callable[[tuple[int, int], int, float, Device], bool],
    short_of: Callable[[int, int], bool],
) -> Iterator[Variant]:
    """One for every pair of columns a thread and blocks a cluster, two where only some rows keep pace, are short, have
    gaps between them, or leave whole lines."""
    if not device.has_clusters:
        return
    speeds = device, device._replace(memory_gbps=1)  # memory as fast as it may be, and slow
    clusters = [cluster for cluster in CLUSTERS if cluster <= device.largest_cluster]
    pairs = {(n, cluster) for cluster in clusters for preferred in choice_of(cluster, device) for n in preferred}
    if access in ODD:
        pairs = {(n, cluster) for n, cluster in pairs if cluster <= ODD_MOST_CLUSTER[direction]}
    pairs = pairs if has_long_rows(x, access) else set()
    wholes = {(*pair, 0) for pair in pairs | {(columns_per_thread(x), 1)}}
    for per_thread, cluster, part in sorted(wholes | {(n, 1, lanes) for n, lanes in _held(parts)}):
        warp_or_less = part > 0 or per_thread <= columns_per_thread(x)
        if warp_or_less:
            lanes: tuple[int, ...] = (part,) if part else (1, WARP)
            lanes_of = dict.fromkeys(speeds, lanes)
        else:
            lanes_of = {speed: _threads_of(per_thread, choice_of(cluster, speed), cluster) for speed in speeds}
        asked = [(*each, speed) for speed in speeds for each in product(lanes_of[speed], (0.0, 1.0))]
        paces = {paced_of((per_thread, lanes), cluster, filled, speed) for lanes, filled, speed in asked}
        fills_warp = WARP * per_thread  # as the blocks of clusters all do
        least_columns = (1, fills_warp) if cluster == 1 and not part else (fills_warp,)
        shorts = sorted({access not in ODD and short_of(per_thread, n) for n in least_columns})
        gaps = (False, True) if warp_or_less and cluster == 1 else (False,)
        groups = {lanes for of_speed in lanes_of.values() for lanes in of_speed}
        lines = (False, True) if any(leaves_lines((per_thread, lanes)) for lanes in groups) else (False,)
        kernel = f"{direction}_staged"
        for paced, short, gap, off_lines in product(sorted(paces), shorts, gaps, lines):
            staged = staged_definitions(
                per_thread, cluster, part, paced, short, gap, access=access, off_lines=off_lines
            )
            yield Variant(f"{kernel}.cu", (kernel,), (*definitions, *staged))
