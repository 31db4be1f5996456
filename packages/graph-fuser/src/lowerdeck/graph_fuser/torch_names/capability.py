"""The partitioner class of ``torch.fx.passes``, in linear time."""

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
    """Proposes and fuses partitions as torch's class of this name does, in linear time.

    Partitions come from the last to the first, as from torch. Inputs and the output of the graph
    are in none, whatever the support says of them: torch proposes those too, and then fails to
    fuse. With ``skip_horizontal_fusion`` torch proposes.

    Args:
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
        operator_support: operators.OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Names = None,
        allowed_single_node_partition_ops: Names = None,
        skip_horizontal_fusion: bool = False,
    ) -> None:
        # torch's constructor lists what follows each node, which is quadratic: it gets no nodes.
        self._options: tuple[Any, ...] = (
            *(operator_support, allows_single_node_partition, non_compute_ops),
            *(allowed_single_node_partition_ops, skip_horizontal_fusion),
        )
        super().__init__(GraphModule(torch.nn.Module(), Graph()), *self._options)
        self.graph_module = graph_module
        self._submodules: dict[str, torch.nn.Module] = {}

    def propose_partitions(self) -> list[partitioner.Partition]:
        """Return partitions of the supported nodes that may all be fused, the last one first.

        With each node comes its position, counted from the graph's end, as torch has it.
        """
        gm = self.graph_module
        # Collected once: torch does it again for each node.
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
        """Replace each partition by a call of a submodule; return the graph module.

        Args:
            partitions: As proposed, or edited.
            prefix: Start of the submodules' names.
        """
        nodes = [partition.nodes for partition in partitions]
        return fuse_by_partitions(self.graph_module, nodes, prefix=prefix)

    def _is_node_supported(self, node: Node) -> bool:
        """Return whether ``node`` may be fused; subclasses override it, as they do torch's."""
        return self.operator_support.is_node_supported(self._submodules, node)

    def _is_large_enough(self, nodes: Sequence[Node]) -> bool:
        if self.allows_single_node_partition:
            return True
        idle = _NON_COMPUTE.union(self.non_compute_ops)
        alone = frozenset(self.allowed_single_node_partition_ops)
        names = [_qualified_name(node) for node in nodes if node.op == "call_function"]
        # An operator that may be alone counts twice, so that it reaches two by itself.
        return sum((name not in idle) + (name in alone) for name in names) > 1


def _qualified_name(node: Node) -> str:
    """Return what ``node`` calls as torch's partitioner names it, such as ``"_operator.getitem"``.

    Args:
        node: Any node; for a method or a module the name is its target.
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
