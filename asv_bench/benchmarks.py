"""Bandwidths that airspeed-velocity records across commits: GB/s of the bytes that the work needs.

`cupynorm.bench` does the timing. Without a CUDA device the CUDA benchmarks are reported as not available.
"""

from __future__ import annotations

import numpy as np

from cupynorm import bench


class CudaBackward:
    """The backward passes, bfloat16 x with float32 w."""

    params = (["rmsnorm_backward", "layernorm_backward"], ["32768x1024", "32768x4096", "8192x16384"])
    param_names = ("op", "shape")
    unit = "GB/s"
    timeout = 300

    def setup(self, op: str, shape: str) -> None:
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()
        except Exception as error:  # no CuPy, no driver, no device: each raises its own kind
            raise NotImplementedError(f"no CUDA: {error}") from error

    def track_gbps(self, op: str, shape: str) -> float:
        import cupy

        return round(bench.measure(op, *map(int, shape.split("x")), "bfloat16", xp=cupy).gbps, 1)

    track_gbps.pretty_name = "Backward on CUDA, bfloat16"


class NumpyBackward:
    """The backward passes on the CPU, float32."""

    params = (["rmsnorm_backward", "layernorm_backward"], ["4096x1024", "4096x4096", "1024x16384"])
    param_names = ("op", "shape")
    unit = "GB/s"
    timeout = 300

    def track_gbps(self, op: str, shape: str) -> float:
        return round(bench.measure(op, *map(int, shape.split("x")), "float32", xp=np, repeats=5).gbps, 2)

    track_gbps.pretty_name = "Backward on NumPy arrays, float32"
