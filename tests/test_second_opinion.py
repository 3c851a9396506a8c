"""PyTorch's own operators and their autograd against this library: another formulation, by other people."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frameworks import FRAMEWORKS
from helpers import DEFAULT_EPS, DTYPES, NORMS

import cupynorm

SHAPES = [(5, 7), (33, 768), (2, 3, 1000), (1, 4097), (64, 1)]

# Relative L2 error of a chain forward, backward. A dozen roundings of float32, since the statistics carry their own;
# half precision adds one rounding of the result, at its worst, as a result may be a single number. float64: two sums
# of up to 1000 terms each, ours and torch's.
ROUNDINGS = 12 * 2.0**-24
TOLERANCES = {"float64": 1e-14, "float32": ROUNDINGS, "bfloat16": 2.0**-8 + ROUNDINGS, "float16": 2.0**-11 + ROUNDINGS}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def framework(request: pytest.FixtureRequest) -> Any:
    return FRAMEWORKS["torch"](request.param)


def torch_norm(torch: Any, norm: str, x: Any, w: Any, b: Any) -> Any:
    columns = (x.shape[-1],)
    if norm == "layernorm":
        return torch.nn.functional.layer_norm(x, columns, w, b, DEFAULT_EPS[norm])
    return torch.nn.functional.rms_norm(x, columns, w, DEFAULT_EPS[norm]) + b


def torch_results(torch: Any, norm: str, dtype: Any, *arrays: Any) -> list[Any]:
    """y, dx, dw, db by autograd in this dtype."""
    x, w, b, dy = (array.detach().to(dtype, copy=True) for array in arrays)
    for leaf in (x, w, b):
        leaf.requires_grad_()
    y = torch_norm(torch, norm, x, w, b)
    y.backward(dy)
    return [y.detach(), x.grad, w.grad, b.grad]


def our_results(norm: str, x: Any, w: Any, b: Any, dy: Any) -> list[Any]:
    y, *statistics = getattr(cupynorm, f"{norm}_forward")(x, w, b)
    return [y, *getattr(cupynorm, f"{norm}_backward")(x, w, dy, *statistics, has_bias=True)]


def distance(torch: Any, a: Any, b: Any) -> float:
    return float(torch.linalg.vector_norm(a.double() - b) / torch.linalg.vector_norm(b).clamp_min(1e-30))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_forward_and_gradients(framework: Any, norm: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Rows of one value have no gradient under LayerNorm and next to none under RMSNorm: nothing to be relative to, so
    there the inputs' scale stands in for it."""
    torch = framework.torch
    random = np.random.default_rng(7)
    inputs = [random.standard_normal(extent) for extent in (shape, shape[-1:], shape[-1:], shape)]
    arrays = [framework.array(values.astype(DTYPES[dtype])) for values in inputs]
    wanted = torch_results(torch, norm, torch.float64, *arrays)
    for name, result, reference in zip(("y", "dx", "dw", "db"), our_results(norm, *arrays), wanted, strict=True):
        assert result.dtype == arrays[0].dtype
        if shape[-1] == 1 and name == "dw" and norm == "layernorm":
            assert not result.any()  # x̂ is 0
        elif shape[-1] == 1 and name == "dx":
            # g − x̂·c1 − c2 cancels (to about eps/x² or to nothing): what is left is rounding, of the size of g·rstd.
            rstd = DEFAULT_EPS[norm] ** -0.5 if norm == "layernorm" else 1 / arrays[0].double().abs()
            scale = (arrays[3] * arrays[1]).double().abs() * rstd
            assert bool(((result.double() - reference).abs() <= scale * ROUNDINGS + 2.0**-7 * reference.abs()).all())
        else:
            assert distance(torch, result, reference) <= TOLERANCES[dtype], name


@pytest.mark.parametrize("shape", [(33, 768), (200, 1000)], ids=str)
def test_the_fused_backward_operator(framework: Any, shape: tuple[int, int]) -> None:
    """With the same statistics given to both: native_layer_norm_backward in float64."""
    torch = framework.torch
    random = np.random.default_rng(8)
    x, dy = (framework.array(random.standard_normal(shape)) for _ in range(2))
    w, b = (framework.array(random.standard_normal(shape[-1:])) for _ in range(2))
    columns = [shape[-1]]
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, columns, w, b, 1e-5)
    mask = [True, True, True]
    wanted = torch.ops.aten.native_layer_norm_backward(dy, x, columns, mean, rstd, w, b, mask)
    for result, reference in zip(cupynorm.layernorm_backward(x, w, dy, mean, rstd), wanted, strict=True):
        assert distance(torch, result, reference) <= 1e-14


@pytest.mark.parametrize("norm", NORMS)
def test_no_further_from_float64_than_torch(framework: Any, norm: str) -> None:
    """float32, 4096 rows of 768: within a tenth of the distance of torch's own float32 results, or nearer. Torch may do
    better on db, a plain sum there: for it, no further than the promise for such sums, 1.3e-7."""
    torch = framework.torch
    random = np.random.default_rng(9)
    inputs = [random.standard_normal(extent) for extent in ((4096, 768), (768,), (768,), (4096, 768))]
    arrays = [framework.array(values.astype(np.float32)) for values in inputs]
    reference = torch_results(torch, norm, torch.float64, *arrays)
    theirs = torch_results(torch, norm, torch.float32, *arrays)
    for name, ours, other, best in zip(
        ("y", "dx", "dw", "db"), our_results(norm, *arrays), theirs, reference, strict=True
    ):
        allowed = 1.1 * distance(torch, other, best)
        assert distance(torch, ours, best) <= (max(allowed, 1.3e-7) if name == "db" else allowed), name
