"""Reads of what a model holds, each by an attribute of the module whose call reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.fx import Node

from lowerdeck.torch_base import add_node
from lowerdeck.unflatten.calls.carrying import SEVERAL_NAMES, SHARED_STATE, must_be_one
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, enter_node, first_node
from lowerdeck.unflatten.trace.call_tree import Frame
from lowerdeck.unflatten.trace.flat_items import Scope
from lowerdeck.unflatten.trace.module_paths import ModulePaths
from lowerdeck.unflatten.trace.state import ProgramState
from lowerdeck.unflatten.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class StateRead:
    """Stands for the value of a state placeholder until it is known which call reads it."""

    placeholder: str


class StateReads:
    """Adds reads to a working graph, one for each piece of state in each call that owns it.

    Args:
        trace: The program.
        made: The working graph; nodes are added to it.
    """

    def __init__(self, trace: Trace, made: WorkingGraph) -> None:
        self.state: ProgramState = trace.state
        self.paths: ModulePaths = trace.paths
        self.made: WorkingGraph = made
        self._reads: dict[tuple[Frame, str], Node] = {}
        self._examples: dict[str, Any] = {
            node.name: node.meta.get("val")
            for node in trace.program.graph.find_nodes(op="placeholder")
        }

    def value(self, found: Any, frame: Frame) -> Any:
        """Return what a call in ``frame`` uses for a value: for state a read of the attribute."""
        if isinstance(found, StateRead):
            return self.read(found.placeholder, frame)
        if isinstance(found, tuple):
            return tuple(self.value(part, frame) for part in found)
        return found

    def read(self, placeholder: str, frame: Frame, *, early: bool = False) -> Node:
        """Return a read of state in the innermost call around ``frame`` whose module owns it."""
        names = self.state.names_of(placeholder)
        owner: Frame | None = frame
        path: str | None = None
        while owner is not None:
            found = (self.paths.attribute(owner.path, name) for name in names)
            path = next((text for text in found if text is not None), None)
            if path is not None:
                break
            owner = owner.parent
        if owner is None or path is None:
            owner, path = self.made.tree.root, names[0]
        key = (owner, placeholder)
        read = self._reads.get(key)
        if read is None:
            read = self._insert(owner, path, owner is frame and not early)
            read.meta["val"] = self._examples[placeholder]
            self._reads[key] = read
            self._check_names(owner, path, read, names)
            self.made.reads[read] = placeholder
        return read

    def attribute(self, node: Node, scope: Scope, frame: Frame) -> Any:
        """Return a read of what the graph module itself holds, such as a branch of a cond."""
        name = str(node.target)
        held = scope.module
        for part in name.split("."):
            held = getattr(held, part)
        base, number = name.replace(".", "_"), 0
        while (
            self.made.attributes.get(name, held) is not held
            or name.partition(".")[0] in self._model_names
        ):
            number += 1
            name = f"{base}_{number}"
        self.made.attributes[name] = held
        read = self.made.graph.create_node("get_attr", name, (), {}, node.name)
        return enter_node(read, frame, node)

    def _insert(self, owner: Frame, path: str, here: bool) -> Node:
        name = path.replace(".", "_")
        first = None if here else first_node(owner)
        if first is None:
            return enter_node(add_node(self.made.graph, "get_attr", path, (), name), owner)
        with self.made.graph.inserting_before(first):
            read = add_node(self.made.graph, "get_attr", path, (), name)
        owner.nodes.insert(0, read)
        return read

    def _check_names(self, owner: Frame, path: str, read: Node, names: Sequence[str]) -> None:
        """Check that state is one by all its names that ``owner`` knows, where it reads it."""
        known = names_known(self.paths, owner.path, path, names)
        if not known:
            return
        prefix = f"{owner.path}." if owner.path else ""
        holders = [prefix + name.rpartition(".")[0] for name in known if "." in name]
        is_one = len({self.paths.canonical(holder) for holder in holders}) == 1 < len(holders)
        for holder in holders:
            self.made.forbid(holder, owner, SEVERAL_NAMES if is_one else SHARED_STATE)
        with self.made.graph.inserting_before(read):
            held = tuple(add_node(self.made.graph, "get_attr", name, (), name) for name in known)
            check = self.made.graph.call_function(must_be_one, (held, tuple(known)))
        index = owner.nodes.index(read)
        owner.nodes[index:index] = [*held, check]

    @cached_property
    def _model_names(self) -> frozenset[str]:
        """Whatever the model calls a child or state anywhere: calls read those by such names."""
        names = (*self.paths.order, *self.state.entries)
        return frozenset(part for name in names for part in name.split("."))


def names_known(paths: ModulePaths, owner: str, path: str, names: Sequence[str]) -> Sequence[str]:
    """Return by which paths code of a module may read state, where others may be put there.

    The program does not tell by which of them it does. None if only one is possible.

    Args:
        paths: The modules.
        owner: The module.
        path: One of these paths.
        names: All names of the state.
    """
    if len(names) == 1 and "." not in path:
        return ()
    found = paths.attributes(owner, names)
    return found if len(found) > 1 and any("." in name for name in found) else ()
