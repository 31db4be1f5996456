"""Models of every kind and random raw programs, taken apart as torch takes them apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lowerdeck.decompose import decompose, explain
from lowerdeck.torch_base import explicit
from tests.interop.zoo import MODELS, Model
from tests.soak.raw_programs import raw_program

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/decompose/tests"))
from program_likeness import differences

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]

# torch's own result is wrong: a scalar written to a whole buffer makes the buffer a scalar.
WRONG_IN_TORCH = frozenset({202})
# Two views are made once more than torch makes them; the numbers are the same.
VIEWED_AGAIN = frozenset({342})


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_come_out_as_torch_gives_them(model: Model) -> None:
    program = explicit(model.export()[1])
    assert explain(program).reason is None
    assert not differences(decompose(program), program.run_decompositions())


@pytest.mark.parametrize("start", range(0, 400, 20))
def test_raw_programs_come_out_as_torch_gives_them(start: int) -> None:
    unlike = {}
    for seed in set(range(start, start + 20)) - WRONG_IN_TORCH - VIEWED_AGAIN:
        made = raw_program(seed)
        for name, model in made.models().items():
            try:
                program = torch.export.export(
                    model, made.example(name), dynamic_shapes=made.dynamic_shapes()
                )
                said = explicit(program)
                expected = said.run_decompositions()
            except Exception:  # noqa: BLE001, RUF100  (whatever torch cannot do is not ours)
                continue
            found = differences(decompose(program), expected)
            if found:
                unlike[f"{seed}/{name}"] = found
    assert not unlike
