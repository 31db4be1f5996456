"""Weights that stay float in quantised programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module.authoring.rejects import operator_name
from lowerdeck.lowered_module.program.graphs import inputs_of, nodes_of
from lowerdeck.torch_base import OpOverload, returns_view

_SMALL = 1000
"""Weights of at most this many bytes are not listed."""


@dataclass(frozen=True, slots=True)
class FloatWeight:
    """A weight that stays float in a quantised program.

    Attributes:
        name: Its name in the model.
    """

    name: str
    nbytes: int
    why: str

    def __str__(self) -> str:
        return f"stays float: {self.name}: {self.nbytes} bytes: {self.why}"


def why_not_quantized(node: Node) -> str:
    """Return the default reason why a weight stays float: its reader is not quantised."""
    return f"{operator_name(node)} is not quantised"


def list_float_weights(
    program: ExportedProgram, why_float: Callable[[Node], str | None] = why_not_quantized
) -> tuple[FloatWeight, ...]:
    """Return the float weights of more than 1 kB, the largest first, without biases.

    Args:
        why_float: Returns why the weight that a node reads stays float, or None to omit the
            weight.
    """
    weights = []
    tensors = {**program.state_dict, **program.constants}
    for node, spec in inputs_of(program):
        tensor = tensors.get(str(spec.target))
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        reader = _reader_of(node)
        if tensor.dim() < 2 or tensor.nbytes <= _SMALL or reader is None:
            continue
        why = why_float(reader)
        if why is not None:
            weights.append(FloatWeight(str(spec.target), tensor.nbytes, why))
    return _sorted(weights)


def float_weights_of_parts(programs: Iterable[ExportedProgram]) -> tuple[FloatWeight, ...]:
    """Return the float weights in the lowered programs and delegates of a quantised program.

    The result is empty if no program contains a quantising operator.

    Args:
        programs: The lowered programs and those of their delegates.
    """
    parts = list(programs)
    nodes = (node for part in parts for node in nodes_of(part.graph_module))
    if not any("quantize" in str(node.target) for node in nodes if _is_call(node)):
        return ()
    # A weight that several delegates read counts once.
    return _sorted(
        {weight.name: weight for part in parts for weight in list_float_weights(part)}.values()
    )


def _sorted(weights: Iterable[FloatWeight]) -> tuple[FloatWeight, ...]:
    return tuple(sorted(weights, key=lambda weight: (-weight.nbytes, weight.name)))


def _is_call(node: Node) -> bool:
    return node.op == "call_function"


def _reader_of(node: Node) -> Node | None:
    """Return the first call that reads a weight, through views, without quantizing it, or None."""
    for user in node.users:
        if _is_call(user) and "quantize" in str(user.target):
            continue
        moves = isinstance(user.target, OpOverload) and returns_view(user.target)
        reader = _reader_of(user) if moves and user.users else user
        if reader is not None and _is_call(reader):
            return reader
    return None
