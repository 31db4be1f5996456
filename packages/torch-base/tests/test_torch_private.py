"""Expectations of torch's private parts; a new torch that breaks one fails here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace

from lowerdeck.torch_base import _torch_private as private
from lowerdeck.torch_base import assume_constant_result, bytes_of
from lowerdeck_zoo import Of, exported


def test_composite_operators_are_told_from_true_views() -> None:
    aten = torch.ops.aten
    assert private.composite_parts(aten.reshape.default)
    assert private.composite_parts(aten.contiguous.default)
    assert private.composite_parts(aten.view.default) is None
    assert private.composite_parts(aten.select.int) is None
    # It is known to TorchScript only.
    assert private.composite_parts(aten.einsum.sublist) is None
    x, parts = torch.ones(2), private.composite_parts(aten.type_as.default)
    assert parts is not None
    assert parts(x, x) is x


def test_reading_a_lazy_clone_does_not_copy_it() -> None:
    tensor = torch.arange(12.0)
    clone = torch._lazy_clone(tensor)
    assert bytes(bytes_of(clone)) == bytes(bytes_of(tensor))
    assert private.data_address(clone) == private.data_address(tensor)
    assert private.data_address(tensor[3:]) == private.data_address(tensor) + 12


def test_what_has_no_memory_has_no_address() -> None:
    assert private.data_address(torch.zeros(4, device="meta")[2:]) == 0
    assert private.data_address(torch.zeros(4).to_sparse()) == 0


def test_padding_of_symbols_needs_the_python_dispatcher() -> None:
    program = torch.export.export(
        torch.nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    value = next(iter(program.graph.nodes)).meta["val"]
    with value.fake_mode, private.enable_python_dispatcher():
        assert str(torch.nn.functional.pad(value, (0, 0, 1, 1)).shape[0]).endswith(" + 2")


def test_a_reserved_name_is_given_to_no_node() -> None:
    graph = Graph()
    private.reserve_name(graph, "mm")
    made = graph.create_node("call_function", torch.ops.aten.mm.default, (), name="mm")
    assert made.name == "mm_1"


def linear() -> torch.export.ExportedProgram:
    return exported(torch.nn.Linear(2, 2), torch.ones(1, 2))


def test_a_size_that_nothing_bounds_is_taken_for_the_least() -> None:
    program = exported(Of(lambda count: torch.arange(count.item())), torch.tensor(4))
    (made,) = (node for node in program.graph.nodes if "arange" in node.name)
    size = made.meta["val"].shape[0]
    assert size.node.hint is None
    assert private.upper_bound(size) == private.size_range(size)[0] == 0


def test_upper_bounds_come_from_the_range_or_the_example() -> None:
    sizes = []
    for top in (16, None):
        batch = torch.export.Dim("batch", min=1, max=top) if top else torch.export.Dim("batch")
        program = torch.export.export(
            torch.nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=({0: batch},)
        )
        node = next(one for one in program.graph.nodes if one.op == "call_function")
        sizes.append([private.upper_bound(size) for size in node.meta["val"].shape])
    assert sizes == [[16, 2], [3, 2]]


def _size(model: torch.nn.Module, rows: Any, *, rank: int = 1) -> tuple[Any, Any]:
    example = torch.ones(4, *[2] * (rank - 1))
    program = torch.export.export(model, (example,), dynamic_shapes=({0: rows},))
    return next(iter(program.graph.nodes)).meta["val"].shape[0], program.range_constraints


@pytest.mark.parametrize("least", [0, 1, 3])
def test_a_size_is_between_what_the_user_said(least: int) -> None:
    size, ranges = _size(torch.nn.ReLU(), torch.export.Dim("rows", min=least, max=7))
    assert private.size_range(size, ranges) == (least, 7)
    assert private.size_range(size * 2 + 1, ranges) == (2 * least + 1, 15)
    assert private.size_range(size - 5, ranges)[0] == 0
    # What the symbol itself knows.
    assert private.size_range(size) == (max(2, least), 7)
    assert private.size_range(size - size + 5) == private.size_range(5) == (5, 5)


def test_a_size_without_a_bound_has_none() -> None:
    size, ranges = _size(torch.nn.ReLU(), torch.export.Dim("rows"))
    assert private.size_range(size, ranges)[1] is None
    assert private.upper_bound(size) == size.node.hint == 4


def test_symbols_are_told_by_their_expressions() -> None:
    size, _ = _size(torch.nn.ReLU(), torch.export.Dim("rows"), rank=2)
    assert type(size) in private.SYMBOLS
    assert private.varies(size)
    assert not private.varies(size - size + 5)
    assert not private.varies(5)
    assert private.plain_number(size) is size
    assert private.plain_number(size - size + 5) == private.plain_number(5) == 5
    assert type(private.plain_number(size - size + 5)) is int
    assert private.expression_of(size + 1) == private.expression_of(1 + size)
    assert private.expression_of(5) == 5


def test_expressions_and_bounds_follow_what_torch_learns_of_a_symbol() -> None:
    size, ranges = _size(torch.nn.ReLU(), torch.export.Dim("rows", min=2, max=9), rank=2)
    assert private.size_range(2 * size, ranges) == (4, 18)
    narrow = {symbol: type(bounds)(2, 3) for symbol, bounds in ranges.items()}
    assert private.size_range(2 * size, narrow) == (4, 6)
    total = size + 1
    assert private.varies(total)
    assert size == 4  # specializes the symbol
    assert private.expression_of(total) == total.node.expr == 5
    assert private.plain_number(total) == 5


def test_fake_tensors_of_other_sizes_are_made_without_guards() -> None:
    size, _ = _size(torch.nn.ReLU(), torch.export.Dim("rows"), rank=2)
    environment = size.node.shape_env
    mode, guards = private.FakeTensorMode(shape_env=environment), len(environment.guards)
    like = private.FakeTensor(mode, torch.empty(1, dtype=torch.int8, device="meta"), "cpu")
    plain, again = (private.new_fake(like, [2 * size, 3, size]) for _ in range(2))
    storages = [tensor.untyped_storage() for tensor in (plain, again)]
    assert storages[0].nbytes() == storages[1].nbytes() == 6 * size * size
    assert storages[0]._cdata != storages[1]._cdata
    other = private.new_fake(like, [size, 3], [1, size])
    assert (plain.dtype, plain.device, plain.fake_mode) == (torch.int8, like.device, mode)
    expected = [[2 * size, 3, size, 3 * size, size, 1], [size, 3, 1, size]]
    for tensor, numbers in zip((plain, other), expected, strict=True):
        found = [*tensor.shape, *tensor.stride()]
        assert list(map(private.expression_of, found)) == list(map(private.expression_of, numbers))
    assert len(environment.guards) == guards


def _graph() -> GraphModule:
    """Return a graph with every kind of node, nested arguments, and a value of two readers."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            x = self.inner(x) * self.scale
            parts = torch.split(torch.cat([x, y.relu()], dim=0), [1, 1])
            return [parts[0] + x, torch.stack((parts[1], x), dim=0)]

    traced = symbolic_trace(Model())
    for index, node in enumerate(traced.graph.nodes):
        node.meta["index"] = index
    return traced


def test_add_node_names_nodes_as_create_node_does() -> None:
    ours, theirs = Graph(), Graph()
    wanted = ["x", "x", "x", "y_3", "input", "None", "a.b", "0", "a@1", "ä", "", "a_b"]
    for name in wanted:
        private.add_node(ours, "get_attr", "attribute", (), name, type_expr=torch.Tensor)
        theirs.create_node("get_attr", "attribute", (), {}, name, torch.Tensor)
    for graph in (ours, theirs):
        last = next(reversed(graph.nodes))
        if graph is ours:
            private.add_node(graph, "output", "output", (last,), "output")
        else:
            graph.output(last)
        graph.lint()
    assert str(ours) == str(theirs)
    assert [node.name for node in ours.nodes] == [node.name for node in theirs.nodes]
    assert [node.type for node in ours.nodes] == [node.type for node in theirs.nodes]


def test_hooks_hear_of_added_nodes() -> None:
    gm = symbolic_trace(lambda x: x.sin())
    seen: list[str] = []
    gm._register_create_node_hook(lambda node: seen.append(node.name))
    with gm.graph.inserting_before(gm.graph.output_node()):
        private.add_node(
            gm.graph, "call_function", torch.cos, (next(iter(gm.graph.nodes)),), "cos"
        )
    assert seen == ["cos"]


def test_readers_that_are_missing_are_entered_and_others_left() -> None:
    gm = _graph()
    before = {node: list(node.users) for node in gm.graph.nodes}
    private.restore_users(gm.graph)
    assert {node: list(node.users) for node in gm.graph.nodes} == before
    for node, users in before.items():
        if users:
            del node.users[users[-1]]
    private.restore_users(gm.graph)
    assert {node: set(node.users) for node in gm.graph.nodes} == {
        node: set(users) for node, users in before.items()
    }


def test_parts_of_a_program_are_replaced_in_place() -> None:
    program = linear()
    signature = program.graph_signature
    state = {
        name: torch.nn.Parameter(torch.zeros_like(value))
        for name, value in program.state_dict.items()
    }
    private.set_program_parts(program, state_dict=state, constants={"k": torch.ones(1)})
    assert program.state_dict is state
    assert list(program.constants) == ["k"]
    assert program.graph_signature is signature
    assert not program.module()(torch.ones(1, 2)).any()


def test_copy_node_does_what_node_copy_does() -> None:
    gm = _graph()
    ours, theirs = Graph(), Graph()
    env_ours: dict[torch.fx.Node, torch.fx.Node] = {}
    env_theirs: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        env_ours[node] = private.copy_node(ours, node, env_ours)
        env_theirs[node] = theirs.node_copy(node, env_theirs.__getitem__)
    assert str(ours) == str(theirs)
    assert len(ours.nodes) == len(theirs.nodes)
    ours.lint()
    for node in gm.graph.nodes:
        one, other = env_ours[node], env_theirs[node]
        assert one.name == other.name
        assert [user.name for user in one.users] == [user.name for user in other.users]
        assert one.meta == other.meta
        assert one.meta is not node.meta
        assert one.type == other.type
    for op in ("placeholder", "get_attr", "output"):
        assert len(ours.find_nodes(op=op)) == len(theirs.find_nodes(op=op))
    # Names stay unique when the graph grows by torch's own ways.
    last = ours.output_node()
    with ours.inserting_before(last):
        new = ours.call_function(torch.sin, (last.prev,), name=last.prev.name)
    assert new.name not in {node.name for node in gm.graph.nodes}


def test_an_impure_module_survives_dead_code_elimination_in_copies_too() -> None:
    inner = symbolic_trace(lambda x: x.sin())
    assert not private.is_impure(inner)
    assert not private.is_impure(None)
    private.mark_impure(inner)
    for module in (inner, copy.deepcopy(inner)):
        assert private.is_impure(module)
        graph = Graph()
        x = graph.placeholder("x")
        graph.call_module("inner", (x,))
        graph.output(x)
        gm = GraphModule({"inner": module}, graph)
        gm.graph.eliminate_dead_code()
        assert len(gm.graph.find_nodes(op="call_module", target="inner")) == 1


def test_what_nodes_read_is_known_where_readers_are_forgotten() -> None:
    gm = symbolic_trace(lambda x: torch.sin(x) + x)
    nodes = list(gm.graph.nodes)
    x, sin, add, output = nodes
    x.users.clear()
    assert private.reads_only_earlier(nodes)
    assert not private.reads_only_earlier([x, add, sin, output])
    assert not private.reads_only_earlier([sin, x, add, output])
    assert not private.reads_only_earlier([sin, add, output])


def test_erasing_does_what_erase_node_does() -> None:
    ours, theirs = (symbolic_trace(lambda x: (x.sin().cos(), x)[1]) for _ in range(2))
    for gm in (ours, theirs):
        sin, cos = list(gm.graph.nodes)[1:3]
        if gm is ours:
            private.erase_nodes_now(gm.graph, [cos, sin])
        else:
            gm.graph.erase_node(cos)
            gm.graph.erase_node(sin)
        assert sin._erased
        assert not sin.users
        assert not cos.all_input_nodes
        assert not gm.graph.find_nodes(op="call_method")
    assert str(ours.graph) == str(theirs.graph)
    assert len(ours.graph.nodes) == len(theirs.graph.nodes) == 2
    ours.graph.lint()


def test_a_program_with_other_parts_is_a_whole_program() -> None:
    program = linear()
    made = private.with_parts(program, example_inputs=None, guards_code=[])
    assert set(vars(made)) == set(vars(program))
    made.validate()  # type: ignore[no-untyped-call]
    x = torch.ones(1, 2)
    torch.testing.assert_close(made.module()(x), program.module()(x))
    assert program.example_inputs is not None
    other = GraphModule(torch.nn.Module(), Graph())
    assert private.with_parts(program, graph_module=other).graph_module is other
    assert program.graph_module is not other


def test_hooks_hear_of_erased_nodes() -> None:
    gm = symbolic_trace(lambda x: (x.sin(), x)[1])
    seen: list[str] = []
    gm._register_erase_node_hook(lambda node: seen.append(node.name))
    private.erase_nodes_now(gm.graph, [list(gm.graph.nodes)[1]])
    assert seen == ["sin"]


def test_dynamo_reads_the_mark_of_a_constant_function() -> None:
    def own() -> int:
        return 1

    def upstream() -> int:
        return 1

    assert assume_constant_result(own) is own
    torch.compiler.assume_constant_result(upstream)  # type: ignore[no-untyped-call]
    assert vars(own) == vars(upstream) != {}
