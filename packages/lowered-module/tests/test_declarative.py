"""Backends by table and visitors, and the conformance kit that tries them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    DeclarativeBackend,
    LoweringError,
    PartitionError,
    PartitionView,
    PreprocessError,
    PreprocessResult,
    SupportedOp,
    TablePartitioner,
    arguments_of,
    delegation_summary,
    get_lowered_backend_modules,
    graph_html,
    lower,
    operator_name,
    to_backend,
    visits,
)
from lowerdeck.lowered_module.testing import RunPartitioner, Sample, check_backend, generated

FLOAT = {torch.float32}


class Pocket(DeclarativeBackend):
    """Adds, multiplies, splits and knows tanh."""

    supported: ClassVar[tuple[SupportedOp, ...]] = (
        SupportedOp("aten.add.Tensor", FLOAT, when=lambda node: arguments_of(node)["alpha"] == 1),
        SupportedOp("aten.mul.Tensor", FLOAT),
        SupportedOp("aten.tanh", FLOAT, ranks={1, 2}),
        SupportedOp("aten.split.Tensor"),
        SupportedOp("aten.sin"),
    )
    owns_state = True

    @visits("aten.add.Tensor", "aten.mul.Tensor", "aten.tanh")
    def elementwise(self, part: PartitionView, node: Node) -> None:
        operands = [[part.index(a)] if isinstance(a, Node) else a for a in node.args]
        part.emit([operator_name(node).split(".")[1], part.index(node), operands])

    @visits("aten.split.Tensor")
    def split(self, part: PartitionView, node: Node) -> None:
        results = [None if found is None else part.index(found) for found in part.parts(node)]
        part.emit(["split", results, [[part.index(node.args[0])], node.args[1]]])  # type: ignore[arg-type]

    def compile(self, part: PartitionView) -> bytes:
        return json.dumps(
            {
                "specs": sorted(part.compile_specs),
                "inputs": [part.index(node) for node in part.inputs],
                "weights": {part.index(n): t.tolist() for n, t in part.constants.items()},
                "code": part.instructions,
                "state": {part.index(n): part.index(new) for n, new in part.mutations.items()},
                "outputs": [part.index(node) for node in part.outputs],
            }
        ).encode()


class PocketRuntime:
    """Runs what Pocket compiled."""

    def init(self, blob: Any, compile_specs: Any, named_data: Any) -> Any:
        program = json.loads(bytes(blob))
        program["values"] = {int(k): torch.tensor(v) for k, v in program["weights"].items()}
        return program

    def execute(self, program: Any, inputs: Sequence[Any]) -> list[torch.Tensor]:
        values = dict(program["values"])
        values.update(zip(program["inputs"], inputs, strict=True))
        for name, result, operands in program["code"]:
            taken = [values[a[0]] if isinstance(a, list) else a for a in operands]
            found = getattr(torch, name)(*taken)
            if name == "split":
                values.update(zip(result, found, strict=True))
            else:
                values[result] = found
        for old, new in program["state"].items():
            program["values"][int(old)] = values[new].clone()
        return [values[number] for number in program["outputs"]]


class Model(torch.nn.Module):
    """Some of what Pocket knows and some that it does not."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.detach())
        y = torch.tanh(x * self.scale) + self.total
        first, second = torch.split(y, 2)
        return torch.where(first > 0, first + 1.0, second.double().tanh().float())


def export(module: torch.nn.Module, *inputs: Any) -> ExportedProgram:
    with torch.no_grad():
        program: ExportedProgram = torch.export.export(module, inputs).run_decompositions()
    return program


def test_a_table_partitions_visits_and_reports() -> None:
    program = export(Model(), torch.ones(4))
    partitioner = Pocket.partitioner([CompileSpec("k", b"v")])
    lowered = to_backend(program, partitioner)
    delegates = get_lowered_backend_modules(lowered.graph_module)
    assert {m.backend_id for m in delegates} == {"Pocket"}
    blobs = [json.loads(m.processed_bytes) for m in delegates]
    assert all(blob["specs"] == ["k"] for blob in blobs)
    assert any(blob["state"] for blob in blobs)
    assert not lowered.state_dict
    reasons = set(partitioner.refused.values())
    assert "dtype torch.float64 is not among torch.float32" in reasons
    assert "aten.where.self is not supported" in reasons
    assert "torch.float64" in partitioner.report.get_table_report()
    summary = delegation_summary(lowered)
    assert summary.delegated["aten.add.Tensor"] == 3
    assert summary.left["aten.where.self"] == 1
    assert 0 < summary.share < 1
    assert "aten.where.self is not supported" in str(summary)
    for delegate in delegates:
        count = len(json.loads(delegate.processed_bytes)["code"])
        assert sorted(delegate.meta["debug_handle_map"]) == list(range(count))


def test_it_passes_the_conformance_kit() -> None:
    pytest.importorskip("lowerdeck.runner")
    samples = [generated(seed, 6, control_flow=False, dynamic=seed == 1) for seed in range(3)]
    report = check_backend(
        Pocket.partitioner(), samples=samples, runtimes={"Pocket": PocketRuntime()}
    )
    assert report.passed, str(report)
    assert "the runtime half computes what the module does (3/3)" in str(report)


def test_the_kit_finds_what_is_wrong() -> None:
    class Wrong(BackendDetails):
        calls = 0

        @staticmethod
        def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
            Wrong.calls += 1
            return PreprocessResult(str(Wrong.calls).encode(), {0: (10**6,)})

    partitioner = RunPartitioner(lambda _: True, backend_id="Wrong")
    report = check_backend(partitioner, samples=[generated(1, 4, control_flow=False)])
    assert not report.passed
    assert "FAIL  lowering again gives the same blobs (0/1)" in str(report)
    assert "FAIL  debug maps name nodes of their partition (0/1)" in str(report)


class Counting(nn.Module):
    """Counts its calls."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x * self.count


def _counting() -> Sample:
    return Sample("counting", Counting(), (torch.ones(2),))


class Stateless(Pocket):
    """Leaves state to the program, as a backend does that says nothing about it."""

    owns_state = False

    def compile(self, part: PartitionView) -> bytes:
        assert not part.mutations
        return super().compile(part)


class Forgetful(Pocket):
    """Declares that it takes state, and forgets it."""

    def compile(self, part: PartitionView) -> bytes:
        program = json.loads(super().compile(part))
        return json.dumps({**program, "state": {}}).encode()


def test_state_stays_with_the_program_unless_the_backend_takes_it() -> None:
    assert DeclarativeBackend.owns_state is False
    runner = pytest.importorskip("lowerdeck.runner")
    for backend in (Stateless, Pocket):
        lowered = lower((Counting(), (torch.ones(2),)), backend.partitioner())
        assert not lowered.delegation().left
        runtimes = {backend.__name__: PocketRuntime()}
        program = runner.load(lowered.to_bytes(), backends=runtimes)
        calls = [program.run("forward", torch.ones(2)).tolist() for _ in range(3)]
        assert calls == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_the_kit_finds_lost_state_and_says_what_differs() -> None:
    pytest.importorskip("lowerdeck.runner")
    report = check_backend(
        Forgetful.partitioner(), samples=[_counting()], runtimes={"Forgetful": PocketRuntime()}
    )
    assert not report.passed
    assert "output 0 differs from eager's in call 3 of 3: max 1.5" in str(report)


def test_the_kit_calls_with_different_inputs() -> None:
    pytest.importorskip("lowerdeck.runner")

    class Deaf(PocketRuntime):
        """Answers each call as the first."""

        def execute(self, handle: Any, inputs: Any) -> Any:
            if "first" not in handle:
                handle["first"] = super().execute(handle, inputs)
            return handle["first"]

    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    sample = Sample("adding", Adding(), (torch.ones(2),))
    for runtime, passes in ((PocketRuntime(), True), (Deaf(), False)):
        report = check_backend(
            Pocket.partitioner(), samples=[sample], runtimes={"Pocket": runtime}
        )
        assert report.passed is passes, str(report)


def test_the_kit_says_what_it_does_not_run() -> None:
    report = check_backend(Pocket.partitioner(), samples=[_counting()])
    assert report.passed
    (check,) = report.not_run
    assert check not in report.tried
    lines = str(report).splitlines()
    (line,) = [one for one in lines if one.startswith(f"not run  {check}: ")]
    assert "'lowerdeck.runtimes'" in line or "pip install lowerdeck-runner" in line
    assert lines[-1].endswith("not run by a runtime half: the numbers of the files are unchecked")


def test_the_kit_says_when_nothing_was_tried() -> None:
    partitioner = RunPartitioner(lambda _: False)
    report = check_backend(partitioner, samples=[generated(1, 4, control_flow=False)])
    assert not report.passed
    assert "nothing was delegated" in str(report)


class Beginning(DeclarativeBackend):
    """Numbers what it is given before it visits, and says what each instruction computes."""

    supported: ClassVar[tuple[SupportedOp, ...]] = (
        SupportedOp("aten.relu"),
        SupportedOp("aten.conv2d", FLOAT, when=lambda node: arguments_of(node)["groups"] == 1),
    )

    def begin_partition(self, part: PartitionView) -> None:
        assert not part.instructions
        self.names = {node: f"in{number}" for number, node in enumerate(part.inputs)}
        self.names |= {node: f"held{number}" for number, node in enumerate(part.constants)}

    @visits("aten.conv2d", "aten.relu")
    def fuse(self, part: PartitionView, node: Node) -> None:
        if operator_name(node) == "aten.conv2d.default":
            return
        (source,) = node.all_input_nodes
        found = arguments_of(source)
        given = [self.names[found[name]] for name in ("input", "weight")]
        text = f"conv_relu {' '.join(given)} {found['stride']} {found['dilation']}"
        part.emit(text, nodes=(source, node), identifier=f"{source.name}+{node.name}")

    def compile(self, part: PartitionView) -> bytes:
        return "; ".join(part.instructions).encode()


class Convolving(torch.nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.weight = torch.nn.Parameter(torch.ones(2, 2 // groups, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, self.weight, stride=[2], groups=self.groups)
        return torch.relu(y)


def test_a_backend_prepares_before_the_first_node_and_reads_arguments_by_name() -> None:
    program = torch.export.export(Convolving(), (torch.ones(1, 2, 3, 3),))
    (delegate,) = get_lowered_backend_modules(
        to_backend(program, Beginning.partitioner()).graph_module
    )
    assert delegate.processed_bytes == b"conv_relu in0 held0 [2, 2] [1, 1]"


def test_an_instruction_stands_for_all_nodes_that_it_computes_under_its_own_identifier() -> None:
    program = torch.export.export(Convolving(), (torch.ones(1, 2, 3, 3),))
    (delegate,) = get_lowered_backend_modules(
        to_backend(program, Beginning.partitioner()).graph_module
    )
    inner = delegate.original_module.graph_module.graph.nodes
    handles = tuple(n.meta["debug_handle"] for n in inner if n.op == "call_function")
    assert len(handles) == 2
    assert delegate.meta["debug_handle_map"] == {"conv2d+relu": handles}
    # Given by hand, without handles, a partition is compiled without a map.
    assert Beginning.preprocess(program, []).debug_handle_map == {}


def test_a_backend_lists_the_operators_of_its_table() -> None:
    assert Beginning.supported_operators() == ["aten.conv2d.default", "aten.relu.default"]


class Functional(Pocket):
    """Takes a write in place for its functional form, as most compilers must."""

    supported: ClassVar[tuple[SupportedOp, ...]] = (
        *Pocket.supported,
        *(SupportedOp("aten.t"), SupportedOp("aten.tanh_"), SupportedOp("aten.tanh")),
    )

    @visits("aten.t", "aten.tanh_")
    def one(self, part: PartitionView, node: Node) -> None:
        (source,) = node.all_input_nodes
        name = operator_name(node).split(".")[1].strip("_")
        part.emit([name, part.index(node), [[part.index(source)]]])


class WrittenThroughView(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x
        y.t().tanh_()
        return y * y


class ReadThroughView(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x
        view = y.t()
        y.tanh_()
        return view * view


class ReadItself(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x
        y.tanh_()
        return y * y.t()


@pytest.mark.parametrize("model", [WrittenThroughView, ReadThroughView, ReadItself])
def test_a_write_that_shows_through_a_view_reaches_a_backend_in_functional_form(
    model: type[torch.nn.Module],
) -> None:
    load = pytest.importorskip("lowerdeck.runner").load
    emit = pytest.importorskip("lowerdeck.emitter").emit
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    lowered = to_backend(torch.export.export(model(), (x,)), Functional.partitioner())
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    found = load(emit(lowered).to_bytes(), backends={"Functional": PocketRuntime()})
    torch.testing.assert_close(found.run("forward", x), model()(x))
    inner = [operator_name(n) for n in delegate.original_module.graph_module.graph.nodes]
    # What shows nowhere else stays as it was written.
    assert ("aten.tanh_.default" in inner) is (model is ReadItself)


class Split(torch.nn.Module):
    """One operator with many results, and one with one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tanh(one) for one in torch.unbind(x)[:5]])


@pytest.mark.parametrize(
    ("table", "min_nodes", "reasons"),
    [
        # Refused: not in the table, by its predicate, or by two entries of one mind.
        ((), 1, {"unbind": "aten.unbind.int is not supported"}),
        ((SupportedOp("aten.unbind.int", ranks={9}),), 1, {"unbind": "2 dim"}),
        ((SupportedOp("aten.unbind.int", ranks={9}),) * 2, 1, {"unbind": "2 dim"}),
        # Taken, and left because there is too little with it.
        ((SupportedOp("aten.unbind.int"),), 2, {"unbind": "fewer than 2 nodes"}),
    ],
)
def test_one_refused_operator_gives_one_reason_however_many_results_it_has(
    table: tuple[SupportedOp, ...], min_nodes: int, reasons: dict[str, str]
) -> None:
    partitioner = TablePartitioner("Pocket", table, min_nodes=min_nodes)
    lowered = to_backend(torch.export.export(Split(), (torch.ones(6, 2),)), partitioner)
    told = {name: why for name, why in partitioner.refused.items() if "tanh" not in why}
    assert set(told) == {*reasons, "cat"}
    for name, why in reasons.items():
        assert why in told[name]
        assert " and " not in told[name]
    assert all(len(found) == 1 for found in delegation_summary(lowered).reasons.values())


def test_partitions_of_one_kind_that_are_too_small_have_one_reason() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh().sin().tanh()

    partitioner = TablePartitioner("Pocket", (SupportedOp("aten.tanh"),), min_nodes=2)
    summary = delegation_summary(to_backend(export(Twice(), torch.ones(2)), partitioner))
    assert summary.reasons["aten.tanh.default"] == ("its partition would have fewer than 2 nodes",)


def test_what_a_table_cannot_say_is_said_by_a_derived_partitioner() -> None:
    class Short(TablePartitioner):
        def objection(self, node: Node) -> str | None:
            return None if len(node.name) < 4 else f"{node.name} is a long name"

    class Names(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().tanh().cos()

    partitioner = Short("VerbatimBackend", ())
    lowered = to_backend(export(Names(), torch.ones(2)), partitioner)
    assert delegation_summary(lowered).delegated == {"aten.sin.default": 1, "aten.cos.default": 1}
    assert partitioner.refused == {"tanh": "tanh is a long name"}


def test_a_node_without_a_visitor_names_operator_node_and_source() -> None:
    class Sine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    with pytest.raises(
        PreprocessError, match=r"cannot compile aten\.sin\.default \(node 'sin'"
    ) as e:
        to_backend(export(Sine(), torch.ones(2)), Pocket.partitioner())
    assert "x.sin()" in str(e.value)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (SupportedOp("aten.sin", ranks={3}), "1 dimensions are not among 3"),
        (SupportedOp("aten.sin", when=lambda _: False), "its predicate says no"),
        (SupportedOp("aten.sin", when=lambda _: "too early"), "too early"),
        (SupportedOp("aten.sin", static=True), None),
        (SupportedOp("aten.cos"), "aten.sin.default is not supported"),
    ],
)
def test_the_table_says_why_not(op: SupportedOp, reason: str | None) -> None:
    class Sine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    class Tried(Pocket):
        supported = (op,)

        @visits("aten.sin")
        def sine(self, part: PartitionView, node: Node) -> None:
            part.emit(["sin", part.index(node), [[part.index(node.args[0])]]])  # type: ignore[arg-type]

    partitioner = Tried.partitioner()
    to_backend(export(Sine(), torch.ones(2)), partitioner)
    assert list(partitioner.refused.values()) == ([] if reason is None else [reason])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten.rellu", "torch has no operator 'aten.rellu'"),
        ("aten.add", r"it has .*aten\.add\.Tensor"),
        ("aten.add.tensor", r"it has .*aten\.add\.Tensor"),
        ("relu", "expected 'aten.relu'"),
        (torch.ops.aten.relu.default, "expected its name"),
    ],
)
def test_a_name_that_no_node_can_have_is_refused(name: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        SupportedOp(name)
    with pytest.raises(LoweringError, match=message):
        visits(name)


def test_names_of_other_libraries_and_of_functions_are_taken() -> None:
    for name in ("mine.not_registered_yet", "mine.nor.this", "cond", "getitem", "add"):
        assert SupportedOp(name).name == name


@pytest.mark.parametrize("dtypes", [torch.float32, {"float32"}])
def test_dtypes_that_are_none_are_refused(dtypes: Any) -> None:
    with pytest.raises(LoweringError, match="expected a set such as"):
        SupportedOp("aten.relu", dtypes)


def test_a_table_of_names_is_refused() -> None:
    class Names(Pocket):
        supported = ("aten.relu",)  # type: ignore[assignment]

    with pytest.raises(PartitionError, match=r"'aten\.relu' in the table of Names"):
        Names.partitioner()


def test_operators_of_the_table_stay_whole_where_it_is_asked() -> None:
    class Whole(Pocket):
        supported = (SupportedOp("aten.linear"), SupportedOp("aten.relu"), SupportedOp("cond"))

    kept, wanted = Whole.partitioner().ops_to_not_decompose(None)  # type: ignore[arg-type]
    assert kept == [torch.ops.aten.linear.default, torch.ops.aten.relu.default]
    assert wanted is None


class Normed(torch.nn.Module):
    """Its batch norm counts batches that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.norm(x), self.scale)


def test_a_backend_sees_the_constants_that_its_partition_reads_and_stores_their_bytes() -> None:
    class Storing(Pocket):
        def compile(self, part: PartitionView) -> bytes:
            for node, tensor in part.constants.items():
                part.store(f"storing/{node.name}", tensor)
            return b"stored"

    program = torch.export.export(Normed().eval(), (torch.ones(2, 3),))
    (delegate,) = get_lowered_backend_modules(
        to_backend(program, Storing.partitioner()).graph_module
    )
    data = delegate.named_data_store_output
    assert data is not None
    (key,) = data.pte_data
    assert key == "storing/p_scale"
    stored = memoryview(data.buffers[data.pte_data[key].buffer_index])  # type: ignore[arg-type]
    assert stored.cast("B").cast("f").tolist() == [1.0, 2.0, 3.0]


def test_an_error_names_the_user_s_line_and_not_torch_s() -> None:
    class Failing(DeclarativeBackend):
        supported = (SupportedOp("aten.linear"),)

        def compile(self, part: PartitionView) -> bytes:
            return b""

    program = torch.export.export(torch.nn.Sequential(Layer()), (torch.ones(1, 3),))
    with pytest.raises(PreprocessError, match=r"test_declarative\.py.*") as caught:
        to_backend(program, Failing.partitioner())
    assert "linear.py" not in str(caught.value)


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor])
def test_what_a_visitor_raises_is_told_with_the_node_that_it_visited(executor: Any) -> None:
    class Dividing(Pocket):
        @visits("aten.sin")
        def sine(self, part: PartitionView, node: Node) -> None:
            raise ZeroDivisionError("of all things")

    class Sines(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + x
            return y.sin()

    program = export(Sines(), torch.ones(2))
    where = r"while visiting aten\.sin\.default \(node 'sin', from .*test_declarative\.py:\d+\)"
    with pytest.raises(PreprocessError, match=rf"ZeroDivisionError: of all things\n{where}"):
        to_backend(
            program, Dividing.partitioner(), executor=None if executor is None else executor(1)
        )


def test_constants_are_plain_tensors_on_the_program_s_memory() -> None:
    program = torch.export.export(Normed().eval(), (torch.ones(2, 3),))
    part = PartitionView(program, [])
    held = {tensor.data_ptr() for tensor in program.state_dict.values()}
    for tensor in part.constants.values():
        assert not tensor.requires_grad
        assert tensor.numpy() is not None
        assert tensor.data_ptr() in held


class Layer(torch.nn.Module):
    """Calls a layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Pocket, r"the class Pocket .*give Pocket\.partitioner\(\)"),
        (RunPartitioner, r"the class RunPartitioner .*give RunPartitioner\(\)"),
        (Pocket.partitioner, "call it"),
        ([Pocket.partitioner()], "once for each"),
    ],
)
def test_what_is_no_partitioner_is_refused_with_what_to_give(given: Any, message: str) -> None:
    program = torch.export.export(torch.nn.Tanh(), (torch.ones(2),))
    with pytest.raises(PartitionError, match=message):
        to_backend(program, given)


def test_a_module_is_no_program_to_tell_of() -> None:
    for tell in (delegation_summary, graph_html):
        with pytest.raises(LoweringError, match="found a Tanh, expected an exported program"):
            tell(torch.nn.Tanh())  # type: ignore[arg-type]


def test_the_kit_holds_each_element_and_dtype_to_eagers() -> None:
    pytest.importorskip("lowerdeck.runner")

    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0

    class Off(PocketRuntime):
        """Is wrong where elements are small, by less than is allowed of the large ones."""

        def execute(self, handle: Any, inputs: Any) -> Any:
            return [one + torch.tensor([0.0, 0.01]) for one in super().execute(handle, inputs)]

    sample = Sample("adding", Adding(), (torch.tensor([1e4, 1e-3]),))
    report = check_backend(Pocket.partitioner(), samples=[sample], runtimes={"Pocket": Off()})
    assert not report.passed, str(report)
