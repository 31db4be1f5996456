"""What this package uses of torch's private parts, each with a test of what is expected of it."""

from __future__ import annotations

import torch

_LARGEST = 2**31 - 1


def data_address(tensor: torch.Tensor) -> int:
    """Return where a dense tensor's elements lie, without a claim to write there.

    ``Tensor.data_ptr()`` promises a writable address and so makes a real copy of a lazily cloned
    tensor: of every weight of a partition.

    Args:
        tensor: A dense CPU tensor.

    Returns:
        The address of its first element.
    """
    base: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]  # not in its stubs
    return base + int(tensor.storage_offset()) * tensor.element_size()


def upper_bound(size: int | torch.SymInt) -> int:
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
    if top.is_integer and top.is_finite and int(top) <= _LARGEST:
        return int(top)
    return int(symbol.hint)


def is_mutable(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(op._schema.is_mutable)


def returns_alias(op: torch._ops.OpOverload) -> bool:
    """Return whether a result can share memory with an argument that is only read."""
    return any(
        one.alias_info is not None and not one.alias_info.is_write for one in op._schema.returns
    )
