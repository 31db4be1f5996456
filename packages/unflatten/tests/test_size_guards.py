"""Sizes that vary, and for which eager takes another side of a branch than the one recorded."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from lowerdeck.torch_base import expression_of
from lowerdeck.unflatten import (
    InputConstraintError,
    UnsupportedProgramError,
    export_preserving,
    unflatten,
)
from lowerdeck.unflatten.sizes.guards import SizeGuard, SizeGuards, size_guards
from lowerdeck.unflatten.sizes.one_symbol import numbers_of

X = torch.randn(5, 12, 8)
VARIES = {0: Dim.AUTO, 1: Dim.AUTO}


class Branch(nn.Module):
    """Takes the mean instead of the sum where a condition of its argument's sizes holds."""

    def __init__(self, condition: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() if self.condition(x.shape[0], x.shape[1]) else x.sum()


class Around(nn.Module):
    """A linear layer, and after it a branch, in a module or in its own code."""

    def __init__(self, condition: Callable[[int, int], bool], *, own: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = Branch(condition)
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if not self.own:
            branched: torch.Tensor = self.inner(x)
            return branched
        return x.mean() if self.inner.condition(x.shape[0], x.shape[1]) else x.sum()


CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "b < t": lambda b, t: b < t,
    "t > 8": lambda b, t: t > 8,
    "t <= 20": lambda b, t: t <= 20,
    "t even": lambda b, t: t % 2 == 0,
    "b*t > 50": lambda b, t: b * t > 50,
    "t // 5 == 2": lambda b, t: t // 5 == 2,
    "max": lambda b, t: max(b, t) > 11,
    "power": lambda b, t: b**2 > t,
    "not equal": lambda b, t: b * b != t,
    "scaled": lambda b, t: int(t * 0.5) == 6,
}
SIZES = [(5, 12), (13, 5), (2, 3), (5, 7), (12, 12), (3, 40), (20, 13), (3, 9)]


def exported(model: nn.Module, how: str) -> ExportedProgram:
    shapes = (VARIES,)
    if how == "plain":
        return export(model, (X,), dynamic_shapes=shapes)
    program = export_preserving(model, (X,), dynamic_shapes=shapes, strict=how == "strict")
    if how != "loaded":
        return program
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in CONDITIONS for how in ("plain", "preserving")),
        *((name, how) for name in ("b < t", "scaled") for how in ("strict", "loaded")),
    ],
)
def test_a_size_of_another_branch_is_refused_by_the_whole_and_by_the_module(
    name: str, how: str
) -> None:
    eager: Any = Around(CONDITIONS[name])
    made: Any = unflatten(exported(eager, how), preserve="all")
    for b, t in SIZES:
        x = torch.randn(b, t, 8)
        for own, module in ((made, eager), (made.inner, eager.inner)):
            if CONDITIONS[name](b, t):
                torch.testing.assert_close(own(x), module(x))
            else:
                with pytest.raises(InputConstraintError, match=r"(x|arg_0)\.shape"):
                    own(x)


class Part(nn.Module):
    """Gives a part of its tokens, or more of them, to a module that branches on their number."""

    def __init__(self, part: Callable[[Any], Any], condition: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = Branch(condition)
        self.part = part

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.part(self.linear(x)))


PARTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda x: x[:, : x.shape[1] // 2],
    "every second": lambda x: x[:, ::2],
    "even": lambda x: x[:, : x.shape[1] // 2 * 2],
    "half more": lambda x: torch.cat([x[:, ::2], x], 1),
    "but one": lambda x: x[:, 1:],
}


@pytest.mark.parametrize("how", ["plain", "preserving"])
@pytest.mark.parametrize("name", ["t even", "t <= 20", "b < t", "not equal"])
@pytest.mark.parametrize("part", PARTS)
def test_sizes_that_are_computed_of_one_that_varies(part: str, name: str, how: str) -> None:
    """Of half a size, the condition of the size itself tells what it was for that half."""
    condition = CONDITIONS[name]
    eager: Any = Part(PARTS[part], condition)
    made: Any = unflatten(exported(eager, how), preserve="all")
    is_recorded = condition(5, PARTS[part](X).shape[1])
    for b, t in [*SIZES, (4, 16), (3, 4), (2, 60)]:
        for own, module in ((made, eager), (made.inner, eager.inner)):
            x = torch.randn(b, t, 8)
            size = t if own is made.inner else PARTS[part](x).shape[1]
            sizes = {PARTS[part](torch.empty(1, each, 1)).shape[1] for each in range(200)}
            # So many tokens such a part never has: branches on that leave no condition.
            never = own is made.inner and size not in sizes
            if condition(b, size) is is_recorded and not never:
                torch.testing.assert_close(own(x), module(x))
            else:
                with pytest.raises(InputConstraintError, match=r"shape"):
                    own(x)


class Compares(nn.Module):
    """Branches on two sizes of which one follows from the other, so that export notes nothing."""

    def __init__(self, condition: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum() + y.sum() if self.condition(x, y) else x.mean() - y.mean()


class GivesBoth(nn.Module):
    """Gives what it is given, and what it makes of that, to a module that compares them."""

    def __init__(
        self,
        part: Callable[[torch.Tensor], torch.Tensor],
        condition: Callable[[Any, Any], bool],
    ) -> None:
        super().__init__()
        self.inner = Compares(condition)
        self.part = part

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x, self.part(x))


UNNOTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], bool]]] = {
    "half is not all": (lambda x: x[:, ::2], lambda x, y: y.shape[1] == x.shape[1]),
    "half is less": (lambda x: x[:, ::2], lambda x, y: y.shape[1] <= x.shape[1]),
    "double is even": (
        lambda x: torch.cat([x, x], 1),
        lambda x, y: y.shape[1] % 2 == 0,
    ),
    "cancels": (lambda x: x[:, 1:], lambda x, y: x.shape[1] - y.shape[1] == 1),
    "the same": (lambda x: x * 2, lambda x, y: x.shape == y.shape),
    "squared": (
        lambda x: (x[:, :, None] * x[:, None]).flatten(1, 2),
        lambda x, y: y.shape[1] == x.shape[1] * x.shape[1],
    ),
    "three halves": (
        lambda x: torch.cat([x[:, : x.shape[1] // 2], x], 1),
        lambda x, y: y.shape[1] - x.shape[1] == x.shape[1] // 2,
    ),
}


@pytest.mark.parametrize("how", ["plain", "preserving", "loaded", "strict"])
@pytest.mark.parametrize("name", UNNOTED)
def test_sizes_that_belong_together_must_stay_so(name: str, how: str) -> None:
    part, condition = UNNOTED[name]
    eager: Any = GivesBoth(part, condition)
    made: Any = unflatten(exported(eager, how), preserve="all")
    for b, t in [(5, 12), (3, 8), (4, 9)]:
        x = torch.randn(b, t, 8)
        torch.testing.assert_close(made(x), eager(x))
        torch.testing.assert_close(made.inner(x, part(x)), eager.inner(x, part(x)))
        for size in (t - 2, t, t + 5, 2 * t + 1, 2 * t + 4):
            y = torch.randn(b, size, 8)
            if size == part(x).shape[1]:
                torch.testing.assert_close(made.inner(x, y), eager.inner(x, y))
                continue
            with pytest.raises(InputConstraintError, match=r"shape\[1\] == "):
                made.inner(x, y)


@pytest.mark.parametrize(
    "text", ["t**1000000", "(((t**60 + 1)**60 + 1)**60 + 1)**60", "t*10**5000", "2**t**t"]
)
def test_a_size_of_a_file_is_not_computed_without_end(text: str) -> None:
    """Whether it grows was asked of numbers up to 63, whatever the power."""
    t, u = sympy.symbols("t u", integer=True, positive=True)
    size = sympy.sympify(text, {"t": t}, evaluate=False)
    guards = SizeGuards((SizeGuard("{0} > 3", (t,)), SizeGuard("{0} > {1}", (t, u))))
    assert guards.limits([((0, 0), size)]) is None
    found = guards.limits([((0, 0), size), ((0, 1), t)])
    assert found is not None
    assert found.texts == ("{0} > 3",)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1) / x.shape[1]


class Given(nn.Module):
    """Gives what it computes of its argument to a module that asks for the size."""

    def __init__(self, part: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = Mean()
        self.part = part

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.part(x))


@pytest.mark.parametrize("changed", ["all", "last"])
@pytest.mark.parametrize("part", [*PARTS, "itself", "twice"])
def test_a_flat_module_is_given_sizes_that_follow_from_each_other(part: str, changed: str) -> None:
    """In a plain export it may take another tensor, for its size alone."""
    of: Any = {**PARTS, "itself": lambda x: x, "twice": lambda x: x * 2}[part]
    eager, x = Given(of), torch.randn(5, 12, 8)
    made = unflatten(exported(eager, "plain"))

    def more(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # Flat values may be numbers, which stay: then they do not belong to the tensors.
        tensors = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        chosen = tensors if changed == "all" else tensors[-1:]
        return tuple(
            torch.cat([arg, arg], 1) if place in chosen else arg for place, arg in enumerate(args)
        )

    for module in (made, eager):
        module.get_submodule("inner").register_forward_pre_hook(more)
    try:
        torch.testing.assert_close(made(x), eager(x))
    except InputConstraintError:
        assert part != "itself"
    else:
        assert changed == "all" or part == "itself"


@pytest.mark.parametrize(
    ("made", "size", "found"),
    [
        ("(n // 2)", 5, (10, 11)),
        ("(n * 2)", 6, (3, 3)),
        ("(n * 2)", 7, (4, 3)),
        ("((n + 1) // 2)", 1, (1, 2)),
        ("(n // 2)", 0, (1, 1)),
        ("(n + ((n + 1) // 2))", 4, (3, 2)),
        ("n", 10**9, (10**9, 10**9)),
        ("(n // 7)", 3, (21, 27)),
    ],
)
def test_what_a_size_is_computed_of(made: str, size: int, found: tuple[int, ...]) -> None:
    assert numbers_of(made, size) == found


def test_threads_are_held_to_the_sizes_of_their_own_calls() -> None:
    eager: Any = Around(CONDITIONS["b < t"])
    made: Any = unflatten(exported(eager, "preserving"))
    made.linear = copy.deepcopy(eager.linear)  # so that results are looked at, too

    def call(number: int) -> bool:
        b, t = SIZES[number % len(SIZES)]
        x = torch.randn(b, t, 8)
        if b < t:
            torch.testing.assert_close(made(x), eager(x))
            return True
        with pytest.raises(InputConstraintError, match=f"{b}.*{t}"):
            made(x)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(200)))


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_changed_module_that_returns_a_size_of_another_branch_is_told(name: str) -> None:
    eager: Any = Around(CONDITIONS[name], own=True)
    for b, t in SIZES:

        def cut(module: Any, args: Any, result: torch.Tensor, b: int = b, t: int = t) -> Any:
            return result[:1, :1].expand(b, t, 8)

        made: Any = unflatten(exported(eager, "preserving"))
        other = copy.deepcopy(eager)
        made.linear.register_forward_hook(cut)
        other.linear.register_forward_hook(cut)
        if (b, t) == X.shape[:2]:
            torch.testing.assert_close(made(X), other(X))
        else:
            with pytest.raises(InputConstraintError, match=r"'linear'.* recorded with a tensor"):
                made(X)


class Doubled(nn.Module):
    """Hands a module a tensor with twice as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Branch(lambda b, t: b > 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.inner(torch.cat([x, x]))
        return summed


def test_a_size_that_follows_from_the_one_compared_is_refused() -> None:
    made: Any = unflatten(exported(Doubled(), "preserving"))
    assert torch.equal(made.inner(X.expand(5, 12, 8).repeat(2, 1, 1)), X.repeat(2, 1, 1).mean())
    with pytest.raises(InputConstraintError, match=r"x\.shape\[0\]"):
        made.inner(torch.randn(4, 12, 8))


def test_the_message_says_what_held_and_what_was_found() -> None:
    made: Any = unflatten(exported(Around(CONDITIONS["b < t"]), "preserving"))
    told = r"x\.shape\[0\] < x\.shape\[1\].*found x\.shape\[0\] = 7, x\.shape\[1\] = 3"
    for module in (made, made.inner):
        with pytest.raises(InputConstraintError, match=told):
            module(torch.randn(7, 3, 8))
    made.check_input_constraints = False
    made(torch.randn(7, 3, 8))
    made.inner(torch.randn(7, 3, 8))


def test_copies_and_pickles_are_held_to_the_same_sizes() -> None:
    made: Any = unflatten(exported(Around(CONDITIONS["b < t"]), "preserving"))
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        torch.testing.assert_close(again(X), made(X))
        with pytest.raises(InputConstraintError, match=r"x\.shape"):
            again.inner(torch.randn(7, 3, 8))


def test_a_module_with_limits_is_compiled_and_exported_with_sizes_that_vary() -> None:
    eager: Any = Around(CONDITIONS["b < t"])
    made: Any = unflatten(exported(eager, "preserving"))
    x = torch.randn(3, 9, 8)
    compiled: Any = torch.compile(made.inner, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), eager.inner(x))
    program = export(made, (X,), dynamic_shapes=(VARIES,))
    torch.testing.assert_close(program.module()(x), eager(x))


class Several(nn.Module):
    """Compares sizes of inputs of all kinds."""

    def forward(self, d: dict[str, list[torch.Tensor]], *more: torch.Tensor, k: Any) -> Any:
        first = d["p"][0]
        if first.shape[0] < more[1].shape[0] < k["a"].shape[0]:
            return first.sum()
        return first.mean()


@pytest.mark.parametrize("strict", [False, True])
def test_conditions_on_structured_inputs_are_known(strict: bool) -> None:
    def inputs(a: int, b: int, c: int) -> Any:
        return ({"p": [torch.ones(a)]}, torch.ones(2), torch.ones(b)), {"k": {"a": torch.ones(c)}}

    args, kwargs = inputs(3, 4, 6)
    row = {0: Dim.AUTO}
    shapes = {"d": {"p": [row]}, "more": ({}, row), "k": {"a": row}}
    program = export(Several(), args, kwargs, dynamic_shapes=shapes, strict=strict)
    made: Any = unflatten(program)
    for sizes in ((3, 4, 6), (2, 7, 8)):
        args, kwargs = inputs(*sizes)
        torch.testing.assert_close(made(*args, **kwargs), Several()(*args, **kwargs))
    for sizes in ((5, 4, 6), (3, 7, 6)):
        args, kwargs = inputs(*sizes)
        with pytest.raises(InputConstraintError, match="must hold"):
            made(*args, **kwargs)


@pytest.mark.parametrize(
    "condition",
    [
        "__import__('os').abort()",
        "L['x'].size()[0].__class__",
        "(lambda: 1)()",
        "[1 for _ in range(10**9)]",
        "L['x'].size()[0] ** 10**9 > 1",
        "((L['x'].size()[0] ** 8) ** 8) ** 8 > 1",
        "L['x'].size()[99] > 1",
        "L['nobody'].size()[0] > 1",
        "max.__self__",
        "L['x'].size()[0] >",
        "\0",
        "(" * 1500 + ")" * 1500,
        "L['x'].size()[0] < " + "9" * 400,
        "L['x'].size()[0] < " + "9" * 1990,
        "-" * 1000 + "L['x'].size()[0] > 1",
        "x" * 5000,
        "True",
        "",
    ],
)
def test_a_condition_of_a_file_is_never_run(condition: str) -> None:
    program = exported(Around(CONDITIONS["t > 8"]), "plain")
    shape = program.graph.find_nodes(op="placeholder")[-1].meta["val"].shape
    sources = {"L['x']": tuple(expression_of(size) for size in shape)}
    known = size_guards(program.range_constraints, (), sources)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = size_guards(program.range_constraints, [condition], sources)
    # What is read is held to, or says nothing of sizes that vary.
    is_read = len(found.all) > len(known.all) or condition == "True"
    assert [w for w in told if "is not understood" in str(w.message)] or is_read
    assert found.all[: len(known.all)] == known.all
    assert all(guard.holds([5]) in {True, False} for guard in found.all)


@pytest.mark.parametrize(
    "power", ["L['x'].size()[0] ** L['x'].size()[1]", "2 ** L['x'].size()[1]", "(x ** 8) ** 8"]
)
def test_a_power_of_a_file_that_may_be_any_number_is_not_read(power: str) -> None:
    b, t = sympy.symbols("b t", integer=True, positive=True)
    condition = power.replace("x **", "L['x'].size()[0] **") + " > 1"
    with pytest.warns(UserWarning, match="is not understood"):
        assert not size_guards({}, [condition], {"L['x']": (b, t)}).all


def test_conditions_that_are_no_texts_are_a_typed_error() -> None:
    program: Any = exported(Around(CONDITIONS["t > 8"]), "plain")
    program._guards_code.append(["a"])
    with pytest.raises(UnsupportedProgramError, match="conditions on sizes are no texts"):
        unflatten(program)


def test_a_product_of_many_sums_in_a_file_is_not_written_out() -> None:
    """Of 30 sums it would have a thousand million terms."""
    t, u = sympy.symbols("t u", integer=True, positive=True)
    size = sympy.prod([t + number * u for number in range(1, 31)])
    found = SizeGuards().limits([((0, 0), size), ((0, 1), t), ((0, 2), u)])
    assert found is None


OPERATORS: dict[str, tuple[Callable[[Any], Any], tuple[int, int]]] = {
    "parts of a split": (lambda x: sum(c.sum(1) for c in x.split(4, 1)), (2, 12)),
    "parts of a tensor_split": (lambda x: sum(_mean(c) for c in x.tensor_split(3, 1)), (2, 7)),
    "a slice that ends with the tensor": (lambda x: _mean(x[:, 2 : x.shape[0] + 6]), (9, 5)),
    "a pool with a last window": (
        lambda x: _mean(nn.functional.avg_pool1d(x, 2, 3, padding=1, ceil_mode=True)),
        (2, 9),
    ),
    "a root": (lambda x: x * 2 if x.shape[0] ** 0.5 < x.shape[1] else x * 3, (100, 3)),
}
"""What decides what an operator returns is no matter of layout; and sizes that it does not fit."""


def _mean(x: Any) -> Any:
    return x.sum(-1) / x.shape[-1]


class Calls(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("name", OPERATORS)
def test_sizes_that_decide_what_operators_return_are_held(name: str) -> None:
    function, sizes = OPERATORS[name]
    eager, first, other = nn.Sequential(Calls(function)), torch.randn(2, 8), torch.randn(sizes)
    program = export_preserving(eager, (first,), dynamic_shapes=(VARIES,))
    made: Any = unflatten(program)
    torch.testing.assert_close(made(first), eager(first))
    for module in (made, made.get_submodule("0")):
        with pytest.raises(InputConstraintError):
            module(other)


def test_a_decomposed_program_is_held_to_no_layout() -> None:
    class Front(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x[:, : x.shape[1] // 2 + 1]
            return y.sum(1) / y.shape[1]

    program = export(Front(), (torch.randn(4, 6, 8),), dynamic_shapes=(VARIES,))
    x = torch.randn(3, 2, 8)
    for each in (program, program.run_decompositions()):
        torch.testing.assert_close(unflatten(each)(x), Front()(x))


def test_a_size_that_export_fixed_is_held_while_compiling() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() / len(x)

    program = export_preserving(Rows(), (X,), dynamic_shapes=(VARIES,))
    made: Any = unflatten(program)
    for module in (made, torch.compile(made, backend="eager")):
        torch.testing.assert_close(module(X), Rows()(X))
        with pytest.raises(InputConstraintError):
            module(torch.randn(3, 12, 8))
