"""Replace every module of a model, one at a time, and call each alone as eager does."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from lowerdeck.unflatten import (
    InputConstraintError,
    UnflattenedModule,
    UnflattenError,
    export_preserving,
    unflatten,
)


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_same(found: Any, wanted: Any) -> bool:
    pairs = list(zip(leaves(found), leaves(wanted), strict=True))
    return all(torch.allclose(one, other, atol=1e-4, rtol=1e-3) for one, other in pairs)


Call = tuple[Any, Any, Any]
"""What a module was given by position and by keyword, and what it returned."""


def all_calls(made: nn.Module, args: tuple[Any, ...]) -> dict[str, list[Call]]:
    """Return what each module takes and returns, call by call, where it can be hooked."""
    # A module without a recorded call or signature takes no hook.
    without = {
        row.path
        for row in (made.swappable() if isinstance(made, UnflattenedModule) else ())
        if not row.replaceable and "exchanges" not in row.reason
    }
    found: dict[str, list[Call]] = {}
    open_calls: list[tuple[Any, Any]] = []

    def before(_: Any, args: Any, kwargs: Any) -> None:
        # Copies, made before: what a module is given may be written by it and by its caller.
        open_calls.append(copy.deepcopy((args, dict(kwargs))))

    handles = []
    for path, module in made.named_modules():
        if path in without:
            continue

        def after(_: Any, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            found.setdefault(path, []).append((*open_calls.pop(), copy.deepcopy(result)))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    made(*args)
    for handle in handles:
        handle.remove()
    return found


class Changed(nn.Module):
    """A module of which each result is another one, in each place: no norm undoes that."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self.inner(*args, **kwargs))

    @staticmethod
    def change(result: Any) -> Any:
        """Return a result with other tensors."""

        def changed(leaf: Any) -> Any:
            is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            if not is_float or not leaf.dim():
                return leaf
            # Something is added too: results of random weights are small.
            ramp = torch.linspace(0.5, 1.5, leaf.shape[-1]).to(leaf.dtype)
            return leaf * ramp + ramp

        return pytree.tree_map(changed, result)


def sweep(
    eager: nn.Module, args: tuple[Any, ...], program: ExportedProgram | None = None
) -> tuple[Counter[str], list[str]]:
    """Replace each module by eager's, call each alone, and change what each returns.

    Each is called alone with what eager gives it in each of its calls. That a change is seen in
    the model's result shows that a call of the module is in the program.

    Args:
        eager: The model.
        args: What it is called with.
        program: The model with signatures recorded, perhaps with other sizes; None exports it.

    Returns:
        How often what came out, and why modules were refused.
    """
    made = unflatten(program if program is not None else export_preserving(eager, args))
    wanted, calls = eager(*args), all_calls(eager, args)
    own_calls = all_calls(made, args)
    assert is_same(made(*args), wanted)
    found: Counter[str] = Counter()
    reasons = []
    for row in made.swappable():
        if not row.called:
            continue  # a list of layers, which are swapped themselves, or a module without a call
        own, original = made.get_submodule(row.path), eager.get_submodule(row.path)
        if row.callable_alone and row.path in own_calls:
            if "flat values" in row.reason:
                # Not called as eager's.
                same = _repeats(own, own_calls[row.path])
            else:
                given = (calls.get(row.path, []), own_calls[row.path])
                same = _same_alone(own, original, *given)
            found["alone" if same else "alone, wrong"] += 1
        try:
            found[
                "right" if is_same(_with(made, row.path, original, args), wanted) else "wrong"
            ] += 1
        except (UnflattenError, TypeError):
            # What the table does not promise; an Identity may be put where one was.
            if row.replaceable:
                raise
            found["refused"] += 1
            reasons.append(f"{row.path}: {row.reason}")
        if not row.replaceable:
            continue
        other = _with(eager, row.path, Changed(original), args)
        found["without effect"] += is_same(other, wanted)
        try:
            result = _with(made, row.path, Changed(own), args)
        except UnflattenError as error:
            # The module returned an argument, and the program reads both by one name.
            if "the same tensor as another one" not in str(error):
                raise
            found["changed, refused"] += 1
        else:
            same = is_same(result, other) or is_same(
                result, _changed_within(eager, row.path, args)
            )
            found["changed" if same else "changed, wrong"] += 1
    return found, reasons


def _changed_within(eager: nn.Module, path: str, args: tuple[Any, ...]) -> Any:
    """Return what ``eager`` gives if the module changes its own results.

    Models of transformers record what modules of some classes return, which is what those around
    them are not asked for; a program has one value for what was recorded and what was returned.
    """
    module = eager.get_submodule(path)
    forward = module.forward
    module.forward = lambda *args, **kwargs: Changed.change(forward(*args, **kwargs))
    try:
        return eager(*args)
    finally:
        del module.forward


def _repeats(own: nn.Module, calls: list[Call]) -> bool:
    """Return whether ``own`` gives in each of these calls what it gave before.

    A result that the program does not read is None.
    """
    return all(
        is_same(*_read(own(*given, **named), result))
        for given, named, result in copy.deepcopy(calls)
    )


def _read(found: Any, wanted: Any) -> tuple[list[Any], list[Any]]:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    read = [pair for pair in pairs if pair[0] is not None]
    return [one for one, _ in read], [other for _, other in read]


def _same_alone(
    own: nn.Module, original: nn.Module, calls: list[Call], own_calls: list[Call]
) -> bool:
    """Return whether ``own`` is as eager's with what eager gives it, or with what it gets itself.

    Models look whether they are exported, and give their layers something else then.
    """
    try:
        return _repeats(own, calls)
    except InputConstraintError:
        pairs = zip(copy.deepcopy(own_calls), copy.deepcopy(own_calls), strict=True)
        return all(
            is_same(own(*given, **named), original(*again, **named_again))
            for (given, named, _), (again, named_again, _) in pairs
        )


def _with(model: nn.Module, path: str, other: nn.Module, args: tuple[Any, ...]) -> Any:
    """Return what ``model`` gives with another module in one place."""
    outer, _, last = path.rpartition(".")
    parent = model.get_submodule(outer)
    own = getattr(parent, last)
    setattr(parent, last, other)
    try:
        return model(*args)
    finally:
        setattr(parent, last, own)


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
    """Return which of some values a tensor is: the one that equals it, or else is near it.

    Eager's modules may run other kernels than the program: attention has a fast path.
    """
    if not isinstance(value, torch.Tensor):
        return None
    alike = [
        (number, other)
        for number, other in enumerate(among)
        if isinstance(other, torch.Tensor)
        and (other.dtype, other.shape) == (value.dtype, value.shape)
    ]
    equal = [number for number, other in alike if torch.equal(other, value)]
    is_float = value.is_floating_point()
    near = [n for n, other in alike if is_float and torch.allclose(other, value, 1e-4, 1e-5)]
    return next(iter(equal or near), None)


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
        result = _with(made, row.path, behind, args)
        found["right" if is_same(result, wanted) else "wrong"] += 1
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
