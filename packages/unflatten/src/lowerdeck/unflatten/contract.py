"""Check call arguments and results against the recorded ones.

A program is specialized to its recorded constants, dtypes, ranks and static sizes, because eager
may branch on each. Arguments of a module that is called alone or by a changed parent, and results
of a changed child, must match the record. Calls between unchanged modules are not checked.
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
    assume_constant_result,
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
        return f"a {self.dtype} tensor of shape ({', '.join(map(str, self.sizes))})"


class NumberRecord(NamedTuple):
    """Recorded symbolic number, as text."""

    expression: str

    def __str__(self) -> str:
        return f"the number {self.expression}"


class ConstantRecord(NamedTuple):
    """Recorded constant."""

    value: object

    def __str__(self) -> str:
        return f"the constant {self.value!r}"


Record = TensorRecord | NumberRecord | ConstantRecord | None
"""Recorded metadata of one leaf; None accepts any value."""

Records = tuple[tuple[Record, ...], tuple[Record, ...], tuple[tuple[int, int], ...]]
"""Records of arguments and results, and positions of identical tensors."""


def record_of(value: Any) -> Record:
    """Return the record of an example value or constant."""
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
    """One recorded call of a module.

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
        """Return the records of the leaves; None for results that are unread or only returned."""
        self._find()
        return self._records  # type: ignore[no-any-return]

    # Called, not traced, by compilers.
    @assume_constant_result
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
        """Return whether an argument that this module also returns is unused as a result."""
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
    """Return whether a value's only users are outputs."""
    users = [user for user in leaf.users if user.op != "output" and user.target is not _ALIAS]
    aliases = [user for user in leaf.users if user.target is _ALIAS]
    return bool(leaf.users) and not users and all(map(_is_only_returned, aliases))


_ALIAS = torch.ops.aten.alias.default


def _same_tensor(leaf: Node) -> list[Node]:
    """Return ``leaf`` and the arguments of in-place operators that it aliases."""
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
    """Leaf that differs from its record.

    Attributes:
        position: Position of the leaf, arguments before results.
        recorded: Description of the record.
        value: The actual leaf.
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
    """Return None if a call matches a recorded call, else a mismatch.

    Args:
        calls: Recorded calls of one specialization.
        results: Leaves of the result; None before the call. If given, arguments only select
            recorded calls and bind size symbols.
        any_float: Accept any floating-point dtype for a recorded one.
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
        sizes: Value of each symbol; filled in.
        any_float: Accept any floating-point dtype for a recorded one.
        start: Position of the first leaf in a reported mismatch.
    """
    for position, (record, value) in enumerate(zip(records, values, strict=True), start):
        # A symbolic trace would drop a proxy passed for a constant.
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
    # In an export, comparing symbolic sizes would specialize them.
    return bool(type(size) is not int or type(expected) is not int or size == expected)


def _same_constant(expected: Any, value: Any) -> bool:
    # Compare type and sign: 1 == 1.0 == True and 0.0 == -0.0; NaN matches NaN.
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
    """Return whether two tensors are interchangeable in values and gradients."""
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or first.requires_grad is not second.requires_grad:
        return False
    try:
        if first.is_set_to(second):
            return True
        # Gradients of distinct autograd leaves are distinct.
        is_read = first.requires_grad and first.is_leaf and torch.is_grad_enabled()
        return not is_read and first.dtype is second.dtype and torch.equal(first, second)
    except (NotImplementedError, RuntimeError):
        # Traced and torch.func tensors have no values to compare.
        return False


def describe(value: Any) -> str:
    """Return a description of a value for messages."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"a {value.dtype} tensor of shape ({sizes})"
    return f"a {type(value).__name__}" if isinstance(value, (tuple, list, dict)) else repr(value)


def raise_for_argument(mismatch: Mismatch, labels: Sequence[str], type_name: str) -> None:
    """Raise the error for an argument that differs from its record.

    Args:
        labels: Name of each argument leaf.
        type_name: Qualified name of the eager module's type.
    """
    is_proxy = isinstance(mismatch.value, Proxy)
    advice = "pass that value in concrete_args" if is_proxy else "pass what was recorded"
    raise InputConstraintError(
        f"argument {labels[mismatch.position]!r} of {type_name} was recorded as "
        f"{mismatch.recorded}; found {describe(mismatch.value)}. The program has no "
        f"code for this: {advice}, replace the module by an eager one, or export again with this "
        "argument. check_input_constraints = False skips this check."
    )


def raise_for_result(found: str, recorded: str, path: str) -> None:
    """Raise the error for a result of a changed module that differs from its record."""
    raise InputConstraintError(
        f"the changed module {path!r} returned {found}; expected {recorded}, as recorded. Code "
        "after the call is specialized to that: return it, or export the changed model. "
        "check_input_constraints = False skips this check."
    )


# Size guards of the whole program, as checked by program.module().

_INPUT = re.compile(r"L\['flat_args'\]\[(\d+)\]")


class RootGuards:
    """Size guards on a program's inputs.

    Args:
        placeholders: Placeholder of each user input.
        conditions: Guards that export recorded, as Python expressions.
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
        # Names that no argument has: error messages get labels in their place.
        unique = [f"_input_{number}_" for number in range(len(names))]
        texts = []
        for condition in conditions:
            text = _INPUT.sub(lambda match: f"L[{unique[int(match[1])]!r}]", condition)
            for name, other in sorted(zip(names, unique, strict=True), key=lambda x: -len(x[0])):
                text = text.replace(f"L{name}", f"L[{other!r}]")
                # Strict export's names of *args.
                base = re.fullmatch(r"\['(.+)_(\d+)'\](.*)", name)
                if base is not None:
                    part = f"L['{base[1]}'][{base[2]}]{base[3]}"
                    text = text.replace(part, f"L[{other!r}]")
            texts.append(text)
        self._names = unique
        self._guards = [*size_guards(placeholders, ranges, unique), *texts]
        # Parsed eagerly, so that invalid guards fail here.
        self._function: Callable[..., None] | None = guard_function(self._guards, unique)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    def check(self, leaves: Sequence[Any]) -> None:
        """Check the sizes of the flat inputs.

        Raises:
            InputConstraintError: The sizes violate a guard.
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
                f"{message}. The program was exported with this size guard: pass sizes that "
                "satisfy it, or export again with these. check_input_constraints = False skips "
                "it."
            ) from None


def root_guards(
    program: ExportedProgram, placeholders: Sequence[Node], signature: CallSignature
) -> RootGuards | None:
    """Return a program's guards, or None if all sizes are static.

    Raises:
        UnsupportedProgramError: The recorded guards are not valid Python.
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
            f"The program's size guards cannot be parsed ({error}). Export it again."
        ) from error
