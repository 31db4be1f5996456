"""HTML page of a program's graph: partitions, and reasons for nodes outside of them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.inspect import html_page
from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.inspect.summary import source_line
from lowerdeck.lowered_module.program.graphs import computes_tensor, outputs_of, user_inputs
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG, REJECT
from lowerdeck.torch_base import attribute_of, executorch_call_delegate, is_getitem, module_path

_LONGEST = 300


def graph_html(
    program: ExportedProgram,
    *,
    reasons: Mapping[str, str] = MappingProxyType({}),
    title: str = "program",
) -> str:
    """Return a page that shows the graph with each partition in its colour.

    Delegates are shown by their nodes. Tags that are not lowered yet are also shown as partitions.
    Weights are shown with the nodes that read them.

    Args:
        program: The program, before or after :func:`to_backend`.
        reasons: Why nodes are not delegated, by node name, if the partitioner did not use a
            :class:`WhyNoPartitionReporter`.
        title: Title of the page.

    Returns:
        The text of one HTML page without external resources, to be written as UTF-8.

    Raises:
        LoweringError: ``program`` is not an exported program.

    Example:
        >>> import torch
        >>> from lowerdeck.lowered_module import graph_html
        >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
        >>> page = graph_html(program, reasons={"relu": "no backend was asked"})
        >>> "no backend was asked" in page
        True
    """
    if not isinstance(program, ExportedProgram):
        raise LoweringError(
            f"found a {type(program).__name__}, expected an ExportedProgram: export it first"
        )
    picture = _Picture(reasons)
    picture.add_graph(program.graph_module, user_inputs(program), {}, -1)
    style, script = (
        files(__package__).joinpath(f"graph_page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    data = {"title": title, "groups": picture.groups, "nodes": picture.nodes}
    return html_page(data, title, script=script, style=style)


class _Picture:
    """Nodes of all graphs in one topologically sorted list, for the page's script."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.groups: list[dict[str, Any]] = []
        self._reasons = reasons
        self._tags: dict[str, int] = {}

    def add_graph(
        self,
        graph_module: GraphModule,
        inputs: Container[Node] | None,
        made_by: dict[Node, list[int]],
        group: int,
    ) -> None:
        """Add the nodes of one graph.

        Args:
            graph_module: The graph; its delegates are shown by their nodes.
            inputs: The placeholders to show; None for all.
            made_by: Indices of the boxes that each value comes from; includes the graph's inputs.
            group: Index of the delegate that contains the graph; -1 outside of all delegates.
        """
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                if node not in made_by and (inputs is None or node in inputs):
                    made_by[node] = [self._add(node, "input", -1, made_by)]
            elif node.op == "call_function" and node.target is executorch_call_delegate:
                self._add_delegate(graph_module, node, made_by)
            elif is_getitem(node):
                made_by.setdefault(node, made_by.get(cast("Node", node.args[0]), []))
            elif node.op == "call_function" and not computes_tensor(node):
                # Assertions and sizes are not shown; values computed from them depend on their
                # inputs.
                args = node.all_input_nodes
                made_by[node] = sorted({box for arg in args for box in made_by.get(arg, [])})
            elif node.op == "call_function":
                for arg in node.all_input_nodes:
                    child = attribute_of(graph_module, arg) if arg.op == "get_attr" else None
                    if isinstance(child, GraphModule):
                        self._add_branch(child, node, made_by, group)
                made_by[node] = [self._add(node, "op", self._group_of(node, group), made_by)]
            elif node.op == "output" and group < 0:
                self._add(node, "output", -1, made_by)

    def _add_delegate(
        self, graph_module: GraphModule, node: Node, made_by: dict[Node, list[int]]
    ) -> None:
        """Add the nodes of a delegate."""
        handle, *args = cast("list[Node]", list(node.args))
        delegate = cast("LoweredBackendModule", attribute_of(graph_module, handle))
        number = len(self.groups)
        specs = [f"{spec.key} = {_brief(spec.value)}" for spec in delegate.compile_specs]
        nbytes = len(delegate.processed_bytes)
        self._add_group(str(handle.target), delegate.backend_id, nbytes, specs)
        inner = delegate.original_module
        holes = user_inputs(inner)
        inside = {
            hole: made_by.get(arg, [])
            for hole, arg in zip(holes, args, strict=False)
            if isinstance(arg, Node)
        }
        self.add_graph(inner.graph_module, holes, inside, number)
        results = [inside.get(value, []) for value, _ in outputs_of(inner)]
        made_by[node] = sorted({source for result in results for source in result})
        for user in node.users:
            if is_getitem(user) and isinstance(user.args[1], int) and user.args[1] < len(results):
                made_by[user] = results[user.args[1]]

    def _add_branch(
        self, child: GraphModule, call: Node, made_by: dict[Node, list[int]], group: int
    ) -> None:
        """Add the nodes of a branch or body; its inputs are the values that the call reads."""
        outside = sorted(
            {source for arg in call.all_input_nodes for source in made_by.get(arg, [])}
        )
        inside = dict.fromkeys(child.graph.find_nodes(op="placeholder"), outside)
        before = len(self.nodes)
        self.add_graph(child, None, inside, group)
        made_by.setdefault(call, []).extend(range(before, len(self.nodes)))

    def _group_of(self, node: Node, group: int) -> int:
        tag = node.meta.get(DELEGATION_TAG)
        if group >= 0 or not isinstance(tag, str):
            return group
        if tag not in self._tags:
            self._tags[tag] = len(self.groups)
            self._add_group(tag, "tagged, not lowered", None, [])
        return self._tags[tag]

    def _add_group(self, name: str, backend: str, nbytes: int | None, specs: list[str]) -> None:
        self.groups.append({"name": name, "backend": backend, "nbytes": nbytes, "specs": specs})

    def _add(self, node: Node, kind: str, group: int, made_by: dict[Node, list[int]]) -> int:
        needs = {source for arg in node.all_input_nodes for source in made_by.get(arg, [])}
        # The call depends on the results of its branches.
        needs |= set(made_by.get(node, []))
        # Weights are placeholders without a node in the picture.
        constants = [
            arg.name
            for arg in node.all_input_nodes
            if arg.op == "placeholder" and arg not in made_by
        ]
        why = self._reasons.get(node.name) or node.meta.get(REJECT) or "no partitioner selected it"
        self.nodes.append(
            {
                "name": node.name,
                "label": _brief(_label(node)),
                "kind": kind,
                "group": group,
                "needs": sorted(needs),
                "constants": constants,
                "type": _brief(_type(node.meta.get("val"))),
                "place": _brief(", ".join(filter(None, (module_path(node), source_line(node))))),
                "reason": _brief(why) if kind == "op" and group < 0 else "",
            }
        )
        return len(self.nodes) - 1


def _label(node: Node) -> str:
    if node.op != "call_function":
        return node.name
    name = getattr(node.target, "name", None)
    return str(name()) if callable(name) else getattr(node.target, "__name__", str(node.target))


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(_type(item) for item in value[:8])})"
    return "" if value is None else str(value)


def _brief(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
