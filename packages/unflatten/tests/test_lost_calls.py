"""Hooks where decomposing wrote a region's calls out: as in eager, or refused, never unheard."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as maps
from torch._higher_order_ops import while_loop as loops
from torch.export import ExportedProgram, export

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

map_of_rows: Any = maps
while_loop: Any = loops
X = torch.linspace(-2, 2, 8).reshape(2, 4)
Mode = Callable[[], AbstractContextManager[Any]]


class Rotated(nn.Module):
    """Computes its factors without gradients, as rotary embeddings do, and calls nobody."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            factors = x.sum(0).cos()
        return x * factors


class Model(nn.Module):
    """Calls some modules in a region alone, some outside too, and some outside alone."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode = mode
        self.both, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.stateless = nn.ReLU()
        self.block = nn.Sequential(Rotated(mode), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stateless(self.both(x))
        with self.mode():
            z = self.stateless(self.inside(self.both(y)))
        result: Tensor = self.block(self.outside(y) + z)
        return result


def _saved(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


MODES: dict[str, Mode] = {
    "no_grad": torch.no_grad,
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}
WAYS: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "core": lambda program: program.run_decompositions(),
    "functional": lambda program: program.run_decompositions({}),
    "saved": lambda program: _saved(program.run_decompositions()),
}


def _hooked(model: Any, path: str, kind: str) -> Any:
    module = model.get_submodule(path)
    if kind == "before":
        module.register_forward_pre_hook(lambda _, args: tuple(3 * value for value in args))
    else:
        module.register_forward_hook(lambda _module, _args, result: 3 * result)
    return model


def _hook_each(
    eager: nn.Module,
    program: ExportedProgram,
    *,
    words: Sequence[str] = ("before run_decompositions()", "decomposing gave"),
    **options: Any,
) -> dict[str, set[str]]:
    """Return the modules whose hooks were run, and those whose hooks were refused."""
    found: dict[str, set[str]] = {"run": set(), "refused": set()}
    for path, _ in eager.named_modules():
        for kind in ("before", "after") if path else ():
            wanted = _hooked(copy.deepcopy(eager), path, kind)(X)
            subject: Any = unflatten(program, **options)
            table = {row.path: row for row in subject.swappable()}
            result = _result(_hooked(subject, path, kind))
            if isinstance(result, str):
                assert all(word in result for word in words)
                assert all(word in table[path].reason for word in words)
                found["refused"].add(path)
            else:
                torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
                found["run"].add(path)
    return found


def _result(module: nn.Module) -> Tensor | str:
    """Return what a module returns, or what it refuses to compute that with."""
    try:
        result: Tensor = module(X)
    except UnflattenError as error:
        return str(error)
    return result


@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_a_hook_runs_in_each_call_or_is_refused(
    mode: str, way: str, strict: bool, preserve: Any
) -> None:
    eager = Model(MODES[mode]).eval()
    program = WAYS[way](export(eager, (X,), strict=strict))
    found = _hook_each(eager, program, preserve=preserve)
    assert {"both", "inside.0", "inside.1", "inside", "stateless"} <= found["refused"]
    assert {"outside", "block.1"} <= found["run"]
    if not strict:
        assert "block" in found["run"]


def _called_with(subject: nn.Module, holder: nn.Module, name: str) -> None:
    setattr(holder, name, nn.Linear(4, 4))
    subject(X)


@pytest.mark.parametrize("path", ["both", "inside", "inside.1", "stateless"])
def test_no_other_module_is_taken_there(path: str) -> None:
    eager = Model(torch.no_grad).eval()
    subject: Any = unflatten(export(eager, (X,)).run_decompositions())
    outer, _, name = path.rpartition(".")
    # What holds no weights left nothing in the program, and is refused when it is put there.
    words = f"stands for '{path}'.*decomposing gave|of '{name}', which is called nowhere"
    with pytest.raises(UnflattenError, match=words):
        _called_with(subject, subject.get_submodule(outer), name)


class PartOutside(nn.Module):
    """Calls a block in a region, and a part of it outside."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block[0](x)
        with torch.no_grad():
            z: Tensor = self.block(y)
        return y + z


def test_a_block_of_which_a_part_is_called_outside_is_refused_too() -> None:
    eager = PartOutside().eval()
    found = _hook_each(eager, export(eager, (X,)).run_decompositions())
    assert found == {"run": set(), "refused": {"block", "block.0", "block.1"}}


def test_a_region_that_calls_nobody_leaves_the_others_free() -> None:
    eager = nn.Sequential(Rotated(torch.no_grad), nn.Linear(4, 4), nn.Tanh())
    assert not _hook_each(eager, export(eager, (X,)).run_decompositions())["refused"]


def test_without_decomposing_they_can_all_be_hooked() -> None:
    eager = Model(torch.no_grad).eval()
    assert not _hook_each(eager, export(eager, (X,)))["refused"]


class Tied(nn.Module):
    """Calls a module in a region whose weight is another one's too."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode, self.one, self.other = mode, nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            x = self.other(x)
        return x * 1


@pytest.mark.parametrize("preserving", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_what_shares_its_weights_is_refused_too(mode: str, preserving: bool) -> None:
    """What was forbidden for that reason was not asked for hooks."""
    eager: nn.Module = Tied(MODES[mode]).eval()
    program = (export_preserving if preserving else export)(eager, (X,)).run_decompositions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "other" in _hook_each(eager, program)["refused"]


class Branched(nn.Module):
    """Calls a block in a branch or a loop, and others outside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.outside, self.act = how, nn.Linear(4, 4), nn.Tanh()
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.outside(x))
        if self.how == "cond":
            return torch.cond(x.sum() > -99, lambda t: -self.inside(t), lambda t: t * 1, (x,))
        if self.how == "map":
            return map_of_rows(lambda row: -self.inside(row), x)
        return while_loop(
            lambda step, _: step < 3,
            lambda step, t: (step + 1, self.inside(t)),
            (torch.tensor(0), x),
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("preserve", [None, "all"])
@pytest.mark.parametrize("how", ["cond", "map", "loop"])
def test_what_a_branch_may_call_is_refused(
    how: str, preserve: Any, strict: bool, decomposed: bool
) -> None:
    """A graph of a branch reads the weights by itself: no call is left that a hook would see."""
    eager = Branched(how).eval()
    program = export(eager, (X,), strict=strict)
    program = program.run_decompositions() if decomposed else program
    found = _hook_each(eager, program, words=["branch or a loop"], preserve=preserve)
    assert found["refused"] == {"inside", "inside.0", "inside.1"}
    assert found["run"] == {"outside", "act"}
    made: Any = unflatten(program, preserve=preserve)
    rows = {row.path: row for row in made.swappable()}
    assert not any(rows[path].replaceable for path in found["refused"])
    with pytest.raises(UnflattenError, match="branch or a loop"):
        _called_with(made, made.inside, "0")
