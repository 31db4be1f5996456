"""Export and comparison helpers."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree


def exported(module: nn.Module, *args: Any, **options: Any) -> ExportedProgram:
    """Export ``module`` in evaluation mode, without torch's warnings.

    Args:
        module: The module.
        args: Its example arguments.
        options: Options of ``torch.export.export``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module.eval(), args, **options)


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` after a round trip through ``torch.export.save``."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, file)
        file.seek(0)
        return torch.export.load(file)


def assert_close(found: Any, expected: Any, *, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Raise AssertionError unless all leaves agree; all but tensors and floats exactly.

    Tensors must have the same shape and dtype; NaN equals NaN.

    Args:
        found: A tree of values, or the flat values of one.
        expected: Likewise.
        atol: Largest absolute error.
        rtol: Largest relative error.
    """
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert len(found) == len(expected), f"{len(found)} values, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(other, torch.Tensor | float):
            text = f"value {number}: {{}}".format
            torch.testing.assert_close(one, other, atol=atol, rtol=rtol, equal_nan=True, msg=text)
        else:
            assert one == other, f"value {number}: {one!r}, expected {other!r}"


def assert_close_within_steps(found: Any, expected: Any, *, share: float) -> None:
    """Raise AssertionError unless few elements are off, and none by more than a step.

    Integers may be off by 1, floats by 0.05 and 2 % of the largest.

    Args:
        found: A tree of tensors.
        expected: Likewise.
        share: The share of elements that may be off by more than 1e-5 and 0.01 %.
    """
    found, expected = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        error, size = (one.double() - other.double()).abs(), other.double().abs()
        limit = 0.05 + 0.02 * size.max() if other.is_floating_point() else 1.0
        assert error.max() <= limit, f"value {number} is off by {error.max():g}"
        off = (error > 1e-5 + 1e-4 * size).double().mean()
        assert off <= share, f"{off:.0%} of value {number} are off"
