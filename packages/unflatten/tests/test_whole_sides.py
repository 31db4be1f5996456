"""Conditions of several sizes, of which a module has a product, a sum or a difference alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from random_branches import check_seed  # type: ignore[import-not-found]
from torch import nn
from torch.export import Dim

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten
from lowerdeck.unflatten.sizes.guards import SizeGuard, SizeGuards

X = torch.randn(5, 12, 8)


class Branch(nn.Module):
    """Takes the mean instead of the sum where a condition of its argument's first size holds."""

    def __init__(self, condition: Callable[[int], bool]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() if self.condition(x.shape[0]) else x.sum()


class Given(nn.Module):
    """Gives what it makes of its argument to a module that branches on the size."""

    def __init__(self, condition: Callable[[int], bool], whole: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = Branch(condition)
        self.whole = whole

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.whole(x))


WHOLES: dict[str, Callable[[Any], Any]] = {
    "product": lambda x: x.reshape(-1, 8),
    "sum": lambda x: torch.cat([x[:, 0], x[0]]),
    "difference": lambda x: x[0, x.shape[0] :],
    "twice the product": lambda x: torch.cat([x, x]).reshape(-1, 8),
}
CONDITIONS: dict[str, Callable[[int], bool]] = {
    "more": lambda n: n > 8,
    "half, rounded": lambda n: int(0.5 * n) > 7,
    "even": lambda n: n % 2 == 0,
    "a third": lambda n: n // 3 > 4,
    "square": lambda n: n * n > 100,
    "not equal": lambda n: n - 60 != 3,
    "largest": lambda n: max(n, 9) > 9,
    "both": lambda n: n > 20 and n != 24,
    "divided": lambda n: n / 2 > 5.5,
    "root": lambda n: n**0.5 > 3,
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("whole", WHOLES)
def test_a_module_is_held_to_what_its_size_tells(whole: str, name: str, plain: bool) -> None:
    eager: Any = Given(CONDITIONS[name], WHOLES[whole])
    export: Any = torch.export.export if plain else export_preserving
    program = export(eager, (X,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    made: Any = unflatten(program, preserve="all")
    recorded = CONDITIONS[name](WHOLES[whole](X).shape[0])
    ran = 0
    for size in range(2, 150):
        x = torch.randn(size, 8)
        if CONDITIONS[name](size) is not recorded:
            with pytest.raises(InputConstraintError, match=r"shape\[0\]"):
                made.inner(x)
            continue
        try:
            found = made.inner(x)
        except InputConstraintError:
            # `int` of a float, and a product that must be even, are held to more.
            continue
        torch.testing.assert_close(found, eager.inner(x))
        ran += 1
    assert ran


@pytest.mark.parametrize(
    ("whole", "fits", "others"),
    [
        ("product", [16, 60, 80], [15, 81, 100]),
        ("sum", [8, 17, 18], [3, 7, 19, 40]),
        ("twice the product", [32, 120, 160], [30, 33, 162]),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_a_size_is_held_to_the_bounds_of_what_it_is_made_of(
    whole: str, fits: list[int], others: list[int], plain: bool
) -> None:
    """Of the whole's no branch can be taken: that leaves no condition in the program."""
    eager: Any = Given(lambda n: n > 1000, WHOLES[whole])
    export: Any = torch.export.export if plain else export_preserving
    varies = {0: Dim("b", min=4, max=5), 1: Dim("t", min=4, max=16 if whole != "sum" else 13)}
    made: Any = unflatten(export(eager, (X,), dynamic_shapes=(varies,)), preserve="all")
    for size in fits:
        x = torch.randn(size, 8)
        torch.testing.assert_close(made.inner(x), eager.inner(x))
    for size in others:
        with pytest.raises(InputConstraintError, match=r"shape\[0\]"):
            made.inner(torch.randn(size, 8))


B, T = sympy.symbols("b t", integer=True, positive=True)


@pytest.mark.parametrize(
    ("text", "size", "told"),
    [
        ("({0} * {1}) > 8", B * T, "{0} > 8"),
        ("8 < ({0} * {1})", 2 * B * T, "8 < ({0} // 2)"),
        ("({0} + 3) > {1}", B - T, "(3 + {0}) > 0"),
        ("(({0} * {1}) > 8 or not ({0} * {1}) == 3)", B * T, "({0} > 8 or (not {0} == 3))"),
        ("(({0} * {1}) % 2) == 0", 2 * B * T + 1, "({0} - 1) % 2 == 0"),
        ("({0} // {1}) > 8", B * T, None),
        ("({0} * {1}) > {0}", B * T, None),
    ],
)
def test_what_a_whole_tells(text: str, size: Any, told: str | None) -> None:
    guards = SizeGuards((SizeGuard(text, (B, T)),))
    found = guards.limits([((0, 0), size)])
    assert (told or None) in (found.texts if found is not None else (None,))


@pytest.mark.parametrize(
    "text",
    [
        "(({0} * {1}) // 0) > 1",
        "(({0} * {1}) % 0) > 1",
        "(({0} * {1}) / 0) > 1",
        "(1.5 // ({0} * {1})) > 1",
        "((({0} * {1}) * 0.5) // 2) > 1",
        "max(({0} * {1}), 1.5) > 1",
        "((({0} + {1}) ** 8) * (({0} + {1}) ** 8)) > 1",
        "(({0} > {1}) * 3) > 1",
        "floor(" * 80 + "({0} * {1})" + ")" * 80 + " > 1",
        "(" * 80 + "({0} * {1})" + " % 7)" * 80 + " > 1",
        "({0} * {1})" + " + {0}" * 400 + " > 1",
        "({0} * {1})" + " and {0}" * 90,
    ],
)
def test_conditions_of_files_are_read_or_left(text: str) -> None:
    guards = SizeGuards((SizeGuard(text, (B, T)),))
    found = guards.limits([((0, 0), B * T)])
    assert found is None or found.hold(60) in {True, False}


@pytest.mark.parametrize("seed", range(12))
def test_random_branches_are_right_or_refused(seed: int) -> None:
    right, refused = check_seed(seed)
    assert right or not refused
