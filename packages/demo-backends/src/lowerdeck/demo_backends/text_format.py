"""Text format of the demo backends: writer and validating reader.

The first line has the backend's name, its version and a checksum; the program follows::

    BackendWithStateDemo 2 0badc0de
    inputs @KEY/float32/8x4 float32 int64
    linear 0 %1 @KEY/float32/4x8 -
    mul_by first/mul %3 #0.5 [1,2]
    outputs %4

Each step has an operator, the identifier that the runtime logs, and operands:

- ``%N``: value N; the inputs come first, then the result of each step;
- ``@KEY/DTYPE/SIZES``: a tensor in the named data, whose key is the hash of its bytes;
- ``#N``: a number; ``[N,N]``: a list of integers; ``-``: None.

An input is a dtype, ``number``, or a tensor: the initial value of a state of the delegate.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

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
    """Index of a value, distinct from a literal integer."""


Operand: TypeAlias = Value | torch.Tensor | int | float | Sequence[int] | None


class Step(NamedTuple):
    """Call of one operator.

    Attributes:
        op: Name of the operator.
        identifier: Key in the debug map, which the runtime logs.
        operands: Arguments of the operator.
    """

    op: str
    identifier: int | str
    operands: Sequence[Operand]


class TextProgram(NamedTuple):
    """Decoded content of a blob.

    Attributes:
        inputs: For each input its kind (see ``kind_of``), or the initial value of a state.
        steps: The steps in order; each computes one value.
    """

    inputs: Sequence[str | torch.Tensor]
    steps: Sequence[Step]
    outputs: Sequence[Operand]


def kind_of(value: object) -> str:
    """Return ``number`` for a number, and the dtype of a tensor, such as ``float32``."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "number"


def write(
    name: str, version: str, program: TextProgram, store: Callable[[str, torch.Tensor], None]
) -> bytes:
    """Return a program as a blob.

    Args:
        version: The version of the backend's operators.
        store: Adds a tensor to the named data under a key; equal tensors have equal keys.

    Raises:
        BlobError: The format cannot represent an operand or the dtype of a tensor.
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
        raise BlobError(f"found the operand {operand!r}, expected tensors and numbers")

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
    """Return the program in a blob, with steps in topological order.

    Args:
        version: The version of the backend's operators.
        blob: The untrusted bytes.
        operators: Names of the supported operators.
        named_data: The bytes of the tensors by key; the tensors are read-only views of the bytes.

    Raises:
        BlobError: The blob is malformed, or of another backend or version.
    """
    first, _, body = blob.partition(b"\n")
    expected = _first_line(name, version, body)
    if first + b"\n" != expected:
        raise BlobError(
            f"found {first[:60]!r}, expected {expected[:-1]!r} (name, version, checksum): the "
            "blob is truncated, corrupt, or of another backend or version"
        )
    if not body.isascii() or body.count(b"\n") < 2 or not body.endswith(b"\n"):
        raise BlobError("expected lines of inputs and outputs, each with a newline at its end")
    head, *middle, last = (line.split(" ") for line in body.decode("ascii").split("\n")[:-1])
    if head[0] != "inputs" or last[0] != "outputs" or len(last) == 1:
        raise BlobError(
            f"the first line begins with {head[0][:40]!r} and the last with "
            f"{' '.join(last[:2])[:40]!r}; expected 'inputs' and 'outputs VALUE'"
        )
    inputs = [_input(word, named_data) for word in head[1:]]
    steps = []
    for count, (op, *words) in enumerate(middle, start=len(inputs)):
        if op not in operators or not words:
            raise BlobError(f"found operator {op[:40]!r}, expected one of {', '.join(operators)}")
        identifier = int(words[0]) if re.fullmatch(r"\d{1,9}", words[0]) else words[0]
        operands = [_operand(word, count, named_data) for word in words[1:]]
        steps.append(Step(op, identifier, operands))
    count = len(inputs) + len(steps)
    outputs = [_operand(word, count, named_data) for word in last[1:]]
    if not all(isinstance(item, (Value, torch.Tensor)) for item in outputs):
        raise BlobError(f"found the outputs {last!r}, expected tensors only")
    return TextProgram(inputs, steps, outputs)


def _first_line(name: str, version: str, body: bytes) -> bytes:
    return f"{name} {version} {zlib.crc32(body):08x}\n".encode("ascii")


def _stored(tensor: torch.Tensor, store: Callable[[str, torch.Tensor], None]) -> str:
    kind = kind_of(tensor)
    if kind not in _DTYPES:
        raise BlobError(f"found weights of {tensor.dtype}, expected one of {', '.join(_DTYPES)}")
    key = hashlib.sha256(bytes_of(tensor)).hexdigest()
    store(key, tensor)
    return f"@{key}/{kind}/{'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _input(word: str, named_data: Mapping[str, memoryview]) -> str | torch.Tensor:
    if word.startswith("@"):
        return _tensor(word, named_data)
    if word not in _DTYPES and word != "number":
        raise BlobError(f"found the input {word[:80]!r}, expected a dtype, 'number' or a tensor")
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
            f"found the operand {word[:80]!r}, expected one of %0 to %{count - 1}, a tensor, "
            "numbers or '-'"
        )
    return Value(word[1:])


def _tensor(word: str, named_data: Mapping[str, memoryview]) -> torch.Tensor:
    match = _TENSOR.fullmatch(word)
    if match is None or match[2] not in _DTYPES:
        raise BlobError(f"found the tensor {word[:80]!r}, expected @KEY/DTYPE/SIZExSIZE")
    key, dtype, sizes = match.groups()
    shape = [] if sizes == "scalar" else [int(size) for size in sizes.split("x")]
    if key not in named_data:
        raise BlobError(
            f"the named data has no entry {key}: load the blob together with its file and the "
            "file's .ptd"
        )
    try:
        return view_tensor(named_data[key], _DTYPES[dtype], shape)
    except ValueError as error:
        raise BlobError(f"named data {key[:12]}...: {error}") from error
