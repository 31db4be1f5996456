"""The contract of calls: recorded arguments and results, and the one check against them.

The program has no code for other constants, dtypes, ranks or static sizes than the recorded ones:
eager may have branched on each of them. So the arguments of a module that is called alone or by a
changed parent, and the results of a changed child, must match the record. Calls of unchanged
children by unchanged parents are not checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node, Proxy

from lowerdeck.torch_base import (
    SYMBOLS,
    expression_of,
    plain_number,
    returns_written,
    varies,
)
from lowerdeck.unflatten._torch_private import guard_function, size_conditions, size_guards
from lowerdeck.unflatten.call_signature import CallSignature
from lowerdeck.unflatten.errors import InputConstraintError, UnsupportedProgramError
from lowerdeck.unflatten.metadata import RESULT, UNREAD


class TensorRecord(NamedTuple):
    """Recorded metadata of a tensor; symbolic sizes are expressions as text."""

    dtype: torch.dtype
    sizes: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"a tensor of shape ({', '.join(map(str, self.sizes))}) of {self.dtype}"


class NumberRecord(NamedTuple):
    """A recorded symbolic number, as text."""

    expression: str

    def __str__(self) -> str:
        return f"the number {self.expression}"


class ConstantRecord(NamedTuple):
    """A recorded constant."""

    value: object

    def __str__(self) -> str:
        return f"the constant {self.value!r}"


Record = TensorRecord | NumberRecord | ConstantRecord | None
"""Metadata of one leaf; None accepts any value."""

Records = tuple[tuple[Record, ...], tuple[Record, ...], tuple[tuple[int, int], ...]]
"""Records of arguments and results, and the positions of equal tensors."""


def record_of(value: Any) -> Record:
    """Return the record of an example value or a constant."""
    if isinstance(value, torch.Tensor):
        return TensorRecord(value.dtype, tuple([_size(size) for size in value.shape]))
    if isinstance(value, SYMBOLS):
        number = _size(value)
        return NumberRecord(number) if isinstance(number, str) else ConstantRecord(number)
    if value is None or type(value) in {bool, int, float, str}:
        return ConstantRecord(value)
    return None


def _size(size: Any) -> Any:
    if type(size) is int:
        return size
    number = plain_number(size)
    return str(expression_of(number)) if isinstance(number, SYMBOLS) else number


@dataclass(slots=True, eq=False)
class RecordedCall:
    """One call of a module as the program recorded it.

    Attributes:
        inputs: Leaves of the arguments: nodes of the working graph, or constants.
        outputs: Leaves of the result.
        path: Name of the module.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any] = ()
    path: str = ""
    _records: Any = None

    def records(self) -> Records:
        """Return the records of the leaves; the root's own results accept any value."""
        self._find()
        return self._records  # type: ignore[no-any-return]

    # Compilers call this instead of tracing it.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _find(self) -> None:
        if self._records is None:
            arguments = tuple(map(_leaf_record, self.inputs))
            self._records = (arguments, self._find_results(), self._find_aliases())

    def _find_results(self) -> tuple[Record, ...]:
        return tuple(
            None
            if isinstance(leaf, Node) and (self._is_unread(leaf) or _is_only_returned(leaf))
            else _leaf_record(leaf)
            for leaf in self.outputs
        )

    def _is_unread(self, leaf: Node) -> bool:
        """Return whether nothing reads an argument as the result of this module."""
        return self.path in (leaf.meta.get("custom") or {}).get(UNREAD, ())

    def _find_aliases(self) -> tuple[tuple[int, int], ...]:
        first: dict[Any, int] = {}
        pairs: list[tuple[int, int]] = []
        for position, leaf in enumerate((*self.inputs, *self.outputs)):
            if not isinstance(leaf, Node) or not isinstance(leaf.meta.get("val"), torch.Tensor):
                continue
            if position >= len(self.inputs) and self._is_unread(leaf):
                continue
            for source in _same_tensor(leaf):
                if first.setdefault(source, position) != position:
                    pairs.append((first[source], position))
                    break
        return tuple(pairs)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordedCall, ((), (), "", self.records())


def _leaf_record(leaf: Any) -> Record:
    if isinstance(leaf, Node):
        return record_of(leaf.meta["val"]) if "val" in leaf.meta else None
    return record_of(leaf) if type(leaf) in {bool, int, float, str, type(None)} else None


def _is_only_returned(leaf: Node) -> bool:
    """Return whether the program returns a value without computing anything from it."""
    users = [user for user in leaf.users if user.op != "output" and user.target is not _ALIAS]
    aliases = [user for user in leaf.users if user.target is _ALIAS]
    return bool(leaf.users) and not users and all(map(_is_only_returned, aliases))


_ALIAS = torch.ops.aten.alias.default


def _same_tensor(leaf: Node) -> list[Node]:
    """Return ``leaf`` and the values that in-place operators returned as ``leaf``."""
    nodes = [leaf]
    if RESULT in (leaf.meta.get("custom") or ()):
        return nodes
    while nodes[-1].args and returns_written(nodes[-1].target):
        source = nodes[-1].args[0]
        if not isinstance(source, Node):
            break
        nodes.append(source)
    return nodes


class Mismatch(NamedTuple):
    """A leaf that differs from its record.

    Attributes:
        position: Position of the leaf, arguments before results.
        recorded: Description of the record.
    """

    position: int
    recorded: str
    value: Any


def check(
    calls: Sequence[RecordedCall],
    arguments: Sequence[Any],
    results: Sequence[Any] | None = None,
    *,
    any_float: bool = False,
) -> Mismatch | None:
    """Return None if the leaves of a call match a recorded call, else a mismatch.

    Args:
        calls: The recorded calls of one specialization.
        arguments: Leaves of the arguments.
        results: Leaves of the result; None before the call. Then arguments only select the
            recorded calls and bind the symbols of their sizes.
        any_float: Accept any floating-point dtype where one was recorded.
    """
    mismatch: Mismatch | None = None
    matching: list[tuple[Records, dict[str, Any]]] = []
    for call in calls:
        records = call.records()
        if len(records[0]) != len(arguments):
            continue
        sizes: dict[str, Any] = {}
        difference = compare(records[0], arguments, sizes, any_float)
        difference = difference or _compare_aliases(records[2], arguments)
        if difference is None:
            matching.append((records, sizes))
            if results is None:
                return None
        mismatch = mismatch or difference
    if results is None:
        return mismatch
    mismatch = None
    for records, sizes in matching or [(call.records(), {}) for call in calls]:
        if len(records[1]) != len(results):
            continue
        difference = compare(records[1], results, sizes, any_float, len(arguments))
        difference = difference or _compare_aliases(records[2], (*arguments, *results))
        if difference is None:
            return None
        mismatch = mismatch or difference
    return mismatch


def compare(
    records: Sequence[Record],
    values: Sequence[Any],
    sizes: dict[str, Any],
    any_float: bool,
    start: int = 0,
) -> Mismatch | None:
    """Return None if leaves match their records, else the first mismatch.

    Args:
        sizes: The value of each symbol; filled.
        any_float: Accept any floating-point dtype where one was recorded.
        start: Position of the first leaf.
    """
    for position, (record, value) in enumerate(zip(records, values, strict=True), start):
        # A symbolic trace would ignore a proxy for a constant.
        if record is None or (isinstance(value, Proxy) and not isinstance(record, ConstantRecord)):
            continue
        if isinstance(record, TensorRecord):
            is_match = (
                isinstance(value, torch.Tensor)
                and _same_dtype(record.dtype, value, any_float)
                and len(value.shape) == len(record.sizes)
                and all(
                    _same_size(size, actual, sizes)
                    for size, actual in zip(record.sizes, value.shape, strict=True)
                )
            )
        elif isinstance(record, NumberRecord):
            is_number = isinstance(value, (int, float, *SYMBOLS))
            is_match = is_number and _same_size(record.expression, value, sizes)
        else:
            is_match = _same_constant(record.value, value)
        if not is_match:
            bound = {
                size: sizes[size]
                for size in getattr(record, "sizes", ())
                if isinstance(size, str) and size in sizes
            }
            where = ", ".join(f"{name} = {size}" for name, size in bound.items())
            return Mismatch(position, f"{record}{f' with {where}' if where else ''}", value)
    return None


def _same_dtype(expected: torch.dtype, value: torch.Tensor, any_float: bool) -> bool:
    if value.dtype is expected:
        return True
    if not (expected.is_floating_point and value.is_floating_point()):
        return False
    return any_float or torch.is_autocast_enabled(value.device.type)


def _same_size(expected: int | str, size: Any, sizes: dict[str, Any]) -> bool:
    if type(expected) is str:
        expected = sizes.setdefault(expected, size)
    # Export has symbolic sizes, and a comparison would fix their values.
    return bool(type(size) is not int or type(expected) is not int or size == expected)


def _same_constant(expected: Any, value: Any) -> bool:
    # 1, 1.0 and True are equal but differ, as do 0.0 and -0.0; two NaNs are the same.
    if type(value) is not type(expected):
        return isinstance(value, SYMBOLS) and type(expected) is int
    if type(expected) is float and not expected:
        return bool(value == 0 and math.copysign(1.0, value) == math.copysign(1.0, expected))
    return bool(value == expected or (expected != expected and value != value))


def _compare_aliases(aliases: Sequence[tuple[int, int]], values: Sequence[Any]) -> Mismatch | None:
    for first, second in aliases:
        if second < len(values) and values[first] is not values[second]:
            if isinstance(values[second], Proxy) or _are_alike(values[first], values[second]):
                continue
            return Mismatch(second, "the same tensor as another one of this call", values[second])
    return None


def _are_alike(first: Any, second: Any) -> bool:
    """Return whether readers of two tensors get the same values and gradients."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or first.requires_grad is not second.requires_grad:
        return False
    try:
        if first.is_set_to(second):
            return True
        # The user reads the gradients of leaves one by one.
        is_read = first.requires_grad and first.is_leaf and torch.is_grad_enabled()
        return not is_read and first.dtype is second.dtype and torch.equal(first, second)
    except (NotImplementedError, RuntimeError):
        # Tensors of a trace or of a torch.func transform have no values.
        return False


def describe(value: Any) -> str:
    """Return the description of a value for messages."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"a tensor of shape ({sizes}) of {value.dtype}"
    return f"a {type(value).__name__}" if isinstance(value, (tuple, list, dict)) else repr(value)


def raise_for_argument(mismatch: Mismatch, labels: Sequence[str], type_name: str) -> None:
    """Raise the error for an argument that differs from the recorded one."""
    is_proxy = isinstance(mismatch.value, Proxy)
    advice = "give that value in concrete_args" if is_proxy else "pass what was recorded"
    raise InputConstraintError(
        f"argument {labels[mismatch.position]!r} of {type_name} was recorded as "
        f"{mismatch.recorded}; found {describe(mismatch.value)}. The program has no code for "
        f"this: {advice}, put an eager module in its place, or export again with it. "
        "check_input_constraints = False skips this check."
    )


def raise_for_result(found: str, recorded: str, path: str) -> None:
    """Raise the error for a result of a changed module that differs from the recorded one."""
    raise InputConstraintError(
        f"the changed module {path!r} returned {found}; expected {recorded}, as recorded. The "
        "code behind the call was recorded for that alone: return it, or export the changed "
        "model. check_input_constraints = False skips this check."
    )


# Size conditions of the whole program: the guards that program.module() runs.

_INPUT = re.compile(r"L\['flat_args'\]\[(\d+)\]")


class RootGuards:
    """Guards on the sizes of a program's inputs.

    Args:
        placeholders: Placeholder of each user input.
        ranges: Range of each symbol.
        conditions: Conditions that export recorded, as Python.
        signature: Structure of the arguments.
    """

    def __init__(
        self,
        placeholders: Sequence[Node],
        ranges: Any,
        conditions: Sequence[str],
        signature: CallSignature,
    ) -> None:
        examples = [node.meta.get("val") for node in placeholders]
        self.labels: list[str] = signature.leaf_labels(examples)
        names = signature.leaf_labels(examples, lambda name: f"[{name!r}]")
        # Names of no argument, as error messages quote them.
        unique = [f"_input_{number}_" for number in range(len(names))]
        texts = []
        for condition in conditions:
            text = _INPUT.sub(lambda match: f"L[{unique[int(match[1])]!r}]", condition)
            for name, other in sorted(zip(names, unique, strict=True), key=lambda x: -len(x[0])):
                text = text.replace(f"L{name}", f"L[{other!r}]")
                # Strict export names the arguments of *args so.
                base = re.fullmatch(r"\['(.+)_(\d+)'\](.*)", name)
                if base is not None:
                    part = f"L['{base[1]}'][{base[2]}]{base[3]}"
                    text = text.replace(part, f"L[{other!r}]")
            texts.append(text)
        self._names = unique
        self._guards = [*size_guards(placeholders, ranges, unique), *texts]
        # Read now, so that a damaged file is refused early.
        self._function: Callable[..., None] | None = guard_function(self._guards, unique)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    def check(self, leaves: Sequence[Any]) -> None:
        """Check the sizes of the flat inputs.

        Raises:
            InputConstraintError: The program was not exported for them.
        """
        if any(isinstance(leaf, Proxy) for leaf in leaves):
            return
        if self._function is None:
            self._function = guard_function(self._guards, self._names)
        try:
            self._function(*leaves)
        except AssertionError as error:
            message = str(error)
            for name, label in zip(self._names, self.labels, strict=True):
                message = message.replace(name, label)
            raise InputConstraintError(
                f"{message}. The program was exported for sizes that meet this condition: pass "
                "such sizes, or export again with these. check_input_constraints = False skips it."
            ) from None


def root_guards(
    program: ExportedProgram, placeholders: Sequence[Node], signature: CallSignature
) -> RootGuards | None:
    """Return the guards of a program, or None if its sizes are fixed.

    Raises:
        UnsupportedProgramError: Its conditions are not Python.
    """
    values = [node.meta.get("val") for node in placeholders]
    is_fixed = not any(
        varies(size)
        for value in values
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
        if not isinstance(size, (int, float, str, type(None)))
    )
    if is_fixed or any("val" not in node.meta for node in placeholders):
        return None
    try:
        return RootGuards(
            placeholders, program.range_constraints, size_conditions(program), signature
        )
    except (SyntaxError, TypeError, KeyError) as error:
        raise UnsupportedProgramError(
            f"The program's size conditions cannot be read ({error}). Export it again."
        ) from error
