"""Each setting of exir's means something, warns, or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.emitter import EmitterError, Place, PlanRequest, one_memory
from lowerdeck.exir_compat import (
    EdgeProgramManager,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
    ExirCompatError,
    MemoryPlanningPass,
    SettingError,
    SettingWarning,
    to_edge,
    to_edge_transform_and_lower,
)
from lowerdeck.serializer import open_pte
from lowerdeck_zoo import Of

HONOURED = {
    *("passes", "memory_planning_pass", "emit_stacktrace", "extract_delegate_segments"),
    *("segment_alignment", "constant_tensor_alignment", "delegate_alignment"),
    *("external_constants", "emit_mutable_buffer_names", "do_quant_fusion_and_const_prop"),
}
OTHERS = [one.name for one in dataclasses.fields(ExecutorchBackendConfig)]
OTHERS = sorted({*OTHERS} - HONOURED)


def settings(name: str, value: Any) -> ExecutorchBackendConfig:
    return ExecutorchBackendConfig(**{name: value})


@pytest.mark.parametrize("name", OTHERS)
def test_a_field_that_is_not_honoured_warns(exported: ExportedProgram, name: str) -> None:
    value = not getattr(ExecutorchBackendConfig(), name)
    with pytest.warns(SettingWarning, match=f"{name} is ignored"):
        made = to_edge(exported).to_executorch(settings(name, value))
    assert made.buffer == to_edge(exported).to_executorch().buffer


def test_exirs_own_pass_needs_exir(exported: ExportedProgram) -> None:
    with pytest.raises(SettingError, match=r"needs executorch\.exir"):
        to_edge(exported).to_executorch(settings("do_quant_fusion_and_const_prop", True))


def test_files_of_weights_are_chosen(exported: ExportedProgram, tmp_path: Path) -> None:
    config = settings("external_constants", lambda node: "w" if "weight" in node.name else None)
    made = to_edge(exported).to_executorch(config)
    made.write_tensor_data_to_file(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["w.ptd"]


def test_files_are_laid_out_and_traced_as_asked(exported: ExportedProgram, tmp_path: Path) -> None:
    plain = to_edge(exported).to_executorch()
    config = ExecutorchBackendConfig(segment_alignment=4096, emit_stacktrace=True)
    wide = to_edge(exported).to_executorch(config)
    wide.save(tmp_path / "wide.pte")
    with open_pte(tmp_path / "wide.pte") as file:
        assert file.header is not None
        assert file.header.segment_base_offset % 4096 == 0
    assert len(wide.buffer) > len(plain.buffer)
    assert wide.executorch_program.execution_plan[0].chains[0].stacktrace
    assert not plain.executorch_program.execution_plan[0].chains[0].stacktrace


def planned(exported: ExportedProgram, **named: Any) -> ExecutorchProgramManager:
    config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(**named))
    return to_edge(exported).to_executorch(config)


def test_inputs_and_outputs_are_planned_as_asked(exported: ExportedProgram) -> None:
    assert planned(exported).buffer == to_edge(exported).to_executorch().buffer
    made = planned(exported, alloc_graph_input=False, alloc_graph_output=False)
    assert placed(made) == {False}
    assert placed(planned(exported)) == {True}


def placed(made: ExecutorchProgramManager, method: int = 0) -> set[bool]:
    """Return whether inputs and outputs of a method have memory."""
    plan = made.executorch_program.execution_plan[method]
    values: list[Any] = [plan.values[index].val for index in (*plan.inputs, *plan.outputs)]
    return {value.allocation_info is not None for value in values}


def test_a_planner_of_ours_places_what_is_live(exported: ExportedProgram) -> None:
    called = []

    def watched(request: PlanRequest) -> Sequence[Place]:
        called.append(request)
        return one_memory(request)

    planned(exported, memory_planning_algo=watched)
    assert called


@pytest.mark.parametrize(
    "named",
    [
        {"alignment": 64},
        {"alloc_mutable_buffers": False},
        {"allow_lifetime_and_storage_overlap": True},
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_made_is_refused(
    exported: ExportedProgram, named: dict[str, Any]
) -> None:
    with pytest.raises(SettingError):
        planned(exported, **named)


def test_memory_is_planned_by_method(exported: ExportedProgram) -> None:
    programs = {"forward": exported, "other": exported}
    passes = {"forward": MemoryPlanningPass(alloc_graph_input=False, alloc_graph_output=False)}
    made = to_edge(programs).to_executorch(ExecutorchBackendConfig(memory_planning_pass=passes))
    # Whose pass is not given is planned by default.
    assert [placed(made, index) for index in (0, 1)] == [{False}, {True}]


def test_state_of_one_name_is_shared_where_asked() -> None:
    fill = Of(lambda self, x: self.cache.copy_(x) + 0, cache=torch.zeros(2))
    read = Of(lambda self: self.cache + 0, cache=torch.zeros(2))
    programs = {
        "fill": torch.export.export(fill, (torch.ones(2),)),
        "read": torch.export.export(read, ()),
    }
    config = settings("memory_planning_pass", MemoryPlanningPass(share_mutable_buffers=True))
    # tests/interop runs it.
    assert to_edge(programs).to_executorch(config).methods == {"fill", "read"}
    # exir keeps two states; which of the two a reader meant is for the caller to say.
    with pytest.raises(EmitterError, match="have different memory"):
        to_edge(programs).to_executorch()


@pytest.mark.parametrize("begin", [to_edge, to_edge_transform_and_lower, EdgeProgramManager])
@pytest.mark.parametrize(
    ("programs", "words"),
    [
        (torch.nn.ReLU(), "found a ReLU as the program of method 'forward'"),
        ((torch.nn.ReLU(), (torch.ones(2),)), "found a tuple"),
        ({"relu": 3}, "found a int as the program of method 'relu'"),
    ],
)
def test_what_is_no_program_is_told_at_once(begin: Any, programs: Any, words: str) -> None:
    with pytest.raises(ExirCompatError, match=words):
        begin(programs)
