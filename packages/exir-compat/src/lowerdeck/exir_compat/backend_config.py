"""exir's settings of emission and files, and their meaning here."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lowerdeck.emitter import EmitConfig, MemoryPlanner, one_memory
from lowerdeck.exir_compat._executorch import is_exirs, quantized_fusions
from lowerdeck.exir_compat.errors import SettingError, SettingWarning

# The stem of the file that exir puts constants into where the caller gives no name.
EXTERNAL_CONSTANTS = "_default_external_constant"

# As exir, call what has an out variant in torch, such as all of ``executorch.kernels.quantized``
# after its import.
LIBRARY_KERNELS = frozenset({"*"})
_HONOURED = {
    *("passes", "memory_planning_pass", "emit_stacktrace", "external_constants"),
    *("extract_delegate_segments", "segment_alignment", "constant_tensor_alignment"),
    *("delegate_alignment", "emit_mutable_buffer_names", "do_quant_fusion_and_const_prop"),
}


@dataclass(slots=True)
class MemoryPlanningPass:
    """How memory is planned, under the names that exir gives it.

    Attributes:
        memory_planning_algo: A ``lowerdeck.emitter.MemoryPlanner``; the default one if None, or if
            it is one of exir's, which plan exir's own graphs.
        allow_lifetime_and_storage_overlap: Must be False, as it is by default: plans are checked.
        alloc_graph_input: Whether inputs get planned memory.
        alloc_graph_output: Whether outputs get planned memory.
        alloc_mutable_buffers: Must be True, as it is by default.
        share_mutable_buffers: Whether mutable buffers of one name are one state in all methods.
        alignment: Must be 16, as it is by default: the alignment that kernels ask for.
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
    """Settings of ``to_executorch``, under the names that exir gives them.

    Another value than the default of a field that is not listed here warns
    (:class:`SettingWarning`) and changes nothing: sizes are bounded by what ``torch.export`` says,
    views are views and results are written in place wherever that is safe, and memory is the
    CPU's.

    Attributes:
        passes: Run on each method's program before it is emitted; they see torch's operators.
        memory_planning_pass: A :class:`MemoryPlanningPass`, or an object with its attributes;
            or one for each method by name, which may differ in what they allocate.
        emit_stacktrace: Whether each instruction carries the stack trace of the user's code.
        extract_delegate_segments: Whether blobs of delegates are segments, which can be freed.
        segment_alignment: Alignment of segments in bytes.
        constant_tensor_alignment: Alignment of constants in bytes; 16 if None.
        delegate_alignment: Alignment of inline blobs in bytes; 16 if None.
        external_constants: Whether weights go to a ``.ptd`` file; or a function that takes the
            placeholder of each and returns the stem of its file, or None.
        emit_mutable_buffer_names: Changes nothing: state always has its name.
        do_quant_fusion_and_const_prop: Whether exir's pass, which must be loaded, fuses quantised
            operators, such as those of embeddings, for ``executorch.kernels.quantized``.
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


def warn_of_others(config: Any) -> None:
    """Warn of settings that change nothing.

    Args:
        config: Settings of this package's class or of exir's.
    """
    default = type(config)()
    for name in sorted({field_.name for field_ in fields(config)} - _HONOURED):
        value, usual = getattr(config, name), getattr(default, name)
        # Passes of exir have no equality.
        if value != usual and not (is_exirs(value) and type(value) is type(usual)):
            warnings.warn(
                f"ExecutorchBackendConfig.{name} changes nothing", SettingWarning, stacklevel=3
            )


def emit_config(
    config: Any, constant_methods: Mapping[str, Any], methods: Iterable[str]
) -> tuple[EmitConfig, bool]:
    """Return the settings of the emission, and whether state of one name is one state.

    Args:
        config: Settings of this package's class or of exir's.
        constant_methods: What constant methods return.
        methods: Names of the methods.

    Raises:
        SettingError: The memory plan that is asked for cannot be made.
    """
    given = config.memory_planning_pass
    plans = {
        name: _planning(given.get(name) if isinstance(given, Mapping) else given)
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
    """Return all passes that run before the emission.

    Args:
        config: Settings of this package's class or of exir's.

    Raises:
        SettingError: Quantised operators are to be fused, and exir is not loaded.
    """
    fusions = [quantized_fusions()] if config.do_quant_fusion_and_const_prop else []
    return [*fusions, *config.passes]


def file_options(config: Any) -> dict[str, Any]:
    """Return what ``lowerdeck.serializer.write_pte`` takes of the settings.

    Args:
        config: Settings of this package's class or of exir's.
    """
    return {
        "extract_delegate_segments": config.extract_delegate_segments,
        "segment_alignment": config.segment_alignment,
        "constant_tensor_alignment": config.constant_tensor_alignment,
        "delegate_alignment": config.delegate_alignment,
    }


def _planning(given: Any) -> MemoryPlanningPass:
    """Return a pass, which may be exir's, as this package's class."""
    default = MemoryPlanningPass()
    settings = {
        field_.name: getattr(given, field_.name, getattr(default, field_.name))
        for field_ in fields(MemoryPlanningPass)
    }
    if is_exirs(settings["memory_planning_algo"]):
        settings["memory_planning_algo"] = None
    for name in ("allow_lifetime_and_storage_overlap", "alloc_mutable_buffers", "alignment"):
        if settings[name] != getattr(default, name):
            raise SettingError(
                f"MemoryPlanningPass.{name} is {settings[name]!r}, expected "
                f"{getattr(default, name)!r}, which is all that emit does"
            )
    return MemoryPlanningPass(**settings)
