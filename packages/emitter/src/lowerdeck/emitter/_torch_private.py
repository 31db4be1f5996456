"""Everything that this package uses of torch without a promise, each with a test of its own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.export import ExportedProgram
from torch.export.exported_program import _decompose_and_get_gm_with_new_signature_constants
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._thunk import Thunk

from lowerdeck.emitter.traced import TracedProgram
from lowerdeck.torch_base import (
    OperatorBase,
    OpOverload,
    OpOverloadPacket,
    executorch_call_delegate,
    unset_fake_temporarily,
)

__all__ = [
    "current_result",
    "dimension_names",
    "is_known",
    "lower_bound",
    "number_functions",
    "operator_schemas",
    "overload_packet",
    "reference_decompositions",
    "retrace",
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


# torch's tracing changes what operators do for the whole process: two at once fail.
_TRACING = RLock()


def retrace(
    exported: ExportedProgram,
    rules: Mapping[OperatorBase, Callable[..., Any]],
    composites: Mapping[OperatorBase, Callable[..., Any]],
) -> TracedProgram:
    """Return ``exported`` traced again with operators taken apart.

    ``ExportedProgram.run_decompositions`` does the same, but overrides each of the 500 composite
    operators one by one, which takes half of its time; here only those that differ are.

    Args:
        exported: The program, which is not changed.
        rules: How operators are taken apart.
        composites: How composite operators are; a rule that returns ``NotImplemented`` keeps one.
    """
    with _TRACING, unset_fake_temporarily(), _delegates_take_numbers(), warnings.catch_warnings():
        # torch copies its own pytree specs, which warns about how it is done.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        parts = _decompose_and_get_gm_with_new_signature_constants(
            exported,
            cia_to_decomp=dict(composites),
            python_decomp_table=dict(rules),
            joint_loss_index=None,
            decompose_custom_triton_ops=False,
        )
    module, signature, state, *more = parts
    # From 2.14 on torch gives back the constants too: those that tracing lifted are among them.
    constants = more[0] if more else exported.constants
    ranges = exported.range_constraints
    return TracedProgram(module, signature, state, constants, exported.call_spec, ranges)


@contextmanager
def _delegates_take_numbers() -> Iterator[None]:
    """Let a delegate with a symbolic number among its arguments be traced.

    torch looks the proxy of such a number up as if it were that of a tensor, and finds a thunk.
    """
    # The operator and its module have one name, and the package shows the operator.
    module: Any = sys.modules[type(executorch_call_delegate).__module__]
    found = module.get_proxy_slot

    def look_up(value: Any, tracer: Any, default: Any, transform: Callable[[Any], Any]) -> Any:
        def proxy_of(slot: Any) -> Any:
            return slot.force() if isinstance(slot, Thunk) else transform(slot)

        return found(value, tracer, default, proxy_of)

    module.get_proxy_slot = look_up
    try:
        yield
    finally:
        module.get_proxy_slot = found
