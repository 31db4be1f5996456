"""Values that pass between preserved calls though they are no arguments and no results.

Eager's modules compute or remember such values themselves, so a module that was put in the place
of a generated one must not see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node, Proxy

from lowerdeck.torch_base import graphs_of, storage_identity
from lowerdeck.unflatten._torch_private import has_hooks
from lowerdeck.unflatten.errors import UnflattenError

NOT_RECORDED = "lowerdeck_not_recorded"
"""Where ``custom`` of a node's meta has the modules whose signatures export could not record."""

ALL_ASKED = "lowerdeck_all_asked"
"""Where ``custom`` of a node's meta says that the signature of each module was asked for, so that
one without was not called, under the name that no module has: "*"."""

MODULE_NUMBERS = "lowerdeck_module_numbers"
"""Where ``custom`` of a node's meta has a number for each name of modules that hold the same
state: two names have one number where they are one module."""

ARGUMENT_READ = "lowerdeck_argument_read"
"""Where ``custom`` of the meta of what its module then returns, and which is its argument, says
whether that argument is read or written afterwards too, or only what shares its memory."""

RETURNED = "lowerdeck_returned"
"""Where ``custom`` of the meta of what a module returned, and which is its argument, says that
readers of the argument were told from those of the result, so that ``ARGUMENT_READ`` is known."""

ITSELF = "lowerdeck_itself"
"""Where ``custom`` of an alias says that it is the tensor itself, which a module was given and
returned. While export runs it has the names of that module."""

TWICE = "lowerdeck_twice"
"""Where ``custom`` of such an alias has the names of the module that was given or returned its
tensor before, in the same call."""

UNREAD_TWICE = "lowerdeck_unread_twice"
"""Where ``custom`` of a node's meta has the modules that are given or return it more than once, of
which only the first is read."""

UNREAD_RESULT = "lowerdeck_unread_result"
"""Where ``custom`` of a node's meta has the modules that are given it and return it, of which
nobody reads what they return."""

IN_BRANCHES = "is called in a branch or a loop"
"""Why: the graph of a branch or a loop reads its state by itself, and has no call of it."""

MAY_BE_IN_BRANCHES = (
    "may be called in a branch or a loop, whose graph has no calls of modules: another module or "
    "a hook would have no effect there. A program of export_preserving tells what is called there."
)
LOST_CHANGES = "hands on a list, dict or object that is changed by another name afterwards"
"""Why: export records each call with copies of the containers that it is given and returns."""

CARRIED = "_lowerdeck_carried"
"""Keyword by which a graph's call has the values that are no arguments: code hands them over
beside the call, so that no module is ever given it."""

PRIVATE = "_lowerdeck"
"""The one attribute that generated modules have beside those of ``torch.nn.Module``."""

CARRIES = "carries"
"""Meta of a call that returns a pair: its result, and values read elsewhere that are no result."""

NEEDS = "needs"
"""Meta of a call: how many of the values that are no arguments only a generated module gets."""


class Generated:
    """What generated modules are instances of, and no others."""


LOST_SIGNATURE = (
    "takes and returns flat values here: decomposing lost what eager's takes and returns. "
    "Unflatten the program before run_decompositions(), and replace the module there."
)
LOST_CALL = (
    "is called nowhere in this program: decomposing gave what it computes to its caller. "
    "Unflatten the program before run_decompositions(), and replace the module there."
)
COMPUTES_NOTHING = (
    "returns what it is given or holds, so that this program has no call of it: another module in "
    "its place would have no effect. Export the model with that module in it."
)
NO_TENSOR = (
    "returns no tensor, and this program has no call of it: another module in its place would "
    "have no effect. Export the model with that module in it, and unflatten that program before "
    "run_decompositions()."
)
SOMETIMES_NOTHING = (
    "returns in some of its calls what it is given, so that this program has not all of them: "
    "another module in its place would have no effect there. Export the model with that module "
    "in it."
)
CANNOT_RECORD = (
    "which export cannot record. Put the other module, or what is to be around this one, into the "
    "model, and export it anew"
)
NO_CALL = "has no call in this program, in which another module or a hook would have no effect"
CALLED_ELSEWHERE = (
    "is called by a module that does not hold it, or by itself, which computes that call here: "
    "another module or a hook would have no effect in it. Export the model with that module in it."
)
LOST_PART = (
    "may compute or write something without gradients, or under autocast, that decomposing gave "
    "to its caller. Unflatten the program before run_decompositions(), and change or replace the "
    "module there."
)
LOST_MEMORY = (
    "returns what shares memory with something that is written, and decomposing made new values "
    "of that, so that the program does not tell which of them its caller reads. Unflatten the "
    "program before run_decompositions(), and change or replace the module there."
)
RETURNS_OTHERS = (
    "returns what another module computes or holds, without being given it, so that no call of "
    "it alone is in the program. Give it that as an argument, or export the model with the other "
    "module in it."
)
SEVERAL_NAMES = (
    "has several names, and another module reads or writes what it holds by one that the program "
    "does not tell. Put the other module there by all of its names."
)
SHARED_STATE = (
    "holds what another module holds too, and the code around them reads or writes it by a name "
    "that the program does not tell. Put a module there that holds the same tensor, or export the "
    "model with the other module in it."
)
UNKNOWN_CALL = (
    "is called nowhere in this program, or computes nothing: another module in its place has no "
    "effect; export_preserving tells which"
)
UNCALLED = (
    *(IN_BRANCHES, LOST_CALL, COMPUTES_NOTHING, SOMETIMES_NOTHING, CALLED_ELSEWHERE),
    *(MAY_BE_IN_BRANCHES, LOST_PART, LOST_MEMORY, NO_CALL, RETURNS_OTHERS),
)
"""How the reasons begin for which a call, or a part of one, is missing: no hook would see it."""
IN_PARTS = (
    "is computed in several parts, between which other modules compute what it reads: no call "
    "of it alone is in the program"
)
UNSURE_MODE = (
    "runs under autocast, and the program does not tell whether it or its caller switches that "
    "on: another module might run in another precision. Export the model without switching "
    "gradients in this module, or replace the module around it."
)


def notes_of(program: ExportedProgram, key: str) -> dict[str, Any]:
    """Return what ``export_preserving`` noted of modules, by their names.

    Args:
        program: The program.
        key: The name of the note.
    """
    found: dict[str, Any] = {}
    for held in graphs_of(program.graph_module):
        for node in held.graph.nodes:
            if custom := node.meta.get("custom"):
                found.update(custom.get(key, {}))
    return found


def is_itself(node: Node) -> bool:
    """Return whether ``node`` is an alias that stands for a tensor itself."""
    is_alias = node.target is torch.ops.aten.alias.default
    return is_alias and ITSELF in (node.meta.get("custom") or ())


def is_unread_twice(node: Node, path: str) -> bool:
    """Return whether a module that is given or returns a tensor twice has readers of one only."""
    return path in (node.meta.get("custom") or {}).get(UNREAD_TWICE, ())


def is_unread_result(node: Node, path: str) -> bool:
    """Return whether a module that returns its argument has readers of the argument alone."""
    return path in (node.meta.get("custom") or {}).get(UNREAD_RESULT, ())


def is_read_as_argument(node: Node) -> bool:
    """Return whether an argument that a module returned as ``node`` is read afterwards too."""
    return bool((node.meta.get("custom") or {}).get(ARGUMENT_READ))


def is_told_from_argument(node: Node) -> bool:
    """Return whether the program tells if an argument that was returned is read afterwards."""
    return RETURNED in (node.meta.get("custom") or ())


def has_read_memory(node: Node) -> bool:
    """Return whether anything of the memory of such an argument is read afterwards."""
    return ARGUMENT_READ in (node.meta.get("custom") or ())


def must_be_generated(module: Any, name: str, why: str) -> None:
    """Check that a module was not replaced in whose place no other one would be right.

    Args:
        module: What is there.
        name: The name of what was there.
        why: What is not known of that.

    Raises:
        UnflattenError: It was, or a hook waits for a call that is missing.
    """
    if not _is_generated(module):
        raise UnflattenError(f"A {type(module).__name__} stands for {name!r}, which {why}")
    if has_hooks(module) and why.startswith(UNCALLED):
        raise UnflattenError(f"A hook waits at {name!r}, which {why}")


def must_hold_generated(module: Any, name: str, why: str) -> None:
    """Check that a module that takes flat values was not replaced, but wrapped at most.

    Args:
        module: What is there.
        name: The name of what was there.
        why: What is not known of that.

    Raises:
        UnflattenError: It was.
    """
    if not _is_generated(module) and not any(map(_is_generated, module.modules())):
        must_be_generated(module, name, why)


def must_compute_nothing(module: Any, name: str, why: str) -> None:
    """Check that a module of which no call is left was not replaced by one that computes.

    Args:
        module: What is there.
        name: The name of what was there.
        why: Why no call is left.

    Raises:
        UnflattenError: It was, or a hook waits for a call.
    """
    if not isinstance(module, torch.nn.Identity) or why != COMPUTES_NOTHING:
        must_be_generated(module, name, why)
    if has_hooks(module):
        raise UnflattenError(f"A hook waits at {name!r}, which {why}")


def must_be_one(held: Sequence[Any], names: Sequence[str]) -> None:
    """Check that state of several names is one by each, whatever was put where it is held.

    Args:
        held: What is there by each name.
        names: The names, as the caller knows them.

    Raises:
        UnflattenError: It was replaced by some of its names only.
    """
    first = held[0]
    # A symbolic trace makes a new proxy for each read.
    if all(value is first or isinstance(value, Proxy) for value in held):
        return
    if not torch.compiler.is_dynamo_compiling() and all(
        isinstance(value, torch.Tensor) and _show_the_same(value, first) for value in held
    ):
        return
    raise UnflattenError(
        f"{', '.join(map(repr, names))} are no longer one, and the program does not tell by which "
        "of these names the model's code reads or writes what was one when it was recorded. Put "
        "the same there by all of them, or export the model with the other module in it."
    )


def must_be_twins(one: object, other: object, name: str, wheres: Sequence[str]) -> None:
    """Check that a module returned one tensor twice, where it did so when it was recorded.

    The program has one value for both, and does not tell which of them is read afterwards.

    Args:
        one: What it returned.
        other: What it returned in the other place.
        name: The module's name in its caller.
        wheres: Which of its results these are.

    Raises:
        UnflattenError: They are two.
    """
    if one is other or isinstance(one, Proxy) or are_one(one, other):
        return
    places = " and as ".join(wheres)
    raise UnflattenError(
        f"{name!r} returned two tensors as {places}, which were one when it was recorded, so that "
        "the program does not tell which of the two is read afterwards. Return one tensor in both "
        "places, or export the model with export_preserving, or with a module that returns a copy."
    )


def are_one(one: object, other: object) -> bool:
    """Return whether whatever reads one of two tensors gets what it would get from the other.

    What is put around a module may change both alike, to two tensors of equal values. Where
    gradients flow these would be two ways for them, of which the program has one.
    """
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or one.requires_grad is not other.requires_grad:
        return False
    try:
        if _show_the_same(one, other):
            return True
        is_read_once = not (one.requires_grad and torch.is_grad_enabled())
        return is_read_once and one.dtype is other.dtype and torch.equal(one, other)
    except (NotImplementedError, RuntimeError):
        return False  # what has no values: of a trace, or of torch.func


def must_hand_through(result: object, argument: object, name: str, where: str) -> None:
    """Check that a module returned what it was given, where it did so when it was recorded.

    The program has one value for both, and does not tell which of them is read afterwards.

    Args:
        result: What it returned.
        argument: What it was given, or holds.
        name: The module's name in its caller.
        where: Which of its results it is.

    Raises:
        UnflattenError: They are two.
    """
    if result is argument or isinstance(result, Proxy):
        return
    if isinstance(result, torch.Tensor) and isinstance(argument, torch.Tensor):
        # A wrapper may make a new object of the same memory, as recomputation does.
        if not torch.compiler.is_dynamo_compiling() and _show_the_same(result, argument):
            return
    elif type(result) is type(argument) and result == argument:
        return
    raise UnflattenError(
        f"{name!r} returned as {where} something else than the argument, or what it holds, that "
        "it returned when it was recorded, so that the program does not tell which of the two is "
        "read afterwards. Return that argument or state, or export the model with "
        "export_preserving, if that was not done, or with a module that computes it."
    )


def must_be_apart(result: object, argument: object, name: str) -> None:
    """Check that a module returned no memory of an argument, where one is written afterwards.

    A decomposed program makes a new value of that write, which the other one would not show.

    Args:
        result: What it returned.
        argument: What it was given.
        name: The module's name in its caller.

    Raises:
        UnflattenError: It did.
    """
    if isinstance(result, Proxy) or not isinstance(result, torch.Tensor):
        return
    is_one = result is argument
    if not torch.compiler.is_dynamo_compiling() and isinstance(argument, torch.Tensor):
        storage = storage_identity(result)
        is_one |= storage is not None and storage == storage_identity(argument)
    if is_one:
        raise UnflattenError(
            f"{name!r} returned what shares memory with an argument, which it did not when it was "
            "recorded, and one of the two is written afterwards: decomposing made a new value of "
            "that write, and the other one would not show it. Return a copy, or unflatten the "
            "program before run_decompositions()."
        )


def _show_the_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    storage = storage_identity(one)
    if storage is None:
        try:
            return one.is_set_to(other)  # what torch.func wraps has no storage of its own
        except (NotImplementedError, RuntimeError):
            return False  # told as another one
    return (
        storage == storage_identity(other)
        and one.dtype is other.dtype
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def reads_of_others(count: int) -> str:
    """Return what a module does that is given values beside its arguments."""
    if count == 1:
        return "reads 1 value that other modules compute and that is no argument"
    return f"reads {count} values that other modules compute and that are no arguments"


def read_by_others(count: int) -> str:
    """Return what a module does of which others read values that are no results."""
    if count == 1:
        return "computes 1 value that other modules read without being given it"
    return f"computes {count} values that other modules read without being given them"


def _is_generated(module: object) -> bool:
    # A further form of a call is a method of the module that it belongs to.
    return isinstance(getattr(module, "__self__", module), Generated)
