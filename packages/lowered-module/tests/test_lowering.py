"""Lowering through a partitioner: results, atomicity, nested graphs, handles."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from lowerdeck.graph_fuser import CycleError
from lowerdeck.lowered_module import (
    BackendDetails,
    DelegationSpec,
    PartitionError,
    PartitionResult,
    PreprocessError,
    PreprocessResult,
    get_delegates,
    get_lowered_backend_modules,
    get_lowered_submodules,
    get_non_lowered_nodes,
    register_backend,
    tag_constant_data,
    to_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.program.graphs import computing_nodes
from lowerdeck.lowered_module.testing import (
    RunPartitioner,
    Sample,
    TaggingPartitioner,
    generated,
)
from lowerdeck.torch_base import graphs_of, is_getitem


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other.detach(), atol=1e-5, rtol=1e-5)
        else:
            assert one == other


def same_behaviour(sample: Sample, lowered: ExportedProgram, calls: int = 3) -> None:
    eager = copy.deepcopy(sample.module)
    found = lowered.module()
    with torch.no_grad():
        for _ in range(calls):
            close(found(*sample.inputs), eager(*sample.inputs))


def export(module: torch.nn.Module, *inputs: Any) -> ExportedProgram:
    program: ExportedProgram = torch.export.export(module.eval(), inputs).run_decompositions()
    return program


def snapshot(program: ExportedProgram) -> tuple[Any, ...]:
    return (
        [str(gm.graph) for gm in graphs_of(program.graph_module)],
        [sorted(node.meta) for gm in graphs_of(program.graph_module) for node in gm.graph.nodes],
        str(program.graph_signature),
        {name: value.clone() for name, value in program.state_dict.items()},
    )


def unchanged(program: ExportedProgram, before: tuple[Any, ...]) -> None:
    now = snapshot(program)
    assert now[:3] == before[:3]
    assert list(now[3]) == list(before[3])
    for name, value in before[3].items():
        assert torch.equal(now[3][name], value)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.3, 0.6, 1.0]), dynamic=st.booleans())
def test_a_lowered_program_computes_what_eager_does(
    seed: int, share: float, dynamic: bool
) -> None:
    lowered_behaves(generated(seed, 10, dynamic=dynamic, control_flow=False), seed, share)


@pytest.mark.parametrize("seed", [9, 530])
def test_a_lowered_program_with_branches_computes_what_eager_does(seed: int) -> None:
    lowered_behaves(generated(seed, 8), seed, 0.6)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(200))
def test_many_lowered_programs_compute_what_eager_does(seed: int) -> None:
    lowered_behaves(generated(seed, 16, dynamic=seed % 2 == 0), seed, 0.5)


def lowered_behaves(sample: Sample, seed: int, share: float) -> None:
    program = sample.export()
    before = snapshot(program)
    rng = random.Random(seed)
    lowered = to_backend(program, RunPartitioner(lambda _: rng.random() < share))
    unchanged(program, before)
    lowered.validate()  # type: ignore[no-untyped-call]
    same_behaviour(sample, lowered)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_random_groups_are_lowered_or_refused_with_the_path(seed: int) -> None:
    sample = generated(seed, 8, control_flow=False)
    program = sample.export()
    before = snapshot(program)
    rng = random.Random(seed)
    partitioner = TaggingPartitioner(lambda _: rng.choice([None, "a", "b"]))
    try:
        lowered = to_backend(program, partitioner)
    except CycleError as error:
        path = str(error)
        assert "is partition 'a'" in path or "is partition 'b'" in path
        event("refused")
    else:
        path = "->"
        same_behaviour(sample, lowered)
    assert "->" in path
    unchanged(program, before)


def test_a_lowered_program_can_be_exported_again() -> None:
    # Static sizes: torch's operator cannot trace a call that is given a symbolic number.
    sample = generated(5, 10, state=False)
    lowered = to_backend(
        sample.export(), RunPartitioner(lambda node: "sin" not in str(node.target))
    )
    again = torch.export.export(
        lowered.module(), sample.inputs, dynamic_shapes=sample.dynamic_shapes
    )
    assert len(get_delegates(again.graph)) == len(get_delegates(lowered.graph)) > 0
    same_behaviour(sample, again.run_decompositions())


def test_dotted_and_odd_tags_are_only_names() -> None:
    program = export(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid()), torch.ones(2))
    tags = {"aten.relu.default": "a.b", "aten.sigmoid.default": "0 / ?"}
    lowered = to_backend(program, TaggingPartitioner(lambda node: tags.get(str(node.target))))
    assert torch.equal(lowered.module()(torch.ones(2)), torch.ones(2).sigmoid())
    assert len(get_delegates(lowered.graph)) == 2


def test_an_input_called_input_keeps_its_name() -> None:
    program = torch.export.export(torch.nn.Sequential(torch.nn.ReLU()), (torch.ones(2),))
    assert program.graph_signature.user_inputs == ("input",)
    lowered = to_backend(program, TaggingPartitioner(lambda _: "all"))
    assert lowered.graph_signature.user_inputs == ("input",)


class Wide(torch.nn.Module):
    """Several branches whose order matters for memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for _ in range(4):
            total = total + torch.tan(x.exp()).sum()
        return total


def test_what_is_left_alone_is_not_reordered() -> None:
    program = export(Wide(), torch.ones(3))
    tags = {"tan_2": "only"}
    lowered = to_backend(program, TaggingPartitioner(lambda node: tags.get(node.name)))
    kept = [node.name for node in get_non_lowered_nodes(lowered.graph)]
    assert kept == [
        node.name for node in computing_nodes(program.graph_module) if node.name != "tan_2"
    ]


def test_inputs_and_outputs_come_in_the_order_of_the_program() -> None:
    class Model(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            first, second = b.sin(), a.cos()
            return second + first, first, second

    lowered = to_backend(
        export(Model(), torch.ones(2), torch.zeros(2)), TaggingPartitioner(lambda _: "all")
    )
    ((_, delegate, call),) = get_lowered_submodules(lowered.graph_module)
    assert [str(arg) for arg in call.args[1:]] == ["a", "b"]
    signature = delegate.original_module.graph_signature
    assert list(signature.user_inputs) == ["a", "b"]
    assert list(signature.user_outputs) == ["sin", "cos", "add"]


def test_a_dead_partition_is_left_alone() -> None:
    program = export(Wide(), torch.ones(3))
    node = next(node for node in program.graph.nodes if node.name == "tan")
    with program.graph.inserting_after(node):
        dead = program.graph.call_function(torch.ops.aten.sin.default, (node,))
    dead.meta = {"val": node.meta["val"]}
    tags = {dead.name: "dead"}
    lowered = to_backend(program, TaggingPartitioner(lambda node: tags.get(node.name)))
    assert get_delegates(lowered.graph) == []


def test_a_list_is_opened_at_the_border() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = torch.chunk(x, 2)
            return torch.cat([second, first]).sin()

    program = export(Model(), torch.arange(4.0))
    for wanted in ("split", "cat", "getitem", "sin"):
        lowered = to_backend(
            program,
            TaggingPartitioner(lambda node, w=wanted: "t" if w in node.name else None),  # type: ignore[misc]
        )
        close(lowered.module()(torch.arange(4.0)), Model()(torch.arange(4.0)))


@pytest.mark.parametrize("kind", ["cond", "while_loop", "map", "scan"])
def test_nested_graphs_are_lowered(kind: str) -> None:
    program, inputs = NESTED[kind]()
    lowered = to_backend(program, RunPartitioner(lambda node: "sin" in str(node.target)))
    inner = list(graphs_of(lowered.graph_module))[1:]
    assert sum(len(get_delegates(gm.graph)) for gm in inner) > 0
    close(lowered.module()(*inputs), program.module()(*inputs))
    for gm in graphs_of(lowered.graph_module):
        assert not any("delegation_tag" in node.meta for node in gm.graph.nodes)


@pytest.mark.parametrize("kind", ["cond", "while_loop", "map", "scan"])
def test_control_flow_goes_into_a_partition_with_its_graphs(kind: str) -> None:
    program, inputs = NESTED[kind]()
    lowered = to_backend(program, TaggingPartitioner(lambda _: "all"))
    assert get_non_lowered_nodes(lowered.graph) == []
    close(lowered.module()(*inputs), program.module()(*inputs))


def test_an_earlier_delegate_goes_into_a_later_partition() -> None:
    program = export(Wide(), torch.ones(3))
    once = to_backend(program, RunPartitioner(lambda node: "tan" in str(node.target)))
    twice = to_backend(once, TaggingPartitioner(lambda _: "all"))
    ((_, outer, _),) = get_lowered_submodules(twice.graph_module)
    assert len(get_delegates(outer.original_module.graph)) == 4
    close(twice.module()(torch.ones(3)), Wide()(torch.ones(3)))


def test_debug_handles_are_unique_across_the_program() -> None:
    program, _ = nested_cond()
    lowered = to_backend(program, RunPartitioner(lambda node: "sin" in str(node.target)))
    handles = [
        node.meta["debug_handle"]
        for gm in graphs_of(lowered.graph_module)
        for node in gm.graph.nodes
        if node.op == "call_function" and not is_getitem(node)
    ]
    for gm in graphs_of(lowered.graph_module):
        for _, delegate, _ in get_lowered_submodules(gm):
            assert delegate.meta["debug_handle_map"] is not None
            inner = delegate.original_module.graph.nodes
            handles += [n.meta["debug_handle"] for n in inner if n.op == "call_function"]
    assert len(handles) == len(set(handles))


def test_handles_of_delegates_in_delegates_are_their_own() -> None:
    @register_backend
    class Nests(BackendDetails):
        @staticmethod
        def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
            inner = to_backend(edge_program, RunPartitioner(lambda n: "tan" in str(n.target)))
            calls = [call for _, _, call in get_lowered_submodules(inner.graph_module)]
            return PreprocessResult(b"", {0: tuple(c.meta["debug_handle"] for c in calls)})

    program = export(Wide(), torch.ones(3))
    try:
        lowered = to_backend(
            program, RunPartitioner(lambda n: "sum" not in str(n.target), backend_id="Nests")
        )
    finally:
        unregister_backend("Nests")
    found = [m for _, m, _ in get_lowered_submodules(lowered.graph_module)]
    handles = [h for m in found for h in m.meta["debug_handle_map"].get(0, ())]
    for graph in (lowered.graph, *(m.original_module.graph for m in found)):
        handles += [n.meta["debug_handle"] for n in graph.nodes if "debug_handle" in n.meta]
    assert len(found) > 1
    assert len(handles) == len(set(handles))


def test_debug_handles_that_are_there_are_kept() -> None:
    program = export(Wide(), torch.ones(3))
    for index, node in enumerate(program.graph.nodes):
        node.meta["debug_handle"] = 1000 + index
    lowered = to_backend(program, TaggingPartitioner(lambda _: "all"))
    ((_, delegate, call),) = get_lowered_submodules(lowered.graph_module)
    names = {node.name: node.meta["debug_handle"] for node in program.graph.nodes}
    for node in delegate.original_module.graph.nodes:
        if node.op == "call_function":
            assert node.meta["debug_handle"] == names[node.name]
    assert call.meta["debug_handle"] == 1000 + len(names)


def test_a_failing_backend_changes_nothing_and_names_partition_and_source() -> None:
    @register_backend
    class Fails(BackendDetails):
        @staticmethod
        def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
            for value in edge_program.state_dict.values():
                value.data.zero_()
            edge_program.graph.erase_node(edge_program.graph.output_node())
            raise ValueError("no such instruction")

    sample = generated(3, 8, control_flow=False)
    program = sample.export()
    before = snapshot(program)
    try:
        with pytest.raises(PreprocessError, match="no such instruction") as caught:
            to_backend(program, TaggingPartitioner(lambda _: "here", backend_id="Fails"))
    finally:
        unregister_backend("Fails")
    assert "'here'" in str(caught.value)
    assert "programs.py" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    unchanged(program, before)


def test_a_backend_may_change_its_program_and_weights() -> None:
    @register_backend
    class Scribbles(BackendDetails):
        @staticmethod
        def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
            for value in edge_program.state_dict.values():
                value.data.fill_(7.0)
            for node in list(edge_program.graph.nodes)[::-1]:
                edge_program.graph.erase_node(node)
            return PreprocessResult(b"")

    sample = generated(4, 8)
    program = sample.export()
    before = snapshot(program)
    try:
        lowered = to_backend(program, TaggingPartitioner(lambda _: "t", backend_id="Scribbles"))
    finally:
        unregister_backend("Scribbles")
    unchanged(program, before)
    same_behaviour(sample, lowered)


EDITS: dict[str, Callable[[ExportedProgram, Node], Any]] = {
    "a literal": lambda _, node: node.update_arg(1, 3.0),
    "a keyword": lambda _, node: node.update_kwarg("alpha", 2),
    "the operator": lambda _, node: setattr(node, "target", torch.ops.aten.sub.Tensor),
    "a new node": lambda ep, node: ep.graph.call_function(torch.ops.aten.sin.default, (node,)),
    "the output": lambda ep, node: ep.graph.output_node().update_arg(0, (node.args[0],)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_by_a_partitioner_is_caught(edit: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 2.0

    def partition(program: ExportedProgram) -> PartitionResult:
        node = next(node for node in program.graph.nodes if node.op == "call_function")
        with program.graph.inserting_after(node):
            EDITS[edit](program, node)
        return PartitionResult(program, {})

    program = export(Model(), torch.ones(2))
    before = snapshot(program)
    with pytest.raises(PartitionError, match="changed the graph"):
        to_backend(program, partition)
    unchanged(program, before)


@pytest.mark.parametrize(
    ("result", "message"),
    [(None, "NoneType"), (PartitionResult(None, {}), "NoneType")],  # type: ignore[arg-type]
)
def test_a_partitioner_must_return_a_result(result: Any, message: str) -> None:
    program = export(Wide(), torch.ones(3))
    with pytest.raises(PartitionError, match=message):
        to_backend(program, lambda _: result)


@pytest.mark.parametrize("op", ["placeholder", "output"])
def test_inputs_and_outputs_cannot_be_tagged(op: str) -> None:
    def partition(program: ExportedProgram) -> PartitionResult:
        next(n for n in program.graph.nodes if n.op == op).meta["delegation_tag"] = "t"
        return PartitionResult(program, {"t": DelegationSpec("VerbatimBackend", [])})

    with pytest.raises(PartitionError, match=r"should not be tagged.* tag(ged)? 't'"):
        to_backend(export(Wide(), torch.ones(3)), partition)


def test_tags_that_name_no_backend_are_said() -> None:
    """A tag left out of the result by mistake would lower nothing, and nobody would know."""

    def partition(program: ExportedProgram) -> PartitionResult:
        for node in computing_nodes(program.graph_module):
            node.meta.setdefault("delegation_tag", "mistyped")
        return PartitionResult(program, {"t": DelegationSpec("VerbatimBackend", [])})

    program = export(Wide(), torch.ones(3))
    first = next(computing_nodes(program.graph_module))
    with pytest.warns(UserWarning, match=rf"tagged 'mistyped' \({first.name}"):
        lowered = to_backend(program, partition)
    assert not get_delegates(lowered.graph)
    # What an earlier partitioner left is not this one's fault.
    for node in computing_nodes(program.graph_module):
        node.meta["delegation_tag"] = "old"
    to_backend(program, partition)


def test_classes_written_for_another_library_serve_unchanged() -> None:
    class Spec:
        key, value = "k", b"v"

    class Where:
        backend_id, compile_specs = "Foreign", [Spec()]

    class Outcome:
        def __init__(self, program: ExportedProgram) -> None:
            self.tagged_exported_program = program
            self.partition_tags = {"t": Where()}

    class Result:
        processed_bytes, debug_handle_map, data_store_output = b"blob", {0: (1,)}, None
        _delegate_info_meta = "anything"

    class Foreign:
        @staticmethod
        def preprocess(program: ExportedProgram, specs: Any) -> Result:
            assert specs[0].key == "k"
            return Result()

    class Chooser:
        def __call__(self, program: ExportedProgram) -> Outcome:
            for node in program.graph.nodes:
                if node.op == "call_function":
                    node.meta["delegation_tag"] = "t"
            tag_constant_data(program)
            return Outcome(program)

    register_backend(Foreign)
    try:
        lowered = to_backend(export(torch.nn.Linear(2, 2), torch.ones(1, 2)), Chooser())
    finally:
        unregister_backend("Foreign")
    ((_, delegate, _),) = get_lowered_submodules(lowered.graph_module)
    assert delegate.processed_bytes == b"blob"
    assert delegate.meta["_delegate_info_meta"] == "anything"


def test_nothing_is_kept_alive_afterwards() -> None:
    program = export(torch.nn.Linear(64, 64), torch.ones(1, 64))
    weight = weakref.ref(program.state_dict["weight"])
    lowered = to_backend(program, TaggingPartitioner(lambda _: "t"))
    lowered.module()(torch.ones(1, 64))
    del lowered, program
    gc.collect()
    assert weight() is None


def nested_cond() -> tuple[ExportedProgram, tuple[Any, ...]]:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(
                x.sum() > 0, lambda x: (x.sin() * 2).sin(), lambda x: x.sin() + 1, (x,)
            )

    return export(Model(), torch.ones(3)), (torch.ones(3),)


def nested_while() -> tuple[ExportedProgram, tuple[Any, ...]]:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch._higher_order_ops.while_loop(  # type: ignore[no-untyped-call]
                lambda i, x: i < 3, lambda i, x: (i + 1, x.sin() + 1), (torch.tensor(0), x)
            )

    return export(Model(), torch.ones(3)), (torch.ones(3),)


def nested_map() -> tuple[ExportedProgram, tuple[Any, ...]]:
    from functorch.experimental.control_flow import (  # type: ignore[import-untyped]
        map as map_over,
    )

    class Model(torch.nn.Module):
        def forward(self, xs: torch.Tensor, y: torch.Tensor) -> Any:
            return map_over(lambda x, y: x.sin() + y, xs, y)

    inputs = (torch.ones(2, 3), torch.ones(3))
    return export(Model(), *inputs), inputs


def nested_scan() -> tuple[ExportedProgram, tuple[Any, ...]]:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, xs: torch.Tensor) -> Any:
            return torch._higher_order_ops.scan(
                lambda c, x: (c + x.sin(), (c * 2).sin()), x, xs, dim=0
            )

    inputs = (torch.ones(3), torch.ones(2, 3))
    return export(Model(), *inputs), inputs


NESTED = {"cond": nested_cond, "while_loop": nested_while, "map": nested_map, "scan": nested_scan}


def test_numbers_never_leave_a_partition() -> None:
    class Sizes(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            both = torch.cat([x, y])
            rows = both.shape[0] * 2 - x.shape[0]
            return both.sin().reshape(-1), torch.ones(rows, 3) + 1, both.new_zeros(both.shape[0])

    inputs = (torch.randn(4, 3), torch.randn(5, 3))
    rows = ({0: torch.export.Dim("n", max=8)}, {0: torch.export.Dim("m", max=8)})
    program = torch.export.export(Sizes(), inputs, dynamic_shapes=rows)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    alone: list[dict[str, str]] = [{node.name: "t"} for node in nodes]
    apart = {node.name: f"t{number}" for number, node in enumerate(nodes)}
    together = {node.name: "t" for node in nodes}
    for tags in (*alone, apart, together):
        lowered = to_backend(program, TaggingPartitioner(tag_by_name(tags)))
        for delegate in get_lowered_backend_modules(lowered.graph_module):
            for value in delegate.original_module.graph.output_node().args[0]:
                assert isinstance(value.meta["val"], torch.Tensor)
        for values in (inputs, (torch.randn(3, 3), torch.randn(2, 3))):
            close(lowered.module()(*values), Sizes()(*values))


def tag_by_name(tags: dict[str, str]) -> Callable[[Node], str | None]:
    return lambda node: tags.get(node.name)
