"""The README's examples run, and its commands are what the marks say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def block_after(mark: str) -> str:
    """The fenced block that follows `<!-- mark -->`."""
    match = re.search(rf"<!-- {mark} -->\n```\w+\n(.*?)\n```\n", README.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"README.md has no block marked {mark}"
    return match[1]


def run(example: str) -> None:
    exec(compile(example, str(README), "exec"), {"__name__": "readme"})


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


@pytest.mark.parametrize("mark", ["main command", "test command"])
def test_set_up_is_one_line(mark: str) -> None:
    assert "\n" not in block_after(mark)
