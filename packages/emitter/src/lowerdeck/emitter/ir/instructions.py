"""Linear IR of a method: steps in execution order."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from torch import fx

from lowerdeck.emitter.ir.graph import Kernel
from lowerdeck.emitter.ir.values import Storage, TensorValue, Value


@dataclass(frozen=True, slots=True)
class ListArg:
    """A list that is an argument of a kernel.

    Attributes:
        kind: Class of the list in the file format, such as ``IntList``.
        items: Values or literals; None for a missing tensor.
    """

    kind: Callable[[list[Any]], Any]
    items: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class KernelStep:
    """A kernel call.

    Attributes:
        args: Boxed inputs, outputs and return slot.
        reads: Tensors that it reads.
        writes: Tensors that it writes.
        origin: The graph node from which the step was created.
    """

    kernel: Kernel
    args: list[Any]
    reads: tuple[TensorValue, ...]
    writes: tuple[TensorValue, ...]
    origin: fx.Node | None


@dataclass(eq=False, slots=True)
class DelegateStep:
    """A call of a lowered module: inputs, then outputs."""

    module: Any
    args: list[Any]
    reads: tuple[TensorValue, ...]
    writes: tuple[TensorValue, ...]
    origin: fx.Node | None


@dataclass(eq=False, slots=True)
class MoveStep:
    """Copies a run-time number from one value to another."""

    source: Any
    target: Value
    origin: fx.Node | None
    reads: tuple[TensorValue, ...] = ()
    writes: tuple[TensorValue, ...] = ()


@dataclass(eq=False, slots=True)
class Label:
    """A jump target, resolved when its position is known."""

    index: int = -1


@dataclass(eq=False, slots=True)
class JumpStep:
    """Jumps to ``target`` when ``condition`` is false; the literal False always jumps."""

    condition: Any
    target: Label
    origin: fx.Node | None
    reads: tuple[TensorValue, ...] = ()
    writes: tuple[TensorValue, ...] = ()


Step: TypeAlias = KernelStep | DelegateStep | MoveStep | JumpStep


@dataclass(eq=False, slots=True)
class Code:
    """The steps of one method, with the information for memory planning.

    Attributes:
        name: Name of the method.
        loops: The loops, inner ones first.
        inputs: User inputs: values or literals.
        outputs: User outputs: values or literals.
        storages: Every block of memory that the steps use, in order of first use.
        states: The mutable buffers that the steps use.
        branches: Ranges of steps that conditionals may skip.
    """

    name: str
    steps: list[Step]
    loops: list[range]
    inputs: list[Any]
    outputs: list[Any]
    storages: list[Storage] = field(default_factory=list)
    states: list[TensorValue] = field(default_factory=list)
    branches: list[range] = field(default_factory=list)

    def drop_steps(self, removed: Collection[int]) -> None:
        """Remove steps by index; update jumps, loops and branches.

        Args:
            removed: Indices of the steps; none of them may be a jump.
        """
        moved = list(accumulate((i not in removed for i in range(len(self.steps))), initial=0))
        labels = {step.target for step in self.steps if isinstance(step, JumpStep)}
        for label in labels:
            label.index = moved[label.index]
        self.loops, self.branches = (
            [range(moved[part[0]], moved[part[-1]] + 1) for part in parts]
            for parts in (self.loops, self.branches)
        )
        self.steps = [step for i, step in enumerate(self.steps) if i not in removed]
