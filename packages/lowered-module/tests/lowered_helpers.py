"""Backends and partitioners in one line, programs, and what tests compare."""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module import (
    BackendDetails,
    LoweredBackendModule,
    PreprocessResult,
    get_lowered_backend_modules,
    register_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.testing import RunPartitioner, TaggingPartitioner
from lowerdeck.script import main
from lowerdeck_zoo import assert_close, exported

Preprocess = Callable[[ExportedProgram, list[Any]], Any]


def backend_class(name: str, preprocess: Preprocess, base: type = BackendDetails) -> Any:
    """Return a backend class; ``preprocess`` may return the bytes alone."""

    def wrapped(edge_program: ExportedProgram, compile_specs: list[Any]) -> Any:
        result = preprocess(edge_program, compile_specs)
        return PreprocessResult(result) if isinstance(result, bytes) else result

    return type(name, (base,), {"preprocess": staticmethod(wrapped)})


@contextmanager
def backend(preprocess: Preprocess, name: str = "Custom") -> Iterator[Any]:
    """Register a backend of this name for a while; give its class."""
    made = backend_class(name, preprocess)
    register_backend(made)
    try:
        yield made
    finally:
        unregister_backend(name)


def everything(backend_id: str = "VerbatimBackend", **options: Any) -> TaggingPartitioner:
    """Return a partitioner that gives all nodes to one partition."""
    return TaggingPartitioner(lambda _: "all", backend_id=backend_id, **options)


def by_name(tags: dict[str, str], **options: Any) -> TaggingPartitioner:
    """Return a partitioner that tags the nodes of these names."""
    return TaggingPartitioner(lambda node: tags.get(node.name), **options)


def runs_of(*words: str, **options: Any) -> RunPartitioner:
    """Return a partitioner that takes the operators whose names contain one of these words."""
    return RunPartitioner(lambda n: any(word in str(n.target) for word in words), **options)


def runs_without(word: str, **options: Any) -> RunPartitioner:
    """Return a partitioner that takes all operators but those whose names contain a word."""
    return RunPartitioner(lambda node: word not in str(node.target), **options)


def core(module: torch.nn.Module, *inputs: Any) -> ExportedProgram:
    """Return the module's program in torch's core operators."""
    with torch.no_grad():
        program: ExportedProgram = exported(module, *inputs).run_decompositions()
    return program


def delegates(program: ExportedProgram) -> list[LoweredBackendModule]:
    """Return the delegates of the outermost graph, in order."""
    return get_lowered_backend_modules(program.graph_module)


def blobs(program: ExportedProgram) -> list[Any]:
    """Return all that the backends returned for the delegates of the outermost graph."""
    return [
        (m.processed_bytes, m.meta["debug_handle_map"], m.named_data_store_output)
        for m in delegates(program)
    ]


def calls_of(program: ExportedProgram) -> list[Node]:
    """Return the nodes that call functions, in order."""
    return [node for node in program.graph.nodes if node.op == "call_function"]


def assert_behaves(lowered: Any, eager: torch.nn.Module, *inputs: Any, calls: int = 3) -> None:
    """Compare several calls with those of a copy of ``eager``, and inputs that are written."""
    runnable = lowered.module() if isinstance(lowered, ExportedProgram) else lowered
    eager = copy.deepcopy(eager)
    with torch.no_grad():
        for _ in range(calls):
            ours, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
            assert_close(runnable(*ours), eager(*theirs))
            assert_close(ours, theirs)


def lowerdeck(*words: object) -> int:
    """Run the command, as a user does."""
    return int(main([str(word) for word in words]))


def install(monkeypatch: pytest.MonkeyPatch, group: str, objects: dict[str, Any]) -> None:
    """Let entry points of a group be these objects alone, by name."""
    entries = [importlib.metadata.EntryPoint(name, f"{name}:it", group) for name in objects]
    entry_points, load = importlib.metadata.entry_points, importlib.metadata.EntryPoint.load

    def found(**wanted: Any) -> Any:
        return entries if wanted == {"group": group} else entry_points(**wanted)

    def loaded(entry: importlib.metadata.EntryPoint) -> Any:
        return objects[entry.name] if entry in entries else load(entry)

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", loaded)
