"""Which way programs go, what templates outlive, and several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from program_likeness import differences  # type: ignore[import-not-found]
from torch import nn

from lowerdeck.decompose import DecompositionCache, decompose, explain

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
]

GELU: Any = torch.ops.aten.gelu.default


class Layers(nn.Module):
    calls: torch.Tensor

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.forward(x) * self.calls


class Second(nn.Module):
    def __init__(self, model: Layers) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.counted(x)


def _exported(model: nn.Module, width: int) -> torch.export.ExportedProgram:
    return torch.export.export(model, (torch.randn(2, width),))


def _table(rule: Any) -> Any:
    return {**torch.export.default_decompositions().materialize(), GELU: rule}


def test_a_rule_that_fails_is_told_and_is_torchs_to_raise() -> None:
    def broken(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        raise ZeroDivisionError("no such gelu")

    program, table = _exported(Layers(4, 2), 4), _table(broken)
    told = explain(program, table)
    assert told.failed
    assert "gelu.default cannot be traced by itself: ZeroDivisionError: no such gelu" in str(told)
    with pytest.raises(ZeroDivisionError, match="no such gelu"):
        decompose(program, table)
    assert not explain(program).failed


def test_a_rule_that_looks_at_numbers_is_no_template() -> None:
    def choosing(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3

    cache = DecompositionCache()
    program, table = _exported(Layers(4, 1), 4), _table(choosing)
    told = explain(program, table, cache=cache)
    assert told.failed
    assert told.reason is not None
    assert "data-dependent" in told.reason
    assert not [key for key in cache._templates if key[1][0] is GELU]


def test_a_rule_that_makes_unknown_sizes_is_no_template() -> None:
    def finding(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return x + torch.nonzero(x).sum()

    cache = DecompositionCache()
    program, table = _exported(Layers(4, 1), 4), _table(finding)
    told = explain(program, table, cache=cache)
    assert told.reason is not None
    assert "known only at run time" in told.reason
    assert not [key for key in cache._templates if key[1][0] is GELU]
    # Tracing gives symbols the numbers that are free, and so other names.
    ours, theirs = decompose(program, table), program.run_decompositions(table)
    targets = [[node.target for node in each.graph.nodes] for each in (ours, theirs)]
    assert targets[0] == targets[1]


@pytest.mark.parametrize("shared", [False, True])
def test_threads_may_decompose_at_once(shared: bool) -> None:
    programs = [_exported(Layers(width, 3), width) for width in (3, 4, 5, 6)] * 2
    expected = [program.run_decompositions() for program in programs]
    cache = DecompositionCache() if shared else None
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda program: decompose(program, cache=cache), programs))
    for one, other in zip(found, expected, strict=True):
        assert not differences(one, other)


@pytest.mark.parametrize("size", [2, 100])
def test_models_and_methods_share_a_cache_that_stays_small(size: int) -> None:
    cache = DecompositionCache(size)
    small, wide = Layers(4, 3), Layers(8, 2)
    for _ in range(2):
        for model, width in ((small, 4), (Second(small), 4), (wide, 8), (Second(wide), 8)):
            program = _exported(model, width)
            assert not differences(decompose(program, cache=cache), program.run_decompositions())
            assert len(cache) <= size
    if size == 100:
        assert explain(_exported(Layers(8, 7), 8), cache=cache).traces == 0
        assert explain(_exported(Second(Layers(4, 7)), 4), cache=cache).traces == 0
