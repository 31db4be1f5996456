"""The calls whose signatures the user asked to preserve, with what they take and return."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.fx import Node

from lowerdeck.torch_base import SYMBOLS
from lowerdeck.unflatten._torch_private import TRACEPOINT
from lowerdeck.unflatten.calls.carrying import (
    CALLED_ELSEWHERE,
    CANNOT_RECORD,
    COMPUTES_NOTHING,
    IN_BRANCHES,
    LOST_CALL,
    LOST_MEMORY,
    LOST_PART,
    LOST_SIGNATURE,
    NO_CALL,
    NO_TENSOR,
    RETURNS_OTHERS,
    SOMETIMES_NOTHING,
    must_be_generated,
    must_compute_nothing,
)
from lowerdeck.unflatten.cut.preserved import (
    Absent,
    Leaf,
    PreservedCall,
    asked_signatures,
    doubtful_names,
    leaf_names,
    not_recorded,
    preserved_calls,
    preserved_signature,
    warn_of_lost,
)
from lowerdeck.unflatten.cut.rewritten_leaves import (
    EagersMemory,
    Surroundings,
    in_time,
    is_elsewhere,
    warn_of_doubtful,
    with_current_leaves,
    writes_argument,
)
from lowerdeck.unflatten.cut.state_reads import StateRead, StateReads
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, first_node, nodes_in
from lowerdeck.unflatten.trace.call_tree import Frame, frames_around
from lowerdeck.unflatten.trace.lost_stacks import lost_its_stack
from lowerdeck.unflatten.trace.trace import Trace

MarkedCalls = dict[Frame, dict[str, tuple[Leaf, ...]]]
"""What export's own marks say that calls take and return, by the kind of the mark."""


def find_preserved_calls(
    trace: Trace,
    made: WorkingGraph,
    reads: StateReads,
    values: Mapping[Node, Any],
    marked: MarkedCalls,
) -> None:
    """Enter the preserved calls into ``made``; calls whose signature was lost stay generated.

    Args:
        trace: The program.
        made: The working graph, whole but for its output.
        reads: Adds reads of state to it.
        values: What the working graph has for each node of the outermost graph.
        marked: What marks that export left in the graph say of calls.
    """
    _guard_not_recorded(trace, made)
    for path in made.tree.called_elsewhere:
        if not made.is_uncalled(path):
            forbid_uncalled(trace, made, path, CALLED_ELSEWHERE)
    known = trace.paths.canonical
    called = {known(frame.path) for frame in made.tree.frames()} if made.tree.unheard else set()
    for path in made.tree.unheard:
        if not made.is_uncalled(path):
            why = SOMETIMES_NOTHING if known(path) in called else COMPUTES_NOTHING
            forbid_uncalled(trace, made, path, why)
    asked = asked_signatures(trace.program)
    if not asked:
        return
    _guard_lost_parts(trace, made)
    signatures = preserved_calls(trace.program, asked)
    leaves = _Leaves(trace, reads, values)
    unsure_names = {leaves.by_name.get(name) for name in doubtful_names(trace.program.graph)}
    output = next(iter(trace.program.graph.find_nodes(op="output")))
    returned = {values.get(node) for node in output.all_input_nodes}
    stored = {values.get(mutation.value) for mutation in trace.mutations.all}
    doubtful: list[str] = []
    lost: set[str] = set()
    outside: list[Frame] = []
    flat: list[Frame] = []
    for frame in made.tree.frames():
        name = frame.recorded if frame.recorded in asked else frame.path
        if frame.parent is None or frame.part or name not in asked:
            continue
        found = leaves.recorded(frame, signatures.get(frame.call_name))
        inside = dict.fromkeys(nodes_in(frame))
        if found is not None and not _is_certain(found, inside, unsure_names):
            found = None
        if found is None and frame in marked:
            found = _marked_call(frame, asked[name], marked[frame])
        if found is None:
            lost.add(frame.path)
            flat.append(frame)
            forbid_replacing(made, frame, frame.parent, LOST_SIGNATURE)
            continue
        found = in_time(found, inside)
        # Its caller has no value for what the call itself computes.
        own = [leaf in inside for leaf in found.inputs]
        call = _without(found, own, None)
        around = Surroundings(inside, returned, stored, made.reads)
        call, unsure = with_current_leaves(call, around)
        signature = replace(call.signature, loses_writes=writes_argument(call, around))
        call = replace(call, signature=signature)
        made.preserved[frame] = _without(call, own, Absent())
        if is_elsewhere(call, inside):
            outside.append(frame)
        doubtful.extend(frame.path for _ in unsure)
    _guard_lost_results(made, outside, flat, stored, EagersMemory(made, returned))
    lost.update(_guard_uncalled(trace, made, signatures))
    warn_of_doubtful(doubtful)
    warn_of_lost(lost)


def _is_certain(call: PreservedCall, inside: Collection[Node], doubtful: Container[Leaf]) -> bool:
    """Return whether what a call takes and returns is what the call itself reads and computes.

    Args:
        call: The call.
        inside: Its nodes.
        doubtful: Leaves that may be others than those that signatures mean.
    """
    taken, returned = call.nodes(call.inputs), call.nodes(call.outputs)
    if any(leaf in doubtful for leaf in taken):
        read = {source for node in inside for source in node.all_input_nodes}
        others = (leaf for leaf in read if leaf not in inside and leaf not in taken)
        if not read.issuperset(taken) or any(map(_is_tensor, others)):
            return False
    if not any(leaf in doubtful for leaf in returned):
        return True
    left = {node for node in inside if any(user not in inside for user in node.users)}
    return all(leaf in inside or leaf in taken for leaf in returned) and left.issubset(returned)


def _is_tensor(node: Node) -> bool:
    return node.op != "get_attr" and isinstance(node.meta.get("val"), torch.Tensor)


def _without(call: PreservedCall, which: Sequence[bool], leaf: Leaf) -> PreservedCall:
    """Return the call with ``leaf`` for those of its arguments."""
    inputs = zip(call.inputs, which, strict=True)
    return replace(call, inputs=tuple(leaf if other else given for given, other in inputs))


def _guard_not_recorded(trace: Trace, made: WorkingGraph) -> None:
    told = not_recorded(trace.program)
    why = {path: f"{reason}, {CANNOT_RECORD}" for path, reason in told.items()}
    frames = [frame for frame in made.tree.frames() if frame.path in why]
    for frame in frames:
        if frame.parent is not None:
            forbid_replacing(made, frame, frame.parent, why[frame.path])
    uncalled = why.keys() - {frame.path for frame in frames}
    for path, reason in why.items():
        if path in trace.paths and told[path] == IN_BRANCHES:
            forbid_uncalled(trace, made, path, reason)
        elif path in trace.paths and path in uncalled:
            forbid_uncalled(trace, made, path, f"{reason}; {NO_CALL}")


def _guard_lost_parts(trace: Trace, made: WorkingGraph) -> None:
    """Forbid changing modules of which a caller may compute a part, or write the state."""
    lost = set(trace.tree.lost)
    for mutation in trace.mutations.all:
        names = trace.state.aliases(str(mutation.spec.target))
        if not lost_its_stack(mutation.value):
            continue
        lost.update(
            frame
            for frame in made.tree.frames()
            if mutation.frame in frames_around(frame)[1:]
            and any(trace.paths.attribute(frame.path, name) for name in names)
        )
    # What export marked as a call and is none here, decomposing gave to a caller with the marks.
    given = _paths_given_away(trace, made)
    for frame in made.tree.frames():
        is_lost = frame in lost or trace.paths.canonical(frame.path) in given
        if is_lost and frame.parent is not None:
            forbid_replacing(made, frame, frame.parent, LOST_PART)


def _paths_given_away(trace: Trace, made: WorkingGraph) -> set[str]:
    """Return the modules of which this program has fewer calls than export recorded and marked."""
    recorded: Counter[str] = Counter()
    for entry in trace.program.module_call_graph:
        if entry.signature is not None and entry.signature.outputs:
            recorded[trace.paths.canonical(trace.paths.eager(entry.fqn.partition("@")[0]))] += 1
    marked: Counter[str] = Counter()
    for mark in trace.program.graph.find_nodes(op="call_function", target=TRACEPOINT):
        called = trace.tree.marked.get(mark)
        path = trace.paths.eager(str(mark.kwargs["path"]))
        if mark.kwargs["kind"] == "module_call_inputs" and (not called or called.path != path):
            marked[trace.paths.canonical(path)] += 1
    calls = Counter(trace.paths.canonical(frame.path) for frame in made.tree.frames())
    return {path for path in marked if recorded[path] + marked[path] > calls[path]}


def _guard_lost_results(
    made: WorkingGraph,
    outside: Iterable[Frame],
    flat: Iterable[Frame],
    stored: Container[Any],
    memory: EagersMemory,
) -> None:
    """Forbid changing modules whose callers read what these compute from elsewhere.

    Args:
        made: The working graph, whole but for its output.
        outside: Those that return what they neither compute nor are given.
        flat: Those whose signature decomposing lost.
        stored: The nodes whose values become new state.
        memory: What shares memory in eager.
    """
    lost = LOST_MEMORY if memory.is_renewed else RETURNS_OTHERS
    why = dict.fromkeys(outside, lost)
    for frame in why:
        del made.preserved[frame]
    for frame in (*made.preserved, *flat) if memory.is_renewed else ():
        inside = set(nodes_in(frame))
        call = made.preserved.get(frame)
        given = call.nodes(call.inputs) if call else []
        returned = call.nodes(call.outputs) if call else [*filter(_has_readers(inside), inside)]
        if memory.is_lost(given, returned, inside, stored):
            why[frame] = LOST_MEMORY
        elif call:
            made.preserved[frame] = replace(call, apart=memory.apart(call, inside))
    for frame, reason in why.items():
        if frame.parent is not None:
            forbid_replacing(made, frame, frame.parent, reason)


def _has_readers(inside: Container[Node]) -> Callable[[Node], bool]:
    """Return what tells whether others than the nodes ``inside`` read a node."""
    return lambda node: any(user not in inside for user in node.users)


def _guard_uncalled(
    trace: Trace, made: WorkingGraph, signatures: Mapping[str, Any]
) -> Iterator[str]:
    """Forbid replacing what eager calls and this program does not; yield what has lost its leaves.

    A module whose results are its arguments computes nothing, as an Identity: another one may.
    """
    known = trace.paths.canonical
    frames = made.tree.frames()
    called = {known(frame.path) for frame in frames}
    calls = {(known(frame.path), frame.index) for frame in frames}
    missing: dict[str, Any] = {}
    for name, signature in signatures.items():
        path, _, number = (name, "", "0") if name in trace.paths else name.rpartition("@")
        if (known(path), int(number)) not in calls:
            missing.setdefault(path, signature)
            if signature is None and path not in made.tree.unheard:
                yield path
    for path, signature in missing.items():
        if made.is_uncalled(path):
            continue
        why = SOMETIMES_NOTHING if known(path) in called else _why_uncalled(signature, trace)
        forbid_uncalled(trace, made, path, why)


def _why_uncalled(signature: Any, trace: Trace) -> str:
    if signature is None:
        return LOST_CALL
    if all(isinstance(spec, ConstantArgument) for spec in signature.outputs):
        return NO_TENSOR
    taken = {*trace.state.targets, *(spec.name for spec in signature.inputs)}
    return COMPUTES_NOTHING if taken.issuperset(s.name for s in signature.outputs) else LOST_CALL


def _marked_call(
    frame: Frame, signature: Any, leaves: Mapping[str, tuple[Leaf, ...]]
) -> PreservedCall | None:
    """Return the call that marks surround; None if they are not those of ``signature``."""
    inputs, outputs = (leaves.get(f"module_call_{kind}") for kind in ("inputs", "outputs"))
    if inputs is None or outputs is None:
        return None
    found = PreservedCall(preserved_signature(frame, signature), inputs, outputs, path=frame.path)
    wanted = (signature.in_spec.num_leaves, signature.out_spec.num_leaves)
    return found if (len(inputs), len(outputs)) == wanted else None


def forbid_replacing(
    made: WorkingGraph,
    frame: Frame,
    caller: Frame,
    why: str,
    check: Callable[..., None] = must_be_generated,
) -> None:
    """Let ``caller`` check before a call that its module is still the generated one."""
    made.forbid(frame.path, caller, why)
    first = first_node(frame)
    if first is None:
        return
    with made.graph.inserting_before(first):
        module = made.graph.get_attr(frame.accessor)
        checked = made.graph.call_function(check, (module, frame.path, why))
    index = bisect_left(caller.nodes, first)
    caller.nodes[index:index] = [module, checked]


def forbid_uncalled(trace: Trace, made: WorkingGraph, name: str, why: str) -> None:
    """Let the calls of what is around a module, by whatever name, check that it is still there."""
    known = trace.paths.canonical
    frames = made.frames_of(known)
    outer = name.rpartition(".")[0]
    while known(outer) not in frames:
        outer = outer.rpartition(".")[0]
    known_why = made.forbidden.get(name, why)
    made.forbidden[name] = why if why in known_why else f"{why.rstrip('.')}; {known_why}"
    path = name[len(outer) + 1 :] if outer else name
    for frame in frames[known(outer)]:
        first = first_node(frame)
        with nullcontext() if first is None else made.graph.inserting_before(first):
            module = made.graph.get_attr(path)
            check = made.graph.call_function(must_compute_nothing, (module, name, why))
        frame.nodes[:0] = [module, check]


def _is_size(spec: Any, leaf: Leaf) -> bool:
    """Return whether a signature names the size of a tensor in the place of that.

    Decomposing does where it asks for the size right after the tensor was computed.
    """
    value = leaf.meta.get("val") if isinstance(leaf, Node) else None
    return isinstance(spec, TensorArgument) and isinstance(value, SYMBOLS)


class _Leaves:
    """Finds what the leaves of signatures became in the working graph."""

    def __init__(self, trace: Trace, reads: StateReads, values: Mapping[Node, Any]) -> None:
        self.reads = reads
        self.by_name = {node.name: value for node, value in values.items()}
        for item in trace.items:
            inner = item.inner.values.items() if item.inner is not None else ()
            for node, value in inner:
                self.by_name.setdefault(node.name, value)

    def recorded(self, frame: Frame, signature: Any) -> PreservedCall | None:
        """Return the call as export recorded it; None where the record is lost."""
        if signature is None or frame.parent is None:
            return None
        inputs = tuple(self.of(signature.inputs, frame.parent))
        outputs = tuple(self.of(signature.outputs, frame))
        specs = (*signature.inputs, *signature.outputs)
        if any(map(_is_size, specs, (*inputs, *outputs))):
            return None
        told = preserved_signature(frame, signature)
        return PreservedCall(told, inputs, outputs, path=frame.path)

    def of(self, specs: Sequence[Any], frame: Frame) -> Iterator[Leaf]:
        """Yield the values of ``specs``; reads of state come first in ``frame``."""
        for name, constant in leaf_names(specs):
            found = constant if name is None else self.by_name.get(name, constant)
            if isinstance(found, StateRead):
                found = self.reads.read(found.placeholder, frame, early=True)
            yield found
