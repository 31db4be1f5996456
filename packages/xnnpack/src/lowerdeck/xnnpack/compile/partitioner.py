"""Which nodes of a program go to XNNPACK."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.graph_fuser import propose_partitions
from lowerdeck.lowered_module import (
    DelegationSpec,
    Partitioner,
    PartitionResult,
    constant_names,
    tag_constant_data,
)
from lowerdeck.torch_base import OpOverload, schema_of
from lowerdeck.xnnpack.operators.table import OPERATORS, refusal

NAME = "XnnpackBackend"


class XnnpackPartitioner(Partitioner):
    """Gives XNNPACK all that it computes as torch does, in as few partitions as can be.

    It takes programs straight from ``torch.export.export`` as well as decomposed ones. The first
    is better: a layer norm or an attention in one piece costs less to find and to lower.

    Attributes:
        refused: For each node of the last program that is left out: why.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag on each node that XNNPACK takes."""
        constants = constant_names(exported_program)
        reasons = {
            node: refusal(node, constants)
            for node in exported_program.graph.nodes
            if node.op == "call_function"
        }
        self.refused = {node.name: reason for node, reason in reasons.items() if reason}
        partitions = propose_partitions(
            exported_program.graph_module,
            lambda node: node in reasons and reasons[node] is None,
            groups=list(_inseparable(node for node, reason in reasons.items() if not reason)),
        )
        tags = {}
        for number, nodes in enumerate(partitions):
            if any(_computes(node) for node in nodes):
                tag = f"xnnpack_{number}"
                tags[tag] = DelegationSpec(NAME, [])
                for node in nodes:
                    node.meta["delegation_tag"] = tag
        _take_sizes(exported_program)
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)

    def ops_to_not_decompose(
        self,
        ep: ExportedProgram,  # noqa: ARG002  (the same for every program)
    ) -> tuple[list[OpOverload], None]:
        """Return the operators that XNNPACK takes whole."""
        return [op for op in OPERATORS if isinstance(op, OpOverload)], None


def _computes(node: Node) -> bool:
    entry = OPERATORS.get(node.target)
    return entry is not None and entry.computes


def _take_sizes(program: ExportedProgram) -> None:
    """Tag sizes that one partition alone reads: it knows them from its inputs."""
    for node in reversed(program.graph.nodes):
        tags = {user.meta.get("delegation_tag") for user in node.users}
        if isinstance(node.meta.get("val"), (int, torch.SymInt)) and len(tags) == 1:
            (tag,) = tags
            if tag is not None and node.op == "call_function":
                node.meta["delegation_tag"] = tag


def _inseparable(nodes: Iterator[Node]) -> Iterator[Sequence[Node]]:
    """Yield writes in place with what they overwrite: a partition must not change its inputs."""
    chains: dict[Node, list[Node]] = {}
    for node in nodes:
        source = node.args[0]
        if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
            continue
        if isinstance(source, Node):
            chain = chains.setdefault(source, [source])
            chain.append(node)
            chains[node] = chain
    yield from {id(chain): chain for chain in chains.values()}.values()
