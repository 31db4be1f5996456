"""Text from the official runtime, of which only the worker of ``lowerdeck.runner`` is used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowerdeck.language_models import LanguageModelError, generating
from lowerdeck.language_models.generating import ModelFile, Timing, generate
from lowerdeck.runner import OfficialCalls, OfficialRuntimeError


class Counting:
    """A runtime in which each token is followed by the next number; 9 ends its process."""

    name = "counting"

    def __init__(self, *, extra_kernels: bool) -> None:
        self.closed = False

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def load(self, path: Path, *, methods: list[str]) -> None:
        assert methods == ["forward"]

    def run(self, inputs: tuple[torch.Tensor, torch.Tensor], method: str) -> OfficialCalls:
        last = int(inputs[0][0, -1])
        if last == 9:
            raise OfficialRuntimeError("the official runtime failed: no such operator")
        return OfficialCalls([torch.eye(16)[last + 1].reshape(1, 1, 16)], [0.5])


def test_tokens_and_times_of_the_official_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generating, "OfficialRuntime", Counting)
    program: Any = SimpleNamespace(methods=("forward",))
    model, timing = ModelFile(Path("model.pte"), 2, 64, (7,), program), Timing()
    tokens = list(generate(model, [1, 2, 3], 8, official=True, timing=timing))
    assert tokens == [4, 5, 6]
    assert timing == Timing("counting", 3, 1.0, 3, 1.5)
    with pytest.raises(
        LanguageModelError, match=r"model\.pte: .*no such operator; --runtime lowerdeck"
    ):
        list(generate(model, [9], 8, official=True, timing=Timing()))
