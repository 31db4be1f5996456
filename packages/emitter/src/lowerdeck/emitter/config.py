"""The settings of an emission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from lowerdeck.emitter.bounds import Bounds
from lowerdeck.emitter.ir.kernels import OFFICIAL_KERNELS, KernelTable
from lowerdeck.emitter.memory.memory_plan import MemoryPlanner, one_memory
from lowerdeck.torch_base import OpOverload


@dataclass(frozen=True, slots=True)
class EmitConfig:
    """Settings of :func:`lowerdeck.emitter.emit`; the defaults suit the official runtime.

    Attributes:
        kernels: Kernels of the target runtime.
        custom_kernels: Full names of further out-variant kernels, such as
            ``"mylib::fused_gelu.out"``. ``"*"`` allows all operators outside of ATen; their
            tensors have the layouts that the program records.
        decompositions: Additional decompositions; they override those of the emitter.
        constant_methods: Additional methods that return a constant, such as
            ``{"get_max_seq_len": 128}``.
        bounds: Upper bounds of dynamic dimensions, for memory planning; see
            :data:`lowerdeck.emitter.Bounds`.
        memory_planner: Places the activations; see :data:`lowerdeck.emitter.MemoryPlanner`.
        plan_inputs: Whether inputs get planned memory; otherwise the caller must provide it. One
            bool for all methods, or a mapping by method name with default True.
        plan_outputs: Whether outputs get planned memory, in the same form as ``plan_inputs``.
        zeroed_memory: Whether the target zero-fills planned memory before the first call, so that
            zero-initialized mutable buffers need no data in the file.
        weights_file: Stem of the `.ptd` file for parameters, buffers and the named data of
            delegates (such as their weights); None to keep them in the `.pte`.
        external_constants: Returns the stem of the `.ptd` file for the placeholder of a parameter
            or buffer, or None for the `.pte`. Not called for mutable state, nor for named data of
            delegates, for which the backends choose the file. Cannot be combined with
            ``weights_file``.
        weight_names: Whether to store the fully qualified names of weights, for tools such as
            `lowerdeck inspect`; about 50 bytes each.
        stack_traces: Whether to store a stack trace of the user's code for each instruction.
    """

    kernels: KernelTable = OFFICIAL_KERNELS
    custom_kernels: frozenset[str] = frozenset()
    decompositions: Mapping[OpOverload, Callable[..., Any]] = field(default_factory=dict)
    constant_methods: Mapping[str, Any] = field(default_factory=dict)
    bounds: Bounds | None = None
    memory_planner: MemoryPlanner = one_memory
    plan_inputs: bool | Mapping[str, bool] = True
    plan_outputs: bool | Mapping[str, bool] = True
    zeroed_memory: bool = True
    weights_file: str | None = None
    external_constants: Callable[[Node], str | None] | None = None
    weight_names: bool = True
    stack_traces: bool = False

    @property
    def table(self) -> KernelTable:
        """Return the kernels that a program may call, custom ones included."""
        if not self.custom_kernels:
            return self.kernels
        return self.kernels.with_kernels(self.custom_kernels)
