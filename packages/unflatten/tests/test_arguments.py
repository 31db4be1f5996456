"""What is said of arguments that the program was not exported for, and what passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export, register_dataclass
from torch.utils import _pytree as pytree
from unflatten_comparison import FORMS, assert_equal, check  # type: ignore[import-not-found]

from lowerdeck.unflatten import InputConstraintError, unflatten

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

X = torch.randn(2, 4)


@dataclass
class Checked:
    """Takes nothing but tensors."""

    one: Tensor
    two: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.one, Tensor) or self.one.shape != self.two.shape:
            raise TypeError(f"no tensors: {self.one!r}, {self.two!r}")


class Counted:
    """Takes a tensor and a number, and may be told to take no example of a tensor."""

    takes: type = Tensor

    def __init__(self, value: Any, count: Any) -> None:
        if not isinstance(value, Counted.takes):
            raise TypeError(f"no value: {value!r}")
        self.value, self.count = value, count


register_dataclass(Checked, serialized_type_name="test_arguments.Checked")
pytree.register_pytree_node(
    Counted,
    lambda counted: ([counted.value, counted.count], None),
    lambda leaves, _: Counted(*leaves),
    serialized_type_name="test_arguments.Counted",
    flatten_with_keys_fn=lambda counted: (
        [(pytree.GetAttrKey("value"), counted.value), (pytree.GetAttrKey("count"), counted.count)],
        None,
    ),
)


class Adds(Model):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, pair: Any) -> Any:
        return Checked(self.fc(pair.one) + pair.two, pair.two * 2)


class Takes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Adds(), Adds()

    def forward(self, pair: Any, *, more: Any = None) -> Any:
        pair = self.two(self.one(pair))
        return pair if more is None else [pair.one * more["a"].value, more["a"].count]


@pytest.mark.parametrize("preserved", [(), ("one",), ("one", "two")])
@pytest.mark.parametrize("form", FORMS)
def test_classes_that_check_their_leaves(form: str, preserved: tuple[str, ...]) -> None:
    eager, args = Takes(), (Checked(X, X + 1),)
    options = {"forms": (form,), "preserve_module_call_signature": preserved}
    made: Any = check(eager, args, **options)[form]
    if preserved:
        made.one = eager.one
        assert_equal(made(*args), eager(*args))


def test_the_error_names_the_leaf_of_a_class_that_checks_its_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def halves(pair: Any) -> Any:
        return Checked(pair.one[:1], pair.two[:1])

    module = unflatten(export(Takes(), (Checked(X, X + 1),)))
    with pytest.raises(InputConstraintError, match=r"pair\.one\.shape\[0\] must be 2; found 1"):
        module(halves(Checked(X, X)))
    args, more = (Checked(X, X + 1),), {"more": {"a": Counted(X, 3)}}
    program = export(Takes(), args, more, strict=False)
    monkeypatch.setattr(Counted, "takes", nn.Parameter)
    module = unflatten(program)
    monkeypatch.undo()
    assert_equal(module(*args, **more)[1], 3)
    with pytest.raises(InputConstraintError, match=r"more \(leaf 1\)' .* constant 3; found 4"):
        module(*args, more={"a": Counted(X, 4)})


class Doubles(Model):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4)) if bias else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = x + x if self.bias is None else x + self.bias
        return y if mask is None else y * mask


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("exported", "passed"),
    [
        (torch.float32, torch.int64),
        (torch.float32, torch.complex64),
        (torch.float32, torch.bool),
        (torch.int64, torch.int32),
        (torch.int64, torch.float32),
        (torch.bool, torch.uint8),
    ],
)
def test_a_value_of_another_type_is_refused(
    exported: torch.dtype, passed: torch.dtype, bias: bool
) -> None:
    module = unflatten(export(Doubles(bias), (torch.ones(2, 4, dtype=exported),)))
    with pytest.raises(InputConstraintError, match=f"'x' must be of type {exported}.*{passed}"):
        module(torch.ones(2, 4, dtype=passed))
    module.check_input_constraints = False
    module(torch.ones(2, 4, dtype=passed))


def test_a_module_takes_the_type_that_it_was_moved_to() -> None:
    eager = Doubles(bias=True)
    module = unflatten(export(eager, (X,)))
    with pytest.raises(InputConstraintError, match=r"float32; found torch\.float64"):
        module(X.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(module(X.bfloat16()), eager(X.bfloat16()))
    for dtype in (torch.float64, torch.bfloat16):
        assert_equal(module.to(dtype)(X.to(dtype)), eager.to(dtype)(X.to(dtype)))
    stateless = unflatten(export(Doubles(bias=False), (X,)))
    with pytest.raises(InputConstraintError, match=r"float32; found torch\.float64"):
        stateless(X.double())
    assert_equal(stateless.double()(X.double()), (X + X).double())


def test_what_was_exported_as_none_is_none() -> None:
    module = unflatten(export(Doubles(bias=True), (X, None)))
    assert_equal(module(X, None), X)
    with pytest.raises(InputConstraintError, match=r"'mask' .* constant None; found a tensor"):
        module(X, X)


class Constant(Model):
    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.arange(4.0)
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x * torch.tensor([1.0, 2.0, 3.0, 4.0])) + self.plain


@pytest.mark.parametrize("strict", [False, True])
def test_constants_follow_the_module_to_another_device(strict: bool) -> None:
    eager = Constant()
    module = unflatten(export(eager, (X,), strict=strict))
    there = module.to("meta")(X.to("meta"))
    assert (there.device.type, there.shape) == ("meta", X.shape)
    # Nothing that can be loaded holds them.
    module.to_empty(device="cpu").load_state_dict(eager.state_dict())
    assert_equal(module(X), eager(X))
    # Eager's plain tensors keep their types.
    assert_equal(module.bfloat16().plain, torch.arange(4.0))
