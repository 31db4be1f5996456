"""Delegate parts of programs to backends: the three forms of ``to_backend``."""

# ruff: noqa: D418  (each form of a public function says what it returns)

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack, overload

from torch.export import ExportedProgram

from lowerdeck.lowered_module._executorch import is_exir, is_exir_backend, needs_edge
from lowerdeck.lowered_module.authoring.partitioner import (
    Partitioner,
    PartitionerLike,
    require_partitioner,
)
from lowerdeck.lowered_module.authoring.registry import find_backend
from lowerdeck.lowered_module.authoring.rejects import keep_reasons, keep_remarks
from lowerdeck.lowered_module.delegate.calling_convention import flatten_program
from lowerdeck.lowered_module.delegate.module import LoweredBackendModule
from lowerdeck.lowered_module.errors import (
    CacheError,
    LoweringError,
    PartitionerError,
    PartitionError,
    SignatureError,
)
from lowerdeck.lowered_module.partition.cut import Cut, CutProgram, cut_program
from lowerdeck.lowered_module.partition.edits import first_edit
from lowerdeck.lowered_module.partition.splice import splice_delegates
from lowerdeck.lowered_module.preprocess.cache import ResultCache
from lowerdeck.lowered_module.preprocess.preprocess import make_delegate, preprocess_partitions
from lowerdeck.lowered_module.program.copies import partitioner_copy, rewritten, shared_copy
from lowerdeck.lowered_module.program.debug_handles import assign_debug_handles
from lowerdeck.lowered_module.program.edge_form import (
    edge_form,
    leave_edge_form,
    without_edge_operators,
)
from lowerdeck.lowered_module.program.functional import functional, mark_shared, used_memory
from lowerdeck.lowered_module.program.masks import with_short_masks
from lowerdeck.lowered_module.program.plain_sizes import with_plain_sizes
from lowerdeck.lowered_module.program.prepared import MutableStateSnapshot
from lowerdeck.lowered_module.progress import Progress
from lowerdeck.torch_base import (
    MemoryMap,
    changed_constant,
    collector_held,
    remove_noop_mode_regions,
    repair_program,
    set_program_parts,
)

_Shared = tuple[MemoryMap, MemoryMap]
"""Two maps: memory that any method of a file changes, and memory that other methods use."""


@dataclass(frozen=True, slots=True)
class MethodProgramsPartitionerSpec:
    """Methods of one file and their partitioners.

    Attributes:
        method_to_edge_program: The program of each method.
        method_to_partitioner: The partitioner of each method; methods without one are not changed.
    """

    method_to_edge_program: Mapping[str, ExportedProgram]
    method_to_partitioner: Mapping[str, PartitionerLike]


class LoweringOptions(TypedDict, total=False):
    """Options of ``to_backend`` about compiling partitions."""

    executor: Executor | None
    cache: str | os.PathLike[str] | None
    progress: Progress | None


@overload
def to_backend(
    backend_id: str,
    edge_program: ExportedProgram,
    compile_specs: Sequence[Any] = (),
    **options: Unpack[LoweringOptions],
) -> LoweredBackendModule:
    """Return the delegate of a whole program."""


@overload
def to_backend(
    edge_program: ExportedProgram,
    partitioner_instance: PartitionerLike,
    **options: Unpack[LoweringOptions],
) -> ExportedProgram:
    """Return the program with the tagged nodes delegated."""


@overload
def to_backend(
    method_edge_program_partitioners: MethodProgramsPartitionerSpec,
    **options: Unpack[LoweringOptions],
) -> dict[str, ExportedProgram]:
    """Return the programs of several methods, each with its tagged nodes delegated."""


def to_backend(
    *args: Any,
    executor: Executor | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **named: Any,
) -> Any:
    """Delegate a program, or parts of one or several programs, to backends.

    There are three forms. ``to_backend(backend_id, edge_program, compile_specs)`` delegates a
    whole program and returns a ``LoweredBackendModule``. ``to_backend(edge_program,
    partitioner_instance)`` delegates the nodes that the partitioner tags, also in nested graphs,
    and returns a new program. ``to_backend(method_edge_program_partitioners)`` does the same for
    several methods; a backend can compile its partitions of all methods together
    (``preprocess_multimethod``).

    Arguments are not changed, even if lowering fails. Weights are shared, or cloned copy-on-write
    where torch supports it. Results do not depend on executor and cache. Python's garbage
    collector is paused meanwhile.

    Args:
        *args: The arguments of the form: ``backend_id``, the name of a backend; ``edge_program``,
            any ``ExportedProgram``; ``compile_specs``, settings of the backend;
            ``partitioner_instance``, a callable from a program to an object with
            ``tagged_exported_program`` and ``partition_tags``;
            ``method_edge_program_partitioners``, a ``MethodProgramsPartitionerSpec``.
        **named: The same arguments by name.
        executor: A ``concurrent.futures.Executor`` that compiles partitions in parallel. Its
            workers must be able to import the backends.
        cache: Directory or ``fsspec`` URL of a cache of compiled partitions, by content (graph,
            weights, specs, backend version). Concurrent lowerings may share it.
        progress: Called with the number of compiled partitions, the total number, and the label of
            the last compiled one. If None, a progress bar is shown on a terminal for two or more.

    Returns:
        A ``LoweredBackendModule``, a program, or a program for each method.

    Raises:
        BackendNotFoundError: A backend is unknown.
        AmbiguousBackendError: Two backends have the same name.
        PartitionError: A partitioner failed, changed the graph, or tagged nodes that cannot be
            delegated.
        OwnershipError: A partition cannot own a tagged tensor.
        PreprocessError: A backend failed; the message names the partition or the methods.
        SignatureError: A constant of a program was changed after export.
        CacheError: The cache directory cannot be used.
        LoweringError: ``executor`` is not an executor.
        lowerdeck.graph_fuser.CycleError: A value leaves a partition and comes back; the message
            shows the path.

    Example:
        >>> import torch
        >>> class Bytes(BackendDetails):
        ...     @staticmethod
        ...     def preprocess(edge_program, compile_specs):
        ...         return PreprocessResult(b"compiled")
        >>> class Relus(Partitioner):
        ...     def partition(self, exported_program):
        ...         for node in exported_program.graph.nodes:
        ...             if node.target is torch.ops.aten.relu.default:
        ...                 node.meta["delegation_tag"] = "relu"
        ...         return PartitionResult(exported_program, {"relu": DelegationSpec("Bytes", [])})
        >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
        >>> lowered = to_backend(program, Relus())
        >>> [delegate.backend_id for delegate in get_lowered_backend_modules(lowered.graph_module)]
        ['Bytes']
    """
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise LoweringError(
            f"executor: found a {type(executor).__name__}, expected a concurrent.futures.Executor"
        )
    if cache is not None and not isinstance(cache, str | os.PathLike):
        raise CacheError(f"cache: found a {type(cache).__name__}, expected a directory or a URL")
    preprocess = partial(
        preprocess_partitions,
        executor=executor,
        cache=None if cache is None else ResultCache(cache),
        progress=progress,
    )
    first = args[0] if args else next((named[name] for name in _FIRST if name in named), None)
    form: Callable[..., Any]
    if isinstance(first, str):
        form = partial(_lower_whole, preprocess)
    elif hasattr(first, "method_to_edge_program") and hasattr(first, "method_to_partitioner"):
        form = partial(_lower_methods, preprocess)
    elif isinstance(first, ExportedProgram):
        form = partial(_lower_program, preprocess)
    else:
        raise PartitionError(
            f"found a {type(first).__name__}, expected a backend id, an ExportedProgram or a "
            "MethodProgramsPartitionerSpec"
        )
    signature = inspect.signature(form)
    try:
        bound = signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(
            f"to_backend() {error}; with a {type(first).__name__} first it takes "
            f"{', '.join(signature.parameters)}"
        ) from None
    # One pause for all steps: each resumption would collect, and walk the graphs again.
    with collector_held():
        return form(*bound.args, **bound.kwargs)


_FIRST = ("backend_id", "method_edge_program_partitioners", "edge_program")
"""Names of the first argument of each form."""
_Preprocess = Callable[..., dict[str, list[Any]]]
"""``preprocess_partitions`` with the options of one lowering."""


def _lower_program(
    preprocess: _Preprocess, edge_program: ExportedProgram, partitioner_instance: Any = None
) -> ExportedProgram:
    return _lowered(preprocess, {"": edge_program}, {"": partitioner_instance})[""]


def _lower_whole(
    preprocess: _Preprocess,
    backend_id: str,
    edge_program: Any = None,
    compile_specs: Sequence[Any] | None = None,
) -> LoweredBackendModule:
    if not isinstance(edge_program, ExportedProgram):
        raise PartitionError(
            f"found a {type(edge_program).__name__} after backend id {backend_id!r}, expected "
            "an ExportedProgram: export the module first"
        )
    specs = list(compile_specs or [])
    program = _regrouped(_functional(edge_program))
    backend = find_backend(backend_id, peers=any(map(is_exir, specs)))
    kept = edge_form(program) if is_exir_backend(backend) else program
    kept = shared_copy(program) if kept is program else kept
    convention = flatten_program(kept)
    assign_debug_handles(kept.graph_module)
    cut = Cut(backend_id, backend, specs, kept, "that is the whole program")
    ((result,),) = preprocess({"": [cut]}).values()
    leave_edge_form(kept)
    return make_delegate(cut, result, convention)


def _lower_methods(
    preprocess: _Preprocess, method_edge_program_partitioners: Any
) -> dict[str, ExportedProgram]:
    spec = method_edge_program_partitioners
    programs = dict(spec.method_to_edge_program)
    require_programs(spec.method_to_partitioner, programs, PartitionError)
    return programs | _lowered(preprocess, programs, spec.method_to_partitioner, together=True)


def require_programs(
    partitioners: Iterable[object], programs: Iterable[str], error: type[LoweringError]
) -> None:
    """Raise an error if there are partitioners for methods without a program.

    Args:
        partitioners: Names of methods with partitioners.
        programs: Names of methods with programs.
    """
    names = list(programs)
    unknown = [str(name) for name in partitioners if name not in names]
    if unknown:
        raise error(
            f"there are partitioners for methods {', '.join(unknown)}, but programs only for "
            f"{', '.join(names) or 'none'}: give a program for each"
        )


def _lowered(
    preprocess: _Preprocess,
    programs: Mapping[str, ExportedProgram],
    partitioners: Mapping[str, Any],
    *,
    together: bool = False,
) -> dict[str, ExportedProgram]:
    """Return the programs that have partitioners, with the tagged nodes delegated."""
    for partitioner in partitioners.values():
        require_partitioner(partitioner)
    # The signature of a functional program lists all mutations.
    programs = {**programs, **{name: _functional(programs[name]) for name in partitioners}}
    state = MutableStateSnapshot(programs.values())
    cut = {}
    for name, partitioner in partitioners.items():
        others = [parts for other, parts in programs.items() if other != name]
        shared = (state.changed, used_memory(others)) if others else None
        cut[name] = _partitioned(programs[name], partitioner, shared)
    results = preprocess(
        {name: parts.cuts for name, parts in cut.items()},
        together=together,
    )
    lowered = {}
    for name, parts in cut.items():
        leave_edge_form(parts.program, [part.program for part in parts.cuts])
        delegates = list(map(make_delegate, parts.cuts, results[name]))
        lowered[name] = splice_delegates(parts, delegates, state)
    return lowered


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Return a repaired program without in-place writes."""
    changed = changed_constant(program)
    if changed is not None:
        raise SignatureError(f"{changed}: re-export the module, or restore its constant")
    # Mode regions split partitions; remove those without an effect.
    repaired = repair_program(program)
    program = with_plain_sizes(repaired, in_place=repaired is not program)
    return functional(remove_noop_mode_regions(program))


def _regrouped(values: ExportedProgram, changed: MemoryMap | None = None) -> ExportedProgram:
    """Rewrite dynamic sizes, masks and views so that backends can delegate more.

    Args:
        changed: The memory that other methods change.
    """
    if not values.range_constraints:
        # All sizes are static: the other rewrites, which are imported late, change nothing.
        return with_short_masks(values)
    from lowerdeck.lowered_module.program.equal_calls import merge_calls
    from lowerdeck.lowered_module.program.late_views import merge_late
    from lowerdeck.lowered_module.program.position_tables import with_position_tables

    values = with_position_tables(rewritten(values, merge_calls), changed)
    return with_short_masks(values, merge_calls, merge_late)


def _partitioned(
    program: ExportedProgram, partitioner: PartitionerLike, shared: _Shared | None
) -> CutProgram:
    """Return a copy of ``program`` whose partitions are submodules."""
    program = _regrouped(program, None if shared is None else shared[0])
    if needs_edge(partitioner):
        program = edge_form(program)
    copied = partitioner_copy(program)
    if shared is not None:
        mark_shared(copied, program, *shared)
    name = type(partitioner).__name__
    try:
        result: Any
        if isinstance(partitioner, Partitioner):
            with without_edge_operators(copied):
                result = partitioner(copied)
        else:
            result = partitioner(copied)
    except LoweringError:
        raise
    except Exception as error:
        raise PartitionError(
            f"partitioner {name} failed with {type(error).__name__}: {error}"
        ) from error
    tagged = getattr(result, "tagged_exported_program", None)
    tags = getattr(result, "partition_tags", None)
    if isinstance(result, Partitioner):
        raise PartitionError(
            "found a function that returns a partitioner, expected the partitioner: call it"
        )
    if not isinstance(tagged, ExportedProgram) or not isinstance(tags, Mapping):
        raise PartitionerError(
            f"partitioner {name} returned a {type(result).__name__} with a "
            f"{type(tagged).__name__} and a {type(tags).__name__}: return a PartitionResult of "
            "the tagged program; it needs a `partition_tags` field containing a mapping of tags "
            "to delegate specs (DelegationSpec)"
        )
    edit = first_edit(program.graph_module, tagged.graph_module)
    if edit is not None:
        raise PartitionerError(
            f"partitioner {name} changed the graph: {edit}. A partitioner only tags nodes; "
            "transform the program before partitioning, or in preprocess"
        )
    keep_reasons(tagged.graph, getattr(partitioner, "refused", None))
    keep_remarks(tagged.graph, getattr(partitioner, "remarks", None))
    set_program_parts(
        tagged, state_dict=dict(program.state_dict), constants=dict(program.constants)
    )
    return cut_program(tagged, tags)
