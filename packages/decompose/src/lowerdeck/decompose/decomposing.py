"""Decompose programs call by call, or as a whole where that is impossible."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from lowerdeck.decompose._torch_private import (
    FakeTensors,
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
from lowerdeck.decompose.module_calls import named_nodes, renamed_entries
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
    cache: DecompositionCache | None = None,
) -> ExportedProgram:
    """Return ``exported_program`` decomposed, as ``run_decompositions(table)`` returns it.

    Args:
        exported_program: Any program, straight from ``torch.export`` or decomposed; not changed.
        table: How operators are decomposed, as ``run_decompositions`` takes it: core ATen for
            None.
        keep: Operators that stay whole whatever the table says; in a mapping, each with a
            predicate on its calls (nodes of the program) that selects those that stay, or None
            for all. torch's own way keeps all calls of an operator if one of them is to stay.
        cache: Where templates outlive this call; for a program of fixed sizes.

    Raises:
        DecomposeError: An argument is of another kind, an operator of ``keep`` cannot be kept, the
            program writes memory in ways that cannot be functionalized, or a rule fails on a call
            that it is given; the exception of the rule is the cause.
    """
    _check_arguments(exported_program, table)
    decomposed: ExportedProgram = _decompose(exported_program, Rules.of(table, keep), cache)
    return decomposed


def functionalize(exported_program: ExportedProgram) -> ExportedProgram:
    """Return ``exported_program`` without in-place writes; its other calls stay as they are.

    Composite operators are decomposed only where the memory that they read or return is written.

    Args:
        exported_program: Any program; not changed.

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
    # Functionalization trusts schemas: a composite that hides an alias or a write is decomposed.
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
    """Return graph, signature and state of ``exported_program``, decomposed by ``rules``.

    For compilers that continue with the graph: ``rules`` contain only what differs from torch's
    behaviour, a rule may keep one call and decompose the next, and nothing is verified.

    Args:
        exported_program: Any program; not changed.
        cache: Shares templates with other calls.

    Raises:
        DecomposeError: The program writes memory in ways that cannot be functionalized, or a rule
            fails.
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
    """Return how ``decompose`` converts a program with the same arguments; the trace is done.

    Args:
        exported_program: Any program; not changed.
        table: As ``decompose`` takes it.
        keep: As ``decompose`` takes it.
        cache: As ``decompose`` takes it.
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
    """Return a decomposed program or its parts, by torch's own way where that is needed."""
    program, memory = _prepare(exported_program)
    entries = () if as_parts else program.module_call_graph

    def call_by_call() -> Parts | ExportedProgram:
        templates = _templates(program, rules, cache)
        parts, nodes = _trace(program, memory, templates, entries=entries, only_writes=only_writes)
        return parts if as_parts else assemble(program, parts, renamed_entries(entries, nodes))

    with collector_held():
        result = _attempt(call_by_call)
    if not isinstance(result, WholeProgramError):
        return result
    try:
        whole = _as_a_whole(program, rules)
    except Exception as error:
        raise DecomposeError(
            f"the program cannot be decomposed call by call, because {result}; nor can torch "
            f"decompose it as a whole: {type(error).__name__}: {str(error).strip()}"
        ) from error
    state, constants = whole.state_dict, whole.constants
    parts = Parts(whole.graph_module, whole.graph_signature, state, constants)
    return parts if as_parts else whole


def _attempt(call_by_call: Callable[[], Result]) -> Result | WholeProgramError:
    """Return the result, or why the program cannot be decomposed call by call."""
    try:
        return call_by_call()
    except WholeProgramError as error:
        return error
    except DecomposeError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        reason = TemplateError(f"torch fails on its parts: {type(error).__name__}: {first}")
        reason.__cause__ = error
        return reason


def _check_arguments(program: Any, table: Any) -> None:
    if not isinstance(program, ExportedProgram):
        raise DecomposeError(
            f"found a {type(program).__name__}, expected an ExportedProgram: call "
            "torch.export.export first"
        )
    rules = table.items() if isinstance(table, Mapping) else [(table, None)] * (table is not None)
    for operator, rule in rules:
        if not isinstance(operator, OperatorBase) or not callable(rule):
            raise DecomposeError(
                f"found {operator!r}: {rule!r} in the table, expected an operator such as "
                "torch.ops.aten.gelu.default and a function that computes the same"
            )


def _prepare(exported_program: ExportedProgram) -> tuple[ExportedProgram, MemoryUse | None]:
    """Return the program with one name for each mutated memory, and its aliases if it writes."""
    program = repair_program(unwrap_subclass_parameters(exported_program))
    if not any(map(writes_in_place, graphs_of(program.graph_module))):
        return program, None
    try:
        memory = MemoryUse.of_program(program)
        merged = merge_written_names(program, memory)
        return merged, memory if merged is program else MemoryUse.of_program(merged)
    except Exception as error:
        # A graph that was edited by hand may be invalid in any way.
        raise DecomposeError(
            f"the writes of the program cannot be followed: {type(error).__name__}: {error}"
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
    program: ExportedProgram, rules: Rules, cache: DecompositionCache | None
) -> Templates:
    fakes = FakeTensors(fake_mode_of(program.graph_module))
    return Templates(rules, fakes, DecompositionCache() if cache is None else cache)


def _trace(
    program: ExportedProgram,
    memory: MemoryUse | None,
    templates: Templates,
    *,
    entries: Sequence[ModuleCallEntry] = (),
    only_writes: bool = False,
) -> tuple[Parts, Mapping[str, Node]]:
    """Return a program decomposed by tracing each distinct call once.

    Args:
        program: With one name for each mutated memory.
        memory: Its aliases and writes; None if it writes nothing.
        templates: Decompositions of distinct calls.
        entries: Preserved calls of modules: the new nodes of the values that they name are kept,
            and returned by name.
        only_writes: Whether calls on memory that nothing writes are copied, whatever the rules.

    Raises:
        WholeProgramError: A call, an input or an output is not supported.
    """
    _check(program, memory)
    graph_module = program.graph_module
    graph = Graph()
    # Views matter only where something is written: keys of a cache depend on it.
    templates.writes = memory is not None
    # torch's tracing patches operators of the process, so that two traces at once fail.
    with tracing_lock, templates:
        regions = Regions()
        walk = Walk(
            Writer(graph, templates.fakes),
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
        # After the outputs, which may regenerate values that a signature names.
        named = named_nodes(entries, env)
        eliminate_dead_code(graph, frozenset(named.values()))
        new_module = LazyGraphModule(regions.root, graph)
        # Assertions on symbols are inserted last, as torch does: names of nodes depend on it.
        if walk.writer.is_dynamic:
            insert_assertions(new_module)
            signature = renamed_outputs(signature, graph)
        new_module.meta.update(graph_module.meta)
        return Parts(new_module, signature, program.state_dict, program.constants), named


def _check(program: ExportedProgram, memory: MemoryUse | None) -> None:
    """Raise WholeProgramError for programs that are not decomposed call by call."""
    signature = program.graph_signature
    if signature.backward_signature is not None:
        raise WholeProgramError("it has a backward graph")
    for spec in signature.input_specs:
        if spec.kind in {InputKind.TOKEN, InputKind.CUSTOM_OBJ}:
            raise WholeProgramError(f"an input is a {spec.kind.name}")
    read = subclass_reader(program)
    if read is not None:
        name, reader = read
        raise WholeProgramError(
            f"{name!r} is a tensor subclass, and {reader.name!r} reads more of it than its inner "
            "tensors"
        )
    if memory is None:
        return
    # Functionalization treats inputs as separate memories.
    targets = {spec.arg.name: spec.target for spec in signature.input_specs}
    for nodes in shared_inputs(program):
        used = [repr(targets[node.name]) for node in nodes if node.users]
        writers = memory.writers(nodes[0])
        if len(used) > 1 and writers:
            raise WholeProgramError(
                f"{' and '.join(used)} overlap in memory, and {writers[0].name!r} writes it"
            )


def _as_a_whole(program: ExportedProgram, rules: Rules) -> ExportedProgram:
    """Return the result of torch, which keeps all calls of an operator or none."""
    kept = {
        node.target
        for graph_module in graphs_of(program.graph_module)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and rules.keeps_call(node)
    }
    table = {op: rule for op, rule in rules.as_table().items() if op not in kept}
    with tracing_lock, warnings.catch_warnings():
        # torch's deep copy of pytree specs emits a warning (2.13).
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        whole: ExportedProgram = program.run_decompositions(table)
    return whole
