"""Hand partitions to their backends: one by one, side by side, or all methods at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.lowered_module._executorch import is_peers_backend
from lowerdeck.lowered_module.authoring.backend import BackendDetails, with_plain_bytes
from lowerdeck.lowered_module.authoring.edge_dialect import in_torchs_operators
from lowerdeck.lowered_module.authoring.registry import find_backend
from lowerdeck.lowered_module.errors import PreprocessError
from lowerdeck.lowered_module.partition import Cut
from lowerdeck.lowered_module.preprocess.cache import ResultCache, content_key
from lowerdeck.lowered_module.preprocess.delegate import check_result, failure
from lowerdeck.lowered_module.preprocess.progress import Progress
from lowerdeck.lowered_module.preprocess.task import Task
from lowerdeck.lowered_module.program.copies import backend_copy


def preprocess_each(
    cuts: Sequence[Cut],
    progress: Progress,
    *,
    executor: Executor | None = None,
    cache: ResultCache | None = None,
) -> list[Any]:
    """Return the result of each partition, in order, whoever computed it.

    Args:
        cuts: The partitions.
        progress: Called after each.
        executor: Where backends run; in this process, one after the other, if None.
        cache: Where results are looked up and kept.

    Raises:
        BackendNotFoundError: A partition goes to no known backend.
        PreprocessError: A backend raised or returned no result. What other partitions came to
            stays in the cache.
    """
    # All are found before the first compiles: a name that nobody knows must not cost an hour.
    wanted = dict.fromkeys((cut.backend_id, cut.peers) for cut in cuts)
    backends = {one: find_backend(one[0], peers=one[1]) for one in wanted}
    backend_of = [backends[cut.backend_id, cut.peers] for cut in cuts]
    results: dict[int, Any] = {}
    keys: dict[int, str | None] = {}
    if cache is not None:
        for number, cut in enumerate(cuts):
            keys[number] = content_key(
                cut.part.program, backend_of[number], cut.backend_id, cut.compile_specs
            )
            found = cache.get(keys[number])
            if found is not None:
                results[number] = found

    def keep(number: int, result: Any) -> None:
        cut = cuts[number]
        # Checked before it is kept, so that no later run gets a wrong result out of the cache.
        results[number] = check_result(result, cut.backend_id, cut.label)
        if cache is not None:
            cache.put(keys[number], result)
        progress(len(results), len(cuts), cut.label)

    todo = [number for number in range(len(cuts)) if number not in results]
    if executor is None:
        for number in todo:
            keep(number, _run_here(cuts[number], backend_of[number]))
    else:
        futures: dict[Future[Any], int] = {}
        for number in todo:
            cut = cuts[number]
            task = Task.of(cut.part.program, backend_of[number], cut.compile_specs)
            futures[executor.submit(Task.run, task)] = number
        _gather(futures, cuts, keep)
    return [results[number] for number in range(len(cuts))]


def preprocess_methods(
    cuts: Mapping[str, Sequence[Cut]],
    progress: Progress,
    *,
    executor: Executor | None = None,
    cache: ResultCache | None = None,
) -> dict[str, list[Any]]:
    """Return the results of each method's partitions, each backend seeing all its partitions.

    A backend that does not override ``preprocess_multimethod`` looks at each partition alone, so
    that ``executor`` and ``cache`` serve it; one that does runs here, once.

    Args:
        cuts: The partitions of each method.
        progress: Called after each partition, or after each backend that takes all at once.
        executor: As in ``preprocess_each``.
        cache: As in ``preprocess_each``.

    Raises:
        BackendNotFoundError: A partition goes to no known backend.
        PreprocessError: A backend raised, or returned too few results or something else.
    """
    every = [(method, cut) for method, parts in cuts.items() for cut in parts]
    results: dict[int, Any] = {}
    for name, peers in dict.fromkeys((cut.backend_id, cut.peers) for _, cut in every):
        mine = [one for one in every if (one[1].backend_id, one[1].peers) == (name, peers)]
        backend = find_backend(name, peers=peers)
        if _looks_at_each(backend):
            found = preprocess_each(
                [cut for _, cut in mine], progress, executor=executor, cache=cache
            )
        else:
            found = _run_together(backend, name, mine)
            progress(len(results) + len(found), len(every), mine[-1][1].label)
        results.update({id(cut): one for (_, cut), one in zip(mine, found, strict=True)})
    return {method: [results[id(cut)] for cut in parts] for method, parts in cuts.items()}


def _run_here(cut: Cut, backend: Any) -> Any:
    try:
        with _given(backend, cut.part.program) as (program, is_edge):
            result = backend.preprocess(program, cut.compile_specs)
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


def _gather(futures: dict[Future[Any], int], cuts: Sequence[Cut], keep: Any) -> None:
    """Keep what arrives; at the first failure cancel what has not begun and wait for the rest."""
    failures: dict[int, BaseException] = {}
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            number = futures[future]
            try:
                keep(number, future.result())
            except PreprocessError as error:
                failures[number] = error
            except Exception as error:
                failures[number] = failure(cuts[number], error)
                failures[number].__cause__ = error
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
    return [check_result(next(taken[method]), name, cut.label) for method, cut in mine]
