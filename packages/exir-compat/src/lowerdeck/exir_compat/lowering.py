"""exir's entry points."""

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
    """Return a manager of programs in core ATen operators.

    Args:
        programs: One program (the method ``forward``), or several by method name; not changed.
        constant_methods: Results of constant methods.
        compile_config: Selects operators that are not decomposed.
        generate_etrecord: Record programs for ExecuTorch's devtools, which must be installed; see
            ``ExecutorchProgramManager.get_etrecord``.

    Raises:
        ExirCompatError: A method is not an exported program.
        SettingError: A record is requested, but ExecuTorch's devtools are not installed.

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
    """Return a manager of programs with partitions lowered to backends.

    Args:
        transform_passes: Passes that run before lowering, as for
            :meth:`EdgeProgramManager.transform`.
        partitioner: One partitioner, or several in order of precedence, for all methods or in a
            mapping by method. Operators that the partitioners request are not decomposed.
        constant_methods: Results of constant methods.
        compile_config: Selects further operators that are not decomposed.
        generate_etrecord: Record programs for ExecuTorch's devtools, which must be installed; see
            ``ExecutorchProgramManager.get_etrecord``.

    Raises:
        ExirCompatError: A method is not an exported program.
        SettingError: A record is requested, but ExecuTorch's devtools are not installed.
        UnknownMethodError: There are partitioners or passes for an unknown method.
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
        name: _pretransformed(program, chosen.get(name, ())) for name, program in methods.items()
    }
    manager = _decomposed(chosen, methods, constant_methods, compile_config, generate_etrecord)
    if transform_passes is not None:
        manager = manager.transform(transform_passes)
        manager.keep_record()
    for index in range(max(map(len, chosen.values()), default=0)):
        partitioners = {
            name: entries[index] for name, entries in chosen.items() if index < len(entries)
        }
        manager = manager.to_backend(partitioners)
    return manager


def emit_program(
    methods: ExportedProgram | Mapping[str, ExportedProgram],
    emit_stacktrace: bool = False,
    prim_getters: Mapping[str, Any] | None = None,
    emit_mutable_buffer_names: bool = False,  # noqa: ARG001
) -> EmitterOutput:
    """Return the emission result of programs.

    Args:
        methods: One program (the method ``forward``), or several by method name.
        emit_stacktrace: Whether instructions have stack traces of the user's code.
        prim_getters: Results of constant methods.
        emit_mutable_buffer_names: Ignored: state always has its name.

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


def _pretransformed(program: ExportedProgram, partitioners: Sequence[Any]) -> ExportedProgram:
    """Apply the partitioners' pre-decomposition transforms (exir 1.5.1)."""
    for partitioner in partitioners:
        transform = getattr(partitioner, "transform_for_pre_decomposition", None)
        program = program if transform is None else transform(program)
    return program
