"""Who calls what: of which modules the code must look at what calls return after a change.

Only these look: code around modules that are as they were recorded costs nothing more.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch

from lowerdeck.unflatten._torch_private import children_of
from lowerdeck.unflatten.calls.carrying import PRIVATE, Generated

_HOLDERS = "_lowerdeck_holders"


class _Holders:
    """The modules that hold a module, which they keep alive and not the other way; not copied."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[weakref.ref[torch.nn.Module]] = []

    def add(self, holder: torch.nn.Module) -> None:
        """Add one."""
        if not any(each() is holder for each in self.found):
            self.found.append(weakref.ref(holder))

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


def note_children(holder: torch.nn.Module) -> None:
    """Note of the generated children of ``holder`` that it holds them."""
    for child in children_of(holder).values():
        if isinstance(child, Generated):
            note_child(holder, child)


def note_child(holder: torch.nn.Module, child: torch.nn.Module) -> None:
    """Note of ``child`` that ``holder`` holds it."""
    held = child.__dict__
    if _HOLDERS not in held:
        held[_HOLDERS] = _Holders()
    held[_HOLDERS].add(holder)


def note_copied(holder: torch.nn.Module) -> None:
    """Note the same after ``holder`` was copied, of containers in it too."""
    note_children(holder)
    for child in children_of(holder).values():
        if isinstance(child, Generated) and PRIVATE not in child.__dict__:
            note_copied(child)


def watch_all(model: torch.nn.Module) -> None:
    """Let the code of all modules look at what calls return.

    Export puts hooks on modules, for which their code and class are made anew: not while it runs.

    Args:
        model: Holds them.
    """
    for module in model.modules():
        body = module.__dict__.get(PRIVATE)
        if body is not None:
            body.watch_calls(module)


def watch_around(module: torch.nn.Module, *, itself: bool = False) -> None:
    """Let the code around a module look at what calls return, for that may be something else now.

    Args:
        module: What was changed, or holds what was.
        itself: Whether the code of the module itself looks too.
    """
    queue: list[Any] = [module]
    seen = {id(module)}
    for each in queue:
        body = each.__dict__.get(PRIVATE)
        if body is not None and (itself or each is not module):
            body.watch_calls(each)
        for holder in each.__dict__[_HOLDERS].found if _HOLDERS in each.__dict__ else ():
            found = holder()
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                queue.append(found)
