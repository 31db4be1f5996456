"""torch's ``CapabilityBasedPartitioner`` over ``propose_partitions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import Partition
from torch.fx.passes.operator_support import OperatorSupportBase

from lowerdeck.graph_fuser.proposer import propose_partitions, qualified_name
from lowerdeck.graph_fuser.torch_names.torch_names import fuse_by_partitions

Names: TypeAlias = Sequence[str] | None
"""Qualified names of operators; None for none."""
_NON_COMPUTE = frozenset({"torch.ops.aten.view", "_operator.getitem"})


class CapabilityBasedPartitioner:
    """Proposes and fuses partitions as torch's class of this name does, in linear time.

    Partitions come from the last to the first, as from torch. Inputs and the output of the graph
    are in none, whatever the support says of them: torch proposes those too, and then fails to
    fuse.

    Args:
        graph_module: The graph module.
        operator_support: Says which nodes may be fused.
        allows_single_node_partition: Keep partitions with fewer than two computing nodes.
        non_compute_ops: Qualified names that do not count as computing.
        allowed_single_node_partition_ops: Qualified names that may make a partition alone.
        skip_horizontal_fusion: Keep apart what exchanges no value.

    Example:
        >>> import torch
        >>> from torch.fx.passes.operator_support import OperatorSupportBase
        >>> class Support(OperatorSupportBase):
        ...     def is_node_supported(self, submodules, node):
        ...         return node.target != "sin"
        >>> gm = torch.fx.symbolic_trace(lambda x: (x + 1).relu().sin())
        >>> partitioner = CapabilityBasedPartitioner(gm, Support(), True)
        >>> partitioner.propose_partitions()
        [{add: 3, relu: 2}]
    """

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Names = None,
        allowed_single_node_partition_ops: Names = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        self.non_compute_ops: list[str] = list(non_compute_ops or ())
        self.allowed_single_node_partition_ops: list[str] = list(
            allowed_single_node_partition_ops or ()
        )
        self.skip_horizontal_fusion = skip_horizontal_fusion
        self.allows_single_node_partition = allows_single_node_partition
        self.operator_support = operator_support
        self.graph_module = graph_module
        self._submodules: dict[str, torch.nn.Module] | None = None

    def propose_partitions(self) -> list[Partition]:
        """Return partitions of the supported nodes that may all be fused, the last one first.

        With each node comes its position, counted from the graph's end, as torch has it.
        """
        # Collected once: torch does it again for each node.
        self._submodules = dict(self.graph_module.named_modules())
        try:
            proposal = propose_partitions(
                self.graph_module,
                self._is_node_supported,
                connected_only=self.skip_horizontal_fusion,
                min_nodes=0,
            )
        finally:
            self._submodules = None
        position = {
            node: number for number, node in enumerate(reversed(self.graph_module.graph.nodes))
        }
        kept = [nodes for nodes in reversed(proposal.partitions) if self._is_large_enough(nodes)]
        return [
            Partition(number, nodes, [position[node] for node in nodes])
            for number, nodes in enumerate(kept)
        ]

    def _is_node_supported(self, node: Node) -> bool:
        """Return whether ``node`` may be fused; subclasses override it, as they do torch's."""
        submodules = self._submodules
        if submodules is None:
            submodules = dict(self.graph_module.named_modules())
        return self.operator_support.is_node_supported(submodules, node)

    def fuse_partitions(
        self, partitions: Sequence[Partition], prefix: str = "fused_"
    ) -> GraphModule:
        """Replace each partition by a call of a submodule; return the graph module.

        Args:
            partitions: As proposed, or edited.
            prefix: Start of the submodules' names.
        """
        nodes = [partition.nodes for partition in partitions]
        return fuse_by_partitions(self.graph_module, nodes, prefix=prefix)

    def partition_and_fuse(self, prefix: str = "fused_") -> GraphModule:
        """Propose partitions and fuse them; return the graph module.

        Args:
            prefix: Start of the submodules' names.
        """
        return self.fuse_partitions(self.propose_partitions(), prefix)

    def remove_bookend_non_compute_ops(self, partitions: Sequence[Partition]) -> None:
        """Take the nodes that do not compute off the ends of ``partitions``, in place.

        Args:
            partitions: The partitions; one may become empty.
        """
        names = frozenset(self.non_compute_ops)
        for partition in partitions:
            for node in _bookends(partition, names):
                partition.remove_node(node)

    def _is_large_enough(self, nodes: Sequence[Node]) -> bool:
        if self.allows_single_node_partition:
            return True
        idle = _NON_COMPUTE.union(self.non_compute_ops)
        alone = frozenset(self.allowed_single_node_partition_ops)
        names = [qualified_name(node) for node in nodes if node.op == "call_function"]
        # An operator that may be alone counts twice, so that it reaches two by itself.
        return sum((name not in idle) + (name in alone) for name in names) > 1


def _bookends(partition: Partition, names: frozenset[str]) -> list[Node]:
    """Return the idle nodes that have only idle nodes between them and the border."""
    idle = {
        node: None
        for node in partition.nodes
        if node.op == "call_function" and qualified_name(node) in names
    }
    at_start: set[Node] = set()
    for node in partition.nodes:
        if node in idle and all(
            source not in partition.nodes or source in at_start for source in node.all_input_nodes
        ):
            at_start.add(node)
    at_end: set[Node] = set()
    for node in reversed(partition.nodes):
        if node in idle and all(
            user not in partition.nodes or user in at_end for user in node.users
        ):
            at_end.add(node)
    return [node for node in idle if node in at_start or node in at_end]
