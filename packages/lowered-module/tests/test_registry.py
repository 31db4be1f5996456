"""How backends and partitioners are found by name."""

from __future__ import annotations

import copy
import importlib.metadata
import sys
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    AmbiguousBackendError,
    BackendDetails,
    BackendNotFoundError,
    DelegationSpec,
    LoweredBackendModule,
    PartitionResult,
    PreprocessResult,
    backend_names,
    find_backend,
    find_partitioner,
    register_backend,
    to_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.testing import VerbatimBackend


def make(name: str, **members: Any) -> Any:
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(b"")

    return type(name, (BackendDetails,), {"preprocess": staticmethod(preprocess), **members})


def test_a_subclass_is_found_by_its_name_or_its_id() -> None:
    assert find_backend("VerbatimBackend") is VerbatimBackend
    named = make("RegistryNamed", backend_id="registry/named")
    assert find_backend("registry/named") is named
    with pytest.raises(BackendNotFoundError):
        find_backend("RegistryNamed")
    assert "registry/named" in backend_names()


def test_a_backend_may_derive_from_another() -> None:
    base = make("RegistryBase")
    derived = type("RegistryDerived", (base,), {})
    assert find_backend("RegistryDerived") is derived
    assert find_backend("RegistryBase") is base


def test_abstract_classes_are_no_backends() -> None:
    type("RegistryAbstract", (BackendDetails,), {})
    assert "RegistryAbstract" not in backend_names()


def test_the_same_class_made_again_replaces_the_first() -> None:
    first = make("RegistryTwice")
    second = make("RegistryTwice")
    assert find_backend("RegistryTwice") is second
    del first


def test_two_backends_with_one_name_are_an_error() -> None:
    first = make("RegistryClash")
    second = make("RegistryClash", __module__="elsewhere")
    with pytest.raises(AmbiguousBackendError, match=r"elsewhere\.RegistryClash"):
        find_backend("RegistryClash")
    register_backend(first)
    try:
        assert find_backend("RegistryClash") is first
    finally:
        unregister_backend("RegistryClash")
    del first, second


def test_registration_is_explicit_and_can_be_undone() -> None:
    class Duck:
        @staticmethod
        def preprocess(program: Any, specs: Any) -> PreprocessResult:
            return PreprocessResult(b"")

    register_backend(Duck, "registry duck")
    try:
        assert find_backend("registry duck") is Duck
        other = types.new_class("Other")
        with pytest.raises(AmbiguousBackendError, match="already"):
            register_backend(other, "registry duck")
    finally:
        unregister_backend("registry duck")
    with pytest.raises(BackendNotFoundError, match="register_backend"):
        find_backend("registry duck")


def test_installed_backends_and_partitioners_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "lowerdeck.lowered_module.testing"
    entries = [
        importlib.metadata.EntryPoint(
            "Installed", f"{here}:VerbatimBackend", "lowerdeck.backends"
        ),
        importlib.metadata.EntryPoint("Parts", "builtins:object", "lowerdeck.partitioners"),
        importlib.metadata.EntryPoint("Two", "builtins:object", "lowerdeck.partitioners"),
        importlib.metadata.EntryPoint("Two", "builtins:int", "lowerdeck.partitioners"),
    ]
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda *, group: [entry for entry in entries if entry.group == group],
    )
    assert find_backend("Installed") is VerbatimBackend
    assert "Installed" in backend_names()
    imported = make("RegistryImported", backend_id="Installed")
    assert find_backend("Installed") is imported
    assert type(find_partitioner("Parts")) is object
    with pytest.raises(AmbiguousBackendError, match="uninstall one"):
        find_partitioner("Two")
    with pytest.raises(BackendNotFoundError, match="Installed: Parts, Two"):
        find_partitioner("Absent")


def test_backends_of_executorch_are_found_where_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BackendDetailsOfThePeer:
        pass

    class PeerBackend(BackendDetailsOfThePeer):
        pass

    module = types.ModuleType("executorch.exir.backend.backend_details")
    module.BackendDetails = BackendDetailsOfThePeer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert find_backend("PeerBackend") is PeerBackend


def test_of_one_name_who_asks_decides_which_side_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    class BackendDetailsOfThePeer:
        pass

    def subclass(base: type) -> type:
        return type("OnBothSides", (base,), {"preprocess": staticmethod(lambda *_: None)})

    ours, theirs = subclass(BackendDetails), subclass(BackendDetailsOfThePeer)
    module = types.ModuleType("executorch.exir.backend.backend_details")
    module.BackendDetails = BackendDetailsOfThePeer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert find_backend("OnBothSides") is ours
    assert find_backend("OnBothSides", peers=True) is theirs


def test_a_partition_of_the_peers_partitioner_goes_to_the_peers_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BackendDetailsOfThePeer:
        pass

    asked: list[str] = []

    def subclass(base: type, side: str) -> type:
        def preprocess(*_: object) -> PreprocessResult:
            asked.append(side)
            return PreprocessResult(side.encode())

        return type("OnEachSide", (base,), {"preprocess": staticmethod(preprocess)})

    sides = [subclass(BackendDetails, "ours"), subclass(BackendDetailsOfThePeer, "theirs")]
    module = types.ModuleType("executorch.exir.backend.backend_details")
    module.BackendDetails = BackendDetailsOfThePeer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    peers_spec = namedtuple("peers_spec", ["backend_id", "compile_specs"])
    peers_spec.__module__ = "executorch.exir.backend.partitioner"
    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))

    def partitioner(spec: Any) -> Callable[[ExportedProgram], PartitionResult]:
        def partition(tagged: ExportedProgram) -> PartitionResult:
            for node in tagged.graph.nodes:
                if node.op == "call_function":
                    node.meta["delegation_tag"] = "t"
            return PartitionResult(tagged, {"t": spec("OnEachSide", [])})

        return partition

    for spec in (DelegationSpec, peers_spec):
        to_backend(program, partitioner(spec))
    assert asked == ["ours", "theirs"]
    assert len(sides) == 2


def test_a_delegate_is_the_peers_whenever_the_peer_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LoweredBackendModuleOfThePeer:
        pass

    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    before = to_backend("VerbatimBackend", program, [])
    assert before.__class__ is LoweredBackendModule
    module = types.ModuleType("executorch.exir.lowered_backend_module")
    peer = type("LoweredBackendModule", (LoweredBackendModuleOfThePeer,), {})
    module.LoweredBackendModule = peer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    after = to_backend("VerbatimBackend", program, [])
    for delegate in (before, after, copy.deepcopy(before)):
        assert isinstance(delegate, peer)
        assert isinstance(delegate, LoweredBackendModule)
        assert type(delegate) is LoweredBackendModule
        torch.testing.assert_close(delegate(torch.ones(2)), torch.ones(2))
