"""The smallest program that a delegate can be: a text of operators on numbered values.

Three of the demo backends compile to it::

    inputs 2
    steps 2
    linear %0 @KEY/float32/4x8 -
    add %2 %1
    outputs %3

``%N`` is a value (inputs first, then one for each step), ``@`` a weight in the named data, ``#`` a
number, ``-`` nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from lowerdeck.demo_backends.errors import (
    BlobError,
    DelegateInputError,
    DelegateRunError,
    UnsupportedNodeError,
)
from lowerdeck.demo_backends.named_weights import NamedWeights, read_weight
from lowerdeck.torch_base import describe_node

Operators: TypeAlias = Mapping[object, tuple[str, Callable[..., torch.Tensor]]]
"""For each operator of torch its name in the text, and what computes it."""
_FAULTS = (RuntimeError, ValueError, IndexError, TypeError)


class _Slot(int):
    """The number of a value, which no plain number is taken for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation.

    Attributes:
        op: Name of the operator.
        operands: What it is called with.
    """

    op: str
    operands: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TextProgram:
    """A program that was read and checked.

    Attributes:
        inputs: Number of inputs.
        steps: The operations in order.
        outputs: What it returns.
    """

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]


@dataclass(slots=True)
class TextWriter:
    """Writes a program node by node.

    Attributes:
        backend: Id of the backend, for messages.
        operators: What the backend computes.
        weights: Where constants go.
    """

    backend: str
    operators: Operators
    weights: NamedWeights = field(default_factory=NamedWeights)
    _names: dict[Node, str] = field(default_factory=dict)
    _inputs: int = 0
    _steps: list[str] = field(default_factory=list)

    def add_input(self, node: Node) -> None:
        """Number an input; all come before the first step."""
        self._names[node] = f"%{self._inputs}"
        self._inputs += 1

    def add_constant(self, node: Node, tensor: torch.Tensor) -> None:
        """Store a constant."""
        self._names[node] = f"@{self.weights.add(tensor)}"

    def add_step(self, node: Node) -> None:
        """Write one call.

        Args:
            node: A call of an operator.

        Raises:
            UnsupportedNodeError: The backend has no such operator, or an operand is no tensor of
                the partition and no number.
        """
        known = self.operators.get(node.target)
        if known is None or node.kwargs:
            names = ", ".join(name for name, _ in self.operators.values())
            raise UnsupportedNodeError(
                f"{self.backend} cannot compile {describe_node(node)}: it knows {names}; leave "
                "other nodes untagged"
            )
        place = describe_node(node)
        words = [known[0], *(self._word(argument, place) for argument in node.args)]
        self._steps.append(" ".join(words))
        self._names[node] = f"%{self._inputs + len(self._steps) - 1}"

    def lines(self, outputs: Sequence[Node | None]) -> list[str]:
        """Return the text of the program with these outputs."""
        words = [self._tensor(node, "the outputs") for node in outputs]
        return [
            *(f"inputs {self._inputs}", f"steps {len(self._steps)}", *self._steps),
            " ".join(["outputs", *words]),
        ]

    def _word(self, argument: object, place: str) -> str:
        if argument is None:
            return "-"
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return f"#{argument!r}"
        return self._tensor(argument, place)

    def _tensor(self, argument: object, place: str) -> str:
        if isinstance(argument, Node) and argument in self._names:
            return self._names[argument]
        raise UnsupportedNodeError(
            f"{self.backend} cannot use {argument!r} in {place}: only tensors that the partition "
            "is given or computes, and numbers as operands"
        )


def read_program(
    lines: list[str], operators: Operators, named_data: Mapping[str, memoryview]
) -> TextProgram:
    """Return the program that lines of text say.

    Args:
        lines: The text; nothing about it is trusted.
        operators: What may be called.
        named_data: The weights.

    Returns:
        The program; every value it reads is there by then.

    Raises:
        BlobError: A line is not what it should be; the message quotes it.
    """
    inputs, count = (_count(lines, place, word) for place, word in enumerate(("inputs", "steps")))
    if len(lines) != count + 3:
        raise BlobError(f"{count} steps need {count + 3} lines, found {len(lines)}")
    names = {name for name, _ in operators.values()}
    steps = []
    for place, line in enumerate(lines[2:-1]):
        op, *words = line.split(" ")
        if op not in names:
            raise BlobError(f"{op[:40]!r} is none of the operators {', '.join(sorted(names))}")
        operands = tuple(_operand(word, inputs + place, named_data) for word in words)
        steps.append(Step(op, operands))
    word, *outputs = lines[-1].split(" ")
    if word != "outputs" or not outputs:
        raise BlobError(f"the last line must list the outputs, found {lines[-1][:60]!r}")
    returned = tuple(_operand(one, inputs + count, named_data) for one in outputs)
    if not all(isinstance(one, (_Slot, torch.Tensor)) for one in returned):
        raise BlobError(f"an output is no tensor: {lines[-1][:60]!r}")
    return TextProgram(inputs, tuple(steps), returned)


def run_program(
    program: TextProgram, operators: Operators, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs of a program.

    Args:
        program: What ``read_program`` returned.
        operators: What computes its steps.
        inputs: Its inputs, in order.

    Returns:
        The outputs, in order.

    Raises:
        DelegateInputError: Another number of inputs is needed.
        DelegateRunError: A step cannot be computed on these inputs.
    """
    if len(inputs) != program.inputs:
        raise DelegateInputError(f"{program.inputs} inputs are needed, found {len(inputs)}")
    kernels = dict(operators.values())
    values = list(inputs)

    def fetch(operand: Any) -> Any:
        return values[operand] if isinstance(operand, _Slot) else operand

    for number, step in enumerate(program.steps):
        try:
            values.append(kernels[step.op](*map(fetch, step.operands)))
        except _FAULTS as error:
            raise DelegateRunError(f"step {number}, {step.op}: {error}") from error
    return [fetch(operand) for operand in program.outputs]


def _count(lines: list[str], place: int, word: str) -> int:
    text = lines[place] if place < len(lines) else ""
    if not re.fullmatch(rf"{word} \d{{1,9}}", text):
        raise BlobError(f"line {place + 2} must be '{word} NUMBER', found {text[:60]!r}")
    return int(text.split(" ")[1])


def _operand(word: str, known: int, named_data: Mapping[str, memoryview]) -> Any:
    if word == "-":
        return None
    if word.startswith("@"):
        return read_weight(word[1:], named_data)
    if re.fullmatch(r"#-?\d{1,18}", word):
        return int(word[1:])
    if re.fullmatch(r"#-?(\d{1,25}\.\d{1,25}(e[-+]?\d{1,3})?|\de[-+]?\d{1,3}|inf|nan)", word):
        return float(word[1:])
    if not re.fullmatch(r"%\d{1,9}", word) or int(word[1:]) >= known:
        raise BlobError(
            f"an operand must be one of %0 to %{known - 1}, a weight, a number or '-', found "
            f"{word[:80]!r}"
        )
    return _Slot(word[1:])
