"""asv_bench/parts.py, as far as it goes without a GPU: what it leaves out of the kernels is there, and they compile
without it; its table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import compare
import parts
import pytest
from helpers import exit_status

from cupynorm import bench, cli

SOURCE = (compare.ROOT / parts.ALTERED).read_text(encoding="utf-8")


@pytest.mark.parametrize("part", parts.PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("columns", [1024, 4096, 7168, 16384])
@pytest.mark.parametrize("op", parts.OPS)
def test_what_is_left_compiles(op: str, columns: int, part: parts.Part, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    from assembly import kernels_of
    from compiling import compile_variant
    from roofline import Row

    from cupynorm.cuda import module
    from cupynorm.cuda.config.variants import Variant

    kernels = [
        k for k in kernels_of(Row(bench.case(op, 1017, columns, "bfloat16"))) if f"kernels_cu/{k[0]}" == parts.ALTERED
    ]
    assert len(kernels) == 2
    module.compile_options()  # which remembers where the headers lie that are not altered
    with parts.altered(part) as folder:
        monkeypatch.setattr(module, "source_directory", lambda: folder / "kernels_cu")
        for file, definitions in kernels:
            text = module.source(file, definitions)
            assert all(after in text and before not in text for before, after in part.edits if after)
            assert all(before not in text for before, after in part.edits if not after)
            spills, wrong = compile_variant((9, 0), Variant(file, ("backward_staged",), definitions))
            assert not wrong, "\n".join(wrong)
            assert not spills


def test_each_part_is_another_kernel() -> None:
    assert len({part.of(SOURCE) for part in parts.PARTS}) == len({part.name for part in parts.PARTS}) == 4
    assert parts.PARTS[0].of(SOURCE) == SOURCE


@pytest.mark.parametrize("source", ["", "ab ab"])
def test_what_is_not_there_once_is_an_error(source: str) -> None:
    with pytest.raises(ValueError, match=r"backward_staged\.cu does not have this once.*'ab'"):
        parts.Part("no b", (("ab", "a"),)).of(source)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    import roofline

    turns: list[int] = []

    def one_turn(script: str, folder: Path, turn: int, arguments: list[str]) -> list[list[float]]:
        assert script == parts.__file__
        assert (folder / parts.ALTERED).read_text(encoding="utf-8") == parts.PARTS[turn].of(SOURCE)
        assert arguments == given
        turns.append(turn)
        return [[10.0 * turn + row, 5.0 * turn + row] for row in range(4)]

    given = ["--only", "32,64", "--sizes", "0.01", "--csv", str(tmp_path / "parts.csv")]
    monkeypatch.setattr(compare, "one_turn", one_turn)
    monkeypatch.setattr(cli, "usable_cupy", lambda: (np, ""))
    monkeypatch.setattr(roofline, "bound_seconds", lambda row, whole, cupy: 2 * whole.triad_seconds)
    assert exit_status(parts.main, given) == 0
    assert turns == [0, 1, 2, 3]
    with (tmp_path / "parts.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["op"], line["rows x N"]) for line in lines] == [
        (op, shape) for op in parts.OPS for shape in ("52x32", "26x64")
    ]
    assert [line["copies: us"] for line in lines] == ["20.0", "21.0", "22.0", "23.0"]
    assert [line["arithmetic: dx us"] for line in lines] == ["15.0", "16.0", "17.0", "18.0"]
    assert float(lines[0]["bound us"]) == pytest.approx(2 * float(lines[0]["T us"]), abs=0.2)
    assert "no sums: us" in capsys.readouterr().out


def test_a_turn_times_the_call_and_dx_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    asked: list[Any] = []
    monkeypatch.setattr(bench, "call", lambda case, inputs: asked.append(inputs.get("output_mask")))
    monkeypatch.setattr(bench, "time_call", lambda function, xp: function() or 3e-6)
    for op, alone in zip(parts.OPS, ((True, False), (True, False, False)), strict=True):
        asked.clear()
        assert parts.both_us(bench.case(op, 2, 8, "float32"), {}, np) == [3.0, 3.0]
        assert asked == [None, alone]


def test_a_turn_leaves_the_table_of_another_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    import numpy as np

    target = tmp_path / "parts.csv"
    target.write_text("of another run")
    monkeypatch.setattr(cli, "usable_cupy", lambda: (np, ""))
    monkeypatch.setattr(parts, "both_us", lambda case, inputs, xp: [float(case.rows), 1.0])
    assert exit_status(parts.main, ["--only", "32", "--sizes", "0.01", "--csv", str(target), "--turn", "0"]) == 0
    assert target.read_text() == "of another run"
    assert json.loads(capsys.readouterr().out) == [str(Path(bench.__file__).resolve()), [[52.0, 1.0], [52.0, 1.0]]]
