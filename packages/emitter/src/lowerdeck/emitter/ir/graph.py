"""Functional IR of a method: operations on values in SSA form.

Control flow has nested blocks, which read values of the enclosing blocks directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import fx

from lowerdeck.emitter.ir.values import ScalarValue, TensorValue, Value
from lowerdeck.torch_base import OpOverload, pytree, schema_of


@dataclass(frozen=True, slots=True)
class Kernel:
    """The runtime's kernel for an operation.

    Attributes:
        name: Operator with namespace, such as ``"aten::add"``.
        overload: Overload, such as ``"out"``; "" for the default one.
        list_out: Whether the outputs are one list of tensors.
    """

    name: str
    overload: str
    list_out: bool = False

    @property
    def full_name(self) -> str:
        """Return the name as the runtime registers it."""
        return f"{self.name}.{self.overload}" if self.overload else self.name


VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "reshape"})
"""Other names of ``view``: with static sizes they are one kernel."""
_OPERATORS: dict[int, tuple[OpOverload, str]] = {}
"""Cache of operator names."""


@dataclass(eq=False, slots=True)
class Call:
    """A call of an operator.

    Attributes:
        target: The operator: an ``OpOverload``, a Python function on numbers, or a ``Kernel``
            that exists only in the runtime.
        args: One entry for each argument of the schema, in order, with defaults filled in.
        origin: The graph node from which the call was created.
        kernel: The runtime's kernel, set by the pass ``select_kernels``.
        effect: Whether it has side effects: it is neither removed nor reordered.
        rewritten: Positions of arguments that the kernel mutates. Their new values are the last of
            ``outs``; other uses of the arguments read the old values.
    """

    target: Any
    args: list[Any]
    outs: list[Value]
    origin: fx.Node | None
    kernel: Kernel | None = None
    effect: bool = False
    rewritten: tuple[int, ...] = ()

    @property
    def is_foreign(self) -> bool:
        """Return whether the operator is of another library than ATen."""
        return isinstance(self.target, OpOverload) and self.target.namespace != "aten"

    @property
    def op_name(self) -> str:
        """Return the operator without namespace and overload, such as ``"add"``."""
        if isinstance(self.target, OpOverload):
            # Keyed by id: hashing an operator is slow, and torch keeps operators alive.
            cached = _OPERATORS.get(id(self.target))
            if cached is None or cached[0] is not self.target:
                name = schema_of(self.target).name.partition("::")[2]
                cached = _OPERATORS[id(self.target)] = (self.target, name)
            return cached[1]
        if isinstance(self.target, Kernel):
            return self.target.name.partition("::")[2]
        return str(getattr(self.target, "__name__", self.target))

    @property
    def view_name(self) -> str:
        """Return the name of a view, which its copying variant and synonyms share."""
        name = self.op_name.removesuffix("_copy")
        return "view" if name in VIEWS else name

    @property
    def order(self) -> list[int]:
        """Return the source's dimension for each one of a ``permute``, ``transpose`` or ``t``."""
        source, *dims = self.args
        rank = max(source.rank, 1)
        if self.view_name == "permute":
            return [dim % rank for dim in dims[0]]
        order = list(range(source.rank))
        if self.view_name == "t":
            order.reverse()
        elif order:
            first, second = dims[0] % rank, dims[1] % rank
            order[first], order[second] = second, first
        return order


@dataclass(eq=False, slots=True)
class Delegate:
    """A call of a lowered module: inputs in order, outputs in order."""

    module: Any
    args: list[Any]
    outs: list[Value]
    origin: fx.Node | None


@dataclass(eq=False, slots=True)
class Block:
    """A basic block, whose operations may have nested blocks.

    Attributes:
        results: Results of the block: values, or literals.
    """

    body: list[Operation] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Cond:
    """Runs one of two blocks.

    Attributes:
        predicate: A bool tensor, a run-time bool, or a literal.
        branches: The blocks for true and for false.
        outs: One value for each result of the branches.
    """

    predicate: Any
    branches: tuple[Block, Block]
    outs: list[Value]
    origin: fx.Node | None


@dataclass(eq=False, slots=True)
class While:
    """Run ``body`` while ``condition`` returns true.

    Attributes:
        initial: First value of each carried value.
        carried: The carried values, which both blocks read, updated after each iteration; also
            the results of the loop.
        condition: Block with one result.
        body: Block with one result for each carried value.
    """

    initial: list[Any]
    carried: list[Value]
    condition: Block
    body: Block
    origin: fx.Node | None

    @property
    def outs(self) -> list[Value]:
        """Return the results of the loop."""
        return self.carried


@dataclass(eq=False, slots=True)
class Scan:
    """Run ``body`` for each row of ``xs`` along dimension 0; a map has no carried values.

    Attributes:
        initial: First value of each carried value.
        carried: The carried values, updated after each row; results of the loop.
        xs: Tensors whose rows are passed one by one.
        rows: The row of each of ``xs``, which the body reads.
        body: Block with a result for each carried value, then one for each of ``stacked``.
        stacked: Tensors into which the row results are stacked.
    """

    initial: list[Any]
    carried: list[Value]
    xs: list[TensorValue]
    rows: list[TensorValue]
    body: Block
    stacked: list[TensorValue]
    origin: fx.Node | None

    @property
    def outs(self) -> list[Value]:
        """Return the results of the loop."""
        return [*self.carried, *self.stacked]


Operation: TypeAlias = Call | Delegate | Cond | While | Scan


class WriteBack(NamedTuple):
    """Assignment of ``source`` to a tensor outside of the graph at the end of the method."""

    target: TensorValue
    source: TensorValue


@dataclass(eq=False, slots=True)
class Method:
    """One method of the program.

    Attributes:
        inputs: User inputs in order: values, or literals that are fixed.
        outputs: User outputs in order: values, or literals.
        write_backs: Parallel assignments to the buffers and inputs that the method mutates.
        in_spec: Pytree spec of the inputs.
        out_spec: Pytree spec of the outputs.
        ranges: The least and the largest value of each symbol in a shape.
    """

    name: str
    inputs: list[Any]
    outputs: list[Any]
    block: Block
    write_backs: list[WriteBack]
    in_spec: pytree.TreeSpec | None = None
    out_spec: pytree.TreeSpec | None = None
    ranges: Mapping[Any, Any] = field(default_factory=dict)


def blocks_of(operation: Operation) -> tuple[Block, ...]:
    """Return the blocks of an operation."""
    match operation:
        case Cond():
            return operation.branches
        case While():
            return (operation.condition, operation.body)
        case Scan():
            return (operation.body,)
        case _:
            return ()


def all_blocks(block: Block) -> Iterator[Block]:
    """Yield ``block`` and all blocks inside it, outer ones first."""
    pending = [block]
    while pending:
        current = pending.pop()
        yield current
        for operation in current.body:
            pending.extend(blocks_of(operation))


_HELD = (TensorValue, ScalarValue, list, tuple)


def values_in(argument: Any) -> Iterator[Value]:
    """Yield the values in an argument, including those in lists."""
    if isinstance(argument, (TensorValue, ScalarValue)):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            if isinstance(item, (TensorValue, ScalarValue)):
                yield item
            elif isinstance(item, (list, tuple)):
                yield from values_in(item)


def reads_of(operation: Operation) -> Iterator[Value]:
    """Yield the values that an operation reads, without those that only its blocks read."""
    match operation:
        case Call() | Delegate():
            yield from values_in(operation.args)
        case Cond():
            yield from values_in(operation.predicate)
        case While():
            yield from values_in(operation.initial)
        case Scan():
            yield from values_in(operation.initial)
            yield from operation.xs


def substitute(argument: Any, replaced: dict[Value, Any]) -> Any:
    """Return ``argument`` with values replaced, also in lists."""
    if isinstance(argument, (TensorValue, ScalarValue)):
        return replaced.get(argument, argument)
    if isinstance(argument, (list, tuple)):
        # Most items are numbers: avoid a recursive call for them.
        return [
            substitute(item, replaced) if isinstance(item, _HELD) else item for item in argument
        ]
    return argument


def substitute_reads(operation: Operation, replaced: dict[Value, Any]) -> None:
    """Replace values that ``operation`` reads, but not inside its blocks."""
    match operation:
        case Call() | Delegate():
            operation.args = substitute(operation.args, replaced)
        case Cond():
            operation.predicate = substitute(operation.predicate, replaced)
        case While():
            operation.initial = substitute(operation.initial, replaced)
        case Scan():
            operation.initial = substitute(operation.initial, replaced)
            operation.xs = substitute(operation.xs, replaced)
