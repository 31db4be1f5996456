"""Operators that hold graphs, operators with effects, and objects other than tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import export
from unflatten_zoo import Case  # type: ignore[import-not-found]
from unflatten_zoo.judges import compare_calls, replace  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnsupportedProgramError, unflatten

# torch's own: operators with graphs compile themselves when eager runs them.
pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.arange(12.0).reshape(3, 4) / 6 - 1
WAYS = ("plain", "strict", "decomposed", "preserving")


class Calls(nn.Module):
    """Calls one inner module twice between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.inner(self.inner(self.before(x)).sin()))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        def right(y: Tensor) -> Any:
            return torch.cond(y.max() > 0, lambda z: z * 2, self.b, (y,))

        return torch.cond(x.sum() > 0, self.a, right, (x,))


class Loop(nn.Module):
    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("step", torch.tensor(1))

    def forward(self, x: Tensor) -> Any:
        def body(left: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return left - self.step, self.fc(y)

        loop: Any = while_loop
        return loop(lambda left, _: left > 0, body, (self.step + 2, x))[1]


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        carry, rows = scan(lambda seen, row: (seen + self.fc(row), seen * row), x[0], x)
        return rows + carry


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


INNER: tuple[type[nn.Module], ...] = (Branches, Loop, Scan, Region)
CASES = {
    # No gradients: eager cannot compute them through some of these.
    cls.__name__: Case(
        cls.__name__,
        lambda cls=cls: Calls(cls()).requires_grad_(False),
        lambda: (X,),
        ((),),
    )
    for cls in INNER
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name,
            way,
            # Eager compiles most of these operators, which takes seconds.
            marks=() if way == "plain" or (number + at) % 3 == 0 else pytest.mark.heavy,
        )
        for number, name in enumerate(CASES)
        for at, way in enumerate(WAYS)
    ],
)
def test_an_operator_with_graphs_is_in_the_module_that_calls_it(name: str, way: str) -> None:
    case: Case = CASES[name]
    module = case.unflattened(way)
    compare_calls(case, module)
    calls = [node.target for node in module.graph.find_nodes(op="call_module")]
    assert calls == ["before", "inner", "inner", "after"]
    if way == "preserving":
        for path in ("before", "inner"):
            replaced = case.unflattened(way)
            replace(replaced, path, case.module().get_submodule(path))
            compare_calls(case, replaced)


SEEN: list[int] = []


@torch.library.custom_op("lowerdeck_unflatten_tests::noted", mutates_args=())
def noted(x: Tensor, mark: int) -> Tensor:
    SEEN.append(mark)
    return x * 2


@noted.register_fake
def _(x: Tensor, mark: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("lowerdeck_unflatten_tests::note", mutates_args=())
def note(x: Tensor, mark: int) -> None:
    SEEN.append(mark)


@note.register_fake
def _(x: Tensor, mark: int) -> None:
    return None


for _op in (noted, note):
    torch.library._register_effectful_op(_op._qualname, _EffectType.ORDERED)


class Notes(nn.Module):
    def __init__(self, mark: int) -> None:
        super().__init__()
        self.fc, self.mark = nn.Linear(4, 4), mark

    def forward(self, x: Tensor) -> Any:
        y = self.fc(noted(x, self.mark))
        note(y, self.mark + 1)
        return y


class Effects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Notes(10), Notes(20)

    def forward(self, x: Tensor) -> Any:
        y = self.b(x)
        note(y, 5)
        return self.a(self.a(y)) + y


EFFECTS = Case("effects", Effects, lambda: (X,), ((),))


@pytest.mark.parametrize("way", ["plain", "strict"])
def test_effects_happen_once_and_in_order(way: str) -> None:
    module = EFFECTS.unflattened(way)
    compare_calls(EFFECTS, module)
    SEEN.clear()
    module(X)
    assert SEEN == [20, 21, 5, 10, 11, 10, 11]
    calls = [node.target for node in module.graph.find_nodes(op="call_module")]
    assert calls == ["b", "a", "a"]


def test_tokens_of_effects_are_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match="effect tokens"):
        EFFECTS.unflattened("decomposed")


def test_calls_whose_effects_alternate_are_split_rather_than_reordered() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Notes(10), Notes(20)

        def forward(self, x: Tensor) -> Any:
            return self.a(x) + self.b(x)

    model = Two()
    program = export(model, (X,))
    steps = [node for node in program.graph.nodes if node.op == "call_function"]
    half = len(steps) // 2
    for one, two in zip(steps[:half], steps[half : 2 * half], strict=True):
        steps[-1].prepend(one)
        steps[-1].prepend(two)
    module = unflatten(program)
    SEEN.clear()
    torch.testing.assert_close(module(X), model(X))
    assert SEEN == [10, 20, 11, 21, 10, 11, 20, 21]


def test_what_is_printed_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    class Prints(nn.Module):
        def forward(self, x: Tensor) -> Any:
            torch.ops.aten._print("seen")
            return x + 1

    for program in (
        export(nn.Sequential(Prints()), (X,), strict=strict) for strict in (False, True)
    ):
        capfd.readouterr()
        module = unflatten(program)
        assert capfd.readouterr().out == ""
        module(X)
        assert capfd.readouterr().out == "seen\n"
