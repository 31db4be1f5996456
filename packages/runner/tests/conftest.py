"""A small builder of programs in memory, so that tests say only what matters to them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lowerdeck import serializer as pte
from lowerdeck_files.shell import shell

__all__ = ["shell"]

_TYPES = {
    torch.float32: pte.ScalarType.FLOAT,
    torch.float64: pte.ScalarType.DOUBLE,
    torch.int64: pte.ScalarType.LONG,
    torch.int32: pte.ScalarType.INT,
    torch.bool: pte.ScalarType.BOOL,
    torch.uint8: pte.ScalarType.BYTE,
}


class MethodBuilder:
    """Collects the values and instructions of one method; planned tensors never overlap."""

    def __init__(self, owner: "ProgramBuilder", name: str) -> None:
        self.owner = owner
        self.plan = pte.ExecutionPlan(name, chains=[pte.Chain()], non_const_buffer_sizes=[0, 0])

    def value(self, val: Any) -> int:
        self.plan.values.append(pte.EValue(val))
        return len(self.plan.values) - 1

    def integer(self, value: int) -> int:
        return self.value(pte.Int(value))

    def boolean(self, value: bool) -> int:
        return self.value(pte.Bool(value))

    def double(self, value: float) -> int:
        return self.value(pte.Double(value))

    def string(self, value: str) -> int:
        return self.value(pte.String(value))

    def null(self) -> int:
        return self.value(pte.Null())

    def ints(self, values: Sequence[int]) -> int:
        return self.value(pte.IntList([self.integer(value) for value in values]))

    def doubles(self, values: Sequence[float]) -> int:
        return self.value(pte.DoubleList(list(values)))

    def bools(self, values: Sequence[bool]) -> int:
        return self.value(pte.BoolList(list(values)))

    def tensors(self, items: Sequence[int]) -> int:
        return self.value(pte.TensorList(list(items)))

    def optional_tensors(self, items: Sequence[int]) -> int:
        return self.value(pte.OptionalTensorList(list(items)))

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
        tensor = pte.Tensor(
            _TYPES[dtype],
            sizes=list(sizes),
            dim_order=list(dim_order if dim_order is not None else range(len(sizes))),
            shape_dynamism=pte.TensorShapeDynamism(int(dynamic)),
        )
        if name is not None:
            tensor.extra_tensor_info = pte.ExtraTensorInfo(fully_qualified_name=name)
        if planned:
            memory = self.plan.non_const_buffer_sizes
            while len(memory) <= memory_id:
                memory.append(0)
            if at is None:
                at = memory[memory_id]
            end = at + -(-tensor.nbytes // 16) * 16
            memory[memory_id] = max(memory[memory_id], end)
            tensor.allocation_info = pte.AllocationDetails.at(memory_id, at)
        if initial is not None:
            self.owner.program.mutable_data.append(pte.Buffer(_bytes(initial)))
            tensor.data_buffer_idx = len(self.owner.program.mutable_data) - 1
        return self.value(tensor)

    def constant(self, tensor: torch.Tensor) -> int:
        buffers = self.owner.program.constant_buffer
        buffers.append(pte.Buffer(_bytes(tensor)))
        return self.value(
            pte.Tensor(
                _TYPES[tensor.dtype],
                sizes=list(tensor.shape),
                dim_order=list(range(tensor.dim())),
                data_buffer_idx=len(buffers) - 1,
            )
        )

    def add(self, item: Any) -> int:
        self.plan.chains[0].instructions.append(pte.Instruction(item))
        return len(self.plan.chains[0].instructions) - 1

    def call(self, name: str, *args: int) -> int:
        short, _, overload = name.partition(".")
        operator = pte.Operator(short, overload)
        if operator not in self.plan.operators:
            self.plan.operators.append(operator)
        return self.add(pte.KernelCall(self.plan.operators.index(operator), list(args)))

    def delegate(
        self, backend: str, args: Sequence[int], blob: bytes = b"", specs: Sequence[Any] = ()
    ) -> int:
        blobs = self.owner.program.backend_delegate_data
        blobs.append(pte.BackendDelegateInlineData(blob))
        where = pte.BackendDelegateDataReference(pte.DataLocation.INLINE, len(blobs) - 1)
        settings = [pte.CompileSpec(key, value) for key, value in specs]
        self.plan.delegates.append(pte.BackendDelegate(backend, where, settings))
        return self.add(pte.DelegateCall(len(self.plan.delegates) - 1, list(args)))

    def move(self, source: int, target: int) -> int:
        return self.add(pte.MoveCall(source, target))

    def free(self, index: int) -> int:
        return self.add(pte.FreeCall(index))

    def jump(self, condition: int, destination: int) -> int:
        return self.add(pte.JumpFalseCall(condition, destination))

    def ends(self, inputs: Sequence[int], outputs: Sequence[int]) -> pte.Program:
        self.plan.inputs, self.plan.outputs = list(inputs), list(outputs)
        return self.owner.program

    def structure(self, inputs: str, outputs: str) -> None:
        self.plan.container_meta_type = pte.ContainerMetadata(inputs, outputs)


class ProgramBuilder:
    """Collects the methods of a program."""

    def __init__(self) -> None:
        self.program = pte.Program()

    def method(self, name: str = "forward") -> MethodBuilder:
        builder = MethodBuilder(self, name)
        self.program.execution_plan.append(builder.plan)
        return builder

    def named(self, key: str, data: bytes) -> None:
        self.program.named_data.append(pte.NamedData(key, data))


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
