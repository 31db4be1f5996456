"""What we expect of torch's private parts; a new torch that breaks it breaks one of these."""

from __future__ import annotations

import copy

import torch
from fuser_graphs import random_graph
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx._lazy_graph_module import _LazyGraphModule

from lowerdeck.graph_fuser import _torch_private as private


def test_copy_node_does_what_node_copy_does() -> None:
    gm = random_graph(7, 40)
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


def test_erase_hooks_are_called() -> None:
    gm = symbolic_trace(lambda x: (x.sin(), x)[1])
    seen: list[str] = []
    gm._register_erase_node_hook(lambda node: seen.append(node.name))
    private.erase_nodes_now(gm.graph, [list(gm.graph.nodes)[1]])
    assert seen == ["sin"]


def test_replace_hooks_are_found() -> None:
    gm = symbolic_trace(lambda x: x.sin().cos())
    seen: list[tuple[str, str, str]] = []
    assert list(private.replace_hooks(gm)) == []
    assert list(private.replace_hooks(None)) == []
    with gm._set_replace_hook(lambda old, new, user: seen.append((old.name, new, user.name))):
        (hook,) = private.replace_hooks(gm)
        x, sin, cos, _ = gm.graph.nodes
        hook(old=sin, new=x.name, user=cos)
        assert seen == [("sin", "x", "cos")]
        # torch calls it likewise.
        cos.replace_input_with(sin, x)
        assert seen == [("sin", "x", "cos")] * 2


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


def test_operators_have_kinds() -> None:
    add = torch.ops.aten.add
    assert isinstance(add.Tensor, private.OpOverload)
    assert isinstance(add, private.OpOverloadPacket)


def test_a_lazy_module_is_a_plain_graph_module_after_its_first_use() -> None:
    gm = symbolic_trace(lambda x: x.sin())
    lazy = private.lazy_graph_module("Lazy", gm.graph)
    assert type(lazy).__name__ == "Lazy"
    assert "_code" not in vars(lazy) or "sin" not in lazy._code
    torch.testing.assert_close(lazy(torch.ones(1)), torch.ones(1).sin())
    assert not {"recompile", "code", "__str__", "__reduce__"} & set(vars(type(lazy)))
    assert isinstance(lazy, GraphModule)


def test_recompile_and_a_new_graph_end_the_deferral() -> None:
    for finish in (lambda gm: gm.recompile(), lambda gm: setattr(gm, "graph", gm.graph)):
        gm = symbolic_trace(lambda x: x.sin())
        assert "sin" in gm.code
        next(n for n in gm.graph.nodes if n.op == "call_method").target = "cos"
        private.defer_code(gm)
        private.defer_code(gm)
        finish(gm)
        assert "recompile" not in vars(type(gm))
        torch.testing.assert_close(gm(torch.ones(1)), torch.ones(1).cos())


def test_deferred_code_is_fresh_wherever_it_is_read() -> None:
    def edited() -> GraphModule:
        gm = symbolic_trace(lambda x: x.sin())
        next(n for n in gm.graph.nodes if n.op == "call_method").target = "cos"
        private.defer_code(gm)
        return gm

    assert "cos" in edited().code
    assert "cos" in str(edited())
    assert "cos" in edited().__reduce__()[1][0]["_code"]
    torch.testing.assert_close(edited()(torch.ones(1)), torch.ones(1).cos())
    torch.testing.assert_close(edited().forward(torch.ones(1)), torch.ones(1).cos())


def test_torchs_own_lazy_module_keeps_its_ways() -> None:
    gm = symbolic_trace(lambda x: x.sin())
    lazy = _LazyGraphModule.from_graphmodule(gm)
    lazy(torch.ones(1))
    next(n for n in lazy.graph.nodes if n.op == "call_method").target = "cos"
    private.defer_code(lazy)
    torch.testing.assert_close(lazy(torch.ones(1)), torch.ones(1).cos())
    private.defer_code(lazy)
    private.generate_code(lazy)
    assert "cos" in lazy.code


def test_codegen_is_shared() -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    module = program.module()
    assert isinstance(module, GraphModule)
    graph = Graph()
    private.share_codegen(module.graph, graph)
    assert graph._codegen is module.graph._codegen


def test_add_node_names_nodes_as_create_node_does() -> None:
    ours, theirs = Graph(), Graph()
    wanted = ["x", "x", "x", "y_3", "input", "None", "a.b", "0", "a@1", "ä", "", "a_b"]
    for name in wanted:
        private.add_node(ours, "get_attr", "attribute", (), name, torch.Tensor)
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
    gm = random_graph(3, 30)
    before = {node: list(node.users) for node in gm.graph.nodes}
    private.mend_readers(gm.graph)
    assert {node: list(node.users) for node in gm.graph.nodes} == before
    for node, users in before.items():
        if users:
            del node.users[users[-1]]
    private.mend_readers(gm.graph)
    assert {node: set(node.users) for node in gm.graph.nodes} == {
        node: set(users) for node, users in before.items()
    }
