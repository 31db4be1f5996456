"""Elements: getitem nodes that stay with their multi-output producer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from lowerdeck.torch_base import is_getitem


def is_element(node: Node) -> bool:
    """Return whether ``node`` is certainly a getitem of a tuple or list, not of a tensor.

    Such a node reads no tensor data, so it may be reordered with writes.
    """
    if not is_getitem(node) or not isinstance(node.args[0], Node):
        return False
    return isinstance(node.args[0].meta.get("val"), (tuple, list))


def followers(
    nodes: Sequence[Node], hazards: Iterable[tuple[Node, Node]] = ()
) -> dict[Node, Node]:
    """Return the producer of each getitem node of a multi-output op.

    Nodes with other dependencies are excluded (``y[mask]`` after a write to ``y`` would form a
    cycle with it). A producer and its followers can be treated as one node: everything that must
    precede any of them precedes the producer.

    Args:
        nodes: The graph's nodes in topological order.
        hazards: Node pairs whose order must be preserved.
    """
    waits = {after for before, after in hazards if before not in after.all_input_nodes}
    follows: dict[Node, Node] = {}
    for node in nodes:
        users = node.users
        if users and all(is_getitem(user) and user.args[0] is node for user in users):
            follows.update(
                (user, node)
                for user in users
                if user not in waits and len(user.all_input_nodes) == 1
            )
    return follows
