"""Build region modules."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser._torch_private import defer_code, lazy_graph_module
from lowerdeck.graph_fuser.order import install
from lowerdeck.graph_fuser.outliner.outlined import OutlinedRegion
from lowerdeck.graph_fuser.outliner.region_graph import GraphBuilder
from lowerdeck.graph_fuser.outliner.splice import splice_calls
from lowerdeck.graph_fuser.regions import ROOT, Region, RegionTree
from lowerdeck.torch_base import Behaviours, Effect, attribute_of, is_impure, mark_impure


class ModuleBuilder:
    """Builds all modules in postorder, after validation.

    Args:
        gm: The graph module to outline from.
    """

    def __init__(self, graphs: GraphBuilder, gm: GraphModule) -> None:
        self.graphs = graphs
        self.gm = gm
        self.tree: RegionTree = graphs.tree
        self.behaviours: Behaviours = Behaviours(gm)
        self._modules: dict[int, GraphModule] = {}
        self._maps: dict[int, dict[Node, Node]] = {}

    def build(self, index: int) -> GraphModule:
        """Build one region's graph and module; its children must be built already."""
        graph, env = self.graphs.build(index)
        self._maps[index] = env
        module = self._modules[index] = self._module(index, graph)
        return module

    def splice(self) -> None:
        """Replace the nodes of the outermost regions by calls."""
        for child in self.tree.children[ROOT]:
            install(self.gm, self.tree.name(child) or "", self._modules[child])
        splice_calls(self.graphs)
        defer_code(self.gm)

    def collect(self) -> dict[Region, OutlinedRegion]:
        """Return the result of each region, in preorder."""
        outlined: dict[Region, OutlinedRegion] = {}
        for index, region in enumerate(self.tree.regions):
            if region is None:
                continue
            call = self.graphs.calls[index]
            outlined[region] = OutlinedRegion(
                region=region,
                module=self._modules[index],
                call_node=call.node,
                inputs=self.graphs.boundary.inputs[index],
                outputs=self.graphs.boundary.outputs[index],
                arguments=tuple(call.node.args),  # type: ignore[arg-type]
                results=call.results,
                node_map=self._maps[index],
            )
        return outlined

    def _module(self, index: int, graph: Graph) -> GraphModule:
        name = self.tree.name(index) or ""
        module = lazy_graph_module(name.replace(".", "_"), graph)
        module.training = self.gm.training
        for node in self.tree.members[index]:
            if node.op in {"get_attr", "call_module"}:
                path = str(node.target)
                install(module, path, attribute_of(self.gm, path))
        for child in self.tree.children[index]:
            install(module, self.tree.name(child) or "", self._modules[child])
        if self._has_effect(index):
            mark_impure(module)
        return module

    def _has_effect(self, index: int) -> bool:
        plain, effect = self.behaviours.is_plain, self.behaviours.effect
        return any(
            not plain(node) and effect(node) != Effect.NONE for node in self.tree.members[index]
        ) or any(is_impure(self._modules[child]) for child in self.tree.children[index])
