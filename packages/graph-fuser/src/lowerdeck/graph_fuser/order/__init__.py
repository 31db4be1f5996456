"""In which orders nodes may run."""

from lowerdeck.graph_fuser.order.attributes import install
from lowerdeck.graph_fuser.order.components import strong_components
from lowerdeck.graph_fuser.order.elements import followers
from lowerdeck.graph_fuser.order.meta import call_meta, value_meta
from lowerdeck.graph_fuser.order.ordering import (
    is_legal,
    legal_order,
    legalize_graph,
    ordered_tree,
    relink,
    topo_sort,
)

__all__ = [
    "call_meta",
    "followers",
    "install",
    "is_legal",
    "legal_order",
    "legalize_graph",
    "ordered_tree",
    "relink",
    "strong_components",
    "topo_sort",
    "value_meta",
]
