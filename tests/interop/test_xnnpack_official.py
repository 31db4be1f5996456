"""XNNPACK payloads of this project in the official runtime, with eager as the judge."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch

from lowerdeck_zoo import official

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/xnnpack/tests"))
from xnnpack_cases import Case, cases

from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner

pytestmark = [
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    # torch's own, from copying a tree spec inside run_decompositions
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    # and of even kernels
    pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning"),
    # and of every recurrent layer
    pytest.mark.filterwarnings("ignore:The tensor attributes self.layer:UserWarning"),
]


def lowered(
    model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: object = None
) -> tuple[bytes, int, int]:
    """Return the file, the number of delegates, and the number of calls left to others."""
    exported = torch.export.export(model, inputs, dynamic_shapes=dynamic)
    program = to_backend(exported, XnnpackPartitioner())
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    delegates = sum("executorch_call_delegate" in call for call in calls)
    others = sum("getitem" not in call and "sym_size" not in call for call in calls) - delegates
    return emit(program).to_bytes(), delegates, others


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_each_operator_runs_there_as_one_delegate_and_equals_eager(
    case: Case, tmp_path: Path
) -> None:
    file, delegates, others = lowered(case.model, case.inputs, case.dynamic)
    assert (delegates, others) == (1, 0)
    inputs = [case.inputs, *case.others]
    # From a path, where the runtime frees weights that it copied.
    path = tmp_path / "model.pte"
    path.write_bytes(file)
    outcome = official.run(path, [official.Call(one) for one in inputs])
    assert isinstance(outcome, official.Ran), outcome
    for given, outputs in zip(inputs, outcome.outputs, strict=True):
        with torch.no_grad():
            expected = case.model(*given)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        assert len(outputs) == len(wanted)
        for found, right in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vit"])
def test_whole_models_are_one_delegate_and_equal_eager(name: str) -> None:
    model, inputs = importlib.import_module(f"examples.{name}").example()
    file, delegates, others = lowered(model, inputs)
    assert (delegates, others) == (1, 0)
    outcome = official.run(file, [official.Call(inputs)])
    assert isinstance(outcome, official.Ran), outcome
    with torch.no_grad():
        torch.testing.assert_close(outcome.outputs[0][0], model(*inputs), rtol=0, atol=1e-4)


class Overwrites(torch.nn.Module):
    table: torch.Tensor
    row: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4, 3))
        self.register_buffer("row", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # What is written is an expanded row, which has no such view; the table has.
        self.table.copy_(self.row)
        return x + self.table.view(-1)


def test_constants_are_viewed_wherever_they_lie_after_folding() -> None:
    model, x = Overwrites().eval(), torch.randn(12)
    lowered = to_backend(torch.export.export(model, (x,)), XnnpackPartitioner())
    outcome = official.run(emit(lowered).to_bytes(), [official.Call((x,))])
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], model(x))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
def test_weights_in_a_file_of_their_own(tagged: bool, mapped: bool, tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 8)),
    ).eval()
    x = torch.randn(1, 3, 4, 4)
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
    outcome = official.run(program, [official.Call((x,))], data=data)
    assert isinstance(outcome, official.Ran), outcome
    torch.testing.assert_close(outcome.outputs[0][0], model(x), rtol=0, atol=1e-5)
    alone = official.run(program, [official.Call((x,))])
    assert not isinstance(alone, official.Ran)


def test_square_roots_of_float16_know_zero_infinity_and_what_is_below(tmp_path: Path) -> None:
    class Root(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.sqrt(), x**0.5, x.rsqrt(), (x * x * x).sqrt()

    x = torch.tensor([-0.0, 0.0, 1.5, -1.0, 6e-8, 65504.0, math.nan, math.inf]).half()
    file, delegates, _ = lowered(Root(), (x,))
    assert delegates == 1
    path = tmp_path / "root.pte"
    path.write_bytes(file)
    outcome = official.run(path, [official.Call((x,))])
    assert isinstance(outcome, official.Ran), outcome
    (found,) = outcome.outputs
    for one, wanted in zip(found, Root()(x), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-3, atol=0, equal_nan=True)
    assert torch.equal(found[0][:2].signbit(), torch.tensor([True, False]))
