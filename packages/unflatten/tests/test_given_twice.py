"""Arguments, and results, that are one tensor when they are recorded, and two later."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import (
    InputConstraintError,
    UnflattenError,
    export_preserving,
    unflatten,
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, q: Tensor, k: Tensor, d: dict[str, Any] | None = None) -> Any:
        more = d["a"].relu() - d["b"][1] * d["b"][0] if d else 0
        return self.work(q) * k + more


class Results(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.work(x)
        return y, [y, {"x": x}]


class Writing(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q.add_(1) * k


class Asking(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q.sin() if q is k else q * k


class Model(nn.Module):
    def __init__(self, child: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.child = child
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.child, x)


class Changing(nn.Module):
    def __init__(self, inner: nn.Module, which: int) -> None:
        super().__init__()
        self.inner = inner
        self.which = which

    def forward(self, *args: Any, **more: Any) -> Any:
        leaves, spec = torch.utils._pytree.tree_flatten((args, more))
        leaves[self.which] = leaves[self.which] * 1.7 + 0.3
        args, more = torch.utils._pytree.tree_unflatten(leaves, spec)
        return self.inner(*args, **more)


class ChangingResult(Changing):
    def forward(self, *args: Any, **more: Any) -> Any:
        leaves, spec = torch.utils._pytree.tree_flatten(self.inner(*args, **more))
        leaves[self.which] = leaves[self.which] * 1.7 + 0.3
        return torch.utils._pytree.tree_unflatten(leaves, spec)


def all_changed(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf * 1.7 + 0.3, value)


GIVEN = {
    "two": (Two, lambda child, x: child(x, x), 2),
    "computed": (Two, lambda child, x: child(x.sin(), x).cos() + child(x, x), 2),
    "in containers": (Two, lambda child, x: child(x, x, d={"a": x, "b": (x.cos(), x)}), 5),
}


def loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


CHANGES: dict[str, Callable[..., Any]] = {
    "raw": lambda program: program,
    "decomposed": lambda program: program.run_decompositions(),
    "loaded": loaded,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", GIVEN)
def test_each_argument_is_read_by_itself(case: str, strict: bool, change: str) -> None:
    kind, run, leaves = GIVEN[case]
    eager, x = Model(kind(), run), torch.randn(3, 4)
    program = export_preserving(eager, (x,), strict=strict)
    module = unflatten(CHANGES[change](program))
    torch.testing.assert_close(module(x), eager(x))
    child, inner = eager.child, module.get_submodule("child")
    for which in range(leaves):
        eager.child = Changing(child, which)
        for other in (inner, child):
            module.set_submodule("child", Changing(other, which))
            torch.testing.assert_close(module(x), eager(x))
        eager.child = child
        module.set_submodule("child", inner)
    if case == "two":
        q, k = torch.randn(2, 3, 4)
        torch.testing.assert_close(inner(q, k), child(q, k))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("change", ["raw", "decomposed"])
def test_each_result_is_read_by_itself(change: str, strict: bool) -> None:
    def run(child: nn.Module, x: Tensor) -> Any:
        one, (two, more) = child(x)
        return one + 1, two.relu(), more["x"] * 2

    eager, x = Model(Results(), run), torch.randn(3, 4)
    module = unflatten(CHANGES[change](export_preserving(eager, (x,), strict=strict)))
    child, inner = eager.child, module.get_submodule("child")
    for which in range(3):
        eager.child = ChangingResult(child, which)
        module.set_submodule("child", ChangingResult(inner, which))
        torch.testing.assert_close(module(x), eager(x))
        eager.child = child


def recorded_by_torch(eager: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(eager, (x,), preserve_module_call_signature=("child",))


@pytest.mark.parametrize(
    ("make", "export"),
    [(Two, recorded_by_torch), (Writing, lambda eager, x: export_preserving(eager, (x,)))],
    ids=["by torch", "written"],
)
def test_what_is_read_once_is_refused(make: Callable[[], nn.Module], export: Any) -> None:
    eager = Model(make(), lambda child, x: child(y := x.sin(), y))
    x, q, k = torch.randn(3, 3, 4)
    module = unflatten(export(eager, x))
    torch.testing.assert_close(module(x), eager(x))
    inner: Any = module.get_submodule("child")
    row = next(row for row in module.swappable() if row.path == "child")
    assert "'q' and 'k' were one tensor" in row.reason
    for copied in (inner, copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        both = q.clone()
        torch.testing.assert_close(copied(both, both), eager.child(both := q.clone(), both))
        with pytest.raises(InputConstraintError, match=r"'q' and 'k' .* were one tensor"):
            copied(q, k)
    with pytest.raises(UnflattenError, match="one tensor"):
        torch.fx.symbolic_trace(inner)
    for which in range(2):
        module.set_submodule("child", Changing(inner, which))
        with pytest.raises(InputConstraintError, match="one tensor"):
            module(x)
    module.set_submodule("child", Changing(eager.child, 1))
    expected = Model(Changing(eager.child, 1), eager.run)
    if make is Two:
        torch.testing.assert_close(module(x), expected(x))


def test_arguments_that_are_changed_alike_are_right() -> None:
    eager, x = Model(Two(), lambda child, x: child(x, x)), torch.randn(3, 4)
    module = unflatten(recorded_by_torch(eager, x))
    handles = [
        each.register_forward_pre_hook(lambda _, args: all_changed(args))
        for each in (eager.child, module.get_submodule("child"))
    ]
    with torch.no_grad():
        torch.testing.assert_close(module(x), eager(x))
    torch.testing.assert_close(module(x), eager(x))
    # Two ways of gradients, of which the program has one.
    with pytest.raises(InputConstraintError, match="one tensor"):
        module(x.clone().requires_grad_())
    for handle in handles:
        handle.remove()
    x.requires_grad_()
    module(x).sum().backward()
    grad, x.grad = x.grad, None
    eager(x).sum().backward()
    torch.testing.assert_close(grad, x.grad)


def test_results_that_are_changed_are_refused_in_torchs_record() -> None:
    def run(child: nn.Module, x: Tensor) -> Any:
        one, (two, _) = child(x)
        return one + 1, two.relu()

    eager, x = Model(Results(), run), torch.randn(3, 4)
    module = unflatten(recorded_by_torch(eager, x))
    row = next(row for row in module.swappable() if row.path == "child")
    assert "must return one tensor as its result[0] and as its result[1][0]" in row.reason
    inner = module.get_submodule("child")
    for which in range(2):
        module.set_submodule("child", ChangingResult(inner, which))
        with pytest.raises(UnflattenError, match="were one when it was recorded"):
            module(x)
    module.set_submodule("child", eager.child)
    torch.testing.assert_close(module(x), eager(x))


def test_a_module_that_asks_whether_two_are_one_is_recorded_as_it_is() -> None:
    eager, x = Model(Asking(), lambda child, x: child(x, x)), torch.randn(3, 4)
    module = unflatten(export_preserving(eager, (x,)))
    torch.testing.assert_close(module(x), eager(x))
    with pytest.raises(InputConstraintError, match="one tensor"):
        module.get_submodule("child")(x, x + 1)


@pytest.mark.parametrize("training", [False, True])
def test_attention_makes_one_product_for_what_is_one_tensor(training: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    eager = Model(attention, lambda child, x: child(x, x, x, need_weights=False)[0])
    eager.train(training)
    x = torch.randn(2, 3, 8)
    program = export_preserving(eager, (x,))
    plain = torch.export.export(eager, (x,))
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [
        n.target for n in plain.graph.nodes if n.op == "call_function"
    ]
    module = unflatten(program)
    torch.testing.assert_close(module(x), eager(x))
    for which in range(3):
        module.set_submodule("child", Changing(module.get_submodule("child"), which))
        with pytest.raises(InputConstraintError, match="one tensor"):
            module(x)
        module.set_submodule("child", module.get_submodule("child.inner"))
