"""Give children the eager class that they stand for, or any module of the caller's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from lowerdeck.unflatten._torch_private import (
    MovesConstants,
    buffers_of,
    children_of,
    parameters_of,
)
from lowerdeck.unflatten.calls.carrying import PRIVATE, Generated
from lowerdeck.unflatten.calls.former_calls import FORMER
from lowerdeck.unflatten.modules.container import restored_class
from lowerdeck.unflatten.modules.generated_module import GeneratedModule, give_eager_type
from lowerdeck.unflatten.modules.replacing import check_replacement, loaded_class, note_replaced

ModuleFactory: TypeAlias = Callable[[str, torch.nn.Module], torch.nn.Module]
"""Returns what a name gets in place of the module that was made for it."""


def restore(modules: Mapping[str, torch.nn.Module], eager: torch.nn.Module | None) -> None:
    """Make each child an instance of its eager class too.

    Args:
        modules: The modules by name, the outermost under ``""``.
        eager: The module that was exported: children get its children's classes and plain
            attributes. Without it, classes that are loaded are found by name.
    """
    for name, module in modules.items():
        if not name:
            continue
        model = _child(eager, name)
        body = module.__dict__.get(PRIVATE)
        cls = _eager_class(model) if model is not None else loaded_class(body and body.type_name)
        if cls is None or not issubclass(cls, torch.nn.Module):
            continue
        if isinstance(module, GeneratedModule):
            give_eager_type(module, cls)
        else:
            module.__class__ = restored_class(cls)
        if model is not None:
            _copy_attributes(model, module)
        elif cls.__module__.startswith("torch.nn."):
            _add_missing(cls, module)


def replace_children(root: torch.nn.Module, factory: ModuleFactory) -> None:
    """Put what ``factory`` returns in the place of each child, children before their parents."""
    made: dict[int, torch.nn.Module] = {}
    for name, child in reversed(list(root.named_modules(remove_duplicate=False))):
        if not name:
            continue
        if id(child) not in made:
            made[id(child)] = factory(name, child)
        parent, _, last = name.rpartition(".")
        outer = root.get_submodule(parent)
        if unknown := check_replacement(last, child, made[id(child)]):
            outer.__dict__.setdefault(FORMER, {}).update(unknown)
        children_of(outer)[last] = made[id(child)]
        if made[id(child)] is not child and isinstance(outer, Generated):
            note_replaced(outer, made[id(child)])


def _child(eager: torch.nn.Module | None, name: str) -> torch.nn.Module | None:
    for part in name.split("."):
        eager = children_of(eager).get(part) if eager is not None else None
    return eager


def _eager_class(model: torch.nn.Module) -> type | None:
    """Return the class of ``model``; of a module of ours that for which it stands, or None."""
    ours = (Generated, MovesConstants)
    found = next(cls for cls in type(model).__mro__ if not issubclass(cls, ours))
    return None if found is torch.nn.Module else found


def _copy_attributes(model: torch.nn.Module, module: torch.nn.Module) -> None:
    for name, value in vars(model).items():
        if name not in module.__dict__ and not isinstance(value, torch.nn.Module):
            module.__dict__[name] = copy.copy(value)
    for table in (parameters_of, buffers_of, children_of):
        for name, value in table(model).items():
            if value is None:
                table(module).setdefault(name, None)
    module.training = model.training


_OPTIONAL = {
    "bias": ("bias",),
    "affine": ("weight", "bias"),
    "elementwise_affine": ("weight", "bias"),
}
"""Parameters that layers of torch's have as None where they are made without them, by the argument
that says so."""


def _add_missing(cls: type, module: torch.nn.Module) -> None:
    """Let ``module`` have what a layer of torch's has as None: code asks for ``linear.bias``."""
    asked = inspect.signature(cls).parameters
    for name in (each for option in _OPTIONAL.keys() & asked for each in _OPTIONAL[option]):
        if not hasattr(module, name):
            parameters_of(module)[name] = None
