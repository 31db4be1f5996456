"""Embeddings in 8 or 4 bits, for the runtime's quantised kernels.

A runtime has these kernels only if the application links them (``quantized_ops_lib``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from lowerdeck.language_models.errors import LanguageModelError
from lowerdeck.language_models.kernel_library import define
from lowerdeck.language_models.stored import StoredEmbedding

KERNELS = {
    8: "quantized_decomposed::embedding_byte.out",
    4: "quantized_decomposed::embedding_4bit.out",
}
"""Kernels that a file needs in addition to the runtime's portable ones, by bits."""

GROUP = 32
"""Number of weights that share a scale in 4 bits; in 8 bits a whole row shares one."""

_ROWS = 1024
"""Rows quantised at once."""

_ARGUMENTS = (
    "Tensor weight, Tensor weight_scales, Tensor? weight_zero_points, int weight_quant_min, "
    "int weight_quant_max, Tensor indices"
)


class QuantizedEmbedding(nn.Module):
    """An embedding with symmetric integer weights and a scale per group.

    Args:
        weight: The weights, ``float[rows, width]``.
        bits: Bits of an integer, 8 or 4.

    Raises:
        LanguageModelError: The group size does not divide the width.
    """

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        super().__init__()
        register()
        width = weight.shape[1]
        group = width if bits == 8 else GROUP
        if width % group:
            raise LanguageModelError(
                f"the embedding has rows of {width} weights, expected a multiple of the group "
                f"size {group}: quantise it to 8 bits, or not at all"
            )
        self._limits = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        self._bits = bits
        parts = [self._quantized(part, group) for part in torch.split(weight.detach(), _ROWS)]
        self.register_buffer("weight", torch.cat([numbers for numbers, _ in parts]))
        self.register_buffer("scales", torch.cat([scales for _, scales in parts]).squeeze(-1))

    def _quantized(self, rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the integer weights of some rows, and the scales of their groups."""
        grouped = rows.float().reshape(len(rows), -1, group)
        scales = grouped.abs().amax(-1, keepdim=True) / self._limits[1]
        # The scale of a group of zeros is arbitrary.
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        numbers = (grouped / scales).round().clamp(*self._limits).to(torch.int8)
        numbers = numbers.reshape(rows.shape)
        return numbers if self._bits == 8 else _packed(numbers), scales.squeeze(-1)

    weight: torch.Tensor
    scales: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of some tokens."""
        ops = torch.ops.quantized_decomposed
        look_up = ops.embedding_byte if self._bits == 8 else ops.embedding_4bit
        rows: torch.Tensor = look_up(self.weight, self.scales, None, *self._limits, tokens)
        return rows


def quantize_embedding(model: Any, bits: int) -> None:
    """Quantise the input embedding of a model of transformers, in place.

    Raises:
        LanguageModelError: The embedding is of another class, or cannot be quantised.
    """
    embedding = model.get_input_embeddings()
    if type(embedding) not in (nn.Embedding, StoredEmbedding):
        raise LanguageModelError(
            f"the model's embedding is a {type(embedding).__name__}, expected an nn.Embedding: "
            "leave it unquantised"
        )
    weight = embedding.stored if isinstance(embedding, StoredEmbedding) else embedding.weight
    model.set_input_embeddings(QuantizedEmbedding(weight, bits))


@cache
def register() -> None:
    """Register the kernels with torch."""
    define("quantized_decomposed", "embedding_byte", _ARGUMENTS, _rows_of_bytes)
    define("quantized_decomposed", "embedding_4bit", _ARGUMENTS, _rows_of_halves)


def _rows_of_bytes(
    weight: torch.Tensor, weight_scales: torch.Tensor, zero_points: Any, *rest: Any
) -> torch.Tensor:
    rows = nn.functional.embedding(rest[-1], weight)
    return _dequantized(rows, weight_scales, zero_points, rest[-1])


def _rows_of_halves(
    weight: torch.Tensor, weight_scales: torch.Tensor, zero_points: Any, *rest: Any
) -> torch.Tensor:
    rows = _unpacked(nn.functional.embedding(rest[-1], weight))
    return _dequantized(rows, weight_scales, zero_points, rest[-1])


def _dequantized(
    rows: torch.Tensor, weight_scales: torch.Tensor, zero_points: Any, indices: torch.Tensor
) -> torch.Tensor:
    scales = weight_scales[indices]
    groups = scales.unsqueeze(-1) if weight_scales.dim() == 1 else scales
    grouped = rows.to(weight_scales.dtype).reshape(*groups.shape, -1)
    if zero_points is not None:
        grouped = grouped - zero_points[indices].reshape(*groups.shape, 1)
    dequantized: torch.Tensor = grouped * groups.unsqueeze(-1)
    return dequantized.reshape(rows.shape)


def _packed(numbers: torch.Tensor) -> torch.Tensor:
    """Pack pairs of 4-bit numbers into bytes, offset to 0 to 15, the first in the high half."""
    moved = (numbers + 8).to(torch.uint8)
    return moved[:, ::2] * 16 + moved[:, 1::2]


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack((packed // 16, packed % 16), -1)
    return pairs.reshape(*packed.shape[:-1], -1).to(torch.int8) - 8
