"""Replace every module of a model by eager's, one at a time, and call each alone."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lowerdeck.unflatten import UnflattenedModule, UnflattenError, export_preserving, unflatten


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_same(found: Any, wanted: Any) -> bool:
    pairs = list(zip(leaves(found), leaves(wanted), strict=True))
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-3) for one, other in pairs)


def recorded(made: nn.Module, args: tuple[Any, ...]) -> dict[str, tuple[Any, Any, Any]]:
    """Return what each module takes and returns, the first time that it is called."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    handles = []
    for path, module in made.named_modules():

        def note(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            # Copies: callers change what they were given in place.
            found.setdefault(path, copy.deepcopy((args, dict(kwargs), result)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    made(*args)
    for handle in handles:
        handle.remove()
    return found


def sweep(eager: nn.Module, args: tuple[Any, ...]) -> tuple[Counter[str], list[str]]:
    """Replace each module by eager's, and call each alone; return how often what came out."""
    made = unflatten(export_preserving(eager, args))
    wanted, calls = eager(*args), recorded(made, args)
    assert is_same(made(*args), wanted)
    found: Counter[str] = Counter()
    reasons = []
    for row in made.swappable():
        outer, _, last = row.path.rpartition(".")
        parent = made.get_submodule(outer)
        own = getattr(parent, last)
        if row.callable_alone and row.path in calls:
            given, named, result = calls[row.path]
            found["alone" if is_same(own(*given, **named), result) else "alone, wrong"] += 1
        setattr(parent, last, eager.get_submodule(row.path))
        try:
            found["right" if is_same(made(*args), wanted) else "wrong"] += 1
        except (UnflattenError, TypeError):
            # What the table does not promise; an Identity may be put where one was.
            if row.replaceable:
                raise
            found["refused"] += 1
            reasons.append(f"{row.path}: {row.reason}")
        setattr(parent, last, own)
    return found, reasons


class Behind(nn.Module):
    """Eager's module where flat tensors are taken and returned, for the calls that were recorded.

    Each of eager's tensors is the flat one of the same value; what no flat one is, the program's
    call does not read. State that the caller reads from the module is eager's.
    """

    def __init__(self, eager: nn.Module, calls: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.eager = eager
        self.calls = calls
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("eager"), name)

    def forward(self, *flat: torch.Tensor) -> Any:
        (args, kwargs, _), (known, returned) = self.calls[self.count % len(self.calls)]
        self.count += 1

        def given(leaf: Any) -> Any:
            number = place(leaf, known)
            return leaf if number is None else flat[number]

        args, kwargs = pytree.tree_map(given, (args, kwargs))
        found = pytree.tree_leaves(self.eager(*args, **kwargs))
        result = tuple(found[number] for number in returned)
        return result[0] if len(result) == 1 else result


def place(value: Any, among: Any) -> int | None:
    """Return which of some values equals a tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    for number, other in enumerate(among):
        same = isinstance(other, torch.Tensor) and other.dtype == value.dtype
        if same and other.shape == value.shape and torch.equal(other, value):
            return number
    return None


def all_calls(made: nn.Module, args: tuple[Any, ...]) -> dict[str, list[tuple[Any, Any, Any]]]:
    """Return what each module takes and returns, call by call."""
    found: dict[str, list[tuple[Any, Any, Any]]] = {}
    handles = []
    for path, module in made.named_modules():

        def note(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            found.setdefault(path, []).append(copy.deepcopy((args, dict(kwargs), result)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    made(*args)
    for handle in handles:
        handle.remove()
    return found


def plain_sweep(eager: nn.Module, args: tuple[Any, ...]) -> Counter[str]:
    """Replace each module of a plain export by eager's, which is given flat tensors."""
    made = unflatten(torch.export.export(eager, args), preserve="all")
    wanted = eager(*args)
    flat, known = all_calls(made, args), all_calls(eager, args)
    found: Counter[str] = Counter()
    for row in made.swappable():
        if row.path not in flat:
            continue
        behind = _behind(eager.get_submodule(row.path), flat[row.path], known.get(row.path, []))
        if behind is None:
            found["refused"] += 1
            continue
        found[_put(made, row.path, behind, args, wanted)] += 1
    return found


def _behind(eager: nn.Module, flat: list[Any], known: list[Any]) -> Behind | None:
    """Return ``eager`` for flat calls; None where these pass what eager's do not."""
    if len(flat) != len(known):
        return None
    calls = []
    for (taken, _, result), call in zip(flat, known, strict=True):
        results = pytree.tree_leaves(result)
        numbers = [place(leaf, pytree.tree_leaves(call[2])) for leaf in results]
        if None in numbers:
            return None
        calls.append((call, (taken, numbers)))
    return Behind(eager, calls)


def _put(
    made: UnflattenedModule, path: str, other: nn.Module, args: tuple[Any, ...], wanted: Any
) -> str:
    outer, _, last = path.rpartition(".")
    parent = made.get_submodule(outer)
    own = getattr(parent, last)
    setattr(parent, last, other)
    found = is_same(made(*args), wanted)
    setattr(parent, last, own)
    return "right" if found else "wrong"
