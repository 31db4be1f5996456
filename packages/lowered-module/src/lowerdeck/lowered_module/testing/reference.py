"""A backend and partitioners that accept any operator, to test code that uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.lowered_module.authoring.backend import (
    BackendDetails,
    CompileSpec,
    PreprocessResult,
)
from lowerdeck.lowered_module.authoring.delegate_mapping import DelegateMappingBuilder
from lowerdeck.lowered_module.authoring.partitioner import (
    DelegationSpec,
    Partitioner,
    PartitionResult,
)
from lowerdeck.lowered_module.program.constants import tag_constant_data, tag_mutated_buffer
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.graphs import nodes_of
from lowerdeck.lowered_module.program.tags import DELEGATION_TAG
from lowerdeck.torch_base import graphs_of


class VerbatimBackend(BackendDetails):
    """Backend that validates the partition and returns its graph as text."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Return the graph as text, each line mapped to its node.

        Args:
            compile_specs: Printed above the graph.
        """
        edge_program.validate()  # type: ignore[no-untyped-call]
        maps = DelegateMappingBuilder(generated_identifiers=True)
        lines = [f"{spec.key}={spec.value!r}" for spec in compile_specs]
        for node in edge_program.graph.nodes:
            lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")
            if HANDLE in node.meta:
                maps.insert_delegate_mapping_entry(nodes=node)
        return PreprocessResult("\n".join(lines).encode(), maps.get_delegate_mapping())


class TaggingPartitioner(Partitioner):
    """Partitioner that tags nodes by a function, also in nested graphs.

    Args:
        tag_of: Returns a node's tag, or None.
        constants: Whether partitions own the constants that they read.
        state: Whether partitions own the buffers whose new values they compute.
    """

    def __init__(
        self,
        tag_of: Callable[[Node], str | None],
        *,
        backend_id: str = "VerbatimBackend",
        constants: bool = True,
        state: bool = True,
        compile_specs: tuple[CompileSpec, ...] = (),
    ) -> None:
        super().__init__()
        self.tag_of = tag_of
        self.backend_id = backend_id
        self.constants = constants
        self.state = state
        self.compile_specs = compile_specs

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with tags."""
        tags: dict[str, DelegationSpec] = {}
        for node in nodes_of(exported_program.graph_module):
            tag = self.tag_of(node) if node.op == "call_function" else None
            if tag is not None:
                node.meta[DELEGATION_TAG] = tag
                tags[tag] = DelegationSpec(self.backend_id, list(self.compile_specs))
        if self.constants:
            tag_constant_data(exported_program)
        if self.state:
            tag_mutated_buffer(exported_program)
        return PartitionResult(exported_program, tags)


def _runs_of(graph_module: GraphModule, chosen: Callable[[Node], bool]) -> dict[Node, str]:
    """Return a tag for each chosen node, one for each run of consecutive chosen nodes.

    Runs are convex, as no other node is between their nodes.

    Args:
        graph_module: The outermost graph; nested ones get separate tags.
        chosen: Returns whether to tag a node.
    """
    tags: dict[Node, str] = {}
    number = 0
    for gm in graphs_of(graph_module):
        previous: Any = None
        for node in gm.graph.nodes:
            if node.op != "call_function" or not chosen(node):
                previous = None
                continue
            if previous is None:
                number += 1
            tags[node] = previous = f"run {number}"
    return tags


class RunPartitioner(TaggingPartitioner):
    """Partitioner with one partition for each run of consecutive nodes that a function chooses.

    Args:
        chosen: Returns whether to delegate a node.
        **options: ``constants`` and ``state`` of ``TaggingPartitioner``.
    """

    def __init__(self, chosen: Callable[[Node], bool], **options: Any) -> None:
        super().__init__(lambda _: None, **options)
        self.chosen = chosen

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with tags."""
        tags = _runs_of(exported_program.graph_module, self.chosen)
        self.tag_of: Callable[[Node], str | None] = tags.get
        return super().partition(exported_program)
