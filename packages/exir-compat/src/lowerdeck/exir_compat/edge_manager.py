"""Manager of programs between export and emission."""

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
    warn_of_ignored,
)
from lowerdeck.exir_compat.edge_config import EdgeCompileConfig
from lowerdeck.exir_compat.errors import ExirCompatError, SettingWarning, UnknownMethodError
from lowerdeck.exir_compat.executorch_manager import ExecutorchProgramManager
from lowerdeck.exir_compat.exir_classes import Manager
from lowerdeck.exir_compat.transforming import expects_edge, transformed
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
    """Programs by method, decomposed or lowered.

    Each step returns a new manager.

    Args:
        edge_programs: One program (the method ``forward``), or several by method name.
        constant_methods: Results of constant methods.
        compile_config: Settings of ``to_edge``.
        core_aten_ops_exception_list: Ignored.
        preserve_ops: Ignored: the programs are decomposed already.
    """

    _exir_name = "EdgeProgramManager"

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
        """The programs, under the name that exir's tools read and write."""
        self._programs = self._in_edge()
        return self._programs

    @property
    def _named_data_store(self) -> NamedDataStore:
        """Named data of all delegates, under the name that exir's tools read."""
        store = NamedDataStore()
        for delegate in _delegates(self._programs.values()):
            if delegate.named_data_store_output is not None:
                store.merge_named_data_store(delegate.named_data_store_output)
        return store

    @property
    def config_methods(self) -> set[str]:
        """Names of constant methods."""
        return set(self._constants)

    def keep_record(self, exported: Mapping[str, ExportedProgram] | None = None) -> None:
        """Record the current programs for ExecuTorch's devtools.

        Args:
            exported: The exported programs, to create a record; None to add the current programs
                to the existing record, if any.

        Raises:
            SettingError: The devtools are not installed.
        """
        if exported is None and self._etrecord is None:
            return
        # Copy the graphs, which the caller may change; weights are shared.
        copies = {name: transformed(program, []) for name, program in self._in_edge().items()}
        manager = EdgeProgramManager(copies, None, self.compile_config)
        if exported is None:
            self._etrecord.add_extra_export_modules({"edge_after_transform": manager})
            return
        self._etrecord = new_record()
        self._etrecord.add_exported_program(dict(exported))
        self._etrecord.add_edge_dialect_program(manager)

    def exported_program(self, method_name: str = "forward") -> ExportedProgram:
        """Return the program of a method, in the Edge dialect if it has been imported.

        Raises:
            UnknownMethodError: The method does not exist.
        """
        self._programs = self._in_edge()
        return super().exported_program(method_name)

    def transform(
        self, passes: Any, compile_config: EdgeCompileConfig | None = None
    ) -> EdgeProgramManager:
        """Return a manager of transformed programs.

        Args:
            passes: One pass or several, for all methods or in a mapping by method. A pass takes a
                graph module, or an ``ExportedProgram`` if its first parameter is annotated so.
            compile_config: Settings of the new manager.

        Raises:
            TransformError: A pass returned an unsupported result.
            UnknownMethodError: There are passes for an unknown method.
        """
        programs = dict(self._programs)
        for name, passes_of_method in by_method(passes, programs).items():
            is_several = isinstance(passes_of_method, list | tuple)
            pass_list = passes_of_method if is_several else [passes_of_method]
            programs[name] = transformed(programs[name], pass_list)
        return self._with(programs, compile_config)

    def to_backend(self, partitioner: Any) -> EdgeProgramManager:
        """Return a manager of programs with tagged nodes lowered to backends.

        Args:
            partitioner: One partitioner for all methods, or a mapping by method.

        Raises:
            UnknownMethodError: There is a partitioner for an unknown method.
            lowerdeck.lowered_module.LoweringError: A program cannot be lowered.
        """
        chosen = by_method(partitioner, self._programs)
        programs = self._in_edge() if any(map(expects_edge, chosen.values())) else self._in_torch()
        return self._with(to_backend(MethodProgramsPartitionerSpec(programs, chosen)))

    def to_executorch(
        self, config: ExecutorchBackendConfig | None = None
    ) -> ExecutorchProgramManager:
        """Return a manager of the emitted program.

        Args:
            config: Settings of emission and file, possibly of exir's class.

        Raises:
            SettingError: A setting is not supported.
            lowerdeck.emitter.EmitterError: The programs cannot be emitted.
        """
        settings = config or ExecutorchBackendConfig()
        warn_of_ignored(settings)
        passes = passes_to_run(settings)
        manager = self.transform(passes) if passes else self
        programs = manager._in_torch()
        _warn_of_devices(programs.values())
        emission, is_shared = emit_config(settings, self._constants, programs)
        emitted = emit(programs, config=emission, shared_state=is_shared)
        new_manager = ExecutorchProgramManager(programs, emitted, settings)
        if self._etrecord is not None:
            new_manager.keep_record(self._etrecord)
        return new_manager

    def _in_edge(self) -> dict[str, ExportedProgram]:
        """Return the programs, in the Edge dialect if that is loaded and enabled by the config."""
        if not getattr(self.compile_config, "_use_edge_ops", True):
            return dict(self._programs)
        return {name: in_edge_operators(program) for name, program in self._programs.items()}

    def _in_torch(self) -> dict[str, ExportedProgram]:
        """Return the programs in ATen operators, with the original scalars and views."""
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
    """Warn of delegates whose inputs and outputs exir would place in device memory."""
    for delegate in _delegates(programs):
        for spec in delegate.compile_specs:
            if spec.key == "target_device" and not spec.value.startswith(b"cpu"):
                warnings.warn(
                    f"a delegate of {delegate.backend_id} targets {spec.value.decode()}, but "
                    "only CPU memory is planned: its runtime must copy inputs and outputs",
                    SettingWarning,
                    stacklevel=3,
                )


def programs_by_method(value: Any) -> dict[str, ExportedProgram]:
    """Return programs by method; a single program is ``forward``.

    Args:
        value: A program, or a mapping by method.

    Raises:
        ExirCompatError: A value is not an ``ExportedProgram``.
    """
    programs = dict(value) if isinstance(value, Mapping) else {"forward": value}
    for name, program in programs.items():
        if not isinstance(program, ExportedProgram):
            raise ExirCompatError(
                f"found a {type(program).__name__} as the program of method {name!r}; expected "
                "the result of torch.export.export(model, example_args)"
            )
    return programs


def by_method(settings: Any, methods: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by method.

    Args:
        settings: One setting for all methods, or a mapping by method.
        methods: Methods of the program.

    Raises:
        UnknownMethodError: ``settings`` has an unknown method.
    """
    if not isinstance(settings, Mapping):
        return dict.fromkeys(methods, settings)
    unknown = [str(name) for name in settings if name not in methods]
    if unknown:
        raise UnknownMethodError(
            f"found settings of methods {', '.join(unknown)}; expected only "
            f"{', '.join(methods) or 'none'}"
        )
    return dict(settings)
