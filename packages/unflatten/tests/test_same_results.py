"""Modules that return what they are given are called, changed and replaced as any other."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

Act = Callable[..., Any]


class Child(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act
        self.work = nn.Linear(4, 4)

    def forward(self, *args: Any, **more: Any) -> Any:
        return self.act(self, *args, **more)


class Model(nn.Module):
    def __init__(self, run: Act, act: Act) -> None:
        super().__init__()
        self.run = run
        self.child = Child(act)
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def part(result: Any) -> Any:
    return torch.utils._pytree.tree_leaves(result)[-1]


def in_a_row(self: Any, x: Tensor) -> Any:
    return self.work(part(self.child(self.work(x))))


def beside(self: Any, x: Tensor) -> Any:
    y = self.work(x)
    return part(self.child(y)) + y


def by_keyword(self: Any, x: Tensor) -> Any:
    y = self.work(x)
    return part(self.child(x=y)), y


def twice(self: Any, x: Tensor) -> Any:
    y = part(self.child(self.work(x)))
    return part(self.child(y)) * 2 + y


def an_input(self: Any, x: Tensor) -> Any:
    return part(self.child(x))


def an_input_and_itself(self: Any, x: Tensor) -> Any:
    return part(self.child(x)), x


def a_parameter(self: Any, x: Tensor) -> Any:
    return part(self.child(self.work.weight)) + x[:1]


def without_gradients(self: Any, x: Tensor) -> Any:
    y = self.work(x)
    with torch.no_grad():
        z = part(self.child(y))
    return z * y


def writes_argument(self: Any, x: Tensor) -> Any:
    y = self.work(x)
    z = part(self.child(y))
    y.add_(1)
    return z


def writes_result(self: Any, x: Tensor) -> Any:
    y = self.work(x)
    part(self.child(y)).add_(1)
    return y * 2


def wrote_before(self: Any, x: Tensor) -> Any:
    y = self.work(x)
    y.mul_(2)
    return part(self.child(y)) + y


def writes_its_base(self: Any, x: Tensor) -> Any:
    y = self.work(x)
    z = part(self.child(y[:2]))
    y.add_(1)
    return z


UNWRITTEN: tuple[Act, ...] = (
    *(in_a_row, beside, by_keyword, twice, an_input, an_input_and_itself, a_parameter),
    without_gradients,
)
WRITTEN = (writes_argument, writes_result, wrote_before, writes_its_base)


def same(self: Any, x: Tensor) -> Any:
    return x


def converted(self: Any, x: Tensor) -> Any:
    return x.to(torch.float32)


def a_pair(self: Any, x: Tensor) -> Any:
    return self.work(x), x


def a_dict(self: Any, x: Tensor) -> Any:
    return {"same": x}


def nested(self: Any, x: Tensor) -> Any:
    return [x, (x,)]


def in_place(self: Any, x: Tensor) -> Any:
    return x.mul_(0.5)


ACTS = (same, converted, a_pair, a_dict, nested, in_place)


def changed(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf * -1.5, value)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **more: Any) -> Any:
        return changed(self.inner(*args, **more))


def check_all_ways(eager: Any, program: Any, x: Tensor) -> list[str]:
    """Return in which ways changing the child was refused; the others compute as eager's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = unflatten(program)
    torch.testing.assert_close(module(x.clone()), eager(x.clone()))
    refused: list[str] = []
    for way in ("eager's", "kept", "wrapped", "replaced", "hooked"):
        mine: Any = copy.deepcopy(module)
        its: Any = copy.deepcopy(eager)
        if way == "hooked":
            for one in (mine, its):
                one.child.register_forward_hook(lambda _, args, result: changed(result))
        elif way == "eager's":
            mine.child = copy.deepcopy(eager.child)
        elif way == "kept":
            mine.child = nn.Sequential(mine.child) if eager.run is not by_keyword else mine.child
        else:
            mine.child = Around(mine.child if way == "wrapped" else copy.deepcopy(eager.child))
            its.child = Around(its.child)
        try:
            found = mine(x.clone())
        except UnflattenError:
            refused.append(way)
        else:
            torch.testing.assert_close(found, its(x.clone()), msg=way)
    return refused


EXPORTED = [
    pytest.param(run, act, strict, marks=() if (one + other) % 3 == 0 else pytest.mark.heavy)
    for one, run in enumerate((*UNWRITTEN, *WRITTEN))
    for other, act in enumerate(ACTS)
    for strict in (False, True)
]


@pytest.mark.parametrize(("run", "act", "strict"), EXPORTED)
def test_changes_of_what_returns_its_argument_compute_as_eagers(
    run: Act, act: Act, strict: bool
) -> None:
    eager, x = Model(run, act).requires_grad_(False), torch.randn(3, 4)
    program = export_preserving(eager, (x.clone(),), strict=strict)
    refused = check_all_ways(eager, program, x)
    if run in UNWRITTEN and act is not in_place:
        # Of what is returned twice, what nobody reads must be the argument still.
        assert not refused or act is nested
        assert not {"eager's", "kept"} & {*refused}
        (row,) = [row for row in unflatten(program).swappable() if row.path == "child"]
        assert row.replaceable
        assert row.callable_alone


DECOMPOSED = [
    pytest.param(run, act, marks=() if (one + other) % 4 == 0 else pytest.mark.heavy)
    for one, run in enumerate((*UNWRITTEN[:-1], *WRITTEN))
    for other, act in enumerate(ACTS)
]


def _names_state(program: Any) -> bool:
    """Return whether decomposing dropped a result, for which export names a parameter then."""
    state = set(program.graph_signature.inputs_to_parameters)
    signatures = [entry.signature for entry in program.module_call_graph if entry.signature]
    return any(spec.name in state for each in signatures for spec in each.outputs)


@pytest.mark.parametrize(("run", "act"), DECOMPOSED)
def test_decomposing_works_where_it_works_without_us(run: Act, act: Act) -> None:
    eager, x = Model(run, act).requires_grad_(False), torch.randn(3, 4)
    names = ("child", "child.work", "work")
    plain = torch.export.export(eager, (x.clone(),), preserve_module_call_signature=names)
    try:
        plain.run_decompositions()
    except Exception:
        return
    program = export_preserving(eager, (x.clone(),)).run_decompositions()
    refused = check_all_ways(eager, program, x)
    if run in UNWRITTEN and act in (same, a_pair, a_dict) and not _names_state(program):
        assert not refused


def test_the_program_that_could_not_be_decomposed() -> None:
    """An alias of what is written later is made anew by decomposing, and its name is lost."""
    eager, x = Model(writes_argument, same), torch.randn(3, 4)
    program = export_preserving(eager, (x,))
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)
    module: Any = unflatten(program.run_decompositions())
    torch.testing.assert_close(module(x), eager(x))
    (row,) = [row for row in module.swappable() if row.path == "child"]
    assert "returns what it is given" in row.reason


class Identities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout().eval()
        self.none = nn.Identity()
        self.blocks = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.none(x) + self.blocks(self.drop(x))
        return y


@pytest.mark.parametrize("decomposed", [False, True])
def test_identities_are_called_and_return_the_tensor_itself(decomposed: bool) -> None:
    eager, x = Identities().eval(), torch.randn(3, 4)
    program = export_preserving(eager, (x,))
    if decomposed:
        program = program.run_decompositions()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module: Any = unflatten(torch.export.load(file))
    assert all(row.replaceable and row.callable_alone for row in module.swappable())
    seen: list[str] = []
    for name, child in module.named_modules():
        child.register_forward_hook(lambda *_, name=name: seen.append(name))
    torch.testing.assert_close(module(x), eager(x))
    assert set(seen) == {name for name, _ in eager.named_modules()}
    assert module.none(x) is x
    assert module.get_submodule("blocks.0")(x) is x
    assert "alias(" not in module.none.code
    again = torch.export.export(module, (x,))
    assert not again.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)


def test_an_alias_of_the_models_own_stays_one() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[...]

    eager, x = nn.Sequential(Views()), torch.randn(3, 4)
    module: Any = unflatten(export_preserving(eager, (x,)))
    found = module.get_submodule("0")(x)
    assert found is not x
    assert found._base is x
