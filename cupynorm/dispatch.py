"""The way of every call: arrays in, one validated problem, a backend, arrays out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from .arrays import Array, Frame, receive
from .problem import (
    BackwardOperands,
    ForwardOperands,
    Norm,
    NormProblem,
    backward_problem,
    check_memory,
    forward_problem,
    gradient_names,
    out_sequence,
    spec_of,
)


def backward(
    norm: Norm,
    x: Any,
    w: Any,
    dy: Any,
    mean: Any,
    rstd: Any,
    *,
    has_bias: bool,
    weight_offset: float,
    dresidual_out: Any,
    output_mask: Sequence[bool] | None,
    out: Any,
    accumulate: bool,
) -> tuple[Any, ...]:
    """Both backward passes."""
    names = gradient_names(has_bias)
    labels = {name: f"out[{position}] ({name})" for position, name in enumerate(names)}
    given = dict(zip(names, out_sequence(out, names), strict=True))
    inputs = {"x": x, "w": w, "dy": dy, "mean": mean, "rstd": rstd, "dresidual_out": dresidual_out}
    frame, arrays = receive(inputs | {labels[name]: array for name, array in given.items()}, labels.values())
    outputs = {name: arrays.pop(labels[name]) for name in names}
    problem = _remembered(
        backward_problem,
        norm,
        tuple([(name, spec_of(array)) for name, array in arrays.items()]),
        tuple([spec_of(outputs.get(name)) for name in ("dx", "dw", "db")]),
        has_bias=has_bias,
        weight_offset=weight_offset,
        output_mask=output_mask,
        accumulate=accumulate,
    )
    check_memory(arrays, outputs, labels)
    wanted = {"dx": problem.want_dx, "dw": problem.want_dw, "db": problem.want_db}
    shapes = {"dx": (arrays["x"].shape, problem.x_dtype)}
    for name in ("dw", "db"):
        shapes[name] = ((problem.columns,), problem.parameter_dtype)
    with frame.device_scope():
        new = {name: frame.empty(*shapes[name]) for name in names if wanted[name] and outputs[name] is None}
        with frame.temporaries():
            work = _targets(frame, problem, wanted, shapes, outputs, new)
            operands = BackwardOperands(**_inputs(frame, problem, arrays, "x w dy mean rstd"), **work)
            _backend(frame).backward(problem, operands)
            return _results(frame, names, work, outputs, given)


def forward(
    norm: Norm,
    x: Any,
    w: Any,
    b: Any,
    *,
    eps: float,
    weight_offset: float,
    residual: Any,
    out: Any,
) -> tuple[Any, ...]:
    """Both forward passes."""
    names = ("y", "mean", "rstd") if norm == "layernorm" else ("y", "rstd")
    labels = {name: f"out[{position}] ({name})" for position, name in enumerate(names)}
    given = dict(zip(names, out_sequence(out, names), strict=True))
    inputs = {"x": x, "w": w, "b": b, "residual": residual}
    frame, arrays = receive(inputs | {labels[name]: array for name, array in given.items()}, labels.values())
    outputs = {name: arrays.pop(labels[name]) for name in names}
    problem = _remembered(
        forward_problem,
        norm,
        tuple([(name, spec_of(array)) for name, array in arrays.items()]),
        tuple([spec_of(outputs[name]) for name in names]),
        eps=eps,
        weight_offset=weight_offset,
    )
    check_memory(arrays, outputs, labels)
    x_shape = arrays["x"].shape
    shapes = {"y": (x_shape, problem.x_dtype)}
    for name in ("mean", "rstd"):
        shapes[name] = (x_shape[:-1], problem.compute_dtype)
    with frame.device_scope():
        new = {name: frame.empty(*shapes[name]) for name in names if outputs[name] is None}
        with frame.temporaries():
            wanted = {"y": True, "mean": norm == "layernorm", "rstd": True}
            work = _targets(frame, problem, wanted, shapes, outputs, new)
            operands = ForwardOperands(**_inputs(frame, problem, arrays, "x w b"), **work)
            _backend(frame).forward(problem, operands)
            return _results(frame, names, work, outputs, given)


def _remembered(validate: Callable[..., NormProblem], *arguments: Any, **options: Any) -> NormProblem:
    """The validated problem; the same call again finds it without validating again."""
    if isinstance(mask := options.get("output_mask"), (tuple, list)):
        options["output_mask"] = tuple(mask)
        options["mask_types"] = tuple(map(type, mask))  # 1 equals True, but is none
    try:
        return _validated(validate, *arguments, **options)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
    options.pop("mask_types", None)
    return validate(arguments[0], dict(arguments[1]), *arguments[2:], **options)


@functools.lru_cache(maxsize=4096, typed=True)
def _validated(
    validate: Callable[..., NormProblem], norm: Norm, arrays: Any, out: Any, *, mask_types: Any = None, **options: Any
) -> NormProblem:
    return validate(norm, dict(arrays), out, **options)


def _backend(frame: Frame) -> Any:
    if frame.device is None:
        from . import numpy_backend

        return numpy_backend
    from .cuda import launch

    return launch


def _inputs(frame: Frame, problem: NormProblem, arrays: dict[str, Array | None], names: str) -> dict[str, Any]:
    return {name: frame.contiguous(arrays[name]) if name in problem.copies else arrays[name] for name in names.split()}


def _targets(
    frame: Frame,
    problem: NormProblem,
    wanted: dict[str, bool],
    shapes: dict[str, Any],
    outputs: dict[str, Array | None],
    new: dict[str, Array],
) -> dict[str, Array | None]:
    """What the backend writes into: a new array, the caller's, or a stand-in where it cannot work in the caller's."""
    targets: dict[str, Array | None] = {}
    for name, is_wanted in wanted.items():
        if not is_wanted:
            targets[name] = None
        elif name in new:
            targets[name] = new[name]
        else:
            targets[name] = frame.empty(*shapes[name]) if name in problem.copies else outputs[name]
    return targets


def _results(
    frame: Frame,
    names: tuple[str, ...],
    work: dict[str, Array | None],
    outputs: dict[str, Array | None],
    given: dict[str, Any],
) -> tuple[Any, ...]:
    results = []
    for name in names:
        target = outputs[name]
        if target is None:
            results.append(frame.give_back(work[name]))
            continue
        if work[name] is not target:
            target[...] = work[name].reshape(target.shape)  # type: ignore[union-attr]
        # The exchange makes the caller's stream wait for the work; the object returned is the one given.
        frame.give_back(target)
        results.append(given[name])
    return tuple(results)
