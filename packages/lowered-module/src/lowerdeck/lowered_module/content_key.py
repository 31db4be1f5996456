"""A name for one partition's result that changes when anything it depends on changes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.lowered_module._torch_private import pytree
from lowerdeck.lowered_module.graphs import attribute_of
from lowerdeck.lowered_module.rejects import operator_name

FORMAT = b"lowerdeck result 1"


def content_key(
    program: ExportedProgram, backend: Any, backend_id: str, compile_specs: Iterable[Any]
) -> str | None:
    """Return the name, or None where something cannot be told by its content.

    It covers the graph with its names, shapes, dtypes and debug handles, the weights, the specs,
    torch's version, and the backend's class and ``version``.

    Args:
        program: The partition.
        backend: Its backend class.
        backend_id: The name that the class was found by.
        compile_specs: What the backend is told.
    """
    digest = hashlib.sha256(FORMAT)
    _say(digest, torch.__version__, backend_id, backend.__module__, backend.__qualname__)
    _say(digest, str(getattr(backend, "version", "")))
    for spec in compile_specs:
        _say(digest, spec.key, bytes(spec.value).hex())
    signature = program.graph_signature
    for entry in (*signature.input_specs, *signature.output_specs):
        _say(digest, str(entry))
    for symbol, bounds in program.range_constraints.items():
        _say(digest, str(symbol), str(bounds))
    if not _graph(digest, program.graph_module):
        return None
    for name, value in (*program.state_dict.items(), *program.constants.items()):
        _say(digest, name)
        if not isinstance(value, torch.Tensor):
            return None
        _tensor(digest, value)
    return digest.hexdigest()


def _graph(digest: Any, graph_module: GraphModule) -> bool:
    """Add one graph; return whether all of it can be told by content."""
    for node in graph_module.graph.nodes:
        target = operator_name(node) if node.op == "call_function" else str(node.target)
        _say(digest, node.op, node.name, target, str(node.args), str(node.kwargs))
        _say(digest, str(node.meta.get("debug_handle")))
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            _say(digest, _described(leaf))
        if node.op == "get_attr" and not _attribute(digest, graph_module, node):
            return False
    return True


def _attribute(digest: Any, graph_module: GraphModule, node: Node) -> bool:
    value = attribute_of(graph_module, node)
    if isinstance(value, GraphModule):
        return _graph(digest, value)
    if isinstance(value, torch.Tensor):
        _tensor(digest, value)
        return True
    blob = getattr(value, "processed_bytes", None)
    if isinstance(blob, bytes):
        digest.update(blob)
        return True
    return False


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return f"{type(value).__name__} {value}"


def _tensor(digest: Any, value: torch.Tensor) -> None:
    _say(digest, _described(value) if value.layout == torch.strided else str(value.layout))
    try:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    except (RuntimeError, TypeError):
        # Sparse and quantized tensors have no plain bytes of their own.
        saved = io.BytesIO()
        torch.save(value, saved)
        digest.update(saved.getbuffer())


def _say(digest: Any, *words: str) -> None:
    for word in words:
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(f"{len(word)}:{word}".encode())
