"""Users of dynamically quantised rows: layers with integer weights, and others.

The runtime quantises rows only as inputs of layers with integer weights. Any other user in the
delegate would read float rows that are not rounded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch.fx import Node

from lowerdeck.torch_base import arguments_of
from lowerdeck.xnnpack.emit import named, shape_of
from lowerdeck.xnnpack.operators.contract import ASSERTION

_aten = torch.ops.aten
CONVOLUTIONS = named(
    "conv1d conv1d.padding conv2d conv2d.padding convolution "
    "conv_transpose1d conv_transpose2d.input"
)
"""Convolutions that support integer weights."""
_LAYERS: Mapping[object, tuple[str, str]] = {
    _aten.linear.default: ("input", "weight"),
    _aten.addmm.default: ("mat1", "mat2"),
    _aten.mm.default: ("self", "mat2"),
    _aten.matmul.default: ("self", "other"),
    **dict.fromkeys(CONVOLUTIONS, ("input", "weight")),
}
"""Layers that quantise their rows, with the names of their row and weight arguments."""
_SAME_ROWS = frozenset(
    named(
        "view reshape _unsafe_view unsqueeze squeeze.dim flatten.using_ints to.dtype _to_copy "
        "clone alias detach"
    )
)
"""Operators that do not change rows, if the row length stays the same."""
_TURNS = frozenset(named("t permute transpose.int numpy_T"))
_SAME_WEIGHTS = _SAME_ROWS | _TURNS


def unrounded_reader(
    node: Node, chain: Collection[str], is_weight: Callable[[Node], bool]
) -> Node | None:
    """Return a user of a chain's rows that does not quantise them, or None.

    Args:
        node: A node of the chain: it chooses scales, quantises or dequantises.
        chain: Names of the operators that occur in chains of dynamic quantisation.
        is_weight: Whether a node dequantises constant weights.
    """
    waiting, seen = [node], {node}
    while waiting:
        source = waiting.pop()
        for reader in source.users:
            if reader in seen or reader.target is ASSERTION:
                continue
            if _keeps_rows(reader, source, chain):
                seen.add(reader)
                waiting.append(reader)
            elif not _rounds(reader, source, is_weight):
                return reader
    return None


def layers_of(weight: Node) -> Iterator[Node]:
    """Yield the layers that multiply by a weight, or by its transpose.

    Args:
        weight: A node that dequantises constant weights.
    """
    waiting = [weight]
    while waiting:
        source = waiting.pop()
        for reader in source.users:
            if reader.target in _SAME_WEIGHTS:
                waiting.append(reader)
            names = _LAYERS.get(reader.target)
            if names is not None and arguments_of(reader)[names[1]] is source:
                yield reader


def rows_of(layer: Node) -> Node:
    """Return the producer of a layer's rows, skipping views of whole rows."""
    rows: Node = arguments_of(layer)[_LAYERS[layer.target][0]]
    while rows.target in _SAME_ROWS and isinstance(rows.args[0], Node):
        rows = rows.args[0]
    return rows


def reads_rows_of(layer: Node, weight: Node) -> bool:
    """Return whether a layer is a ``linear`` whose weight is not transposed.

    Args:
        weight: The argument of :func:`layers_of` that yielded the layer.
    """
    node = arguments_of(layer)[_LAYERS[layer.target][1]]
    while node is not weight and node.target not in _TURNS:
        node = node.args[0]
    return node is weight and layer.target is _aten.linear.default


def _keeps_rows(reader: Node, source: Node, chain: Collection[str]) -> bool:
    if str(reader.target) in chain or reader.target is operator.getitem:
        return True
    if reader.target not in _SAME_ROWS:
        return False
    before, after = shape_of(source), shape_of(reader)
    return bool(before and after) and before[-1] == after[-1]


def _rounds(reader: Node, source: Node, is_weight: Callable[[Node], bool]) -> bool:
    names = _LAYERS.get(reader.target)
    if names is None:
        return False
    args = arguments_of(reader)
    rows, weight = (args[name] for name in names)
    alone = rows is source and reader.all_input_nodes.count(source) == 1 and weight is not source
    while isinstance(weight, Node) and weight.target in _SAME_WEIGHTS:
        weight = weight.args[0]
    return alone and isinstance(weight, Node) and is_weight(weight)
