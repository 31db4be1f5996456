"""Lowering through a partitioner: results, atomicity, nested graphs, handles."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered_helpers import (
    assert_behaves,
    backend,
    by_name,
    calls_of,
    core,
    delegates,
    everything,
    runs_of,
    runs_without,
)
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from lowerdeck.graph_fuser import CycleError
from lowerdeck.lowered_module import (
    DelegationSpec,
    MethodProgramsPartitionerSpec,
    PartitionError,
    PartitionResult,
    PreprocessError,
    get_delegates,
    get_lowered_submodules,
    get_non_lowered_nodes,
    to_backend,
)
from lowerdeck.lowered_module.testing import RunPartitioner, TaggingPartitioner, generated
from lowerdeck.torch_base import graphs_of, is_getitem
from lowerdeck_zoo import Of, exported
from lowerdeck_zoo.seeds import seeds


def snapshot(program: ExportedProgram) -> tuple[Any, ...]:
    return (
        [str(gm.graph) for gm in graphs_of(program.graph_module)],
        [sorted(node.meta) for gm in graphs_of(program.graph_module) for node in gm.graph.nodes],
        str(program.graph_signature),
        {name: value.tolist() for name, value in program.state_dict.items()},
    )


# Seeds 9 and 530 branch.
@pytest.mark.parametrize("seed", [9, 530, *seeds(30), *seeds(30, first=1000)])
def test_a_lowered_program_computes_what_eager_does(seed: int) -> None:
    branches = seed in (9, 530)
    dynamic = seed % 2 == 0 and not branches
    sample = generated(seed, 8 if branches else 10, dynamic=dynamic, control_flow=branches)
    program = sample.export()
    before, draw = snapshot(program), random.Random(seed)
    share = draw.choice([0.3, 0.6, 1.0])
    lowered = to_backend(program, RunPartitioner(lambda _: draw.random() < share))
    assert snapshot(program) == before
    lowered.validate()  # type: ignore[no-untyped-call]
    assert_behaves(lowered, sample.module, *sample.inputs)


@pytest.mark.parametrize("seed", seeds(40))
def test_random_groups_are_lowered_or_refused_with_the_path(seed: int) -> None:
    sample = generated(seed, 8, control_flow=False)
    program = sample.export()
    before, draw = snapshot(program), random.Random(seed)
    try:
        lowered = to_backend(program, TaggingPartitioner(lambda _: draw.choice([None, "a", "b"])))
    except CycleError as error:
        path = str(error)
    else:
        path = "-> is partition 'a'"
        assert_behaves(lowered, sample.module, *sample.inputs)
    assert "->" in path
    assert "is partition 'a'" in path or "is partition 'b'" in path
    assert snapshot(program) == before


def test_a_lowered_program_can_be_exported_again() -> None:
    # Static sizes: torch's operator cannot trace a call that is given a symbolic number.
    sample = generated(5, 10, state=False)
    lowered = to_backend(sample.export(), runs_without("sin"))
    again = torch.export.export(lowered.module(), sample.inputs)
    assert len(get_delegates(again.graph)) == len(get_delegates(lowered.graph)) > 0
    assert_behaves(again.run_decompositions(), sample.module, *sample.inputs)


def test_tags_and_inputs_may_have_odd_names() -> None:
    program = exported(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Sigmoid()), torch.ones(2))
    lowered = to_backend(program, by_name({"relu": "a.b", "sigmoid": "0 / ?"}))
    assert torch.equal(lowered.module()(torch.ones(2)), torch.ones(2).sigmoid())
    assert len(get_delegates(lowered.graph)) == 2
    assert lowered.graph_signature.user_inputs == ("input",)


class Wide(torch.nn.Module):
    """Several branches whose order matters for memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for _ in range(4):
            total = total + torch.tan(x.exp()).sum()
        return total


def test_what_is_left_alone_is_not_reordered() -> None:
    program = core(Wide(), torch.ones(3))
    lowered = to_backend(program, by_name({"tan_2": "only"}))
    left = [node.name for node in get_non_lowered_nodes(lowered.graph)]
    assert left == [node.name for node in calls_of(program) if node.name != "tan_2"]


def test_inputs_and_outputs_come_in_the_order_of_the_program() -> None:
    def swapped(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = b.sin(), a.cos()
        return second + first, first, second

    program = core(Of(swapped), torch.ones(2), torch.zeros(2))
    inputs = list(program.graph_signature.user_inputs)
    lowered = to_backend(program, everything())
    ((_, delegate, call),) = get_lowered_submodules(lowered.graph_module)
    signature = delegate.original_module.graph_signature
    assert [str(arg) for arg in call.args[1:]] == list(signature.user_inputs) == inputs
    assert list(signature.user_outputs) == ["sin", "cos", "add"]


def test_a_dead_partition_is_left_alone() -> None:
    program = core(Wide(), torch.ones(3))
    node = next(node for node in program.graph.nodes if node.name == "tan")
    with program.graph.inserting_after(node):
        dead = program.graph.call_function(torch.ops.aten.sin.default, (node,))
    dead.meta = {"val": node.meta["val"]}
    assert get_delegates(to_backend(program, by_name({dead.name: "dead"})).graph) == []


@pytest.mark.parametrize("word", ["split", "cat", "getitem", "sin"])
def test_a_list_is_opened_at_the_border(word: str) -> None:
    model = Of(lambda x: torch.cat(torch.chunk(x, 2)[::-1]).sin())
    chosen = TaggingPartitioner(lambda node: "t" if word in node.name else None)
    assert_behaves(to_backend(core(model, torch.arange(4.0)), chosen), model, torch.arange(4.0))


def _cond(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x.sin() * 2).sin(), lambda x: x.sin() + 1, (x,))


def _while(x: torch.Tensor) -> Any:
    return torch._higher_order_ops.while_loop(  # type: ignore[no-untyped-call]
        lambda i, x: i < 3, lambda i, x: (i + 1, x.sin() + 1), (torch.tensor(0), x)
    )


def _map(x: torch.Tensor) -> Any:
    over: Any = torch._higher_order_ops.map
    return over(lambda x, y: x.sin() + y, torch.stack([x, x]), x)


def _scan(x: torch.Tensor) -> Any:
    rows = torch.stack([x, x])
    return torch._higher_order_ops.scan(lambda c, x: (c + x.sin(), (c * 2).sin()), x, rows, dim=0)


@pytest.mark.parametrize("function", [_cond, _while, _map, _scan])
def test_nested_graphs_are_lowered_and_go_into_partitions(function: Any) -> None:
    x = torch.ones(3)
    program = core(Of(function), x)
    lowered = to_backend(program, runs_of("sin"))
    graphs = list(graphs_of(lowered.graph_module))
    assert sum(len(get_delegates(gm.graph)) for gm in graphs[1:]) > 0
    assert not any("delegation_tag" in node.meta for gm in graphs for node in gm.graph.nodes)
    assert_behaves(lowered, Of(function), x, calls=1)
    whole = to_backend(program, everything())
    assert get_non_lowered_nodes(whole.graph) == []
    assert_behaves(whole, Of(function), x, calls=1)


def test_an_earlier_delegate_goes_into_a_later_partition() -> None:
    once = to_backend(core(Wide(), torch.ones(3)), runs_of("tan"))
    twice = to_backend(once, everything())
    (outer,) = delegates(twice)
    assert len(get_delegates(outer.original_module.graph)) == 4
    assert_behaves(twice, Wide(), torch.ones(3))


def handles_in(program: ExportedProgram) -> list[int]:
    """Return the debug handles of all calls, those in nested graphs and delegates too."""
    handles = []
    for gm in graphs_of(program.graph_module):
        calls = [n for n in gm.graph.nodes if n.op == "call_function" and not is_getitem(n)]
        handles += [node.meta["debug_handle"] for node in calls]
        for _, delegate, _ in get_lowered_submodules(gm):
            assert delegate.meta["debug_handle_map"] is not None
            handles += handles_in(delegate.original_module)
    return handles


def test_debug_handles_are_unique_across_the_program() -> None:
    handles = handles_in(to_backend(core(Of(_cond), torch.ones(3)), runs_of("sin")))
    assert len(handles) == len(set(handles)) > 4


def test_debug_handles_that_are_there_are_kept() -> None:
    program = core(Wide(), torch.ones(3))
    for index, node in enumerate(program.graph.nodes):
        node.meta["debug_handle"] = 1000 + index
    names = {node.name: node.meta["debug_handle"] for node in program.graph.nodes}
    lowered = to_backend(program, everything())
    ((_, delegate, call),) = get_lowered_submodules(lowered.graph_module)
    for node in calls_of(delegate.original_module):
        assert node.meta["debug_handle"] == names[node.name]
    assert call.meta["debug_handle"] == 1000 + len(names)


@pytest.mark.parametrize("fails", [False, True])
def test_a_backend_may_change_its_program_and_weights_and_fail(fails: bool) -> None:
    def scribble(program: ExportedProgram, specs: Any) -> bytes:
        for value in program.state_dict.values():
            value.data.fill_(7.0)
        for node in list(program.graph.nodes)[::-1]:
            program.graph.erase_node(node)
        if fails:
            raise ValueError("no such instruction")
        return b""

    sample = generated(4, 8)
    program = sample.export()
    before = snapshot(program)
    with backend(scribble):
        if fails:
            with pytest.raises(PreprocessError, match="no such instruction") as caught:
                to_backend(program, everything("Custom"))
            assert "'all'" in str(caught.value)
            assert "programs.py" in str(caught.value)
            assert isinstance(caught.value.__cause__, ValueError)
        else:
            lowered = to_backend(program, everything("Custom"))
            assert_behaves(lowered, sample.module, *sample.inputs)
    assert snapshot(program) == before


EDITS: dict[str, Callable[[ExportedProgram, Node], Any]] = {
    "a literal": lambda _, node: node.update_arg(1, 3.0),
    "a keyword": lambda _, node: node.update_kwarg("alpha", 2),
    "the operator": lambda _, node: setattr(node, "target", torch.ops.aten.sub.Tensor),
    "a new node": lambda ep, node: ep.graph.call_function(torch.ops.aten.sin.default, (node,)),
    "the output": lambda ep, node: ep.graph.output_node().update_arg(0, (node.args[0],)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_by_a_partitioner_is_caught(edit: str) -> None:
    def partition(program: ExportedProgram) -> PartitionResult:
        node = calls_of(program)[0]
        with program.graph.inserting_after(node):
            EDITS[edit](program, node)
        return PartitionResult(program, {})

    program = core(Of(lambda x: x + 2.0), torch.ones(2))
    before = snapshot(program)
    with pytest.raises(PartitionError, match="changed the graph"):
        to_backend(program, partition)
    assert snapshot(program) == before


def tags_of(op: str, tag: str) -> Callable[[ExportedProgram], PartitionResult]:
    """Return a partitioner that tags all nodes of a kind, and declares the tag ``t``."""

    def partition(program: ExportedProgram) -> PartitionResult:
        for node in program.graph.nodes:
            if node.op == op:
                node.meta.setdefault("delegation_tag", tag)
        return PartitionResult(program, {"t": DelegationSpec("VerbatimBackend", [])})

    return partition


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (lambda _: None, "NoneType"),
        (lambda _: PartitionResult(None, {}), "NoneType"),  # type: ignore[arg-type]
        (tags_of("placeholder", "t"), r"should not be tagged.* tag(ged)? 't'"),
        (tags_of("output", "t"), r"should not be tagged.* tag(ged)? 't'"),
    ],
)
def test_a_partitioners_result_is_checked(partition: Any, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        to_backend(core(Wide(), torch.ones(3)), partition)


def test_nothing_is_kept_alive_afterwards() -> None:
    program = core(torch.nn.Linear(64, 64), torch.ones(1, 64))
    weight = weakref.ref(program.state_dict["weight"])
    lowered = to_backend(program, everything())
    lowered.module()(torch.ones(1, 64))
    del lowered, program
    gc.collect()
    assert weight() is None


class Sizes(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([x, y])
        rows = both.shape[0] * 2 - x.shape[0]
        return both.sin().reshape(-1), torch.ones(rows, 3) + 1, both.new_zeros(both.shape[0])


def test_numbers_never_leave_a_partition() -> None:
    inputs = (torch.randn(4, 3), torch.randn(5, 3))
    rows = ({0: Dim("n", max=8)}, {0: Dim("m", max=8)})
    program = exported(Sizes(), *inputs, dynamic_shapes=rows)
    names = [node.name for node in calls_of(program)]
    alone: list[dict[str, str]] = [{name: "t"} for name in names]
    apart = {name: f"t{number}" for number, name in enumerate(names)}
    for tags in (*alone, apart, dict.fromkeys(names, "t")):
        lowered = to_backend(program, by_name(tags))
        for delegate in delegates(lowered):
            for value in delegate.original_module.graph.output_node().args[0]:
                assert isinstance(value.meta["val"], torch.Tensor)
        for values in (inputs, (torch.randn(3, 3), torch.randn(2, 3))):
            assert_behaves(lowered, Sizes(), *values, calls=1)


class Distances(torch.nn.Module):
    """Adds a bias for each pair of positions, by their distance as T5 groups them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Embedding(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0])
        far = (places[None] - places[:, None]).abs()
        group = torch.where(far < 3, far, 3 + (far / 3).log().long().clamp(max=2))
        bias: torch.Tensor = self.bias(group)
        return bias + x[:, None]


class Halves(Distances):
    """Halves the bias of its parent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bias.weight.mul_(0.5)
        return x + 1


@pytest.mark.parametrize("is_changed", [False, True])
def test_functions_of_distances_are_tables_unless_a_method_changes_the_weight(
    is_changed: bool,
) -> None:
    model, other = Distances(), Halves().requires_grad_(False)
    other.bias = model.requires_grad_(False).bias
    x = torch.randn(5, 2)
    rows = ({0: Dim("n", min=1, max=16)},)
    programs = {"forward": exported(model, x, dynamic_shapes=rows)}
    if is_changed:
        programs["halve"] = exported(other, x)
    nothing = dict.fromkeys(programs, by_name({}))
    lowered = to_backend(MethodProgramsPartitionerSpec(programs, nothing))["forward"]
    computes = any("log" in str(node.target) for node in lowered.graph.nodes)
    assert computes == is_changed
    for size in (1, 5, 16):
        assert_behaves(lowered, model, torch.randn(size, 2), calls=1)
