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


def _off() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)


def _on() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


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
            found = query @ (key.transpose(1, 2) @ query)
            found = found / (found.sum(1, keepdim=True) + 1)
        result: Tensor = self.after(found.float().unflatten(2, x.shape[2:]))
        return result


@pytest.mark.parametrize("mode", [_off, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("preserved", [(), ("before", "after")])
def test_idle_regions_are_in_one_delegate(
    mode: Callable[[], AbstractContextManager[Any]], preserved: tuple[str, ...]
) -> None:
    model, x = Attends(mode).eval(), torch.randn(1, 3, 6, 6)
    program = torch.export.export(model, (x,), preserve_module_call_signature=preserved)
    lowered = to_backend(program, XnnpackPartitioner())
    assert len(get_lowered_backend_modules(lowered.graph_module)) == 1
    assert [node.op for node in lowered.graph.nodes].count("call_function") == 2
    torch.testing.assert_close(lowered.module()(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(emit(lowered).program.execution_plan[0].delegates) == 1


def test_regions_of_autocast_are_left_with_a_reason_and_are_as_eager() -> None:
    model, x = Attends(_on).eval(), torch.randn(1, 3, 6, 6)
    partitioner = XnnpackPartitioner()
    lowered = to_backend(torch.export.export(model, (x,)), partitioner)
    assert len(get_lowered_backend_modules(lowered.graph_module)) == 2
    assert any("graphs of its own" in reason for reason in partitioner.refused.values())
    torch.testing.assert_close(lowered.module()(x), model(x), rtol=1e-5, atol=1e-5)


class BesideBranches(nn.Module):
    """Runs under autocast beside a branch, so that export writes the mode's calls out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = torch.cond(x.sum() > 0, lambda one: one.sin(), lambda one: one.cos(), (x,))
            found = self.layer(found)
        result: Tensor = self.layer(found.float())
        return result


def test_what_asserts_behind_a_mode_is_in_no_partition_before_it() -> None:
    torch.manual_seed(0)
    model, x = BesideBranches().eval(), torch.randn(2, 4)
    program = torch.export.export(model, (x,))
    assert any("exit_autocast" in str(node.target) for node in program.graph.nodes)
    lowered = to_backend(program, XnnpackPartitioner())
    torch.testing.assert_close(lowered.module()(x), model(x), atol=3e-2, rtol=3e-2)


class ConstantsBesideBranches(nn.Module):
    """Computes constants before, in and behind autocast that is on, and reads them elsewhere.

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
        with torch.autocast("cpu", dtype=torch.bfloat16):
            within = torch.arange(4.0).cos()
            y = x * before if self.read == "within" else self.layer(x)
            y = torch.cond(y.float().sum() > 0, torch.sin, torch.cos, (y,))
            if self.read == "own":
                y = y.float() * within
        result: Tensor = y.float() * 2
        if self.read == "before":
            result = y * before
        elif self.read == "behind":
            result = torch.relu(x) * within + y.float()
        elif self.read == "both":
            result = y.float() * within + before
        return result


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("read", ["before", "within", "behind", "both", "own"])
def test_constants_of_another_mode_are_in_no_partition_that_reads_them(
    read: str, decomposed: bool
) -> None:
    torch.manual_seed(0)
    model, x = ConstantsBesideBranches(read).eval(), torch.randn(4, 4)
    program = torch.export.export(model, (x,))
    program = program.run_decompositions() if decomposed else program
    lowered = to_backend(program, XnnpackPartitioner())
    assert get_lowered_backend_modules(lowered.graph_module)
    torch.testing.assert_close(lowered.module()(x), model(x), atol=3e-2, rtol=3e-2)
