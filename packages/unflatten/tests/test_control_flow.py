"""Operators that hold graphs, operators with effects, and objects that are no tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.effects import _EffectType, with_effects
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import export
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.torchbind_impls import init_torchbind_implementations
from unflatten_zoo import Case  # type: ignore[import-not-found]
from unflatten_zoo.judges import compare_calls, replace  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnsupportedProgramError, export_preserving, unflatten

# torch's own: operators with graphs compile themselves when eager runs them.
pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.arange(12.0).reshape(3, 4) / 6 - 1
WAYS = ("plain", "strict", "decomposed", "preserving")


class Calls(nn.Module):
    """Calls one inner module twice between layers of its own."""

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


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        over: Any = map_rows
        return over(lambda row, shift: self.fc(row) + shift, x, x[0].clone())


class Scan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        carry, rows = scan(lambda seen, row: (seen + self.fc(row), seen * row), x[0], x)
        return rows + carry


class AssociativeScan(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Any:
        return self.fc(x)


INNER: tuple[type[nn.Module], ...] = (Branches, Loop, Map, Scan, AssociativeScan, Region)
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


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score + (q - k))


def test_flexible_attention() -> None:
    x = X.reshape(1, 1, 3, 4)
    module = unflatten(export(nn.Sequential(Attention(), Attention()), (x,)))

    def attend(y: Tensor) -> Tensor:
        positions = torch.arange(3.0)
        scores = y @ y.transpose(2, 3) / 2 + positions[:, None] - positions
        return scores.softmax(3) @ y

    torch.testing.assert_close(module(x), attend(attend(x)))


class Named(nn.Module):
    """A branch, beside state or a child that has the name that export gives a branch's graph."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        if isinstance(held, Tensor):
            self.register_buffer("true_graph_0", held)
        else:
            self.true_graph_0 = held

    def forward(self, x: Tensor) -> Any:
        held: Any = self.true_graph_0
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (self.fc(x),))
        return y + (held if isinstance(held, Tensor) else held(x))


@pytest.mark.parametrize("way", ["plain", "strict", "decomposed"])
def test_a_model_may_use_the_names_of_branches(way: str) -> None:
    held: tuple[Any, ...] = (torch.full((4,), 3.0), nn.Linear(4, 4))
    case = Case("named", lambda: nn.Sequential(*map(Named, held)), lambda: (X,), ((),))
    compare_calls(case, case.unflattened(way))


def test_hints_that_a_pass_adds_stay_an_operator() -> None:
    model = Calls(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    program = export(model, (X,))
    body = torch.fx.Graph()
    body.output(body.call_function(torch.ops.aten.relu.default, (body.placeholder("x"),)))
    program.graph_module.hinted = torch.fx.GraphModule({}, body)
    for relu in program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
        with program.graph.inserting_before(relu):
            held = program.graph.get_attr("hinted")
            held.meta["nn_module_stack"] = relu.meta["nn_module_stack"]
        relu.args, relu.kwargs = (held, relu.args, {}), {"hints": {"fuse": True}}
        relu.target = hints_wrapper
    module: Any = unflatten(program)
    torch.testing.assert_close(module(X), model(X))
    torch.testing.assert_close(copy.deepcopy(module)(X), model(X))
    nodes = module.get_submodule("inner.1").graph.find_nodes(
        op="call_function", target=hints_wrapper
    )
    assert [node.kwargs for node in nodes] == [{"hints": {"fuse": True}}]


def test_tensors_that_a_transform_left_behind_are_refused() -> None:
    """torch.export keeps tensors of a level of torch.func.grad, which has ended, as constants."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.constant = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.constant

    kept: list[Tensor] = []

    def total(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    program = export(Adds(), (X,))
    torch.func.grad(total)(torch.ones(4))
    program.constants["constant"] = kept[0]
    with pytest.raises(UnsupportedProgramError, match="'constant'"):
        unflatten(program)


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


@pytest.mark.parametrize("way", ["plain", "strict", "decomposed", "strict decomposed"])
def test_effects_happen_once_and_in_order(way: str) -> None:
    program = EFFECTS.program(way)
    text, signature = str(program.graph), str(program.graph_signature)
    has_tokens = bool(program.graph.find_nodes(op="call_function", target=with_effects))
    assert has_tokens == ("decomposed" in way)
    module = EFFECTS.unflattened(way)
    # Taking the tokens out must not take them out of the program.
    assert (str(program.graph), str(program.graph_signature)) == (text, signature)
    compare_calls(EFFECTS, module)
    SEEN.clear()
    module(X)
    assert SEEN == [20, 21, 5, 10, 11, 10, 11]
    calls = [node.target for node in module.graph.find_nodes(op="call_module")]
    assert calls == ["b", "a", "a"]


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

    for program in (export(nn.Sequential(Prints()), (X,), strict=strict) for strict in (0, 1)):
        capfd.readouterr()
        module = unflatten(program)
        assert capfd.readouterr().out == ""
        module(X)
        assert capfd.readouterr().out == "seen\n"


@pytest.fixture(scope="module")
def objects() -> Any:
    try:
        init_torchbind_implementations()  # type: ignore[no-untyped-call]
    except Exception as error:
        pytest.skip(f"this torch comes without its test classes: {error}")
    return torch.classes._TorchScriptTesting


class HoldsObject(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.fc, self.held = nn.Linear(4, 4), held

    def forward(self, x: Tensor) -> Any:
        y = torch.ops._TorchScriptTesting.takes_foo(self.held, x)
        return self.fc(self.held.add_tensor(y))


@pytest.mark.parametrize("record", [export, export_preserving])
def test_custom_objects_stay_attributes_of_their_module(
    objects: Any, record: Callable[..., Any]
) -> None:
    model = nn.Sequential(HoldsObject(objects._Foo(1, 2)), HoldsObject(objects._Foo(3, 4)))
    program = record(model, (X,))
    module: Any = unflatten(program)
    torch.testing.assert_close(module(X), model(X))
    assert set(program.constants) == {"0.held", "1.held"}
    # Shared with the program, as torch's own modules share them: not every object can be copied.
    assert module.get_submodule("0").held is program.constants["0.held"]
    torch.testing.assert_close(copy.deepcopy(module)(X), model(X))


def test_custom_objects_are_arguments(objects: Any) -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, held: Any) -> Any:
            return torch.ops._TorchScriptTesting.takes_foo(held, x) * 2

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, held: Any, x: Tensor) -> Any:
            return self.inner(x, held)

    model = Takes()
    module = unflatten(export(model, (objects._Foo(1, 2), X)))
    for other in (objects._Foo(1, 2), objects._Foo(5, 6)):
        torch.testing.assert_close(module(other, X), model(other, X))


def test_an_object_with_state_is_the_programs_own(objects: Any) -> None:
    class Queue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queue, self.fc = objects._TensorQueue(torch.zeros(0)), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            torch.ops._TorchScriptTesting.queue_push(self.queue, x.cos())
            return self.fc(torch.ops._TorchScriptTesting.queue_pop(self.queue))

    model = Queue()
    program = export(model, (X,))
    module: Any = unflatten(program)
    for _ in range(2):
        torch.testing.assert_close(module(X), model(X))
    assert module.queue is program.constants["queue"]
    assert module.queue.size() == 0
