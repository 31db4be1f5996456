"""One memory is one state and one name is not, compared with eager over several methods."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from lowerdeck.emitter import EmittedProgram, EmitterError, UnsupportedError, emit
from lowerdeck_zoo import assert_close, official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


class Adds(nn.Module):
    """Adds its input to a buffer and returns it."""

    def __init__(self, memory: torch.Tensor, name: str = "kept") -> None:
        super().__init__()
        self.register_buffer(name, memory)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = getattr(self, self.name)
        kept.add_(x)
        return kept * 2


class Reads(Adds):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.name) - x.sum()


class AddsToParameter(nn.Module):
    def __init__(self, memory: nn.Parameter) -> None:
        super().__init__()
        self.kept = memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.kept.add_(x)
        return self.kept * 2


def exported(module: nn.Module, x: torch.Tensor, *, loaded: bool = False) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, (x,))
        if not loaded:
            return program
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        return torch.export.load(file)


def compare(
    emitted: EmittedProgram, modules: dict[str, nn.Module], calls: list[Any], folder: Path
) -> None:
    """Compare calls with eager, from bytes and from a path; memory is shared by all methods."""
    # Both before eager runs, for the program holds the very memory of the modules.
    content = emitted.to_bytes()
    emitted.save(folder / "model.pte")
    # Loading a method sets its initial values, so all are loaded, by a call that adds nothing.
    first = [(name, torch.zeros_like(calls[0][1])) for name in modules]
    given = [official.Call((x,), name) for name, x in [*first, *calls]]
    with torch.no_grad():
        expected = [modules[name](x).clone() for name, x in calls]
    for source in (content, folder / "model.pte"):
        outcome = official.run(source, given, shared_arenas=True)
        assert isinstance(outcome, official.Ran), outcome
        found = [values[0] for values in outcome.outputs[len(first) :]]
        assert_close(found, expected)


X = torch.arange(4.0)
TURNS = [("one", X), ("two", X + 1), ("one", X - 3), ("two", X), ("two", X)]


def test_two_models_with_a_buffer_of_one_name_are_refused_and_both_are_named() -> None:
    one, two = Adds(torch.zeros(4)), Adds(torch.ones(4))
    programs = {"one": exported(one, X), "two": exported(two, X)}
    with pytest.raises(
        UnsupportedError, match="'kept' of method 'one' and 'kept' of method 'two'"
    ):
        emit(programs)
    with pytest.raises(UnsupportedError, match="begin with other values"):
        emit(programs, shared_state=True)


def test_a_method_that_only_reads_a_buffer_of_that_name_is_refused_too() -> None:
    programs = {
        "one": exported(Adds(torch.zeros(4)), X),
        "two": exported(Reads(torch.zeros(4)), X),
    }
    with pytest.raises(UnsupportedError, match=r"shared_state=\['kept'\]"):
        emit(programs)


def test_two_models_with_buffers_of_two_names_have_two_states(tmp_path: Path) -> None:
    modules = {"one": Adds(torch.zeros(4), "mine"), "two": Adds(torch.zeros(4), "yours")}
    programs = {name: exported(module, X) for name, module in modules.items()}
    compare(emit(programs), modules, TURNS, tmp_path)


@pytest.mark.parametrize("share", [True, ["kept"], ("kept",), {"kept"}])
@pytest.mark.parametrize("second", [Adds, Reads])
def test_methods_saved_apart_share_what_is_named(
    second: type[Adds], share: Any, tmp_path: Path
) -> None:
    memory = torch.arange(4.0) - 1
    modules = {"one": Adds(memory), "two": second(memory)}
    programs = {name: exported(module, X, loaded=True) for name, module in modules.items()}
    with pytest.raises(UnsupportedError, match="two memories"):
        emit(programs)
    compare(emit(programs, shared_state=share), modules, TURNS, tmp_path)


def test_one_memory_is_one_state_under_two_names(tmp_path: Path) -> None:
    memory = torch.arange(4.0) - 1
    modules = {"one": Adds(memory, "mine"), "two": Reads(memory, "yours")}
    programs = {name: exported(module, X) for name, module in modules.items()}
    emitted = emit(programs)
    assert [plan.sizes[-1] for plan in emitted.memory_plans.values()] == [16, 16]
    compare(emitted, modules, TURNS, tmp_path)


def test_views_of_one_memory_are_one_state(tmp_path: Path) -> None:
    memory = torch.arange(12.0).view(3, 4) + 1
    modules = {
        "all": Adds(memory, "all"),
        "one": Adds(memory[1], "row"),
        "two": Reads(memory[1:].view(8)[:4], "flat"),
        "three": Adds(memory[2], "row2"),
    }
    programs = {name: exported(module, X) for name, module in modules.items()}
    calls = [*TURNS, ("all", X), ("three", X * 5), ("two", X), ("all", X)]
    compare(emit(programs), modules, calls, tmp_path)


def test_two_views_in_one_method(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self, memory: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("low", memory[:4])
            self.register_buffer("high", memory[2:6])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.low * x + self.high

    memory = torch.arange(6.0) + 1
    modules = {"one": Adds(memory[1:5], "middle"), "two": Both(memory)}
    programs = {name: exported(module, X) for name, module in modules.items()}
    compare(emit(programs), modules, TURNS, tmp_path)


def test_views_that_a_program_cannot_hold_are_refused() -> None:
    memory = torch.zeros(4, 4)
    modules = {"one": Adds(memory, "all"), "two": Reads(memory.t(), "turned")}
    with pytest.raises(UnsupportedError, match="'turned' of method 'two' is not contiguous"):
        emit({name: exported(module, X) for name, module in modules.items()})


@pytest.mark.parametrize("loaded", [False, True])
def test_parameters_that_are_written(loaded: bool, tmp_path: Path) -> None:
    memory = nn.Parameter(torch.ones(4), requires_grad=False)
    modules: dict[str, nn.Module] = {
        "one": AddsToParameter(memory),
        "two": AddsToParameter(memory),
    }
    programs = {name: exported(module, X, loaded=loaded) for name, module in modules.items()}
    compare(emit(programs, shared_state=loaded), modules, TURNS, tmp_path)


def test_buffers_that_nobody_reads_need_no_name_of_their_own() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    emit({"one": exported(Adds(torch.zeros(4)), X), "two": exported(Unread(), X)})


def test_names_that_share_nothing_are_told() -> None:
    program = exported(Adds(torch.zeros(4)), X)
    with pytest.raises(EmitterError, match=r"\['keep'\].*\['kept'\]"):
        emit(program, shared_state=["keep"])
    with pytest.raises(EmitterError, match=r"write \['kept'\]"):
        emit(program, shared_state="kept")


def test_a_state_that_has_another_name_in_each_method(tmp_path: Path) -> None:
    memory = torch.arange(4.0) - 1
    modules = {"one": Adds(memory, "mine"), "two": Adds(memory, "yours")}
    programs = {name: exported(module, X, loaded=True) for name, module in modules.items()}
    assert emit(programs).memory_plans["two"].sizes[-1] == 32
    emitted = emit(programs, shared_state=[("mine", "yours")])
    assert [plan.sizes[-1] for plan in emitted.memory_plans.values()] == [16, 16]
    compare(emitted, modules, TURNS, tmp_path)


@pytest.mark.parametrize("share", [["again"], [("kept", "again")], {("kept", "again"), "kept"}])
def test_a_state_that_has_two_names_in_one_module(share: Any, tmp_path: Path) -> None:
    class Tied(Adds):
        def __init__(self, memory: torch.Tensor) -> None:
            super().__init__(memory)
            self.register_buffer("again", memory)

    memory = torch.arange(4.0) - 1
    modules = {"one": Tied(memory), "two": Adds(memory, "again")}
    programs = {name: exported(module, X, loaded=True) for name, module in modules.items()}
    compare(emit(programs, shared_state=share), modules, TURNS, tmp_path)


def test_two_states_of_one_method_are_not_made_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a.add_(x)
            return self.b + 1

    with pytest.raises(UnsupportedError, match="'a' of method 'forward' and 'b' of method 'forw"):
        emit(exported(Two(), X), shared_state=[("a", "b")])


@pytest.mark.parametrize(
    "share", [1, None, b"kept", {"kept": 1}, [["kept"]], [True], ["kept", 3], [()], [("kept", 3)]]
)
def test_what_is_no_list_of_names_is_told(share: Any) -> None:
    with pytest.raises(
        EmitterError, match=r"shared_state: found .*expected True or a list of nam"
    ):
        emit(exported(Adds(torch.zeros(4)), X), shared_state=share)


def test_a_name_that_only_one_method_has_is_told() -> None:
    with pytest.raises(
        EmitterError, match=r"\['kept'\], but only method 'forward' has that state"
    ):
        emit(exported(Adds(torch.zeros(4)), X), shared_state=["kept"])


def test_states_of_other_forms_are_not_one() -> None:
    programs = {
        "one": exported(Adds(torch.zeros(4)), X),
        "two": exported(Reads(torch.zeros(4, 4)), X),
    }
    with pytest.raises(UnsupportedError, match=r"shape \(4,\).*shape \(4, 4\)"):
        emit(programs, shared_state=True)


class Takes(nn.Module):
    kept: torch.Tensor

    def __init__(self, memory: torch.Tensor, fill: bool) -> None:
        super().__init__()
        self.register_buffer("kept", memory)
        self.fill = fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.kept.to(torch.float32) * 2
        if self.fill:
            self.kept.fill_(x.sum())
        else:
            self.kept.copy_(x)
        return before


@pytest.mark.parametrize("form", ["raw", "core", "functional"])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(3, 4),
        torch.ones(4, 3).t(),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.ones(4, 3, dtype=torch.float64).t(),
    ],
)
def test_state_takes_what_is_written_as_eager_converts_and_broadcasts_it(
    memory: torch.Tensor, fill: bool, form: str, tmp_path: Path
) -> None:
    model = Takes(memory.clone(), fill)
    program = torch.export.export(Takes(memory.clone(), fill), (X,))
    if form != "raw":
        program = program.run_decompositions({} if form == "functional" else None)
    calls = [("forward", X + 2.75), ("forward", X - 3), ("forward", X)]
    expected = [("forward", torch.zeros(4)), *calls]
    model(expected[0][1])
    compare(emit({"forward": program}), {"forward": model}, calls, tmp_path)
