"""A name for one partition's result that changes when anything it depends on changes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from lowerdeck.lowered_module.authoring.rejects import operator_name
from lowerdeck.lowered_module.program.tags import AHEAD
from lowerdeck.torch_base import attribute_of, bytes_of, pytree

FORMAT = b"lowerdeck result 2"


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
    specs = [(spec.key, bytes(spec.value).hex()) for spec in compile_specs]
    _say(digest, str(specs))
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
        if AHEAD in node.meta:
            _say(digest, AHEAD)
        if node.meta.get("custom"):  # such as which file a weight is to go to
            _say(digest, str(node.meta["custom"]))
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
    return _delegate(digest, value)


def _delegate(digest: Any, value: Any) -> bool:
    """Add an earlier delegate: all that a backend could see of it, not its blob alone."""
    blob = getattr(value, "processed_bytes", None)
    if not isinstance(blob, bytes):
        return False
    specs = [(spec.key, bytes(spec.value).hex()) for spec in value.compile_specs]
    _say(digest, str(value.backend_id), str(specs))
    _bytes(digest, blob)
    store = getattr(value, "named_data_store_output", None)
    if store is None:
        return True
    groups = {"": store.pte_data, **store.external_data}
    for tag, entries in groups.items():
        for key, entry in entries.items():
            _say(digest, tag, key, str(entry.alignment), str(entry.tensor_layout))
            _bytes(digest, store.buffers[entry.buffer_index])
    return True


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}"
    return f"{type(value).__name__} {value}"


def _tensor(digest: Any, value: torch.Tensor) -> None:
    _say(digest, _described(value) if value.layout == torch.strided else str(value.layout))
    try:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(bytes_of(flat))
    except (RuntimeError, TypeError):
        # Sparse and quantized tensors have no plain bytes of their own.
        saved = io.BytesIO()
        torch.save(value, saved)
        digest.update(saved.getbuffer())


def _bytes(digest: Any, blob: Any) -> None:
    view = memoryview(blob).cast("B")
    digest.update(f"{len(view)}:".encode())
    digest.update(view)


def _say(digest: Any, *words: str) -> None:
    for word in words:
        # The length keeps ("ab", "c") and ("a", "bc") apart.
        digest.update(f"{len(word)}:{word}".encode())
