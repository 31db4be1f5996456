"""``to_edge`` and ``to_edge_transform_and_lower``, which begin what callers of exir do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.exir_compat.edge_config import EdgeCompileConfig, checked
from lowerdeck.exir_compat.edge_manager import EdgeProgramManager, by_method, programs_by_method
from lowerdeck.exir_compat.errors import ExirCompatError
from lowerdeck.lowered_module import assign_debug_handles, decomposed_for


def to_edge(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any] | None = None,
    compile_config: EdgeCompileConfig | None = None,
    generate_etrecord: bool = False,
) -> EdgeProgramManager:
    """Return programs in core ATen operators, to be lowered and emitted.

    They are decomposed once, at the first step that needs it.

    Args:
        programs: One program, which becomes the method ``forward``, or several by method name.
            None of them is changed.
        constant_methods: Values that additional methods return.
        compile_config: Which operators stay whole.
        generate_etrecord: Whether to keep a record for ExecuTorch's devtools, which must be
            installed; ``ExecutorchProgramManager.get_etrecord`` returns it.

    Raises:
        ExirCompatError: A method is not an exported program.
        SettingError: A record is asked for, and ExecuTorch's devtools are not installed.

    Example:
        >>> import torch
        >>> exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> to_edge(exported).to_executorch().buffer[4:8]
        b'ET12'
    """
    config = checked(compile_config)
    methods = programs_by_method(programs)
    manager = EdgeProgramManager(methods, constant_methods, config)
    manager.decompose_when_asked(config.preserve_ops)
    if generate_etrecord:
        manager.keep_record(methods)
    return manager


def to_edge_transform_and_lower(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    transform_passes: Any = None,
    partitioner: Any = None,
    constant_methods: Mapping[str, Any] | None = None,
    compile_config: EdgeCompileConfig | None = None,
    generate_etrecord: bool = False,
) -> EdgeProgramManager:
    """Return programs with parts given to backends, which get whole what they want whole.

    Args:
        transform_passes: As :meth:`EdgeProgramManager.transform` takes them; they run first.
        partitioner: A partitioner or several, of which the first chooses first, for all methods;
            or a mapping from methods to them.
        constant_methods: Values that additional methods return.
        compile_config: Which operators stay whole whatever the partitioners want.
        generate_etrecord: Whether to keep a record for ExecuTorch's devtools, which must be
            installed; ``ExecutorchProgramManager.get_etrecord`` returns it.

    Raises:
        ExirCompatError: A method is not an exported program.
        SettingError: A record is asked for, and ExecuTorch's devtools are not installed.
        UnknownMethodError: There are partitioners or passes for a method that is none.
        lowerdeck.lowered_module.LoweringError: A program cannot be lowered.

    Example:
        >>> import torch
        >>> exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> to_edge_transform_and_lower(exported, partitioner=[]).methods
        {'forward'}
    """
    config = checked(compile_config)
    methods = programs_by_method(programs)
    chosen = {
        name: list(entry) if isinstance(entry, list | tuple) else [entry]
        for name, entry in by_method(partitioner, methods).items()
        if entry is not None
    }
    methods = {
        name: _transformed(program, chosen.get(name, ())) for name, program in methods.items()
    }
    taken_apart = decomposed_for(chosen, methods, keep=config.preserve_ops)
    for program in taken_apart.values():
        assign_debug_handles(program.graph_module)
    manager = EdgeProgramManager(taken_apart, constant_methods, config)
    if generate_etrecord:
        manager.keep_record(methods)
    if transform_passes is not None:
        manager = manager.transform(transform_passes)
        manager.keep_record()
    for turn in range(max(map(len, chosen.values()), default=0)):
        partitioners = {
            name: several[turn] for name, several in chosen.items() if turn < len(several)
        }
        manager = manager.to_backend(partitioners)
    return manager


def _transformed(program: ExportedProgram, partitioners: Sequence[Any]) -> ExportedProgram:
    """Return a program after the transformations of partitioners, which exir 1.5.1 introduced."""
    for partitioner in partitioners:
        transform = getattr(partitioner, "transform_for_pre_decomposition", None)
        program = program if transform is None else transform(program)
        if not isinstance(program, ExportedProgram):
            raise ExirCompatError(
                f"{type(partitioner).__name__}.transform_for_pre_decomposition returned a "
                f"{type(program).__name__}, expected an ExportedProgram"
            )
    return program
