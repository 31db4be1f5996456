"""Decompose programs call by call, with ``run_decompositions`` as fallback."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from lowerdeck.decompose._torch_private import (
    assemble,
    fake_mode_of,
    insert_assertions,
    is_preservable,
    tracing_lock,
)
from lowerdeck.decompose.cache import DecompositionCache
from lowerdeck.decompose.errors import DecomposeError, TemplateError, WholeProgramError
from lowerdeck.decompose.in_place import replace_in_place_calls
from lowerdeck.decompose.inner_tensors import subclass_reader, unwrap_subclass_parameters
from lowerdeck.decompose.keeping import Keep
from lowerdeck.decompose.recording import eliminate_dead_code
from lowerdeck.decompose.regions import Regions
from lowerdeck.decompose.results import Explanation, Parts
from lowerdeck.decompose.rules import Rules, Table, keep_whole
from lowerdeck.decompose.signature import add_output
from lowerdeck.decompose.templates import Templates
from lowerdeck.decompose.walk import Walk
from lowerdeck.decompose.writer import Writer
from lowerdeck.decompose.written_names import merge_written_names
from lowerdeck.torch_base import (
    LazyGraphModule,
    MemoryUse,
    OperatorBase,
    OpOverload,
    collector_held,
    composite_parts,
    graphs_of,
    hides_effects,
    renamed_outputs,
    repair_program,
    shared_inputs,
    writes_in_place,
)

Result = TypeVar("Result")


def decompose(
    exported_program: ExportedProgram,
    table: Table | None = None,
    *,
    keep: Keep = (),
    rules: Table = MappingProxyType({}),
    cache: DecompositionCache | None = None,
) -> ExportedProgram:
    """Return the decomposed program, as ``run_decompositions(table)`` does.

    Args:
        exported_program: Any program, as exported or decomposed; not changed.
        table: As for ``run_decompositions``; core ATen by default.
        keep: Operators that are not decomposed; a mapping may have a predicate on nodes that
            selects calls, or None for all. The fallback keeps all calls of an operator if any is
            selected.
        rules: Rules in addition to the table, which take precedence.
        cache: Shares templates with other programs of static sizes.

    Raises:
        DecomposeError: An argument has the wrong type, an operator of ``keep`` cannot be kept, the
            program cannot be functionalized, or a rule fails; its exception is the cause.
    """
    _check_arguments(exported_program, table)
    decomposed: ExportedProgram = _decompose(exported_program, Rules.of(table, keep, rules), cache)
    return decomposed


def functionalize(exported_program: ExportedProgram) -> ExportedProgram:
    """Return a copy of the program without in-place writes.

    Calls on unwritten memory are unchanged, also those of composite operators.

    Raises:
        DecomposeError: torch cannot functionalize the program.
    """
    without_calls = replace_in_place_calls(exported_program)
    if without_calls is not None:
        return without_calls
    operators = {
        node.target
        for graph_module in graphs_of(exported_program.graph_module)
        for node in graph_module.graph.nodes
        if isinstance(node.target, OpOverload) and is_preservable(node.target)
    }
    # Functionalization relies on schemas, so composites with hidden effects are decomposed.
    composites: dict[OperatorBase, Any] = {
        operator: composite_parts(operator) if hides_effects(operator) else keep_whole
        for operator in operators
    }
    functional: ExportedProgram = _decompose(
        exported_program, Rules({}, composites), None, only_writes=True
    )
    return functional


def decompose_graph(
    exported_program: ExportedProgram, rules: Rules, *, cache: DecompositionCache | None = None
) -> Parts:
    """Return the decomposed graph, signature and state of a program.

    For compilers: nothing is verified, ``rules`` contain only differences from torch's behaviour,
    and a rule may keep single calls.

    Args:
        exported_program: Any program; not changed.
        cache: Shares templates with other programs.

    Raises:
        DecomposeError: The program cannot be functionalized, or a rule fails.
    """
    parts: Parts = _decompose(exported_program, rules, cache, as_parts=True)
    return parts


def explain(
    exported_program: ExportedProgram,
    table: Table | None = None,
    *,
    keep: Keep = (),
    cache: DecompositionCache | None = None,
) -> Explanation:
    """Trace as ``decompose`` does with these arguments, and return statistics.

    Args:
        exported_program: Any program; not changed.

    Raises:
        DecomposeError: An argument is invalid, or the program's mutations cannot be analysed.
    """
    _check_arguments(exported_program, table)
    program, memory = _prepare(exported_program)
    templates = _templates(program, Rules.of(table, keep), cache)
    reason = _attempt(lambda: _trace(program, memory, templates))
    if isinstance(reason, WholeProgramError):
        return Explanation(str(reason), 0, 0, isinstance(reason, TemplateError))
    return Explanation(None, templates.traces, templates.reused)


def _decompose(
    exported_program: ExportedProgram,
    rules: Rules,
    cache: DecompositionCache | None,
    *,
    as_parts: bool = False,
    only_writes: bool = False,
) -> Any:
    """Return a decomposed program or its parts, if necessary by ``run_decompositions``."""
    program, memory = _prepare(exported_program)

    def call_by_call() -> Parts | ExportedProgram:
        # Rules of ``decompose`` may have state.
        ranges = program.range_constraints if as_parts or only_writes else None
        templates = _templates(program, rules, cache, ranges)
        parts = _trace(program, memory, templates, only_writes=only_writes)
        return parts if as_parts else assemble(program, parts, _without_signatures(program))

    with collector_held():
        result = _attempt(call_by_call)
    if not isinstance(result, WholeProgramError):
        return result
    try:
        fallback = _as_a_whole(program, rules)
    except Exception as error:
        raise DecomposeError(
            f"the program cannot be decomposed call by call, because {result}; "
            f"run_decompositions fails too: {type(error).__name__}: {str(error).strip()}"
        ) from error
    state, constants = fallback.state_dict, fallback.constants
    parts = Parts(fallback.graph_module, fallback.graph_signature, state, constants)
    return parts if as_parts else fallback


def _attempt(call_by_call: Callable[[], Result]) -> Result | WholeProgramError:
    """Return the result, or the reason why the program cannot be decomposed call by call."""
    try:
        return call_by_call()
    except WholeProgramError as error:
        return error
    except DecomposeError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        reason = TemplateError(f"torch fails: {type(error).__name__}: {first}")
        reason.__cause__ = error
        return reason


def _check_arguments(program: Any, table: Any) -> None:
    if not isinstance(program, ExportedProgram):
        raise DecomposeError(
            f"found a {type(program).__name__}; expected an ExportedProgram: call "
            "torch.export.export first"
        )
    rules = table.items() if isinstance(table, Mapping) else [(table, None)] * (table is not None)
    for operator, rule in rules:
        if not isinstance(operator, OperatorBase) or not callable(rule):
            raise DecomposeError(
                f"found {operator!r}: {rule!r} in the table; expected an operator such as "
                "torch.ops.aten.gelu.default and a function that decomposes it"
            )


def _prepare(exported_program: ExportedProgram) -> tuple[ExportedProgram, MemoryUse | None]:
    """Return the program with one name per mutated tensor, and its memory use if it mutates."""
    program = repair_program(unwrap_subclass_parameters(exported_program))
    if not any(map(writes_in_place, graphs_of(program.graph_module))):
        return program, None
    try:
        memory = MemoryUse.of_program(program)
        merged = merge_written_names(program, memory)
        return merged, memory if merged is program else MemoryUse.of_program(merged)
    except Exception as error:
        # Hand-edited graphs may be invalid in any way.
        raise DecomposeError(
            f"cannot analyse the program's mutations: {type(error).__name__}: {error}"
        ) from error


def _calls_on_unwritten_memory(
    program: ExportedProgram, memory: MemoryUse | None
) -> frozenset[Node]:
    return frozenset(
        node
        for node in program.graph.nodes
        if isinstance(node.target, OpOverload)
        and (memory is None or not any(map(memory.writers, (node, *node.all_input_nodes))))
    )


def _templates(
    program: ExportedProgram, rules: Rules, cache: DecompositionCache | None, ranges: Any = None
) -> Templates:
    mode = fake_mode_of(program.graph_module)
    return Templates(rules, mode, DecompositionCache() if cache is None else cache, ranges)


def _trace(
    program: ExportedProgram,
    memory: MemoryUse | None,
    templates: Templates,
    *,
    only_writes: bool = False,
) -> Parts:
    """Return the decomposed parts.

    Args:
        program: A program in which each mutated tensor has one name.
        memory: Memory use; None if the program does not mutate.
        only_writes: Whether calls on unwritten memory are copied regardless of the rules.

    Raises:
        WholeProgramError: A call, input or output is not supported.
    """
    _check(program, memory)
    graph_module = program.graph_module
    graph = Graph()
    # Cache keys depend on it: templates record views only for programs that mutate.
    templates.writes = memory is not None
    with tracing_lock, templates:
        regions = Regions()
        walk = Walk(
            Writer(graph, templates.mode),
            templates,
            regions,
            unwritten=_calls_on_unwritten_memory(program, memory),
            only_writes=only_writes,
        )
        placeholders = {
            node: walk.placeholder(node)
            for node in graph_module.graph.find_nodes(op="placeholder")
        }
        env = dict(placeholders)
        outputs = walk.run(graph_module, env)
        signature = add_output(program, walk, placeholders, outputs)
        eliminate_dead_code(graph)
        new_module = LazyGraphModule(regions.root, graph)
        # Assertions are inserted last, as torch does, because node names depend on it.
        if walk.writer.is_dynamic:
            insert_assertions(new_module, walk.writer.fixed.values())
            signature = renamed_outputs(signature, graph)
        new_module.meta.update(graph_module.meta)
        return Parts(new_module, signature, program.state_dict, program.constants)


def _without_signatures(program: ExportedProgram) -> list[ModuleCallEntry]:
    """Return the module calls without their signatures, which name nodes of the old graph."""
    return [
        ModuleCallEntry(entry.fqn, None)
        if entry.fqn or entry.signature is None
        else ModuleCallEntry("", replace(entry.signature, inputs=[], outputs=[]))
        for entry in program.module_call_graph
    ]


def _check(program: ExportedProgram, memory: MemoryUse | None) -> None:
    """Raise WholeProgramError for unsupported programs."""
    signature = program.graph_signature
    if signature.backward_signature is not None:
        raise WholeProgramError("it has a backward graph")
    for spec in signature.input_specs:
        if spec.kind in {InputKind.TOKEN, InputKind.CUSTOM_OBJ}:
            raise WholeProgramError(f"an input is a {spec.kind.name}")
    subclass_use = subclass_reader(program)
    if subclass_use is not None:
        name, reader = subclass_use
        raise WholeProgramError(
            f"{reader.name!r} reads the subclass {name!r} itself, not only its inner tensors"
        )
    if memory is None:
        return
    # Functionalization assumes that inputs do not overlap.
    targets = {spec.arg.name: spec.target for spec in signature.input_specs}
    for nodes in shared_inputs(program):
        used = [repr(targets[node.name]) for node in nodes if node.users]
        writers = memory.writers(nodes[0])
        if len(used) > 1 and writers:
            raise WholeProgramError(
                f"{' and '.join(used)} overlap in memory, and {writers[0].name!r} writes it"
            )


def _as_a_whole(program: ExportedProgram, rules: Rules) -> ExportedProgram:
    """Return the result of ``run_decompositions``, which keeps all or no calls of an operator."""
    kept_operators = {
        node.target
        for graph_module in graphs_of(program.graph_module)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and rules.keeps_call(node)
    }
    table = {op: rule for op, rule in rules.as_table().items() if op not in kept_operators}
    with tracing_lock, warnings.catch_warnings():
        # torch 2.13's deep copy of pytree specs emits a warning.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        decomposed: ExportedProgram = program.run_decompositions(table)
    return decomposed
