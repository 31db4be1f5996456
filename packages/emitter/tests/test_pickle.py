"""An emitted program can be sent to another process."""

from __future__ import annotations

import copy
import pickle

import torch

from lowerdeck.emitter import EmitConfig, emit


def test_a_pickled_program_gives_the_same_files() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Tanh())
    program = torch.export.export(model, (torch.ones(1, 40),))
    for config in (EmitConfig(), EmitConfig(weights_file="weights")):
        emitted = emit(program, config=config)
        for again in (pickle.loads(pickle.dumps(emitted)), copy.deepcopy(emitted)):
            assert again.to_bytes() == emitted.to_bytes()
            assert again.external_files() == emitted.external_files()
            assert again.memory_plans.keys() == emitted.memory_plans.keys()
