"""Every kernel variant that the library can choose compiles without spills, for every architecture it speaks of.

A spill, from registers to memory, costs half the speed or more in a loop over columns, so none is allowed that is not
listed here with its reason. Compiling all variants takes over an hour on two cores: a record (compiling.py) says
what came of that for these very sources, comments apart, and here a part of them is compiled anew, another one whenever
the sources change.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import compiling
import pytest
from compiling import (
    COMPUTE_CAPABILITIES,
    RECORD,
    Spill,
    architecture,
    compile_all,
    compile_variant,
    counts,
    every_variant,
    expanded,
    file_digests,
    problems,
    recorded_spills,
    renewed,
    sample,
)

from cupynorm.cuda import module
from cupynorm.cuda.config.variants import Variant

pytest.importorskip("cupy", reason="NVRTC comes with CuPy")

PART = 10  # one of so many variants is compiled here


class Allowed(NamedTuple):
    """So many bytes may be spilled where kernel, architecture (None: any) and all definitions agree, and why."""

    kernel: str
    architecture: str | None
    definitions: tuple[str, ...]
    most: int
    why: str


# Off 16 bytes, 16 columns a thread, 12.0, where a thread has 168 registers: norm, types of x and dy, whether db is
# summed, whether for rows with gaps alone, bytes.
SPILLS_OF_SINGLE_COLUMNS = (
    (0, "float16", "float16", 1, True, 16),
    (0, "float16", "bfloat16", 1, True, 16),
    (0, "float16", "float64", 1, False, 36),
    (0, "bfloat16", "float16", 1, True, 16),
    (0, "bfloat16", "bfloat16", 1, True, 16),
    (0, "bfloat16", "float64", 1, False, 36),
)
# In vectors, blocks of 512 threads, 7.5 and 8.0: bytes, why, and architecture, norm, types of x and dy.
SPILLS_OF_LARGE_BLOCKS = (
    (
        8,
        "two of 128 registers, set before the first row, one read once a row. Not timed",
        (
            ("sm_75", 0, "bfloat16", "float64"),
            *(
                (architecture, 0, x, dy)
                for architecture in ("sm_75", "sm_80")
                for x, dy in (
                    *(("float16", "float32"), ("bfloat16", "float32")),
                    *(("float32", dy) for dy in ("float16", "bfloat16", "float32")),
                )
            ),
        ),
    ),
    (
        12,
        "two of 128 registers, set before the first row, read once and twice a row. Not timed",
        (("sm_75", 0, "float16", "float64"), ("sm_80", 0, "float32", "float64")),
    ),
    (
        32,
        "an address, set before the first row and read after the last",
        tuple(("sm_80", norm, x, dy) for norm, dy in ((1, "float32"), (0, "float64")) for x in ("float16", "bfloat16")),
    ),
)

ALLOWED_SPILLS = (
    *(
        Allowed(
            "backward_staged",
            "sm_120",
            (
                f"LAYER_NORM={norm}",
                f"X_TYPE={x}",
                f"DY_TYPE={dy}",
                f"WANT_DB={db}",
                "VECTOR=0",
                "COLUMNS_PER_THREAD=16",
                *(("ROW_GAPS=1",) if gaps else ()),
            ),
            most,
            "By the disassembly: written before the loop over rows, up to six read once a row. Not timed.",
        )
        for norm, x, dy, db, gaps, most in SPILLS_OF_SINGLE_COLUMNS
    ),
    *(
        Allowed(
            "backward_staged",
            "sm_120",
            (
                *(f"LAYER_NORM={norm}", f"X_TYPE={x}", f"DY_TYPE={dy}", "WANT_DB=1", "VECTOR=1"),
                *("COLUMNS_PER_THREAD=32", "CLUSTER=1"),
            ),
            12,
            "By the disassembly: a register, set before the first row and read before it and after the last.",
        )
        for norm in (0, 1)
        for x in ("float16", "bfloat16")
        for dy in ("float16", "bfloat16")
    ),
    *(
        Allowed(
            "forward_staged",
            "sm_90",
            ("LAYER_NORM=0", f"X_TYPE={x}", "VECTOR=0", "COLUMNS_PER_THREAD=36", "CLUSTER=1", "NARROW_VECTOR=2"),
            8,
            "By the disassembly: a register, set before the first row and read once a row. Not timed.",
        )
        for x in ("float16", "bfloat16")
    ),
    *(
        Allowed(
            "backward_staged",
            "sm_90",
            (
                *(f"LAYER_NORM={norm}", "X_TYPE=float64", f"DY_TYPE={dy}", "VECTOR=1", "COLUMNS_PER_THREAD=8"),
                *("CLUSTER=1", "PACED=1", *gaps),
            ),
            8,
            "By the disassembly: an address, set before the first row and read after the last. Not timed.",
        )
        for norm, dy, gaps in (
            *((0, dy, ()) for dy in ("float16", "bfloat16", "float32")),
            (1, "float16", ("ROW_GAPS=1",)),
        )
    ),
    *(
        Allowed(
            "forward_staged",
            "sm_90",
            ("LAYER_NORM=1", f"X_TYPE={x}", "VECTOR=0", "COLUMNS_PER_THREAD=24", "CLUSTER=1", "ODD_ROWS=2"),
            16,
            "By the disassembly: three registers, set before the first row and read once a row. Not timed.",
        )
        for x in ("float16", "bfloat16")
    ),
    *(
        Allowed(
            "forward_staged",
            "sm_90",
            ("LAYER_NORM=1", f"X_TYPE={x}", "VECTOR=0", f"COLUMNS_PER_THREAD={per_thread}", f"CLUSTER={cluster}"),
            most,
            "Single columns. By the disassembly: one register, with 24 in clusters of eight two and of sixteen eight, "
            "set before the first row and read once a row. Not timed.",
        )
        for x in ("float16", "bfloat16")
        for per_thread, cluster, most in (
            *((24, 1, 8), (24, 8, 16), (24, 16, 72)),
            *((32, cluster, 8) for cluster in (2, 4, 8, 16)),
        )
    ),
    *(
        Allowed(
            "forward_staged",
            "sm_90",
            (
                *("LAYER_NORM=1", f"X_TYPE={x}", "VECTOR=0", f"COLUMNS_PER_THREAD={per_thread}"),
                *(f"CLUSTER={cluster}", f"ODD_ROWS={odd}"),
            ),
            most,
            "By the disassembly: one register, with 24 across words in clusters of sixteen seven, set before the first "
            "row and read once a row. Not timed on their own.",
        )
        for x in ("float16", "bfloat16")
        for per_thread, cluster, odd, most in ((24, 16, 1, 8), (24, 8, 2, 8), (24, 16, 2, 48), (32, 16, 2, 8))
    ),
    *(
        Allowed(
            "backward_staged",
            "sm_100",
            (
                *("LAYER_NORM=0", f"X_TYPE={x}", f"DY_TYPE={x}", "WANT_DB=1", "COLUMNS_PER_THREAD=24"),
                *(f"CLUSTER={cluster}", f"ODD_ROWS={odd}"),
            ),
            most,
            f"By the disassembly: {why}. Not timed.",
        )
        for x in ("float16", "bfloat16")
        for cluster, odd, most, why in (
            (1, 1, 8, "an address, set before the first row and read after the last"),
            *((cluster, 1, 16, "an address, set before the first row and read after the last") for cluster in (2, 4)),
            (1, 2, 16, "an address, set before the first row and read after the last"),
            *((cluster, 2, 8, "16 bits, written at one of two places and read once a row") for cluster in (2, 4)),
        )
    ),
    Allowed(
        "backward_direct",
        "sm_80",
        ("LAYER_NORM=1", "X_TYPE=float32", "VECTOR=1", "MAX_THREADS=512"),
        32,
        "By the disassembly: an address, set before the first row and read after the last.",
    ),
    *(
        Allowed(
            "backward_direct",
            architecture,
            (f"LAYER_NORM={norm}", f"X_TYPE={x}", f"DY_TYPE={dy}", "VECTOR=1", "MAX_THREADS=512"),
            most,
            f"By the disassembly: {why}.",
        )
        for most, why, cases in SPILLS_OF_LARGE_BLOCKS
        for architecture, norm, x, dy in cases
    ),
    *(
        Allowed(
            "backward_wide",
            "sm_90",
            (f"LAYER_NORM={norm}", f"X_TYPE={x}", "WANT_DB=0", "ROW_WARPS=16", "WIDE_ROWS=1"),
            8,
            "Sixteen warps that work on rows leave each thread too few registers. Timed with it in bfloat16 alone.",
        )
        for norm, x in ((0, "float16"), (1, "float16"), (1, "bfloat16"))
    ),
)


def numbers(spill: Spill) -> int:
    return max(spill.stack, spill.stores, spill.loads)


def allowance(spill: Spill) -> Allowed | None:
    """The entry that decides: of those that agree the largest."""
    agree = (
        allowed
        for allowed in ALLOWED_SPILLS
        if allowed.kernel == spill.kernel
        and allowed.architecture in (None, spill.architecture)
        and set(allowed.definitions) <= set(spill.definitions)
        # Of these only those that an entry names were looked at.
        and not any(
            text.startswith(("NARROW_VECTOR=", "ODD_ROWS=", "PART_OF_WARP="))
            for text in {*spill.definitions} - {*allowed.definitions}
        )
    )
    return max(agree, key=lambda allowed: allowed.most, default=None)


def not_allowed(spills: list[Spill]) -> list[str]:
    """In words, the spills that no entry allows."""
    return [
        f"{spill.architecture} {spill.kernel} {' '.join(spill.definitions)}: {spill.stack} bytes of stack, "
        f"spills {spill.stores} and reloads {spill.loads}"
        for spill in spills
        if (entry := allowance(spill)) is None or numbers(spill) > entry.most
    ]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("capability", COMPUTE_CAPABILITIES, ids=architecture)
def test_a_part_of_the_variants_compiles_without_spills(capability: tuple[int, int]) -> None:
    chosen = list(sample(capability, PART))
    assert len(chosen) > 20
    spills, wrong = compile_all(capability, chosen)
    assert not wrong, "\n".join(wrong)
    assert not not_allowed(spills), "\n".join(not_allowed(spills))


def test_all_variants_compiled_without_spills(record: dict[str, Any]) -> None:
    found = problems(record, file_digests()) + not_allowed(recorded_spills(record))
    assert not found, "\n".join(["tests/compile_record.json:", *found])


@pytest.mark.parametrize("entry", ALLOWED_SPILLS, ids=lambda entry: f"{entry.architecture} {entry.kernel}")
def test_every_allowance_is_as_large_as_what_it_allows(record: dict[str, Any], entry: Allowed) -> None:
    """Else a later spill would hide behind it."""
    assert max((numbers(s) for s in recorded_spills(record) if allowance(s) is entry), default=0) == entry.most


def test_what_counts_of_included_files(tmp_path: Path) -> None:
    """What is compiled of them, wherever it stands: moved, with the place where it is included, it counts as before."""

    def code(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.cuh").write_text(f"// {name}\n#pragma once\n\n{text}")
        return expanded('#include "one.cuh"\n#include "two.cuh"\nint last;  // of all\n', tmp_path)

    assert code(one="int a;\nint b;\n", two='#include "one.cuh"\nint c;\n') == "int a;\nint b;\nint c;\nint last;"
    assert code(one='#include "three.cuh"\nint b;\n', two="int c;\n", three="int a;\n") == code(
        one="int a;\n", two="int b;\n\nint c;\n"
    )
    assert code(one="int b;\nint a;\n") != code(one="int a;\nint b;\n")


def test_a_record_of_other_sources_does_not_pass(record: dict[str, Any]) -> None:
    digests = file_digests()
    assert not problems(record, digests)
    (problem,) = problems(record, {**digests, "forward.cu": "0" * 64})
    assert problem.startswith("it is not about what is compiled of forward.cu; ")
    (problem,) = problems(record, {**digests, "new.cu": "0" * 64})
    assert "compiled of new.cu;" in problem
    (problem,) = problems(record, {file: digest for file, digest in digests.items() if file != "triad.cu"})
    assert "compiled of triad.cu;" in problem
    worse = copy.deepcopy(record)
    worse["wrong"].append("sm_90 triad.cu: does not compile")
    assert problems(worse, digests) == ["sm_90 triad.cu: does not compile"]
    spill = ["sm_90", "triad", ["ELEMENT=float32"], 8, 8, 4]
    assert not_allowed(recorded_spills({"spills": [spill]})) == [
        "sm_90 triad ELEMENT=float32: 8 bytes of stack, spills 8 and reloads 4"
    ]


def test_the_record_counts_what_the_tree_has(record: dict[str, Any]) -> None:
    assert record["variants"] == counts()


def test_digests_are_of_all_that_a_file_includes_and_of_no_comments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in module.source_directory().iterdir()}
    chosen = {(9, 0): tuple(Variant(file, ("kernel",), ("A=1",)) for file in sorted(files) if file.endswith(".cu"))}
    monkeypatch.setattr(module, "source_directory", lambda: tmp_path)
    monkeypatch.setattr("compiling.every_variant", lambda: chosen)

    def digests(**texts: str) -> dict[str, str]:
        for name, text in {**files, **{name.replace("__", "."): text for name, text in texts.items()}}.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        return file_digests.__wrapped__()

    def changed(**texts: str) -> set[str]:
        after = digests(**texts)
        return {file for file, digest in digests().items() if after[file] != digest}

    assert set(digests()) == {variant.file for variant in chosen[9, 0]}
    assert not changed(element__cuh="// more words\n" + files["element.cuh"])
    assert changed(triad__cu=files["triad.cu"] + "int more;") == {"triad.cu"}
    of_backward = changed(reduction__cuh=files["reduction.cuh"] + "int more;")
    assert of_backward == {file for file in digests() if file.startswith("backward")}
    assert {"backward_staged.cu", "forward_staged.cu"} <= changed(staged__cuh=files["staged.cuh"] + "int more;")
    before = digests()
    chosen[9, 0] = (*chosen[9, 0], Variant("forward.cu", ("kernel",), ("A=2",)))
    assert {file for file, digest in digests().items() if before[file] != digest} == {"forward.cu"}


def test_a_new_record_compiles_what_changed_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]
) -> None:
    from cupy.cuda import nvrtc

    record = {**record, "nvrtc": ".".join(map(str, nvrtc.getVersion()))}  # as if it were made here
    compiled = []

    def compile_none(capability: tuple[int, int], chosen: list[Variant]) -> tuple[list[Spill], list[str]]:
        compiled.extend((capability, variant.file) for variant in chosen)
        return [], []

    monkeypatch.setattr("compiling.compile_all", compile_none)
    assert json.loads(json.dumps(renewed(record))) == record
    assert not compiled
    before = copy.deepcopy(record)
    before["files"]["backward_staged.cu"] = "0" * 64
    before["wrong"] = ["sm_90 triad.cu ELEMENT=float32: does not compile:\nan error"]
    after = renewed(before)
    assert {file for _, file in compiled} == {"backward_staged.cu", "triad.cu"}
    assert {capability for capability, _ in compiled} == set(COMPUTE_CAPABILITIES)
    assert after["files"] == file_digests()
    assert not after["wrong"]
    kept = [spill for spill in recorded_spills(record) if spill.kernel != "backward_staged"]
    assert kept
    assert recorded_spills(after) == kept
    for other in (None, {**record, "nvrtc": "11.0"}):
        compiled.clear()
        assert not recorded_spills(renewed(other))
        assert len(compiled) == sum(counts().values())


def test_the_parts_differ_between_sources_and_are_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    every = every_variant()[9, 0]
    one = list(sample((9, 0), PART))
    assert 0.6 < len(one) / (len(every) / PART) < 1.4
    monkeypatch.setattr("compiling.file_digests", lambda: dict.fromkeys({each.file for each in every}, "other"))
    assert set(one) != set(sample((9, 0), PART))


def test_the_check_sees_a_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with an indexed local array is reported, so a silent report cannot pass for a clean one."""
    text = """
    extern "C" __global__ void local(int* p, int i) {
        volatile int a[1024];
        for (int j = 0; j < 1024; ++j) a[j] = p[j];
        p[0] = a[i];
    }
    """
    monkeypatch.setattr(module, "source", lambda file_name, definitions: text)
    (spill,), wrong = compile_variant((9, 0), Variant("local.cu", ("local",), ()))
    assert not wrong
    assert spill[:4] == ("sm_90", "local", (), 4096)
    assert not_allowed([spill])
    assert compile_variant((9, 0), Variant("local.cu", ("another",), ()))[1] == [
        "sm_90 local.cu : no report of another"
    ]


def test_the_check_sees_a_spill_of_a_function_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
    __device__ __noinline__ int called(int* p, int i) {
        volatile int a[1024];
        for (int j = 0; j < 1024; ++j) a[j] = p[j];
        return a[i];
    }
    extern "C" __global__ void caller(int* p, int i) { p[0] = called(p, i); }
    """
    monkeypatch.setattr(module, "source", lambda file_name, definitions: text)
    (spill,), wrong = compile_variant((9, 0), Variant("caller.cu", ("caller",), ()))
    assert not wrong
    assert spill[:4] == ("sm_90", "caller", (), 4096)


def test_kernels_are_compiled_into_the_cache_on_all_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from types import SimpleNamespace

    cupy = pytest.importorskip("cupy")
    asked = []

    class Pool:
        def __init__(self, processes: int, mp_context: object) -> None:
            assert processes == len(os.sched_getaffinity(0))

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        map = staticmethod(lambda function, every, chunksize: map(function, every))

    def kernel(*variant: object) -> SimpleNamespace:
        asked.append(variant)
        return SimpleNamespace(kernel=SimpleNamespace(ptr=1))

    monkeypatch.setattr(compiling, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(compiling.module, "kernel", kernel)
    monkeypatch.setattr(cupy.cuda, "Device", lambda: SimpleNamespace(compute_capability="90"))
    assert compiling.main(["--cache"]) == 0
    every = list(compiling.variants((9, 0)))
    assert asked == [(variant.file, variant.kernels[0], variant.definitions) for variant in every]
    assert capsys.readouterr().out == f"{len(every)} variants are in CuPy's cache\n"
