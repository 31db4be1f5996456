"""Programs as bytes, of which another process makes the same programs again.

``torch.export.save`` traces what it loads: it renames and merges nodes, and refuses delegates and
some operators. torch's pickler of graphs keeps each node as it is.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from lowerdeck.lowered_module._executorch import edge_operator
from lowerdeck.lowered_module._torch_private import graph_pickler, new_fake_mode
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.edge_form import torchs_verifiers
from lowerdeck.lowered_module.program.tags import AHEAD, DECISION, REJECT, REMARKS
from lowerdeck.torch_base import (
    FakeTensor,
    FakeTensorMode,
    copy_graph_module,
    executorch_call_delegate,
    reserve_name,
)

_KEPT = {"val", "stack_trace", "nn_module_stack", "torch_fn", "custom"}
_KEPT |= {AHEAD, DECISION, HANDLE, REJECT, REMARKS}


def dump_program(program: ExportedProgram, tensors: list[torch.Tensor]) -> bytes:
    """Return a program as bytes that refer to its tensors by number.

    Nodes keep their example values, where they come from, what users noted in ``custom``, debug
    handles and what partitioners said of them. Operators of ExecuTorch's Edge dialect become
    torch's, since that dialect makes its operators when it is imported.

    Args:
        program: Any program; not changed.
        tensors: The tensors that the bytes refer to; those that are new are appended. Programs
            that are dumped with one list share their tensors when they are loaded.

    Raises:
        Exception: Whatever pickle raises for an object that it cannot take.
    """
    stream = io.BytesIO()
    pickler, _ = _classes()
    pickler(stream, tensors).dump(program)
    return stream.getvalue()


def load_program(content: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what :func:`dump_program` was given.

    Loading runs code, as all of pickle does: give it only what this program or its workers made.

    Args:
        tensors: The tensors that the bytes refer to.

    Raises:
        Exception: Whatever pickle raises.
    """
    _, unpickler = _classes()
    return unpickler(io.BytesIO(content), tensors).load()


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Return the pickler and the unpickler, classes that torch's are the bases of."""
    graph_pickler_class, options_class, unpickler_class, state_class = graph_pickler()
    options = options_class(ops_filter=None, node_metadata_key_filter=_KEPT.__contains__)

    class Pickler(graph_pickler_class):  # type: ignore[misc, valid-type]
        def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
            super().__init__(stream, options)
            self._tensors = tensors
            self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

        def persistent_id(self, obj: object) -> object:
            if not isinstance(obj, torch.Tensor) or isinstance(obj, FakeTensor):
                return super().persistent_id(obj)
            number = self._numbers.setdefault(id(obj), len(self._tensors))
            if number == len(self._tensors):
                self._tensors.append(obj)
            return number

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, ExportedProgram):
                state = {**obj.__dict__, "_verifiers": torchs_verifiers(obj), "_module": None}
                return obj.__class__.__new__, (obj.__class__,), state
            if isinstance(obj, FakeTensorMode):
                return _fake_mode, (self._unpickle_state,)
            if obj is executorch_call_delegate:
                return "executorch_call_delegate"
            if isinstance(obj, torch.SymFloat | torch.SymBool):
                number: Any = torch.SymInt(obj.node)  # type: ignore[no-untyped-call]
                return _symbolic, (type(obj), *super().reducer_override(number))
            if isinstance(obj, GraphModule):
                if any(edge_operator(node.target) for node in obj.graph.nodes):
                    # torch refuses operators of other classes than its own.
                    obj = copy_graph_module(obj)
                    for node in obj.graph.nodes:
                        node.target = edge_operator(node.target) or node.target
                names = [node.name for node in obj.graph.nodes]
                return _renamed, (*super().reducer_override(obj), names)
            return super().reducer_override(edge_operator(obj) or obj)

    class Unpickler(unpickler_class):  # type: ignore[misc, valid-type]
        def __init__(self, stream: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
            super().__init__(stream, state_class(new_fake_mode()))
            self._tensors = tensors

        def persistent_load(self, pid: Any) -> object:
            return self._tensors[pid] if isinstance(pid, int) else super().persistent_load(pid)

    return Pickler, Unpickler


def _fake_mode(unpickling: Any) -> FakeTensorMode:
    """Return the one mode that all fake tensors of a loaded program are of."""
    mode: FakeTensorMode = unpickling.fake_mode
    return mode


def _symbolic(kind: type, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return kind(make(*args).node)


def _renamed(make: Callable[..., Any], args: tuple[Any, ...], names: Sequence[str]) -> Any:
    """Return a graph module whose nodes have the names that they had, Python's own among them."""
    graph_module = make(*args)
    for node, name in zip(graph_module.graph.nodes, names, strict=True):
        reserve_name(graph_module.graph, name)
        node.name = name
    graph_module.recompile()
    return graph_module
