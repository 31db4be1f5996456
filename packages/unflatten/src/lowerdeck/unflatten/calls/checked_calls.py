"""Refuse a call of a module with anything else than what its calls were recorded with.

What a module computes for another constant, or for another size than a fixed one, is not in the
program: eager may have looked at either. Each function compares what it is given with what one
call was given, in a line that costs less than the smallest operator; where these differ, ``check``
asks all recorded calls. What is compared is no text of the function, so that modules that compute
the same for other sizes share its code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Proxy

from lowerdeck.unflatten.calls.carrying import PRIVATE, are_one
from lowerdeck.unflatten.calls.former_calls import described
from lowerdeck.unflatten.calls.recorded_calls import (
    RecordedCall,
    exceeds,
    fits,
    lacks_twin,
    path_of_leaf,
)
from lowerdeck.unflatten.calls.recorded_leaves import (
    Recorded,
    RecordedConstant,
    RecordedTensor,
    may_be_of_type,
)
from lowerdeck.unflatten.calls.signature import CallSignature
from lowerdeck.unflatten.errors import InputConstraintError
from lowerdeck.unflatten.sizes.guards import NOT_SURE, Place

Pattern = tuple[tuple[tuple[bool, ...], tuple[Place, ...]] | int | str | None, ...]
"""What is compared of each leaf: the fixed sizes of a tensor, and which are held to limits; the
number of the leaf that must be the same tensor; a constant; or nothing."""

_CONSTANT = "constant"
_REMEMBERED = 1000

_TWINS = (
    "were one tensor when the program was recorded; found two. The program reads one of them for "
    "both: pass one tensor for both, put an eager module in its place, or export again with "
    "export_preserving, or where that does not tell them apart, with a clone() of one in the "
    "code that calls it."
)


def pattern_of(calls: Sequence[RecordedCall]) -> Pattern:
    """Return what functions compare of the leaves of the first of these calls."""
    if not calls:
        return ()
    return tuple(
        _pattern_of_tensor(leaf)
        if isinstance(leaf, RecordedTensor)
        else _CONSTANT
        if isinstance(leaf, RecordedConstant)
        else None
        for leaf in calls[0]
    )


def _pattern_of_tensor(leaf: RecordedTensor) -> tuple[tuple[bool, ...], tuple[Place, ...]] | int:
    if leaf.twin is not None:
        return leaf.twin
    fixed = tuple([size is not None for size in leaf.shape])
    return fixed, leaf.limits.places if leaf.limits is not None else ()


def check_lines(pattern: Pattern, leaves: Sequence[str], prefix: str) -> Iterator[str]:
    """Yield the lines that check a call.

    Args:
        pattern: What is compared.
        leaves: The variable of each leaf.
        prefix: What the global names begin with; no variable does.
    """
    terms: list[str] = []
    limits: list[str] = []
    for index, (kind, leaf) in enumerate(zip(pattern, leaves, strict=True)):
        if kind == _CONSTANT:
            terms.append(f"{leaf}.__class__ is not {prefix}_type_{index}")
            terms.append(f"{leaf} != {prefix}_value_{index}")
        elif isinstance(kind, int):
            terms.append(f"{leaf} is not {leaves[kind]}")
        elif isinstance(kind, tuple):
            fixed, places = kind
            shape = f"{prefix}_shape_{index}"
            terms.append(f"{leaf}.__class__ is not {prefix}_tensor")
            if all(fixed):
                terms.append(f"{leaf}.shape != {shape}")
            else:
                terms.append(f"{leaf}.dim() != {len(fixed)}")
                terms += (
                    f"{leaf}.shape[{dim}] != {shape}[{dim}]"
                    for dim, is_fixed in enumerate(fixed)
                    if is_fixed
                )
            terms.append(f"{leaf}.dtype is not {prefix}_dtype_{index}")
            if places:
                sizes = (
                    leaves[at] if dim is None else f"{leaves[at]}.shape[{dim}]"
                    for at, dim in places
                )
                limits.append(f"not {prefix}_hold_{index}({', '.join(sizes)})")
    if terms:
        # Last what asks for sizes, of what was found to be tensors of these ranks.
        yield f"if {' or '.join((*terms, *limits))}:"
        yield f"    {prefix}_check({', '.join(['self', *leaves])})"


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What the calls of one function may be given.

    Attributes:
        calls: What its calls were recorded with.
        signature: How leaves are named; None where they are no more than numbered.
        known: Leaves that were found to be right.
        twins: Which leaves must be one tensor in some of the calls; None until it is asked.
        exact: What ``_key`` says of the calls that have one; None until it is asked.
    """

    calls: tuple[RecordedCall, ...]
    signature: CallSignature | None
    known: set[object] = field(default_factory=set, repr=False)
    twins: Sequence[tuple[int, int]] | None = field(default=None, init=False, repr=False)
    exact: Collection[object] | None = field(default=None, init=False, repr=False)

    def names(self, prefix: str) -> dict[str, object]:
        """Return the objects that the lines of ``check_lines`` name."""
        found: dict[str, object] = {
            f"{prefix}_check": self.check,
            f"{prefix}_tensor": torch.Tensor,
        }
        for index, leaf in enumerate(self.calls[0] if self.calls else ()):
            if isinstance(leaf, RecordedTensor):
                found[f"{prefix}_shape_{index}"] = leaf.shape
                found[f"{prefix}_dtype_{index}"] = leaf.dtype
                if leaf.limits is not None:
                    found[f"{prefix}_hold_{index}"] = leaf.limits.hold
            elif isinstance(leaf, RecordedConstant):
                found[f"{prefix}_type_{index}"] = leaf.kind
                # 0.0 equals -0.0, from which a division tells it: nothing equals NaN.
                is_zero = leaf.kind is float and leaf.value == 0
                found[f"{prefix}_value_{index}"] = float("nan") if is_zero else leaf.value
        return found

    def check(self, module: torch.nn.Module, *leaves: Any) -> None:
        """Check the leaves of one call of ``module``.

        Raises:
            InputConstraintError: No call was recorded with such ones.
        """
        key: object = None
        if not torch.compiler.is_compiling() and (told := _key(leaves)) is not None:
            if not (twins := self._twins()):
                key = told
                if told[: len(self.calls[0])] in self._exact():
                    return
            else:
                key = (told, tuple(are_one(leaves[index], leaves[twin]) for index, twin in twins))
        if key is not None and key in self.known:
            return
        body = module.__dict__[PRIVATE]
        if body.unchecked:
            return
        given = leaves[: len(self.calls[0])]
        fitting = [call for call in self.calls if fits(call, given)]
        if any(_same_types(call, given) for call in fitting):
            if key is not None and len(self.known) < _REMEMBERED:
                self.known.add(key)
            return
        if any(_allowed_types(call, given, body.moved) for call in fitting):
            return
        raise InputConstraintError(self._told(given, fitting, body.type_name))

    def _twins(self) -> Sequence[tuple[int, int]]:
        """Return which leaves must be one tensor in some of the calls."""
        found = self.twins
        if found is None:
            pairs = (
                (index, leaf.twin)
                for call in self.calls
                for index, leaf in enumerate(call)
                if isinstance(leaf, RecordedTensor) and leaf.twin is not None
            )
            # There may be thousands of calls, and this is asked in each of them.
            found = list(dict.fromkeys(pairs))
            object.__setattr__(self, "twins", found)
        return found

    def _exact(self) -> Collection[object]:
        """Return what tells the leaves of each call that was recorded with fixed sizes alone.

        To ask all calls one by one would take their square, for each of them asks.
        """
        found = self.exact
        if found is None:
            found = {
                tuple(
                    (leaf.shape, leaf.dtype)
                    if isinstance(leaf, RecordedTensor)
                    else _constant_key(leaf.value)
                    for leaf in call
                    if leaf is not None
                )
                for call in self.calls
                if not any(
                    leaf is None or (isinstance(leaf, RecordedTensor) and None in leaf.shape)
                    for leaf in call
                )
            }
            object.__setattr__(self, "exact", found)
        return found

    def _told(
        self, given: Sequence[Any], fitting: Sequence[RecordedCall], type_name: str | None
    ) -> str:
        """Return what is wrong with the leaf that is wrong in the call that is most like this."""
        most_like: list[tuple[int, Recorded]] = []
        for call in fitting or self.calls:
            wrong = [
                (index, want)
                for index, (want, leaf) in enumerate(zip(call, given, strict=True))
                if (want is not None and not want.fits(leaf))
                or lacks_twin(want, leaf, given)
                or (fitting and _is_other_type(want, leaf))
            ]
            if not wrong:
                return self._exceeded(call, given, type_name)
            if not most_like or len(wrong) < len(most_like):
                most_like = wrong
        index, want = most_like[0]
        others = len(self.calls) - 1
        recorded = f"{want}" if not isinstance(want, RecordedTensor) else f"{want} of {want.dtype}"
        more = f" (and other ones in {others} more calls)" if others else ""
        of = f" of a {type_name}" if type_name else ""
        if isinstance(want, RecordedTensor) and lacks_twin(want, given[index], given):
            one, other = self._path(want.twin or 0), self._path(index)
            return f"Arguments {one!r} and {other!r}{of} {_TWINS}"
        return (
            f"Argument {self._path(index)!r}{of} was recorded as {recorded}{more}; found "
            f"{described(given[index])}. The program holds what the module computes for what was "
            f"recorded alone: {_advice(want, given[index])}."
        )

    def _exceeded(self, call: RecordedCall, given: Sequence[Any], type_name: str | None) -> str:
        """Return what is wrong with sizes that vary."""
        limits = next(
            leaf.limits
            for leaf in call
            if isinstance(leaf, RecordedTensor) and leaf.limits and exceeds(leaf, given)
        )
        names = [self._path(index) for index in range(len(call))]
        of = f" of a {type_name}" if type_name else ""
        return (
            f"The arguments{of} were recorded with {limits.told(given, names)}. The program holds "
            f"what the module computes for such sizes alone: pass other ones, put an eager module "
            f"in its place, or export again with these. {NOT_SURE}"
        )

    def _path(self, index: int) -> str:
        return path_of_leaf(self.signature, self.calls[0], index)


def _key(leaves: Sequence[Any]) -> tuple[object, ...] | None:
    """Return what tells these leaves; None where nothing cheap does."""
    try:
        key = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else _constant_key(leaf)
            for leaf in leaves
        )
        hash(key)
    except (TypeError, RuntimeError):
        # A list, or a size that varies.
        return None
    return key


def _constant_key(value: object) -> object:
    # As text: -0.0 equals 0.0.
    return (value.__class__, value, repr(value) if isinstance(value, float) else None)


def _is_other_type(want: object, leaf: Any) -> bool:
    return (
        isinstance(want, RecordedTensor)
        and not isinstance(leaf, Proxy)
        and leaf.dtype is not want.dtype
    )


def _same_types(call: RecordedCall, given: Sequence[Any]) -> bool:
    return not any(_is_other_type(want, leaf) for want, leaf in zip(call, given, strict=True))


def _allowed_types(
    call: RecordedCall, given: Sequence[Any], moved: Mapping[torch.dtype, torch.dtype]
) -> bool:
    """Return whether tensors of other types come of a module that was moved, or of autocast."""
    return all(
        may_be_of_type(want.dtype, leaf, moved)
        for want, leaf in zip(call, given, strict=True)
        if isinstance(want, RecordedTensor) and _is_other_type(want, leaf)
    )


def _advice(want: object, value: Any) -> str:
    if isinstance(value, Proxy):
        return "give that value in concrete_args"
    if isinstance(want, RecordedTensor) and isinstance(value, torch.Tensor):
        if want.fits(value):
            return (
                "convert the tensor, move the module to that type, put an eager module in its "
                "place, or export again"
            )
        return "export again with sizes that vary, or put an eager module in its place"
    return "pass what was recorded, put an eager module in its place, or export again with this"
