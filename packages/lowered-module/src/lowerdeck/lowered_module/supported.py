"""Which operators a backend takes, as a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from lowerdeck.lowered_module._torch_private import pytree
from lowerdeck.lowered_module.rejects import operator_name


@dataclass(frozen=True, slots=True)
class SupportedOp:
    """One operator, and what a node must satisfy to be taken.

    Attributes:
        name: The operator, such as ``"aten.add.Tensor"``; ``"aten.relu"`` is
            ``"aten.relu.default"``.
        dtypes: Dtypes that its tensors, in and out, may have; None takes all.
        ranks: Numbers of dimensions that its tensors may have; None takes all.
        static: Whether all sizes must be plain numbers.
        when: Called with the node; returns True to take it, or False, or a str that says why not.
    """

    name: str
    dtypes: Collection[torch.dtype] | None = None
    ranks: Collection[int] | None = None
    static: bool = False
    when: Callable[[Node], bool | str] | None = None

    def objection(self, node: Node) -> str | None:
        """Return why ``node`` is not taken, or None if it is.

        Args:
            node: A node with this operator.
        """
        for tensor in tensors_of(node):
            if self.dtypes is not None and tensor.dtype not in self.dtypes:
                return f"dtype {tensor.dtype} is not among {_listed(self.dtypes)}"
            if self.ranks is not None and tensor.dim() not in self.ranks:
                return f"{tensor.dim()} dimensions are not among {_listed(self.ranks)}"
            if self.static and any(not isinstance(size, int) for size in tensor.shape):
                return f"size {tuple(tensor.shape)} is not static"
        if self.when is None:
            return None
        answer = self.when(node)
        if isinstance(answer, str):
            return answer
        return None if answer else "its predicate says no"


def objection_of(table: Sequence[SupportedOp], node: Node) -> str | None:
    """Return why no entry of a table takes ``node``, or None if one does.

    Args:
        table: Entries; several may have one name, then any of them may take the node.
        node: A computing node.
    """
    name = operator_name(node)
    reasons = []
    for entry in table:
        if full_name(entry.name) == name:
            reason = entry.objection(node)
            if reason is None:
                return None
            reasons.append(reason)
    return " and ".join(reasons) or f"{name} is not supported"


def full_name(name: str) -> str:
    """Return an operator's name with its overload.

    Args:
        name: With or without overload.
    """
    return f"{name}.default" if name.count(".") == 1 else name


def tensors_of(node: Node) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node reads and makes, as far as metadata tells.

    Args:
        node: Any node.
    """
    for source in (*node.all_input_nodes, node):
        for leaf in pytree.tree_leaves(source.meta.get("val")):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _listed(values: Collection[object]) -> str:
    return ", ".join(sorted(str(value) for value in values))
