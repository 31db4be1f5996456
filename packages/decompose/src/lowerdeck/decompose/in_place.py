"""Fast functionalization for in-place calls such as ``relu_`` on values without aliases.

Each call is replaced by its functional variant, and nothing is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from lowerdeck.decompose.untraced import functional_variant
from lowerdeck.torch_base import (
    MemoryUse,
    OpOverload,
    copy_graph_module,
    graphs_of,
    with_parts,
    writes_in_place,
)


def replace_in_place_calls(program: ExportedProgram) -> ExportedProgram | None:
    """Return a copy of a program with functional variants of in-place calls.

    Node names, metadata and order are unchanged.

    Returns:
        The copy, which shares all tensors; None if mutated memory has aliases, or if an operator
        that mutates it has no functional variant.
    """
    if any(map(writes_in_place, list(graphs_of(program.graph_module))[1:])):
        return None
    # Overlaps of inputs do not matter: a program that writes an input is not handled here.
    memory = MemoryUse(program.graph, program.graph_module)
    variants: dict[Node, OpOverload] = {}
    variants_by_kind: dict[Any, OpOverload | None] = {}
    names: dict[Node, list[Node]] = {}
    for node in program.graph.nodes:
        if memory.writers(node):
            names.setdefault(memory.group(node), []).append(node)
        if memory.writes(node):
            variant = _variant(node, variants_by_kind)
            if variant is None:
                return None
            variants[node] = variant
    outputs = set(program.graph.output_node().all_input_nodes)
    for nodes in names.values():
        # Views after the last write read the last variant.
        while nodes[-1] not in variants:
            nodes.pop()
        maker, *others = nodes
        if maker.op != "call_function" or maker in outputs or not _is_tensor(maker):
            return None
        if not all(node in variants for node in others):
            return None
    maker_of = {node: nodes[0] for nodes in names.values() for node in nodes}
    return _rewritten(program, variants, maker_of)


def _variant(node: Node, variants_by_kind: dict[Any, OpOverload | None]) -> OpOverload | None:
    """Return the functional variant of an in-place call, None if its metadata would differ.

    Args:
        variants_by_kind: Cache of variants; updated in place.
    """
    if not isinstance(node.target, OpOverload) or not node.args:
        return None
    tensors: list[Any] = [source.meta.get("val") for source in node.all_input_nodes]
    first, *others = (_facts(value) for value in tensors)
    if first is None or any(facts != first for facts in others):
        return None
    kinds = tuple(map(type, (*node.args, *node.kwargs.values())))
    by_element = torch.Tag.pointwise in node.target.tags and tensors[0].is_contiguous()
    # Whether an elementwise variant keeps this metadata does not depend on the sizes.
    key = (node.target, first[2:] if by_element else first, kinds, tuple(node.kwargs))
    if key not in variants_by_kind:
        variants_by_kind[key] = _checked_variant(node, first)
    return variants_by_kind[key]


def _checked_variant(node: Node, facts: tuple[Any, ...]) -> OpOverload | None:
    # In-place comparisons keep their argument's dtype; functional variants return bool.
    variant = functional_variant(node.target)
    if variant is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return variant if _facts(variant(*args, **kwargs)) == facts else None


def _facts(value: object) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return str(value.shape), str(value.stride()), value.dtype, value.device


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _rewritten(
    program: ExportedProgram, variants: Mapping[Node, OpOverload], maker_of: Mapping[Node, Node]
) -> ExportedProgram:
    graph_module = copy_graph_module(program.graph_module)
    copies: dict[Node, Node] = dict(
        zip(program.graph.nodes, graph_module.graph.nodes, strict=True)
    )
    current: dict[Node, Node] = {}
    for node, copied in copies.items():
        for source in node.all_input_nodes:
            maker = maker_of.get(source)
            if maker is not None:
                copied.replace_input_with(copies[source], current[maker])
        if node in variants:
            copied.target = variants[node]
        if node in maker_of:
            current[maker_of[node]] = copied
    return with_parts(program, graph_module=graph_module)
