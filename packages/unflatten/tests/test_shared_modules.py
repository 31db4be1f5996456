"""Which names are one module or one tensor: what a program tells, and what it does not."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from unflatten_comparison import compare  # type: ignore[import-not-found]

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module


class Chain(Model):
    """Calls two children, which may be one module."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def tied() -> Chain:
    """Return a chain of two modules that share all their state."""
    model = Chain(nn.Linear(2, 2), nn.Linear(2, 2))
    model.second.weight = model.first.weight
    model.second.bias = model.first.bias
    return model


def shared() -> Chain:
    """Return a chain of one module with two names."""
    layer = nn.Linear(2, 2)
    return Chain(layer, layer)


def record(program: ExportedProgram) -> Any:
    """Return all that a program tells about modules: stacks, state and signature."""
    stacks = [
        (node.name, str(node.target), str(node.meta.get("nn_module_stack")))
        for node in program.graph.nodes
    ]
    entries = [(entry.fqn, entry.signature is None) for entry in program.module_call_graph]
    values = {id(value): name for name, value in reversed(program.state_dict.items())}
    names = [(name, values[id(value)]) for name, value in program.state_dict.items()]
    return stacks, entries, names, str(program.graph_signature)


def test_strict_export_tells_a_shared_module_from_two_that_share_their_state() -> None:
    x = torch.randn(1, 2)
    for model, is_one in ((tied(), False), (shared(), True)):
        for program in _both(export(model, (x,), strict=True)):
            module: Any = unflatten(program)
            assert (module.first is module.second) is is_one
            assert module.first.weight is module.second.weight
            compare(copy.deepcopy(model), module, (x,))


def test_non_strict_export_does_not_tell_so_that_both_become_one_module() -> None:
    x = torch.randn(1, 2)
    programs = [export(model, (x,), strict=False) for model in (tied(), shared())]
    assert record(programs[0]) == record(programs[1])
    for program in programs:
        module: Any = unflatten(program)
        assert module.first is module.second


def test_non_strict_export_does_not_tell_a_shared_module_without_state_from_two() -> None:
    x, layer = torch.randn(1, 2), nn.ReLU()
    models = (Chain(layer, layer), Chain(nn.ReLU(), nn.ReLU()))
    programs = [export(model, (x,), strict=False) for model in models]
    assert record(programs[0]) == record(programs[1])
    for program in programs:
        module: Any = unflatten(program)
        assert module.first is not module.second


class Doubles(nn.Module):
    """Two names of one module without state, in a module that has two names itself."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU(inplace=True)
        self.inner = Chain(Chain(act, nn.Tanh()), Chain(nn.Tanh(), act))
        self.again = self.inner

    def forward(self, x: Tensor) -> Any:
        return self.again(self.inner(x + 1) * 2)


@pytest.mark.parametrize("how", ["as it is", "decomposed", "saved"])
@pytest.mark.parametrize("strict", [False, True])
def test_export_preserving_notes_which_modules_without_state_are_one(
    strict: bool, how: str
) -> None:
    eager, x = Doubles(), torch.randn(3)
    program = export_preserving(eager, (x,), strict=strict)
    if how == "decomposed":
        program = program.run_decompositions()
    elif how == "saved":
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    made: Any = unflatten(program)
    assert made.inner is made.again
    assert made.inner.first.first is made.inner.second.second
    assert made.inner.first.second is not made.inner.second.first
    torch.testing.assert_close(made(x), eager(x))
    for module in (made, eager):
        act = module.get_submodule("inner.first.first")
        act.register_forward_hook(lambda _module, _args, result: result * 1.5)
    try:
        found = made(x)
    except UnflattenError:
        # Decomposing lost what is given back as it was given.
        assert how == "decomposed"
        return
    torch.testing.assert_close(found, eager(x))


class CallsFirstTwice(Chain):
    def forward(self, x: Tensor) -> Any:
        return self.first(self.first(x))


def test_strict_export_does_not_tell_a_shared_module_without_state_from_one_never_called() -> None:
    x, layer = torch.randn(1, 2), nn.ReLU()
    models = (Chain(layer, layer), CallsFirstTwice(layer, nn.Tanh()))
    programs = [export(model, (x,), strict=True) for model in models]
    one, two = (
        re.sub(r"\d{9,}|Chain|CallsFirstTwice", "", str(record(program))) for program in programs
    )
    assert one == two
    for program in programs:
        module: Any = unflatten(program)
        assert module.first is not module.second


class Unsaved(Model):
    """Reads a buffer that is not saved, and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("unread", torch.zeros(2), persistent=False)
        self.factor = torch.full((2,), 0.5)

    def forward(self, x: Tensor) -> Any:
        self.seen.add_(1)
        return x * self.factor + self.seen


def unsaved_shared() -> Chain:
    """Return a chain of one module with two names."""
    layer = Unsaved()
    return Chain(layer, layer)


def unsaved_tied() -> Chain:
    """Return a chain of two modules that share all their tensors."""
    model = Chain(Unsaved(), Unsaved())
    model.second.seen, model.second.factor = model.first.seen, model.first.factor
    return model


@pytest.mark.parametrize("make", [unsaved_shared, unsaved_tied])
@pytest.mark.parametrize("strict", [False, True])
def test_unsaved_tensors_come_back_under_every_name(make: Any, strict: bool) -> None:
    x = torch.randn(1, 2)
    program = export(make(), (x,), strict=strict)
    module: Any = unflatten(program)
    assert module.first.seen is module.second.seen
    assert module.first.factor is module.second.factor
    compare(make(), module, (x,))
    if strict:
        # All that the program has; of the one that is never read it has nothing.
        assert not {"first.seen", "first.unread", "second.unread"} & program.constants.keys()
        assert not hasattr(module.first, "unread")
    else:
        assert module.first.unread.shape == (2,)


def test_unsaved_tensors_of_a_part_of_a_shared_module_come_back() -> None:
    x, block = torch.randn(1, 2), nn.Sequential(nn.ReLU(), Unsaved())
    for strict in (False, True):
        module: Any = unflatten(export(Chain(block, block), (x,), strict=strict))
        assert module.first[1].seen is module.second[1].seen
        # Dynamo says that ``first`` called ``second.1``, so that they are one.
        assert not strict or module.first is module.second
        calls = [node.target for node in module.graph.find_nodes(op="call_module")]
        assert calls in (["first", "first"], ["first", "second"])
        compare(Chain(block, block), module, (x,))


class Mixed(Model):
    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.register_buffer(f"b{number}", torch.ones(2) * number, persistent=number % 2 == 1)

    def forward(self, x: Tensor) -> Any:
        return x + self.b3 - self.b2 * self.b1 + self.b0


@pytest.mark.parametrize("form", [0, 1])
def test_buffers_keep_their_order_whether_they_are_saved_or_not(form: int) -> None:
    model, x = Mixed(), torch.randn(1, 2)
    module = unflatten(_both(export(model, (x,), strict=False))[form])
    assert list(dict(module.named_buffers())) == ["b0", "b1", "b2", "b3"]
    assert list(module.state_dict()) == ["b1", "b3"]
    compare(model, module, (x,))


def _both(program: ExportedProgram) -> tuple[ExportedProgram, ExportedProgram]:
    with warnings.catch_warnings():
        # torch's own passes warn of torch's own deprecations.
        warnings.simplefilter("ignore")
        return program, program.run_decompositions()


class Tied(Model):
    """As in T5: the embedding has a name by which nobody calls it, and the head has its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(5, 3)
        self.encoder = Model()
        self.encoder.embed = self.shared
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = nn.functional.embedding(x, self.encoder.embed.weight)
        headed: Tensor = self.head(self.encoder.embed(x) + embedded)
        return headed


@pytest.mark.parametrize("strict", [False, True])
def test_tied_modules_of_two_types_are_two(strict: bool) -> None:
    eager, ids = Tied(), torch.tensor([1, 3])
    made: Any = unflatten(export(eager, (ids,), strict=strict))
    torch.testing.assert_close(made(ids), eager(ids))
    assert made.head is not made.shared
    assert made.head.weight is made.shared.weight
    assert made.encoder.embed.type_name().endswith("Embedding")
    assert made.head.type_name().endswith("Linear")
    assert list(made.state_dict()) == list(eager.state_dict())


class Counter(Model):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """Count, and multiply."""
        self.n.add_(1)
        result: Tensor = x * self.n
        return result


class ReadsShared(Chain):
    """Reads, and may write, the state of a child that has two names."""

    first: Any
    second: Any
    writes = True

    def forward(self, x: Tensor) -> Any:
        """Call the child by both names, and use what it holds by the first."""
        result: Any = self.second(self.first(x))
        if self.writes:
            self.first.n.mul_(2)
        return result * self.first.n


class Held(Model):
    """Hands on what it is put around."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        result: Tensor = self.inner(x)
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("replaced", [("first",), ("second",), ("first", "second")])
def test_read_by_a_name_that_no_program_tells(
    strict: bool, writes: bool, replaced: tuple[str, ...]
) -> None:
    """Another module by some of the names is refused; by all of them it is eager's."""
    counter, x = Counter(), torch.ones(2)
    eager = ReadsShared(counter, counter)
    eager.writes = writes
    module = unflatten(export_preserving(eager, (x,), strict=strict))
    if module.first is not module.second:
        # Nothing in such a program tells that they are one.
        return
    assert not any(row.replaceable for row in module.swappable() if row.path == "first")
    compare(copy.deepcopy(eager), copy.deepcopy(module), (x,))
    other, same = Counter(), Counter()
    for name in replaced:
        setattr(module, name, other)
        setattr(eager, name, same)
    if len(replaced) < 2:
        with pytest.raises(UnflattenError, match=r"'first.n', 'second.n' are no longer one"):
            module(x)
        return
    for _ in range(2):
        torch.testing.assert_close(module(x), eager(x))
    torch.testing.assert_close(other.n, same.n)


@pytest.mark.parametrize("strict", [False, True])
def test_what_nobody_replaced_is_never_refused(strict: bool) -> None:
    """Wrapped by each name, traced, compiled, copied: what the names hold stays one."""
    counter, x = Counter(), torch.ones(2)
    eager = ReadsShared(counter, counter)
    module = unflatten(export_preserving(eager, (x,), strict=strict))
    wanted = copy.deepcopy(eager)(x)
    wrapped = copy.deepcopy(module)
    wrapped.first, wrapped.second = Held(wrapped.first), Held(wrapped.second)
    torch.testing.assert_close(wrapped(x), wanted)
    for made in (
        torch.fx.symbolic_trace(copy.deepcopy(module)),
        torch.compile(copy.deepcopy(module), backend="eager"),
        pickle.loads(pickle.dumps(module)),
        export(copy.deepcopy(module), (x,)).module(),
    ):
        torch.testing.assert_close(made(x), wanted)


class TiedTables(nn.Module):
    """Three modules of one weight, of which one is never called, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.one, self.two = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.same = self.two
        self.one.weight = self.two.weight = self.shared.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.one(x), self.two(x).sin(), self.same(x + 1)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("change", ["raw", "saved", "decomposed"])
def test_modules_that_share_all_state_stay_apart_where_we_exported(
    change: str, strict: bool
) -> None:
    eager, x = TiedTables(), torch.randn(2, 4)
    program = export_preserving(eager, (x,), strict=strict)
    if change == "saved":
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    elif change == "decomposed":
        program = program.run_decompositions()
    module: Any = unflatten(program)
    assert module.one is not module.two
    assert module.same is module.two
    assert module.one.weight is module.two.weight
    torch.testing.assert_close(module(x), eager(x))
    assert not any("taken for one" in row.reason for row in module.swappable())
    for path in ("shared", "one", "two", "same"):
        handles = [
            each.get_submodule(path).register_forward_hook(lambda _, args, result: result * 2)
            for each in (eager, module)
        ]
        torch.testing.assert_close(module(x), eager(x))
        for handle in handles:
            handle.remove()
    module.one.weight = eager.one.weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(module(x), eager(x))


def test_the_table_names_modules_that_are_taken_for_one() -> None:
    module = unflatten(torch.export.export(TiedTables(), (torch.randn(2, 4),)))
    rows = [row for row in module.swappable() if "taken for one module" in row.reason]
    assert [row.path for row in rows] == ["shared"]
    assert all(name in rows[0].reason for name in ("'shared'", "'one'", "'two'", "'same'"))
