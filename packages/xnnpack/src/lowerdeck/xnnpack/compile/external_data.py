"""Constants of tagged weights, stored in separate `.ptd` files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node

from lowerdeck.serializer import NamedDataStore, NamedDataStoreOutput, XnnGraph, XnnNode
from lowerdeck.xnnpack.emit import Emission

ALIGNMENT = 16
TAG = "delegate_constant_tag"
"""Key of the `.ptd` file name in a placeholder's custom metadata, set by ExecuTorch's pass
``delegate_external_constants_pass_unlifted``.
"""


def data_by_file(emission: Emission, graph: Graph) -> NamedDataStoreOutput:
    """Return a partition's constants for the `.pte`, and by tag for `.ptd` files.

    XNNPACK's constants do not map one to one to weights: batch norms are folded in, and scales are
    separate. An operator's constants go to the file of its first tagged weight.
    """
    store = NamedDataStore()
    for constant in emission.graph.constants[1:]:
        store.add_named_data(str(constant.key), emission.data[constant], alignment=ALIGNMENT)
    output = store.get_named_data_store_output()
    tags = _tags(emission, graph)
    if not tags:
        return output
    for node, sources in zip(emission.graph.nodes, emission.sources, strict=True):
        tag = _first_tag(sources, tags)
        for key in _keys(node, emission.graph) if tag is not None else ():
            entry = output.pte_data.pop(key, None)
            if entry is not None:  # otherwise an earlier operator stored the same bytes
                output.external_data.setdefault(str(tag), {})[key] = entry
    return output


def _tags(emission: Emission, graph: Graph) -> dict[Node, str]:
    """Return the tags of tagged weights, and of values computed only from weights."""
    tags: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            tag = (node.meta.get("custom") or {}).get(TAG)
        else:
            tag = _first_of(node.all_input_nodes, tags)
        if tag is not None and node in emission and emission.of(node).is_constant:
            tags[node] = tag
    return tags


def _first_tag(sources: Sequence[Node], tags: dict[Node, str]) -> str | None:
    return _first_of(
        (candidate for node in sources for candidate in (node, *node.all_input_nodes)), tags
    )


def _first_of(nodes: Iterable[Node], tags: dict[Node, str]) -> str | None:
    return next((tags[node] for node in nodes if node in tags), None)


def _keys(node: XnnNode, payload: XnnGraph) -> list[str]:
    """Return the keys of the constants and scales that a payload node reads."""
    values = [payload.values[value_id] for value_id in (*node.inputs, *node.outputs)]
    constants = [
        value_id
        for value in values
        for value_id in (value.constant, value.encoding.scale_constant)
    ]
    return [
        value_id.key for value_id in constants if value_id is not None and value_id.key is not None
    ]
