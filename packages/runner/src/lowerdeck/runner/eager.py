"""What eager computes on the way: each operator's results, recorded while a model runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lowerdeck.runner._torch_private import TorchDispatchMode, flat_graph_inputs, operator_name

_TORCH_FOLDER = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class EagerOp:
    """One operator that eager ran.

    Attributes:
        name: Its name, such as ``aten::addmm``.
        values: Copies of its tensor results.
        source_line: The line of the user's code that led to it, empty when unknown.
        node: Name of the node, where an exported program was run; else empty.
        handle: Debug handle of that node, or None.
    """

    name: str
    values: tuple[torch.Tensor, ...]
    source_line: str = ""
    node: str = ""
    handle: int | None = None


def record_calls(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[EagerOp]]:
    """Return what ``model`` returns, and the operators of torch that it ran.

    Args:
        model: A module or function.
        args: Its inputs by position.
        kwargs: Its inputs by name.
    """
    recorder = _CallRecorder()
    with torch.no_grad(), recorder:
        result = model(*args, **kwargs)
    return result, recorder.found


def record_nodes(
    program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[EagerOp]:
    """Return the operators that an exported program runs, with the names of their nodes.

    Args:
        program: The exported program.
        args: Its inputs by position.
        kwargs: Its inputs by name.
    """
    recorder = _NodeRecorder(program.graph_module)
    with torch.no_grad():
        recorder.run(*flat_graph_inputs(program, args, kwargs))
    return recorder.found


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[EagerOp] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _CONTROL_FLOW:
            # Torch would run branches and bodies unseen; here they run under this mode again.
            with self:
                return _CONTROL_FLOW[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = operator_name(func) or str(func)
        self.found.append(EagerOp(name, _copies(result), _user_line()))
        return result


def _cond(
    predicate: Any,
    true_branch: Callable[..., Any],
    false_branch: Callable[..., Any],
    operands: Sequence[Any],
) -> Any:
    return true_branch(*operands) if predicate else false_branch(*operands)


def _while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    carried: Sequence[Any],
    additional: Sequence[Any],
) -> tuple[Any, ...]:
    while condition(*carried, *additional):
        carried = body(*carried, *additional)
    return tuple(carried)


_CONTROL_FLOW: Mapping[Any, Callable[..., Any]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
}


class _NodeRecorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[EagerOp] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            name = operator_name(n.target) or str(n.target)
            handle = n.meta.get("debug_handle")
            self.found.append(EagerOp(name, _copies(result), "", n.name, handle))
        return result


def _copies(result: object) -> tuple[torch.Tensor, ...]:
    """Return copies, as later operators may write in place."""
    if isinstance(result, torch.Tensor):
        return (result.detach().clone(),)
    if isinstance(result, (tuple, list)):
        return tuple(copy for item in result for copy in _copies(item))
    return ()


def _user_line() -> str:
    """Return the innermost line on the stack that is neither torch's nor this package's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH_FOLDER) and file != __file__:
            return f'File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
