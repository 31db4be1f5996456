"""Regions of modes that change no result do not cut a program into several delegates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_lowered_backend_modules, to_backend
from lowerdeck.xnnpack import XnnpackPartitioner


class Attends(nn.Module):
    """Attention by two products, computed in float32 whatever is around it, as efficientvit's."""

    def __init__(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.mode = mode
        self.before, self.after = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.before(x).flatten(2).chunk(2, 1)
        with self.mode(), torch.no_grad():
            query, key = query.float().relu(), key.float().relu()
            product = query @ (key.transpose(1, 2) @ query)
            product = product / (product.sum(1, keepdim=True) + 1)
        result: Tensor = self.after(product.float().unflatten(2, x.shape[2:]))
        return result


def _autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize(
    ("mode", "preserved"),
    [
        (lambda: _autocast(False), ()),
        (torch.no_grad, ()),
        (torch.enable_grad, ("before", "after")),
        (_autocast, ()),
    ],
)
def test_idle_regions_are_in_one_delegate_and_others_are_left_with_a_reason(
    mode: Callable[[], AbstractContextManager[Any]], preserved: tuple[str, ...]
) -> None:
    model, x, partitioner = Attends(mode).eval(), torch.randn(1, 3, 6, 6), XnnpackPartitioner()
    program = torch.export.export(model, (x,), preserve_module_call_signature=preserved)
    lowered = to_backend(program, partitioner)
    torch.testing.assert_close(lowered.module()(x), model(x), rtol=1e-5, atol=1e-5)
    if mode is _autocast:
        assert len(get_lowered_backend_modules(lowered.graph_module)) == 2
        assert any("contains subgraphs" in reason for reason in partitioner.refused.values())
    else:
        assert [node.op for node in lowered.graph.nodes].count("call_function") == 2
        assert len(emit(lowered).program.execution_plan[0].delegates) == 1


class BesideBranches(nn.Module):
    """Runs under autocast beside a branch, so that export writes the mode's calls out.

    Constants are computed before, in and behind the region, and read elsewhere.

    Args:
        read: Where: ``"before"``, ``"within"``, ``"behind"``, ``"both"``, ``"own"``.
    """

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read, self.layer = read, nn.Linear(4, 4)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.arange(4.0).sin()
        if self.read == "own":
            x = x + before
        with _autocast():
            within = torch.arange(4.0).cos()
            y = x * before if self.read == "within" else self.layer(x)
            y = torch.cond(y.float().sum() > 0, torch.sin, torch.cos, (y,))
            if self.read == "own":
                y = y.float() * within
        results = {
            "before": lambda: y * before,
            "behind": lambda: torch.relu(x) * within + y.float(),
            "both": lambda: y.float() * within + before,
            "own": lambda: self.layer(y.float()),
        }
        result: Tensor = results.get(self.read, lambda: y.float() * 2)()
        return result


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("read", ["before", "within", "behind", "both", "own"])
def test_constants_and_assertions_stay_on_their_side_of_a_mode(
    read: str, decomposed: bool
) -> None:
    torch.manual_seed(0)
    model, x = BesideBranches(read).eval(), torch.randn(4, 4)
    program = torch.export.export(model, (x,))
    assert any("exit_autocast" in str(node.target) for node in program.graph.nodes)
    program = program.run_decompositions() if decomposed else program
    lowered = to_backend(program, XnnpackPartitioner())
    assert get_lowered_backend_modules(lowered.graph_module)
    torch.testing.assert_close(lowered.module()(x), model(x), atol=3e-2, rtol=3e-2)
