"""Custom operators that write what they are given; ``tests/interop`` runs one of the runtime's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from lowerdeck.emitter import EmitConfig, MissingKernelError, UnsupportedError, emit
from lowerdeck.serializer import Tensor

CONFIG = EmitConfig(custom_kernels=frozenset({"test_writes::add_one"}))


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        torch.ops.test_writes.add_one(made)
        return made


class WritesAView(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        torch.ops.test_writes.add_one(made[1:])
        return made


class WritesOneTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        torch.ops.test_writes.add_both(made, made)
        return made


@pytest.fixture
def library() -> Iterator[None]:
    made: Any = torch.library.Library("test_writes", "FRAGMENT")  # type: ignore[no-untyped-call]
    made.define("add_one(Tensor(a!) x) -> ()")
    made.define("add_both(Tensor(a!) x, Tensor(b!) y) -> ()")

    def add_one(x: torch.Tensor) -> None:
        x.add_(1)

    def add_both(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(1)
        y.add_(1)

    made.impl("add_one", add_one, "CompositeExplicitAutograd")
    made.impl("add_both", add_both, "CompositeExplicitAutograd")
    yield
    made._destroy()


def test_an_operator_that_only_writes_is_its_own_kernel(library: None) -> None:
    program = export(Writes(), (torch.ones(3),))
    emitted = emit(program, config=CONFIG)
    (plan,) = emitted.program.execution_plan
    assert [operator.name for operator in plan.operators] == ["aten::mul", "test_writes::add_one"]
    with pytest.raises(MissingKernelError, match="add_one"):
        emit(program)


@pytest.mark.parametrize(
    ("model", "what"), [(WritesAView, "writes a view"), (WritesOneTwice, "two names")]
)
def test_what_a_kernel_may_not_write_is_refused(
    model: type[nn.Module], what: str, library: None
) -> None:
    with pytest.raises(UnsupportedError, match=f"add_.*{what}.*expected whole tensors"):
        emit(export(model(), (torch.ones(3),)).run_decompositions(), config=CONFIG)


class Begins(nn.Module):
    held: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.test_writes.add_one(self.held)
        return self.held + x


def test_what_only_a_kernel_writes_begins_as_the_model_has_it(library: None) -> None:
    emitted = emit(export(Begins(), (torch.ones(3),)), config=CONFIG)
    (plan,) = emitted.program.execution_plan
    tensors = [one.val for one in plan.values if isinstance(one.val, Tensor)]
    assert [one.data_buffer_idx for one in tensors if one.data_buffer_idx] == [1]
