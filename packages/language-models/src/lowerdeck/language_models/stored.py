"""Keep weights in the dtype of their file, and convert them to float32 at each use.

Weights stay memory-mapped until they are converted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from lowerdeck.torch_base import tensor_in_file

HALVES = (torch.bfloat16, torch.float16)
_PIECE = 1 << 20
"""Elements copied at once."""
_SMALL = 1 << 16
"""Tensors with fewer elements stay in memory."""


class StoredLinear(nn.Linear):
    """A linear layer that computes in float32 with a float16 or bfloat16 weight."""

    stored: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a parameter there
        """The weight in float32, converted each time."""
        return self.stored.float()


class StoredEmbedding(nn.Embedding):
    """An embedding that computes in float32 with float16 or bfloat16 rows."""

    stored: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # a parameter there
        """All rows in float32, converted each time."""
        return self.stored.float()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Return the rows of the tokens, converting only these."""
        return F.embedding(input, self.stored).float()


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StoredLinear,
    nn.Embedding: StoredEmbedding,
}


def keep_stored(model: nn.Module) -> None:
    """Make a float16 or bfloat16 model compute in float32, in place.

    Weights of linear layers and of plain embeddings keep their dtype; all others become float32.
    """
    # Tensors hash by identity and outlive this dictionary.
    stored_weights: dict[torch.Tensor, torch.Tensor] = {}
    for module in list(model.modules()):
        kind = _KINDS.get(type(module))
        # An embedding with max_norm renormalizes its rows in place at lookup.
        if kind is None or getattr(module, "max_norm", None) is not None:
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or weight.dtype not in HALVES:
            continue
        # Tied weights stay one tensor.
        stored = stored_weights.setdefault(weight, weight.detach())
        del module.weight
        module.__class__ = kind
        module.register_buffer("stored", stored, persistent=False)
    stored_ids = {id(tensor) for tensor in stored_weights.values()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in HALVES:
                parameter.data = parameter.data.float()
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in HALVES and id(buffer) not in stored_ids:
                setattr(module, name, buffer.float())


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along the first dimension.

    A large result is stored in an unlinked file, unless none can be written.

    Args:
        parts: At least one tensor; a single large one is moved to a file, a single small one is
            returned.
    """
    count = sum(part.numel() for part in parts)
    if count >= _SMALL:
        pieces = (piece for part in parts for piece in _pieces(part))
        moved = tensor_in_file(pieces, count, parts[0].dtype)
        if moved is not None:
            return moved.view(-1, *parts[0].shape[1:])
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from torch.split(tensor.detach().reshape(-1), _PIECE)


def release_freed_memory() -> None:
    """Return freed memory to the system, if the C library can.

    glibc keeps small freed blocks, which cannot be reused for larger ones.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], object] | None:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None  # another C library or system
    return trim
