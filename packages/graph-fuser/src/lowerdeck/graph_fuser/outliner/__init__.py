"""Outlining of node groups into submodules."""

from lowerdeck.graph_fuser.outliner.boundary import InputOrder
from lowerdeck.graph_fuser.outliner.checks import check_free
from lowerdeck.graph_fuser.outliner.outlined import OutlinedRegion
from lowerdeck.graph_fuser.outliner.outlining import extract, outline
from lowerdeck.graph_fuser.outliner.partition import (
    FusedPartition,
    create_submodule_from_nodes,
    fuse_partitions,
    validate_partition,
)
from lowerdeck.graph_fuser.outliner.plan import OutlinePlan, plan_outline
from lowerdeck.graph_fuser.outliner.splice import replace_inputs

__all__ = [
    "FusedPartition",
    "InputOrder",
    "OutlinePlan",
    "OutlinedRegion",
    "check_free",
    "create_submodule_from_nodes",
    "extract",
    "fuse_partitions",
    "outline",
    "plan_outline",
    "replace_inputs",
    "validate_partition",
]
