"""Keys of calls: of several calls with one key, one is traced and the others are copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.decompose.calls.facts import TensorFacts
from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.torch_base import SYMBOLS, expression_of

_PLAIN: tuple[type, ...] = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN += (torch.memory_format,)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a distinct input among the arguments of a call."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call as a key of templates.

    Attributes:
        key: What calls that are alike have in common.
        inputs: Its distinct tensors and symbols: ``Value`` or ``Node``.
        nodes: The nodes that they are now.
        args: Its arguments, with ``Slot`` for an input.
        kwargs: Its keywords, likewise.
        facts: Of the inputs.
        differentiable: Which of them require gradients, though their facts say otherwise.
    """

    key: tuple[Any, ...]
    inputs: tuple[Any, ...]
    nodes: tuple[Node, ...]
    args: Any
    kwargs: Any
    facts: tuple[Any, ...]
    differentiable: tuple[int, ...]

    @property
    def is_static(self) -> bool:
        """Return whether no symbol is among the inputs."""
        return all(isinstance(each, TensorFacts) and each.is_static for each in self.facts)


def call_of(
    target: Any,
    args: Any,
    kwargs: Any,
    current: Callable[[Value], Node],
    facts: Callable[[Node], Any],
    state: tuple[Any, ...] = (),
) -> Call:
    """Return a call with its key.

    Args:
        target: What is called.
        args: Its arguments: trees with ``Value`` and ``Node``.
        kwargs: Its keywords.
        current: Gives the node of a value.
        facts: Gives the facts of a node.
        state: What else the call depends on.

    Raises:
        WholeProgramError: An argument can be in no key.
    """
    slots: dict[int, Slot] = {}
    inputs: list[Any] = []

    def visit(given: Any) -> tuple[Any, Any]:
        """Return what stands for an argument in the key, and in the call."""
        if isinstance(given, (Value, Node)):
            # By identity: one tensor given twice is another call than two equal ones.
            slot = slots.get(id(given))
            if slot is None:
                slot = slots[id(given)] = Slot(len(inputs))
                inputs.append(given)
            return slot, slot
        if isinstance(given, float):
            # Zeros of both signs are equal, and no two NaNs are.
            return (float, repr(given)), given
        if isinstance(given, _PLAIN):
            return (type(given), given), given
        if isinstance(given, (tuple, list)):
            pairs = [visit(each) for each in given]
            kind = tuple if isinstance(given, tuple) else list
            return (kind, *(key for key, _ in pairs)), kind(made for _, made in pairs)
        if isinstance(given, dict):
            found = {name: visit(each) for name, each in given.items()}
            parts = tuple((name, key) for name, (key, _) in found.items())
            return (dict, *parts), {name: made for name, (_, made) in found.items()}
        if isinstance(given, complex):
            return (complex, repr(given)), given
        raise WholeProgramError(f"{target} takes an argument of type {type(given).__name__}")

    args_key, args = visit(args)
    kwargs_key, kwargs = visit(dict(kwargs))
    nodes = tuple(current(each) if isinstance(each, Value) else each for each in inputs)
    known = tuple(map(facts, nodes))
    keys = tuple(map(_facts_key, known))
    differentiable = tuple(
        index
        for index, (each, said) in enumerate(zip(inputs, known, strict=True))
        if isinstance(each, Value) and each.requires_grad and not said.requires_grad
    )
    key = (target, args_key, kwargs_key, keys, differentiable, state)
    return Call(key, tuple(inputs), nodes, args, kwargs, known, differentiable)


def is_autocast(state: tuple[Any, ...]) -> bool:
    """Return whether calls in a state stand in a region of autocast that is on.

    Args:
        state: What such calls depend on besides their arguments.
    """
    return any(isinstance(each, tuple) and each[:1] == ("autocast",) and each[3] for each in state)


def result_key(value: Any) -> Any:
    """Return what a rule may ask of the result of a call, for the key of the call.

    Args:
        value: What the call gave in the original program: a tree of fake tensors and others.
    """
    if isinstance(value, torch.Tensor):
        return TensorFacts.of(value).key()
    if isinstance(value, (tuple, list)):
        return tuple(map(result_key, value))
    return type(value)


def fill(tree: Any, inputs: Any) -> Any:
    """Return arguments with inputs in their slots.

    Args:
        tree: As in ``Call``.
        inputs: By index of the slot.
    """
    if isinstance(tree, Slot):
        return inputs[tree.index]
    if isinstance(tree, (tuple, list)):
        return type(tree)(fill(each, inputs) for each in tree)
    if isinstance(tree, dict):
        return {name: fill(each, inputs) for name, each in tree.items()}
    return tree


def _facts_key(facts: Any) -> Any:
    if isinstance(facts, TensorFacts):
        return facts.key()
    if isinstance(facts, SYMBOLS):
        return (type(facts), expression_of(facts))
    raise WholeProgramError(f"a value of type {type(facts).__name__} is an argument")
