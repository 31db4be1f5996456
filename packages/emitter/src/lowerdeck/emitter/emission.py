"""The entry point: from exported programs to a program of the file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch.export import ExportedProgram

from lowerdeck.decompose import methods_on_cpu
from lowerdeck.emitter.backend.build_plan import PlanBuilder
from lowerdeck.emitter.backend.constant_methods import constant_plan
from lowerdeck.emitter.backend.debug_map import DebugTrace, stack_frames, unused_handles
from lowerdeck.emitter.backend.external_weights import ChosenFiles, ExternalWeights, is_stem
from lowerdeck.emitter.backend.linearizing import linearize
from lowerdeck.emitter.bounds import bounded
from lowerdeck.emitter.config import EmitConfig
from lowerdeck.emitter.decompositions.decomposing import decompose
from lowerdeck.emitter.errors import EmitterError, UnboundedSizeError
from lowerdeck.emitter.frontend.constants import ConstantPool
from lowerdeck.emitter.frontend.containers import container_metadata
from lowerdeck.emitter.frontend.delegates import DelegatePool
from lowerdeck.emitter.frontend.read_graph import read_method
from lowerdeck.emitter.frontend.state_sharing import find_states
from lowerdeck.emitter.frontend.states import StatePool
from lowerdeck.emitter.ir.graph import Method
from lowerdeck.emitter.ir.instructions import Code
from lowerdeck.emitter.memory.memory_plan import plan_memory, with_state
from lowerdeck.emitter.passes.pipeline import run_passes
from lowerdeck.emitter.passes.select_kernels import require_kernels
from lowerdeck.emitter.passes.writing_in_place import write_in_place
from lowerdeck.emitter.program import EmittedProgram
from lowerdeck.serializer import Program
from lowerdeck.torch_base import collector_held, remove_noop_mode_regions, repair_program


def emit(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    *,
    config: EmitConfig | None = None,
    shared_state: bool = False,
) -> EmittedProgram:
    """Return an executable program for the official runtime.

    Args:
        programs: One exported program, which becomes the method ``forward``, or several by
            method name. None of them is changed.
        config: Settings; the defaults suit the official runtime.
        shared_state: Whether mutable buffers with equal names are one state in all methods
            although their memory differs, as after saving and loading methods separately. Buffers
            that alias are always one state. In the official runtime methods share state only in
            a C++ ``Module`` created with ``share_memory_arenas``: the Python binding gives each
            method separate memory.

    Raises:
        EmitterError: If a setting is invalid or conflicts with another setting or with the
            programs.
        DecompositionError: If torch cannot decompose the program.
        MissingKernelError: If the runtime lacks a kernel; all missing ones are named.
        UnboundedSizeError: If a size has no upper bound.
        InvalidDelegateError: If a lowered module does not follow the delegate protocol.
        MemoryPlanError: If the memory planner's result is invalid.
        UnsupportedError: If the format cannot express a part of the program.

    Example:
        >>> import torch
        >>> from lowerdeck.emitter import emit
        >>> exported = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> emit(exported).program.execution_plan[0].name
        'forward'
    """
    settings = config if config is not None else EmitConfig()
    by_name = dict(programs) if isinstance(programs, Mapping) else {"forward": programs}
    _check_names(by_name, settings)
    by_name = {
        name: remove_noop_mode_regions(repair_program(program))
        for name, program in by_name.items()
    }
    by_name = bounded(by_name, settings.bounds)
    # The file format has no devices, and constants are folded on the CPU.
    by_name = methods_on_cpu(by_name)
    emission = _Emission(settings, by_name, shared_state=shared_state)
    for name in sorted(by_name):
        with collector_held():
            emission.prepare_method(name)
    emission.add_methods()
    for name in sorted(settings.constant_methods):
        emission.add_constant(name)
    return emission.result()


class _PreparedMethod(NamedTuple):
    """A method with planned memory, except for its state."""

    method: Method
    code: Code
    sizes: Sequence[int]
    stem_of: Callable[[str], str | None] | None


class _Emission:
    """State that the methods of one program share."""

    def __init__(
        self,
        settings: EmitConfig,
        programs: Mapping[str, ExportedProgram],
        *,
        shared_state: bool,
    ) -> None:
        self._settings = settings
        self._constants = ConstantPool()
        choose = settings.external_constants
        self._files = None if choose is None else ChosenFiles(choose)
        self._delegates = DelegatePool(settings.weights_file)
        self._states = StatePool(settings.zeroed_memory)
        self._programs = programs
        self._decomposed = {
            name: decompose(exported, settings) for name, exported in programs.items()
        }
        # A shared buffer has the same offset in all methods: find all states before reading any
        # method.
        self._views = find_states(self._decomposed, by_name=shared_state)
        self._handles = unused_handles(programs.values())
        self._prepared: dict[str, _PreparedMethod] = {}
        self._emitted = EmittedProgram(Program())

    def prepare_method(self, name: str) -> None:
        """Read, rewrite and linearize a method, and plan its memory, except for its state."""
        settings = self._settings
        try:
            method = read_method(
                name,
                self._decomposed[name],
                plan_inputs=_for_method(settings.plan_inputs, name),
                states=self._views,
            )
        except UnboundedSizeError:
            # Report a missing kernel first: a size bound would not help.
            require_kernels(self._decomposed[name].graph_module, settings.table)
            raise
        stem_of = self._stems(name)
        run_passes(method, settings, stem_of)
        code = linearize(method, plan_outputs=_for_method(settings.plan_outputs, name))
        # After linearizing, which fixes the order that liveness depends on, and before planning,
        # so that in-place results need no additional memory.
        write_in_place(code, settings.table)
        sizes = plan_memory(code, settings.memory_planner)
        self._prepared[name] = _PreparedMethod(method, code, sizes, stem_of)

    def add_methods(self) -> None:
        """Add the prepared methods, with all mutable state in one planned memory."""
        methods = self._prepared.items()
        memory_id = max((len(program.sizes) for _, program in methods), default=0)
        for name, program in methods:
            with collector_held():
                sizes = with_state(program.sizes, program.code, self._states, memory_id)
                self._add_method(name, program, sizes)

    def _add_method(self, name: str, prepared: _PreparedMethod, sizes: Sequence[int]) -> None:
        settings, method, code = self._settings, prepared.method, prepared.code
        stem_of = prepared.stem_of
        weights = None if stem_of is None else ExternalWeights(self._emitted.named_data, stem_of)
        builder = PlanBuilder(
            self._constants, self._states, self._delegates, weights, settings.weight_names
        )
        plan = builder.build(code, sizes)
        plan.container_meta_type = container_metadata(method.in_spec, method.out_spec)
        if settings.stack_traces:
            plan.chains[0].stacktrace = [stack_frames(step.origin) for step in code.steps]
        trace = DebugTrace(self._programs[name], self._handles)
        self._emitted.debug_handle_map[name] = trace.sources(code)
        self._emitted.delegate_debug_maps[name] = trace.delegates(code)
        self._emitted.program.execution_plan.append(plan)

    def _stems(self, method: str) -> Callable[[str], str | None] | None:
        """Return a function from weight names to stems of `.ptd` files; None without `.ptd`."""
        if self._files is not None:
            return self._files.of(method, self._programs[method])
        stem = self._settings.weights_file
        return None if stem is None else lambda _: stem

    def add_constant(self, name: str) -> None:
        plan = constant_plan(name, self._settings.constant_methods[name], self._constants)
        self._emitted.program.execution_plan.append(plan)

    def result(self) -> EmittedProgram:
        program = self._emitted.program
        program.constant_buffer = self._constants.buffers
        program.mutable_data = self._states.buffers
        program.backend_delegate_data = self._delegates.data
        self._emitted.named_data.merge_named_data_store(self._delegates.named_data())
        return self._emitted


def _for_method(setting: bool | Mapping[str, bool], name: str) -> bool:
    return setting.get(name, True) if isinstance(setting, Mapping) else setting


def _check_names(programs: Mapping[str, ExportedProgram], settings: EmitConfig) -> None:
    config: object = settings
    if not isinstance(config, EmitConfig):
        raise EmitterError(f"config: found a {type(config).__name__}, expected an EmitConfig")
    stem: object = settings.weights_file
    if stem is not None and not is_stem(stem):
        raise EmitterError(
            f"config: found {stem!r} as weights_file, expected the stem of a file's name, such as "
            "'weights': its file goes into the program's folder"
        )
    choose: object = settings.external_constants
    if choose is not None and (stem is not None or not callable(choose)):
        raise EmitterError(
            f"config: found {choose!r} as external_constants and {stem!r} as weights_file, "
            "expected one of the two: a function of placeholders, or one stem for all"
        )
    if not programs:
        raise EmitterError("no method to emit: found an empty mapping, expected at least one")
    twice = sorted(set(programs) & set(settings.constant_methods))
    if twice:
        raise EmitterError(
            f"found {twice} both as methods and as constant methods; rename one of each"
        )
    for name, exported in programs.items():
        if not isinstance(exported, ExportedProgram):
            raise EmitterError(
                f"method {name!r}: found a {type(exported).__name__}, expected an "
                "ExportedProgram: call torch.export.export first"
            )
        if exported.dialect == "EDGE":
            raise EmitterError(
                f"method {name!r}: found a program in ExecuTorch's Edge dialect, expected the "
                "result of torch.export.export: omit to_edge"
            )
