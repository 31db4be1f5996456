"""Attributes of modules and metadata of nodes that this package sets.

``export_preserving`` passes notes to ``unflatten`` in ``node.meta["custom"]``, which survives
saving.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.torch_base import graphs_of

PRIVATE = "_lowerdeck"
"""Body of a generated module."""

NAME = "_lowerdeck_name"
"""The canonical name of a module without code."""

REFUSAL = "_lowerdeck_refusal"
"""Why a module without code cannot be replaced or hooked."""

UNCHANGED = "_lowerdeck_unchanged"
"""The caller's name of a child; removed when the child is hooked, wrapped or assigned to another
module, which enables its checks.
"""

CHECKS = "check_input_constraints"
"""Whether a module's checks are on."""

ADAPTER = "flat_args_adapter"
"""Argument adapter of the root."""

FUNCTIONS = "_lowerdeck_functions"
"""The functions of a generated class."""


def full_name(module: Any, child: str) -> str:
    """Return a child's full name from the root, for messages."""
    state = module.__dict__
    owner = state[PRIVATE].name if PRIVATE in state else state.get(NAME)
    return f"{owner}.{child}" if owner else child


NOT_RECORDED = "lowerdeck_not_recorded"
"""Reasons for modules without a recorded signature."""

MODULE_NUMBERS = "lowerdeck_module_numbers"
"""Ids of modules that share all state: equal ids are one module."""

PASS_THROUGH = "lowerdeck_itself"
"""Marks the alias node of a result that is an argument of the same call."""

RESULT = "lowerdeck_returned"
"""Marks an argument that is mutated and returned, and afterwards used only as the result."""

UNREAD = "lowerdeck_unread_result"
"""Modules that return a node unchanged, with the result unused."""

INNER = "lowerdeck_inner"
"""Unique name of a call leaf inside a mode region."""

LEAVES = "lowerdeck_leaves"
"""Call leaves inside mode regions: constants, and node names in one-element lists."""


def read_notes(program: ExportedProgram) -> dict[str, dict[str, Any]]:
    """Return the notes about modules, by kind and module name."""
    notes: dict[str, dict[str, Any]] = {NOT_RECORDED: {}, MODULE_NUMBERS: {}, LEAVES: {}}
    for graph_module in graphs_of(program.graph_module):
        for node in graph_module.graph.nodes:
            if custom := node.meta.get("custom"):
                for key, facts in notes.items():
                    facts.update(custom.get(key, {}))
    return notes


def is_pass_through(node: Node) -> bool:
    """Return whether ``node`` is an alias inserted for a pass-through result."""
    if node.target is not torch.ops.aten.alias.default:
        return False
    return PASS_THROUGH in (node.meta.get("custom") or ())
