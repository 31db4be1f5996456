"""Registers of a method: a Python value for each value of the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.values.arena import Arena
from lowerdeck.runner.values.sources import ProgramData, make_tensor
from lowerdeck.runner.values.tensors import Origin, TensorSpec, read_spec
from lowerdeck.serializer import (
    Bool,
    BoolList,
    Double,
    DoubleList,
    ExecutionPlan,
    Int,
    IntList,
    KernelTypes,
    Null,
    OptionalTensorList,
    String,
    TensorList,
)
from lowerdeck.serializer import Tensor as TensorValue


class Freed:
    """Content of a register after its tensor was freed; any use is an error."""


class Frame:
    """Values of one method.

    Registers outside of ``rebound`` keep their objects, so that instructions are bound to these
    once.

    Attributes:
        values: Values in the file.
        registers: Python value of each: tensor, number, string, list or None.
        specs: Spec of each tensor value, None for other values.
        rebound: Registers that instructions rebind: targets of moves, results of scalar
            operators, freed tensors.
        spec_of: Spec of each tensor by ``id(tensor)``.
    """

    def __init__(self, plan: ExecutionPlan, arenas: Sequence[Arena], source: ProgramData) -> None:
        self.values: list[KernelTypes] = [value.val for value in plan.values]
        self.registers: list[object] = [None] * len(self.values)
        self.specs: list[TensorSpec | None] = [None] * len(self.values)
        self.rebound: set[int] = set()
        self._read_only: set[int] = set()
        for index, value in enumerate(self.values):
            if isinstance(value, TensorValue):
                spec = read_spec(index, value)
                self.specs[index] = spec
                self.registers[index] = make_tensor(spec, value, arenas, source)
                if spec.origin is Origin.CONSTANT:
                    self._read_only.add(index)
        for index, value in enumerate(self.values):
            if not isinstance(value, TensorValue):
                self.registers[index] = self._read(index, value)
        self.spec_of: dict[int, TensorSpec] = {
            id(tensor): spec
            for tensor, spec in zip(self.registers, self.specs, strict=True)
            if spec is not None
        }

    def check(self, index: int, use: str) -> int:
        """Return ``index`` if it is a valid value index.

        Args:
            use: Purpose, for the message.

        Raises:
            ProgramError: ``index`` is out of range.
        """
        if not 0 <= index < len(self.values):
            raise ProgramError(f"{use} is value {index}; there are {len(self.values)} values")
        return index

    def mark_aliases(self, edges: Sequence[tuple[int, int]]) -> None:
        """Propagate read-only status from constants to their aliases.

        Args:
            edges: Pairs (from, to): ``to`` may alias ``from``.
        """
        followers: dict[int, list[int]] = {}
        for source, target in edges:
            followers.setdefault(source, []).append(target)
        pending = list(self._read_only)
        while pending:
            for target in followers.get(pending.pop(), ()):
                if target not in self._read_only:
                    self._read_only.add(target)
                    pending.append(target)

    def require_writable(self, index: int, use: str) -> None:
        """Reject a write to a value that may be a constant.

        Raises:
            ProgramError: The value is a constant or may alias one.
        """
        if index in self._read_only:
            raise ProgramError(f"{use} is value {index}, a constant or an alias of one")

    def is_rebound(self, index: int) -> bool:
        """Return whether the register ``index``, or an item of its list, may be rebound."""
        value = self.values[index]
        if isinstance(value, (IntList, TensorList, OptionalTensorList)):
            return any(item in self.rebound for item in value.items)
        return index in self.rebound

    def fetcher(self, index: int) -> Callable[[], object]:
        """Return a function that reads the register ``index``, or the items of its list."""
        registers = self.registers
        value = self.values[index]
        if isinstance(value, (IntList, TensorList)):
            items = list(value.items)
            return lambda: [registers[item] for item in items]
        if isinstance(value, OptionalTensorList):
            optional = list(value.items)
            return lambda: [None if item < 0 else registers[item] for item in optional]
        return lambda: registers[index]

    def unfolded(self, index: int) -> list[int]:
        """Return the items of a tensor list, or ``[index]`` for other values."""
        value = self.values[index]
        if isinstance(value, (TensorList, OptionalTensorList)):
            return [item for item in value.items if item >= 0]
        return [index]

    def tensor(self, index: int, use: str) -> tuple[torch.Tensor, TensorSpec]:
        """Return the tensor and the spec of the value ``index``.

        Args:
            use: Purpose, for the message.

        Raises:
            ProgramError: The value is not a tensor.
        """
        self.check(index, use)
        register, spec = self.registers[index], self.specs[index]
        if spec is None or not isinstance(register, torch.Tensor):
            kind = type(self.values[index]).__name__
            raise ProgramError(f"{use} is value {index}, a {kind}; expected a Tensor")
        return register, spec

    def _read(self, index: int, value: KernelTypes) -> object:
        match value:
            case Null():
                return None
            case Int(int_val):
                return int(int_val)
            case Bool(bool_val):
                return bool(bool_val)
            case Double(double_val):
                return float(double_val)
            case String(string_val):
                return string_val
            case DoubleList(items) | BoolList(items):
                return list(items)
            case IntList(items):
                for item in items:
                    if not isinstance(self.values[self.check(item, "an item of a list")], Int):
                        raise ProgramError(
                            f"list {index} has the item {item}, which is not an Int"
                        )
                # Int values may come after the list that refers to them.
                return [self._int(item) for item in items]
            case TensorList(items):
                return [self.tensor(item, f"an item of list {index}")[0] for item in items]
            case OptionalTensorList(items):
                return [self._optional(item, index) for item in items]
            case _:
                raise ProgramError(f"value {index} has the unknown type {type(value).__name__}")

    def _int(self, index: int) -> int:
        value = self.values[index]
        return int(value.int_val) if isinstance(value, Int) else 0

    def _optional(self, item: int, index: int) -> torch.Tensor | None:
        if item < 0 or (item < len(self.values) and isinstance(self.values[item], Null)):
            return None
        return self.tensor(item, f"an item of list {index}")[0]
