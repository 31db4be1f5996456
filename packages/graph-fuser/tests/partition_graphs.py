"""Random graphs, deep and wide, with every kind of node that ties others, and node lists for them.

The numbers are those of vectors of four, so that any of it can be run.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from lowerdeck.graph_fuser.order.hazards import order_hazards

aten = torch.ops.aten
CONSTANT = torch.linspace(-1.0, 1.0, 4)


def tied_graph(rng: random.Random, size: int) -> GraphModule:
    """Return a graph module of about ``size`` nodes; it may have no input at all."""
    root = torch.nn.Module()
    root.register_buffer("constant", CONSTANT.clone())
    root.register_buffer("state", torch.zeros(4))
    graph = Graph()
    values = [graph.placeholder(f"x{number}") for number in range(rng.randrange(4))]
    if not values or rng.random() < 0.3:
        values.append(graph.get_attr("constant"))
    # Of a deep graph each node reads what came last, of a wide one whatever came before.
    reach = rng.choice([2, 6, 20, size])
    effects = rng.choice([0.0, 0.05, 0.3])
    if effects:
        state = graph.get_attr("state")
        graph.call_function(aten.zero_.default, (state,))
        values.append(state)
    while len(graph.nodes) < size:
        make = _effect if rng.random() < effects else _pure
        values.append(make(rng, graph, values[-reach:]))
    graph.output((values[-1], *rng.sample(values, k=min(len(values), rng.randrange(4)))))
    return GraphModule(root, graph)


def _pure(rng: random.Random, graph: Graph, values: Sequence[Node]) -> Node:
    value, other = rng.choice(values), rng.choice(values)
    kind = rng.randrange(8)
    if kind == 0:
        return graph.get_attr("constant")
    if kind == 1:
        parts = graph.call_function(aten.split.Tensor, (value, 2))
        first, second = (graph.call_function(operator.getitem, (parts, i)) for i in (0, 1))
        return graph.call_function(aten.cat.default, ([second, first],))
    if kind == 2:
        return graph.call_function(aten.view.default, (value, [4]))
    if kind == 3:
        return graph.call_function(aten.sin.default, (value,))
    return graph.call_function(rng.choice([aten.add.Tensor, aten.sub.Tensor]), (value, other))


def _effect(rng: random.Random, graph: Graph, values: Sequence[Node]) -> Node:
    value, other = rng.choice(values), rng.choice(values)
    kind = rng.randrange(4)
    if kind == 0:
        return graph.call_function(aten.rand.default, ([4],))
    if kind == 1:
        return graph.call_function(aten.mul_.Tensor, (value, 0.5))
    if kind == 2:
        parts = graph.call_function(aten.split.Tensor, (value, 2))
        early = graph.call_function(operator.getitem, (parts, 0))
        graph.call_function(aten.mul_.Tensor, (early, 0.5))
        late = graph.call_function(operator.getitem, (parts, 1))
        return graph.call_function(aten.cat.default, ([late, early],))
    return graph.call_function(aten.add_.Tensor, (value, other))


def inputs_of(gm: GraphModule) -> list[torch.Tensor]:
    """Return fixed inputs, new ones at each call."""
    count = sum(node.op == "placeholder" for node in gm.graph.nodes)
    return [torch.linspace(-1.0, 1.0, 4) + number for number in range(count)]


def results(gm: GraphModule) -> tuple[torch.Tensor, ...]:
    """Return what ``gm`` gives for fixed inputs, buffers and draws."""
    for name, buffer in gm.named_buffers():
        buffer.copy_(CONSTANT if name.endswith("constant") else torch.zeros(4))
    torch.manual_seed(0)
    return tuple(value.clone() for value in gm(*inputs_of(gm)))


def node_lists(rng: random.Random, gm: GraphModule) -> dict[str, list[Node]]:
    """Return disjoint lists of nodes: some sure to be possible, some sure not, some either."""
    if rng.random() < 0.6:
        return _possible_lists(rng, gm)
    nodes = [node for node in gm.graph.nodes if node.op not in {"placeholder", "output"}]
    count = rng.randint(2, max(3, len(nodes) // 4))
    spread = rng.choice([0, 1, count])
    share = rng.choice([0.4, 0.9])
    found: dict[str, list[Node]] = {}
    for number, node in enumerate(nodes):
        if rng.random() < share:
            own = number * count // len(nodes) + rng.randint(-spread, spread)
            found.setdefault(f"p{min(count - 1, max(0, own))}", []).append(node)
    return found


def _possible_lists(rng: random.Random, gm: GraphModule) -> dict[str, list[Node]]:
    """Return stretches of another order that the graph could have had: each can be one call."""
    order = [node for node in _random_order(rng, gm) if node.op not in {"placeholder", "output"}]
    found: dict[str, list[Node]] = {}
    longest = rng.choice([2, 4, 12])
    while order:
        length = rng.randint(1, longest)
        if rng.random() < 0.8:
            found[f"p{len(found)}"] = rng.sample(order[:length], k=min(length, len(order)))
        order = order[length:]
    return found


def _random_order(rng: random.Random, gm: GraphModule) -> list[Node]:
    after = {node: list(node.users) for node in gm.graph.nodes}
    for first, second in order_hazards(gm.graph, gm):
        after[first].append(second)
    waits = dict.fromkeys(after, 0)
    for targets in after.values():
        for target in targets:
            waits[target] += 1
    ready = [node for node, count in waits.items() if not count]
    order: list[Node] = []
    # Depth first now and then: lists then hold what is far apart in the graph.
    deep = rng.random()
    while ready:
        node = ready.pop(-1 if rng.random() < deep else rng.randrange(len(ready)))
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    return order
