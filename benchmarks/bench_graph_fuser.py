"""Fusing and partitioning beside torch.fx.passes and, where it is installed, ExecuTorch."""

from __future__ import annotations

import importlib
import random
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import ModuleType

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes import tools_common
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils import fuser_utils

from benchmarks.harness import Row, count_calls, cpu_seconds, growth_exponent, in_rounds
from lowerdeck.graph_fuser import (
    Region,
    create_submodule_from_nodes,
    fuse_by_partitions,
    fuse_partitions,
    inline_submodule,
    legalize_graph,
    outline,
    propose_partitions,
)

PACKAGE = "graph_fuser"
NODES = ("nodes", "CPU time (s)")
EXECUTORCH = "ExecuTorch create_submodule_from_nodes, once per partition"


def rows(quick: bool) -> Iterator[Row]:
    """Yield the results.

    Args:
        quick: Small sizes, for CI; the goals are stated for the full ones.
    """
    yield from _fuse(quick)
    yield from _fuse_by_partitions(quick)
    yield from _single(quick)
    yield from _legalize(quick)
    yield from _propose(quick)
    yield from _hierarchy(quick)
    yield from _inline(quick)


def _fuse(quick: bool) -> Iterator[Row]:
    sizes = [(2500, 50), (5000, 100)] if quick else [(12_500, 250), (25_000, 500), (50_000, 1000)]
    costs = in_rounds([partial(_fuse_all, n, p) for n, p in sizes], repeat=5)
    own = [(n, cost) for (n, _), cost in zip(sizes, costs, strict=True)]
    size, seconds = own[-1]
    count = sizes[-1][1]
    yield Row(
        PACKAGE,
        f"fuse {size} nodes in {count} partitions",
        seconds,
        goal="" if quick else "<= 1 s",
        met=None if quick else seconds <= 1.0,
        series=tuple((float(n), cost, None) for n, cost in own),
        axes=NODES,
    )
    worst = max(later / earlier for (_, earlier), (_, later) in pairwise(own))
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
    series = []
    for n, p in [(1000, 10), (2000, 20)] if quick else [(2500, 25), (5000, 50), (10_000, 100)]:
        ours = _least(partial(_fuse_all, n, p))
        series.append((float(n), ours, _fuse_each(peer, n, p)))
    exponent = growth_exponent([(n, theirs) for n, _, theirs in series])
    yield Row(
        PACKAGE,
        f"fuse {series[-1][0]:.0f} nodes, a partition for every 100",
        series[-1][1],
        series[-1][2],
        note=f"{EXECUTORCH}; run in full; its cost grows with exponent {exponent:.2f}",
        series=tuple(series),
        axes=NODES,
    )
    estimate = _estimated(peer, size, count)
    yield Row(
        PACKAGE,
        f"fuse {size} nodes in {count} partitions",
        seconds,
        estimate,
        goal="" if quick else ">= 2000x faster",
        met=None if quick else estimate >= 2000 * seconds,
        note=f"{EXECUTORCH}; ESTIMATED from single calls measured at six stages of the work",
    )


def _estimated(peer: ModuleType, size: int, count: int) -> float:
    """Return the seconds of ``count`` calls, from one call each with so many partitions fused."""
    stages = [count * step // 5 for step in range(6)]
    costs = []
    for done in stages:
        gm, partitions = _partitioned(size, count)
        named = list(partitions.items())
        first = min(done, count - 1)
        fuse_partitions(gm, dict(named[:first]))
        name, nodes = named[first]
        costs.append(_timed(partial(peer.create_submodule_from_nodes, gm, nodes, name)))
    pairs = pairwise(zip(stages, costs, strict=True))
    return sum((b - a) * (low + high) / 2 for (a, low), (b, high) in pairs)


def _fuse_by_partitions(quick: bool) -> Iterator[Row]:
    for size, count in [(2000, 200)] if quick else [(10_000, 1000), (50_000, 1000)]:
        both = (fuse_by_partitions, fuser_utils.fuse_by_partitions)
        ours, theirs = in_rounds(
            [partial(_fuse_named, fuse, size, count) for fuse in both], repeat=3 if quick else 2
        )
        yield Row(
            PACKAGE,
            f"fuse_by_partitions, {size} nodes, {count} partitions",
            ours,
            theirs,
            goal="" if quick else ">= 7x faster",
            met=None if quick else theirs >= 7 * ours,
            note="torch; it generates the code at once, ours at the first use",
        )
        ours = _fuse_and_generate(size, count)
        yield Row(
            PACKAGE,
            f"the same with the outer code generated too, {size} nodes, {count} partitions",
            ours,
            theirs,
        )


def _single(quick: bool) -> Iterator[Row]:
    peer = _executorch()
    size = 2000 if quick else 20_000
    if peer is not None:
        other, others = _chain(size)
        theirs = _timed(lambda: peer.create_submodule_from_nodes(other, others[100:150], "t"))
    ours = _least(partial(_create_one, size, 50))
    yield Row(
        PACKAGE,
        f"one create_submodule_from_nodes, 50 of {size} nodes",
        ours,
        None if peer is None else theirs,
        note="ExecuTorch",
    )
    lengths = (50, 100, 200, 400, 800)
    costs = in_rounds([partial(_create_one, size, length) for length in lengths])
    yield Row(
        PACKAGE,
        f"one create_submodule_from_nodes, 800 of {size} nodes",
        costs[-1],
        note="series over the partition's size: a constant scan and a linear part",
        series=tuple((float(n), cost, None) for n, cost in zip(lengths, costs, strict=True)),
        axes=("nodes in the partition", "CPU time (s)"),
    )


def _create_one(size: int, length: int) -> float:
    gm, nodes = _chain(size)
    chosen = nodes[100 : 100 + length]
    return _timed(lambda: create_submodule_from_nodes(gm, chosen, "t"))


def _legalize(quick: bool) -> Iterator[Row]:
    size = 5000 if quick else 50_000
    gm, _ = _chain(size)
    other, _ = _chain(size)
    ours = cpu_seconds(lambda: legalize_graph(gm), repeat=5) / size * 1e6
    theirs = _timed(lambda: tools_common.legalize_graph(other)) / size * 1e6
    yield Row(
        PACKAGE,
        f"legalize_graph, legal graph of {size} nodes",
        ours,
        theirs,
        unit="us/node",
        goal="<= 0.3 us/node",
        met=ours <= 0.3,
        note="torch",
    )


class _Support(OperatorSupportBase):
    def __init__(self, refused: set[Node]) -> None:
        self.refused = refused

    def is_node_supported(self, submodules: object, node: Node) -> bool:  # noqa: ARG002
        return node.op == "call_function" and node not in self.refused


def _propose(quick: bool) -> Iterator[Row]:
    sizes = [250, 500] if quick else [500, 1000, 2000, 4000]
    series: list[tuple[float, float, float | None]] = []
    for size in sizes:
        gm, support = _supported(size)
        ours = cpu_seconds(partial(propose_partitions, gm, support))
        peer = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
        theirs = _timed(peer.propose_partitions)
        series.append((size, ours, theirs))
    size, ours, theirs = series[-1]
    yield Row(
        PACKAGE,
        f"propose_partitions, {int(size)} nodes, 10 % unsupported",
        ours,
        theirs,
        goal="" if quick else ">= 1000x faster",
        met=None if quick or theirs is None else theirs >= 1000 * ours,
        note="torch CapabilityBasedPartitioner",
        series=tuple(series),
        axes=NODES,
    )
    yield from _propose_large([5000, 10_000] if quick else [25_000, 50_000, 100_000], quick)


def _propose_large(sizes: list[int], quick: bool) -> Iterator[Row]:
    proposals = [partial(propose_partitions, *_supported(size)) for size in sizes]
    costs = in_rounds([partial(_timed, proposal) for proposal in proposals], repeat=5)
    own = [(float(size), cost) for size, cost in zip(sizes, costs, strict=True)]
    yield Row(
        PACKAGE,
        f"propose_partitions, {sizes[-1]} nodes, 10 % unsupported",
        own[-1][1],
        goal="" if quick else "<= 2 s",
        met=None if quick else own[-1][1] <= 2.0,
        series=tuple((n, cost, None) for n, cost in own),
        axes=NODES,
    )
    yield Row(
        PACKAGE,
        "propose_partitions, growth of time",
        growth_exponent(own),
        unit="exponent",
        goal="linear, <= 1.2",
        met=None if quick else growth_exponent(own) <= 1.2,
        note="caches grow no larger with the graph",
    )
    calls = [
        (float(size), count_calls(proposal))
        for size, proposal in zip(sizes, proposals, strict=True)
    ]
    yield Row(
        PACKAGE,
        "propose_partitions, growth of work",
        growth_exponent(calls),
        unit="exponent",
        goal="linear, <= 1.02",
        met=growth_exponent(calls) <= 1.02,
        note=f"function calls, which no load can change: {calls[-1][1] / calls[-1][0]:.1f} a node",
    )
    memory = [(float(size), _peak_mb(*_supported(size))) for size in sizes]
    yield Row(
        PACKAGE,
        f"propose_partitions, peak memory beyond the graph, {sizes[-1]} nodes",
        memory[-1][1],
        unit="MB",
        series=tuple((n, cost, None) for n, cost in memory),
        axes=("nodes", "peak memory (MB)"),
    )
    yield Row(
        PACKAGE,
        "propose_partitions, growth of memory",
        growth_exponent(memory),
        unit="exponent",
        goal="linear, <= 1.1",
        met=growth_exponent(memory) <= 1.1,
    )


def _hierarchy(quick: bool) -> Iterator[Row]:
    for depth in (1, 4, 16):
        size = 4096 if quick else 32_768
        gm, nodes = _chain(size)
        regions = [_nested(nodes, depth)]
        seconds = _timed(partial(outline, gm, regions))
        yield Row(
            PACKAGE,
            f"outline a hierarchy {depth} deep, {size} nodes",
            seconds / size * 1e6,
            unit="us/node",
        )


def _inline(quick: bool) -> Iterator[Row]:
    gm, partitions = _partitioned(2000 if quick else 20_000, 20)
    fused = fuse_partitions(gm, partitions)

    def all_back() -> None:
        for part in fused.values():
            inline_submodule(gm, part.call_node)

    yield Row(
        PACKAGE, f"inline 20 submodules of {2000 if quick else 20_000} nodes", _timed(all_back)
    )


def _nested(nodes: list[Node], depth: int) -> Region:
    """Return regions of which each holds the inner half of the one around it."""
    region: Region | None = None
    width = len(nodes) // (2 * depth)
    for level in range(depth, 0, -1):
        low, high = (level - 1) * width, len(nodes) - (level - 1) * width
        inner_low, inner_high = (low + width, high - width) if region else (high, high)
        own = [*nodes[low:inner_low], *nodes[inner_high:high]]
        region = Region("inner", own, children=[region] if region else [])
    if region is None:
        raise ValueError("depth must be positive")
    return region


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


def _fuse_and_generate(size: int, count: int) -> float:
    gm, partitions = _partitioned(size, count)
    return _timed(lambda: (fuse_partitions(gm, partitions), gm.code))


def _fuse_each(peer: ModuleType, size: int, count: int) -> float:
    gm, partitions = _partitioned(size, count)
    names = {tag: [node.name for node in nodes] for tag, nodes in partitions.items()}

    def each() -> None:
        for tag, nodes in names.items():
            # Each call rebuilds every node, so that they are looked up again, as its callers do.
            wanted = set(nodes)
            chosen = [node for node in gm.graph.nodes if node.name in wanted]
            peer.create_submodule_from_nodes(gm, chosen, tag)

    return _timed(each)


def _fuse_named(fuse: Callable[..., object], size: int, count: int) -> float:
    gm, partitions = _partitioned(size, count)
    lists = [dict.fromkeys(nodes) for nodes in partitions.values()]
    return _timed(lambda: fuse(gm, lists))


def _timed(action: Callable[[], object]) -> float:
    return cpu_seconds(action, repeat=1)


def _least(measure: Callable[[], float], repeat: int = 3) -> float:
    return min(measure() for _ in range(repeat))


def _peak_mb(gm: GraphModule, support: _Support) -> float:
    tracemalloc.start()
    try:
        propose_partitions(gm, support)
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def _executorch() -> ModuleType | None:
    """Return ExecuTorch's module, or None where only the runtime is installed."""
    try:
        return importlib.import_module("executorch.exir.lowered_backend_module")
    except ImportError:
        return None
