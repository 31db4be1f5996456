"""Operators that came apart and are compiled as if they were whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recognised_cases import NEAR, WRITTEN_OUT, model_of  # type: ignore[import-not-found]
from torch.export import ExportedProgram
from xnnpack_cases import Case, cases  # type: ignore[import-not-found]
from xnnpack_lowering import labels, run, whole  # type: ignore[import-not-found]

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import DECISION, PartitionResult, to_backend
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck.xnnpack.compile import backend, decisions, partitioner
from lowerdeck.xnnpack.patterns import rewriting
from lowerdeck.xnnpack.patterns.rewriting import match_patterns

# torch's own, from copying a tree spec inside run_decompositions
pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning"),
]
# torch divides these into operators that XNNPACK lacks, or into others than the whole becomes.
OTHERWISE = (
    *("pad_circular", "whole_functions", "compose", "recurrent", "layout_shuffle"),
    *("parted_linear_relu", "parted_view", "move_after_conv", "computed_linear", "image_norms"),
    *("dynamic_two_sizes", "dynamic_speech", "dynamic_tokens_of_images", "fill_given"),
    "constant_bias",
)
WHOLE_NAMES = ("move", "pool1d")
SAME = [
    one for one in cases() if not one.name.startswith(OTHERWISE) and one.name not in WHOLE_NAMES
]
PIECES = ("elementwise", "prelu", "glu", "linear", "matmul", "pixel", "norm", "mask", "attention")
SOME = [one for one in SAME if one.name.startswith(PIECES)]
SOME += [one for one in SAME if one not in SOME][::6]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_a_decomposed_program_is_compiled_to_the_same_nodes(case: Case) -> None:
    program = torch.export.export(case.model, case.inputs, dynamic_shapes=case.dynamic)
    torn = program.run_decompositions()
    before = [node.name for node in torn.graph.nodes]
    raw, found = (whole(to_backend(one, XnnpackPartitioner())) for one in (program, torn))
    # A result that the pieces turn twice, and so not at all, is a copy.
    made, wanted = (sorted(one for one in labels(x) if one != "Copy") for x in (found, raw))
    assert made == wanted
    assert before == [node.name for node in torn.graph.nodes]


def calls(program: ExportedProgram) -> list[Any]:
    """Return the calls of the program, as they are compiled."""
    graph = match_patterns(program.graph_module, lambda _: True).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def forms(function: Any, *shapes: tuple[int, ...]) -> list[ExportedProgram]:
    """Return the program of a function as exported, and decomposed."""
    program = torch.export.export(*model_of(function, *shapes))
    return [program, program.run_decompositions()]


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_an_operator_that_the_model_writes_out_is_one(name: str) -> None:
    op, function, *shapes = WRITTEN_OUT[name]
    torch.manual_seed(0)
    model, inputs = model_of(function, *shapes)
    exported = torch.export.export(model, inputs)
    for program in (exported, exported.run_decompositions()):
        assert any(f".{op}." in str(node.target) for node in calls(program))
        (found,) = run(whole(to_backend(program, XnnpackPartitioner())), inputs)
        with torch.no_grad():
            torch.testing.assert_close(found, model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NEAR)
def test_what_only_looks_like_an_operator_is_none(name: str) -> None:
    op, function, *shapes = NEAR[name]
    for program in forms(function, *shapes):
        if op == "enable_gqa":
            nodes = [node for node in calls(program) if "scaled_dot" in str(node.target)]
            assert all(True not in node.args for node in nodes)
        else:
            own = [node.target for node in program.graph.nodes]
            new = [str(node.target) for node in calls(program) if node.target not in own]
            assert not any(f".{op}." in one for one in new)


def test_a_graph_without_pieces_is_the_programs_own() -> None:
    program = torch.export.export(torch.nn.Linear(3, 4), (torch.randn(2, 3),))
    assert match_patterns(program.graph_module, lambda _: True).graph is program.graph


def test_each_node_of_the_program_has_one_that_stands_for_it() -> None:
    _, program = forms(*WRITTEN_OUT["attention"][1:])
    names = [node.name for node in program.graph.nodes]
    found = match_patterns(program.graph_module, lambda _: True)
    sources = [one for node in found.graph.nodes for one in found.sources_of(node)]
    assert sorted(one.name for one in sources) == sorted(names)
    found.graph.lint()
    # What is not accepted stays in pieces.
    refused = match_patterns(program.graph_module, lambda _: False)
    assert [node.name for node in refused.graph.nodes] == names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_are_recognised_too(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(5, 7).to(dtype)
    exported = torch.export.export(model, (torch.randn(2, 3, 5, dtype=dtype),))
    program = exported.run_decompositions()
    assert "FullyConnected" in labels(whole(to_backend(program, XnnpackPartitioner())))
    assert any("linear" in str(node.target) for node in calls(program))


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[int]:
    """Return a list that grows at each call of a function of a module."""
    function, calls = getattr(module, name), list[int]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


class WithoutDecisions(XnnpackPartitioner):
    """As somebody else's partitioner, it leaves no decisions; it may leave a call untagged."""

    untagged = ""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        result = super().partition(exported_program)
        for node in exported_program.graph.nodes:
            if self.untagged:
                if node.name == self.untagged:
                    del node.meta["delegation_tag"]
            else:
                node.meta.pop(DECISION, None)
        return result


def _attention() -> tuple[ExportedProgram, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = model_of(*WRITTEN_OUT["attention"][1:])
    return torch.export.export(model, inputs).run_decompositions(), inputs


def test_preprocess_takes_over_what_the_partitioner_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, _ = _attention()
    expected = emit(to_backend(program, WithoutDecisions())).to_bytes()
    modules = ((decisions, "refusal"), (partitioner, "refusal"), (backend, "refusal"))
    matches, *refusals, last_refusals = (
        count_calls(monkeypatch, module, name)
        for module, name in ((rewriting, "_first_match"), *modules)
    )
    XnnpackPartitioner().partition(_attention()[0])
    tried = len(matches)
    calls = sum(node.op == "call_function" for node in program.graph.nodes)
    assert sum(map(len, refusals)) <= calls
    matches.clear()
    lowered = to_backend(program, XnnpackPartitioner())
    assert emit(lowered).to_bytes() == expected
    # In preprocess one pattern is tried for each whole call: two products, and attention.
    assert tried < len(matches) <= tried + 3
    assert not last_refusals
    to_backend(program, WithoutDecisions())
    assert last_refusals
    left = [*program.graph.nodes, *lowered.graph.nodes]
    assert not any(DECISION in node.meta for node in left)


@pytest.mark.parametrize("untagged", [0, -1])
def test_decisions_do_not_hold_for_a_part_of_a_partition(untagged: int) -> None:
    program, inputs = _attention()
    calls = [node.name for node in program.graph.nodes if node.op == "call_function"]
    changed = WithoutDecisions()
    changed.untagged = calls[untagged]
    lowered = to_backend(program, changed)
    with torch.no_grad():
        torch.testing.assert_close(lowered.module()(*inputs), program.module()(*inputs))
