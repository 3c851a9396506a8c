"""The README's examples run, and its commands are what the marks say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


def block_after(mark: str) -> str:
    """The fenced block that follows `<!-- mark -->`."""
    match = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)\n```\n", README.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"README.md has no block marked {mark}"
    return match[1]


def run(example: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(example, str(README), "exec"), names)
    return names


@pytest.mark.gpu
def test_cupy_example() -> None:
    run(block_after("example: cupy"))


def test_cupy_example_on_numpy_arrays() -> None:
    """ "The same calls", it says."""
    example = block_after("example: cupy").replace("import cupy\n", "import numpy as cupy\n")
    run(example.replace("8192", "128"))


def test_torch_example() -> None:
    pytest.importorskip("torch")
    run(block_after("example: torch"))


def test_autograd_example() -> None:
    """It runs, its gradients are right, and functions that call it compile."""
    torch = pytest.importorskip("torch")
    names = run(block_after("example: torch autograd"))
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: names["RMSNorm"].apply(x, w, 1e-6), (x, w))

    y = (names["RMSNorm"].apply(x, w, 1e-6) * torch.arange(8)).sum()
    with pytest.raises(NotImplementedError, match="first derivatives only"):  # else they would be wrong
        torch.autograd.grad(y, x, create_graph=True)

    def loss(x: Any, w: Any) -> Any:
        return (2 * names["RMSNorm"].apply(x, w, 1e-6)).sum()

    expected = torch.autograd.grad(loss(x, w), (x, w))
    found = torch.autograd.grad(torch.compile(loss, backend="eager")(x, w), (x, w))
    assert all(torch.equal(one, another) for one, another in zip(found, expected, strict=True))


@pytest.mark.parametrize("mark", ["main command", "test command"])
def test_set_up_is_one_line(mark: str) -> None:
    assert "\n" not in block_after(mark)
