"""What a call of an operator must satisfy for a backend to take it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.lowered_module.errors import LoweringError
from lowerdeck.torch_base import OpOverload, pytree, schema_of


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the calls that one visitor takes have in common; see ``visits`` for the attributes."""

    visitor: Callable[..., Any]
    dtypes: Collection[torch.dtype] | None
    ranks: Collection[int] | None
    static: bool
    when: Callable[[Node], bool | str] | None

    def __post_init__(self) -> None:
        """Refuse dtypes that would never match a tensor."""
        dtypes: object = self.dtypes
        if dtypes is not None and not (
            isinstance(dtypes, Collection) and all(isinstance(one, torch.dtype) for one in dtypes)
        ):
            raise LoweringError(
                f"{self.visitor.__name__}: found dtypes {dtypes!r}, expected a set such as "
                "{torch.float32}"
            )

    def objection(self, node: Node) -> str | None:
        """Return why ``node`` is not taken, or None if it is.

        Args:
            node: A call of the visitor's operator.
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


def find_operator(name: object) -> OpOverload | None:
    """Return the operator of torch with that name, or None if it may be one of another library.

    Operators of torch must exist; those of other libraries may be registered later. What has no
    dot is a function, such as the higher-order operator ``cond``.

    Args:
        name: What an author wrote, with or without overload.

    Raises:
        LoweringError: With what may have been meant.
    """
    if not isinstance(name, str):
        raise LoweringError(
            f"found {name!r} as an operator, expected its name, such as 'aten.add.Tensor'"
        )
    namespace, dot, rest = name.partition(".")
    if not dot:
        if hasattr(torch.ops.aten, name) and not hasattr(operator, name):
            raise LoweringError(f"found {name!r} as an operator, expected 'aten.{name}'")
        return None
    short, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    if packet is None:
        if namespace == "aten":
            raise LoweringError(f"torch has no operator {name!r}")
        return None
    # aten::add without an overload, and its like, are for plain numbers.
    every = {one: getattr(packet, one) for one in packet.overloads()}
    known = {one: found for one, found in every.items() if "Tensor" in str(schema_of(found))}
    if (overload or "default") not in known:
        names = ", ".join(f"{namespace}.{short}.{one}" for one in known)
        raise LoweringError(f"torch has no operator {full_name(name)!r}; it has {names}")
    found: OpOverload = known[overload or "default"]
    return found


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
