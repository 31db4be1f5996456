"""Fusing and partitioning against torch.fx.passes and, where it is installed, ExecuTorch."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import ModuleType

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from benchmarks.harness import Row, count_calls, cpu_seconds, growth_exponent, in_rounds
from lowerdeck.graph_fuser import fuse_partitions, propose_partitions

PACKAGE = "graph_fuser"
EXECUTORCH = "ExecuTorch create_submodule_from_nodes, once per partition"


def rows(quick: bool) -> Iterator[Row]:
    """Yield the results.

    Args:
        quick: Small sizes; the goals are stated for the full ones.
    """
    yield from _fuse(quick)
    yield from _propose(quick)


def _fuse(quick: bool) -> Iterator[Row]:
    sizes = [(2500, 50), (5000, 100)] if quick else [(12_500, 250), (25_000, 500), (50_000, 1000)]
    costs = in_rounds([partial(_fuse_all, n, p) for n, p in sizes], repeat=5)
    size, count = sizes[-1]
    case = f"fuse {size} nodes in {count} partitions"
    yield Row(PACKAGE, case, costs[-1], goal="<= 1 s", met=costs[-1] <= 1.0)
    worst = max(later / earlier for earlier, later in pairwise(costs))
    yield Row(
        PACKAGE,
        "fuse, twice the nodes and partitions: cost, worst of the series",
        worst,
        unit="x",
        goal="<= 2.3x",
        met=None if quick else worst <= 2.3,
    )
    peer = _executorch()
    if peer is None:
        return
    small = 2000 if quick else 10_000
    yield Row(
        PACKAGE,
        f"fuse {small} nodes, a partition for every 100",
        min(_fuse_all(small, small // 100) for _ in range(3)),
        _fuse_each(peer, small, small // 100),
        note=f"{EXECUTORCH}; run in full",
    )


class _Support(OperatorSupportBase):
    def __init__(self, refused: set[Node]) -> None:
        self.refused = refused

    def is_node_supported(self, submodules: object, node: Node) -> bool:  # noqa: ARG002
        return node.op == "call_function" and node not in self.refused


def _propose(quick: bool) -> Iterator[Row]:
    size = 500 if quick else 4000
    gm, support = _supported(size)
    ours = cpu_seconds(partial(propose_partitions, gm, support))
    peer = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
    theirs = _timed(peer.propose_partitions)
    yield Row(
        PACKAGE,
        f"propose_partitions, {size} nodes, 10 % unsupported",
        ours,
        theirs,
        goal="" if quick else ">= 1000x faster",
        met=None if quick else theirs >= 1000 * ours,
        note="torch CapabilityBasedPartitioner",
    )
    sizes = [5000, 10_000] if quick else [25_000, 50_000, 100_000]
    proposals = [partial(propose_partitions, *_supported(size)) for size in sizes]
    cost = min(_timed(proposals[-1]) for _ in range(3))
    case = f"propose_partitions, {sizes[-1]} nodes, 10 % unsupported"
    yield Row(PACKAGE, case, cost, goal="<= 2 s", met=cost <= 2.0)
    calls = [
        (size, count_calls(proposal)) for size, proposal in zip(sizes, proposals, strict=True)
    ]
    exponent = growth_exponent(calls)
    yield Row(
        PACKAGE,
        "propose_partitions, growth of work",
        exponent,
        unit="exponent",
        goal="linear, <= 1.02",
        met=exponent <= 1.02,
        note=f"function calls, which no load can change: {calls[-1][1] / calls[-1][0]:.1f} a node",
    )


def _chain(size: int) -> tuple[GraphModule, list[Node]]:
    """Return a graph of additions, each of the last value and one of the eight before."""
    rng = random.Random(0)
    graph = Graph()
    values: list[Node] = [graph.placeholder("x"), graph.placeholder("y")]
    fake = torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2))
    for _ in range(size):
        pair = (values[-1], rng.choice(values[-8:]))
        values.append(graph.call_function(torch.ops.aten.add.Tensor, pair))
        values[-1].meta["val"] = fake
    graph.output(values[-1])
    return GraphModule(torch.nn.Module(), graph), values[2:]


def _partitioned(size: int, count: int) -> tuple[GraphModule, dict[str, list[Node]]]:
    """Return a graph cut into ``count`` stretches, two nodes between each and the next."""
    gm, nodes = _chain(size)
    step = size // count
    return gm, {f"p{i}": nodes[i * step : (i + 1) * step - 2] for i in range(count)}


def _supported(size: int) -> tuple[GraphModule, _Support]:
    gm, nodes = _chain(size)
    rng = random.Random(1)
    return gm, _Support({node for node in nodes if rng.random() < 0.1})


def _fuse_all(size: int, count: int) -> float:
    gm, partitions = _partitioned(size, count)
    return _timed(lambda: fuse_partitions(gm, partitions))


def _fuse_each(peer: ModuleType, size: int, count: int) -> float:
    gm, partitions = _partitioned(size, count)
    names = {tag: [node.name for node in nodes] for tag, nodes in partitions.items()}

    def fuse() -> None:
        for tag, nodes in names.items():
            # Each call rebuilds every node, so its callers look them up again by name.
            wanted = set(nodes)
            nodes_of_tag = [node for node in gm.graph.nodes if node.name in wanted]
            peer.create_submodule_from_nodes(gm, nodes_of_tag, tag)

    return _timed(fuse)


def _timed(action: Callable[[], object]) -> float:
    return cpu_seconds(action, repeat=1)


def _executorch() -> ModuleType | None:
    """Return ExecuTorch's module, or None where only the runtime is installed."""
    try:
        return importlib.import_module("executorch.exir.lowered_backend_module")
    except ImportError:
        return None
