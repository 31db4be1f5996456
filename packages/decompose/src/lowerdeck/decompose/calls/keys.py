"""Keys of calls: calls with equal keys share a template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from lowerdeck.decompose.calls.facts import TensorFacts, facts_key, is_static
from lowerdeck.decompose.calls.memory import Value
from lowerdeck.decompose.errors import WholeProgramError
from lowerdeck.torch_base import FakeTensorMode

# Hashable, compared by type and value (True equals 1).
_PLAIN: tuple[type, ...] = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_PLAIN += (torch.memory_format,)


@dataclass(frozen=True, slots=True)
class Slot:
    """Reference to a distinct input in the arguments of a call."""

    index: int


class Call(NamedTuple):
    """A call with its template key.

    Attributes:
        key: Key that is equal for calls with the same decomposition; starts with the target.
        inputs: Distinct tensors and symbols: ``Value`` or ``Node``.
        nodes: Current nodes of the inputs.
        args: Arguments with ``Slot`` for inputs.
        facts: ``TensorFacts`` or symbol of each input.
        differentiable: Positions of inputs that are views of tensors that require gradients.
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
        """Return whether the inputs have no symbols."""
        return is_static(self.facts)

    def fake_inputs(self, mode: FakeTensorMode) -> list[Any]:
        """Return inputs for a trace: new fake tensors and the call's symbols."""
        return [
            facts.input_fake(mode) if isinstance(facts, TensorFacts) else facts
            for facts in self.facts
        ]


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
        target: An operator or a ``ViewInverse``.
        args: Trees with ``Value`` and ``Node``.
        current: Returns the current node of a value.
        facts: Returns the facts of a node.
        state: Additional parts of the key.

    Raises:
        WholeProgramError: An argument has an unsupported type.
    """
    slots: dict[int, Slot] = {}
    inputs: list[Any] = []

    def visit(argument: Any) -> tuple[Any, Any]:
        """Return an argument's part of the key, and the argument with slots in place of inputs."""
        if isinstance(argument, (Value, Node)):
            # By identity: one tensor twice differs from two equal tensors.
            slot = slots.get(id(argument))
            if slot is None:
                slot = slots[id(argument)] = Slot(len(inputs))
                inputs.append(argument)
            return slot, slot
        if isinstance(argument, float):
            # By repr: 0.0 equals -0.0, and NaN differs from itself.
            return (float, repr(argument)), argument
        if isinstance(argument, _PLAIN):
            return (type(argument), argument), argument
        if isinstance(argument, (tuple, list)):
            pairs = [visit(item) for item in argument]
            kind = tuple if isinstance(argument, tuple) else list
            return (kind, *(key for key, _ in pairs)), kind(value for _, value in pairs)
        if isinstance(argument, dict):
            entries = {name: visit(item) for name, item in argument.items()}
            parts = tuple((name, key) for name, (key, _) in entries.items())
            return (dict, *parts), {name: value for name, (_, value) in entries.items()}
        if isinstance(argument, complex):
            return (complex, repr(argument)), argument
        raise WholeProgramError(
            f"{target} has an argument of unsupported type {type(argument).__name__}"
        )

    args_key, args = visit(args)
    kwargs_key, kwargs = visit(dict(kwargs))
    nodes = tuple(current(item) if isinstance(item, Value) else item for item in inputs)
    facts_of_inputs = tuple(map(facts, nodes))
    keys = tuple(map(facts_key, facts_of_inputs))
    differentiable = tuple(
        index
        for index, (item, tensor_facts) in enumerate(zip(inputs, facts_of_inputs, strict=True))
        if isinstance(item, Value) and item.requires_grad and not tensor_facts.requires_grad
    )
    key = (target, args_key, kwargs_key, keys, differentiable, state)
    return Call(key, tuple(inputs), nodes, args, kwargs, facts_of_inputs, differentiable)


def is_autocast(state: tuple[Any, ...]) -> bool:
    """Return whether a state includes enabled autocast.

    Args:
        state: Keys of the contexts around a call.
    """
    return any(isinstance(part, tuple) and part[:1] == ("autocast",) and part[3] for part in state)


def fill(tree: Any, inputs: Any, convert: Callable[[Any], Any] | None = None) -> Any:
    """Return arguments with slots replaced by inputs.

    Args:
        tree: Arguments of a ``Call``, or of a ``View`` in a template.
        inputs: Inputs by slot index.
        convert: Applied to other leaves.
    """
    if isinstance(tree, Slot):
        return inputs[tree.index]
    if isinstance(tree, (tuple, list)):
        return type(tree)(fill(item, inputs, convert) for item in tree)
    if isinstance(tree, dict):
        return {name: fill(item, inputs, convert) for name, item in tree.items()}
    return tree if convert is None else convert(tree)
