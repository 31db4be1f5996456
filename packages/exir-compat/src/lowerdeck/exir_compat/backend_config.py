"""exir's settings of emission and files, and their conversion to Lowerdeck's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lowerdeck.emitter import EmitConfig, MemoryPlanner, one_memory
from lowerdeck.exir_compat._executorch import is_from_executorch, quantized_fusions
from lowerdeck.exir_compat.errors import SettingError, SettingWarning

# exir's default stem of the file of external constants.
EXTERNAL_CONSTANTS = "_default_external_constant"

# As in exir, call any out variant registered with torch, such as those of
# ``executorch.kernels.quantized``.
LIBRARY_KERNELS = frozenset({"*"})
_SUPPORTED = {
    *("passes", "memory_planning_pass", "emit_stacktrace", "external_constants"),
    *("extract_delegate_segments", "segment_alignment", "constant_tensor_alignment"),
    *("delegate_alignment", "emit_mutable_buffer_names", "do_quant_fusion_and_const_prop"),
}


@dataclass(slots=True)
class MemoryPlanningPass:
    """Memory planning settings, with exir's names.

    Attributes:
        memory_planning_algo: A ``lowerdeck.emitter.MemoryPlanner``; None, and exir's algorithms,
            select the default.
        allow_lifetime_and_storage_overlap: Must be False (the default): plans are checked.
        alloc_graph_input: Whether inputs have planned memory.
        alloc_graph_output: Whether outputs have planned memory.
        alloc_mutable_buffers: Must be True (the default).
        share_mutable_buffers: Whether methods share mutable buffers of equal names.
        alignment: Must be 16 (the default), as kernels require.
    """

    memory_planning_algo: MemoryPlanner | None = None
    allow_lifetime_and_storage_overlap: bool = False
    alloc_graph_input: bool = True
    alloc_graph_output: bool = True
    alloc_mutable_buffers: bool = True
    share_mutable_buffers: bool = False
    alignment: int = 16


@dataclass(slots=True)
class ExecutorchBackendConfig:
    """Settings of ``to_executorch``, with exir's names.

    Fields that are not listed here are ignored, with a :class:`SettingWarning` for values other
    than the default: size bounds are those of ``torch.export``, views and in-place writes are used
    where safe, and memory is on the CPU.

    Attributes:
        passes: Passes that run on each method's program before emission, as in
            ``EdgeProgramManager.transform``.
        memory_planning_pass: A :class:`MemoryPlanningPass` or an object with its attributes, or a
            mapping of these by method; only ``alloc_graph_input`` and ``alloc_graph_output`` may
            differ between methods.
        emit_stacktrace: Whether instructions have stack traces of the user's code.
        extract_delegate_segments: Whether delegate blobs are segments, which can be freed.
        segment_alignment: Alignment of segments in bytes.
        constant_tensor_alignment: Alignment of constants in bytes; 16 if None.
        delegate_alignment: Alignment of inline blobs in bytes; 16 if None.
        external_constants: Whether weights are stored in a ``.ptd`` file; or a function that
            returns the stem of a weight's file for its placeholder, or None to store the weight in
            the ``.pte``.
        emit_mutable_buffer_names: Ignored: state always has its name.
        do_quant_fusion_and_const_prop: Whether exir's pass fuses quantized operators, such as
            embeddings, for ``executorch.kernels.quantized``; exir must be loaded.
    """

    passes: Sequence[Any] = field(default_factory=list)
    memory_planning_pass: Any = None
    propagate_device_config: Any = None
    to_out_var_pass: Any = None
    dynamic_memory_planning_mode: Any = None
    emit_stacktrace: bool = False
    extract_delegate_segments: bool = True
    segment_alignment: int = 128
    constant_tensor_alignment: int | None = None
    delegate_alignment: int | None = None
    sym_shape_eval_pass: Any = None
    remove_view_copy: bool = True
    external_constants: Any = False
    external_mutable_weights: bool = False
    emit_mutable_buffer_names: bool = False
    do_quant_fusion_and_const_prop: bool = False
    run_reinplace_pass: bool = False
    enable_non_cpu_memory_planning: bool = True
    reinplace_extra_ops: Any = None


def warn_of_ignored(config: Any) -> None:
    """Warn of ignored settings.

    Args:
        config: A backend config of this package or of exir.
    """
    default = type(config)()
    for name in sorted({field_.name for field_ in fields(config)} - _SUPPORTED):
        value, usual = getattr(config, name), getattr(default, name)
        # Compare exir's passes by type.
        if value != usual and not (is_from_executorch(value) and type(value) is type(usual)):
            warnings.warn(
                f"ExecutorchBackendConfig.{name} is ignored", SettingWarning, stacklevel=3
            )


def emit_config(
    config: Any, constant_methods: Mapping[str, Any], methods: Iterable[str]
) -> tuple[EmitConfig, bool]:
    """Return the emission settings, and whether methods share state of equal names.

    Args:
        config: A backend config of this package or of exir.
        constant_methods: Results of constant methods.
        methods: Method names.

    Raises:
        SettingError: The requested memory plan is not supported.
    """
    planning = config.memory_planning_pass
    plans = {
        name: _planning(planning.get(name) if isinstance(planning, Mapping) else planning)
        for name in methods
    }
    planners = (plan.memory_planning_algo for plan in plans.values())
    external = config.external_constants
    settings = EmitConfig(
        constant_methods=constant_methods,
        memory_planner=next(filter(None, planners), one_memory),
        plan_inputs={name: plan.alloc_graph_input for name, plan in plans.items()},
        plan_outputs={name: plan.alloc_graph_output for name, plan in plans.items()},
        weights_file=EXTERNAL_CONSTANTS if external is True else None,
        external_constants=None if isinstance(external, bool) else external,
        stack_traces=config.emit_stacktrace,
        custom_kernels=LIBRARY_KERNELS,
    )
    return settings, any(plan.share_mutable_buffers for plan in plans.values())


def passes_to_run(config: Any) -> list[Any]:
    """Return the passes that run before emission.

    Args:
        config: A backend config of this package or of exir.

    Raises:
        SettingError: The fusion of quantized operators is enabled, but exir is not loaded.
    """
    fusions = [quantized_fusions()] if config.do_quant_fusion_and_const_prop else []
    return [*fusions, *config.passes]


def file_options(config: Any) -> dict[str, Any]:
    """Return the options of ``lowerdeck.serializer.write_pte``.

    Args:
        config: A backend config of this package or of exir.
    """
    return {
        "extract_delegate_segments": config.extract_delegate_segments,
        "segment_alignment": config.segment_alignment,
        "constant_tensor_alignment": config.constant_tensor_alignment,
        "delegate_alignment": config.delegate_alignment,
    }


def _planning(planning: Any) -> MemoryPlanningPass:
    """Return ``planning``, possibly an object of exir's class, as this package's class."""
    default = MemoryPlanningPass()
    settings = {
        field_.name: getattr(planning, field_.name, getattr(default, field_.name))
        for field_ in fields(MemoryPlanningPass)
    }
    if is_from_executorch(settings["memory_planning_algo"]):
        settings["memory_planning_algo"] = None
    for name in ("allow_lifetime_and_storage_overlap", "alloc_mutable_buffers", "alignment"):
        if settings[name] != getattr(default, name):
            raise SettingError(
                f"MemoryPlanningPass.{name} is {settings[name]!r}; the emitter supports only "
                f"{getattr(default, name)!r}"
            )
    return MemoryPlanningPass(**settings)
