"""Give parts of programs to backends: ``to_backend`` in its three forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

from torch.export import ExportedProgram

from lowerdeck.lowered_module.calling_convention import flatten_program
from lowerdeck.lowered_module.copies import backend_copy, partitioner_copy, shared_copy
from lowerdeck.lowered_module.cut import CutProgram, cut_program
from lowerdeck.lowered_module.debug_handles import assign_debug_handles
from lowerdeck.lowered_module.edits import first_edit
from lowerdeck.lowered_module.errors import PartitionError, PreprocessError
from lowerdeck.lowered_module.module import LoweredBackendModule
from lowerdeck.lowered_module.preprocess import Progress, make_delegate, preprocess_each
from lowerdeck.lowered_module.registry import find_backend
from lowerdeck.lowered_module.splice import splice_delegates


@overload
def to_backend(
    first: str, second: ExportedProgram, third: list[Any], /
) -> LoweredBackendModule: ...


@overload
def to_backend(
    first: ExportedProgram,
    second: Callable[[ExportedProgram], Any],
    /,
    *,
    progress: Progress | None = None,
) -> ExportedProgram: ...


def to_backend(
    first: Any, second: Any = None, third: Any = None, /, *, progress: Progress | None = None
) -> Any:
    """Return a program, parts of which are given to backends."""
    if isinstance(first, str):
        return _lower_whole(first, second, third)
    return _lower_parts(first, second, progress or _quiet)


def _quiet(done: int, total: int, place: str) -> None:
    del done, total, place


def _lower_whole(
    backend_id: str, program: ExportedProgram, compile_specs: list[Any]
) -> LoweredBackendModule:
    backend = find_backend(backend_id)
    kept = shared_copy(program)
    convention = flatten_program(kept)
    assign_debug_handles(kept.graph_module)
    try:
        result = backend.preprocess(backend_copy(kept), list(compile_specs))
    except Exception as error:
        raise PreprocessError(
            f"backend {backend_id!r} failed on the whole program with "
            f"{type(error).__name__}: {error}"
        ) from error
    return make_delegate(
        kept, backend_id, list(compile_specs), result, "the whole program", convention
    )


def _lower_parts(
    program: ExportedProgram, partitioner: Callable[[ExportedProgram], Any], progress: Progress
) -> ExportedProgram:
    cut = _partitioned(program, partitioner)
    return splice_delegates(cut, list(preprocess_each(cut.cuts, progress)))


def _partitioned(
    program: ExportedProgram, partitioner: Callable[[ExportedProgram], Any]
) -> CutProgram:
    """Return a copy of ``program``, cut where the partitioner wants it."""
    result = partitioner(partitioner_copy(program))
    tagged = getattr(result, "tagged_exported_program", None)
    tags = getattr(result, "partition_tags", None)
    name = type(partitioner).__name__
    if not isinstance(tagged, ExportedProgram) or not isinstance(tags, Mapping):
        raise PartitionError(
            f"partitioner {name} returned {type(result).__name__} with "
            f"{type(tagged).__name__} and {type(tags).__name__}: return a PartitionResult of the "
            "tagged program and a mapping from tags to DelegationSpecs"
        )
    edit = first_edit(program.graph_module, tagged.graph_module)
    if edit is not None:
        raise PartitionError(
            f"partitioner {name} changed the graph: {edit}. A partitioner only tags nodes; "
            "transform the program before partitioning, or in preprocess"
        )
    tagged._state_dict = dict(program.state_dict)
    tagged._constants = dict(program.constants)
    return cut_program(tagged, tags)
