"""compare() finds no difference in right programs of the zoo, and the layer that was spoilt."""

from __future__ import annotations

import pytest
import torch

import lowerdeck_zoo as zoo
from lowerdeck.emitter import emit
from lowerdeck.runner import compare, load

SMALL = [
    one
    for one in zoo.programs(
        *("vision", "layers", "recurrent", "graphs", "layouts", "audio", "outputs"),
        without="large several-methods stateful in-place quantised half complex dynamic",
    )
    if not one.name.startswith("views_of")
]
LAYERS = [one for one in SMALL if one.has("layers") or one.has("recurrent")]


@pytest.mark.parametrize("program", SMALL, ids=str)
def test_a_right_program_has_no_difference(program: zoo.Program) -> None:
    module, exported, inputs = program.module(), program.export(), program.calls()[0].args
    emitted = emit(exported)
    for debug in (None, emitted):
        loaded = load(emitted.to_bytes(), memory="poison", debug=debug)
        for reference in (module, exported):
            comparison = compare(loaded, reference, inputs, atol=program.atol, rtol=program.rtol)
            assert comparison.first is None, str(comparison)


@pytest.mark.parametrize("program", LAYERS, ids=str)
def test_a_spoilt_weight_makes_a_difference(program: zoo.Program) -> None:
    module, emitted = program.module(), emit(program.export())
    with torch.no_grad():
        for weight in list(module.parameters())[:1]:
            weight.mul_(1.5).add_(0.1)
            loaded = load(emitted.to_bytes(), debug=emitted)
            assert compare(loaded, module, program.calls()[0].args).first is not None
