"""The CUDA path: sources in kernels_cu/, compiled at first use by NVRTC through cupy.RawModule."""
