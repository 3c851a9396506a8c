"""Import of foreign arrays through DLPack, without a copy and with bfloat16.

NumPy's own ``from_dlpack`` refuses bfloat16 and CuPy's takes three times as long as the kernel launch
that follows, so the capsule is read here: a producer's ``__dlpack__`` hands over a C struct (layout:
https://dmlc.github.io/dlpack/latest/c_api.html) that names the memory. The struct stays the capsule's: whoever
holds the capsule keeps the memory alive, and its destructor gives the memory back to the producer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from typing import Any, NamedTuple

import numpy as np

CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost (page-locked host memory)
CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

# DLTensor: data, device type, device id, ndim, dtype (code, bits, lanes), shape, strides, byte_offset
_TENSOR = struct.Struct("P2i iBBH2PQ")
# DLManagedTensorVersioned before its DLTensor: version (major, minor), manager_ctx, deleter, flags
_HEADER = struct.Struct("2I2PQ")

# An object of its own: that in ctypes.pythonapi is everybody's, with what others set for its result.
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_IEEE_FLOAT, _BFLOAT = 2, 4  # kDLFloat, kDLBfloat
_CODES = {0: "i", 1: "u", _IEEE_FLOAT: "f", 5: "c"}  # kDLInt, kDLUInt, kDLFloat, kDLComplex
_OTHERS = {6: "bool", 10: "float8_e4m3fn", 12: "float8_e5m2"}  # some that are not taken, as messages name them


class UnsupportedType(ValueError):
    """An element type that the library does not take."""


class Imported(NamedTuple):
    """One foreign array: where it lies, how it is laid out, and what keeps it alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: np.dtype[Any]
    read_only: bool
    owner: object


@functools.cache
def _dtype_of(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    if lanes == 1 and code == _BFLOAT and bits == 16:
        return bfloat16()
    if lanes == 1 and code in _CODES and bits >= 8:
        with contextlib.suppress(TypeError):  # NumPy has no such type: complex numbers of 32 bits, say
            return np.dtype(f"{_CODES[code]}{bits // 8}")
    name = f" ({_OTHERS[code]})" if code in _OTHERS else ""
    raise UnsupportedType(
        f"has DLPack type code {code}{name} with {bits} bits and {lanes} lanes; "
        "one of float16, bfloat16, float32, float64 is needed"
    )


def bfloat16() -> np.dtype[Any]:
    """The NumPy dtype for bfloat16, from the package ml_dtypes (which CuPy uses as well)."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 arrays need the package ml_dtypes: pip install ml_dtypes") from error
    bfloat: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat


def read(capsule: object) -> Imported:
    """What a DLPack capsule of the versioned or the older kind says; it holds while the capsule lives."""
    flags = 0
    try:
        address = _get_pointer(capsule, b"dltensor_versioned")
    except ValueError:
        address = _get_pointer(capsule, b"dltensor")
    else:
        major, minor, _, _, flags = _unpack(_HEADER, address)
        if major != 1:  # a later layout may differ
            raise BufferError(f"DLPack version {major}.{minor}; version 1 is needed")
        address += _HEADER.size
    data, _, _, ndim, code, bits, lanes, shape_at, strides_at, byte_offset = _unpack(_TENSOR, address)
    integers = _bytes(8 * ndim).from_address
    extents = integers(shape_at).raw if ndim else b""
    steps = integers(strides_at).raw if ndim and strides_at else None
    shape, strides, dtype = _layout(extents, steps, code, bits, lanes)
    if not data and 0 not in shape:  # a tensor of zeros that PyTorch has not made yet
        raise BufferError("it names no memory")
    return Imported(data + byte_offset, shape, strides, dtype, bool(flags & _READ_ONLY), capsule)


@functools.lru_cache(maxsize=4096)
def _layout(
    shape: bytes, strides: bytes | None, code: int, bits: int, lanes: int
) -> tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]:
    """Shape, strides in bytes and dtype of what a DLTensor says; the same few come again and again."""
    dtype = _dtype_of(code, bits, lanes)
    extents, itemsize = _integers(shape), dtype.itemsize
    if strides is None:
        return extents, contiguous_strides(extents, itemsize), dtype
    return extents, tuple([stride * itemsize for stride in _integers(strides)]), dtype


def _integers(memory: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(memory) // 8}q", memory)


def _unpack(layout: struct.Struct, address: int) -> tuple[Any, ...]:
    return layout.unpack(_bytes(layout.size).from_address(address))


@functools.cache
def _bytes(size: int) -> Any:
    return ctypes.c_char * size


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array."""
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def import_from(obj: Any, stream: int | None) -> Imported:
    """A producer's array; `stream` is the CUDA stream that must wait for the producer's work, None on the host.

    The versioned protocol tells whether the memory is read-only; producers from before it take no max_version.
    """
    kwargs = {} if stream is None else {"stream": stream}
    try:
        capsule = obj.__dlpack__(max_version=(1, 0), **kwargs)
    except TypeError:
        capsule = obj.__dlpack__(**kwargs)
    return read(capsule)


class _Owner:
    """The array interface of imported host memory, and what keeps that memory alive."""

    def __init__(self, imported: Imported) -> None:
        self.imported = imported
        self.__array_interface__ = {
            "version": 3,
            "data": (imported.pointer, imported.read_only),
            "shape": imported.shape,
            "strides": imported.strides,
            # An opaque type of the right size, viewed as the real one: the interface has no name for bfloat16.
            "typestr": f"|V{imported.dtype.itemsize}",
        }


def as_numpy(imported: Imported) -> np.ndarray[Any, Any]:
    """A NumPy array over imported host memory."""
    if imported.pointer == 0 or 0 in imported.shape:
        return np.empty(imported.shape, imported.dtype)
    return np.asarray(_Owner(imported)).view(imported.dtype)


def as_cupy(imported: Imported, device_id: int) -> Any:
    """A CuPy array over imported memory of a CUDA device, which is the current one."""
    import cupy

    if imported.pointer == 0 or 0 in imported.shape:
        return cupy.empty(imported.shape, imported.dtype)
    extent = sum([abs(stride) * (n - 1) for n, stride in zip(imported.shape, imported.strides, strict=True)])
    size = extent + imported.dtype.itemsize
    memory = cupy.cuda.UnownedMemory(imported.pointer, size, imported.owner, device_id)
    start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(imported.shape, imported.dtype, start, strides=imported.strides)
