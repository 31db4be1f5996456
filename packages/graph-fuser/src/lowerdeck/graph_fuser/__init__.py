"""Turn groups of torch.fx nodes into submodules, in one linear pass.

Partitions (flat groups of nodes) go through ``fuse_partitions``:

    fused = fuse_partitions(gm, {"first": nodes_a, "second": nodes_b})
    fused["first"].module, fused["first"].call_node, fused["first"].inputs, fused["first"].outputs

``propose_partitions(gm, is_supported)`` chooses the groups; ``fuse_partitions(gm,
proposal.named())`` fuses them.

Hierarchies (groups in groups) go through ``outline``, on which everything else is built:

    inner = Region("linear", nodes_of_linear)
    outer = Region("block", other_nodes_of_block, children=[inner])
    outlined = outline(gm, [outer])
    outlined[inner].module       # a GraphModule, called by outlined[outer].module
    outlined[inner].call_node    # the call_module node in that module's graph
    outlined[inner].inputs       # the original outer nodes passed as arguments
    outlined[inner].outputs      # the original inner nodes returned
    outlined[inner].node_map     # from original nodes to their copies

``plan_outline`` computes the inputs, outputs and order of each region without building modules.

Code of changed and new modules is generated at first use, or immediately by ``generate_code``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowerdeck.graph_fuser._torch_private import generate_code
    from lowerdeck.graph_fuser.errors import CycleError, GraphFuserError, RegionError
    from lowerdeck.graph_fuser.order import legalize_graph, topo_sort
    from lowerdeck.graph_fuser.outliner import (
        FusedPartition,
        InputOrder,
        OutlinedRegion,
        OutlinePlan,
        create_submodule_from_nodes,
        fuse_partitions,
        outline,
        plan_outline,
        validate_partition,
    )
    from lowerdeck.graph_fuser.proposer import LeftOut, Proposal, Reason, propose_partitions
    from lowerdeck.graph_fuser.regions import Region
    from lowerdeck.graph_fuser.torch_names import (
        CapabilityBasedPartitioner,
        erase_nodes,
        fuse_as_graphmodule,
        fuse_by_partitions,
        insert_subgm,
    )

__all__ = [
    # Regions and the outliner
    "InputOrder",
    "OutlinePlan",
    "OutlinedRegion",
    "Region",
    "generate_code",
    "outline",
    "plan_outline",
    # Partitions
    "FusedPartition",
    "LeftOut",
    "Proposal",
    "Reason",
    "create_submodule_from_nodes",
    "fuse_partitions",
    "propose_partitions",
    "validate_partition",
    # Drop-ins for torch.fx.passes
    "CapabilityBasedPartitioner",
    "erase_nodes",
    "fuse_as_graphmodule",
    "fuse_by_partitions",
    "insert_subgm",
    "legalize_graph",
    "topo_sort",
    # Errors
    "CycleError",
    "GraphFuserError",
    "RegionError",
]

# Search order: few callers need the names of torch, which import torch's partitioner.
_MODULES = (
    *("errors", "regions", "outliner", "proposer"),
    *("order", "_torch_private", "torch_names"),
)

if not TYPE_CHECKING:  # With ``__getattr__``, a type checker accepts any name.

    def __getattr__(name: str) -> Any:
        """Return a public name, importing its module on first use."""
        for module in _MODULES if name in __all__ else ():
            submodule = importlib.import_module(f"{__name__}.{module}")
            if hasattr(submodule, name):
                globals()[name] = getattr(submodule, name)
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all names, including those not imported yet."""
        return sorted({*globals(), *__all__})
