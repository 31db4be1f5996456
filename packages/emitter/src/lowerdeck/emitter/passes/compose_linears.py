"""Pass: fuse products with a transposed weight into linear layers.

Core ATen has no linear layer: a decomposed program transposes the weight and multiplies. The
runtime then copies the weight at each call and multiplies in a naive loop. Its ``linear`` kernel
does neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowerdeck.emitter.ir.graph import Block, Call, Method, blocks_of
from lowerdeck.emitter.ir.kernels import KernelTable
from lowerdeck.emitter.ir.values import ScalarValue, TensorValue
from lowerdeck.torch_base import OpOverload

_ATEN = torch.ops.aten
_NEEDED = "aten::linear.out"
_TRANSPOSED = {"t", "transpose", "permute"}
_Sources = Mapping[Any, TensorValue]


def compose_linears(method: Method, table: KernelTable) -> None:
    """Replace ``addmm`` and ``mm`` with a transposed matrix by the kernel of a linear layer.

    Transposes without other readers become dead.

    Args:
        method: The method, changed in place.

    Requires:
        Run-time numbers are computed by kernels. Small constants are not folded yet: a folded
        transpose of a weight would no longer be recognized.
    """
    if _NEEDED in table.names:
        _in_block(method.block, {})


def _in_block(block: Block, around: _Sources) -> None:
    sources = dict(around)
    for operation in block.body:
        for inner in blocks_of(operation):
            _in_block(inner, sources)
        if not isinstance(operation, Call) or not isinstance(operation.target, OpOverload):
            continue
        if operation.view_name in _TRANSPOSED:
            source = _transposed(operation)
            if source is not None:
                sources[operation.outs[0]] = source
        elif operation.target is _ATEN.mm.default:
            left, right = operation.args
            _compose(operation, sources, left, right, None)
        elif operation.target is _ATEN.addmm.default:
            bias, left, right, beta, alpha = operation.args
            if _is_row(bias, right) and (beta, alpha) == (1, 1):
                _compose(operation, sources, left, right, bias)


def _transposed(call: Call) -> TensorValue | None:
    """Return the matrix that a call transposes, None for other calls."""
    source, *dims = call.args
    if not isinstance(source, TensorValue) or source.rank != 2:
        return None
    if not source.dtype.is_floating_point:
        return None
    if any(isinstance(dim, ScalarValue) for dim in dims):
        return None
    return source if call.order == [1, 0] else None


def _is_row(bias: Any, right: Any) -> bool:
    """Return whether a bias has one number per column of the result, as the kernel requires."""
    return (
        isinstance(bias, TensorValue)
        and bias.rank == 1
        and not bias.dynamic
        and isinstance(right, TensorValue)
        and right.sizes[1:] == bias.sizes
        and bias.dtype == right.dtype
    )


def _compose(call: Call, sources: _Sources, left: Any, right: Any, bias: Any) -> None:
    weight = sources.get(right)
    if weight is not None and isinstance(left, TensorValue) and left.dtype == weight.dtype:
        call.target, call.args = _ATEN.linear.default, [left, weight, bias]
