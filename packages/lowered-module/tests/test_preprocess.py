"""Executors, caches, progress, several methods, and backends that fail."""

from __future__ import annotations

import copy
import multiprocessing
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    BackendDetails,
    BackendNotFoundError,
    CompileSpec,
    MethodProgramsPartitionerSpec,
    PartitionError,
    PreprocessError,
    PreprocessResult,
    SharedWeights,
    get_lowered_backend_modules,
    register_backend,
    to_backend,
    unregister_backend,
)
from lowerdeck.lowered_module.preprocess.cache import ResultCache
from lowerdeck.lowered_module.preprocess.content_key import content_key
from lowerdeck.lowered_module.preprocess.transport import pack, preprocess_parcel
from lowerdeck.lowered_module.preprocess.weights import put_back, taken_out
from lowerdeck.lowered_module.program.copies import with_values
from lowerdeck.lowered_module.testing import RunPartitioner, TaggingPartitioner, generated
from lowerdeck.serializer import NamedDataStore
from lowerdeck.torch_base import data_address, lazy_clone


class Counting(BackendDetails):
    """Counts its calls, puts weights into named data, and fails where it is told to."""

    calls: ClassVar[list[str]] = []
    fail_on: ClassVar[str | None] = None

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        text = str(edge_program.graph)
        Counting.calls.append(text)
        if Counting.fail_on is not None and Counting.fail_on in text:
            raise ValueError("told to fail")
        store = NamedDataStore()
        for name, value in edge_program.state_dict.items():
            store.add_named_data(name, bytes(value.detach().numpy().tobytes()), alignment=16)
        handles = [n.meta["debug_handle"] for n in edge_program.graph.nodes if n.op[:4] == "call"]
        return PreprocessResult(
            text.encode(), {0: tuple(handles)}, store.get_named_data_store_output()
        )


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    register_backend(Counting)
    Counting.calls.clear()
    yield
    Counting.fail_on = None
    unregister_backend("Counting")


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return generated(11, 10, control_flow=False).export()


def partitioner() -> RunPartitioner:
    return RunPartitioner(lambda node: "tanh" not in str(node.target), backend_id="Counting")


def blobs(program: ExportedProgram) -> list[Any]:
    return [
        (m.processed_bytes, m.meta["debug_handle_map"], m.named_data_store_output)
        for m in get_lowered_backend_modules(program.graph_module)
    ]


def test_a_cache_returns_the_same_without_compiling(
    program: ExportedProgram, tmp_path: Path
) -> None:
    plain = blobs(to_backend(program, partitioner()))
    calls = len(Counting.calls)
    first = blobs(to_backend(program, partitioner(), cache=tmp_path))
    assert len(Counting.calls) == 2 * calls
    second = blobs(to_backend(program, partitioner(), cache=tmp_path))
    assert len(Counting.calls) == 2 * calls
    assert plain == first == second


def test_a_cache_misses_when_anything_changes(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    specs = (CompileSpec("k", b"1"),)

    def lower(*, specs: Sequence[CompileSpec] = specs) -> None:
        to_backend(
            program,
            TaggingPartitioner(lambda _: "t", backend_id="Counting", compile_specs=tuple(specs)),
            cache=tmp_path,
        )

    lower()
    lower()
    assert len(Counting.calls) == 1
    lower(specs=(CompileSpec("k", b"2"),))
    assert len(Counting.calls) == 2
    with torch.no_grad():
        program.state_dict["weight"][0, 0] += 1
    lower()
    assert len(Counting.calls) == 3
    Counting.version = "2"
    lower()
    Counting.version = ""
    assert len(Counting.calls) == 4
    program.graph.find_nodes(op="placeholder")[0].meta["custom"] = {"file": "weights"}
    lower()
    assert len(Counting.calls) == 5


@pytest.mark.parametrize("reads_only", [False, True])
def test_weights_from_a_file_are_copied_only_for_backends_that_write(
    reads_only: bool, tmp_path: Path
) -> None:
    class Addresses(BackendDetails):
        """Tells where the weights lie that it is given."""

        @staticmethod
        def preprocess(
            edge_program: ExportedProgram, compile_specs: list[CompileSpec]
        ) -> PreprocessResult:
            return PreprocessResult(str(edge_program.state_dict["weight"].data_ptr()).encode())

    Addresses.reads_only = reads_only
    torch.save(torch.nn.Linear(64, 64), tmp_path / "weights")
    model = torch.load(tmp_path / "weights", weights_only=False)
    program = torch.export.export(model, (torch.ones(1, 64),))
    register_backend(Addresses)
    try:
        lowered = to_backend(program, RunPartitioner(lambda _: True, backend_id="Addresses"))
    finally:
        unregister_backend("Addresses")
    (delegate,) = get_lowered_backend_modules(lowered.graph_module)
    assert (int(delegate.processed_bytes) == model.weight.data_ptr()) is reads_only


def test_an_altered_cache_file_counts_as_absent(program: ExportedProgram, tmp_path: Path) -> None:
    wanted = blobs(to_backend(program, partitioner(), cache=tmp_path))
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        content = path.read_bytes()
        path.write_bytes(content[:-1] if number % 2 else content[:60] + b"!" + content[61:])
    assert blobs(to_backend(program, partitioner(), cache=tmp_path)) == wanted


def test_other_results_survive_a_failure(program: ExportedProgram, tmp_path: Path) -> None:
    to_backend(program, partitioner())
    count = len(Counting.calls)
    Counting.fail_on = Counting.calls[-1]
    with pytest.raises(PreprocessError, match="told to fail"):
        to_backend(program, partitioner(), cache=tmp_path)
    Counting.fail_on = None
    Counting.calls.clear()
    to_backend(program, partitioner(), cache=tmp_path)
    assert len(Counting.calls) == 1
    assert count > 1


def test_results_with_objects_are_not_kept(tmp_path: Path) -> None:
    cache = ResultCache(tmp_path)
    cache.put("key", PreprocessResult(b"x", delegate_info_meta=object()))
    assert cache.get("key") is None
    cache.put("key", PreprocessResult(b"x", {"a": (1, 2)}))
    assert cache.get("key") == PreprocessResult(b"x", {"a": (1, 2)})
    assert (cache.hits, cache.misses) == (1, 1)


def lowered_with(executor: Executor, program: ExportedProgram) -> None:
    wanted = blobs(to_backend(program, partitioner()))
    assert blobs(to_backend(program, partitioner(), executor=executor)) == wanted


def test_threads_give_the_same(program: ExportedProgram) -> None:
    with ThreadPoolExecutor(2) as executor:
        lowered_with(executor, program)


@pytest.mark.heavy
def test_processes_give_the_same(program: ExportedProgram) -> None:
    # Forked children know this module; spawned ones could not import it by its name.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        wanted = blobs(to_backend(program, RunPartitioner(lambda n: "tanh" not in str(n.target))))
        found = to_backend(
            program, RunPartitioner(lambda n: "tanh" not in str(n.target)), executor=executor
        )
        assert blobs(found) == wanted


def test_a_parcel_arrives_as_it_was_sent() -> None:
    program = generated(2, 6, dynamic=True).export()
    for index, node in enumerate(program.graph.nodes):
        node.meta["debug_handle"] = 100 + index
        node.meta["custom"] = {"number": index}
    arrived: list[Any] = []

    class Keeping(Counting):
        """Counts, and notes what users wrote to nodes."""

        @staticmethod
        def preprocess(
            edge_program: ExportedProgram, compile_specs: list[CompileSpec]
        ) -> PreprocessResult:
            arrived.extend(node.meta["custom"]["number"] for node in edge_program.graph.nodes)
            return Counting.preprocess(edge_program, compile_specs)

    result = preprocess_parcel(pack(program, Keeping, []))
    assert arrived == list(range(len(program.graph.nodes)))
    assert result.processed_bytes == str(program.graph).encode()
    assert result.debug_handle_map is not None
    assert min(result.debug_handle_map[0]) > 100  # type: ignore[index]


class Weights(BackendDetails):
    """Tells what weights arrive, and spoils them."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        told = []
        for name, value in sorted({**edge_program.state_dict, **edge_program.constants}.items()):
            told.append(f"{name} {value.dtype} {value.stride()} {type(value)} {value.tolist()}")
            with torch.no_grad():
                value.zero_()
        return PreprocessResult("\n".join(told).encode())


class _OddWeights(torch.nn.Module):
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


@pytest.mark.parametrize("shared", [False, True])
def test_weights_of_every_kind_arrive(shared: bool, tmp_path: Path) -> None:
    model = _OddWeights().eval()
    program = torch.export.export(model, (torch.randn(2, 32),))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = Weights.preprocess(copy.deepcopy(program), [])
    with ThreadPoolExecutor(1) as threads, SharedWeights(threads, tmp_path) as sharing:
        executor = sharing if shared else threads
        found = executor.submit(preprocess_parcel, pack(program, Weights, [])).result()
        again = executor.submit(preprocess_parcel, pack(program, Weights, [])).result()
    assert found == again == wanted
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, kept[name])


def _linears(count: int) -> ExportedProgram:
    """Return a program of linear layers, the first and last of which have one weight."""
    layers = [torch.nn.Linear(256, 256) for _ in range(count)]
    layers[-1].weight = layers[0].weight
    cut = [step for layer in layers for step in (layer, torch.nn.Tanh())]
    return torch.export.export(torch.nn.Sequential(*cut).eval(), (torch.randn(1, 256),))


def test_weights_travel_once_with_the_tasks_and_once_through_a_directory(tmp_path: Path) -> None:
    class Counted(ThreadPoolExecutor):
        """Counts the bytes of what it is given."""

        seen = 0

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            Counted.seen += len(pickle.dumps((fn, args)))
            return super().submit(fn, *args, **kwargs)

    program = _linears(6)
    chosen = RunPartitioner(lambda node: "tanh" not in str(node.target))
    wanted = blobs(to_backend(program, chosen))
    each = {value.data_ptr(): value.nbytes for value in program.state_dict.values()}
    weights = sum(each.values())
    one = 256 * 256 * 4
    with Counted(2) as threads:
        assert blobs(to_backend(program, chosen, executor=threads)) == wanted
        # Two partitions read the first weight: each gets it.
        assert weights < threads.seen < (weights + one) * 1.05
        Counted.seen = 0
        with SharedWeights(threads, tmp_path) as executor:
            for _ in range(2):
                assert blobs(to_backend(program, chosen, executor=executor)) == wanted
            assert executor.written == weights
            assert threads.seen < 0.1 * weights
            assert len(list(executor.directory.iterdir())) == 11
    assert not list(tmp_path.iterdir())


def test_a_key_and_a_parcel_copy_no_weights() -> None:
    program = _linears(2)
    lazily = with_values(program, lambda held: {n: lazy_clone(one) for n, one in held.items()})
    assert content_key(lazily, Weights, "Weights", [])
    taken_out(lazily)
    for name, weight in program.state_dict.items():
        assert data_address(lazily.state_dict[name]) == data_address(weight)


def test_weights_that_cannot_be_written_or_read_are_told(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(PreprocessError, match=r"no weights can be written to .*/none"):
            SharedWeights(threads, tmp_path / "none")
        executor = SharedWeights(threads, tmp_path)
        executor.shutdown()
        with pytest.raises(PreprocessError, match="no weights can be written to"):
            to_backend(_linears(2), partitioner(), executor=executor)
    executor = SharedWeights(threads, tmp_path)
    (weight, *_) = pack(_linears(2), Weights, []).weights
    gone = replace(weight, data=tmp_path / "gone")
    with pytest.raises(PreprocessError, match=r"a worker cannot read the weights at .*/gone"):
        put_back(_linears(2), (gone,))


class _Builtins(torch.nn.Module):
    """Has arguments that are called as builtins are: their nodes are not."""

    def forward(self, input: torch.Tensor, dict: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return input.relu() + dict


def test_arguments_keep_their_names_in_a_parcel() -> None:
    class Naming(Counting):
        """Tells what a program calls its arguments."""

        @staticmethod
        def preprocess(
            edge_program: ExportedProgram, compile_specs: list[CompileSpec]
        ) -> PreprocessResult:
            names = [node.target for node in edge_program.graph.find_nodes(op="placeholder")]
            edge_program.module()(torch.ones(2), torch.ones(2))
            return PreprocessResult(str(names).encode())

    program = torch.export.export(_Builtins(), (torch.ones(2), torch.ones(2)))
    arrived = preprocess_parcel(pack(program, Naming, []))
    assert arrived == Naming.preprocess(program, [])
    assert arrived.processed_bytes == b"['input', 'dict']"


class _Calling(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.norm = torch.nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.norm(x)) if x.ndim == 4 else self.call(x)


_SEVERAL_RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "batch_norm": lambda x: x.relu(),
    "max": lambda x: x.max(-1)[0] * 2,
    "min, indices alone": lambda x: x.min(-1)[1] + 1,
    "topk": lambda x: x.topk(2)[1] + 1,
    "sort": lambda x: x.sort(-1)[0],
    "chunk": lambda x: x.chunk(2, -1)[0] * 2,
    "split": lambda x: torch.split(x, 2, -1)[1] + 1,
    "unbind": lambda x: x.unbind(0)[0] * 2,
    "max_pool2d": lambda x: torch.nn.functional.max_pool2d(x.relu(), 2) + 1,
    "indices": lambda x: torch.nn.functional.max_pool2d(x, 2, return_indices=True)[1] + 1,
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (8,)) * 2,
    "group_norm": lambda x: torch.nn.functional.group_norm(x, 2) * 2,
    "var_mean": lambda x: torch.var_mean(x, -1)[1] + 1,
    "frexp": lambda x: torch.frexp(x)[0] + 1,
    "twice": lambda x: (x.max(-1)[0] * 2).max(-1)[1] + x.max(-1)[0].max(-1)[1],
    "none": lambda x: torch.ops.aten.max.dim(x, -1) and x + 1,
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", _SEVERAL_RESULTS)
def test_operators_of_several_results_arrive_as_they_were_sent(name: str, apart: bool) -> None:
    module = _Calling(_SEVERAL_RESULTS[name]).eval()
    program = torch.export.export(module, (torch.randn(2, 4, 8, 8),))
    if apart:
        program = program.run_decompositions()
    text = str(program.graph)
    for number, node in enumerate(program.graph.nodes):
        node.meta["debug_handle"] = 7 * number
    handles = [n.meta["debug_handle"] for n in program.graph.nodes if n.op[:4] == "call"]
    result = preprocess_parcel(pack(program, Counting, []))
    assert result.processed_bytes == text.encode()
    assert result.debug_handle_map == {0: tuple(handles)}
    with ThreadPoolExecutor(1) as executor:
        wanted = blobs(to_backend(program, TaggingPartitioner(lambda _: "t")))
        found = to_backend(program, TaggingPartitioner(lambda _: "t"), executor=executor)
        assert blobs(found) == wanted


def _results_apart() -> ExportedProgram:
    """Return a program whose results are late, taken twice, swapped, with names of their own."""
    module = _Calling(lambda x: sum(torch.split(x.relu(), 2, -1)[1:], x.max(-1, keepdim=True)[0]))
    exported = torch.export.export(module, (torch.randn(2, 8),))
    program: ExportedProgram = exported.run_decompositions()
    graph = program.graph
    taken = [node for node in graph.nodes if node.target is operator.getitem]
    sums = [node for node in graph.nodes if "add" in str(node.target)]
    for node in reversed(taken):
        if node.all_input_nodes[0].target is not torch.ops.aten.max.dim:
            sums[0].prepend(node)
    with graph.inserting_before(sums[-1]):
        again = graph.node_copy(taken[-1])
    sums[-1].replace_input_with(taken[-1], again)
    names = [node.name for node in taken]
    for node, fresh in zip(taken, reversed(names), strict=True):
        node.name = fresh
    next(n for n in graph.nodes if n.target is torch.ops.aten.max.dim).name = "max_17"
    for number, node in enumerate(graph.nodes):
        node.meta["debug_handle"] = 3 * number
    program.graph_module.recompile()
    return program


def test_results_that_lie_anywhere_arrive_as_they_were_sent() -> None:
    program = _results_apart()
    program.validate()  # type: ignore[no-untyped-call]
    assert preprocess_parcel(pack(program, Counting, [])) == Counting.preprocess(program, [])


def test_a_parcel_that_runs_gives_what_was_sent() -> None:
    class Running(BackendDetails):
        """Runs what arrives."""

        @staticmethod
        def preprocess(
            edge_program: ExportedProgram, compile_specs: list[CompileSpec]
        ) -> PreprocessResult:
            found = edge_program.module()(torch.arange(16.0).view(2, 8))
            return PreprocessResult(found.numpy().tobytes())

    program = _results_apart()
    assert preprocess_parcel(pack(program, Running, [])) == Running.preprocess(program, [])


@pytest.mark.parametrize("change", ["less", "more", "other", "graphs"])
def test_what_arrives_otherwise_is_refused(change: str) -> None:
    program = torch.export.export(_Calling(lambda x: x.relu().max(-1)[0]), (torch.ones(2, 3),))
    parcel = pack(program, Counting, [])
    (nodes,) = parcel.graphs
    relu = next(n for n, node in enumerate(nodes) if "relu" in node.target)
    changed = {
        "less": ((*nodes[:relu], *nodes[relu + 1 :]),),
        "more": ((*nodes, nodes[relu]),),
        "other": ((*nodes[:relu], replace(nodes[relu], target="aten.tanh.default"), *nodes[2:]),),
        "graphs": (nodes, nodes),
    }
    Counting.calls.clear()
    with pytest.raises(PreprocessError, match=r"arrived otherwise .* without an executor"):
        preprocess_parcel(replace(parcel, graphs=changed[change]))
    assert not Counting.calls


def test_a_failure_in_an_executor_names_the_partition(program: ExportedProgram) -> None:
    Counting.fail_on = "graph"
    with ThreadPoolExecutor(2) as executor, pytest.raises(PreprocessError, match="'run 1'"):
        to_backend(program, partitioner(), executor=executor)


def test_a_program_with_delegates_cannot_travel(program: ExportedProgram) -> None:
    once = to_backend(program, partitioner())
    with (
        ThreadPoolExecutor(1) as executor,
        pytest.raises(PreprocessError, match="without an executor"),
    ):
        to_backend(once, TaggingPartitioner(lambda _: "t"), executor=executor)


def test_progress_is_told(program: ExportedProgram) -> None:
    seen: list[tuple[int, int, str]] = []
    lowered = to_backend(program, partitioner(), progress=lambda *step: seen.append(step))
    count = len(blobs(lowered))
    assert [(done, total) for done, total, _ in seen] == [(i + 1, count) for i in range(count)]


@pytest.mark.parametrize("result", [None, 3, PreprocessResult("text")])  # type: ignore[arg-type]
def test_a_backend_must_return_bytes(program: ExportedProgram, result: Any) -> None:
    class Wrong(BackendDetails):
        @staticmethod
        def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> Any:
            return result

    with pytest.raises(PreprocessError, match="return a PreprocessResult with bytes"):
        to_backend(program, TaggingPartitioner(lambda _: "t", backend_id="Wrong"))


def test_an_unknown_backend_is_named(program: ExportedProgram) -> None:
    with pytest.raises(
        BackendNotFoundError, match=r"Backend Absent was not found. Known: .*Counting"
    ):
        to_backend(program, TaggingPartitioner(lambda _: "t", backend_id="Absent"))


class Together(BackendDetails):
    """Sees all partitions of all methods at once; may lose some."""

    seen: ClassVar[list[dict[str, int]]] = []
    lose: ClassVar[int] = 0

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        raise NotImplementedError

    @classmethod
    def preprocess_multimethod(cls, edge_programs: Any, compile_specs: Any) -> Any:
        cls.seen.append({method: len(found) for method, found in edge_programs.items()})
        assert all(
            len(compile_specs[method]) == len(found) for method, found in edge_programs.items()
        )
        return {
            method: [PreprocessResult(f"{method} {i}".encode()) for i in range(len(found))][
                : len(found) - cls.lose
            ]
            for method, found in edge_programs.items()
        }


def methods(backend_id: str) -> MethodProgramsPartitionerSpec:
    programs = {
        name: generated(seed, 6, control_flow=False).export()
        for seed, name in enumerate(["one", "two", "three"])
    }
    chosen = RunPartitioner(lambda node: "tanh" not in str(node.target), backend_id=backend_id)
    return MethodProgramsPartitionerSpec(programs, {"one": chosen, "two": chosen})


def test_a_backend_may_see_all_methods_at_once() -> None:
    spec = methods("Together")
    lowered = to_backend(spec)
    assert list(lowered) == ["one", "two", "three"]
    assert lowered["three"] is spec.method_to_edge_program["three"]
    (seen,) = Together.seen
    for name, count in seen.items():
        assert [blob for blob, _, _ in blobs(lowered[name])] == [
            f"{name} {i}".encode() for i in range(count)
        ]


def test_a_backend_that_looks_at_each_serves_several_methods(tmp_path: Path) -> None:
    first = to_backend(methods("Counting"), cache=tmp_path)
    calls = len(Counting.calls)
    second = to_backend(methods("Counting"), cache=tmp_path)
    assert len(Counting.calls) == calls
    assert {name: blobs(program) for name, program in first.items()} == {
        name: blobs(program) for name, program in second.items()
    }


def test_too_few_results_are_an_error() -> None:
    Together.lose = 1
    try:
        with pytest.raises(
            PreprocessError, match=r"results for the \d+ partitions of method 'one'"
        ):
            to_backend(methods("Together"))
    finally:
        Together.lose = 0


def test_a_partitioner_without_a_program_is_an_error() -> None:
    with pytest.raises(PartitionError, match="partitioners for methods absent"):
        to_backend(MethodProgramsPartitionerSpec({}, {"absent": partitioner()}))
