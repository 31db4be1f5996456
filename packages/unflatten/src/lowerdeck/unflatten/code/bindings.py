"""Python functions that run an ATen operator faster than its ``OpOverload`` does.

Calling ``torch.ops.aten.add.Tensor`` costs about a microsecond more than ``torch.add``, because
its arguments go through a generic schema instead of a generated parser. Where both are known to
run the same operator for the arguments at hand, generated code calls the function. A test
compares every entry with its operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowerdeck.unflatten._torch_private import NATIVE_FUNCTIONS
from lowerdeck.unflatten.code.batch_norm import BATCH_NORM, batch_norm
from lowerdeck.unflatten.trace.dtype_check import CHECK, warn_of_other_dtype

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
        _aten("linear"): NATIVE_FUNCTIONS.linear,
        _aten("gelu"): NATIVE_FUNCTIONS.gelu,
        _aten("silu"): NATIVE_FUNCTIONS.silu,
        _aten("scaled_dot_product_attention"): NATIVE_FUNCTIONS.scaled_dot_product_attention,
    }
    for name in _POINTWISE_UNARY.split():
        table[_aten(name)] = getattr(torch, name)
    for name in (f"{name}.Tensor" for name in ("add", "sub")):
        table[_aten(name)] = getattr(torch, name.partition(".")[0])
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

A call of a method works on the proxies of a symbolic trace too, which ``Tensor.view(x)`` does not.
"""

KEYWORDS = frozenset({"alpha", "rounding_mode", "dtype", "approximate", "memory_format"})
"""Keywords that these functions spell as the operators' schemas do."""


def callable_for(target: Any, keywords: Any) -> Any:
    """Return what generated code calls to run ``target`` with these keyword names."""
    if target is CHECK:
        return warn_of_other_dtype
    if target is BATCH_NORM and not keywords:
        return batch_norm
    if keywords and not KEYWORDS.issuperset(keywords):
        return target
    return FAST.get(target, target)
