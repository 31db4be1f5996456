"""Alias analysis: groups of values that may share memory, and their readers and writers.

Conservative, from operator schemas: values of one group may alias; values of different groups do
not, provided that user inputs do not.
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
    """Alias groups of one graph, with their readers and writers.

    Args:
        graph: The graph in topological order; results are invalid after an edit.
        module: Owner of the graph's attributes, if any.
        shared: Groups of nodes that share memory outside of the graph.

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
        self._parent: dict[Node, Node] = {}
        for nodes in shared:
            for node in nodes[1:]:
                self._join(node, nodes[0])
        self._join_attributes(graph, module)
        # In-place shape changes (``t_``, ``resize_``) affect ops that read only metadata.
        self._reshapes = False
        written: list[tuple[Node, Sequence[Node]]] = []
        for node in graph.nodes:
            if node.op in _NOT_COMPUTED:
                continue
            behaviour = self._behaviours.of(node)
            if behaviour.aliases:
                for source in _selected_inputs(node, behaviour.aliased):
                    self._join(node, source)
            if behaviour.effect & Effect.WRITES:
                tags = getattr(node.target, "tags", ())
                self._reshapes |= torch.Tag.inplace_view in tags
                written.append((node, _selected_inputs(node, behaviour.writes)))
        self._writers: dict[Node, list[Node]] = {}
        self._writes: dict[Node, list[Node]] = {}
        for node, sources in written:
            self._writes[node] = self._groups(sources)
            for group in self._writes[node]:
                self._writers.setdefault(group, []).append(node)

    @classmethod
    def of_program(cls, program: ExportedProgram) -> MemoryUse:
        """Return the memory use of the root graph of ``program``.

        Parameters, buffers and constants may alias if their bytes overlap; user inputs are assumed
        not to.
        """
        return cls(program.graph, program.graph_module, shared_inputs(program))

    def group(self, node: Node) -> Node:
        """Return the representative of the alias group of ``node``."""
        root = node
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while node is not root:
            node, self._parent[node] = self._parent.get(node, node), root
        return root

    def writers(self, node: Node) -> Sequence[Node]:
        """Return the nodes that may write the memory of ``node``, in graph order."""
        return self._writers.get(self.group(node), ())

    def writes(self, node: Node) -> Sequence[Node]:
        """Return the alias groups that ``node`` may write."""
        return self._writes.get(node, ())

    def reads(self, node: Node) -> Sequence[Node]:
        """Return the alias groups whose bytes ``node`` may read.

        Metadata-only ops (views, getitem of a tuple, sizes) read none, unless the graph changes
        shapes in place.
        """
        if node.op in {"placeholder", "get_attr"}:
            return ()
        if not self._reshapes and self._reads_metadata_only(node):
            return ()
        return self._groups(node.all_input_nodes)

    def _groups(self, nodes: Iterable[Node]) -> list[Node]:
        return list(dict.fromkeys(map(self.group, nodes)))

    def _join(self, node: Node, other: Node) -> None:
        self._parent[self.group(node)] = self.group(other)

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

    def _reads_metadata_only(self, node: Node) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            source, index = node.args
            value = source.meta.get("val") if isinstance(source, Node) else None
            return isinstance(value, list | tuple) or _is_basic(index)
        return self._behaviours.of(node).reads_metadata_only


def shared_inputs(program: ExportedProgram) -> list[list[Node]]:
    """Return the groups of placeholders whose tensors overlap in memory.

    Args:
        program: Its parameters, buffers and constants are compared.
    """
    return [nodes for nodes in _overlapping(state_tensors(program)) if len(nodes) > 1]


def _overlapping(tensors: Mapping[Node, torch.Tensor]) -> list[list[Node]]:
    """Return the groups of nodes whose tensors overlap; empty tensors are left out."""
    extents = {node: Extent.of(tensor) for node, tensor in tensors.items()}
    memory = MemoryMap(extents.values())
    by_memory: dict[Extent | None, list[Node]] = {}
    for node, extent in extents.items():
        by_memory.setdefault(memory.find(extent), []).append(node)
    # Empty tensors overlap none.
    by_memory.pop(None, None)
    return list(by_memory.values())


def state_tensors(program: ExportedProgram) -> dict[Node, torch.Tensor]:
    """Return the parameter, buffer or constant of each placeholder that has one."""
    placeholders = program.graph.find_nodes(op="placeholder")
    tensors: dict[Node, torch.Tensor] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        value = program.state_dict.get(spec.target, program.constants.get(spec.target))
        if isinstance(value, torch.Tensor):
            tensors[node] = value
    return tensors


def _selected_inputs(node: Node, arguments: Sequence[tuple[int, str]]) -> Sequence[Node]:
    """Return the nodes in the arguments of these positions or names; without any, all inputs."""
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
    # Conservative for keywords that are not in the schema.
    return nodes or node.all_input_nodes


def _is_basic(index: object) -> bool:
    """Return whether an index only selects and slices, so that the result is a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)
