"""Outlining: boundaries, order, meta, every kind of value, and errors that change nothing."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuser_graphs import chain, named
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import (
    CycleError,
    Region,
    RegionError,
    fuse_partitions,
    generate_code,
    outline,
    plan_outline,
)
from lowerdeck_zoo import Of, exported

aten = torch.ops.aten
X = torch.linspace(-1, 1, 4)
CHAIN = (X.sin() + 1).cos().neg()


def snapshot(gm: GraphModule) -> list[object]:
    """Return everything that an error must leave as it was."""
    return [
        (id(node), node.name, node.op, node.target, node.args, node.kwargs, dict(node.meta))
        for node in gm.graph.nodes
    ] + [sorted(gm._modules), sorted(gm._buffers), gm.code]


def with_buffer() -> nn.Module:
    root = nn.Module()
    root.register_buffer("c", torch.full((2,), 3.0))
    return root


def test_a_partition_becomes_one_call_and_all_else_stays() -> None:
    gm, n = chain()
    for node in gm.graph.nodes:
        node.meta["mark"] = node.name
    fused = fuse_partitions(gm, {"block": [n["add"], n["cos"]]})["block"]
    names = ["x", "sin", "block", "neg", "output"]
    assert [node.name for node in gm.graph.nodes] == names
    kept = [node for node in gm.graph.nodes if node.name != "block"]
    assert kept == [n["x"], n["sin"], n["neg"], n["output"]]
    assert all(node.meta == {"mark": node.name} for node in kept)
    assert fused.call_node.target == "block"
    assert (fused.inputs, fused.outputs) == ((n["sin"],), (fused.call_node,))
    assert fused.original_outputs == (n["cos"],)
    assert gm.get_submodule("block") is fused.module
    assert all(fused.node_map[n[name]].name == name for name in ("sin", "add", "cos"))
    assert {node.graph for node in fused.node_map.values()} == {fused.module.graph}
    torch.testing.assert_close(gm(X), CHAIN)


def _crossed(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.sin(), x.cos()
    return second.neg(), first.neg()


@pytest.mark.parametrize(
    ("function", "members", "order", "inputs", "outputs"),
    [
        (lambda a, b, c: (c - b) * a, "sub mul", "parent", "a b c", "mul"),
        (lambda a, b, c: (c - b) * a, "sub mul", "first_use", "c b a", "mul"),
        (lambda x: x.sin() * x + x, "mul add", "parent", "x sin", "add"),
        (_crossed, "cos sin", "parent", "x", "sin cos"),
        (lambda x: (x, x.sin(), x), "sin", "parent", "x", "sin"),
    ],
)
def test_inputs_and_outputs_have_a_fixed_order_and_each_value_is_passed_once(
    function: Callable[..., Any], members: str, order: Any, inputs: str, outputs: str
) -> None:
    gm = symbolic_trace(function)
    n = named(gm)
    fused = fuse_partitions(gm, {"p": [n[m] for m in members.split()]}, input_order=order)["p"]
    assert [node.name for node in fused.inputs] == inputs.split()
    assert [node.name for node in fused.original_outputs] == outputs.split()
    args = [X + number for number in range(len(gm.graph.find_nodes(op="placeholder")))]
    torch.testing.assert_close(gm(*args), function(*args), rtol=0, atol=0)


def test_first_use_counts_the_reads_of_nested_regions() -> None:
    gm = symbolic_trace(lambda b, a: a.sin() + b)
    n = named(gm)
    region = Region("outer", [n["add"]], children=[Region("inner", [n["sin"]])])
    done = outline(gm, [region], input_order="first_use")
    assert done[region].inputs == (n["a"], n["b"])


def test_a_region_that_reads_nothing_and_one_that_nobody_reads() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(aten.ones.default, ([4],))
    twice = graph.call_function(aten.add.Tensor, (ones, ones))
    dead = graph.call_function(aten.neg.default, (x,))
    graph.output(graph.call_function(aten.add.Tensor, (x, twice)))
    gm = GraphModule(nn.Module(), graph)
    fused = fuse_partitions(gm, {"constant": [ones, twice], "dead": [dead]})
    assert fused["constant"].inputs == fused["dead"].outputs == ()
    assert fused["dead"].call_node.meta["val"] == fused["dead"].module(X) == ()
    torch.testing.assert_close(gm(X), X + 2)


def test_constants_and_submodules_move_in_and_are_shared() -> None:
    model = nn.Module()
    model.block = nn.Sequential(nn.Linear(4, 4))
    model.scale = nn.Parameter(torch.ones(4))
    model.register_buffer("shift", torch.ones(4))
    graph = Graph()
    x = graph.placeholder("x")
    product = graph.call_function(
        operator.mul, (graph.call_module("block.0", (x,)), graph.get_attr("scale"))
    )
    graph.output(graph.call_function(operator.add, (product, graph.get_attr("shift"))))
    gm = GraphModule(model.eval(), graph)
    expected = gm(X)
    nodes = [node for node in graph.nodes if node.op not in {"placeholder", "output"}]
    fused = fuse_partitions(gm, {"p": [named(gm)[node.name] for node in nodes]})["p"]
    assert fused.module.get_parameter("scale") is model.scale
    assert fused.module.get_submodule("block.0") is model.get_submodule("block.0")
    assert not fused.module.training
    torch.testing.assert_close(gm(X), expected)


def test_an_outer_constant_is_an_input_and_an_inner_one_an_output() -> None:
    graph = Graph()
    x, c = graph.placeholder("x"), graph.get_attr("c")
    graph.output(
        graph.call_function(aten.mul.Tensor, (graph.call_function(aten.add.Tensor, (x, c)), c))
    )
    for inside, inputs, outputs in ((False, ["x", "c"], ["add"]), (True, ["x"], ["c", "add"])):
        gm = GraphModule(with_buffer(), copy.deepcopy(graph))
        n = named(gm)
        members = [n["add_tensor"], *([n["c"]] if inside else [])]
        fused = fuse_partitions(gm, {"p": members})["p"]
        assert [node.name for node in fused.inputs] == inputs
        assert [node.name.partition("_")[0] for node in fused.original_outputs] == outputs
        torch.testing.assert_close(gm(torch.ones(2)), torch.full((2,), 12.0))


def test_multi_output_operators_lists_none_and_literals() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    split = graph.call_function(aten.split.Tensor, (x, 2))
    first, second = (graph.call_function(operator.getitem, (split, i)) for i in range(2))
    clamp = graph.call_function(aten.clamp.default, (first,), {"min": None, "max": 1.0})
    cat = graph.call_function(aten.cat.default, ([clamp, second],))
    graph.output((cat, None, 3, {"again": cat}))
    gm = GraphModule(nn.Module(), graph)
    expected = gm(X)
    fused = fuse_partitions(gm, {"a": [split], "b": [first, clamp, cat]})
    # The list itself crosses the border, as one value.
    assert fused["a"].outputs == (fused["a"].call_node,)
    assert len(fused["b"].inputs) == 2
    result = gm(X)
    torch.testing.assert_close(result[0], expected[0])
    assert result[1:3] == (None, 3)


@pytest.mark.parametrize("with_graphs", [True, False])
def test_a_higher_order_operator_moves_with_or_without_its_graphs(with_graphs: bool) -> None:
    program = exported(
        Of(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x + 1,)) * 2), X, strict=False
    )
    gm, expected = copy.deepcopy(program.graph_module), program.module()(X)
    ops = {"call_function", "get_attr"} if with_graphs else {"call_function"}
    fused = fuse_partitions(gm, {"p": [node for node in gm.graph.nodes if node.op in ops]})["p"]
    assert len(fused.inputs) == (1 if with_graphs else 3)
    torch.testing.assert_close(gm(X)[0], expected)


def test_symbolic_sizes_cross_the_border() -> None:
    dynamic = (({0: torch.export.Dim("n", min=2, max=8)},),)
    model = Of(lambda x: x.reshape(x.shape[0] * 2, -1).sin())
    gm = exported(model, torch.ones(4, 2), dynamic_shapes=dynamic).graph_module
    size = next(node for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt))
    rest = [node for node in gm.graph.nodes if node.op == "call_function" and node is not size]
    fused = fuse_partitions(gm, {"p": rest})["p"]
    assert size in fused.inputs
    assert isinstance(fused.module.graph.find_nodes(op="placeholder")[1].meta["val"], torch.SymInt)
    assert gm(torch.ones(3, 2))[0].shape == (6, 1)


def test_meta_is_kept_where_true_and_not_invented() -> None:
    gm, n = chain()
    for node in gm.graph.nodes:
        node.meta.update(
            val=f"value of {node.name}",
            nn_module_stack={"m": node.name},
            stack_trace=node.name,
            debug_handle=7,
            quantization="int8",
        )
    fused = fuse_partitions(gm, {"p": [n["add"], n["cos"]]})["p"]
    placeholder, add, cos, output = fused.module.graph.nodes
    assert add.meta == n["add"].meta
    assert add.meta is not n["add"].meta
    assert cos.meta["debug_handle"] == 7
    # Where a value comes from stays true of what passes it on; what the operation did does not.
    for node, name in ((placeholder, "sin"), (fused.call_node, "cos")):
        assert node.meta == {
            "val": f"value of {name}",
            "nn_module_stack": {"m": name},
            "stack_trace": name,
            "quantization": "int8",
        }
    assert output.meta["val"] == "value of cos"


def test_hooks_on_the_parent_see_every_change_and_results_carry_their_values() -> None:
    gm = symbolic_trace(lambda x: (x.sin(), x.cos(), x.neg()))
    n = named(gm)
    n["sin"].meta.update(val=1, stack_trace="here")
    n["cos"].meta.update(val=2)
    replaced: list[tuple[str, str, str]] = []
    erased: list[str] = []
    gm._register_replace_node_hook(
        lambda old, new, user: replaced.append((old.name, new, user.name))
    )
    gm._register_erase_node_hook(lambda node: erased.append(node.name))
    fused = fuse_partitions(gm, {"p": [n["sin"], n["cos"]], "q": [n["neg"]]})
    names = [node.name for part in fused.values() for node in part.outputs]
    pairs = zip(("sin", "cos", "neg"), names, strict=True)
    assert replaced == [(old, new, "output") for old, new in pairs]
    assert sorted(erased) == ["cos", "neg", "sin"]
    assert fused["p"].call_node.meta == {"val": (1, 2)}
    metas = [node.meta for node in fused["p"].outputs]
    assert metas == [{"val": 1, "stack_trace": "here"}, {"val": 2}]


# --- hierarchies ---------------------------------------------------------------------------------


def test_a_value_passes_through_every_region_on_its_way() -> None:
    gm = symbolic_trace(lambda x, y: ((x.sin() + y).cos(), y))
    n = named(gm)
    inner = Region("inner", [n["add"]])
    middle = Region("middle", [], children=[inner])
    outer = Region("outer", [n["sin"]], children=[middle])
    done = outline(gm, [outer])
    assert done[outer].inputs == (n["x"], n["y"])
    assert done[middle].inputs == done[inner].inputs == (n["y"], n["sin"])
    assert gm.get_submodule("outer.middle.inner") is done[inner].module
    assert done[middle].call_node.graph is done[outer].module.graph
    assert all(done[region].outputs == (n["add"],) for region in (inner, middle, outer))
    torch.testing.assert_close(gm(X, X)[0], (X.sin() + X).cos())


def test_forced_inputs_and_outputs_come_first_and_reach_nested_regions() -> None:
    gm = symbolic_trace(lambda x, y: (x.sin().cos(), y))
    n = named(gm)
    region = Region("p", [n["sin"], n["cos"]], inputs=[n["y"]], outputs=[n["sin"]])
    plan = plan_outline(gm, [region])
    assert plan.inputs(region) == (n["y"], n["x"])
    assert plan.outputs(region) == (n["sin"], n["cos"])
    inner = Region("inner", [n["cos"]], inputs=[n["y"]], outputs=[n["cos"]])
    outer = Region("outer", [n["sin"]], children=[inner])
    done = outline(gm, [outer])
    assert done[outer].inputs == (n["x"], n["y"])
    assert done[inner].inputs == (n["y"], n["sin"])


def test_a_tree_deeper_than_the_recursion_limit() -> None:
    graph = Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(1200):
        nodes.append(graph.call_function(torch.neg, (nodes[-1],)))
    graph.output(nodes[-1])
    gm = GraphModule(nn.Module(), graph)
    region = Region("m", [nodes[-1]])
    for node in reversed(nodes[1:-1]):
        region = Region("m", [node], children=[region])
    done = outline(gm, [region])
    assert len(done) == 1200
    assert len(gm.graph.nodes) == 3


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partitions", "path", "regions"),
    [
        ({"p": "sin exp"}, "sin cos neg exp", ("p", None, None, "p")),
        ({"p": "sin neg", "q": "cos exp"}, "", ("p", "q", "p")),
    ],
)
def test_a_cycle_is_shown_node_by_node(
    partitions: dict[str, str], path: str, regions: tuple[str | None, ...]
) -> None:
    gm = symbolic_trace(lambda x: x.sin().cos().neg().exp())
    n = named(gm)
    before = snapshot(gm)
    with pytest.raises(CycleError) as caught:
        fuse_partitions(
            gm, {key: [n[m] for m in names.split()] for key, names in partitions.items()}
        )
    assert set(caught.value.regions) == set(regions)
    assert caught.value.regions[0] == caught.value.regions[-1]
    if path:
        assert caught.value.path == tuple(n[name] for name in path.split())
        assert "sin (in 'p') -> cos -> neg -> exp (in 'p')" in str(caught.value)
    assert snapshot(gm) == before


def test_a_message_shows_both_ends_of_a_long_cycle() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x.sin()
        return x

    gm = symbolic_trace(long)
    nodes = gm.graph.find_nodes(op="call_method", target="sin")
    with pytest.raises(CycleError) as caught:
        fuse_partitions(gm, {"p": [nodes[0], nodes[-1]]})
    assert caught.value.path == tuple(nodes)
    assert " -> sin_11 -> ... 6 more ... -> sin_18 -> " in str(caught.value)


def _wrong() -> tuple[GraphModule, dict[str, Node]]:
    """Return a graph, and its nodes with one of another graph and one that was erased."""
    gm = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    gm.register_buffer("constant", torch.ones(1))
    n = named(gm)
    n["foreign"] = chain()[1]["sin"]
    n["gone"] = gm.graph.call_function(torch.sin, (n["_1"],))
    gm.graph.erase_node(n["gone"])
    return gm, n


@pytest.mark.parametrize(
    ("partitions", "error", "message"),
    [
        ({"p": "_0 foreign"}, RegionError, "another graph"),
        ({"p": "gone"}, RegionError, "erased"),
        ({"p": "_1 _1"}, RegionError, "twice"),
        ({"p": "_0", "q": "_0"}, RegionError, "regions 'p' and 'q'"),
        ({"p": "input_1"}, RegionError, "a placeholder node"),
        ({"p": "output"}, RegionError, "an? output node"),
        ({"p": ""}, RegionError, "is empty"),
        ({"0": "_1"}, RegionError, "still uses"),
        ({"constant": "_1"}, RegionError, "not a submodule"),
        ({"a..b": "_1"}, RegionError, "not an attribute path"),
    ],
)
def test_each_error_has_its_own_message_and_changes_nothing(
    partitions: dict[str, str], error: type[RegionError], message: str
) -> None:
    gm, n = _wrong()
    before = snapshot(gm)
    with pytest.raises(error, match=message):
        fuse_partitions(
            gm, {name: [n[m] for m in own.split()] for name, own in partitions.items()}
        )
    assert snapshot(gm) == before


def test_errors_of_regions_change_nothing() -> None:
    gm, n = chain()
    before, sin = snapshot(gm), [n["sin"]]

    for regions, error, message in (
        ([Region("p", sin, inputs=sin)], RegionError, "not an outer node"),
        ([Region("p", sin, outputs=[n["x"]])], RegionError, "not an inner node"),
        ([Region("p", sin), Region("p", [n["neg"]])], RegionError, "sibling"),
    ):
        with pytest.raises(error, match=message):
            outline(gm, regions)
    assert snapshot(gm) == before


def test_an_inner_name_must_be_free_in_the_new_parent() -> None:
    graph = Graph()
    read = graph.get_attr("c")
    sin = graph.call_function(torch.sin, (read,))
    graph.output(graph.call_function(torch.cos, (sin,)))
    gm = GraphModule(with_buffer(), graph)
    before = snapshot(gm)
    for name in ("c", "forward", "type"):
        with pytest.raises(RegionError, match="existing attribute of its parent"):
            outline(gm, [Region("outer", [read], children=[Region(name, [sin])])])
    with pytest.raises(RegionError, match="leads through 'c'"):
        outline(gm, [Region("c.inner", [sin])])
    assert snapshot(gm) == before
    del gm.c
    with pytest.raises(RegionError, match="does not have"):
        fuse_partitions(gm, {"p": [read]})
    assert list(gm.graph.nodes)[:2] == [read, sin]


def test_a_dotted_name_is_a_path_and_an_unused_submodule_is_replaced() -> None:
    gm, n = chain()
    gm.add_submodule("p", nn.Identity())
    fused = fuse_partitions(gm, {"blocks.first": [n["add"], n["cos"]], "p": [n["neg"]]})
    torch.testing.assert_close(gm(X), CHAIN)
    assert "blocks.first" in dict(gm.named_modules())
    assert gm.p is fused["p"].module


# --- code ----------------------------------------------------------------------------------------


def test_code_is_generated_once_and_only_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, n = chain()
    made: list[Graph] = []
    original: Any = Graph.python_code

    def counting(self: Graph, *args: object, **kwargs: object) -> object:
        made.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Graph, "python_code", counting)
    fused = fuse_partitions(gm, {"p": [n["add"]], "q": [n["neg"]]})
    assert made == []
    gm(X), gm(X)
    assert made.count(gm.graph) == 1
    assert all(made.count(part.module.graph) == 1 for part in fused.values())


def test_generate_code_does_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, n = chain()
    fused = fuse_partitions(gm, {"p": [n["add"]]})["p"]
    generate_code(gm)
    monkeypatch.setattr(Graph, "python_code", None)
    assert "self.p" in gm.code
    assert "+ 1" in fused.module.code
    torch.testing.assert_close(gm(X), CHAIN)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_copies_pickles_exports_and_compiled_modules_are_whole() -> None:
    gm, n = chain()
    fuse_partitions(gm, {"p": [n["add"], n["cos"]]})
    for clone in (copy.deepcopy(gm), copy.copy(gm), pickle.loads(pickle.dumps(gm))):
        torch.testing.assert_close(clone(X), CHAIN)
    assert "self.p" in gm.code
    torch.testing.assert_close(exported(gm, X).module()(X), CHAIN)
    torch.testing.assert_close(torch.compile(gm, backend="eager", fullgraph=True)(X), CHAIN)
