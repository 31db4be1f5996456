"""Kernels that the emitter inserts, and the kernels of arithmetic on numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.emitter.ir.graph import Kernel

COPY = Kernel("aten::clone", "out")
CLONE_DIM_ORDER = Kernel("dim_order_ops::_clone_dim_order", "out")
TO_DIM_ORDER_COPY = Kernel("dim_order_ops::_to_dim_order_copy", "out")
RESHAPE_IN_PLACE = Kernel("executorch_prim::et_view", "default")
COPY_ROW = Kernel("executorch_prim::et_copy_index", "tensor")
SYM_SIZE = Kernel("aten::sym_size", "int")
ADD = Kernel("executorch_prim::add", "Scalar")
SUBTRACT = Kernel("executorch_prim::sub", "Scalar")
EQUAL = Kernel("executorch_prim::eq", "Scalar")


def _prim(name: str, overload: str = "Scalar") -> Kernel:
    return Kernel(f"executorch_prim::{name}", overload)


SCALAR_KERNELS: dict[Callable[..., Any], Kernel] = {
    operator.add: ADD,
    operator.sub: SUBTRACT,
    operator.mul: _prim("mul"),
    operator.floordiv: _prim("floordiv"),
    operator.truediv: _prim("truediv"),
    operator.mod: _prim("mod"),
    operator.neg: _prim("neg"),
    operator.eq: EQUAL,
    operator.lt: _prim("lt"),
    operator.le: _prim("le"),
    operator.gt: _prim("gt"),
    operator.ge: _prim("ge"),
    torch.sym_max: _prim("sym_max"),
    torch.sym_min: _prim("sym_min"),
    torch.sym_not: _prim("sym_not"),
    torch.sym_float: _prim("sym_float"),
    torch.sym_int: _prim("sym_int"),
    torch.sym_ite: _prim("sym_ite"),
    math.ceil: _prim("ceil"),
    math.trunc: _prim("trunc"),
    round: _prim("round"),
}
