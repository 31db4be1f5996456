"""Delegates from lowering to the runner: profiles and comparisons reach into them."""

import torch

from lowerdeck.demo_backends import BackendWithDelegateMappingDemo, DelegateMappingDemoPartitioner
from lowerdeck.emitter import EmittedProgram, emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import compare, load

MODEL, INPUTS = BackendWithDelegateMappingDemo.get_test_model_and_inputs()


def lowered() -> EmittedProgram:
    exported = torch.export.export(MODEL, INPUTS)
    return emit(to_backend(exported, DelegateMappingDemoPartitioner()))


def test_each_part_of_a_delegate_has_its_line_of_the_user_s_code() -> None:
    emitted = lowered()
    profile = load(emitted.to_bytes(), debug=emitted).run("forward", *INPUTS, profile=True)
    inside = [event for event in profile.events if event.identifier is not None]
    assert [event.place.operator for event in inside] == [
        "aten.relu.default",
        "aten.relu.default",
        *["aten.tan.default"] * 3,
    ]
    assert [event.place.module_path for event in inside[:2]] == ["conv1", "conv2"]
    assert all(", in forward" in event.place.source_line for event in inside)
    torch.testing.assert_close(profile.result, MODEL(*INPUTS))


def test_comparison_matches_parts_of_a_delegate_with_eager() -> None:
    emitted = lowered()
    for memory in ("strict", "poison"):
        program = load(emitted.to_bytes(), debug=emitted, memory=memory)
        for eager in (MODEL, torch.export.export(MODEL, INPUTS)):
            comparison = compare(program, eager, INPUTS)
            assert comparison.first is None, comparison
            assert comparison.compared >= 4


def test_comparison_finds_the_part_of_a_delegate_that_differs() -> None:
    other, _ = BackendWithDelegateMappingDemo.get_test_model_and_inputs()
    with torch.no_grad():
        other.get_parameter("conv2.weight").mul_(1.5)
    emitted = lowered()
    program = load(emitted.to_bytes(), debug=emitted)
    for eager in (other, torch.export.export(other, INPUTS)):
        first = compare(program, eager, INPUTS).first
        assert first is not None
        assert first.name == "BackendWithDelegateMappingDemo[0]/1"
        assert "conv2" in str(first)
