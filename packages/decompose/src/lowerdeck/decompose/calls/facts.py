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
    """A fake tensor in words.

    Attributes:
        shape: Sizes, symbols among them.
        stride: Strides, likewise.
        dtype: The type of the elements.
        device: Where it would lie.
        requires_grad: Whether it does; what is computed while tracing never does.
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
            tensor: The tensor.

        Raises:
            WholeProgramError: It is no plain, strided, fake tensor.
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
        """Return whether no symbol is in it."""
        return not any(isinstance(number, SYMBOLS) for number in (*self.shape, *self.stride))

    def key(self) -> tuple[Any, ...]:
        """Return what two tensors have in common that no operator can tell apart."""
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
            fakes: Creates it.
        """
        return fakes.empty(self.shape, self.stride, self.dtype, self.device)

    def input_fake(self, fakes: FakeTensors) -> torch.Tensor:
        """Return a new fake tensor to trace a call with.

        Args:
            fakes: Creates it.
        """
        made: torch.Tensor = self.fake(fakes)
        return made.requires_grad_() if self.requires_grad else made


def number_key(number: Any) -> Any:
    """Return what stands for a size in a key: the expression of a symbol.

    Args:
        number: A number or symbol.
    """
    if isinstance(number, SYMBOLS):
        return ("symbol", expression_of(number))
    return number
