"""Operators that came apart and are compiled as if they were whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mask_cases import given_masks  # type: ignore[import-not-found]
from recognised_cases import (  # type: ignore[import-not-found]
    NEAR,
    WHOLE,
    WRITTEN_OUT,
    Case,
    model_of,
)
from torch.export import Dim, ExportedProgram
from xnnpack_lowering import delegates, named_data  # type: ignore[import-not-found]

from lowerdeck.lowered_module import to_backend
from lowerdeck.serializer import decode_payload
from lowerdeck.xnnpack import XnnpackPartitioner, XnnpackRuntime
from lowerdeck.xnnpack.recognise.rewriting import recognised

RUNTIME = XnnpackRuntime()


def kinds(program: ExportedProgram) -> list[str]:
    """Return the nodes of the program's only delegate."""
    (delegate,) = delegates(program)
    return [node.operator.name for node in decode_payload(delegate.processed_bytes).nodes]


def calls(program: ExportedProgram) -> list[str]:
    """Return the calls of the program, as they are compiled."""
    graph = recognised(program.graph_module, (), lambda _: True).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def left(program: ExportedProgram) -> list[str]:
    """Return the calls outside of delegates."""
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [one for one in targets if "call_delegate" not in one and "getitem" not in one]


def run(program: ExportedProgram, inputs: tuple[torch.Tensor, ...]) -> Any:
    (delegate,) = delegates(program)
    handle = RUNTIME.init(memoryview(delegate.processed_bytes), [], named_data(delegate))
    return RUNTIME.execute(handle, inputs)


@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_a_decomposed_operator_is_compiled_as_the_whole_one(case: Case) -> None:
    model, inputs = model_of(*case)
    raw = to_backend(torch.export.export(model, inputs), XnnpackPartitioner())
    torn = torch.export.export(model, inputs).run_decompositions()
    before = [node.name for node in torn.graph.nodes]
    program = to_backend(torn, XnnpackPartitioner())
    assert before == [node.name for node in torn.graph.nodes]
    assert left(program) == []
    assert sorted(kinds(program)) == sorted(kinds(raw))
    if delegates(program):  # else nothing is computed
        (found,) = run(program, inputs)
        with torch.no_grad():
            torch.testing.assert_close(found, model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "function", "shapes"), WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_an_operator_that_the_model_writes_out_is_one(op: str, function: Any, shapes: Any) -> None:
    model, inputs = model_of(function, shapes)
    for decomposed in (False, True):
        exported = torch.export.export(model, inputs)
        program = exported.run_decompositions() if decomposed else exported
        assert any(f".{op}." in call for call in calls(program))
        (found,) = run(to_backend(program, XnnpackPartitioner()), inputs)
        with torch.no_grad():
            torch.testing.assert_close(found, model(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "function", "shapes"), NEAR.values(), ids=NEAR)
def test_what_only_looks_like_an_operator_is_none(op: str, function: Any, shapes: Any) -> None:
    model, inputs = model_of(function, shapes)
    for decomposed in (False, True):
        exported = torch.export.export(model, inputs)
        program = exported.run_decompositions() if decomposed else exported
        graph = recognised(program.graph_module, (), lambda _: True).graph
        if op == "enable_gqa":
            nodes = [node for node in graph.nodes if "scaled_dot" in str(node.target)]
            assert all(True not in node.args for node in nodes)
        else:
            own = [node.target for node in program.graph.nodes]
            new = [node for node in graph.nodes if node.target not in own]
            assert not any(f".{op}." in str(node.target) for node in new)


def test_a_graph_without_pieces_is_the_programs_own() -> None:
    program = torch.export.export(torch.nn.Linear(3, 4), (torch.randn(2, 3),))
    assert recognised(program.graph_module, (), lambda _: True).graph is program.graph


def test_what_is_not_accepted_stays_in_pieces() -> None:
    model, inputs = model_of(*WHOLE["attention"])
    program = torch.export.export(model, inputs).run_decompositions()
    found = recognised(program.graph_module, (), lambda _: False)
    assert [node.name for node in found.graph.nodes] == [node.name for node in program.graph.nodes]


def test_each_node_of_the_program_has_one_that_stands_for_it() -> None:
    model, inputs = model_of(*WHOLE["attention_between_layers"])
    program = torch.export.export(model, inputs).run_decompositions()
    found = recognised(program.graph_module, (), lambda _: True)
    sources = [one for node in found.graph.nodes for one in found.sources_of(node)]
    assert sorted(one.name for one in sources) == sorted(one.name for one in program.graph.nodes)
    found.graph.lint()


@pytest.mark.parametrize("case", list(given_masks()), ids=lambda case: case.name)
def test_attention_with_a_mask_that_is_given_at_run_time_is_whole(case: Case) -> None:
    program = torch.export.export(case.model, case.inputs, dynamic_shapes=case.dynamic)
    raw = kinds(to_backend(program, XnnpackPartitioner()))
    lowered = to_backend(program.run_decompositions(), XnnpackPartitioner())
    assert left(lowered) == []
    assert sorted(kinds(lowered)) == sorted(raw)
    for inputs in (case.inputs, *case.others):
        with torch.no_grad():
            torch.testing.assert_close(run(lowered, inputs)[0], case.model(*inputs))


@pytest.mark.parametrize("name", ["linear_3d", "rms_norm", "attention"])
def test_sizes_may_be_dynamic(name: str) -> None:
    model, inputs = model_of(*WHOLE[name])
    batch = Dim("batch", min=1, max=16)
    dynamic = (tuple({0: batch} for _ in inputs),)
    exported = torch.export.export(model, inputs, dynamic_shapes=dynamic)
    raw = kinds(to_backend(exported, XnnpackPartitioner()))
    torn = torch.export.export(model, inputs, dynamic_shapes=dynamic).run_decompositions()
    program = to_backend(torn, XnnpackPartitioner())
    assert sorted(kinds(program)) == sorted(raw)
    many = tuple(torch.cat([one] * 3) for one in inputs)
    (found,) = run(program, many)
    with torch.no_grad():
        torch.testing.assert_close(found, model(*many), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes_are_recognised_too(dtype: torch.dtype) -> None:
    model, inputs = model_of(*WHOLE["linear_3d"])
    halves = tuple(one.to(dtype) for one in inputs)
    program = torch.export.export(model.to(dtype), halves).run_decompositions()
    assert "FULLY_CONNECTED" in kinds(to_backend(program, XnnpackPartitioner()))
    assert any("linear" in call for call in calls(program))
