"""Outlining: boundaries, order, meta, every kind of value, and nothing half-done."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from lowerdeck.graph_fuser import (
    CycleError,
    DuplicateNodeError,
    ErasedNodeError,
    ForeignNodeError,
    NameInUseError,
    OverlapError,
    Region,
    RegionError,
    fuse_partitions,
    generate_code,
    outline,
)

aten = torch.ops.aten


def named(gm: GraphModule) -> dict[str, Node]:
    return {node.name: node for node in gm.graph.nodes}


def chain() -> tuple[GraphModule, dict[str, Node]]:
    gm = symbolic_trace(lambda x: (x.sin() + 1).cos().neg())
    return gm, named(gm)


def snapshot(gm: GraphModule) -> list[object]:
    """Return everything that an error must leave as it was."""
    return [
        (id(node), node.name, node.op, node.target, node.args, node.kwargs, dict(node.meta))
        for node in gm.graph.nodes
    ] + [sorted(gm._modules), sorted(gm._buffers), gm.code]


def test_a_partition_becomes_one_call() -> None:
    gm, n = chain()
    fused = fuse_partitions(gm, {"block": [n["add"], n["cos"]]})["block"]
    assert [node.name for node in gm.graph.nodes] == ["x", "sin", "block", "neg", "output"]
    assert fused.call_node.target == "block"
    assert fused.inputs == (n["sin"],)
    assert fused.outputs == (fused.call_node,)
    assert fused.original_outputs == (n["cos"],)
    assert gm.get_submodule("block") is fused.module
    x = torch.randn(3)
    torch.testing.assert_close(gm(x), (x.sin() + 1).cos().neg())


def test_nodes_outside_keep_identity_order_and_meta() -> None:
    gm, n = chain()
    for node in gm.graph.nodes:
        node.meta["mark"] = node.name
    fuse_partitions(gm, {"block": [n["add"]]})
    assert [node for node in gm.graph.nodes if node.name != "block"] == [
        n["x"],
        n["sin"],
        n["cos"],
        n["neg"],
        n["output"],
    ]
    assert all(node.meta["mark"] == node.name for node in gm.graph.nodes if node.name != "block")


def test_inputs_follow_the_parents_order_or_first_use() -> None:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (c - b) * a

    gm = symbolic_trace(f)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    fused = fuse_partitions(gm, {"p": nodes})["p"]
    assert [node.name for node in fused.inputs] == ["a", "b", "c"]
    gm = symbolic_trace(f)
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    fused = fuse_partitions(gm, {"p": nodes}, input_order="first_use")["p"]
    assert [node.name for node in fused.inputs] == ["c", "b", "a"]


def test_first_use_counts_the_reads_of_nested_regions() -> None:
    gm = symbolic_trace(lambda b, a: a.sin() + b)
    n = named(gm)
    region = Region("outer", [n["add"]], children=[Region("inner", [n["sin"]])])
    done = outline(gm, [region], input_order="first_use")
    assert done.regions[region].inputs == (n["a"], n["b"])


def test_outputs_follow_the_parents_order() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x.sin()
        b = x.cos()
        return b.neg(), a.neg()

    gm = symbolic_trace(f)
    n = named(gm)
    fused = fuse_partitions(gm, {"p": [n["cos"], n["sin"]]})["p"]
    assert [node.name for node in fused.original_outputs] == ["sin", "cos"]
    x = torch.randn(3)
    torch.testing.assert_close(gm(x), f(x))


def test_a_value_used_twice_is_passed_once() -> None:
    gm = symbolic_trace(lambda x: x.sin() * x + x)
    n = named(gm)
    fused = fuse_partitions(gm, {"p": [n["mul"], n["add"]]})["p"]
    assert fused.inputs == (n["x"], n["sin"])


def test_always_return_tuple_wraps_a_lone_output() -> None:
    gm, n = chain()
    fused = fuse_partitions(gm, {"p": [n["add"]]}, always_return_tuple=True)["p"]
    assert fused.outputs[0].target is operator.getitem
    assert isinstance(fused.module(torch.zeros(2)), tuple)
    torch.testing.assert_close(gm(torch.ones(2)), (torch.ones(2).sin() + 1).cos().neg())


def test_a_region_that_reads_nothing_and_one_that_nobody_reads() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    full = graph.call_function(aten.ones.default, ([2],))
    twice = graph.call_function(aten.add.Tensor, (full, full))
    dead = graph.call_function(aten.neg.default, (x,))
    graph.output(graph.call_function(aten.add.Tensor, (x, twice)))
    gm = GraphModule(torch.nn.Module(), graph)
    fused = fuse_partitions(gm, {"constant": [full, twice], "dead": [dead]})
    assert fused["constant"].inputs == ()
    assert fused["dead"].outputs == ()
    assert fused["dead"].call_node.meta["val"] == ()
    assert fused["dead"].module(torch.ones(2)) == ()
    torch.testing.assert_close(gm(torch.ones(2)), torch.full((2,), 3.0))


def test_constants_and_submodules_move_in_and_are_shared() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Sequential(torch.nn.Linear(2, 2))
            self.scale = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("shift", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = self.block(x) * self.scale
            return scaled + self.get_buffer("shift")

    model = Model().eval()
    gm = symbolic_trace(model)
    nodes = [node for node in gm.graph.nodes if node.op not in {"placeholder", "output"}]
    x = torch.randn(1, 2)
    fused = fuse_partitions(gm, {"p": nodes})["p"]
    assert fused.module.get_parameter("scale") is model.scale
    assert fused.module.get_submodule("block.0") is model.block[0]
    assert not fused.module.training
    torch.testing.assert_close(gm(x), model(x))


def test_an_outer_constant_is_an_input_and_an_inner_one_an_output() -> None:
    root = torch.nn.Module()
    root.register_buffer("c", torch.ones(2))
    graph = Graph()
    x = graph.placeholder("x")
    c = graph.get_attr("c")
    add = graph.call_function(aten.add.Tensor, (x, c))
    graph.output(graph.call_function(aten.mul.Tensor, (add, c)))
    gm = GraphModule(root, graph)
    outside = GraphModule(root, copy.deepcopy(graph))
    n = named(outside)
    fused = fuse_partitions(outside, {"p": [n["add_tensor"]]})["p"]
    assert fused.inputs == (n["x"], n["c"])
    fused = fuse_partitions(gm, {"p": [c, add]})["p"]
    assert [node.name for node in fused.original_outputs] == ["c", "add_tensor"]
    torch.testing.assert_close(gm(torch.ones(2)), torch.full((2,), 2.0))


def test_multi_output_operators_lists_none_and_literals() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    split = graph.call_function(aten.split.Tensor, (x, 2))
    first = graph.call_function(operator.getitem, (split, 0))
    clamp = graph.call_function(aten.clamp.default, (first,), {"min": None, "max": 1.0})
    second = graph.call_function(operator.getitem, (split, 1))
    cat = graph.call_function(aten.cat.default, ([clamp, second],))
    graph.output((cat, None, 3, {"again": cat}))
    gm = GraphModule(torch.nn.Module(), graph)
    x_value = torch.arange(4.0)
    expected = gm(x_value)
    fused = fuse_partitions(gm, {"a": [split], "b": [first, clamp, cat]})
    # The list itself crosses the border, as one value.
    assert fused["a"].outputs == (fused["a"].call_node,)
    assert len(fused["b"].inputs) == 2
    result = gm(x_value)
    torch.testing.assert_close(result[0], expected[0])
    assert result[1:3] == (None, 3)


def test_an_output_that_is_an_input_of_the_graph_stays() -> None:
    gm = symbolic_trace(lambda x: (x, x.sin(), x))
    n = named(gm)
    fuse_partitions(gm, {"p": [n["sin"]]})
    x = torch.randn(2)
    result = gm(x)
    assert result[0] is x
    assert result[2] is x


def test_a_higher_order_operator_moves_with_or_without_its_graphs() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            chosen: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (y,))
            return chosen * 2

    x = torch.ones(3)
    program = torch.export.export(Model(), (x,), strict=False)
    expected = program.module()(x)
    for with_graphs in (True, False):
        gm = copy.deepcopy(program.graph_module)
        nodes = [
            node
            for node in gm.graph.nodes
            if node.op == "call_function" or (with_graphs and node.op == "get_attr")
        ]
        fused = fuse_partitions(gm, {"p": nodes})["p"]
        assert len(fused.inputs) == (1 if with_graphs else 3)
        torch.testing.assert_close(gm(x)[0], expected)


def test_symbolic_sizes_cross_the_border() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0] * 2, -1).sin()

    dynamic = {"x": {0: torch.export.Dim("n", min=2, max=8)}}
    program = torch.export.export(Model(), (torch.ones(4, 2),), dynamic_shapes=dynamic)
    gm = program.graph_module
    n = named(gm)
    size = next(node for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt))
    rest = [node for node in gm.graph.nodes if node.op == "call_function" and node is not size]
    fused = fuse_partitions(gm, {"p": rest})["p"]
    assert size in fused.inputs
    assert isinstance(fused.module.graph.find_nodes(op="placeholder")[1].meta["val"], torch.SymInt)
    assert gm(torch.ones(3, 2))[0].shape == (6, 1)
    assert n


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
    # Where a value comes from stays true of what hands it on; what the operation did does not.
    for node, name in ((placeholder, "sin"), (fused.call_node, "cos")):
        assert node.meta == {
            "val": f"value of {name}",
            "nn_module_stack": {"m": name},
            "stack_trace": name,
            "quantization": "int8",
        }
    assert output.meta["val"] == "value of cos"


def test_a_call_with_several_results_carries_their_values() -> None:
    gm = symbolic_trace(lambda x: (x.sin(), x.cos()))
    n = named(gm)
    n["sin"].meta.update(val=1, stack_trace="here")
    n["cos"].meta.update(val=2)
    fused = fuse_partitions(gm, {"p": [n["sin"], n["cos"]]})["p"]
    assert fused.call_node.meta == {"val": (1, 2)}
    assert [node.meta for node in fused.outputs] == [{"val": 1, "stack_trace": "here"}, {"val": 2}]


def test_node_map_leads_from_old_nodes_to_new_ones() -> None:
    gm, n = chain()
    fused = fuse_partitions(gm, {"p": [n["add"], n["cos"]]})["p"]
    assert [fused.node_map[n[name]].name for name in ("sin", "add", "cos")] == [
        "sin",
        "add",
        "cos",
    ]
    assert all(node.graph is fused.module.graph for node in fused.node_map.values())


def test_hooks_on_the_parent_see_every_change() -> None:
    gm = symbolic_trace(lambda x: (x.sin(), x.cos(), x.neg()))
    n = named(gm)
    replaced: list[tuple[str, str, str]] = []
    erased: list[str] = []

    def on_replace(old: Node, new: str, user: Node) -> None:
        replaced.append((old.name, new, user.name))

    gm._register_replace_node_hook(on_replace)
    gm._register_erase_node_hook(lambda node: erased.append(node.name))
    fused = fuse_partitions(gm, {"p": [n["sin"], n["cos"]], "q": [n["neg"]]})
    names = [node.name for part in fused.values() for node in part.outputs]
    assert replaced == [
        (old, new, "output") for old, new in zip(("sin", "cos", "neg"), names, strict=True)
    ]
    assert sorted(erased) == ["cos", "neg", "sin"]


def test_a_fused_module_becomes_an_exported_program() -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    gm = program.graph_module
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    fused = fuse_partitions(gm, {"p": nodes}, always_return_tuple=True)["p"]
    signature = copy.deepcopy(program.graph_signature)
    names = [node.name for node in fused.module.graph.find_nodes(op="placeholder")]
    for spec, name in zip(signature.input_specs, names, strict=True):
        spec.arg = torch.export.graph_signature.TensorArgument(name)
    inner = fused.module.graph.output_node().all_input_nodes[0]
    signature.output_specs[0].arg = torch.export.graph_signature.TensorArgument(inner.name)
    rebuilt = torch.export.ExportedProgram(
        fused.module,
        fused.module.graph,
        signature,
        program.state_dict,
        program.range_constraints,
        program.module_call_graph,
        program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
    x = torch.ones(1, 2)
    weight, bias = program.state_dict["weight"], program.state_dict["bias"]
    torch.testing.assert_close(rebuilt.module()(x), torch.nn.functional.linear(x, weight, bias))


# --- hierarchies ---------------------------------------------------------------------------------


def test_regions_nest() -> None:
    gm, n = chain()
    inner = Region("inner", [n["add"]])
    outer = Region("outer", [n["sin"], n["cos"]], children=[inner])
    done = outline(gm, [outer])
    assert [node.name for node in gm.graph.nodes] == ["x", "outer", "neg", "output"]
    module = done.regions[outer].module
    assert isinstance(module, GraphModule)
    assert [node.name for node in module.graph.nodes] == ["x", "sin", "inner", "cos", "output"]
    assert gm.get_submodule("outer.inner") is done.regions[inner].module
    assert done.regions[inner].inputs == (n["sin"],)
    assert done.regions[inner].call_node.graph is module.graph
    x = torch.randn(3)
    torch.testing.assert_close(gm(x), (x.sin() + 1).cos().neg())


def test_a_value_passes_through_every_region_on_its_way() -> None:
    gm = symbolic_trace(lambda x, y: ((x.sin() + y).cos(), y))
    n = named(gm)
    inner = Region("inner", [n["add"]])
    middle = Region("middle", [], children=[inner])
    outer = Region("outer", [n["sin"]], children=[middle])
    done = outline(gm, [outer])
    assert done.regions[outer].inputs == (n["x"], n["y"])
    assert done.regions[middle].inputs == (n["y"], n["sin"])
    assert done.regions[inner].inputs == (n["y"], n["sin"])
    assert all(done.regions[region].outputs == (n["add"],) for region in (inner, middle, outer))
    torch.testing.assert_close(
        gm(torch.ones(1), torch.ones(1))[0], (torch.ones(1).sin() + 1).cos()
    )


def test_without_in_place_the_input_stays_as_it_is() -> None:
    gm, n = chain()
    before = snapshot(gm)
    done = outline(gm, [Region("p", [n["add"], n["cos"]])], in_place=False)
    assert snapshot(gm) == before
    assert done.module is not gm
    x = torch.randn(3)
    torch.testing.assert_close(done.module(x), gm(x))


class Shell(torch.nn.Module):
    """Carries a graph out of the outliner."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.size = len(graph.nodes)
        self.held = [graph]


def test_a_bare_graph_is_outlined_with_the_callers_modules() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    sin = graph.call_function(torch.sin, (x,))
    graph.output(sin)
    region = Region("p", [sin])
    done = outline(graph, [region], in_place=False, make_module=lambda _, inner: Shell(inner))
    assert isinstance(done.module, Shell)
    assert done.module.p is done.regions[region].module
    with pytest.raises(RegionError, match="bare graph"):
        outline(graph, [region])


def test_attribute_name_lets_a_region_read_parameters_by_its_own_names() -> None:
    root = torch.nn.Module()
    root.register_buffer("block_weight", torch.full((2,), 3.0))
    graph = Graph()
    x = graph.placeholder("x")
    weight = graph.get_attr("block_weight")
    mul = graph.call_function(aten.mul.Tensor, (x, weight))
    graph.output(mul)
    gm = GraphModule(root, graph)
    region = Region("block", [mul])

    def attribute_name(region: Region | None, node: Node) -> str | None:
        return "weight" if region is not None and node.target == "block_weight" else None

    done = outline(gm, [region], attribute_name=attribute_name)
    assert done.regions[region].inputs == (x,)
    assert done.regions[region].module.get_buffer("weight") is root.block_weight
    torch.testing.assert_close(gm(torch.ones(2)), torch.full((2,), 3.0))


def test_attribute_name_takes_placeholders_out_of_the_outermost_graph() -> None:
    graph = Graph()
    unused, weight, bias = (graph.placeholder(name) for name in ("unused", "weight", "bias"))
    mul = graph.call_function(aten.mul.Tensor, (weight, bias))
    x = graph.placeholder("x")
    add = graph.call_function(aten.add.Tensor, (mul, x))
    more = graph.call_function(aten.add.Tensor, (add, bias))
    graph.output((more, weight))
    before = str(graph)
    region = Region("block", [mul])
    done = outline(
        graph,
        [region],
        in_place=False,
        attribute_name=lambda _, node: None if node is x else f"held.{node.name}",
        make_module=lambda _, inner: Shell(inner),
    )
    assert str(graph) == before
    assert done.regions[region].inputs == ()
    inner, whole = done.regions[region].module, done.module
    assert isinstance(inner, Shell)
    assert isinstance(whole, Shell)
    block, outer = inner.held[0], whole.held[0]
    assert [node.op for node in block.nodes] == ["get_attr", "get_attr", "call_function", "output"]
    # The region needs its own reads; nobody needs "unused".
    assert [node.name for node in outer.nodes if node.op == "placeholder"] == ["x"]
    reads = [node.target for node in outer.nodes if node.op == "get_attr"]
    assert reads == ["held.weight", "held.bias"]
    assert unused not in done.node_map
    for made in (block, outer):
        made.lint()


def test_children_are_left_out_for_a_caller_that_installs_its_own() -> None:
    gm, n = chain()
    region = Region("p", [n["sin"]])
    done = outline(
        gm,
        [region],
        in_place=False,
        make_module=lambda _, inner: Shell(inner),
        install_children=False,
    )
    assert not list(done.module.children())
    assert isinstance(done.regions[region].module, Shell)


def test_a_placeholder_read_by_name_needs_the_callers_modules() -> None:
    gm, n = chain()
    with pytest.raises(RegionError, match="make_module"):
        outline(gm, [Region("p", [n["sin"]])], attribute_name=lambda _, node: "weight")


def test_forced_inputs_and_outputs_come_first() -> None:
    gm = symbolic_trace(lambda x, y: (x.sin().cos(), y))
    n = named(gm)
    region = Region("p", [n["sin"], n["cos"]], inputs=[n["y"]], outputs=[n["sin"]])
    done = outline(gm, [region]).regions[region]
    assert done.inputs == (n["y"], n["x"])
    assert done.outputs == (n["sin"], n["cos"])
    torch.testing.assert_close(gm(torch.ones(1), torch.ones(1))[0], torch.ones(1).sin().cos())


def test_forced_inputs_reach_a_nested_region() -> None:
    gm = symbolic_trace(lambda x, y: (x.sin().cos(), y))
    n = named(gm)
    inner = Region("inner", [n["cos"]], inputs=[n["y"]], outputs=[n["cos"]])
    outer = Region("outer", [n["sin"]], children=[inner])
    done = outline(gm, [outer])
    assert done.regions[outer].inputs == (n["x"], n["y"])
    assert done.regions[inner].inputs == (n["y"], n["sin"])


def test_forced_inputs_and_outputs_must_be_outside_and_inside() -> None:
    gm, n = chain()
    with pytest.raises(RegionError, match="not a node outside"):
        outline(gm, [Region("p", [n["sin"]], inputs=[n["sin"]])])
    with pytest.raises(RegionError, match="not a node inside"):
        outline(gm, [Region("p", [n["sin"]], outputs=[n["x"]])])


def test_a_tree_deeper_than_the_recursion_limit() -> None:
    graph = Graph()
    value = graph.placeholder("x")
    nodes = []
    for _ in range(1500):
        value = graph.call_function(torch.neg, (value,))
        nodes.append(value)
    graph.output(value)
    gm = GraphModule(torch.nn.Module(), graph)
    region = Region("m", [nodes[-1]])
    for node in reversed(nodes[:-1]):
        region = Region("m", [node], children=[region])
    done = outline(gm, [region])
    assert len(done.regions) == 1500
    assert len(gm.graph.nodes) == 3


# --- errors --------------------------------------------------------------------------------------


def cyclic() -> tuple[GraphModule, dict[str, Node]]:
    gm = symbolic_trace(lambda x: x.sin().cos().neg().exp())
    gm(torch.ones(1))
    return gm, named(gm)


def test_a_cycle_is_shown_node_by_node() -> None:
    gm, n = cyclic()
    before = snapshot(gm)
    with pytest.raises(CycleError) as caught:
        fuse_partitions(gm, {"p": [n["sin"], n["exp"]]})
    assert caught.value.path == (n["sin"], n["cos"], n["neg"], n["exp"])
    assert caught.value.regions == ("p", None, None, "p")
    assert "sin (in 'p') -> cos -> neg -> exp (in 'p')" in str(caught.value)
    assert snapshot(gm) == before


def test_a_message_shows_both_ends_of_a_long_cycle() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = x.sin()
        return x

    gm = symbolic_trace(long)
    nodes = [node for node in gm.graph.nodes if node.op == "call_method"]
    with pytest.raises(CycleError) as caught:
        fuse_partitions(gm, {"p": [nodes[0], nodes[-1]]})
    assert caught.value.path == tuple(nodes)
    assert " -> sin_11 -> ... 6 more ... -> sin_18 -> " in str(caught.value)


def test_a_cycle_between_two_partitions_is_shown() -> None:
    gm, n = cyclic()
    before = snapshot(gm)
    with pytest.raises(CycleError) as caught:
        fuse_partitions(gm, {"p": [n["sin"], n["neg"]], "q": [n["cos"], n["exp"]]})
    assert set(caught.value.regions) == {"p", "q"}
    assert caught.value.regions[0] == caught.value.regions[-1]
    assert snapshot(gm) == before


def _error_cases() -> list[tuple[str, type[RegionError], str]]:
    return [
        ("foreign", ForeignNodeError, "another graph"),
        ("erased", ErasedNodeError, "erased"),
        ("duplicate", DuplicateNodeError, "twice"),
        ("overlap", OverlapError, "regions 'p' and 'q'"),
        ("placeholder", RegionError, "a placeholder node"),
        ("output", RegionError, "an? output node"),
        ("empty", RegionError, "is empty"),
        ("taken", NameInUseError, "still uses"),
        ("attribute", NameInUseError, "no submodule"),
        ("name", RegionError, "no attribute path"),
    ]


@pytest.mark.parametrize(("case", "error", "message"), _error_cases())
def test_each_error_has_its_own_message_and_changes_nothing(
    case: str, error: type[RegionError], message: str
) -> None:
    gm = symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    gm.register_buffer("constant", torch.ones(1))
    linear, relu = (node for node in gm.graph.nodes if node.op == "call_module")
    other = symbolic_trace(lambda x: x.sin())
    gone = gm.graph.call_function(torch.sin, (relu,))
    gm.graph.erase_node(gone)
    placeholder, output = gm.graph.find_nodes(op="placeholder")[0], gm.graph.output_node()
    partitions: dict[str, dict[str, list[Node]]] = {
        "foreign": {"p": [linear, next(iter(other.graph.nodes)).next]},
        "erased": {"p": [gone]},
        "duplicate": {"p": [relu, relu]},
        "overlap": {"p": [linear], "q": [linear]},
        "placeholder": {"p": [placeholder]},
        "output": {"p": [output]},
        "empty": {"p": []},
        "taken": {"0": [relu]},
        "attribute": {"constant": [relu]},
        "name": {"a..b": [relu]},
    }
    before = snapshot(gm)
    with pytest.raises(error, match=message):
        fuse_partitions(gm, partitions[case])
    assert snapshot(gm) == before


def test_sibling_regions_need_different_names() -> None:
    gm, n = chain()
    with pytest.raises(NameInUseError, match="sibling"):
        outline(gm, [Region("p", [n["sin"]]), Region("p", [n["neg"]])])


def test_an_inner_name_must_be_free_in_the_new_parent() -> None:
    root = torch.nn.Module()
    root.register_buffer("c", torch.ones(1))
    graph = Graph()
    read = graph.get_attr("c")
    sin = graph.call_function(torch.sin, (read,))
    graph.output(graph.call_function(torch.cos, (sin,)))
    gm = GraphModule(root, graph)
    before = snapshot(gm)
    for name in ("c", "forward", "type"):
        with pytest.raises(NameInUseError, match="beside an attribute"):
            outline(gm, [Region("outer", [read], children=[Region(name, [sin])])])
    with pytest.raises(NameInUseError, match="beside an attribute"):
        outline(gm, [Region("c", [sin])], in_place=False)
    with pytest.raises(NameInUseError, match="leads through 'c'"):
        outline(gm, [Region("c.inner", [sin])])
    assert snapshot(gm) == before


def test_an_error_of_the_callers_module_factory_changes_nothing() -> None:
    gm, n = chain()
    before = snapshot(gm)

    def refuse(region: Region | None, graph: Graph) -> torch.nn.Module:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        outline(gm, [Region("p", [n["add"]])], make_module=refuse)
    assert snapshot(gm) == before


def test_a_missing_attribute_is_found_before_anything_changes() -> None:
    root = torch.nn.Module()
    root.register_buffer("c", torch.ones(1))
    graph = Graph()
    graph.output(graph.get_attr("c"))
    gm = GraphModule(root, graph)
    read = next(iter(gm.graph.nodes))
    del gm.c
    before = [node.format_node() for node in gm.graph.nodes]
    with pytest.raises(RegionError, match="does not have"):
        fuse_partitions(gm, {"p": [read]})
    assert [node.format_node() for node in gm.graph.nodes] == before


def test_a_dotted_name_is_a_path_and_gives_right_numbers() -> None:
    gm, n = chain()
    fuse_partitions(gm, {"blocks.first": [n["add"], n["cos"]]})
    x = torch.randn(3)
    torch.testing.assert_close(gm(x), (x.sin() + 1).cos().neg())
    assert "blocks.first" in dict(gm.named_modules())


def test_an_unused_submodule_of_that_name_is_replaced() -> None:
    gm, n = chain()
    gm.add_submodule("p", torch.nn.Identity())
    fused = fuse_partitions(gm, {"p": [n["add"]]})["p"]
    assert gm.p is fused.module


# --- code ----------------------------------------------------------------------------------------


def test_code_is_generated_once_and_only_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, n = chain()
    made: list[Graph] = []
    original = Graph.python_code

    def counting(self: Graph, *args: object, **kwargs: object) -> object:
        made.append(self)
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Graph, "python_code", counting)
    fused = fuse_partitions(gm, {"p": [n["add"]], "q": [n["neg"]]})
    assert made == []
    gm(torch.ones(1))
    gm(torch.ones(1))
    assert made.count(gm.graph) == 1
    assert all(made.count(part.module.graph) == 1 for part in fused.values())


def test_generate_code_does_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, n = chain()
    fused = fuse_partitions(gm, {"p": [n["add"]]})["p"]
    generate_code(gm)
    monkeypatch.setattr(Graph, "python_code", None)
    assert "self.p" in gm.code
    assert "+ 1" in fused.module.code
    torch.testing.assert_close(gm(torch.ones(1)), (torch.ones(1).sin() + 1).cos().neg())


def test_copies_pickles_and_exports_are_whole() -> None:
    gm, n = chain()
    x = torch.randn(3)
    expected = gm(x)
    fuse_partitions(gm, {"p": [n["add"], n["cos"]]})
    clones = [copy.deepcopy(gm), copy.copy(gm), pickle.loads(pickle.dumps(gm))]
    for clone in clones:
        torch.testing.assert_close(clone(x), expected)
    assert "self.p" in gm.code
    program = torch.export.export(gm, (x,))
    torch.testing.assert_close(program.module()(x), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fused_module_compiles_in_one_graph() -> None:
    gm, n = chain()
    x = torch.randn(3)
    expected = gm(x)
    fuse_partitions(gm, {"p": [n["add"], n["cos"]]})
    compiled = torch.compile(gm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
