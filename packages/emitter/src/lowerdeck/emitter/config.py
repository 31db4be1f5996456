"""The settings of an emission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from lowerdeck.emitter.bounds import Bounds
from lowerdeck.emitter.ir.kernels import OFFICIAL_KERNELS, KernelTable
from lowerdeck.emitter.memory import MemoryPlanner, one_memory
from lowerdeck.torch_base import OpOverload


@dataclass(frozen=True, slots=True)
class EmitConfig:
    """Settings of :func:`lowerdeck.emitter.emit`; the defaults suit the official runtime.

    Attributes:
        kernels: The kernels that the target runtime registers.
        custom_kernels: Further kernels by full name, such as ``"mylib::fused_gelu.out"``,
            of operators with an out-variant in torch. ``"*"`` stands for all but those of ATen,
            whose tensors then have the layouts that the program records.
        decompositions: Decompositions to add to those of the emitter, which they override.
        constant_methods: Values that additional methods return, such as
            ``{"get_max_seq_len": 128}``.
        bounds: Upper bounds of dynamic dimensions, for which memory is planned; see
            :data:`lowerdeck.emitter.Bounds`.
        memory_planner: Places the activations; see :data:`lowerdeck.emitter.MemoryPlanner`.
        plan_inputs: Whether inputs get planned memory; else the caller must bring it. One answer
            for all methods, or one for each by its name; methods without one have them planned.
        plan_outputs: The same of outputs.
        zeroed_memory: Whether the target fills planned memory with zeros before the first call,
            so that the zeros of a mutable buffer need not be in the file.
        weights_file: Stem of a `.ptd` file that parameters, buffers and the named data of
            delegates (such as their weights) go to, None to keep them in the `.pte`.
        external_constants: Chooses weight by weight: takes the placeholder of a parameter or
            buffer in the program that is emitted, and returns the stem of the `.ptd` file that it
            goes to, or None for the `.pte`. It is not asked about state that changes, nor about
            the named data of delegates, whose backends choose. Not together with ``weights_file``.
        weight_names: Whether weights carry their names in the model, for tools such as `lowerdeck
            inspect`; some 50 bytes for each.
        stack_traces: Whether each instruction carries the stack trace of the user's code.
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
