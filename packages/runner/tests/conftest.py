"""A small builder of programs in memory, so that tests say only what matters to them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lowerdeck.serializer import (
    AllocationDetails,
    BackendDelegate,
    BackendDelegateDataReference,
    BackendDelegateInlineData,
    Bool,
    BoolList,
    Buffer,
    Chain,
    CompileSpec,
    ContainerMetadata,
    DataLocation,
    DelegateCall,
    Double,
    DoubleList,
    EValue,
    ExecutionPlan,
    ExtraTensorInfo,
    FreeCall,
    Instruction,
    Int,
    IntList,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    NamedData,
    Null,
    Operator,
    OptionalTensorList,
    Program,
    ScalarType,
    String,
    Tensor,
    TensorList,
    TensorShapeDynamism,
)

_TYPES = {
    torch.float32: ScalarType.FLOAT,
    torch.float64: ScalarType.DOUBLE,
    torch.int64: ScalarType.LONG,
    torch.int32: ScalarType.INT,
    torch.bool: ScalarType.BOOL,
    torch.uint8: ScalarType.BYTE,
}


class MethodBuilder:
    """Collects the values and instructions of one method; planned tensors never overlap."""

    def __init__(self, owner: "ProgramBuilder", name: str) -> None:
        self.owner = owner
        self.plan = ExecutionPlan(name, chains=[Chain()], non_const_buffer_sizes=[0, 0])

    def value(self, val: Any) -> int:
        self.plan.values.append(EValue(val))
        return len(self.plan.values) - 1

    def integer(self, value: int) -> int:
        return self.value(Int(value))

    def boolean(self, value: bool) -> int:
        return self.value(Bool(value))

    def double(self, value: float) -> int:
        return self.value(Double(value))

    def string(self, value: str) -> int:
        return self.value(String(value))

    def null(self) -> int:
        return self.value(Null())

    def ints(self, values: Sequence[int]) -> int:
        return self.value(IntList([self.integer(value) for value in values]))

    def doubles(self, values: Sequence[float]) -> int:
        return self.value(DoubleList(list(values)))

    def bools(self, values: Sequence[bool]) -> int:
        return self.value(BoolList(list(values)))

    def tensors(self, items: Sequence[int]) -> int:
        return self.value(TensorList(list(items)))

    def optional_tensors(self, items: Sequence[int]) -> int:
        return self.value(OptionalTensorList(list(items)))

    def tensor(
        self,
        sizes: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        at: int | None = None,
        memory_id: int = 1,
        planned: bool = True,
        dynamic: bool = False,
        dim_order: Sequence[int] | None = None,
        initial: torch.Tensor | None = None,
        name: str | None = None,
    ) -> int:
        tensor = Tensor(
            _TYPES[dtype],
            sizes=list(sizes),
            dim_order=list(dim_order if dim_order is not None else range(len(sizes))),
            shape_dynamism=TensorShapeDynamism(int(dynamic)),
        )
        if name is not None:
            tensor.extra_tensor_info = ExtraTensorInfo(fully_qualified_name=name)
        if planned:
            memory = self.plan.non_const_buffer_sizes
            while len(memory) <= memory_id:
                memory.append(0)
            if at is None:
                at = memory[memory_id]
            end = at + -(-tensor.nbytes // 16) * 16
            memory[memory_id] = max(memory[memory_id], end)
            tensor.allocation_info = AllocationDetails.at(memory_id, at)
        if initial is not None:
            self.owner.program.mutable_data.append(Buffer(_bytes(initial)))
            tensor.data_buffer_idx = len(self.owner.program.mutable_data) - 1
        return self.value(tensor)

    def constant(self, tensor: torch.Tensor) -> int:
        buffers = self.owner.program.constant_buffer
        buffers.append(Buffer(_bytes(tensor)))
        return self.value(
            Tensor(
                _TYPES[tensor.dtype],
                sizes=list(tensor.shape),
                dim_order=list(range(tensor.dim())),
                data_buffer_idx=len(buffers) - 1,
            )
        )

    def add(self, item: Any) -> int:
        self.plan.chains[0].instructions.append(Instruction(item))
        return len(self.plan.chains[0].instructions) - 1

    def call(self, name: str, *args: int) -> int:
        short, _, overload = name.partition(".")
        operator = Operator(short, overload)
        if operator not in self.plan.operators:
            self.plan.operators.append(operator)
        return self.add(KernelCall(self.plan.operators.index(operator), list(args)))

    def delegate(
        self, backend: str, args: Sequence[int], blob: bytes = b"", specs: Sequence[Any] = ()
    ) -> int:
        blobs = self.owner.program.backend_delegate_data
        blobs.append(BackendDelegateInlineData(blob))
        where = BackendDelegateDataReference(DataLocation.INLINE, len(blobs) - 1)
        settings = [CompileSpec(key, value) for key, value in specs]
        self.plan.delegates.append(BackendDelegate(backend, where, settings))
        return self.add(DelegateCall(len(self.plan.delegates) - 1, list(args)))

    def move(self, source: int, target: int) -> int:
        return self.add(MoveCall(source, target))

    def free(self, index: int) -> int:
        return self.add(FreeCall(index))

    def jump(self, condition: int, destination: int) -> int:
        return self.add(JumpFalseCall(condition, destination))

    def ends(self, inputs: Sequence[int], outputs: Sequence[int]) -> Program:
        self.plan.inputs, self.plan.outputs = list(inputs), list(outputs)
        return self.owner.program

    def structure(self, inputs: str, outputs: str) -> None:
        self.plan.container_meta_type = ContainerMetadata(inputs, outputs)


class ProgramBuilder:
    """Collects the methods of a program."""

    def __init__(self) -> None:
        self.program = Program()

    def method(self, name: str = "forward") -> MethodBuilder:
        builder = MethodBuilder(self, name)
        self.program.execution_plan.append(builder.plan)
        return builder

    def named(self, key: str, data: bytes) -> None:
        self.program.named_data.append(NamedData(key, data))


def _bytes(tensor: torch.Tensor) -> bytes:
    return (
        bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if tensor.numel()
        else b""
    )


@pytest.fixture
def build() -> ProgramBuilder:
    return ProgramBuilder()


@pytest.fixture
def method(build: ProgramBuilder) -> MethodBuilder:
    return build.method()
