"""The drop-ins beside torch's own functions."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from fuser_graphs import example_inputs, random_graph
from torch.fx import Graph, GraphModule, Node, symbolic_trace
from torch.fx.passes import tools_common
from torch.fx.passes.utils import fuser_utils

from lowerdeck.graph_fuser import (
    CycleError,
    ErasedNodeError,
    ForeignNodeError,
    InputOrder,
    NameInUseError,
    NodeInUseError,
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


def twins(seed: int, size: int = 25) -> tuple[GraphModule, GraphModule]:
    """Return two equal graph modules."""
    return random_graph(seed, size), random_graph(seed, size)


def pick(gm: GraphModule, names: list[str]) -> list[Node]:
    n = {node.name: node for node in gm.graph.nodes}
    return [n[name] for name in names]


def some_names(gm: GraphModule, rng: random.Random) -> list[str]:
    """Return the names of a stretch of nodes in the graph's order."""
    names = [node.name for node in gm.graph.nodes if node.op not in {"placeholder", "output"}]
    start = rng.randrange(len(names))
    return names[start : start + rng.randint(1, 8)]


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


def test_topo_sort_equals_torch() -> None:
    for seed in seeds(60):
        rng = random.Random(seed)
        gm = random_graph(seed, 25)
        nodes = rng.sample(list(gm.graph.nodes), k=rng.randint(1, len(gm.graph.nodes)))
        assert topo_sort(nodes) == fuser_utils.topo_sort(nodes)


def test_topo_sort_shows_a_circle() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    second = graph.call_function(torch.cos, (first,))
    first.args = (second,)
    with pytest.raises(CycleError) as caught:
        topo_sort([second, first])
    assert caught.value.path[0] is caught.value.path[-1]
    assert set(caught.value.path) == {first, second}


def test_validate_partition_equals_torch() -> None:
    answers = []
    for seed in seeds(150):
        rng = random.Random(seed)
        gm = random_graph(seed, 20)
        nodes = [node for node in gm.graph.nodes if node.op not in {"placeholder", "output"}]
        picked = rng.sample(nodes, k=rng.randint(1, 5))
        answers.append(validate_partition(picked))
        assert answers[-1] == fuser_utils.validate_partition(picked)
    assert set(answers) == {True, False}
    assert validate_partition([])


def test_fuse_as_graphmodule_equals_torch() -> None:
    count = 0
    for seed in seeds(120):
        rng = random.Random(seed)
        gm, other = twins(seed)
        names = some_names(gm, rng)
        if not validate_partition(pick(gm, names)):
            with pytest.raises(CycleError):
                fuse_as_graphmodule(gm, pick(gm, names), "Fused")
            continue
        as_tuple = rng.random() < 0.5
        (order,) = torch_orders(pick(gm, names))
        ours = fuse_as_graphmodule(
            gm, pick(gm, names), "Fused", always_return_tuple=as_tuple, input_order=order
        )
        theirs = fuser_utils.fuse_as_graphmodule(
            other, pick(other, names), "Fused", always_return_tuple=as_tuple
        )
        assert [node.name for node in ours[1]] == [node.name for node in theirs[1]]
        assert [node.name for node in ours[2]] == [node.name for node in theirs[2]]
        # torch makes placeholders as it meets them; the signature and what is computed are the
        # same.
        assert flow(ours[0].graph) == flow(theirs[0].graph)
        assert type(ours[0]).__name__ == type(theirs[0]).__name__
        assert str(gm.graph) == str(other.graph)
        count += 1
    assert count


def test_fuse_insert_erase_legalize_gives_what_torch_gives() -> None:
    for seed in seeds(80):
        rng = random.Random(seed)
        gm, other = twins(seed)
        names = some_names(gm, rng)
        nodes, theirs = pick(gm, names), pick(other, names)
        if not validate_partition(nodes):
            continue
        (order,) = torch_orders(nodes)
        module, inputs, outputs = fuse_as_graphmodule(gm, nodes, "Fused", input_order=order)
        if not outputs:
            continue
        expected = gm(*example_inputs(gm))
        insert_subgm(gm, module, inputs, outputs, nodes[-1])
        erase_nodes(gm, nodes)
        legalize_graph(gm)
        fused = fuser_utils.fuse_as_graphmodule(other, theirs, "Fused")
        fuser_utils.insert_subgm(other, *fused, theirs[-1])
        fuser_utils.erase_nodes(other, theirs)
        tools_common.legalize_graph(other)
        gm.graph.lint()
        assert flow(gm.graph) == flow(other.graph)
        for value, wanted in zip(gm(*example_inputs(gm)), expected, strict=True):
            torch.testing.assert_close(value, wanted)


def test_fuse_by_partitions_equals_torch() -> None:
    count = 0
    for seed in seeds(80):
        rng = random.Random(seed)
        gm, other = twins(seed, 30)
        names = [node.name for node in gm.graph.nodes if node.op not in {"placeholder", "output"}]
        cut = rng.randrange(1, len(names))
        lists = [names[:cut], names[cut : cut + 6]]
        as_tuple = rng.random() < 0.5
        order, *others = torch_orders(*(pick(gm, part) for part in lists))
        if others:
            continue
        try:
            ours = fuse_by_partitions(
                gm,
                [dict.fromkeys(pick(gm, part)) for part in lists if part],
                always_return_tuple=as_tuple,
                input_order=order,
            )
        except CycleError:
            continue
        theirs = fuser_utils.fuse_by_partitions(
            other,
            [dict.fromkeys(pick(other, part)) for part in lists if part],
            always_return_tuple=as_tuple,
        )
        assert ours is gm
        assert flow(ours.graph) == flow(theirs.graph)
        count += 1
    assert count


def test_legalize_is_the_identity_on_a_legal_graph() -> None:
    gm = random_graph(5, 40)
    before = [(node, node.name, node.args) for node in gm.graph.nodes]
    code = gm.code
    assert legalize_graph(gm) is gm
    assert [(node, node.name, node.args) for node in gm.graph.nodes] == before
    assert gm.code == code


def test_legalize_moves_only_what_must_move() -> None:
    gm = symbolic_trace(lambda x: (x.sin().cos(), x.neg(), x.exp()))
    n = {node.name: node for node in gm.graph.nodes}
    n["neg"].append(n["sin"])
    legalize_graph(gm)
    assert [node.name for node in gm.graph.nodes] == ["x", "neg", "sin", "cos", "exp", "output"]
    gm.graph.lint()


def test_legalize_agrees_with_torch_on_shuffled_graphs() -> None:
    for seed in seeds(40):
        rng = random.Random(seed)
        gm = random_graph(seed, 25)
        expected = gm(*example_inputs(gm))
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        for node in rng.sample(nodes, k=5):
            rng.choice(nodes).append(node)
        other = copy.copy(gm)
        legalize_graph(gm)
        gm.graph.lint()
        assert len(other.graph.nodes) == len(gm.graph.nodes)
        for value, wanted in zip(gm(*example_inputs(gm)), expected, strict=True):
            torch.testing.assert_close(value, wanted)


def test_legalize_puts_inputs_before_what_computes_as_torch_does() -> None:
    for seed in seeds(40):
        ours, theirs = random_graph(seed, 15), random_graph(seed, 15)
        for gm in (ours, theirs):
            rng = random.Random(seed)
            nodes = list(gm.graph.nodes)
            for node in rng.sample(nodes, k=rng.randint(1, 6)):
                rng.choice(nodes).append(node)
        assert legalize_graph(ours) is ours
        tools_common.legalize_graph(theirs)
        ours.graph.lint()
        kinds = [node.op for node in ours.graph.nodes]
        assert kinds == sorted(kinds, key=lambda op: (op != "placeholder", op == "output"))
        assert inputs_read(ours) == inputs_read(theirs)
        torch.testing.assert_close(ours(*example_inputs(ours)), theirs(*example_inputs(theirs)))


def inputs_read(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "placeholder"]


def test_an_input_alone_after_what_it_does_not_feed_moves_to_the_front() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    sin = graph.call_function(torch.sin, (x,))
    y = graph.placeholder("y")
    add = graph.call_function(torch.add, (sin, y))
    output = graph.output(add)
    gm = GraphModule(torch.nn.Module(), graph)
    legalize_graph(gm)
    assert list(gm.graph.nodes) == [x, y, sin, add, output]
    torch.testing.assert_close(gm(torch.zeros(1), torch.ones(1)), torch.ones(1))


def test_what_catches_the_error_of_torch_catches_ours() -> None:
    for legalize in (legalize_graph, tools_common.legalize_graph):
        gm = symbolic_trace(lambda x: x.sin().cos())
        n = {node.name: node for node in gm.graph.nodes}
        n["sin"].args = (n["cos"],)
        with pytest.raises(RuntimeError):
            legalize(gm)


def test_legalize_shows_a_circle_and_leaves_the_graph() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos())
    n = {node.name: node for node in gm.graph.nodes}
    n["sin"].args = (n["cos"],)
    before = [(node, node.args) for node in gm.graph.nodes]
    with pytest.raises(CycleError, match="circle"):
        legalize_graph(gm)
    assert [(node, node.args) for node in gm.graph.nodes] == before


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


def test_insert_subgm_without_outputs_needs_no_insertion_point() -> None:
    gm = symbolic_trace(lambda x: (x.sin(), x.cos())[1])
    n = {node.name: node for node in gm.graph.nodes}
    module, inputs, outputs = fuse_as_graphmodule(gm, [n["sin"]], "Dead")
    assert outputs == ()
    insert_subgm(gm, module, inputs, outputs)
    erase_nodes(gm, [n["sin"]])
    torch.testing.assert_close(gm(torch.ones(2)), torch.ones(2).cos())


def test_insert_subgm_checks_first() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos())
    other = symbolic_trace(lambda x: x.sin().cos())
    n = {node.name: node for node in gm.graph.nodes}
    module, inputs, outputs = fuse_as_graphmodule(gm, [n["sin"]], "Part")
    before = str(gm.graph)
    with pytest.raises(ForeignNodeError):
        insert_subgm(other, module, inputs, outputs)
    insert_subgm(gm, module, inputs, outputs)
    assert str(gm.graph) != before
    with pytest.raises(NameInUseError):
        insert_subgm(gm, module, inputs, outputs)


def test_erase_nodes_is_all_or_nothing() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg())
    n = {node.name: node for node in gm.graph.nodes}
    before = str(gm.graph)
    with pytest.raises(NodeInUseError, match="'neg' reads it"):
        erase_nodes(gm, [n["sin"], n["cos"]])
    assert str(gm.graph) == before
    n["output"].args = (n["x"],)
    erase_nodes(gm, [n["sin"], n["neg"], n["cos"]])
    assert len(gm.graph.nodes) == 2
    with pytest.raises(ErasedNodeError):
        erase_nodes(gm, [n["sin"]])


def test_fuse_by_partitions_is_atomic() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg().exp())
    n = {node.name: node for node in gm.graph.nodes}
    before = str(gm.graph)
    with pytest.raises(CycleError):
        fuse_by_partitions(gm, [{n["neg"]: None}, {n["sin"]: None, n["exp"]: None}])
    with pytest.raises(RegionError):
        fuse_by_partitions(gm, [{n["neg"]: None}, {}])
    assert str(gm.graph) == before
