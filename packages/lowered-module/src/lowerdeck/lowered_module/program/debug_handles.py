"""Debug handles, which map instructions of a device to nodes of the program."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, GraphModule

from lowerdeck.torch_base import graphs_of

HANDLE = "debug_handle"


def assign_debug_handles(graph_module: GraphModule) -> int:
    """Assign new debug handles to calls and attributes without one; return the next unused one.

    Modifies node metadata in place. Existing handles are kept, since records of another tool may
    refer to them. New handles are unique in the program with its nested graphs.
    """
    all_graphs = list(graphs_of(graph_module))
    highest = max((handle for gm in all_graphs for handle in _handles(gm.graph)), default=0)
    following = 1 + highest
    for gm in all_graphs:
        for node in gm.graph.nodes:
            # exir numbers get_attr nodes too, and backends written for it require that.
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
