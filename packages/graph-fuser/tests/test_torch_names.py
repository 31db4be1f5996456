"""The drop-ins compared with torch's functions."""

from __future__ import annotations

import random

import pytest
import torch
from fuser_graphs import computing, moved, named, random_graph, results, same_results
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes import tools_common
from torch.fx.passes.utils import fuser_utils

from lowerdeck.graph_fuser import (
    CycleError,
    InputOrder,
    RegionError,
    erase_nodes,
    fuse_as_graphmodule,
    fuse_by_partitions,
    insert_subgm,
    legalize_graph,
    topo_sort,
    validate_partition,
)
from lowerdeck_zoo.seeds import seeds


def pick(gm: GraphModule, nodes: list[Node]) -> list[Node]:
    """Return the nodes of an equal graph."""
    n = named(gm)
    return [n[node.name] for node in nodes]


def stretch(gm: GraphModule, rng: random.Random) -> list[Node]:
    """Return a stretch of nodes in the graph's order."""
    nodes = computing(gm)
    start = rng.randrange(len(nodes))
    return nodes[start : start + rng.randint(1, 8)]


def flow(graph: Graph) -> list[str]:
    """Return what each node computes, whatever the order of the nodes."""
    text: dict[Node, str] = {}
    for node in graph.nodes:
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: text[n])
        text[node] = str(hash((node.op, str(node.target), str(args))))
    return sorted(text.values())


def torch_sorts_placeholders() -> bool:
    """Return whether torch orders inputs of the whole graph as the graph does (from 2.14 on)."""
    gm = symbolic_trace(lambda a, b: b - a)
    nodes = list(gm.graph.nodes)
    return fuser_utils.fuse_as_graphmodule(gm, nodes[2:3], "Probe")[1] == tuple(nodes[:2])


def torch_orders(*partitions: list[Node]) -> set[InputOrder]:
    """Return the orders in which torch makes the inputs of these partitions."""
    orders: set[InputOrder] = set()
    for nodes in partitions:
        outer = {one for node in nodes for one in node.all_input_nodes} - set(nodes)
        of_graph = all(node.op == "placeholder" for node in outer)
        if len(outer) > 1:
            orders.add("parent" if of_graph and torch_sorts_placeholders() else "first_use")
    return orders or {"first_use"}


def test_topo_sort_and_validate_partition_equal_torch() -> None:
    answers = set()
    for seed in seeds(150):
        rng, gm = random.Random(seed), random_graph(seed, 25)
        nodes = rng.sample(list(gm.graph.nodes), k=rng.randint(1, len(gm.graph.nodes)))
        assert topo_sort(nodes) == fuser_utils.topo_sort(nodes)
        picked = rng.sample(computing(gm), k=rng.randint(1, 5))
        answers.add(validate_partition(picked))
        assert validate_partition(picked) == fuser_utils.validate_partition(picked)
    assert answers == {True, False}
    assert validate_partition([])


def test_fuse_insert_erase_legalize_equal_torch() -> None:
    count = 0
    for seed in seeds(200):
        rng = random.Random(seed)
        gm, other = random_graph(seed, 25), random_graph(seed, 25)
        nodes, as_tuple = stretch(gm, rng), rng.random() < 0.5
        theirs = pick(other, nodes)
        if not validate_partition(nodes):
            with pytest.raises(CycleError):
                fuse_as_graphmodule(gm, nodes, "Fused")
            continue
        expected, (order,) = results(gm), torch_orders(nodes)
        ours = fuse_as_graphmodule(
            gm, nodes, "Fused", always_return_tuple=as_tuple, input_order=order
        )
        fused = fuser_utils.fuse_as_graphmodule(
            other, theirs, "Fused", always_return_tuple=as_tuple
        )
        assert [node.name for node in ours[1]] == [node.name for node in fused[1]]
        assert [node.name for node in ours[2]] == [node.name for node in fused[2]]
        # torch makes placeholders as it meets them; signature and computation are the same.
        assert flow(ours[0].graph) == flow(fused[0].graph)
        assert type(ours[0]).__name__ == type(fused[0]).__name__
        assert str(gm.graph) == str(other.graph)
        if not ours[2] or as_tuple:
            continue
        insert_subgm(gm, *ours, nodes[-1])
        erase_nodes(gm, nodes)
        legalize_graph(gm)
        fuser_utils.insert_subgm(other, *fused, theirs[-1])
        fuser_utils.erase_nodes(other, theirs)
        tools_common.legalize_graph(other)
        assert flow(gm.graph) == flow(other.graph)
        same_results(gm, expected)
        count += 1
    assert count


def test_fuse_by_partitions_equals_torch() -> None:
    count = 0
    for seed in seeds(80):
        rng = random.Random(seed)
        gm, other = random_graph(seed, 30), random_graph(seed, 30)
        nodes, as_tuple = computing(gm), rng.random() < 0.5
        cut = rng.randrange(1, len(nodes))
        lists = [part for part in (nodes[:cut], nodes[cut : cut + 6]) if part]
        theirs = [dict.fromkeys(pick(other, part)) for part in lists]
        order, *others = torch_orders(*lists)
        if others:
            continue
        try:
            ours = fuse_by_partitions(
                gm,
                [dict.fromkeys(part) for part in lists],
                always_return_tuple=as_tuple,
                input_order=order,
            )
        except CycleError:
            continue
        fused = fuser_utils.fuse_by_partitions(other, theirs, always_return_tuple=as_tuple)
        assert ours is gm
        assert flow(ours.graph) == flow(fused.graph)
        count += 1
    assert count


def test_legalize_moves_only_what_must_move() -> None:
    gm = random_graph(5, 40)
    before, code = [(node, node.name, node.args) for node in gm.graph.nodes], gm.code
    assert legalize_graph(gm) is gm
    assert [(node, node.name, node.args) for node in gm.graph.nodes] == before
    assert gm.code == code
    gm = symbolic_trace(lambda x: (x.sin().cos(), x.neg(), x.exp()))
    n = named(gm)
    n["neg"].append(n["sin"])
    legalize_graph(gm)
    assert [node.name for node in gm.graph.nodes] == ["x", "neg", "sin", "cos", "exp", "output"]


def test_legalize_puts_inputs_first_as_torch_does() -> None:
    for seed in seeds(40):
        ours, theirs = (moved(random_graph(seed, 15), random.Random(seed), 5) for _ in range(2))
        legalize_graph(ours)
        tools_common.legalize_graph(theirs)
        kinds = [node.op for node in ours.graph.nodes]
        assert kinds == sorted(kinds, key=lambda op: (op != "placeholder", op == "output"))
        inputs = [[n.name for n in gm.graph.find_nodes(op="placeholder")] for gm in (ours, theirs)]
        assert inputs[0] == inputs[1]
        same_results(ours, results(theirs))


def test_writes_keep_their_order_when_a_graph_is_legalized() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    sin = graph.call_function(torch.ops.aten.sin.default, (x,))
    write = graph.call_function(torch.ops.aten.mul_.Tensor, (x, sin))
    read = graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output(read)
    gm = GraphModule(torch.nn.Module(), graph)
    read.append(sin)
    legalize_graph(gm)
    assert list(gm.graph.nodes)[1:4] == [sin, write, read]


def test_a_circle_is_shown_and_the_graph_stays() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos())
    n = named(gm)
    n["sin"].args = (n["cos"],)
    before = [(node, node.args) for node in gm.graph.nodes]
    with pytest.raises(CycleError) as caught:
        topo_sort([n["cos"], n["sin"]])
    assert caught.value.path[0] is caught.value.path[-1]
    assert set(caught.value.path) == {n["sin"], n["cos"]}
    with pytest.raises(CycleError, match="cycle") as caught:
        legalize_graph(gm)
    assert isinstance(caught.value, RuntimeError), "what catches torch's error catches ours"
    assert [(node, node.args) for node in gm.graph.nodes] == before


def test_insert_subgm_checks_first_and_without_outputs_needs_no_place() -> None:
    gm = symbolic_trace(lambda x: (x.neg(), x.sin().cos())[1])
    n = named(gm)
    dead = fuse_as_graphmodule(gm, [n["neg"]], "Dead")
    assert dead[2] == ()
    insert_subgm(gm, *dead)
    erase_nodes(gm, [n["neg"]])
    torch.testing.assert_close(gm(torch.ones(2)), torch.ones(2).sin().cos())
    part = fuse_as_graphmodule(gm, [n["sin"]], "Part")
    with pytest.raises(RegionError):
        insert_subgm(symbolic_trace(lambda x: x.sin()), *part)
    insert_subgm(gm, *part)
    with pytest.raises(RegionError):
        insert_subgm(gm, *part)


def test_erase_nodes_and_fuse_by_partitions_are_all_or_nothing() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg().exp())
    n = named(gm)
    before = str(gm.graph)
    with pytest.raises(RegionError, match="'neg' uses it"):
        erase_nodes(gm, [n["sin"], n["cos"]])
    for lists, error in ((["neg", "sin exp"], CycleError), (["neg", ""], RegionError)):
        with pytest.raises(error):
            fuse_by_partitions(gm, [dict.fromkeys(n[m] for m in one.split()) for one in lists])
    assert str(gm.graph) == before
    n["output"].args = (n["x"],)
    erase_nodes(gm, [n["sin"], n["exp"], n["neg"], n["cos"]])
    assert len(gm.graph.nodes) == 2
    with pytest.raises(RegionError):
        erase_nodes(gm, [n["sin"]])
