"""The calls whose signatures the user asked to preserve, with what they take and return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Node

from lowerdeck.unflatten.calls.carrying import (
    LOST_CALL,
    LOST_SIGNATURE,
    NOT_RECORDED,
    must_be_generated,
)
from lowerdeck.unflatten.cut.preserved import (
    Leaf,
    PreservedCall,
    leaf_names,
    preserved_calls,
    preserved_signature,
    warn_of_lost,
)
from lowerdeck.unflatten.cut.rewritten_leaves import (
    Surroundings,
    warn_of_doubtful,
    with_current_leaves,
)
from lowerdeck.unflatten.cut.state_reads import StateRead, StateReads
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, first_node, nodes_in
from lowerdeck.unflatten.trace.call_tree import Frame
from lowerdeck.unflatten.trace.trace import Trace


def find_preserved_calls(
    trace: Trace, made: WorkingGraph, reads: StateReads, values: Mapping[Node, Any]
) -> None:
    """Enter the preserved calls into ``made``; calls whose signature was lost stay generated.

    Args:
        trace: The program.
        made: The working graph, whole but for its output.
        reads: Adds reads of state to it.
        values: What the working graph has for each node of the outermost graph.
    """
    not_recorded = trace.program.graph_module.meta.get(NOT_RECORDED, {})
    for frame in made.tree.frames() if not_recorded else ():
        if frame.parent is not None and frame.path in not_recorded:
            why = f"{not_recorded[frame.path]}, which export cannot record"
            forbid_replacing(made, frame, frame.parent, why)
    signatures = preserved_calls(trace.program)
    if not signatures:
        return
    leaves = _Leaves(trace, reads, values)
    output = next(iter(trace.program.graph.find_nodes(op="output")))
    returned = {values.get(node) for node in output.all_input_nodes}
    stored = {values.get(mutation.value) for mutation in trace.mutations.all}
    doubtful: list[str] = []
    for frame in made.tree.frames():
        if frame.parent is None or frame.part or frame.call_name not in signatures:
            continue
        signature = signatures[frame.call_name]
        if signature is None:
            forbid_replacing(made, frame, frame.parent, LOST_SIGNATURE)
            continue
        inside = dict.fromkeys(nodes_in(frame))
        inputs = tuple(
            None if isinstance(leaf, Node) and leaf in inside else leaf
            for leaf in leaves.of(signature.inputs, frame.parent)
        )
        outputs = tuple(leaves.of(signature.outputs, frame))
        call = PreservedCall(preserved_signature(frame, signature), inputs, outputs)
        around = Surroundings(inside, returned, stored, made.reads)
        made.preserved[frame], lost = with_current_leaves(call, around)
        doubtful.extend(frame.path for _ in lost)
    called = {frame.path for frame in made.tree.frames()}
    for name in signatures:
        # What has no state may compute nothing in eager either, as an Identity does.
        has_state = any(entry.startswith(name + ".") for entry in trace.state.entries)
        if name not in called and has_state:
            _forbid_lost(made, name)
    warn_of_doubtful(doubtful)
    warn_of_lost(name for name, signature in signatures.items() if signature is None)


def forbid_replacing(made: WorkingGraph, frame: Frame, caller: Frame, why: str) -> None:
    """Let ``caller`` check before a call that its module is still the generated one."""
    made.forbidden[frame.path] = why
    first = first_node(frame)
    if first is None:
        return
    with made.graph.inserting_before(first):
        module = made.graph.get_attr(frame.accessor)
        check = made.graph.call_function(must_be_generated, (module, frame.path, why))
    index = sum(1 for node in caller.nodes if node < first)
    caller.nodes[index:index] = [module, check]


def _forbid_lost(made: WorkingGraph, name: str) -> None:
    """Let the outermost code check that a module is still there of which no call is left."""
    made.forbidden[name] = LOST_CALL
    root = made.tree.root
    first = next(node for node in made.graph.nodes if node.op != "placeholder")
    with made.graph.inserting_before(first):
        module = made.graph.get_attr(name)
        check = made.graph.call_function(must_be_generated, (module, name, LOST_CALL))
    root.nodes[:0] = [module, check]


class _Leaves:
    """Finds what the leaves of signatures became in the working graph."""

    def __init__(self, trace: Trace, reads: StateReads, values: Mapping[Node, Any]) -> None:
        self.reads = reads
        self.by_name = {node.name: value for node, value in values.items()}
        self.examples = {
            node.name: node.meta.get("val")
            for node, value in values.items()
            if isinstance(value, StateRead)
        }
        for item in trace.items:
            inner = item.inner.values.items() if item.inner is not None else ()
            for node, value in inner:
                self.by_name.setdefault(node.name, value)

    def of(self, specs: Sequence[Any], frame: Frame) -> Iterator[Leaf]:
        """Yield the values of ``specs``; reads of state come first in ``frame``."""
        for name, constant in leaf_names(specs):
            found = constant if name is None else self.by_name.get(name, constant)
            if isinstance(found, StateRead):
                example = self.examples[found.placeholder]
                found = self.reads.read(found.placeholder, frame, early=True)
                found.meta["val"] = example
            yield found
