"""Launch choices: a pure function of the problem and the device, needing no GPU.

What fixes the order of a row's sums (route, vector width, threads and blocks that share a row) depends on the row, its
layout, what is summed and the GPU model (of a part of a device, on that) alone, never on how many rows come with it: so
a row's dx and y have the same bits in any company.

backward.py and forward.py choose the kernel and its blocks, wide.py those for rows that all blocks share, walkers.py
how many blocks run, column_blocks.py where others sum dw and db, few_rows.py what kernels for few rows take; common.py
has what they share. Constants stand where they are used, each with one time that it was chosen by, in us, of bfloat16,
on an H200, unless said otherwise; all that was measured is in asv_bench/CHOICES.md, under their names. variants.py
lists every kernel that can be asked for.
"""

from .backward import (
    ANY_W,
    BACKWARD_ARGUMENTS,
    WIDENING_ARGUMENTS,
    backward_config,
    converts_w,
    widening_definitions,
)
from .column_blocks import column_parts_bytes
from .common import (
    DX_ALONE,
    ELEMENT_CODES,
    ODD_ACROSS_WORDS,
    ODD_BY_ELEMENT,
    ODD_IN_WORDS,
    Access,
    BackwardConfig,
    Device,
    ForwardConfig,
    Grid,
)
from .few_rows import (
    FEW_ROWS_ARGUMENTS,
    FewRows,
    ForwardFewRows,
    few_rows_blocks,
    few_rows_definitions,
    forward_few_rows,
    forward_few_rows_definitions,
)
from .forward import FORWARD_ARGUMENTS, forward_config
from .walkers import (
    KEPT_BYTES,
    KEPT_COUNTER_BYTES,
    KEPT_EXCHANGE_BYTES,
    KEPT_STREAMS,
    KEPT_WIDE_BYTES,
    STEP_COUNTERS_BYTES,
    WORKSPACE_BYTES,
    clusters_at_once,
    exchange_bytes,
    forward_split_walkers,
    forward_steps,
    forward_walkers,
    grid,
    least_steps,
    meeting_bytes,
    pace,
    partial_row_stride,
    reads_once,
    reduction_row_threads,
    slab_sums_bytes,
    sums_walkers,
)
from .wide import (
    FORWARD_WIDE_ARGUMENTS,
    WIDE_ARGUMENTS,
    WIDE_OTHER_THREADS,
    forward_wide_reads_once,
    wide_exchange_bytes,
)

__all__ = [
    "ANY_W",
    "BACKWARD_ARGUMENTS",
    "DX_ALONE",
    "ELEMENT_CODES",
    "FEW_ROWS_ARGUMENTS",
    "FORWARD_ARGUMENTS",
    "FORWARD_WIDE_ARGUMENTS",
    "KEPT_BYTES",
    "KEPT_COUNTER_BYTES",
    "KEPT_EXCHANGE_BYTES",
    "KEPT_STREAMS",
    "KEPT_WIDE_BYTES",
    "ODD_ACROSS_WORDS",
    "ODD_BY_ELEMENT",
    "ODD_IN_WORDS",
    "STEP_COUNTERS_BYTES",
    "WIDENING_ARGUMENTS",
    "WIDE_ARGUMENTS",
    "WIDE_OTHER_THREADS",
    "WORKSPACE_BYTES",
    "Access",
    "BackwardConfig",
    "Device",
    "FewRows",
    "ForwardConfig",
    "ForwardFewRows",
    "Grid",
    "backward_config",
    "clusters_at_once",
    "column_parts_bytes",
    "converts_w",
    "exchange_bytes",
    "few_rows_blocks",
    "few_rows_definitions",
    "forward_config",
    "forward_few_rows",
    "forward_few_rows_definitions",
    "forward_split_walkers",
    "forward_steps",
    "forward_walkers",
    "forward_wide_reads_once",
    "grid",
    "least_steps",
    "meeting_bytes",
    "pace",
    "partial_row_stride",
    "reads_once",
    "reduction_row_threads",
    "slab_sums_bytes",
    "sums_walkers",
    "wide_exchange_bytes",
    "widening_definitions",
]
