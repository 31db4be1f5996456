"""Turn a tree of regions into nested graph modules, in one pass."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser._torch_private import (
    copy_node,
    defer_code,
    lazy_graph_module,
    mark_impure,
    share_codegen,
)
from lowerdeck.graph_fuser.attributes import attribute, has_attribute, install
from lowerdeck.graph_fuser.boundary import (
    AttributeName,
    Boundary,
    InputOrder,
    find_boundary,
)
from lowerdeck.graph_fuser.collector import collector_held
from lowerdeck.graph_fuser.effects import Behaviours, Effect
from lowerdeck.graph_fuser.errors import NameInUseError, RegionError
from lowerdeck.graph_fuser.hazards import order_hazards
from lowerdeck.graph_fuser.meta import call_meta, value_meta
from lowerdeck.graph_fuser.regions import ROOT, Region, RegionTree, region_tree
from lowerdeck.graph_fuser.schedule import Schedule, body_order, schedule
from lowerdeck.graph_fuser.splice import splice_root

MakeModule: TypeAlias = Callable[[Region | None, Graph], torch.nn.Module]
"""Makes the module of one region (None: of the root) around its finished graph."""


@dataclass(frozen=True, slots=True)
class OutlinedRegion:
    """What became of one region.

    Attributes:
        region: The region that was asked for.
        module: Its module.
        call_node: The ``call_module`` node in the parent's graph.
        inputs: The outer nodes, of the graph as it was, whose values are passed, in order.
        outputs: The inner nodes, of the graph as it was, whose values are returned, in order. They
            are erased from the graph, but keep their names and meta.
        arguments: The nodes of the parent's graph that are passed now.
        results: The nodes of the parent's graph that carry ``outputs`` now: the call itself where
            one output is returned bare, else one ``getitem`` each.
        node_map: From the nodes that stood directly in the region, and its inputs, to the nodes of
            its graph.
    """

    region: Region
    module: torch.nn.Module
    call_node: Node
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    arguments: tuple[Node, ...]
    results: tuple[Node, ...]
    node_map: Mapping[Node, Node]


@dataclass(frozen=True, slots=True)
class Outline:
    """What ``outline`` made.

    Attributes:
        module: The outermost module: the one that was passed, or a new one with
            ``in_place=False``.
        regions: What became of each region, children after their parents.
        node_map: From the nodes that stay in the outermost graph to where they are now: the same
            nodes in place, their copies otherwise. Outputs of regions map to the nodes that carry
            them.
    """

    module: torch.nn.Module
    regions: Mapping[Region, OutlinedRegion]
    node_map: Mapping[Node, Node]


def outline(
    gm: GraphModule | Graph,
    regions: Sequence[Region],
    *,
    input_order: InputOrder = "parent",
    in_place: bool = True,
    order: Iterable[tuple[Node, Node]] = (),
    attribute_name: AttributeName | None = None,
    make_module: MakeModule | None = None,
) -> Outline:
    """Turn each region into a module that its parent calls, and return what became of each.

    Boundaries of all regions come from one walk over the edges and the new graphs from one walk
    over the nodes: O(nodes + edges x depth), whatever the number of regions. Everything is checked
    before anything changes. Nodes outside the regions stay the same objects in the same order,
    save those that stand before something that they now depend on.

    Args:
        gm: The graph module. Changed unless ``in_place`` is False; its code is generated again at
            its next use. A bare graph will do with ``in_place=False`` and ``make_module``.
        regions: The outermost regions; each may hold others.
        input_order: Order of the inputs: ``"parent"`` as the values stand in the parent's graph,
            ``"first_use"`` as the region first reads them.
        in_place: Edit ``gm``; otherwise leave it alone and build a new outermost module.
        order: Pairs of nodes (before, after) that must keep their order though no value flows
            between them, beside those that are found here (writes, random draws, other effects).
        attribute_name: Called with a region (None: the root, only asked with ``in_place=False``)
            and a node. For a ``get_attr`` or ``call_module`` node of the region it returns the
            target to use in the region's module (None: as it is). For a ``get_attr`` or
            ``placeholder`` node outside it returns the attribute by which the region's module
            reads that value, which then is no input (None: pass it as an input).
        make_module: Makes each module from its finished graph, children before parents; the
            default makes a ``GraphModule`` whose code is generated at its first use, with the
            attributes that its graph reads (shared with ``gm``, not copied). Children are
            installed in what it returns.

    Returns:
        The outermost module, and for each region its module, call, inputs, outputs and node map.

    Raises:
        CycleError: A region would need its own result; the error shows the path node by node.
        RegionError: The tree is not sound (a node is foreign, erased, repeated or shared, a name
            is in use); each case has a subclass.

    Example:
        >>> import torch
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x.relu() + 1).sin()
        >>> gm = torch.fx.symbolic_trace(Model())
        >>> _, relu, add, sin, _ = gm.graph.nodes
        >>> inner = Region("inner", [add])
        >>> done = outline(gm, [Region("outer", [relu], children=[inner])])
        >>> [node.target for node in gm.graph.nodes if node.op == "call_module"]
        ['outer']
        >>> done.regions[inner].inputs, done.regions[inner].outputs
        ((relu,), (add,))
    """
    graph, module = (gm, gm.owning_module) if isinstance(gm, Graph) else (gm.graph, gm)
    if module is None and (in_place or make_module is None):
        raise RegionError(
            "A bare graph was passed; expected a graph module, or in_place=False with make_module."
        )
    with collector_held():
        tree = region_tree(graph, regions)
        hazards = [*order_hazards(graph, module), *_checked(order, tree)]
        boundary = find_boundary(
            tree, order=hazards, input_order=input_order, attribute_name=attribute_name
        )
        plan = schedule(tree, boundary, hazards)
        _check_names(module if in_place else None, tree)
        if module is not None and make_module is None:
            _check_attributes(module, tree, boundary)
        builder = _Builder(graph, module, tree, boundary, plan, attribute_name, make_module)
        for index in range(len(tree.regions) - 1, ROOT, -1):
            builder.build(index)
        if in_place and module is not None:
            root_map = builder.splice(module)
            return Outline(module, builder.collect(), root_map)
        outermost, root_map = builder.rebuild_root()
        return Outline(outermost, builder.collect(), root_map)


def extract(
    gm: GraphModule, region: Region, *, input_order: InputOrder = "parent"
) -> tuple[torch.nn.Module, tuple[Node, ...], tuple[Node, ...]]:
    """Return the module that one region would become, its inputs and its outputs; change nothing.

    Args:
        gm: The graph module.
        region: A region without children.
        input_order: See ``outline``.

    Raises:
        RegionError: See ``outline``.
    """
    tree = region_tree(gm.graph, [region])
    hazards = order_hazards(gm.graph, gm)
    boundary = find_boundary(tree, order=hazards, input_order=input_order)
    plan = schedule(tree, boundary, hazards)
    _check_attributes(gm, tree, boundary)
    builder = _Builder(gm.graph, gm, tree, boundary, plan, None, None)
    module = builder.build(1)
    return module, tuple(boundary.inputs[1]), tuple(boundary.outputs[1])


def _checked(order: Iterable[tuple[Node, Node]], tree: RegionTree) -> list[tuple[Node, Node]]:
    pairs = list(order)
    for before, after in pairs:
        if tree.position.get(before, -1) >= tree.position.get(after, -1):
            raise RegionError(
                f"order asks for {before.name!r} before {after.name!r}; expected two nodes of the "
                "graph "
                "that stand in this order already."
            )
    return pairs


def _check_names(gm: GraphModule | None, tree: RegionTree) -> None:
    for index, children in enumerate(tree.children):
        names: set[str] = set()
        for child in children:
            name = tree.name(child) or ""
            if not name or any(not part for part in name.split(".")):
                raise RegionError(
                    f"Region name {name!r} is no attribute path; expected one or more non-empty "
                    "parts "
                    "joined by dots."
                )
            if name in names:
                raise NameInUseError(
                    f"Two sibling regions are named {name!r}; give each its own name."
                )
            names.add(name)
            if index == ROOT and gm is not None:
                check_free(gm, name)


def check_free(gm: GraphModule, name: str) -> None:
    """Raise ``NameInUseError`` unless a submodule may be installed under ``name``."""
    if not has_attribute(gm, name):
        return
    if not isinstance(attribute(gm, name), torch.nn.Module):
        raise NameInUseError(
            f"The module already has an attribute {name!r} that is no submodule; rename the "
            "region."
        )
    if any(
        node.op in {"call_module", "get_attr"} and f"{node.target}.".startswith(f"{name}.")
        for node in gm.graph.nodes
    ):
        raise NameInUseError(
            f"The module already has a submodule {name!r} that its graph still uses; rename the "
            "region."
        )


def _check_attributes(
    gm: GraphModule,
    tree: RegionTree,
    boundary: Boundary,
) -> None:
    for index in range(1, len(tree.regions)):
        reads = [node for node in tree.members[index] if node.op in {"get_attr", "call_module"}]
        for node in (*reads, *boundary.local[index]):
            if node.op == "placeholder":
                raise RegionError(
                    f"attribute_name gives placeholder {node.name!r} a name in region "
                    f"{tree.name(index)!r}, "
                    "but its value is not known here; pass make_module too and install it there."
                )
            if not has_attribute(gm, str(node.target)):
                raise RegionError(
                    f"Node {node.name!r} reads attribute {node.target!r}, which the module does "
                    "not have."
                )


@dataclass(slots=True)
class _Built:
    graph: Graph
    env: dict[Node, Node]
    module: torch.nn.Module | None = None
    call_node: Node | None = None
    results: tuple[Node, ...] = ()
    calls: list[int] = field(default_factory=list)


class _Builder:
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
    ) -> None:
        self.graph = graph
        self.gm = gm
        self.behaviours = Behaviours(gm)
        self.tree = tree
        self.boundary = boundary
        self.plan = plan
        self.attribute_name = attribute_name
        self.make_module = make_module
        self.built: dict[int, _Built] = {}

    def build(self, index: int) -> torch.nn.Module:
        """Build the graph and the module of one region; its children are there already."""
        region = self.tree.regions[index]
        made = _Built(Graph(), {})
        self.built[index] = made
        for outer in self.boundary.inputs[index]:
            placeholder = made.graph.placeholder(outer.name, type_expr=outer.type)
            placeholder.meta.update(value_meta(outer.meta))
            made.env[outer] = placeholder
        self._read_local(index, made)
        self._fill(index, made, self.tree.members[index])
        returned = tuple(made.env[node] for node in self.boundary.outputs[index])
        bare = self.is_bare(index)
        output = made.graph.output(returned[0] if bare else returned)
        if self.boundary.outputs[index]:
            output.meta.update(call_meta(tuple(self.boundary.outputs[index]), bare=bare))
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
        call = graph.create_node("call_module", name, arguments, {}, name.replace(".", "_"))
        bare = self.is_bare(index)
        call.meta.update(call_meta(outputs, bare=bare))
        made.call_node = call
        if bare:
            call.type = outputs[0].type
            env[outputs[0]] = call
            made.results = (call,)
            return
        results: list[Node] = []
        for place, node in enumerate(outputs):
            part = graph.create_node(
                "call_function", operator.getitem, (call, place), {}, node.name, node.type
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
        self._fill(ROOT, made, [node for node in self.tree.position if node not in home])
        module = self._module(None, ROOT, made)
        return module, made.env

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
            read = made.graph.create_node("get_attr", name, (), {}, outer.name, outer.type)
            read.meta.update(outer.meta if outer.op == "get_attr" else value_meta(outer.meta))
            made.env[outer] = read

    def _module(self, region: Region | None, index: int, made: _Built) -> torch.nn.Module:
        if self.make_module is not None:
            module = self.make_module(region, made.graph)
        elif self.gm is not None:
            module = self._graph_module(self.gm, region, index, made)
        else:
            raise RegionError("A bare graph needs make_module.")
        for child in self.tree.children[index]:
            inner = self.built[child].module
            if inner is not None:
                install(module, self.tree.name(child) or "", inner)
        return module

    def _has_effect(self, index: int) -> bool:
        plain, effect = self.behaviours.is_plain, self.behaviours.effect
        return any(
            not plain(node) and effect(node) != Effect.NONE for node in self.tree.members[index]
        ) or any(
            getattr(self.built[child].module, "_is_impure", False)
            for child in self.tree.children[index]
        )

    def _graph_module(
        self, gm: GraphModule, region: Region | None, index: int, made: _Built
    ) -> GraphModule:
        name = type(gm).__name__ if region is None else region.name.replace(".", "_")
        module = lazy_graph_module(name, made.graph)
        module.training = gm.training
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
