"""What the command line and the scripts of asv_bench/ share: arguments, files, the choice of a device, the way to fail.

Whatever a user gets wrong is one line on stderr and exit status 2, before anything is measured or written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

import cupynorm

from . import bench, numpy_backend, report
from .arrays import first_line as first_line
from .problem import MOST_COLUMNS

Number = TypeVar("Number", int, float)


class UsageError(Exception):
    """What the user asked for cannot be done: one line, exit status 2."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def guarded(program: str, command: Callable[[], int]) -> int:
    """The command's exit status, or that of what stopped it, said in one line."""
    try:
        with _ended_in_order():
            status = command()
        print(end="", flush=True)
        return status
    except UsageError as error:
        _say(f"{program}: {error}")
        return 2
    except MemoryError as error:
        _say(f"{program}: out of memory: {error}")
        return 1
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        _drop_what_stdout_cannot_take()
        return 1
    except OSError as error:  # a full disk, perhaps that on which stdout lies
        _say(f"{program}: {error}")
        _drop_what_stdout_cannot_take()
        return 1
    except KeyboardInterrupt:
        _say(f"{program}: interrupted")
        return 130


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """By SIGTERM, too, so that no unfinished file stays."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _drop_what_stdout_cannot_take() -> None:
    """Else the interpreter, which flushes it in the end, would say so again."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stdout.fileno())
        finally:
            os.close(nowhere)


def _say(line: str) -> None:
    """On stderr, if the process was started with one: without, `print` would take stdout."""
    if sys.stderr is not None:
        print(line, file=sys.stderr)


# --- arguments --------------------------------------------------------------------------------------------


def op(text: str) -> str:
    if text not in bench.OPS:
        raise argparse.ArgumentTypeError(f"unknown op {text!r}; one of {', '.join(bench.OPS)} is needed")
    return text


def shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]{0,15})x([1-9][0-9]{0,15})", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"got {text!r}; ROWSxN with both at least 1 is needed, such as 32768x4096")
    rows, columns = int(match[1]), int(match[2])
    if rows * columns > 1 << 40:
        raise argparse.ArgumentTypeError(f"{text} is more than 2^40 elements, and no device holds them")
    if columns > MOST_COLUMNS:
        raise argparse.ArgumentTypeError(f"{text}: N of at most {MOST_COLUMNS} is needed")
    return rows, columns


def dtype(text: str) -> Any:
    try:
        return bench.dtype_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str, kind: type[Number]) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not 0 < value <= 1 << 40:
        most = " and at most 2^40" if value > 0 else ""
        raise argparse.ArgumentTypeError(f"got {text!r}; a number above 0{most} is needed")
    return value


# --- files ------------------------------------------------------------------------------------------------


def file(text: str) -> Path:
    if not text or text.endswith(tuple(filter(None, (os.sep, os.altsep)))):
        raise argparse.ArgumentTypeError(f"got {text!r}; the name of a file is needed")
    return Path(text)


def writable(files: ExitStack, option: str, path: Path | None) -> Path | None:
    """A file to write into that becomes `path` once `files` closes without an exception."""
    try:
        return files.enter_context(report.replaced(path)) if path else None
    except OSError as error:
        raise UsageError(f"argument {option}: cannot write {path}: {error.strerror or error}") from None


def plot_format(path: Path) -> str:
    """What matplotlib is to write, by the path's ending."""
    try:
        formats = report.plot_formats()
    except ImportError:
        raise UsageError("argument --plot: needs matplotlib: pip install matplotlib") from None
    except Exception as error:  # a setting that it refuses
        raise UsageError(f"argument --plot: matplotlib cannot be used: {first_line(error)}") from None
    ending = path.suffix[1:].lower()
    if ending not in formats:
        raise UsageError(f"argument --plot: {path} should end in one of {', '.join('.' + f for f in sorted(formats))}")
    try:
        report.try_plot(ending)
    except Exception as error:  # for .pgf it needs LaTeX
        raise UsageError(f"argument --plot: matplotlib cannot write .{ending} here: {first_line(error)}") from None
    return ending


# --- the device -------------------------------------------------------------------------------------------


def pick_device(wanted: str | None) -> tuple[Any, str]:
    """numpy or cupy, and the line that says which and why. Raises UsageError where `wanted` is not to be had."""
    here = f"cupynorm {cupynorm.__version__} on"
    if wanted == "numpy":
        return np, f"{here} NumPy arrays ({host_threads()} threads), as asked."
    cupy, reason = usable_cupy()
    if cupy is not None:
        major, minor = divmod(int(cupy.cuda.Device().compute_capability), 10)
        return cupy, f"{here} {bench.device_name(cupy)}, compute capability {major}.{minor}."
    if wanted == "cuda":
        raise UsageError(f"argument --device: no CUDA: {reason}")
    return np, f"{here} NumPy arrays ({host_threads()} threads); not on CUDA, because {reason}."


def host_threads() -> int:
    """How many threads NumPy arrays get. Raises UsageError where the environment asks for no such number."""
    try:
        return numpy_backend.threads()
    except ValueError as error:
        raise UsageError(str(error)) from None


def usable_cupy() -> tuple[Any, str]:
    """CuPy, where its device answers and can compile; else None and the reason."""
    try:
        import cupy
    except Exception as error:  # built for another NumPy, it raises a ValueError
        installed = version("cupy") or version("cupy-cuda12x") or version("cupy-cuda13x")
        return None, f"CuPy cannot be imported ({first_line(error)})" if installed else "CuPy is not installed"
    try:
        if not cupy.cuda.runtime.driverGetVersion():
            return None, "there is no NVIDIA driver"
        if not cupy.cuda.runtime.getDeviceCount():
            return None, "there is no CUDA device"
        cupy.empty(1).fill(0)
        cupy.cuda.get_current_stream().synchronize()
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:  # CuPy's own error types
        return None, f"no CUDA device answers ({first_line(error)})"
    return cupy, ""


def needed_cupy() -> Any:
    """CuPy, where it is usable. Raises UsageError where it is not."""
    cupy, reason = usable_cupy()
    if cupy is None:
        raise UsageError(f"a CUDA device and CuPy are needed: {reason}")
    return cupy


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
