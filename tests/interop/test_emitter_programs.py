"""Whole programs in the official runtime: state, several methods, memories, delegates, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate

from lowerdeck.emitter import EmitConfig, EmittedProgram, emit, fast_and_large
from lowerdeck.serializer import NamedDataStore, deserialize_pte
from lowerdeck_zoo import assert_close, exported, official, program

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

CORPUS = Path(__file__).resolve().parent / "corpus"


def outputs(emitted: EmittedProgram, calls: list[official.Call], **options: Any) -> list[Any]:
    outcome = official.run(emitted.to_bytes(), calls, **options)
    assert isinstance(outcome, official.Ran), outcome
    return outcome.outputs


def test_state_lies_in_a_memory_of_its_own_at_one_offset_in_all_methods() -> None:
    emitted = emit(program("push_peek_from_zero").exports())
    offsets = [
        {(b.name, b.memory_id, b.offset) for b in plan.blocks if b.role == "state"}
        for plan in emitted.memory_plans.values()
    ]
    assert offsets[0] == offsets[1]
    assert len(offsets[0]) == 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + x


def test_a_small_fast_memory_beside_a_large_one() -> None:
    model, x = Model(), torch.randn(4, 8)
    config = EmitConfig(memory_planner=fast_and_large(256))
    emitted = emit(exported(model, x), config=config)
    (plan,) = emitted.memory_plans.values()
    assert 0 < plan.sizes[1] <= 256
    assert plan.sizes[2] > 0
    assert emitted.program.execution_plan[0].non_const_buffer_sizes == list(plan.sizes)
    ((got,),) = outputs(emitted, [official.Call((x,))])
    torch.testing.assert_close(got, model(x))


def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(4, 8)
    emitted = emit(exported(model, x), config=EmitConfig(weights_file="weights"))
    emitted.save(tmp_path / "model.pte")
    assert (tmp_path / "weights.ptd").stat().st_size > 64 * 8 * 4 * 2
    outcome = official.run(
        tmp_path / "model.pte", [official.Call((x,))], data=tmp_path / "weights.ptd"
    )
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], model(x))


def test_constant_methods_come_back() -> None:
    values = {
        "get_max": 128,
        "get_ratio": 0.5,
        "use_cache": True,
        "get_name": "model",
        "get_infinity": float("inf"),
        "get_table": torch.arange(4),
        "get_nothing": None,
    }
    emitted = emit(exported(Model(), torch.ones(1, 8)), config=EmitConfig(constant_methods=values))
    found = outputs(emitted, [official.Call((), name) for name in values])
    assert_close([one[0] for one in found], list(values.values()))


class LoweredBackendModule(nn.Module):
    """A module whose bytes another compiler made."""

    def __init__(self, original: Any, delegate: Any, content: bytes, named: Any) -> None:
        super().__init__()
        self.original_module = original
        self.backend_id = delegate.id
        self.processed_bytes = content
        self.compile_specs = delegate.compile_specs
        self.named_data_store_output = named

    def forward(self, *args: torch.Tensor) -> Any:
        return executorch_call_delegate(self, *args)


class Stand(nn.Module):
    """Tells torch the shape of what a delegate returns."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.new_zeros(self.sizes) + x.sum() * 0,)


class Around(nn.Module):
    """Two delegates, one of them in a branch, with operators between them."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.features(x * 1.0)
        y = y.mean((2, 3))
        return torch.cond(
            y.sum() > -1e9, lambda v: self.head(v)[0] + 1, lambda v: v[:, :10] * 0, (y,)
        )


@pytest.mark.parametrize("segments", [True, False])
def test_delegates_of_the_official_runtime_run(segments: bool) -> None:
    program = deserialize_pte((CORPUS / "conv_xnnpack.pte").read_bytes())
    (call,) = torch.load(CORPUS / "conv_xnnpack.io.pt", weights_only=False)["calls"][:1]
    store = NamedDataStore()
    for item in program.named_data:
        store.add_named_data(item.key, item.data, item.alignment)
    named = store.get_named_data_store_output()
    lowered = []
    for delegate, inner, example in zip(
        program.execution_plan[0].delegates,
        (Stand(2, 64, 8, 8), Stand(2, 10)),
        (torch.ones(2, 3, 32, 32), torch.ones(2, 64)),
        strict=True,
    ):
        data = bytes(program.backend_delegate_data[delegate.processed.index].data)
        lowered.append(LoweredBackendModule(exported(inner, example), delegate, data, named))
    emitted = emit(exported(Around(*lowered), *call["inputs"], strict=False))
    content = emitted.to_bytes(extract_delegate_segments=segments)
    outcome = official.run(content, [official.Call(call["inputs"])])
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(
        outcome.outputs[0][0], call["outputs"][0] + 1, atol=call["atol"], rtol=call["rtol"]
    )
