"""Quantise linear layers with torchao, in XNNPACK's schemes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.utils import unwrap_tensor_subclass
from transformers.pytorch_utils import Conv1D

from lowerdeck.language_models.embeddings import QuantizedEmbedding
from lowerdeck.language_models.errors import LanguageModelError
from lowerdeck.language_models.stored import StoredLinear, joined, release_freed_memory

_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it

GROUPS = range(32, 257, 32)
"""Group sizes that XNNPACK supports."""

_PIECE = 1 << 20
"""Weights quantised at once."""

_EMBEDDINGS = "embeddings"


class Quantized(NamedTuple):
    """Number of quantised and float weights.

    Attributes:
        weights: Number of quantised weights.
        left: Number of float weights by kind of layer, in descending order.
    """

    weights: int
    left: Mapping[str, int]

    @property
    def is_little(self) -> bool:
        """Return whether most weights are still float, not counting embeddings."""
        return sum(self.left.values()) - self.left.get(_EMBEDDINGS, 0) > self.weights

    def line(self) -> str:
        """Return the share of quantised weights, and of float weights by kind, as text."""
        total = sum(self.left.values()) + self.weights
        text = f"{self.weights / total:.1%} of {total:,} weights"
        if not self.left:
            return text
        shares = (f"{count / total:.1%} {label}" for label, count in self.left.items())
        return f"{text}; float: {', '.join(shares)}"


def quantize_linears(
    model: nn.Module, mode: str, group: int, *, scales: torch.dtype | None = None
) -> Quantized:
    """Quantise the linear layers of a model one by one, in place.

    Args:
        model: The model; weights are freed as they are replaced.
        mode: ``"8da4w"`` or ``"8da8w"``.
        group: Number of weights of a row that share a scale in ``"8da4w"``.
        scales: Dtype that group scales are rounded to; None for no rounding.

    Returns:
        Counts of quantised and float weights.

    Raises:
        LanguageModelError: The group size is not supported, or divides the rows of no layer.
    """
    if mode == "8da8w":
        config = Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int8, weight_granularity=PerAxis(0)
        )
        return _quantize(model, config, lambda _: True, "", None)
    if group not in GROUPS:
        raise LanguageModelError(
            f"group is {group}, expected a multiple of {GROUPS.step} from {GROUPS.start} to "
            f"{GROUPS.stop - 1}"
        )
    rows = [
        _row(module_) for module_ in model.modules() if isinstance(module_, nn.Linear | Conv1D)
    ]
    unsuitable = [row for row in rows if row % group]
    if len(unsuitable) == len(rows):
        raise LanguageModelError(
            f"no linear layer has rows that are a multiple of {group} weights (found "
            f"{sorted(set(unsuitable))}): give a group size of 32 to 256 that divides "
            "them, or use 8da8w"
        )
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=_INT4, weight_granularity=PerGroup(group)
    )
    return _quantize(
        model,
        config,
        lambda row: row % group == 0,
        f"linear layers with rows that are not a multiple of {group}",
        scales,
    )


def _row(layer: nn.Linear | Conv1D) -> int:
    """Return the number of weights per output of a layer."""
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.weight.shape[0])


def _quantize(
    model: nn.Module,
    config: Any,
    chosen: Callable[[int], bool],
    unsuitable: str,
    scales: torch.dtype | None,
) -> Quantized:
    """Quantise the layers for whose row size ``chosen`` returns True, each in pieces."""
    done: dict[nn.Module, nn.Module] = {}
    weights = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in done:  # shared by several parents
                setattr(parent, name, done[child])
                continue
            if not isinstance(child, nn.Linear | Conv1D) or not chosen(_row(child)):
                continue
            done[child] = _quantized(child, config, scales)
            weights += _weight_count(child)
            setattr(parent, name, done[child])
    return Quantized(weights, _left(model, set(done.values()), unsuitable))


def _weight_count(layer: nn.Linear | Conv1D) -> int:
    weight = layer.stored if isinstance(layer, StoredLinear) else layer.weight
    return int(weight.numel())


def _quantized(layer: nn.Linear | Conv1D, config: Any, scales: torch.dtype | None) -> nn.Module:
    """Return a layer, quantised in pieces.

    Quantising a large layer at once takes several times its float size in memory. Rows have
    separate scales, so pieces give the same result.
    """
    weight = layer.stored if isinstance(layer, StoredLinear) else layer.weight
    rows = weight.detach() if isinstance(layer, nn.Linear) else weight.detach().t()
    dtype = torch.float32 if isinstance(layer, StoredLinear) else weight.dtype
    parts: list[dict[str, torch.Tensor]] = []
    kind: Any = None
    context: Any = None
    for piece_rows in torch.split(rows, max(1, _PIECE // rows.shape[1])):
        piece: Any = _linear(nn.Parameter(piece_rows.to(dtype).contiguous(), requires_grad=False))
        quantize_(piece, config)
        # A quantised weight is a tensor subclass that holds plain tensors.
        names, context = piece.weight.__tensor_flatten__()
        parts.append({name: joined([getattr(piece.weight, name)]) for name in names})
        kind = type(piece.weight)
    inner = parts[0]
    if len(parts) > 1:
        inner = {name: joined([part[name] for part in parts]) for name in inner}
    if scales is not None:
        inner["scale"] = inner["scale"].to(scales).to(inner["scale"].dtype)
    quantized_weight = kind.__tensor_unflatten__(inner, context, rows.shape, (rows.shape[1], 1))
    linear_layer = _linear(nn.Parameter(quantized_weight, requires_grad=False))
    linear_layer.bias = layer.bias
    holder = nn.ModuleDict({"layer": linear_layer.train(layer.training)})
    # With the tensor subclass torch.export would trace the whole program, which is slower.
    unwrap_tensor_subclass(holder)
    release_freed_memory()
    return holder["layer"]


def _linear(weight: nn.Parameter) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    return layer


def _left(model: nn.Module, done: set[nn.Module], unsuitable: str) -> Mapping[str, int]:
    """Return the number of float weights by kind of layer."""
    counts: Counter[str] = Counter()
    seen: set[torch.Tensor] = set()
    for module in _outside(model, done):
        if isinstance(module, QuantizedEmbedding):
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            # XNNPACK also computes norms and biases in float.
            if tensor.dim() < 2 or not tensor.is_floating_point() or tensor in seen:
                continue
            seen.add(tensor)
            if isinstance(module, nn.Embedding):
                label = _EMBEDDINGS
            elif isinstance(module, nn.Linear | Conv1D):
                label = unsuitable
            else:
                label = f"{type(module).__name__} (not linear layers)"
            counts[label] += tensor.numel()
    return dict(counts.most_common())


def _outside(module: nn.Module, done: set[nn.Module]) -> Iterator[nn.Module]:
    if module in done:
        return
    yield module
    for child in module.children():
        yield from _outside(child, done)
