"""Compile partitions with their backends: one by one, in parallel, or all methods together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.lowered_module._executorch import backend_own_copy, is_exir_backend
from lowerdeck.lowered_module.authoring.backend import BackendDetails, with_plain_bytes
from lowerdeck.lowered_module.delegate.calling_convention import CallingConvention
from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.partition.cut import Cut
from lowerdeck.lowered_module.preprocess.cache import ResultCache, content_key
from lowerdeck.lowered_module.preprocess.task import Task
from lowerdeck.lowered_module.program.copies import backend_copy
from lowerdeck.lowered_module.program.edge_form import without_edge_operators
from lowerdeck.lowered_module.program.prepared import give_own_state
from lowerdeck.lowered_module.progress import Progress, shown
from lowerdeck.torch_base import source_frame


def preprocess_partitions(
    cuts: Mapping[str, Sequence[Cut]],
    *,
    executor: Executor | None,
    cache: ResultCache | None,
    progress: Progress | None,
    together: bool = False,
) -> dict[str, list[Any]]:
    """Return the result of each partition of each method, in order.

    Args:
        cuts: The partitions of each method.
        executor: Runs the backends; None compiles in this process, one by one.
        progress: Called after each partition; None shows a progress bar on a terminal.
        together: Whether a backend that defines ``preprocess_multimethod`` gets its partitions of
            all methods together, in this process and without the cache.

    Raises:
        PreprocessError: A backend raised an exception, or returned too few or invalid results.
            Results of other partitions stay in the cache.
    """
    results: dict[int, Any] = {}  # by identity of the partition
    keys: dict[int, str | None] = {}
    missing: list[Cut] = []
    groups: dict[tuple[str, Any], list[tuple[str, Cut]]] = {}
    count = sum(map(len, cuts.values()))
    with shown(progress, count) as show:

        def keep(cut: Cut, result: Any) -> None:
            blob = getattr(result, "processed_bytes", None)
            if not isinstance(blob, bytes | bytearray | memoryview):
                raise PreprocessError(
                    f"backend {cut.backend_id!r} returned {_kind(result)} with processed_bytes "
                    f"{_kind(blob)} for partition {cut.label}: return a PreprocessResult with "
                    "bytes"
                )
            results[id(cut)] = result
            if id(cut) in keys and cache is not None:
                cache.put(keys[id(cut)], result)
            show(len(results), count, cut.label)

        for method, cut in ((name, cut) for name, parts in cuts.items() for cut in parts):
            if together and not _looks_at_each(cut.backend):
                groups.setdefault((cut.backend_id, cut.backend), []).append((method, cut))
                continue
            if cache is not None:
                key = content_key(cut.program, cut.backend, cut.backend_id, cut.compile_specs)
                result = cache.get(key)
                if result is not None:
                    keep(cut, result)
                    continue
                keys[id(cut)] = key
            missing.append(cut)
        for (name, backend), mine in groups.items():
            for (_, cut), result in zip(mine, _run_together(backend, name, mine), strict=True):
                keep(cut, result)
        if executor is None:
            for cut in missing:
                keep(cut, _run_here(cut))
        else:
            tasks = {
                executor.submit(
                    Task.run, Task.of(cut.program, cut.backend, cut.compile_specs)
                ): cut
                for cut in missing
            }
            _gather(tasks, keep)
    return {method: [results[id(cut)] for cut in parts] for method, parts in cuts.items()}


def make_delegate(
    cut: Cut, result: Any, convention: CallingConvention | None = None
) -> LoweredBackendModule:
    """Return the delegate of one partition.

    Args:
        convention: Calling convention; by default flat positional arguments.
    """
    # The delegate gets copies of the state that it changes; the caller's program keeps its values.
    give_own_state(cut.program)
    named = getattr(result, "data_store_output", None)
    blob = bytes(result.processed_bytes)
    delegate = LoweredBackendModule(
        cut.program, cut.backend_id, blob, cut.compile_specs, named, convention
    )
    delegate.meta["debug_handle_map"] = getattr(result, "debug_handle_map", None)
    for name in ("delegate_info_meta", "_delegate_info_meta"):
        if getattr(result, name, None) is not None:
            delegate.meta["_delegate_info_meta"] = getattr(result, name)
    return delegate


def _failure(cut: Cut, error: BaseException) -> PreprocessError:
    """Return a ``PreprocessError`` for an exception of a partition's backend."""
    message = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    lines: dict[str, None] = {}
    for node in cut.program.graph.nodes:
        frame = source_frame(node) if node.op == "call_function" else None
        if frame and len(lines) < _SHOWN_LINES:
            lines["\n    ".join(filter(None, (f"  {frame.location}", frame.code)))] = None
    origin = "\n".join(["\nThe partition comes from", *lines]) if lines else ""
    return PreprocessError(
        f"backend {cut.backend_id!r} failed on partition {cut.label} with {message}{origin}"
    )


_SHOWN_LINES = 5


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _run_here(cut: Cut) -> Any:
    try:
        with _backend_program(cut) as (program, is_edge):
            result = cut.backend.preprocess(program, cut.compile_specs)
        return with_plain_bytes(result) if is_edge else result
    except Exception as error:
        raise _failure(cut, error) from error


@contextmanager
def _backend_program(cut: Cut) -> Iterator[tuple[ExportedProgram, bool]]:
    """Yield a copy of a partition for its backend, and whether Edge operators were replaced."""
    backend, own_copy = cut.backend, backend_own_copy(cut.backend)
    if own_copy is not None:
        copied = own_copy(cut.program, cut.compile_specs)
    else:
        reads_only = getattr(backend, "reads_only", False) is True
        copied = backend_copy(cut.program, reads_only=reads_only)
    if is_exir_backend(backend):
        yield copied, False
        return
    with without_edge_operators(copied) as is_edge:
        yield copied, is_edge


def _gather(futures: dict[Future[Any], Cut], keep: Callable[[Cut, Any], None]) -> None:
    """Collect results; after a failure, cancel pending tasks and wait for running ones."""
    failures: dict[int, BaseException] = {}
    pending = set(futures)
    order = {future: number for number, future in enumerate(futures)}
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            cut = futures[future]
            try:
                keep(cut, future.result())
            except PreprocessError as error:
                failures[order[future]] = error
            except Exception as error:
                failed = failures[order[future]] = _failure(cut, error)
                failed.__cause__ = error
        if failures:
            # Cancelled futures are not waited for: dask does not report a future that is cancelled
            # while its task ends.
            pending = {future for future in pending if not future.cancel()}
    if failures:
        # Raise the error of the first partition in order, not in time: the same in every run.
        raise failures[min(failures)]


def _looks_at_each(backend: Any) -> bool:
    method = getattr(backend, "preprocess_multimethod", None)
    if method is None:
        return True
    own = getattr(method, "__func__", method)
    base = getattr(BackendDetails.preprocess_multimethod, "__func__", None)
    return own is base


def _run_together(backend: Any, name: str, mine: Sequence[tuple[str, Cut]]) -> list[Any]:
    programs: dict[str, list[Any]] = {}
    specs: dict[str, list[Any]] = {}
    try:
        with ExitStack() as stack:
            for method, cut in mine:
                program, _ = stack.enter_context(_backend_program(cut))
                programs.setdefault(method, []).append(program)
                specs.setdefault(method, []).append(cut.compile_specs)
            results = backend.preprocess_multimethod(programs, specs)
    except Exception as error:
        raise PreprocessError(
            f"backend {name!r} failed on methods {', '.join(programs)} with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(results, Mapping):
        raise PreprocessError(
            f"backend {name!r} returned a {type(results).__name__} from preprocess_multimethod, "
            "expected a mapping from methods to lists of results"
        )
    for method, parts in programs.items():
        count = len(results.get(method, ()))
        if count != len(parts):
            raise PreprocessError(
                f"backend {name!r} returned {count} results for the {len(parts)} partitions of "
                f"method {method!r}: return one per partition, in order"
            )
    iterators = {method: iter(results[method]) for method in programs}
    return [next(iterators[method]) for method, _ in mine]
