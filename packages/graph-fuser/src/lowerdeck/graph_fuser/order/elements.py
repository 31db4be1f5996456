"""Elements: nodes that only take a part of a value, and stay with the node that made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Node

from lowerdeck.torch_base import is_getitem


def is_element(node: Node) -> bool:
    """Return whether ``node`` surely takes an element of a tuple or list, and not of a tensor.

    That reads no tensor and looks at none, so that it may pass whatever changes one.
    """
    if not is_getitem(node) or not isinstance(node.args[0], Node):
        return False
    return isinstance(node.args[0].meta.get("val"), (tuple, list))


def followers(
    nodes: Sequence[Node], hazards: Iterable[tuple[Node, Node]] = ()
) -> dict[Node, Node]:
    """Return the producer of each node that only takes an element of its value.

    What must wait for something else, such as ``y[mask]`` for a write after ``y``, follows
    nothing: tied to its producer it could close a circle around the write. So a producer and its
    followers can be taken for one node: all that must precede any of them precedes the producer.

    Args:
        nodes: The graph's nodes in a legal order.
        hazards: Pairs of nodes that must keep their order.
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
