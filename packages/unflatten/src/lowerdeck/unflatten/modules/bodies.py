"""Make what each call runs: its code at once, its graph when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from lowerdeck.graph_fuser import OutlinePlan, Region, RegionGraph
from lowerdeck.unflatten.calls.carrying import is_unread_twice
from lowerdeck.unflatten.calls.checked_calls import Pattern, pattern_of
from lowerdeck.unflatten.calls.recorded_calls import RecordedCall
from lowerdeck.unflatten.calls.recorded_leaves import RecordedTensor, recorded
from lowerdeck.unflatten.code import Source, write_source
from lowerdeck.unflatten.cut import (
    Absent,
    FlatCall,
    SignatureApplier,
    WorkingGraph,
    attribute_modules,
)
from lowerdeck.unflatten.modules.any_size import computes_any_size
from lowerdeck.unflatten.modules.generated_module import Body
from lowerdeck.unflatten.results import sizes_of
from lowerdeck.unflatten.sizes.guards import SizeGuards, SizeLimits, varying_sizes
from lowerdeck.unflatten.trace.call_tree import Frame
from lowerdeck.unflatten.trace.structure import region_structure


@dataclass(frozen=True, slots=True)
class _Written:
    """The first of many equal calls.

    Attributes:
        graph: Its graph; nobody else is ever given it.
        source: The source of all of them.
    """

    graph: Graph
    source: Source


class BodyMaker:
    """Makes the bodies of all calls, those of a call's own calls before its own.

    Equal calls are written once, and their graphs are not even built. A graph is built at once
    where a signature is preserved, for that changes the caller's graph too, and where it names
    other graphs.

    Args:
        working: The working graph.
        plan: How it is cut.
        regions: The region of each call.
        guards: What sizes that vary must meet.
    """

    def __init__(
        self,
        working: WorkingGraph,
        plan: OutlinePlan,
        regions: Mapping[Frame, Region],
        guards: SizeGuards,
    ) -> None:
        self.working = working
        self.plan = plan
        self.regions = regions
        self._guards = guards
        self._tells_flat = any(not call.signature.flat for call in working.preserved.values())
        self._applier = SignatureApplier()
        self._built: dict[Frame, RegionGraph] = {}
        self._written: dict[object, _Written] = {}
        self._targets: dict[Region, str] = {}
        self._recorded_calls: dict[RecordedCall, RecordedCall] = {}
        self._patterns: dict[int, Pattern] = {}

    def set_target(self, frame: Frame, target: str) -> None:
        """Let the caller of ``frame`` call it by this name."""
        self._targets[self.regions[frame]] = target

    def body(self, frame: Frame) -> Body:
        """Return what a call runs; its own calls have been given their names."""
        call = self.working.preserved.get(frame)
        if call is None and frame not in self._built and not self._names_graphs(frame):
            return self._shared_body(frame)
        graph = self._graph(frame)
        signature = None
        if call is not None:
            signature = self._applier.apply(call, self._flat_call(frame))
        attributes = attribute_modules(graph, self.working.attributes)
        made = Body(graph, signature, attributes, frame.type_name)
        made.recorded, made.is_part = (self._recorded(frame),), bool(frame.part)
        given = len(made.recorded[0])
        made.is_checked = not computes_any_size(frame.type_name, frame.nodes, given)
        made.is_guarded = frame.path in self.working.forbidden
        made.guards = self._guards
        made.returned = self._returned(frame)
        is_flat = signature is None or signature.flat
        made.tells_flat = is_flat and self._tells_flat
        return made

    def _recorded(self, frame: Frame) -> RecordedCall:
        call = self.working.preserved.get(frame)
        taken = self.plan.inputs(self.regions[frame]) if call is None else call.inputs
        examples = [
            leaf.meta.get("val", _ABSENT) if isinstance(leaf, Node) else leaf for leaf in taken
        ]
        found = tuple([recorded(example) for example in examples])
        limits = self._guards.limits(varying_sizes(examples))
        if limits is not None:
            found = _with_limits(found, limits)
        nodes = [leaf for leaf in taken if isinstance(leaf, Node)] if call is not None else []
        if len(set(nodes)) < len(nodes):
            found = _with_twins(found, taken, frame)
        # One object for equal ones, so that they are told apart by it.
        return self._recorded_calls.setdefault(found, found)

    def _pattern(self, calls: tuple[RecordedCall]) -> Pattern:
        # By identity: equal calls are one object.
        found = self._patterns.get(id(calls[0]))
        if found is None:
            found = self._patterns[id(calls[0])] = pattern_of(calls)
        return found

    def root_graph(self) -> tuple[Graph, dict[str, torch.nn.Module]]:
        """Return the outermost graph, and the graph modules that it names."""
        graph = self._graph(self.working.tree.root)
        return graph, attribute_modules(graph, self.working.attributes)

    def _shared_body(self, frame: Frame) -> Body:
        region = self.regions[frame]
        calls = (self._recorded(frame),)
        is_checked = not computes_any_size(frame.type_name, frame.nodes, len(calls[0]))
        pattern = self._pattern(calls) if is_checked else ()
        structure = (region_structure(self.plan, region, self._targets), pattern)
        first = self._written.get(structure)
        if first is None:
            graph = self._named(self.plan.graph(region)).graph
            first = self._written[structure] = _Written(
                graph, write_source(graph, pattern=pattern)
            )
        graph_later = self.plan.defer(region, first.graph)
        made = Body(graph_later, type_name=frame.type_name, source=first.source)
        made.recorded, made.is_checked, made.is_part = calls, is_checked, bool(frame.part)
        made.is_guarded = frame.path in self.working.forbidden
        made.guards = self._guards
        made.returned = self._returned(frame)
        made.tells_flat = self._tells_flat
        return made

    def _returned(self, frame: Frame) -> Callable[[], tuple[Any, ...]] | None:
        """Return what tells the sizes and types of what the calls in a call returned."""
        called = [self.regions[child] for child in frame.children]
        if not called:
            return None
        outputs = self.plan.outputs
        return lambda: tuple(sizes_of(node) for region in called for node in outputs(region))

    def _names_graphs(self, frame: Frame) -> bool:
        held = self.working.attributes
        return bool(held) and any(
            node.op == "get_attr" and node.target in held for node in frame.nodes
        )

    def _graph(self, frame: Frame) -> Graph:
        return self._named(self._region_graph(frame)).graph

    def _region_graph(self, frame: Frame) -> RegionGraph:
        found = self._built.get(frame)
        if found is None:
            region = None if frame.parent is None else self.regions[frame]
            found = self._built[frame] = self.plan.graph(region)
        return found

    def _named(self, built: RegionGraph) -> RegionGraph:
        for region, call in built.calls.items():
            # torch looks a node up in its graph whenever an attribute of it is set.
            if call.target != self._targets[region]:
                call.target = self._targets[region]
        return built

    def _flat_call(self, frame: Frame) -> FlatCall:
        region, inner = self.regions[frame], self._region_graph(frame)
        if frame.parent is None:
            raise ValueError("the outermost module has no caller")
        outer = self._region_graph(frame.parent)
        return FlatCall(
            inner.graph,
            self.plan.inputs(region),
            self.plan.outputs(region),
            inner.node_map,
            outer.calls[region],
            outer.results[region],
        )


def _with_limits(found: RecordedCall, limits: SizeLimits) -> RecordedCall:
    """Return what was recorded of a call, with what its sizes must meet at its last tensor."""
    made = list(found)
    for index in reversed(range(len(made))):
        want = made[index]
        if isinstance(want, RecordedTensor):
            made[index] = replace(want, limits=limits)
            break
    return tuple(made)


def _with_twins(found: RecordedCall, taken: Sequence[object], frame: Frame) -> RecordedCall:
    """Return what was recorded of a call, with which of its arguments were one tensor."""
    first: dict[object, int] = {}
    made = list(found)
    for index, (leaf, want) in enumerate(zip(taken, found, strict=True)):
        if not isinstance(leaf, Node) or not isinstance(want, RecordedTensor):
            continue
        twin = first.setdefault(leaf, index)
        if twin != index and not is_unread_twice(leaf, frame.path):
            made[index] = replace(want, twin=twin)
    return tuple(made)


_ABSENT = Absent()
"""The example of a value that has none."""
