"""Python functions that run an ATen operator faster than its ``OpOverload`` does.

A call of ``torch.ops.aten.add.Tensor`` costs about a microsecond more than ``torch.add``, because
its arguments go through a generic schema instead of a generated parser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import NATIVE_FUNCTIONS

_POINTWISE_UNARY = (
    "abs acos asin atan ceil clone cos cosh erf exp expm1 floor isfinite isinf isnan log log10 "
    "log1p log2 logical_not neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt tan tanh "
    "square"
)
_POINTWISE_BINARY = "mul div atan2 maximum minimum logical_and logical_or"
_COMPARISON = "eq ne lt le gt ge"

_SAME_SIGNATURE = (
    "matmul mm bmm addmm layer_norm group_norm embedding dropout batch_norm transpose.int permute "
    "t reshape unsqueeze squeeze.dim cat stack flatten.using_ints select.int narrow chunk "
    "split_with_sizes where.self softmax.int log_softmax.int mean.dim sum.dim_IntList "
    "index_select gather cumsum conv1d conv2d conv3d rms_norm repeat_interleave.self_int "
    "masked_fill.Scalar masked_fill.Tensor tril triu"
)


def _aten(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _table() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {
        _aten(name): getattr(NATIVE_FUNCTIONS, name)
        for name in ("linear", "gelu", "silu", "scaled_dot_product_attention")
    }
    for name in _POINTWISE_UNARY.split():
        table[_aten(name)] = getattr(torch, name)
    for name in ("add", "sub"):
        table[_aten(f"{name}.Tensor")] = getattr(torch, name)
    for name in _POINTWISE_BINARY.split():
        overload = "Tensor" if name in {"mul", "div"} else "default"
        table[_aten(f"{name}.{overload}")] = getattr(torch, name)
    for name in _COMPARISON.split():
        table[_aten(f"{name}.Tensor")] = getattr(torch, name)
        table[_aten(f"{name}.Scalar")] = getattr(torch, name)
    for name in _SAME_SIGNATURE.split():
        table[_aten(name)] = getattr(torch, name.partition(".")[0])
    return table


FAST: dict[Any, Callable[..., Any]] = _table()
"""From operator to the function that runs it for positional arguments."""

METHODS: dict[Any, str] = {
    **{_aten(name): name for name in ("view", "expand")},
    _aten("sym_size.int"): "size",
}
"""From operator to the method of its first argument that runs it.

A call of a method also works on proxies of a symbolic trace, ``Tensor.view(x)`` does not.
"""

KEYWORDS = frozenset({"alpha", "rounding_mode", "dtype", "approximate", "memory_format"})
"""Keywords with the same name in these functions and in the operators' schemas."""

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def batch_norm(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    *options: Any,
) -> Any:
    """Run the batch norm of decomposed programs on copies of the running statistics.

    Its gradient needs the statistics that it read, and the program overwrites them right after.
    """
    return _BATCH_NORM(value, weight, bias, running_mean.clone(), running_var.clone(), *options)


def callable_for(target: Any, keywords: Any) -> Any:
    """Return the function that generated code calls for ``target`` with these keywords."""
    if target is _BATCH_NORM and not keywords:
        return batch_norm
    if keywords and not KEYWORDS.issuperset(keywords):
        return target
    return FAST.get(target, target)
