"""The whole way from an exported program to bytes, without the official runtime."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from lowerdeck.emitter import (
    OFFICIAL_KERNELS,
    RUNTIME_VERSION,
    EmitConfig,
    EmitterError,
    MemoryPlanError,
    MissingKernelError,
    Place,
    PlanRequest,
    UnboundedSizeError,
    UnsupportedError,
    emit,
    one_memory,
)
from lowerdeck.emitter.ir.runtime_ops import SCALAR_KERNELS
from lowerdeck.serializer import DelegateCall, JumpFalseCall, KernelCall, Tensor, deserialize_pte


def kernels(emitted: Any, method: int = 0) -> list[str]:
    """Return the names of the kernels that a method calls, in order."""
    plan = emitted.program.execution_plan[method]
    calls = [i.instr_args for i in plan.chains[0].instructions]
    return [plan.operators[c.op_index].full_name for c in calls if isinstance(c, KernelCall)]


def test_a_program_goes_to_bytes_and_back() -> None:
    emitted = emit(export(nn.Linear(2, 3), (torch.ones(1, 2),)))
    assert kernels(emitted) == ["aten::linear.out"]
    again = deserialize_pte(emitted.to_bytes())
    assert again.execution_plan[0].name == "forward"
    assert len(again.constant_buffer) == 3


def test_weights_are_views_on_the_tensors_memory() -> None:
    module = nn.Linear(64, 64)
    emitted = emit(export(module, (torch.ones(1, 64),)))
    with torch.no_grad():
        module.weight.fill_(1.0)
    weight = next(
        memoryview(buffer.storage)  # type: ignore[arg-type]
        for buffer in emitted.program.constant_buffer
        if memoryview(buffer.storage).nbytes == 64 * 64 * 4  # type: ignore[arg-type]
    )
    assert weight[:4].tobytes() == b"\x00\x00\x80\x3f"


def test_every_missing_kernel_is_named_with_its_line() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = torch.linalg.inv(x)
            return torch.linalg.cholesky(y)

    with pytest.raises(MissingKernelError) as caught:
        emit(export(Model(), (torch.eye(3),)))
    names = [item.operator for item in caught.value.missing]
    assert len(names) == 2
    assert "linalg_inv" in names[0]
    assert "linalg_cholesky" in names[1]
    assert "test_emission.py" in caught.value.missing[0].sources[0]


def test_floats_of_8_bits_are_refused_where_a_kernel_would_take_them() -> None:
    class Widened(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float32)

    with pytest.raises(MissingKernelError, match="no floats of 8 bits") as caught:
        emit(export(Widened(), (torch.ones(2).to(torch.float8_e4m3fn),)))
    assert "test_emission.py" in caught.value.missing[0].sources[0]
    halved = (torch.ones(4, 2).to(torch.float8_e5m2),)
    assert not kernels(emit(export(_First(), halved)))  # what needs none is as before


class _First(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:2].view(-1)


def test_an_unbounded_size_asks_for_a_max() -> None:
    exported = export(
        nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    with pytest.raises(UnboundedSizeError, match=r'Dim\("rows", max='):
        emit(exported)


def test_a_bounded_size_is_planned_at_its_bound() -> None:
    rows = torch.export.Dim("rows", max=16)
    exported = export(nn.ReLU(), (torch.ones(4, 2),), dynamic_shapes=({0: rows},))
    values = [value.val for value in emit(exported).program.execution_plan[0].values]
    assert [value.sizes for value in values if isinstance(value, Tensor)] == [[16, 2], [16, 2]]


def test_a_number_that_varies_is_refused_as_input() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n

    exported = export(Model(), (torch.ones(2), 3), dynamic_shapes=(None, torch.export.Dim.DYNAMIC))
    with pytest.raises(UnsupportedError, match="0-dim tensor"):
        emit(exported)


def test_a_branch_becomes_jumps() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    emitted = emit(export(Model(), (torch.ones(3),)))
    steps = [i.instr_args for i in emitted.program.execution_plan[0].chains[0].instructions]
    jumps = [step for step in steps if isinstance(step, JumpFalseCall)]
    assert len(jumps) == 2
    assert jumps[1].destination_instruction == len(steps)


def test_methods_share_weights_and_constant_methods_follow() -> None:
    module = nn.Linear(8, 8)
    small, large = (export(module, (torch.ones(rows, 8),)) for rows in (1, 4))
    config = EmitConfig(constant_methods={"get_max": 4, "get_name": "eight"})
    emitted = emit({"small": small, "large": large}, config=config)
    names = [plan.name for plan in emitted.program.execution_plan]
    assert names == ["large", "small", "get_max", "get_name"]
    assert len(emitted.program.constant_buffer) == 3


def test_the_given_program_is_unchanged() -> None:
    exported = export(nn.BatchNorm1d(3).eval(), (torch.ones(2, 3),))
    before = str(exported.graph)
    emit(exported)
    assert str(exported.graph) == before


def test_a_mapping_without_methods_is_refused() -> None:
    with pytest.raises(EmitterError, match="no method"):
        emit({})


def test_a_namedtuple_among_the_outputs_has_a_text_form() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.topk(x, 2)

    emitted = emit(export(Model(), (torch.ones(4),)))
    meta = emitted.program.execution_plan[0].container_meta_type
    assert meta is not None
    # The same text from every torch: only newer ones know the class by name.
    assert '"builtins.tuple"' in meta.encoded_out_str
    assert "return_types" not in meta.encoded_out_str


def test_a_delegate_is_called(lowered: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = lowered(), lowered()

        def forward(self, x: torch.Tensor) -> Any:
            (y,) = self.one(x + 1)
            (z,) = self.two(y)
            return z - 1

    emitted = emit(export(Model(), (torch.ones(2, 3),), strict=False))
    plan = emitted.program.execution_plan[0]
    assert [delegate.id for delegate in plan.delegates] == ["TestBackend"] * 2
    assert len(emitted.program.backend_delegate_data) == 1
    calls = [i.instr_args for i in plan.chains[0].instructions]
    assert sum(isinstance(call, DelegateCall) for call in calls) == 2
    assert [d.backend_id for d in emitted.delegate_debug_maps["forward"].values()] == [
        "TestBackend"
    ] * 2


class _Relaid(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).to(memory_format=torch.channels_last), x - 1


def test_results_of_a_delegate_have_the_layouts_of_its_own_program(lowered: Any) -> None:
    image = torch.ones(1, 3, 4, 4)
    inner = export(_Relaid(), (image,))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = type(lowered())(inner)

        def forward(self, x: torch.Tensor) -> Any:
            return self.part(x)

    plan = emit(export(Model(), (image,), strict=False)).program.execution_plan[0]
    (call,) = (
        step.instr_args
        for step in plan.chains[0].instructions
        if isinstance(step.instr_args, DelegateCall)
    )
    tensors = [plan.values[index].val for index in call.args]
    orders = [tensor.dim_order for tensor in tensors if isinstance(tensor, Tensor)]
    assert orders == [[0, 1, 2, 3], [0, 2, 3, 1], [0, 1, 2, 3]]


class Counter(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += x  # type: ignore[operator]
        return self.count * 2


def test_a_planner_that_lets_values_overlap_is_caught() -> None:
    def careless(request: PlanRequest) -> list[Place]:
        return [Place(1, 0) for _ in request.lives]

    exported = export(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), (torch.ones(1, 2),))
    with pytest.raises(MemoryPlanError, match="overlap"):
        emit(exported, config=EmitConfig(memory_planner=careless))


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_held_while_passes_run_and_is_as_before_afterwards(was_on: bool) -> None:
    seen: list[bool] = []

    def watching(request: PlanRequest) -> list[Place]:
        seen.append(gc.isenabled())
        if len(seen) > 1:
            raise MemoryPlanError("stop")
        return one_memory(request)

    exported = export(nn.ReLU(), (torch.ones(1, 2),))
    settings = EmitConfig(memory_planner=watching)
    if not was_on:
        gc.disable()
    try:
        emit(exported, config=settings)
        assert gc.isenabled() is was_on
        with pytest.raises(MemoryPlanError, match="stop"):
            emit(exported, config=settings)
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
    assert seen == [False, False]


def test_the_plan_is_data() -> None:
    emitted = emit(export(Counter(), (torch.ones(4),)))
    plan = emitted.memory_plans["forward"]
    assert plan.bound <= plan.sizes[1]
    roles = {block.role for block in plan.blocks}
    assert roles >= {"input", "state"}
    assert emitted.program.execution_plan[0].non_const_buffer_sizes == list(plan.sizes)


def test_zeros_of_a_buffer_are_in_the_file_only_on_request() -> None:
    exported = export(Counter(), (torch.ones(4),))
    assert len(emit(exported).program.mutable_data) == 1
    careful = emit(exported, config=EmitConfig(zeroed_memory=False))
    assert len(careful.program.mutable_data) == 2


def test_state_of_one_name_and_two_sizes_is_refused() -> None:
    programs = {
        "small": export(Counter(4), (torch.ones(4),)),
        "large": export(Counter(8), (torch.ones(8),)),
    }
    with pytest.raises(UnsupportedError, match="rename"):
        emit(programs)


def test_equal_small_constants_are_stored_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.full((8,), 3.0))
            self.register_buffer("two", torch.full((8,), 3.0))

        def forward(self, x: torch.Tensor) -> Any:
            return x + self.one, x * self.two  # type: ignore[operator]

    emitted = emit(export(Model(), (torch.ones(8),)))
    assert len(emitted.program.constant_buffer) == 2


def test_weights_may_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    exported = export(nn.Linear(64, 64), (torch.ones(1, 64),))
    emitted = emit(exported, config=EmitConfig(weights_file="weights"))
    assert len(emitted.program.constant_buffer) == 1
    assert len(emitted.external_files()["weights"]) > 64 * 64 * 4
    size = emitted.save(tmp_path / "model.pte")
    assert size == (tmp_path / "model.pte").stat().st_size < 64 * 64 * 4
    assert (tmp_path / "weights.ptd").read_bytes() == emitted.external_files()["weights"]


def test_saving_and_bytes_agree(tmp_path: Path) -> None:
    emitted = emit(export(nn.Linear(4, 4), (torch.ones(1, 4),)))
    emitted.save(tmp_path / "model.pte")
    assert (tmp_path / "model.pte").read_bytes() == emitted.to_bytes()


def test_a_name_may_stand_for_one_method_only() -> None:
    exported = export(nn.ReLU(), (torch.ones(2),))
    with pytest.raises(EmitterError, match="rename"):
        emit(exported, config=EmitConfig(constant_methods={"forward": 1}))


def test_a_module_is_no_program() -> None:
    with pytest.raises(EmitterError, match=r"call torch\.export\.export first"):
        emit(nn.ReLU())  # type: ignore[arg-type]


def test_a_program_that_needs_nothing_is_not_retraced(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (torch.ones(1, 2),))

    def refuse(*_: Any) -> Any:
        raise AssertionError("retraced")

    monkeypatch.setattr("lowerdeck.emitter.decompositions.table.take_apart", refuse)
    assert kernels(emit(exported)) == ["aten::linear.out", "aten::relu.out"]


def test_the_users_decomposition_counts() -> None:
    config = EmitConfig(decompositions={torch.ops.aten.relu.default: lambda x: x.clamp(min=0)})
    emitted = emit(export(nn.ReLU(), (torch.ones(2),)), config=config)
    assert kernels(emitted) == ["aten::clamp.out"]


def test_the_kernel_table_says_which_runtime_it_was_read_from() -> None:
    assert OFFICIAL_KERNELS.version == RUNTIME_VERSION == "1.4.1"
    assert len(OFFICIAL_KERNELS.names) == 240
    assert "aten::add.out" in OFFICIAL_KERNELS


def test_every_kernel_on_numbers_is_in_the_table() -> None:
    assert {kernel.full_name for kernel in SCALAR_KERNELS.values()} <= OFFICIAL_KERNELS.names


def test_weights_carry_their_names_unless_told_otherwise() -> None:
    def names(config: EmitConfig) -> set[str | None]:
        emitted = emit(export(nn.Linear(2, 3), (torch.ones(1, 2),)), config=config)
        values = deserialize_pte(emitted.to_bytes()).execution_plan[0].values
        infos = [v.val.extra_tensor_info for v in values if isinstance(v.val, Tensor)]
        return {info.fully_qualified_name for info in infos if info is not None}

    assert names(EmitConfig()) == {"weight", "bias"}
    assert names(EmitConfig(weight_names=False)) == set()


def test_equal_weights_of_fresh_layers_keep_their_modules_and_share_their_bytes() -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm in self.norms:
                x = norm(x).relu()
            result: torch.Tensor = self.norms[0](x)  # the same module once more
            return result

    emitted = emit(export(Called().eval(), (torch.ones(2, 4),)))
    program = deserialize_pte(emitted.to_bytes())
    (plan,) = program.execution_plan
    assert len(program.constant_buffer) == 3  # nothing, ones, zeros
    modules = []
    for one in plan.chains[0].instructions:
        args = one.instr_args
        if isinstance(args, KernelCall) and "norm" in plan.operators[args.op_index].name:
            values = [plan.values[place].val for place in args.args]
            infos = [one.extra_tensor_info for one in values if isinstance(one, Tensor)]
            names = {info.fully_qualified_name for info in infos if info is not None}
            modules.append({name.rpartition(".")[0] for name in names if name})
    assert modules == [{"norms.0"}, {"norms.1"}, {"norms.2"}, {"norms.0"}]


def test_an_operator_of_one_s_own_without_out_variant_is_told_to_get_one() -> None:
    with torch.library._scoped_library("lowerdeck_test", "FRAGMENT") as library:
        library.define("half(Tensor x) -> Tensor")
        library.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")

        class Half(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return torch.ops.lowerdeck_test.half(x)

        exported = export(Half(), (torch.ones(2),))
        with pytest.raises(
            MissingKernelError, match=r"register one \(lowerdeck_test::half\.out\)"
        ):
            emit(exported)


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export(nn.ReLU(), (torch.ones(2),))
    with pytest.raises(EmitterError, match="found a dict, expected an EmitConfig"):
        emit(exported, config={"plan_inputs": False})  # type: ignore[arg-type]
    with pytest.raises(EmitterError, match="found 3 as the name of a method"):
        emit({3: exported})  # type: ignore[dict-item]
    monkeypatch.setattr(torch.export.ExportedProgram, "dialect", "EDGE")
    with pytest.raises(EmitterError, match=r"Edge dialect.*leave out to_edge"):
        emit(exported)


def test_what_is_shown_of_an_emission_is_short() -> None:
    emitted = emit(export(nn.Linear(2, 3), (torch.ones(1, 2),)))
    assert repr(emitted) == "<EmittedProgram forward: 1 instructions>"
    assert len(repr(EmitConfig())) < 600


def test_memory_of_inputs_and_outputs_is_planned_by_method() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x)

    exported = export(Twice(), (torch.ones(2),))
    config = EmitConfig(plan_inputs={"a": False}, plan_outputs={"b": False})
    plans = emit({"a": exported, "b": exported}, config=config).program.execution_plan
    planned: list[tuple[bool, bool]] = []
    for plan in plans:
        (x,), (y,) = plan.inputs, plan.outputs
        values: list[Any] = [plan.values[index].val for index in (x, y)]
        planned.append(
            (values[0].allocation_info is not None, values[1].allocation_info is not None)
        )
    assert planned == [(False, True), (True, False)]
    with pytest.raises(EmitterError, match=r"found plan_outputs for \['c'\]"):
        emit(exported, config=EmitConfig(plan_outputs={"c": True}))


def test_a_missing_kernel_is_named_before_a_missing_bound() -> None:
    def pick(x: torch.Tensor) -> torch.Tensor:
        return x[:2].clone()

    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    class Pick(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            picked: torch.Tensor = torch.ops.lowerdeck_test_pick.pick(x)
            return picked * 2

    with torch.library._scoped_library("lowerdeck_test_pick", "DEF") as library:
        library.define("pick(Tensor x) -> Tensor")
        library.impl("pick", pick, "CPU")
        torch.library.register_fake("lowerdeck_test_pick::pick", fake, lib=library)
        program = torch.export.export(Pick(), (torch.ones(5),))
        with pytest.raises(MissingKernelError, match="lowerdeck_test_pick"):
            emit(program)
