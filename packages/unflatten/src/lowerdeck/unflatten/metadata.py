"""Attributes of modules and metadata of nodes that this package sets.

``export_preserving`` passes facts about modules to ``unflatten`` in ``node.meta["custom"]``, which
saved programs keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.torch_base import graphs_of

PRIVATE = "_lowerdeck"
"""The code of a generated module."""

NAME = "_lowerdeck_name"
"""The canonical name of a module without code."""

UNCHANGED = "_lowerdeck_unchanged"
"""The caller's name of a child until it is hooked, wrapped or moved: its calls are not checked."""

CHECKS = "check_input_constraints"
"""The switch of a module's checks."""

ADAPTER = "flat_args_adapter"
"""The adapter of the outermost module's arguments."""

FUNCTIONS = "_lowerdeck_functions"
"""The functions of a generated class."""


def full_name(module: Any, child: str) -> str:
    """Return the name of a module's child from the root, for messages."""
    state = module.__dict__
    owner = state[PRIVATE].name if PRIVATE in state else state.get(NAME)
    return f"{owner}.{child}" if owner else child


NOT_RECORDED = "lowerdeck_not_recorded"
"""Modules without a recorded signature, with the reason."""

MODULE_NUMBERS = "lowerdeck_module_numbers"
"""Identity of modules that share all their state: equal numbers are one module."""

PASS_THROUGH = "lowerdeck_itself"
"""Marks an alias node of a result that is an argument of the same call."""

RESULT = "lowerdeck_returned"
"""Marks an argument that was written in place and returned, and is read as the result only."""

UNREAD = "lowerdeck_unread_result"
"""Modules that return a node as it was given, without a reader of the result."""

INNER = "lowerdeck_inner"
"""Unique name of a node inside a mode region that is a leaf of a call."""

LEAVES = "lowerdeck_leaves"
"""Leaves of calls inside mode regions: constants, and names of nodes in lists of one."""


def read_notes(program: ExportedProgram) -> dict[str, dict[str, Any]]:
    """Return the facts about modules, by kind and module name."""
    notes: dict[str, dict[str, Any]] = {NOT_RECORDED: {}, MODULE_NUMBERS: {}, LEAVES: {}}
    for graph_module in graphs_of(program.graph_module):
        for node in graph_module.graph.nodes:
            if custom := node.meta.get("custom"):
                for key, facts in notes.items():
                    facts.update(custom.get(key, {}))
    return notes


def is_pass_through(node: Node) -> bool:
    """Return whether ``node`` is an alias that is read as its argument."""
    if node.target is not torch.ops.aten.alias.default:
        return False
    return PASS_THROUGH in (node.meta.get("custom") or ())
