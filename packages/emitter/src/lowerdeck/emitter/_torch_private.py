"""Private torch APIs that this package uses, each with a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from lowerdeck.torch_base import (
    OperatorBase,
    OpOverload,
    OpOverloadPacket,
    enable_python_dispatcher,
)

__all__ = [
    "current_result",
    "dimension_names",
    "inferring_shapes",
    "is_known",
    "operator_schemas",
    "overload_packet",
    "reference_decompositions",
    "untraced",
]


def operator_schemas(name: str) -> Sequence[torch.FunctionSchema]:
    """Return the schemas of all overloads of an operator such as ``"aten::add"``."""
    return torch._C._jit_get_schemas_for_operator(name)


def overload_packet(operator: OpOverload) -> OpOverloadPacket:
    """Return the overload packet of an overload's operator."""
    return operator._overloadpacket


@contextmanager
def inferring_shapes(mode: Any) -> Iterator[None]:
    """Run operators on a program's fake tensors without adding guards on its sizes.

    Some operators, such as padding, have a symbolic shape rule only in Python. Without the Python
    dispatcher they read sizes as integers, which specializes symbols.

    Args:
        mode: The tensors' FakeTensorMode; None if there are no tensors.
    """
    shape_env = getattr(mode, "shape_env", None)
    suppressed = nullcontext() if shape_env is None else shape_env.suppress_guards()
    with nullcontext() if mode is None else mode, enable_python_dispatcher(), suppressed:
        yield


def is_known(truth: Any) -> bool:
    """Return whether ``truth`` holds for all sizes, without adding a guard."""
    if isinstance(truth, bool):
        return truth
    # Creating a symbolic number imports this module. Importing it at the top would load sympy in
    # every process, which takes 0.3 s.
    return bool(torch.fx.experimental.symbolic_shapes.statically_known_true(truth))


def dimension_names(size: Any) -> dict[str, str]:
    """Return the user's names of dynamic dimensions, keyed by the symbol's name.

    Args:
        size: Any size of the program.
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


@cache
def reference_decompositions(
    targets: tuple[OpOverload, ...],
) -> Mapping[OperatorBase, Callable[..., Any]]:
    """Return torch's decompositions of the operators."""
    rules: dict[OperatorBase, Callable[..., Any]] = get_decompositions(targets)
    return rules
