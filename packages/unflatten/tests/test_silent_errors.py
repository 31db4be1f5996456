"""Programs for which torch.export.unflatten gives wrong values without a word."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mode_models import SplitByMode, SplitByModeTwice  # type: ignore[import-not-found]
from torch import Tensor, nn
from unflatten_comparison import PLAIN, assert_equal, check, compare, programs  # type: ignore[import-not-found]

from lowerdeck.unflatten import InterpreterModuleDispatcher, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Expert(Model):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.a = nn.Linear(size, size)
        self.b = nn.Linear(size, size)

    def forward(self, x: Tensor, use_a: bool) -> Any:
        chosen: Tensor = self.a(x) if use_a else self.b(x)
        return chosen


class Mixture(Model):
    def __init__(self) -> None:
        super().__init__()
        self.expert = Expert(4)

    def forward(self, x: Tensor) -> Any:
        for use_a in (True, False, True, False):
            x = self.expert(x, use_a)
        return x


def test_calls_that_differ_in_the_child_that_they_call_are_told_apart() -> None:
    for module in check(Mixture(), (torch.randn(2, 4),)).values():
        assert isinstance(module.expert, InterpreterModuleDispatcher)
        assert len(module.expert.call_modules()) == 2


class ReadsOldValue(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        old = self.state.clone()
        self.state.add_(x)
        return old * 2, self.state * 3


class ReadsOldValueAround(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadsOldValue()
        self.after = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        before = self.inner.state + 0
        old, new = self.inner(x)
        return self.after(before), old, new + self.inner.state


@pytest.mark.parametrize("model", [ReadsOldValue, ReadsOldValueAround])
def test_a_buffer_is_overwritten_after_the_last_reader_of_its_old_value(
    model: type[nn.Module],
) -> None:
    check(model(), (torch.arange(3.0),))


class Swaps(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(2))
        self.register_buffer("second", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        kept = self.first.clone()
        self.first.copy_(self.second)
        self.second.copy_(kept + x)
        return kept


def test_buffers_that_take_each_others_values() -> None:
    check(Swaps(), (torch.ones(2),))


class Counter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count.add_(1)
        return x * self.count


class ReadsIntermediate(Model):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.counter(x)
        return self.layer(x) + self.counter.count


@pytest.mark.parametrize("preserved", [(), ("counter",), ("counter", "layer")])
def test_a_stateful_module_called_three_times(preserved: tuple[str, ...]) -> None:
    made = check(
        ReadsIntermediate(), (torch.randn(2, 2),), preserve_module_call_signature=preserved
    )
    for module in made.values():
        assert not isinstance(module.counter, InterpreterModuleDispatcher)


@pytest.mark.parametrize("form", ["non-strict", "strict", "non-strict decomposed"])
def test_a_stateful_module_called_three_times_can_be_swapped(form: str) -> None:
    eager, x = ReadsIntermediate(), torch.randn(2, 2)
    program = programs(eager, (x,), preserve_module_call_signature=("counter",))[form]
    module = unflatten(program)
    module.counter = Counter()
    compare(eager, module, (x,))


class Reader(Model):
    def forward(self, x: Tensor) -> Any:
        return x + self.host[0].shared

    host: list[Any]


class Host(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shared", torch.zeros(2))
        self.reader = Reader()
        self.reader.host = [self]

    def forward(self, x: Tensor) -> Any:
        self.shared.copy_(x.sum(0))
        return self.reader(x) * 2


def test_a_preserved_module_that_reads_an_intermediate_value_besides_its_argument() -> None:
    model, x = Host(), torch.randn(3, 2)
    program = torch.export.export(
        model, (x,), preserve_module_call_signature=("reader",), strict=False
    )
    for form in (program, _decomposed(program)):
        module = unflatten(form)
        assert_equal(module(x), model(x))


def _decomposed(program: torch.export.ExportedProgram) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.run_decompositions()


@pytest.mark.parametrize("model", [SplitByMode, SplitByModeTwice])
def test_a_call_with_a_mode_region_in_it_stays_one_call(model: type[nn.Module]) -> None:
    for module in check(model(), (torch.randn(2, 4),), forms=PLAIN).values():
        calls = [node for node in module.graph.nodes if node.op == "call_module"]
        if model is SplitByModeTwice:
            assert [node.target for node in calls] == ["block", "block"]


def test_gradients_stop_where_eager_stops_them() -> None:
    eager, x = SplitByMode(), torch.randn(2, 4)
    for program in programs(eager, (x,), forms=PLAIN).values():
        module = unflatten(program)
        expected = torch.autograd.grad(eager(x).sum(), tuple(eager.parameters()))
        found = torch.autograd.grad(module(x).sum(), tuple(module.parameters()))
        torch.testing.assert_close(found, expected)


class Aliases(Model):
    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(8.0)
        self.register_buffer("base", base)
        self.register_buffer("middle", base[2:6])
        self.register_buffer("bits", base.view(torch.int32))
        value = torch.randn(2, dtype=torch.complex64)
        self.register_buffer("value", value)
        self.register_buffer("conjugate", value.conj())

    def forward(self, x: Tensor) -> Any:
        return x + self.middle, self.base * 2, self.bits + 1, self.value * self.conjugate


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_views_of_one_memory_keep_their_type_and_conjugation() -> None:
    model = Aliases()
    program = torch.export.export(model, (torch.ones(4),), strict=False)
    module: Any = unflatten(program)
    compare(copy.deepcopy(model), module, (torch.ones(4),))
    module.base.zero_()
    assert module.middle.eq(0).all()
    assert model.base[1] == 1


def test_no_counter_goes_wrong_after_an_exception_a_direct_call_or_in_threads() -> None:
    model, x = Mixture(), torch.randn(2, 4)
    module: Any = unflatten(torch.export.export(model, (x,)))
    expected = model(x)
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 3))
    torch.testing.assert_close(module(x), expected)
    module.expert.call_modules()[1](x)
    torch.testing.assert_close(module(x), expected)
    found: list[Tensor] = []

    def run() -> None:
        found.extend(module(x) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for value in found:
        torch.testing.assert_close(value, expected)


class TwoHalves(Model):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.b = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        out: Tensor = self.a(x) + self.b(x)
        return out


def test_interleaved_nodes_of_two_modules() -> None:
    model, x = TwoHalves(), torch.randn(2, 2)
    program = torch.export.export(model, (x,))
    first, relu_first, second, _ = program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.linear.default
    ) + program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    del relu_first
    linears = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    relus = program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relus[0].prepend(linears[1])
    del first, second
    module = unflatten(program)
    torch.testing.assert_close(module(x), model(x))
    assert [n.target for n in module.graph.find_nodes(op="call_module", target="a")] == ["a"]


def test_interleaved_nodes_that_depend_on_each_other_are_split() -> None:
    model, x = TwoHalves(), torch.randn(2, 2)
    program = torch.export.export(model, (x,))
    linears = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    relus = program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    relus[0].prepend(linears[1])
    # Each module's second node now reads the other's first.
    relus[0].args, relus[1].args = (linears[1],), (linears[0],)
    module = unflatten(program)
    expected = torch.relu(model.b[0](x)) + torch.relu(model.a[0](x))
    torch.testing.assert_close(module(x), expected)


class NestedModes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            with torch.no_grad():
                y = self.fc(x)
            z = self.fc(y)
        return self.fc(z) * y


def test_mode_regions_inside_each_other() -> None:
    check(NestedModes(), (torch.randn(1, 2),), forms=PLAIN)
