"""State of other sizes or types than recorded, and parts that were moved alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from lowerdeck.unflatten import InputConstraintError, UnflattenError, export_preserving, unflatten

X = torch.randn(4, 8)


class LowRank(nn.Module):
    """Asks its own weight for its size, and its type."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(8, rank))
        self.up = nn.Parameter(torch.randn(rank, 8))
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x @ self.down @ self.up / self.down.shape[1] * self.scale
        return made * 2 if self.scale.dtype == torch.float32 else made * 3


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = LowRank()
        self.embed = nn.Embedding(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.low(x) @ self.embed.weight.T / self.embed.weight.shape[0]
        return found


def _set(module: Any, name: str, value: nn.Parameter) -> None:
    setattr(module, name, value)


def _register(module: Any, name: str, value: nn.Parameter) -> None:
    module.register_parameter(name, value)


def _delete_and_set(module: Any, name: str, value: nn.Parameter) -> None:
    delattr(module, name)
    setattr(module, name, value)


def _assign(module: Any, name: str, value: nn.Parameter) -> None:
    held = {**module.state_dict(), name: value}
    if value.shape == module.state_dict()[name].shape:
        module.load_state_dict(held, assign=True)
    else:
        setattr(module, name, value)


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("put", [_set, _register, _delete_and_set, _assign])
def test_weights_of_another_size_or_type_are_refused(
    put: Callable[[Any, str, nn.Parameter], None], preserve: bool
) -> None:
    program = (export_preserving if preserve else export)(Whole(), (X,))
    for name, value in {
        "down": torch.randn(8, 4),
        "up": torch.randn(4, 8),
        "scale": torch.ones(1, dtype=torch.float64),
    }.items():
        module: Any = unflatten(program)
        module(X)
        before = getattr(module.low, name)
        new: Any = nn.Parameter(value) if name != "scale" else value
        if name == "scale" and put is _register:
            module.low.register_buffer(name, new)
        else:
            put(module.low, name, new)
        with pytest.raises(InputConstraintError, match=rf"'{name}' of a .*LowRank is a tensor"):
            module(X)
        with pytest.raises(InputConstraintError, match="Put an eager module"):
            copy.deepcopy(module).low(X)
        setattr(module.low, name, before)
        module(X)


def test_a_caller_that_reads_the_weight_of_another_size_is_refused() -> None:
    module: Any = unflatten(export_preserving(Whole(), (X,)))
    module.embed.weight = nn.Parameter(torch.randn(6, 8))
    with pytest.raises(InputConstraintError, match=r"'embed.weight' of a .*Whole is a"):
        module(X)
    module.check_input_constraints = False
    module(X)


def test_weights_of_the_same_size_and_moved_modules_pass() -> None:
    eager = Whole()
    module: Any = unflatten(export_preserving(eager, (X,)))
    for each in (module, eager):
        each.low.down = nn.Parameter(torch.ones(8, 2))
    torch.testing.assert_close(module(X), eager(X))
    module.load_state_dict(eager.state_dict(), assign=True)
    torch.testing.assert_close(module(X), eager(X))
    assert not any(name in module.code for name in ("check_state", "check_result"))
    assert module.double()(X.double()).dtype is torch.float64


class Converts(nn.Module):
    """Computes in float32 whatever it is given, as norms do, with a weight of that type."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.weight).to(x.dtype)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Converts()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x * 2)
        return found + 1


@pytest.mark.parametrize("how", [export, export_preserving])
def test_a_type_is_not_right_because_a_weight_has_it(how: Any) -> None:
    x = X.bfloat16()
    for eager in (Converts(), Around()):
        module: Any = unflatten(how(eager, (x,)))
        torch.testing.assert_close(module(x), eager(x))
        with pytest.raises(InputConstraintError, match=r"bfloat16.*found.*float32"):
            module(X)
    with pytest.raises(InputConstraintError, match=r"bfloat16.*found.*float32"):
        module.norm(X)
    module.norm.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    with pytest.raises(InputConstraintError, match=r"bfloat16.*found.*float32"):
        module(x)


class Parts(nn.Module):
    """Reads of one part of a tensor; decomposed, its call is lost, or its writes are elsewhere."""

    def forward(self, x: Tensor) -> Any:
        return {"double": x * 2, "number": 3}


class LosesCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = Parts()

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            return x + self.parts(x[:, :7])["double"].mean()


@pytest.mark.filterwarnings("ignore:Decomposing this program lost")
def test_a_forward_that_was_put_there_is_no_other_than_a_hook() -> None:
    module: Any = unflatten(export_preserving(LosesCall(), (X,)).run_decompositions())
    module.parts.forward = lambda x: {"double": x * 9, "number": 3}
    with pytest.raises(UnflattenError, match="'parts'"):
        module(X)
    module = unflatten(export(nn.Sequential(nn.Linear(8, 8), nn.Identity()), (X,)))
    with pytest.raises(UnflattenError, match="called nowhere"):
        module.get_submodule("1").forward = torch.relu


class WritesView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:, ::2].add_(1)
        return x.mean() + x


class HandsView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writes = WritesView()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.writes(x[:, :3]).mean() + x
        return found


class ReadsWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), HandsView()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.reshape(2, 2, 8))
        found: Tensor = self.inner(y) + y * 2
        return found


def test_what_writes_a_view_of_its_argument_is_given_no_other_in_a_decomposed_program() -> None:
    program = export_preserving(ReadsWritten(), (X,)).run_decompositions()
    module: Any = unflatten(program)
    module.inner.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(UnflattenError, match="shares memory"):
        module(X)


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2]


class ReadsSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut = Cut()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x / self.cut(x).shape[1]
        return found


@pytest.mark.parametrize("preserve", [None, "all"])
def test_what_only_a_size_is_read_of_is_not_replaced_in_a_plain_export(preserve: Any) -> None:
    module: Any = unflatten(export(ReadsSize(), (X,)), preserve=preserve)

    def replace() -> None:
        module.cut = nn.Identity()
        module(X)

    with pytest.raises(UnflattenError, match="'cut'"):
        replace()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x[:, ::2])
        return found


@pytest.mark.filterwarnings("ignore:The program notes a condition")
@pytest.mark.filterwarnings("ignore:Decomposing this program lost")
def test_decomposing_may_name_a_size_in_the_place_of_an_argument() -> None:
    """What took the module's place was given that number."""
    x = torch.randn(2, 12, 8)
    half = torch.export.Dim("half", max=50)
    sizes = ({0: torch.export.Dim.AUTO, 1: half * 2},)
    program = export_preserving(Halves(), (x,), dynamic_shapes=sizes).run_decompositions()
    module: Any = unflatten(program)
    module.linear = nn.Linear(8, 8)
    with pytest.raises(UnflattenError, match="decomposing lost what eager's takes and returns"):
        module(x)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < x.shape[1] else x + 100


class Third(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // 3]


class ReadsHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut = Cut()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cut(x)
        return y * 3 / (y.shape[1] + 1)


def test_what_is_exported_again_is_held_to_what_was_recorded() -> None:
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    x = torch.randn(4, 12, 8)
    module: Any = unflatten(export_preserving(Branches(), (x,), dynamic_shapes=sizes))
    again = export(module, (x,), dynamic_shapes=sizes).module()
    torch.testing.assert_close(again(x[:3]), x[:3] * 2)
    with pytest.raises(AssertionError, match="Guard failed"):
        again(torch.randn(9, 4, 8))
    with pytest.raises(InputConstraintError, match=r"shape\[0\] < .*shape\[1\]"):
        export(module, (torch.randn(9, 4, 8),), dynamic_shapes=sizes)


@pytest.mark.parametrize("strict", [False, True])
def test_what_was_changed_and_is_exported_again_too(strict: bool) -> None:
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    x = torch.randn(4, 12, 8)
    module: Any = unflatten(export_preserving(ReadsHalf(), (x,), dynamic_shapes=sizes))
    module.cut = Third()
    with pytest.raises(Exception, match=r"recorded|Unsupported|InputConstraint"):
        export(module, (x,), dynamic_shapes=sizes, strict=strict)


class Centred(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x - self.mean


@pytest.mark.parametrize("export", [torch.export.export, export_preserving])
def test_a_buffer_that_is_not_saved_is_assigned_as_eagers(export: Any) -> None:
    x = torch.randn(2, 4)
    made: Any = unflatten(export(nn.Sequential(Centred()), (x,)))
    made.get_submodule("0").mean = torch.ones(4)
    torch.testing.assert_close(made(x), x - 1)
    made.get_submodule("0").register_buffer("mean", torch.full((4,), 2.0), persistent=False)
    torch.testing.assert_close(made(x), x - 2)
    assert not made.state_dict()


def test_a_part_is_moved_alone_whatever_another_thread_moves() -> None:
    """A part that is moved with the whole is no change, and that is told by who moves."""
    module, other = (unflatten(export_preserving(Whole(), (X,))) for _ in range(2))
    is_moving, go_on = threading.Event(), threading.Event()

    def slow(tensor: Tensor) -> Tensor:
        if tensor.numel():  # and it is no question what becomes of a type
            is_moving.set()
            assert go_on.wait(60)
        return tensor

    thread = threading.Thread(target=lambda: other._apply(slow))
    thread.start()
    assert is_moving.wait(60)
    module.get_submodule("low").to(torch.float64)
    go_on.set()
    thread.join()
    assert "_check_result" in str(module.code)
    assert "_check_result" not in str(other.code)
