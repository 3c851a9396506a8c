"""The way of every call: arrays in, a plan, arrays out.

A call's signature is all that it brings but addresses: the layout of each array (shape, strides, dtype, device,
alignment) and the options. The first call with a signature is validated and becomes a `Plan`; later ones find it, and
only ask what depends on addresses and on the moment: overlaps, the current device, the current stream.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import Handed, Layout, MadeByTorch, WayBack, home_of, mixed_devices, tell_of_writing, way_in
from .dlpack import contiguous_strides
from .problem import (
    START_BYTES_COUNT,
    VECTOR_BYTES,
    ArraySpec,
    BackwardOperands,
    ForwardOperands,
    Norm,
    NormProblem,
    backward_problem,
    check_placement,
    forward_problem,
    gradient_names,
    out_sequence,
    overlap,
    possible_overlaps,
)


@dataclass(frozen=True, eq=False)
class Operation:
    """One of the public functions: what its arrays are called, and how a call becomes a problem.

    A call's arrays come in the order of `inputs` and then `outputs`, with None for one that is not there.
    """

    norm: Norm
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]  # all that it may return
    options: tuple[str, ...]
    validate: Callable[..., NormProblem]
    returned: Callable[[Any], tuple[str, ...]]  # the outputs that a call returns, by its first option
    labels: tuple[str, ...] = field(init=False)  # what error messages call the arrays

    def __post_init__(self) -> None:
        outputs = (f"out[{position}] ({name})" for position, name in enumerate(self.outputs))
        object.__setattr__(self, "labels", (*self.inputs, *outputs))


def backward_of(norm: Norm) -> Operation:
    """`mean` is None for RMSNorm."""
    return Operation(
        norm,
        inputs=("x", "w", "dy", "mean", "rstd", "dresidual_out"),
        outputs=("dx", "dw", "db"),
        options=("has_bias", "weight_offset", "output_mask", "accumulate"),
        validate=backward_problem,
        returned=gradient_names,
    )


def forward_of(norm: Norm) -> Operation:
    outputs = ("y", "mean", "rstd") if norm == "layernorm" else ("y", "rstd")
    return Operation(
        norm,
        inputs=("x", "w", "b", "residual"),
        outputs=outputs,
        options=("eps", "weight_offset"),
        validate=forward_problem,
        returned=lambda eps: outputs,
    )


def run(operation: Operation, inputs: tuple[Any, ...], out: Any, *options: Any) -> tuple[Any, ...]:
    """One call of a public function."""
    if out is None:
        targets: tuple[Any, ...] = ()
    elif type(out) is tuple and 0 < len(out) <= len(operation.outputs):
        targets = out  # has it as many entries as these options want? The plan asks
    else:
        targets = out_sequence(out, operation.returned(options[0]))
    arrays = inputs + targets
    look = way_in(type(inputs[0]))  # type: ignore[arg-type]  # types are hashable
    layouts, operands, views, way_back = look(arrays, operation.labels, len(inputs))
    try:
        plan = plan_of(operation, layouts, *options)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        plan = None
    if plan is None:  # an option that no signature can hold, such as an array: validation has the word for it
        plan = plan_of.__wrapped__(operation, layouts, *options)
    if targets and operands != plan.apart:
        plan.check_overlaps(operands)
    scope = plan.home.scope(plan.device, way_back)
    try:
        if scope is None:
            return plan.run(operands, views, targets, way_back)
        with scope:
            return plan.run(operands, views, targets, way_back)
    finally:
        if targets and way_back is not None:
            tell_of_writing(targets)


@functools.lru_cache(maxsize=2048, typed=True)  # some 12 kB a plan; typed: 1 equals True, but is none
def plan_of(operation: Operation, layouts: tuple[Layout | None, ...], *options: Any) -> Plan:
    """The plan for a signature, once it has been found valid."""
    specs = [None if layout is None else _spec_of(*layout) for layout in layouts]
    inputs, targets = specs[: len(operation.inputs)], specs[len(operation.inputs) :]
    returned = operation.returned(options[0])
    if targets:
        out_sequence(targets, returned)
    device = specs[0].device if specs[0] is not None else None
    for spec, label in zip(specs, operation.labels, strict=False):
        if spec is not None and spec.device != device:
            raise mixed_devices(label, spec.device, device)
    missing = (None,) * (len(operation.labels) - len(specs))
    problem = operation.validate(
        operation.norm,
        dict(zip(operation.inputs, inputs, strict=True)),
        (*targets, *missing),
        **dict(zip(operation.options, options, strict=True)),
    )
    check_placement(operation.labels, specs, len(inputs))
    # Plans take memory and time: as few of them as there are launches.
    shared = tuple(map(_as_far_as_it_counts, operation.inputs + operation.outputs, layouts))
    if shared != layouts:
        return plan_of(operation, shared, *options)
    return Plan(operation, problem, specs, len(returned))


def _spec_of(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: Any, *others: Any) -> ArraySpec:
    if strides is None:
        strides = contiguous_strides(shape, dtype.itemsize)
    if dtype.metadata and (plain := np.dtype(dtype.type)) == dtype:
        dtype = plain  # equal dtypes share a plan, and so its results' dtypes
    return ArraySpec(tuple(shape), strides, dtype, *others)  # PyTorch's tuples print another way


def _as_far_as_it_counts(name: str, layout: Layout | None) -> Layout | None:
    """That of any array which starts where kernels do not tell it from this one."""
    if layout is None or name in START_BYTES_COUNT:
        return layout
    return *layout[:4], *(offset % VECTOR_BYTES for offset in layout[4:5]), *layout[5:]


def _allocated_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """What an array takes of CuPy's pool: a multiple of 512."""
    size: int = math.prod(shape) * dtype.itemsize
    return -(-size // 512) * 512


class Plan:
    """Everything about a call that depends neither on addresses nor on the moment. It refers to no array."""

    def __init__(
        self, operation: Operation, problem: NormProblem, specs: Sequence[ArraySpec | None], returned: int
    ) -> None:
        x = specs[0]
        assert x is not None
        self.problem, self.device = problem, x.device
        self.home: Any = home_of(x.device)
        self.apart: Any = None  # operands among which no output overlaps anything: the same buffers often come again
        self._operation, self._specs = operation, specs
        first_output = len(operation.inputs)
        self._overlaps = possible_overlaps(specs, first_output)
        self._no_targets = [None] * returned
        self._no_operands = [self.home.absent] * (len(operation.labels) - len(specs))
        # For each result its position among the operands, its position among the results, its shape and dtype.
        results = problem.results(x.shape)
        places = {
            name: (first_output + position, position, *results[name])
            for position, name in enumerate(operation.outputs)
            if name in results
        }
        self._new = [place for place in places.values() if place[0] >= len(specs) or specs[place[0]] is None]
        # dw and db, or mean and rstd, which are small, of one shape and dtype, share an allocation.
        paired = [position for _, position, *_ in self._new[-2:]] == [1, 2]
        self._alone, self._pair = (self._new[:-2], self._new[-2:]) if paired else (self._new, [])
        self._apart = _allocated_bytes(*self._new[-1][2:]) if paired else 0
        self._stand_ins = [place for name, place in places.items() if name in problem.copies]
        self._copied = [position for position, name in enumerate(operation.inputs) if name in problem.copies]
        self._copies = bool(problem.copies)
        self._work: Callable[..., None] = self._first_work

    def check_overlaps(self, operands: list[Any]) -> None:
        """Raise ValueError for an output that shares memory with an input or with another output."""
        addresses = self.home.addresses(operands)
        for output, other, least, most in self._overlaps:
            if least < addresses[output] - addresses[other] < most:
                one, another = self._specs[output], self._specs[other]
                assert one is not None
                assert another is not None
                if overlap(one, addresses[output], another, addresses[other]):
                    labels = self._operation.labels
                    raise ValueError(
                        f"{labels[output]}: overlaps {labels[other]} in memory; memory of its own is needed"
                    )
        self.apart = None if self.device is None else operands.copy()

    def run(
        self,
        operands: list[Any],
        views: Any,
        targets: tuple[Any, ...],
        way_back: WayBack | None,
    ) -> tuple[Any, ...]:
        """Make what is missing, do the work, hand back the results. The plan's device is the current one."""
        home, device = self.home, self.device
        results = [*targets] or self._no_targets.copy()
        operands += self._no_operands
        if isinstance(way_back, MadeByTorch):
            for operand, result, shape, dtype in self._new:
                results[result], operands[operand] = way_back.make(shape, dtype, device)
        else:
            for operand, result, shape, dtype in self._alone:
                results[result] = array = home.empty(shape, dtype)
                operands[operand] = home.operand(array)
            if self._pair:
                (operand, result, shape, dtype), (other_operand, other_result, *_) = self._pair
                results[result], results[other_result] = array, other = home.empty_pair(shape, dtype, self._apart)
                operands[operand], operands[other_operand] = home.operand(array), home.operand(other)
        try:
            if self._copies:
                self._work_on_copies(operands, views)
            else:
                self._work(*operands)
        finally:
            if device is not None and isinstance(way_back, Handed):
                home.hold(way_back.held)
        if isinstance(way_back, Handed):
            self._hand_over(results, views, way_back)
        return tuple(results)

    def _work_on_copies(self, operands: list[Any], views: Any) -> None:
        """Work on stand-ins for the operands whose rows do not lie at one stride."""
        home, copies, stand_ins = self.home, [], []
        with home.temporaries():
            for operand in self._copied:
                copies.append(home.contiguous(home.array(views[operand], self.device)))
                operands[operand] = home.operand(copies[-1])
            for operand, _, shape, dtype in self._stand_ins:
                stand_ins.append(home.empty(shape, dtype))
                operands[operand] = home.operand(stand_ins[-1])
            self._work(*operands)
            for (operand, *_), stand_in in zip(self._stand_ins, stand_ins, strict=True):
                target = home.array(views[operand], self.device)
                target[...] = stand_in.reshape(target.shape)

    def _hand_over(self, results: list[Any], views: Sequence[Any], way_back: Handed) -> None:
        """The results in the caller's framework, whose current stream then waits for the work on CuPy's."""
        for _, result, *_ in self._new:
            results[result] = way_back.give(results[result])
        if self.device is not None:
            for view in views[len(self._operation.inputs) :]:
                if view is not None:
                    way_back.give(self.home.array(view, self.device))

    def _first_work(self, *operands: Any) -> None:
        """Finds the backend, where kernels are compiled: not before a call has passed all checks."""
        self._work = self._host_work() if self.device is None else self._device_work()
        self._work(*operands)

    def _host_work(self) -> Callable[..., None]:
        from . import numpy_backend

        problem, names = self.problem, self._operation.inputs + self._operation.outputs
        kind = BackwardOperands if problem.direction == "backward" else ForwardOperands

        def work(*operands: Any) -> None:
            backend: Any = getattr(numpy_backend, problem.direction)
            backend(problem, kind(**dict(zip(names, operands, strict=True))))

        return work

    def _device_work(self) -> Callable[..., None]:
        from .cuda import launch

        specs = zip(self._operation.inputs + self._operation.outputs, self._specs, strict=False)
        placed = {name: spec for name, spec in specs if spec and name not in self.problem.copies}

        def offsets(*names: str) -> list[int]:  # from multiples of START_BYTES; new arrays and copies have none
            return [placed[name].offset if name in placed else 0 for name in names]

        if self.problem.direction == "backward":
            return launch.Backward(self.problem, offsets("x", "dy", "dx"), offsets("w"), offsets("dw", "db"))
        return launch.Forward(self.problem, offsets("x", "y"), offsets("w", "b"))
