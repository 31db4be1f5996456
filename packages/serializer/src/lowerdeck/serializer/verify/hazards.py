"""Crash risks in valid files that depend on input values or on missing ``.ptd`` data.

Each case was run in the official runtime. A division by a constant of the file is not reported,
unless the constant is -1.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from lowerdeck.serializer.kernels.limits import Shape, Steps
from lowerdeck.serializer.kernels.table import PRIMITIVES, RuntimeKernel, runtime_kernels
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import ScalarType
from lowerdeck.serializer.verify.number_bounds import NumberBounds
from lowerdeck.serializer.xnnpack.graph import XnnGraph
from lowerdeck.serializer.xnnpack.moves import mergeable_move
from lowerdeck.serializer.xnnpack.unset_sizes import unset_result
from lowerdeck.serializer.xnnpack.verify_types import needed_release

# Smaller integers are computed with 32 bits, where nothing overflows.
_WIDE = {ScalarType.INT: "i", ScalarType.LONG: "q"}
_INTEGERS = {*_WIDE, ScalarType.BYTE, ScalarType.CHAR, ScalarType.SHORT, ScalarType.BOOL}


@dataclass(frozen=True, slots=True)
class Hazard:
    """An instruction or a delegate that may end the runtime's process for some inputs.

    Attributes:
        reason: The values for which the process ends, or the data that are missing.
        field: The instruction, or the delegate.
        offset: Where it is in the file.
        needs: Keys of data that must come with another file, or the process ends.
        release: The oldest release of ExecuTorch that loads the file, if 1.4 does not.
    """

    reason: str
    field: str
    offset: int
    needs: tuple[str, ...] = ()
    release: str = ""

    def __str__(self) -> str:
        """Return it in the form of this package's errors."""
        return f"{self.field} at byte {self.offset}: {self.reason}"


def missing_data(
    keys: Sequence[str], named: Container[str], field: str, offset: int
) -> Hazard | None:
    """Return the hazard of a delegate whose data are not all in the file, else None.

    The runtime looks them up when it loads the method, and its process ends if one is missing.

    Args:
        keys: The keys that a payload of XNNPACK reads.
        named: Those of the file.
        field: The delegate.
        offset: Where it is in the file.
    """
    needs = tuple(dict.fromkeys(key for key in keys if key not in named))
    if not needs:
        return None
    more = f" and {len(needs) - 1} more" if len(needs) > 1 else ""
    return Hazard(
        f"needs the data {needs[0]!r}{more} from a .ptd file, without which the process ends",
        field,
        offset,
        needs,
    )


def no_images(payload: XnnGraph, field: str, offset: int) -> Hazard | None:
    """Return the hazard of a delegate that is called with no images of a size that varies.

    Args:
        payload: What XNNPACK runs.
        field: The delegate.
        offset: Where it is in the file.
    """
    argument = unset_result(payload)
    if argument is None:
        return None
    return Hazard(
        f"leaves sizes of its argument {argument} unset when it is called with no images, which "
        "is an error or ends the process",
        field,
        offset,
    )


def merged_moves(payload: XnnGraph, field: str, offset: int) -> Hazard | None:
    """Return the hazard of a delegate whose moves of bytes the runtime merges when it loads it.

    Args:
        payload: What XNNPACK runs.
        field: The delegate.
        offset: Where it is in the file.
    """
    node = mergeable_move(payload)
    if node is None:
        return None
    return Hazard(
        f"has two {node.operator.label} nodes of which one reads the other alone, or that are "
        "equal: merging them at load may end the process of executorch 1.4.1",
        field,
        offset,
    )


def newer_release(payload: XnnGraph, field: str, offset: int) -> Hazard | None:
    """Return the hazard of a delegate that ExecuTorch 1.4 refuses to load and a newer one runs.

    Args:
        payload: What XNNPACK runs.
        field: The delegate.
        offset: Where it is in the file.
    """
    needed = needed_release(payload)
    if needed is None:
        return None
    release, what = needed
    return Hazard(
        f"needs ExecuTorch {release} or later: {what} is refused by 1.4 when the file is loaded",
        field,
        offset,
        release=release,
    )


class HazardFinder:
    """Finds the hazards of one verified method."""

    def __init__(
        self,
        plan: schema.ExecutionPlan,
        stored: Callable[[schema.Tensor], memoryview | None],
        position: Callable[[int, int], int],
    ) -> None:
        """Make a finder.

        Args:
            plan: The method.
            stored: Returns the bytes of a constant tensor, None for other tensors.
            position: Returns the offset in the file of an instruction, by the indices of its
                chain and its step.
        """
        self._plan = plan
        self._stored = stored
        self._position = position
        self._kernels = [runtime_kernels().get(one.full_name) for one in plan.operators]
        # Inputs other than tensors are constants: the runtime refuses values that differ from
        # those of the file.
        self._unknown = set(_written(plan))
        # Caches: many tensors may share a constant, and many calls a list.
        self._holds: dict[tuple[int, str, int], bool] = {}
        self._computed: dict[int, bool] = {}
        self._zero_sizes: dict[int, bool] = {}
        self._bounds: NumberBounds | None = None

    def find(self) -> Iterator[Hazard]:
        """Yield the hazards in the order of the instructions."""
        for number, chain in enumerate(self._plan.chains):
            for step, instruction in enumerate(chain.instructions):
                call = instruction.instr_args
                for reason in self._reasons(call, step):
                    field = f"method {self._plan.name!r}.chains[{number}].instructions[{step}]"
                    yield Hazard(reason, field, self._position(number, step))

    def _reasons(self, call: schema.InstructionArguments, step: int) -> Iterator[str]:
        if (
            isinstance(call, schema.JumpFalseCall)
            and call.destination_instruction <= step
            and self._may_stay_false(call.cond_value_index)
        ):
            yield (
                f"jumps back until value {call.cond_value_index} is true, which nothing "
                "writes; the runtime gives up after 10,000,000 instructions"
            )
        if isinstance(call, schema.KernelCall):
            kernel = self._kernels[call.op_index]
            if kernel is None:
                return
            if "divides" in kernel.words:
                yield from self._divisions(kernel, call.args)
            for number in kernel.positive:
                if self._is_computed(call.args[number]):
                    yield (
                        f"{kernel.name} divides by its argument {number}, which is computed: a 0 "
                        "there ends the process"
                    )
            for limit in kernel.limits:
                if isinstance(limit, Steps) and self._may_be_many(limit, call.args):
                    yield (
                        f"{kernel.name} makes as many numbers as value {call.args[limit.end]} "
                        "says, which is computed: 2**31 of them end the process"
                    )
                elif isinstance(limit, Shape) and self._may_hold_zero(call.args[limit.position]):
                    yield (
                        f"{kernel.name} divides by the sizes of value "
                        f"{call.args[limit.position]}, of which one is -1 and one is computed: a "
                        "0 there ends the process"
                    )

    @property
    def _numbers(self) -> NumberBounds:
        if self._bounds is None:
            self._bounds = NumberBounds(self._plan, self._kernels)
        return self._bounds

    def _may_be_many(self, limit: Steps, args: Sequence[int]) -> bool:
        """Return whether a range with a computed end may have 2**31 numbers."""
        parts = [args[at] for at in (limit.start, limit.end, limit.step) if at >= 0]
        if not self._unknown.intersection(parts):
            return False
        start = (0.0, 0.0) if limit.start < 0 else self._numbers.of(args[limit.start])
        end = self._numbers.of(args[limit.end])
        least, most = (1.0, 1.0) if limit.step < 0 else self._numbers.of(args[limit.step])
        if least != most or not least:
            return True
        far = max(end[1] - start[0], start[1] - end[0])
        return far / abs(least) >= (1 << 31) - 1

    def _may_hold_zero(self, index: int) -> bool:
        """Return whether sizes have a -1 beside a computed one that may be 0."""
        if index not in self._zero_sizes:
            value = self._plan.values[index].val
            items = value.items if isinstance(value, schema.IntList) else ()
            computed = self._unknown.intersection(items)
            infers = any(
                item not in computed
                and isinstance(number := self._plan.values[item].val, schema.Int)
                and number.int_val == -1
                for item in items
            )
            self._zero_sizes[index] = infers and any(
                self._numbers.of(item)[0] < 1 for item in computed
            )
        return self._zero_sizes[index]

    def _may_stay_false(self, index: int) -> bool:
        """Return whether a loop's condition is constant and false."""
        if index in self._unknown:
            return False
        condition = self._plan.values[index].val
        data = self._stored(condition) if isinstance(condition, schema.Tensor) else None
        ends = isinstance(condition, schema.Bool) and condition.bool_val
        return not (ends or (data is not None and any(data[:1])))

    def _divisions(self, kernel: RuntimeKernel, args: Sequence[int]) -> Iterator[str]:
        dividend, divisor = (self._plan.values[index].val for index in args[:2])
        if kernel.name.startswith(PRIMITIVES):
            if isinstance(dividend, schema.Int) and isinstance(divisor, schema.Int):
                if args[1] in self._unknown:
                    yield f"{kernel.name} divides by value {args[1]}: a 0 there ends the process"
                elif not divisor.int_val:
                    yield f"{kernel.name} divides by 0, which ends the process"
                elif divisor.int_val == -1 and self._may_be_least(args[0]):
                    yield f"{kernel.name} divides by -1: -2**63 by that ends the process"
            return
        rounded = not any(isinstance(self._plan.values[at].val, schema.Null) for at in args[2:3])
        if rounded and self._may_be_zero(args[0], args[1]):
            yield (
                f"{kernel.name} divides integers by value {args[1]}, which is computed: a 0 there "
                "ends the process"
            )
        elif rounded and self._overflows(args[0], args[1]):
            yield (
                f"{kernel.name} divides integers by value {args[1]}: the smallest integer by -1 "
                "ends the process"
            )

    def _may_be_zero(self, dividend: int, divisor: int) -> bool:
        """Return whether integers are divided by a computed number, which may be 0."""
        left, right = self._plan.values[dividend].val, self._plan.values[divisor].val
        integers = isinstance(left, schema.Tensor) and left.scalar_type in _INTEGERS
        return integers and isinstance(right, schema.Int) and divisor in self._unknown

    def _overflows(self, dividend: int, divisor: int) -> bool:
        """Return whether the smallest integer of 32 or 64 bits may be divided by -1."""
        left, right = self._plan.values[dividend].val, self._plan.values[divisor].val
        if not isinstance(left, schema.Tensor) or left.scalar_type not in _INTEGERS:
            return False
        if not isinstance(right, schema.Tensor):
            known = isinstance(right, schema.Int) and divisor not in self._unknown
            minus = isinstance(right, schema.Int) and (not known or right.int_val == -1)
            return minus and left.scalar_type in _WIDE and self._may_hold_least(left)
        dtypes = {left.scalar_type, right.scalar_type}
        if not dtypes <= _INTEGERS or not dtypes & set(_WIDE):
            return False
        return self._may_hold(right, -1) and self._may_hold_least(left)

    def _may_hold_least(self, tensor: schema.Tensor) -> bool:
        return self._may_hold(tensor, -1 << 8 * tensor.scalar_type.itemsize - 1)

    def _may_hold(self, tensor: schema.Tensor, number: int) -> bool:
        """Return whether a tensor may contain a number; tensors that are not constant may."""
        code = _WIDE.get(tensor.scalar_type)
        data = self._stored(tensor)
        if code is None or data is None:
            return True
        key = tensor.data_buffer_idx, code, number
        if key not in self._holds:
            whole = data.tobytes()
            pattern, at = struct.pack(f"<{code}", number), -1
            # A match that starts inside an element does not count.
            while (at := whole.find(pattern, at + 1)) >= 0 and at % len(pattern):
                pass
            self._holds[key] = at >= 0
        return self._holds[key]

    def _may_be_least(self, index: int) -> bool:
        value = self._plan.values[index].val
        known = isinstance(value, schema.Int) and index not in self._unknown
        return not known or (isinstance(value, schema.Int) and value.int_val == -1 << 63)

    def _is_computed(self, index: int) -> bool:
        """Return whether a number, or an element of a list, is computed by an instruction."""
        if index not in self._computed:
            value = self._plan.values[index].val
            items = value.items if isinstance(value, schema.IntList) else (index,)
            self._computed[index] = any(item in self._unknown for item in items)
        return self._computed[index]


def _written(plan: schema.ExecutionPlan) -> Iterator[int]:
    """Yield the values that instructions write."""
    for chain in plan.chains:
        for step in chain.instructions:
            call = step.instr_args
            if isinstance(call, schema.KernelCall) and call.args:
                yield call.args[-1]
            elif isinstance(call, schema.DelegateCall):
                yield from call.args
            elif isinstance(call, schema.MoveCall):
                yield call.move_to
