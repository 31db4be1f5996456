"""The functions with which callers of exir begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.exir_compat.backend_config import ExecutorchBackendConfig
from lowerdeck.exir_compat.edge_config import EdgeCompileConfig
from lowerdeck.exir_compat.edge_manager import EdgeProgramManager, by_method, programs_by_method
from lowerdeck.exir_compat.emitting import EmitterOutput
from lowerdeck.lowered_module import assign_debug_handles, decomposed_for


def to_edge(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any] | None = None,
    compile_config: EdgeCompileConfig | None = None,
    generate_etrecord: bool = False,
) -> EdgeProgramManager:
    """Return programs in core ATen operators, to be lowered and emitted.

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
    methods = programs_by_method(programs)
    return _decomposed({}, methods, constant_methods, compile_config, generate_etrecord)


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
    methods = programs_by_method(programs)
    chosen = {
        name: list(entry) if isinstance(entry, list | tuple) else [entry]
        for name, entry in by_method(partitioner, methods).items()
        if entry is not None
    }
    methods = {
        name: _transformed(program, chosen.get(name, ())) for name, program in methods.items()
    }
    manager = _decomposed(chosen, methods, constant_methods, compile_config, generate_etrecord)
    if transform_passes is not None:
        manager = manager.transform(transform_passes)
        manager.keep_record()
    for turn in range(max(map(len, chosen.values()), default=0)):
        partitioners = {
            name: several[turn] for name, several in chosen.items() if turn < len(several)
        }
        manager = manager.to_backend(partitioners)
    return manager


def emit_program(
    methods: ExportedProgram | Mapping[str, ExportedProgram],
    emit_stacktrace: bool = False,
    prim_getters: Mapping[str, Any] | None = None,
    emit_mutable_buffer_names: bool = False,  # noqa: ARG001
) -> EmitterOutput:
    """Return programs as what a file holds.

    Args:
        methods: One program, which becomes the method ``forward``, or several by method name.
        emit_stacktrace: Whether each instruction carries the stack trace of the user's code.
        prim_getters: Values that additional methods return.
        emit_mutable_buffer_names: Changes nothing: state always has its name.

    Raises:
        lowerdeck.emitter.EmitterError: The programs cannot be emitted.
    """
    named = programs_by_method(methods)
    manager = EdgeProgramManager({name: named[name] for name in sorted(named)}, prim_getters)
    config = ExecutorchBackendConfig(emit_stacktrace=emit_stacktrace)
    return manager.to_executorch(config)._emitter_output


def _decomposed(
    partitioners: Mapping[str, Sequence[Any]],
    methods: Mapping[str, ExportedProgram],
    constant_methods: Mapping[str, Any] | None,
    compile_config: EdgeCompileConfig | None,
    generate_etrecord: bool,
) -> EdgeProgramManager:
    config = compile_config or EdgeCompileConfig()
    programs = decomposed_for(partitioners, methods, keep=config.preserve_ops)
    for program in programs.values():
        assign_debug_handles(program.graph_module)
    manager = EdgeProgramManager(programs, constant_methods, config)
    if generate_etrecord:
        manager.keep_record(methods)
    return manager


def _transformed(program: ExportedProgram, partitioners: Sequence[Any]) -> ExportedProgram:
    """Return a program after the transformations of partitioners, which exir 1.5.1 introduced."""
    for partitioner in partitioners:
        transform = getattr(partitioner, "transform_for_pre_decomposition", None)
        program = program if transform is None else transform(program)
    return program
