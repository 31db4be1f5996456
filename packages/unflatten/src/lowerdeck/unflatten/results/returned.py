"""What is recorded of the structure that a call returned, and the check of what it returns now.

The program has the caller's code for what was recorded: a sum over the items of a list has one
term for each, and a constant is a number in it. Another module in the place may return more
items, or another constant, and nothing would read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Proxy

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.recorded_leaves import RecordedConstant
from lowerdeck.unflatten.errors import InputConstraintError

_NO_OPERAND = (type(None), str, tuple, list, dict)
RETURNS = "returns"
"""Meta of the node that carries what a call returned: a ``Returned``, if that is no tensor."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call returned when it was recorded, or a part of that.

    Attributes:
        kind: Its type; None of a leaf.
        parts: The parts of a tuple, list or dict by their keys; the leaves of another structure.
        constant: The constant that a leaf was; None of a tensor or a number.
    """

    kind: type | None = None
    parts: Mapping[Any, Returned] = field(default_factory=dict)
    constant: RecordedConstant | None = None

    @property
    def is_taken_by_key(self) -> bool:
        """Whether code takes the parts by their keys, and not all at once."""
        return self.kind in {tuple, list, dict}


def recorded_result(spec: pytree.TreeSpec, leaves: Iterator[RecordedConstant | None]) -> Returned:
    """Return what was recorded of a structure.

    Args:
        spec: The structure.
        leaves: The constant that each leaf was; None for a tensor or a number.
    """
    if spec.is_leaf():
        return Returned(constant=next(leaves))
    children = spec.children()
    if spec.type in {tuple, list, dict}:
        keys = spec.context if spec.type is dict else range(len(children))
        parts = {
            key: recorded_result(each, leaves) for key, each in zip(keys, children, strict=True)
        }
        return Returned(spec.type, parts)
    numbered = range(spec.num_leaves)
    return Returned(spec.type, {number: Returned(constant=next(leaves)) for number in numbered})


@dataclass(frozen=True, slots=True, eq=False)
class StructureCheck:
    """Checks the structure of what one call returned, and the constants in it.

    Attributes:
        name: The name of what is called.
        recorded: What it returned when it was recorded.
        texts: The sizes that ``check`` is given beside the result: none.
    """

    name: str
    recorded: Returned
    texts: tuple[str, ...] = ()

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes of which sizes are computed: none."""
        return iter(())

    def check(self, module: torch.nn.Module, value: Any) -> None:
        """Check a result.

        Args:
            module: The caller.
            value: The result.

        Raises:
            InputConstraintError: It is another structure, or has other parts, or has them in
                another order, or has another constant, or no tensor where there was one.
        """
        body = module.__dict__[PRIVATE]
        if body.unchecked:
            return
        problem = next(_problems(self.recorded, value, "its result"), None)
        if problem is not None:
            of = f" of a {body.type_name}" if body.type_name else ""
            raise InputConstraintError(
                f"{self.name!r}{of} was changed, and {problem}. The code that calls it was "
                "recorded for that alone: return it, or make the change in the model and export "
                "that; check_input_constraints = False goes on with what was recorded."
            )


def _problems(part: Returned, value: Any, where: str) -> Iterator[str]:
    if isinstance(value, Proxy):
        return
    if part.kind is None:
        if part.constant is not None and not part.constant.fits(value):
            yield f"{where} is {_shown(value)}; it was recorded as {part.constant}"
        elif part.constant is None and isinstance(value, _NO_OPERAND):
            yield f"{where} is {_shown(value)}; it was recorded as a tensor or a number"
    elif not part.is_taken_by_key:
        # Where the structure is another one, taking it apart says so.
        leaves = pytree.tree_leaves(value)
        if len(leaves) == len(part.parts):
            for number, leaf in enumerate(leaves):
                yield from _problems(part.parts[number], leaf, f"{where}[{number!r}]")
    elif value.__class__ is not part.kind:
        yield f"{where} is {_shown(value)}; it was recorded as a {part.kind.__name__}"
    else:
        items: Any = value
        given = list(items) if part.kind is dict else list(range(len(items)))
        # Who goes through all of a dict (``values()``) is given them in its order.
        if given != list(part.parts):
            yield f"{where} has {given}; it was recorded with {list(part.parts)}"
            return
        for key, each in part.parts.items():
            yield from _problems(each, items[key], f"{where}[{key!r}]")


def _shown(value: Any) -> str:
    if isinstance(value, (torch.Tensor, tuple, list, dict)):
        return f"a {type(value).__name__}"
    return repr(value)
