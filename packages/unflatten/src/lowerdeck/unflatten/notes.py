"""Node metadata by which ``export_preserving`` passes facts about modules to ``unflatten``.

They are stored in ``node.meta["custom"]``, which saved programs keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.torch_base import graphs_of

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
