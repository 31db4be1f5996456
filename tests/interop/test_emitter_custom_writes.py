"""Custom operators that write what they are given, with the official runtime's own kernels.

``llama::update_cache`` is the one of the wheel: what it returns nobody reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from lowerdeck.decompose import decompose
from lowerdeck.emitter import EmitConfig, emit
from lowerdeck.language_models.custom_kernels import register
from lowerdeck_zoo import official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)
CONFIG = EmitConfig(custom_kernels=frozenset({"llama::update_cache.out"}))

RUN = """
import json, os, sys
import torch
from executorch.extension.pybindings import _portable_lib
root = os.path.dirname(_portable_lib.__file__) + "/../.."
torch.ops.load_library(root + "/extension/llm/custom_ops/libcustom_ops_aot_lib.so")
path, inputs = sys.argv[1:]
calls = torch.load(inputs)
if path.endswith("bytes"):
    data = open(path, "rb").read()  # the runtime reads it for as long as it runs
    module = _portable_lib._load_for_executorch_from_buffer(data)
else:
    module = _portable_lib._load_for_executorch(path)
print(json.dumps([[one.tolist() for one in module.forward(call)] for call in calls]))
"""


def _write(cache: torch.Tensor, value: torch.Tensor, start: Any) -> None:
    torch.ops.llama.update_cache(value, cache, start)


def _last(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.cache, x * 2, start)
    return self.cache.sum(dim=(0, 2, 3))


def _old_is_read(self: Any, x: torch.Tensor, start: Any) -> Any:
    before = self.cache + 1
    _write(self.cache, x, start)
    return before.sum(), self.cache.sum()


def _old_is_read_afterwards(self: Any, x: torch.Tensor, start: Any) -> Any:
    kept = self.cache.clone()
    _write(self.cache, x, start)
    return (kept - self.cache).sum(), self.cache * 1


def _twice(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.cache, x, start)
    found = self.cache.sum()
    _write(self.cache, x * found, start)
    return found, self.cache.mean()


def _first_is_read_afterwards(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.cache, x, start)
    first = self.cache.clone()
    _write(self.cache, x + 1, start)
    return first.sum(), self.cache.sum()


def _first_is_returned(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.cache, x, start)
    first = self.cache.clone()
    _write(self.cache, x + 1, start)
    return first


def _no_state(_: Any, x: torch.Tensor, start: Any) -> Any:
    made = torch.zeros(1, 16, 2, 4) + x.sum()
    _write(made, x, start)
    return made


def _constant(self: Any, x: torch.Tensor, start: Any) -> Any:
    made = self.constant.clone()
    _write(made, x, start)
    return made.sum(), self.constant.sum()


def _input(_: Any, x: torch.Tensor, start: Any) -> Any:
    made = x.sum() + torch.zeros(1, 16, 2, 4)
    _write(made, x, start)
    return made + 1, x


def _branches(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.cache, x, start)
    return torch.cond(x.sum() > 0, lambda c: c + 1, lambda c: c * 2, (self.cache,))


def _began_otherwise(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.ones, x, start)
    return self.ones.sum(dim=(0, 2, 3))


def _half(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.halves, x.half(), start)
    return self.halves.float()


def _one_into_another(self: Any, x: torch.Tensor, start: Any) -> Any:
    _write(self.cache, x, start)
    _write(self.ones, self.cache[:, : x.shape[1]].clone(), start)
    return self.cache.sum(), self.ones.sum(dim=(0, 2, 3))


def _between_other_writes(self: Any, x: torch.Tensor, start: Any) -> Any:
    before = self.cache.clone()
    self.ones.copy_(before)
    _write(self.ones, x * 3, start)
    self.cache.add_(1)
    _write(self.cache, x, start)
    self.cache.mul_(0.5)
    return self.cache.sum(dim=(0, 2, 3)), self.ones.sum(dim=(0, 2, 3)), before.sum()


def _view_is_read(self: Any, x: torch.Tensor, start: Any) -> Any:
    view = self.ones[:, 2:6]
    _write(self.ones, x, start)
    return view.sum(dim=(0, 2, 3)), (view + 1).sum()


BODIES: dict[str, Callable[..., Any]] = {
    body.__name__: body
    for body in (
        _last,
        _old_is_read,
        _old_is_read_afterwards,
        _twice,
        _first_is_read_afterwards,
        _first_is_returned,
        _no_state,
        _constant,
        _input,
        _branches,
        _began_otherwise,
        _half,
        _one_into_another,
        _between_other_writes,
        _view_is_read,
    )
}
COPIES = {"_last": 0, "_old_is_read": 0, "_twice": 0}
"""How often the cache is copied where that was counted."""


class Caching(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("cache", torch.zeros(1, 16, 2, 4))
        self.register_buffer("ones", torch.ones(1, 16, 2, 4))
        self.register_buffer("halves", torch.full((1, 16, 2, 4), 0.5, dtype=torch.float16))
        self.constant = torch.ones(1, 16, 2, 4)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Any:
        start: Any = positions[0].item()
        torch._check(start >= 0)
        torch._check(start + x.shape[1] <= 16)
        return self.body(self, x, start)


def _calls() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        (torch.randn(1, n, 2, 4), torch.arange(at, at + n))
        for n, at in ((3, 0), (1, 3), (5, 4), (2, 1), (1, 15), (8, 8))
    ]


def _run(path: Path, tmp_path: Path, calls: Any = None) -> list[list[Any]]:
    torch.save(calls or _calls(), tmp_path / "inputs.pt")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(tmp_path / "inputs.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _exported(body: Callable[..., Any]) -> torch.export.ExportedProgram:
    register()
    n = Dim("n", min=1, max=8)
    return export(Caching(body), _calls()[0], dynamic_shapes=({1: n}, {0: n}))


@pytest.mark.parametrize("form", ["raw", "decompose", "run_decompositions", "saved"])
@pytest.mark.parametrize("name", BODIES)
def test_what_a_kernel_writes_is_what_eager_writes(name: str, form: str, tmp_path: Path) -> None:
    program = _exported(BODIES[name])
    if form == "decompose":
        program = decompose(program)
    elif form == "run_decompositions":
        program = program.run_decompositions()
    elif form == "saved":
        torch.export.save(program, tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2")
    emitted = emit(program, config=CONFIG)
    emitted.save(tmp_path / "model.pte")
    (tmp_path / "bytes").write_bytes(emitted.to_bytes())
    eager = Caching(BODIES[name])
    expected = [torch.utils._pytree.tree_leaves(eager(*call)) for call in _calls()]
    for path in (tmp_path / "model.pte", tmp_path / "bytes"):
        for got, wanted in zip(_run(path, tmp_path), expected, strict=True):
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(torch.tensor(one), other.detach(), atol=1e-5, rtol=1e-5)
    if name in COPIES:
        copies = [
            operator
            for plan in emitted.program.execution_plan
            for operator in plan.operators
            if "clone" in operator.name
        ]
        assert len(copies) == COPIES[name]


class _Given(nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> Any:
        start: Any = positions[0].item()
        torch._check(start >= 0)
        torch._check(start + x.shape[1] <= 16)
        _write(cache, x, start)
        return cache, cache * 2


@pytest.mark.parametrize("form", ["raw", "decompose"])
def test_a_kernel_may_write_what_the_caller_gives(form: str, tmp_path: Path) -> None:
    register()
    calls = [(*call, torch.full((1, 16, 2, 4), 0.5)) for call in _calls()]
    n = Dim("n", min=1, max=8)
    program = export(_Given(), calls[0], dynamic_shapes=({1: n}, {0: n}, None))
    emit(decompose(program) if form == "decompose" else program, config=CONFIG).save(
        tmp_path / "model.pte"
    )
    for got, call in zip(_run(tmp_path / "model.pte", tmp_path, calls), calls, strict=True):
        for one, wanted in zip(got, _Given()(*call), strict=True):
            torch.testing.assert_close(torch.tensor(one), wanted)
