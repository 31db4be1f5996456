"""Operators with effects, their tokens, and objects that are no tensors."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, with_effects
from torch.export import export
from torch.testing._internal.torchbind_impls import init_torchbind_implementations
from unflatten_comparison import FORMS, compare, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

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


class Notes(Model):
    def __init__(self, mark: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.mark = mark

    def forward(self, x: Tensor) -> Any:
        y = self.fc(noted(x, self.mark))
        note(y, self.mark + 1)
        return y


class Effects(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = Notes(10)
        self.b = Notes(20)

    def forward(self, x: Tensor) -> Any:
        y = self.b(x)
        note(y, 5)
        return self.a(self.a(y)) + y


@pytest.mark.parametrize(
    ("form", "preserved"), [*((form, ()) for form in FORMS), ("strict decomposed", ("a",))]
)
def test_effects_happen_once_and_in_order(form: str, preserved: tuple[str, ...]) -> None:
    model, x = Effects(), torch.randn(2, 3)
    options = {"preserve_module_call_signature": preserved}
    program = programs(model, (x,), forms=(form,), **options)[form]
    text, signature = str(program.graph), str(program.graph_signature)
    has_tokens = bool(program.graph.find_nodes(op="call_function", target=with_effects))
    assert has_tokens == ("decomposed" in form)
    module = unflatten(program)
    # Taking the tokens out must not take them out of the program.
    assert (str(program.graph), str(program.graph_signature)) == (text, signature)
    compare(copy.deepcopy(model), module, (x,), calls=1)
    SEEN.clear()
    module(x)
    assert SEEN == [20, 21, 5, 10, 11, 10, 11]
    inner: Any
    for inner in module.modules():
        assert not inner.graph.find_nodes(op="call_function", target=with_effects)
    calls = [node.target for node in module.graph.find_nodes(op="call_module")]
    assert calls == ["b", "a", "a"]


def test_calls_whose_effects_alternate_are_split_rather_than_reordered() -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a = Notes(10)
            self.b = Notes(20)

        def forward(self, x: Tensor) -> Any:
            return self.a(x) + self.b(x)

    model, x = Two(), torch.randn(2, 3)
    program = export(model, (x,))
    steps = [node for node in program.graph.nodes if node.op == "call_function"]
    half = len(steps) // 2
    for one, two in zip(steps[:half], steps[half : 2 * half], strict=True):
        steps[-1].prepend(one)
        steps[-1].prepend(two)
    module = unflatten(program)
    SEEN.clear()
    torch.testing.assert_close(module(x), model(x))
    assert SEEN == [10, 20, 11, 21, 10, 11, 20, 21]


def test_what_is_printed_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    class Prints(Model):
        def forward(self, x: Tensor) -> Any:
            torch.ops.aten._print("seen")
            return x + 1

    for program in programs(nn.Sequential(Prints()), (torch.ones(1),)).values():
        capfd.readouterr()
        module = unflatten(program)
        assert capfd.readouterr().out == ""
        module(torch.ones(1))
        assert capfd.readouterr().out == "seen\n"


@pytest.fixture(scope="module")
def objects() -> Any:
    try:
        init_torchbind_implementations()  # type: ignore[no-untyped-call]
    except Exception as error:
        pytest.skip(f"this torch comes without its test classes: {error}")
    return torch.classes._TorchScriptTesting


class HoldsObject(Model):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.held = held

    def forward(self, x: Tensor) -> Any:
        y = torch.ops._TorchScriptTesting.takes_foo(self.held, x)
        return self.fc(self.held.add_tensor(y))


@pytest.mark.parametrize("form", ["non-strict", "non-strict decomposed"])
def test_custom_objects_stay_attributes_of_their_module(objects: Any, form: str) -> None:
    model = nn.Sequential(HoldsObject(objects._Foo(1, 2)), HoldsObject(objects._Foo(3, 4)))
    x = torch.randn(2, 3)
    program = programs(model, (x,), forms=(form,))[form]
    module: Any = unflatten(program)
    compare(copy.deepcopy(model), module, (x,))
    assert set(program.constants) == {"0.held", "1.held"}
    # Shared with the program, as torch's own modules share them: not every object can be copied.
    assert module.get_submodule("0").held is program.constants["0.held"]
    twin = copy.deepcopy(module)
    torch.testing.assert_close(twin(x), model(x))


def test_custom_objects_as_arguments(objects: Any) -> None:
    class Takes(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, held: Any, x: Tensor) -> Any:
            return self.inner(x, held)

    class Inner(Model):
        def forward(self, x: Tensor, held: Any) -> Any:
            return torch.ops._TorchScriptTesting.takes_foo(held, x) * 2

    model, x = Takes(), torch.randn(2, 3)
    module = unflatten(export(model, (objects._Foo(1, 2), x)))
    for other in (objects._Foo(1, 2), objects._Foo(5, 6)):
        torch.testing.assert_close(module(other, x), model(other, x))


def test_an_object_with_state_is_the_programs_own(objects: Any) -> None:
    class Queue(Model):
        def __init__(self) -> None:
            super().__init__()
            self.queue = objects._TensorQueue(torch.zeros(0))
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            torch.ops._TorchScriptTesting.queue_push(self.queue, x.cos())
            return self.fc(torch.ops._TorchScriptTesting.queue_pop(self.queue))

    model, x = Queue(), torch.randn(2, 3)
    program = export(model, (x,))
    module: Any = unflatten(program)
    for _ in range(2):
        torch.testing.assert_close(module(x), model(x))
    assert module.queue is program.constants["queue"]
    assert module.queue.size() == 0
