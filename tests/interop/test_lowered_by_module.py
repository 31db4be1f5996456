"""Delegation by modules: in the official runtime, and back in the modules by unflattening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    ModulePartitioner,
    PartitionError,
    get_delegates,
    get_lowered_backend_modules,
    to_backend,
)
from lowerdeck.unflatten import unflatten
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Holding, Of, exported, official


class Block(
    Holding, norm=lambda: nn.LayerNorm(8), fc=lambda: nn.Linear(8, 8), seen=lambda: torch.zeros(())
):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return torch.add(x, self.fc(self.norm(x)).relu() * self.seen)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        # The first one again: its calls are before and after the others.
        result: Tensor = self.head(self.layers[0](x).relu())
        return result


def paths(program: torch.export.ExportedProgram) -> list[list[str]]:
    """Return the modules that the nodes of each delegate were in."""
    found = []
    for delegate in get_lowered_backend_modules(program.graph_module):
        names = set()
        for node in delegate.original_module.graph.nodes:
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            if node.op == "call_function" and stack:
                names.add(".".join(stack[-1][0].split("@")[0].split(".")[:2]))
        found.append(sorted(names))
    return found


@pytest.mark.parametrize(
    "by_module",
    [
        {"layers.*": XnnpackPartitioner()},
        {"layers.1": XnnpackPartitioner(), "head": XnnpackPartitioner()},
        {"layers.*.fc": XnnpackPartitioner(), "layers.2": XnnpackPartitioner()},
    ],
    ids=["layers", "one and head", "inner before outer"],
)
def test_files_compute_what_eager_does(tmp_path: Path, by_module: dict[str, Any]) -> None:
    torch.manual_seed(0)
    eager, x = Net().eval(), torch.randn(4, 8)
    lowered = to_backend(exported(eager, x), ModulePartitioner(by_module))
    assert get_delegates(lowered.graph)
    path = tmp_path / "by_module.pte"
    emit(lowered).save(path)
    calls = [official.Call((x,)), official.Call((x + 1,))]
    outputs = official.outputs(path, calls)
    with torch.no_grad():
        wanted = [eager(x), eager(x + 1)]
    for found, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(found[0], want, atol=1e-5, rtol=1e-4)


def test_delegates_are_in_their_modules_and_span_no_two() -> None:
    eager, x = Net().eval(), torch.randn(4, 8)
    lowered = to_backend(exported(eager, x), ModulePartitioner({"layers.*": XnnpackPartitioner()}))
    found = paths(lowered)
    assert len(found) >= 4
    assert all(len(names) == 1 and names[0].startswith("layers.") for names in found)
    whole = paths(to_backend(exported(eager, x), XnnpackPartitioner()))
    assert any(len(names) > 1 for names in whole)
    module = unflatten(lowered)
    for name in ("layers.0", "layers.1", "layers.2"):
        assert "executorch_call_delegate" in module.get_submodule(name).code, name
    assert "executorch_call_delegate" not in module.get_submodule("head").code
    with torch.no_grad():
        torch.testing.assert_close(module(x), Net.forward(eager, x))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("decomposed", [False, True])
def test_calls_of_one_module_running_are_in_it(
    *, nested: bool, strict: bool, decomposed: bool
) -> None:
    step = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if nested else nn.Linear(8, 8)
    eager = Of(lambda self, x: self.step(self.step(self.step(x))), step=step).eval()
    x = torch.randn(4, 8)
    program = torch.export.export(eager, (x,), strict=strict)
    if decomposed:
        program = program.run_decompositions()
    lowered = to_backend(program, ModulePartitioner({"step": XnnpackPartitioner()}))
    assert len(get_lowered_backend_modules(lowered.graph_module)) == 3
    module = unflatten(lowered)
    assert "executorch_call_delegate" not in module.code
    assert "executorch_call_delegate" in module.get_submodule("step").code
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(x))


# The first reads what the user passes in, which belongs to no delegate.
@pytest.mark.parametrize("path", ["stem", "head"])
def test_a_backend_may_take_everything_of_a_module(path: str) -> None:
    eager, x = Net().eval(), torch.randn(4, 8)
    lowered = to_backend(exported(eager, x), ModulePartitioner({path: "XnnpackBackend"}))
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert delegate.backend_id == "XnnpackBackend"
    assert set(lowered.state_dict) == {
        name for name in eager.state_dict() if not name.startswith(f"{path}.")
    }
    with torch.no_grad():
        torch.testing.assert_close(lowered.module()(x), Net.forward(eager, x))


def test_patterns_that_name_no_module_are_refused() -> None:
    eager, x = Net().eval(), torch.randn(4, 8)
    program = exported(eager, x)
    with pytest.raises(PartitionError, match=r"'layer\.\*' in by_module.*module: stem, layers.0"):
        to_backend(program, ModulePartitioner({"layer.*": XnnpackPartitioner()}))
    for wrong in ({}, {"stem": XnnpackPartitioner}, {"stem": 3}, {3: "X"}, ["stem"]):
        with pytest.raises(PartitionError, match="expected a"):
            ModulePartitioner(wrong)  # type: ignore[arg-type]
