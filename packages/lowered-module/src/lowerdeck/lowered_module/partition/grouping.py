"""Collect the tagged nodes of a graph into the groups to delegate."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping

import torch
from torch.fx import GraphModule, Node

from lowerdeck.lowered_module.errors import PartitionError
from lowerdeck.lowered_module.program.graphs import nodes_of, replace_input
from lowerdeck.lowered_module.program.tags import DECISION, DELEGATION_TAG
from lowerdeck.torch_base import attribute_of, is_getitem

Groups = dict[str, list[Node]]
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


def group_by_tag(graph_module: GraphModule, tags: Container[str]) -> Groups:
    """Return the nodes of each tag in one graph, with the nodes that must be delegated with them.

    A getitem is in the group of its producer, since delegates return single values. Groups include
    the get_attr nodes that they read: branch graphs, earlier delegates, tree specs, and tagged
    tensor attributes. A get_attr node that other nodes read too is duplicated in the graph.

    Args:
        graph_module: One graph; nested graphs have separate groups.
        tags: The tags with a backend; others are ignored.

    Returns:
        The nodes of each tag, in the graph's order, without tags whose results are unused.

    Raises:
        PartitionError: An output or another node that cannot be delegated is tagged.
    """
    groups: Groups = {}
    tag_of: dict[Node, str] = {}
    for node in graph_module.graph.nodes:
        tag = node.meta.get(DELEGATION_TAG)
        if is_getitem(node) and isinstance(node.args[0], Node):
            tag = tag_of.get(node.args[0])
        if tag is None or tag not in tags or node.op in ("placeholder", "get_attr"):
            continue
        if node.op != "call_function":
            raise PartitionError(
                f"{node.op} node {node.name} should not be tagged, found tag {tag!r}; only "
                "computing nodes and the constants they read can be delegated: leave it untagged"
            )
        tag_of[node] = tag
        groups.setdefault(tag, []).append(node)
    for nodes in groups.values():
        _compute_numbers_outside(nodes, tag_of)
    for tag in [tag for tag, nodes in groups.items() if _is_dead(nodes, tag_of, tag)]:
        # The nodes are unread: dead code elimination removes them later.
        for node in groups.pop(tag):
            del tag_of[node]
    for nodes in groups.values():
        _unpack_list_outputs(nodes, tag_of)
    _add_get_attrs(graph_module, groups, tag_of)
    return groups


def strip_tags(graph_module: GraphModule) -> None:
    """Remove tags and decisions from ``graph_module`` and all graphs nested in it, in place."""
    for node in nodes_of(graph_module):
        node.meta.pop(DELEGATION_TAG, None)
        node.meta.pop(DECISION, None)


def _is_dead(nodes: list[Node], tag_of: dict[Node, str], tag: str) -> bool:
    return all(tag_of.get(user) == tag for node in nodes for user in node.users)


def _unpack_list_outputs(nodes: list[Node], tag_of: dict[Node, str]) -> None:
    """Replace uses of a list outside of its group by getitems inside of the group."""
    for node in list(nodes):
        value = node.meta.get("val")
        readers = [user for user in node.users if tag_of.get(user) != tag_of[node]]
        if not isinstance(value, list | tuple) or not readers:
            continue
        parts: list[Node] = []
        with node.graph.inserting_after(node):
            for index in reversed(range(len(value))):
                part = node.graph.call_function(operator.getitem, (node, index))
                part.meta = {"val": value[index], DELEGATION_TAG: tag_of[node]}
                tag_of[part] = tag_of[node]
                parts.insert(0, part)
        nodes.extend(parts)
        for reader in readers:
            replace_input(reader, node, list(parts))


def _compute_numbers_outside(nodes: list[Node], tag_of: dict[Node, str]) -> None:
    """Recompute numbers of a partition, such as sizes, for uses outside of it.

    Delegates return tensors only. Recomputing a number is cheap; the tensor that it is read from
    becomes an output of the partition instead.
    """
    copies: dict[Node, Node] = {}
    for node in nodes:
        readers = [user for user in node.users if tag_of.get(user) != tag_of[node]]
        if not readers or not isinstance(node.meta.get("val"), _NUMBERS):
            continue
        copied = _copy_outside(node, tag_of, copies)
        for reader in readers:
            reader.replace_input_with(node, copied)
    for node in reversed(copies):
        if not node.users:
            del tag_of[node]
            node.graph.erase_node(node)
    nodes[:] = [node for node in nodes if node in tag_of]


def _copy_outside(node: Node, tag_of: Mapping[Node, str], copies: dict[Node, Node]) -> Node:
    """Return a copy of ``node`` that reads only tensors of its partition."""
    waiting = [node]
    while waiting:
        current = waiting[-1]
        numbers = [
            source
            for source in current.all_input_nodes
            if tag_of.get(source) == tag_of[node] and isinstance(source.meta.get("val"), _NUMBERS)
        ]
        missing = [source for source in numbers if source not in copies]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if current not in copies:
            with current.graph.inserting_after(current):
                copied = current.graph.node_copy(current, lambda arg: copies.get(arg, arg))
            copied.meta.pop(DELEGATION_TAG, None)
            copies[current] = copied
    return copies[node]


def _add_get_attrs(graph_module: GraphModule, groups: Groups, tag_of: dict[Node, str]) -> None:
    added: dict[str, list[Node]] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        readers: dict[str | None, list[Node]] = {}
        for user in node.users:
            readers.setdefault(tag_of.get(user), []).append(user)
        here = [tag for tag in readers if tag is not None]
        if not here or (_is_data(graph_module, node) and DELEGATION_TAG not in node.meta):
            continue
        for tag in here:
            own = node
            if len(readers) > 1:
                with graph_module.graph.inserting_after(node):
                    own = graph_module.graph.node_copy(node)
                for reader in readers[tag]:
                    reader.replace_input_with(node, own)
            added.setdefault(tag, []).append(own)
        if not node.users:
            graph_module.graph.erase_node(node)
    for tag, attributes in added.items():
        groups[tag] = attributes + groups[tag]


def _is_data(graph_module: GraphModule, node: Node) -> bool:
    # Other attributes are modules or tree specs.
    return hasattr(attribute_of(graph_module, node), "dtype")
