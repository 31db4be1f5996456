"""Backends by visitors."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from declarative_backends import FLOAT, Counting, Pocket, PocketRuntime
from lowered_helpers import core, delegates
from torch import nn
from torch.fx import Node

from lowerdeck.emitter import emit
from lowerdeck.lowered_module import (
    CompileSpec,
    DeclarativeBackend,
    DeclarativePartitioner,
    LoweringError,
    NodePartitioner,
    PartitionError,
    PartitionView,
    PreprocessError,
    arguments_of,
    delegation_summary,
    graph_html,
    lower,
    operator_name,
    to_backend,
    visits,
)
from lowerdeck.lowered_module.testing import RunPartitioner
from lowerdeck_zoo import Holding, Of, exported


class Model(Holding, scale=lambda: nn.Parameter(torch.randn(4)), total=lambda: torch.zeros(4)):
    """Some operators that Pocket has and some that it lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.detach())
        y = torch.tanh(x * self.scale) + self.total
        first, second = torch.split(y, 2)
        return torch.where(first > 0, first + 1.0, second.double().tanh().float())


def test_a_table_partitions_visits_and_reports() -> None:
    partitioner = Pocket.partitioner([CompileSpec("k", b"v")])
    lowered = to_backend(core(Model(), torch.ones(4)), partitioner)
    assert {one.backend_id for one in delegates(lowered)} == {"Pocket"}
    blobs = [json.loads(one.processed_bytes) for one in delegates(lowered)]
    assert all(blob["specs"] == ["k"] for blob in blobs)
    assert any(blob["state"] for blob in blobs)
    assert not lowered.state_dict
    reasons = set(partitioner.refused.values())
    assert "dtype torch.float64 is not among torch.float32" in reasons
    assert "Pocket has no such operator" in reasons
    assert "torch.float64" in partitioner.report.get_table_report()
    summary = delegation_summary(lowered)
    assert summary.delegated["aten.add.Tensor"] == 3
    assert summary.left["aten.where.self"] == 1
    assert 0 < summary.share < 1
    assert "Pocket has no such operator" in str(summary)
    for delegate, blob in zip(delegates(lowered), blobs, strict=True):
        assert sorted(delegate.meta["debug_handle_map"]) == list(range(len(blob["code"])))


class Stateless(Pocket):
    """Leaves state to the program, as the base class does."""

    owns_state = DeclarativeBackend.owns_state

    def compile(self, part: PartitionView) -> bytes:
        assert not part.mutations
        return super().compile(part)


@pytest.mark.parametrize("backend", [Stateless, Pocket])
def test_state_stays_with_the_program_unless_the_backend_takes_it(backend: type[Pocket]) -> None:
    runner = pytest.importorskip("lowerdeck.runner")
    lowered = lower((Counting(), (torch.ones(2),)), backend.partitioner())
    assert not lowered.delegation().left
    program = runner.load(lowered.to_bytes(), backends={backend.__name__: PocketRuntime()})
    calls = [program.run("forward", torch.ones(2)).tolist() for _ in range(3)]
    assert calls == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


class Beginning(DeclarativeBackend):
    """Numbers its inputs before it visits, and fuses two nodes into one instruction."""

    def begin_partition(self, part: PartitionView) -> None:
        assert not part.instructions
        self.names = {node: f"in{number}" for number, node in enumerate(part.inputs)}
        self.names |= {node: f"held{number}" for number, node in enumerate(part.constants)}

    @visits("aten.relu")
    @visits("aten.conv2d", dtypes=FLOAT, when=lambda node: arguments_of(node)["groups"] == 1)
    def fuse(self, part: PartitionView, node: Node) -> None:
        if operator_name(node) == "aten.conv2d.default":
            return
        (source,) = node.all_input_nodes
        arguments = arguments_of(source)
        operands = [self.names[arguments[name]] for name in ("input", "weight")]
        text = f"conv_relu {' '.join(operands)} {arguments['stride']} {arguments['dilation']}"
        part.emit(text, nodes=(source, node), identifier=f"{source.name}+{node.name}")

    def compile(self, part: PartitionView) -> bytes:
        return "; ".join(part.instructions).encode()


def test_an_instruction_may_compute_several_nodes_and_reads_arguments_by_name() -> None:
    conv = nn.Conv2d(2, 2, 1, stride=[2], bias=False)  # type: ignore[arg-type]
    program = exported(nn.Sequential(conv, nn.ReLU()), torch.ones(1, 2, 3, 3))
    (delegate,) = delegates(to_backend(program, Beginning.partitioner()))
    assert delegate.processed_bytes == b"conv_relu in0 held0 [2, 2] [1, 1]"
    inner = delegate.original_module.graph_module.graph.nodes
    handles = tuple(n.meta["debug_handle"] for n in inner if n.op == "call_function")
    assert len(handles) == 2
    assert delegate.meta["debug_handle_map"] == {"conv2d+relu": handles}
    # Without handles, as when it is called by hand, a partition is compiled without a map.
    assert Beginning.preprocess(program, []).debug_handle_map == {}
    assert Beginning.supported_operators() == ["aten.conv2d.default", "aten.relu.default"]


class Functional(Pocket):
    """Treats an in-place operator as its functional form, as most compilers must."""

    @visits("aten.t", "aten.tanh")
    def one(self, part: PartitionView, node: Node) -> None:
        (source,) = node.all_input_nodes
        name = operator_name(node).split(".")[1].strip("_")
        part.emit([name, part.index(node), [[part.index(source)]]])


def _written_through_view(x: torch.Tensor) -> torch.Tensor:
    y = x + x
    y.t().tanh_()
    return y * y


def _read_through_view(x: torch.Tensor) -> torch.Tensor:
    y = x + x
    view = y.t()
    y.tanh_()
    return view * view


def _read_itself(x: torch.Tensor) -> torch.Tensor:
    y = x + x
    y.tanh_()
    return y * y.t()


@pytest.mark.parametrize("function", [_written_through_view, _read_through_view, _read_itself])
def test_a_write_that_shows_through_a_view_reaches_a_backend_in_functional_form(
    function: Any,
) -> None:
    load = pytest.importorskip("lowerdeck.runner").load
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    lowered = to_backend(exported(Of(function), x), Functional.partitioner())
    (delegate,) = delegates(lowered)
    found = load(emit(lowered).to_bytes(), backends={"Functional": PocketRuntime()})
    torch.testing.assert_close(found.run("forward", x), function(x))
    inner = [operator_name(n) for n in delegate.original_module.graph_module.graph.nodes]
    assert "aten.tanh.default" in inner


def with_visits(base: type[DeclarativeBackend], *marks: Any) -> Any:
    """Return a backend that visits more: each mark is one of ``visits``."""

    def visit(self: Any, part: PartitionView, node: Node) -> None:
        part.emit([operator_name(node)])

    for mark in marks:
        mark(visit)
    return type("Tried", (base,), {"visit": visit})


class Empty(DeclarativeBackend):
    """Visits nothing."""

    def compile(self, part: PartitionView) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("marks", "min_nodes", "reason"),
    [
        ((), 1, "has no such operator"),
        ((visits("aten.unbind.int", ranks={9}),), 1, "2 dim"),
        ((visits("aten.unbind.int", ranks={9}),) * 2, 1, "2 dim"),
        ((visits("aten.unbind.int"),), 2, "fewer than 2 nodes"),
    ],
)
def test_a_refused_operator_of_many_results_has_one_reason(
    marks: Any, min_nodes: int, reason: str
) -> None:
    model = Of(lambda x: torch.cat([torch.tanh(one) for one in torch.unbind(x)[:5]]))
    partitioner = DeclarativePartitioner(with_visits(Empty, *marks), min_nodes=min_nodes)
    lowered = to_backend(exported(model, torch.ones(6, 2)), partitioner)
    told = {name: why for name, why in partitioner.refused.items() if "tanh" not in name}
    assert set(told) == {"unbind", "cat"}
    assert reason in told["unbind"]
    assert " and " not in told["unbind"]
    assert all(len(found) == 1 for found in delegation_summary(lowered).reasons.values())


class Short(NodePartitioner):
    """Takes whatever has a short name."""

    def objection(self, node: Node) -> str | None:
        return None if len(node.name) < 4 else f"{node.name} is a long name"


def test_a_derived_partitioner_may_object_by_its_own_rule() -> None:
    partitioner = Short("VerbatimBackend")
    model = Of(lambda x: x.sin().tanh().cos())
    lowered = to_backend(core(model, torch.ones(2)), partitioner)
    assert delegation_summary(lowered).delegated == {"aten.sin.default": 1, "aten.cos.default": 1}
    assert partitioner.refused == {"tanh": "tanh is a long name"}


class Sines(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + x).sin()


class Sine(Pocket):
    @visits("aten.sin")
    def sine(self, part: PartitionView, node: Node) -> None:
        part.emit(["sin", part.index(node), [[part.index(node.args[0])]]])  # type: ignore[arg-type]


class Dividing(Pocket):
    @visits("aten.sin")
    def sine(self, part: PartitionView, node: Node) -> None:
        raise ZeroDivisionError("of all things")


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor])
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (Pocket, r"cannot compile aten\.sin\.default \(node 'sin', from .*"),
        (Dividing, r"ZeroDivisionError: of all things\nwhile visiting aten\.sin\.default \(node"),
    ],
)
def test_an_error_names_operator_node_and_the_users_line(
    backend: type[Pocket], words: str, executor: Any
) -> None:
    options = {} if executor is None else {"executor": executor(1)}
    program = core(nn.Sequential(Sines()), torch.ones(2))
    everything = RunPartitioner(lambda _: True, backend_id=backend.__name__)
    with pytest.raises(PreprocessError, match=words) as caught:
        to_backend(program, everything, **options)
    assert "test_declarative.py" in str(caught.value)
    assert "container.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        (visits("aten.sin", ranks={3}), "1 dimensions are not among 3"),
        (visits("aten.sin", when=lambda _: False), "its predicate returned False"),
        (visits("aten.sin", when=lambda _: "too early"), "too early"),
        (visits("aten.sin", static=True), None),
        (visits("aten.cos"), "Tried has no such operator"),
    ],
)
def test_conditions_give_a_reason(mark: Any, reason: str | None) -> None:
    backend = with_visits(Empty, mark)
    partitioner = backend.partitioner()
    to_backend(core(Of(torch.sin), torch.ones(2)), partitioner)
    assert list(partitioner.refused.values()) == ([] if reason is None else [reason])


def test_a_class_replaces_what_its_base_says_of_an_operator() -> None:
    double = with_visits(Pocket, visits("aten.tanh", dtypes={torch.float64}))
    partitioner = double.partitioner()
    to_backend(core(Of(torch.tanh), torch.ones(2)), partitioner)
    assert list(partitioner.refused.values()) == ["dtype torch.float32 is not among torch.float64"]
    assert double.supported_operators() == Pocket.supported_operators()


_visits: Any = visits


def _lowered_by(given: Any) -> Any:
    return lambda: to_backend(exported(nn.Tanh(), torch.ones(2)), given)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: visits("aten.rellu"), LoweringError, "torch has no operator 'aten.rellu'"),
        (lambda: visits("aten.add"), LoweringError, r"it has .*aten\.add\.Tensor"),
        (lambda: visits("aten.add.tensor"), LoweringError, r"it has .*aten\.add\.Tensor"),
        (lambda: visits("relu"), LoweringError, "expected 'aten.relu'"),
        (lambda: _visits(torch.ops.aten.relu.default), LoweringError, "expected its name"),
        (_lowered_by(Pocket), PartitionError, r"class Pocket .*pass Pocket\.partitioner\(\)"),
        (_lowered_by(RunPartitioner), PartitionError, r"class RunPart.* pass RunPartitioner\(\)"),
        (_lowered_by(Pocket.partitioner), PartitionError, "call it"),
        (_lowered_by([Pocket.partitioner()]), PartitionError, "once for each"),
        (lambda: delegation_summary(nn.Tanh()), LoweringError, "found a Tanh, expected an exp"),  # type: ignore[arg-type]
        (lambda: graph_html(nn.Tanh()), LoweringError, "found a Tanh, expected an Exp"),  # type: ignore[arg-type]
    ],
)
def test_wrong_entries_and_arguments_are_refused(
    make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_names_of_other_libraries_and_of_functions_are_taken() -> None:
    for name in ("mine.not_registered_yet", "mine.nor.this", "cond", "getitem", "add"):
        visits(name)


def test_visited_operators_stay_whole_where_it_is_asked() -> None:
    marks = [visits(name) for name in ("aten.linear", "aten.relu", "cond")]
    kept, wanted = with_visits(Empty, *marks).partitioner().ops_to_not_decompose(None)
    assert kept == [torch.ops.aten.linear.default, torch.ops.aten.relu.default]
    assert wanted is None


class Normed(nn.Module):
    """A batch norm, whose count of batches nothing reads, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.norm(x), self.scale)


def test_constants_are_plain_tensors_on_the_programs_memory_and_can_be_stored() -> None:
    class Storing(Pocket):
        def compile(self, part: PartitionView) -> bytes:
            for node, tensor in part.constants.items():
                part.store(f"storing/{node.name}", tensor)
            return b"stored"

    program = exported(Normed(), torch.ones(2, 3))
    (delegate,) = delegates(to_backend(program, Storing.partitioner()))
    data = delegate.named_data_store_output
    assert data is not None
    ((key, entry),) = data.pte_data.items()
    assert key == "storing/p_scale"
    stored = memoryview(data.buffers[entry.buffer_index])  # type: ignore[arg-type]
    assert stored.cast("B").cast("f").tolist() == [1.0, 2.0, 3.0]
    held = {tensor.data_ptr() for tensor in program.state_dict.values()}
    for tensor in PartitionView(program, []).constants.values():
        assert not tensor.requires_grad
        assert tensor.data_ptr() in held
