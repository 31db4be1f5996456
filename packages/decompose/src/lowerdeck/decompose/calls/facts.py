"""Metadata of tensors and symbols, without the tensors."""

from __future__ import annotations

from dataclasses import dataclass
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
        if tensor.layout is not torch.strided:
            raise WholeProgramError(f"a tensor of layout {tensor.layout} is traced")
        if tensor.is_conj() or tensor.is_neg():
            raise WholeProgramError("a lazily conjugated or negated tensor is traced")
        if tensor.is_quantized:
            raise WholeProgramError("a tensor of a quantized dtype is traced")
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
        )

    @property
    def is_static(self) -> bool:
        """Return whether its sizes and strides are numbers."""
        return not any(isinstance(number, SYMBOLS) for number in (*self.shape, *self.stride))

    def key(self) -> tuple[Any, ...]:
        """Return a key that is equal for tensors that no operator distinguishes."""
        return (
            # Expressions, since comparing symbols would add guards.
            tuple(map(number_key, self.shape)),
            tuple(map(number_key, self.stride)),
            self.dtype,
            self.device,
            self.requires_grad,
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
        made: torch.Tensor = self.fake(fakes)
        return made.requires_grad_() if self.requires_grad else made


def number_key(number: Any) -> Any:
    """Return a size as part of a key: a number, or the expression of a symbol.

    Args:
        number: A size or a stride.
    """
    if isinstance(number, SYMBOLS):
        return ("symbol", expression_of(number))
    return number
