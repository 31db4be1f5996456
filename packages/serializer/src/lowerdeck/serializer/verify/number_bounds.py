"""Between which bounds the numbers lie that a method's instructions compute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lowerdeck.serializer.kernels.table import RuntimeKernel
from lowerdeck.serializer.pte import schema
from lowerdeck.serializer.pte.enums import TensorShapeDynamism

Bounds = tuple[float, float]
"""The least and the greatest number; infinite where nothing bounds it."""

_ANY: Bounds = (-math.inf, math.inf)


class NumberBounds:
    """Bounds of the numbers of one method, from its sizes; its indices are verified.

    One pass over the instructions in their order: what is written twice, or read before it is
    written (in a loop), may be anything.
    """

    def __init__(
        self, plan: schema.ExecutionPlan, kernels: Sequence[RuntimeKernel | None]
    ) -> None:
        """Compute them.

        Args:
            plan: The method.
            kernels: The kernel of each of its operators.
        """
        self._plan = plan
        written: Counter[int] = Counter()
        calls: list[tuple[RuntimeKernel | None, list[int]]] = []
        for chain in plan.chains:
            for step in chain.instructions:
                call = step.instr_args
                if isinstance(call, schema.MoveCall):
                    written[call.move_to] += 2
                elif isinstance(call, schema.DelegateCall):
                    written.update(call.args)
                elif isinstance(call, schema.KernelCall) and call.args:
                    written[call.args[-1]] += 1
                    calls.append((kernels[call.op_index], call.args))
        self._found: dict[int, Bounds] = dict.fromkeys(written, _ANY)
        for kernel, args in calls:
            rule = _RULES.get(kernel.name.partition("::")[2]) if kernel is not None else None
            if rule is not None and written[args[-1]] == 1:
                self._found[args[-1]] = rule(self, args)

    def of(self, index: int) -> Bounds:
        """Return the bounds of a number.

        Args:
            index: Which value it is.
        """
        found = self._found.get(index)
        if found is not None:
            return found
        value = self._plan.values[index].val
        if isinstance(value, schema.Int):
            return (value.int_val, value.int_val)
        if isinstance(value, schema.Double) and not math.isnan(value.double_val):
            return (value.double_val, value.double_val)
        return _ANY

    def sizes(self, index: int) -> Sequence[int] | None:
        """Return the greatest sizes of a tensor, None where nothing bounds them.

        Args:
            index: Which value it is.
        """
        tensor = self._plan.values[index].val
        if not isinstance(tensor, schema.Tensor):
            return None
        unbound = tensor.shape_dynamism is TensorShapeDynamism.DYNAMIC_UNBOUND
        return None if unbound else tensor.sizes


def _size(known: NumberBounds, args: Sequence[int]) -> Bounds:
    sizes, (dim, same) = known.sizes(args[0]), known.of(args[1])
    if sizes is None or dim != same or not 0 <= dim < len(sizes):
        return (0, math.inf)
    return (0, sizes[int(dim)])


def _numel(known: NumberBounds, args: Sequence[int]) -> Bounds:
    sizes = known.sizes(args[0])
    return (0, math.inf if sizes is None else math.prod(sizes))


def _corners(
    compute: Callable[[float, float], float],
) -> Callable[[NumberBounds, Sequence[int]], Bounds]:
    """Return the rule of a function that is least and greatest where its arguments are."""

    def rule(known: NumberBounds, args: Sequence[int]) -> Bounds:
        left, right = known.of(args[0]), known.of(args[1])
        if not all(map(math.isfinite, (*left, *right))):
            return _ANY
        found = [compute(one, other) for one in left for other in right]
        return (min(found), max(found))

    return rule


def _quotient(known: NumberBounds, args: Sequence[int]) -> Bounds:
    (low, high), (least, most) = known.of(args[0]), known.of(args[1])
    if least < 1 or not all(map(math.isfinite, (low, high, most))):
        return _ANY
    found = [one // other for one in (low, high) for other in (least, most)]
    return (min(found), max(found))


def _remainder(known: NumberBounds, args: Sequence[int]) -> Bounds:
    least, most = known.of(args[1])
    return (0, most) if least >= 1 else _ANY


_RULES: Mapping[str, Callable[[NumberBounds, Sequence[int]], Bounds]] = {
    "sym_size.int": _size,
    "sym_numel": _numel,
    "add.Scalar": _corners(lambda one, other: one + other),
    "sub.Scalar": _corners(lambda one, other: one - other),
    "mul.Scalar": _corners(lambda one, other: one * other),
    "sym_max.Scalar": _corners(max),
    "sym_min.Scalar": _corners(min),
    "floordiv.Scalar": _quotient,
    "floordiv.int": _quotient,
    "mod.Scalar": _remainder,
    "mod.int": _remainder,
}
