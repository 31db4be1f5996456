"""Linear-time drop-in for the partitioner of ``torch.fx.passes``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes import operator_support as operators
from torch.fx.passes.infra import partitioner

from lowerdeck.graph_fuser.proposer import propose_partitions
from lowerdeck.graph_fuser.torch_names.torch_names import fuse_by_partitions
from lowerdeck.torch_base import OpOverload, OpOverloadPacket

Names: TypeAlias = Sequence[str] | None
"""Qualified names of operators; None for none."""
_NON_COMPUTE = frozenset({"torch.ops.aten.view", "_operator.getitem"})


class CapabilityBasedPartitioner(partitioner.CapabilityBasedPartitioner):
    """Linear-time drop-in for torch's class of this name.

    Partitions are returned last first, as in torch. Graph inputs and the output are never
    included; torch proposes them if supported, and then fails to fuse. ``skip_horizontal_fusion``
    uses torch's implementation.

    Args:
        operator_support: Predicate of fusible nodes.
        allows_single_node_partition: Keep partitions with fewer than two computing nodes.
        non_compute_ops: Qualified names of operators that do not count as computation.
        allowed_single_node_partition_ops: Qualified names of ops that may be a partition alone.
        skip_horizontal_fusion: Do not fuse independent nodes.

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
        operator_support: operators.OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Names = None,
        allowed_single_node_partition_ops: Names = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        # torch's constructor collects the dependents of each node, which is quadratic: pass no
        # nodes.
        self._options: tuple[Any, ...] = (
            *(operator_support, allows_single_node_partition, non_compute_ops),
            *(allowed_single_node_partition_ops, skip_horizontal_fusion),
        )
        super().__init__(GraphModule(torch.nn.Module(), Graph()), *self._options)
        self.graph_module = graph_module
        self._submodules: dict[str, torch.nn.Module] = {}

    def propose_partitions(self) -> list[partitioner.Partition]:
        """Return partitions of the supported nodes, last first; all can be fused.

        As in torch, each node has its position from the graph's end.
        """
        gm = self.graph_module
        # Collected once; torch recomputes them for each node.
        self._submodules = dict(gm.named_modules())
        if self.skip_horizontal_fusion:
            super().__init__(gm, *self._options)
            return super().propose_partitions()
        proposal = propose_partitions(gm, self._is_node_supported, min_nodes=0)
        # torch walks the graph from its end.
        position = {node: number for number, node in enumerate(reversed(gm.graph.nodes))}
        kept = [nodes for nodes in reversed(proposal.partitions) if self._is_large_enough(nodes)]
        return [
            partitioner.Partition(number, nodes, [position[node] for node in nodes])
            for number, nodes in enumerate(kept)
        ]

    def fuse_partitions(
        self, partitions: Sequence[partitioner.Partition], prefix: str = "fused_"
    ) -> GraphModule:
        """Replace each partition by a submodule call; return the graph module.

        Args:
            partitions: Proposed or edited partitions.
            prefix: Prefix of the submodules' names.
        """
        nodes = [partition.nodes for partition in partitions]
        return fuse_by_partitions(self.graph_module, nodes, prefix=prefix)

    def _is_node_supported(self, node: Node) -> bool:
        """Return whether ``node`` may be fused; subclasses may override it, as in torch."""
        return self.operator_support.is_node_supported(self._submodules, node)

    def _is_large_enough(self, nodes: Sequence[Node]) -> bool:
        if self.allows_single_node_partition:
            return True
        idle = _NON_COMPUTE.union(self.non_compute_ops)
        alone = frozenset(self.allowed_single_node_partition_ops)
        names = [_qualified_name(node) for node in nodes if node.op == "call_function"]
        # An op that may be alone counts twice, to reach the minimum of two.
        return sum((name not in idle) + (name in alone) for name in names) > 1


def _qualified_name(node: Node) -> str:
    """Return torch's qualified name of the callee, such as ``"_operator.getitem"``.

    Args:
        node: Any node; for calls of methods and modules the target is returned.
    """
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{target}"
    name = getattr(target, "__name__", type(target).__name__)
    module = str(getattr(target, "__module__", None) or "torch")
    if getattr(torch, name, None) is target:
        module = "torch"
    elif getattr(torch.nn.functional, name, None) is target:
        module = "torch.nn.functional"
    return f"{module}.{name}"
