"""Torch and JAX behind one face, for the tests of the exchange through DLPack."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the GPU's memory at its start


class Torch:
    def __init__(self, device: str) -> None:
        self.torch, self.device = pytest.importorskip("torch"), device
        if device == "cuda" and not self.torch.cuda.is_available():
            pytest.skip("torch is built without CUDA")
        self.kind = self.torch.Tensor

    def array(self, values: np.ndarray[Any, Any]) -> Any:
        if values.dtype == ml_dtypes.bfloat16:
            tensor = self.torch.from_numpy(values.view(np.int16).copy()).view(self.torch.bfloat16)
        else:
            tensor = self.torch.from_numpy(values.copy())
        return tensor.to(self.device)

    def values(self, tensor: Any) -> np.ndarray[Any, Any]:
        assert tensor.device.type == self.device
        if tensor.dtype == self.torch.bfloat16:
            return tensor.cpu().view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.cpu().numpy()

    def pointer(self, tensor: Any) -> int:
        return tensor.data_ptr()

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


class Jax:
    def __init__(self, device: str) -> None:
        self.jax = pytest.importorskip("jax")
        self.jax.config.update("jax_enable_x64", True)  # or float64 arrays become float32
        self.platform = "gpu" if device == "cuda" else "cpu"
        try:
            self.device = self.jax.devices(self.platform)[0]
        except RuntimeError as error:
            pytest.skip(f"JAX has no {self.platform}: {error}")
        self.kind = self.jax.Array

    def array(self, values: np.ndarray[Any, Any]) -> Any:
        return self.jax.device_put(values.copy(), self.device).block_until_ready()

    def values(self, array: Any) -> np.ndarray[Any, Any]:
        assert array.device.platform == self.platform
        return np.asarray(array)

    def pointer(self, array: Any) -> int:
        return array.unsafe_buffer_pointer()

    def synchronize(self) -> None:
        if self.platform == "gpu":
            self.jax.effects_barrier()


FRAMEWORKS = {"torch": Torch, "jax": Jax}
