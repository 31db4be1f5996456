"""Buffers that a cache holds by a second name."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from program_likeness import assert_as_eager  # type: ignore[import-not-found]
from torch import Tensor, nn

from lowerdeck.decompose import decompose
from lowerdeck_zoo import exported


class TwoNames(nn.Module):
    """Keeps its buffer in a plain object, too, as caches of language models do."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 3), persistent=False)
        self.keeps = SimpleNamespace(memory=self.cache)

    def forward(self, x: Tensor) -> Tensor:
        """Write by the one name, and read by both."""
        self.keeps.memory[0].add_(x[1])
        made: Tensor = self.cache + self.keeps.memory * 2
        return made


def test_a_write_by_one_name_is_read_by_the_other() -> None:
    assert_as_eager(TwoNames(), torch.ones(2, 3))


def test_the_program_given_is_not_changed() -> None:
    program = exported(TwoNames(), torch.ones(2, 3))
    before = str(program.graph)
    made = decompose(program)
    assert str(program.graph) == before
    assert len(made.graph_signature.input_specs) < len(program.graph_signature.input_specs)
