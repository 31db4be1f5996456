"""What we expect of torch's private parts; a new torch that breaks it breaks one of these."""

from __future__ import annotations

import copy

import torch
from torch.fx import Graph, GraphModule, symbolic_trace

from lowerdeck.graph_fuser import _torch_private as private
from lowerdeck.torch_base import LazyGraphModule, is_impure


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
    lazy = LazyGraphModule(gm, gm.graph)
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


def test_an_impure_module_survives_dead_code_elimination_in_copies_too() -> None:
    inner = symbolic_trace(lambda x: x.sin())
    assert not is_impure(inner)
    assert not is_impure(None)
    private.mark_impure(inner)
    for module in (inner, copy.deepcopy(inner)):
        assert is_impure(module)
        graph = Graph()
        x = graph.placeholder("x")
        graph.call_module("inner", (x,))
        graph.output(x)
        gm = GraphModule({"inner": module}, graph)
        gm.graph.eliminate_dead_code()
        assert len(gm.graph.find_nodes(op="call_module", target="inner")) == 1


def test_nodes_are_found_by_what_they_call() -> None:
    gm = symbolic_trace(lambda x: (torch.sin(torch.sin(x)) + x.cos()).cos())
    x, inner, outer, cos, add, last, _ = gm.graph.nodes
    groups = [list(nodes) for nodes in private.nodes_by_callee(gm.graph)]
    assert groups == [[inner, outer], [cos, last], [add]]
    outer.target = torch.tan
    add.replace_all_uses_with(x)
    gm.graph.erase_node(add)
    groups = [list(nodes) for nodes in private.nodes_by_callee(gm.graph)]
    assert groups == [[inner], [cos, last], [outer]]


def test_what_nodes_read_is_known_where_readers_are_forgotten() -> None:
    gm = symbolic_trace(lambda x: torch.sin(x) + x)
    nodes = list(gm.graph.nodes)
    x, sin, add, output = nodes
    x.users.clear()
    assert private.reads_only_earlier(nodes)
    assert not private.reads_only_earlier([x, add, sin, output])
    assert not private.reads_only_earlier([sin, x, add, output])
    assert not private.reads_only_earlier([sin, add, output])


def test_hooks_hear_of_erased_nodes() -> None:
    gm = symbolic_trace(lambda x: (x.sin(), x)[1])
    seen: list[str] = []
    gm._register_erase_node_hook(lambda node: seen.append(node.name))
    private.erase_nodes_now(gm.graph, [list(gm.graph.nodes)[1]])
    assert seen == ["sin"]
