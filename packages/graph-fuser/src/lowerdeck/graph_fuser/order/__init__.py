"""Topological orders and metadata of moved nodes."""

from lowerdeck.graph_fuser.order.attributes import install
from lowerdeck.graph_fuser.order.components import strong_components
from lowerdeck.graph_fuser.order.elements import followers
from lowerdeck.graph_fuser.order.hazards import order_hazards
from lowerdeck.graph_fuser.order.meta import call_meta, value_meta
from lowerdeck.graph_fuser.order.ordering import check_legal, legalize_graph, relink, topo_sort

__all__ = [
    "call_meta",
    "check_legal",
    "followers",
    "install",
    "legalize_graph",
    "order_hazards",
    "relink",
    "strong_components",
    "topo_sort",
    "value_meta",
]
