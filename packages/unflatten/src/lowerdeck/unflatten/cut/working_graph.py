"""A copy of a program's flat graph in the shape that can be cut into modules.

In the copy no placeholder stands for state: each call reads what its module owns by attribute.
Pieces that export had wrapped in an operator to run them without gradients or under autocast are
written out again, because the modules called in them are part of the hierarchy too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from lowerdeck.unflatten.calls.carrying import UNCALLED
from lowerdeck.unflatten.cut.preserved import PreservedCall
from lowerdeck.unflatten.trace.call_tree import CallTree, Frame


@dataclass(slots=True)
class WorkingGraph:
    """The copy.

    Attributes:
        graph: Placeholders are the user's inputs, in order; the output is a flat tuple of the
            user's.
        tree: The calls, with their nodes entered.
        inputs: The program's placeholder of each user input.
        preserved: The calls whose signatures the user asked to preserve.
        attributes: Graph modules by the attribute that ``get_attr`` nodes name.
        reads: The placeholder of the state that each other ``get_attr`` node reads.
        local: Where the graph is the program's own: for the name of a module and a placeholder of
            state the attribute by which calls of that module read it.
        forbidden: Modules in whose place no other one would be right, and why.
        by_module: What ``frames_of`` returns, once it was asked.
    """

    graph: Graph
    tree: CallTree
    inputs: list[Node] = field(default_factory=list)
    preserved: dict[Frame, PreservedCall] = field(default_factory=dict)
    attributes: dict[str, torch.nn.Module] = field(default_factory=dict)
    reads: dict[Node, str] = field(default_factory=dict)
    local: Mapping[tuple[str, Node], str] = field(default_factory=dict)
    forbidden: dict[str, str] = field(default_factory=dict)

    by_module: dict[str, list[Frame]] = field(default_factory=dict, init=False, repr=False)

    def frames_of(self, known: Callable[[str], str]) -> Mapping[str, Sequence[Frame]]:
        """Return the calls of each module, by its first name, which ``known`` returns."""
        if not self.by_module:
            for frame in self.tree.frames():
                self.by_module.setdefault(known(frame.path), []).append(frame)
        return self.by_module

    def is_uncalled(self, path: str) -> bool:
        """Return whether hooks of a module were forbidden, for a call of it is missing."""
        return self.forbidden.get(path, "").startswith(UNCALLED)

    def forbid(self, path: str, caller: Frame, why: str) -> None:
        """Note that another module may not take the place of a module that ``caller`` knows."""
        known = self.forbidden.setdefault(path, why)
        if why not in known:
            self.forbidden[path] = f"{known.rstrip('.')}; {why}"
        # Whatever is between the two holds the module, and would bring another one with it.
        outer = path.rpartition(".")[0]
        while outer and outer != caller.path:
            self.forbidden.setdefault(outer, f"holds {path!r}, which {why}")
            outer = outer.rpartition(".")[0]


def enter_node(node: Node, frame: Frame, origin: Node | None = None) -> Node:
    """Enter a new node into the call that runs it, with the meta of the node it came from."""
    if origin is not None:
        node.meta.update(origin.meta)
    frame.nodes.append(node)
    return node


def nodes_in(frame: Frame) -> Iterator[Node]:
    """Yield the nodes of ``frame`` and of the calls that it makes."""
    queue = [frame]
    for current in queue:
        queue.extend(current.children)
        yield from current.nodes


def first_node(frame: Frame) -> Node | None:
    """Return the first node of ``frame`` or of a call that it makes."""
    best: Node | None = None
    queue = [frame]
    for current in queue:
        queue.extend(current.children)
        if current.nodes and (best is None or current.nodes[0] < best):
            best = current.nodes[0]
    return best


def attribute_modules(
    graph: Graph, held: Mapping[str, torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """Return the entries of ``held`` that ``graph`` reads."""
    if not held:
        return {}
    return {
        str(node.target): held[str(node.target)]
        for node in graph.find_nodes(op="get_attr")
        if str(node.target) in held
    }
