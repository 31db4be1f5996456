"""``lower``: from models or exported programs to a ``.pte`` program in one call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram, ShapesCollection
from torch.fx import Node

from lowerdeck.decompose import (
    DecomposeError,
    DecompositionCache,
    can_keep,
    decompose,
    methods_on_cpu,
    unwrap_subclass_parameters,
)
from lowerdeck.emitter import (
    Bounds,
    EmitConfig,
    EmittedProgram,
    bounded,
    emit,
    pre_partition_rules,
)
from lowerdeck.lowered_module.authoring.partitioner import PartitionerLike, require_partitioner
from lowerdeck.lowered_module.authoring.registry import find_partitioner
from lowerdeck.lowered_module.errors import LoweringError, in_a_line
from lowerdeck.lowered_module.inspect.summary import DelegationSummary, delegation_summary
from lowerdeck.lowered_module.lowering import (
    MethodProgramsPartitionerSpec,
    require_programs,
    to_backend,
)
from lowerdeck.lowered_module.program.graphs import nodes_of
from lowerdeck.lowered_module.program.plain_sizes import with_plain_sizes
from lowerdeck.lowered_module.program.prepared import PortableProgram
from lowerdeck.lowered_module.progress import Progress, Stages
from lowerdeck.torch_base import OpOverload, pytree, schema_of, varies, with_parts

Model: TypeAlias = (
    tuple[torch.nn.Module, tuple[Any, ...]]
    | tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any] | None]
    | tuple[torch.nn.Module, tuple[Any, ...], Mapping[str, Any] | None, Any]
)
"""A module, example args, example kwargs and ``dynamic_shapes`` of torch.export."""

Partitioners: TypeAlias = PartitionerLike | str | Sequence[PartitionerLike | str]
"""One or several partitioners, in order of precedence; a string names an installed one."""

STAGES = ("export", "decompose", "lower", "emit")


@dataclass(frozen=True, slots=True, repr=False)
class LoweredProgram(EmittedProgram):
    """Result of ``lower``: the program for the runtime and the lowered methods.

    Attributes:
        programs: The lowered program of each method, including its delegates.
        seconds: Wall time of each stage.
    """

    programs: Mapping[str, ExportedProgram] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def delegation(self, method: str | None = None) -> DelegationSummary:
        """Return the delegated and other nodes, with reasons; ``print`` it for a table.

        Args:
            method: Name of a method; None for all methods.

        Raises:
            LoweringError: The method is missing.
        """
        if method is not None and method not in self.programs:
            raise LoweringError(
                f"there is no lowered method {method!r}, only {', '.join(self.programs)}"
            )
        return delegation_summary(self.programs if method is None else self.programs[method])


def lower(
    programs: ExportedProgram | Model | Mapping[str, ExportedProgram | Model],
    partitioners: Partitioners | Mapping[str, Partitioners] | None = None,
    *,
    dynamic_shapes: Any = None,
    constant_methods: Mapping[str, Any] | None = None,
    bounds: Bounds | None = None,
    config: EmitConfig | None = None,
    shared_state: bool = False,
    executor: Executor | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> LoweredProgram:
    """Lower models or exported programs to one program for the official runtime.

    Each method is exported if it is a module. With partitioners it is decomposed to core ATen
    operators except those that they keep, partitioned, and compiled by the backends; without, only
    ``emit`` decomposes it. Arguments are not changed. Weights on the CPU are shared, or cloned
    copy-on-write where torch supports it.

    Args:
        programs: An exported program, or a module with example inputs: ``(module, args)``,
            ``(module, args, kwargs)`` or ``(module, args, kwargs, dynamic_shapes)``; it becomes
            the method ``forward``. Or a mapping of these by method name; weights that methods
            share in memory are stored once.
        partitioners: A partitioner, the name of an installed backend, or a list of them in order
            of precedence; for all methods, or a mapping by method. None delegates nothing.
            If partitioners were given and none delegates anything, a warning says so.
        dynamic_shapes: The ``dynamic_shapes`` of torch.export, for ``(module, args)`` or
            ``(module, args, kwargs)``.
        constant_methods: Additional methods without inputs: names and values.
        bounds: Upper bounds of dynamic dimensions, for planning memory: a number for all unbounded
            dimensions, or sizes by name, such as ``{"batch": 8, "x": {1: 512}}``; see
            :data:`lowerdeck.emitter.Bounds`.
        config: Settings of ``emit``; ``bounds`` and ``constant_methods`` take precedence.
        shared_state: See ``lowerdeck.emitter.emit``.
        executor: Compiles partitions in parallel; see ``to_backend``.
        cache: Cache of compiled partitions; see ``to_backend``.
        progress: See ``to_backend``; if None, stages are shown on a terminal.

    Raises:
        LoweringError: A method is another kind of object, or cannot be exported, decomposed or
            lowered.
        lowerdeck.graph_fuser.CycleError: A value leaves a partition and comes back.
        lowerdeck.emitter.EmitterError: The lowered program cannot be emitted.

    Example:
        >>> import torch
        >>> from lowerdeck.lowered_module import lower
        >>> lowered = lower((torch.nn.Linear(2, 3), (torch.ones(1, 2),)))
        >>> lowered.methods
        ('forward',)
        >>> lowered.buffer[4:8]
        b'ET12'
        >>> lowered.delegation().delegates
        {}
    """
    if dynamic_shapes is not None:
        if not isinstance(programs, tuple) or len(programs) not in (2, 3):
            raise LoweringError("dynamic_shapes needs (module, args) or (module, args, kwargs)")
        programs = (*programs, *({},)[len(programs) - 2 :], dynamic_shapes)
    methods = dict(programs) if isinstance(programs, Mapping) else {"forward": programs}
    chosen = _by_method(partitioners, methods)
    settings = EmitConfig() if config is None else config
    settings = replace(
        settings,
        bounds=settings.bounds if bounds is None else bounds,
        constant_methods={**settings.constant_methods, **(constant_methods or {})},
    )
    with Stages(STAGES) as stages:
        with stages.stage("export"):
            exported = {name: _exported(name, method) for name, method in methods.items()}
        lowered = lower_exported(
            exported,
            chosen,
            stages,
            config=settings,
            shared_state=shared_state,
            executor=executor,
            cache=cache,
            progress=progress,
        )
    if any(chosen.values()) and not any(p.delegates for p in lowered.program.execution_plan):
        reasons = "print(lowered.delegation()) of the result shows the reasons"
        warnings.warn(f"nothing was delegated; {reasons}", stacklevel=2)
    return lowered


def lower_exported(
    programs: Mapping[str, ExportedProgram],
    partitioners: Mapping[str, Sequence[PartitionerLike]],
    stages: Stages,
    *,
    config: EmitConfig | None = None,
    shared_state: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> LoweredProgram:
    """Lower exported programs to one program for the official runtime, as ``lower`` does.

    Args:
        programs: The program of each method.
        partitioners: The partitioners of each method, in order of precedence.
        stages: Shows and times the stages.
        **options: ``executor`` and ``cache`` of ``lower``.
    """
    with stages.stage("decompose"):
        # Files have no device, and attention has other kernels on a GPU.
        exported = bounded(methods_on_cpu(programs), None if config is None else config.bounds)
        # Programs without partitioners are not decomposed: `emit` does it with another table.
        partitioned = {name: exported[name] for name, entry in partitioners.items() if entry}
        lowered = {**exported, **decomposed_for(partitioners, partitioned)}
    with stages.stage("lower"):
        show = stages.partition if progress is None else progress
        for turn in range(max(map(len, partitioners.values()), default=0)):
            turns = {
                name: entry[turn] for name, entry in partitioners.items() if turn < len(entry)
            }
            spec = MethodProgramsPartitionerSpec(lowered, turns)
            lowered = to_backend(spec, progress=show, **options)
    with stages.stage("emit"):
        emitted = emit(lowered, config=config, shared_state=shared_state)
    parts = {entry.name: getattr(emitted, entry.name) for entry in fields(emitted)}
    portable = {name: with_parts(program, PortableProgram) for name, program in lowered.items()}
    return LoweredProgram(**parts, programs=portable, seconds=stages.seconds)


def _by_method(partitioners: Any, methods: Mapping[str, Any]) -> dict[str, list[PartitionerLike]]:
    """Return the partitioners of each method, in order of precedence."""
    by_method = (
        partitioners if isinstance(partitioners, Mapping) else dict.fromkeys(methods, partitioners)
    )
    require_programs(by_method, methods, LoweringError)
    chosen = {}
    for name, entry in by_method.items():
        several = [] if entry is None else entry if isinstance(entry, list | tuple) else [entry]
        chosen[name] = [find_partitioner(p) if isinstance(p, str) else p for p in several]
    return chosen


def _exported(method: str, model: Any) -> ExportedProgram:
    if isinstance(model, ExportedProgram):
        return model
    program = example_of(model, f"method {method!r} is").export(f"method {method!r}")
    if trains(program):
        warnings.warn(f"method {method!r} {TRAINS}", stacklevel=3)
    return program


@dataclass(frozen=True, slots=True)
class Example:
    """A module with example inputs.

    Attributes:
        module: The module; for an exported program, its ``module()``.
        args: Example inputs by position.
        kwargs: Example inputs by name.
        dynamic_shapes: The ``dynamic_shapes`` of torch.export.
        program: The exported program, if one was given.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any = None
    program: ExportedProgram | None = None

    def with_dynamic_batch(self, least: int, most: int) -> Example:
        """Return a copy with a dynamic dimension 0, shared by all input tensors.

        Raises:
            LoweringError: The example has dynamic shapes, is an exported program, or has a batch
                of 1.
        """
        if self.program is not None or self.dynamic_shapes is not None:
            raise LoweringError(
                "a dynamic batch is for a module without dynamic_shapes, not for an "
                "ExportedProgram: leave it out, and give the dynamic_shapes at export"
            )
        batch = torch.export.Dim("batch", min=least, max=most)
        untyped: Any = ShapesCollection
        shapes = untyped()
        for leaf in pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                if len(leaf) == 1:
                    raise LoweringError(
                        "an example input has a batch of 1, which torch.export takes as fixed: "
                        "give examples with a batch of 2 or more for a dynamic batch"
                    )
                shapes[leaf] = {0: batch}
        shapes_by_input = shapes.dynamic_shapes(self.module, self.args, self.kwargs)
        return replace(self, dynamic_shapes=shapes_by_input)

    def export(self, origin: str) -> ExportedProgram:
        """Return the exported program.

        Args:
            origin: Description of the module for errors.

        Raises:
            LoweringError: torch cannot export it.
        """
        if self.program is not None:
            return self.program
        shapes = {} if self.dynamic_shapes is None else {"dynamic_shapes": self.dynamic_shapes}
        try:
            return torch.export.export(self.module, self.args, self.kwargs, **shapes)
        except (Exception, SystemExit) as error:
            hint = _FOURTH if isinstance(error, TypeError) and self.kwargs else ""
            raise LoweringError(
                f"torch.export cannot export {origin}: {in_a_line(error)}{_advice(error)}{hint}"
            ) from error


_FOURTH = "; dynamic_shapes are the fourth element of an example, after the keyword arguments"
_LOGGING = ("For ", "If you suspect the guard was triggered from C++")
"""Beginnings of the lines of torch's errors that only name logging options."""


def _advice(error: BaseException) -> str:
    """Return torch's message without its first line and its hints on logging options."""
    message = str(error).strip().partition("The error above occurred")[0]
    lines = [line for line in message.splitlines()[1:] if line.strip()]
    return "".join(f"\n  {line}" for line in lines if not line.startswith(_LOGGING))


_EXAMPLE = (
    "an ExportedProgram, (module, example_args), (module, example_args, example_kwargs) or "
    "(module, example_args, example_kwargs, dynamic_shapes)"
)
_TRAINING_ARGUMENT = {"dropout": 2, "feature_dropout": 2, "alpha_dropout": 2, "batch_norm": 5}
TRAINS = (
    "is in training mode, in which dropout is random and batch norms use the inputs' statistics; "
    "call .eval() on the module first"
)


def trains(program: ExportedProgram) -> bool:
    """Return whether a program has dropout or batch norms in training mode."""
    for node in program.graph.nodes:
        if isinstance(node.target, OpOverload):
            position = _TRAINING_ARGUMENT.get(schema_of(node.target).name.partition("::")[2])
            if position is not None and node.args[position : position + 1] == (True,):
                return True
    return False


def example_of(value: Any, origin: str) -> Example:
    """Return a module with example inputs.

    Args:
        value: An exported program, or a module with example inputs.
        origin: The beginning of an error, such as ``"method 'forward' is"``.

    Raises:
        LoweringError: ``value`` is another kind of object, or has no example inputs.
    """
    if isinstance(value, ExportedProgram):
        if value.example_inputs is None:
            raise LoweringError(f"{origin} an ExportedProgram without example inputs: set them")
        args, kwargs = value.example_inputs
        return Example(value.module(), tuple(args), dict(kwargs), program=value)
    described = type(value).__name__
    if isinstance(value, tuple):
        described = f"({', '.join(type(part).__name__ for part in value)})"
        if len(value) in (2, 3, 4):
            no_more: tuple[Any, ...] = ({}, None)
            module, args, kwargs, shapes = (*value, *no_more[len(value) - 2 :])
            if isinstance(module, torch.nn.Module) and isinstance(kwargs, Mapping | None):
                inputs = tuple(args) if isinstance(args, list | tuple) else (args,)
                return Example(module, *separate_inputs(module, inputs, kwargs or {}), shapes)
    raise LoweringError(f"{origin} a {described}, expected {_EXAMPLE}")


def separate_inputs(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs with copies of repeated tensors, and of parameters and buffers.

    torch.export identifies inputs by tensor object: if a tensor is passed twice or is also a
    parameter or buffer of the module, the program has one input for both.
    """
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def separate(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in seen:
            leaf = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
        return leaf

    separated: tuple[tuple[Any, ...], dict[str, Any]]
    separated = pytree.tree_map(separate, (args, dict(kwargs)))
    return separated


def decomposed_for(
    partitioners: Mapping[str, Sequence[PartitionerLike]],
    programs: Mapping[str, ExportedProgram],
    *,
    keep: Iterable[OpOverload] = (),
) -> dict[str, ExportedProgram]:
    """Decompose programs to core ATen operators, except those that their partitioners keep.

    This is the step of ``lower`` before ``to_backend``.

    Args:
        partitioners: The partitioners of each method.
        programs: The program of each method.
        keep: Additional operators to keep.

    Raises:
        LoweringError: ``ops_to_not_decompose`` of a partitioner failed, or a program cannot be
            decomposed.

    Example:
        >>> import torch
        >>> program = torch.export.export(torch.nn.Linear(2, 3), (torch.ones(1, 2),))
        >>> apart = decomposed_for({}, {"forward": program})
        >>> [n.name for n in apart["forward"].graph.nodes if n.op == "call_function"]
        ['permute', 'addmm']
    """
    cache = DecompositionCache()
    always: dict[OpOverload, Any] = dict.fromkeys(keep)
    decomposed = {}
    for name, exported in programs.items():
        # As in exir, a weight of a tensor subclass becomes plain inputs, which partitioners
        # expect.
        program = with_plain_sizes(unwrap_subclass_parameters(exported))
        kept, kept_by_all = _kept(program, partitioners.get(name, ()))
        rules = pre_partition_rules(kept_by_all)
        kept[_ROLL] = _either(kept.get(_ROLL, _is_dynamic), _is_dynamic)
        kept |= always
        try:
            decomposed[name] = _decomposed(program, kept, rules, cache)
        except DecomposeError as error:
            raise LoweringError(f"method {name!r} cannot be decomposed: {error}") from error
    return decomposed


# With dynamic sizes, its decomposition computes indices at each call; the runtime has a kernel
# for `roll`.
_ROLL = torch.ops.aten.roll.default


def _is_dynamic(call: Node) -> bool:
    return any(map(varies, call.meta["val"].shape))


# Composite operators that may contain operators that a partitioner keeps.
_RECURRENT = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"}
_RECURRENT |= {"aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell", "aten::rnn_relu_cell"}


def _decomposed(
    program: ExportedProgram,
    kept: Mapping[OpOverload, Any],
    rules: Mapping[OpOverload, Any],
    cache: DecompositionCache,
) -> ExportedProgram:
    """Decompose a program except for kept operators, also those inside composite operators."""
    called = {
        schema_of(node.target).name
        for node in nodes_of(program.graph_module)
        if isinstance(node.target, OpOverload)
    }
    table: dict[Any, Any] = {op: rules[op] for op in rules if schema_of(op).name in called}
    if called.isdisjoint(_RECURRENT) or all(predicate is None for predicate in kept.values()):
        return decompose(program, keep=kept, rules=table, cache=cache)
    # Predicates take nodes: first decompose composite operators that contain kept ones.
    every = [operator for operator in kept if can_keep(operator)]
    return decompose(decompose(program, keep=every, rules=table), keep=kept, rules=table)


def _kept(
    program: ExportedProgram, partitioners: Sequence[Any]
) -> tuple[dict[OpOverload, Any], set[OpOverload]]:
    """Return the operators that any partitioner keeps, and the operators that all keep.

    The first map has a predicate on the calls to keep of each operator, or None to keep all.
    """
    kept: dict[OpOverload, Any] = {}
    common: set[OpOverload] | None = None
    for partitioner in partitioners:
        require_partitioner(partitioner)
        method = getattr(partitioner, "ops_to_not_decompose", None)
        try:
            operators, predicate = ([], None) if method is None else method(program)
            if predicate is not None and not callable(predicate):
                raise TypeError(f"the predicate is {predicate!r}")
            # As in exir, operators that write or return views are decomposed nevertheless.
            able = [op for op in operators if can_keep(op, some=predicate is not None)]
        except Exception as error:
            raise LoweringError(
                f"ops_to_not_decompose of {type(partitioner).__name__} failed: "
                f"{in_a_line(error)}; expected a list of operators, and a predicate on nodes "
                "or None"
            ) from error
        common = {*able} if common is None else common.intersection(able)
        for operator in able:
            kept[operator] = _either(kept[operator], predicate) if operator in kept else predicate
    return kept, common or set()


def _either(first: Any, other: Any) -> Callable[[Node], bool] | None:
    """Return the disjunction of two predicates; None is always true."""
    if first is None or other is None:
        return None
    return lambda call: first(call) or other(call)
