"""Every hook that torch offers sees and changes in an unflattened module what it does in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as registries
from torch.utils import _pytree as pytree
from unflatten_zoo.judges import Around, assert_same  # type: ignore[import-not-found]

from lowerdeck.unflatten import InterpreterModuleDispatcher, export_preserving, unflatten


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, by: Any = 1.0) -> Any:
        return self.fc(x) * by


class Net(nn.Module):
    """Calls one child in two specializations, one with a keyword and one with a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.step = Block(), Block()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        x = self.layers(self.block(x, by=x.exp()))
        return self.step(self.step(x, by=0.5), by=0.25)


PATHS = ("", "block", "step", "step.fc", "layers", "layers.0")
X = torch.randn(2, 4)

Log = list[Any]
Register = Callable[[nn.Module, Log], list[Any]]


def _own(register: str, **options: Any) -> Register:
    def registered(module: nn.Module, log: Log) -> list[Any]:
        names = {inner: name for name, inner in module.named_modules()}

        def hook(inner: nn.Module, *found: Any) -> None:
            # The object itself, as hooks keep what they collect by it.
            log.append((register, names[inner], _copied(found)))

        return [getattr(module.get_submodule(path), register)(hook, **options) for path in PATHS]

    return registered


def _global(register: str, **options: Any) -> Register:
    def registered(module: nn.Module, log: Log) -> list[Any]:
        names = {inner: name for name, inner in module.named_modules()}

        def hook(inner: nn.Module, *found: Any) -> None:
            log.append((register, names[inner], _copied(found)))

        return [getattr(registries, register)(hook, **options)]

    return registered


def _copied(found: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, found
    )


def _changes(module: nn.Module, log: Log) -> list[Any]:
    step: Any = module.get_submodule("step")
    return [
        step.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
        step.register_forward_hook(lambda _, args, result: result * args[0]),
        step.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,)),
        step.register_full_backward_hook(lambda _, grads, __: (grads[0] * 2,)),
    ]


def _changes_with_keywords(module: nn.Module, log: Log) -> list[Any]:
    block, step = (module.get_submodule(name) for name in ("block", "step"))

    def scaled(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {"by": kwargs["by"] * 3}

    return [
        block.register_forward_pre_hook(scaled, with_kwargs=True),
        step.register_forward_hook(
            lambda _, __, kwargs, result: result * kwargs["by"], with_kwargs=True
        ),
    ]


def _changes_all(module: nn.Module, log: Log) -> list[Any]:
    everywhere: Any = registries
    return [
        everywhere.register_module_forward_pre_hook(lambda _, args: (args[0] + 1,)),
        everywhere.register_module_forward_hook(lambda _, __, result: result * 2),
        everywhere.register_module_full_backward_pre_hook(lambda _, grads: (grads[0] * 3,)),
        everywhere.register_module_full_backward_hook(lambda _, grads, __: (grads[0] * 2,)),
    ]


def _in_order(module: nn.Module, log: Log) -> list[Any]:
    kinds = ("forward_pre", "forward", "full_backward_pre", "full_backward")
    made = [
        getattr(module.get_submodule("step"), f"register_{kind}_hook")(
            lambda *_, said=(kind, number): log.append(said), prepend=number == 2
        )
        for kind in kinds
        for number in range(3)
    ]
    # Those of all modules run before a module's own, whenever they were registered.
    return [*made, *_global("register_module_forward_hook")(module, log)]


def _fails(path: str, *, always_call: bool) -> Register:
    def registered(module: nn.Module, log: Log) -> list[Any]:
        def fail(*_: Any) -> None:
            raise ValueError("failed")

        return [
            *_own("register_forward_hook", always_call=always_call)(module, log),
            *_global("register_module_forward_hook", always_call=always_call)(module, log),
            module.get_submodule(path).register_forward_pre_hook(fail),
        ]

    return registered


HOOKS: dict[str, Register] = {
    "forward": _own("register_forward_hook"),
    "forward with keywords": _own("register_forward_hook", with_kwargs=True),
    "before": _own("register_forward_pre_hook"),
    "before with keywords": _own("register_forward_pre_hook", with_kwargs=True),
    "backward": _own("register_full_backward_hook"),
    "before backward": _own("register_full_backward_pre_hook"),
    "all": _global("register_module_forward_hook"),
    "all with keywords": _global("register_module_forward_hook", with_kwargs=True),
    "all always": _global("register_module_forward_hook", with_kwargs=True, always_call=True),
    "before all": _global("register_module_forward_pre_hook"),
    "backward of all": _global("register_module_full_backward_hook"),
    "before backward of all": _global("register_module_full_backward_pre_hook"),
    "changes": _changes,
    "changes with keywords": _changes_with_keywords,
    "changes all": _changes_all,
    "in order": _in_order,
    **{
        f"{path} fails, always_call={always}": _fails(path, always_call=always)
        for path in ("block", "step", "step.fc")
        for always in (False, True)
    },
}


@contextmanager
def _hooked(module: nn.Module, register: Register) -> Iterator[Log]:
    log: Log = []
    handles = register(module, log)
    try:
        yield log
    finally:
        for handle in handles:
            handle.remove()
        # torch leaves the marks of these behind, and warns of them when something is compiled.
        registries._global_forward_hooks_with_kwargs.clear()


def _log(module: nn.Module, register: Register) -> Log:
    module.zero_grad()
    x = X.clone().requires_grad_()
    with _hooked(module, register) as log:
        try:
            result = module(x)
        except ValueError as error:
            log.append(str(error))
        else:
            result.sum().backward()
            log.append((result.detach(), x.grad, [value.grad for value in module.parameters()]))
    return log


# A module that had one of the other kind takes none of this.
OLD_HOOKS = {"backward of the last operator": _own("register_backward_hook")}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("hooks", [HOOKS, OLD_HOOKS])
def test_every_hook_sees_and_changes_what_it_does_in_eager(
    hooks: dict[str, Register],
) -> None:
    eager = Net()
    module: Any = unflatten(export_preserving(eager, (X,)))
    assert isinstance(module.step, InterpreterModuleDispatcher)
    for name, register in hooks.items():
        found, wanted = _log(module, register), _log(eager, register)
        assert len(found) == len(wanted), name
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    assert_same(_log(module, lambda *_: []), _log(eager, lambda *_: []))


class Scales(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0, mask: Any = None) -> Tensor:
        y = x * scale
        return y if mask is None else y * mask


class Calls(nn.Module):
    def __init__(self, called: nn.Module, call: Any, times: int) -> None:
        super().__init__()
        self.called, self.call, self.times = called, call, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            # Several shapes are several specializations.
            x = torch.cat([x, self.call(self.called, x)])
        return x


class Gives(nn.Module):
    """A wrapper that gives the module in it other arguments."""

    def __init__(self, inner: nn.Module, other: Any) -> None:
        super().__init__()
        self.inner, self.other = inner, other

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.other(None, args, kwargs)
        return self.inner(*args, **kwargs)


_OTHER_ARGUMENTS: dict[str, tuple[type[nn.Module], Any, Any]] = {
    "default left out": (
        Scales,
        lambda c, x: c(x, scale=2.0),
        lambda _, a, k: (a, {}),
    ),
    "one added": (
        Scales,
        lambda c, x: c(x, scale=2.0),
        lambda _, a, k: (a, {**k, "mask": a[0]}),
    ),
    "by position": (
        Scales,
        lambda c, x: c(x, mask=x),
        lambda _, a, k: ((*a, 1.0, k["mask"]), {}),
    ),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("how", ["hook", "wrapper"])
@pytest.mark.parametrize("case", _OTHER_ARGUMENTS)
def test_arguments_that_were_not_recorded_are_refused(case: str, how: str, times: int) -> None:
    cls, call, other = _OTHER_ARGUMENTS[case]
    x = torch.randn(2, 4)
    module: Any = unflatten(export_preserving(Calls(cls(), call, times), (x,)))
    if how == "hook":
        module.called.register_forward_pre_hook(other, with_kwargs=True)
    else:
        module.called = Gives(module.called, other)
    with pytest.raises(TypeError, match=r"forward\(\)"):
        module(x)


@pytest.mark.parametrize("first", ["plain", "preserving"])
def test_hooks_of_an_unflattened_module_are_exported_with_it(first: str) -> None:
    eager: Any = nn.Sequential(Around(nn.Linear(4, 4)), nn.Sequential(Around(nn.ReLU()))).eval()
    x = torch.randn(2, 4)
    made: Any = unflatten(
        (torch.export.export if first == "plain" else export_preserving)(eager, (x,))
    )
    if first == "preserving":
        for model in (eager, made):
            for path in ("0", "1.0"):
                module = model.get_submodule(path)
                module.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
                module.register_forward_hook(lambda _, args, result: result + 1)
    wanted = eager(x)
    again = export_preserving(made, (x,))
    torch.testing.assert_close(again.module()(x), wanted)
    torch.testing.assert_close(unflatten(again)(x), wanted)
    torch.testing.assert_close(made(x), wanted)
