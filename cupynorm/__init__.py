"""RMSNorm and LayerNorm, forward and backward, on CuPy, NumPy and DLPack arrays.

Importing this package neither imports CuPy nor touches a GPU.
"""

from .layernorm import layernorm_backward, layernorm_forward
from .rmsnorm import rmsnorm_backward, rmsnorm_forward

__version__ = "0.1.0"
__all__ = ["layernorm_backward", "layernorm_forward", "rmsnorm_backward", "rmsnorm_forward"]
