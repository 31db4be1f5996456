"""transformers' exporter for ExecuTorch, implemented with Lowerdeck.

Importing this module requires transformers; running exported files requires ``executorch``.
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
    """Replacement of transformers' ``ExecutorchExporter``.

    It does not apply transformers' patches of torch and ExecuTorch. transformers can save, load
    and run the result as with ``ExecutorchExporter``.

    Args:
        partitioners: Partitioners, in order; by default that of ``lowerdeck.xnnpack``. An empty
            sequence uses portable kernels only.
        bounds: Upper bounds of dynamic dimensions, as for ``lowerdeck.lowered_module.lower``: one
            number for all unbounded dimensions, or sizes by name, such as
            ``{"input_ids": {1: 128}}`` or ``{"input_ids_1": 128}``. The error for an unknown name
            lists the names of the program.

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
        """Return the emitted program of one graph as a manager, and transformers' metadata.

        Args:
            model: The model; moved to the CPU in place, and ``requires_grad`` of its parameters is
                set to False.
            sample_inputs: Keyword arguments of ``forward``.
            config: Settings of export and memory planning.

        Raises:
            SettingError: The config has a backend other than ``"xnnpack"``, and there are no
                partitioners.
            lowerdeck.lowered_module.LoweringError: The program cannot be lowered.
            lowerdeck.emitter.EmitterError: The program cannot be emitted, for example because a
                dimension has no bound.
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
                f"found backend {config.backend!r}; expected 'xnnpack', or pass partitioners to "
                "LowerdeckExporter"
            )
        # Optional dependency.
        from lowerdeck.xnnpack import XnnpackPartitioner

        return [XnnpackPartitioner()]

    @classmethod
    def save_program(cls, program: Any, path: str | os.PathLike[str]) -> None:
        """Write a program to a ``.pte`` file, as transformers does."""
        get_exporter_class(cls.export_format).save_program(program, path)

    @classmethod
    def load_program(cls, path: str | os.PathLike[str]) -> Any:
        """Load a ``.pte`` file in the official runtime, as transformers does."""
        return get_exporter_class(cls.export_format).load_program(path)
