"""How backends and partitioners are found by name."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any

import pytest

from lowerdeck.lowered_module import (
    AmbiguousBackendError,
    BackendDetails,
    BackendNotFoundError,
    PreprocessResult,
    backend_names,
    find_backend,
    find_partitioner,
    register_backend,
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
