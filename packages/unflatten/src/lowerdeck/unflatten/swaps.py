"""The table of modules that can be replaced, and the refusal to replace or hook the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lowerdeck.unflatten._torch_private import Movable, children_of
from lowerdeck.unflatten.attributes import NAME, PRIVATE, full_name
from lowerdeck.unflatten.call_signature import one_line
from lowerdeck.unflatten.cut.signatures import NO_CALL
from lowerdeck.unflatten.errors import UnflattenError

_EXCHANGES = (
    "exchanges {} values with other modules besides its arguments and its result, so that it can "
    "be wrapped or hooked, but not replaced or called alone"
)
_SEVERAL = "has {} specializations: call call_modules()[number] of the module alone"


@dataclass(frozen=True, slots=True)
class Swap:
    """Possible changes of one module.

    Attributes:
        path: Its name.
        replaceable: Whether an eager module of the same signature may replace it.
        callable_alone: Whether it computes its result from its arguments and its own state.
        reason: Why one of these is not so, or "".
        called: Whether the program has a call of it.
    """

    path: str
    replaceable: bool
    callable_alone: bool
    reason: str = ""
    called: bool = True


class SwapTable(tuple[Swap, ...]):
    """A row for each module of the program, outer ones first; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max((len(one_line(row.path)) for row in self), default=0)
        return "\n".join(
            f"{one_line(row.path):<{width}}  {'replace' if row.replaceable else '-------'}  "
            f"{'call' if row.callable_alone else '----'}  {one_line(row.reason)}".rstrip()
            for row in self
        )


def swap_table(root: torch.nn.Module) -> SwapTable:
    """Return the possible changes of each module under ``root``."""
    return SwapTable(_row(path, module) for path, module in root.named_modules() if path)


def _row(path: str, module: torch.nn.Module) -> Swap:
    body = module.__dict__.get(PRIVATE)
    if not isinstance(module, Refusing):
        return Swap(path, replaceable=True, callable_alone=True)
    refusal = refusal_of(module)
    if body is None:
        is_called = any(PRIVATE in inner.__dict__ for inner in module.modules())
        reason = refusal or "is not called itself, only the modules in it"
        return Swap(path, not refusal and is_called, False, reason, called=False)
    exchanged, count = _exchanged(body), len(body.specializations)
    is_alone = not exchanged and count == 1 and not body.is_part
    reasons = [refusal] if refusal else []
    if exchanged and not body.is_part:
        reasons.append(_EXCHANGES.format(exchanged))
    if count > 1 and not body.is_part:
        reasons.append(_SEVERAL.format(count))
    is_free = not refusal and not _exchanged(body, needed=True)
    return Swap(path, is_free, is_alone, "; ".join(reasons))


def _exchanged(body: Any, *, needed: bool = False) -> int:
    """Return the number of values that pass besides arguments and results.

    Args:
        body: The code of the module.
        needed: Count those alone that a replacement could not compute.
    """
    signatures = [one.signature for one in body.specializations if one.signature is not None]
    inputs = "needs" if needed else "carried"
    return max((getattr(each, inputs) + each.carries for each in signatures), default=0)


def refusal_of(module: torch.nn.Module) -> str:
    """Return why a module can neither be replaced nor hooked, or "" if it can."""
    body = module.__dict__.get(PRIVATE)
    if body is not None:
        return next((one.refusal for one in body.specializations if one.refusal), "")
    if not isinstance(module, Refusing):
        return ""
    inside = [(name, inner) for name, inner in module.named_modules() if inner is not module]
    if not any(
        PRIVATE in inner.__dict__ or not isinstance(inner, Refusing) for _, inner in inside
    ):
        return NO_CALL
    for name, inner in inside:
        if PRIVATE in inner.__dict__ and (reason := refusal_of(inner)):
            return f"has the child {name!r}, which {reason}"
    return ""


class Refusing(Movable):
    """Base of generated modules; refuses changes of which the program has no call."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self._lowerdeck_refuse("hooked")
        elif value is None or isinstance(value, torch.nn.Module):
            check_replacement(self, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in children_of(self):
            check_replacement(self, name, None)
        super().__delattr__(name)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Add or replace a child, as ``torch.nn.Module`` does.

        Raises:
            UnflattenError: The program has no call or no signature of the present child.
        """
        check_replacement(self, name, module)
        super().add_module(name, module)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook, as ``torch.nn.Module`` does.

        Raises:
            UnflattenError: The program has no call or no signature of this module.
        """
        self._lowerdeck_refuse("hooked")
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook; see ``register_forward_hook``."""
        self._lowerdeck_refuse("hooked")
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook; see ``register_forward_hook``."""
        self._lowerdeck_refuse("hooked")
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register a hook; see ``register_forward_hook``."""
        self._lowerdeck_refuse("hooked")
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def _lowerdeck_refuse(self, action: str) -> None:
        if reason := refusal_of(self):
            body = self.__dict__.get(PRIVATE)
            name = body.name if body is not None else self.__dict__.get(NAME, "")
            raise UnflattenError(f"{name!r} cannot be {action}: it {reason}.")

    def _lowerdeck_moved(self, fn: Any) -> None:
        """Move plain tensors to another device with the buffers; they keep their dtype."""
        for name, value in self.__dict__.items():
            if isinstance(value, torch.Tensor):
                # The result for an empty tensor has the new device, at no cost.
                device = fn(torch.empty(0, dtype=value.dtype, device=value.device)).device
                if device != value.device and device.type != "meta":
                    self.__dict__[name] = value.to(device)


def check_replacement(holder: torch.nn.Module, name: str, new: Any) -> None:
    """Check that another module may take the place of a child.

    Raises:
        UnflattenError: The program has no call or no signature of the child.
    """
    # Not by attribute: export puts proxies of modules there.
    old = holder.__dict__.get("_modules", {}).get(name)
    if old is None or new is old or not isinstance(old, Refusing):
        return
    body = old.__dict__.get(PRIVATE)
    if reason := refusal_of(old):
        raise UnflattenError(f"{full_name(holder, name)!r} cannot be replaced: it {reason}.")
    modules = new.modules() if isinstance(new, torch.nn.Module) else ()
    needed = _exchanged(body, needed=True) if body is not None else 0
    if needed and all(inner is not old for inner in modules):
        raise UnflattenError(
            f"{full_name(holder, name)!r} cannot be replaced: it "
            f"{_EXCHANGES.format(_exchanged(body))}. Export the model with the replacement in it."
        )
