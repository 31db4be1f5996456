"""Attention and cache with ExecuTorch's custom kernels for language models.

A runtime has ``llama::custom_sdpa`` and ``llama::update_cache`` only if the application links
them (``custom_ops``). ``custom_sdpa`` reads only the filled part of the cache, in the layout
that ``update_cache`` writes: ``[1, context, heads, width]``.
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
"""Name of the attention implementation in transformers."""

KERNELS = frozenset({"llama::custom_sdpa.out", "llama::update_cache.out"})
"""Kernels that a file needs in addition to the runtime's portable ones."""

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, SymInt start_pos, Tensor? attn_mask=None, "
    "float drpout_p=0., bool is_causal=False, float? scale=None"
)

_CACHE_ARGUMENTS = "Tensor value, Tensor(a!) cache, SymInt start_pos"


class FilledLayer(StaticLayer):  # type: ignore[misc]
    """Keys and values of one layer, ``[1, context, heads, width]`` each."""

    positions: torch.Tensor
    start: Any

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate keys and values.

        Args:
            key_states: Keys, ``[1, heads, n, width]``; their values are not used.
        """
        super().lazy_initialization(key_states, value_states)
        self.keys: torch.Tensor = self.keys.transpose(1, 2).contiguous()
        self.values: torch.Tensor = self.values.transpose(1, 2).contiguous()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of some tokens; return the whole cache.

        Args:
            key_states: Keys, ``[1, heads, n, width]``.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write = torch.ops.llama.update_cache
        write(key_states.transpose(1, 2), self.keys, self.start)
        write(value_states.transpose(1, 2), self.values, self.start)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Return the number of tokens before the current ones."""
        return self.start


@cache
def register() -> None:
    """Register the kernels with torch, and an attention that calls them with transformers."""
    define("llama", "custom_sdpa", _ARGUMENTS, _eager)
    define("llama", "update_cache", _CACHE_ARGUMENTS, _write)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


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
        raise UnsupportedModelError(
            "the model does not pass token positions to its attention, which llama::custom_sdpa "
            "needs: leave attention to the delegate"
        )
    attended = torch.ops.llama.custom_sdpa(
        query.transpose(1, 2), key, value, start_position, None, 0.0, True, scaling
    )
    return attended, None


def _write(value: torch.Tensor, cache: torch.Tensor, start_pos: int) -> torch.Tensor:
    """Write keys or values in eager mode, as the kernel does; the result is unused."""
    if isinstance(start_pos, int) and not value.is_meta:
        cache[:, start_pos : start_pos + value.shape[1]] = value
    return value.new_empty(1)


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
    """Compute attention in eager mode, as documented for the kernel."""
    del attn_mask, drpout_p, is_causal
    if query.is_meta or not isinstance(start_pos, int):
        # The filled length is unknown during tracing.
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    count = query.shape[1]
    filled = start_pos + count
    seen = torch.arange(filled) <= torch.arange(start_pos, filled).unsqueeze(1)
    attended = nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key[:, :filled].transpose(1, 2),
        value[:, :filled].transpose(1, 2),
        seen,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.transpose(1, 2).contiguous()
