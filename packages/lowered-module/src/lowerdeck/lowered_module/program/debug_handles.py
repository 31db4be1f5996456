"""Numbers that tie what runs on a device back to the nodes of the program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.fx import Graph, GraphModule

from lowerdeck.torch_base import graphs_of

HANDLE = "debug_handle"

# A backend may lower parts of its partition in preprocess: those handles must not meet others of
# the program around, which it does not see.
_free: ContextVar[int] = ContextVar("first debug handle free in the programs around", default=0)


def assign_debug_handles(graph_module: GraphModule) -> int:
    """Give each call and attribute without a debug handle a new one; return the next free one.

    Modifies node metadata in place. Handles that are there already are kept, so that a program
    whose handles were assigned by another tool still maps to that tool's records. New handles
    are unique across the program with all its nested graphs.

    Returns:
        The smallest handle above all in use.
    """
    all_graphs = list(graphs_of(graph_module))
    highest = max((handle for gm in all_graphs for handle in _handles(gm.graph)), default=0)
    following = max(1 + highest, _free.get())
    for gm in all_graphs:
        for node in gm.graph.nodes:
            # exir numbers what reads attributes too, and backends written for it ask for that.
            named = node.op in ("call_function", "get_attr")
            if named and not isinstance(node.meta.get(HANDLE), int):
                node.meta[HANDLE] = following
                following += 1
    return following


def _handles(graph: Graph) -> Iterator[int]:
    for node in graph.nodes:
        handle = node.meta.get(HANDLE)
        if isinstance(handle, int):
            yield handle


@contextmanager
def handles_taken(below: int) -> Iterator[None]:
    """Let programs that are lowered meanwhile use no handle smaller than ``below``.

    What they use stays taken for the next one.

    Args:
        below: The smallest handle above all in use.
    """
    token = _free.set(max(_free.get(), below))
    try:
        yield
    finally:
        _free.reset(token)


def take_handles(below: int) -> None:
    """Say that a program inside another's preprocess has used the handles smaller than ``below``.

    Args:
        below: The smallest handle above all in use.
    """
    if _free.get():
        _free.set(max(_free.get(), below))
