"""A module called with anything else than what its calls were recorded with says so."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten
from lowerdeck.unflatten.calls.recorded_calls import _leaves_of


class Step(nn.Module):
    """Looks at every constant, at sizes and at the type."""

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
        self.step = Step()
        self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.step(x, 0.5, flag=False, mask=None))
        return found


X = torch.linspace(-1, 1, 8).view(2, 4)
GOOD: dict[str, Any] = {"x": X, "t": 0.5, "flag": False, "mask": None}

OTHERS: list[tuple[str, Any, str]] = [
    ("t", 0.25, r"'t' of a .*Step was recorded as 0\.5; found 0\.25"),
    ("t", math.nan, "found nan"),
    ("t", torch.tensor(0.5), r"found a tensor of shape \(\)"),
    ("t", [0.5], r"found \[0\.5\]"),
    ("flag", True, "'flag' .*recorded as False; found True"),
    ("flag", 0, "recorded as False; found 0"),
    ("flag", None, "recorded as False; found None"),
    ("mask", X, r"'mask' .*recorded as None; found a tensor of shape \(2, 4\)"),
    ("x", X[:1], r"'x' .*shape \(2, 4\) .*found a tensor of shape \(1, 4\)"),
    ("x", X[0], r"found a tensor of shape \(4\)"),
    ("x", X.double(), r"of torch.float32; found .* of torch.float64.*move the module"),
    ("x", X.long(), r"found .* of torch.int64"),
    ("x", 1.0, r"found 1\.0"),
    ("x", None, "found None"),
]


@pytest.fixture(autouse=True)
def forget_compiled() -> None:
    torch._dynamo.reset()


@pytest.fixture
def module() -> Any:
    return unflatten(export_preserving(Model().eval(), (X,)))


@pytest.mark.parametrize(("name", "value", "told"), OTHERS)
def test_a_module_called_alone_with_another_argument_is_refused(
    module: Any, name: str, value: Any, told: str
) -> None:
    torch.testing.assert_close(module.step(**GOOD), X * 0.25 + torch.finfo(X.dtype).eps)
    with pytest.raises(InputConstraintError, match=told):
        module.step(**{**GOOD, name: value})
    module.step(**GOOD)


@pytest.mark.parametrize(("name", "value", "told"), OTHERS)
def test_a_wrapper_that_changes_an_argument_is_refused(
    module: Any, name: str, value: Any, told: str
) -> None:
    class Changes(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, t: float, **options: Any) -> Any:
            return self.inner(**{"x": x, "t": t, **options, name: value})

    module.step = Changes(module.step)
    with pytest.raises(InputConstraintError, match=told):
        module(X)


def test_a_hook_that_changes_an_argument_is_refused(module: Any) -> None:
    module.step.register_forward_pre_hook(lambda _, args: (args[0], 0.25))
    with pytest.raises(InputConstraintError, match=r"found 0\.25"):
        module(X)


def test_a_neighbour_that_returns_another_size_or_type_is_noticed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.step = Step()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.step(self.first(x), 0.5, False)
            return found

    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.double()

    program = torch.export.export(Model(), (X,))
    for other in (nn.AvgPool1d(2), Doubles()):
        module: Any = unflatten(program)
        module.first = other
        with pytest.raises(InputConstraintError, match="recorded with a tensor of shape"):
            module(X)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_form_that_was_told_takes_no_constant_of_another_form(number: int) -> None:
    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = Step()

        def forward(self, x: Tensor) -> Tensor:
            for t in (0.5, 0.25, 0.1):
                x = self.step(x, t)
            return x

    times = (0.5, 0.25, 0.1)

    class Changes(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor, t: float) -> Any:
            return self.inner(x, times[number])

    module: Any = unflatten(export_preserving(Sampler(), (X,)))
    form = module.step.call_modules()[number]
    form(X, times[number])
    with pytest.raises(InputConstraintError, match="was recorded as"):
        form(X, times[number - 1])
    module.step = Changes(module.step)
    with pytest.raises(InputConstraintError, match="was recorded as"):
        module(X)


def test_equal_modules_of_other_constants_are_told_apart_when_their_places_are_exchanged() -> None:
    class Ignores(nn.Module):
        """Computes the same for every number that it is given: one code, many constants."""

        def forward(self, x: Tensor, number: int) -> Tensor:
            return x.tanh() * 2

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Ignores() for _ in range(3))
            self.shared = Ignores()

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = self.shared(layer(x, number), number)
            return x

    module: Any = unflatten(export_preserving(Layers(), (X,)))
    torch.testing.assert_close(module(X), Layers()(X))
    one, two = module.layers[1], module.layers[2]
    # One code for all: what is checked is no part of it.
    assert one.forward.__func__.__code__ is two.forward.__func__.__code__
    assert not hasattr(module.shared, "call_modules")
    for number in range(3):
        module.shared(X, number)
    with pytest.raises(InputConstraintError, match="and other ones in 2 more calls"):
        module.shared(X, 3)
    module.layers._modules["1"], module.layers._modules["2"] = two, one
    with pytest.raises(InputConstraintError, match="recorded as 2; found 1"):
        module(X)


def test_zeros_of_both_signs_are_two_constants() -> None:
    class Signed(nn.Module):
        def forward(self, x: Tensor, t: float) -> Tensor:
            return x + math.copysign(1.0, t)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Signed()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x, 0.0)
            return found

    module: Any = unflatten(export_preserving(Outer(), (X,)))
    for _ in range(2):
        torch.testing.assert_close(module.inner(X, 0.0), X + 1)
        with pytest.raises(InputConstraintError, match=r"recorded as 0\.0; found -0\.0"):
            module.inner(X, -0.0)


def test_sizes_that_vary_may_vary() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.shape[0]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found

    rows = {"x": {0: torch.export.Dim("rows")}}
    module: Any = unflatten(export_preserving(Outer(), (X,), dynamic_shapes=rows))
    for count in (2, 5, 3):
        torch.testing.assert_close(
            module.inner(torch.ones(count, 4)), torch.ones(count, 4) * count
        )
    with pytest.raises(InputConstraintError, match=r"recorded as a tensor of shape \(any, 4\)"):
        module.inner(torch.ones(2, 3))


def test_a_plain_export_checks_what_its_modules_read() -> None:
    for preserve in (None, "all"):
        module: Any = unflatten(torch.export.export(Model().eval(), (X,)), preserve=preserve)
        module.step(X)
        with pytest.raises(InputConstraintError, match=r"found a tensor of shape \(1, 4\)"):
            module.step(X[:1])


def test_torchs_own_layers_compute_any_size() -> None:
    eager = Model().eval()
    module: Any = unflatten(export_preserving(eager, (X,)))
    more = torch.randn(3, 5, 4)
    torch.testing.assert_close(module.last(more), eager.last(more))


@pytest.mark.parametrize("change", ["half", "double", "autocast", "loaded", "saved"])
def test_modules_moved_to_another_type_take_that_type(change: str) -> None:
    class Shifts(nn.Module):
        """Has no state by which to tell whether it was moved."""

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + 1

    eager = nn.Sequential(nn.Linear(4, 4), Shifts()).eval()
    module: Any = unflatten(export_preserving(eager, (X,)))
    given = X
    if change in {"half", "double"}:
        module, eager = getattr(module, change)(), getattr(copy.deepcopy(eager), change)()
        given = getattr(X, change)()
    if change in {"loaded", "saved"}:
        module, eager, given = copy.deepcopy(module.double()), eager.double(), X.double()
    if change == "saved":
        stored = io.BytesIO()
        torch.save(module, stored)
        stored.seek(0)
        module = torch.load(stored, weights_only=False)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
        torch.testing.assert_close(module(given), eager(given))
    if change == "double":
        with pytest.raises(InputConstraintError, match=r"found .* of torch\.float16"):
            module.get_submodule("1")(X.half())
        back = module.float()
        torch.testing.assert_close(back.get_submodule("1")(X), X * 2 + 1)
        with pytest.raises(InputConstraintError, match=r"found .* of torch\.float64"):
            back.get_submodule("1")(X.double())


def test_checks_can_be_switched_off(module: Any) -> None:
    module.check_input_constraints = False
    assert module.check_input_constraints is False
    assert module.step(X[:1], 0.75, False, None).shape == (1, 4)
    copy.deepcopy(module).step(X[:1], 0.75, False, None)
    module.check_input_constraints = True
    with pytest.raises(InputConstraintError, match="found a tensor"):
        module.step(X[:1], 0.5, False, None)


def test_compiled_exported_and_traced_again(module: Any) -> None:
    eager_result = module(X)
    for subject in (module, copy.deepcopy(module)):
        compiled: Any = torch.compile(subject, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(X), eager_result)
    for strict in (False, True):
        again = torch.export.export(module, (X,), strict=strict)
        torch.testing.assert_close(again.module()(X), eager_result)
    traced = torch.fx.symbolic_trace(module)
    torch.testing.assert_close(traced(X), eager_result)
    alone = torch.fx.symbolic_trace(module.step, {"t": 0.5, "flag": False, "mask": None})
    torch.testing.assert_close(alone(X, 0.5, False, None), module.step(**GOOD))
    with pytest.raises(InputConstraintError, match="give that value in concrete_args"):
        torch.fx.symbolic_trace(module.step)
    mapped = torch.func.vmap(lambda x: module.step(x, 0.5, False, None))(torch.stack([X, X]))
    torch.testing.assert_close(mapped[0], module.step(**GOOD))


def test_a_compiled_module_refuses_as_well(module: Any) -> None:
    compiled: Any = torch.compile(module.step, backend="eager")
    compiled(**GOOD)
    for name, value in (("t", 0.25), ("x", X[:1]), ("flag", True)):
        with pytest.raises(InputConstraintError, match=f"{name!r} .*was recorded as"):
            compiled(**{**GOOD, name: value})


def test_a_moved_module_compiles(module: Any) -> None:
    moved = copy.deepcopy(module).double()
    compiled: Any = torch.compile(moved, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X.double()), moved(X.double()))


class Quotient(nn.Module):
    def forward(self, x: Tensor, t: float) -> Tensor:
        return 1 / (x * t)


class Each(nn.Module):
    """Calls one module with numbers that are equal for Python and not for arithmetic."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.quotient = Quotient()
        self.numbers = numbers

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.quotient(x, t) for t in self.numbers)


@pytest.mark.parametrize(
    "numbers",
    [(0.0, -0.0), (-0.0, 0.0), (1, 1.0, True), (math.nan, math.nan, math.inf), (-0.0, -0.0, 2.0)],
)
def test_constants_that_only_compare_equal_are_calls_of_their_own(
    numbers: tuple[float, ...],
) -> None:
    eager, x = Each(*numbers), torch.ones(1)
    module: Any = unflatten(export_preserving(eager, (x,)))
    torch.testing.assert_close(module(x), eager(x), equal_nan=True)
    for t, expected in zip(numbers, eager(x), strict=True):
        # Two calls with NaN are two forms, since nothing equals it, which nothing tells apart.
        if not math.isnan(t):
            torch.testing.assert_close(module.quotient(x, t), expected)


def test_what_is_given_by_name_is_for_no_form_that_takes_flat_values() -> None:
    """Decomposing can lose the signature of one of several calls."""
    x = torch.randn(3)
    assert _leaves_of(None, (x,), {}) == [x]
    assert _leaves_of(None, (x,), {"t": 0.5}) is None
