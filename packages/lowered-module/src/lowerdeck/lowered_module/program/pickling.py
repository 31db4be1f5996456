"""Serialize programs exactly, for other processes.

``torch.export.load`` retraces programs: it renames and merges nodes, and rejects delegates and
some operators. torch's graph pickler keeps all nodes.
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
from lowerdeck.lowered_module.program.edge_form import aten_verifiers
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

    Nodes keep their example values, provenance, ``custom`` metadata, debug handles, and the tags,
    reasons and decisions of partitioners. Operators of the Edge dialect become torch's, since they
    exist only after that dialect is imported.

    Args:
        program: Any program; not changed.
        tensors: The tensors that the bytes refer to; new ones are appended. Programs dumped with
            one list share their tensors after loading.

    Raises:
        Exception: Raised by pickle for an unsupported object.
    """
    stream = io.BytesIO()
    pickler, _ = _classes()
    pickler(stream, tensors).dump(program)
    return stream.getvalue()


def load_program(content: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the program of :func:`dump_program`.

    Loading runs code, as with any pickle: load only bytes from this process or its workers.

    Args:
        tensors: The tensors that the bytes refer to.

    Raises:
        Exception: Raised by pickle.
    """
    _, unpickler = _classes()
    return unpickler(io.BytesIO(content), tensors).load()


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Return subclasses of torch's graph pickler and unpickler."""
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
                state = {**obj.__dict__, "_verifiers": aten_verifiers(obj), "_module": None}
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
                    # torch rejects operators of other classes.
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
    """Return the fake mode that all fake tensors of a loaded program share."""
    mode: FakeTensorMode = unpickling.fake_mode
    return mode


def _symbolic(kind: type, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return kind(make(*args).node)


def _renamed(make: Callable[..., Any], args: tuple[Any, ...], names: Sequence[str]) -> Any:
    """Return a graph module with the original node names, also those that are Python keywords."""
    graph_module = make(*args)
    for node, name in zip(graph_module.graph.nodes, names, strict=True):
        reserve_name(graph_module.graph, name)
        node.name = name
    graph_module.recompile()
    return graph_module
