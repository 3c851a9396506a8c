"""A minimal array framework that speaks DLPack and nothing else, over NumPy's memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

HOST = (1, 0)


class Foreign:
    """An array of this framework. `versioned=False` speaks the protocol from before max_version and copies."""

    def __init__(self, array: Any, device: tuple[int, int] = HOST, versioned: bool = True) -> None:
        self.array, self.device, self.versioned = array, device, versioned

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def __array_namespace__(self) -> Any:
        return sys.modules[__name__]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and options:
            raise TypeError(f"__dlpack__() got unexpected arguments {sorted(options)}")
        return self.array.__dlpack__(**options)


def from_dlpack(array: Any) -> Foreign:
    return Foreign(np.from_dlpack(array))


class Broken(Foreign):
    """A producer that refuses, as autograd frameworks do for tensors under differentiation."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not for export")


class Homeless(Foreign):
    """Of a framework that cannot take arrays back."""

    def __array_namespace__(self) -> Any:
        return object()
