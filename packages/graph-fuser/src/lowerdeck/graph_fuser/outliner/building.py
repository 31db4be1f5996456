"""Build the modules of all regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser._torch_private import defer_code, lazy_graph_module
from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.order import install
from lowerdeck.graph_fuser.outliner.boundary import Boundary
from lowerdeck.graph_fuser.outliner.outlined import OutlinedRegion
from lowerdeck.graph_fuser.outliner.region_graph import GraphBuilder
from lowerdeck.graph_fuser.outliner.splice import splice_root
from lowerdeck.graph_fuser.regions import ROOT, Region, RegionTree
from lowerdeck.torch_base import Behaviours, Effect, attribute, is_impure, mark_impure

MakeModule: TypeAlias = Callable[[Region | None, Graph], torch.nn.Module]
"""Makes the module of one region (None: of the root) around its finished graph."""


class ModuleBuilder:
    """Builds every module, children before their parents, once all checks have passed.

    Args:
        graphs: Builds their graphs.
        gm: The graph module that the regions are cut out of, or None for a bare graph.
        make_module: See ``outline``.
        install_children: See ``outline``.
    """

    def __init__(
        self,
        graphs: GraphBuilder,
        gm: GraphModule | None,
        make_module: MakeModule | None,
        *,
        install_children: bool = True,
    ) -> None:
        self.graphs = graphs
        self.gm = gm
        self.behaviours: Behaviours = Behaviours(gm)
        self.tree: RegionTree = graphs.tree
        self.boundary: Boundary = graphs.boundary
        self.make_module = make_module
        self.install_children = install_children
        self._modules: dict[int, torch.nn.Module] = {}
        self._maps: dict[int, dict[Node, Node]] = {}

    def build(self, index: int) -> torch.nn.Module:
        """Build the graph and the module of one region; its children are there already."""
        graph, env = self.graphs.build(index)
        self._maps[index] = env
        module = self._modules[index] = self._module(self.tree.regions[index], index, graph, env)
        return module

    def splice(self, gm: GraphModule) -> dict[Node, Node]:
        """Put the calls of the outermost regions into the graph in place of their nodes."""
        for child in self.tree.children[ROOT]:
            install(gm, self.tree.name(child) or "", self._modules[child])
        env = splice_root(self.graphs, self._results)
        defer_code(gm)
        return env

    def rebuild_root(self) -> tuple[torch.nn.Module, dict[Node, Node]]:
        """Return a new outermost module, and the map into its graph."""
        graph, env = self.graphs.build_root()
        return self._module(None, ROOT, graph, env), env

    def collect(self) -> dict[Region, OutlinedRegion]:
        """Return what became of each region, in preorder."""
        done: dict[Region, OutlinedRegion] = {}
        for index in range(1, len(self.tree.regions)):
            region, call = self.tree.regions[index], self.graphs.calls.get(index)
            if region is None or call is None:
                continue
            done[region] = OutlinedRegion(
                region=region,
                module=self._modules[index],
                call_node=call.node,
                inputs=tuple(self.boundary.inputs[index]),
                outputs=tuple(self.boundary.outputs[index]),
                arguments=tuple(call.node.args),  # type: ignore[arg-type]
                results=call.results,
                node_map=self._maps[index],
            )
        return done

    def _results(self, index: int) -> tuple[Node, ...]:
        """Return the nodes that the call of a region created, in their order."""
        call = self.graphs.calls.get(index)
        if call is None:
            return ()
        return call.results if self.graphs.is_bare(index) else (call.node, *call.results)

    def _module(
        self, region: Region | None, index: int, graph: Graph, env: Mapping[Node, Node]
    ) -> torch.nn.Module:
        if self.make_module is not None:
            module = self.make_module(region, graph)
        elif self.gm is not None:
            module = self._graph_module(self.gm, region, index, graph, env)
        else:
            raise RegionError("A bare graph needs make_module.")
        for child in self.tree.children[index] if self.install_children else ():
            install(module, self.tree.name(child) or "", self._modules[child])
        return module

    def _has_effect(self, index: int) -> bool:
        plain, effect = self.behaviours.is_plain, self.behaviours.effect
        return any(
            not plain(node) and effect(node) != Effect.NONE for node in self.tree.members[index]
        ) or any(is_impure(self._modules[child]) for child in self.tree.children[index])

    def _graph_module(
        self,
        gm: GraphModule,
        region: Region | None,
        index: int,
        graph: Graph,
        env: Mapping[Node, Node],
    ) -> GraphModule:
        name = type(gm).__name__ if region is None else region.name.replace(".", "_")
        module = lazy_graph_module(name, graph)
        module.training = gm.training
        if region is None:
            module.meta.update(gm.meta)
        old = self.graphs.root_nodes() if index == ROOT else self.tree.members[index]
        for node in (*old, *self.boundary.local[index]):
            if node.op in {"get_attr", "call_module"}:
                install(module, str(env[node].target), attribute(gm, str(node.target)))
        if region is not None and self._has_effect(index):
            mark_impure(module)
        return module
