"""A lowered program equals eager whatever it writes in place, or its lowering is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.emitter import UnsupportedError, emit
from lowerdeck.lowered_module import (
    AliasingError,
    DelegationSpec,
    MethodProgramsPartitionerSpec,
    OwnershipError,
    Partitioner,
    PartitionResult,
    get_lowered_backend_modules,
    tag_constant_data,
    tag_mutated_buffer,
    to_backend,
)
from lowerdeck.lowered_module.program.functional import first_harm, functional, writes_outside
from lowerdeck.lowered_module.testing import RunPartitioner, VerbatimBackend

aten = torch.ops.aten
assert VerbatimBackend.__name__ == "VerbatimBackend"


class Takes(Partitioner):
    """Gives each node that is wanted to a partition of its own, or all to one."""

    def __init__(self, wanted: Callable[[Node], bool], *, together: bool = False) -> None:
        super().__init__()
        self._wanted = wanted
        self._together = together
        self.runs = 0

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self.runs += 1
        tags = {}
        for gm in (exported_program.graph_module,):
            for number, node in enumerate(gm.graph.nodes):
                if node.op == "call_function" and self._wanted(node):
                    tag = "all" if self._together else f"p{number}"
                    node.meta["delegation_tag"] = tag
                    tags[tag] = DelegationSpec("VerbatimBackend", [])
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)


def calls(*operators: object) -> Callable[[Node], bool]:
    return lambda node: node.target in operators


class Cache(nn.Module):
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
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


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(x, 0.5, self.training)
        x.add_(1)
        return y * 2


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
        mean = self.batch.running_mean
        other = self.instance.running_mean
        assert mean is not None
        assert other is not None
        before = mean.sin()
        y = self.batch(x) + self.instance(x[None])[0]
        return before, y, mean.sin(), other * 2


MODELS = (Normalised, Cache, ThroughView, BeforeAndAfter, InputChanged, Dropped, SameType)


def exported(model: nn.Module) -> ExportedProgram:
    return torch.export.export(copy.deepcopy(model).eval(), (torch.ones(2, 2) * 2,))


@pytest.mark.parametrize("model", MODELS)
def test_every_choice_of_operators_gives_what_eager_gives(model: type[nn.Module]) -> None:
    eager = model().eval()
    operators = {node.target for node in exported(eager).graph.nodes if node.op == "call_function"}
    choices = [Takes(lambda node: True, together=True), Takes(lambda node: True)]
    choices += [Takes(calls(operator)) for operator in operators]
    for partitioner in choices:
        expected, ours = copy.deepcopy(eager), exported(eager)
        lowered = to_backend(ours, partitioner).module()
        for step in range(2):
            given = torch.tensor([[1.5, -2.0], [-1.0, 3.0]]) + step
            own = given.clone()
            torch.testing.assert_close(lowered(own), expected(given))
            torch.testing.assert_close(own, given)
        found = dict(lowered.named_buffers())
        for name, value in expected.named_buffers():
            # Nobody reads the count of an instance norm: the program may have given it away.
            if name in found or "num_batches" not in name:
                torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_program_gives_what_eager_gives(model: type[nn.Module]) -> None:
    eager = model().eval()
    delegate = to_backend("VerbatimBackend", exported(eager), [])
    for step in range(2):
        given = torch.tensor([[1.5, -2.0], [-1.0, 3.0]]) + step
        own = given.clone()
        torch.testing.assert_close(delegate(own), eager(given))
        torch.testing.assert_close(own, given)


def test_what_a_partition_makes_and_writes_alone_is_left_as_it_is() -> None:
    program = exported(ThroughView())
    partitioner = Takes(lambda node: True, together=True)
    lowered = to_backend(program, partitioner)
    assert partitioner.runs == 1
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    inner = delegate.original_module.graph
    assert inner.find_nodes(op="call_function", target=aten.add_.Tensor)


def test_the_partitioner_sees_the_functional_form_where_a_write_would_be_lost() -> None:
    partitioner = Takes(calls(aten.select.int))
    lowered = to_backend(exported(Cache()), partitioner)
    assert partitioner.runs == 2
    targets = {node.target for node in lowered.graph.nodes}
    assert aten.copy_.default not in targets
    assert list(lowered.graph_signature.buffers_to_mutate.values()) == ["cache"]


def test_a_program_that_writes_nothing_is_never_traced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("traced again")

    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    to_backend(exported(nn.Linear(2, 2)), Takes(lambda node: True, together=True))


def test_harm_names_the_writer_and_what_is_touched() -> None:
    program = exported(Cache())
    select = next(node for node in program.graph.nodes if node.target is aten.select.int)
    other = [node for node in program.graph.nodes if node.target is aten.select.int][1]
    node = other if other.args[0].name == "b_cache" else select
    node.meta["delegation_tag"] = "p"
    harm = first_harm(program, {"p"})
    assert harm is not None
    assert str(harm) == (
        f"partition 'p' would take {node.name!r} (aten.select.int), whose memory 'copy_' "
        "(aten.copy_.default) writes"
    )
    assert first_harm(program, set()) is None


def test_what_torch_cannot_make_functional_is_refused_with_both_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no way")

    program = exported(Cache())
    before = str(program.graph)
    monkeypatch.setattr("lowerdeck.lowered_module.program.functional.decompose", fail)
    with pytest.raises(AliasingError, match=r"'select.*'copy_'.*RuntimeError: no way"):
        to_backend(program, Takes(calls(aten.select.int)))
    assert str(program.graph) == before


class Overlapping(nn.Module):
    """Two buffers that are views of one memory, of which one is changed."""

    low: Tensor
    high: Tensor

    def __init__(self, second: slice) -> None:
        super().__init__()
        memory = torch.arange(8.0)
        self.register_buffer("low", memory[:4])
        self.register_buffer("high", memory[second])

    def forward(self, x: Tensor) -> Tensor:
        before = (self.high * x).relu()
        self.low.add_(x)
        return self.high * before + 1


@pytest.mark.parametrize("chosen", ["mul", "relu", "add", "add_"])
@pytest.mark.parametrize("second", [slice(2, 6), slice(4, 8), slice(0, 4)])
def test_overlapping_buffers_are_lowered_right_or_refused_by_name(
    second: slice, chosen: str
) -> None:
    model = Overlapping(second)
    program = torch.export.export(model, (torch.ones(4),))
    partitioner = RunPartitioner(lambda node: chosen in str(node.target).split("."))
    if second == slice(2, 6) and chosen in ("mul", "add_"):
        with pytest.raises(AliasingError, match="'low' and 'high' overlap in memory, and 'add_'"):
            to_backend(program, partitioner)
        return
    lowered = to_backend(program, partitioner).module()
    for x in (torch.ones(4), torch.arange(4.0)):
        assert torch.equal(lowered(x), model(x))


def test_writes_to_what_is_given_are_found_and_others_are_not() -> None:
    assert writes_outside(exported(ThroughView())) is None
    for model in (Cache, InputChanged):
        writer = writes_outside(exported(model()))
        assert writer is not None
        assert writer.target in {aten.copy_.default, aten.relu_.default}
    assert writes_outside(functional(exported(Cache()), "")) is None


class Reads(nn.Module):
    cache: Tensor

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.register_buffer("cache", cache.cache)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.cache.t()


class Writes(nn.Module):
    cache: Tensor

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.register_buffer("cache", cache.cache)

    def forward(self, x: Tensor) -> Tensor:
        self.cache[1] = x[0]
        return x + 1


def test_no_method_owns_as_constant_what_another_method_changes() -> None:
    state = Cache()
    programs = {
        "read": torch.export.export(Reads(state), (torch.ones(2, 2),)),
        "write": torch.export.export(Writes(state), (torch.ones(2, 2),)),
    }
    everything = Takes(lambda node: True, together=True)
    lowered = to_backend(
        MethodProgramsPartitionerSpec(programs, dict.fromkeys(programs, everything))
    )
    for delegate in get_lowered_backend_modules(lowered["read"].graph_module):
        assert not delegate.original_module.state_dict
    x = torch.randn(2, 2)
    lowered["write"].module()(x)
    expected = torch.zeros(3, 2)
    expected[1] = x[0]
    torch.testing.assert_close(lowered["read"].module()(x), x @ expected.t())


@pytest.mark.parametrize("loaded", [False, True])
def test_methods_lowered_apart_of_which_one_compiled_the_state_are_refused(
    loaded: bool, tmp_path: Path
) -> None:
    state = Cache()
    programs = {
        "read": torch.export.export(Reads(state), (torch.ones(2, 2),)),
        "write": torch.export.export(Writes(state), (torch.ones(2, 2),)),
    }
    if loaded:
        for name, program in programs.items():
            torch.export.save(program, tmp_path / f"{name}.pt2")
            programs[name] = torch.export.load(tmp_path / f"{name}.pt2")
    everything = Takes(lambda node: True, together=True)
    lowered = {name: to_backend(program, everything) for name, program in programs.items()}
    assert emit(lowered["read"]).program.execution_plan
    with pytest.raises(UnsupportedError, match=r"holds 'cache' as a constant.*in one call"):
        emit(lowered)


class OwnsState(Takes):
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        result = super().partition(exported_program)
        tag_mutated_buffer(exported_program)
        return result


def test_state_that_two_methods_use_is_no_delegates_own() -> None:
    def programs() -> dict[str, ExportedProgram]:
        state = Cache()
        return {
            "one": torch.export.export(Writes(state), (torch.ones(2, 2),)).run_decompositions({}),
            "two": torch.export.export(Writes(state), (torch.ones(2, 2),)).run_decompositions({}),
        }

    owner = OwnsState(lambda node: True, together=True)
    together = programs()
    lowered = to_backend(MethodProgramsPartitionerSpec(together, dict.fromkeys(together, owner)))
    emit(lowered)
    for program in lowered.values():
        assert "cache" in program.graph_signature.buffers_to_mutate.values()
    apart = {name: to_backend(program, owner) for name, program in programs().items()}
    with pytest.raises(UnsupportedError, match="'cache' and changes it, but method"):
        emit(apart)


def test_methods_that_are_lowered_together_keep_one_state_of_their_own() -> None:
    state = Cache()
    programs = {
        "write": torch.export.export(Writes(state), (torch.ones(2, 2),)),
        "read": torch.export.export(Reads(state), (torch.ones(2, 2),)),
    }
    nothing = Takes(lambda node: False)
    lowered = to_backend(MethodProgramsPartitionerSpec(programs, dict.fromkeys(programs, nothing)))
    ours, theirs = (lowered[name].state_dict["cache"] for name in programs)
    lowered["write"].module()(torch.ones(2, 2))
    assert ours.sum() == theirs.sum() == 2
    assert state.cache.eq(0).all()


def test_a_constant_that_shares_memory_with_changing_state_is_no_constant() -> None:
    class Overlapping(nn.Module):
        whole: Tensor
        part: Tensor

        def __init__(self) -> None:
            super().__init__()
            memory = torch.zeros(4)
            self.register_buffer("whole", memory[:3])
            self.register_buffer("part", memory[2:])

        def forward(self, x: Tensor) -> Tensor:
            self.whole.add_(1)
            return x + self.part

    program = torch.export.export(Overlapping(), (torch.ones(2),))

    class Insists(Takes):
        def partition(self, exported_program: ExportedProgram) -> PartitionResult:
            result = super().partition(exported_program)
            for node in exported_program.graph.find_nodes(op="placeholder"):
                if node.name == "b_part":
                    node.meta["delegation_tag"] = next(iter(result.partition_tags))
            return result

    with pytest.raises((OwnershipError, AliasingError), match="part"):
        to_backend(program, Insists(calls(aten.add.Tensor)))
