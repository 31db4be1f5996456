"""The delegate as a module: calls, copies, pickles, programs of its own."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_helpers import (
    assert_behaves,
    backend,
    core,
    delegates,
    everything,
    runs_of,
    runs_without,
)
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from lowerdeck.decompose import decompose
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    CompileSpec,
    LoweredBackendModule,
    PreprocessError,
    PreprocessResult,
    SignatureError,
    executorch_call_delegate,
    lower,
    to_backend,
)
from lowerdeck.lowered_module.testing import TaggingPartitioner, generated
from lowerdeck.serializer import NamedDataStore, deserialize_pte
from lowerdeck.torch_base import graphs_of
from lowerdeck_zoo import Holding, Of, assert_close, exported


class Odd(Holding, linear=lambda: nn.Linear(4, 4), state=lambda: torch.zeros(4)):
    """Nested inputs, None and int outputs, a lifted constant, state, dynamic sizes."""

    def forward(self, d: dict[str, Any], scale: int = 3) -> dict[str, Any]:
        y = self.linear(d["x"])
        self.state.add_(y.detach().sum(0))
        return {
            "o": torch.tan(y) + self.state * scale + torch.tensor(3.0),
            "nothing": None,
            "number": 7,
            "state": self.state.clone(),
        }


X = {"x": torch.randn(3, 4)}


def odd() -> tuple[Odd, LoweredBackendModule]:
    module, batch = Odd().eval(), Dim("batch", min=2, max=10)
    program = exported(module, X, dynamic_shapes=({"x": {0: batch}},)).run_decompositions()
    return module, to_backend("VerbatimBackend", program, [CompileSpec("k", b"v")])


def whole(module: nn.Module, *inputs: Any) -> LoweredBackendModule:
    return to_backend("VerbatimBackend", exported(module, *inputs).run_decompositions(), [])


def test_a_whole_program_is_called_as_before() -> None:
    module, delegate = odd()
    assert_behaves(delegate, module, {"x": torch.randn(5, 4)})
    assert pytree.tree_structure(delegate(X)) == pytree.tree_structure(module(X))
    with pytest.raises(SignatureError, match="expected TreeSpec"):
        delegate(X["x"])
    assert type(delegate).__name__ == "LoweredBackendModule"
    assert delegate.backend_id == "VerbatimBackend"
    assert isinstance(delegate.processed_bytes, bytes)
    assert delegate.compile_specs == [CompileSpec("k", b"v")]
    assert delegate.named_data_store_output is None
    assert delegate.meta["debug_handle_map"]
    delegate.original_module.validate()  # type: ignore[no-untyped-call]


def test_a_program_of_its_own_has_every_kind_of_input_and_output() -> None:
    (plan,) = odd()[1].program().execution_plan
    assert (len(plan.inputs), len(plan.delegates)) == (1, 1)
    kinds = [type(plan.values[i].val).__name__ for i in plan.outputs]
    assert kinds == ["Tensor", "Null", "Int", "Tensor"]
    assert "nothing" in plan.container_meta_type.encoded_out_str  # type: ignore[union-attr]


@pytest.mark.parametrize("extract", [False, True])
def test_its_file_has_the_blob_and_the_named_data(extract: bool) -> None:
    def named(program: ExportedProgram, specs: Any) -> PreprocessResult:
        store = NamedDataStore()
        store.add_named_data("weights", b"abcd", alignment=16)
        return PreprocessResult(b"blob", data_store_output=store.get_named_data_store_output())

    with backend(named):
        delegate = to_backend("Custom", exported(nn.ReLU(), torch.ones(2)), [])
    content = delegate.buffer(extract_delegate_segments=extract, segment_alignment=4096)
    assert content == copy.deepcopy(delegate).buffer(extract, segment_alignment=4096)
    program = deserialize_pte(content)
    (blob,) = program.backend_delegate_data
    assert bytes(memoryview(blob.data)) == b"blob"  # type: ignore[arg-type]
    (entry,) = program.named_data
    assert (entry.key, bytes(memoryview(entry.data))) == ("weights", b"abcd")  # type: ignore[arg-type]


class Changing(nn.Module):
    def forward(self, x: Tensor) -> list[Any]:
        x.add_(1)
        return [x * 2, 5]


class Swap(Holding, one=lambda: torch.tensor([1.0]), two=lambda: torch.tensor([2.0])):
    def forward(self, x: Tensor) -> Any:
        one, two = self.one.clone(), self.two.clone()
        self.one.copy_(two)
        self.two.copy_(one)
        return x + self.one


@pytest.mark.parametrize("module", [Changing(), Swap()])
def test_inputs_and_state_are_changed_as_in_eager(module: nn.Module) -> None:
    delegate = whole(module, torch.zeros(1))
    assert_behaves(delegate, module, torch.zeros(1))
    outputs = len(pytree.tree_leaves(module(torch.zeros(1))))
    assert len(delegate.program().execution_plan[0].outputs) == outputs


def test_copies_share_constants_and_own_state_maps_and_specs() -> None:
    _, delegate = odd()
    copied = copy.deepcopy(delegate)
    mine, theirs = delegate.original_module, copied.original_module
    assert copied.processed_bytes is delegate.processed_bytes
    assert theirs.graph_module is mine.graph_module
    assert theirs.state_dict["linear.weight"] is mine.state_dict["linear.weight"]
    assert theirs.state_dict["state"] is not mine.state_dict["state"]
    assert copied.meta == delegate.meta
    assert copied.meta["debug_handle_map"] is not delegate.meta["debug_handle_map"]
    assert copied.compile_specs == delegate.compile_specs
    assert copied.compile_specs is not delegate.compile_specs
    first = mine.module()
    delegate(X)
    assert torch.equal(theirs.state_dict["state"], torch.zeros(4))
    theirs.state_dict.clear()
    assert mine.state_dict
    assert_close(copy.deepcopy(delegate)(X), delegate(X))
    # Calls in eager prepare a module once.
    assert mine.module() is first


def test_the_operator_works_under_autograd_fake_and_functionalize() -> None:
    linear = nn.Linear(2, 2)
    delegate = to_backend("VerbatimBackend", exported(linear, torch.ones(1, 2)), [])
    (found,) = executorch_call_delegate(delegate, torch.ones(1, 2, requires_grad=True))
    assert_close(found.detach(), linear(torch.ones(1, 2)).detach())
    assert found.requires_grad
    with torch._subclasses.FakeTensorMode() as mode:
        fake = delegate(mode.from_tensor(torch.ones(1, 2)))
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert fake.shape == (1, 2)
    traced = exported(nn.Sequential(delegate), torch.ones(1, 2))
    assert any(node.target is executorch_call_delegate for node in traced.graph.nodes)
    assert_close(traced.run_decompositions().module()(torch.ones(1, 2)), found.detach())


def test_a_composition_can_be_lowered_by_another_backend() -> None:
    sample = generated(6, 6, state=False, control_flow=False)
    inner = to_backend("VerbatimBackend", sample.export(), [])
    module = Of(lambda self, x, y: self.inner(x, y)["last"][0] + 1.0, inner=inner)
    lowered = to_backend(core(module, *sample.inputs), everything())
    (outer,) = delegates(lowered)
    assert delegates(outer.original_module)
    assert_close(lowered.module()(*sample.inputs), module(*sample.inputs))


def test_a_failing_backend_of_a_whole_program_is_named() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("what")

    with (
        backend(fails),
        pytest.raises(PreprocessError, match="'Custom' failed on partition that is the whole"),
    ):
        to_backend("Custom", exported(nn.ReLU(), torch.ones(2)), [])


class Viewed(nn.Module):
    """Returns what ``view`` makes of a parameter, and changes a buffer."""

    count: Tensor

    def __init__(self, view: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(3, 4))
        self.q = self.p
        self.register_buffer("count", torch.zeros(1))
        self.view = view

    def forward(self, x: Tensor) -> Any:
        self.count.add_(1)
        return self.p + x, self.view(self.p, x), x * self.q


VIEWS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a row": lambda p, _: p[0],
    "turned": lambda p, _: p.t(),
    "expanded": lambda p, _: p.unsqueeze(0).expand(2, 3, 4),
    "itself, under two names": lambda p, _: (p.view(3, 4), p.view(12)),
    "of an input": lambda _, x: x[1],
    "of what is computed": lambda p, x: ((p * x).t(), (p * x)[0]),
    "an embedding": lambda p, x: (nn.functional.embedding(x[:, :3].argmax(1), p), p[1]),
}
_LOOKS = ("select", "t", "unsqueeze", "expand", "view", "embedding", "permute")


@pytest.mark.parametrize("name", VIEWS)
def test_a_delegate_returns_views_as_copies(name: str) -> None:
    module, x = Viewed(VIEWS[name]), torch.randn(3, 4)
    program = exported(module, x)
    for owns in (False, True):
        lowered = to_backend(
            program,
            TaggingPartitioner(
                lambda n: "a" if n.name.rstrip("_0123456789") in _LOOKS else None,
                constants=owns,
                state=owns,
            ),
        )
        assert len(emit(lowered).program.execution_plan[0].delegates) == len(delegates(lowered))
        assert len(delegates(lowered)) == 1
        assert_behaves(lowered.run_decompositions(), module, x)
    delegate = to_backend("VerbatimBackend", program, [])
    found = pytree.tree_leaves(delegate(x))
    assert_close(found, module(x))
    held = [x, *delegate.original_module.state_dict.values()]
    addresses = [value.untyped_storage().data_ptr() for value in found]
    assert len(set(addresses)) == len(addresses)
    assert not {value.untyped_storage().data_ptr() for value in held} & {*addresses}


def test_a_delegate_whose_outputs_alias_nothing_copies_nothing() -> None:
    x = torch.randn(3, 4)
    delegate = to_backend("VerbatimBackend", exported(nn.Linear(4, 4), x), [])
    with torch.profiler.profile() as profile, torch.no_grad():
        delegate(x)
    assert "aten::clone" not in {event.name for event in profile.events()}


@pytest.mark.parametrize("peer", [False, True], ids=["alone", "beside ExecuTorch"])
@pytest.mark.parametrize("called", [False, True], ids=["before a call", "after one"])
def test_delegates_and_emitted_programs_can_be_pickled(
    monkeypatch: pytest.MonkeyPatch, peer: bool, called: bool
) -> None:
    # torch cannot load pickles of what its own export and run_decompositions return, and drops
    # metadata of nodes: what is kept of those is what was emitted.
    delegate = to_backend("VerbatimBackend", decompose(exported(Odd(), X)), [])
    emitted = emit(to_backend(decompose(exported(nn.Linear(4, 4), X["x"])), everything()))
    if peer:
        module = types.ModuleType("executorch.exir.lowered_backend_module")
        module.LoweredBackendModule = type("Peers", (nn.Module,), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch.no_grad():
        if called:
            delegate(X)
        found, again = pickle.loads(pickle.dumps((delegate, emitted)))
        assert type(found) is LoweredBackendModule
        assert found.backend_id == delegate.backend_id
        assert found.processed_bytes == delegate.processed_bytes
        for _ in range(2):
            assert_close(found(X), delegate(X))
    assert again.to_bytes() == emitted.to_bytes()


def _branch(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y.exp(), (x,))


def _nested(x: Tensor) -> Any:
    return torch.cond(x.max() > 1, _branch, lambda y: y - 1, (x,)) + 1


def _loop(x: Tensor) -> Any:
    return torch.while_loop(  # type: ignore[no-untyped-call]
        lambda count, _: count < 3, lambda count, y: (count + 1, y * 2), (torch.tensor(0), x)
    )


def _straight(x: Tensor) -> Any:
    return torch.cat(torch.chunk(x, 2), 1).tanh(), {"more": x.max(-1)[0]}


def _without_gradients(x: Tensor) -> Any:
    with torch.no_grad():
        y = x + 1
    return y * 2


class Counted(nn.Module):
    state: Tensor

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.linear = nn.Linear(3, 3)
        self.register_buffer("state", torch.zeros(3))

    def forward(self, input: Tensor) -> Any:  # noqa: A002  (a name that torch.fx gives no node)
        self.state.add_(1)
        return self.call(self.linear(input) + self.state)


def _program(call: Callable[[Tensor], Any]) -> ExportedProgram:
    return exported(Counted(call).requires_grad_(False), torch.ones(2, 3))


@pytest.mark.parametrize("call", [_branch, _nested, _loop, _straight, _without_gradients])
def test_what_was_lowered_is_the_same_after_pickle_and_copies(
    call: Callable[[Tensor], Any],
) -> None:
    program = _program(call)
    for partitioner in (None, runs_without("cond"), runs_of("linear", "mm")):
        lowered = lower(program, partitioner)
        once = pickle.loads(pickle.dumps(lowered))
        twice = pickle.loads(pickle.dumps(once))
        for again in (once, twice, copy.deepcopy(lowered), copy.copy(lowered)):
            assert type(again) is type(lowered)
            assert again.to_bytes() == lowered.to_bytes()
            assert str(again.delegation()) == str(lowered.delegation())
        before = lowered.programs["forward"]
        alone = pickle.loads(pickle.dumps(before))
        for after in (once.programs["forward"], twice.programs["forward"], alone):
            assert after.graph_signature == before.graph_signature
            graphs = graphs_of(before.graph_module), graphs_of(after.graph_module)
            for mine, other in zip(*graphs, strict=True):
                assert str(other.graph) == str(mine.graph)
                assert other.code == mine.code
                other.graph.lint()
    delegate = to_backend("VerbatimBackend", decompose(program), [])
    x = torch.randn(2, 3)
    again, copied = pickle.loads(pickle.dumps(delegate)), copy.deepcopy(delegate)
    assert_close(again(x), wanted := delegate(x))
    assert_close(copied(x), wanted)
    assert_close(again(x), delegate(x))


def test_another_process_can_read_what_was_lowered(tmp_path: Path) -> None:
    lowered = lower(_program(_nested))
    (tmp_path / "lowered").write_bytes(pickle.dumps(lowered))
    code = "import pickle; pickle.load(open('lowered', 'rb')).save('model.pte')"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=tmp_path)
    assert (tmp_path / "model.pte").read_bytes() == lowered.to_bytes()
