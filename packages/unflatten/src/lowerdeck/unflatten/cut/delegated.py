"""Modules of a lowered program, of which delegates hold what they compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Graph, Node

from lowerdeck.unflatten.calls.carrying import must_hold_generated
from lowerdeck.unflatten.cut.preserved_frames import forbid_replacing, forbid_uncalled
from lowerdeck.unflatten.cut.working_graph import WorkingGraph
from lowerdeck.unflatten.trace.module_paths import is_delegate
from lowerdeck.unflatten.trace.trace import Trace

_DELEGATED = (
    "is lowered to {}: a delegate computes it, so that another module in its place would have no "
    "effect. Replace it in the program before lowering, and lower that."
)
_CUT = (
    "takes and returns flat values: the program has no signature of it, or lowering cut through "
    "it. Replace it in the program before lowering, and lower that."
)


def forbid_delegated(trace: Trace, made: WorkingGraph) -> None:
    """Forbid replacing what delegates hold, and calls whose signatures they have cut.

    Args:
        trace: The program.
        made: The working graph, whole but for its output; preserved calls are known.
    """
    delegates = {name: module for name, module in made.attributes.items() if is_delegate(module)}
    if not delegates:
        return
    frame_of = {node: frame for frame in made.tree.frames() for node in frame.nodes}
    for node in made.graph.find_nodes(op="get_attr"):
        delegate: Any = delegates.get(str(node.target))
        if delegate is None:
            continue
        for user in node.users:
            own = frame_of[user].path if user in frame_of else ""
            for path in dict.fromkeys(_paths(_nodes(delegate))):
                is_around = not path or own == path or own.startswith(path + ".")
                if path in trace.paths and not is_around and not made.is_uncalled(path):
                    forbid_uncalled(trace, made, path, _DELEGATED.format(delegate.backend_id))
    for frame in made.tree.frames():
        if frame.parent is not None and frame not in made.preserved:
            forbid_replacing(made, frame, frame.parent, _CUT, must_hold_generated)


def _nodes(delegate: Any) -> Iterable[Node]:
    """Return what a delegate computes; nothing where another library's does not tell."""
    graph = getattr(delegate.original_module, "graph", None)
    return graph.nodes if isinstance(graph, Graph) else ()


def _paths(nodes: Iterable[Node]) -> Iterator[str]:
    """Yield the modules in which nodes are."""
    for node in nodes:
        # What a delegate is given was computed elsewhere.
        if node.op == "placeholder":
            continue
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            yield path.partition("@")[0]
