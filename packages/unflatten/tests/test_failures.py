"""An operator that fails in generated code names the line of the model in its own message."""

from __future__ import annotations

import ast
import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import InputConstraintError, UnflattenError, export_preserving, unflatten


class Inner(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.relu(self.inner(x, index))


def test_the_message_names_the_line_of_the_model() -> None:
    made = unflatten(torch.export.export(Outer(), (torch.ones(3, 2), torch.tensor([1]))))
    lines, start = inspect.getsourcelines(Inner)
    number = start + next(i for i, line in enumerate(lines) if "index_select" in line)
    with pytest.raises(IndexError) as failed:
        made(torch.ones(3, 2), torch.tensor([7]))
    message = str(failed.value)
    assert "out of range" in message
    assert f"test_failures.py:{number} in forward: return x.index_select(0, index)" in message
    assert message.count("test_failures.py") == 1


def test_other_errors_stay_as_they_are() -> None:
    made = unflatten(torch.export.export(Outer(), (torch.ones(3, 2), torch.tensor([1]))))
    with pytest.raises(InputConstraintError) as failed:
        made(torch.ones(4, 2), torch.tensor([1]))
    assert "test_failures" not in str(failed.value)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: float) -> Tensor:
        result: Tensor = self.work(x) * times if times > 0.2 else self.work(x) + 1
        return result


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Scales()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.step(self.step(x, 0.5), 0.1)
        return result


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.twice = Twice()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.twice(x)
        return result


class Through(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def line_of(cls: type, text: str) -> str:
    lines, start = inspect.getsourcelines(cls)
    number = next(start + index for index, line in enumerate(lines) if text in line)
    return f"test_failures.py:{number} in forward: "


@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
@pytest.mark.parametrize("how", ["whole", "child", "form", "wrapped", "wrapped forms"])
def test_the_line_of_the_model_is_named_however_the_module_is_called(
    export: Any, how: str
) -> None:
    x = torch.ones(2, 4)
    made: Any = unflatten(export(Whole(), (x,)))
    made.twice.step.work.weight = nn.Parameter(torch.ones(4, 5))
    step, subject, args = made.twice.step, made, (x,)
    if how == "child":
        subject = made.twice
    if how == "form":
        subject = step.call_modules()[0]
        args = (x, 0.5) if export is export_preserving else (x,)  # type: ignore[assignment]
    if how == "wrapped":
        made.twice = Through(made.twice)
    if how == "wrapped forms":
        made.twice.step = Through(step)
    with pytest.raises(RuntimeError) as failed:
        subject(*args)
    message = str(failed.value)
    # torch's own line, and that of the model which calls it.
    assert message.count("\n") == 1
    assert "linear.py:" in message
    assert message.count(line_of(Scales, "self.work(x) * times")) == 1


def test_what_stands_in_the_place_of_a_module_fails_by_itself() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(7)

    made: Any = unflatten(torch.export.export(Whole(), (torch.ones(2, 4),)))
    made.twice = Fails()
    with pytest.raises(RuntimeError) as failed:
        made(torch.ones(2, 4))
    assert "test_failures" not in str(failed.value)


@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
@pytest.mark.parametrize("path", ["twice", "twice.step", "twice.step.work"])
@pytest.mark.parametrize("how", ["deleted", "None"])
def test_a_child_that_is_gone_is_named(export: Any, path: str, how: str) -> None:
    made: Any = unflatten(export(Whole(), (torch.ones(2, 4),)))
    outer, _, last = path.rpartition(".")
    if how == "deleted":
        delattr(made.get_submodule(outer), last)
    else:
        setattr(made.get_submodule(outer), last, None)
    with pytest.raises(UnflattenError, match=f"child '{last}', but no module is there"):
        made(torch.ones(2, 4))
    # What can be read of the rest still can.
    for module in made.modules():
        assert module.code
        assert module.graph_module.code
    made.swappable()
    copy.deepcopy(made).state_dict()


def test_code_is_compiled_without_a_tree_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("parsed into a tree, which takes four times as long")

    program = torch.export.export(nn.Sequential(nn.ReLU(), nn.Tanh()), (torch.ones(2),))
    monkeypatch.setattr(ast, "parse", refused)
    torch.testing.assert_close(unflatten(program)(torch.ones(2)), torch.ones(2).tanh())


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.same, self.linear = (
            nn.Embedding(8, 4),
            nn.Embedding(8, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)  # the first table
        z = self.same(x)  # the second table
        result: Tensor = self.linear(y + z)  # the layer
        return result


@pytest.mark.parametrize(
    ("path", "given", "line"),
    [
        ("table", torch.tensor([9]), "# the first table"),
        ("same", torch.tensor([9]), "# the second table"),
        ("linear", torch.ones(3, 5), "# the layer"),
    ],
)
@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
def test_a_layer_of_torchs_alone_names_the_model(
    export: Any, path: str, given: Tensor, line: str
) -> None:
    made = unflatten(export(Lookup(), (torch.tensor([1, 2]),)))
    with pytest.raises((IndexError, RuntimeError), match=f"called by .*{line}"):
        made.get_submodule(path)(given)
