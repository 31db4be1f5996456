"""Base classes of compiler and runtime for backends that compile to the text format."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch.fx import Node

from lowerdeck.demo_backends.errors import DelegateInputError, DelegateRunError
from lowerdeck.demo_backends.text_format import (
    Operand,
    Step,
    TextProgram,
    Value,
    kind_of,
    read,
    write,
)
from lowerdeck.lowered_module import (
    DeclarativeBackend,
    PartitionView,
    UnsupportedOperatorError,
    operator_name,
)
from lowerdeck.serializer import CompileSpec as StoredSpec
from lowerdeck.torch_base import describe_node

Kernels: TypeAlias = Mapping[str, Callable[..., torch.Tensor]]
MOST_ELEMENTS = 2**31


class TextBackend(DeclarativeBackend):
    """Declarative backend whose visitors add steps of a ``TextProgram``.

    Mutated state comes first among inputs and outputs.
    """

    version: ClassVar[str] = "2"
    owns_state = False

    @property
    @abstractmethod
    def kernels(self) -> Kernels:
        """The function of each operator of the text format; a class attribute of subclasses."""

    def begin_partition(self, part: PartitionView) -> None:
        """Number the inputs, mutated state first."""
        inputs = [*part.mutations, *part.inputs]
        self._inputs = len(inputs)
        self.operands: dict[Node, Operand] = dict(part.constants)
        self.operands.update((node, Value(number)) for number, node in enumerate(inputs))

    def add_step(
        self,
        part: PartitionView,
        op: str,
        arguments: Sequence[Any],
        nodes: Sequence[Node],
        identifier: str | None = None,
    ) -> Value:
        """Add one step and return its value.

        Args:
            op: Name of its operator, a key of ``kernels``.
            arguments: Arguments of the operator; a node is replaced by its value.
            identifier: Identifier that the runtime logs; the step's number if None.

        Raises:
            UnsupportedOperatorError: An argument is a node without a value in the partition.
        """
        operands = [self._operand(argument) for argument in arguments]
        number = len(part.instructions)
        step = Step(op, number if identifier is None else identifier, operands)
        part.emit(step, nodes=nodes, identifier=identifier)
        return Value(self._inputs + number)

    def add_call(self, part: PartitionView, node: Node) -> None:
        """Add the call of an operator as one step with the same arguments.

        Raises:
            UnsupportedOperatorError: The call has keyword arguments, which the format cannot
                represent.
        """
        if node.kwargs:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} has the keyword arguments {', '.join(node.kwargs)}, which "
                "the text format cannot represent: leave the node untagged"
            )
        self.operands[node] = self.add_step(part, operator_name(node), node.args, [node])

    def compile(self, part: PartitionView) -> bytes:
        """Return the partition in the text format."""
        inputs: list[str | torch.Tensor] = [part.constants[node] for node in part.mutations]
        inputs += [kind_of(node.meta["val"]) for node in part.inputs]
        returned = [self._operand(node) for node in (*part.mutations.values(), *part.outputs)]
        program = TextProgram(inputs, part.instructions, returned)
        return write(type(self).__name__, self.version, program, part.store)

    def _operand(self, argument: Any) -> Operand:
        if not isinstance(argument, Node):
            operand: Operand = argument
            return operand
        if argument not in self.operands:
            raise UnsupportedOperatorError(
                f"{type(self).__name__} found the argument {describe_node(argument)}, "
                "expected an input of the partition or a node in it"
            )
        return self.operands[argument]


def is_positional(node: Node) -> bool | str:
    """Return whether ``add_call`` supports a call, or why not: a condition for ``visits``."""
    return not node.kwargs or f"it has the keyword arguments {', '.join(node.kwargs)}"


class TextRuntime:
    """Executes the blobs of a ``TextBackend``, step by step.

    Attributes:
        backend: The class of the backend.
    """

    backend: ClassVar[type[TextBackend]]

    def __init__(self) -> None:
        self._kernels = cast("Kernels", self.backend.kernels)

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],  # noqa: ARG002  (used by subclasses)
        named_data: Mapping[str, memoryview],
    ) -> Any:
        """Return the decoded program of a blob, the handle for ``execute``.

        Raises:
            BlobError: The blob is truncated, corrupt or of another version, or its weights are
                missing or of another size.
        """
        backend = self.backend
        return read(backend.__name__, backend.version, bytes(blob), self._kernels, named_data)

    def input_count(self, handle: Any) -> int:
        """Return the number of inputs of a call."""
        return len(handle.inputs)

    def execute(self, handle: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``.

        Raises:
            DelegateInputError: The number of inputs or a dtype differs from the compiled ones.
            DelegateRunError: A step cannot be computed on these inputs.
        """
        return self.execute_logged(handle, inputs, lambda *_: None)

    def execute_logged(
        self, handle: Any, inputs: Sequence[torch.Tensor], log: Callable[..., None]
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``, and log every step.

        Args:
            log: Called with each step's debug identifier, its start and end in nanoseconds, and
                its outputs.

        Raises:
            DelegateInputError: The number of inputs or a dtype differs from the compiled ones.
            DelegateRunError: A step cannot be computed on these inputs.
        """
        if len(inputs) != len(handle.inputs):
            raise DelegateInputError(f"found {len(inputs)} inputs, expected {len(handle.inputs)}")
        for position, (argument, expected) in enumerate(zip(inputs, handle.inputs, strict=True)):
            kind = expected if isinstance(expected, str) else kind_of(expected)
            if kind_of(argument) != kind:
                raise DelegateInputError(
                    f"input {position}: found {kind_of(argument)}, expected {kind}"
                )
        values = list(inputs)
        for step in handle.steps:
            start = time.perf_counter_ns()
            values.append(self._computed(step, _fetched(step.operands, values)))
            log(step.identifier, start, time.perf_counter_ns(), (values[-1],))
        return _fetched(handle.outputs, values)

    def _computed(self, step: Step, operands: list[Any]) -> torch.Tensor:
        kernel = self._kernels[step.op]
        try:
            # First on meta tensors: the result of a malicious blob may exceed the memory.
            likes = [
                item.to("meta") if isinstance(item, torch.Tensor) else item for item in operands
            ]
            if kernel(*likes).numel() <= MOST_ELEMENTS:
                return kernel(*operands)
        except Exception as error:
            raise DelegateRunError(
                f"{step.op} (debug identifier {step.identifier}): {error}"
            ) from error
        raise DelegateRunError(
            f"{step.op} (debug identifier {step.identifier}): its result has more than "
            f"{MOST_ELEMENTS} elements"
        )


def _fetched(operands: Sequence[Operand], values: Sequence[Any]) -> list[Any]:
    return [values[item] if isinstance(item, Value) else item for item in operands]
