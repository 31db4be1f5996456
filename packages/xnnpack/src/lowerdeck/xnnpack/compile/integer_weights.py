"""Find integer weights that must be converted to float, from node arguments only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import fake
from lowerdeck.xnnpack.operators.quantization import (
    QUANTIZATION,
    is_dynamic,
    is_weight,
    name_of,
    unrounded,
)
from lowerdeck.xnnpack.operators.quantized_constants import stored_bits
from lowerdeck.xnnpack.operators.quantized_layers import group_refusal
from lowerdeck.xnnpack.operators.rounding import CONVOLUTIONS, layers_of, reads_rows_of, rows_of


def integer_weights(
    nodes: Sequence[Node], constants: Collection[str]
) -> tuple[dict[str, str], dict[Node, str]]:
    """Find layers with integer weights that compute in float.

    Args:
        constants: Names of constant placeholders.

    Returns:
        Two mappings: the reason for each such layer, by name, and the reason for each node that
        quantises rows for such a layer and so cannot be delegated.
    """
    in_float: dict[str, str] = {}
    unfit: set[Node] = set()
    for weight in nodes:
        for layer in layers_of(weight) if is_weight(weight, constants) else ():
            source = rows_of(layer)
            reason = _refusal(layer, source, weight)
            if reason is not None:
                in_float[layer.name] = reason
                if is_dynamic(source):
                    unfit.add(weight)

    def fits(node: Node) -> bool:
        return is_weight(node, constants) and node not in unfit

    rounding = [node for node in nodes if is_dynamic(node)] if unfit else []
    left = {node: why for node in rounding if (why := unrounded(node, fits)) is not None}
    return in_float, left


def _refusal(layer: Node, source: Node, weight: Node) -> str | None:
    if layer.target in CONVOLUTIONS:
        rounded = name_of(source) in QUANTIZATION
        return (
            None if rounded else "XNNPACK has no convolution of float inputs with integer weights"
        )
    group, args = _group_size(weight), arguments_of(weight)
    if group and not reads_rows_of(layer, weight):
        # Per-group scales cannot be transposed: the weight is converted to float.
        return f"its weight has groups of {group} and is transposed"
    return group_refusal(group, stored_bits(args), rounds=is_dynamic(source))


def _group_size(weight: Node) -> int:
    """Return the group size of a weight's scales; 0 without groups."""
    args = arguments_of(weight)
    integers, block = fake(args["input"]), args.get("block_size")
    if "group_size" in args:
        return int(args["group_size"])
    if integers is None or not isinstance(block, (list, tuple)) or not block:
        return 0
    return 0 if block[-1] == integers.shape[-1] else int(block[-1])
