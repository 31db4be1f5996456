"""Whoever calls torch's fusing functions by keyword calls ours with the same words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner as TorchPartitioner
from torch.fx.passes.tools_common import legalize_graph
from torch.fx.passes.utils import fuser_utils

from lowerdeck import graph_fuser

PARTITIONER = ("fuse_partitions", "partition_and_fuse", "remove_bookend_non_compute_ops")
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{
        name: (getattr(graph_fuser, name), getattr(fuser_utils, name))
        for name in (
            "erase_nodes",
            "fuse_as_graphmodule",
            "fuse_by_partitions",
            "insert_subgm",
            "topo_sort",
            "validate_partition",
        )
    },
    "legalize_graph": (graph_fuser.legalize_graph, legalize_graph),
    "CapabilityBasedPartitioner": (graph_fuser.CapabilityBasedPartitioner, TorchPartitioner),
    **{
        name: (
            getattr(graph_fuser.CapabilityBasedPartitioner, name),
            getattr(TorchPartitioner, name),
        )
        for name in ("propose_partitions", *PARTITIONER)
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_parameters_are_called_and_default_as_torchs(name: str) -> None:
    ours, theirs = (inspect.signature(item).parameters for item in PAIRS[name])
    shared = list(ours.values())[: len(theirs)]
    assert [(one.name, one.default, one.kind) for one in shared] == [
        (other.name, other.default, other.kind) for other in theirs.values()
    ]

    # What only ours takes is given by keyword and may be left out.
    for parameter in list(ours.values())[len(theirs) :]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
        assert parameter.default is not inspect.Parameter.empty, parameter
