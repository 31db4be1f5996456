"""A model may name its children and state as it likes, also as our modules name their parts."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from unflatten_comparison import (  # type: ignore[import-not-found]
    FORMS,
    assert_equal,
    check,
    compare,
)

from lowerdeck.unflatten import InterpreterModuleDispatcher, UnflattenedModule, unflatten
from lowerdeck.unflatten.calls.carrying import CARRIED
from lowerdeck.unflatten.code.call_targets import OWN_NAMES, form_name

if TYPE_CHECKING:

    class Model(nn.Module):
        """A module whose attributes may be anything."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Model = nn.Module

X = torch.randn(2, 4)


def test_every_name_of_ours_is_known() -> None:
    root: Any = unflatten(export(nn.Sequential(nn.Linear(4, 4)), (X,)))
    found = {
        *dir(root),
        *dir(root[0] if hasattr(root, "__getitem__") else root.get_submodule("0")),
    }
    found |= set(dir(InterpreterModuleDispatcher)) | set(dir(UnflattenedModule))
    # Nothing can be called "": torch refuses it.
    children = {*root._modules, ""}
    assert found - set(dir(nn.Module())) - children - {"weight", "bias"} <= OWN_NAMES


def _names() -> list[str]:
    # Python asks classes for the others; a model that has them cannot be copied itself.
    ours = sorted(name for name in OWN_NAMES if name[:2] != "__")
    return [*ours, CARRIED, "_others", form_name(1), "_form"]


class Holds(Model):
    """Holds a buffer, a parameter or a child under a name, and calls another in two forms."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.name, self.kind = name, kind
        if kind == "buffer":
            self.register_buffer(name, torch.full((4,), 3.0))
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.full((4,), 3.0)))
        else:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor, scale: float = 0.5) -> Any:
        kinds: Any = {
            "buffer": self._buffers,
            "parameter": self._parameters,
            "child": self._modules,
        }
        held: Any = kinds[self.kind][self.name]
        y = held(x) if self.kind == "child" else x * held
        if self.kind == "buffer" and self.training:
            held.mul_(2)
        return y * scale


class Twice(Model):
    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.inner = Holds(name, kind)

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inner(x, 0.25), 0.125)


@pytest.mark.parametrize("kind", ["buffer", "parameter", "child"])
@pytest.mark.parametrize("name", _names())
def test_state_and_children_may_have_any_name_of_ours(name: str, kind: str) -> None:
    for eager in (Holds(name, kind).eval(), Twice(name, kind).train()):
        module = unflatten(export(eager, (X,), strict=False))
        for subject in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            compare(copy.deepcopy(eager), subject, (X,))
            repr(subject)
            UnflattenedModule.print_readable(subject, print_output=False)
            UnflattenedModule.tree_summary(subject)
            UnflattenedModule.recompile(subject)


class Owner(Model):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("c", torch.full((4,), 5.0))

    def forward(self, x: Tensor) -> Any:
        return x * self.b + self.c


class Collides(Model):
    """State whose names torch.export, or our own code, gives to other values too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mul, self.torch, self._check = (
            Owner(),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )
        for index, name in enumerate(("a_b", "p_a_b", "x", "add_1", "b_a_c", "_relu", "self_")):
            self.register_parameter(name, nn.Parameter(torch.full((4,), 1.0 + index)))
        for index, name in enumerate(("a_c", "_is_compiling", "_check_1", "mul_1", "value")):
            self.register_buffer(name, torch.full((4,), 2.0 + index))
        self.lifted = torch.full((4,), 0.5)

    def forward(self, x: Tensor) -> Any:
        y = self.torch(self.mul(self.a(x) * self.a_b + self.a_c) * self.p_a_b * self.x)
        y = y * self.add_1 + self.b_a_c * self._relu - self.self_ * torch.tensor(3.0)
        y = self._check(y * self._is_compiling + self._check_1 * self.mul_1) * self.value
        return y.relu() * self.lifted


@pytest.mark.parametrize("preserved", [(), ("a", "mul")])
def test_names_that_collide_once_they_are_flat(preserved: tuple[str, ...]) -> None:
    check(Collides(), (X,), preserve_module_call_signature=preserved, forms=FORMS)


def test_a_model_may_own_the_switch_of_the_checks() -> None:
    eager = Holds("check_input_constraints", "buffer").eval()
    module: Any = unflatten(export(eager, (X,)))
    assert_equal(module.check_input_constraints, torch.full((4,), 3.0))
    with pytest.raises(RuntimeError, match="must have 2 dimensions"):
        module(X[0])
