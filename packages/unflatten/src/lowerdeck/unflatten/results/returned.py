"""What is recorded of the structure that a call returned, and the check of what it returns now.

The program has the caller's code for what was recorded: a sum over the items of a list has one
term for each, and a constant is a number in it. Another module in the place may return more
items, or another constant, and nothing would read them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch.fx import Node, Proxy

from lowerdeck.torch_base import OpOverload, pytree
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
        read: The keys on the way to each part that the code after the call reads.
        computed: Of these, those that an operator is given.
        texts: The sizes that ``check`` is given beside the result: none.
    """

    name: str
    recorded: Returned
    read: frozenset[tuple[Any, ...]]
    computed: frozenset[tuple[Any, ...]] = frozenset()
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
            InputConstraintError: It has parts that the code does not read, lacks some that it
                reads, or has them in another order, or has another constant, or no tensor where
                an operator is given one.
        """
        body = module.__dict__[PRIVATE]
        if body.unchecked:
            return
        problem = next(self._problems(self.recorded, value, ()), None)
        if problem is not None:
            of = f" of a {body.type_name}" if body.type_name else ""
            raise InputConstraintError(
                f"{self.name!r}{of} was changed, and {problem}. The code that calls it was "
                "recorded for that alone: return it, or make the change in the model and export "
                "that."
            )

    def _problems(self, part: Returned, value: Any, path: tuple[Any, ...]) -> Iterator[str]:
        where = "".join(["its result", *(f"[{key!r}]" for key in path)])
        if isinstance(value, Proxy):
            return
        if part.kind is None:
            if part.constant is not None and not part.constant.fits(value):
                yield f"{where} is {_shown(value)}; it was recorded as {part.constant}"
            elif path in self.computed and isinstance(value, _NO_OPERAND):
                yield f"{where} is {_shown(value)}; it was recorded as a tensor or a number"
        elif not part.is_taken_by_key:
            # Where the structure is another one, taking it apart says so.
            leaves = pytree.tree_leaves(value)
            if len(leaves) == len(part.parts):
                for number, leaf in enumerate(leaves):
                    yield from self._problems(part.parts[number], leaf, (*path, number))
        elif not isinstance(value, Mapping if part.kind is dict else (tuple, list)):
            yield f"{where} is {_shown(value)}; it was recorded as a {part.kind.__name__}"
        else:
            given = list(value) if isinstance(value, Mapping) else list(range(len(value)))
            lacks = {key for key in part.parts if key not in given and (*path, key) in self.read}
            # Who goes through all of a dict (``values()``) is given them in its order.
            expected = [key for key in part.parts if key in given]
            is_told = given == expected or not self._reads_all(part, path)
            is_counted = len(given) != len(part.parts) and self._counts_from_last(part, path)
            if lacks or not is_told or is_counted:
                yield f"{where} has {given}; it was recorded with {list(part.parts)}"
                return
            for key in part.parts:
                if key in given:
                    yield from self._problems(part.parts[key], value[key], (*path, key))

    def _reads_all(self, part: Returned, path: tuple[Any, ...]) -> bool:
        """Return whether the code may go through all parts; who leaves one out asks for others."""
        return all(
            each.constant is not None or (*path, key) in self.read
            for key, each in part.parts.items()
        )

    def _counts_from_last(self, part: Returned, path: tuple[Any, ...]) -> bool:
        """Return whether the code may take parts of a list by their numbers from the last one.

        ``found[-2]``, ``found[1:]`` and ``found[::2]`` are numbers from the first in the program;
        those who count from there mostly read the first ones, and not the last.
        """
        read = [(*path, key) in self.read for key in part.parts]
        return part.kind is not dict and (any(read[-1:]) or read != sorted(read, reverse=True))


def structure_check(
    name: str, node: Node, recorded: Returned, checked: Container[Node]
) -> StructureCheck:
    """Return the check of the structure that ``node`` carries.

    Args:
        name: The name of what is called.
        node: A node of the caller's graph.
        recorded: What is recorded of it.
        checked: Nodes that are looked at though nothing may read them.
    """
    read: set[tuple[Any, ...]] = set()
    computed: set[tuple[Any, ...]] = set()
    queue: list[tuple[Node, Returned, tuple[Any, ...]]] = [(node, recorded, ())]
    for source, around, path in queue:
        others = dict.fromkeys(source.users)
        if around.is_taken_by_key:
            for user in source.users:
                if user.target is getitem and user.args[1] in around.parts:
                    key: Any = user.args[1]
                    queue.append((user, around.parts[key], (*path, key)))
                    del others[user]
        if others or source in checked:
            read.update(path[:count] for count in range(1, len(path) + 1))
        if any(isinstance(user.target, OpOverload) for user in others):
            computed.add(path)
    return StructureCheck(name, recorded, frozenset(read), frozenset(computed))


def _shown(value: Any) -> str:
    if isinstance(value, (torch.Tensor, tuple, list, dict)):
        return f"a {type(value).__name__}"
    return repr(value)
