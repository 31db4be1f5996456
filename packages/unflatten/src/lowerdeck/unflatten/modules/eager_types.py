"""Give children the class of their eager module, or replace them by a factory."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from lowerdeck.unflatten._torch_private import buffers_of, children_of, parameters_of
from lowerdeck.unflatten.attributes import PRIVATE
from lowerdeck.unflatten.modules.container import restored_class
from lowerdeck.unflatten.modules.module import GeneratedModule, give_eager_type
from lowerdeck.unflatten.swaps import Refusing, check_replacement

ModuleFactory: TypeAlias = Callable[[str, torch.nn.Module], torch.nn.Module]
"""Returns the module that takes the place of a generated child, given its name and the child."""


def restore_types(modules: Mapping[str, torch.nn.Module], eager: torch.nn.Module | None) -> None:
    """Make each child an instance of its eager class as well.

    Args:
        modules: The modules by name, the outermost under ``""``.
        eager: The exported module: children get the classes and plain attributes of its children.
            Without it, loaded classes are found by name.
    """
    for name, module in modules.items():
        if not name:
            continue
        model = _child(eager, name)
        body = module.__dict__.get(PRIVATE)
        cls = _eager_class(model) if model is not None else _loaded_class(body and body.type_name)
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
    """Replace each child by the result of ``factory``, children before their parents.

    Raises:
        UnflattenError: The program has no call or no signature of a replaced child.
    """
    replaced: dict[int, torch.nn.Module] = {}
    for name, child in reversed(list(root.named_modules(remove_duplicate=False))):
        if not name:
            continue
        if id(child) not in replaced:
            replaced[id(child)] = factory(name, child)
        parent, _, last = name.rpartition(".")
        outer = root.get_submodule(parent)
        check_replacement(outer, last, replaced[id(child)])
        children_of(outer)[last] = replaced[id(child)]


def _child(eager: torch.nn.Module | None, name: str) -> torch.nn.Module | None:
    for part in name.split("."):
        eager = children_of(eager).get(part) if eager is not None else None
    return eager


def _eager_class(model: torch.nn.Module) -> type | None:
    """Return the class of ``model``, or the eager class of a generated module, or None."""
    cls = next(cls for cls in type(model).__mro__ if not issubclass(cls, Refusing))
    return None if cls is torch.nn.Module else cls


def _loaded_class(type_name: str | None) -> type | None:
    """Return the class of this qualified name if its module is loaded."""
    outer, _, name = (type_name or "").rpartition(".")
    # Not by getattr: a module may import others when it is asked for a name.
    cls: Any = vars(sys.modules[outer]).get(name) if outer in sys.modules else None
    return cls if isinstance(cls, type) else None


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
"""Parameters that are None in layers of torch created without them, by the argument."""


def _add_missing(cls: type, module: torch.nn.Module) -> None:
    """Add the parameters that a layer of torch has as None: code reads ``linear.bias``."""
    options = _OPTIONAL.keys() & inspect.signature(cls).parameters
    for name in (name for option in options for name in _OPTIONAL[option]):
        if not hasattr(module, name):
            parameters_of(module)[name] = None
