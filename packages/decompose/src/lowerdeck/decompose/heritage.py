"""What nodes know of the node that they were made from."""

from __future__ import annotations

import copy
from typing import Any

from torch.fx import Node

from lowerdeck.decompose._torch_private import COPIED_META, node_source


class Heritage:
    """The meta that one node of the original program hands on.

    Args:
        source: The node.
    """

    __slots__ = ("_meta", "source")

    def __init__(self, source: Node) -> None:
        self.source: Node = source
        meta = source.meta
        self._meta: dict[str, Any] = {
            name: meta[name] for name in ("stack_trace", *COPIED_META) if name in meta
        }
        # Shared by all nodes that come from it: nobody changes a source.
        self._meta["from_node"] = [node_source(source)]

    def meta(self) -> dict[str, Any]:
        """Return meta for one more node."""
        return {
            name: copy.copy(value) if isinstance(value, (dict, list)) else value
            for name, value in self._meta.items()
        }
