"""Checks that the runtime can execute the instructions of one method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NoReturn

from lowerdeck.serializer.errors import ContentError, FormatError, IndexRangeError, LimitError
from lowerdeck.serializer.kernels.limits import Arguments, is_constant
from lowerdeck.serializer.kernels.table import PRIMITIVES, RuntimeKernel, runtime_kernels
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import ScalarType
from lowerdeck.serializer.verify.verify_views import View, views_of
from lowerdeck.serializer.xnnpack.graph import XnnGraph
from lowerdeck.serializer.xnnpack.verify import verify_call

_NUMBERS = (schema.Int, schema.Double, schema.Bool)
_ACCEPTED: Mapping[str, tuple[type, ...]] = {
    "T": (schema.Tensor,),
    "W": (schema.Tensor,),
    "L": (schema.TensorList,),
    "V": (schema.TensorList,),
    "O": (schema.OptionalTensorList,),
    "i": (schema.Int,),
    "I": (schema.IntList,),
    "n": _NUMBERS,
    "f": (schema.Double,),
    "b": (schema.Bool,),
    "B": (schema.BoolList,),
    "s": (schema.String,),
    "t": (schema.Tensor, schema.Null),
    "j": (schema.Int, schema.Null),
    "J": (schema.IntList, schema.Null),
    "m": (*_NUMBERS, schema.Null),
    "g": (schema.Double, schema.Null),
    "c": (schema.Bool, schema.Null),
    "F": (schema.DoubleList, schema.Null),
    "r": (schema.String, schema.Null),
}


_RESULTS: Sequence[tuple[frozenset[str], tuple[type, ...]]] = (
    (
        frozenset(f"{name}.Scalar" for name in ("eq", "ge", "gt", "le", "lt", "sym_not")),
        (schema.Bool,),
    ),
    (frozenset({"truediv.Scalar", "sym_float.Scalar"}), (schema.Double,)),
    (
        frozenset(
            {
                *(f"{name}.Scalar" for name in ("ceil", "round", "trunc", "sym_int")),
                *("floordiv.int", "mod.int"),
            }
        ),
        (schema.Int,),
    ),
)
"""Result types of primitive operators, where they do not depend on the arguments."""


_COMPLEX = {
    ScalarType.COMPLEX_HALF,
    ScalarType.COMPLEX_FLOAT,
    ScalarType.COMPLEX_DOUBLE,
}
# Kernels abort the process on unsupported element types.
_UNUSABLE = {
    kind
    for kind in ScalarType
    if kind.name.startswith(("QINT", "QUINT", "BITS", "FLOAT8")) or kind is ScalarType.COMPLEX_HALF
}


_ALWAYS = 1 << 62  # a step after all others
# Limit on checks of one value: each jump may end the memory of views, which are then checked
# again.
_MAX_MEMORY_CHECKS = 64


class ChainVerifier:
    """Checks the instructions of one method; each check names the argument that is wrong."""

    def __init__(
        self,
        plan: schema.ExecutionPlan,
        position: Callable[[int, int], int],
        payloads: Sequence[XnnGraph | None],
    ) -> None:
        """Create a verifier.

        Args:
            plan: The method, with verified values.
            position: Maps chain and instruction indices to an offset in the file.
            payloads: The XNNPACK payload of each delegate, or None.
        """
        self._payloads = payloads
        self._plan = plan
        self._position = position
        self._chain = 0
        self._step = 0
        self._kernels = [runtime_kernels().get(operator.full_name) for operator in plan.operators]
        calls = [step.instr_args for chain in plan.chains for step in chain.instructions]
        moves = [call for call in calls if isinstance(call, schema.MoveCall)]
        kernels = [call for call in calls if isinstance(call, schema.KernelCall) and call.args]
        self._moved = {call.move_to for call in moves}
        self._unknown = self._moved | {call.args[-1] for call in kernels}
        self._caller_values = {*plan.inputs, *plan.outputs}
        # Checked values are cached, so that a long list that many calls share is traversed once.
        self._with_memory: dict[int, int] = {}
        self._memory_checks: Counter[int] = Counter()
        self._writable: set[int] = set()
        # For each tensor without allocated memory, the step up to which a view provides it.
        self._viewed: dict[int, int] = {}
        # Moves copy handles, so the target of a constant's move must not be written either.
        self._moved_constants = {
            call.move_to
            for call in moves
            if 0 <= call.move_from < len(plan.values) and self._is_constant(call.move_from)
        }
        self._views = [list(views_of(chain, plan.operators)) for chain in plan.chains]
        for view in (view for views in self._views for view in views):
            # A view of a constant is a constant, and so are views of that view.
            if self._shows_constant(view):
                self._moved_constants.add(view.out)

    def verify(self) -> None:
        """Check all instructions.

        Raises:
            FormatError: One of them cannot be executed, or would crash the runtime.
        """
        verify: dict[type, Callable[..., None]] = {
            schema.KernelCall: self._verify_kernel,
            schema.DelegateCall: self._verify_delegate,
            schema.MoveCall: self._verify_move,
            schema.JumpFalseCall: self._verify_jump,
            schema.FreeCall: self._verify_free,
        }
        for number, chain in enumerate(self._plan.chains):
            self._chain = number
            # Memory provided by views in one chain may be missing in the next.
            if self._viewed:
                self._with_memory = {k: v for k, v in self._with_memory.items() if v == _ALWAYS}
            self._viewed.clear()
            views = {view.step: view for view in self._views[number]}
            for step_number, step in enumerate(chain.instructions):
                self._step = step_number
                if step_number in views:
                    self._verify_view(views[step_number])
                verify[type(step.instr_args)](step.instr_args)

    def _verify_view(self, view: View) -> None:
        """Record the memory that a view provides, after checking that its source has memory."""
        self._verify_indices((view.source, view.out))
        source, out = (self._plan.values[index].val for index in (view.source, view.out))
        if not isinstance(source, schema.Tensor) or not isinstance(out, schema.Tensor):
            return  # rejected with the call
        if self._is_constant(view.out):
            self._refuse(
                f"found the constant {view.out} as the output of a view, which would replace its "
                "bytes"
            )
        if out.allocation_info is not None:
            return
        self._verify_memory(view.source)
        if source.scalar_type is not out.scalar_type or source.nbytes != out.nbytes:
            self._refuse(
                f"found a view of {source.nbytes} bytes of {source.scalar_type!r} as "
                f"{out.nbytes} of {out.scalar_type!r}, expected the same"
            )
        self._viewed[view.out] = max(view.end, self._viewed.get(view.out, 0))

    def _verify_kernel(self, call: schema.KernelCall) -> None:
        operators = self._plan.operators
        if not 0 <= call.op_index < len(operators):
            self._refuse(
                f"found op_index {call.op_index}, expected one of {len(operators)} operators",
                IndexRangeError,
            )
        self._verify_arguments(call.args)
        kernel = self._kernels[call.op_index]
        if kernel is None:
            return  # a custom kernel with an unknown signature
        if kernel.name.startswith(PRIMITIVES):
            self._verify_primitive(kernel, call.args)
            return
        name, letters = kernel.name, kernel.arguments
        if len(call.args) != len(letters) + 1:
            self._refuse(
                f"found {len(call.args)} arguments of {name}, expected {len(letters)} and one "
                "for the return value"
            )
        for number, (letter, index) in enumerate(zip(letters, call.args, strict=False)):
            self._verify_kind(name, number, index, letter)
        if kernel.returned:
            self._verify_kind(name, len(letters), call.args[-1], kernel.returned)
        if name.endswith("_") and call.args[-1] != call.args[0]:
            self._refuse(
                f"found value {call.args[-1]} for the result of {name}, expected "
                f"{call.args[0]}, which it updates in place"
            )
        self._verify_types(kernel, call.args)
        for limit in kernel.limits:
            problem = limit(Arguments(self._plan.values, call.args, self._unknown))
            if problem:
                self._refuse(f"{problem}; otherwise {name} aborts the process")

    def _verify_primitive(self, kernel: RuntimeKernel, args: list[int]) -> None:
        """Check arguments that built-in operators use without a check."""
        needed = len(kernel.arguments) + len(kernel.returned)
        if len(args) < needed:
            self._refuse(
                f"found {len(args)} arguments of {kernel.name}, expected at least {needed}"
            )
        for number, (letter, index) in enumerate(zip(kernel.arguments, args, strict=False)):
            self._verify_kind(kernel.name, number, index, letter)
        if kernel.returned == "n":
            self._verify_result(kernel.name, args[needed - 1])

    def _verify_result(self, name: str, index: int) -> None:
        """Raise if a result replaces a value of another kind, which the next execution needs."""
        short = name.removeprefix(f"{PRIMITIVES}::")
        accepted = next((kinds for names, kinds in _RESULTS if short in names), _NUMBERS)
        value = self._plan.values[index].val
        if not isinstance(value, accepted):
            kinds = " or ".join(kind.__name__ for kind in accepted)
            self._refuse(
                f"found a {type(value).__name__} (value {index}) where {name} writes its result, "
                f"expected {kinds}"
            )

    def _verify_kind(self, name: str, number: int, index: int, letter: str) -> None:
        value = self._plan.values[index].val
        if not isinstance(value, _ACCEPTED[letter]):
            accepted = " or ".join(kind.__name__ for kind in _ACCEPTED[letter])
            self._refuse(
                f"found a {type(value).__name__} (value {index}) as argument {number} of {name}, "
                f"expected {accepted}"
            )
        if letter in "WV" and index not in self._writable:
            for tensor in value.items if isinstance(value, schema.TensorList) else (index,):
                if self._is_constant(tensor) or tensor in self._moved_constants:
                    self._refuse(f"found the constant {tensor} where {name} writes its result")
            self._writable.add(index)

    def _verify_types(self, kernel: RuntimeKernel, args: list[int]) -> None:
        """Raise if a kernel would abort on the element type of an argument."""
        kinds = {
            tensor.scalar_type
            for index in args[: len(kernel.arguments)]
            if isinstance(tensor := self._plan.values[index].val, schema.Tensor)
        }
        unsupported = kinds & _UNUSABLE
        if unsupported:
            self._refuse(
                f"found tensors of {unsupported} as arguments of {kernel.name}, which does not "
                "support them"
            )
        if kinds & _COMPLEX and kinds - _COMPLEX and "mixed" not in kernel.words:
            self._refuse(
                f"found tensors of {kinds} as arguments of {kernel.name}, expected only real or "
                "only complex ones"
            )

    def _verify_delegate(self, call: schema.DelegateCall) -> None:
        count = len(self._plan.delegates)
        if not 0 <= call.delegate_index < count:
            self._refuse(
                f"found delegate_index {call.delegate_index}, expected one of {count} delegates",
                IndexRangeError,
            )
        self._verify_arguments(call.args)
        payload = self._payloads[call.delegate_index]
        if payload is not None:
            try:
                verify_call(payload, [self._plan.values[index].val for index in call.args])
            except ContentError as error:
                self._refuse(error.reason)

    def _verify_move(self, call: schema.MoveCall) -> None:
        self._verify_indices((call.move_from, call.move_to))
        source, target = (
            type(self._plan.values[index].val) for index in (call.move_from, call.move_to)
        )
        if source is not target:
            self._refuse(f"found a move of {source.__name__} to another type {target.__name__}")

    def _verify_jump(self, call: schema.JumpFalseCall) -> None:
        self._verify_indices((call.cond_value_index,))
        condition = self._plan.values[call.cond_value_index].val
        if isinstance(condition, schema.Tensor):
            self._verify_memory(call.cond_value_index)
            if condition.scalar_type is not ScalarType.BOOL:
                self._refuse(f"found a condition of {condition.scalar_type!r}, expected booleans")
        elif not isinstance(condition, schema.Bool):
            self._refuse(
                f"found a {type(condition).__name__} as condition, expected a Bool or a Tensor"
            )
        count = len(self._plan.chains[self._chain].instructions)
        if not 0 <= call.destination_instruction <= count:
            self._refuse(
                f"found destination {call.destination_instruction}, expected 0 to {count}; "
                "the runtime would silently end the chain",
                IndexRangeError,
            )

    def _verify_free(self, call: schema.FreeCall) -> None:
        index = call.value_index
        self._verify_indices((index,))
        if not isinstance(self._plan.values[index].val, schema.Tensor):
            self._refuse(f"found value {index}, expected a Tensor")
        # A freed tensor has no memory in later executions either.
        if index in self._used:
            self._refuse(f"found value {index}, which instructions use, expected an unused tensor")

    @cached_property
    def _used(self) -> set[int]:
        used = set(self._caller_values)
        for chain in self._plan.chains:
            for step in chain.instructions:
                call = step.instr_args
                if isinstance(call, schema.KernelCall | schema.DelegateCall):
                    used.update(call.args)
                elif isinstance(call, schema.MoveCall):
                    used |= {call.move_from, call.move_to}
                elif isinstance(call, schema.JumpFalseCall):
                    used.add(call.cond_value_index)
        for index in list(used):
            used.update(self._tensors_of(index))
        return used

    def _verify_arguments(self, args: list[int]) -> None:
        self._verify_indices(args)
        for index in args:
            if self._step >= self._with_memory.get(index, 0):
                self._with_memory[index] = self._memory_end(index)

    def _memory_end(self, index: int) -> int:
        """Return the step until which a tensor or list has memory; raise if it has none here."""
        end = _ALWAYS
        for tensor in self._tensors_of(index):
            self._verify_memory(tensor)
            end = min(end, self._viewed.get(tensor, _ALWAYS))
        if end != _ALWAYS:
            self._memory_checks[index] += 1
            if self._memory_checks[index] > _MAX_MEMORY_CHECKS:
                self._refuse(
                    f"found value {index} used over {_MAX_MEMORY_CHECKS} times after jumps past "
                    "the views that provide its memory",
                    LimitError,
                )
        return end

    def _verify_indices(self, indices: Iterable[int]) -> None:
        count = len(self._plan.values)
        for index in indices:
            if not 0 <= index < count:
                self._refuse(f"found value {index}, expected one of {count}", IndexRangeError)

    def _tensors_of(self, index: int) -> tuple[int, ...]:
        if not 0 <= index < len(self._plan.values):
            return ()
        value = self._plan.values[index].val
        if isinstance(value, schema.Tensor):
            return (index,)
        if isinstance(value, schema.TensorList | schema.OptionalTensorList):
            return tuple(
                item
                for item in value.items
                if item >= 0 and isinstance(self._plan.values[item].val, schema.Tensor)
            )
        return ()

    def _verify_memory(self, index: int) -> None:
        """Raise if a tensor has no memory: kernels would dereference a null pointer."""
        tensor = self._plan.values[index].val
        if not isinstance(tensor, schema.Tensor) or tensor.allocation_info is not None:
            return
        if self._is_constant(index) or not tensor.nbytes or index in self._moved:
            return
        if index not in self._caller_values and self._step >= self._viewed.get(index, 0):
            self._refuse(
                f"found tensor {index} without memory: it is not a constant, has no "
                "allocation_info, is neither input, output nor the target of a move, and not "
                "every path to this step includes a view that provides memory"
            )

    def _shows_constant(self, view: View) -> bool:
        count = len(self._plan.values)
        if not (0 <= view.source < count and 0 <= view.out < count):
            return False
        out = self._plan.values[view.out].val
        if not isinstance(out, schema.Tensor) or out.allocation_info is not None:
            return False
        return self._is_constant(view.source) or view.source in self._moved_constants

    def _is_constant(self, index: int) -> bool:
        return is_constant(self._plan.values[index].val)

    def _refuse(self, reason: str, kind: type[FormatError] = ContentError) -> NoReturn:
        raise kind(
            reason,
            field=(f"method {self._plan.name!r}.chains[{self._chain}].instructions[{self._step}]"),
            offset=self._position(self._chain, self._step),
        )
