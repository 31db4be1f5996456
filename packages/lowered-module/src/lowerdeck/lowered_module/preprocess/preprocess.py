"""Hand partitions to their backends: one by one, side by side, or all methods at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.lowered_module._executorch import is_peers_backend
from lowerdeck.lowered_module.authoring.backend import BackendDetails, with_plain_bytes
from lowerdeck.lowered_module.authoring.edge_dialect import in_torchs_operators
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.partition import Cut
from lowerdeck.lowered_module.preprocess.cache import ResultCache, content_key
from lowerdeck.lowered_module.preprocess.delegate import check_result, failure
from lowerdeck.lowered_module.preprocess.task import Task
from lowerdeck.lowered_module.program.copies import backend_copy
from lowerdeck.lowered_module.progress import Progress


def preprocess_partitions(
    cuts: Mapping[str, Sequence[Cut]],
    progress: Progress,
    *,
    together: bool = False,
    executor: Executor | None = None,
    cache: ResultCache | None = None,
) -> dict[str, list[Any]]:
    """Return the result of each partition of each method, in order, whoever computed it.

    Args:
        cuts: The partitions of each method.
        progress: Called after each.
        together: Whether a backend with a ``preprocess_multimethod`` of its own sees its
            partitions of all methods at once: here, without executor and cache.
        executor: Where backends run; in this process, one after the other, if None.
        cache: Where results are looked up and kept.

    Raises:
        PreprocessError: A backend raised, or returned too few results or something else. What
            other partitions came to stays in the cache.
    """
    every = [(method, cut) for method, parts in cuts.items() for cut in parts]
    results: dict[int, Any] = {}  # by identity of the partition

    def keep(cut: Cut, result: Any) -> None:
        # Checked before it is stored, so that no later run gets a wrong result out of the cache.
        results[id(cut)] = check_result(result, cut.backend_id, cut.label)
        if id(cut) in keys and cache is not None:
            cache.put(keys[id(cut)], result)
        progress(len(results), len(every), cut.label)

    keys: dict[int, str | None] = {}
    missing: list[Cut] = []
    groups: dict[tuple[str, Any], list[tuple[str, Cut]]] = {}
    for method, cut in every:
        if together and not _looks_at_each(cut.backend):
            groups.setdefault((cut.backend_id, cut.backend), []).append((method, cut))
            continue
        if cache is not None:
            key = content_key(cut.part.program, cut.backend, cut.backend_id, cut.compile_specs)
            result = cache.get(key)
            if result is not None:
                keep(cut, result)
                continue
            keys[id(cut)] = key
        missing.append(cut)
    for (name, backend), mine in groups.items():
        found = _run_together(backend, name, mine)
        for (_, cut), result in zip(mine, found, strict=True):
            keep(cut, result)
    if executor is None:
        for cut in missing:
            keep(cut, _run_here(cut))
    else:
        tasks = {
            executor.submit(
                Task.run, Task.of(cut.part.program, cut.backend, cut.compile_specs)
            ): cut
            for cut in missing
        }
        _gather(tasks, keep)
    return {method: [results[id(cut)] for cut in parts] for method, parts in cuts.items()}


def _run_here(cut: Cut) -> Any:
    try:
        with _given(cut.backend, cut.part.program) as (program, is_edge):
            result = cut.backend.preprocess(program, cut.compile_specs)
        return with_plain_bytes(result) if is_edge else result
    except Exception as error:
        raise failure(cut, error) from error


@contextmanager
def _given(backend: Any, program: ExportedProgram) -> Iterator[tuple[ExportedProgram, bool]]:
    """Yield what a backend is given, in torch's operators, and whether it was in ExecuTorch's."""
    given = backend_copy(program, reads_only=getattr(backend, "reads_only", False) is True)
    if is_peers_backend(backend):
        yield given, False
        return
    with in_torchs_operators(given) as is_edge:
        yield given, is_edge


def _gather(futures: dict[Future[Any], Cut], keep: Callable[[Cut, Any], None]) -> None:
    """Keep what arrives; at the first failure cancel what has not begun and wait for the rest."""
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
                failed = failures[order[future]] = failure(cut, error)
                failed.__cause__ = error
        if failures:
            # Nobody waits for what is cancelled: dask does not report a future that is cancelled
            # while its task ends.
            pending = {future for future in pending if not future.cancel()}
    if failures:
        # That of the first partition, not the first to arrive: the same error in every run.
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
                program, _ = stack.enter_context(_given(backend, cut.part.program))
                programs.setdefault(method, []).append(program)
                specs.setdefault(method, []).append(cut.compile_specs)
            found = backend.preprocess_multimethod(programs, specs)
    except Exception as error:
        raise PreprocessError(
            f"backend {name!r} failed on methods {', '.join(programs)} with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Mapping):
        raise PreprocessError(
            f"backend {name!r} returned a {type(found).__name__} from preprocess_multimethod, "
            "expected a mapping from methods to lists of results"
        )
    for method, parts in programs.items():
        count = len(found.get(method, ()))
        if count != len(parts):
            raise PreprocessError(
                f"backend {name!r} returned {count} results for the {len(parts)} partitions of "
                f"method {method!r}: return one per partition, in order"
            )
    taken = {method: iter(found[method]) for method in programs}
    return [next(taken[method]) for method, _ in mine]
