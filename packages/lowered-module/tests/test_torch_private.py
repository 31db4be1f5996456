"""What this package expects of torch's private parts."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowerdeck.lowered_module._torch_private import (
    FakeScriptObject,
    SpecViolationError,
    active_fake_mode,
    fake_mode_of,
)


def test_fake_modes_are_found() -> None:
    mode = FakeTensorMode()
    assert active_fake_mode() is None
    with mode:
        assert active_fake_mode() is mode
        fake = torch.zeros(2)
    assert fake_mode_of([1, {"a": fake}]) is mode
    assert fake_mode_of([torch.zeros(1)]) is None


def test_a_program_that_breaks_its_rules_is_refused() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    next(iter(reversed(program.graph.nodes))).args = ((),)
    with pytest.raises(SpecViolationError):
        program.validate()  # type: ignore[no-untyped-call]


def test_values_of_an_exported_program_are_fake() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    assert fake_mode_of(next(iter(program.graph.nodes)).meta["val"]) is not None
    assert isinstance(FakeScriptObject, type)
