"""Attention and cache of the runtime's own kernels for language models, ``llama::custom_sdpa``.

A runtime has these kernels only if the application links them (``custom_ops``). They look at the
filled part of the cache alone, and take it as it is written: ``[1, context, heads, width]``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import StaticLayer

from lowerdeck.language_models.errors import UnsupportedModelError
from lowerdeck.language_models.kernel_library import define

NAME = "lowerdeck_custom_sdpa"
"""Name of the attention among those of transformers."""

KERNELS = frozenset({"llama::custom_sdpa.out"})
"""What a file needs of the runtime beside the kernels that it always has."""

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, SymInt start_pos, Tensor? attn_mask=None, "
    "float drpout_p=0., bool is_causal=False, float? scale=None"
)


class FilledLayer(StaticLayer):  # type: ignore[misc]
    """Keys and values of one layer, ``[1, context, heads, width]`` each."""

    positions: torch.Tensor
    start: Any

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for keys and values.

        Args:
            key_states: Keys, ``[1, heads, n, width]``, of which the sizes count.
            value_states: Values, likewise.
        """
        super().lazy_initialization(key_states, value_states)
        self.keys: torch.Tensor = self.keys.transpose(1, 2).contiguous()
        self.values: torch.Tensor = self.values.transpose(1, 2).contiguous()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values of some tokens; return all, as they lie.

        Args:
            key_states: Keys, ``[1, heads, n, width]``.
            value_states: Values, likewise.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(1, self.positions, key_states.transpose(1, 2))
        self.values.index_copy_(1, self.positions, value_states.transpose(1, 2))
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Return how many tokens there were before those that are given."""
        return self.start


@cache
def register() -> None:
    """Let torch know the kernel, and transformers the attention that calls it."""
    define("llama", "custom_sdpa", _ARGUMENTS, _eager)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    start_position: Any = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    del module, attention_mask
    for name in ("softcap", "s_aux", "position_bias"):
        if more.get(name) is not None:
            raise UnsupportedModelError(
                f"the model's attention has a {name}, which llama::custom_sdpa does not compute: "
                "leave attention to the delegate"
            )
    if start_position is None:
        # A text without a cache, which the decoder is compared with.
        alone = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return alone.transpose(1, 2), None
    found = torch.ops.llama.custom_sdpa(
        query.transpose(1, 2), key, value, start_position, None, 0.0, True, scaling
    )
    return found, None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start_pos: int,
    attn_mask: torch.Tensor | None = None,
    drpout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute what the kernel computes, from its description."""
    del attn_mask, drpout_p, is_causal
    if query.is_meta or not isinstance(start_pos, int):
        # While it is traced, nobody knows how much is filled.
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    count = query.shape[1]
    filled = start_pos + count
    seen = torch.arange(filled) <= torch.arange(start_pos, filled).unsqueeze(1)
    found = nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key[:, :filled].transpose(1, 2),
        value[:, :filled].transpose(1, 2),
        seen,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return found.transpose(1, 2).contiguous()
