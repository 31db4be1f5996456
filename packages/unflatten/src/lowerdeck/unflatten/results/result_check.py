"""What is recorded of a tensor that a call returned, and the check of what it returns now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import torch
from torch.fx import Node, Proxy

from lowerdeck.torch_base import SYMBOLS, expression_of, plain_number
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.channel import Missing
from lowerdeck.unflatten.calls.former_calls import described
from lowerdeck.unflatten.calls.recorded_leaves import may_be_of_type
from lowerdeck.unflatten.errors import InputConstraintError
from lowerdeck.unflatten.sizes.guards import SizeLimits

Given = tuple[int | None, ...]
"""The sizes of a tensor that code was given; None where one varies."""

SIZES = "sizes"
"""Meta of a node of a graph that was stored: what ``sizes_of`` returns of its value."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is recorded of a tensor.

    Attributes:
        shape: Its sizes; an expression where one varies.
        dtype: Its type.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype


def sizes_of(node: Node) -> Any:
    """Return the ``Sizes`` of a tensor, the expression of a symbol; None of anything else."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape = tuple([expression_of(plain_number(size)) for size in value.shape])
        return Sizes(shape, value.dtype)
    if isinstance(value, SYMBOLS):
        return expression_of(value)
    return node.meta.get(SIZES)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a tensor must be that a call returns.

    Attributes:
        shape: Its sizes; None where one varies.
        dtype: Its type.
        known: The dimensions that vary whose sizes are told by what is there when the call
            returns, each with the number of its text.
        limits: What its sizes must meet where one is told by nothing else; None where nothing.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    known: tuple[tuple[int, int], ...] = ()
    limits: SizeLimits | None = None

    def told(self, sizes: Sequence[Any]) -> list[Any]:
        """Return what each size must be; None where any may be.

        Args:
            sizes: What the texts say.
        """
        shape: list[Any] = [*self.shape]
        for dim, number in self.known:
            shape[dim] = sizes[number]
        return shape

    def is_shape(self, value: torch.Tensor, sizes: Sequence[Any]) -> bool:
        """Return whether a tensor has the rank and sizes."""
        return value.dim() == len(self.shape) and all(
            want is None or size == want
            for size, want in zip(value.shape, self.told(sizes), strict=True)
        )

    def is_type(self, value: torch.Tensor, moved: Mapping[torch.dtype, torch.dtype]) -> bool:
        """Return whether a tensor has the type, or one that its caller was moved to."""
        return value.dtype is self.dtype or may_be_of_type(self.dtype, value, moved)


@dataclass(frozen=True, slots=True, eq=False)
class ResultCheck:
    """Checks a tensor that one call returned.

    Attributes:
        name: The name of what is called.
        where: What is computed after the call, as a line of the model.
        expected: What it must be; where several calls run the same code, by what these were
            given, and more than one where that was alike.
        texts: The sizes that the check is given, and what the code was given, as the code has
            them.
        sizes: How many of these are sizes.
    """

    name: str
    where: str
    expected: Mapping[tuple[Given, ...], tuple[Expected, ...]]
    texts: tuple[str, ...]
    sizes: int

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes of which the sizes are computed."""
        return _names_in(self.texts)

    def check(self, module: torch.nn.Module, value: Any, *told: Any) -> None:
        """Check a result.

        Args:
            module: The caller.
            value: The result.
            told: What the ``texts`` are now.

        Raises:
            InputConstraintError: It is no tensor, or has another size, rank or type than the
                code after the call was recorded with.
        """
        body = module.__dict__[PRIVATE]
        # What is missing, whoever reads it says.
        if body.unchecked or isinstance(value, (Proxy, Missing)):
            return
        sizes = told[: self.sizes]
        expected = self._expected(told[self.sizes :])
        is_tensor = isinstance(value, torch.Tensor)
        alike = [each for each in expected if is_tensor and each.is_shape(value, sizes)]
        of_type = [each for each in alike if each.is_type(value, body.moved)]
        for each in of_type:
            if each.limits is None or each.limits.hold_for((value,)):
                return
        first = (of_type or alike or expected)[0]
        if of_type and first.limits is not None:
            recorded = first.limits.told((value,), ("its result",))
        else:
            # Not by str, which dynamo does not follow.
            shown = ["any" if size is None else f"{size}" for size in first.told(sizes)]
            shape = ", ".join(shown) + ("," if len(shown) == 1 else "")
            recorded = f"a tensor of shape ({shape}) of {first.dtype}"
        raise _error(self.name, described(value), recorded, self.where, body.type_name)

    def _expected(self, given: Sequence[torch.Tensor]) -> Sequence[Expected]:
        """Return what the result must be where the code was given these."""
        recorded = next(iter(self.expected))
        # In all calls of one code the same sizes vary, but where one of them has a size of 1.
        key = tuple(
            tuple(
                None if size is None else now for size, now in zip(shape, one.shape, strict=False)
            )
            for one, shape in zip(given, recorded, strict=True)
        )
        return self.expected.get(key) or [e for each in self.expected.values() for e in each]


@dataclass(frozen=True, slots=True, eq=False)
class NumberCheck:
    """Checks a number that one call returned, which follows from sizes.

    Attributes:
        name: The name of what is called.
        where: What is computed after the call, as a line of the model.
        texts: What it must be, as the code has it.
    """

    name: str
    where: str
    texts: tuple[str, ...]

    def names(self) -> Iterator[str]:
        """Yield the names of the nodes of which it is computed."""
        return _names_in(self.texts)

    def check(self, module: torch.nn.Module, value: Any, *expected: Any) -> None:
        """Check a result.

        Args:
            module: The caller.
            value: The result.
            expected: What it must be, one for each call that runs the same code.

        Raises:
            InputConstraintError: It is another number, or none.
        """
        body = module.__dict__[PRIVATE]
        if body.unchecked or isinstance(value, (Proxy, Missing)):
            return
        is_number = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
        if not is_number or not any(value == each for each in expected):
            raise _error(self.name, described(value), f"{expected[0]}", self.where, body.type_name)


def _names_in(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from (name for _, name, _, _ in Formatter().parse(text) if name)


def _error(
    name: str, found: str, recorded: str, where: str, caller: str | None
) -> InputConstraintError:
    of = f" of a {caller}" if caller else ""
    return InputConstraintError(
        f"{name!r}{of} was changed, and returned {found}; the program was recorded with "
        f"{recorded}, and holds what is computed of that alone, up to {where}. Return what was "
        "recorded, or make the change in the model and export that; check_input_constraints = "
        "False goes on with what was recorded."
    )
