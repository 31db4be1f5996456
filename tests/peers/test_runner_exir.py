"""The runner on programs that ExecuTorch's own compiler makes, beside eager."""

from __future__ import annotations

import pytest

import lowerdeck_zoo as zoo
from lowerdeck.runner import load

exir = pytest.importorskip("executorch.exir", reason="the full executorch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = ("map", "lstm", "counter_from_zero", "dynamic_mlp", "cond", "wav2letter")


@pytest.mark.parametrize("program", [one for one in zoo.PROGRAMS if one.name in NAMES], ids=str)
def test_programs_of_exir_give_what_eager_gives(program: zoo.Program) -> None:
    content = bytes(exir.to_edge(program.export_anew()).to_executorch().buffer)
    for memory in ("strict", "poison"):
        loaded = load(content, memory=memory)
        for call, result in zip(program.calls(), program.results(), strict=True):
            program.compare(loaded.method(call.method).run_flat(call.flat), result.outputs)
