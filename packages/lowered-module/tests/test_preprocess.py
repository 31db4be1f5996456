"""Executors, caches, progress, several methods, and backends that fail."""

from __future__ import annotations

import multiprocessing
import operator
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lowered_helpers import backend, backend_class, blobs, calls_of, everything, runs_without
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    BackendDetails,
    BackendNotFoundError,
    CompileSpec,
    MethodProgramsPartitionerSpec,
    PartitionError,
    PreprocessError,
    PreprocessResult,
    to_backend,
)
from lowerdeck.lowered_module.testing import RunPartitioner, TaggingPartitioner, generated
from lowerdeck.serializer import NamedDataStore
from lowerdeck.torch_base import data_address, graphs_of
from lowerdeck_zoo import Of, Program, exported, programs


class Counting:
    """What the backend of this name was called with; it fails on texts that contain a word."""

    calls: ClassVar[list[str]] = []
    fail_on: ClassVar[str | None] = None


def counted(program: ExportedProgram, specs: Any) -> PreprocessResult:
    text = str(program.graph)
    Counting.calls.append(text)
    if Counting.fail_on is not None and Counting.fail_on in text:
        raise ValueError("made to fail")
    store = NamedDataStore()
    for name, value in program.state_dict.items():
        store.add_named_data(name, bytes(value.detach().numpy().tobytes()), alignment=16)
    handles = {0: tuple(node.meta["debug_handle"] for node in calls_of(program))}
    custom = [node.meta.get("custom") for node in program.graph.nodes]
    named = store.get_named_data_store_output()
    return PreprocessResult(f"{text} {custom}".encode(), handles, named)


@pytest.fixture(autouse=True)
def counting() -> Iterator[Any]:
    Counting.calls.clear()
    Counting.fail_on = None
    with backend(counted, "Counting") as made:
        yield made


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return generated(11, 10, control_flow=False).export()


def partitioner() -> RunPartitioner:
    return runs_without("tanh", backend_id="Counting")


def assert_the_same_elsewhere(program: ExportedProgram, executor: Executor, chosen: Any) -> None:
    """Compare what a backend makes in another thread or process with what it makes here."""
    wanted = blobs(to_backend(program, chosen))
    assert wanted
    assert blobs(to_backend(program, chosen, executor=executor)) == wanted


def test_a_cache_returns_the_same_without_compiling(
    program: ExportedProgram, tmp_path: Path
) -> None:
    plain = blobs(to_backend(program, partitioner()))
    calls = len(Counting.calls)
    for _ in range(2):
        assert blobs(to_backend(program, partitioner(), cache=tmp_path)) == plain
        assert len(Counting.calls) == 2 * calls


def test_a_cache_misses_when_anything_changes(tmp_path: Path, counting: Any) -> None:
    program = exported(torch.nn.Linear(2, 2), torch.ones(1, 2))

    def misses(spec: bytes = b"1") -> int:
        Counting.calls.clear()
        chosen = everything("Counting", compile_specs=(CompileSpec("k", spec),))
        to_backend(program, chosen, cache=tmp_path)
        return len(Counting.calls)

    assert [misses(), misses(), misses(b"2")] == [1, 0, 1]
    with torch.no_grad():
        program.state_dict["weight"][0, 0] += 1
    assert [misses(), misses()] == [1, 0]
    counting.version = "2"
    assert [misses(), misses()] == [1, 0]
    program.graph.find_nodes(op="placeholder")[0].meta["custom"] = {"file": "weights"}
    assert [misses(), misses()] == [1, 0]


@pytest.mark.parametrize(
    ("place", "reads_only", "is_copied"),
    [("file", False, True), ("file", True, False), ("memory", False, False)],
)
def test_weights_of_files_are_copied_only_for_backends_that_write(
    place: str, reads_only: bool, is_copied: bool, tmp_path: Path
) -> None:
    # Those in memory are lazy copies: the key of the cache must not make them real ones.
    model = torch.nn.Linear(64, 64)
    if place == "file":
        torch.save(model, tmp_path / "weights")
        model = torch.load(tmp_path / "weights", weights_only=False)
    program = exported(model, torch.ones(1, 64))
    with backend(lambda one, _: str(data_address(one.state_dict["weight"])).encode()) as made:
        made.reads_only = reads_only
        lowered = to_backend(program, everything("Custom"), cache=tmp_path / "cache")
    ((address, _, _),) = blobs(lowered)
    assert (int(address) != data_address(model.weight)) is is_copied


def test_other_results_survive_a_failure(program: ExportedProgram, tmp_path: Path) -> None:
    to_backend(program, partitioner())
    assert len(Counting.calls) > 1
    Counting.fail_on = Counting.calls[-1]
    with pytest.raises(PreprocessError, match="made to fail"):
        to_backend(program, partitioner(), cache=tmp_path)
    Counting.fail_on = None
    Counting.calls.clear()
    to_backend(program, partitioner(), cache=tmp_path)
    assert len(Counting.calls) == 1


@pytest.mark.heavy
def test_processes_give_the_same(program: ExportedProgram) -> None:
    # Forked children know this module; spawned ones could not import it by its name.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        assert_the_same_elsewhere(program, executor, runs_without("tanh"))


def test_a_partition_is_the_same_in_a_thread() -> None:
    program = generated(2, 6, dynamic=True).export()
    for index, node in enumerate(program.graph.nodes):
        node.meta["debug_handle"] = 100 + index
        node.meta["custom"] = {"number": index}
    with ThreadPoolExecutor(2) as executor:
        assert_the_same_elsewhere(program, executor, everything("Counting"))
    assert b"{'number': 4}" in blobs(to_backend(program, everything("Counting")))[0][0]


class FirstFails(Executor):
    """Its first call fails; the others end never, and nobody is told when they are cancelled."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.futures.append(Future())
        if len(self.futures) == 1:
            self.futures[0].set_exception(OSError("no space"))
        return self.futures[-1]


@pytest.mark.timeout(60)
def test_a_failure_waits_for_no_cancelled_call(program: ExportedProgram) -> None:
    # Dask's futures are such when they are cancelled while their task ends.
    executor = FirstFails()
    with pytest.raises(PreprocessError, match="OSError: no space"):
        to_backend(program, partitioner(), executor=executor)
    assert len(executor.futures) > 1
    assert all(future.cancelled() for future in executor.futures[1:])


class OddWeights(torch.nn.Module):
    """Tied, half, overlapping and transposed weights, and a constant."""

    all: torch.Tensor
    part: torch.Tensor
    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(32, 32)
        self.tied = torch.nn.Linear(32, 32)
        self.tied.weight = self.wide.weight
        self.short = torch.nn.Parameter(torch.randn(40, 32).bfloat16(), requires_grad=False)
        memory = torch.randn(64, 32)
        self.register_buffer("all", memory)
        self.register_buffer("part", memory[:32])
        self.register_buffer("turned", torch.randn(32, 64).t())
        self.table = torch.arange(1024).view(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.wide(x)) @ self.part @ self.table.float()
        return x @ (self.all.t() @ self.turned) + self.short.float()[0]


def test_weights_of_every_kind_arrive_and_may_be_spoilt() -> None:
    def spoil(program: ExportedProgram, specs: Any) -> bytes:
        text = []
        for name, value in sorted({**program.state_dict, **program.constants}.items()):
            text.append(f"{name} {value.dtype} {value.stride()} {type(value)} {value.tolist()}")
        for value in (*program.state_dict.values(), *program.constants.values()):
            value.detach().zero_()
        return "\n".join(text).encode()

    model = OddWeights().eval()
    program = exported(model, torch.randn(2, 32))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with backend(spoil), ThreadPoolExecutor(1) as threads:
        for _ in range(2):
            assert_the_same_elsewhere(program, threads, everything("Custom"))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, kept[name])


def linears(count: int) -> ExportedProgram:
    """Return a program of linear layers, the first and last of which have one weight."""
    layers = [torch.nn.Linear(256, 256) for _ in range(count)]
    layers[-1].weight = layers[0].weight
    cut = [step for layer in layers for step in (layer, torch.nn.Tanh())]
    return exported(torch.nn.Sequential(*cut), torch.randn(1, 256))


class Weighing(ThreadPoolExecutor):
    """Counts the bytes of its tasks."""

    seen = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.seen += len(pickle.dumps((fn, args)))
        return super().submit(fn, *args, **kwargs)


def test_a_weight_travels_with_each_partition_that_reads_it() -> None:
    program = linears(6)
    weights = sum({v.data_ptr(): v.nbytes for v in program.state_dict.values()}.values())
    with Weighing(2) as threads:
        assert_the_same_elsewhere(program, threads, runs_without("tanh"))
        assert weights < threads.seen < (weights + 256 * 256 * 4) * 1.05


class Builtins(torch.nn.Module):
    """Its arguments have names of Python's builtins, which nodes cannot have."""

    def forward(self, input: torch.Tensor, dict: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input.relu() + dict


def test_arguments_keep_their_names_elsewhere() -> None:
    def names(program: ExportedProgram, specs: Any) -> bytes:
        program.module()(torch.ones(2), torch.ones(2))
        return str([n.target for n in program.graph.find_nodes(op="placeholder")]).encode()

    program = exported(Builtins(), torch.ones(2), torch.ones(2))
    with backend(names), ThreadPoolExecutor(1) as executor:
        assert_the_same_elsewhere(program, executor, everything("Custom"))
        assert blobs(to_backend(program, everything("Custom")))[0][0] == b"['input', 'dict']"


def calling(call: Callable[[torch.Tensor], Any]) -> Of:
    """Return a module that calls a function, of images with a norm before it."""
    norm = torch.nn.BatchNorm2d(4)
    return Of(lambda self, x: call(self.norm(x) if x.ndim == 4 else x), norm=norm)


def described(program: ExportedProgram, specs: Any) -> bytes:
    """Return all that a backend can see of the nodes of a program."""
    lines = [str(program.graph_signature), str(program.range_constraints)]
    for graph_module in graphs_of(program.graph_module):
        for node in graph_module.graph.nodes:
            told = (node.format_node(), node.meta.get("val"), node.meta.get("nn_module_stack"))
            lines.append(" ".join(map(str, told)))
    return "\n".join(lines).encode()


@pytest.mark.parametrize("program", programs(without="large"), ids=str)
def test_programs_of_the_zoo_arrive_as_they_were_sent(program: Program) -> None:
    with backend(described), ThreadPoolExecutor(1) as executor:
        for exported_program in program.exports().values():
            wanted = to_backend("Custom", exported_program, []).processed_bytes
            found = to_backend("Custom", exported_program, [], executor=executor)
            assert found.processed_bytes == wanted


def results_apart() -> ExportedProgram:
    """Return a program whose results are late, taken twice, swapped, with names of their own."""
    module = calling(lambda x: sum(torch.split(x.relu(), 2, -1)[1:], x.max(-1, keepdim=True)[0]))
    program: ExportedProgram = exported(module, torch.randn(2, 8)).run_decompositions()
    graph = program.graph
    taken = [node for node in graph.nodes if node.target is operator.getitem]
    sums = [node for node in graph.nodes if "add" in str(node.target)]
    for node in reversed(taken):
        if node.all_input_nodes[0].target is not torch.ops.aten.max.dim:
            sums[0].prepend(node)
    with graph.inserting_before(sums[-1]):
        again = graph.node_copy(taken[-1])
    sums[-1].replace_input_with(taken[-1], again)
    for node, fresh in zip(taken, reversed([node.name for node in taken]), strict=True):
        node.name = fresh
    next(n for n in graph.nodes if n.target is torch.ops.aten.max.dim).name = "max_17"
    program.graph_module.recompile()
    return program


def test_results_anywhere_arrive_as_they_were_sent() -> None:
    def run(program: ExportedProgram, specs: Any) -> bytes:
        outputs = program.module()(torch.arange(16.0).view(2, 8))
        return f"{outputs} {program.graph}".encode()

    program = results_apart()
    with backend(run), ThreadPoolExecutor(1) as executor:
        assert_the_same_elsewhere(program, executor, everything("Custom"))


class Damaging(ThreadPoolExecutor):
    """Hands on programs that no worker can read."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return super().submit(fn, *(one._replace(program=b"") for one in args), **kwargs)


def test_what_cannot_travel_is_an_error() -> None:
    program = exported(calling(lambda x: x.relu()), torch.ones(2, 3))
    with (
        Damaging(1) as executor,
        pytest.raises(PreprocessError, match="a worker cannot deserialise"),
    ):
        to_backend(program, everything("Counting"), executor=executor)
    calls_of(program)[0].meta["custom"] = {"called": lambda: None}
    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(PreprocessError, match=r"pickle local object.*without an exec"),
    ):
        to_backend(program, everything("Counting"), executor=executor)
    assert not Counting.calls


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor])
def test_a_failure_names_the_partition(program: ExportedProgram, executor: Any) -> None:
    Counting.fail_on = "graph"
    with pytest.raises(PreprocessError, match="'run 1'"):
        to_backend(program, partitioner(), executor=None if executor is None else executor(2))


def test_delegates_travel(program: ExportedProgram) -> None:
    once = to_backend(program, partitioner())
    with backend(described), ThreadPoolExecutor(1) as executor:
        assert_the_same_elsewhere(once, executor, everything("Custom"))


def test_progress_is_shown(program: ExportedProgram) -> None:
    seen: list[tuple[int, int, str]] = []
    lowered = to_backend(program, partitioner(), progress=lambda *step: seen.append(step))
    count = len(blobs(lowered))
    assert [(done, total) for done, total, _ in seen] == [(i + 1, count) for i in range(count)]


@pytest.mark.parametrize("result", [None, 3, PreprocessResult("text")])  # type: ignore[arg-type]
def test_a_backend_must_return_bytes(program: ExportedProgram, result: Any) -> None:
    with backend(lambda *_: result), pytest.raises(PreprocessError, match="with bytes"):
        to_backend(program, everything("Custom"))


def test_an_unknown_backend_is_named(program: ExportedProgram) -> None:
    with pytest.raises(BackendNotFoundError, match=r"Absent was not found. Known: .*Counting"):
        to_backend(program, everything("Absent"))


def methods(backend_id: str) -> MethodProgramsPartitionerSpec:
    programs = {
        name: generated(seed, 6, control_flow=False).export()
        for seed, name in enumerate(["one", "two", "three"])
    }
    chosen = runs_without("tanh", backend_id=backend_id)
    return MethodProgramsPartitionerSpec(programs, {"one": chosen, "two": chosen})


def together(lost: int, edge_programs: Any, compile_specs: Any) -> Any:
    """Compile the partitions of all methods at once, and return fewer results."""
    counts = {method: len(found) for method, found in edge_programs.items()}
    assert {method: len(found) for method, found in compile_specs.items()} == counts
    return {
        method: [PreprocessResult(f"{method} {i}".encode()) for i in range(count - lost)]
        for method, count in counts.items()
    }


@pytest.mark.parametrize("lost", [0, 1])
def test_a_backend_may_see_all_methods_at_once(lost: int) -> None:
    made = backend_class("Together", lambda *_: None)
    assert issubclass(made, BackendDetails)
    made.preprocess_multimethod = staticmethod(partial(together, lost))
    spec = methods("Together")
    if lost:
        with pytest.raises(PreprocessError, match=r"the \d+ partitions of method 'one'"):
            to_backend(spec)
        return
    lowered = to_backend(spec)
    assert list(lowered) == ["one", "two", "three"]
    assert lowered["three"] is spec.method_to_edge_program["three"]
    for name in ("one", "two"):
        found = [blob for blob, _, _ in blobs(lowered[name])]
        assert found == [f"{name} {number}".encode() for number in range(len(found))] != []


def test_a_backend_that_looks_at_each_serves_several_methods(tmp_path: Path) -> None:
    first, second = (
        {n: blobs(one) for n, one in to_backend(methods("Counting"), cache=tmp_path).items()}
        for _ in range(2)
    )
    assert first == second
    assert len(Counting.calls) == sum(map(len, first.values()))


def test_a_partitioner_without_a_program_is_an_error() -> None:
    chosen = TaggingPartitioner(lambda _: None)
    with pytest.raises(PartitionError, match="partitioners for methods absent"):
        to_backend(MethodProgramsPartitionerSpec({}, {"absent": chosen}))


def test_a_backend_may_copy_the_program_itself() -> None:
    copies: list[ExportedProgram] = []

    def copied(program: ExportedProgram, specs: list[CompileSpec]) -> ExportedProgram:
        copies.append(program)
        return program

    received: list[ExportedProgram] = []

    def noted(program: ExportedProgram, specs: list[CompileSpec]) -> bytes:
        received.append(program)
        return b""

    with backend(noted) as kind:
        kind.copy_exported_program_for_preprocess = staticmethod(copied)
        to_backend(exported(Of(torch.sin), torch.ones(2)), everything("Custom"))
    assert received == copies
    assert len(received) == 1
