"""Find the operators of a method, analyse its registers and bind its instructions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from lowerdeck.runner.delegates import Delegate, DelegateStep
from lowerdeck.runner.errors import MissingKernelError, ProgramError
from lowerdeck.runner.instructions import BoundChain, Instruction, Step, successors
from lowerdeck.runner.linking.binding import bind_kernel, effects
from lowerdeck.runner.operators.kernels import VIEW, Kernel, ScalarKernel, find_kernel
from lowerdeck.runner.values.frame import Frame, Freed
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
    """Convert the instructions of one method to functions.

    Args:
        custom_kernels: Full names of additionally allowed operators.

    Attributes:
        moves: Pairs (from, to) of registers that share memory after a move or a view.

    Raises:
        MissingKernelError: An operator is unknown or not allowed.
        ProgramError: An index is out of range.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        frame: Frame,
        delegates: Sequence[Delegate],
        custom_kernels: Collection[str] = (),
    ) -> None:
        self._plan = plan
        self._custom_kernels = custom_kernels
        self._frame = frame
        self._delegates = delegates
        self._code = [[item.instr_args for item in chain.instructions] for chain in plan.chains]
        self._kernels = self._find_kernels()
        self.moves: list[tuple[int, int]] = []
        self._examine()

    def link(self) -> list[BoundChain]:
        """Return the bound chains of the method.

        Raises:
            ProgramError: An instruction does not match its values.
        """
        return [self._link_chain(number) for number in range(len(self._code))]

    def _find_kernels(self) -> list[Kernel | None]:
        operators = self._plan.operators
        used = {
            item.op_index for code in self._code for item in code if isinstance(item, KernelCall)
        }
        if any(not 0 <= index < len(operators) for index in used):
            raise ProgramError(
                f"calls use the operators {min(used)} to {max(used)}; expected indices from 0 to "
                f"{len(operators) - 1}"
            )
        custom = self._custom_kernels
        kernels = [find_kernel(item.name, item.overload, custom) for item in operators]
        missing = sorted({operators[index].full_name for index in used if kernels[index] is None})
        if missing:
            raise MissingKernelError(
                missing, _missing_text(missing, custom), method=self._plan.name
            )
        return kernels

    def _kernel(self, op_index: int) -> Kernel:
        kernel = self._kernels[op_index]
        if kernel is None:
            raise ProgramError(f"operator {op_index} has no kernel")
        return kernel

    def _examine(self) -> None:
        """Check indices; record rebound registers and values that share memory."""
        rebound = self._frame.rebound
        for code in self._code:
            for number, item in enumerate(code):
                for index in _values_of(item):
                    self._frame.check(index, f"an argument of instruction {number}")
                match item:
                    case MoveCall(source, target):
                        rebound.add(target)
                        self.moves.append((source, target))
                    case FreeCall(index):
                        rebound.add(index)
                    case KernelCall(op_index, args):
                        kernel = self._kernel(op_index)
                        if isinstance(kernel, ScalarKernel):
                            rebound.update(args[kernel.arity :])
                        elif kernel.name == VIEW and len(args) > 2:
                            self.moves.append((args[0], args[2]))
                    case _:
                        pass
        self._frame.mark_aliases(self.moves)

    def _link_chain(self, number: int) -> BoundChain:
        code = self._code[number]
        steps, instructions = [], []
        for index, item in enumerate(code):
            instruction = Instruction(self._name(item))
            try:
                step, instruction = self._bind(item)
            except ProgramError as error:
                raise ProgramError(f"instruction {index} ({instruction.name}): {error}") from error
            steps.append(step)
            instructions.append(instruction)
        return BoundChain(
            tuple(steps),
            tuple(instructions),
            self._follow(code),
            any(isinstance(item, JumpFalseCall) for item in code),
        )

    def _follow(self, code: Sequence[InstructionArguments]) -> tuple[tuple[int, ...], ...]:
        """Return the possible successors of each instruction; jumps on a constant have one."""
        follow = successors(code)
        for index, item in enumerate(code):
            if (
                isinstance(item, JumpFalseCall)
                and item.cond_value_index not in self._frame.rebound
            ):
                value = self._frame.values[item.cond_value_index]
                if isinstance(value, Bool):
                    follow[index] = follow[index][:1] if value.bool_val else follow[index][1:]
        return tuple(follow)

    def _bind(self, item: InstructionArguments) -> tuple[Step, Instruction]:
        registers, name = self._frame.registers, self._name(item)
        match item:
            case KernelCall(op_index, args):
                kernel = self._kernel(op_index)
                step = bind_kernel(kernel, args, self._frame)
                return step, effects(kernel, args, self._frame)
            case DelegateCall(index, args):
                if not 0 <= index < len(self._delegates):
                    count = len(self._delegates)
                    raise ProgramError(f"delegate {index} is missing; the file has {count}")
                count = self._delegates[index].input_count(len(args))
                inputs, outputs = args[:count], args[count:]
                call = DelegateStep(self._delegates[index], inputs, outputs, self._frame)
                reads = tuple(i for value in inputs for i in self._frame.unfolded(value))
                return call, Instruction(name, reads, tuple(outputs), tuple(outputs))
            case MoveCall(source, target):
                instruction = Instruction(name, (source,), (target,), (target,))
                return _move(registers, source, target), instruction
            case FreeCall(index):
                return _free(registers, index), Instruction(name)
            case JumpFalseCall(condition, destination):
                return self._jump(condition, destination), Instruction(name, (condition,))

    def _jump(self, condition: int, destination: int) -> Step:
        frame = self._frame
        value = frame.values[condition]
        if destination < 0:
            raise ProgramError(f"the jump target is {destination}; expected 0 or more")
        if isinstance(value, Tensor):
            _, spec = frame.tensor(condition, "a condition")
            if spec.dtype is not torch.bool:
                raise ProgramError(f"the condition is a tensor of {spec.dtype}; expected bool")
        elif not isinstance(value, Bool):
            raise ProgramError(f"the condition is a {type(value).__name__}; expected a Bool")
        registers = frame.registers
        return lambda: None if _truth(registers[condition]) else destination

    def _name(self, item: InstructionArguments) -> str:
        match item:
            case KernelCall(op_index):
                return self._plan.operators[op_index].full_name
            case DelegateCall(index) if 0 <= index < len(self._delegates):
                return f"{self._delegates[index].backend_id}[{index}]"
            case _:
                return type(item).__name__


def _missing_text(missing: Sequence[str], custom: Collection[str]) -> str:
    absent = [name for name in missing if name in custom]
    if absent:
        return (
            f"custom_kernels allows {', '.join(absent)}, but torch has no such out variant: "
            "import the library that registers it"
        )
    names = "".join(f", {name!r}" for name in missing)[2:]
    return (
        f"no kernel for {', '.join(missing)}: files may call only operators with a kernel in the "
        f"ExecuTorch runtime; for a kernel of your own, import its library and pass "
        f"load(..., custom_kernels={{{names}}})"
    )


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
        raise TypeError(f"the condition is a {type(value).__name__}; expected a bool")
    return value
