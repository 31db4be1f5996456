"""The delegate as a module: calls, copies, programs of its own."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from lowerdeck.decompose import decompose
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    LoweredBackendModule,
    PreprocessError,
    PreprocessResult,
    SignatureError,
    executorch_call_delegate,
    get_lowered_backend_modules,
    to_backend,
)
from lowerdeck.lowered_module.testing import TaggingPartitioner, generated
from lowerdeck.serializer import NamedDataStore, deserialize_pte


class Odd(torch.nn.Module):
    """Nested inputs, None and int outputs, a lifted constant, state, dynamic sizes."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, d: dict[str, Any], scale: int = 3) -> dict[str, Any]:
        y = self.linear(d["x"])
        self.state.add_(y.detach().sum(0))
        return {
            "o": torch.tan(y) + self.state * scale + torch.tensor(3.0),
            "nothing": None,
            "number": 7,
            "state": self.state.clone(),
        }


def odd() -> tuple[Odd, torch.Tensor, LoweredBackendModule]:
    module, x = Odd().eval(), torch.randn(3, 4)
    batch = torch.export.Dim("batch", min=2, max=10)
    with torch.no_grad():
        program = torch.export.export(
            module, ({"x": x},), dynamic_shapes=({"x": {0: batch}},)
        ).run_decompositions()
    return module, x, to_backend("VerbatimBackend", program, [CompileSpec("k", b"v")])


def same(found: Any, wanted: Any) -> None:
    one, other = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b.detach())
        else:
            assert a == b


def test_a_whole_program_is_called_as_before() -> None:
    module, x, delegate = odd()
    for size in (3, 5):
        x = torch.randn(size, 4)
        same(delegate({"x": x}), module({"x": x}))
    with pytest.raises(SignatureError, match="expected TreeSpec"):
        delegate(x)


def test_its_attributes_are_what_torch_expects() -> None:
    _, _, delegate = odd()
    assert type(delegate).__name__ == "LoweredBackendModule"
    assert delegate.backend_id == "VerbatimBackend"
    assert isinstance(delegate.processed_bytes, bytes)
    assert delegate.compile_specs == [CompileSpec("k", b"v")]
    assert isinstance(delegate.original_module, ExportedProgram)
    assert delegate.named_data_store_output is None
    assert delegate.meta["debug_handle_map"]
    delegate.original_module.validate()  # type: ignore[no-untyped-call]


def test_a_program_of_its_own_has_every_kind_of_input_and_output() -> None:
    _, _, delegate = odd()
    plan = delegate.program().execution_plan[0]
    assert len(plan.inputs) == 1
    assert len(plan.outputs) == 4
    assert len(plan.delegates) == 1
    kinds = [type(plan.values[i].val).__name__ for i in plan.outputs]
    assert kinds == ["Tensor", "Null", "Int", "Tensor"]
    assert "nothing" in plan.container_meta_type.encoded_out_str  # type: ignore[union-attr]


@pytest.mark.parametrize("extract", [False, True])
def test_its_file_holds_the_blob(extract: bool) -> None:
    _, _, delegate = odd()
    content = delegate.buffer(extract_delegate_segments=extract, segment_alignment=4096)
    assert content == copy.deepcopy(delegate).buffer(extract, segment_alignment=4096)
    program = deserialize_pte(content)
    (blob,) = program.backend_delegate_data
    assert bytes(memoryview(blob.data)) == delegate.processed_bytes  # type: ignore[arg-type]


def test_named_data_reaches_the_file() -> None:
    class Named(BackendDetails):
        @staticmethod
        def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
            store = NamedDataStore()
            store.add_named_data("weights", b"abcd", alignment=16)
            return PreprocessResult(b"blob", data_store_output=store.get_named_data_store_output())

    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    delegate = to_backend("Named", program, [])
    named = deserialize_pte(delegate.buffer()).named_data
    assert [(entry.key, bytes(memoryview(entry.data))) for entry in named] == [  # type: ignore[arg-type]
        ("weights", b"abcd")
    ]


def test_inputs_that_are_changed_in_place_are_changed() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[Any]:
            x.add_(1)
            return [x * 2, 5]

    program = torch.export.export(Model(), (torch.ones(3),)).run_decompositions()
    delegate = to_backend("VerbatimBackend", program, [])
    x = torch.ones(3)
    same(delegate(x), [torch.full((3,), 4.0), 5])
    assert torch.equal(x, torch.full((3,), 2.0))
    assert len(delegate.program().execution_plan[0].outputs) == 2


def test_copies_share_constants_and_own_state_maps_and_specs() -> None:
    _, x, delegate = odd()
    copied = copy.deepcopy(delegate)
    mine, theirs = delegate.original_module, copied.original_module
    assert copied.processed_bytes is delegate.processed_bytes
    assert theirs.graph_module is mine.graph_module
    assert theirs.state_dict["linear.weight"] is mine.state_dict["linear.weight"]
    assert theirs.state_dict["state"] is not mine.state_dict["state"]
    assert copied.meta["debug_handle_map"] is not delegate.meta["debug_handle_map"]
    assert copied.meta == delegate.meta
    assert copied.compile_specs == delegate.compile_specs
    assert copied.compile_specs is not delegate.compile_specs
    delegate({"x": x})
    assert torch.equal(theirs.state_dict["state"], torch.zeros(4))
    copied.original_module.state_dict.clear()
    assert mine.state_dict
    same(copy.deepcopy(delegate)({"x": x}), delegate({"x": x}))


def test_eager_calls_reuse_one_prepared_module() -> None:
    _, x, delegate = odd()
    first = delegate.original_module.module()
    code = delegate.original_module.graph_module.code
    for _ in range(3):
        delegate({"x": x})
    assert delegate.original_module.module() is first
    assert delegate.original_module.graph_module.code is code


def test_swapped_state_is_exchanged_and_not_overwritten() -> None:
    class Swap(torch.nn.Module):
        one: torch.Tensor
        two: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.tensor([1.0]))
            self.register_buffer("two", torch.tensor([2.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two = self.one.clone(), self.two.clone()
            self.one.copy_(two)
            self.two.copy_(one)
            return x + self.one

    module = Swap()
    program = torch.export.export(module, (torch.zeros(1),)).run_decompositions()
    delegate = to_backend("VerbatimBackend", program, [])
    for _ in range(3):
        assert torch.equal(delegate(torch.zeros(1)), module(torch.zeros(1)))


def test_the_operator_works_under_autograd_fake_and_functionalize() -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    delegate = to_backend("VerbatimBackend", program, [])
    x = torch.ones(1, 2, requires_grad=True)
    (found,) = executorch_call_delegate(delegate, x)
    torch.testing.assert_close(found.detach(), program.module()(x).detach())
    assert found.requires_grad
    with torch._subclasses.FakeTensorMode() as mode:
        fake = delegate(mode.from_tensor(torch.ones(1, 2)))
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert fake.shape == (1, 2)
    traced = torch.export.export(torch.nn.Sequential(delegate), (torch.ones(1, 2),))
    assert any(node.target is executorch_call_delegate for node in traced.graph.nodes)
    again = traced.run_decompositions()
    torch.testing.assert_close(again.module()(torch.ones(1, 2)), found.detach())


def test_a_composition_can_be_lowered_by_another_backend() -> None:
    sample = generated(6, 6, state=False, control_flow=False)
    inner = to_backend("VerbatimBackend", sample.export(), [])

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x, y)["last"][0] + 1.0
            return result

    program = torch.export.export(Outer(), sample.inputs).run_decompositions()
    lowered = to_backend(program, TaggingPartitioner(lambda _: "all"))
    (outer,) = get_lowered_backend_modules(lowered.graph_module)
    assert get_lowered_backend_modules(outer.original_module.graph_module)
    same(lowered.module()(*sample.inputs), Outer()(*sample.inputs))


def test_a_failing_backend_of_a_whole_program_is_named() -> None:
    class Refuses(BackendDetails):
        @staticmethod
        def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
            raise KeyError("what")

    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    with pytest.raises(PreprocessError, match="'Refuses' failed on partition that is the whole"):
        to_backend("Refuses", program, [])


def test_where_executorch_is_imported_its_passes_take_a_delegate_for_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class PeerModule(torch.nn.Module):
        def __init__(self, needed: int) -> None:
            raise AssertionError("the peer's constructor is not for us")

        @property
        def backend_id(self) -> str:
            raise AssertionError("nor are its properties")

    peer = types.ModuleType("executorch.exir.lowered_backend_module")
    peer.LoweredBackendModule = PeerModule  # type: ignore[attr-defined]
    _, x, plain = odd()
    assert not isinstance(plain, PeerModule)
    monkeypatch.setitem(sys.modules, peer.__name__, peer)
    for delegate in (odd()[2], copy.deepcopy(plain)):
        assert isinstance(delegate, PeerModule)
        assert isinstance(delegate, LoweredBackendModule)
        assert type(delegate).__name__ == "LoweredBackendModule"
        assert delegate.backend_id == "VerbatimBackend"
        delegate({"x": x})


@pytest.mark.parametrize("peer", [False, True], ids=["alone", "beside ExecuTorch"])
@pytest.mark.parametrize("called", [False, True], ids=["before a call", "after one"])
def test_delegates_and_emitted_programs_can_be_pickled(
    monkeypatch: pytest.MonkeyPatch, peer: bool, called: bool
) -> None:
    # torch cannot load pickles of what its own export and run_decompositions return, and forgets
    # what nodes know of any program: what is kept of those is what was emitted.
    x = torch.randn(3, 4)
    exported = decompose(torch.export.export(Odd().eval(), ({"x": x},)))
    delegate = to_backend("VerbatimBackend", exported, [CompileSpec("k", b"v")])
    exported = decompose(torch.export.export(torch.nn.Linear(4, 4), (x,)))
    emitted = emit(to_backend(exported, TaggingPartitioner(lambda node: "all")))
    if peer:
        module = types.ModuleType("executorch.exir.lowered_backend_module")
        module.LoweredBackendModule = type("Peers", (torch.nn.Module,), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch.no_grad():
        if called:
            delegate({"x": x})
        found, again = pickle.loads(pickle.dumps((delegate, emitted)))
        assert type(found) is LoweredBackendModule
        assert found.backend_id == delegate.backend_id
        assert found.processed_bytes == delegate.processed_bytes
        assert found.compile_specs == delegate.compile_specs
        for _ in range(2):
            same(found({"x": x}), delegate({"x": x}))
    assert again.to_bytes() == emitted.to_bytes()


def test_torchs_own_files_refuse_delegates_with_an_error() -> None:
    x = torch.ones(1, 4)
    program = to_backend(
        torch.export.export(torch.nn.Linear(4, 4), (x,)), TaggingPartitioner(lambda node: "all")
    )
    # torch.export.save names submodules of control flow only; pickle keeps a lowered program.
    with pytest.raises(Exception, match="Failed serializing node executorch_call_delegate"):
        torch.export.save(program, io.BytesIO())


class Viewed(torch.nn.Module):
    """Returns what ``view`` makes of a parameter, and changes a buffer."""

    count: torch.Tensor

    def __init__(self, view: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.randn(3, 4))
        self.q = self.p
        self.register_buffer("count", torch.zeros(1))
        self.view = view

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return self.p + x, self.view(self.p, x), x * self.q


VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a row": lambda p, _: p[0],
    "turned": lambda p, _: p.t(),
    "expanded": lambda p, _: p.unsqueeze(0).expand(2, 3, 4),
    "itself, under two names": lambda p, _: (p.view(3, 4), p.view(12)),
    "of an input": lambda _, x: x[1],
    "of what is computed": lambda p, x: ((p * x).t(), (p * x)[0]),
    "an embedding": lambda p, x: (torch.nn.functional.embedding(x[:, :3].argmax(1), p), p[1]),
}
_LOOKS = ("select", "t", "unsqueeze", "expand", "view", "embedding", "permute")


def memory_of(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("owns", [False, True])
def test_a_delegate_returns_views_as_copies(name: str, owns: bool) -> None:
    module, x = Viewed(VIEWS[name]), torch.randn(3, 4)
    program = torch.export.export(module, (x,))
    chosen = lambda n: "a" if n.name.rstrip("_0123456789") in _LOOKS else None  # noqa: E731
    lowered = to_backend(program, TaggingPartitioner(chosen, constants=owns, state=owns))
    emitted = emit(lowered).program.execution_plan[0]
    assert len(emitted.delegates) == len(get_lowered_backend_modules(lowered.graph_module)) == 1
    same(lowered.run_decompositions().module()(x), module(x))


@pytest.mark.parametrize("name", VIEWS)
def test_a_whole_program_as_a_delegate_returns_views_as_copies(name: str) -> None:
    module, x = Viewed(VIEWS[name]), torch.randn(3, 4)
    delegate = to_backend("VerbatimBackend", torch.export.export(module, (x,)), [])
    found = pytree.tree_leaves(delegate(x))
    same(found, pytree.tree_leaves(module(x)))
    held = {memory_of(x), *map(memory_of, delegate.original_module.state_dict.values())}
    addresses = [memory_of(value) for value in found]
    assert len(set(addresses)) == len(addresses)
    assert not held & set(addresses)


def test_a_delegate_whose_outputs_alias_nothing_copies_nothing() -> None:
    linear, x = torch.nn.Linear(4, 4), torch.randn(3, 4)
    delegate = to_backend("VerbatimBackend", torch.export.export(linear, (x,)), [])
    with torch.profiler.profile() as profile, torch.no_grad():
        delegate(x)
    assert "aten::clone" not in {event.name for event in profile.events()}
