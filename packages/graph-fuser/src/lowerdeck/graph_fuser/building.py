"""Build the graph and the module of every region."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser._torch_private import (
    add_node,
    copy_node,
    defer_code,
    is_impure,
    lazy_graph_module,
    mark_impure,
    share_codegen,
)
from lowerdeck.graph_fuser.attributes import attribute, install
from lowerdeck.graph_fuser.boundary import AttributeName, Boundary
from lowerdeck.graph_fuser.callees import Effect
from lowerdeck.graph_fuser.effects import Behaviours
from lowerdeck.graph_fuser.errors import RegionError
from lowerdeck.graph_fuser.meta import call_meta, value_meta
from lowerdeck.graph_fuser.outlined import OutlinedRegion
from lowerdeck.graph_fuser.regions import ROOT, Region, RegionTree
from lowerdeck.graph_fuser.schedule import Schedule, body_order
from lowerdeck.graph_fuser.splice import splice_root

MakeModule: TypeAlias = Callable[[Region | None, Graph], torch.nn.Module]
"""Makes the module of one region (None: of the root) around its finished graph."""


@dataclass(slots=True)
class _Built:
    graph: Graph
    env: dict[Node, Node]
    meta: Mapping[str, object] = field(default_factory=dict)
    module: torch.nn.Module | None = None
    call_node: Node | None = None
    results: tuple[Node, ...] = ()


class Builder:
    """Builds every graph and module once all checks have passed."""

    def __init__(
        self,
        graph: Graph,
        gm: GraphModule | None,
        tree: RegionTree,
        boundary: Boundary,
        plan: Schedule,
        attribute_name: AttributeName | None,
        make_module: MakeModule | None,
        *,
        install_children: bool = True,
    ) -> None:
        self.graph = graph
        self.gm = gm
        self.behaviours: Behaviours = Behaviours(gm)
        self.tree = tree
        self.boundary = boundary
        self.plan = plan
        self.attribute_name = attribute_name
        self.make_module = make_module
        self.install_children = install_children
        self.built: dict[int, _Built] = {}

    def build(self, index: int) -> torch.nn.Module:
        """Build the graph and the module of one region; its children are there already."""
        region = self.tree.regions[index]
        made = _Built(Graph(), {})
        self.built[index] = made
        for outer in self.boundary.inputs[index]:
            name = outer.name
            placeholder = add_node(made.graph, "placeholder", name, (), name, outer.type)
            placeholder.meta.update(value_meta(outer.meta))
            made.env[outer] = placeholder
        self._read_local(index, made)
        self._fill(index, made, self.tree.members[index])
        outputs = tuple(self.boundary.outputs[index])
        bare = self.is_bare(index)
        result = made.env[outputs[0]] if bare else tuple(made.env[node] for node in outputs)
        output = add_node(made.graph, "output", "output", (result,), "output")
        made.meta = call_meta(outputs, bare=bare)
        if outputs:
            output.meta.update(made.meta)
        made.module = self._module(region, index, made)
        return made.module

    def is_bare(self, index: int) -> bool:
        """Return whether a region returns its one output without a tuple around it."""
        region = self.tree.regions[index]
        return (
            region is not None
            and not region.always_return_tuple
            and len(self.boundary.outputs[index]) == 1
        )

    def call(self, index: int, graph: Graph, env: dict[Node, Node]) -> None:
        """Create a region's call and what unpacks it, at the graph's insert point."""
        made = self.built[index]
        outputs = tuple(self.boundary.outputs[index])
        name = self.tree.name(index) or ""
        arguments = tuple(env[outer] for outer in self.boundary.inputs[index])
        bare = self.is_bare(index)
        type_expr = outputs[0].type if bare else None
        label = name.replace(".", "_")
        label = label if label.isidentifier() else f"_{label}"
        call = add_node(graph, "call_module", name, arguments, label, type_expr)
        call.meta.update(made.meta)
        made.call_node = call
        if bare:
            env[outputs[0]] = call
            made.results = (call,)
            return
        results: list[Node] = []
        for place, node in enumerate(outputs):
            part = add_node(
                graph, "call_function", operator.getitem, (call, place), node.name, node.type
            )
            part.meta.update(value_meta(node.meta))
            env[node] = part
            results.append(part)
        made.results = tuple(results)

    def splice(self, gm: GraphModule) -> dict[Node, Node]:
        """Put the calls of the outermost regions into the graph in place of their nodes."""
        for child in self.tree.children[ROOT]:
            module = self.built[child].module
            if module is not None:
                install(gm, self.tree.name(child) or "", module)
        env = splice_root(
            self.graph, self.tree, self.boundary, self.plan, self.call, self._results
        )
        defer_code(gm)
        return env

    def rebuild_root(self) -> tuple[torch.nn.Module, dict[Node, Node]]:
        """Return a new outermost module, and the map into its graph."""
        made = _Built(Graph(), {})
        share_codegen(self.graph, made.graph)
        home = self.tree.home
        nodes = [node for node in self.tree.position if node not in home]
        nodes = self._replace_placeholders(made, nodes)
        self._fill(ROOT, made, nodes)
        module = self._module(None, ROOT, made)
        return module, made.env

    def _replace_placeholders(self, made: _Built, nodes: Sequence[Node]) -> list[Node]:
        """Make the outermost graph read by attribute what the caller has a name for.

        Returns those of ``nodes`` that are still to be copied.
        """
        name_of, home = self.attribute_name, self.tree.home
        placeholders = [node for node in nodes if node.op == "placeholder"]
        names = {node: name_of(None, node) for node in placeholders} if name_of is not None else {}
        if not any(names.values()):
            return list(nodes)
        for node in placeholders:
            if names[node] is None:
                made.env[node] = copy_node(made.graph, node, made.env)
        for node, name in names.items():
            if name is not None and any(user not in home for user in node.users):
                self._read(node, name, made)
        return [node for node in nodes if node not in names]

    def collect(self) -> dict[Region, OutlinedRegion]:
        """Return what became of each region, in preorder."""
        done: dict[Region, OutlinedRegion] = {}
        for index in range(1, len(self.tree.regions)):
            region, made = self.tree.regions[index], self.built[index]
            if region is None or made.module is None or made.call_node is None:
                continue
            done[region] = OutlinedRegion(
                region=region,
                module=made.module,
                call_node=made.call_node,
                inputs=tuple(self.boundary.inputs[index]),
                outputs=tuple(self.boundary.outputs[index]),
                arguments=tuple(made.call_node.args),  # type: ignore[arg-type]
                results=made.results,
                node_map=made.env,
            )
        return done

    def _results(self, index: int) -> tuple[Node, ...]:
        made = self.built[index]
        if made.call_node is None:
            return ()
        return made.results if self.is_bare(index) else (made.call_node, *made.results)

    def _fill(self, index: int, made: _Built, nodes: Sequence[Node]) -> None:
        env, graph = made.env, made.graph
        region = self.tree.regions[index]
        for item in body_order(self.tree, self.plan, index, nodes):
            if isinstance(item, int):
                self.call(item, graph, env)
                continue
            copy = copy_node(graph, item, env)
            env[item] = copy
            if self.attribute_name is not None and item.op in {"get_attr", "call_module"}:
                name = self.attribute_name(region, item)
                if name is not None:
                    copy.target = name

    def _read_local(self, index: int, made: _Built) -> None:
        for outer, name in self.boundary.local[index].items():
            self._read(outer, name, made)

    def _read(self, outer: Node, name: str, made: _Built) -> None:
        read = add_node(made.graph, "get_attr", name, (), name.replace(".", "_"), outer.type)
        read.meta.update(outer.meta if outer.op == "get_attr" else value_meta(outer.meta))
        made.env[outer] = read

    def _module(self, region: Region | None, index: int, made: _Built) -> torch.nn.Module:
        if self.make_module is not None:
            module = self.make_module(region, made.graph)
        elif self.gm is not None:
            module = self._graph_module(self.gm, region, index, made)
        else:
            raise RegionError("A bare graph needs make_module.")
        for child in self.tree.children[index] if self.install_children else ():
            inner = self.built[child].module
            if inner is not None:
                install(module, self.tree.name(child) or "", inner)
        return module

    def _has_effect(self, index: int) -> bool:
        plain, effect = self.behaviours.is_plain, self.behaviours.effect
        return any(
            not plain(node) and effect(node) != Effect.NONE for node in self.tree.members[index]
        ) or any(is_impure(self.built[child].module) for child in self.tree.children[index])

    def _graph_module(
        self, gm: GraphModule, region: Region | None, index: int, made: _Built
    ) -> GraphModule:
        name = type(gm).__name__ if region is None else region.name.replace(".", "_")
        module = lazy_graph_module(name, made.graph)
        module.training = gm.training
        if region is None:
            module.meta.update(gm.meta)
        reads = self.boundary.local[index]
        home = self.tree.home
        old = (
            self.tree.members[index]
            if index != ROOT
            else [node for node in self.tree.position if node not in home]
        )
        for node in (*old, *reads):
            if node.op in {"get_attr", "call_module"}:
                install(module, str(made.env[node].target), attribute(gm, str(node.target)))
        if region is not None and self._has_effect(index):
            mark_impure(module)
        return module
