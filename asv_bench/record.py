"""Record commits with the Python that is there, for machines that cannot build environments:

    python asv_bench/record.py COMMIT [COMMIT ...] [--machine NAME] [--python PATH] [--bench REGEX]

For each commit: checked out into a temporary worktree, found through PYTHONPATH, measured by `asv run` with the
benchmarks of this checkout, written to asv_bench/results/. The Python must have asv and what cupynorm needs (NumPy; for
CUDA CuPy and ml_dtypes, too). A commit that was recorded before on the machine is measured anew and replaced; with
--bench, these benchmarks of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "asv_bench" / "results"

# Runs in the Python that is to measure, on the package of one commit.
DESCRIBE = """
import json, platform
import numpy, cupynorm
about = {"python": platform.python_version(), "numpy": numpy.__version__, "package": cupynorm.__file__, "gpu": "none"}
try:
    import cupy
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    number = runtime.driverGetVersion()
    about["cupy"] = cupy.__version__
    about["gpu"] = f"{properties['name'].decode()}, driver for CUDA {number // 1000}.{number % 1000 // 10}"
except Exception:  # no CuPy, no driver, no device
    pass
print(json.dumps(about))
"""


class Failure(Exception):
    """One line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is taken back
    try:
        commits = [git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", say=name) for name in options.commits]
        if changed := git("status", "--porcelain", "--", "asv.conf.json", "asv_bench/*.py"):
            raise Failure(
                f"the benchmarks have changes of which a record says nothing: {', '.join(changed.split()[1::2])}"
            )
        for number, commit in enumerate(commits, 1):
            print(f"[{number}/{len(commits)}] {git('log', '-1', '--format=%h %s', commit)}", flush=True)
            record(commit, options)
    except Failure as failure:
        print(f"record.py: {failure}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def record(commit: str, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        worktree = Path(folder) / "cupynorm"
        git("worktree", "add", "--quiet", "--detach", str(worktree), commit)
        try:
            # asv drops PYTHONPATH unless it finds the same in ASV_PYTHONPATH; processes started by benchmarks keep it.
            path = os.pathsep.join([str(worktree), *filter(None, [os.environ.get("PYTHONPATH")])])
            # Kernels are cached by the folder of their sources, which is gone afterwards.
            kernels = str(Path(folder) / "kernels")
            environment = os.environ | {"PYTHONPATH": path, "ASV_PYTHONPATH": path, "CUPY_CACHE_DIR": kernels}
            environment.pop("CUPYNORM_QUICK", None)
            about = describe(options.python, environment, worktree)
            machine = options.machine or machine_name(about["gpu"])
            save_machine(machine, about["gpu"])
            before = files_of(machine)
            command = [sys.executable, "-m", "asv", "run", "--config", str(ROOT / "asv.conf.json"), "--no-pull"]
            command += ["-E", f"existing:{options.python}", "--set-commit-hash", commit, "--machine", machine]
            # Forked, a figure that is only looked up takes 7 ms, and there are 600; by a new interpreter half a second.
            command += ["--launch-method", "forkserver", "--durations", "all"]
            command += ["--bench", options.bench] if options.bench else []
            status = run_to_the_end(command, environment)
            written = [path for path, _ in files_of(machine) - before if path.name.startswith(commit[:8])]
            if not written:
                raise Failure(f"asv recorded nothing for {commit[:8]} (its exit status: {status})")
            failed = rename_environment(written[0], about, keeps_others=bool(options.bench))
            if status or failed:
                names = f", without figures of {', '.join(failed)}" if failed else ""
                raise Failure(f"{commit[:8]} is recorded{names}: asv's exit status is {status}")
        finally:
            git("worktree", "remove", "--force", str(worktree))


def run_to_the_end(command: list[str], environment: dict[str, str]) -> int:
    """The command's exit status. What stops this process stops all of its processes."""
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            # Those that benchmarks start have process groups of their own.
            for member in members_of_session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGTERM)
            raise


def members_of_session(leader: int) -> list[int]:
    """Its processes, as Linux has them; elsewhere the leader alone."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()  # state, parent, group, session, …
            if int(fields[3]) == leader:
                members.append(int(path.parent.name))
    return members or [leader]


def files_of(machine: str) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in RESULTS.glob(f"{machine}/*.json")}


def describe(python: str, environment: dict[str, str], worktree: Path) -> dict[str, str]:
    """Versions and device, and a check that it is this commit's package that gets imported."""
    command = [python, "-c", DESCRIBE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=worktree.parent, check=False)
    if done.returncode:
        raise Failure(
            f"{python} cannot import cupynorm: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    about: dict[str, str] = json.loads(done.stdout)
    if not Path(about["package"]).is_relative_to(worktree):
        raise Failure(f"{python} imports cupynorm from {about['package']}, not from the commit's worktree")
    return about


def machine_name(gpu: str) -> str:
    from asv.machine import Machine

    name = Machine.get_unique_machine_name() if gpu == "none" else gpu.partition(",")[0]
    return re.sub(r"[^a-z0-9]+", "-", str(name).lower()).strip("-")


def save_machine(name: str, gpu: str) -> None:
    """Where `asv machine` keeps it, with the GPU, about which asv does not ask.

    For each value of a field asv draws a line of its own, so there are no build numbers, and memory in whole GiB: of
    machines of one kind it differs by megabytes.
    """
    from asv.machine import Machine, MachineCollection

    fields: dict[str, Any] = Machine.get_defaults()
    fields["os"] = re.match(r"[^-]*", fields["os"])[0]  # type: ignore[index]  # "Linux 6.1.0"
    if fields["ram"]:
        fields["ram"] = f"{round(int(fields['ram']) / 2**30)} GiB"
    MachineCollection.save(name, fields | {"machine": name, "gpu": gpu})


def rename_environment(path: Path, about: dict[str, str], keeps_others: bool) -> list[str]:
    """asv names an existing environment after its path; versions say more, on any machine. Figures of benchmarks that
    were left out this time may stay. Returns the benchmarks that failed."""
    result = json.loads(path.read_text(encoding="utf-8"))
    # What is not available is NaN.
    failed = [
        name.removeprefix("benchmarks.")
        for name, (figures, *_) in result["results"].items()
        if None in (figures or [None])
    ]
    python = ".".join(about["python"].split(".")[:2])
    versions = {name: about[name] for name in ("numpy", "cupy") if name in about}
    name = "-".join([f"existing-py{python}", *(f"{name}{version}" for name, version in versions.items())])
    result.update(env_name=name, python=python, requirements=versions)
    result["params"] |= versions | {"python": python}
    path.unlink()
    target = path.with_name(f"{result['commit_hash'][:8]}-{name}.json")
    if keeps_others and target.exists():
        before = json.loads(target.read_text(encoding="utf-8"))
        for key in ("results", "durations"):
            result[key] = before.get(key, {}) | result.get(key, {})
    target.write_text(json.dumps(result, sort_keys=True, indent=1) + "\n", encoding="utf-8")
    return failed


def git(*arguments: str, say: str = "") -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"no commit is called {say!r}" if say else f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="record.py", description="Record commits with the Python that is there.")
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    parser.add_argument("--machine", type=machine, metavar="NAME", help="default: the GPU's name, else the host's")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="default: the one that runs this")
    parser.add_argument("--bench", type=regex, metavar="REGEX", help="only these benchmarks")
    options = parser.parse_args(arguments)
    if not os.access(options.python, os.X_OK):
        parser.error(f"argument --python: {options.python} is not a program")
    options.python = os.path.abspath(options.python)  # not behind links, of which an environment's is one
    try:
        import asv  # noqa: F401
    except ImportError as error:
        parser.error(f"asv is needed: pip install asv ({error})")
    return options


def machine(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text):
        raise argparse.ArgumentTypeError(f"got {text!r}; letters, digits, '.', '_' and '-' are needed")
    return text


def regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


if __name__ == "__main__":
    sys.exit(main())
