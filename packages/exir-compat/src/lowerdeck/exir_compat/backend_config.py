"""exir's settings of emission and files, and their meaning here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch.export import ExportedProgram

from lowerdeck.emitter import EmitConfig, MemoryPlanner, one_memory
from lowerdeck.exir_compat._executorch import is_exirs, quantized_fusions
from lowerdeck.exir_compat.errors import SettingError, SettingWarning

# The stem of the file that exir puts constants into where the caller gives no name.
EXTERNAL_CONSTANTS = "_default_external_constant"

# As exir, call what has an out variant in torch, such as all of ``executorch.kernels.quantized``
# after its import.
LIBRARY_KERNELS = frozenset({"*"})
# Why a value other than exir's default changes nothing here.
_NO_MATTER = {
    "to_out_var_pass": "emit chooses the kernels, and refuses an operator that has none",
    "dynamic_memory_planning_mode": "memory is planned for upper bounds",
    "sym_shape_eval_pass": "sizes are bounded by what torch.export says of them",
    "remove_view_copy": "views are always views where that is safe",
    "run_reinplace_pass": "what can be written in place always is",
    "reinplace_extra_ops": "what can be written in place always is",
    "enable_non_cpu_memory_planning": "all memory that is planned is the CPU's",
}
# Why a value other than exir's default cannot be honoured; without it the file would differ.
_REFUSED = {
    "external_mutable_weights": "programs that return gradients are not emitted",
    "propagate_device_config": "emit plans memory of the CPU only",
}


@dataclass(slots=True)
class MemoryPlanningPass:
    """How memory is planned, under the names that exir gives it.

    Attributes:
        memory_planning_algo: A ``lowerdeck.emitter.MemoryPlanner``; the default one if None.
            exir's algorithms plan exir's own graphs and are refused.
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

    A field that means nothing here is taken at its default, None included; another value warns
    (:class:`SettingWarning`) where the file is right all the same, and is refused
    (:class:`SettingError`) where it would not be what was asked for.

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

    @classmethod
    def of(cls, config: Any) -> ExecutorchBackendConfig:
        """Return settings of this class: ``config`` itself, its like of exir's, or the default.

        Args:
            config: Settings of this class or of exir's; None for the default.

        Raises:
            SettingError: It is something else, or changes a setting that this class lacks.
        """
        if config is None or isinstance(config, cls):
            return config or cls()
        kind = type(config)
        if not is_exirs(kind) or kind.__name__ != cls.__name__:
            raise SettingError(
                f"found a {kind.__module__}.{kind.__name__} as config, expected an "
                "ExecutorchBackendConfig of lowerdeck.exir_compat or executorch.exir"
            )
        default = kind()
        changed = {}
        for field_ in fields(config):
            value, usual = getattr(config, field_.name), getattr(default, field_.name)
            # Passes of exir have no equality.
            is_default = value == usual or (is_exirs(value) and type(value) is type(usual))
            if not is_default or field_.name == "memory_planning_pass":
                changed[field_.name] = value
        if unknown := sorted(changed.keys() - {field_.name for field_ in fields(cls)}):
            raise SettingError(f"ExecutorchBackendConfig.{unknown[0]} of exir is not offered")
        return cls(**changed)

    def check(self) -> None:
        """Refuse what cannot be honoured, and warn of what changes nothing.

        Raises:
            SettingError: A setting cannot be honoured.
        """
        changed = {
            field_.name for field_ in fields(self) if getattr(self, field_.name) != field_.default
        }
        for name in sorted(changed & _REFUSED.keys()):
            raise SettingError(
                f"ExecutorchBackendConfig.{name} is {getattr(self, name)!r}, which is not "
                f"offered: {_REFUSED[name]}; leave it out"
            )
        for name in sorted(changed & _NO_MATTER.keys()):
            warnings.warn(
                f"ExecutorchBackendConfig.{name} changes nothing: {_NO_MATTER[name]}",
                SettingWarning,
                stacklevel=3,
            )
        chosen = self.external_constants
        if not isinstance(chosen, bool) and not callable(chosen):
            raise SettingError(
                f"ExecutorchBackendConfig.external_constants is {chosen!r}, expected True, False, "
                "or a function from placeholders to stems of .ptd files"
            )

    def emit_config(
        self, constant_methods: Mapping[str, Any], programs: Mapping[str, ExportedProgram]
    ) -> tuple[EmitConfig, bool]:
        """Return the settings of the emission, and whether state of one name is one state.

        Args:
            constant_methods: What constant methods return.
            programs: The program of each method.

        Raises:
            SettingError: The memory plan that is asked for cannot be made.
        """
        plans = self._plannings(programs)
        planning = next(iter(plans.values()))
        external = self.external_constants
        config = EmitConfig(
            constant_methods=constant_methods,
            memory_planner=planning.memory_planning_algo or one_memory,
            plan_inputs={name: each.alloc_graph_input for name, each in plans.items()},
            plan_outputs={name: each.alloc_graph_output for name, each in plans.items()},
            weights_file=EXTERNAL_CONSTANTS if external is True else None,
            external_constants=None if isinstance(external, bool) else external,
            stack_traces=self.emit_stacktrace,
            custom_kernels=LIBRARY_KERNELS,
        )
        return config, planning.share_mutable_buffers

    def passes_to_run(self) -> list[Any]:
        """Return all passes that run before the emission.

        Raises:
            SettingError: Quantised operators are to be fused, and exir is not loaded.
        """
        fusions = [quantized_fusions()] if self.do_quant_fusion_and_const_prop else []
        return [*fusions, *self.passes]

    @property
    def file_options(self) -> dict[str, Any]:
        """What ``lowerdeck.serializer.write_pte`` takes of these settings."""
        return {
            "extract_delegate_segments": self.extract_delegate_segments,
            "segment_alignment": self.segment_alignment,
            "constant_tensor_alignment": self.constant_tensor_alignment,
            "delegate_alignment": self.delegate_alignment,
        }

    def _plannings(self, programs: Mapping[str, ExportedProgram]) -> dict[str, MemoryPlanningPass]:
        """Return how the memory of each method is planned.

        What all methods share, the algorithm and the state, must be the same of all.
        """
        planning = self.memory_planning_pass
        by_name = planning if isinstance(planning, Mapping) else dict.fromkeys(programs, planning)
        plannings = {name: _planning(by_name.get(name)) for name in programs}
        for setting in ("memory_planning_algo", "share_mutable_buffers"):
            values = {name: getattr(plan, setting) for name, plan in plannings.items()}
            first = next(iter(values.values()))
            if any(value != first for value in values.values()):
                raise SettingError(
                    f"ExecutorchBackendConfig.memory_planning_pass: {setting} is {values!r}, "
                    "expected one for all methods"
                )
        return plannings


def _planning(given: Any) -> MemoryPlanningPass:
    """Return a pass as this package's class."""
    default = MemoryPlanningPass()
    if given is None:
        return default
    has_settings = any(hasattr(given, field_.name) for field_ in fields(MemoryPlanningPass))
    if not has_settings and not callable(given):
        raise SettingError(
            f"ExecutorchBackendConfig.memory_planning_pass: found a {type(given).__name__}, "
            "expected a MemoryPlanningPass, or one for each method by name"
        )
    settings = {
        field_.name: getattr(given, field_.name, getattr(default, field_.name))
        for field_ in fields(MemoryPlanningPass)
    }
    settings["memory_planning_algo"] = _planner(settings["memory_planning_algo"])
    planning = MemoryPlanningPass(**settings)
    for name in ("allow_lifetime_and_storage_overlap", "alloc_mutable_buffers", "alignment"):
        if getattr(planning, name) != getattr(default, name):
            raise SettingError(
                f"MemoryPlanningPass.{name} is {getattr(planning, name)!r}, expected "
                f"{getattr(default, name)!r}, which is all that emit does"
            )
    return planning


def _planner(algorithm: Any) -> MemoryPlanner | None:
    """Return the planner that a pass names: exir's own places what exir's own graphs hold."""
    kind = type(algorithm)
    if algorithm is None or kind.__name__ == "MemoryPlanningAlgorithmSuite":
        return None
    if not callable(algorithm):
        raise SettingError(
            f"found a {kind.__name__} as memory_planning_algo, expected a "
            "lowerdeck.emitter.MemoryPlanner or None"
        )
    if is_exirs(algorithm):
        warnings.warn(
            "memory_planning_algo is one of exir's, which plan exir's own graphs: the default "
            "planner is taken; give a lowerdeck.emitter.MemoryPlanner",
            SettingWarning,
            stacklevel=5,
        )
        return None
    return algorithm  # type: ignore[no-any-return]
