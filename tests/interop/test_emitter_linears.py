"""Linear layers of decomposed programs in the official runtime: eager's numbers, and no copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree

from lowerdeck.decompose import decompose
from lowerdeck.emitter import emit
from lowerdeck_zoo import assert_close, official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)


class Layers(nn.Module):
    def __init__(self, body: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.second = nn.Linear(40, 30), nn.Linear(30, 40, bias=False)
        self.register_buffer("state", torch.randn(30, 40))
        self.to(dtype)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def _written(self: Any, x: Tensor) -> Any:
    # The product is by the weight as it was.
    turned = self.state.t()
    found = x @ turned
    self.state.add_(1)
    return found, x @ turned, x @ self.state.t()


def _kept_and_written(self: Any, x: Tensor) -> Any:
    turned = self.state.t().clone()
    self.state.mul_(2)
    return x @ turned, x @ self.state.t()


def _branches(self: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, self.first, lambda x: x @ self.second.weight, (x,))


BODIES: dict[str, Callable[..., Any]] = {
    "two": lambda self, x: self.second(self.first(x).relu()),
    "one for two": lambda self, x: (self.first(x), self.first(x * 2)),
    "three dimensions": lambda self, x: self.first(x.unsqueeze(0)),
    "vector": lambda self, x: self.first(x[0]),
    "by itself": lambda _, x: x @ x.t(),
    "shares a transpose": lambda self, x: (x @ self.first.weight.t(), self.first.weight.t() + 1),
    "of a part": lambda self, x: x[:, :20] @ self.first.weight[:, :20].t(),
    "bias of one": lambda self, x: torch.addmm(self.first.bias[:1], x, self.first.weight.t()),
    "factors": lambda self, x: torch.addmm(
        self.first.bias, x, self.first.weight.t(), beta=0.5, alpha=2
    ),
    "written": _written,
    "kept and written": _kept_and_written,
    "branches": _branches,
}


def _decomposed(program: ExportedProgram, form: str) -> ExportedProgram:
    if form == "decompose":
        return decompose(program)
    return program.run_decompositions() if form == "run_decompositions" else program


@pytest.mark.parametrize("form", ["raw", "decompose", "run_decompositions"])
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_numbers_are_those_of_eager(name: str, varies: bool, form: str, tmp_path: Path) -> None:
    sizes = [{0: Dim("rows", min=1, max=8)}] if varies else None
    given = torch.randn(3, 40)
    program = export(Layers(BODIES[name]), (given,), dynamic_shapes=sizes)
    path = tmp_path / "model.pte"
    emit(_decomposed(program, form)).save(path)
    calls = [given, -given, *([torch.randn(1, 40), torch.randn(8, 40)] if varies else [])]
    eager = Layers(BODIES[name])
    for case in (path, path.read_bytes()):
        ran = official.run(case, [official.Call((call,)) for call in calls])
        assert isinstance(ran, official.Ran), ran
        eager = Layers(BODIES[name])
        for call, found in zip(calls, ran.outputs, strict=True):
            with torch.no_grad():
                wanted = pytree.tree_leaves(eager(call))
            assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    given = torch.randn(3, 40, dtype=dtype)
    model = Layers(BODIES["two"], dtype)
    path = tmp_path / "model.pte"
    emit(decompose(export(model, (given,)))).save(path)
    ran = official.run(path, [official.Call((given,))])
    assert isinstance(ran, official.Ran), ran
    assert_close(ran.outputs[0], [model(given).detach()], atol=1e-2, rtol=1e-2)
