"""What we expect of torch's private parts; a new torch that breaks it breaks one of these."""

from __future__ import annotations

import torch

from lowerdeck.lowered_module._torch_private import bare_program
from lowerdeck_zoo import exported


def test_a_bare_program_is_a_whole_program() -> None:
    program = exported(torch.nn.Linear(2, 2), torch.ones(1, 2))
    bare = bare_program(
        program.graph_module,
        program.graph_signature,
        state_dict=program.state_dict,
        constants=program.constants,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        verifiers=list(program.verifiers),
    )
    assert set(vars(bare)) == set(vars(program))
    bare.validate()  # type: ignore[no-untyped-call]
    x = torch.ones(1, 2)
    torch.testing.assert_close(bare.module()(x), program.module()(x))
