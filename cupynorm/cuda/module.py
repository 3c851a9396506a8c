"""From a source file in kernels_cu/ to a callable kernel: finding, compiling, caching."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

COMPILE_OPTIONS = ("-std=c++17",)


@functools.cache
def source_directory() -> Path:
    """Where kernels_cu lies: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (candidate / "element.cuh").is_file():
            return candidate
    raise FileNotFoundError(f"the CUDA sources kernels_cu are neither in {package} nor beside it; reinstall cupynorm")


@functools.cache
def source_digest() -> str:
    """A hash over all CUDA sources.

    CuPy's disk cache looks at the file that is compiled and at the options, not at the files that it includes:
    as a definition among the options the hash makes a changed header a new kernel.
    """
    digest = hashlib.sha256()
    for path in sorted(source_directory().glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_options(definitions: tuple[str, ...]) -> tuple[str, ...]:
    return (*COMPILE_OPTIONS, f"-I{source_directory()}", *definitions)


@functools.cache
def _module(file_name: str, definitions: tuple[str, ...]) -> Any:
    import cupy

    source = (source_directory() / file_name).read_text(encoding="utf-8")
    options = compile_options((*definitions, f"-DSOURCE_DIGEST=0x{source_digest()}ull"))
    return cupy.RawModule(code=source, options=options)


@functools.cache
def kernel(file_name: str, kernel_name: str, definitions: tuple[str, ...] = ()) -> Any:
    """The kernel `kernel_name` of kernels_cu/`file_name`, compiled with definitions such as "-DVECTOR=1".

    A cupy.RawKernel: compiled when first launched on a device, then kept in memory and in CuPy's disk cache.
    """
    return _module(file_name, definitions).get_function(kernel_name)
