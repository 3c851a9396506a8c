"""What the assembler says of every kernel variant: stack and spills, for every architecture that the library speaks of.

All of them, some 21700 (12900 took 80 to 100 minutes on two cores), with cupynorm installed:

    python tests/compiling.py

compiles them and writes tests/compile_record.json, which is committed beside the sources that it is about. Kernel files
that are compiled as the record there has it, from the same text and with the same definitions, are not compiled again:
comments, lines that move from one file to another and stay where they are for the compiler, and launch choices that ask
for no other kernels, change nothing. `problems` says what keeps a record from
vouching for a tree; the tests ask that, and compile a part of the variants themselves. NVRTC needs no GPU. Where there
is one,

    python tests/compiling.py --cache

compiles those of its compute capability into CuPy's cache, on all cores: GPU tests, which compile one kernel at a time,
then find theirs there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from gpu_record import without_comments

from cupynorm.cuda import module
from cupynorm.cuda.config.variants import Variant, variants

RECORD = Path(__file__).with_name("compile_record.json")
HOW_TO = "make a new one with `python tests/compiling.py`"
# What CuPy adds to a module's own options (cupy/cuda/compiler.py); with -ftz=true other instructions come out.
OPTIONS_OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")
COMPUTE_CAPABILITIES = ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))

INCLUDE = re.compile(r'#include "(.+?)"')

REPORT = re.compile(
    r"Function properties for (\w+)\s+ptxas\s+[.:]\s+(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads"
)


class Spill(NamedTuple):
    """Bytes that one kernel of a variant, or a function that it calls, has on the stack, and that it writes and reads
    for lack of registers."""

    architecture: str
    kernel: str
    definitions: tuple[str, ...]
    stack: int
    stores: int
    loads: int


def architecture(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def compile_variant(capability: tuple[int, int], variant: Variant) -> tuple[list[Spill], list[str]]:
    """The kernels that have a stack, and in words what is wrong beside that; both empty if all is well."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(module.source(variant.file, variant.definitions), variant.file, (), ())
    options = (f"-arch={architecture(capability)}", "--ptxas-options=-v", *module.compile_options(), *OPTIONS_OF_CUPY)
    name = f"{architecture(capability)} {variant.file} {' '.join(variant.definitions)}"
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        return [], [f"{name}: does not compile:\n{nvrtc.getProgramLog(program)}"]
    report = {match[1]: tuple(map(int, match.groups()[1:])) for match in REPORT.finditer(nvrtc.getProgramLog(program))}
    nvrtc.destroyProgram(program)
    missing = [f"{name}: no report of {kernel}" for kernel in variant.kernels if kernel not in report]
    called = [numbers for function, numbers in report.items() if function not in variant.kernels]
    worst = {
        kernel: [max(each) for each in zip(report[kernel], *called, strict=True)]
        for kernel in variant.kernels
        if kernel in report
    }
    spills = [
        Spill(architecture(capability), kernel, variant.definitions, *numbers)
        for kernel, numbers in worst.items()
        if any(numbers)
    ]
    return spills, missing


def compile_all(capability: tuple[int, int], chosen: Iterable[Variant]) -> tuple[list[Spill], list[str]]:
    """The same of many, by processes."""
    every = list(chosen)
    spills: list[Spill] = []
    wrong: list[str] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        for found in pool.map(compile_variant, [capability] * len(every), every, chunksize=4):
            spills += found[0]
            wrong += found[1]
    return spills, wrong


def expanded(text: str, folder: Path) -> str:
    """The code of a kernel file, with that of each file that it includes in the first #include's place: as it is
    compiled, whatever file a line stands in."""
    seen: set[str] = set()

    def lines_of(text: str) -> Iterator[str]:
        for line in without_comments(text, ".cu").split("\n"):
            include = INCLUDE.fullmatch(line)
            if include and include[1] not in seen:
                seen.add(include[1])
                yield from lines_of((folder / include[1]).read_text(encoding="utf-8"))
            elif not include and line != "#pragma once":
                yield line

    return "\n".join(lines_of(text))


@functools.cache
def every_variant() -> dict[tuple[int, int], tuple[Variant, ...]]:
    return {capability: tuple(variants(capability)) for capability in COMPUTE_CAPABILITIES}


@functools.cache
def file_digests() -> dict[str, str]:
    """SHA-256, for each kernel file, over all that decides what comes of compiling it, but for NVRTC's version and the
    option that hangs on that."""
    asked_for: dict[str, list[str]] = {}
    for capability, chosen in every_variant().items():
        for variant in chosen:
            words = (architecture(capability), *variant.kernels, *variant.definitions)
            asked_for.setdefault(variant.file, []).append(" ".join(words))
    options = [*module.COMPILE_OPTIONS, *OPTIONS_OF_CUPY]
    digests = {}
    for file, words in asked_for.items():
        text = module.source(file, ("NAME=VALUE",))
        parts = [*options, expanded(text, module.source_directory()), *sorted(words)]
        digests[file] = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return digests


def sample(capability: tuple[int, int], part: int) -> Iterator[Variant]:
    """One of `part` variants; others when what is compiled changes."""
    for variant in every_variant()[capability]:
        name = f"{file_digests()[variant.file]} {architecture(capability)} {' '.join(variant.definitions)}"
        if int(hashlib.sha256(name.encode()).hexdigest(), 16) % part == 0:
            yield variant


def counts() -> dict[str, int]:
    """Variants, for each architecture."""
    return {architecture(capability): len(chosen) for capability, chosen in every_variant().items()}


def problems(record: dict[str, Any], digests: dict[str, str]) -> list[str]:
    """What keeps a record from vouching for a tree with these file_digests(), beside spills; empty if nothing does."""
    found = list(record["wrong"])
    if changed := sorted(
        file for file in {*digests, *record["files"]} if digests.get(file) != record["files"].get(file)
    ):
        found.append(f"it is not about what is compiled of {', '.join(changed)}; {HOW_TO}")
    return found


def unchanged(record: dict[str, Any], digests: dict[str, str]) -> set[str]:
    """Kernel files whose variants the record is about, and found nothing wrong with."""
    failed = {word for text in record["wrong"] for word in text.replace(":", " ").split()}
    return {file for file, digest in digests.items() if record["files"].get(file) == digest and file not in failed}


def recorded_spills(record: dict[str, Any]) -> list[Spill]:
    return [Spill(a, kernel, tuple(definitions), *numbers) for a, kernel, definitions, *numbers in record["spills"]]


def into_cache(variant: Variant) -> int:
    """Into CuPy's cache on disk, all kernels of a variant at once, as a first launch on the current device would.

    Returns the handle of the first, for which they must be loaded.
    """
    return int(module.kernel(variant.file, variant.kernels[0], variant.definitions).kernel.ptr)


def fill_cache() -> int:
    """What into_cache() does, of every variant for the current device; how many these are."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    every = list(variants((int(capability[:-1]), int(capability[-1]))))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        return sum(address != 0 for address in pool.map(into_cache, every, chunksize=4))


def main(arguments: Sequence[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(description="Compile every kernel variant and record what spills.")
    parser.add_argument("--cache", action="store_true", help="compile into CuPy's cache what this device's kernels are")
    if parser.parse_args(arguments).cache:
        print(f"{fill_cache()} variants are in CuPy's cache")
        return 0

    before = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else None
    record = renewed(before)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if record["wrong"] else 0


def renewed(before: dict[str, Any] | None) -> dict[str, Any]:
    """A record of this tree, for which what `before` says of unchanged files is taken from there."""
    from cupy.cuda import nvrtc

    version = ".".join(map(str, nvrtc.getVersion()))
    known = unchanged(before, file_digests()) if before and before["nvrtc"] == version else set()
    file_of = {kernel: each.file for chosen in every_variant().values() for each in chosen for kernel in each.kernels}
    kept = [spill for spill in recorded_spills(before) if file_of.get(spill.kernel) in known] if before else []
    spills, wrong = [], []
    for capability, chosen in every_variant().items():
        again = [variant for variant in chosen if variant.file not in known]
        found, failed = compile_all(capability, again)
        name = architecture(capability)
        spills += [*(spill for spill in kept if spill.architecture == name), *found]
        wrong += failed
        print(
            f"{name}: {len(again)} of {len(chosen)} variants compiled, {len(found)} spill",
            *failed,
            sep="\n",
            flush=True,
        )
    return {"nvrtc": version, "variants": counts(), "files": file_digests(), "spills": spills, "wrong": wrong}


if __name__ == "__main__":
    sys.exit(main())
