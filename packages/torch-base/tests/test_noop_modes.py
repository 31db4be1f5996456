"""Modes that change no result go out of programs, which compute the very same afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export

from lowerdeck.torch_base import graphs_of, remove_noop_mode_regions
from lowerdeck_zoo import Of, saved_and_loaded

Mode = Callable[[], AbstractContextManager[Any]]


def _off() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)


def _on() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Within(nn.Module):
    """Layers in one mode in another, with state, a view that is written, control flow."""

    count: Tensor

    def __init__(self, outer: Mode, inner: Mode, *, branches: bool = False) -> None:
        super().__init__()
        self.outer, self.inner, self.branches = outer, inner, branches
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        # Branches of what has gradients make torch warn.
        self.requires_grad_(not branches)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with self.outer():
            y = self.first(x)
            with self.inner():
                z = self.second(x) @ x.transpose(0, 1)
                self.count.add_(1)
                z[0].mul_(2)
            if self.branches:
                z = torch.cond(z.float().sum() > 0, torch.sin, torch.cos, (z,))
            y = y * 2
        return y, z, x + self.count


def _calls(program: ExportedProgram) -> Iterator[str]:
    for gm in graphs_of(program.graph_module):
        yield from (str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def _modes(program: ExportedProgram) -> list[str]:
    words = ("wrap_with", "autocast", "set_grad", "tracepoint")
    return [name for name in _calls(program) if any(word in name for word in words)]


def _results(program: ExportedProgram, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = copy.deepcopy(program).module()(*inputs)
    return found


def _assert_same(made: ExportedProgram, program: ExportedProgram, x: Tensor) -> None:
    made.graph.lint()
    made.validate()  # type: ignore[no-untyped-call]
    for found, expected in zip(_results(made, (x,)), _results(program, (x,)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


IDLE = [
    *((torch.no_grad, torch.enable_grad), (torch.enable_grad, torch.no_grad)),
    *((torch.no_grad, _off), (_off, torch.no_grad), (_off, _off)),
]


def _program(outer: Mode, inner: Mode, way: str, x: Tensor) -> ExportedProgram:
    # torch cannot save a branch within autocast: it loses what entered the mode.
    branches = way == "branches" or (way == "loaded" and outer not in (_on, _off))
    program = export(Within(outer, inner, branches=branches), (x,))
    return saved_and_loaded(program) if way == "loaded" else program


WAYS = pytest.mark.parametrize("way", ["", "branches", "loaded"])


@WAYS
@pytest.mark.parametrize(("outer", "inner"), IDLE)
def test_what_is_in_idle_regions_stands_in_their_place(outer: Mode, inner: Mode, way: str) -> None:
    x = torch.randn(4, 4)
    program = _program(outer, inner, way, x)
    before = program.graph_module.print_readable(print_output=False)
    made = remove_noop_mode_regions(program)
    assert not _modes(made)
    assert program.graph_module.print_readable(print_output=False) == before
    _assert_same(made, program, x)
    if way == "loaded":
        _assert_same(saved_and_loaded(made), program, x)


@WAYS
@pytest.mark.parametrize(("outer", "inner"), [(_on, _off), (_off, _on), (_on, torch.no_grad)])
def test_autocast_that_is_on_stays_and_so_does_what_turns_it_off_inside(
    outer: Mode, inner: Mode, way: str
) -> None:
    x = torch.randn(4, 4)
    program = _program(outer, inner, way, x)
    made = remove_noop_mode_regions(program)
    assert any("autocast" in name for name in _modes(made))
    assert not any("grad" in name for name in _modes(made))
    _assert_same(made, program, x)


def test_a_program_without_idle_modes_is_returned_itself() -> None:
    program = export(nn.Linear(4, 4), (torch.randn(2, 4),))
    assert remove_noop_mode_regions(program) is program


def test_marks_of_preserved_calls_give_what_they_pass_on() -> None:
    def forward(own: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = own.layer(x)
        return own.layer(y) + 1

    model, x = Of(forward, layer=nn.Linear(4, 4)), torch.randn(2, 4)
    program = export(model, (x,), preserve_module_call_signature=("layer",))
    assert any("tracepoint" in name for name in _modes(program))
    made = remove_noop_mode_regions(program)
    assert not _modes(made)
    torch.testing.assert_close(made.module()(x), program.module()(x), rtol=0, atol=0)


class Varying(nn.Module):
    """Sizes that vary are read, computed with and passed on, in regions and out of them."""

    seen: Tensor

    def __init__(self, outer: Mode, inner: Mode) -> None:
        super().__init__()
        self.outer, self.inner = outer, inner
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with self.outer():
            rows = x.shape[0] * 2
            y = self.layer(x).reshape(rows, -1)
            with self.inner():
                z = torch.cat([y, y.new_ones(rows, 1)], 1)
                self.seen.add_(x.shape[0])
            y = y[: x.shape[0]] + z.sum()
        return y, z, self.seen + rows


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(("outer", "inner"), [(torch.no_grad, _off), (_off, torch.no_grad)])
def test_sizes_that_vary_pass_the_borders_of_regions(
    outer: Mode, inner: Mode, loaded: bool
) -> None:
    model = Varying(outer, inner)
    rows = torch.export.Dim("rows", min=2, max=16)
    program = export(model, (torch.randn(4, 4),), dynamic_shapes=({0: rows},))
    if loaded:
        program = saved_and_loaded(program)
    assert _modes(program)
    made = remove_noop_mode_regions(program)
    assert not _modes(made)
    assert made.range_constraints == program.range_constraints
    for count in (2, 4, 9):
        _assert_same(made, program, torch.randn(count, 4))
    again = saved_and_loaded(made)
    _assert_same(again, program, torch.randn(7, 4))
