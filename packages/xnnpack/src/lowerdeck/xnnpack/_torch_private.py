"""What this package uses of torch's private parts, each with a test of what is expected of it."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

__all__ = ["OpOverload", "is_mutable", "returns_alias", "schema_of"]


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """Return the schema of one overload of an operator."""
    schema: torch.FunctionSchema = op._schema
    return schema


def is_mutable(op: OpOverload) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(schema_of(op).is_mutable)


def returns_alias(op: OpOverload) -> bool:
    """Return whether a result can share memory with an argument that is only read."""
    returned = schema_of(op).returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
