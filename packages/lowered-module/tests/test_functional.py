"""A lowered program equals eager whatever it writes in place, or its lowering is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered_helpers import assert_behaves, calls_of, delegates, everything, runs_of
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    AliasingError,
    MethodProgramsPartitionerSpec,
    OwnershipError,
    Partitioner,
    PartitionResult,
    to_backend,
)
from lowerdeck.lowered_module.testing import TaggingPartitioner
from lowerdeck_zoo import Holding, Of, exported

aten = torch.ops.aten
X = torch.tensor([[1.5, -2.0], [-1.0, 3.0]])


class Cache(Holding, cache=lambda: torch.zeros(3, 2)):
    def forward(self, x: Tensor) -> Any:
        self.cache[1] = x[0]
        return self.cache + 1


class ThroughView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        row = y[0]
        row.add_(1)
        return y + row


class BeforeAndAfter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        before = y.sin()
        y.mul_(3)
        return before + y.sin()


class InputChanged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.relu_()
        return x + 1


class SameType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.type_as(x)
        y[0] = 5
        return x * 2


class Normalised(nn.Module):
    """Norms that train, whose schemas hide that they write their running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(2)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)

    def train(self, mode: bool = True) -> Normalised:
        return super().train(True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean: Any = self.batch.running_mean
        other: Any = self.instance.running_mean
        before = mean.sin()
        y = self.batch(x) + self.instance(x[None])[0]
        return before, y, mean.sin(), other * 2


MODELS = (Normalised, Cache, ThroughView, BeforeAndAfter, InputChanged, SameType)


def by_calls(wanted: Callable[[Node], bool]) -> TaggingPartitioner:
    """Return a partitioner that gives each wanted call a partition of its own; state stays."""

    def tag_of(node: Node) -> str | None:
        return f"p_{node.name}" if node.op == "call_function" and wanted(node) else None

    return TaggingPartitioner(tag_of, state=False)


@pytest.mark.parametrize("model", MODELS)
def test_every_choice_of_operators_gives_what_eager_gives(model: type[nn.Module]) -> None:
    eager = model().eval()
    operators = {node.target for node in calls_of(exported(model(), X.clone()))}
    choices: list[Any] = [by_calls(lambda node, one=one: node.target is one) for one in operators]  # type: ignore[misc]
    choices += [everything(state=False), by_calls(lambda _: True)]
    for partitioner in choices:
        lowered = to_backend(exported(model(), X.clone()), partitioner).module()
        assert_behaves(lowered, eager, X, calls=2)
    whole = to_backend("VerbatimBackend", exported(model(), X.clone()), [])
    assert_behaves(whole, eager, X, calls=2)


class Seeing(Partitioner):
    """Keeps the operators of each program that a partitioner is given."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.seen = inner, list[set[Any]]()

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self.seen.append({node.target for node in exported_program.graph.nodes})
        result: PartitionResult = self.inner(exported_program)
        return result


@pytest.mark.parametrize("model", [Cache, ThroughView])
def test_a_partitioner_is_asked_once_about_a_functional_program(model: type[nn.Module]) -> None:
    partitioner = Seeing(everything(state=False))
    lowered = to_backend(exported(model(), X), partitioner)
    (seen,) = partitioner.seen
    assert aten.add.Tensor in seen
    assert seen.isdisjoint({aten.add_.Tensor, aten.copy_.default})
    written = ["cache"] if model is Cache else []
    assert list(lowered.graph_signature.buffers_to_mutate.values()) == written


def _shows(self: Any, x: Tensor) -> Any:
    """Change one of two buffers, which are views of one memory."""
    before = (self.high * x).relu()
    self.low.add_(x)
    return self.high * before + 1


@pytest.mark.parametrize("chosen", ["mul", "relu", "add", "add_"])
@pytest.mark.parametrize("start", [2, 4, 0])
def test_overlapping_buffers_are_lowered_right_or_refused_by_name(start: int, chosen: str) -> None:
    memory = torch.arange(8.0)
    model = Of(_shows, low=memory[:4], high=memory[start : start + 4])
    program = exported(model, torch.ones(4))
    before = str(program.graph)
    partitioner = by_calls(lambda node: chosen in str(node.target).split("."))
    if start == 2:
        words = "the program writes in place.*'low' and 'high' overlap in memory, and 'add_'"
        with pytest.raises(AliasingError, match=words):
            to_backend(program, partitioner)
    else:
        lowered = to_backend(program, partitioner).module()
        for x in (torch.ones(4), torch.arange(4.0)):
            assert torch.equal(lowered(x), model(x))
    assert str(program.graph) == before


def _writes(self: Any, x: Tensor) -> Tensor:
    self.cache[1] = x[0]
    return x + 1


def methods(read: Any = lambda self, x: x @ self.cache.t()) -> dict[str, ExportedProgram]:
    """Return programs that share a buffer, which the second one writes."""
    functions, cache = {"read": read, "write": _writes}, torch.zeros(3, 2)
    return {n: exported(Of(one, cache=cache), torch.ones(2, 2)) for n, one in functions.items()}


@pytest.mark.parametrize("partitioner", [everything(state=False), by_calls(lambda _: False)])
def test_methods_that_are_lowered_together_keep_one_state(partitioner: Any) -> None:
    programs = methods()
    lowered = to_backend(
        MethodProgramsPartitionerSpec(programs, dict.fromkeys(programs, partitioner))
    )
    # No method owns as a constant what another method changes.
    for delegate in delegates(lowered["read"]):
        assert not delegate.original_module.state_dict
    x = torch.randn(2, 2)
    lowered["write"].module()(x)
    expected = torch.zeros(3, 2)
    expected[1] = x[0]
    torch.testing.assert_close(lowered["read"].module()(x), x @ expected.t())
    assert not programs["write"].state_dict["cache"].any()


def test_state_that_two_methods_use_is_no_delegates_own() -> None:
    together = {n: one.run_decompositions({}) for n, one in methods(_writes).items()}
    lowered = to_backend(
        MethodProgramsPartitionerSpec(together, dict.fromkeys(together, everything()))
    )
    emit(lowered)
    for program in lowered.values():
        assert "cache" in program.graph_signature.buffers_to_mutate.values()


def test_a_constant_that_shares_memory_with_changing_state_is_no_constant() -> None:
    def insists(program: ExportedProgram) -> PartitionResult:
        result = runs_of("add.Tensor")(program)
        for node in program.graph.find_nodes(op="placeholder"):
            if node.name == "b_part":
                node.meta["delegation_tag"] = next(iter(result.partition_tags))
        return result

    def adds(self: Any, x: Tensor) -> Any:
        self.whole.add_(1)
        return x + self.part

    memory = torch.zeros(4)
    model = Of(adds, whole=memory[:3], part=memory[2:])
    with pytest.raises((OwnershipError, AliasingError), match="part"):
        to_backend(exported(model, torch.ones(2)), insists)
