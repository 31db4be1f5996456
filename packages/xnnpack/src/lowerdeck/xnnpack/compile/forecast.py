"""Predict which nodes of a quantised program compute in float, without reading weights."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from torch.fx import Node

from lowerdeck.serializer import XnnEncoding
from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import Call
from lowerdeck.xnnpack.operators.quantization import (
    DEQUANTIZE,
    QUANTIZATION,
    QUANTIZE,
    is_weight,
    name_of,
    static_encoding,
)
from lowerdeck.xnnpack.operators.results import following_clamp
from lowerdeck.xnnpack.operators.storage import storage_of
from lowerdeck.xnnpack.operators.table import entry_of
from lowerdeck.xnnpack.payload import FLOAT

UNSEEN = "scales without observation"


def unseen_weights(nodes: Sequence[Node], constants: Collection[str]) -> dict[str, str]:
    """Find weights with the scale 1.0, as from observers never called before ``convert_pt2e``.

    This scale rounds magnitudes below 0.5 to 0.

    Args:
        constants: Names of constant placeholders.

    Returns:
        Advice by name of the weight's dequantise node.
    """
    return {
        node.name: "its weight has the scale 1.0, as from an observer that was never run: call "
        "what prepare_pt2e returned, with any inputs if quantised dynamically, before convert_pt2e"
        for node in nodes
        if name_of(node) == DEQUANTIZE
        and is_weight(node, constants)
        and arguments_of(node)["scale"] == 1
        and arguments_of(node)["zero_point"] == 0
    }


def computed_in_float(
    nodes: Sequence[Node], constants: Collection[str], *, halves: bool
) -> dict[str, str]:
    """Return why nodes that read 8-bit integers compute in float.

    Args:
        nodes: The delegated nodes, in graph order.
        constants: Names of constant placeholders.
        halves: Whether float16 is computed in float16.

    Returns:
        Reasons by node name.
    """
    stored: dict[Node, XnnEncoding | None] = {}
    reasons = {}
    # One pass in graph order; walking back from each node would be quadratic.
    weights: set[Node] = set()

    def encoding_of(node: Node) -> XnnEncoding | None:
        is_constant = node.op == "placeholder" and node.name in constants
        return None if is_constant else stored.get(node, FLOAT)

    for node in nodes:
        name, entry, sources = name_of(node), entry_of(node), node.all_input_nodes
        if sources and all(source in weights or source.name in constants for source in sources):
            weights.add(node)
        call = Call(node, arguments_of(node), constants)
        if name in (QUANTIZE, DEQUANTIZE):
            stored[node] = static_encoding(node)
        elif node in weights:
            stored[node] = None
        elif node.target is operator.getitem:
            stored[node] = stored.get(sources[0], FLOAT)
        elif entry is not None and name not in QUANTIZATION and call.args:
            storage = storage_of(call, entry, encoding_of, halves=halves)
            last = following_clamp(node)[0] if entry.clamps else node
            stored[node] = stored[last] = storage.writes
            if storage.in_float is not None:
                reasons[node.name] = storage.in_float
    return reasons
