"""What came in, and how it goes back: frameworks, devices, DLPack.

`receive` looks at every array argument of a call once. NumPy arrays stay as they are, CuPy arrays stay as they
are, and arrays of any other framework are imported through DLPack without a copy: host memory as NumPy arrays,
CUDA memory as CuPy arrays. The `Frame` that it returns makes outputs and hands results back.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import dlpack

# Their arrays never change once made, whatever the DLPack flags say (JAX 0.10 sets none).
IMMUTABLE_FRAMEWORKS = ("jax", "tensorflow")
_DEFAULT_STREAMS = (0, 1)  # the legacy default stream cannot be captured

Array = Any  # numpy.ndarray or cupy.ndarray: the two share the interface that is used here


@dataclass(frozen=True)
class Frame:
    """Where one call's arrays live and what the caller wants back."""

    xp: Any  # numpy or cupy
    device: int | None  # the CUDA device, None on the host
    from_dlpack: Callable[[Any], Any] | None = None  # the foreign framework's importer, None for NumPy and CuPy
    foreign_dtypes: Mapping[np.dtype[Any], Any] = field(default_factory=dict)

    def device_scope(self) -> AbstractContextManager[Any]:
        """Makes the arrays' device the current one."""
        if self.device is None or self.xp.cuda.runtime.getDevice() == self.device:
            return nullcontext()
        return self.xp.cuda.Device(self.device)  # type: ignore[no-any-return]

    def temporaries(self) -> AbstractContextManager[Any]:
        """For what lives no longer than the call.

        While the stream is captured into a graph, such memory must belong to the graph: CuPy's pool would hand it to
        others before the graph runs.
        """
        if self.device is None:
            return nullcontext()
        stream = self.xp.cuda.get_current_stream()
        if stream.ptr in _DEFAULT_STREAMS or not stream.is_capturing():
            return nullcontext()
        return self.xp.cuda.using_allocator(self.xp.cuda.malloc_async)  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self.xp.empty(shape, dtype)

    def contiguous(self, array: Array) -> Array:
        return self.xp.ascontiguousarray(array)

    def give_back(self, array: Array | None) -> Any:
        """The array in the caller's framework. The framework's current stream waits for the work on CuPy's."""
        if array is None or self.from_dlpack is None:
            return array
        if self.device is None and array.dtype.name == "bfloat16":
            # NumPy cannot export bfloat16: the bits travel as uint16 and the framework names them again.
            return self.from_dlpack(array.view(np.uint16)).view(self.foreign_dtypes[array.dtype])
        return self.from_dlpack(array)


def receive(arguments: Mapping[str, Any], written: Collection[str] = ()) -> tuple[Frame, dict[str, Any]]:
    """Sort out one call's array arguments, given by name, `x` first; None stands for an absent one.

    `written` names those that the call writes into. Raises TypeError for anything that is not an array, for arrays of
    different frameworks and for arrays on different devices; ValueError for a foreign array whose element type is
    unknown here, or that is to be written into and immutable.
    """
    x = arguments["x"]
    given = {name: value for name, value in arguments.items() if value is not None}
    if "x" not in given:
        raise _not_an_array("x", x)
    if isinstance(x, np.ndarray):
        _require_all(given, np.ndarray, "numpy.ndarray")
        return Frame(np, None), dict(arguments)
    if _is_cupy(x):
        import cupy

        _require_all(given, cupy.ndarray, "cupy.ndarray")
        for name, value in given.items():
            if value.device.id != x.device.id:
                raise _mixed_devices(name, f"cuda:{value.device.id}", f"cuda:{x.device.id}")
        return Frame(cupy, x.device.id), dict(arguments)
    return _receive_foreign(arguments, given, written)


def _receive_foreign(
    arguments: Mapping[str, Any], given: Mapping[str, Any], written: Collection[str]
) -> tuple[Frame, dict[str, Any]]:
    for name, value in given.items():
        if isinstance(value, np.generic) or not hasattr(type(value), "__dlpack__"):
            raise _not_an_array(name, value)
    x = given["x"]
    framework = _framework(x)
    device = _device(x, "x")
    imported: dict[str, Any] = dict.fromkeys(arguments)
    foreign_dtypes: dict[np.dtype[Any], Any] = {}
    for name, value in given.items():
        if _framework(value) != framework:
            raise TypeError(
                f"{name}: got {_type_name(value)}, but x is {_type_name(x)}; "
                "all arrays of a call must come from one framework"
            )
        if (own := _device(value, name)) != device:
            raise _mixed_devices(name, _device_name(own), _device_name(device))
        try:
            array, read_only = dlpack.as_numpy(value) if device is None else dlpack.as_cupy(value, device)
        except ImportError:
            raise
        except dlpack.UnsupportedType as error:
            raise ValueError(f"{name}: {error}") from None
        except Exception as error:  # whatever the producer raises: BufferError, RuntimeError, its own types
            raise TypeError(f"{name}: {_type_name(value)} cannot be exported through DLPack: {error}") from error
        if name in written and (read_only or framework in IMMUTABLE_FRAMEWORKS):
            raise ValueError(f"{name}: {_type_name(value)} is read-only; a writable array is needed")
        imported[name] = array
        foreign_dtypes[array.dtype] = getattr(value, "dtype", None)
    xp = np if device is None else importlib.import_module("cupy")
    return Frame(xp, device, _importer(x, framework), foreign_dtypes), imported


def _is_cupy(value: Any) -> bool:
    cupy = sys.modules.get("cupy")  # an array of CuPy's cannot exist before CuPy is imported
    return cupy is not None and isinstance(value, cupy.ndarray)


def _framework(value: Any) -> str:
    """The package that an array's class comes from; for a class derived from a framework's own, that framework."""
    for kind in type(value).__mro__:
        if "__dlpack__" in vars(kind):
            root = kind.__module__.partition(".")[0]
            return {"jaxlib": "jax"}.get(root, root)
    return type(value).__module__.partition(".")[0]


def _importer(x: Any, framework: str) -> Callable[[Any], Any]:
    """The `from_dlpack` of x's own framework: of its array namespace where it has one, else of its module."""
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else importlib.import_module(framework)
    importer: Callable[[Any], Any] | None = getattr(namespace, "from_dlpack", None)
    if importer is None:
        raise TypeError(f"x: {_type_name(x)} exports DLPack, but {framework} has no from_dlpack to take results back")
    return importer


def _device(value: Any, name: str) -> int | None:
    try:
        kind, ordinal = value.__dlpack_device__()
    except Exception as error:  # a torch tensor on the meta device, say
        raise TypeError(f"{name}: {_type_name(value)} cannot be exported through DLPack: {error}") from error
    if kind in dlpack.CPU_DEVICES:
        return None
    if kind in dlpack.CUDA_DEVICES:
        return int(ordinal)
    raise TypeError(f"{name}: got an array on DLPack device type {int(kind)}; host or CUDA memory is needed")


def _require_all(given: Mapping[str, Any], kind: type, needed: str) -> None:
    for name, value in given.items():
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"{name}: got numpy.ma.MaskedArray, whose mask would be lost; a plain NumPy array is needed"
            )
        if not isinstance(value, kind):
            if isinstance(value, np.generic) or not hasattr(type(value), "__dlpack__"):
                raise _not_an_array(name, value)
            raise TypeError(
                f"{name}: got {_type_name(value)}, but x is {needed}; all arrays of a call must come from one framework"
            )


def _not_an_array(name: str, value: Any) -> TypeError:
    return TypeError(
        f"{name}: got {_type_name(value)}; a NumPy array, a CuPy array or an array with __dlpack__ is needed"
    )


def _mixed_devices(name: str, got: str, needed: str) -> TypeError:
    return TypeError(f"{name}: is on {got}, but x is on {needed}; all arrays of a call must be on one device")


def _device_name(device: int | None) -> str:
    return "the host" if device is None else f"cuda:{device}"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
