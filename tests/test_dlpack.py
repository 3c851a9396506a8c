"""Torch and JAX arrays in, the same framework's arrays out, without a copy on the way in.

The same bodies run on the host and (under the gpu mark) on CUDA devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import subprocess
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
from foreign import Foreign
from frameworks import FRAMEWORKS
from gpu_record import NEEDS_TWO_DEVICES
from helpers import (
    DTYPES,
    NORMS,
    Tensors,
    address,
    assert_same_bits,
    backward,
    forward,
    host,
    make_tensors,
    spy,
)

import cupynorm
from cupynorm import arrays, dlpack

BOTH_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = ("x", "w", "b", "dy", "mean", "rstd")


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, device: str) -> Any:
    return FRAMEWORKS[request.param](device)


@pytest.fixture
def torch(device: str) -> Any:
    return FRAMEWORKS["torch"](device)


def backend_arrays(device: str) -> Any:
    """The module whose arrays the backend gets for this device's arrays."""
    return importlib.import_module("cupy" if device == "cuda" else "numpy")


def exported(framework: Any, tensors: Tensors) -> Tensors:
    """The same values as the framework's arrays."""
    arrays = {name: getattr(tensors, name) for name in NAMES}
    return Tensors(**{name: None if a is None else framework.array(host(a)) for name, a in arrays.items()})


@pytest.mark.parametrize("device", BOTH_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_arrays_of_the_framework_come_back(
    monkeypatch: Any, framework: Any, device: str, norm: str, dtype: str
) -> None:
    """Types, devices, dtypes, and the very bits that the backend's own arrays get. The backend works on the
    framework's memory: every operand lies where the framework has it."""
    xp = backend_arrays(device)
    own = make_tensors(xp, norm, (33, 500), dtype, w_dtype="bfloat16")
    theirs = exported(framework, own)
    pointers = {name: framework.pointer(getattr(theirs, name)) for name in NAMES if getattr(theirs, name) is not None}
    calls = spy(monkeypatch, xp)
    for run in (lambda t: backward(norm, t, has_bias=True), lambda t: forward(norm, t)):
        calls.clear()
        results = run(theirs)
        operands = calls[0][1]
        for name, pointer in pointers.items():
            if hasattr(operands, name) and not (name in ("mean", "rstd") and hasattr(operands, "y")):
                assert address(getattr(operands, name)) == pointer, f"{name} was copied"
        framework.synchronize()
        expected = tuple(host(array) for array in run(own))
        assert all(isinstance(result, framework.kind) for result in results)
        assert_same_bits(tuple(framework.values(result) for result in results), expected)
    assert {str(result.dtype).removeprefix("torch.") for result in results} <= {dtype, str(own.rstd.dtype)}


@pytest.mark.parametrize("device", BOTH_DEVICES)
def test_results_are_not_copied_to_torch(monkeypatch: Any, torch: Any, device: str) -> None:
    calls = spy(monkeypatch, backend_arrays(device))
    tensors = exported(torch, make_tensors(np, "layernorm", (33, 500), "bfloat16"))
    results = backward("layernorm", tensors)
    operands = calls[0][1]
    assert [result.data_ptr() for result in results] == [
        address(operands.dx),
        address(operands.dw),
        address(operands.db),
    ]


@pytest.mark.parametrize("device", BOTH_DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tensors_given_as_out_are_written_in_place(torch: Any, device: str, dtype: str) -> None:
    own = make_tensors(np, "layernorm", (33, 500), dtype, w_dtype="bfloat16")
    theirs = exported(torch, own)
    buffer = torch.array(np.zeros((33, 600), DTYPES[dtype]))
    out = (buffer[:, 50:550], None, torch.array(np.zeros(500, DTYPES["bfloat16"])))
    results = backward("layernorm", theirs, out=out)
    assert results[0] is out[0]
    assert results[2] is out[2]
    expected = backward("layernorm", theirs)
    for result, wanted in zip(results, expected, strict=True):
        # Another alignment may mean another order of sums: one last place.
        wanted = torch.values(wanted)
        place = 2.0**-7 if wanted.dtype.name == "bfloat16" else 2.0**-22
        np.testing.assert_allclose(torch.values(result).astype(float), wanted.astype(float), rtol=place, atol=1e-6)
    assert not buffer[:, :50].any()
    assert not buffer[:, 550:].any()


@pytest.mark.parametrize("device", BOTH_DEVICES)
def test_autograd_knows_of_what_is_written(torch: Any, device: str) -> None:
    """What a tensor given as out held before is needed for a gradient: PyTorch says so, as after its own operations."""
    library = pytest.importorskip("torch")
    factor = torch.array(np.ones((2, 4), np.float32)).requires_grad_()
    y = torch.array(np.ones((2, 4), np.float32))
    total = (factor * y).sum()
    cupynorm.rmsnorm_forward(torch.array(np.full((2, 4), 3, np.float32)), out=(y, None))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    with library.inference_mode():  # such tensors have no count of what was written
        y = torch.array(np.zeros((2, 4), np.float32)).clone()
    cupynorm.rmsnorm_forward(torch.array(np.full((2, 4), 3, np.float32)), out=(y, None))
    np.testing.assert_allclose(torch.values(y), 1, rtol=1e-6)


@pytest.mark.parametrize("device", BOTH_DEVICES)
def test_jax_arrays_are_never_written_to(device: str) -> None:
    """JAX's arrays are immutable: others may share their memory."""
    jax = FRAMEWORKS["jax"](device)
    tensors = exported(jax, make_tensors(np, "rmsnorm", (3, 8)))
    dx = jax.array(np.full((3, 8), 7, np.float32))
    with pytest.raises(ValueError, match=r"^out\[0\] \(dx\): .*read-only.*writable"):
        backward("rmsnorm", tensors, out=(dx, None))
    assert bool((dx == 7).all())


@pytest.mark.parametrize("device", BOTH_DEVICES)
@pytest.mark.parametrize("name", ["x", "w", "dy", "rstd"])
def test_tensors_under_differentiation_are_refused(torch: Any, device: str, name: str) -> None:
    tensors = exported(torch, make_tensors(np, "rmsnorm", (3, 8)))
    getattr(tensors, name).requires_grad_()
    with pytest.raises(TypeError, match=rf"^{name}: torch\.Tensor .*grad"):
        backward("rmsnorm", tensors)


def test_what_jax_traces_is_refused() -> None:
    """A tracer has a shape and a dtype, but lies nowhere."""
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((3, 8))
    assert len(cupynorm.rmsnorm_forward(x)) == 2
    for transformed in (
        jax.jit(lambda x: cupynorm.rmsnorm_forward(x)[0]),
        jax.grad(lambda x: cupynorm.rmsnorm_forward(x)[0].sum()),
    ):
        with pytest.raises(TypeError, match=r"^x: jax\S*Tracer lies nowhere in memory; .*outside of what jax\.jit"):
            transformed(x)


@pytest.mark.parametrize("name", ["x", "w"])
def test_jax_arrays_that_are_gone_are_refused(name: str) -> None:
    jax = FRAMEWORKS["jax"]("cpu")
    tensors = exported(jax, make_tensors(np, "rmsnorm", (3, 8)))
    getattr(tensors, name).delete()
    with pytest.raises(TypeError, match=rf"^{name}: jax\S* was deleted, or donated; one that has memory is needed"):
        backward("rmsnorm", tensors)


TWO_HOST_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, cupynorm
jax.config.update("jax_enable_x64", True)
x, w = np.arange(32.0).reshape(4, 8), np.arange(8.0)
expected = (*cupynorm.rmsnorm_forward(x, w), *cupynorm.rmsnorm_backward(x, w, x, np.ones(4)))
first, second = jax.devices()
for device, dtype in ((first, x.dtype), (second, x.dtype), (second, jnp.bfloat16)):
    there = lambda array: jax.device_put(array.astype(dtype), device)
    y, rstd = cupynorm.rmsnorm_forward(there(x), there(w))
    results = y, rstd, *cupynorm.rmsnorm_backward(there(x), there(w), y, rstd)
    assert all(result.devices() == {device} for result in results), results
    for result, value in zip(results[:2], expected):
        np.testing.assert_allclose(result.astype(float), value, rtol=1e-2)
    try:
        cupynorm.rmsnorm_forward(there(x), jax.device_put(w, first if device == second else second))
    except TypeError as error:
        assert str(error).startswith("w: is on cpu:"), error
    else:
        raise AssertionError("two devices were taken")
"""


def test_jax_devices_of_the_host() -> None:
    """DLPack tells of one."""
    pytest.importorskip("jax")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", TWO_HOST_DEVICES], env=environment, check=True, timeout=300)


@pytest.mark.parametrize("device", BOTH_DEVICES)
def test_kinds_of_tensors_that_cannot_be_read_are_refused(torch: Any, device: str) -> None:
    tensors = exported(torch, make_tensors(np, "rmsnorm", (3, 8)))
    x = tensors.x
    for dy, error in (
        (x.bool(), ValueError),
        (x.long(), ValueError),
        (x.to_sparse(), TypeError),
        (x.to("meta"), TypeError),
    ):
        tensors.dy = dy
        with pytest.raises(error, match=r"^dy: "):
            backward("rmsnorm", tensors)


@pytest.mark.parametrize("device", BOTH_DEVICES)
@pytest.mark.parametrize("layout", ["transposed", "every second column", "rows at two strides"])
def test_out_tensors_of_any_layout_are_written(torch: Any, device: str, layout: str) -> None:
    """By a copy; what lies between their elements is left alone."""
    tensors = exported(torch, make_tensors(np, "layernorm", (4, 8, 48), "float32"))

    def empty() -> tuple[Any, Any]:
        shape = {"transposed": (4, 48, 8), "every second column": (4, 8, 96), "rows at two strides": (4, 9, 48)}[layout]
        whole = torch.array(np.full(shape, 7, np.float32))
        views = {"transposed": whole.transpose(1, 2), "every second column": whole[..., ::2]}
        return whole, views.get(layout, whole[:, :8])

    for run in (
        lambda out: backward("layernorm", tensors, out=out),
        lambda out: forward("layernorm", tensors, out=out),
    ):
        expected = torch.values(run(None)[0])
        whole, out = empty()
        assert run((out, None, None))[0] is out
        np.testing.assert_array_equal(torch.values(out), expected)
        out.fill_(7)
        assert bool((whole == 7).all())


@pytest.mark.parametrize("device", BOTH_DEVICES)
@pytest.mark.parametrize("layout", ["slice", "every second row", "transposed", "every second column", "expanded"])
def test_layouts_of_tensors(monkeypatch: Any, torch: Any, device: str, layout: str) -> None:
    """Rows at one stride are read in place, as everywhere."""
    own = make_tensors(np, "layernorm", (32, 48), "bfloat16")
    if layout == "expanded":
        own.dy[:] = own.dy[0]
    theirs = exported(torch, own)
    expected = [torch.values(result) for result in backward("layernorm", theirs)]
    wide = {name: torch.torch.zeros(64, 96, dtype=torch.torch.bfloat16, device=device) for name in ("x", "dy")}
    for name, buffer in wide.items():
        view = {
            "slice": buffer[:32, 3:51],
            "every second row": buffer[::2, :48],
            "transposed": buffer[:48, :32].T,
            "every second column": buffer[:32, ::2],
            "expanded": buffer[:32, :48] if name == "x" else buffer[0, :48].expand(32, 48),
        }[layout]
        if layout == "expanded" and name == "dy":
            buffer[0, :48] = theirs.dy[0]
        else:
            view.copy_(getattr(theirs, name))
        setattr(theirs, name, view)
    calls = spy(monkeypatch, backend_arrays(device))
    results = backward("layernorm", theirs)
    if layout in ("slice", "every second row", "expanded"):
        assert address(calls[0][1].x) == theirs.x.data_ptr()
        assert address(calls[0][1].dy) == theirs.dy.data_ptr()
    np.testing.assert_array_equal(torch.values(results[0]).view(np.uint16), expected[0].view(np.uint16))
    for result, wanted in zip(results[1:], expected[1:], strict=True):
        np.testing.assert_allclose(torch.values(result), wanted, rtol=1e-6, atol=1e-6)  # float32 sums of 32 terms


@pytest.mark.parametrize("device", ["cpu"])
def test_tensors_whose_memory_is_not_what_they_say_are_refused(torch: Any, device: str) -> None:
    """PyTorch exports both without a word; the signs were wrong, and the zeros whatever lay at no address."""
    tensors = exported(torch, make_tensors(np, "rmsnorm", (3, 8)))
    x = tensors.x
    tensors.x = torch.torch.complex(x, x).conj().imag
    assert tensors.x.is_neg()
    with pytest.raises(TypeError, match=r"^x: .*negated.*resolve_neg"):
        backward("rmsnorm", tensors)
    tensors.x = x
    with pytest.raises(TypeError, match=r"^out\[0\] \(dx\): .*negated"):
        backward("rmsnorm", tensors, out=(torch.torch._neg_view(x.clone()), None))
    tensors.dy = torch.torch._efficientzerotensor((3, 8), device=device)
    with pytest.raises(TypeError, match=r"^dy: torch\.Tensor cannot be exported .*names no memory"):
        backward("rmsnorm", tensors)


def test_more_axes_than_numpy_has_are_an_error_of_the_argument() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones([1] * 64 + [4])
    with pytest.raises(ValueError, match=r"^x: .*dimensions"):
        cupynorm.rmsnorm_forward(x)


def test_float64_of_jax_stays_float64_where_that_is_switched_off() -> None:
    jax = FRAMEWORKS["jax"]("cpu").jax
    tensors = make_tensors(np, "layernorm", (5, 8), "float64")
    x, dy = (jax.numpy.asarray(array) for array in (tensors.x, tensors.dy))
    expected = backward("layernorm", tensors, has_bias=True)
    with jax.enable_x64(False):
        y, mean, rstd = cupynorm.layernorm_forward(x)
        results = cupynorm.layernorm_backward(x, jax.numpy.asarray(tensors.w), dy, mean, rstd)
        assert jax.numpy.asarray(tensors.x).dtype == np.float32
    assert {array.dtype for array in (y, mean, rstd, results[0])} == {np.dtype(np.float64)}
    np.testing.assert_allclose(np.asarray(results[0]), expected[0], rtol=1e-5, atol=1e-5)  # w is float32 there


def test_frameworks_do_not_mix() -> None:
    torch, jax = (FRAMEWORKS[name]("cpu") for name in ("torch", "jax"))
    own = make_tensors(np, "rmsnorm", (3, 8))
    of_torch, of_jax = exported(torch, own), exported(jax, own)
    of_torch.dy = of_jax.dy
    with pytest.raises(TypeError, match=r"^dy: got jax\S*, but x is torch\.Tensor; .* one framework"):
        backward("rmsnorm", of_torch)
    of_jax.rstd = own.rstd
    with pytest.raises(TypeError, match=r"^rstd: got numpy\.ndarray, but x is jax\S*; .* one framework"):
        backward("rmsnorm", of_jax)


@pytest.mark.gpu
def test_host_and_cuda_tensors_do_not_mix() -> None:
    on_host, on_device = (
        exported(FRAMEWORKS["torch"](device), make_tensors(np, "rmsnorm", (3, 8))) for device in ("cpu", "cuda")
    )
    on_device.w, on_host.w = on_host.w, on_device.w
    with pytest.raises(TypeError, match=r"^w: is on the host, but x is on cuda:0; .* one device"):
        backward("rmsnorm", on_device)
    with pytest.raises(TypeError, match=r"^w: is on cuda:0, but x is on the host; .* one device"):
        backward("rmsnorm", on_host)


@pytest.mark.parametrize("device", ["cpu"])
def test_no_rows_and_no_axes(framework: Any, device: str) -> None:
    empty = exported(framework, make_tensors(np, "layernorm", (0, 8), "bfloat16"))
    dx, dw, db = backward("layernorm", empty)
    assert tuple(dx.shape) == (0, 8)
    assert not framework.values(dw).any()
    assert not framework.values(db).any()
    vector = make_tensors(np, "layernorm", (8,), "float32")
    results = forward("layernorm", exported(framework, vector))
    assert [tuple(result.shape) for result in results] == [(8,), (), ()]
    got = backward("layernorm", exported(framework, vector))
    assert_same_bits(tuple(framework.values(result) for result in got), backward("layernorm", vector))


# --- the protocol itself, and who owns the memory -----------------------------------------------------------


def foreign_tensors(own: Tensors, **options: Any) -> Tensors:
    arrays = {name: getattr(own, name) for name in NAMES}
    return Tensors(**{name: None if array is None else Foreign(array, **options) for name, array in arrays.items()})


@pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "old protocol"])
@pytest.mark.parametrize("norm", NORMS)
def test_any_framework_with_dlpack(monkeypatch: Any, norm: str, versioned: bool) -> None:
    own = make_tensors(np, norm, (7, 33), "float16")
    calls = spy(monkeypatch, np)
    results = backward(norm, foreign_tensors(own, versioned=versioned))
    assert all(type(result) is Foreign for result in results)
    assert address(calls[0][1].x) == address(own.x)
    assert_same_bits(tuple(result.array for result in results), backward(norm, own))


def test_arrays_while_another_thread_imports_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name is there, and has no ndarray yet."""
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    arrays.way_in.cache_clear()
    try:
        test_any_framework_with_dlpack(monkeypatch, "rmsnorm", True)
    finally:
        arrays.way_in.cache_clear()


def test_read_only_inputs_are_taken() -> None:
    own = make_tensors(np, "rmsnorm", (3, 8))
    expected = backward("rmsnorm", own)
    for name in ("x", "w", "dy", "rstd"):
        getattr(own, name).flags.writeable = False
    results = backward("rmsnorm", foreign_tensors(own))
    assert_same_bits(tuple(result.array for result in results), expected)


def test_strides_of_a_contiguous_array() -> None:
    for shape in ((), (5,), (2, 3, 4), (3, 0, 2), (1, 7, 1)):
        expected = np.empty(shape, np.float32)
        strides = dlpack.contiguous_strides(shape, 4)
        assert expected.size == 0 or strides == expected.strides
        assert len(strides) == len(shape)


def test_the_producer_gets_its_memory_back() -> None:
    """Alive as long as the imported array, also when its own object is gone; released with it, exactly then."""
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    released = weakref.ref(source)
    imported = dlpack.as_numpy(dlpack.import_from(Foreign(source), None))
    part = imported[1:, 2:]
    del source, imported
    gc.collect()
    assert released() is not None
    np.testing.assert_array_equal(part, [[6, 7], [10, 11]])
    del part
    gc.collect()
    assert released() is None


@pytest.mark.parametrize("bad", [False, True], ids=["call", "refused call"])
def test_a_call_keeps_nothing(bad: bool) -> None:
    own = make_tensors(np, "rmsnorm", (3, 8))
    released = [weakref.ref(array) for array in (own.x, own.w, own.dy, own.rstd)]
    theirs = foreign_tensors(own)
    if bad:
        with pytest.raises(ValueError, match="rstd"):
            cupynorm.rmsnorm_backward(theirs.x, theirs.w, theirs.dy, theirs.w)
    else:
        backward("rmsnorm", theirs)
    del own, theirs
    gc.collect()
    assert [reference() for reference in released] == [None] * 4


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("device", ["cpu"])
def test_a_thousand_calls_leave_nothing_behind(framework: Any, device: str) -> None:
    """64 KiB in and 64 KiB out a call: one kept array a call would show as 64 MB, a kept object as 1000 blocks."""
    own = make_tensors(np, "rmsnorm", (64, 256), "float32")

    def calls(count: int) -> None:
        for _ in range(count):
            backward("rmsnorm", exported(framework, own))
        gc.collect()

    calls(500)  # caches of the frameworks fill
    blocks, memory = sys.getallocatedblocks(), resident()
    calls(1000)
    assert sys.getallocatedblocks() - blocks < 500
    assert resident() - memory < 32 << 20


@pytest.mark.gpu
def test_a_thousand_calls_leave_nothing_behind_on_the_device() -> None:
    """Counted by torch's allocator for inputs and results, by CuPy's for the rest, to the byte."""
    torch = FRAMEWORKS["torch"]("cuda")
    own = make_tensors(np, "rmsnorm", (64, 256), "bfloat16")
    backward("rmsnorm", exported(torch, own))
    before = used(torch)
    for _ in range(1000):
        backward("rmsnorm", exported(torch, own))
    assert used(torch) == before


def used(torch: Any) -> tuple[int, int]:
    """Bytes of the device that live tensors take, and that CuPy's pool has handed out."""
    import cupy

    torch.synchronize()
    gc.collect()
    return torch.torch.cuda.memory_allocated(), cupy.get_default_memory_pool().used_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("one_stream", [True, False], ids=["one stream", "two streams"])
@pytest.mark.parametrize("norm", NORMS)
def test_results_are_of_the_pool_of_torch(norm: str, one_stream: bool) -> None:
    """Nothing is taken of CuPy's. Where there is no room PyTorch's own error comes, and the next call works."""
    import cupy

    torch = FRAMEWORKS["torch"]("cuda")
    tensors = exported(torch, make_tensors(np, norm, (512, 4096), "bfloat16"))

    def both() -> tuple[Any, ...]:
        return *forward(norm, tensors), *backward(norm, tensors)

    def keep_all() -> None:
        kept = []
        for _ in range(1000):
            kept.append(both())

    with contextlib.nullcontext() if one_stream else cupy.cuda.Stream(non_blocking=True):
        both()
        of_torch, of_cupy = used(torch)
        results = both()
        more_of_torch, more_of_cupy = used(torch)
        assert more_of_torch - of_torch >= sum(result.nbytes for result in results)
        assert more_of_cupy == of_cupy
        expected = [torch.values(result) for result in results]
        del results
        library = torch.torch.cuda
        library.empty_cache()
        total = library.get_device_properties(0).total_memory
        library.set_per_process_memory_fraction(library.memory_reserved() / total)
        try:
            with pytest.raises(library.OutOfMemoryError):
                keep_all()
        finally:
            library.set_per_process_memory_fraction(1.0)
        assert_same_bits(tuple(torch.values(result) for result in both()), tuple(expected))


ON_THE_SECOND_DEVICE = """
import cupynorm, torch
x, dy = torch.randn(2, 50, 1000, dtype=torch.float64, device="cuda:1")
w = torch.randn(1000, dtype=torch.float64, device="cuda:1")
for stream in (torch.cuda.default_stream(1), torch.cuda.Stream(1)):
    torch.cuda.synchronize(1)
    with torch.cuda.stream(stream):
        {before}
        y, rstd = cupynorm.rmsnorm_forward(x, w)
        dx, dw = cupynorm.rmsnorm_backward(x, w, dy, rstd)
        copied, _ = cupynorm.rmsnorm_forward(x[:, ::2], w[::2])
        assert all(result.get_device() == 1 for result in (y, rstd, dx, dw, copied))
        root = (x.square().mean(1) + 1e-6).rsqrt()[:, None]
        torch.testing.assert_close(y, x * root * w)
        torch.testing.assert_close(dw, (dy * x * root).sum(0))
        torch.testing.assert_close(copied, torch.nn.functional.rms_norm(x[:, ::2], (500,), w[::2], 1e-6))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["pass", "torch.cuda.set_device(0)", "torch.cuda.set_device(1)"])
def test_tensors_of_the_second_device(before: str) -> None:
    """In a process of its own, in which nothing has run on the first: PyTorch's current device may be no other's."""
    cupy, torch = (pytest.importorskip(name) for name in ("cupy", "torch"))
    if cupy.cuda.runtime.getDeviceCount() < 2 or not torch.cuda.is_available():
        pytest.skip(NEEDS_TWO_DEVICES)
    command = [sys.executable, "-c", ON_THE_SECOND_DEVICE.format(before=before)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class OnCuda(Foreign):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_cuda_arrays_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    arrays.device_home.cache_clear()
    x = OnCuda(np.ones((2, 4), np.float32))
    with pytest.raises(ImportError, match=r"need CuPy, which .* extra cuda12 or cuda13"):
        cupynorm.rmsnorm_forward(x)


CUPYS_BANNER = f"""
{"=" * 64}
Failed to import CuPy.

If you installed CuPy via wheels, make sure that the package matches with the version of CUDA installed.

Original error:
  ImportError: libcudart.so.12: cannot open shared object file: No such file or directory
{"=" * 64}
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError(CUPYS_BANNER), "ImportError: libcudart.so.12: cannot open shared object file"),
        (ValueError("numpy.dtype size changed, may indicate binary incompatibility"), "numpy.dtype size changed"),
        (ImportError(""), "ImportError"),
    ],
)
def test_why_cupy_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    """The cause, in one line."""

    def refuse(name: str) -> Any:
        raise error

    monkeypatch.setattr(arrays.importlib, "import_module", refuse)
    arrays.device_home.cache_clear()
    with pytest.raises(ImportError, match="need CuPy, which cannot be imported") as raised:
        cupynorm.rmsnorm_forward(OnCuda(np.ones((2, 4), np.float32)))
    assert f"({reason}" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "==" not in str(raised.value)


def test_what_others_set_for_a_function_of_pythons_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ctypes.pythonapi` has one object of it for all."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    before = get_pointer.restype
    monkeypatch.setattr(get_pointer, "restype", ctypes.POINTER(ctypes.c_char))
    test_any_framework_with_dlpack(monkeypatch, "rmsnorm", True)
    monkeypatch.setattr(get_pointer, "restype", before)
    test_any_framework_with_dlpack(monkeypatch, "rmsnorm", False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("none left"), pytest.raises(MemoryError, match="none left")),
        (RuntimeError(), pytest.raises(TypeError, match="cannot be exported through DLPack: RuntimeError")),
    ],
)
def test_errors_of_a_producer(error: Exception, expected: Any) -> None:
    class Fails(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise error

    with expected:
        cupynorm.rmsnorm_forward(Fails(np.ones((2, 4), np.float32)))


def test_numbers_in_place_of_arrays() -> None:
    """As eps is, in libraries that have it third."""
    x = np.ones((2, 4), np.float32)
    with pytest.raises(TypeError, match=r"b: got float; .* \(options are given by name: eps=1e-6, say\)"):
        cupynorm.rmsnorm_forward(x, None, 1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "bits", "name"), [(10, 8, "float8_e4m3fn"), (6, 8, "bool")])
def test_types_that_have_a_name(code: int, bits: int, name: str) -> None:
    with pytest.raises(dlpack.UnsupportedType, match=rf"type code {code} \({name}\) with {bits} bits"):
        dlpack._dtype_of(code, bits, 1)


@pytest.mark.parametrize(("code", "bits"), [(5, 32), (2, 8)])
def test_types_that_numpy_lacks(code: int, bits: int) -> None:
    """Complex numbers of two halves, say."""
    with pytest.raises(dlpack.UnsupportedType, match=rf"type code {code} with {bits} bits and 1 lanes; one of float16"):
        dlpack._dtype_of(code, bits, 1)


def test_complex_tensors_are_refused_by_their_type() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.complex32, torch.complex64):
        with pytest.raises(ValueError, match=r"^x: .*float16, bfloat16, float32, float64 .*is needed"):
            cupynorm.rmsnorm_forward(torch.zeros(4, 8, dtype=dtype))


def test_tensors_that_export_themselves_are_pytorchs() -> None:
    """A class derived from PyTorch's may say how, and be written beside plain ones."""
    torch = pytest.importorskip("torch")

    class Own(torch.Tensor):  # type: ignore[misc]
        def __dlpack__(self, **options: Any) -> Any:
            return super().__dlpack__(**options)

    x, w = torch.randn(4, 8), torch.randn(8)
    expected = cupynorm.rmsnorm_forward(x, w)
    for given in ((x.as_subclass(Own), w), (x, w.as_subclass(Own))):
        assert all(map(torch.equal, cupynorm.rmsnorm_forward(*given), expected))


class Exports:
    """As a protocol's class of another package, from which arrays may be derived."""

    def __dlpack__(self, **options: Any) -> Any:
        raise NotImplementedError


def test_classes_derived_from_a_protocols() -> None:
    """They are of the framework that says how they are exported, or of PyTorch, whatever the protocol's package."""
    torch = pytest.importorskip("torch")

    class Own(Foreign, Exports):
        pass

    class OwnTensor(torch.Tensor, Exports):  # type: ignore[misc]
        pass

    x = np.ones((4, 8), np.float32)
    expected = cupynorm.rmsnorm_forward(x)
    assert_same_bits(tuple(result.array for result in cupynorm.rmsnorm_forward(Own(x))), expected)
    y, _ = cupynorm.rmsnorm_forward(torch.from_numpy(x).as_subclass(OwnTensor))
    assert_same_bits((y.numpy(),), expected[:1])


def test_half_of_the_protocol() -> None:
    """Without a device, which is no sign of JAX's tracers."""

    class Nowhere:
        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError

    with pytest.raises(TypeError, match=r"^x: .*Nowhere cannot be exported through DLPack: .*__dlpack_device__"):
        cupynorm.rmsnorm_forward(Nowhere())
