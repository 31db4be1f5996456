"""Mixtures of experts with a batch and a length that vary: modules swapped and called alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from lowerdeck.unflatten import export_preserving, unflatten


class Experts(nn.Module):
    """Is given the rows of all sequences, and makes two of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows = x.shape[0]
        order = chosen.reshape(-1).argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(2 * rows)
        given = x[order // 2]
        made = torch.einsum("ri,rio->ro", given, self.weight[chosen.reshape(-1)[order]])
        return (made[back].view(rows, 2, 8) * weights[..., None]).sum(1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        rows = x.reshape(-1, size)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        made: Tensor = self.experts(rows, chosen, weights)
        return made.reshape(batch, length, size)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_experts_ask_the_rows_that_they_are_given() -> None:
    eager, x = Layers().eval(), torch.randn(2, 7, 8)
    sizes = ({0: Dim("b", max=16), 1: Dim("t", max=32)},)
    for export in (export_preserving, torch.export.export):
        program = export(eager, (x,), dynamic_shapes=sizes)
        made: Any = unflatten(program, preserve="all")
        assert all(row.callable_alone for row in made.swappable() if row.called)
        for shape in ((2, 7, 8), (3, 11, 8)):
            y = torch.randn(shape)
            torch.testing.assert_close(made.layers[1](y), eager.layers[1](y))
    program = export_preserving(eager, (x,), dynamic_shapes=sizes)
    _check_swaps(program, eager, {"x": torch.randn(3, 11, 8)})


def test_each_module_of_a_mixture_can_be_swapped() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    eager = transformers.MixtralForCausalLM(config).eval()
    given = {"input_ids": torch.randint(0, 64, (2, 7)), "use_cache": False}
    sizes = {"input_ids": {0: Dim("b", max=16), 1: Dim("t", max=32)}, "use_cache": None}
    program = export_preserving(eager, (), given, dynamic_shapes=sizes)
    _check_swaps(program, eager, {"input_ids": torch.randint(0, 64, (3, 11)), "use_cache": False})


@torch.no_grad()
def _check_swaps(program: torch.export.ExportedProgram, eager: nn.Module, given: Any) -> None:
    made = unflatten(program)
    rows = [row for row in made.swappable() if row.called]
    assert all(row.replaceable and row.callable_alone for row in rows)
    wanted = _first(eager(**given))
    for row in rows:
        before = made.get_submodule(row.path)
        made.set_submodule(row.path, copy.deepcopy(eager.get_submodule(row.path)))
        torch.testing.assert_close(_first(made(**given)), wanted, msg=row.path)
        made.set_submodule(row.path, before)


def _first(result: Any) -> Tensor:
    found: Tensor = result if isinstance(result, Tensor) else result.logits
    return found
