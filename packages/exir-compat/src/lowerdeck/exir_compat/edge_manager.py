"""The programs of several methods on their way to a file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.emitter import emit
from lowerdeck.exir_compat._executorch import new_record
from lowerdeck.exir_compat.backend_config import (
    ExecutorchBackendConfig,
    emit_config,
    passes_to_run,
    warn_of_others,
)
from lowerdeck.exir_compat.edge_config import EdgeCompileConfig
from lowerdeck.exir_compat.errors import ExirCompatError, SettingWarning, UnknownMethodError
from lowerdeck.exir_compat.executorch_manager import ExecutorchProgramManager
from lowerdeck.exir_compat.exir_classes import Manager
from lowerdeck.exir_compat.transforming import of_exirs, transformed
from lowerdeck.lowered_module import (
    LoweredBackendModule,
    MethodProgramsPartitionerSpec,
    get_lowered_backend_modules,
    in_edge_operators,
    in_torch_operators,
    to_backend,
)
from lowerdeck.serializer import NamedDataStore
from lowerdeck.torch_base import OpOverload, graphs_of


class EdgeProgramManager(Manager):
    """The programs of several methods, in torch's core operators or lowered.

    Each step returns a new manager and leaves this one as it is.

    Args:
        edge_programs: One program, which becomes the method ``forward``, or several by method
            name; they are taken as they are.
        constant_methods: Values that additional methods return.
        compile_config: Kept for the caller.
        core_aten_ops_exception_list: Nothing here depends on it.
        preserve_ops: Nothing here depends on it.

    Attributes:
        compile_config: What the caller gave.
    """

    _exirs_name = "EdgeProgramManager"

    def __init__(
        self,
        edge_programs: ExportedProgram | Mapping[str, ExportedProgram],
        constant_methods: Mapping[str, Any] | None = None,
        compile_config: EdgeCompileConfig | None = None,
        core_aten_ops_exception_list: Sequence[OpOverload] | None = None,  # noqa: ARG002
        preserve_ops: Sequence[OpOverload] | None = None,  # noqa: ARG002
    ) -> None:
        self._programs: dict[str, Any] = programs_by_method(edge_programs)
        self._constants = dict(constant_methods or {})
        self._etrecord: Any = None
        self.compile_config: EdgeCompileConfig = compile_config or EdgeCompileConfig()

    @property
    def _edge_programs(self) -> dict[str, ExportedProgram]:
        """The programs under the name by which exir's own tools reach for and replace them."""
        self._programs = self._shown()
        return self._programs

    @property
    def _named_data_store(self) -> NamedDataStore:
        """What backends gave to be looked up by key, under the name by which tools ask for it."""
        store = NamedDataStore()
        for delegate in _delegates(self._programs.values()):
            if delegate.named_data_store_output is not None:
                store.merge_named_data_store(delegate.named_data_store_output)
        return store

    @property
    def config_methods(self) -> set[str]:
        """The names of the methods that return constants."""
        return set(self._constants)

    def keep_record(self, exported: Mapping[str, ExportedProgram] | None = None) -> None:
        """Keep the programs as they are now for ExecuTorch's devtools.

        Args:
            exported: The programs as they were exported, which begins a record; None to add to
                one that was begun what passes have made of them.

        Raises:
            SettingError: The devtools are not installed.
        """
        if exported is None and self._etrecord is None:
            return
        # Copies of graphs: a caller may change what is shown. Weights are shared.
        seen = {name: transformed(program, []) for name, program in self._shown().items()}
        manager = EdgeProgramManager(seen, None, self.compile_config)
        if exported is None:
            self._etrecord.add_extra_export_modules({"edge_after_transform": manager})
            return
        self._etrecord = new_record()
        self._etrecord.add_exported_program(dict(exported))
        self._etrecord.add_edge_dialect_program(manager)

    def exported_program(self, method_name: str = "forward") -> ExportedProgram:
        """Return the program of a method, in the Edge dialect where that has been imported.

        Raises:
            UnknownMethodError: There is none of that name.
        """
        self._programs = self._shown()
        return super().exported_program(method_name)

    def transform(
        self, passes: Any, compile_config: EdgeCompileConfig | None = None
    ) -> EdgeProgramManager:
        """Return what passes make of the programs.

        Args:
            passes: One pass or several, for all methods or in a mapping by method. A pass takes a
                graph module, or, where its annotation says so, an ``ExportedProgram``.
            compile_config: Kept for the caller.

        Raises:
            TransformError: A pass is none, or what it returned cannot be used.
            UnknownMethodError: There are passes for a method that is none.
        """
        programs = dict(self._programs)
        for name, passes_of_method in by_method(passes, programs).items():
            is_several = isinstance(passes_of_method, list | tuple)
            several = passes_of_method if is_several else [passes_of_method]
            programs[name] = transformed(programs[name], several)
        return self._with(programs, compile_config)

    def to_backend(self, partitioner: Any) -> EdgeProgramManager:
        """Return the programs with what a partitioner tags given to backends.

        Args:
            partitioner: One for all methods, or a mapping from methods to one each.

        Raises:
            UnknownMethodError: There is a partitioner for a method that is none.
            lowerdeck.lowered_module.LoweringError: A program cannot be lowered.
        """
        chosen = by_method(partitioner, self._programs)
        programs = self._shown() if any(map(of_exirs, chosen.values())) else self._in_torchs()
        return self._with(to_backend(MethodProgramsPartitionerSpec(programs, chosen)))

    def to_executorch(
        self, config: ExecutorchBackendConfig | None = None
    ) -> ExecutorchProgramManager:
        """Return the program of a file.

        Args:
            config: Settings of the emission and of the file: of this package's class or exir's.

        Raises:
            SettingError: A setting cannot be honoured.
            lowerdeck.emitter.EmitterError: The programs cannot be emitted.
        """
        settings = config or ExecutorchBackendConfig()
        warn_of_others(settings)
        passes = passes_to_run(settings)
        manager = self.transform(passes) if passes else self
        programs = manager._in_torchs()
        _warn_of_devices(programs.values())
        emission, is_shared = emit_config(settings, self._constants, programs)
        emitted = emit(programs, config=emission, shared_state=is_shared)
        made = ExecutorchProgramManager(programs, emitted, settings)
        if self._etrecord is not None:
            made.keep_record(self._etrecord)
        return made

    def _shown(self) -> dict[str, ExportedProgram]:
        """Return the programs as callers see them: Edge, where anyone can know that dialect."""
        if not getattr(self.compile_config, "_use_edge_ops", True):
            return dict(self._programs)
        return {name: in_edge_operators(program) for name, program in self._programs.items()}

    def _in_torchs(self) -> dict[str, ExportedProgram]:
        """Return the programs in torch's operators, numbers and views as they were."""
        return {name: in_torch_operators(program) for name, program in self._programs.items()}

    def _with(
        self, programs: Mapping[str, ExportedProgram], config: EdgeCompileConfig | None = None
    ) -> EdgeProgramManager:
        manager = EdgeProgramManager(programs, self._constants, config or self.compile_config)
        manager._etrecord = self._etrecord
        return manager


def _delegates(programs: Iterable[ExportedProgram]) -> Iterator[LoweredBackendModule]:
    for program in programs:
        for graph in graphs_of(program.graph_module):
            yield from get_lowered_backend_modules(graph)


def _warn_of_devices(programs: Iterable[ExportedProgram]) -> None:
    """Warn of delegates whose inputs and outputs exir would place in memory of a device."""
    for delegate in _delegates(programs):
        for spec in delegate.compile_specs:
            if spec.key == "target_device" and not spec.value.startswith(b"cpu"):
                warnings.warn(
                    f"a delegate of {delegate.backend_id} asks for {spec.value.decode()}, but "
                    "emit plans memory of the CPU only: its runtime half must copy",
                    SettingWarning,
                    stacklevel=3,
                )


def programs_by_method(value: Any) -> dict[str, ExportedProgram]:
    """Return programs by method, one alone as ``forward``.

    Args:
        value: A program, or a mapping from methods to programs.

    Raises:
        ExirCompatError: It is something else.
    """
    programs = dict(value) if isinstance(value, Mapping) else {"forward": value}
    for name, program in programs.items():
        if not isinstance(program, ExportedProgram):
            raise ExirCompatError(
                f"found a {type(program).__name__} as the program of method {name!r}, expected "
                "what torch.export.export(model, example_args) returns"
            )
    return programs


def by_method(settings: Any, methods: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by method.

    Args:
        settings: One setting for all methods, or a mapping from methods to settings.
        methods: The methods of the program.

    Raises:
        UnknownMethodError: ``settings`` names a method that the program lacks.
    """
    if not isinstance(settings, Mapping):
        return dict.fromkeys(methods, settings)
    unknown = [str(name) for name in settings if name not in methods]
    if unknown:
        raise UnknownMethodError(
            f"found something for methods {', '.join(unknown)}, expected only "
            f"{', '.join(methods) or 'none'}"
        )
    return dict(settings)
