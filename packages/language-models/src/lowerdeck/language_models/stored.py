"""Weights that stay as their files have them, and become floats where they are used.

Most folders are in bfloat16. Their weights are mapped, not read, as long as nobody converts them:
a model of them takes no memory, however large it is. What is computed is float32 all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowerdeck.torch_base import tensor_in_file

HALVES = (torch.bfloat16, torch.float16)
_PIECE = 1 << 20
"""Elements that are copied at once."""
_SMALL = 1 << 16
"""Elements of a tensor that is left in memory."""


class StoredLinear(nn.Linear):
    """A linear layer in float32 whose weight has fewer bits."""

    stored: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a parameter there
        """The weight in float32, made anew each time."""
        return self.stored.float()


class StoredEmbedding(nn.Embedding):
    """An embedding in float32 whose rows have fewer bits."""

    stored: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a parameter there
        """All rows in float32, made anew each time."""
        return self.stored.float()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Return rows, of which only those that are looked up are converted.

        Args:
            input: Their numbers.
        """
        return F.embedding(input, self.stored).float()


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StoredLinear,
    nn.Embedding: StoredEmbedding,
}


def keep_stored(model: nn.Module) -> None:
    """Let a model compute in float32, in place, its large weights staying what they are.

    Args:
        model: A model in float16 or bfloat16. Weights of linear layers and of plain embeddings
            stay; all others become float32.
    """
    # By the weights themselves, which are equal to none but themselves and live as long as this.
    kept: dict[torch.Tensor, torch.Tensor] = {}
    for module in list(model.modules()):
        kind = _KINDS.get(type(module))
        if kind is None or _renorms(module):
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or weight.dtype not in HALVES:
            continue
        # Tied weights are one tensor still.
        stored = kept.setdefault(weight, weight.detach())
        del module.weight
        module.__class__ = kind
        module.register_buffer("stored", stored, persistent=False)
    stays = {id(one) for one in kept.values()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in HALVES:
                parameter.data = parameter.data.float()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in HALVES and id(buffer) not in stays:
                setattr(module, name, buffer.float())


def _renorms(module: nn.Module) -> bool:
    """Return whether an embedding writes its own rows when they are looked up."""
    return getattr(module, "max_norm", None) is not None


def as_linear(module: StoredLinear) -> nn.Linear:
    """Return a layer with its weight as a parameter in float32; it is changed in place.

    Args:
        module: The layer.
    """
    weight = module.weight
    del module.stored
    made: Any = module
    made.__class__ = nn.Linear
    made.weight = nn.Parameter(weight, requires_grad=False)
    linear: nn.Linear = made
    return linear


def to_files(module: nn.Module) -> None:
    """Move the large tensors of a module out of memory, into files without a name, in place.

    Args:
        module: The module; a tensor stays where it is if no file can be written.
    """
    for inner in module.modules():
        for tensor in (*inner.parameters(recurse=False), *inner.buffers(recurse=False)):
            if tensor.numel() < _SMALL or not tensor.is_contiguous():
                continue
            moved = tensor_in_file(_pieces(tensor), tensor.numel(), tensor.dtype)
            if moved is not None:
                tensor.data = moved.view(tensor.shape)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from torch.split(tensor.detach().reshape(-1), _PIECE)
