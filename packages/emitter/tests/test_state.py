"""State of several methods: one memory is one state, and equal names only if that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emitter_running import check, results  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import ExportedProgram

from lowerdeck.emitter import EmittedProgram, UnsupportedError, emit
from lowerdeck.serializer import Tensor as StoredTensor
from lowerdeck_zoo import Of, assert_close, exported, program, saved_and_loaded

X, SQUARE = torch.arange(4.0), torch.ones(4, 4)
NAMES = ("one", "two", "three", "four")
TURNS = (0, 1, 0, 1, 1, 2, 3, 0, 2)


class Keeps(nn.Module):
    """Adds its input to a buffer, which may have several names, or only reads it."""

    def __init__(self, memory: Tensor, *names: str, reads: bool = False) -> None:
        super().__init__()
        self.names, self.reads = names or ("kept",), reads
        for name in self.names:
            if isinstance(memory, nn.Parameter):
                self.register_parameter(name, memory)
            else:
                self.register_buffer(name, memory)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = getattr(self, self.names[0])
        if self.reads:
            return kept - x.sum()
        with torch.no_grad():
            kept.add_(x)
        return kept * 2


def _two_views(memory: Tensor) -> Of:
    return Of(lambda self, x: self.low * x + self.high, low=memory[:4], high=memory[2:6])


def programs(*modules: nn.Module, saved: bool = False) -> dict[str, ExportedProgram]:
    found = dict(zip(NAMES, (exported(one, X) for one in modules), strict=False))
    return {name: saved_and_loaded(one) for name, one in found.items()} if saved else found


def compare(emitted: EmittedProgram, *modules: nn.Module) -> None:
    turns = [number % len(modules) for number in TURNS]
    calls = [(NAMES[number], [X + turn - 2]) for turn, number in enumerate(turns)]
    # First: eager writes the memory that the program holds.
    found = results(emitted, calls)
    with torch.no_grad():
        expected = [modules[n](*call[1]).clone() for n, call in zip(turns, calls, strict=True)]
    assert_close([values[0] for values in found], expected)


# Methods of one memory, which is of 12 numbers, exported together: no name is asked for.
TOGETHER: dict[str, Callable[[Tensor], tuple[nn.Module, ...]]] = {
    "two names": lambda m: (Keeps(m[:4], "mine"), Keeps(m[:4], "yours", reads=True)),
    "views": lambda m: (
        *(Keeps(m.view(3, 4), "all"), Keeps(m.view(3, 4)[1:].view(8)[:4], "flat", reads=True)),
        *(Keeps(m[4:8], "row"), Keeps(m[8:], "last")),
    ),
    "two views in one method": lambda m: (Keeps(m[1:5], "middle"), _two_views(m[:6])),
    "parameters": lambda m: (p := nn.Parameter(m[:4], False), (Keeps(p), Keeps(p)))[1],
    "two memories": lambda m: (Keeps(m[:4].clone(), "mine"), Keeps(m[:4].clone(), "yours")),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_methods_share_the_memory_that_their_modules_share(name: str) -> None:
    modules = TOGETHER[name](torch.arange(12.0) + 1)
    compare(emit(programs(*modules)), *modules)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: (Keeps(m), Keeps(m)),
        lambda m: (Keeps(m), Keeps(m, reads=True)),
        lambda m: (p := nn.Parameter(m, False), (Keeps(p), Keeps(p)))[1],
        lambda m: (Keeps(m, "kept", "again"), Keeps(m)),
    ],
)
def test_methods_saved_apart_share_equal_names(
    make: Callable[[Tensor], tuple[nn.Module, ...]],
) -> None:
    modules = make(torch.arange(4.0) - 1)
    emitted = emit(programs(*modules, saved=True), shared_state=True)
    sizes = [plan.non_const_buffer_sizes for plan in emitted.program.execution_plan]
    assert [memories[-1] for memories in sizes] == [16, 16]
    compare(emitted, *modules)


@pytest.mark.parametrize(
    ("modules", "share", "message"),
    [
        ((Keeps(X * 1), Keeps(X + 1)), False, "'kept' of method 'one' and 'kept' of method 'two'"),
        ((Keeps(X * 1), Keeps(X + 1)), True, "initial values differ"),
        ((Keeps(X * 1), Keeps(X * 1, reads=True)), False, "shared_state=True"),
        ((Keeps(X * 1), Keeps(X.repeat(4, 1))), True, r"shape \(4,\).*shape \(4, 4\)"),
        (
            (Keeps(SQUARE, "all"), Keeps(SQUARE.t(), "turned", reads=True)),
            False,
            "'turned' of method 'two' is not contiguous",
        ),
    ],
)
def test_states_that_cannot_be_one_are_refused(
    modules: tuple[nn.Module, ...], share: bool, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        emit(programs(*modules), shared_state=share)


def test_a_buffer_that_is_not_read_needs_no_name_of_its_own() -> None:
    unread = nn.ReLU()
    unread.register_buffer("kept", torch.ones(3))
    emit(programs(Keeps(X * 1), unread))


def test_state_has_one_offset_in_all_methods() -> None:
    emitted = emit(program("push_peek_from_zero").exports())
    offsets: list[dict[str, int]] = []
    for plan in emitted.program.execution_plan:
        places: dict[str, int] = {}
        for tensor in (value.val for value in plan.values):
            if isinstance(tensor, StoredTensor) and tensor.extra_tensor_info:
                name = str(tensor.extra_tensor_info.fully_qualified_name)
                place = tensor.allocation_info
                assert place is not None
                # Views of a state have its name, and offsets above its own.
                places[name] = min(place.memory_offset, places.get(name, place.memory_offset))
        offsets.append(places)
    assert offsets[0] == offsets[1]
    assert len(offsets[0]) == 2


@pytest.mark.parametrize("form", ["raw", "core", "functional"])
@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize(
    "memory",
    [torch.zeros(3, 4), torch.zeros(3, 4).int(), torch.ones(4, 3).double().t()],
)
def test_state_takes_what_is_written_as_eager_converts_and_broadcasts_it(
    memory: Tensor, fill: bool, form: str
) -> None:
    def decomposed(program: ExportedProgram) -> ExportedProgram:
        table: Any = {} if form == "functional" else None
        return program if form == "raw" else program.run_decompositions(table)

    def takes(self: Any, x: Tensor) -> Any:
        before = self.kept.to(torch.float32) * 2
        if fill:
            self.kept.fill_(x.sum())
        else:
            self.kept.copy_(x)
        return before

    model = Of(takes, kept=memory.clone())
    check(model, *((x,) for x in (X, X + 2.75, X - 3, X)), change=decomposed)
