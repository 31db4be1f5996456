"""What the table of operators holds for each operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lowerdeck.xnnpack.emit.arguments import Call
from lowerdeck.xnnpack.emit.emission import Emission


def accept(call: Call) -> str | None:  # noqa: ARG001  (the signature of a question)
    """Return None: nothing speaks against the call."""
    return None


@dataclass(frozen=True, slots=True)
class Operator:
    """How one operator of torch becomes nodes of XNNPACK.

    Attributes:
        emit: Adds the nodes and defines the call's result.
        refusal: Returns why XNNPACK cannot take a call, or None where it can. That all tensors
            are float32, not empty and of at most six dimensions has been seen to before.
        computes: Whether the operator is worth a delegate by itself, which moving data is not.
    """

    emit: Callable[[Emission, Call], None]
    refusal: Callable[[Call], str | None] = accept
    computes: bool = True


Table: TypeAlias = Mapping[object, Operator]
"""Operators of torch (``torch.ops.aten...``) and how each is emitted."""
