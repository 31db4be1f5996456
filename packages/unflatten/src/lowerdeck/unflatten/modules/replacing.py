"""Refuse what takes the place of a module that takes flat values, where its call is not known.

A program without a module's signature has the values that it reads, in the order of their use, and
no more: neither the order in which eager's caller gives them, nor numbers or None given beside.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph

from lowerdeck.unflatten._torch_private import (
    MovesConstants,
    buffers_of,
    children_of,
    has_hooks,
    module_state,
    parameters_of,
)
from lowerdeck.unflatten.calls.carrying import PRIVATE, UNKNOWN_CALL, Generated
from lowerdeck.unflatten.calls.former_calls import FLAT_ADVICE, FORMER, takes, told_flat
from lowerdeck.unflatten.errors import UnflattenError
from lowerdeck.unflatten.modules.changes import note_child, watch_around


class Holder(Generated, MovesConstants):
    """Base of the modules that ``unflatten`` makes, which look at what is put in them.

    What is written into ``_modules``, which is torch's own, nobody looks at.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            self._lowerdeck_check(name, value)
        elif name == "forward":
            if is_without_call(self):
                raise UnflattenError(f"'forward' of a module was replaced, which {UNKNOWN_CALL}.")
            watch_around(self)
        elif isinstance(value, torch.Tensor) and _is_other(self, name, value):
            watch_around(self, itself=True)
        old = children_of(self).get(name) if value is None else None
        super().__setattr__(name, value)
        _remember(self, name, old)

    def _lowerdeck_moved_alone(self) -> None:
        watch_around(self)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Hold a parameter, as ``torch.nn.Module`` does."""
        is_other = param is not None and _is_other(self, name, param)
        super().register_parameter(name, param)
        if is_other:
            watch_around(self, itself=True)

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """Hold a buffer, as ``torch.nn.Module`` does."""
        before = buffers_of(self).copy()
        super().register_buffer(name, tensor, persistent)
        others = {name: held for name, held in buffers_of(self).items() if held is not None}
        if any(_are_unlike(before.get(name), held) for name, held in others.items()):
            watch_around(self, itself=True)

    def __delattr__(self, name: str) -> None:
        old = children_of(self).get(name)
        if name in parameters_of(self) or name in buffers_of(self):
            # What is put there next may be of another size.
            watch_around(self, itself=True)
        super().__delattr__(name)
        _remember(self, name, old)

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Put a module where another one was, or there was none, as ``torch.nn.Module`` does.

        Raises:
            UnflattenError: The program does not tell how it would be called.
        """
        self._lowerdeck_check(name, module)
        old = children_of(self).get(name) if module is None else None
        super().add_module(name, module)
        _remember(self, name, old)

    def _lowerdeck_check(self, name: str, new: torch.nn.Module | None) -> None:
        if new is None:
            return
        former: dict[str, Any] = self.__dict__.get(FORMER, {})
        # Not by its truth: one of eager's own type may have a length.
        old = former[name] if name in former else children_of(self).get(name)
        unknown = check_replacement(name, old, new)
        inside = [each for each in former if each.startswith(f"{name}.")]
        for path in inside:
            unknown |= check_replacement(path, former[path], _at(new, path[len(name) + 1 :]))
        for path in (name, *inside):
            former.pop(path, None)
        if is_without_call(old):
            # What takes the place of its Identity has no call either.
            unknown = {name: old}
        if unknown:
            self.__dict__.setdefault(FORMER, {}).update(unknown)
        if new is not children_of(self).get(name):
            note_replaced(self, new)


def note_replaced(holder: torch.nn.Module, new: torch.nn.Module) -> None:
    """Note that ``new`` takes the place of another module in ``holder``."""
    if isinstance(new, Generated):
        note_child(holder, new)
    watch_around(holder, itself=True)


def _is_other(module: torch.nn.Module, name: str, value: torch.Tensor) -> bool:
    """Return whether a tensor is of other sizes or type than what it takes the place of."""
    held: dict[str, Any] = {**module.__dict__, **parameters_of(module), **buffers_of(module)}
    return _are_unlike(held.get(name), value)


def _are_unlike(old: Any, value: torch.Tensor) -> bool:
    return isinstance(old, torch.Tensor) and (old.shape, old.dtype) != (value.shape, value.dtype)


def _remember(holder: Holder, name: str, gone: torch.nn.Module | None) -> None:
    """Keep how what is gone was called: what is put there next takes its place."""
    if isinstance(gone, Generated):
        holder.__dict__.setdefault(FORMER, {})[name] = _without_state(gone)


def _at(module: torch.nn.Module, path: str) -> torch.nn.Module | None:
    found: torch.nn.Module | None = module
    for part in path.split("."):
        found = children_of(found).get(part) if found is not None else None
    return found


def _without_state(module: Any) -> Any:
    """Return what tells as ``module`` does how it is called, and keeps nothing else of it."""
    body = module.__dict__.get(PRIVATE)
    if body is None:
        return module
    made = object.__new__(type(module))
    made.__dict__.update(module_state())
    made.__dict__[PRIVATE] = body
    return made


def is_without_call(module: torch.nn.Module | None) -> bool:
    """Return whether another module in the place of this one would silently not be called.

    Neither it nor what it holds has a call, and nobody reads what they hold.
    """
    return module is not None and bool(getattr(module, "_lowerdeck_uncalled", False))


def check_replacement(name: str, old: Any, new: torch.nn.Module | None) -> dict[str, Any]:
    """Check that the program's calls of ``old`` tell how ``new`` is called.

    What is put around generated modules knows how it is called, and so does what takes any
    values (``*values``), or the one value that such a call gives.

    Args:
        name: The name of both.
        old: What the program calls, or holds modules that it calls.
        new: What takes its place.

    Returns:
        By name what told how the calls are without a signature of which ``new`` takes the place.

    Raises:
        UnflattenError: They do not.
    """
    if not isinstance(old, Generated) or new is old:
        return {}
    held: Any = old
    body = held.__dict__.get(PRIVATE)
    if body is None:
        if new is not None and is_without_call(held) and not _computes_nothing(new):
            raise UnflattenError(
                f"A {type(new).__name__} cannot take the place of {name!r}, which {UNKNOWN_CALL}."
            )
        inside = [
            check_replacement(f"{name}.{key}", child, _at(new, key) if new is not None else None)
            for key, child in children_of(held).items()
        ]
        return {path: each for found in inside for path, each in found.items()}
    unknown = _untold(body)
    own = new.__dict__.get(PRIVATE) if new is not None else None
    if not unknown and own is not None:
        _refuse_flat(name, new, own)
    # Most are told, and what is put around a module may be large.
    if not unknown or own is body:
        return {}
    if new is not None and not any(_is_called_so(each, body) for each in new.modules()):
        for form in unknown:
            if (why := _unknown(form, new)) is not None:
                raise UnflattenError(
                    f"A {type(new).__name__} cannot take the place of {name!r}, of which this "
                    f"program has no signature: {why}. {told_flat(form)} {takes(new)} "
                    f"{FLAT_ADVICE}"
                )
    return {name: _without_state(old)}


def _untold(body: Any) -> list[Any]:
    """Return the forms of whose calls the program tells no signature."""
    return [form for form in (body, *body.others) if not (form.is_guarded or _is_told(form))]


def _is_called_so(module: torch.nn.Module, body: Any) -> bool:
    """Return whether a module is what has this body, or stood for the same class in a program."""
    own = module.__dict__.get(PRIVATE)
    if own is None or own is body:
        return own is body
    same = own.type_name is not None and own.type_name == body.type_name
    return same and bool(_untold(own)) and _counts(own) == _counts(body)


def _counts(form: Any) -> tuple[int, int]:
    """Return how many values a form takes and returns."""
    graph: Graph = form.graph
    returned = next(iter(graph.find_nodes(op="output"))).all_input_nodes
    return len(graph.find_nodes(op="placeholder")), len(returned)


def _refuse_flat(name: str, new: Any, body: Any) -> None:
    """Raise if a module of a program without its signature takes the place of one with it."""
    form = next((each for each in _untold(body) if max(_counts(each)) > 1), None)
    if form is not None:
        raise UnflattenError(
            f"A {type(new).__name__} cannot take the place of {name!r}, which this program calls "
            "as eager's: it is of a program that has no signature of it, and takes and returns "
            "values in the order of their use. Export its program with export_preserving."
        )


def _computes_nothing(module: torch.nn.Module) -> bool:
    if isinstance(module, Generated):
        return PRIVATE not in module.__dict__  # a container
    return isinstance(module, torch.nn.Identity) and not has_hooks(module)


def _is_told(form: Any) -> bool:
    return form.signature is not None and not form.signature.flat


def _unknown(form: Any, new: torch.nn.Module) -> str | None:
    """Return what is not known of the call of ``new`` in the place of ``form``."""
    if form.is_part:
        return "it is computed in several parts"
    taken, returned = _counts(form)
    parameters, takes_any, takes_named = _parameters(new.forward)
    classes = {f"{each.__module__}.{each.__qualname__}": each for each in type(new).__mro__}
    # By its name: a class within another one, or within a function, is not found.
    cls = classes.get(str(form.type_name)) or loaded_class(form.type_name)
    # torch's own wrappers (compile, DataParallel, a trace) hand on to a module of eager's.
    is_torchs = type(new).__module__.partition(".")[0] == "torch"
    if takes_any and not (is_torchs or str(form.type_name) in classes):
        return None  # it hands on what it is given
    if taken > 1 or returned != 1:
        return (
            f"it takes {taken} and returns {returned} values in an order that may be another one"
        )
    if takes_any or takes_named or len(parameters) > taken:
        eager, *others = _parameters(getattr(cls, "forward", None))
        if any(others) or len(eager) != taken + 1:
            names = [repr(each.name) for each in parameters[taken:]]
            names += ["more values"] * takes_any + ["more by name"] * (takes_named or takes_any)
            more = ", ".join(names)
            return f"eager's caller may give {more} too, which the program does not tell"
    return None


def _parameters(
    function: Callable[..., Any] | None,
) -> tuple[list[inspect.Parameter], bool, bool]:
    """Return the parameters, and whether it takes any by position, and by name.

    Of what does not tell nothing is known: it may take any.
    """
    try:
        found = list(inspect.signature(function).parameters.values()) if function else None
    except (TypeError, ValueError):
        found = None
    if found is None:
        return [], True, True
    kinds = [each.kind for each in found]
    any_place, any_name = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = [each for each in found if each.kind not in {any_place, any_name}]
    return named, any_place in kinds, any_name in kinds


def loaded_class(type_name: str | None) -> type | None:
    """Return the class of this qualified name if its file is loaded."""
    outer, _, name = (type_name or "").rpartition(".")
    # Not by getattr: a module may import others when it is asked for a name.
    found = vars(sys.modules[outer]).get(name) if outer in sys.modules else None
    return found if isinstance(found, type) else None
