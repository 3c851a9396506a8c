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
    """A hash over all CUDA sources."""
    digest = hashlib.sha256()
    for path in sorted(path for path in source_directory().iterdir() if path.suffix in (".cu", ".cuh")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def compile_options() -> tuple[str, ...]:
    """Older NVRTC may not know -minimal, which leaves out declarations that no kernel here needs.

    Where CuPy's disk cache has a kernel, the time of a first call is mostly NVRTC's, which CuPy has preprocess an empty
    file for these options: 13 ms, 10 with -minimal.
    """
    from cupy.cuda import nvrtc

    minimal = ("-minimal",) if nvrtc.getVersion() >= (12, 9) else ()
    return (*COMPILE_OPTIONS, *minimal, f"-I{source_directory()}")


@functools.cache
def prepare(device_id: int) -> None:
    """Have CuPy do what it does once for a device, the current one, and these options, before threads need it.

    An empty program does it. In a thread of its own it took 10 to 30 ms, here 9.
    """
    import cupy

    cupy.RawModule(code="", options=compile_options()).compile()


def source(file_name: str, definitions: tuple[str, ...]) -> str:
    """The text to compile: the file after its definitions, such as "VECTOR=1".

    They are no compiler options, because for every new set of options CuPy has NVRTC preprocess an empty file: 14 ms,
    where loading a kernel from the disk cache took one. That cache looks at this text and at the options, not at
    the files that it includes: with the hash in the text, a changed header makes a new kernel.
    """
    lines = [f"// {source_digest()}", *(f"#define {text.replace('=', ' ', 1)}" for text in definitions)]
    text = (source_directory() / file_name).read_text(encoding="utf-8")
    return "\n".join([*lines, f'#line 1 "{file_name}"', text])


@functools.cache
def kernel(file_name: str, kernel_name: str, definitions: tuple[str, ...] = ()) -> Any:
    """The kernel `kernel_name` of kernels_cu/`file_name`, compiled with definitions such as "VECTOR=1".

    A cupy.RawKernel: compiled for the current device, for another when first launched there, then kept in memory and in
    CuPy's disk cache.
    """
    return _module(file_name, definitions).get_function(kernel_name)


@functools.cache
def _module(file_name: str, definitions: tuple[str, ...]) -> Any:
    import cupy

    return cupy.RawModule(code=source(file_name, definitions), options=compile_options())
