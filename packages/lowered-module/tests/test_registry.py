"""How backends and partitioners are found by name."""

from __future__ import annotations

import copy
import importlib.metadata
import sys
import types
from collections import namedtuple
from typing import Any

import pytest
import torch
from lowered_helpers import backend_class, calls_of
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    AmbiguousBackendError,
    BackendDetails,
    BackendNotFoundError,
    DelegationSpec,
    LoweredBackendModule,
    PartitionResult,
    backend_names,
    find_backend,
    find_partitioner,
    register_backend,
    to_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.testing import VerbatimBackend
from lowerdeck_zoo import exported


def make(name: str, **members: Any) -> Any:
    made = backend_class(name, lambda *_: b"")
    for member, value in members.items():
        setattr(made, member, value)
    return made


def test_backends_are_found_by_their_names_or_ids() -> None:
    assert find_backend("VerbatimBackend") is VerbatimBackend
    named = make("RegistryNamed", backend_id="registry/named")
    assert find_backend("registry/named") is named
    with pytest.raises(BackendNotFoundError):
        find_backend("RegistryNamed")
    assert "registry/named" in backend_names()
    derived = type("RegistryDerived", (VerbatimBackend,), {})
    assert find_backend("RegistryDerived") is derived
    type("RegistryAbstract", (BackendDetails,), {})
    assert "RegistryAbstract" not in backend_names()
    # The same class made again replaces the first.
    first, second = make("RegistryTwice"), make("RegistryTwice")
    assert find_backend("RegistryTwice") is second is not first


def test_two_backends_with_one_name_are_an_error_unless_one_is_registered() -> None:
    first, second = make("RegistryClash"), make("RegistryClash", __module__="elsewhere")
    with pytest.raises(AmbiguousBackendError, match=r"elsewhere\.RegistryClash"):
        find_backend("RegistryClash")
    register_backend(first)
    try:
        assert find_backend("RegistryClash") is first is not second
        with pytest.raises(AmbiguousBackendError, match="already"):
            register_backend(types.new_class("Other"), "RegistryClash")
    finally:
        unregister_backend("RegistryClash")
    with pytest.raises(BackendNotFoundError, match="register_backend"):
        find_backend("registry duck")


def test_installed_backends_and_partitioners_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint
    here = "lowerdeck.lowered_module.testing:VerbatimBackend"
    entries = [
        entry("Installed", here, "lowerdeck.backends"),
        entry("Parts", "builtins:object", "lowerdeck.partitioners"),
        entry("Two", "builtins:object", "lowerdeck.partitioners"),
        entry("Two", "builtins:int", "lowerdeck.partitioners"),
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


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> type:
    """ExecuTorch's class of backends, as if it were imported."""
    base = type("BackendDetailsOfThePeer", (), {})
    module = types.ModuleType("executorch.exir.backend.backend_details")
    module.BackendDetails = base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return base


def test_a_partition_of_the_peers_partitioner_goes_to_the_peers_backend(peers: type) -> None:
    ours = backend_class("OnBothSides", lambda *_: b"ours")
    theirs = backend_class("OnBothSides", lambda *_: b"theirs", peers)
    alone = backend_class("PeerBackend", lambda *_: b"", peers)
    assert find_backend("PeerBackend") is alone
    assert find_backend("OnBothSides") is ours
    assert find_backend("OnBothSides", peers=True) is theirs
    peers_spec = namedtuple("peers_spec", ["backend_id", "compile_specs"])
    peers_spec.__module__ = "executorch.exir.backend.partitioner"
    program = exported(torch.nn.ReLU(), torch.ones(2))

    def lowered_with(spec: Any) -> bytes:
        def partition(tagged: ExportedProgram) -> PartitionResult:
            for node in calls_of(tagged):
                node.meta["delegation_tag"] = "t"
            return PartitionResult(tagged, {"t": spec("OnBothSides", [])})

        lowered = to_backend(program, partition)
        return bytes(lowered.graph_module.lowered_module_0.processed_bytes)

    assert [lowered_with(DelegationSpec), lowered_with(peers_spec)] == [b"ours", b"theirs"]


def test_a_delegate_is_the_peers_whenever_the_peer_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class PeerModule(torch.nn.Module):
        def __init__(self, needed: int) -> None:
            raise AssertionError("the peer's constructor is not for us")

        @property
        def backend_id(self) -> str:
            raise AssertionError("nor are its properties")

    program = exported(torch.nn.ReLU(), torch.ones(2))
    before = to_backend("VerbatimBackend", program, [])
    assert before.__class__ is LoweredBackendModule
    module = types.ModuleType("executorch.exir.lowered_backend_module")
    module.LoweredBackendModule = PeerModule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    after = to_backend("VerbatimBackend", program, [])
    for delegate in (before, after, copy.deepcopy(before)):
        assert isinstance(delegate, PeerModule)
        assert isinstance(delegate, LoweredBackendModule)
        assert type(delegate) is LoweredBackendModule
        assert delegate.backend_id == "VerbatimBackend"
        torch.testing.assert_close(delegate(torch.ones(2)), torch.ones(2))
