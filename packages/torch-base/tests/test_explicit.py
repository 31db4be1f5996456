"""What torch's functionalisation would lose is said before torch sees it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lowerdeck.torch_base import aliasing_parts, explicit
from lowerdeck_zoo import Of
from lowerdeck_zoo import exported as zoo_exported

aten = torch.ops.aten


def _dropped(x: Tensor) -> Any:
    views = (
        nn.functional.dropout(x, 0.5, False),
        nn.functional.feature_alpha_dropout(x, 0.5, False),
        nn.functional.alpha_dropout(x, 0.5, False),
        nn.functional.dropout1d(x, 0.5, False),
    )
    x.add_(1)
    return tuple(view * 2 for view in views)


def _hidden(x: Tensor) -> Any:
    same = x.type_as(x)
    turned = torch.einsum("ij->ji", x)
    (wide,) = torch.atleast_2d([x])  # type: ignore[no-untyped-call]
    first, _ = torch.broadcast_tensors(x, torch.ones(2, 3))  # type: ignore[no-untyped-call]
    x.mul_(3)
    return same + 1, turned + 1, wide + 1, first + 1


class TwoNames(nn.Module):
    """Keeps its buffer in a plain object, too, as caches of language models do."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 3), persistent=False)
        self.keeps = SimpleNamespace(memory=self.cache)

    def forward(self, x: Tensor) -> Tensor:
        self.keeps.memory[0].add_(x[1])
        made: Tensor = self.cache + self.keeps.memory * 2
        return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two names": TwoNames,
    "dropped": lambda: Of(_dropped),
    "hidden": lambda: Of(_hidden),
}


def exported(model: nn.Module) -> ExportedProgram:
    return zoo_exported(copy.deepcopy(model), torch.ones(2, 3))


@pytest.mark.parametrize("name", MODELS)
def test_what_torch_makes_functional_is_what_eager_computes(name: str) -> None:
    eager = MODELS[name]()
    program = explicit(exported(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        functional = program.run_decompositions(aliasing_parts(program)).module()
    for step in range(2):
        given = torch.tensor([[1.5, -2.25, 3.0], [0.25, 2.0, -1.0]]) + step
        own = given.clone()
        torch.testing.assert_close(functional(own), eager(given))
        torch.testing.assert_close(own, given)
    for name, value in eager.named_buffers():
        torch.testing.assert_close(dict(functional.named_buffers())[name], value)


def test_the_program_given_is_not_changed() -> None:
    program = exported(TwoNames())
    before = str(program.graph)
    made = explicit(program)
    assert str(program.graph) == before
    assert made is not program
    made.graph.lint()


def test_where_nothing_is_hidden_the_program_itself_comes_back() -> None:
    program = exported(nn.Linear(3, 3))
    assert explicit(program) is program
    assert aliasing_parts(program) == {}


def test_a_dropout_is_an_alias_only_where_something_is_written_through_it() -> None:
    def idle(x: Tensor) -> Tensor:
        y = x * 2
        if write == "before":
            y.add_(1)
        y = nn.functional.dropout(y, training=False)
        return y.add_(1) if write == "after" else y + 1

    for write in ("never", "before", "after"):
        program = exported(Of(idle))
        targets = [node.target for node in explicit(program).graph.nodes]
        assert (aten.alias.default in targets) is (write == "after")
        assert (explicit(program) is program) is (write != "after")
