"""Metadata of tensors and symbols."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lowerdeck.decompose._torch_private import tensor_meta
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.torch_base import SYMBOLS, FakeTensor, FakeTensorMode, empty_fake, expression_of


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Properties of a fake tensor that a trace depends on.

    Attributes:
        shape: Ints or symbols.
        stride: Ints or symbols, in elements.
        device: Device that the fake tensor represents.
        requires_grad: Whether it is a leaf that requires gradients; results of a trace never do.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        """Return the facts of a fake tensor.

        Raises:
            WholeProgramError: The tensor is not a plain strided fake tensor.
        """
        if type(tensor) is not FakeTensor:
            raise WholeProgramError(f"a value has the unsupported type {type(tensor).__name__}")
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.layout is not torch.strided or tensor.is_quantized or is_lazy:
            lazy = "lazily conjugated or negated " if is_lazy else ""
            raise WholeProgramError(
                f"a {lazy}tensor of {tensor.dtype} and layout {tensor.layout} is not supported"
            )
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    @property
    def is_contiguous(self) -> bool:
        """Return whether the strides are known to be those of a contiguous tensor."""
        expected = replace(self, stride=contiguous_strides(self.shape))
        return bool(facts_key(expected) == facts_key(self))

    def fake(self, mode: FakeTensorMode) -> FakeTensor:
        """Return a new fake tensor with these facts, but without requires_grad."""
        return empty_fake(mode, self.shape, self.stride, self.dtype, self.device)

    def input_fake(self, mode: FakeTensorMode) -> torch.Tensor:
        """Return a new fake tensor as input of a trace."""
        tensor: torch.Tensor = self.fake(mode)
        return tensor.requires_grad_() if self.requires_grad else tensor


def contiguous_strides(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def facts_of(value: Any) -> Any:
    """Return the facts of a value or tree of values.

    Args:
        value: A fake tensor, symbol or constant, or a tuple or list of them.

    Raises:
        WholeProgramError: A tensor is not a plain strided fake tensor.
    """
    if isinstance(value, FakeTensor):
        return TensorFacts.of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(facts_of, value)) if type(value) in {list, tuple} else value
    if isinstance(value, torch.Tensor):
        raise WholeProgramError(f"a value has the unsupported type {type(value).__name__}")
    return value


def tensor_meta_of(value: FakeTensor, facts: TensorFacts) -> Any:
    """Return the ``tensor_meta`` of a fake tensor with these facts."""
    # torch solves expressions of sizes and strides to find the memory format, which is slow.
    is_known = not is_static(facts) and facts.is_contiguous
    meta = tensor_meta(value, not is_known)
    return meta._replace(memory_format=torch.contiguous_format) if is_known else meta


def is_static(facts: Any) -> bool:
    """Return whether facts have no symbols.

    Args:
        facts: Result of ``facts_of``.
    """
    if isinstance(facts, TensorFacts):
        # Fast: called for each node of a program.
        return {int}.issuperset(map(type, facts.shape + facts.stride))
    if isinstance(facts, (tuple, list)):
        return all(map(is_static, facts))
    return not isinstance(facts, SYMBOLS)


def facts_key(facts: Any) -> Any:
    """Return a hashable key, equal for facts that are equivalent for all operators.

    Args:
        facts: Result of ``facts_of``.
    """
    if isinstance(facts, TensorFacts):
        sizes = facts.shape, facts.stride
        if not is_static(facts):
            sizes = tuple(map(_number_key, facts.shape)), tuple(map(_stride_key, facts.stride))
        return (*sizes, facts.dtype, facts.device, facts.requires_grad)
    if isinstance(facts, (tuple, list)):
        return tuple(map(facts_key, facts))
    # Constants differ only by type.
    return _number_key(facts) if isinstance(facts, SYMBOLS) else type(facts)


def _number_key(number: Any) -> Any:
    # Use expressions, because comparing symbols would add guards.
    return (type(number), expression_of(number)) if isinstance(number, SYMBOLS) else number


def _stride_key(number: Any) -> Any:
    return _stride_form(expression_of(number)) if isinstance(number, SYMBOLS) else number


@cache
def _stride_form(expression: Any) -> Any:
    """Return a canonical expression for strides that differ at most for empty tensors.

    torch writes strides as ``s``, ``Max(1, s)`` or ``Min(n, n * s)``, and factored or expanded.
    """

    # By name: importing torch's classes would load sympy.
    def find(name: str) -> Any:
        return expression.find(lambda part: type(part).__name__ == name)

    forms = {part: part.args[1] for part in find("Max") if part.args[0] == 1}
    for part in find("Min"):
        # ``Min(n, n * s)``: a size ``s`` is at least 1.
        least = next((n for n in part.args if all((m / n).is_integer for m in part.args)), part)
        forms[part] = least
    return expression.xreplace(forms).expand()
