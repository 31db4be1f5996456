"""Every use that this package makes of what is private in torch; each has a test of its own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase

__all__ = [
    "FakeTensor",
    "HigherOrderOperator",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "composite_parts",
    "data_address",
    "is_composite",
    "is_impure",
    "negative_view",
    "schema_of",
    "shared_copy",
    "storage_address",
    "storage_identity",
    "upper_bound",
    "with_graph_module",
]

_LARGEST = 2**31 - 1

NormBase: type[torch.nn.Module] = _NormBase
"""What batch and instance norms of all dimensions are made from."""


def schema_of(operator: OpOverload) -> torch.FunctionSchema:
    """Return the schema of one overload of an operator."""
    schema: torch.FunctionSchema = operator._schema
    return schema


def is_composite(operator: OpOverload) -> bool:
    """Return whether torch takes ``operator`` apart by itself, and so may copy in it."""
    try:
        name = operator.name()  # type: ignore[no-untyped-call]
        composite: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CompositeImplicitAutograd"
        )
    except RuntimeError:
        # Some overloads exist for TorchScript only.
        return True
    return composite


def composite_parts(operator: OpOverload) -> Callable[..., object] | None:
    """Return what does ``operator`` by calling others, as eager does; None if nothing does.

    Args:
        operator: One overload.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not operator.has_kernel_for_dispatch_key(key):
        return None
    # ``decompose`` would ask for Python's version first, which the caller may have replaced.
    return functools.partial(operator._op_dk, key)


def is_impure(module: object) -> bool:
    """Return whether dead code elimination keeps calls of ``module``."""
    return bool(getattr(module, "_is_impure", False))


def data_address(tensor: torch.Tensor) -> int:
    """Return the address of a dense tensor's first element, for reading only.

    ``Tensor.data_ptr()`` is for writing too, and so turns a lazy clone into a real one.
    """
    start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]  # not in its stubs
    return start + int(tensor.storage_offset()) * tensor.element_size()


def storage_identity(tensor: torch.Tensor) -> int | None:
    """Return what tensors of one storage have in common while either lives; None without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        # Sparse tensors and some subclasses have no storage of their own.
        return None


def shared_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy that shares memory until one side writes, or None where that cannot be.

    torch then takes new memory from the allocator of the storage. A storage that has none is not
    resizable either, and writing to its lazy copy would crash the process.
    """
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return None
    try:
        return torch._lazy_clone(tensor) if tensor.untyped_storage().resizable() else None
    except (NotImplementedError, RuntimeError):
        # Memory that other processes share.
        return None


def upper_bound(size: Any) -> int:
    """Return the largest number that a size can be, without a guard on it.

    Args:
        size: A number, or a symbol of an exported program.

    Returns:
        The number; the top of a symbol's range; or the symbol's value in the example inputs,
        where the range has no top.
    """
    if isinstance(size, int):
        return size
    symbol = size.node
    top = symbol.shape_env.bound_sympy(symbol.expr).upper
    # is_Integer: a number; torch's infinity of integers is is_integer, and finite, too.
    if top.is_Integer and int(top) <= _LARGEST:
        return int(top)
    return int(symbol.hint)


def storage_address(tensor: torch.Tensor) -> int:
    """Return where the storage of a tensor begins in memory; 0 where it lies nowhere.

    ``data_ptr()`` would be for writing too, and so turn a lazy clone into a real one.
    """
    try:
        return int(torch._C._data_address(tensor))  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError):
        return 0


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that reads as the negative of ``tensor``."""
    return torch._neg_view(tensor)


def with_graph_module(
    program: ExportedProgram,
    graph_module: GraphModule,
    signature: ExportGraphSignature | None = None,
) -> ExportedProgram:
    """Return a program like ``program``, on the same tensors, around another graph module.

    Args:
        program: Any program.
        graph_module: The graph module; not copied.
        signature: What describes it; that of ``program`` if None.
    """
    made = copy.copy(program)
    made._graph_module = graph_module
    made._graph_signature = program.graph_signature if signature is None else signature
    return made
