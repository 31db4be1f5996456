"""Aliases in a graph: which values may share memory, and which nodes read and write it.

Derived from operator schemas, without reading data. Two values of one group may share memory, two
of different groups do not: a pass that moves or cuts nodes is too careful at worst.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.torch_base.graphs import attribute_of
from lowerdeck.torch_base.node_effects import Behaviours
from lowerdeck.torch_base.op_effects import Effect
from lowerdeck.torch_base.storage import Extent, MemoryMap

_NOT_COMPUTED = frozenset({"placeholder", "get_attr", "output"})


class MemoryUse:
    """The memory of one graph: groups of values that may share it, who reads and who writes them.

    The cost is linear in nodes and edges.

    Args:
        graph: The graph, in a legal order; build another ``MemoryUse`` after an edit.
        module: The module that holds what the graph's nodes name; None for none.
        shared: Nodes that share memory from outside, a list for each memory.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         y = x + 1
        ...         y[0].mul_(2)
        ...         return y
        >>> program = torch.export.export(Model(), (torch.ones(2, 2),))
        >>> x, add, select, mul_, _ = program.graph.nodes
        >>> memory = MemoryUse.of_program(program)
        >>> memory.group(select) is memory.group(add), memory.group(add) is memory.group(x)
        (True, False)
        >>> [node.name for node in memory.writers(add)]
        ['mul_']
    """

    def __init__(
        self,
        graph: Graph,
        module: torch.nn.Module | None = None,
        shared: Iterable[Sequence[Node]] = (),
    ) -> None:
        self._behaviours = Behaviours(module)
        self._above: dict[Node, Node] = {}
        for nodes in shared:
            for node in nodes[1:]:
                self._join(node, nodes[0])
        self._join_attributes(graph, module)
        # In-place changes of shape (``t_``, ``resize_``) are seen by what only looks.
        self._reshapes = False
        written: list[tuple[Node, Sequence[Node]]] = []
        for node in graph.nodes:
            if node.op in _NOT_COMPUTED:
                continue
            behaviour = self._behaviours.of(node)
            if behaviour.aliases:
                for source in _chosen(node, behaviour.aliased):
                    self._join(node, source)
            if behaviour.effect & Effect.WRITES:
                tags = getattr(node.target, "tags", ())
                self._reshapes |= torch.Tag.inplace_view in tags
                written.append((node, _chosen(node, behaviour.writes)))
        self._writers: dict[Node, list[Node]] = {}
        self._writes: dict[Node, list[Node]] = {}
        for node, sources in written:
            self._writes[node] = self._groups(sources)
            for group in self._writes[node]:
                self._writers.setdefault(group, []).append(node)

    @classmethod
    def of_program(cls, program: ExportedProgram) -> MemoryUse:
        """Return the memory of the outermost graph of ``program``.

        Parameters, buffers and constants that share a storage share memory here. Two inputs of
        the user are taken not to.

        Args:
            program: Any exported program, straight from export or decomposed.
        """
        return cls(program.graph, program.graph_module, shared_inputs(program))

    def group(self, node: Node) -> Node:
        """Return the representative of all values that ``node`` may share memory with."""
        root = node
        while (above := self._above.get(root, root)) is not root:
            root = above
        while node is not root:
            node, self._above[node] = self._above.get(node, node), root
        return root

    def writers(self, node: Node) -> Sequence[Node]:
        """Return the nodes that may write the memory of ``node``, in the graph's order."""
        return self._writers.get(self.group(node), ())

    def writes(self, node: Node) -> Sequence[Node]:
        """Return the groups that ``node`` may write."""
        return self._writes.get(node, ())

    def reads(self, node: Node) -> Sequence[Node]:
        """Return the groups whose bytes ``node`` may read.

        What only looks at how memory is seen (a view, an element of a tuple, a question about a
        shape) reads none, unless the graph changes shapes in place.
        """
        if node.op in {"placeholder", "get_attr"}:
            return ()
        if not self._reshapes and self._only_looks(node):
            return ()
        return self._groups(node.all_input_nodes)

    def _groups(self, nodes: Iterable[Node]) -> list[Node]:
        return list(dict.fromkeys(map(self.group, nodes)))

    def _join(self, node: Node, other: Node) -> None:
        self._above[self.group(node)] = self.group(other)

    def _join_attributes(self, graph: Graph, module: torch.nn.Module | None) -> None:
        by_path: dict[str, Node] = {}
        tensors: dict[Node, torch.Tensor] = {}
        for node in graph.find_nodes(op="get_attr"):
            first = by_path.setdefault(str(node.target), node)
            self._join(node, first)
            value = attribute_of(module, node) if module is not None and first is node else None
            if isinstance(value, torch.Tensor):
                tensors[node] = value
        for nodes in _overlapping(tensors):
            for node in nodes:
                self._join(node, nodes[0])

    def _only_looks(self, node: Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            source, index = node.args
            value = source.meta.get("val") if isinstance(source, Node) else None
            return isinstance(value, list | tuple) or _is_basic(index)
        return self._behaviours.of(node).only_looks


def shared_inputs(program: ExportedProgram) -> list[list[Node]]:
    """Return the placeholders of ``program`` whose tensors share memory, a list for each memory.

    Args:
        program: Its parameters, buffers and constants are compared.
    """
    return [nodes for nodes in _overlapping(state_tensors(program)) if len(nodes) > 1]


def _overlapping(tensors: Mapping[Node, torch.Tensor]) -> list[list[Node]]:
    """Return the nodes of tensors that share memory, a list for each memory."""
    extents = {node: Extent.of(tensor) for node, tensor in tensors.items()}
    memory = MemoryMap(extents.values())
    by_memory: dict[Extent | None, list[Node]] = {}
    for node, extent in extents.items():
        by_memory.setdefault(memory.find(extent), []).append(node)
    # Empty tensors are in no memory.
    by_memory.pop(None, None)
    return list(by_memory.values())


def state_tensors(program: ExportedProgram) -> dict[Node, torch.Tensor]:
    """Return the tensor of each placeholder of ``program`` that has one.

    Args:
        program: Any exported program; with parameters, buffers and constants.
    """
    placeholders = program.graph.find_nodes(op="placeholder")
    tensors: dict[Node, torch.Tensor] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = program.state_dict.get(spec.target, program.constants.get(spec.target))
        if isinstance(value, torch.Tensor):
            tensors[node] = value
    return tensors


def _chosen(node: Node, arguments: Sequence[tuple[int, str]]) -> Sequence[Node]:
    """Return the nodes among the arguments at these positions or of these names; all for none."""
    if not arguments:
        return node.all_input_nodes
    nodes: list[Node] = []
    for index, name in arguments:
        argument: Any = node.kwargs.get(name)
        if 0 <= index < len(node.args):
            argument = node.args[index]
        if isinstance(argument, Node):
            nodes.append(argument)
        elif isinstance(argument, (list, tuple)):
            nodes.extend(item for item in argument if isinstance(item, Node))
    # A keyword under another name than the schema's: be careful rather than wrong.
    return nodes or node.all_input_nodes


def _is_basic(index: object) -> bool:
    """Return whether an index only selects and slices, so that what it gives is a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)
