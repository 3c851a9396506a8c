"""The record of a GPU run: which kernel sources it covered, on which device, with what result.

Machines without a GPU cannot run the GPU tests. A record that is committed beside the tests, made by
``pytest -m gpu --gpu-record tests/gpu_record.json`` on a machine with a GPU, stands in for them: `problems` says
what keeps a record from vouching for the tree that it lies in.

Runs of parts, at the same time or one after the other, of whole files or functions, make one record together:
``python tests/gpu_record.py PART… > tests/gpu_record.json``. A run that is cut off leaves the record of the test
functions that it was through with; ``pytest -m gpu --gpu-record REST --gpu-record-has PART`` runs the others. Several
processes may share a run's tests, ``-n 14`` with pytest-xdist, if only those with the mark are chosen. And where the
fault is a test's, not the sources', a later run over the same sources, of all of that test function's cases, stands
for what failed: ``--again LATER``; or the tree leaves those cases out, and the record names them: ``--gone``.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("gpu_record.json")
HOW_TO = "make a new one with `pytest -m gpu --gpu-record tests/gpu_record.json` on a machine with a GPU"
SOURCES = ("kernels_cu", "cupynorm/cuda")
SUFFIXES = {".cu", ".cuh", ".py"}
# Of C++: a string, a character, a comment (which a backslash at a line's end carries on).
STRING_OR_COMMENT = re.compile(
    r""""(?:\\.|[^"\\\n])*"|'(?:\\[^\n]+?|[^'\\\n])'|//(?:\\\n|[^\n])*|/\*.*?\*/""", re.DOTALL
)

NEEDS_TWO_DEVICES = "needs two CUDA devices"
NEEDS_MEMORY = "needs more free device memory"
EXPECTED_SKIPS = (NEEDS_TWO_DEVICES, NEEDS_MEMORY)  # what a smaller machine may leave out


def without_comments(text: str, suffix: str) -> str:
    """The code of a CUDA C++ or Python file: no comments, no blank lines, no spaces at lines' ends.

    Of Python, blank lines and spaces at lines' ends within strings do not count either.
    """
    if suffix == ".py":
        lines = text.split("\n")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    else:
        code = STRING_OR_COMMENT.sub(lambda found: found[0] if found[0][0] in "\"'" else " ", text)
        lines = code.split("\n")
    kept: list[str] = []
    for line in map(str.rstrip, lines):
        if line or (kept and kept[-1].endswith("\\")):  # there an empty line ends what the backslash carries on
            kept.append(line)
    return "\n".join(kept)


def source_digest(root: Path) -> str:
    """SHA-256 over every kernel source: path, NUL, length, NUL, without_comments(), in the order of the paths."""
    digest = hashlib.sha256()
    paths = [path for folder in SOURCES for path in (root / folder).rglob("*") if path.suffix in SUFFIXES]
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        content = without_comments(path.read_text(encoding="utf-8"), path.suffix).encode()
        digest.update(name.encode() + b"\0" + str(len(content)).encode() + b"\0" + content)
    return digest.hexdigest()


def function_name(nodeid: str) -> str:
    """The test function of a test's id: its file and its name, without its parameters."""
    path, _, test = nodeid.partition("::")
    return f"{Path(path).name}::{test.partition('[')[0]}"


def mark(nodeid: str) -> str:
    """Of a test's id, short enough for a record to have all cases."""
    return hashlib.sha256(nodeid.encode()).hexdigest()[:6]


def marks_of(nodeids: Iterable[str]) -> dict[str, str]:
    """Of each test function's cases."""
    marks: defaultdict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        marks[function_name(nodeid)].append(mark(nodeid))
    return {name: " ".join(sorted(of_function)) for name, of_function in sorted(marks.items())}


def lacking(record: dict[str, Any], nodeids: list[str]) -> list[str]:
    """The tests that are in no function of a record; none where it is from before records had their cases."""
    cases = {name: set(marks.split()) for name, marks in record.get("cases", {}).items()}
    return [nodeid for nodeid in nodeids if cases and mark(nodeid) not in cases.get(function_name(nodeid), set())]


def problems(record: dict[str, Any], digest: str, nodeids: list[str]) -> list[str]:
    """What keeps a record from vouching for a tree with this digest and these GPU tests; empty if nothing does."""
    found = []
    if record["sources_sha256"] != digest:
        found.append(f"it covers sources with SHA-256 {record['sources_sha256']}, the tree's are {digest}")
    if record["passed"] == 0:
        found.append("no GPU test passed in it")
    if record["failed"]:
        found.append(f"{record['failed']} GPU tests failed in it: {', '.join(record['failures'])}")
    for reason, count in record["skip_reasons"].items():
        if not any(expected in reason for expected in EXPECTED_SKIPS):
            found.append(f"{count} GPU tests were skipped in it, unexpectedly: {reason}")
    functions = {function_name(nodeid) for nodeid in nodeids}
    if missing := sorted(functions - set(record["functions"])):
        found.append(f"it lacks {', '.join(missing)}")
    if cases := [nodeid for nodeid in lacking(record, nodeids) if function_name(nodeid) not in missing]:
        found.append(f"it lacks {len(cases)} of the tree's cases, {cases[0]} among them")
    if record["collected"] < len(nodeids):
        found.append(f"it has {record['collected']} GPU tests, the tree has {len(nodeids)}")
    if (ran := record["passed"] + record["failed"] + record["skipped"]) != record["collected"]:
        found.append(f"{record['collected']} GPU tests were collected in it, but {ran} have a result")
    return found


_COUNTS, _LISTS = ("collected", "passed", "failed", "skipped"), ("failures", "functions")
_GONE = "failures_of_cases_gone"
_OF_RESULTS = {"date_utc", "skip_reasons", "cases", _GONE, *_COUNTS, *_LISTS}  # the rest says what ran where


def together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of several runs over the same sources, on machines that are alike in all that a record names, no test
    function in two of them."""
    first = {key: value for key, value in parts[0].items() if key not in _OF_RESULTS}
    skip_reasons: Counter[str] = Counter()
    for part in parts:
        if {key: value for key, value in part.items() if key not in _OF_RESULTS} != first:
            raise ValueError("the parts are of different devices, versions or sources")
        skip_reasons.update(part["skip_reasons"])
    functions = [function for part in parts for function in part["functions"]]
    if len(set(functions)) != len(functions):
        raise ValueError(f"in two parts: {', '.join(sorted(f for f, n in Counter(functions).items() if n > 1))}")
    whole = {key: sum(part[key] for part in parts) for key in _COUNTS}
    whole |= {key: sorted(entry for part in parts for entry in part[key]) for key in _LISTS}
    whole |= {"date_utc": max(part["date_utc"] for part in parts), "skip_reasons": dict(sorted(skip_reasons.items()))}
    if all("cases" in part for part in parts):
        whole["cases"] = dict(sorted(entry for part in parts for entry in part["cases"].items()))
    gone = sorted(entry for part in parts for entry in part.get(_GONE, []))
    keys = [key for key in parts[0] if key != _GONE and (key != "cases" or key in whole)]
    return {key: first.get(key, whole.get(key)) for key in keys} | ({_GONE: gone} if gone else {})


def made_good(
    record: dict[str, Any], later: dict[str, Any], nodeids: list[str], failed_utc: str | None = None
) -> dict[str, Any]:
    """The record with the test functions that failed in it as a later run found them, which it names.

    The later run is of the same sources and versions on such a device, of all cases of its functions among `nodeids`,
    the tree's GPU tests; it skips none. `failed_utc`: when its parts with failures had
    ended, if other parts ran after these.
    """
    functions = sorted({function_name(nodeid) for nodeid in record["failures"]})
    whole = sum(function_name(nodeid) in later["functions"] for nodeid in nodeids)
    ran = later["passed"] + later["failed"] + later["skipped"]
    if any(later.get(key) != value for key, value in record.items() if key not in _OF_RESULTS):
        raise ValueError("the later run is of another machine, versions or sources")
    if later["date_utc"] <= (failed_utc or record["date_utc"]):
        raise ValueError("the later run is not later")
    if lacking(later, [nodeid for nodeid in nodeids if function_name(nodeid) in later["functions"]]):
        raise ValueError("the later run is of other cases than the tree's")
    if not whole == later["collected"] == ran:
        raise ValueError(f"the later run has {ran} results of {later['collected']} tests, the tree has {whole}")
    if later["skipped"]:
        raise ValueError(f"the later run skipped {later['skipped']} tests, of which some may have failed")
    if missing := sorted(set(functions) - set(later["functions"])):
        raise ValueError(f"the later run lacks {', '.join(missing)}")
    if still := sorted(set(functions) & {function_name(nodeid) for nodeid in later["failures"]}):
        raise ValueError(f"failed again: {', '.join(still)}")
    again = {"date_utc": later["date_utc"], "functions": functions, "failures_before": record["failures"]}
    again["failures_of_others"] = later["failures"]
    passed = record["passed"] + len(record["failures"])
    return record | {"passed": passed, "failed": 0, "failures": [], "run_again": again}


def without_gone(record: dict[str, Any], nodeids: list[str]) -> dict[str, Any]:
    """The record without the failures of cases that are not among `nodeids`, the tree's GPU tests; it names them.

    For cases whose fault is the test's, as of inputs that could not be made: whoever reads the record may ask why.
    """
    gone = sorted(set(record["failures"]) - set(nodeids))
    if not gone:
        return record
    counts = {key: record[key] - len(gone) for key in ("collected", "failed")}
    failures = [nodeid for nodeid in record["failures"] if nodeid not in gone]
    return record | counts | {"failures": failures, _GONE: sorted([*record.get(_GONE, []), *gone])}


def functions_of(part: Path) -> list[str]:
    """The test functions in a record, which is to be of this tree's sources."""
    try:
        record = json.loads(part.read_text())
        functions, digest = record["functions"], record["sources_sha256"]
    except (OSError, ValueError, KeyError) as error:
        raise pytest.UsageError(f"{part} is no record: {error}") from None
    if digest != source_digest(ROOT):
        raise pytest.UsageError(f"{part}: it covers sources with SHA-256 {digest}, not this tree's")
    return list(functions)


def collect_gpu_tests(*options: str) -> list[str]:
    """The ids of the tree's GPU tests, as a run of all of them, with more options perhaps, would collect them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [*options, "tests"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in result.stdout.splitlines() if "::" in line]


class Recorder:
    """Pytest plugin: counts the GPU tests of a run and writes the record of the test functions of which all cases have
    run: at its end and, in case it is cut off before, every `seconds`."""

    def __init__(self, path: Path, environment: dict[str, Any], seconds: float = 10.0) -> None:
        self.path, self.environment, self.seconds = path, environment, seconds
        self.sources = source_digest(ROOT)  # at the beginning: what changes meanwhile is not what ran
        self.collected: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.skip_reasons: dict[str, str] = {}
        self.left: Counter[str] = Counter()  # cases of a function
        self.written = time.monotonic()

    def pytest_collection_finish(self, session: Any) -> None:
        self.collected = {item.nodeid for item in session.items if item.get_closest_marker("gpu")}
        self.left = Counter(map(function_name, self.collected))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The same where pytest-xdist's workers run the tests: each has collected all of them, here none are. A worker
        that takes the place of one that died comes later, and changes nothing."""
        if not self.collected:
            self.collected = set(ids)
            self.left = Counter(map(function_name, ids))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid not in self.collected:
            return
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skip_reasons[report.nodeid] = reason.removeprefix("Skipped: ")
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if nodeid not in self.collected:
            return
        self.left[function_name(nodeid)] -= 1
        if self.left[function_name(nodeid)] == 0 and time.monotonic() >= self.written + self.seconds:
            self.write()

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        cases = {case for case in self.collected if self.left[function_name(case)] == 0}
        outcomes = {nodeid: outcome for nodeid, outcome in self.outcomes.items() if nodeid in cases}
        counts = Counter(outcomes.values())
        skip_reasons = Counter(reason for nodeid, reason in self.skip_reasons.items() if nodeid in cases)
        record = {
            "date_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **self.environment,
            "sources_sha256": self.sources,
            "collected": len(cases),
            **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
            "failures": sorted(nodeid for nodeid, outcome in outcomes.items() if outcome == "failed"),
            "skip_reasons": dict(sorted(skip_reasons.items())),
            "functions": sorted({function_name(nodeid) for nodeid in cases}),
            "cases": marks_of(cases),
        }
        unfinished = self.path.with_name(self.path.name + ".new")
        unfinished.write_text(json.dumps(record, indent=2) + "\n")
        unfinished.replace(self.path)  # a run that is cut off just now leaves the one before
        self.written = time.monotonic()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        left = sum(self.left.values())
        words = f", without the functions of which {left} cases did not run" if left else ""
        terminalreporter.write_line(f"GPU record of {len(self.collected)} tests written to {self.path}{words}")


def environment() -> dict[str, Any]:
    """The device and the versions that a record names."""
    import cupy
    import numpy as np

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "device": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "driver": _driver(),
        "driver_cuda": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Print the record that records of parts make together.")
    parser.add_argument("parts", nargs="+", type=Path, metavar="PART")
    parser.add_argument("--again", type=Path, metavar="LATER", help="a later run of the test functions that failed")
    parser.add_argument("--gone", action="store_true", help="leave out failures of cases that the tree no longer has")
    options = parser.parse_args()
    parts = [json.loads(path.read_text()) for path in options.parts]
    record = together(parts)
    if options.gone:
        record = without_gone(record, collect_gpu_tests())
    if options.again:
        failed_utc = max((part["date_utc"] for part in parts if part["failures"]), default=None)
        record = made_good(record, json.loads(options.again.read_text()), collect_gpu_tests(), failed_utc)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
