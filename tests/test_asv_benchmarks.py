"""asv_bench/benchmarks.py: everything it measures on CUDA runs, here on NumPy arrays behind a stand-in for CuPy; and
what asv shows is complete."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynorm import bench

ROOT = Path(__file__).resolve().parent.parent


class Full(Exception):
    """The stand-in's out-of-memory error."""


def test_asv_can_import_the_folder_and_takes_no_script_for_a_benchmark() -> None:
    """It imports every module as asv_bench.NAME, where none finds another by its name, and goes by functions' names."""
    pytest.importorskip("asv")
    if not (ROOT / ".git").exists():
        pytest.skip("asv needs git's history")
    command = [sys.executable, "-m", "asv", "check", "--config", "asv.conf.json", "-E", f"existing:{sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout.lower(), done.stdout


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    sys.modules.pop("asv_bench.benchmarks", None)
    return importlib.import_module("asv_bench.benchmarks")


@pytest.fixture
def stand_in(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("ml_dtypes")
    pool = SimpleNamespace(malloc=None, free_all_blocks=lambda: None, total_bytes=lambda: 3 << 20)
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(
            memory=SimpleNamespace(OutOfMemoryError=Full),
            get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
            MemoryPool=lambda: pool,
            using_allocator=lambda _: contextlib.nullcontext(),
        ),
        get_default_memory_pool=lambda: pool,
        empty=np.empty,
    )
    make_inputs, measure_case = bench.make_inputs, bench.measure_case
    small = lambda case: bench.case(case.op, min(case.rows, 8), min(case.columns, 128), case.dtype, case.w_dtype)  # noqa: E731
    monkeypatch.setattr(benchmarks, "need_cuda", lambda: cupy)
    monkeypatch.setattr(benchmarks, "need_torch", lambda: cupy)
    monkeypatch.setattr(benchmarks, "as_tensor", lambda array: array)
    monkeypatch.setattr(bench, "make_inputs", lambda case, xp=np: make_inputs(small(case)))
    monkeypatch.setattr(
        bench, "measure_case", lambda case, inputs=None, xp=np: measure_case(small(case), inputs, repeats=1)
    )
    monkeypatch.setattr(
        bench,
        "measure",
        lambda op, rows, columns, dtype="float32", w_dtype=None, xp=np, repeats=1: bench.measure_case(
            bench.case(op, rows, columns, dtype, w_dtype)
        ),
    )
    monkeypatch.setattr(bench, "FLUSH_BYTES", 1 << 10)
    bench._host_flush_buffer.cache_clear()
    yield
    bench._host_flush_buffer.cache_clear()


def classes(module: ModuleType) -> list[type]:
    return [each for name, each in vars(module).items() if isinstance(each, type) and name[0] != "_" and tracks(each)]


def tracks(each: type) -> list[Any]:
    return [getattr(each, name) for name in dir(each) if name.startswith(("track_", "timeraw_"))]


def test_everything_has_a_name_a_unit_and_named_parameters(benchmarks: ModuleType) -> None:
    names = [track.pretty_name for each in classes(benchmarks) for track in tracks(each)]
    assert len(names) == len(set(names)) == 28
    for each in classes(benchmarks):
        assert len(getattr(each, "params", ())) == len(getattr(each, "param_names", ())), each
        for track in tracks(each):
            assert track.unit
            assert track.version


def test_quick_leaves_one_case_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("CUPYNORM_QUICK", "1")
    sys.modules.pop("asv_bench.benchmarks", None)
    quick = importlib.import_module("asv_bench.benchmarks")
    sys.modules.pop("asv_bench.benchmarks")
    assert quick.CudaBackward.params == (["rmsnorm_backward"], [1024], [25])
    with_params = [kind for kind in vars(quick).values() if hasattr(kind, "params")]
    assert len(with_params) > 4
    assert all(len(values) == 1 for kind in with_params for values in kind.params)


@pytest.mark.usefixtures("stand_in")
def test_every_case_gets_its_figures(benchmarks: ModuleType) -> None:
    measured = [each for each in classes(benchmarks) if hasattr(each, "setup_cache")]
    assert len(measured) == 10
    for each in measured:
        cache = each().setup_cache()  # type: ignore[attr-defined]
        keys = list(itertools.product(*each.params))  # type: ignore[attr-defined]
        assert list(cache) == keys
        for key in keys:
            instance = each()
            instance.setup(cache, *key)  # type: ignore[misc]
            for track in tracks(each):
                assert track(instance, cache, *key) > 0


@pytest.mark.usefixtures("stand_in")
def test_dx_alone_is_all_that_is_wanted(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    call, seen = bench.call, []
    monkeypatch.setattr(bench, "call", lambda case, inputs: seen.append(call(case, inputs)))
    for op in ("layernorm_backward", "rmsnorm_backward"):
        seen.clear()
        benchmarks.bandwidth_of_dx_alone(np, op, 128, 1)
        assert seen
        for dx, *others in seen:
            assert dx.shape == (8, 128)
            assert others == [None] * (2 if op == "layernorm_backward" else 1)


@pytest.mark.usefixtures("stand_in")
def test_rows_with_gaps_have_them(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_case, seen = bench.measure_case, []
    monkeypatch.setattr(
        bench, "measure_case", lambda case, inputs, xp: seen.append(inputs) or measure_case(case, inputs)
    )
    for op in ("layernorm_backward", "rmsnorm_forward"):
        benchmarks.bandwidth_with_gaps(SimpleNamespace(empty=np.empty), op, 128, 1)
        usual = bench.make_inputs(bench.case(op, 8, 128, "bfloat16", "float32"))
        found = seen.pop()
        assert found.keys() == usual.keys()
        for name, value in found.items():
            assert np.array_equal(value, usual[name])
            if name in ("x", "dy"):
                assert value.strides == ((128 + benchmarks.GAP) * 2, 2)


@pytest.mark.usefixtures("stand_in")
def test_what_fails_and_what_does_not_fit(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(op: str, rows: int, columns: int, *_: Any, xp: Any) -> Any:
        raise Full("too large") if columns == 65536 else RuntimeError("an older commit's fault")

    monkeypatch.setattr(bench, "measure", measure)
    backward = benchmarks.CudaBackward()
    cache = backward.setup_cache()
    with pytest.raises(NotImplementedError, match="too large"):
        backward.setup(cache, "rmsnorm_backward", 65536, 25)
    with pytest.raises(RuntimeError, match="an older commit's fault"):
        backward.setup(cache, "rmsnorm_backward", 1024, 25)


def test_without_cuda_nothing_fails(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for each in classes(benchmarks):
        if not each.__name__.startswith("Cuda"):
            continue
        key = next(itertools.product(*each.params))  # type: ignore[attr-defined]
        instance = each()
        cache = [instance.setup_cache()] if hasattr(each, "setup_cache") else []
        with pytest.raises(NotImplementedError, match="no CUDA"):
            instance.setup(*cache, *key)  # type: ignore[attr-defined]


def test_tensors_over_the_arrays_memory(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    array = np.ones((2, 3), np.float32)
    tensor = benchmarks.as_tensor(array)
    assert type(tensor) is torch.Tensor
    assert tensor.data_ptr() == array.ctypes.data
    assert benchmarks.as_tensor(1e-6) == 1e-6
    monkeypatch.setattr(benchmarks, "need_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cost = benchmarks.CudaHostCostOfTorch()
    with pytest.raises(NotImplementedError, match="no CUDA in PyTorch"):
        cost.setup(cost.setup_cache(), "rmsnorm_backward", "out=")


def test_before_the_first_kernels_nothing_is_available(benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "bench", None)
    monkeypatch.setattr(benchmarks, "NO_BENCH", "cannot import bench", raising=False)
    for each in (benchmarks.CudaForward(), benchmarks.NumpyArrays()):
        with pytest.raises(NotImplementedError, match="cannot import bench"):
            each.setup(each.setup_cache(), *next(itertools.product(*each.params)))


@pytest.mark.parametrize("op", bench.OPS)
def test_the_expression_is_the_formula(op: str, benchmarks: ModuleType) -> None:
    arguments, results = benchmarks.inputs_and_outputs(op, "16x64", "float32", np)
    for got, expected in zip(benchmarks.expression(op, arguments)(), results, strict=True):
        np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_first_calls_code_runs(benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fresh processes as asv starts them, with a module that NumPy stands behind in CuPy's place."""
    pytest.importorskip("ml_dtypes")
    (tmp_path / "cupy.py").write_text(
        "from types import SimpleNamespace\nfrom numpy import zeros\nimport os, pathlib\n"
        "pathlib.Path(os.environ['CUPY_CACHE_DIR'], 'used').touch()\n"
        "stream = SimpleNamespace(synchronize=lambda: None)\n"
        "cuda = SimpleNamespace(get_current_stream=lambda: stream)\n"
    )
    monkeypatch.setattr(benchmarks, "need_cuda", lambda: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    for op in benchmarks.BACKWARD:
        first = benchmarks.CudaFirstCall()
        first.setup(op)
        folder = Path(first.folder.name)
        assert list(folder.glob("bytecode/**/dispatch.*.pyc"))
        for timeraw, used in ((first.timeraw_compiled, 0), (first.timeraw_from_disk_cache, 1)):
            statement, setup = timeraw(op)
            assert len(list(folder.glob("used"))) == 1
            assert len(list(folder.glob("*/used"))) == used
            code = f"import timeit; print(timeit.timeit({statement!r}, {setup!r}, number=1))"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        assert len(list(folder.glob("*/used"))) == 1
        first.teardown(op)
        assert not folder.exists()
