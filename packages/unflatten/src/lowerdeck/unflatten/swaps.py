"""Table of replaceable modules, and base classes that refuse unsupported changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lowerdeck.unflatten._torch_private import Movable, children_of, parameters_of
from lowerdeck.unflatten.call_signature import one_line
from lowerdeck.unflatten.cut.signatures import NO_CALL
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.metadata import NAME, PRIVATE, REFUSAL, UNCHANGED, full_name

_EXCHANGES = (
    "exchanges {} values with other modules besides its arguments and its result, so it can be "
    "wrapped or hooked, but not replaced or called alone"
)
_SEVERAL = "has {} specializations: call call_modules()[number] of the module alone"


@dataclass(frozen=True, slots=True)
class Swap:
    """Supported changes of one module.

    Attributes:
        path: Full name of the module.
        replaceable: Whether an eager module with the same signature may replace it.
        callable_alone: Whether it can be called without its caller.
        reason: Why one of these is False, or "".
        called: Whether the program calls it.
    """

    path: str
    replaceable: bool
    callable_alone: bool
    reason: str = ""
    called: bool = True


class SwapTable(tuple[Swap, ...]):
    """One row per module, parents first; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max((len(one_line(row.path)) for row in self), default=0)
        return "\n".join(
            f"{one_line(row.path):<{width}}  {'replace' if row.replaceable else '-------'}  "
            f"{'call' if row.callable_alone else '----'}  {one_line(row.reason)}".rstrip()
            for row in self
        )


def swap_table(root: torch.nn.Module) -> SwapTable:
    """Return the supported changes of each module under ``root``."""
    return SwapTable(_row(path, module) for path, module in root.named_modules() if path)


def _row(path: str, module: torch.nn.Module) -> Swap:
    body = module.__dict__.get(PRIVATE)
    if not isinstance(module, Refusing):
        return Swap(path, replaceable=True, callable_alone=True)
    refusal = refusal_of(module)
    if body is None:
        is_called = any(PRIVATE in inner.__dict__ for inner in module.modules())
        reason = refusal or "is not called itself; only its children are"
        return Swap(path, not refusal and is_called, False, reason, called=False)
    exchanged, count = _exchanged(body), len(body.specializations)
    is_alone = not exchanged and count == 1
    reasons = [refusal] if refusal else []
    if exchanged:
        reasons.append(_EXCHANGES.format(exchanged))
    if count > 1:
        reasons.append(_SEVERAL.format(count))
    is_free = not refusal and not _exchanged(body, needed=True)
    return Swap(path, is_free, is_alone, "; ".join(reasons))


def _exchanged(body: Any, *, needed: bool = False) -> int:
    """Return the number of extra inputs and outputs.

    Args:
        needed: Skip inputs that a replacement could compute.
    """
    signatures = [part.signature for part in body.specializations if part.signature is not None]
    inputs = "required_inputs" if needed else "extra_inputs"
    return max((getattr(part, inputs) + part.extra_outputs for part in signatures), default=0)


def refusal_of(module: torch.nn.Module) -> str:
    """Return why a module cannot be replaced or hooked, or "" if it can."""
    body = module.__dict__.get(PRIVATE)
    if body is not None:
        return next((part.refusal for part in body.specializations if part.refusal), "")
    if not isinstance(module, Refusing) or REFUSAL in module.__dict__:
        return str(module.__dict__.get(REFUSAL, ""))
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
    """Base of generated modules; refuses changes to children whose calls are not recorded."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            self._lowerdeck_hooked()
        elif name == "_compiled_call_impl":
            self.__dict__.pop(UNCHANGED, None)
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
            UnflattenError: The child's call or signature is not recorded, or the child exchanges
                values with other modules besides its arguments and its result.
        """
        check_replacement(self, name, module)
        super().add_module(name, module)

    def _lowerdeck_hooked(self) -> None:
        """Refuse a hook or another ``forward`` if calls of this module are not recorded."""
        if reason := refusal_of(self):
            body = self.__dict__.get(PRIVATE)
            name = body.name if body is not None else self.__dict__.get(NAME, "")
            raise UnflattenError(f"{name!r} cannot be hooked: it {reason}.")
        self.__dict__.pop(UNCHANGED, None)

    def _lowerdeck_moved(self, fn: Any) -> None:
        """Move plain tensors to the device of the buffers; they keep their dtype."""
        for name, value in self.__dict__.items():
            if isinstance(value, torch.Tensor):
                # Applying it to an empty tensor yields the new device at no cost.
                device = fn(torch.empty(0, dtype=value.dtype, device=value.device)).device
                if device != value.device and device.type != "meta":
                    self.__dict__[name] = value.to(device)


def _register(name: str) -> Callable[..., RemovableHandle]:
    """Return ``torch.nn.Module``'s hook registration, refused where hooks cannot run."""
    register = getattr(torch.nn.Module, name)

    @wraps(register)
    def checked(self: Refusing, *args: Any, **kwargs: Any) -> RemovableHandle:
        self._lowerdeck_hooked()
        handle: RemovableHandle = register(self, *args, **kwargs)
        return handle

    return checked


for _hook in ("forward_pre", "forward", "full_backward_pre", "full_backward", "backward"):
    setattr(Refusing, f"register_{_hook}_hook", _register(f"register_{_hook}_hook"))


def check_replacement(holder: torch.nn.Module, name: str, new: Any) -> None:
    """Check that a child may be replaced.

    Raises:
        UnflattenError: The child's call or signature is not recorded, or the child exchanges
            values with other modules besides its arguments and its result.
    """
    # Not by attribute: export substitutes module proxies.
    old = holder.__dict__.get("_modules", {}).get(name)
    if new is old:
        return
    modules = list(new.modules()) if isinstance(new, torch.nn.Module) else []
    for module in modules:
        module.__dict__.pop(UNCHANGED, None)
    if not isinstance(old, Refusing):
        return
    body = old.__dict__.get(PRIVATE)
    if reason := refusal_of(old):
        raise UnflattenError(f"{full_name(holder, name)!r} cannot be replaced: it {reason}.")
    needed = _exchanged(body, needed=True) if body is not None else 0
    if needed and all(inner is not old for inner in modules):
        raise UnflattenError(
            f"{full_name(holder, name)!r} cannot be replaced: it "
            f"{_EXCHANGES.format(_exchanged(body))}. Export the model with the replacement in it."
        )


# Containers.

_CHANGES = frozenset(
    {"append", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update"}
)
"""Methods of torch containers that add or remove children."""


class Container(Refusing):
    """Module that the program never calls, such as a list of layers.

    Like a ``torch.nn`` container it supports access by index and name, and iteration over
    children, or over parameters if it has no children.
    """

    def __init__(self, name: str = "", refusal: str = "") -> None:
        super().__init__()
        self.__dict__[NAME] = name
        if refusal:
            self.__dict__[REFUSAL] = refusal

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            of = torch.nn.ModuleList if children_of(self) else torch.nn.ParameterList
            return of(list(self)[key])
        return _at(_members(self), key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return key in _members(self)
        return any(child is key for child in self)

    def __delitem__(self, key: int | str | slice) -> None:
        _refuse("del")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Last, because a child may have this name.
            if name in _CHANGES:
                return partial(_refuse, name)
            raise

    def __setitem__(self, key: int | str, new: Any) -> None:
        names = list(_members(self))
        setattr(self, key if isinstance(key, str) else names[key], new)

    def __len__(self) -> int:
        return len(_members(self))

    def __iter__(self) -> Iterator[Any]:
        return iter([member for member in _members(self).values() if member is not None])

    def __bool__(self) -> bool:
        return True

    def forward(self, *_: object, **__: object) -> Any:
        """Raise: the program has no code for this module.

        Raises:
            UnflattenError: Always.
        """
        raise UnflattenError(
            "found a call of a module that the program never calls, so it has no code. Export a "
            "model that calls it, or replace it by an eager module."
        )


def _refuse(change: str, *_: object, **__: object) -> None:
    raise UnflattenError(
        f"{change!r} adds or removes children, and the program calls the exported ones. Wrap a "
        "child (layers[1] = Sequential(layers[1], more)), replace it by an Identity, or export "
        "the changed model."
    )


def restored_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a subclass of an eager container class that refuses to add or remove children."""
    namespace: dict[str, Any] = {
        name: partial(_refuse, name) for name in _CHANGES if hasattr(cls, name)
    }
    if hasattr(cls, "__delitem__"):
        namespace["__delitem__"] = lambda self, key: _refuse("del", self, key)
    namespace.update(__module__=cls.__module__, __doc__=cls.__doc__, __reduce_ex__=_reduce)

    def new(_: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # Slicing creates a list of the same class; it must be a plain one.
        return cls(*args, **kwargs)

    namespace["__new__"] = new
    return type(cls.__name__, (Refusing, cls), namespace)


def _reduce(module: torch.nn.Module, _: object) -> tuple[Any, ...]:
    # The class is created at run time, so pickle cannot look it up by name.
    return _restore, (type(module).__bases__[1],), dict(module.__dict__)


def _restore(cls: type[torch.nn.Module]) -> torch.nn.Module:
    module: torch.nn.Module = object.__new__(restored_class(cls))
    return module


def child_at(module: torch.nn.Module, key: int | str) -> torch.nn.Module:
    """Return a child by index or name.

    Raises:
        IndexError: The index is out of range.
        KeyError: No child has this name.
    """
    child: torch.nn.Module = _at(children_of(module), key)
    return child


def _at(members: Mapping[str, Any], key: int | str) -> Any:
    member = members[key] if isinstance(key, str) else list(members.values())[key]
    if member is None:
        raise KeyError(f"child {key!r} is None")
    return member


def _members(module: torch.nn.Module) -> dict[str, Any]:
    return children_of(module) or parameters_of(module)
