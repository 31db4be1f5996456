"""Which placeholders of a program are constant, and their tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowerdeck.lowered_module import constant_names, constant_tensors


class Model(nn.Module):
    """A parameter, a constant buffer, one that is written through a view, and a lifted tensor."""

    still: Tensor
    written: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("still", torch.ones(2))
        self.register_buffer("written", torch.zeros(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.written[1].add_(x)
        # What is read by a write in place to something else stays a constant.
        return (self.weight * x).add_(self.still) + torch.tensor([5.0, 6.0])


def test_what_a_run_writes_is_no_constant_before_and_after_functionalisation() -> None:
    raw = torch.export.export(Model(), (torch.ones(2),))
    for program in (raw, raw.run_decompositions({})):
        names = constant_names(program)
        assert {"weight", "still"} < set(names.values())
        assert "written" not in names.values()
        tensors = constant_tensors(program)
        assert tensors.keys() == names.keys()
        by_target = {names[name]: tensor for name, tensor in tensors.items()}
        assert torch.equal(by_target["weight"], torch.full((2,), 3.0))
        assert not by_target["weight"].requires_grad
        (lifted,) = by_target.keys() - {"weight", "still"}
        assert torch.equal(by_target[lifted], torch.tensor([5.0, 6.0]))
