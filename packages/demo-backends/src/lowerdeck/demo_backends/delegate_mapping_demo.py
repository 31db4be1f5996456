"""A backend that fuses and decomposes, to show how debug maps survive both.

A convolution whose only user is a relu becomes one instruction, a tangent becomes three. Each
instruction carries a debug identifier, and the map beside the blob says which nodes of the
original program an identifier stands for.

The blob is text::

    BackendWithDelegateMappingDemo 1 0badc0de
    inputs 1
    instructions 4
    conv_relu_op,0,x=%0,weight=@KEY/float32/16x3x3x3,bias=-,stride=1x1,...
    sin_op,1,x=%1
    cos_op,2,x=%1
    div_op,3,x=%2,y=%3
    outputs %4

The first line names format and version and holds the CRC-32 of the rest. Values are numbered
from the inputs on, one more for each instruction; ``@`` names a weight in the named data.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.demo_backends.errors import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    UnsupportedNodeError,
)
from lowerdeck.demo_backends.named_weights import NamedWeights, read_weight
from lowerdeck.demo_backends.program_inputs import output_nodes, user_inputs
from lowerdeck.demo_backends.sealed_text import seal, unseal
from lowerdeck.graph_fuser import propose_partitions
from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    DelegateMappingBuilder,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PreprocessResult,
    constant_names,
    constant_tensors,
    tag_constant_data,
)
from lowerdeck.torch_base import describe_node

NAME = "BackendWithDelegateMappingDemo"
VERSION = 1
OWN_IDENTIFIERS = CompileSpec("debug_identifiers", b"own")
"""Compile spec that asks for identifiers such as ``"tan/sin_op"`` instead of 0, 1, 2, ..."""

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.conv2d.default, _aten.convolution.default}
_RELUS = {_aten.relu.default, _aten.relu_.default}
_SUPPORTED = {*_CONVOLUTIONS, *_RELUS, _aten.tan.default}
_MOST_ELEMENTS = 2**31
# ---------------------------------------------------------------------------------- ahead of time


class DelegateMappingDemoPartitioner(Partitioner):
    """Gives float32 convolutions in two dimensions, relu and tan to the backend.

    Args:
        compile_specs: Passed on to the backend, such as ``OWN_IDENTIFIERS``.
    """

    def __init__(self, compile_specs: Sequence[CompileSpec] = ()) -> None:
        super().__init__()
        self._delegation = DelegationSpec(NAME, list(compile_specs))

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag on each supported node, one tag for each partition."""
        constants = constant_names(exported_program)
        tags = {}
        partitions = propose_partitions(
            exported_program.graph_module, lambda node: _is_supported(node, constants)
        )
        for number, nodes in enumerate(partitions):
            tag = f"mapping_demo_{number}"
            tags[tag] = self._delegation
            for node in nodes:
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)


class BackendWithDelegateMappingDemo(BackendDetails):
    """Compiles convolution, relu and tan to a small text, with a debug map."""

    version: ClassVar[str] = str(VERSION)
    supported_operators: ClassVar[tuple[str, ...]] = tuple(sorted(map(str, _SUPPORTED)))

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Return the blob of one partition, its debug map, and its weights as named data.

        Args:
            edge_program: The partition.
            compile_specs: Empty, or ``OWN_IDENTIFIERS``.

        Returns:
            The result; equal partitions give equal bytes.

        Raises:
            UnsupportedNodeError: A node's operator is not one that this backend computes.
        """
        return _Compiler(edge_program, own=OWN_IDENTIFIERS in compile_specs).compile()

    @staticmethod
    def get_test_model_and_inputs() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        """Return a model that this backend takes whole, and inputs for it.

        Returns:
            Two convolutions with relu (3 to 16 to 32 channels) and a tangent, with seeded
            weights; and a batch of four 64x64 images.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ConvReLUTan().eval(), (torch.randn(4, 3, 64, 64),)


class ConvReLUTan(nn.Module):
    """Two convolutions with relu, then a tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1: nn.Conv2d = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2: nn.Conv2d = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return features of shape ``[N, 32, H, W]`` for images of shape ``[N, 3, H, W]``."""
        x = torch.relu(self.conv1(images))
        return torch.tan(torch.relu(self.conv2(x)))


def _is_supported(node: Node, constants: Mapping[str, str]) -> bool:
    if node.op != "call_function" or node.target not in _SUPPORTED:
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return False
    if node.target is _aten.relu_.default:
        # In place: nobody else may be looking at what it overwrites.
        source = node.args[0]
        return isinstance(source, Node) and source.op == "call_function" and len(source.users) == 1
    if node.target not in _CONVOLUTIONS:
        return True
    weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else None
    constant = all(one is None or getattr(one, "name", "") in constants for one in (weight, bias))
    transposed = node.target is _aten.convolution.default and node.args[6]
    return constant and not transposed and value.dim() == 4


class _Compiler:
    """Walks one partition once and writes an instruction, or three, for each node."""

    def __init__(self, program: ExportedProgram, *, own: bool) -> None:
        self._program = program
        self._own = own
        self._debug_map = DelegateMappingBuilder(generated_identifiers=not own)
        self._weights = NamedWeights()
        self._values: dict[Node, str] = {}
        self._lines: list[str] = []
        self._inputs = user_inputs(program)

    def compile(self) -> PreprocessResult:
        constants = constant_tensors(self._program)
        for number, node in enumerate(self._inputs):
            self._values[node] = f"%{number}"
        for node in self._program.graph.nodes:
            if node.op == "placeholder" and node.name in constants:
                self._values[node] = f"@{self._weights.add(constants[node.name])}"
            elif node.op == "call_function":
                self._compile_node(node)
        outputs = " ".join(self._operand(node) for node in output_nodes(self._program))
        lines = [
            f"inputs {len(self._inputs)}",
            f"instructions {len(self._lines)}",
            *self._lines,
            f"outputs {outputs}",
        ]
        return PreprocessResult(
            processed_bytes=seal(NAME, VERSION, lines),
            debug_handle_map=self._debug_map.get_delegate_mapping(),
            data_store_output=self._weights.output(),
        )

    def _compile_node(self, node: Node) -> None:
        if node.target in _CONVOLUTIONS:
            user = next(iter(node.users)) if len(node.users) == 1 else None
            if user is None or user.target not in _RELUS:
                self._values[node] = self._emit("conv_op", [node], self._convolution(node))
        elif node.target in _RELUS:
            source = node.args[0]
            if (
                isinstance(source, Node)
                and source.target in _CONVOLUTIONS
                and (source not in self._values)
            ):
                fused = self._convolution(source)
                self._values[node] = self._emit("conv_relu_op", [source, node], fused)
            else:
                self._values[node] = self._emit("relu_op", [node], {"x": self._operand(source)})
        elif node.target is _aten.tan.default:
            x = self._operand(node.args[0])
            sine = self._emit("sin_op", [node], {"x": x})
            cosine = self._emit("cos_op", [node], {"x": x})
            self._values[node] = self._emit("div_op", [node], {"x": sine, "y": cosine})
        else:
            raise UnsupportedNodeError(
                f"{NAME} cannot compile {describe_node(node)}: it knows conv2d, convolution, relu "
                "and tan; leave other nodes untagged"
            )

    def _convolution(self, node: Node) -> dict[str, str]:
        if node.target is _aten.convolution.default:
            x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
            if transposed:
                raise UnsupportedNodeError(
                    f"{NAME} cannot compile the transposed {describe_node(node)}"
                )
        else:
            defaults = (None, None, None, [1, 1], [0, 0], [1, 1], 1)
            given = (*node.args, *defaults[len(node.args) :])
            x, weight, bias, stride, padding, dilation, groups = given
        return {
            "x": self._operand(x),
            "weight": self._operand(weight),
            "bias": "-" if bias is None else self._operand(bias),
            "stride": _pair(stride),
            "padding": _pair(padding),
            "dilation": _pair(dilation),
            "groups": str(groups),
        }

    def _operand(self, value: object) -> str:
        if isinstance(value, Node) and value in self._values:
            return self._values[value]
        raise UnsupportedNodeError(
            f"{NAME} cannot use {value!r} as an operand or output: only tensors that the "
            "partition is given or computes"
        )

    def _emit(self, op: str, nodes: list[Node], operands: dict[str, str]) -> str:
        identifier = self._identifier(op, nodes)
        fields = ",".join(f"{name}={value}" for name, value in operands.items())
        self._lines.append(f"{op},{identifier},{fields}")
        return f"%{len(self._inputs) + len(self._lines) - 1}"

    def _identifier(self, op: str, nodes: list[Node]) -> int | str:
        own = f"{'+'.join(node.name for node in nodes)}/{op}" if self._own else None
        if not any("debug_handle" in node.meta for node in nodes):
            # Given to preprocess by hand: to_backend gives every node a handle.
            return len(self._lines) if own is None else own
        return self._debug_map.insert_delegate_mapping_entry(nodes, identifier=own)


def _pair(sizes: object) -> str:
    several = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    return "x".join(str(size) for size in (several * 2 if len(several) == 1 else several))


# ----------------------------------------------------------------------------------- at run time


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a loaded blob.

    Attributes:
        op: What to compute, such as ``"conv_relu_op"``.
        debug_identifier: Key of the debug map.
        operands: The inputs in order: the number of a value, a weight, or None.
        sizes: Stride, padding, dilation and groups of a convolution.
    """

    op: str
    debug_identifier: int | str
    operands: tuple[int | torch.Tensor | None, ...]
    sizes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedBlob:
    """A blob that was checked and is ready to run.

    Attributes:
        inputs: How many inputs it takes.
        instructions: The steps in order; each makes one value.
        outputs: Which values, or weights, it returns.
    """

    inputs: int
    instructions: tuple[Instruction, ...]
    outputs: tuple[int | torch.Tensor, ...]


class DelegateMappingDemoRuntime:
    """Executes the blobs of ``BackendWithDelegateMappingDemo``, instruction by instruction."""

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[CompileSpec],  # noqa: ARG002  (nothing in them is for the run)
        named_data: Mapping[str, memoryview],
    ) -> LoadedBlob:
        """Return the blob, read and checked.

        Args:
            blob: What ``preprocess`` made.
            compile_specs: Not needed at run time.
            named_data: The weights.

        Returns:
            The handle that ``execute`` wants.

        Raises:
            BlobError: The blob is truncated, damaged, of another version, or its weights are not
                what it says.
        """
        return _Reader(unseal(NAME, VERSION, bytes(blob)), named_data).read()

    def input_count(self, handle: LoadedBlob) -> int:
        """Return how many inputs a blob takes."""
        return handle.inputs

    def execute(self, handle: LoadedBlob, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``.

        Args:
            handle: What ``init`` returned.
            inputs: One float32 tensor for each input, in order.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Another number of inputs, or another dtype, than was compiled for.
            DelegateRunError: An instruction cannot be computed on these inputs.
        """
        return self.execute_logged(handle, inputs, _no_log)

    def execute_logged(
        self, handle: LoadedBlob, inputs: Sequence[torch.Tensor], log: Callable[..., None]
    ) -> list[torch.Tensor]:
        """Return the outputs for ``inputs`` and report every instruction.

        Args:
            handle: What ``init`` returned.
            inputs: One float32 tensor for each input, in order.
            log: Called with the debug identifier, the start and the end in nanoseconds and the
                outputs of each instruction.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Another number of inputs, or another dtype, than was compiled for.
            DelegateRunError: An instruction cannot be computed on these inputs.
        """
        if len(inputs) != handle.inputs:
            raise DelegateInputError(f"{handle.inputs} inputs are needed, found {len(inputs)}")
        for position, value in enumerate(inputs):
            if value.dtype != torch.float32:
                raise DelegateInputError(f"input {position} must be float32, found {value.dtype}")
        values = list(inputs)
        for instruction in handle.instructions:
            operands = [
                values[one] if isinstance(one, int) else one for one in instruction.operands
            ]
            start = time.perf_counter_ns()
            try:
                values.append(_KERNELS[instruction.op](operands, instruction.sizes))
            except RuntimeError as error:
                raise DelegateRunError(
                    f"{instruction.op} (debug identifier {instruction.debug_identifier}): {error}"
                ) from error
            log(instruction.debug_identifier, start, time.perf_counter_ns(), (values[-1],))
        return [values[one] if isinstance(one, int) else one for one in handle.outputs]


def _no_log(*_: object) -> None:
    """Drop a report."""


def _convolve(
    operands: list[torch.Tensor | None], sizes: tuple[tuple[int, ...], ...]
) -> torch.Tensor:
    x, weight, bias = operands
    stride, padding, dilation, (groups,) = sizes
    if x is None or weight is None or x.dim() != 4 or weight.dim() != 4:
        raise DelegateRunError("a convolution needs an input and a weight of 4 dimensions each")
    height, width = (
        (x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (weight.shape[2 + axis] - 1) - 1)
        // stride[axis]
        + 1
        for axis in (0, 1)
    )
    # Before torch tries to find the memory for it.
    if x.shape[0] * weight.shape[0] * max(height, 0) * max(width, 0) > _MOST_ELEMENTS:
        raise DelegateRunError(f"an output of {height}x{width} is larger than any image")
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


_KERNELS: dict[
    str, Callable[[list[torch.Tensor | None], tuple[tuple[int, ...], ...]], torch.Tensor]
] = {
    "conv_op": _convolve,
    "conv_relu_op": lambda operands, sizes: torch.relu_(_convolve(operands, sizes)),
    "relu_op": lambda operands, _: _aten.relu(*operands),
    "sin_op": lambda operands, _: _aten.sin(*operands),
    "cos_op": lambda operands, _: _aten.cos(*operands),
    "div_op": lambda operands, _: _aten.div(*operands),
}
_CONV_FIELDS = ("x", "weight", "bias", "stride", "padding", "dilation", "groups")
_FIELDS = {
    "conv_op": _CONV_FIELDS,
    "conv_relu_op": _CONV_FIELDS,
    "relu_op": ("x",),
    "sin_op": ("x",),
    "cos_op": ("x",),
    "div_op": ("x", "y"),
}
_SIZES = re.compile(r"\d{1,9}(x\d{1,9})?")


class _Reader:
    """Reads the lines of one blob and trusts none of them."""

    def __init__(self, lines: list[str], named_data: Mapping[str, memoryview]) -> None:
        self._lines = lines
        self._named_data = named_data
        self._known = 0

    def read(self) -> LoadedBlob:
        inputs, count = (self._number(line, word) for line, word in enumerate(_HEADINGS))
        if len(self._lines) != count + 3:
            raise BlobError(
                f"{count} instructions need {count + 3} lines, found {len(self._lines)}"
            )
        self._known = inputs
        instructions = tuple(self._instructions(self._lines[2:-1]))
        word, *outputs = self._lines[-1].split(" ")
        if word != "outputs" or not outputs:
            raise BlobError(f"the last line must list the outputs, found {self._lines[-1][:60]!r}")
        return LoadedBlob(inputs, instructions, tuple(self._tensor(text) for text in outputs))

    def _number(self, line: int, word: str) -> int:
        text = self._lines[line] if line < len(self._lines) else ""
        found, _, number = text.partition(" ")
        if found != word or not re.fullmatch(r"\d{1,9}", number):
            raise BlobError(f"line {line + 2} must be '{word} NUMBER', found {text[:60]!r}")
        return int(number)

    def _instructions(self, lines: list[str]) -> Iterator[Instruction]:
        for line in lines:
            op, *rest = line.split(",")
            fields = _FIELDS.get(op)
            if fields is None:
                raise BlobError(f"{op[:40]!r} is none of the operators {', '.join(_FIELDS)}")
            named = [one.partition("=")[::2] for one in rest[1:]]
            if tuple(name for name, _ in named) != fields:
                raise BlobError(f"{op} needs the fields {', '.join(fields)}, found {line[:80]!r}")
            texts = [text for _, text in named]
            identifier = int(rest[0]) if re.fullmatch(r"\d{1,9}", rest[0]) else rest[0]
            read = (self._tensor, self._tensor, self._optional)
            operands = tuple(one(text) for one, text in zip(read, texts, strict=False))
            yield Instruction(op, identifier, operands, self._sizes(texts[3:]))
            self._known += 1

    def _optional(self, text: str) -> int | torch.Tensor | None:
        return None if text == "-" else self._tensor(text)

    def _tensor(self, text: str) -> int | torch.Tensor:
        if text.startswith("@"):
            return read_weight(text[1:], self._named_data)
        if not re.fullmatch(r"%\d{1,9}", text) or int(text[1:]) >= self._known:
            raise BlobError(
                f"an operand must be one of %0 to %{self._known - 1} or a weight, found "
                f"{text[:80]!r}"
            )
        return int(text[1:])

    @staticmethod
    def _sizes(texts: list[str]) -> tuple[tuple[int, ...], ...]:
        for text in texts:
            if not _SIZES.fullmatch(text):
                raise BlobError(f"NUMBER or NUMBERxNUMBER is needed, found {text[:80]!r}")
        sizes = tuple(tuple(int(one) for one in text.split("x")) for text in texts)
        if sizes and (
            [len(one) for one in sizes] != [2, 2, 2, 1]
            or 0 in (*sizes[0], *sizes[2], *sizes[3])
            or math.prod(map(operator.add, sizes[1], (1, 1))) > _MOST_ELEMENTS
        ):
            raise BlobError(f"impossible stride, padding, dilation or groups: {' '.join(texts)}")
        return sizes


_HEADINGS = ("inputs", "instructions")
