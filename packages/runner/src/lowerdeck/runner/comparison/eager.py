"""Record the results of each operator in an eager run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowerdeck.runner._torch_private import TorchDispatchMode, flat_graph_inputs, operator_name

_TORCH_FOLDER = f"{Path(torch.__file__).parent}{os.sep}"


@dataclass(frozen=True, slots=True)
class EagerOp:
    """Operator call of an eager run.

    Attributes:
        name: Its name, such as ``aten::addmm``.
        values: Copies of its tensor results.
        source_line: Calling line of user code, empty if unknown.
        module_path: Path of the calling module, empty for the root, None if unknown.
        node: Name of the node of an exported program, else empty.
        handle: Debug handle of that node, or None.
    """

    name: str
    values: tuple[torch.Tensor, ...]
    source_line: str = ""
    module_path: str | None = None
    node: str = ""
    handle: int | None = None


def record_calls(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[EagerOp]]:
    """Return the result of ``model``, and the torch operators that it ran."""
    modules = _ModulePath(model)
    recorder = _CallRecorder(modules)
    # Compiled code, such as branches of torch.cond, would hide its operators.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), modules.tracked(), recorder:
        result = model(*args, **kwargs)
    return result, recorder.ops


class _ModulePath:
    """Path of the running module, tracked by global hooks."""

    def __init__(self, model: object) -> None:
        self._names: dict[int, str] = {}
        self._running: list[str | None] = [None]
        if isinstance(model, torch.nn.Module):
            self._names = {id(module): name for name, module in model.named_modules()}

    @property
    def current(self) -> str | None:
        return self._running[-1]

    @contextmanager
    def tracked(self) -> Iterator[None]:
        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: torch.nn.Module, *_: object) -> None:
        self._running.append(self._names.get(id(module), self.current))

    def _leave(self, *_: object) -> None:
        self._running.pop()


def record_nodes(
    program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[EagerOp]:
    """Return the operators of a run of an exported program, with node names."""
    recorder = _NodeRecorder(program.graph_module)
    with torch.no_grad():
        recorder.run(*flat_graph_inputs(program, args, kwargs))
    return recorder.ops


class _CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, modules: _ModulePath) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[EagerOp] = []
        self._modules = modules

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _CONTROL_FLOW:
            # Run subgraphs under this mode; torch would run them outside of it.
            with self:
                return _CONTROL_FLOW[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = operator_name(func) or str(func)
        self.ops.append(EagerOp(name, tensors_in(result), _user_line(), self._modules.current))
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
        self.ops: list[EagerOp] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            name = operator_name(n.target) or str(n.target)
            handle = n.meta.get("debug_handle")
            self.ops.append(EagerOp(name, tensors_in(result), node=n.name, handle=handle))
        return result


def tensors_in(result: object) -> tuple[torch.Tensor, ...]:
    """Return copies of the tensors in a result, because later operators may mutate them."""
    if isinstance(result, torch.Tensor):
        return (result.detach().clone(),)
    if isinstance(result, (tuple, list)):
        return tuple(copy for item in result for copy in tensors_in(item))
    return ()


def _user_line() -> str:
    """Return the innermost line on the stack outside of torch and of this file."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH_FOLDER) and file != __file__:
            return f'File "{file}", line {frame.f_lineno}, in {frame.f_code.co_name}'
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
