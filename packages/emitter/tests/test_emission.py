"""The whole way from an exported program to bytes, without the official runtime."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from emitter_running import check, kernels, results  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import Dim

from lowerdeck.emitter import (
    OFFICIAL_KERNELS,
    RUNTIME_VERSION,
    EmitConfig,
    EmitterError,
    MemoryPlanError,
    Place,
    PlanRequest,
    UnboundedSizeError,
    UnsupportedError,
    bounded,
    emit,
    one_memory,
)
from lowerdeck.serializer import DelegateCall, JumpFalseCall, KernelCall, deserialize_pte
from lowerdeck.serializer import Tensor as StoredTensor
from lowerdeck_zoo import Holding, Of, Program, assert_close, exported, program, programs
from lowerdeck_zoo.models.strides import attend


def tensors(plan: Any) -> list[StoredTensor]:
    return [value.val for value in plan.values if isinstance(value.val, StoredTensor)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(2, 3), ["linear.out"]),
        (nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["linear.out", "relu.out"]),
    ],
)
def test_a_program_that_needs_nothing_is_not_decomposed(
    model: nn.Module, expected: list[str]
) -> None:
    exported_program = exported(model, torch.ones(1, 2))
    before = str(exported_program.graph)
    emitted = emit(exported_program)
    assert kernels(emitted) == expected
    assert str(exported_program.graph) == before
    again = deserialize_pte(emitted.to_bytes())
    assert again.execution_plan[0].name == "forward"
    assert len(again.constant_buffer) == 3


def test_the_users_decomposition_counts() -> None:
    config = EmitConfig(decompositions={torch.ops.aten.relu.default: lambda x: x.clamp(min=0)})
    assert kernels(emit(exported(nn.ReLU(), torch.ones(2)), config=config)) == ["clamp.out"]


# Attention needs a guard only where a mask may hide a whole row.
HIDDEN = torch.tensor([[True, False, True, True]] * 3 + [[False] * 4])


@pytest.mark.parametrize(
    ("options", "is_guarded"),
    [({}, False), ({"is_causal": True}, False), ({"attn_mask": HIDDEN}, True)],
)
def test_attention_guards_only_rows_that_a_mask_may_hide(
    options: dict[str, Any], is_guarded: bool
) -> None:
    emitted = check(lambda q: attend(q, q, q, **options), (torch.randn(1, 2, 4, 8),))
    assert ("any.out" in kernels(emitted)) is is_guarded


def test_weights_are_views_on_the_tensors_memory() -> None:
    module = nn.Linear(64, 64)
    emitted = emit(exported(module, torch.ones(1, 64)))
    with torch.no_grad():
        module.weight.fill_(1.0)
    stored = [memoryview(one.storage) for one in emitted.program.constant_buffer]  # type: ignore[arg-type]
    (weight,) = (one for one in stored if one.nbytes == 64 * 64 * 4)
    assert weight[:4].tobytes() == b"\x00\x00\x80\x3f"


def test_a_bounded_size_is_planned_at_its_bound() -> None:
    rows = torch.export.Dim("rows", max=16)
    emitted = emit(exported(nn.ReLU(), torch.ones(4, 2), dynamic_shapes=({0: rows},)))
    assert [one.sizes for one in tensors(emitted.program.execution_plan[0])] == [[16, 2]] * 2


def test_a_branch_becomes_jumps() -> None:
    emitted = emit(program("cond").exports())
    steps = [i.instr_args for i in emitted.program.execution_plan[0].chains[0].instructions]
    jumps = [step for step in steps if isinstance(step, JumpFalseCall)]
    assert len(jumps) == 2
    assert jumps[0].destination_instruction < jumps[1].destination_instruction <= len(steps)


def test_methods_share_weights_and_constant_methods_follow() -> None:
    module = nn.Linear(8, 8)
    small, large = (exported(module, torch.ones(rows, 8)) for rows in (1, 4))
    values: dict[str, Any] = {
        "get_max": 128,
        "get_ratio": 0.5,
        "use_cache": True,
        "get_none": None,
    }
    values |= {"get_name": "model", "get_inf": float("inf"), "get_table": torch.arange(4)}
    emitted = emit({"small": small, "large": large}, config=EmitConfig(constant_methods=values))
    names = [plan.name for plan in emitted.program.execution_plan]
    assert names == ["large", "small", *sorted(values)]
    # Nothing, the weight, the bias and the table.
    assert len(emitted.program.constant_buffer) == 4
    found = results(emitted, [(name, []) for name in values])
    assert_close([one[0] for one in found], list(values.values()))


def test_a_namedtuple_among_the_outputs_has_a_text_form() -> None:
    emitted = emit(exported(Of(lambda x: torch.topk(x, 2)), torch.ones(4)))
    meta = emitted.program.execution_plan[0].container_meta_type
    assert meta is not None
    # The same text from every torch: only newer ones know the class by name.
    assert '"builtins.tuple"' in meta.encoded_out_str
    assert "return_types" not in meta.encoded_out_str


class DoublingRuntime:
    """The runtime of the lowered modules of these tests."""

    def init(
        self, blob: memoryview, specs: Sequence[Any], data: Mapping[str, memoryview]
    ) -> bytes:
        return bytes(blob)

    def input_count(self, handle: bytes) -> int:
        return 1

    def execute(self, handle: bytes, inputs: Sequence[Any]) -> list[Tensor]:
        assert handle == b"blob"
        return [inputs[0] * 2]


@pytest.mark.parametrize("segments", [True, False])
def test_delegates_are_called_also_in_branches(lowered: Any, segments: bool) -> None:
    def branching(self: Any, x: Tensor) -> Any:
        (y,) = self.one(x + 1)
        return torch.cond(y.sum() > 0, lambda y: self.two(y)[0] - 1, lambda y: y * 0, (y,))

    model, x = Of(branching, one=lowered(), two=lowered()), torch.ones(2, 3)
    emitted = emit(exported(model, x, strict=False))
    (plan,) = emitted.program.execution_plan
    assert [delegate.id for delegate in plan.delegates] == ["TestBackend"] * 2
    assert len(emitted.program.backend_delegate_data) == 1
    maps = emitted.delegate_debug_maps["forward"].values()
    assert [one.backend_id for one in maps] == ["TestBackend"] * 2
    content = emitted.to_bytes(extract_delegate_segments=segments)
    calls = [("forward", [x]), ("forward", [x - 3])]
    found = results(emitted, calls, content=content, backends={"TestBackend": DoublingRuntime()})
    assert [values[0][0, 0].item() for values in found] == [7, 0]


def test_results_of_a_delegate_have_the_layouts_of_its_own_program(lowered: Any) -> None:
    def relaid(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).to(memory_format=torch.channels_last), x - 1

    image = torch.ones(1, 3, 4, 4)
    part = type(lowered())(exported(Of(relaid), image))
    emitted = emit(exported(Of(lambda self, x: self.part(x), part=part), image, strict=False))
    (plan,) = emitted.program.execution_plan
    steps = [step.instr_args for step in plan.chains[0].instructions]
    (call,) = (step for step in steps if isinstance(step, DelegateCall))
    values: list[Any] = [plan.values[index].val for index in call.args]
    orders = [value.dim_order for value in values if isinstance(value, StoredTensor)]
    assert orders == [[0, 1, 2, 3], [0, 2, 3, 1], [0, 1, 2, 3]]


def apart(request: PlanRequest) -> list[Place]:
    """Place tensors of at most 64 bytes one after the other in memory 1, others in memory 2."""
    places, ends = [], {1: 0, 2: 0}
    for life in request.lives:
        memory = 1 if life.nbytes <= 64 else 2
        places.append(Place(memory, ends[memory]))
        ends[memory] += life.nbytes
    return places


SETTINGS = {
    "small tensors in another memory": EmitConfig(memory_planner=apart),
    "inputs of the caller": EmitConfig(plan_inputs=False),
    "outputs of the caller": EmitConfig(plan_outputs=False),
    "zeros in the file": EmitConfig(zeroed_memory=False),
}


SOME = [
    *map(program, ("push_peek_from_zero", "kv_cache", "two_states_of_two_methods", "nested_cond")),
    *(one for one in programs("memory") if one.name.startswith(("index_put", "rows", "scatter"))),
]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("chosen", SOME, ids=str)
def test_settings_of_memory_do_not_change_numbers(chosen: Program, name: str) -> None:
    emitted = emit(chosen.exports(), config=SETTINGS[name])
    found = results(emitted, [(call.method, call.flat) for call in chosen.calls()])
    for values, result in zip(found, chosen.results(), strict=True):
        chosen.compare(values, result.outputs)


def test_memory_of_inputs_and_outputs_is_planned_by_method() -> None:
    sine = exported(Of(torch.sin), torch.ones(2))
    config = EmitConfig(plan_inputs={"a": False}, plan_outputs={"b": False})
    planned = [
        [one.allocation_info is not None for one in tensors(plan)]
        for plan in emit({"a": sine, "b": sine}, config=config).program.execution_plan
    ]
    assert planned == [[False, True], [True, False]]


def counter_of(size: int) -> Of:
    return Of(lambda self, x: self.count.add_(x) * 2, count=torch.zeros(size))


def test_zeros_of_a_state_are_in_the_file_only_on_request() -> None:
    counter = exported(counter_of(4), torch.ones(4))
    emitted = emit(counter)
    assert len(emitted.program.mutable_data) == 1
    careful = emit(counter, config=EmitConfig(zeroed_memory=False))
    assert len(careful.program.mutable_data) == 2
    with pytest.raises(UnsupportedError, match="rename"):
        emit({"small": counter, "large": exported(counter_of(8), torch.ones(8))})


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_while_passes_run_and_restored_afterwards(was_on: bool) -> None:
    seen: list[bool] = []

    def watching(request: PlanRequest) -> list[Place]:
        seen.append(gc.isenabled())
        if len(seen) > 1:
            # A planner that lets values overlap, too: it is found out.
            return [Place(1, 0) for _ in request.lives]
        return one_memory(request)

    layers = exported(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), torch.ones(1, 2))
    settings = EmitConfig(memory_planner=watching)
    if not was_on:
        gc.disable()
    try:
        emit(layers, config=settings)
        assert gc.isenabled() is was_on
        with pytest.raises(MemoryPlanError, match="overlap"):
            emit(layers, config=settings)
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
    assert seen == [False, False]


def test_the_kernel_table_has_the_version_that_it_was_read_from() -> None:
    assert OFFICIAL_KERNELS.version == RUNTIME_VERSION == "1.4.1"
    assert len(OFFICIAL_KERNELS.names) == 240
    assert "aten::add.out" in OFFICIAL_KERNELS


def test_weights_carry_their_names_unless_told_otherwise() -> None:
    for config, expected in (
        (EmitConfig(), {"weight", "bias"}),
        (EmitConfig(weight_names=False), set()),
    ):
        emitted = emit(exported(nn.Linear(2, 3), torch.ones(1, 2)), config=config)
        (plan,) = deserialize_pte(emitted.to_bytes()).execution_plan
        infos = [one.extra_tensor_info for one in tensors(plan)]
        assert {info.fully_qualified_name for info in infos if info is not None} == expected


def test_equal_weights_of_fresh_layers_keep_their_modules_and_share_their_bytes() -> None:
    class Called(Holding, norms=lambda: nn.ModuleList([nn.BatchNorm1d(4) for _ in range(3)])):
        def forward(self, x: Tensor) -> Tensor:
            for norm in (*self.norms, self.norms[0]):
                x = norm(x).relu()
            return x

    content = deserialize_pte(emit(exported(Called(), torch.ones(2, 4))).to_bytes())
    (plan,) = content.execution_plan
    assert len(content.constant_buffer) == 3  # nothing, ones, zeros
    modules = []
    for one in plan.chains[0].instructions:
        args = one.instr_args
        if isinstance(args, KernelCall) and "norm" in plan.operators[args.op_index].name:
            values: list[Any] = [plan.values[place].val for place in args.args]
            infos = [one.extra_tensor_info for one in values if isinstance(one, StoredTensor)]
            names = {info.fully_qualified_name for info in infos if info is not None}
            modules.append({name.rpartition(".")[0] for name in names if name})
    assert modules == [{"norms.0"}, {"norms.1"}, {"norms.2"}, {"norms.0"}]


class Product(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(a.relu() @ b, -1).repeat(2, 1)


def _product(rows: Any, columns: Any) -> torch.export.ExportedProgram:
    inputs = torch.randn(4, 6), torch.randn(6, 3)
    shapes = {"a": {0: rows, 1: columns}, "b": {0: columns}}
    return torch.export.export(Product(), inputs, dynamic_shapes=shapes)


AUTO, ROWS = Dim.AUTO, Dim("rows")


@pytest.mark.parametrize(
    ("dims", "bounds", "most"),
    [
        ((AUTO, AUTO), 16, (16, 16)),
        ((AUTO, Dim.AUTO(max=8)), 16, (16, 8)),
        ((ROWS, AUTO), {"rows": 7, "a_1": 9}, (7, 9)),
        ((ROWS, AUTO), {"a": {0: 7}, "b": {0: 9}}, (7, 9)),
        ((Dim.AUTO(max=50), AUTO), {"a": {0: 7, 1: 12}, "b": {0: 9}}, (7, 9)),
    ],
)
def test_bounds_give_the_file_of_dimensions_with_a_maximum(
    dims: Any, bounds: Any, most: Sequence[int]
) -> None:
    program = _product(*dims)
    before = dict(program.range_constraints)
    emitted = emit(program, config=EmitConfig(bounds=bounds))
    assert program.range_constraints == before
    expected = emit(_product(*(Dim.AUTO(max=size) for size in most)))
    plans = [one.program.execution_plan[0] for one in (emitted, expected)]
    assert plans[0].non_const_buffer_sizes == plans[1].non_const_buffer_sizes
    assert [one.sizes for one in tensors(plans[0])] == [one.sizes for one in tensors(plans[1])]
    calls = [(torch.randn(*size), torch.randn(size[1], 3)) for size in ((2, 2), most)]
    for call, found in zip(
        calls, results(emitted, [("forward", call) for call in calls]), strict=True
    ):
        assert_close(found, Product()(*call), atol=1e-5)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (0, "found 0 for all dimensions, expected a size of 1 or more"),
        ({"rows": "many"}, "found 'many' for 'rows', expected a size"),
        ({"rows": 60}, "found 60 for 'rows', but the program was exported for . to 50"),
        (
            {"lines": 3, "a": {5: 3}},
            "found 'lines', dimension 5 of 'a', expected .*: 'a_1', 'rows'",
        ),
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds: Any, message: str) -> None:
    with pytest.raises(EmitterError, match=message):
        bounded({"forward": _product(Dim("rows", max=50), AUTO)}, bounds)


def test_a_size_that_is_divided_by_part_of_itself_is_bounded() -> None:
    def windows(x: Tensor) -> Tensor:
        count = x.shape[0] // 4
        return x.view(count, x.shape[0] // count, 8).sum(0)

    check(
        windows,
        *((torch.randn(size, 8),) for size in (8, 12, 64)),
        dynamic_shapes=(({0: Dim("n", min=4, max=64)},),),
        prefer_deferred_runtime_asserts_over_guards=True,
    )


def test_a_view_with_larger_bounds_than_its_weight_is_a_copy() -> None:
    positions = torch.randn(64, 4)

    def grid(x: Tensor) -> Tensor:
        rows = x.shape[0] // 4
        return positions.view(rows, 64 // rows, 4).sum(1) * x[:rows]

    emitted = check(
        grid,
        *((torch.randn(size, 4),) for size in (32, 35)),
        dynamic_shapes=(({0: Dim("side", min=32, max=63)},),),
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    stored = [one for one in tensors(emitted.program.execution_plan[0]) if one.data_buffer_idx]
    assert [one.sizes for one in stored] == [[64, 4]]


def _first(x: Tensor, count: Tensor) -> Tensor:
    size: Any = count[0].item()
    torch._check(size >= 0)  # type: ignore[no-untyped-call]
    torch._check(size < x.shape[0])  # type: ignore[no-untyped-call]
    return x[:size] * 2


def _halves(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    sizes: Any = count.tolist()
    for size in sizes:
        torch._check(size >= 0)  # type: ignore[no-untyped-call]
    torch._check(sizes[0] + sizes[1] == x.shape[0])  # type: ignore[no-untyped-call]
    first, second = torch.split(x, sizes)
    return first * 2, second * 3


@pytest.mark.parametrize(
    "function",
    [
        lambda x, _: x.nonzero(),
        lambda x, _: x[x > 0] * 2,
        lambda x, _: torch.where(x > 0)[0],
        lambda x, _: x[x[:, 0].nonzero().squeeze(1)],
        lambda x, _: torch.masked_select(x, x > 0),
        lambda x, _: x.topk(x.shape[0] // 2, dim=0).values,
        _first,
        _halves,
    ],
)
def test_sizes_from_data_are_bounded_by_what_they_count_or_by_assertions(function: Any) -> None:
    calls = [(torch.randn(rows, 4), torch.tensor([1, rows - 1])) for rows in (6, 3, 16)]
    check(
        function,
        *calls,
        config=EmitConfig(bounds=16),
        dynamic_shapes=(({0: AUTO}, None),),
        prefer_deferred_runtime_asserts_over_guards=True,
    )


def test_a_size_from_data_is_bounded_by_its_symbol() -> None:
    """As VJEPA2 repeats mask tokens ``mask.max() + 1`` times."""

    def repeated(x: Tensor, mask: Tensor) -> Tensor:
        count: Any = mask.max() + 1
        return x.repeat(count, 1).sum(0)

    calls = [(torch.randn(2, 3), torch.tensor([most, 1])) for most in (3, 1, 7)]
    check(repeated, *calls, config=EmitConfig(bounds={"u0": 8}))
    program = torch.export.export(Of(repeated), calls[0])
    with pytest.raises(
        UnboundedSizeError, match=r'bounds=\{"u0": ...\} in lower, .*LowerdeckExporter'
    ):
        emit(program)


def test_a_fourier_transform_over_a_dynamic_size() -> None:
    """As FNet mixes tokens."""
    check(
        lambda x: torch.fft.fft2(x).real,
        *((torch.randn(rows, 6),) for rows in (5, 2, 16)),
        dynamic_shapes=(({0: Dim("rows", min=2, max=16)},),),
    )


def test_pad_by_a_dynamic_amount() -> None:
    calls = [(torch.randn(rows, 3),) for rows in (4, 2, 8)]
    check(
        lambda x: nn.functional.pad(x, (0, 0, 0, 8 - x.shape[0])),
        *calls,
        dynamic_shapes=(({0: Dim("rows", min=2, max=8)},),),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_item_of_a_half_precision_tensor(dtype: torch.dtype) -> None:
    calls = [(torch.tensor([1.0, 2.0, value]),) for value in (0.5, -4.0)]
    check(lambda x: x * x.to(dtype).sum().item(), *calls)
