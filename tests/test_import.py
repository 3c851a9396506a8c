"""`import cupynorm` is light: no CuPy, no other framework, no GPU; and NumPy arrays never need any of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from gpu_record import ROOT

HEAVY = ("cupy", "cupy_backends", "cuda", "torch", "jax", "jaxlib", "ml_dtypes")

# Importing any of these fails, as on a machine that lacks them.
BLOCK = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""

ONE_CALL = """
import numpy as np
import cupynorm

x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
y, mean, rstd = cupynorm.layernorm_forward(x, np.ones(6, np.float32))
dx, dw, db = cupynorm.layernorm_backward(x, np.ones(6, np.float32), np.ones_like(x), mean, rstd)
assert abs(dx).max() < 1e-5  # a constant gradient is all mean, and goes
assert (db == 4).all()
"""


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("code", ["import cupynorm", ONE_CALL], ids=["import", "NumPy call"])
def test_nothing_heavy_is_imported(code: str) -> None:
    loaded = run(f"{code}\nimport sys; print(*sys.modules)").split()
    assert "cupynorm.dispatch" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(HEAVY)


def test_importing_is_fast() -> None:
    """Beyond NumPy, which is needed anyway, a few milliseconds of small modules: best of three, with room for a busy
    machine. Importing CuPy alone would take longer."""
    code = "import time, numpy; start = time.perf_counter(); import cupynorm; print(time.perf_counter() - start)"
    assert min(float(run(code)) for _ in range(3)) < 0.1


def test_numpy_arrays_need_nothing_else() -> None:
    run(BLOCK + ONE_CALL)


def test_what_is_missing_is_named() -> None:
    """bfloat16 through DLPack needs ml_dtypes: the error says so, and how to get it."""
    code = """
from cupynorm import dlpack
try:
    dlpack.bfloat16()
except ImportError as error:
    assert "ml_dtypes" in str(error) and "pip install" in str(error), error
else:
    raise AssertionError("no error")
"""
    run(BLOCK + code)
