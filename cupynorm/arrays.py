"""What came in, and how it goes back: frameworks, devices, DLPack.

NumPy arrays and CuPy arrays stay as they are, arrays of any other framework are imported through DLPack without a copy,
PyTorch's CUDA tensors without even that. `way_in` finds, from the type of a call's x, who looks at its arrays: `Host`
for NumPy's, `Device` for CuPy's, `OfTorch` for PyTorch's, `Foreign` for others. The look tells what the plan of the
call depends on from what a backend works on. `Host` and `Device` also make arrays, and know what differs between the
two kinds of memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from . import dlpack
from .problem import FLOAT_NAMES, START_BYTES

# Their arrays never change once made, whatever the DLPack flags say (JAX 0.10 sets none).
_JAX, _TORCH = "jax", "torch"
IMMUTABLE_FRAMEWORKS = (_JAX, "tensorflow")
_FRAMEWORKS = (_TORCH, _JAX, "jaxlib", "tensorflow")  # from whose arrays' classes others are derived
LEGACY_STREAMS = (0, 1)  # as CuPy holds the legacy default stream, and as it is to others; it cannot be captured
_STATISTICS = ("mean", "rstd")  # of a single row; NumPy makes a scalar of an array's only element
_NOTHING = contextlib.nullcontext()

Array = Any  # numpy.ndarray or cupy.ndarray: the two share the interface that is used here
Layout = tuple[Any, ...]  # the fields of a problem.ArraySpec, the first of them at least; strides None: C-contiguous

# What a look at a call's arrays tells, in the order in which they were given, None where there is none:
# their layouts; the operands, which a backend works on (NumPy arrays; addresses of device memory, 0 for None); what
# keeps the memory alive, of which `array` makes a NumPy or CuPy array; and how results get to the caller's framework,
# where that is another one. A plain tuple: it is made on every call.
Arrived = tuple[tuple[Layout | None, ...], list[Any], "Sequence[Any] | _Tensors", "WayBack | None"]
# Takes the arrays, what error messages call them, and the position of the first that is written into.
Look = Callable[[Sequence[Any], Sequence[str], int], Arrived]


@functools.lru_cache(maxsize=256)
def way_in(kind: type) -> Look:
    """Who looks at the arrays of a call whose x is of this type. Raises TypeError where that is no array.

    A look raises TypeError for anything that is not an array, for arrays of different frameworks, and for foreign
    arrays on different devices; ValueError for a foreign array whose element type is unknown here, or that is to be
    written into and immutable.
    """
    if issubclass(kind, np.ndarray):
        return Host().look
    # An array of CuPy's cannot exist before CuPy is imported; another thread may be importing it.
    kind_of_cupy = getattr(sys.modules.get("cupy"), "ndarray", None)
    if kind_of_cupy is not None and issubclass(kind, kind_of_cupy):
        return device_home().look
    if not _is_array(kind):
        raise _not_an_array("x", kind)
    return {_TORCH: OfTorch, _JAX: OfJax}.get(_framework(kind), Foreign)(kind).look


class Host:
    """NumPy's memory."""

    absent = None  # the operand for an array that is not there
    empty = staticmethod(np.empty)
    contiguous = staticmethod(np.ascontiguousarray)

    def look(self, arrays: Sequence[Any], labels: Sequence[str], written: int) -> Arrived:
        layouts: list[Layout | None] = []
        for array in arrays:
            if array is None:
                layouts.append(None)
            elif isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
                # NumPy warns who asks this of what broadcast_arrays() returned, which inputs may be.
                read_only = len(layouts) >= written and not array.flags.writeable
                layouts.append((array.shape, array.strides, array.dtype, None, 0, read_only))
            elif isinstance(array, np.generic) and labels[len(layouts)] in _STATISTICS:
                layouts.append(((), (), array.dtype, None, 0, False))
            else:
                raise _stranger(labels[len(layouts)], type(array), "numpy.ndarray")
        # A subclass may have a way of its own to index, reshape and assign, as numpy.matrix has.
        plain = [None if array is None else np.asarray(array) for array in arrays]
        return tuple(layouts), plain, plain.copy(), None

    def empty_pair(self, shape: tuple[int, ...], dtype: np.dtype[Any], apart: int) -> tuple[Array, Array]:
        return np.empty(shape, dtype), np.empty(shape, dtype)

    def operand(self, array: Array) -> Array:
        return array

    def array(self, view: Any, device: int | None) -> Array:
        return view

    def addresses(self, operands: Sequence[Array | None]) -> Sequence[int]:
        return [0 if array is None else array.__array_interface__["data"][0] for array in operands]

    def scope(self, device: int | None, way_back: WayBack | None) -> None:
        """The host is always current."""

    def temporaries(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()


class CudaStream:
    """A stream by its pointer, as NVIDIA's protocol for streams has it."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def first_line(error: BaseException) -> str:
    """Of what an error says; of what CuPy says around one of its libraries', of that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =")]
    if "Original error:" in lines[:-1]:
        lines = lines[lines.index("Original error:") + 1 :]
    return (lines or [type(error).__name__])[0].rstrip(".")


class Device:
    """CUDA memory, as CuPy manages it."""

    absent = 0
    operand = staticmethod(operator.attrgetter("data.ptr"))

    def __init__(self) -> None:
        try:
            self.cupy: Any = importlib.import_module("cupy")
        except Exception as error:  # built for another NumPy, it raises a ValueError
            raise ImportError(
                f"arrays on a CUDA device need CuPy, which cannot be imported ({first_line(error)}): "
                "it comes with cupynorm's extra cuda12 or cuda13"
            ) from error
        self._make, self._alloc = _maker_of(self.cupy), self.cupy.cuda.alloc
        self.empty = self._make
        self.contiguous = self.cupy.ascontiguousarray
        self._kind = self.cupy.ndarray
        self.current_device = self.cupy.cuda.runtime.getDevice

    def look(self, arrays: Sequence[Any], labels: Sequence[str], written: int) -> Arrived:
        kind = self._kind
        layouts: list[Layout | None] = []
        addresses = []
        for array in arrays:
            if array is None:
                layouts.append(None)
                addresses.append(0)
            elif isinstance(array, kind):
                data = array.data
                address = data.ptr
                # CuPy makes a tuple of strides whenever it is asked, and its `flags` takes longer still.
                strides = None if getattr(array, "_c_contiguous", False) else array.strides
                layouts.append((array.shape, strides, array.dtype, data.device_id, address % START_BYTES))
                addresses.append(address)
            else:
                raise _stranger(labels[len(layouts)], type(array), "cupy.ndarray")
        return tuple(layouts), addresses, arrays, None

    def empty_pair(self, shape: tuple[int, ...], dtype: np.dtype[Any], apart: int) -> tuple[Array, Array]:
        """Two new arrays that begin so many bytes apart in one allocation, which takes half the time of making one."""
        memory = self._alloc(2 * apart)
        return self._make(shape, dtype, memory), self._make(shape, dtype, memory + apart)

    def array(self, view: Any, device: int) -> Array:
        return dlpack.as_cupy(view, device) if isinstance(view, dlpack.Imported) else view

    def addresses(self, operands: Sequence[int]) -> Sequence[int]:
        return operands

    def scope(self, device: int, way_back: WayBack | None) -> AbstractContextManager[Any] | None:
        """What makes the device the current one, and of it the stream of the way back; None where both are."""
        stream = None if way_back is None else way_back.stream
        if self.current_device() == device:
            return None if stream is None else self._on_stream(stream)
        there = self.on_device(device) if way_back is None else way_back.on_device(device)
        return there if stream is None else self._on_stream(stream, there)

    def on_device(self, device: int) -> AbstractContextManager[Any]:
        return self.cupy.cuda.Device(device)  # type: ignore[no-any-return]

    def current_stream(self, device: int) -> int:
        """The pointer of CuPy's current stream on a device, 1 for the legacy default stream, which CuPy holds as 0."""
        return self.cupy.cuda.get_current_stream(device).ptr or 1

    def stream_at(self, pointer: int) -> Any:
        """CuPy's object for another library's stream."""
        kind = self.cupy.cuda.Stream
        return kind.null if pointer in LEGACY_STREAMS else kind.from_external(CudaStream(pointer))

    @contextlib.contextmanager
    def _on_stream(self, stream: Any, there: AbstractContextManager[Any] = _NOTHING) -> Iterator[None]:
        """Makes it the current one of the device that is current there. `with` would forget what use() had set."""
        with there:
            before = self.cupy.cuda.get_current_stream()
            try:
                stream.use()
                yield
            finally:
                before.use()

    def hold(self, things: Any) -> None:
        """Keep things until CuPy's current stream, of the current device, has done what it has to do.

        While that is captured into a graph, whoever launches the graph keeps them.
        """
        cuda = self.cupy.cuda
        stream = cuda.get_current_stream()
        if is_capturing(stream):
            return
        done = cuda.Event(block=True, disable_timing=True)
        done.record(stream)
        try:
            held = _held()
        except RuntimeError:  # no thread can be started: there are too many, or the interpreter ends
            done.synchronize()
        else:
            held.put((self.cupy.cuda.runtime.setDevice, self.current_device(), done, things))

    @contextlib.contextmanager
    def temporaries(self) -> Iterator[None]:
        """For what lives no longer than the call.

        While the stream is captured into a graph, such memory must belong to the graph: CuPy's pool would hand it to
        others before the graph runs. Else the stream lives until its work is done: once it is gone, the pool would give
        what that work uses to a stream that is made in its place.
        """
        from .cuda.streams import keep_until_done

        cuda = self.cupy.cuda
        stream = cuda.get_current_stream()
        capturing = is_capturing(stream)
        with cuda.using_allocator(cuda.malloc_async) if capturing else _NOTHING:
            try:
                yield
            finally:
                if not capturing:
                    keep_until_done(stream)


@functools.cache
def _held() -> queue.SimpleQueue[Any]:
    """What a thread waits for, one after the other, and drops then."""
    held: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def drop() -> None:
        with contextlib.suppress(Exception):
            from .cuda import driver

            driver.allow_capture_elsewhere()
        while True:
            set_device, device, done, things = held.get()
            with contextlib.suppress(Exception):  # a device that fails says so to the next call
                set_device(device)
                done.synchronize()
            del done, things

    threading.Thread(target=drop, name="cupynorm: inputs until they are read", daemon=True).start()
    return held


def _maker_of(cupy: Any) -> Callable[..., Array]:
    """cupy.empty, or over memory that is given. Where CuPy is known, its own two steps, without the calls around them,
    which take as long again."""
    kind = cupy.ndarray
    base = kind.__mro__[1]
    if not cupy.__version__.startswith("14.") or not hasattr(base, "_init"):
        return kind  # type: ignore[no-any-return]
    new = base.__new__

    def make(shape: tuple[int, ...], dtype: np.dtype[Any], memory: Any = None) -> Array:
        array = new(kind)
        array._init(shape, dtype, memory)
        return array

    return make


device_home = functools.cache(Device)


def home_of(device: int | None) -> Host | Device:
    return Host() if device is None else device_home()


def is_capturing(stream: Any) -> bool:
    """Whether the stream (CuPy's) is being captured into a graph."""
    return stream.ptr not in LEGACY_STREAMS and stream.is_capturing()


class Handed:
    """The way back of results that NumPy or CuPy makes: the framework's from_dlpack, without a copy.

    On CUDA its current stream then waits for CuPy's, for what was written into arrays of its own, too; and things are
    held until the work is done: whoever deletes an array, of JAX's, say, may have its memory used again before.
    """

    stream = None

    def __init__(self, give: Callable[[Array], Any], on_device: Callable[[int], Any], held: Any = None) -> None:
        self.give, self.on_device, self.held = give, on_device, held


class MadeByTorch:
    """The way back of PyTorch's CUDA tensors: results are such tensors from the start.

    The work is on PyTorch's current stream, and the results' memory of its pool, as with operators of its own: whoever
    frees one, or captures a graph, in whichever thread, need not know of CuPy's.
    """

    def __init__(self, torch: Any, stream: Any) -> None:
        self.stream = stream  # PyTorch's, to be made CuPy's current one; None where it is that
        self._empty = torch.empty
        self._dtypes = {ours: its_own for its_own, ours in _dtypes_of(torch).items()}
        self._device = functools.cache(functools.partial(torch.device, "cuda"))
        # It makes no context on the device that was the current one, if that had none.
        self.on_device: Callable[[int], Any] = lambda device: torch.cuda.device(device)

    def make(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int | None) -> tuple[Any, int]:
        """A new tensor, and its address."""
        tensor = self._empty(shape, dtype=self._dtypes[dtype], device=self._device(device))
        return tensor, tensor.data_ptr()


WayBack = Handed | MadeByTorch


class Foreign:
    """Arrays of another framework, through DLPack.

    On a CUDA device CuPy's current stream waits for the producer's before the work, and the framework's current stream
    for CuPy's after it, as the protocol lays down.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._framework = _framework(kind)
        self.on_device: Callable[[int], Any] = lambda device: device_home().on_device(device)

    def look(self, arrays: Sequence[Any], labels: Sequence[str], written: int) -> Arrived:
        device = _device(arrays[0], "x")
        if device is None:
            return self._import(arrays, labels, written, None, None)
        home = device_home()
        with _NOTHING if home.current_device() == device else self.on_device(device):
            return self._import(arrays, labels, written, device, home.current_stream(device))

    def _import(
        self, arrays: Sequence[Any], labels: Sequence[str], written: int, device: int | None, stream: int | None
    ) -> Arrived:
        x = arrays[0]
        layouts: list[Layout | None] = []
        views: list[dlpack.Imported | None] = []
        for position, (value, label) in enumerate(zip(arrays, labels, strict=False)):
            if value is None:
                layouts.append(None)
                views.append(None)
                continue
            if not _is_array(type(value)):
                raise _not_an_array(label, type(value))
            if _framework(type(value)) != self._framework:
                raise _mixed_frameworks(label, type(value), _type_name(self._kind))
            if value is not x:
                self._check_device(value, label, x, device)
            if _is_negated(value):
                raise TypeError(f"{label}: got a view of negated numbers; a plain one is needed, of resolve_neg()")
            try:
                view = dlpack.import_from(value, stream)
            except ImportError:
                raise
            except dlpack.UnsupportedType as error:
                raise ValueError(f"{label}: {error}") from None
            except MemoryError:
                raise
            except Exception as error:  # whatever the producer raises: BufferError, RuntimeError, its own types
                raise _no_export(value, label, error) from error
            if position >= written and (view.read_only or self._framework in IMMUTABLE_FRAMEWORKS):
                raise ValueError(f"{label}: {_type_name(type(value))} is read-only; a writable array is needed")
            layouts.append(
                (view.shape, view.strides, view.dtype, device, 0 if device is None else view.pointer % START_BYTES)
            )
            views.append(view)
        importer = self._importer(x, device)
        if device is not None:
            pointers = [0 if view is None else view.pointer for view in views]
            return tuple(layouts), pointers, views, Handed(importer, self.on_device, self._to_hold(arrays, views))
        host = [view and _as_numpy(view, label) for view, label in zip(views, labels, strict=False)]
        dtypes = {view.dtype: getattr(value, "dtype", None) for value, view in zip(arrays, views, strict=True) if view}
        give = functools.partial(_give_from_host, importer, dtypes)
        return tuple(layouts), host, [*host], Handed(give, self.on_device)

    def _check_device(self, value: Any, label: str, x: Any, device: int | None) -> None:
        if (own := _device(value, label)) != device:
            raise mixed_devices(label, own, device)

    def _importer(self, x: Any, device: int | None) -> Callable[[Any], Any]:
        return _importer(x, self._framework)

    def _to_hold(self, arrays: Sequence[Any], views: Sequence[Any]) -> Any:
        """What exports a copy of an array may let it live no longer than the capsule."""
        return arrays, views


class OfJax(Foreign):
    """JAX's arrays. It may have several devices on the host, which are one to DLPack."""

    def _check_device(self, value: Any, label: str, x: Any, device: int | None) -> None:
        super()._check_device(value, label, x, device)
        if device is None and value.device != x.device:
            raise _mixed(label, value.device, x.device)

    def _importer(self, x: Any, device: int | None) -> Callable[[Any], Any]:
        importer: Any = functools.partial(_into_jax, super()._importer(x, device))
        first = device is not None or getattr(x.device, "id", 0) == 0
        return importer if first else functools.partial(importer, device=x.device)

    def _to_hold(self, arrays: Sequence[Any], views: Sequence[Any]) -> Any:
        """An array whose capsule lives cannot be donated."""
        return arrays


class OfTorch(Foreign):
    """PyTorch's tensors.

    On CUDA they say themselves where they lie, in half the time that DLPack takes, and PyTorch makes the results,
    unless something of it stands between its functions and memory.
    """

    def __init__(self, kind: type) -> None:
        super().__init__(kind)
        torch: Any = importlib.import_module(_TORCH)
        self._kinds, self._dtypes = (torch.Tensor, torch.nn.Parameter), _dtypes_of(torch)
        # None of these is public, nor in all versions and builds; what stands for the last takes ten times as long.
        internal = torch._C
        self._modes = getattr(internal, "_len_torch_dispatch_stack", lambda: 0)
        self._transform = getattr(getattr(internal, "_functorch", None), "peek_interpreter_stack", lambda: None)
        self._tracing = getattr(internal, "_get_tracing_state", lambda: None)
        self._function_modes = getattr(internal, "_len_torch_function_stack", lambda: 0)
        self._without_them = getattr(internal, "DisableTorchFunction", contextlib.nullcontext)
        self._current_stream: Callable[[int], int] = getattr(
            internal, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
        )
        self._on_cupys = MadeByTorch(torch, None)
        self.on_device = self._on_cupys.on_device
        self._on_other = functools.lru_cache(maxsize=256)(
            lambda pointer: MadeByTorch(torch, device_home().stream_at(pointer))
        )

    def look(self, arrays: Sequence[Any], labels: Sequence[str], written: int) -> Arrived:
        if self._function_modes():  # torch.set_default_device is one: a tensor's every attribute would go through it
            with self._without_them():
                arrived = self._look_directly(arrays)
        else:
            arrived = self._look_directly(arrays)
        return arrived or super().look(arrays, labels, written)

    def _look_directly(self, arrays: Sequence[Any]) -> Arrived | None:
        """A call on CUDA tensors.

        None for all others, and for tensors that the way through DLPack refuses, in PyTorch's own words or ours; also
        where a mode, a transform or a tracer gets hold of what PyTorch's functions take and return.
        """
        if self._modes() or self._transform() is not None or self._tracing() is not None:
            return None
        layouts: list[Layout | None] = []
        addresses = []
        kinds, dtypes = self._kinds, self._dtypes
        for array in arrays:
            if array is None:
                layouts.append(None)
                addresses.append(0)
                continue
            if type(array) not in kinds or not array.is_cuda or array.requires_grad or array.is_neg():
                return None
            dtype = dtypes.get(array.dtype)
            try:
                address, shape = array.data_ptr(), array.shape
            except RuntimeError:  # a sparse one, say
                return None
            if dtype is None or (not address and 0 not in shape):
                return None
            strides = None if array.is_contiguous() else tuple([step * dtype.itemsize for step in array.stride()])
            layouts.append((shape, strides, dtype, array.get_device(), address % START_BYTES))
            addresses.append(address)
        device = arrays[0].get_device()
        stream = self._current_stream(device)
        on_cupys = (stream or 1) == device_home().current_stream(device)
        way_back = self._on_cupys if on_cupys else self._on_other(stream)
        return tuple(layouts), addresses, _Tensors(arrays, layouts, tuple(addresses)), way_back


class _Tensors:
    """A call's tensors, as Device.array() takes them: only the few calls that need arrays of CuPy's ask for them."""

    def __init__(self, tensors: Sequence[Any], layouts: Sequence[Layout | None], addresses: tuple[int, ...]) -> None:
        self._tensors, self._layouts, self._addresses = tensors, layouts, addresses

    def __getitem__(self, position: int) -> dlpack.Imported:
        layout = self._layouts[position]
        assert layout is not None
        shape, strides, dtype, *_ = layout
        strides = dlpack.contiguous_strides(shape, dtype.itemsize) if strides is None else strides
        return dlpack.Imported(self._addresses[position], tuple(shape), strides, dtype, False, self._tensors[position])


@functools.cache
def _dtypes_of(torch: Any) -> dict[Any, np.dtype[Any]]:
    """NumPy's dtype for each of PyTorch's that is taken."""
    dtypes = {getattr(torch, name): np.dtype(name) for name in FLOAT_NAMES if name != "bfloat16"}
    with contextlib.suppress(ImportError):  # the longer way tells those who need it
        dtypes[torch.bfloat16] = dlpack.bfloat16()
    return dtypes


def _give_from_host(importer: Callable[[Any], Any], dtypes: dict[np.dtype[Any], Any], array: Array) -> Any:
    if array.dtype.name == "bfloat16":
        # NumPy cannot export bfloat16: the bits travel as uint16 and the framework names them again.
        return importer(array.view(np.uint16)).view(dtypes[array.dtype])
    return importer(array)


def tell_of_writing(targets: Sequence[Any]) -> None:
    """PyTorch's autograd, so that it refuses to use what a tensor held before, as after its own operations."""
    for target in targets:
        tell = None if target is None else _way_to_tell(type(target))  # type: ignore[arg-type]  # types are hashable
        if tell is not None and not target.is_inference():
            tell(target)


@functools.lru_cache(maxsize=256)
def _way_to_tell(kind: type) -> Callable[[Any], None] | None:
    if _framework(kind) != _TORCH:
        return None
    try:
        return getattr(importlib.import_module("torch.autograd.graph"), "increment_version", None)
    except ImportError:  # of an older PyTorch
        return None


# --- pieces -----------------------------------------------------------------------------------------------


def _framework(kind: type) -> str:
    """The package that an array's class comes from; for a class derived from a framework's own, that framework, though
    the class may say itself how it is exported."""
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__ if "__dlpack__" in vars(base)]
    root = next((root for root in roots if root in _FRAMEWORKS), (*roots, kind.__module__.partition(".")[0])[0])
    return {"jaxlib": _JAX}.get(root, root)


def _importer(x: Any, framework: str) -> Callable[[Any], Any]:
    """The `from_dlpack` of x's own framework: of its array namespace where it has one, else of its module."""
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else importlib.import_module(framework)
    importer: Callable[[Any], Any] | None = getattr(namespace, "from_dlpack", None)
    if importer is None:
        raise TypeError(
            f"x: {_type_name(type(x))} exports DLPack, but {framework} has no from_dlpack to take results back"
        )
    return importer


def _into_jax(importer: Callable[..., Any], array: Any, **options: Any) -> Any:
    """Float64 stays float64, though JAX may have it switched off, as it is unless it is told."""
    if array.dtype != np.float64:
        return importer(array, **options)
    jax = importlib.import_module("jax")
    switch = getattr(jax, "enable_x64", None)
    if switch is None:  # of an older JAX
        switch = importlib.import_module("jax.experimental").enable_x64
    with switch(True):
        return importer(array, **options)


def _device(value: Any, label: str) -> int | None:
    try:
        kind, ordinal = value.__dlpack_device__()
    except AttributeError as error:
        if _framework(type(value)) != _JAX:
            raise _no_export(value, label, error) from error
        raise TypeError(  # its tracers
            f"{label}: {_type_name(type(value))} lies nowhere in memory; an array that does is needed: "
            "cupynorm is to be called outside of what jax.jit, jax.grad or jax.vmap trace"
        ) from error
    except Exception as error:  # a torch tensor on the meta device, say
        raise _no_export(value, label, error) from error
    if kind in dlpack.CPU_DEVICES:
        return None
    if kind in dlpack.CUDA_DEVICES:
        return int(ordinal)
    raise TypeError(f"{label}: got an array on DLPack device type {int(kind)}; host or CUDA memory is needed")


def _as_numpy(view: dlpack.Imported, label: str) -> np.ndarray[Any, Any]:
    try:
        return dlpack.as_numpy(view)
    except ValueError as error:  # more axes than NumPy has
        raise ValueError(f"{label}: {error}") from None


def _is_negated(array: Any) -> bool:
    """PyTorch's views such as a conjugate's imaginary part, exported as if their signs were those in memory."""
    is_neg = getattr(array, "is_neg", None)
    return is_neg is not None and bool(is_neg())


def _is_array(kind: type) -> bool:
    return hasattr(kind, "__dlpack__") and not issubclass(kind, np.generic)


def _stranger(label: str, kind: type, needed: str) -> TypeError:
    """For an array that does not come from the framework of x, or that is none."""
    if issubclass(kind, np.ma.MaskedArray):
        return TypeError(f"{label}: got numpy.ma.MaskedArray, whose mask would be lost; a plain NumPy array is needed")
    return _mixed_frameworks(label, kind, needed) if _is_array(kind) else _not_an_array(label, kind)


def _mixed_frameworks(label: str, kind: type, needed: str) -> TypeError:
    return TypeError(
        f"{label}: got {_type_name(kind)}, but x is {needed}; all arrays of a call must come from one framework"
    )


def _not_an_array(label: str, kind: type) -> TypeError:
    by_name = " (options are given by name: eps=1e-6, say)" if label == "b" and issubclass(kind, (int, float)) else ""
    return TypeError(
        f"{label}: got {_type_name(kind)}; a NumPy array, a CuPy array or an array with __dlpack__ is needed{by_name}"
    )


def _no_export(value: Any, label: str, error: Exception) -> TypeError:
    is_deleted = getattr(value, "is_deleted", None)  # JAX's
    if callable(is_deleted) and is_deleted() is True:
        return TypeError(f"{label}: {_type_name(type(value))} was deleted, or donated; one that has memory is needed")
    reason = str(error) or type(error).__name__
    return TypeError(f"{label}: {_type_name(type(value))} cannot be exported through DLPack: {reason}")


def mixed_devices(label: str, got: int | None, needed: int | None) -> TypeError:
    return _mixed(label, _device_name(got), _device_name(needed))


def _mixed(label: str, got: object, needed: object) -> TypeError:
    return TypeError(f"{label}: is on {got}, but x is on {needed}; all arrays of a call must be on one device")


def _device_name(device: int | None) -> str:
    return "the host" if device is None else f"cuda:{device}"


def _type_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
