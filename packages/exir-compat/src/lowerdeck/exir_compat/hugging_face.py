"""transformers' exporter for ExecuTorch, with Lowerdeck as its engine.

Importing this module needs transformers, and running what it exports needs ``executorch``.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel
from transformers.exporters.auto import get_exporter_class
from transformers.exporters.configs import ExecutorchConfig, ExportFormat
from transformers.exporters.exporter_dynamo import DynamoExporter

from lowerdeck.emitter import Bounds
from lowerdeck.exir_compat.backend_config import (
    ExecutorchBackendConfig,
    MemoryPlanningPass,
    emit_config,
)
from lowerdeck.exir_compat.errors import SettingError
from lowerdeck.exir_compat.executorch_manager import ExecutorchProgramManager
from lowerdeck.lowered_module import Partitioner, lower


class LowerdeckExporter(DynamoExporter):  # type: ignore[misc]  # transformers is untyped
    """Exports a model of transformers to ExecuTorch, in place of ``ExecutorchExporter``.

    None of transformers' patches of torch and ExecuTorch is applied. What is returned is saved,
    loaded and run by transformers as if ``ExecutorchExporter`` had made it.

    Args:
        partitioners: Partitioners of the backends, in order; that of ``lowerdeck.xnnpack`` if
            None. An empty sequence leaves all to portable kernels.
        bounds: Upper bounds of dynamic dimensions, as for ``lowerdeck.lowered_module.lower``: one
            for all, or some by name.

    Raises:
        SettingError: The config asks for a backend other than ``"xnnpack"`` without partitioners.

    Example:
        >>> from transformers.exporters import ExecutorchConfig  # doctest: +SKIP
        >>> exporter = LowerdeckExporter(bounds=128)  # doctest: +SKIP
        >>> config = ExecutorchConfig(dynamic=True)  # doctest: +SKIP
        >>> exported = exporter.export(model, inputs, config)  # doctest: +SKIP
        >>> exported.save_pretrained("exported")  # doctest: +SKIP
    """

    export_format: ExportFormat | str = ExportFormat.EXECUTORCH
    config_class: type[ExecutorchConfig] = ExecutorchConfig
    program_suffix = ".pte"
    requires_trust_remote_code = False
    required_packages: list[str] = ["torch"]  # noqa: RUF012 - declared by transformers
    tested_versions: dict[str, str] = {"torch": "2.13.0"}  # noqa: RUF012

    def __init__(
        self, partitioners: Sequence[Partitioner] | None = None, *, bounds: Bounds | None = None
    ) -> None:
        super().__init__()
        self._partitioners = partitioners
        self._bounds = bounds

    def export_program(
        self,
        model: PreTrainedModel,
        sample_inputs: MutableMapping[str, Any],
        config: ExecutorchConfig,
    ) -> tuple[ExecutorchProgramManager, Any]:
        """Return the program of one graph, and transformers' metadata of it.

        Args:
            model: The model; its parameters no longer require gradients afterwards.
            sample_inputs: Keyword arguments of ``forward``.
            config: Settings of the export and of memory planning.

        Raises:
            SettingError: See the class.
            lowerdeck.lowered_module.LoweringError: The program cannot be lowered.
            lowerdeck.emitter.EmitterError: It cannot be emitted, such as for a dimension without
                a bound.
        """
        partitioners = self._chosen_partitioners(config)
        model.requires_grad_(False)
        program, metadata = super().export_program(model.to("cpu"), sample_inputs, config=config)
        settings = ExecutorchBackendConfig(
            memory_planning_pass=MemoryPlanningPass(
                alloc_graph_input=config.alloc_graph_input,
                alloc_graph_output=config.alloc_graph_output,
                alloc_mutable_buffers=config.alloc_mutable_buffers,
            )
        )
        emission, _ = emit_config(settings, {}, ["forward"])
        lowered = lower(program, partitioners, config=replace(emission, bounds=self._bounds))
        return ExecutorchProgramManager(lowered.programs, lowered, settings), metadata

    def _chosen_partitioners(self, config: ExecutorchConfig) -> Sequence[Partitioner]:
        if self._partitioners is not None:
            return self._partitioners
        if config.backend != "xnnpack":
            raise SettingError(
                f"found backend {config.backend!r}, expected 'xnnpack', or partitioners given to "
                "LowerdeckExporter"
            )
        # Only here: the package is not a dependency of this one.
        from lowerdeck.xnnpack import XnnpackPartitioner

        return [XnnpackPartitioner()]

    @classmethod
    def save_program(cls, program: Any, path: str | os.PathLike[str]) -> None:
        """Write one program to a ``.pte`` file, as transformers does."""
        get_exporter_class(cls.export_format).save_program(program, path)

    @classmethod
    def load_program(cls, path: str | os.PathLike[str]) -> Any:
        """Return a ``.pte`` file as a program of the official runtime, as transformers does."""
        return get_exporter_class(cls.export_format).load_program(path)
