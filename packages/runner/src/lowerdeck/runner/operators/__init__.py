"""Operators of instructions: torch kernels, scalar operators, views."""

from lowerdeck.runner.operators.kernels import (
    COPY_INDEX,
    VIEW,
    Kernel,
    ScalarKernel,
    TorchKernel,
    ViewKernel,
    accepts,
    converter,
    find_kernel,
)
from lowerdeck.runner.operators.prim_ops import in_range
from lowerdeck.runner.operators.view_ops import check_shape, resize

__all__ = [
    "COPY_INDEX",
    "VIEW",
    "Kernel",
    "ScalarKernel",
    "TorchKernel",
    "ViewKernel",
    "accepts",
    "check_shape",
    "converter",
    "find_kernel",
    "in_range",
    "resize",
]
