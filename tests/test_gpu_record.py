"""The committed record of a GPU run vouches for exactly the kernel sources and GPU tests of this tree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
from gpu_record import (
    HOW_TO,
    NEEDS_TWO_DEVICES,
    RECORD,
    ROOT,
    Recorder,
    collect_gpu_tests,
    function_name,
    functions_of,
    made_good,
    marks_of,
    problems,
    source_digest,
    together,
    without_comments,
    without_gone,
)

GOOD = {
    "sources_sha256": "d",
    "collected": 3,
    "passed": 2,
    "failed": 0,
    "skipped": 1,
    "failures": [],
    "skip_reasons": {NEEDS_TWO_DEVICES: 1},
    "functions": ["test_a.py::test_one", "test_a.py::test_two"],
}
NODEIDS = ["tests/test_a.py::test_one[1]", "tests/test_a.py::test_one[2]", "tests/test_a.py::test_two"]


def test_the_committed_record_vouches_for_this_tree(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--gpu-record"):
        pytest.skip("this run makes a new record")
    assert RECORD.exists(), f"{RECORD} is missing; {HOW_TO}"
    found = problems(json.loads(RECORD.read_text()), source_digest(ROOT), collect_gpu_tests())
    assert not found, f"{RECORD}: " + "; ".join(found) + f"; {HOW_TO}"


def test_a_complete_record_is_accepted() -> None:
    assert problems(GOOD, "d", NODEIDS) == []
    assert problems(GOOD | {"cases": marks_of(NODEIDS)}, "d", NODEIDS) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources_sha256": "other"}, "it covers sources with SHA-256 other"),
        ({"passed": 0}, "no GPU test passed"),
        ({"failed": 1, "failures": ["test_a.py::test_two"]}, "1 GPU tests failed in it: test_a.py::test_two"),
        ({"skip_reasons": {"no CUDA device": 3}}, "3 GPU tests were skipped in it, unexpectedly: no CUDA device"),
        ({"functions": ["test_a.py::test_one"]}, "it lacks test_a.py::test_two"),
        ({"collected": 2}, "it has 2 GPU tests, the tree has 3"),
        ({"passed": 1}, "3 GPU tests were collected in it, but 2 have a result"),
        (
            {"cases": marks_of([*NODEIDS[1:], "tests/test_a.py::test_two[more]"])},
            f"1 of the tree's cases, {NODEIDS[0]}",
        ),
    ],
)
def test_each_defect_of_a_record_is_named(change: dict[str, object], message: str) -> None:
    assert any(message in problem for problem in problems(GOOD | change, "d", NODEIDS))


def recorder_in(folder: Path, **options: float) -> Recorder:
    """Of a run that has collected NODEIDS."""
    recorder = Recorder(folder / "record.json", {"device": "a device"}, **options)
    items = [SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda _: True) for nodeid in NODEIDS]
    recorder.pytest_collection_finish(SimpleNamespace(items=items))
    return recorder


def report(recorder: Recorder, nodeid: str, when: str, outcome: str, longrepr: object = None) -> None:
    flags = {flag: flag == outcome for flag in ("passed", "failed", "skipped")}
    recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, when=when, longrepr=longrepr, **flags))


def test_the_recorder_beside_workers_that_run_the_tests(tmp_path) -> None:
    """As pytest-xdist tells it: what each of the workers has collected, then which tests ran, in any order."""
    recorder = Recorder(tmp_path / "record.json", {})
    for _ in range(2):
        recorder.pytest_xdist_node_collection_finished(ids=NODEIDS)
    for nodeid in reversed(NODEIDS[:2]):
        report(recorder, nodeid, "call", "passed")
        recorder.pytest_runtest_logfinish(nodeid)
    recorder.pytest_sessionfinish()
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["collected"], record["passed"], record["functions"]) == (2, 2, ["test_a.py::test_one"])


SKIPPED = ("file", 1, f"Skipped: {NEEDS_TWO_DEVICES}")


def test_the_recorder_counts_each_test_once(tmp_path) -> None:
    recorder = recorder_in(tmp_path)

    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "failed")):
        report(recorder, "tests/test_a.py::test_one[1]", when, outcome)
    for when in ("setup", "call", "teardown"):
        report(recorder, "tests/test_a.py::test_one[2]", when, "passed")
        report(recorder, "tests/test_b.py::test_without_the_mark", when, "failed")
    report(recorder, "tests/test_a.py::test_two", "setup", "skipped", SKIPPED)
    for nodeid in recorder.collected:
        recorder.pytest_runtest_logfinish(nodeid)
    recorder.pytest_sessionfinish()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["device"] == "a device"
    assert record["sources_sha256"] == source_digest(ROOT)
    assert [record[key] for key in ("collected", "passed", "failed", "skipped")] == [3, 1, 1, 1]
    assert record["failures"] == ["tests/test_a.py::test_one[1]"]
    assert record["skip_reasons"] == {NEEDS_TWO_DEVICES: 1}
    assert record["functions"] == ["test_a.py::test_one", "test_a.py::test_two"]
    assert record["cases"] == marks_of(NODEIDS)


def test_a_run_that_is_cut_off_leaves_what_it_is_through_with(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, seconds=0)

    def run(nodeid: str, outcome: str) -> None:
        report(recorder, nodeid, "call", outcome, SKIPPED)
        recorder.pytest_runtest_logfinish(nodeid)

    run("tests/test_b.py::test_without_the_mark", "failed")
    run(NODEIDS[0], "failed")
    assert not recorder.path.exists()  # not all cases of its function have run
    run(NODEIDS[1], "skipped")
    assert json.loads(recorder.path.read_text())["functions"] == ["test_a.py::test_one"]
    cut_off = json.loads(recorder.path.read_text())
    assert [cut_off[key] for key in ("collected", "passed", "failed", "skipped")] == [2, 0, 1, 1]
    assert cut_off["failures"] == [NODEIDS[0]]
    assert cut_off["skip_reasons"] == {NEEDS_TWO_DEVICES: 1}
    recorder.pytest_sessionfinish()  # of a run that is interrupted
    assert json.loads(recorder.path.read_text()) == cut_off | {"date_utc": ANY}
    recorder.seconds = 3600
    run(NODEIDS[2], "passed")
    assert json.loads(recorder.path.read_text()) == cut_off | {"date_utc": ANY}
    recorder.pytest_sessionfinish()
    whole = json.loads(recorder.path.read_text())
    assert whole["functions"] == ["test_a.py::test_one", "test_a.py::test_two"]
    assert [whole[key] for key in ("collected", "passed", "failed", "skipped")] == [3, 1, 1, 1]
    assert list(tmp_path.iterdir()) == [recorder.path]


def test_what_parts_have_is_left_out(tmp_path: Path) -> None:
    every = collect_gpu_tests()
    functions = sorted(set(map(function_name, every)))
    parts = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, recorded in zip(parts, (functions[:3], functions[5:]), strict=True):
        path.write_text(json.dumps({"sources_sha256": source_digest(ROOT), "functions": recorded}))
    rest = collect_gpu_tests(*(f"--gpu-record-has={path}" for path in parts))
    assert rest == [nodeid for nodeid in every if function_name(nodeid) in functions[3:5]]
    assert rest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is no record"),
        ('{"functions": []}', "is no record"),
        ('{"functions": [], "sources_sha256": "other"}', "it covers sources with SHA-256 other"),
    ],
)
def test_what_has_no_record_of_these_sources_is_an_error(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(pytest.UsageError, match=message):
        functions_of(path)


def test_parts_make_one_record() -> None:
    first = {"date_utc": "2", "device": "a device", **GOOD}
    second = first | {
        **{"date_utc": "1", "collected": 4, "passed": 1, "failed": 1, "skipped": 2},
        **{"failures": ["b"], "skip_reasons": {NEEDS_TWO_DEVICES: 1, "a": 1}, "functions": ["test_b.py::test_one"]},
    }
    assert together([first, second]) == first | {
        **{"collected": 7, "passed": 3, "failed": 1, "skipped": 3},
        **{"failures": ["b"], "skip_reasons": {NEEDS_TWO_DEVICES: 2, "a": 1}},
        "functions": ["test_a.py::test_one", "test_a.py::test_two", "test_b.py::test_one"],
    }
    assert list(together([first, second])) == list(first)
    for change in ({"device": "another"}, {"sources_sha256": "other"}, {"functions": ["test_a.py::test_two"]}):
        with pytest.raises(ValueError, match=r"the parts are of different|in two parts: test_a\.py::test_two"):
            together([first, second | change])


def test_parts_have_their_cases_together() -> None:
    """Where all have them."""
    other = ["tests/test_b.py::test_one"]
    first = {"date_utc": "2", **GOOD, "cases": marks_of(NODEIDS)}
    second = first | {"functions": ["test_b.py::test_one"], "cases": marks_of(other)}
    assert together([second, first])["cases"] == marks_of([*NODEIDS, *other])
    assert "cases" not in together([first, {key: value for key, value in second.items() if key != "cases"}])


def test_a_later_run_of_a_function_that_failed_makes_it_good() -> None:
    failed, others = ["tests/test_a.py::test_two"], ["tests/test_a.py::test_one[1]"]
    record = {"date_utc": "1", "device": "a device", **GOOD, "passed": 1, "failed": 1, "failures": failed}
    ran = {"passed": 2, "skipped": 0, "skip_reasons": {}}
    later = record | ran | {"date_utc": "2", "failures": others}
    good = made_good(record, later, NODEIDS)
    assert problems(good, "d", NODEIDS) == []
    names = ["test_a.py::test_two"]
    again = {"date_utc": "2", "functions": names, "failures_before": failed, "failures_of_others": others}
    assert good["run_again"] == again
    none = {"passed": 0, "failed": 0, "skipped": 0, "failures": [], "skip_reasons": {}}
    for change, message in (
        ({"sources_sha256": "other"}, "of another machine, versions or sources"),
        ({"device": "another"}, "of another machine, versions or sources"),
        ({"date_utc": "1"}, "is not later"),
        (none, "has 0 results of 3 tests, the tree has 3"),
        (none | {"collected": 1, "passed": 1}, "has 1 results of 1 tests, the tree has 3"),
        ({"passed": 1, "skipped": 1, "skip_reasons": {NEEDS_TWO_DEVICES: 1}}, "skipped 1 tests"),
        ({"functions": names, "collected": 1, "passed": 1, "failed": 0, "failures": []}, None),
        (
            {"functions": ["test_a.py::test_one"], "collected": 2, "failed": 0, "failures": []},
            "lacks test_a.py::test_two",
        ),
        ({"failures": failed}, "failed again: test_a.py::test_two"),
    ):
        if message is None:
            assert made_good(record, later | change, NODEIDS)["failed"] == 0
        else:
            with pytest.raises(ValueError, match=re.escape(message)):
                made_good(record, later | change, NODEIDS)


def test_failures_of_cases_that_are_gone_are_named() -> None:
    gone, still = "tests/test_a.py::test_one[3]", "tests/test_a.py::test_two"
    record = {**GOOD, "collected": 4, "failed": 1, "failures": [gone]}
    assert problems(record, "d", NODEIDS)
    good = without_gone(record, NODEIDS)
    assert problems(good, "d", NODEIDS) == []
    assert good == {**GOOD, "failures_of_cases_gone": [gone]}
    both = {**record, "passed": 1, "failed": 2, "failures": [gone, still]}
    without = without_gone(both, NODEIDS)
    assert problems(without, "d", NODEIDS) == [f"1 GPU tests failed in it: {still}"]
    assert without_gone(without, NODEIDS) == without
    later = {**GOOD, "date_utc": "2", "passed": 3, "skipped": 0, "skip_reasons": {}}
    other = {**later, "collected": 1, "passed": 1, "skipped": 0, "skip_reasons": {}, "functions": ["test_b.py::test"]}
    for parts in ([{**without, "date_utc": "1"}, other], [other, {**without, "date_utc": "1"}]):
        assert together(parts)["failures_of_cases_gone"] == [gone]
    good = made_good({**without, "date_utc": "1"}, later, NODEIDS)
    assert made_good({**without, "date_utc": "9"}, later, NODEIDS, failed_utc="1") == {**good, "date_utc": "9"}
    for failed_utc in ("2", "3"):
        with pytest.raises(ValueError, match="is not later"):
            made_good({**without, "date_utc": "9"}, later, NODEIDS, failed_utc)
    assert (problems(good, "d", NODEIDS), good["failures_of_cases_gone"]) == ([], [gone])


def test_function_names_leave_out_folder_and_parameters() -> None:
    assert function_name("tests/test_a.py::test_one[x::y-1]") == "test_a.py::test_one"


def test_code_of_cuda_is_what_is_no_comment() -> None:
    text = """
    // of a whole line
    int a;  // behind code
      /* of
         several lines */ int b = '"' == 34 /* within */ + 1;
    asm("// not a comment, nor this: /* */ \\"" : : "r"(a));  // but "this" is
    char quote = '"'; print("a // b"); char same = '\\'';  // " and ' \\
    of this comment, too
    #define NOTHING \\

    int c;
    """
    assert without_comments(text, ".cu").split("\n") == [
        "    int a;",
        "        int b = '\"' == 34   + 1;",
        '    asm("// not a comment, nor this: /* */ \\"" : : "r"(a));',
        """    char quote = '"'; print("a // b"); char same = '\\'';""",
        "    #define NOTHING \\",
        "",
        "    int c;",
    ]


def test_code_of_python_is_what_is_no_comment() -> None:
    text = """# of a whole line
def f(a):  # behind code

    \'\'\'A docstring # is none.\'\'\'
    return f"# {a:#x} nor this"  # but "this" is
"""
    assert without_comments(text, ".py").split("\n") == [
        "def f(a):",
        "    '''A docstring # is none.'''",
        '    return f"# {a:#x} nor this"',
    ]


def test_the_digest_sees_all_code_and_every_name_of_the_kernel_sources(tmp_path) -> None:
    kernels, cuda = tmp_path / "kernels_cu", tmp_path / "cupynorm" / "cuda"
    kernels.mkdir()
    cuda.mkdir(parents=True)
    (kernels / "a.cu").write_bytes(b"one")
    (kernels / "b.cuh").write_bytes(b"two")
    (cuda / "launch.py").write_bytes(b"three")
    digests = [source_digest(tmp_path)]
    (kernels / "notes.txt").write_bytes(b"not a source")
    assert source_digest(tmp_path) == digests[0]
    (kernels / "a.cu").write_bytes(b"one  // and a comment\n\n")
    (cuda / "launch.py").write_bytes(b"# and a comment\nthree")
    assert source_digest(tmp_path) == digests[0]
    (cuda / "launch.py").write_bytes(b"threE")
    digests.append(source_digest(tmp_path))
    (kernels / "b.cuh").rename(kernels / "c.cuh")
    digests.append(source_digest(tmp_path))
    (kernels / "a.cu").write_bytes(b"")  # moving bytes between neighbours must show: hence the lengths
    (kernels / "c.cuh").write_bytes(b"onetwo")
    digests.append(source_digest(tmp_path))
    assert len(set(digests)) == len(digests)


def test_the_tree_has_kernel_sources() -> None:
    empty = source_digest(ROOT / "tests" / "no such folder")
    assert source_digest(ROOT) != empty
