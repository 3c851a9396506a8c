"""Trees side by side: what NVRTC makes of the kernels that the same calls choose on an H200. Needs no GPU:

    python asv_bench/assembly.py TREE TREE … [--set NAME,…] [--ops OP …] [--only N,…] [--rounds N] [--csv FILE]

A TREE is a commit, or `.` for this checkout, with launch choices behind a colon, and the rows are those of roofline.py,
as in compare.py; of the rows that have one kernel in every tree, or the same kernels that are compiled together, the
first stands for all. Of each tree: seconds of one core to compile it (of several all; the least of the rounds; other
work on the machine shows in them), the most registers of a thread, bytes that are spilled, loads that hide no latency
since what comes is moved at once; and of all but the first tree whether the instructions are, one by one, the first
one's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cupynorm import bench, report

if TYPE_CHECKING:
    from roofline import Row

CAPABILITY, MULTIPROCESSORS, SHARED_BYTES = (9, 0), 132, 232448  # of an H200
# What CuPy adds to a module's own options (cupy/cuda/compiler.py); with -ftz=true other instructions come out.
OPTIONS_OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")
REGISTERS = re.compile(r"Used (\d+) registers")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
# LDG, MOV and IMAD, the lowest 12 bits of an instruction; IMAD moves where it multiplies RZ, the register that is 0.
LOAD, MOVE, MULTIPLY_ADD, RZ = 0x981, 0x202, 0x224, 255
AT_ONCE = 8  # instructions


Kernel = tuple[str, tuple[str, ...]]  # source file and definitions


class Made(NamedTuple):
    """What came of one compilation, or of several that are made together."""

    kernel: str  # file and definitions
    instructions: str  # a hash
    registers: int
    spilled: int  # bytes, written and read
    moved: int  # loads: see loads_moved()
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    from cupynorm import cli

    options = parse(arguments)
    return cli.guarded("assembly.py", lambda: run(options, sys.argv[1:] if arguments is None else arguments))


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from compare import all_turns, set_constants
    from roofline import rows_of

    from cupynorm import cli

    rows = rows_of(options)
    if options.turn is not None:
        set_constants(options.trees[options.turn].settings)
        print(json.dumps([str(Path(bench.__file__).resolve()), list(compiled(rows))]))
        return 0
    with ExitStack() as files:
        target = cli.writable(files, "--csv", options.csv)
        rounds = all_turns(__file__, options, arguments)
        names = list(map(str, range(1, len(options.trees) + 1)))
        head = ["op", "rows x N", "dtype x/w", "layout"]
        head += [f"{name}: {what}" for name in names for what in ("s", "registers", "spills", "moved")]
        head += [f"{name}: same" for name in names[1:]]
        trees = [[least([Made(*each) for each in made]) for made in zip(*tree, strict=True)] for tree in rounds]
        lines = list(lines_of(rows, trees))
        if target:
            report.write_rows(target, head, lines)
    for name, tree in zip(names, options.trees, strict=True):
        print(f"{name}: {tree.words}")
    print(f"\n{report.table(head, lines)}")
    return 0


def least(rounds: Sequence[Made]) -> Made:
    return min(rounds, key=lambda made: made.seconds)


def lines_of(rows: Sequence[Row], trees: Sequence[Sequence[Made]]) -> Iterator[list[str]]:
    """One for each kernel, or for each set of kernels where the trees choose different ones."""
    seen = set()
    for row, *made in zip(rows, *trees, strict=True):
        kernels = tuple(each.kernel for each in made)
        if kernels in seen:
            continue
        seen.add(kernels)
        numbers = [str(x) for each in made for x in (f"{each.seconds:.2f}", each.registers, each.spilled, each.moved)]
        same = ["yes" if each.instructions == made[0].instructions else "no" for each in made[1:]]
        yield [row.case.op, row.case.shape, row.case.dtypes, row.layout, *numbers, *same]


def compiled(rows: Sequence[Row]) -> Iterator[Made]:
    """What this process's cupynorm chooses for each row, compiled once; a first one is compiled for nobody."""
    made: dict[tuple[Kernel, ...], Made] = {}
    for row in rows:
        kernels = kernels_of(row)
        if not made:
            compile_kernel(*kernels[0])
        if kernels not in made:
            made[kernels] = together([compile_kernel(*kernel) for kernel in kernels])
        yield made[kernels]


def together(made: Sequence[Made]) -> Made:
    kernels, texts, registers, spilled, moved, seconds = zip(*made, strict=True)
    return Made(" + ".join(kernels), " ".join(texts), max(registers), sum(spilled), sum(moved), sum(seconds))


def kernels_of(row: Row) -> tuple[Kernel, ...]:
    """What a row's first call compiles: of several kernels that of walkers that sum dw and db comes first."""
    from cupynorm import problem
    from cupynorm.cuda import config

    case, device = row.case, config.Device(CAPABILITY, MULTIPROCESSORS, SHARED_BYTES)
    itemsize, statistic = case.dtype.itemsize, problem.statistics_dtype(case.dtype)
    strides = ((case.columns + row.gap) * itemsize, itemsize)
    x = problem.ArraySpec((case.rows, case.columns), strides, case.dtype, 0, row.start * itemsize % 16)
    dy_itemsize = row.dy_itemsize
    of_dy = (case.columns + row.gap) * dy_itemsize, dy_itemsize
    dy = problem.ArraySpec(x.shape, of_dy, row.dy_dtype or case.dtype, 0, row.start * dy_itemsize % 16)
    w = problem.ArraySpec((case.columns,), (case.w_dtype.itemsize,), case.w_dtype, 0)
    mean = problem.ArraySpec((case.rows,), (statistic.itemsize,), statistic, 0)
    layernorm = case.norm == "layernorm"
    # Older trees ask whether rows start at multiples of 16 bytes.
    common = getattr(config, "common", None)
    aligned = row.alignment if hasattr(common, "narrow_vector") or hasattr(common, "access_of") else row.alignment == 16
    named: dict[str, Any] = {}
    if case.backward:
        arrays = {"x": x, "w": w, "dy": dy, "mean": mean if layernorm else None, "rstd": mean, "dresidual_out": None}
        found = problem.backward_problem(
            case.norm,
            arrays,
            (None,) * 3,
            has_bias=layernorm,
            weight_offset=0.0,
            output_mask=row.output_mask,
            accumulate=False,
        )
        if hasattr(config, "ODD_IN_WORDS"):
            named["odd"] = odd_access(found, (x.offset, dy.offset, 0))
        backward = config.backward_config(found, aligned, device, **named)
        kernels = [(f"backward_{backward.route}.cu", backward.definitions)]
        # Older trees have other names for it, or none, and no kernel for few rows.
        names = "unpaced_definitions", "column_blocks_definitions", "dx_alone_definitions"
        beside = next((getattr(backward, name) for name in names if hasattr(backward, name)), None)
        if backward.route == "staged" and beside not in (None, backward.definitions):
            kernels.append(("backward_staged.cu", beside))
        few_rows = getattr(config, "few_rows_definitions", lambda _: None)(backward)
        if few_rows:
            kernels.append(("backward_few_rows.cu", few_rows))
        return tuple(kernels)
    arrays = {"x": x, "w": w, "b": w if layernorm else None, "residual": None}
    outputs = (None,) * (3 if layernorm else 2)
    found = problem.forward_problem(case.norm, arrays, outputs, eps=1e-5, weight_offset=0.0)
    if hasattr(config, "ODD_IN_WORDS"):
        named["odd"] = odd_access(found, (x.offset, 0))
    forward = config.forward_config(found, aligned, device, **named)
    few_rows = getattr(config, "forward_few_rows_definitions", lambda _: None)(forward.definitions)
    of_few = [("forward_few_rows.cu", few_rows)] if few_rows else []
    return ((forward.file, forward.definitions), *of_few)


def odd_access(found: Any, offsets: tuple[int, ...]) -> Any:
    """How odd rows are accessed that start so: what is read, and what is written."""
    from cupynorm.cuda import launch

    return launch._odd_access(found, offsets)


def compile_kernel(file: str, definitions: tuple[str, ...]) -> Made:
    log, binary, seconds = binary_of(file, definitions)
    spilled = sum(int(stores) + int(loads) for stores, loads in SPILLS.findall(log))
    registers = max(map(int, REGISTERS.findall(log)))
    texts = list(instructions(binary))
    digest = hashlib.sha256(b"".join(texts)).hexdigest()
    moved = sum(loads_moved(text.split(b"\0", 1)[1]) for text in texts)
    return Made(" ".join((file, *definitions)), digest, registers, spilled, moved, seconds)


def binary_of(file: str, definitions: tuple[str, ...]) -> tuple[str, bytes, float]:
    """NVRTC's log, what it made, and seconds."""
    from cupy.cuda import nvrtc

    from cupynorm.cuda import module

    architecture = f"-arch=sm_{CAPABILITY[0]}{CAPABILITY[1]}"
    text, options = module.source(file, definitions), (*module.compile_options(), *OPTIONS_OF_CUPY)
    start = time.process_time()
    program = nvrtc.createProgram(text, file, (), ())
    nvrtc.compileProgram(program, (architecture, "--ptxas-options=-v", *options))
    seconds = time.process_time() - start
    log, binary = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
    return log, binary, seconds


def instructions(binary: bytes) -> Iterator[bytes]:
    """The sections .text… of an ELF file of 64 bits, by name."""
    (table,), (entry_bytes, count, names_at) = struct.unpack_from("Q", binary, 40), struct.unpack_from("3H", binary, 58)
    # name, type, flags, address, offset, size
    sections = [struct.unpack_from("2I4Q", binary, table + i * entry_bytes) for i in range(count)]
    names = sections[names_at][4]
    texts = {binary[names + name :].split(b"\0", 1)[0]: (at, size) for name, _, _, _, at, size in sections}
    for name, (at, size) in sorted(texts.items()):
        if name.startswith(b".text"):
            yield name + b"\0" + binary[at : at + size]


class Load(NamedTuple):
    """An instruction that loads from global memory."""

    place: int  # among all
    scoreboard: int  # which says that the result is there
    register: int  # the first that it loads


def loads_of(words: Sequence[tuple[int, int]]) -> Iterator[Load]:
    """Those that something can wait for, of instructions as words_of() finds them.

    The upper half of an instruction of compute capability 7.0 or newer names the scoreboard that it sets (7: none), and
    those that it waits for (Jia, Maggioni, Staiger and Scarpazza, 2018, "Dissecting the NVIDIA Volta GPU architecture
    via microbenchmarking").
    """
    for place, (low, high) in enumerate(words):
        if low & 0xFFF == LOAD and (scoreboard := high >> 46 & 7) != 7:
            yield Load(place, scoreboard, low >> 16 & 255)


def words_of(code: bytes) -> list[tuple[int, int]]:
    """The lower and the upper half of each instruction."""
    return list(struct.iter_unpack("<2Q", code[: len(code) // 16 * 16]))


def loads_moved(code: bytes) -> int:
    """Loads that a warp waits for at once, only to move what came to another register: meant to be ahead, and not."""
    words, found = words_of(code), 0
    for place, scoreboard, register in loads_of(words):
        after = words[place + 1 : place + 1 + AT_ONCE]
        waiting = next(((low, high) for low, high in after if high >> 52 + scoreboard & 1), None)
        found += waiting is not None and moved_register(*waiting) == register
    return found


def moved_register(low: int, high: int) -> int | None:
    """Which register an instruction moves to another; None: it does something else."""
    first, second = low >> 24 & 255, low >> 32 & 255
    if low & 0xFFF == MOVE:
        return second
    if low & 0xFFF == MULTIPLY_ADD and first == second == RZ:
        return high & 255
    return None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from compare import add_tree_options

    from cupynorm import cli

    parser = cli.Parser(prog="assembly.py", description="Compile the same calls' kernels with several trees.")
    add_tree_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
