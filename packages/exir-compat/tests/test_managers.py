"""Programs go from export to a file under exir's names."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.exir_compat import (
    EdgeCompileConfig,
    EdgeProgramManager,
    ExecutorchBackendConfig,
    SettingError,
    UnknownMethodError,
    to_edge,
    to_edge_transform_and_lower,
)
from lowerdeck.lowered_module import (
    LoweredBackendModule,
    LoweringError,
    get_lowered_backend_modules,
)
from lowerdeck.lowered_module.testing import RunPartitioner

aten = torch.ops.aten


def called(program: ExportedProgram) -> set[Any]:
    return {node.target for node in program.graph.nodes if node.op == "call_function"}


def delegates(program: ExportedProgram) -> list[LoweredBackendModule]:
    return get_lowered_backend_modules(program.graph_module)


class WantsGelu(RunPartitioner):
    """Takes gelu, and wants linear whole though it takes none."""

    def __init__(self) -> None:
        super().__init__(lambda node: node.target is aten.gelu.default)

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[Any], None]:
        return [aten.linear.default], None


def test_the_file_is_that_of_emit(exported: ExportedProgram) -> None:
    made = to_edge(exported, {"limit": 7}).to_executorch()
    config = EmitConfig(constant_methods={"limit": 7})
    assert made.buffer == emit(exported.run_decompositions(), config=config).to_bytes()
    assert (made.methods, made.config_methods) == ({"forward"}, {"limit"})


def test_operators_to_preserve_stay_whole(exported: ExportedProgram) -> None:
    config = EdgeCompileConfig(preserve_ops=[aten.linear.default])
    assert aten.linear.default in called(
        to_edge(exported, compile_config=config).exported_program()
    )
    lowered = to_edge_transform_and_lower(exported, compile_config=config)
    assert aten.linear.default in called(lowered.exported_program())


@pytest.mark.parametrize("form", ["one", "list", "mapping", "mapping of lists"])
def test_partitioners_get_whole_what_they_want_whole(exported: ExportedProgram, form: str) -> None:
    forms = {
        "one": WantsGelu(),
        "list": [WantsGelu()],
        "mapping": {"forward": WantsGelu()},
        "mapping of lists": {"forward": [WantsGelu()]},
    }
    program = to_edge_transform_and_lower(exported, partitioner=forms[form]).exported_program()
    assert aten.linear.default in called(program)
    assert [one.backend_id for one in delegates(program)] == ["VerbatimBackend"]


def test_each_step_leaves_the_manager_before_it(exported: ExportedProgram) -> None:
    first = to_edge(exported)
    text = str(first.exported_program().graph)
    lowered = first.to_backend(RunPartitioner(lambda node: True))
    assert delegates(lowered.exported_program())
    assert not delegates(first.exported_program())
    assert str(first.exported_program().graph) == text


def test_methods_have_partitioners_of_their_own(exported: ExportedProgram) -> None:
    manager = to_edge({"a": exported, "b": exported}).to_backend(
        {"b": RunPartitioner(lambda node: True)}
    )
    assert manager.methods == {"a", "b"}
    assert not delegates(manager.exported_program("a"))
    assert delegates(manager.exported_program("b"))
    made = manager.to_executorch()
    assert made.exported_program("b") is manager.exported_program("b")
    (call,) = made.delegate_map["b"].values()
    assert call["name"] == "VerbatimBackend"
    assert made.debug_handle_map


@pytest.mark.parametrize("step", ["to_backend", "transform"])
def test_a_method_that_is_none_is_refused(exported: ExportedProgram, step: str) -> None:
    with pytest.raises(UnknownMethodError, match="methods other; expected only forward"):
        getattr(to_edge(exported), step)({"other": []})
    with pytest.raises(UnknownMethodError, match="no method 'other'; the program has forward"):
        to_edge(exported).exported_program("other")
    with pytest.raises(KeyError):
        to_edge(exported).to_executorch().exported_program("other")


def test_a_class_as_partitioner_is_refused_before_anything_is_done(
    exported: ExportedProgram,
) -> None:
    with pytest.raises(LoweringError, match="class WantsGelu as partitioner"):
        to_edge_transform_and_lower(exported, partitioner=[WantsGelu])


def test_records_for_devtools_need_the_devtools(
    exported: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "executorch.devtools.etrecord", None)
    for make in (to_edge, to_edge_transform_and_lower):
        with pytest.raises(SettingError, match=r"cannot import executorch\.devtools"):
            make(exported, generate_etrecord=True)
    with pytest.raises(SettingError, match="ETRecord was not generated"):
        to_edge(exported).to_executorch().get_etrecord()


def test_records_hold_the_programs_as_they_were(
    exported: ExportedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    devtools = ModuleType("executorch.devtools.etrecord")
    devtools.ETRecord = Kept  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, devtools.__name__, devtools)
    manager = to_edge_transform_and_lower(
        exported, transform_passes=[_to_relu], generate_etrecord=True
    )
    made = manager.to_executorch()
    kept = made.get_etrecord()
    assert kept.exported == {"forward": exported}
    (seen,) = kept.edge.values()
    assert torch.ops.aten.gelu.default in {node.target for node in seen.graph.nodes}
    (after,) = kept.extra["edge_after_transform"].values()
    assert torch.ops.aten.relu.default in {node.target for node in after.graph.nodes}
    assert kept.program is made
    # What a caller does to a program later is not what was recorded.
    assert after is not manager.exported_program()
    assert manager._etrecord.program is None


def _to_relu(graph_module: torch.fx.GraphModule) -> None:
    for node in graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.gelu.default
    ):
        node.target = torch.ops.aten.relu.default
        node.kwargs = {}


class Kept:
    """What ExecuTorch's record is asked for."""

    def __init__(self) -> None:
        self.extra: dict[str, Any] = {}
        self.program: Any = None

    def copy(self) -> Kept:
        made = Kept()
        made.__dict__.update(self.__dict__)
        return made

    def add_exported_program(self, programs: Any) -> None:
        self.exported = programs

    def add_edge_dialect_program(self, manager: EdgeProgramManager) -> None:
        self.edge = {name: manager.exported_program(name) for name in manager.methods}

    def add_extra_export_modules(self, modules: dict[str, EdgeProgramManager]) -> None:
        for name, manager in modules.items():
            self.extra[name] = {one: manager.exported_program(one) for one in manager.methods}

    def add_executorch_program(self, program: Any) -> None:
        self.program = program


def test_managers_are_copied_as_what_they_are(exported: ExportedProgram) -> None:
    manager = to_edge(exported)
    for each in (manager, manager.to_executorch()):
        for copied in (copy.copy(each), copy.deepcopy(each)):
            assert type(copied) is type(each)
            assert copied.methods == {"forward"}


def test_files_are_written_from_memory(exported: ExportedProgram, tmp_path: Path) -> None:
    made = EdgeProgramManager(exported).to_executorch(
        ExecutorchBackendConfig(external_constants=True)
    )
    made.save(str(tmp_path / "model.pte"))
    made.write_tensor_data_to_file(tmp_path)
    opened = io.BytesIO()
    made.write_to_file(opened)
    assert opened.getvalue() == made.buffer == (tmp_path / "model.pte").read_bytes()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.pte", "_default_external_constant.ptd"}
    with pytest.raises(ValueError, match="one that ends in"):
        made.save(tmp_path / "model.bin")
    assert made.executorch_program is made.emitted.program


@pytest.mark.parametrize("way", [to_edge, to_edge_transform_and_lower])
def test_nodes_have_the_handles_that_the_file_tells(exported: ExportedProgram, way: Any) -> None:
    made = way(exported).to_executorch()
    nodes = [n for n in made.exported_program().graph.nodes if n.op == "call_function"]
    handles = {node.meta["debug_handle"] for node in nodes}
    assert len(handles) == len(nodes)
    assert set(made.debug_handle_map["forward"].values()) <= handles
    assert not any("debug_handle" in node.meta for node in exported.graph.nodes)
    assert made._emitter_output.program is made.executorch_program
    assert made._emitter_output.debug_handle_map == made.debug_handle_map


def test_partitioners_transform_programs_before_they_are_decomposed(
    exported: ExportedProgram,
) -> None:
    class WithTanh(WantsGelu):
        def transform_for_pre_decomposition(self, program: ExportedProgram) -> Any:
            copied = copy.deepcopy(program)
            for node in copied.graph.find_nodes(op="call_function", target=aten.gelu.default):
                node.target = aten.tanh.default
            return copied

    manager = to_edge_transform_and_lower(exported, partitioner=[WithTanh(), WantsGelu()])
    assert aten.tanh.default in called(manager.exported_program())
    assert not delegates(manager.exported_program())
    assert aten.gelu.default in called(exported)
