"""Pass: remove run-time assertions and size constraints, which the runtime has no kernels for."""

from __future__ import annotations

import torch

from lowerdeck.emitter.ir.graph import Call, Method, all_blocks
from lowerdeck.torch_base import OpOverload, schema_of

_ASSERTIONS_NAMES = """
    _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async
    _functional_assert_scalar sym_constrain_range sym_constrain_range_for_size
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size
    _linalg_check_errors _print
"""
_ASSERTIONS = frozenset(_ASSERTIONS_NAMES.split())


def drop_assertions(method: Method) -> None:
    """Remove every assertion from ``method``.

    Requires:
        Nothing.

    Ensures:
        No call asserts or constrains anything.
    """
    for block in all_blocks(method.block):
        block.body = [
            operation
            for operation in block.body
            if not (isinstance(operation, Call) and is_assertion(operation.target))
        ]


def is_assertion(target: object) -> bool:
    """Return whether an operator only checks something."""
    if isinstance(target, OpOverload):
        space, _, name = schema_of(target).name.partition("::")
        return space == "aten" and name in _ASSERTIONS
    return target in (torch._check, torch._check_is_size)
