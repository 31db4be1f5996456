"""Convert planned steps to an execution plan of the file format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lowerdeck.emitter.backend.boxing import SCALAR_TYPES
from lowerdeck.emitter.backend.external_weights import ExternalWeights
from lowerdeck.emitter.frontend.constants import ConstantPool
from lowerdeck.emitter.frontend.delegates import DelegatePool
from lowerdeck.emitter.frontend.states import StatePool
from lowerdeck.emitter.ir.instructions import (
    Code,
    DelegateStep,
    JumpStep,
    KernelStep,
    ListArg,
    MoveStep,
    Step,
)
from lowerdeck.emitter.ir.values import Role, ScalarValue, TensorValue, Value, root_of
from lowerdeck.serializer import (
    AllocationDetails,
    BackendDelegate,
    Bool,
    BoolList,
    Chain,
    DelegateCall,
    Double,
    DoubleList,
    EValue,
    ExecutionPlan,
    ExtraTensorInfo,
    Instruction,
    Int,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    Null,
    Operator,
    String,
    Tensor,
    TensorDataLocation,
    TensorShapeDynamism,
)


class PlanBuilder:
    """Builds the execution plan of one method.

    Args:
        constants: The program's constants; extended.
        states: Initial values of mutable buffers; extended.
        delegates: The delegates' bytes; extended.
        weights: Store for parameters and buffers in other files; None if all stay in the program.
        names: Whether constants keep their fully qualified names.
    """

    def __init__(
        self,
        constants: ConstantPool,
        states: StatePool,
        delegates: DelegatePool,
        weights: ExternalWeights | None = None,
        names: bool = True,
    ) -> None:
        self._names = names
        self._weights = weights
        self._constants = constants
        self._states = states
        self._delegates = delegates
        self._values: list[EValue] = []
        self._by_value: dict[Value, int] = {}
        self._by_key: dict[Any, int] = {}
        self._operators: dict[Operator | tuple[str, str], int] = {}
        self._plan_delegates: list[BackendDelegate] = []
        self._delegate_index: dict[int, int] = {}

    def build(self, code: Code, sizes: Sequence[int]) -> ExecutionPlan:
        """Return the plan for ``code``.

        Args:
            code: Steps with planned storages.
            sizes: Size of each planned memory; entry 0 is reserved.
        """
        inputs = [self._index(value, fresh=True) for value in code.inputs]
        instructions = [Instruction(self._instruction(step)) for step in code.steps]
        outputs = [self._index(value) for value in code.outputs]
        self._add_initial_values(code.states)
        return ExecutionPlan(
            name=code.name,
            values=self._values,
            inputs=inputs,
            outputs=outputs,
            chains=[Chain(instructions=instructions)],
            operators=[Operator(*key) for key in self._operators],  # type: ignore[misc]
            delegates=self._plan_delegates,
            non_const_buffer_sizes=list(sizes),
        )

    def _add_initial_values(self, states: Sequence[TensorValue]) -> None:
        """Set the initial values of states, also of those that the steps write but never read.

        A kernel that mutates part of a state has a separate value for the result, so the state
        itself may be missing from the value table.
        """
        for state in states:
            if root_of(state)[0] is state and state.constant is not None:
                initial = self._states.index_of(state)
                if initial:
                    tensor = self._values[self._tensor_index(state)].val
                    assert isinstance(tensor, Tensor)
                    tensor.data_buffer_idx = initial

    # Instructions

    def _instruction(self, step: Step) -> Any:
        match step:
            case KernelStep():
                args = [self._index(argument) for argument in step.args]
                return KernelCall(self._operator(step.kernel.name, step.kernel.overload), args)
            case DelegateStep():
                return DelegateCall(
                    self._delegate(step), [self._index(argument) for argument in step.args]
                )
            case MoveStep():
                return MoveCall(self._index(step.source), self._index(step.target))
            case JumpStep():
                return JumpFalseCall(self._index(step.condition), step.target.index)

    def _operator(self, name: str, overload: str) -> int:
        return self._operators.setdefault((name, overload), len(self._operators))

    def _delegate(self, step: DelegateStep) -> int:
        # Keyed by id: the steps keep the modules alive, which may be unhashable.
        key = id(step.module)
        if key not in self._delegate_index:
            self._delegate_index[key] = len(self._plan_delegates)
            self._plan_delegates.append(self._delegates.delegate(step.module))
        return self._delegate_index[key]

    # Values

    def _index(self, argument: Any, *, fresh: bool = False) -> int:
        """Return the index of an argument in the value table, added on first use."""
        if isinstance(argument, TensorValue):
            return self._tensor_index(argument)
        if isinstance(argument, ScalarValue):
            index = self._by_value.get(argument)
            if index is None:
                index = self._by_value[argument] = self._append(_slot(argument))
            return index
        if fresh:
            return self._append(self._constant_value(argument))
        key = _key(argument)
        index = self._by_key.get(key)
        if index is None:
            constant = self._constant_value(argument)
            index = self._by_key[key] = self._append(constant)
        return index

    def _append(self, value: Any) -> int:
        self._values.append(EValue(value))
        return len(self._values) - 1

    def _constant_value(self, argument: Any) -> Any:
        match argument:
            case None:
                return Null()
            case bool():
                return Bool(argument)
            case int():
                return Int(argument)
            case float():
                return Double(argument)
            case str():
                return String(argument)
            case ListArg():
                # Numbers of integer lists may be computed at run time.
                literal = argument.kind in (DoubleList, BoolList)
                return argument.kind(
                    [x if literal else -1 if x is None else self._index(x) for x in argument.items]
                )
        raise TypeError(f"no value kind for {argument!r}")

    def _tensor_index(self, value: TensorValue) -> int:
        position = self._by_value.get(value)
        if position is not None:
            return position
        root, offset = root_of(value)
        if root.constant is not None and not root.state:
            index = self._constant_index(value, root, offset)
        else:
            index = self._planned_index(value, root, offset)
        self._by_value[value] = index
        return index

    def _constant_index(self, value: TensorValue, root: TensorValue, offset: int) -> int:
        assert root.constant is not None
        data = self._constants.bytes_of(root.constant, root.dim_order)
        data = data[offset : offset + value.nbytes]
        if self._weights is not None and root.key and len(data):
            name = self._weights.add(value, root, offset, data)
            if name is not None:
                return self._external_index(value, name)
        buffer = self._constants.index_of(data)
        named = self._names and len(data) == root.nbytes
        # Equal bytes are stored once, but each module has a separate entry, so that layers with
        # equal initial weights keep their names.
        module = root.key.rpartition(".")[0] if named else ""
        key = ("constant", buffer, value.dtype, value.sizes, value.dim_order, module)
        if key not in self._by_key:
            tensor = _tensor(value, data_buffer_idx=buffer)
            if named and root.key:
                tensor.extra_tensor_info = ExtraTensorInfo(fully_qualified_name=root.key)
            self._by_key[key] = self._append(tensor)
        return self._by_key[key]

    def _external_index(self, value: TensorValue, name: str) -> int:
        if (position := self._by_key.get(("external", name))) is not None:
            return position
        tensor = _tensor(value)
        tensor.extra_tensor_info = ExtraTensorInfo(
            fully_qualified_name=name, location=TensorDataLocation.EXTERNAL
        )
        index = self._by_key["external", name] = self._append(tensor)
        return index

    def _planned_index(self, value: TensorValue, root: TensorValue, offset: int) -> int:
        storage = value.storage
        if storage is None or storage.role is Role.CALLER or storage.memory_id == 0:
            return self._append(_tensor(value))
        start = storage.offset + offset
        key = ("planned", storage, offset, value.dtype, value.sizes, value.dim_order)
        if root.grows and root is not value and _matches_root(value, root):
            return self._tensor_index(root)
        # Dynamic tensors and their views have separate entries: the runtime resizes entries in
        # place.
        shared = not any(v.dynamic or v.grows for v in (value, root))
        if shared and key in self._by_key:
            return self._by_key[key]
        if root is not value and root.state:
            # The state's own entry carries its initial value, so it must be in the table.
            self._tensor_index(root)
        tensor = _tensor(value)
        tensor.allocation_info = AllocationDetails.at(storage.memory_id, start)
        if storage.role is Role.STATE:
            tensor.extra_tensor_info = ExtraTensorInfo(fully_qualified_name=storage.name)
        if value is root and root.state:
            tensor.data_buffer_idx = self._states.index_of(root)
        index = self._append(tensor)
        if shared:
            self._by_key[key] = index
        return index


def _matches_root(value: TensorValue, root: TensorValue) -> bool:
    """Return whether a view has offset 0 and the dtype, shape and layout of its root."""
    kind = (value.dtype, value.sizes, value.dim_order)
    return kind == (root.dtype, root.sizes, root.dim_order)


def _slot(value: ScalarValue) -> Int | Bool | Double:
    if value.kind is bool:
        return Bool(bool(value.initial))
    return Double(float(value.initial)) if value.kind is float else Int(int(value.initial))


def _key(argument: Any) -> Any:
    """Return a key that is equal for arguments that can share one value."""
    if isinstance(argument, float):
        # 0.0 equals -0.0 and NaN does not equal itself, but the values are different.
        return ("float", math.copysign(1.0, argument), repr(argument))
    if isinstance(argument, ListArg):
        return (argument.kind, tuple(map(_item_key, argument.items)))
    return (type(argument), argument)


def _item_key(item: Any) -> Any:
    # A value is its own key.
    return item if isinstance(item, (TensorValue, ScalarValue)) else _key(item)


def _tensor(value: TensorValue, data_buffer_idx: int = 0) -> Tensor:
    varies = value.dynamic or value.grows
    dynamism = TensorShapeDynamism.DYNAMIC_BOUND if varies else TensorShapeDynamism.STATIC
    return Tensor(
        scalar_type=SCALAR_TYPES[value.dtype],
        sizes=list(value.sizes),
        dim_order=list(value.dim_order),
        data_buffer_idx=data_buffer_idx,
        shape_dynamism=dynamism,
    )
