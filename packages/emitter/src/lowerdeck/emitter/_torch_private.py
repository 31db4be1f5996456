"""Everything that this package uses of torch without a promise, each with a test of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate
from torch.utils._pytree import TreeSpec, treespec_dumps
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

__all__ = [
    "call_delegate_operator",
    "dump_tree_spec",
    "is_delegate_call",
    "operator_schemas",
    "reference_decompositions",
    "spec_kind",
    "upper_bound",
]


def operator_schemas(name: str) -> Sequence[torch.FunctionSchema]:
    """Return the schemas of all overloads of an operator such as ``"aten::add"``."""
    return torch._C._jit_get_schemas_for_operator(name)


def call_delegate_operator() -> Any:
    """Return torch's higher-order operator that calls a lowered module."""
    return executorch_call_delegate


def is_delegate_call(target: object) -> bool:
    """Return whether ``target`` is the operator that calls a lowered module."""
    return target is executorch_call_delegate


def upper_bound(size: torch.SymInt) -> int | None:
    """Return the largest value that a symbolic size may take, or None when there is no bound."""
    node = size.node
    if node.expr.is_number:
        return int(node.expr)
    upper = bound_sympy(node.expr, node.shape_env.var_to_range).upper
    if upper in (int_oo, -int_oo) or not upper.is_finite:
        return None
    bound = int(upper)
    # torch writes "no bound" also as a number next to the largest 64-bit integer.
    return None if bound >= 2**62 else bound


def dump_tree_spec(spec: TreeSpec) -> str:
    """Return a pytree spec as JSON text."""
    return treespec_dumps(spec)


def spec_kind(spec: TreeSpec) -> type | None:
    """Return the container class that a pytree spec stands for."""
    kind: type | None = spec.type
    return kind


def reference_decompositions(
    targets: Sequence[torch._ops.OpOverload],
) -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """Return torch's own decompositions of operators, from its reference implementations."""
    found: dict[torch._ops.OperatorBase, Callable[..., Any]] = dict(get_decompositions(targets))
    return found
