"""What we expect of torch's private parts; a new torch that breaks it breaks one of these."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.export import Dim, export
from torch.fx import Node
from torch.fx import traceback as fx_traceback

from lowerdeck.decompose import Rules, decompose_graph
from lowerdeck.decompose import _torch_private as private
from lowerdeck.decompose.recording import Recording, as_dispatched
from lowerdeck.decompose.rules import calls_no_others
from lowerdeck.torch_base import FakeTensorMode, OpOverloadPacket, core_decompositions

ATEN = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def _fakes(*shapes: tuple[int, ...]) -> tuple[FakeTensorMode, list[Any]]:
    mode = FakeTensorMode()
    with mode:
        return mode, [torch.empty(shape) for shape in shapes]


def _targets(recording: Recording) -> list[Any]:
    return [node.target for node in recording.graph.nodes if node.op == "call_function"]


def test_importing_the_package_does_not_load_sympy() -> None:
    code = "import sys, lowerdeck.decompose; print('sympy' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert found.stdout.strip() == "False", found.stderr


def test_arguments_are_told_as_the_dispatcher_hands_them_on() -> None:
    told = as_dispatched(ATEN.sum.dim_IntList, ("x", [0]), {"keepdim": False})
    assert told == (("x", [0]), {})
    told = as_dispatched(
        ATEN._assert_tensor_metadata.default, ("x",), {"dtype": torch.int64, "layout": None}
    )
    assert told == (("x", None, None, torch.int64), {})
    # The last argument is optional and has no default.
    given = (None, [6, 8, 8], False, None)
    assert as_dispatched(ATEN.upsample_trilinear3d.vec, given, {}) == (given, {})


def test_composites_that_may_alias_cannot_be_kept() -> None:
    assert private.is_preservable(ATEN.linear.default)
    assert not private.is_preservable(ATEN.reshape.default)
    assert not private.is_preservable(ATEN.addmm.default)


def test_a_call_is_recorded_as_torch_retraces_it() -> None:
    mode, fakes = _fakes((2, 4), (3, 4), (3,))
    with private.tracing_lock:
        found: Recording = private.record(ATEN.linear.default, fakes, mode, core_decompositions())
    assert _targets(found) == [ATEN.permute.default, ATEN.addmm.default]
    assert [node.op for node in found.inputs] == ["placeholder"] * 3
    assert isinstance(found.result, Node)
    assert [found.written, found.returned, found.shared] == [{}, {}, {}]


def test_the_inverse_of_a_view_is_recorded() -> None:
    mode, fakes = _fakes((2, 4), (4,))

    def undo(whole: Any, new: Any) -> Any:
        private.replace_view(whole[1], new)
        return whole

    assert ATEN.select_scatter.default in _targets(private.record(undo, fakes, mode, {}))


def test_composites_are_kept_while_they_are_overridden() -> None:
    mode, fakes = _fakes((2, 4), (3, 4), (3,))
    with private.overriding({ATEN.linear.default: lambda *_: NotImplemented}):
        found = private.record(ATEN.linear.default, fakes, mode, {})
    assert _targets(found) == [ATEN.linear.default]
    with private.overriding(private.own_rule(ATEN.linear.default)):
        found = private.record(ATEN.linear.default, fakes, mode, {})
    assert _targets(found) == [ATEN.t.default, ATEN.addmm.default]
    assert not private.own_rule(ATEN.addmm.default)


def test_sizes_are_computed_once_and_checked() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.view(x.shape[0] * 2, -1), x.shape[0] * 2

    program = export(Twice(), (torch.ones(4, 2),), dynamic_shapes=({0: Dim("n")},))
    private.insert_assertions(program.graph_module)
    products = [n for n in program.graph.nodes if "mul" in n.name]
    assert len(products) == 1


class Counting(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_buffer(f"b{index}", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer.add_(x)
        return x + 1


def test_what_is_told_of_buffers_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = export(Counting(20), (torch.ones(1),))
    parts = decompose_graph(program, Rules.of(None))
    asked = []
    plain = torch.export.graph_signature.InputSpec.__getattribute__

    def asking(self: Any, name: str) -> Any:
        asked.append(name)
        return plain(self, name)

    monkeypatch.setattr(torch.export.graph_signature.InputSpec, "__getattribute__", asking)
    made = private.assemble(program, parts, program.module_call_graph)
    assert asked.count("kind") < 10 * 21
    assert len(made.graph_signature.buffers_to_mutate) == 20
    assert type(made.graph_signature) is torch.export.ExportGraphSignature


def test_what_is_traced_can_see_the_node_that_it_stands_for() -> None:
    program = export(torch.nn.ReLU(), (torch.ones(3, 2),))
    (node,) = program.graph.find_nodes(op="call_function", target=ATEN.relu.default)
    with fx_traceback.preserve_node_meta(), private.as_current_node(node):
        assert fx_traceback.get_current_meta()["val"] is node.meta["val"]
    assert "val" not in fx_traceback.get_current_meta()


def test_what_tracing_tells_of_a_call_is_known() -> None:
    mode, (x,) = _fakes((2, 3))
    recording = private.record(ATEN.sin.default, [x], mode, {})
    traced = recording.result.meta
    assert {"val", "original_aten"} <= traced.keys()
    assert traced["tensor_meta"] == private.tensor_meta(traced["val"])


def test_operators_that_are_not_traced_call_no_others() -> None:
    # No kernel of their own for autograd or functionalisation, in which others could be called.
    keys = ("Autograd", "CompositeImplicitAutograd", "Functionalize")
    names = [name for name in dir(ATEN) if isinstance(getattr(ATEN, name), OpOverloadPacket)]
    untraced = [
        operator
        for packet in (getattr(ATEN, name) for name in names)
        for operator in (getattr(packet, overload) for overload in packet.overloads())
        if calls_no_others(operator) and not private.has_composite_kernel(operator)
    ]
    assert len(untraced) > 300
    found = [op for op in untraced if any(key in str(k) for k in op.py_kernels for key in keys)]
    assert found == []


@torch.library.custom_op("lowerdeck_decompose_tests::noting", mutates_args=("out",))
def noting(x: torch.Tensor, out: torch.Tensor) -> None:
    out.add_(x)


@noting.register_fake
def _(x: Any, out: Any) -> None:
    return None


def test_a_custom_operator_that_writes_becomes_one_of_bases() -> None:
    class Noting(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            torch.ops.lowerdeck_decompose_tests.noting(x, y)
            return y

    made = export(Noting(), (torch.ones(2),)).run_decompositions()
    (call,) = made.graph.find_nodes(op="call_function", target=private.WRITING_CUSTOM)
    assert [str(base) for base in call.kwargs["_all_bases"]] == ["mul"]
