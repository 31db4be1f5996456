"""Linear layers quantised by torchao, in the forms that XNNPACK computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.utils import unwrap_tensor_subclass

from lowerdeck.language_models.errors import LanguageModelError
from lowerdeck.language_models.stored import StoredLinear, as_linear, to_files

_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it

GROUPS = range(32, 257, 32)
"""How many weights may share a scale in XNNPACK."""


def quantize_linears(model: nn.Module, mode: str, group: int) -> None:
    """Quantise the linear layers of a model, in place, one after the other.

    Args:
        model: The model; its weights are freed as they are replaced.
        mode: ``"8da4w"`` or ``"8da8w"``.
        group: How many weights of a row share a scale in ``"8da4w"``.

    Raises:
        LanguageModelError: No linear layer can be divided into such groups.
    """
    if mode == "8da8w":
        config = Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int8, weight_granularity=PerAxis(0)
        )
        _quantize(model, config, lambda _: True)
        return
    if group not in GROUPS:
        raise LanguageModelError(
            f"group is {group}, expected a multiple of {GROUPS.step} from {GROUPS.start} to "
            f"{GROUPS.stop - 1}"
        )
    linears = [one for one in model.modules() if isinstance(one, nn.Linear)]
    odd = [one.in_features for one in linears if one.in_features % group]
    if len(odd) == len(linears):
        raise LanguageModelError(
            f"no linear layer has rows of a multiple of {group} weights (found "
            f"{sorted(set(odd))}): give a --group that divides them"
        )
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=_INT4, weight_granularity=PerGroup(group)
    )
    _quantize(model, config, lambda one: one.in_features % group == 0)


def _quantize(model: nn.Module, config: Any, chosen: Callable[[nn.Linear], bool]) -> None:
    """Quantise layers so that the floats of one alone are in memory, where others are mapped."""
    done: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in done:  # it has several parents
                setattr(parent, name, done[child])
                continue
            if not isinstance(child, nn.Linear) or not chosen(child):
                continue
            linear = as_linear(child) if isinstance(child, StoredLinear) else child
            alone = nn.ModuleDict({"layer": linear})
            quantize_(alone, config)
            # Of plain tensors each distinct layer is taken apart once; of its own classes torch
            # traces the whole program, which takes seven times as long.
            unwrap_tensor_subclass(alone)
            to_files(alone)
            done[child] = alone["layer"]
            setattr(parent, name, alone["layer"])
