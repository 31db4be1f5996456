"""A page that shows a program's graph: what went to which backend, and why the rest did not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.inspect import html_page
from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG, REJECT
from lowerdeck.torch_base import (
    attribute_of,
    executorch_call_delegate,
    is_getitem,
    module_path,
    source_frame,
)

_LONGEST = 300


def graph_html(
    program: ExportedProgram,
    *,
    reasons: Mapping[str, str] = MappingProxyType({}),
    title: str = "program",
) -> str:
    """Return a page that shows the graph with each partition in its colour.

    Delegates are shown by the nodes inside them. Tags of a partitioner that were not lowered yet
    are shown as partitions, too. Weights are named with the nodes that read them.

    Args:
        program: The program, before or after :func:`to_backend`.
        reasons: For names of nodes why no partition took them, where the partitioner did not say
            so through a :class:`WhyNoPartitionReporter`.
        title: What to call the program.

    Returns:
        The text of one HTML page that needs no network, to be written as UTF-8.

    Raises:
        LoweringError: It is no exported program.

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
            f"found a {type(program).__name__}, expected an exported program: torch.export.export"
        )
    picture = _Picture(dict(reasons))
    picture.add_program(program)
    style, script = (
        files(__package__).joinpath(f"graph_page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    return html_page(picture.data(title), title, script=script, style=style)


class _Picture:
    """Nodes of all graphs in one list, each after what it needs.

    Args:
        reasons: For names of nodes why no partition took them.
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        self._reasons = reasons
        # As the script of the page reads them.
        self._nodes: list[dict[str, Any]] = []
        self._groups: list[dict[str, Any]] = []
        self._tags: dict[str, int] = {}

    def add_program(self, program: ExportedProgram) -> None:
        """Add the nodes of a whole program.

        Args:
            program: The program; its delegates are shown by the nodes inside them.
        """
        self._add_graph(program.graph_module, _user_inputs(program), {}, -1)

    def data(self, title: str) -> dict[str, Any]:
        """Return what the script draws.

        Args:
            title: What to call the program.
        """
        return {"title": title, "groups": self._groups, "nodes": self._nodes}

    def _add_graph(
        self,
        graph_module: GraphModule,
        inputs: frozenset[str] | None,
        made_by: dict[Node, list[int]],
        group: int,
    ) -> None:
        """Add the nodes of one graph; ``made_by`` says what stands for values from outside."""
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                self._add_input(node, inputs, made_by)
            elif node.op == "call_function" and node.target is executorch_call_delegate:
                self._add_delegate(graph_module, node, made_by)
            elif is_getitem(node):
                made_by.setdefault(node, made_by.get(cast("Node", node.args[0]), []))
            elif node.op == "call_function":
                for child in _graphs_of_call(graph_module, node):
                    self._add_branch(child, node, made_by, group)
                made_by[node] = [self._add(node, "op", self._group_of(node, group), made_by)]
            elif node.op == "output" and group < 0:
                self._add(node, "output", -1, made_by)

    def _add_input(
        self, node: Node, inputs: frozenset[str] | None, made_by: dict[Node, list[int]]
    ) -> None:
        if node not in made_by and (inputs is None or node.name in inputs):
            made_by[node] = [self._add(node, "input", -1, made_by)]

    def _add_delegate(
        self, graph_module: GraphModule, node: Node, made_by: dict[Node, list[int]]
    ) -> None:
        """Add the nodes inside a delegate, so that the picture shows what it computes."""
        handle, *args = cast("list[Node]", list(node.args))
        delegate = cast("LoweredBackendModule", attribute_of(graph_module, handle))
        number = len(self._groups)
        specs = [f"{spec.key} = {_brief(spec.value)}" for spec in delegate.compile_specs]
        self._add_group(
            str(handle.target), delegate.backend_id, len(delegate.processed_bytes), specs
        )
        inner = delegate.original_module
        names = _user_inputs(inner)
        holes = [n for n in inner.graph.find_nodes(op="placeholder") if n.name in names]
        inside: dict[Node, list[int]] = {
            hole: made_by.get(arg, [])
            for hole, arg in zip(holes, args, strict=False)
            if isinstance(arg, Node)
        }
        self._add_graph(inner.graph_module, names, inside, number)
        results = [
            inside.get(result, []) if isinstance(result, Node) else []
            for result in _results(inner.graph_module)
        ]
        made_by[node] = sorted({one for result in results for one in result})
        for user in node.users:
            if is_getitem(user) and isinstance(user.args[1], int) and user.args[1] < len(results):
                made_by[user] = results[user.args[1]]

    def _add_branch(
        self, child: GraphModule, call: Node, made_by: dict[Node, list[int]], group: int
    ) -> None:
        """Add the nodes of a branch or body; its inputs stand for whatever the call reads."""
        outside = sorted({one for arg in call.all_input_nodes for one in made_by.get(arg, [])})
        inside = dict.fromkeys(child.graph.find_nodes(op="placeholder"), outside)
        before = len(self._nodes)
        self._add_graph(child, None, inside, group)
        made_by.setdefault(call, []).extend(range(before, len(self._nodes)))

    def _reason(self, node: Node) -> str:
        return self._reasons.get(node.name) or node.meta.get(REJECT) or "no partitioner took it"

    def _group_of(self, node: Node, group: int) -> int:
        tag = node.meta.get(DELEGATION_TAG)
        if group >= 0 or not isinstance(tag, str):
            return group
        if tag not in self._tags:
            self._tags[tag] = len(self._groups)
            self._add_group(tag, "tagged, not lowered", None, [])
        return self._tags[tag]

    def _add_group(self, name: str, backend: str, nbytes: int | None, specs: list[str]) -> None:
        self._groups.append({"name": name, "backend": backend, "nbytes": nbytes, "specs": specs})

    def _add(self, node: Node, kind: str, group: int, made_by: dict[Node, list[int]]) -> int:
        needs = {one for arg in node.all_input_nodes for one in made_by.get(arg, [])}
        # Results of the branches of a call are what the call itself needs.
        needs |= set(made_by.get(node, []))
        # Weights are placeholders that stand for no node of the picture.
        constants = [
            arg.name
            for arg in node.all_input_nodes
            if arg.op == "placeholder" and arg not in made_by
        ]
        left_out = kind == "op" and group < 0
        self._nodes.append(
            {
                "name": node.name,
                "label": _brief(_label(node)),
                "kind": kind,
                "group": group,
                "needs": sorted(needs),
                "constants": constants,
                "type": _brief(_type(node.meta.get("val"))),
                "place": _brief(_line(node)),
                "reason": _brief(self._reason(node)) if left_out else "",
            }
        )
        return len(self._nodes) - 1


def _user_inputs(program: ExportedProgram) -> frozenset[str]:
    return frozenset(str(name) for name in program.graph_signature.user_inputs)


def _graphs_of_call(graph_module: GraphModule, call: Node) -> Iterator[GraphModule]:
    for arg in call.all_input_nodes:
        if arg.op == "get_attr":
            child = attribute_of(graph_module, arg)
            if isinstance(child, GraphModule):
                yield child


def _results(graph_module: GraphModule) -> Sequence[object]:
    (output,) = graph_module.graph.find_nodes(op="output")
    results = output.args[0]
    return results if isinstance(results, tuple | list) else [results]


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


def _line(node: Node) -> str:
    """Return the module path, and the innermost line outside torch."""
    frame = source_frame(node)
    line = f"{frame.file}:{frame.line}" if frame else ""
    return ", ".join(part for part in (module_path(node), line) if part)


def _brief(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
