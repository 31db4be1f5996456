"""Private torch APIs that this package uses; see ``tests/test_torch_private.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from lowerdeck.torch_base import OpOverload, OpOverloadPacket


def operator_schemas(name: str) -> Sequence[torch.FunctionSchema]:
    """Return the schemas of all overloads of an operator such as ``"aten::add"``."""
    return torch._C._jit_get_schemas_for_operator(name)


def overload_packet(operator: OpOverload) -> OpOverloadPacket:
    """Return the overload packet of an operator overload."""
    return operator._overloadpacket


def is_known(truth: Any) -> bool:
    """Return whether ``truth`` holds for all sizes, without adding a guard."""
    if isinstance(truth, bool):
        return truth
    # Creating a symbolic number imports ``symbolic_shapes``. Importing it at the top would load
    # sympy in every process.
    return bool(torch.fx.experimental.symbolic_shapes.statically_known_true(truth))


def dimension_names(size: Any) -> dict[str, str]:
    """Return the user's names of dynamic dimensions, keyed by the symbol's name.

    Args:
        size: Any symbolic size of the program.
    """
    environment = size.node.shape_env
    sources = environment.source_name_to_debug_name
    return {
        str(symbol): sources[name]
        for name, symbol in environment.source_to_var.items()
        if name in sources
    }


def untraced() -> AbstractContextManager[Any]:
    """Return a context in which arithmetic on sizes is not traced.

    Symbols of an earlier trace are undefined in this one.
    """
    context: AbstractContextManager[Any] = disable_proxy_modes_tracing()
    return context


def current_result() -> Any:
    """Return the recorded result of the node being retraced as fake tensors; None if unknown."""
    return fx_traceback.get_current_meta().get("val")


def reference_decomposition(target: OpOverload) -> Callable[..., Any]:
    """Return torch's decomposition of an operator that has one."""
    rule: Callable[..., Any] = decomposition_table[target]
    return rule
