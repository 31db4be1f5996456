"""Run many functions in one program, in the official runtime and in the runner."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from lowerdeck.emitter import emit
from lowerdeck.runner import load
from lowerdeck_zoo import Of, exported, official

Function = Callable[..., Any]


class Result(NamedTuple):
    """What a function gave in one call: its name with the runtime, its arguments, its outputs."""

    where: str
    function: Function
    args: Sequence[Any]
    outputs: list[Any]


def computed(functions: Mapping[str, Function], *args: Tensor) -> dict[str, Function]:
    """Return the functions that eager computes of these arguments, such as those of a type."""
    found = {}
    for name, function in functions.items():
        try:
            function(*copy.deepcopy(args))
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        found[name] = function
    return found


def run_together(
    functions: Mapping[str, Function], *calls: Sequence[Any], ours: bool = True, **options: Any
) -> Iterator[Result]:
    """Yield the results of each function in each call, by the official runtime and the runner.

    Args:
        functions: The functions, which write none of their arguments.
        calls: Their arguments; the first are exported.
        ours: Whether the runner computes them, too.
        options: Options of ``torch.export.export``.
    """

    def everything(*args: Any) -> list[Any]:
        return [function(*args) for function in functions.values()]

    content = emit(exported(Of(everything), *calls[0], **options)).to_bytes()
    flat = [pytree.tree_leaves(list(args)) for args in calls]
    outcome = official.run(content, [official.Call(inputs) for inputs in flat])
    assert isinstance(outcome, official.Ran), outcome
    found = {"official": outcome.outputs}
    if ours:
        method = load(content).method()
        found["runner"] = [copy.deepcopy(method.run_flat(inputs)) for inputs in flat]
    for number, args in enumerate(calls):
        for runtime in found:
            rest = iter(found[runtime][number])
            for name, function in functions.items():
                count = len(pytree.tree_leaves(function(*args)))
                outputs = list(islice(rest, count))
                yield Result(f"{name}, {runtime}, call {number}", function, args, outputs)
