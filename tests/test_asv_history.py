"""No bandwidth in asv_bench/results falls by over 3%, or fails, from the commit that last has it to the last recorded
one without being accepted.

To accept a fall, write a line into asv_bench/NOTES.md that holds the word "accepted", the commit (at least 7 digits)
and the benchmark as the failure names it, with its parameters or, for all of them, without:

    Accepted at 06dee5e: CudaBackward.track_gbps(rmsnorm_backward, 4096, 100), because …
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import record

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "asv_bench" / "results"
NOTES = ROOT / "asv_bench" / "NOTES.md"
LARGEST_FALL = 0.03


@dataclass
class Commit:
    """What one machine measured of one commit: GB/s by benchmark and parameters."""

    machine: str
    hash: str
    date: int
    gbps: dict[str, float] = field(default_factory=dict)


def recorded(results: Path, order: list[str]) -> dict[str, list[Commit]]:
    """The commits of each machine, oldest first: as in `order` (newest first), by date where that lacks one."""
    about = json.loads((results / "benchmarks.json").read_text(encoding="utf-8"))
    commits: dict[tuple[str, str], Commit] = {}
    for path in sorted(results.glob("*/*.json")):
        if path.name == "machine.json":
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        key = (path.parent.name, result["commit_hash"])
        commit = commits.setdefault(key, Commit(*key, result["date"]))
        for name, columns in result["results"].items():
            values = dict(zip(result["result_columns"], columns, strict=False))
            if about.get(name, {}).get("unit") == "GB/s" and values["version"] == about[name]["version"]:
                commit.gbps |= bandwidths(name.removeprefix("benchmarks."), values)
    position = {commit_hash: -number for number, commit_hash in enumerate(order)}
    known = all(commit.hash in position for commit in commits.values())
    machines: dict[str, list[Commit]] = {}
    for commit in sorted(commits.values(), key=lambda c: position[c.hash] if known else c.date):
        if commit.gbps:
            machines.setdefault(commit.machine, []).append(commit)
    return machines


def bandwidths(name: str, values: dict[str, Any]) -> dict[str, float]:
    combinations = list(itertools.product(*values["params"] or []))
    figures = values["result"] or [None] * len(combinations)
    named = {
        f"{name}({', '.join(text.strip(chr(39)) for text in combination)})" if combination else name: figure
        for combination, figure in zip(combinations, figures, strict=True)
    }
    # One that failed has no figure, one that is not available NaN.
    return {key: figure or 0.0 for key, figure in named.items() if figure is None or not math.isnan(figure)}


def with_last_figures(commits: list[Commit]) -> list[Commit]:
    """The commits before the last, each with the figures that none between has."""
    seen: set[str] = set()
    found = []
    for commit in reversed(commits[:-1]):
        found.append(replace(commit, gbps={key: value for key, value in commit.gbps.items() if key not in seen}))
        seen |= commit.gbps.keys()
    return found


def falls(older: Commit, newer: Commit, notes: str) -> list[str]:
    """One line for each bandwidth that fell too far and that no line of the notes accepts."""
    lines = []
    for name in sorted(older.gbps.keys() & newer.gbps.keys()):
        before, after = older.gbps[name], newer.gbps[name]
        if after < before * (1 - LARGEST_FALL) and not accepted(notes, newer.hash, name):
            change = f"{before:.0f} GB/s at {older.hash[:7]}, {after:.0f} at {newer.hash[:7]}"
            lines.append(f"{newer.machine}: {name} fell by {1 - after / before:.1%}: {change}")
    return lines


def accepted(notes: str, commit_hash: str, name: str) -> bool:
    names = re.escape(name) + "|" + re.escape(name.partition("(")[0]) + r"(?![\w(])"
    for line in notes.splitlines():
        commits = re.findall(r"\b[0-9a-f]{7,40}\b", line)
        if "accepted" in line.lower() and any(map(commit_hash.startswith, commits)) and re.search(names, line):
            return True
    return False


def git_order(folder: Path) -> list[str]:
    """Newest first; empty without git."""
    try:
        done = subprocess.run(
            ["git", "-c", f"safe.directory={folder}", "log", "--topo-order", "--format=%H"],
            cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return []
    return done.stdout.split() if done.returncode == 0 else []


# --- what is recorded -------------------------------------------------------------------------------------


def test_no_recorded_bandwidth_fell() -> None:
    machines = recorded(RESULTS, git_order(ROOT)) if (RESULTS / "benchmarks.json").is_file() else {}
    pairs = [(older, commits[-1]) for commits in machines.values() for older in with_last_figures(commits)]
    if not pairs:
        pytest.skip("asv_bench/results/ has no machine with bandwidths of two commits yet: nothing to compare")
    notes = NOTES.read_text(encoding="utf-8")
    found = [line for older, newer in pairs for line in falls(older, newer, notes)]
    assert not found, "\n".join(["not accepted in asv_bench/NOTES.md:", *found])


def test_a_machines_commits_are_on_one_line() -> None:
    """Asv draws a line of its own for each value of what it knows of a machine."""
    kept: dict[str, set[str]] = {}
    for path in RESULTS.glob("*/*.json"):
        about = json.loads(path.read_text(encoding="utf-8"))
        about = about if path.name == "machine.json" else about["params"]
        fields = {name: about[name] for name in ("arch", "cpu", "machine", "num_cpu", "os", "ram")}
        kept.setdefault(path.parent.name, set()).add(json.dumps(fields))
    assert all(len(lines) == 1 for lines in kept.values()), kept


@pytest.mark.parametrize(("memory", "kept"), [("135148564480", "126 GiB"), ("135128870912", "126 GiB"), ("", "")])
def test_a_machine_is_kept_by_what_machines_of_its_kind_have_in_common(
    memory: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = pytest.importorskip("asv.machine")
    defaults = {"machine": "host-17", "os": "Linux 6.1.0-13-cloud", "cpu": "Xeon", "ram": memory}
    saved: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(machine.Machine, "get_defaults", lambda: dict(defaults))
    monkeypatch.setattr(machine.MachineCollection, "save", saved.__setitem__)
    record.save_machine("nvidia-h200", "NVIDIA H200")
    assert saved == {
        "nvidia-h200": {
            "machine": "nvidia-h200", "gpu": "NVIDIA H200", "os": "Linux 6.1.0", "cpu": "Xeon", "ram": kept,
        }
    }  # fmt: skip


# --- the check itself -------------------------------------------------------------------------------------

OLD, NEW, OTHER = "a" * 40, "b" * 40, "c" * 40
NAME = "CudaBackward.track_gbps"


def write_results(
    folder: Path, machine: str, commit: str, date: int, gbps: list[float | None] | None, version: str = "1"
) -> None:
    """A file of asv's: two bandwidths with parameters, and one figure that is no bandwidth."""
    about = {
        f"benchmarks.{NAME}": {"unit": "GB/s", "version": "1"},
        "benchmarks.CudaBackward.track_microseconds": {"unit": "us", "version": "1"},
        "version": 2,
    }
    params = [["'rmsnorm_backward'"], ["1024", "4096"]]
    result = {
        "commit_hash": commit,
        "date": date,
        "result_columns": ["result", "params", "version", "started_at"],
        "results": {
            f"benchmarks.{NAME}": [gbps, params, version, 1],
            "benchmarks.CudaBackward.track_microseconds": [[1e3 / date, 1e3 / date], params, "1", 1],
            "benchmarks.gone": [None, [], "1", 1],
        },
        "version": 2,
    }
    (folder / machine).mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.json").write_text(json.dumps(about))
    (folder / machine / "machine.json").write_text("{}")
    (folder / machine / f"{commit[:8]}-existing-py3.12.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("before", "after", "fallen"),
    [
        ([4000, 3000], [4000, 3000], []),
        ([4000, 3000], [3881, 3100], []),  # 2.98%
        ([4000, 3000], [3879, 3100], ["1024"]),  # 3.03%
        ([4000, 3000], [2000, 1500], ["1024", "4096"]),
        ([4000, math.nan], [4000, 100], []),  # was not available
        ([4000, 3000], [4000, math.nan], []),  # is not any more
        ([4000, 3000], [4000, None], ["4096"]),  # failed
        ([4000, 3000], None, ["1024", "4096"]),  # altogether
        ([4000, None], [4000, 3000], []),
    ],
)
def test_a_fall_is_found(
    before: list[float | None], after: list[float | None] | None, fallen: list[str], tmp_path: Path
) -> None:
    write_results(tmp_path, "gpu", OLD, 1, before)
    write_results(tmp_path, "gpu", NEW, 2, after)
    (commits,) = recorded(tmp_path, []).values()
    lines = falls(*commits, "")
    assert len(lines) == len(fallen)
    for line, columns in zip(lines, fallen, strict=True):
        assert line.startswith(f"gpu: {NAME}(rmsnorm_backward, {columns}) fell by ")
        assert f"at {NEW[:7]}" in line


@pytest.mark.parametrize(
    ("note", "accepts"),
    [
        (f"Accepted at {NEW[:7]}: {NAME}(rmsnorm_backward, 1024), because it must hold more", True),
        (f"| accepted | {NEW} | {NAME} | for all parameters |", True),
        (f"Accepted at {OLD[:7]}: {NAME}(rmsnorm_backward, 1024)", False),  # another commit
        (f"Accepted at {NEW[:6]}: {NAME}(rmsnorm_backward, 1024)", False),  # too short
        (f"Accepted at {NEW[:7]}: {NAME}(rmsnorm_backward, 4096)", False),  # another benchmark
        (f"Accepted at {NEW[:7]}: {NAME}_of_another", False),
        (f"{NEW[:7]}: {NAME}(rmsnorm_backward, 1024)", False),  # does not say so
        (f"Accepted at {NEW[:7]}:\n{NAME}(rmsnorm_backward, 1024)", False),  # not one line
    ],
)
def test_a_line_accepts_a_fall(note: str, accepts: bool, tmp_path: Path) -> None:
    write_results(tmp_path, "gpu", OLD, 1, [4000, 3000])
    write_results(tmp_path, "gpu", NEW, 2, [3000, 3000])
    (commits,) = recorded(tmp_path, []).values()
    assert bool(falls(*commits, f"# Notes\n\n{note}\n")) != accepts


def test_commits_are_in_the_order_of_git_else_of_their_dates(tmp_path: Path) -> None:
    for date, commit in enumerate((OLD, NEW, OTHER), 1):
        write_results(tmp_path, "gpu", commit, date, [4000, 3000])

    def order(known: list[str]) -> list[str]:
        return [commit.hash for commit in recorded(tmp_path, known)["gpu"]]

    assert order([]) == [OLD, NEW, OTHER]
    assert order([OLD, OTHER, NEW]) == [NEW, OTHER, OLD]
    assert order([OLD, NEW]) == [OLD, NEW, OTHER]  # one that git does not know


def test_figures_are_held_against_the_last_that_there_are(tmp_path: Path) -> None:
    """A commit between, of which others were measured, hides none."""
    write_results(tmp_path, "gpu", OLD, 1, [4000, 3000])
    write_results(tmp_path, "gpu", OTHER, 2, [math.nan, 2000])
    write_results(tmp_path, "gpu", NEW, 3, [2000, 2000])
    (commits,) = recorded(tmp_path, []).values()
    lines = [line for older in with_last_figures(commits) for line in falls(older, commits[-1], "")]
    assert len(lines) == 1
    assert f"1024) fell by 50.0%: 4000 GB/s at {OLD[:7]}, 2000 at {NEW[:7]}" in lines[0]


def test_machines_and_versions_are_kept_apart(tmp_path: Path) -> None:
    write_results(tmp_path, "one", OLD, 1, [4000, 3000])
    write_results(tmp_path, "two", NEW, 2, [1000, 1000])
    write_results(tmp_path, "two", OTHER, 3, [10, 10], version="0")  # of another method: left out
    machines = recorded(tmp_path, [])
    assert {name: [commit.hash for commit in commits] for name, commits in machines.items()} == {
        "one": [OLD],
        "two": [NEW],
    }


def test_git_gives_the_newest_first(tmp_path: Path) -> None:
    assert git_order(tmp_path) == []
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    try:
        subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    for message in "one", "two":
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", message], cwd=tmp_path, check=True)
    newest = subprocess.run([*git, "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True)
    order = git_order(tmp_path)
    assert len(order) == 2
    assert order[0] == newest.stdout.strip()
