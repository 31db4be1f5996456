"""Integer weights that the runtime does not multiply as such, as far as their arguments tell."""

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
from lowerdeck.xnnpack.operators.rounding import (
    CONVOLUTIONS,
    layers_of,
    reads_rows_of,
    rows_of,
)


class IntegerWeights:
    """The weights that a program's layers read as integers.

    Attributes:
        in_float: Layers that compute floats of such a weight, and why, by name.
        left: Nodes that round rows for such a layer, which others must do, and why.
    """

    def __init__(self, nodes: Sequence[Node], constants: Collection[str]) -> None:
        """Look at all of them.

        Args:
            nodes: The calls that XNNPACK takes.
            constants: Names of the placeholders that no run changes.
        """
        self.in_float: dict[str, str] = {}
        self.left: dict[Node, str] = {}
        unfit: set[Node] = set()
        for weight in nodes:
            if not is_weight(weight, constants):
                continue
            for layer in layers_of(weight):
                source = rows_of(layer)
                reason = _refusal(layer, source, weight)
                if reason is not None:
                    self.in_float[layer.name] = reason
                    if is_dynamic(source):
                        unfit.add(weight)
        for node in nodes if unfit else ():
            if is_dynamic(node):
                why = unrounded(node, lambda one: is_weight(one, constants) and one not in unfit)
                if why is not None:
                    self.left[node] = why


def _refusal(layer: Node, source: Node, weight: Node) -> str | None:
    if layer.target in CONVOLUTIONS:
        rounded = name_of(source) in QUANTIZATION
        return None if rounded else "XNNPACK convolves no floats with integer weights"
    group, args = _group_size(weight), arguments_of(weight)
    if group and not reads_rows_of(layer, weight):
        # Scales of groups do not survive a transposition: the weight becomes floats.
        return f"its weight has groups of {group} and is transposed"
    return group_refusal(group, stored_bits(args), rounds=is_dynamic(source))


def _group_size(weight: Node) -> int:
    """Return how many neighbours of a row share a scale, 0 if all do."""
    args = arguments_of(weight)
    integers, block = fake(args["input"]), args.get("block_size")
    if "group_size" in args:
        return int(args["group_size"])
    if integers is None or not isinstance(block, (list, tuple)) or not block:
        return 0
    return 0 if block[-1] == integers.shape[-1] else int(block[-1])
