"""Values that share memory, and the nodes that read and write it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.torch_base import (
    MemoryUse,
    hides_effects,
    returns_alias,
    returns_view,
    returns_written,
    shared_inputs,
    state_tensors,
    writes_in_place,
    written_arguments,
)
from lowerdeck_zoo import Of, exported

aten = torch.ops.aten


def named(graph: Graph) -> dict[str, Node]:
    return {node.name: node for node in graph.nodes}


def test_a_write_through_views_of_views_is_a_write_of_the_buffer() -> None:
    def forward(own: Any, x: Tensor) -> Any:
        rows = torch.split(own.cache, 2)
        rows[1][0].copy_(x[0])
        return rows[0] + own.table[:2]

    model = Of(forward, cache=torch.zeros(4, 2), table=torch.zeros(4, 2))
    program = exported(model, torch.ones(2, 2))
    memory = MemoryUse.of_program(program)
    nodes = named(program.graph)
    for node in program.graph.nodes:
        if node.target in {aten.split.Tensor, aten.select.int, aten.slice.Tensor}:
            assert not memory.reads(node), "what only looks reads no bytes"
        if node.target is aten.add.Tensor:
            groups = {memory.group(source) for source in node.all_input_nodes}
            assert set(memory.reads(node)) == groups
    (writer,) = memory.writers(nodes["b_cache"])
    assert writer.target is aten.copy_.default
    assert memory.writes(writer) == [memory.group(nodes["b_cache"])]
    assert not memory.writers(nodes["b_table"])
    assert not memory.writers(nodes["args_0"])


def test_changes_of_shape_in_place_are_seen_by_what_looks() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.t_.default, (x,))
    view = graph.call_function(aten.select.int, (x, 0, 0))
    graph.output(view)
    memory = MemoryUse(graph)
    assert memory.reads(view) == [memory.group(x)]


def test_a_composite_operator_may_copy_and_so_reads() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    flat = graph.call_function(aten.reshape.default, (x, [-1]))
    graph.output(flat)
    memory = MemoryUse(graph)
    assert memory.group(flat) is memory.group(x)
    assert memory.reads(flat) == [memory.group(x)]


def test_names_share_memory_where_they_overlap_in_one_storage() -> None:
    whole = torch.zeros(8)
    held = {"apart": whole[6:], "low": whole[:4], "high": whole[2:6], "other": torch.zeros(4)}
    model = Of(lambda own, x: x + own.low + own.high + own.other + own.apart[0], **held)
    program = exported(model, torch.ones(4))
    nodes = named(program.graph)
    assert shared_inputs(program) == [[nodes["b_low"], nodes["b_high"]]]
    assert {node.name for node in state_tensors(program)} == {
        "b_low",
        "b_high",
        "b_other",
        "b_apart",
    }
    memory = MemoryUse.of_program(program)
    assert memory.group(nodes["b_low"]) is memory.group(nodes["b_high"])
    assert memory.group(nodes["b_low"]) is not memory.group(nodes["b_other"])
    assert memory.group(nodes["b_low"]) is not memory.group(nodes["b_apart"])


def test_attributes_of_one_storage_share_memory() -> None:
    root = nn.Module()
    whole = torch.zeros(4)
    root.register_buffer("state", whole)
    root.register_buffer("view", whole[1:])
    root.register_buffer("other", torch.zeros(4))
    graph = Graph()
    state, view, other = (graph.get_attr(name) for name in ("state", "view", "other"))
    write = graph.call_function(aten.add_.Tensor, (view, 1))
    graph.output((state, other))
    memory = MemoryUse(graph, GraphModule(root, graph))
    assert memory.writers(state) == [write]
    assert not memory.writers(other)


def test_control_flow_and_delegates_give_values_of_their_own() -> None:
    chosen = Of(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).add_(1))
    program = exported(chosen, torch.ones(2))
    memory = MemoryUse.of_program(program)
    nodes = named(program.graph)
    assert writes_in_place(program.graph_module)
    assert not memory.writers(nodes["args_0"])


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda x: (x + 1).relu(), False),
        (lambda x: x.view(-1)[0], False),
        (lambda x: x.relu_(), True),
        (lambda x: nn.functional.relu(x, inplace=True), True),
        (lambda x: torch.add(x, 1, out=x), True),
        (lambda x: aten.add_.Tensor(x, 1), True),
        (lambda x: nn.functional.batch_norm(x, x, x, training=False), False),
    ],
)
def test_whether_a_graph_writes_is_told_as_its_memory_tells(
    function: Callable[[Tensor], Tensor], told: bool
) -> None:
    gm = symbolic_trace(function)
    assert writes_in_place(gm) is any(map(MemoryUse(gm.graph, gm).writes, gm.graph.nodes)) is told


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.dropout.default, ("x", 0.5, False)),
        (aten.alpha_dropout.default, ("x", 0.5, False)),
        (aten.feature_dropout.default, ("x", 0.5, False)),
        (aten.feature_alpha_dropout.default, ("x", 0.5, False)),
        (aten.type_as.default, ("x", "x")),
        (aten.sum_to_size.default, ("x", [2, 2])),
        (aten.conj_physical.default, ("x",)),
        (aten.atleast_1d.default, ("x",)),
        (aten.atleast_2d.default, ("x",)),
        (aten.atleast_3d.default, ("x",)),
        (aten.broadcast_tensors.default, (["x", "x"],)),
        (aten.einsum.default, ("ij->ji", ["x"])),
        (aten.meshgrid.default, (["row", "row"],)),
        (aten.cartesian_prod.default, (["row"],)),
        (aten.unsafe_split.Tensor, ("x", 1)),
        (aten.unsafe_split_with_sizes.default, ("x", [1, 1])),
        (aten.unsafe_chunk.default, ("x", 2)),
        (aten._unsafe_view.default, ("x", [4])),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")
def test_operators_whose_schemas_hide_that_they_return_their_argument(
    operator: object, args: tuple[object, ...]
) -> None:
    x, row = torch.ones(2, 2), torch.ones(2)
    values = {"x": x, "row": row}

    def filled(table: dict[str, object]) -> list[object]:
        return [
            [table[item] for item in arg]
            if isinstance(arg, list) and arg and isinstance(arg[0], str)
            else table.get(arg, arg)
            if isinstance(arg, str)
            else arg
            for arg in args
        ]

    result = operator(*filled(dict(values)))  # type: ignore[operator]
    first = result[0] if isinstance(result, (list, tuple)) else result
    given = row if "row" in str(args) else x
    assert first.untyped_storage()._cdata == given.untyped_storage()._cdata
    assert hides_effects(operator)
    graph = Graph()
    nodes: dict[str, object] = {name: graph.placeholder(name) for name in values}
    made = graph.call_function(operator, tuple(filled(nodes)))  # type: ignore[arg-type]
    graph.output(made)
    memory = MemoryUse(graph)
    source = nodes["row" if "row" in str(args) else "x"]
    assert isinstance(source, Node)
    assert memory.group(made) is memory.group(source)


def test_the_cost_is_linear() -> None:
    def steps(count: int) -> int:
        graph = Graph()
        node = graph.placeholder("x")
        for _ in range(count):
            node = graph.call_function(aten.alias.default, (node,))
            graph.call_function(aten.add_.Tensor, (node, 1))
        graph.output(node)
        calls = 0
        find = MemoryUse.group

        def counted(self: MemoryUse, one: Node) -> Node:
            nonlocal calls
            calls += 1
            return find(self, one)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryUse, "group", counted)
            memory = MemoryUse(graph)
            for one in graph.nodes:
                memory.reads(one)
        return calls

    assert steps(400) <= 2.1 * steps(200)


@pytest.mark.parametrize(
    ("target", "written", "view", "alias", "returned"),
    [
        (aten.relu_.default, ("self",), False, True, True),
        (aten.add.out, ("out",), False, True, False),
        (aten.sort.values, ("values", "indices"), False, True, False),
        (aten.view.default, (), True, True, False),
        (aten.split.Tensor, (), True, True, False),
        (aten.reshape.default, (), True, True, False),
        (aten.relu.default, (), False, False, False),
        (aten._foreach_add_.Scalar, ("self",), False, False, False),
        (operator.getitem, (), False, False, False),
    ],
)
def test_what_a_schema_says_of_writes_and_results(
    target: object, written: tuple[str, ...], view: bool, alias: bool, returned: bool
) -> None:
    assert written_arguments(target) == written
    found = (returns_view(target), returns_alias(target), returns_written(target))
    assert found == (view, alias, returned)
