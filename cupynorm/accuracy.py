"""Results held against float64: the relative L2 error of every output of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bench import Case
from .numpy_backend import reference_backward, reference_forward

EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}  # the public functions' defaults
_PIECE = 1 << 22  # elements: float64 copies of so many live at a time

# Half the worst rounding of the output's dtype (a rounding's root mean square is 0.43 of its worst), and eight
# roundings of the arithmetic, where sums in float32 over 32768 rows, well ordered, stay below five.
BOUND = "half a unit roundoff of its dtype plus 8 of the arithmetic's"


@dataclass(frozen=True)
class OutputError:
    """One output's relative L2 error, and the most that it may be."""

    name: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN


def check(case: Case, inputs: dict[str, Any], outputs: tuple[Any, ...], xp: Any = np) -> list[OutputError]:
    """Compare a call's outputs with the float64 reference, a few rows at a time."""
    names = case.output_names
    squares = {name: [0.0, 0.0] for name in names}  # of the difference, of the reference
    sums: dict[str, Any] = {}

    def compare(name: str, got: Any, reference: Any) -> None:
        reference = reference.reshape(got.shape)
        squares[name][0] += float(xp.square(got.astype(np.float64) - reference).sum())
        squares[name][1] += float(xp.square(reference).sum())

    for rows in _pieces(case):
        if case.backward:
            mean = inputs["mean"][rows] if case.norm == "layernorm" else None
            x, dy, rstd = (inputs[name][rows] for name in ("x", "dy", "rstd"))
            references = reference_backward(case.norm, x, inputs["w"], dy, mean, rstd)
            compare("dx", outputs[0][rows], references[0])
            for name, reference in zip(names[1:], references[1 : len(names)], strict=True):
                sums[name] = sums.get(name, 0.0) + reference
        else:
            y, mean, rstd = reference_forward(
                case.norm, inputs["x"][rows], inputs["w"], inputs.get("b"), EPS[case.norm]
            )
            by_name = {"y": y, "mean": mean, "rstd": rstd}
            for name, output in zip(names, outputs, strict=True):
                compare(name, output[rows], by_name[name])
    for name, total in sums.items():
        compare(name, outputs[names.index(name)], total)

    arithmetic = _unit_roundoff(case.compute_dtype)
    errors = []
    for name, output in zip(names, outputs, strict=True):
        difference, reference = squares[name]
        error = (difference / reference if reference else difference) ** 0.5
        errors.append(OutputError(name, error, 0.5 * _unit_roundoff(output.dtype) + 8 * arithmetic))
    return errors


def worst(errors: list[OutputError]) -> OutputError:
    """The output that lies nearest its bound, or farthest beyond."""
    return max(errors, key=lambda each: each.error / each.bound if each.error == each.error else np.inf)


def _pieces(case: Case) -> Iterator[slice]:
    step = max(1, _PIECE // case.columns)
    for start in range(0, case.rows, step):
        yield slice(start, start + step)


def _unit_roundoff(dtype: np.dtype[Any]) -> float:
    """The largest relative error of one rounding to nearest."""
    return {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[dtype.name]
