"""XNNPACK payloads of this project in the official runtime, with eager as the judge."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.serializer import verify_pte
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official
from tests.interop.runs import assert_whole, check, file_of, run

from quantized_cases import as_runtime, run_time_cases, static_cases  # isort: skip
from recognised_cases import NEAR, WRITTEN_OUT, model_of  # isort: skip
from xnnpack_cases import Case, cases  # isort: skip


def whole_file(case: Case, *, decomposed: bool = False) -> bytes:
    """Return the file of a case, of which XNNPACK computes all."""
    program = torch.export.export(case.model, case.inputs, dynamic_shapes=case.dynamic)
    program = program.run_decompositions() if decomposed else program
    lowered = to_backend(program, XnnpackPartitioner())
    if not decomposed:
        assert_whole(lowered)
    file = emit(lowered).to_bytes()
    verify_pte(file)
    return file


@pytest.mark.parametrize("decomposed", [False, True], ids=["raw", "decomposed"])
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_each_operator_runs_there_as_one_delegate_and_equals_eager(
    case: Case, decomposed: bool, tmp_path: Path
) -> None:
    calls = [case.inputs, *case.others]
    outputs = run(whole_file(case, decomposed=decomposed), calls, tmp_path)
    for found, inputs in zip(outputs, calls, strict=True):
        case.check(found, inputs)


@pytest.mark.parametrize("case", list(static_cases()), ids=str)
def test_integers_equal_eager_to_a_step(case: Case, tmp_path: Path) -> None:
    file = whole_file(case)
    for folder in (tmp_path, None):
        case.check(run(file, [case.inputs], folder)[0], case.inputs, 0)


@pytest.mark.parametrize("case", list(run_time_cases()), ids=str)
def test_layers_that_quantise_at_run_time_equal_the_formula(case: Case, tmp_path: Path) -> None:
    file = whole_file(case)
    for folder in (tmp_path, None):
        found = run(file, [case.inputs], folder)[0]
        with as_runtime():
            case.check(found, case.inputs)


@pytest.mark.parametrize("name", [*NEAR, *WRITTEN_OUT])
def test_decomposed_programs_equal_eager(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, inputs = model_of(*(NEAR | WRITTEN_OUT)[name][1:])
    check(model, inputs, inputs, folder=tmp_path, decomposed=True)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vit"])
def test_whole_models_are_one_delegate_and_equal_eager(name: str) -> None:
    model, inputs = importlib.import_module(f"examples.{name}").example()
    lowered = to_backend(torch.export.export(model, inputs), XnnpackPartitioner())
    assert_whole(lowered)
    (outputs,) = run(emit(lowered).to_bytes(), [inputs])
    with torch.no_grad():
        torch.testing.assert_close(outputs[0], model(*inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
def test_weights_in_a_file_of_their_own(tagged: bool, mapped: bool, tmp_path: Path) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8)
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 3, 4, 4)
    exported = torch.export.export(model, (x,))
    if tagged:
        for node in exported.graph.find_nodes(op="placeholder"):
            node.meta["custom"] = {"delegate_constant_tag": "weights"}
    config = EmitConfig(weights_file=None if tagged else "weights")
    emitted = emit(to_backend(exported, XnnpackPartitioner()), config=config)
    assert not emitted.named_data.get_named_data_store_output().pte_data
    emitted.save(tmp_path / "model.pte")
    paths = tmp_path / "model.pte", tmp_path / "weights.ptd"
    program, data = paths if mapped else [path.read_bytes() for path in paths]
    outputs = official.outputs(program, [(x,)], data=data)
    torch.testing.assert_close(outputs[0][0], model(x), rtol=0, atol=1e-5)
    assert not isinstance(official.run(program, [official.Call((x,))]), official.Ran)


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sqrt(), x**0.5, x.rsqrt(), (x * x * x).sqrt()


def test_square_roots_of_float16_know_zero_infinity_and_what_is_below(tmp_path: Path) -> None:
    x = torch.tensor([-0.0, 0.0, 1.5, -1.0, 6e-8, 65504.0, math.nan, math.inf]).half()
    (found,) = run(file_of(Root(), (x,)), [(x,)], tmp_path)
    for one, wanted in zip(found, Root()(x), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-3, atol=0, equal_nan=True)
    assert torch.equal(found[0][:2].signbit(), torch.tensor([True, False]))
