"""Generated programs: eager, lowered, the runner and the official runtime agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import get_delegates, to_backend
from lowerdeck.lowered_module.testing import generated
from lowerdeck.runner import load
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


def tensors(values):
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def agree(sample, lowered, calls=3):
    content = emit(lowered).to_bytes()
    loaded = load(content)
    outcome = official.run(content, [official.Call(sample.inputs) for _ in range(calls)])
    assert isinstance(outcome, official.Ran), outcome
    eager, found = copy.deepcopy(sample.module), lowered.module()
    with torch.no_grad():
        for number in range(calls):
            wanted = tensors(eager(*sample.inputs))
            for other in (
                tensors(found(*sample.inputs)),
                tensors(loaded.run("forward", *sample.inputs)),
                tensors(outcome.outputs[number]),
            ):
                for one, two in zip(other, wanted, strict=True):
                    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_generated_programs_with_state(seed):
    sample = generated(seed, 8, control_flow=False, dynamic=seed in (1, 3))
    lowered = to_backend(sample.export(), XnnpackPartitioner())
    agree(sample, lowered)


def test_a_generated_program_with_branches():
    sample = generated(9, 8)
    agree(sample, to_backend(sample.export(), XnnpackPartitioner()))


def test_what_is_delegated_is_delegated():
    sample = generated(0, 8, control_flow=False)
    assert get_delegates(to_backend(sample.export(), XnnpackPartitioner()).graph)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_generated_programs(seed):
    sample = generated(seed, 14, control_flow=seed % 5 == 0)
    agree(sample, to_backend(sample.export(), XnnpackPartitioner()))
