"""The text that the small demo backends compile to, written and read here and nowhere else.

A line of name, version and checksum, and the program::

    BackendWithStateDemo 2 0badc0de
    inputs @KEY/float32/8x4 float32 int64
    linear 0 %1 @KEY/float32/4x8 -
    mul_by first/mul %3 #0.5 [1,2]
    outputs %4

Each step is an operator, the identifier that it is logged by, and its operands. ``%N`` is a value
(the inputs first, then one for each step), ``@`` a tensor whose bytes are in the named data under
the hash of their content, ``#`` a number, ``[]`` a list of numbers, ``-`` nothing. An input is a
dtype, or ``number``, or a tensor: the first value of a state, which the delegate keeps.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lowerdeck.demo_backends.errors import BlobError
from lowerdeck.torch_base import bytes_of, view_tensor

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
_TENSOR = re.compile(r"@([0-9a-f]{64})/([a-z0-9]{4,8})/((?:\d{1,10}x)*\d{1,10}|scalar)")
_WHOLE = re.compile(r"#-?\d{1,19}")
_FRACTION = re.compile(r"#-?(\d{1,25}\.\d{1,25}(e[-+]?\d{1,3})?|\de[-+]?\d{1,3}|inf|nan)")
_LIST = re.compile(r"\[(-?\d{1,19}(,-?\d{1,19})*)?\]")


class Value(int):
    """The number of a value, which no plain number is taken for."""


Operand: TypeAlias = Value | torch.Tensor | int | float | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes:
        op: Name of what computes it.
        identifier: What it is logged by: the key of the debug map.
        operands: What it is called with.
    """

    op: str
    identifier: int | str
    operands: Sequence[Operand]


@dataclass(frozen=True, slots=True)
class TextProgram:
    """What a blob says.

    Attributes:
        inputs: For each input what it must be (``kind_of``), or the first value of a state.
        steps: The operations in order; each makes one value.
    """

    inputs: Sequence[str | torch.Tensor]
    steps: Sequence[Step]
    outputs: Sequence[Operand]


def kind_of(value: object) -> str:
    """Return the dtype of a tensor, such as ``float32``, or ``number``."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "number"


def write(
    name: str, version: str, program: TextProgram, store: Callable[[str, torch.Tensor], None]
) -> bytes:
    """Return a program as a blob.

    Args:
        version: The version of its operators.
        store: Puts a tensor into the named data under a key; equal tensors have equal keys.

    Raises:
        BlobError: A tensor's dtype, or an operand, is none that the text can say.
    """

    def word(operand: object) -> str:
        if operand is None:
            return "-"
        if isinstance(operand, Value):
            return f"%{int(operand)}"
        if isinstance(operand, torch.Tensor):
            return _stored(operand, store)
        if isinstance(operand, (list, tuple)) and all(type(item) is int for item in operand):
            return f"[{','.join(map(str, operand))}]"
        if isinstance(operand, (int, float)) and not isinstance(operand, bool):
            return f"#{operand!r}"
        raise BlobError(f"the text has no word for {operand!r}: tensors and numbers only")

    inputs = (item if isinstance(item, str) else word(item) for item in program.inputs)
    lines = [
        ["inputs", *inputs],
        *([step.op, str(step.identifier), *map(word, step.operands)] for step in program.steps),
        ["outputs", *map(word, program.outputs)],
    ]
    body = "".join(f"{' '.join(line)}\n" for line in lines).encode("ascii")
    return _first_line(name, version, body) + body


def read(
    name: str,
    version: str,
    blob: bytes,
    operators: Collection[str],
    named_data: Mapping[str, memoryview],
) -> TextProgram:
    """Return the program that a blob says; every value that a step reads is there by then.

    Args:
        version: The version of its operators.
        blob: The bytes; nothing about them is trusted.
        operators: Names that a step may have.
        named_data: Where tensors are; they become views on it, which must not be written to.

    Raises:
        BlobError: The blob is another's or damaged, or a line is not what it should be.
    """
    first, _, body = blob.partition(b"\n")
    expected = _first_line(name, version, body)
    if first + b"\n" != expected:
        raise BlobError(
            f"found {first[:60]!r}, expected {expected[:-1]!r}, a name, a version and a checksum: "
            "the blob is another backend's or version's, truncated or damaged"
        )
    if not body.isascii() or body.count(b"\n") < 2 or not body.endswith(b"\n"):
        raise BlobError("a text has a line of inputs and one of outputs, each ended by a newline")
    head, *middle, last = (line.split(" ") for line in body.decode("ascii").split("\n")[:-1])
    if head[0] != "inputs" or last[0] != "outputs" or len(last) == 1:
        raise BlobError(f"'inputs ...' to 'outputs ...' is needed, found {head[0]!r}, {last!r}")
    inputs = [_input(word, named_data) for word in head[1:]]
    steps = []
    for count, (op, *words) in enumerate(middle, start=len(inputs)):
        if op not in operators or not words:
            raise BlobError(f"{op[:40]!r} is none of the operators {', '.join(operators)}")
        identifier = int(words[0]) if re.fullmatch(r"\d{1,9}", words[0]) else words[0]
        operands = [_operand(word, count, named_data) for word in words[1:]]
        steps.append(Step(op, identifier, operands))
    count = len(inputs) + len(steps)
    outputs = [_operand(word, count, named_data) for word in last[1:]]
    if not all(isinstance(item, (Value, torch.Tensor)) for item in outputs):
        raise BlobError(f"an output is not a tensor: {last!r}")
    return TextProgram(inputs, steps, outputs)


def _first_line(name: str, version: str, body: bytes) -> bytes:
    return f"{name} {version} {zlib.crc32(body):08x}\n".encode("ascii")


def _stored(tensor: torch.Tensor, store: Callable[[str, torch.Tensor], None]) -> str:
    kind = kind_of(tensor)
    if kind not in _DTYPES:
        raise BlobError(f"weights of {tensor.dtype} cannot be stored, only {', '.join(_DTYPES)}")
    key = hashlib.sha256(bytes_of(tensor)).hexdigest()
    store(key, tensor)
    return f"@{key}/{kind}/{'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _input(word: str, named_data: Mapping[str, memoryview]) -> str | torch.Tensor:
    if word.startswith("@"):
        return _tensor(word, named_data)
    if word not in _DTYPES and word != "number":
        raise BlobError(f"an input is a dtype, 'number' or a tensor, found {word[:80]!r}")
    return word


def _operand(word: str, count: int, named_data: Mapping[str, memoryview]) -> Operand:
    if word == "-":
        return None
    if word.startswith("@"):
        return _tensor(word, named_data)
    if _LIST.fullmatch(word):
        return [int(item) for item in word[1:-1].split(",") if item]
    if _WHOLE.fullmatch(word):
        return int(word[1:])
    if _FRACTION.fullmatch(word):
        return float(word[1:])
    if not re.fullmatch(r"%\d{1,9}", word) or int(word[1:]) >= count:
        raise BlobError(
            f"an operand must be one of %0 to %{count - 1}, a tensor, numbers or '-', found "
            f"{word[:80]!r}"
        )
    return Value(word[1:])


def _tensor(word: str, named_data: Mapping[str, memoryview]) -> torch.Tensor:
    match = _TENSOR.fullmatch(word)
    if match is None or match[2] not in _DTYPES:
        raise BlobError(f"@KEY/DTYPE/SIZExSIZE is needed to name a tensor, found {word[:80]!r}")
    key, dtype, sizes = match.groups()
    shape = [] if sizes == "scalar" else [int(size) for size in sizes.split("x")]
    if key not in named_data:
        raise BlobError(
            f"the named data has no entry {key}: was the blob taken out of its file, or is the "
            ".ptd missing that it came with?"
        )
    try:
        return view_tensor(named_data[key], _DTYPES[dtype], shape)
    except ValueError as error:
        raise BlobError(f"named data {key[:12]}...: {error}") from error
