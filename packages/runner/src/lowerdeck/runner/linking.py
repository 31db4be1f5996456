"""The code of a method, linked: operators found, registers examined, instructions bound."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowerdeck.runner.binding import Step, bind_kernel, written_values
from lowerdeck.runner.delegates import Delegate, is_given
from lowerdeck.runner.errors import ProgramError
from lowerdeck.runner.flow import always_written
from lowerdeck.runner.frame import Frame, Freed
from lowerdeck.runner.kernels import VIEW, Kernel, ScalarKernel, find_kernel
from lowerdeck.runner.machine import BoundChain
from lowerdeck.serializer import (
    Bool,
    DelegateCall,
    ExecutionPlan,
    FreeCall,
    InstructionArguments,
    JumpFalseCall,
    KernelCall,
    MoveCall,
    Tensor,
)


class Linker:
    """Turns the instructions of one method into functions.

    Args:
        plan: The method as the file describes it.
        frame: Its values.
        delegates: Its delegates.

    Raises:
        ProgramError: An operator is unknown, or an index is out of range.
    """

    def __init__(self, plan: ExecutionPlan, frame: Frame, delegates: Sequence[Delegate]) -> None:
        self._plan = plan
        self._frame = frame
        self._delegates = delegates
        self._code = [[item.instr_args for item in chain.instructions] for chain in plan.chains]
        self._kernels = self._find_kernels()
        self._check_indices()
        self._examine()

    def link(self) -> list[BoundChain]:
        """Return the chains of the method, bound.

        Raises:
            ProgramError: An instruction does not fit its values.
        """
        return [self._link_chain(number) for number in range(len(self._code))]

    def written_by(self, item: InstructionArguments) -> list[int]:
        """Return the values that an instruction writes; for a delegate, all that it is given.

        Args:
            item: The instruction.
        """
        match item:
            case KernelCall(op_index, args):
                kernel = self._kernels[op_index]
                return [] if kernel is None else written_values(kernel, args, self._frame)
            case DelegateCall(_, args):
                return list(args)
            case MoveCall(_, target):
                return [target]
            case _:
                return []

    def _find_kernels(self) -> list[Kernel | None]:
        operators = self._plan.operators
        used = {
            item.op_index for code in self._code for item in code if isinstance(item, KernelCall)
        }
        if any(not 0 <= index < len(operators) for index in used):
            raise ProgramError(
                f"an instruction calls operator {max(used)}; {len(operators)} are listed"
            )
        kernels = [find_kernel(item.name, item.overload) for item in operators]
        missing = sorted(operators[index].full_name for index in used if kernels[index] is None)
        if missing:
            raise ProgramError(
                f"no kernel is known for {', '.join(missing)}; the runner has the out variants "
                "of torch and the runtime's own scalar and view operators"
            )
        return kernels

    def _check_indices(self) -> None:
        for code in self._code:
            for number, item in enumerate(code):
                for index in _values_of(item):
                    self._frame.check(index, f"an argument of instruction {number}")

    def _examine(self) -> None:
        """Find out which registers are rebound, and which values share memory."""
        moving, edges = self._frame.moving, []
        for code in self._code:
            for item in code:
                match item:
                    case MoveCall(source, target):
                        moving.add(target)
                        edges.append((source, target))
                    case FreeCall(index):
                        moving.add(index)
                    case KernelCall(op_index, args):
                        kernel = self._kernels[op_index]
                        if isinstance(kernel, ScalarKernel):
                            moving.update(args[kernel.arity :])
                        elif kernel is not None and kernel.name == VIEW and len(args) > 2:
                            edges.append((args[0], args[2]))
                    case _:
                        pass
        self._frame.mark_aliases(edges)

    def _link_chain(self, number: int) -> BoundChain:
        code = self._code[number]
        calls = frozenset(i for i, item in enumerate(code) if isinstance(item, DelegateCall))
        held = always_written(
            code,
            [self.written_by(item) for item in code] if calls else (),
            self._given(number) if calls else (),
            calls,
        )
        steps, names = [], []
        for index, item in enumerate(code):
            names.append(self._describe(item))
            try:
                steps.append(self._bind(item, held.get(index, frozenset())))
            except ProgramError as error:
                raise ProgramError(f"instruction {index} ({names[-1]}): {error}") from error
        jumps = any(isinstance(item, JumpFalseCall) for item in code)
        return BoundChain(tuple(steps), tuple(names), jumps)

    def _given(self, number: int) -> set[int]:
        """Return what holds something before chain ``number``; earlier chains have run."""
        given = {i for i, value in enumerate(self._frame.values) if is_given(value)}
        given.update(self._plan.inputs)
        for code in self._code[:number]:
            for item in code:
                given.update(self.written_by(item))
        return given

    def _bind(self, item: InstructionArguments, held: frozenset[int]) -> Step:
        registers = self._frame.registers
        match item:
            case KernelCall(op_index, args):
                kernel = self._kernels[op_index]
                if kernel is None:
                    raise ProgramError("no kernel is known")
                return bind_kernel(kernel, args, self._frame)
            case DelegateCall(index, args):
                if not 0 <= index < len(self._delegates):
                    raise ProgramError(f"there is no delegate {index}")
                return self._delegates[index].bind(args, self._frame, held)
            case MoveCall(source, target):
                return _move(registers, source, target)
            case FreeCall(index):
                return _free(registers, index)
            case JumpFalseCall(condition, destination):
                return self._jump(condition, destination)

    def _jump(self, condition: int, destination: int) -> Step:
        frame = self._frame
        value = frame.values[condition]
        if destination < 0:
            raise ProgramError(f"the jump goes to {destination}")
        if isinstance(value, Tensor):
            tensor, spec = frame.tensor(condition, "a condition")
            if spec.dtype is not torch.bool:
                raise ProgramError(f"the condition is a tensor of {spec.dtype}")
            if condition not in frame.moving:
                return lambda: None if tensor.all().item() else destination
        elif not isinstance(value, Bool):
            raise ProgramError(f"the condition is a {type(value).__name__}")
        registers = frame.registers
        return lambda: None if _truth(registers[condition]) else destination

    def _describe(self, item: InstructionArguments) -> str:
        match item:
            case KernelCall(op_index):
                return self._plan.operators[op_index].full_name
            case DelegateCall(index) if 0 <= index < len(self._delegates):
                return f"{self._delegates[index].backend_id}[{index}]"
            case _:
                return type(item).__name__


def _values_of(item: InstructionArguments) -> list[int]:
    match item:
        case KernelCall(_, args) | DelegateCall(_, args):
            return args
        case MoveCall(source, target):
            return [source, target]
        case JumpFalseCall(condition):
            return [condition]
        case FreeCall(index):
            return [index]


def _move(registers: list[object], source: int, target: int) -> Step:
    def step() -> None:
        registers[target] = registers[source]

    return step


def _free(registers: list[object], index: int) -> Step:
    def step() -> None:
        registers[index] = Freed()

    return step


def _truth(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.all().item())
    if not isinstance(value, bool):
        raise TypeError(f"the condition is a {type(value).__name__}")
    return value
