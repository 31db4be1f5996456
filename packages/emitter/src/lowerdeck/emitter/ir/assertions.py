"""Assertion and print operators, for which the runtime has no kernels."""

from __future__ import annotations

import torch

from lowerdeck.torch_base import OpOverload, schema_of

_ASSERTIONS_NAMES = """
    _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async
    _functional_assert_scalar sym_constrain_range sym_constrain_range_for_size
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size
    _linalg_check_errors _print
"""
_ASSERTIONS = frozenset(_ASSERTIONS_NAMES.split())


def is_assertion(target: object) -> bool:
    """Return whether an operator only asserts or prints."""
    if isinstance(target, OpOverload):
        space, _, name = schema_of(target).name.partition("::")
        return space == "aten" and name in _ASSERTIONS
    return target in (torch._check, torch._check_is_size)
