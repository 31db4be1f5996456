"""Arguments and results that were written in place before the call, or before it returned.

Decomposing makes a new value of each write. A signature names the value that an argument had when
it was made; the call reads the one that it has by then, and so must a module in its place.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.torch_base import MemoryUse, OpOverload, returns_view, schema_of
from lowerdeck.unflatten.calls.carrying import has_read_memory
from lowerdeck.unflatten.cut.preserved import Absent, Leaf, PreservedCall
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.trace.lost_stacks import origins


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known of the nodes around a call.

    Attributes:
        inside: The nodes of the call and of those that it makes.
        returned: The nodes that the program returns.
        stored: The nodes whose values become new state.
        reads: The placeholder of the state that each node reads which reads state.
    """

    inside: Collection[Node]
    returned: Collection[object]
    stored: Collection[object]
    reads: Mapping[Node, str]

    def taken(self) -> list[Node]:
        """Return the tensors that the call reads besides state, but does not compute."""
        sources = (source for node in self.inside for source in node.all_input_nodes)
        return [
            node
            for node in dict.fromkeys(sources)
            if node not in self.inside and node.op != "get_attr" and _layout(node) is not None
        ]

    def is_read_outside(self, node: Node) -> bool:
        """Return whether anything but the call reads a value."""
        return node in self.returned or any(user not in self.inside for user in node.users)

    def identity(self, node: Node) -> object:
        """Return a key that is equal for two reads of the same state."""
        return self.reads.get(node, node)


def in_time(call: PreservedCall, inside: Collection[Node]) -> PreservedCall:
    """Return the call with the values that its leaves had then, where these are known.

    Decomposing may name a value that a later write made, or one of the call's own.

    Args:
        call: The call as the signature names its leaves.
        inside: Its nodes.
    """
    end = max(inside, default=None)
    if end is None:
        return call
    inputs = [_as_of(leaf, lambda node: node < end and node not in inside) for leaf in call.inputs]
    outputs = [_as_of(leaf, lambda node: node <= end) for leaf in call.outputs]
    return replace(call, inputs=tuple(inputs), outputs=tuple(outputs))


def is_elsewhere(call: PreservedCall, inside: Collection[Node]) -> bool:
    """Return whether a leaf of the call is neither there when it is made nor computed by it."""
    end = max(inside, default=None)
    leaves = (*call.inputs, *call.outputs)
    late = any(isinstance(leaf, Node) and end is not None and leaf > end for leaf in leaves)
    returned = call.nodes(call.outputs)
    return late or any(leaf not in inside and leaf not in call.inputs for leaf in returned)


def _as_of(leaf: Leaf, is_known: Callable[[Node], bool]) -> Leaf:
    """Return the last value of ``leaf`` that was known then; itself where nothing tells one."""
    if not isinstance(leaf, Node) or is_known(leaf):
        return leaf
    layout = _layout(leaf)
    values = (node for node in _earlier_values(leaf) if is_known(node))
    return next((node for node in values if _layout(node) == layout), leaf)


def with_current_leaves(
    call: PreservedCall, around: Surroundings
) -> tuple[PreservedCall, Sequence[Leaf]]:
    """Return the call with the values that its leaves have by then, and arguments in doubt.

    Args:
        call: The call as the signature names its leaves.
        around: The nodes around it.
    """
    taken = around.taken()
    known = {around.identity(node) for node in taken}
    unread = [
        leaf
        for leaf in dict.fromkeys(call.inputs)
        if isinstance(leaf, Absent)
        or (
            isinstance(leaf, Node)
            and _layout(leaf) is not None
            and around.identity(leaf) not in known
        )
    ]
    written = [node for node in taken if node not in call.inputs and _is_written(node)]
    renewed = _renewed_arguments(unread, written, around)
    doubtful = [
        leaf
        for leaf in unread
        if leaf not in renewed
        and any(_may_be(node, leaf) for node in written if node not in renewed.values())
    ]
    inputs = tuple(renewed.get(leaf, leaf) for leaf in call.inputs)
    renewed |= _renewed_results(call.outputs, around)
    outputs = tuple(renewed.get(leaf, leaf) for leaf in call.outputs)
    return replace(call, inputs=inputs, outputs=outputs), doubtful


def writes_argument(call: PreservedCall, around: Surroundings) -> bool:
    """Return whether eager writes an argument, where this program makes a new value."""
    taken = {around.identity(leaf) for leaf in call.inputs if isinstance(leaf, Node)}
    return any(
        around.identity(source) in taken
        for node in around.inside
        if _is_written(node)
        for source in _earlier_values(node)
    )


class EagersMemory:
    """Which values of a decomposed program share memory in eager, where each write is a new value.

    Args:
        made: The working graph, whole but for its output.
        returned: What the program returns.
    """

    def __init__(self, made: WorkingGraph, returned: Iterable[object]) -> None:
        self._made = made
        self._results = [node for node in returned if isinstance(node, Node)]
        self._renewed = [node for node in made.graph.nodes if _is_renewed(node)]

    @cached_property
    def _memory(self) -> MemoryUse:
        state: dict[str, list[Node]] = {}
        for node, placeholder in self._made.reads.items():
            state.setdefault(placeholder, []).append(node)
        pairs = [(node, _renewed_by(node)) for node in self._renewed]
        return MemoryUse(self._made.graph, None, [*state.values(), *pairs])

    @property
    def is_renewed(self) -> bool:
        """Return whether any write is a new value here."""
        return bool(self._renewed)

    def is_lost(
        self,
        given: Iterable[Node],
        returned: Sequence[Node],
        inside: Collection[Node],
        stored: Container[Node],
    ) -> bool:
        """Return whether the caller of a call may read what it computes from elsewhere.

        It makes a view of what was written after the call by itself, and reads an argument that
        the call wrote, or state that it wrote and returned, by either name: what another module
        did there would not be read. Memory of the call's own that is written later, it reads from
        the result.

        Args:
            given: What the call is given.
            returned: What it returns.
            inside: Its nodes.
            stored: The nodes whose values become new state.
        """
        if any(has_read_memory(leaf) or (leaf in stored and leaf in inside) for leaf in returned):
            return True
        group = self._memory.group
        known = {group(leaf) for leaf in given if leaf not in inside}
        known &= {group(node) for node in self._renewed if node in inside}
        # Readers may have what was written by another view.
        if any(
            node not in returned and group(node) in known
            for node in (inside if known else ())
            if any(user not in inside for user in node.users)
        ):
            return True
        foreign = {source for node in inside for source in node.all_input_nodes}
        foreign = {node for node in foreign if node not in inside or node.op == "get_attr"}
        others = set(map(group, (*foreign, *given)))
        times = Counter(map(group, returned))
        shared = {one for one, count in times.items() if one in others or count > 1}
        end = max(inside, default=None)
        return any(
            group(node) in shared
            for node in self._renewed
            if (end is None or node > end) and node not in inside
        )

    def apart(self, call: PreservedCall, inside: Collection[Node]) -> dict[Node, list[Node]]:
        """Return the results of ``call`` and arguments of which one is written and one read later.

        What another module returned of that argument's memory would have to be written too.
        """
        group, end = self._memory.group, max(inside, default=None)
        if end is None:
            return {}
        written = {group(node) for node in self._renewed if node > end}
        given = [leaf for leaf in call.nodes(call.inputs) if leaf not in inside]

        def is_apart(one: Node, other: Node) -> bool:
            groups = {group(one): group(other), group(other): group(one)}
            return len(groups) == 2 and any(
                mine in written and (its in self._returned or self._last_read.get(its, end) > end)
                for mine, its in groups.items()
            )

        returned = call.nodes(call.outputs) if written else ()
        found = {leaf: [one for one in given if is_apart(leaf, one)] for leaf in returned}
        return {leaf: others for leaf, others in found.items() if others}

    @cached_property
    def _returned(self) -> set[Node]:
        return set(map(self._memory.group, self._results))

    @cached_property
    def _last_read(self) -> dict[Node, Node]:
        """The last node that reads of each memory."""
        group = self._memory.group
        nodes = self._made.graph.nodes
        return {group(source): node for node in nodes for source in node.all_input_nodes}


def warn_of_doubtful(names: Iterable[str]) -> None:
    """Warn that the arguments of the calls named so are not certain."""
    shown = ", ".join(dict.fromkeys(names))
    if shown:
        warnings.warn(
            f"An argument of {shown} seems to have been written in place before the call, and "
            "decomposing this program lost which value the call is given. The whole computes what "
            "eager does, but do not replace these modules in it: unflatten the program before it "
            "is decomposed to do that.",
            UserWarning,
            stacklevel=2,
        )


def _renewed_arguments(
    unread: Sequence[Leaf], written: Iterable[Node], around: Surroundings
) -> dict[Leaf, Node]:
    """Return the value that replaced each argument which the call itself never reads."""
    wanted = {around.identity(leaf): leaf for leaf in unread if isinstance(leaf, Node)}
    found: dict[Leaf, list[Node]] = {}
    for node in written:
        for source in _earlier_values(node):
            leaf = wanted.get(around.identity(source))
            if leaf is not None:
                if _layout(node) == _layout(leaf):
                    found.setdefault(leaf, []).append(node)
                break
    return {leaf: nodes[0] for leaf, nodes in found.items() if len(nodes) == 1}


def _renewed_results(outputs: Iterable[Leaf], around: Surroundings) -> dict[Leaf, Node]:
    """Return the value that replaced each result which nobody reads as it was made."""
    unread = {
        leaf
        for leaf in outputs
        if isinstance(leaf, Node)
        and leaf in around.inside
        and not around.is_read_outside(leaf)
        and not _may_be_whole(leaf)
    }
    found: dict[Leaf, list[Node]] = {}
    for node in around.inside if unread else ():
        if node in around.stored or node in outputs or not around.is_read_outside(node):
            continue
        for source in _earlier_values(node) if _is_written(node) else ():
            if source in unread:
                if _layout(source) == _layout(node):
                    found.setdefault(source, []).append(node)
                break
    return {leaf: nodes[0] for leaf, nodes in found.items() if len(nodes) == 1}


def _earlier_values(node: Node) -> Iterator[Node]:
    """Yield what ``node`` was before it was written in place, and what that is a view of."""
    is_changed = False
    while node.all_input_nodes and (_writes(node) or returns_view(node.target)):
        # Writing all of a tensor can leave nothing but a view or a copy of what was written.
        is_changed = is_changed or not (returns_view(node.target) or node.target in _COPIES)
        node = _renewed_by(node)
        if is_changed:
            yield node


_COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


def _is_written(node: Node) -> bool:
    """Return whether ``node`` is what became of a value that was written in place, or a view."""
    while returns_view(node.target) and node.all_input_nodes and not _writes(node):
        node = node.all_input_nodes[0]
    return _writes(node)


def _may_be_whole(node: Node) -> bool:
    """Return whether ``node`` may be all of what eager wrote a part of, and returned that part.

    torch then names the whole for the part: nothing tells which value the call returns.
    """
    is_choice = node.target is torch.ops.aten.where.self
    return (is_choice or "_scatter." in str(node.target)) and _writes(node)


def _writes(node: Node) -> bool:
    """Return whether ``node`` stands for an operator that wrote in place."""
    return any(_is_mutable(str(source.target)) for source in origins(node))


def _is_renewed(node: Node) -> bool:
    """Return whether ``node`` makes a new value of what eager wrote in place."""
    if node.op != "call_function" or not node.meta.get("from_node"):
        return False
    return _writes(node) and not _is_mutable(str(node.target))


def _renewed_by(node: Node) -> Node:
    """Return what held the value of ``node`` before the write."""
    # First comes what the operator's variant in place writes; a choice keeps its last.
    is_choice = node.target is torch.ops.aten.where.self
    return node.all_input_nodes[-1 if is_choice else 0] if node.all_input_nodes else node


@cache
def _is_mutable(target: str) -> bool:
    """Return whether the operator that is written so, such as ``aten.add_.Tensor``, writes."""
    found: Any = torch.ops
    for part in target.split("."):
        found = getattr(found, part, None) if part.isidentifier() else None
    return isinstance(found, OpOverload) and schema_of(found).is_mutable


def _may_be(node: Node, leaf: Leaf) -> bool:
    """Return whether ``node`` may be what ``leaf``, or what that is a view of, became."""
    if not isinstance(leaf, Node):
        return True
    layouts = [_layout(leaf)]
    while returns_view(leaf.target) and leaf.all_input_nodes:
        leaf = leaf.all_input_nodes[0]
        layouts.append(_layout(leaf))
    return _layout(node) in layouts


def _layout(node: Node) -> object:
    value = node.meta.get("val")
    # As text: comparing symbolic sizes would note that they are equal.
    return (str(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
