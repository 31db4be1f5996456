"""State of several modules that their caller reads: by which name, the program does not tell."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.nn.functional import linear

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


class Tied(nn.Module):
    """The caller reads what two modules of two types hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(7, 4)
        self.head: Any = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y = self.embed(ids)
        found: Tensor = self.head(y) + linear(y, self.embed.weight)
        return found


class Deep(nn.Module):
    """The same, where what is between the caller and one of the modules holds it too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: Any = nn.Embedding(7, 4)
        self.block: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
        self.block[1].weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y = self.embed(ids)
        found: Tensor = self.block(y) + linear(y, self.block[1].weight)
        return found


class Own(nn.Module):
    """The caller holds it too, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = nn.Linear(4, 4, bias=False)
        self.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = linear(self.head(x), self.weight)
        return found


class Part(nn.Module):
    def __init__(self, n: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("n", n)
        self.n: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.n + self.weight


class Written(nn.Module):
    """The caller writes a buffer of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one: Any = Part(torch.ones(1))
        self.two: Any = Part(self.one.n)

    def forward(self, x: Tensor) -> Tensor:
        self.two.n.add_(1)
        found: Tensor = self.two(self.one(x))
        return found


IDS, X = torch.tensor([[1, 2], [3, 0]]), torch.randn(3, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[str, ...]]] = {
    "tied": (Tied, IDS, ("embed", "head")),
    "deep": (Deep, IDS, ("embed", "block", "block.1")),
    "own": (Own, X, ("head",)),
    "written": (Written, X, ("one", "two")),
}
EXPORTS: dict[str, Callable[..., ExportedProgram]] = {
    "plain": export,
    "strict": lambda *given: export(*given, strict=True),
    "preserving": export_preserving,
    "strict preserving": lambda *given: export_preserving(*given, strict=True),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, tuple[str, ...]]:
    make, given, paths = MODELS[request.param]
    return make(), given, paths


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("how", EXPORTS)
def test_another_module_with_state_of_its_own_is_told(
    case: tuple[nn.Module, Tensor, tuple[str, ...]], how: str
) -> None:
    eager, given, paths = case
    program = EXPORTS[how](copy.deepcopy(eager), (given,))
    rows = {row.path: row for row in unflatten(program).swappable()}
    for path in paths:
        assert not rows[path].replaceable
        assert "holds what another module" in rows[path].reason
        module = unflatten(program)
        module.set_submodule(path, copy.deepcopy(eager).get_submodule(path))
        with pytest.raises(UnflattenError, match="are no longer one"):
            module(given)
    with pytest.raises(UnflattenError, match="are no longer one"):
        torch.compile(module, backend="eager")(given)


@pytest.mark.parametrize("how", ["preserving", "strict preserving"])
def test_another_module_with_the_same_state_is_eagers(
    case: tuple[nn.Module, Tensor, tuple[str, ...]], how: str
) -> None:
    eager, given, paths = case
    program = EXPORTS[how](copy.deepcopy(eager), (given,))
    for path in paths:
        module, wanted = unflatten(program), copy.deepcopy(eager)
        other = copy.deepcopy(wanted).get_submodule(path)
        held: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        held.update(module.named_buffers(remove_duplicate=False))
        for inner, part in other.named_modules():
            for name in (*part._parameters, *part._buffers):
                if getattr(part, name) is None:
                    continue
                value = held[".".join(filter(None, (path, inner, name)))]
                setattr(part, name, value)
        module.set_submodule(path, other)
        torch.testing.assert_close(module(given), wanted(given))


@pytest.mark.parametrize("how", EXPORTS)
def test_what_nobody_replaced_is_never_refused(
    case: tuple[nn.Module, Tensor, tuple[str, ...]], how: str
) -> None:
    eager, given, _ = case
    module = unflatten(EXPORTS[how](copy.deepcopy(eager), (given,)))
    wanted = copy.deepcopy(eager)(given)
    assigned = copy.deepcopy(module)
    assigned.load_state_dict(eager.state_dict(), assign=True)
    for made in (
        copy.deepcopy(module),
        torch.fx.symbolic_trace(copy.deepcopy(module)),
        torch.compile(copy.deepcopy(module), backend="eager", fullgraph=True),
        pickle.loads(pickle.dumps(module)),
        export(copy.deepcopy(module), (given,), strict="strict" in how).module(),
    ):
        torch.testing.assert_close(made(given), wanted)
    torch.testing.assert_close(assigned(given), wanted)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    again = torch.func.functional_call(module, state, (given,))
    torch.testing.assert_close(again, wanted)
