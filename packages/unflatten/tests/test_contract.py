"""R1 and R3: arguments, results and parameters match the record, decided at the call."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from unflatten_zoo.judges import Around, replace  # type: ignore[import-not-found]

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten


class Step(nn.Module):
    """Looks at every constant, at a size and at the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor, t: float, flag: bool = True, mask: Any = None) -> Tensor:
        x = self.work(x) if flag else x
        x = x if mask is None else x + mask
        return x * t / x.shape[0] + torch.finfo(x.dtype).eps


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.step = nn.Linear(4, 4), Step()
        self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.step(self.first(x), 0.5, flag=False, mask=None)
        result: Tensor = self.last(y) + y.shape[1]  # the line after the step
        return result


X = torch.linspace(-1, 1, 8).view(2, 4)
GOOD: dict[str, Any] = {"x": X, "t": 0.5, "flag": False, "mask": None}
OTHERS: dict[str, tuple[str, Any, str]] = {
    "constant": ("t", 0.25, r"0\.5.*found 0\.25"),
    "nan": ("t", math.nan, "found nan"),
    "a tensor for a constant": (
        "t",
        torch.tensor(0.5),
        r"found a torch.float32 tensor of shape \(\)",
    ),
    "flag": ("flag", True, "False.*found True"),
    "zero for False": ("flag", 0, "False.*found 0"),
    "None for a flag": ("flag", None, "False.*found None"),
    "a tensor for None": ("mask", X, r"None.*found a torch.float32 tensor of shape \(2, 4\)"),
    "static size": ("x", X[:1], r"\(2, 4\).*found a torch.float32 tensor of shape \(1, 4\)"),
    "rank": ("x", X[0], r"found a torch.float32 tensor of shape \(4\)"),
    "double": ("x", X.double(), r"float32.*found .*float64"),
    "integers": ("x", X.long(), r"found .*int64"),
    "a number for a tensor": ("x", 1.0, r"found 1\.0"),
    "None for a tensor": ("x", None, "found None"),
}


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return export_preserving(Model().eval(), (X,))


@pytest.fixture
def module(program: torch.export.ExportedProgram) -> Any:
    torch._dynamo.reset()
    return unflatten(program)


class Changes(nn.Module):
    """A wrapper that changes one argument."""

    def __init__(self, inner: nn.Module, name: str, value: Any) -> None:
        super().__init__()
        self.inner, self.name, self.value = inner, name, value

    def forward(self, x: Tensor, t: float, **options: Any) -> Any:
        return self.inner(**{"x": x, "t": t, **options, self.name: self.value})


@pytest.mark.parametrize("how", ["alone", "wrapped", "hooked", "compiled"])
@pytest.mark.parametrize("other", OTHERS)
def test_arguments_match_the_record(module: Any, other: str, how: str) -> None:
    name, value, message = OTHERS[other]
    torch.testing.assert_close(module.step(**GOOD), X * 0.25 + torch.finfo(X.dtype).eps)
    run: Callable[[], Any] = lambda: module.step(**{**GOOD, name: value})  # noqa: E731
    if how == "compiled":
        compiled: Any = torch.compile(module.step, backend="eager")
        compiled(**GOOD)
        run = lambda: compiled(**{**GOOD, name: value})  # noqa: E731
    elif how == "wrapped":
        module.step = Changes(module.step, name, value)
        run = lambda: module(X)  # noqa: E731
    elif how == "hooked":

        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            given = {**dict(zip(("x", "t"), args, strict=True)), **kwargs, name: value}
            return (given.pop("x"), given.pop("t")), given

        module.step.register_forward_pre_hook(hook, with_kwargs=True)
        run = lambda: module(X)  # noqa: E731
    with pytest.raises(InputConstraintError, match=f"'{name}'.*{message}"):
        run()
    # Nothing of a refused call is left.
    if how == "alone":
        module.step(**GOOD)


def test_structure_of_arguments_matches_the_record(module: Any) -> None:
    for args in ((X,), (X, 0.5, False, None, X), ([X], 0.5)):
        with pytest.raises((TypeError, InputConstraintError)):
            module.step(*args)


class Returns(nn.Module):
    """Returns what a function makes of what another module returns."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self.inner(*args, **kwargs))


def doubled(y: Tensor) -> Tensor:
    return torch.cat([y, y])


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "fewer columns": lambda y: y[:, :3],
    "fewer rows": lambda y: y[:1],
    "another rank": lambda y: y[None],
    "another dtype": lambda y: y.double(),
    "a tuple": lambda y: (y,),
    "two": lambda y: (y, y),
    "a dict": lambda y: {"y": y},
    "a number": lambda y: 1.0,
    "None": lambda y: None,
}


@pytest.mark.parametrize("how", ["replaced", "wrapped", "hooked"])
@pytest.mark.parametrize("path", ["first", "step", "last", "last.1"])
@pytest.mark.parametrize("result", RESULTS)
def test_results_of_a_changed_child_match_the_record(
    program: torch.export.ExportedProgram, result: str, path: str, how: str
) -> None:
    module = unflatten(program)
    change, inner = RESULTS[result], module.get_submodule(path)
    if how == "hooked":
        inner.register_forward_hook(lambda _, args, y: (change(y), None)[0])
    else:
        other = Model().eval().get_submodule(path) if how == "replaced" else inner
        replace(module, path, Returns(other, change))
    if how == "hooked" and result == "None":
        # Torch ignores a hook that returns None.
        module(X)
        return
    with pytest.raises(InputConstraintError, match=f"'{path.rpartition('.')[2]}'|'{path}'"):
        module(X)


def test_the_error_has_the_record_the_result_and_the_line_of_the_model(module: Any) -> None:
    module.step = Returns(module.step, lambda y: y[:, :3])
    with pytest.raises(InputConstraintError) as caught:
        module(X)
    message = str(caught.value)
    assert "(2, 4)" in message
    assert "(2, 3)" in message
    assert "'step'" in message
    assert "(in 'step = self.step(first" in message
    line = "y = self.step(self.first(x), 0.5, flag=False, mask=None)"
    assert "test_contract.py:" in message
    assert f"in forward: {line})" in message
    assert "check_input_constraints" in message


class Stepped(nn.Module):
    """Has a child of the same name as ``Model``, called with another constant."""

    def __init__(self, step: nn.Module, t: float) -> None:
        super().__init__()
        self.step, self.t = step, t

    def forward(self, x: Tensor) -> Any:
        return self.step(x, self.t, flag=False, mask=None)


def test_a_child_of_another_program_is_checked(module: Any) -> None:
    other: Any = unflatten(export_preserving(Stepped(Step(), 0.25), (X,)))
    module.step = other.step
    with pytest.raises(InputConstraintError, match=r"'t' .*constant 0\.25; found 0\.5"):
        module(X)
    narrow = Stepped(Returns(Step(), lambda y: y[:, :3]), 0.5)
    other = unflatten(export_preserving(narrow, (X,)))
    module.step = other.step
    with pytest.raises(InputConstraintError, match=r"'step' returned .*\(2, 3\)"):
        module(X)


def test_the_error_names_the_child_from_the_root_and_writes_structures_as_python() -> None:
    eager = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    module = unflatten(export_preserving(eager, (X,)))
    module.set_submodule("0.1", Returns(nn.Tanh(), lambda y: (y, {"mask": y})))
    expected = r"'0\.1' returned \(a value, \{'mask': a value\}\); expected a value"
    with pytest.raises(InputConstraintError, match=expected):
        module(X)


def test_the_same_kind_of_result_passes(module: Any) -> None:
    eager = Model().eval()
    eager.load_state_dict(module.state_dict())
    for model in (module, eager):
        model.step = Around(model.step, 2.0)
        model.first.register_forward_hook(lambda _, args, y: y.flip(1) * 3)
        replace(model, "last.1", nn.Tanh())
    torch.testing.assert_close(module(X), eager(X))


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Any:
        y = self.body(x).relu()
        return {"logits": self.head(y), "hidden": y}


@pytest.mark.parametrize("make", [lambda: Classifier(3), lambda: nn.Sequential(Classifier(3))])
def test_a_result_that_the_root_returns_may_be_of_any_size(make: Any) -> None:
    eager = make().eval()
    module = unflatten(export_preserving(eager, (X,)))
    path = "head" if isinstance(eager, Classifier) else "0.head"
    replace(module, path, nn.Linear(4, 10))
    assert module(X)["logits"].shape == (2, 10)
    replace(module, path, nn.Sequential(nn.Linear(4, 2), nn.Flatten(0)))
    assert module(X)["logits"].shape == (4,)


def test_a_layer_alone_is_held_to_the_record_as_any_module() -> None:
    """No class of torch is an exception, in a list neither."""
    module = unflatten(export_preserving(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X,)))
    for path in ("0", "1"):
        with pytest.raises(InputConstraintError, match=r"\(2, 4\).*\(3, 4\)"):
            module.get_submodule(path)(torch.ones(3, 4))
    module = unflatten(
        export_preserving(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh()), (X,))
    )
    replace(module, "0", nn.Sequential(nn.Linear(4, 4), nn.AvgPool1d(2)))
    with pytest.raises(InputConstraintError, match=r"\(2, 4\)|\(2, 2\)"):
        module(X)


class Adds(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y.sum(1, keepdim=True)


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.adds, self.last = nn.Linear(4, 4), Adds(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return self.last(self.adds(y, x)) / y.shape[0] + y


@pytest.fixture(scope="module")
def dynamic() -> torch.export.ExportedProgram:
    sizes = ({0: Dim("rows", min=2, max=64), 1: Dim("length", min=2, max=64)},)
    return export_preserving(Dynamic().eval(), (torch.ones(3, 5, 4),), dynamic_shapes=sizes)


def test_a_symbol_has_one_size_in_a_call(dynamic: torch.export.ExportedProgram) -> None:
    module: Any = unflatten(dynamic)
    for rows, length in ((3, 5), (2, 7), (9, 2)):
        x = torch.randn(rows, length, 4)
        torch.testing.assert_close(module.adds(x, x), Adds()(x, x))
    for other in ((4, 5, 4), (3, 6, 4), (3, 5, 3), (3, 5)):
        with pytest.raises(InputConstraintError, match=r"\by\b"):
            module.adds(torch.ones(3, 5, 4), torch.ones(other))
    with pytest.raises(InputConstraintError, match=r"\bx\b"):
        module.adds(torch.ones(3, 5, 3), torch.ones(3, 5, 3))


@pytest.mark.parametrize("path", ["first", "adds"])
def test_results_have_the_sizes_of_their_call(
    dynamic: torch.export.ExportedProgram, path: str
) -> None:
    for change in (lambda y: y[:, 1:], lambda y: y[1:], lambda y: torch.cat([y, y])):
        module = unflatten(dynamic)
        replace(module, path, Returns(module.get_submodule(path), change))
        with pytest.raises(InputConstraintError, match=f"'{path}'"):
            module(torch.ones(4, 6, 4))
    module = unflatten(dynamic)
    replace(module, path, Returns(module.get_submodule(path), lambda y: y * 2))
    for rows in (4, 7):
        module(torch.ones(rows, 6, 4))


def test_the_switch_of_the_root_turns_every_check_off(module: Any) -> None:
    module.check_input_constraints = False
    step = Returns(module.step, doubled)
    assert module.step(X[:1], 0.75, False, None).shape == (1, 4)
    module.step = step
    assert module(X).shape == (4, 4)
    assert module(X[:1]).shape == (2, 4)
    for subject in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert subject(X).shape == (4, 4)
    module.check_input_constraints = True
    with pytest.raises(InputConstraintError, match="'step'"):
        module(X)
    with pytest.raises(InputConstraintError, match="shape"):
        module(X[:1])


def test_the_switch_of_the_called_module_turns_its_checks_off(module: Any) -> None:
    module.step.check_input_constraints = False
    assert module.step(X[:1], 0.5, False, None).shape == (1, 4)
    module.last.check_input_constraints = False
    replace(module, "last.1", Returns(nn.ReLU(), doubled))
    assert module.last(X).shape == (4, 4)
    with pytest.raises(InputConstraintError, match="shape"):
        module(X[:1])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_are_held_to_the_record(module: Any, copied: Any) -> None:
    wanted, other = module(X), copied(module)
    other.step.register_forward_hook(lambda _, args, y: y[:, :2])
    with pytest.raises(InputConstraintError, match="'step'"):
        other(X)
    torch.testing.assert_close(module(X), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_module_is_held_to_the_record(module: Any) -> None:
    module.step = Returns(module.step, lambda y: y[:, :3])
    compiled: Any = torch.compile(module, backend="eager")
    with pytest.raises(Exception, match="step"):
        compiled(X)


@pytest.mark.parametrize("other", [{"t": 0.25}, {"x": X[:1]}])
def test_one_graph_of_a_module_alone_is_held_to_the_record(module: Any, other: Any) -> None:
    compiled: Any = torch.compile(module.step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**GOOD), module.step(**GOOD))
    # The compiler reports what would have been raised.
    with pytest.raises(Exception, match=r"InputConstraintError|raise_for_argument"):
        compiled(**{**GOOD, **other})


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_that_is_exported_again_is_held_to_the_record(module: Any, strict: bool) -> None:
    torch.export.export(module, (X,), strict=strict)
    with pytest.raises(Exception, match="recorded"):
        torch.export.export(module, (X[:1],), strict=strict)


def test_a_change_is_taken_back(module: Any) -> None:
    """It is decided at the call whether a child is changed."""
    wanted, step = module(X), module.step
    module.step = Returns(step, lambda y: y[:, :2])
    with pytest.raises(InputConstraintError, match="'step'"):
        module(X)
    module.step = step
    torch.testing.assert_close(module(X), wanted)
    handle = step.register_forward_hook(lambda _, args, y: y[:, :2])
    with pytest.raises(InputConstraintError, match="'step'"):
        module(X)
    handle.remove()
    torch.testing.assert_close(module(X), wanted)
    step.forward = lambda *args, **kwargs: X[:, :2]
    with pytest.raises(InputConstraintError, match="'step'"):
        module(X)
    del step.forward
    torch.testing.assert_close(module(X), wanted)


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        return x * factor


class Block(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.inner = factor, nn.ModuleList([Scaled()])

    def forward(self, x: Tensor) -> Any:
        return self.inner[0](x, self.factor)


@pytest.mark.parametrize("path", ["inner", "inner.0"])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_module_in_the_place_of_another_is_checked(path: str, is_copied: bool) -> None:
    """Its parent calls it by the name that it had before."""
    module = unflatten(export_preserving(nn.Sequential(Block(2.0), Block(3.0)), (X,)))
    torch.testing.assert_close(module(X), X * 6)
    moved = module.get_submodule(f"1.{path}")
    module.set_submodule(f"0.{path}", copy.deepcopy(moved) if is_copied else moved)
    with pytest.raises(InputConstraintError, match=r"'factor'.*3\.0.*found 2\.0"):
        module(X)


@pytest.mark.parametrize("how", ["hooked", "replaced", "a new forward", "replaced in the table"])
def test_a_module_that_changes_after_it_was_compiled_is_checked(module: Any, how: str) -> None:
    compiled: Any = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(X), module(X))
    if how == "hooked":
        module.step.register_forward_hook(lambda _, args, y: y[:, :3])
    elif how == "a new forward":
        module.step.forward = lambda *args, **kwargs: X[:, :3]
    else:
        changed = Returns(module.step, lambda y: y[:, :3])
        # Quantisation writes into the table.
        write = setattr if how == "replaced" else (lambda of, *item: of._modules.update([item]))
        write(module, "step", changed)
    for run in (module, compiled):
        with pytest.raises(Exception, match="step"):
            run(X)


def test_calls_of_unchanged_children_are_not_checked(module: Any) -> None:
    """Parameters are not a part of the record of a call."""
    module.first.weight = nn.Parameter(torch.zeros(4, 4))
    module(X)
    module.first.weight = nn.Parameter(torch.zeros(4, 5))
    # An operator fails by itself, with the line of the model.
    with pytest.raises(RuntimeError, match=r"test_contract\.py:"):
        module(X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("changed", [False, True])
def test_a_whole_module_is_moved_to_another_dtype(
    module: Any, dtype: torch.dtype, changed: bool
) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x).relu())

    eager = Plain()
    module = unflatten(export_preserving(eager, (X,)))
    if changed:
        for model in (module, eager):
            replace(model, "first", Around(model.get_submodule("first"), 2.0))
    saved = io.BytesIO()
    torch.save(module.to(dtype), saved)
    saved.seek(0)
    eager.to(dtype)
    for subject in (module, copy.deepcopy(module), torch.load(saved, weights_only=False)):
        torch.testing.assert_close(subject(X.to(dtype)), eager(X.to(dtype)))
    with pytest.raises(InputConstraintError, match="int64"):
        module(X.long())
