"""Metadata of tensors and symbols, without the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowerdeck.decompose._torch_private import FakeTensors
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.torch_base import SYMBOLS, FakeTensor, expression_of


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Properties of a fake tensor that a trace depends on.

    Attributes:
        shape: Sizes: numbers or symbols.
        stride: In elements: numbers or symbols.
        dtype: The type of the elements.
        device: The device of the tensor that it replaces.
        requires_grad: Whether it is a leaf that requires gradients; results in a trace never do.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorFacts:
        """Return the facts of a fake tensor.

        Args:
            tensor: A plain strided fake tensor.

        Raises:
            WholeProgramError: It is sparse, quantized, lazily conjugated or not a fake tensor.
        """
        if type(tensor) is not FakeTensor:
            raise WholeProgramError(f"a value of type {type(tensor).__name__} is traced")
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.layout is not torch.strided or tensor.is_quantized or is_lazy:
            lazy = "lazily conjugated or negated " if is_lazy else ""
            raise WholeProgramError(
                f"a {lazy}tensor of {tensor.dtype} and layout {tensor.layout} is traced"
            )
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    def fake(self, fakes: FakeTensors) -> FakeTensor:
        """Return a new fake tensor with these facts, which requires no gradients.

        Args:
            fakes: Of the mode of the program.
        """
        return fakes.empty(self.shape, self.stride, self.dtype, self.device)

    def input_fake(self, fakes: FakeTensors) -> torch.Tensor:
        """Return a new fake tensor to trace a call with.

        Args:
            fakes: Of the mode of the program.
        """
        tensor: torch.Tensor = self.fake(fakes)
        return tensor.requires_grad_() if self.requires_grad else tensor


def facts_of(value: Any) -> Any:
    """Return the facts of a value, or a tree of values.

    Args:
        value: A fake tensor, a symbol, a constant, or a tuple or list of them.

    Raises:
        WholeProgramError: A tensor is not of the plain kind.
    """
    if isinstance(value, FakeTensor):
        return TensorFacts.of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(facts_of, value)) if type(value) in {list, tuple} else value
    if isinstance(value, torch.Tensor):
        raise WholeProgramError(f"a value of type {type(value).__name__} is traced")
    return value


def is_static(facts: Any) -> bool:
    """Return whether facts have no symbols.

    Args:
        facts: As ``facts_of`` returns them.
    """
    if isinstance(facts, TensorFacts):
        # Each node of a program asks.
        return {int}.issuperset(map(type, facts.shape + facts.stride))
    if isinstance(facts, (tuple, list)):
        return all(map(is_static, facts))
    return not isinstance(facts, SYMBOLS)


def facts_key(facts: Any) -> Any:
    """Return a hashable key that is equal for facts that no operator distinguishes.

    Args:
        facts: As ``facts_of`` returns them.
    """
    if isinstance(facts, TensorFacts):
        sizes = facts.shape, facts.stride
        if not is_static(facts):
            sizes = tuple(map(_number_key, facts.shape)), tuple(map(_stride_key, facts.stride))
        return (*sizes, facts.dtype, facts.device, facts.requires_grad)
    if isinstance(facts, (tuple, list)):
        return tuple(map(facts_key, facts))
    # Constants among results matter by their type only.
    return _number_key(facts) if isinstance(facts, SYMBOLS) else type(facts)


def _number_key(number: Any) -> Any:
    # Expressions, since comparing symbols would add guards.
    return (type(number), expression_of(number)) if isinstance(number, SYMBOLS) else number


def _stride_key(number: Any) -> Any:
    return _stride_form(expression_of(number)) if isinstance(number, SYMBOLS) else number


@cache
def _stride_form(expression: Any) -> Any:
    """Return one expression for strides that differ for tensors without elements at most.

    torch writes the stride over a size as ``s`` or as ``Max(1, s)``, and a product as a sum.
    """
    # The class is one of torch's, whose module loads sympy.
    largest = expression.find(lambda part: type(part).__name__ == "Max" and part.args[0] == 1)
    return expression.xreplace({part: part.args[1] for part in largest}).expand()
