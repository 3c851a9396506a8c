"""Import of foreign arrays through DLPack, without a copy and with bfloat16.

NumPy's own ``from_dlpack`` refuses bfloat16 and CuPy's takes three times as long as the kernel launch
that follows, so the capsule is read here: a producer's ``__dlpack__`` hands over a C struct (layout:
https://dmlc.github.io/dlpack/latest/c_api.html) that names the memory, and the array built around it keeps
the producer's memory alive until the array dies.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost (page-locked host memory)
CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]

# PyCapsule_SetName keeps the pointer that it is given: these two must outlive every capsule.
_USED = ctypes.c_char_p(b"used_dltensor")
_USED_VERSIONED = ctypes.c_char_p(b"used_dltensor_versioned")

_IEEE_FLOAT, _BFLOAT = 2, 4  # kDLFloat, kDLBfloat
_CODES = {0: "i", 1: "u", _IEEE_FLOAT: "f", 5: "c"}  # kDLInt, kDLUInt, kDLFloat, kDLComplex


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


class _Owner:
    """Calls the producer's deleter once nothing refers to the imported memory any more."""

    __slots__ = ("__array_interface__", "_address", "_struct")

    def __init__(self, struct: _Managed | _ManagedVersioned, address: int) -> None:
        self._struct, self._address = struct, address

    def __del__(self) -> None:
        if self._struct.deleter:
            self._struct.deleter(self._address)


def _dtype_of(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    if lanes == 1 and code == _BFLOAT and bits == 16:
        return bfloat16()
    if lanes == 1 and code in _CODES and bits >= 8:
        return np.dtype(f"{_CODES[code]}{bits // 8}")
    raise UnsupportedType(
        f"has DLPack type code {code} with {bits} bits and {lanes} lanes; "
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
    """Take over a DLPack capsule, of the versioned or the older kind."""
    name = _get_name(capsule)
    versioned = name == b"dltensor_versioned"
    address = _get_pointer(capsule, name)
    if versioned:
        struct: _Managed | _ManagedVersioned = _ManagedVersioned.from_address(address)
        if struct.major != 1:  # a later layout may differ; the capsule stays its producer's to release
            raise BufferError(f"DLPack version {struct.major}.{struct.minor}; version 1 is needed")
    else:
        struct = _Managed.from_address(address)
    tensor = struct.tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    dtype = _dtype_of(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes)
    if tensor.strides:
        strides = tuple([stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim]])
    else:
        strides = contiguous_strides(shape, dtype.itemsize)
    # From here on the memory is ours to release: rename the capsule so that its destructor does not.
    _set_name(capsule, _USED_VERSIONED if versioned else _USED)
    return Imported(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=dtype,
        read_only=isinstance(struct, _ManagedVersioned) and bool(struct.flags & _READ_ONLY),
        owner=_Owner(struct, address),
    )


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-contiguous array."""
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def capsule_from(obj: Any, stream: int | None) -> object:
    """Ask a producer for its capsule; `stream` is the CUDA stream that must wait for the producer's work.

    The versioned protocol tells whether the memory is read-only; producers from before it take no max_version.
    """
    kwargs = {} if stream is None else {"stream": stream}
    try:
        return obj.__dlpack__(max_version=(1, 0), **kwargs)
    except TypeError:
        return obj.__dlpack__(**kwargs)


def as_numpy(obj: Any) -> tuple[np.ndarray[Any, Any], bool]:
    """A NumPy array over the memory of a host array of any framework, and whether the producer says read-only."""
    imported = read(capsule_from(obj, None))
    if imported.pointer == 0 or 0 in imported.shape:
        return np.empty(imported.shape, imported.dtype), imported.read_only
    owner = imported.owner
    owner.__array_interface__ = {  # type: ignore[attr-defined]
        "version": 3,
        "data": (imported.pointer, imported.read_only),
        "shape": imported.shape,
        "strides": imported.strides,
        # An opaque type of the right size, viewed as the real one: the interface has no name for bfloat16.
        "typestr": f"|V{imported.dtype.itemsize}",
    }
    return np.asarray(owner).view(imported.dtype), imported.read_only


def as_cupy(obj: Any, device_id: int) -> tuple[Any, bool]:
    """A CuPy array over the memory of a CUDA array of any framework, ordered after the producer's work.

    And whether the producer says read-only, which a CuPy array cannot express.

    CuPy's current stream on that device waits for the producer's stream, as the protocol lays down.
    """
    import cupy

    with cupy.cuda.Device(device_id):
        pointer = cupy.cuda.get_current_stream().ptr
        # The protocol names the legacy default stream 1; CuPy holds it as 0.
        imported = read(capsule_from(obj, pointer if pointer else 1))
        size = int(np.prod(imported.shape)) * imported.dtype.itemsize
        if imported.pointer == 0 or size == 0:
            return cupy.empty(imported.shape, imported.dtype), imported.read_only
        memory = cupy.cuda.UnownedMemory(imported.pointer, size, imported.owner, device_id)
        start = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(imported.shape, imported.dtype, start, strides=imported.strides), imported.read_only
