"""Everything that this package uses of torch without a promise, each with a test of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from lowerdeck.torch_base import OperatorBase, OpOverload, OpOverloadPacket

__all__ = [
    "current_result",
    "dimension_names",
    "is_known",
    "lower_bound",
    "number_functions",
    "operator_schemas",
    "overload_packet",
    "reference_decompositions",
    "untraced",
    "upper_bound",
]


def operator_schemas(name: str) -> Sequence[torch.FunctionSchema]:
    """Return the schemas of all overloads of an operator such as ``"aten::add"``."""
    return torch._C._jit_get_schemas_for_operator(name)


def overload_packet(operator: OpOverload) -> OpOverloadPacket:
    """Return what holds all overloads of the same operator, by name."""
    return operator._overloadpacket


def number_functions() -> dict[Callable[..., Any], OpOverload]:
    """Return torch's functions of one symbolic number, each with the operator on tensors."""
    aten = torch.ops.aten
    kernels: dict[Callable[..., Any], OpOverload] = {torch.sym_sqrt: aten.sqrt.default}
    names = ("acos", "asin", "atan", "cos", "cosh", "log2", "sin", "sinh", "sqrt", "tan", "tanh")
    for name in names:
        function = getattr(torch, f"_sym_{name}", None)
        if function is not None:
            kernels[function] = getattr(aten, name).default
    return kernels


def is_known(truth: Any) -> bool:
    """Return whether ``truth`` is true whatever the sizes are; never asks for a guard."""
    if isinstance(truth, bool):
        return truth
    # Who made a symbolic number has loaded this module; importing it here would load sympy, which
    # takes 0.3 s, for everybody.
    return bool(torch.fx.experimental.symbolic_shapes.statically_known_true(truth))


def upper_bound(size: torch.SymInt) -> int | None:
    """Return the largest value that a symbolic size may take, or None when there is no bound."""
    node = size.node
    if node.expr.is_number:
        return int(node.expr)
    # Asked of the size's own environment, because importing sympy for it costs 0.3 s.
    upper = node.shape_env.bound_sympy(node.expr).upper
    # torch writes "no bound" as infinity, or as a number next to the largest 64-bit integer.
    return None if upper >= 2**62 else int(upper)


def lower_bound(size: torch.SymInt, ranges: Mapping[Any, Any]) -> int:
    """Return the smallest value that a symbolic size may take, at least 0.

    Args:
        size: A size of a program.
        ranges: The range constraints of the program: while torch traces, its own environment
            takes every size that varies for at least 2.
    """
    expr = size.node.expr
    if expr.is_number:
        return int(expr)
    known = {**size.node.shape_env.var_to_range, **ranges}
    # Who made a symbolic number has loaded this module, as in ``is_known``.
    shapes: Any = torch.fx.experimental.symbolic_shapes
    lower = shapes.bound_sympy(expr, known).lower
    return max(0, int(lower)) if lower > -(2**62) else 0


def dimension_names(size: torch.SymInt) -> dict[str, str]:
    """Return the names that the user gave to dynamic dimensions, by the symbol's text.

    Args:
        size: Any size of the program.
    """
    environment = size.node.shape_env
    given = environment.source_name_to_debug_name
    return {
        str(symbol): given[name]
        for name, symbol in environment.source_to_var.items()
        if name in given
    }


def untraced() -> AbstractContextManager[Any]:
    """Return a context in which arithmetic on sizes is not recorded.

    Sizes of an earlier trace mean nothing in this one: to compute with them would be an error.
    """
    context: AbstractContextManager[Any] = disable_proxy_modes_tracing()
    return context


def current_result() -> Any:
    """Return what the node that is traced again gave before, as fake tensors; None if unknown."""
    return fx_traceback.get_current_meta().get("val")


def reference_decompositions(
    targets: Sequence[OpOverload],
) -> dict[OperatorBase, Callable[..., Any]]:
    """Return torch's own decompositions of operators, from its reference implementations."""
    found: dict[OperatorBase, Callable[..., Any]] = dict(get_decompositions(targets))
    return found
