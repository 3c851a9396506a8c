"""The producer's stream is respected: inputs that another framework has yet to write, results that it reads at once.

Each test delays one side by a kernel of a third of a second. Without ordering the other side would see what was there
before; the control test shows that it does.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import pytest
from frameworks import FRAMEWORKS
from helpers import NORMS, Tensors, backward, forward, host, make_tensors
from test_cuda_runtime import spin

import cupynorm
from cupynorm import arrays

pytestmark = pytest.mark.gpu

DELAY = 0.3


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    return FRAMEWORKS["torch"]("cuda").torch


def sleep(torch: Any) -> None:
    """Keep torch's current stream busy (counted in cycles, at 2 GHz at most)."""
    torch.cuda._sleep(int(DELAY * 2e9))


class Late:
    """Tensors that a stream of torch's has yet to fill, and what the call on them must give."""

    def __init__(self, cupy: Any, torch: Any, norm: str) -> None:
        own = make_tensors(cupy, norm, (200, 1000), "float32")
        self.expected = [host(result) for result in backward(norm, own, has_bias=True)]
        named = {name: getattr(own, name) for name in ("x", "w", "b", "dy", "mean", "rstd")}
        self.ready = {name: torch.from_numpy(host(a)).cuda() for name, a in named.items() if a is not None}
        self.tensors = Tensors(
            **{name: None for name in named} | {n: torch.zeros_like(t) for n, t in self.ready.items()}
        )
        self.side, self.mine = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
        sleep(torch)  # the kernel is loaded by now
        with self.mine:
            spin(cupy, 0)
            backward(norm, own, has_bias=True)  # compiled, and memory is in the pool
            self.mine.synchronize()
        torch.cuda.synchronize()
        cupy.cuda.Device().synchronize()

    def fill(self) -> None:
        for name, tensor in self.ready.items():
            getattr(self.tensors, name).copy_(tensor)


@pytest.mark.parametrize("norm", NORMS)
def test_a_call_waits_for_what_the_producer_writes(cupy: Any, torch: Any, norm: str) -> None:
    late = Late(cupy, torch, norm)
    with torch.cuda.stream(late.side), late.mine:
        sleep(torch)
        late.fill()
        results = backward(norm, late.tensors, has_bias=True)
        assert not late.side.query(), "the call waited on the host"
        late.mine.synchronize()
    torch.cuda.synchronize()
    for result, expected in zip(results, late.expected, strict=True):
        np.testing.assert_array_equal(result.cpu().numpy(), expected)


@pytest.mark.parametrize("given", [False, True], ids=["results", "out"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_producer_waits_for_results(cupy: Any, torch: Any, norm: str, given: bool) -> None:
    """Read on torch's stream right after the call, while CuPy's stream, on which nothing of it is, is held up."""
    late = Late(cupy, torch, norm)
    late.fill()
    out = tuple(torch.full_like(late.ready[name], torch.nan) for name in ("x", "w", "w")) if given else None
    with torch.cuda.stream(late.side):  # new results could otherwise hold the right values from the call before
        poisoned = [torch.full_like(late.ready[name], torch.nan) for name in ("x", "w", "w")]
    del poisoned
    torch.cuda.synchronize()
    with torch.cuda.stream(late.side), late.mine:
        spin(cupy, DELAY)
        results = backward(norm, late.tensors, has_bias=True, out=out)
        consumed = [result.clone() for result in results]
        assert not late.mine.done, "the call waited on the host"
        late.side.synchronize()
    for copy, expected in zip(consumed, late.expected, strict=True):
        np.testing.assert_array_equal(copy.cpu().numpy(), expected)


@pytest.mark.parametrize("given", [False, True], ids=["results", "out"])
@pytest.mark.parametrize("norm", NORMS)
def test_torch_and_cupy_on_one_stream(cupy: Any, torch: Any, norm: str, given: bool) -> None:
    """The work is on that stream and waits for nothing else; results are read on it right after the call."""
    late = Late(cupy, torch, norm)
    out = tuple(torch.full_like(late.ready[name], torch.nan) for name in ("x", "w", "w")) if given else None
    with torch.cuda.stream(late.side), cupy.cuda.ExternalStream(late.side.cuda_stream):
        backward(norm, late.tensors, has_bias=True, out=out)  # memory of this stream is in the pool
        late.side.synchronize()
        sleep(torch)
        late.fill()
        results = backward(norm, late.tensors, has_bias=True, out=out)
        consumed = [result.clone() for result in results]
        for result in results:
            result.zero_()
        assert not late.side.query(), "the call waited on the host"
        late.side.synchronize()
    assert out is None or all(result is tensor for result, tensor in zip(results, out, strict=True))
    for copy, expected in zip(consumed, late.expected, strict=True):
        np.testing.assert_array_equal(copy.cpu().numpy(), expected)


def test_a_stream_that_was_set_by_use_is_current_again(cupy: Any, torch: Any) -> None:
    """Behind a call whose work is on a stream of torch's."""
    late = Late(cupy, torch, "rmsnorm")
    late.fill()
    torch.cuda.synchronize()
    before = cupy.cuda.get_current_stream()
    late.mine.use()
    try:
        with torch.cuda.stream(late.side):
            dx, *_ = backward("rmsnorm", late.tensors, has_bias=True)
            assert cupy.cuda.get_current_stream() == late.mine
        late.side.synchronize()
    finally:
        before.use()
    np.testing.assert_array_equal(dx.cpu().numpy(), late.expected[0])


def test_waiting_until_inputs_are_read_ends_no_capture(cupy: Any, torch: Any) -> None:
    """Of another thread's, in the driver's "global" mode, in which what any thread waits for would."""
    home, x = arrays.device_home(), torch.ones(1000, device="cuda")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]

    def hold(seconds: float) -> weakref.ref[Any]:
        thing = np.zeros(1)
        spin(cupy, seconds)
        home.hold(thing)
        return weakref.ref(thing)

    def wait() -> None:
        until = time.monotonic() + 60
        while any(thing() is not None for thing in held):
            assert time.monotonic() < until
            time.sleep(0.001)

    with streams[0]:
        held = [hold(0)]
    wait()  # the thread is there
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = x + 1
        for times, stream in enumerate(streams, 1):
            with stream:
                held.append(hold(times * DELAY / 3))
        wait()
        z = y * 2
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((z == 12).all())


@pytest.mark.parametrize("norm", NORMS)
def test_memory_that_another_stream_still_reads_is_not_given_away(cupy: Any, torch: Any, norm: str) -> None:
    """A result is deleted while torch's stream, on which it was made, has yet to read it; then another of its streams
    makes a call, with results as large. CuPy's stream is one for both, and its pool would give that memory.
    """
    late = Late(cupy, torch, norm)
    late.fill()
    others = {name: torch.zeros_like(tensor) for name, tensor in late.ready.items()}
    other = Tensors(**dict.fromkeys(("x", "w", "b", "dy", "mean", "rstd")) | others)
    torch.cuda.synchronize()
    with late.mine:
        with torch.cuda.stream(late.side):
            results = backward(norm, late.tensors, has_bias=True)
            sleep(torch)
            consumed = [result.clone() for result in results]
            del results
        with torch.cuda.stream(torch.cuda.Stream()):
            backward(norm, other, has_bias=True)
        late.mine.synchronize()
    assert not late.side.query(), "torch's stream was done too early for this test to tell"
    torch.cuda.synchronize()
    for copy, expected in zip(consumed, late.expected, strict=True):
        np.testing.assert_array_equal(copy.cpu().numpy(), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_a_graph_of_torch_has_its_results(cupy: Any, torch: Any, norm: str) -> None:
    """Captured without out=: the results' memory is the graph's, whatever is allocated between capture and replay."""
    first, second = (make_tensors(cupy, norm, (200, 1000), "float32", seed=seed) for seed in (1, 2))
    expected = [host(result) for result in (*forward(norm, second), *backward(norm, second))]
    names = [name for name in ("x", "w", "b", "dy", "mean", "rstd") if getattr(first, name) is not None]
    given = {name: torch.from_numpy(host(getattr(first, name))).cuda() for name in names}
    tensors = Tensors(**dict.fromkeys(("x", "w", "b", "dy", "mean", "rstd")) | given)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        forward(norm, tensors)  # once before, to compile
        backward(norm, tensors)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        results = (*forward(norm, tensors), *backward(norm, tensors))
    neighbours = [torch.full((1 << power,), 0x5A, dtype=torch.uint8, device="cuda") for power in range(9, 24)]
    for name, tensor in given.items():
        tensor.copy_(torch.from_numpy(host(getattr(second, name))))
    for result in results:
        result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(result.cpu().numpy(), wanted)
    assert all(bool((neighbour == 0x5A).all()) for neighbour in neighbours), "the graph wrote into others' memory"


def test_a_graph_of_torch_with_both_passes_by_autograd(torch: Any) -> None:
    """Captured as any of PyTorch's is: its own stream, the backward pass in a thread of autograd's."""

    class Norm(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            y, rstd = cupynorm.rmsnorm_forward(x.detach(), w.detach())
            ctx.save_for_backward(x, w, rstd)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, w, rstd = ctx.saved_tensors
            return cupynorm.rmsnorm_backward(x.detach(), w.detach(), dy, rstd)

    x = torch.randn(300, 1000, device="cuda", requires_grad=True)
    w, dy = torch.randn(1000, device="cuda", requires_grad=True), torch.randn(300, 1000, device="cuda")

    def step() -> Any:
        x.grad = w.grad = None
        y = Norm.apply(x, w)
        y.backward(dy)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # once before, to compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    found = y, x.grad, w.grad
    with torch.no_grad():
        for tensor in (x, w, dy):
            tensor.normal_()
    neighbours = [torch.full((1 << power,), 0x5A, dtype=torch.uint8, device="cuda") for power in range(9, 24)]
    graph.replay()
    torch.cuda.synchronize()
    got = [tensor.detach().clone() for tensor in found]
    expected = step().detach(), x.grad, w.grad
    assert all(torch.equal(one, another) for one, another in zip(got, expected, strict=True))
    assert all(bool((neighbour == 0x5A).all()) for neighbour in neighbours), "the graph wrote into others' memory"


def test_without_order_the_old_values_are_read(cupy: Any, torch: Any) -> None:
    """The control: the same memory by its bare address, on the same streams, with no exchange between them."""
    late = Late(cupy, torch, "rmsnorm")
    x = late.tensors.x
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.numel() * 4, x, x.device.index)
    bare = cupy.ndarray(tuple(x.shape), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    seen = cupy.ones_like(bare)
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(late.side):
        sleep(torch)
        late.fill()
    seen.data.copy_from_device_async(bare.data, bare.nbytes, late.mine)
    late.mine.synchronize()
    assert not late.side.query(), "torch's stream was done too early for this test to tell"
    torch.cuda.synchronize()
    assert not seen.any()
    assert bool(bare.any())


class LateInJax:
    """JAX's arrays, and a computation that takes its time before it reads its argument."""

    def __init__(self, cupy: Any) -> None:
        jax = FRAMEWORKS["jax"]("cuda")
        self.own = make_tensors(cupy, "layernorm", (200, 1000), "float32")
        self.names = ("x", "w", "b", "dy", "mean", "rstd")
        self.tensors = Tensors(**{name: jax.array(host(getattr(self.own, name))) for name in self.names})
        self._large = jax.array(np.eye(8192, dtype=np.float32))

        def slow(x: Any, matrix: Any) -> Any:
            for _ in range(8):
                matrix = matrix @ matrix  # the identity, after some 10^13 operations
            return x * matrix[0, 0]

        self._slow = jax.jax.jit(slow)
        self.copy(self.tensors.x).block_until_ready()

    def copy(self, x: Any) -> Any:
        return self._slow(x, self._large)


def test_jax_results_are_waited_for(cupy: Any) -> None:
    """JAX computes asynchronously: the call is made while its input is being computed, on another stream."""
    late = LateInJax(cupy)
    expected = backward("layernorm", late.own)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        late.tensors.x = late.copy(late.tensors.x)
        results = backward("layernorm", late.tensors)
        stream.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result), host(wanted))


def test_memory_that_jax_still_reads_is_not_given_away(cupy: Any) -> None:
    """A result that JAX has yet to read is deleted; the calls that follow have results as large, of other values."""
    late = LateInJax(cupy)
    expected, *_ = backward("layernorm", late.own)
    other = Tensors(**{name: getattr(late.tensors, name) * 0 for name in late.names})
    with cupy.cuda.Stream(non_blocking=True) as stream:
        backward("layernorm", other)
        dx, *_ = backward("layernorm", late.tensors)
        dx.block_until_ready()
        copy = late.copy(dx)
        del dx, _
        others = [backward("layernorm", other) for _ in range(3)]
        stream.synchronize()
        assert not copy.is_ready(), "JAX was done too early for this test to tell"
    np.testing.assert_array_equal(np.asarray(copy), host(expected))
    assert not any(np.asarray(result).any() for results in others for result in results)


def test_inputs_that_jax_deletes_are_kept_until_they_are_read(cupy: Any) -> None:
    """Deleted right after the call, while CuPy's stream is held up before the work; then JAX writes as large arrays."""
    late = LateInJax(cupy)
    jax = FRAMEWORKS["jax"]("cuda").jax
    fill = jax.jit(lambda value: jax.numpy.full((200, 1000), value, "float32"))
    fill(1.0).block_until_ready()
    expected = backward("layernorm", late.own)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin(cupy, 0)
        backward("layernorm", late.tensors)
        stream.synchronize()
        spin(cupy, DELAY)
        results = backward("layernorm", late.tensors)
        del late.tensors
        others = [fill(float(value)).block_until_ready() for value in range(8)]
        assert not stream.done, "CuPy's stream was through too early for this test to tell"
        stream.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result), host(wanted))
    assert [float(other[0, 0]) for other in others] == [float(value) for value in range(8)]


def test_inputs_may_be_donated_with_results(cupy: Any) -> None:
    """As a step of an optimizer does, right after the call: what is held is no reference that would forbid it."""
    late = LateInJax(cupy)
    jax = FRAMEWORKS["jax"]("cuda").jax
    step = jax.jit(lambda w, dw: w - dw, donate_argnums=0)
    w = host(late.own.w)
    expected = w - host(backward("layernorm", late.own)[1])
    _, dw, _ = backward("layernorm", late.tensors)
    step(late.tensors.w + 0, dw).block_until_ready()  # compiled
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin(cupy, 0)
        stream.synchronize()
        spin(cupy, DELAY)
        _, dw, _ = backward("layernorm", late.tensors)
        stepped = step(late.tensors.w, dw)
        assert late.tensors.w.is_deleted()
        assert not stream.done, "CuPy's stream was through too early for this test to tell"
        stream.synchronize()
    np.testing.assert_array_equal(np.asarray(stepped), expected)
