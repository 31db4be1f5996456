"""Decompose attention into matrix products and a softmax."""

from __future__ import annotations

import math

import torch

from lowerdeck.emitter.errors import UnsupportedError

_ATEN = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return ``aten.scaled_dot_product_attention`` as matrix products and a softmax.

    torch's decomposition guards every softmax against fully masked rows, with five more kernels.
    No row is fully masked without a mask or with the causal one.

    Args:
        query: Queries, shape (..., heads, length, features).
        key: Keys, shape (..., heads, source length, features).
        value: Values, shape (..., heads, source length, value features).
        attn_mask: A bool mask, True where a query may attend, or a float mask added to the scores.
        dropout_p: Must be 0: an emitted program is for inference.
        is_causal: Whether a query attends only to keys up to its own position.
        scale: Factor of the scores; 1 / sqrt(features) when None.
        enable_gqa: Whether several query heads share a key head.

    Raises:
        UnsupportedError: ``dropout_p`` is not 0.
    """
    if dropout_p > 0.0:
        raise UnsupportedError(
            f"attention with dropout {dropout_p} is random: call eval() on the model before export"
        )
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        length, source = query.size(-2), key.size(-2)
        causal_mask = torch.ones(length, source, dtype=torch.bool, device=query.device).tril()
        scores = torch.where(causal_mask, scores, _lowest(scores))
        return torch.matmul(torch.softmax(scores, -1), value)
    if attn_mask is None:
        return torch.matmul(torch.softmax(scores, -1), value)
    if attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, _lowest(scores))
    else:
        scores = scores + attn_mask
    return torch.matmul(_ATEN._safe_softmax.default(scores, -1), value)


def _lowest(scores: torch.Tensor) -> torch.Tensor:
    return torch.scalar_tensor(-math.inf, dtype=scores.dtype, device=scores.device)
