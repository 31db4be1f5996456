"""Whole programs in the official runtime: state, several methods, memories, delegates, weights."""

from __future__ import annotations

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.executorch_call_delegate import executorch_call_delegate
from torch.export import export

from lowerdeck.emitter import EmitConfig, EmittedProgram, emit, fast_and_large
from lowerdeck.serializer import NamedDataStore, deserialize_pte
from lowerdeck_zoo import assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

CORPUS = Path(__file__).resolve().parent / "corpus"


def exported(module: nn.Module, *args: Any, **options: Any) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export(module.eval(), args, **options)


def outputs(emitted: EmittedProgram, calls: list[official.Call], **options: Any) -> list[Any]:
    outcome = official.run(emitted.to_bytes(), calls, **options)
    assert isinstance(outcome, official.Ran), outcome
    return outcome.outputs


class Cache(nn.Module):
    """Keeps the last rows that it was given; two methods read and write one buffer."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("rows", torch.full((4, 3), start))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Push(nn.Module):
    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.rows.copy_(torch.cat([self.cache.rows[1:], x]))
        self.cache.count.add_(1)
        return self.cache.rows.sum(0)


class Peek(nn.Module):
    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Large temporaries, which must not lie where the state does.
        wide = (x @ x.t()).exp().sum() * 0
        self.cache.count.add_(1)
        return self.cache.rows.sum(0) + wide + self.cache.count


@pytest.mark.parametrize("start", [0.0, 2.5])
def test_methods_share_state_where_they_share_arenas(start: float) -> None:
    cache = Cache(start)
    push, peek = Push(cache), Peek(cache)
    emitted = emit(
        {"push": exported(push, torch.ones(1, 3)), "peek": exported(peek, torch.ones(8, 3))}
    )
    calls = [("peek", torch.randn(8, 3))]  # both methods are loaded before state changes
    calls += [("push", torch.randn(1, 3)), ("peek", torch.randn(8, 3))] * 2
    if start:
        # Loading a method sets its initial values, so push is loaded first by a call, too.
        calls = [("push", torch.randn(1, 3)), *calls[:0], ("push", torch.randn(1, 3))]
    found = outputs(emitted, [official.Call((x,), name) for name, x in calls], shared_arenas=True)
    for (name, x), (got,) in zip(calls, found, strict=True):
        expected = {"push": push, "peek": peek}[name](x)
        torch.testing.assert_close(got, expected)


def test_state_lies_in_a_memory_of_its_own_at_one_offset_in_all_methods() -> None:
    cache = Cache(0.0)
    emitted = emit(
        {
            "push": exported(Push(cache), torch.ones(1, 3)),
            "peek": exported(Peek(cache), torch.ones(8, 3)),
        }
    )
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


def test_a_mutated_input_is_given_back_and_read_anew() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = x * 2
            x.add_(1)
            return old + x

    x = torch.randn(3)
    ((got,),) = outputs(emit(exported(Add(), x.clone())), [official.Call((x.clone(),))])
    torch.testing.assert_close(got, Add()(copy.deepcopy(x)))


class Quantized(nn.Module):
    """Byte weights with a scale a row, activations quantised and back, as pt2e leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (4, 3), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(4) + 0.01)
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ops = torch.ops.quantized_decomposed
        coded = ops.quantize_per_tensor(x, 0.1, 3, -128, 127, torch.int8)
        read = ops.dequantize_per_tensor(coded, 0.1, 3, -128, 127, torch.int8)
        weight = ops.dequantize_per_channel(
            self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
        )
        return nn.functional.linear(read, weight), coded


def test_quantised_operators_without_a_kernel_become_arithmetic() -> None:
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    module, x = Quantized(), torch.randn(2, 3) * 3
    ((result, coded),) = outputs(emit(exported(module, x)), [official.Call((x,))])
    wanted, wanted_code = module(x)
    torch.testing.assert_close(result, wanted)
    assert torch.equal(coded, wanted_code)
