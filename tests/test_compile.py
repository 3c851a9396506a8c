"""Every kernel variant that the library can choose compiles without spills, for every architecture it speaks of.

NVRTC needs no GPU. The resource report of the assembler says for each kernel how many bytes of stack it uses and how
many it spills from registers to memory; a spill costs half the speed or more, so none is allowed that is not
listed here with its reason.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import pytest

from cupynorm.cuda import module
from cupynorm.cuda.config import Variant, variants

pytest.importorskip("cupy", reason="NVRTC comes with CuPy")

COMPUTE_CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]

# All variants take well over ten minutes on two cores, and in nearly half of them x and dy differ in type. Unless this
# is set, these are compiled for one architecture, without the rarest; and where rows lie off 16 bytes, of the clusters
# on newer architectures only the smallest and the largest.
COMPILE_ALL = bool(os.environ.get("CUPYNORM_COMPILE_ALL"))
MIXED_TYPES_ON = (9, 0)
MIXED_TYPES_LEFT_OUT = {
    *("LAYER_NORM=0", "X_TYPE=float64", "DY_TYPE=float64"),
    *("CLUSTER=2", "CLUSTER=4", "CLUSTER=8"),
}
SINGLE_COLUMNS_LEFT_OUT = {"CLUSTER=2", "CLUSTER=4"}


class Allowed(NamedTuple):
    """So many bytes may be spilled where kernel, architecture (None: any) and all definitions agree, and why."""

    kernel: str
    capability: tuple[int, int] | None
    definitions: tuple[str, ...]
    most: int
    why: str


ALLOWED_SPILLS = (
    Allowed(
        "backward_staged",
        None,
        ("LAYER_NORM=1", "WANT_DB=1", "COLUMNS_PER_THREAD=64", "CLUSTER=16"),
        8,
        "w, dw and db of 64 columns leave 63 registers. On an H200, 636x262144, bfloat16: LayerNorm 284 us, in two "
        "sweeps, which spill nothing, 575 us.",
    ),
    Allowed(
        "backward_staged",
        None,
        ("LAYER_NORM=0", "WANT_DB=1", "COLUMNS_PER_THREAD=64", "CLUSTER=16"),
        44,
        "As LayerNorm; not timed on its own.",
    ),
    Allowed(
        "backward_staged",
        (12, 0),
        ("LAYER_NORM=0", "X_TYPE=float32", "WANT_DB=1", "VECTOR=1"),
        16,
        "By the disassembly: an address, set at the start, read once before the first row and once after the last.",
    ),
    Allowed(
        "backward_direct",
        (7, 5),
        ("X_TYPE=float32", "DY_TYPE=float32", "WANT_DB=1", "VECTOR=1", "MAX_THREADS=512"),
        8,
        "By the disassembly: one of 128 registers, set before the first row and read once a row.",
    ),
    Allowed(
        "backward_direct",
        (8, 0),
        ("LAYER_NORM=1", "X_TYPE=float32", "VECTOR=1", "MAX_THREADS=512"),
        24,
        "By the disassembly: an address, set before the first row and read three times after the last.",
    ),
)

REPORT = re.compile(
    r"Function properties for (\w+)\s+ptxas\s+[.:]\s+(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores, (\d+) bytes spill loads"
)


def compile_variant(capability: tuple[int, int], variant: Variant) -> list[str]:
    """What is wrong with one variant, in words; empty if nothing is."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(module.source(variant.file, variant.definitions), variant.file, (), ())
    options = (
        f"-arch=sm_{capability[0]}{capability[1]}",
        "--ptxas-options=-v",
        *module.compile_options(),
    )
    name = f"sm_{capability[0]}{capability[1]} {variant.file} {' '.join(variant.definitions)}"
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        return [f"{name}: does not compile:\n{nvrtc.getProgramLog(program)}"]
    report = {match[1]: match for match in REPORT.finditer(nvrtc.getProgramLog(program))}
    nvrtc.destroyProgram(program)
    problems = []
    for kernel in variant.kernels:
        if kernel not in report:
            problems.append(f"{name}: the resource report does not mention {kernel}")
        elif max(map(int, report[kernel].groups()[1:])) > allowed_spills(capability, variant, kernel):
            stack, stores, loads = report[kernel].groups()[1:]
            problems.append(f"{name}: {kernel} uses {stack} bytes of stack, spills {stores} and reloads {loads}")
    return problems


def is_tested(capability: tuple[int, int], variant: Variant) -> bool:
    given = dict(definition.split("=", 1) for definition in variant.definitions)
    if COMPILE_ALL:
        return True
    if given.get("X_TYPE") != given.get("DY_TYPE", given.get("X_TYPE")):
        return capability == MIXED_TYPES_ON and not MIXED_TYPES_LEFT_OUT & set(variant.definitions)
    left_out = capability > (9, 0) and given.get("VECTOR") == "0" and SINGLE_COLUMNS_LEFT_OUT & set(variant.definitions)
    return not left_out


def allowed_spills(capability: tuple[int, int], variant: Variant, kernel: str) -> int:
    return max(
        (
            allowed.most
            for allowed in ALLOWED_SPILLS
            if allowed.kernel == kernel
            and allowed.capability in (None, capability)
            and set(allowed.definitions) <= set(variant.definitions)
        ),
        default=0,
    )


@pytest.fixture(scope="module")
def workers():
    """Processes, not threads: NVRTC compiles one program at a time in a process."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("capability", COMPUTE_CAPABILITIES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_every_variant_compiles_without_spills(capability, workers):
    all_variants = list(variants(capability))
    assert len(all_variants) > 200
    every = [variant for variant in all_variants if is_tested(capability, variant)]
    assert len(every) > 100
    results = workers.map(compile_variant, [capability] * len(every), every, chunksize=8)
    problems = [problem for result in results for problem in result]
    assert not problems, "\n".join(problems)


def test_the_check_sees_a_spill(tmp_path, monkeypatch):
    """A kernel with an indexed local array is reported, so a silent report cannot pass for a clean one."""
    (tmp_path / "local.cu").write_text(
        'extern "C" __global__ void local(int* p, int i) {\n'
        "    volatile int a[1024];\n"
        "    for (int j = 0; j < 1024; ++j) a[j] = p[j];\n"
        "    p[0] = a[i];\n"
        "}\n"
    )
    monkeypatch.setattr(module, "source_directory", lambda: tmp_path)
    (problem,) = compile_variant((9, 0), Variant("local.cu", ("local",), ()))
    assert "4096 bytes of stack" in problem
