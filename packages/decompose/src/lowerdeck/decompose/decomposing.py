"""``decompose``, ``take_apart`` and ``explain``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node

from lowerdeck.decompose._torch_private import (
    FakeTensors,
    assemble,
    fake_mode_of,
    insert_assertions,
    is_preservable,
    node_source,
    tracing_lock,
)
from lowerdeck.decompose.cache import DecompositionCache
from lowerdeck.decompose.calls.agreement import with_checked_counts
from lowerdeck.decompose.errors import DecomposeError, TemplateError, WholeProgramError
from lowerdeck.decompose.inner_tensors import subclass_reader, unwrapped
from lowerdeck.decompose.keeping import Keep, check_kept
from lowerdeck.decompose.module_calls import Calls
from lowerdeck.decompose.regions import Regions
from lowerdeck.decompose.results import Explanation, Parts
from lowerdeck.decompose.rules import Rules, Table, stay
from lowerdeck.decompose.signature import (
    LiftedConstants,
    new_outputs,
    update_output_names,
)
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
    describe_node,
    graphs_of,
    hides_aliases,
    hides_writes,
    mended,
    shared_inputs,
    writes_in_place,
)

Result = TypeVar("Result")

_AT_NODE = re.compile(r"^While executing %(\S+) :", re.MULTILINE)


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
            function that says of a call (its node in ``exported_program``) whether it stays, or
            None for all its calls. torch's own way keeps all calls of
            an operator if one of them is to stay.
        cache: Where templates outlive this call; for a program of fixed sizes.

    Raises:
        DecomposeError: An argument is of another kind, an operator of ``keep`` cannot be kept, the
            program writes memory that no program of values can tell, or a rule fails on a call
            that it is given; what the rule raised is the cause.
    """
    kept = _checked_keep(exported_program, table, keep)
    program, originals = unwrapped(exported_program)
    kept = _keep_by_original_node(kept, originals)
    return _decomposed(program, Rules.of(table, kept), cache)


def _decomposed(
    program: ExportedProgram,
    rules: Rules,
    cache: DecompositionCache | None,
    *,
    only_writes: bool = False,
) -> ExportedProgram:
    calls: Calls = Calls(program.module_call_graph)

    def call_by_call(merged: ExportedProgram, writes: bool) -> ExportedProgram:
        unchanged = _calls_on_unwritten_memory(merged) if only_writes else frozenset()
        parts, _ = _by_calls(merged, rules, cache, writes=writes, calls=calls, unchanged=unchanged)
        return _verified(merged, parts, calls)

    return _either_way(program, rules, call_by_call, lambda whole: whole)


def _either_way(
    program: ExportedProgram,
    rules: Rules,
    call_by_call: Callable[[ExportedProgram, bool], Result],
    result_of: Callable[[ExportedProgram], Result],
) -> Result:
    """Return the result of ``call_by_call``, or of torch's own way where that is impossible."""
    with collector_held():
        merged, writes = _merge_names(program)
        try:
            return call_by_call(merged, writes)
        except WholeProgramError as error:
            reason = error
    try:
        return result_of(_as_a_whole(merged, rules))
    except DecomposeError:
        raise
    except Exception as error:
        raise _describe_failure(merged, reason, error) from error


def _calls_on_unwritten_memory(program: ExportedProgram) -> frozenset[Node]:
    memory = MemoryUse.of_program(program)
    return frozenset(
        node
        for node in program.graph.nodes
        if isinstance(node.target, OpOverload)
        and not any(memory.writers(other) for other in (node, *node.all_input_nodes))
    )


def functionalize(exported_program: ExportedProgram) -> ExportedProgram:
    """Return ``exported_program`` without in-place writes; its other calls stay as they are.

    Composite operators are decomposed only where the memory that they read or return is written.

    Args:
        exported_program: Any program; not changed.

    Raises:
        DecomposeError: torch cannot functionalize the program.
    """
    program, _ = unwrapped(exported_program)
    operators = {
        node.target
        for graph_module in graphs_of(program.graph_module)
        for node in graph_module.graph.nodes
        if isinstance(node.target, OpOverload) and is_preservable(node.target)
    }
    # Functionalization trusts schemas: a composite that hides an alias or a write is decomposed.
    composites: dict[OperatorBase, Any] = {
        operator: composite_parts(operator)
        if hides_aliases(operator) or hides_writes(operator)
        else stay
        for operator in operators
    }
    return _decomposed(program, Rules({}, composites), None, only_writes=True)


def take_apart(
    exported_program: ExportedProgram, rules: Rules, *, cache: DecompositionCache | None = None
) -> Parts:
    """Return what ``exported_program`` is made of when decomposed by ``rules``.

    For a compiler that goes on with the graph: ``rules`` name only what differs from what torch
    does by itself, one may keep a call and decompose the next, and no ``ExportedProgram`` is
    made, whose verification refuses a right graph in which two buffers get the same new value.

    Args:
        exported_program: As for ``decompose``.
        rules: How operators are decomposed.
        cache: As for ``decompose``.

    Raises:
        DecomposeError: The program writes memory that no program of values can tell, or a rule
            fails.
    """
    program, originals = unwrapped(exported_program)
    rules = replace(rules, chosen=_keep_by_original_node(rules.chosen, originals))
    return _either_way(
        program,
        rules,
        lambda merged, writes: _by_calls(merged, rules, cache, writes=writes)[0],
        lambda whole: Parts(
            whole.graph_module, whole.graph_signature, whole.state_dict, whole.constants
        ),
    )


def _keep_by_original_node(keep: Any, originals: Mapping[Node, Node]) -> Any:
    """Return ``keep`` with predicates that take nodes of a copy of the program."""
    if not originals or not isinstance(keep, Mapping):
        return keep

    def on_original(predicate: Callable[[Node], bool]) -> Callable[[Node], bool]:
        return lambda call: predicate(originals.get(call, call))

    return {
        op: None if predicate is None else on_original(predicate) for op, predicate in keep.items()
    }


def _verified(program: ExportedProgram, parts: Parts, calls: Calls) -> ExportedProgram:
    try:
        return assemble(program, parts, calls.renamed(parts.graph_module.graph))
    except Exception as error:
        # A call that was kept may be of a function that is not an operator.
        first = str(error).partition("\n")[0]
        raise WholeProgramError(f"torch refuses the result: {first}") from error


def _describe_failure(
    program: ExportedProgram, reason: WholeProgramError, error: Exception
) -> DecomposeError:
    message = str(error).strip()
    # torch's interpreter names the node below the message.
    first, at = message.partition("\n")[0], _AT_NODE.search(message)
    nodes = [node for graph in graphs_of(program.graph_module) for node in graph.graph.nodes]
    failed = next((node for node in nodes if at and node.name == at[1]), None)
    return DecomposeError(
        f"the program cannot be decomposed call by call, because {reason}; nor can torch "
        f"decompose it as a whole: {type(error).__name__}: {first}"
        f"{f', at {describe_node(failed)}' if failed else ''}"
    )


def explain(
    exported_program: ExportedProgram,
    table: Table | None = None,
    *,
    keep: Keep = (),
    cache: DecompositionCache | None = None,
) -> Explanation:
    """Return which way ``decompose`` goes with the same arguments, and why; it is tried.

    Args:
        exported_program: As for ``decompose``.
        table: Likewise.
        keep: Likewise.
        cache: Likewise.
    """
    kept = _checked_keep(exported_program, table, keep)
    program, originals = unwrapped(exported_program)
    kept = _keep_by_original_node(kept, originals)
    merged, writes = _merge_names(program)
    try:
        _, templates = _by_calls(merged, Rules.of(table, kept), cache, writes=writes)
    except WholeProgramError as error:
        return Explanation(str(error), 0, 0, isinstance(error, TemplateError))
    return Explanation(None, templates.traces, templates.reused)


def _checked_keep(program: Any, table: Any, keep: Any) -> Keep:
    """Check the arguments of ``decompose``; return ``keep`` as a collection of its own."""
    if not isinstance(program, ExportedProgram):
        raise DecomposeError(
            f"found a {type(program).__name__}, expected an ExportedProgram: call "
            "torch.export.export first"
        )
    rules = (
        table.items() if isinstance(table, Mapping) else [] if table is None else [(table, None)]
    )
    for operator, rule in rules:
        if not isinstance(operator, OperatorBase) or not callable(rule):
            raise DecomposeError(
                f"found {operator!r}: {rule!r} in the table, expected an operator such as "
                "torch.ops.aten.gelu.default and a function that computes the same"
            )
    if not isinstance(keep, Iterable):
        raise DecomposeError(f"found {keep!r} as keep, expected a collection of operators")
    named = list(keep)
    for operator in named:
        check_kept(operator, keep[operator] if isinstance(keep, Mapping) else None)
    return dict(keep) if isinstance(keep, Mapping) else frozenset(named)


def _by_calls(
    program: ExportedProgram,
    rules: Rules,
    cache: DecompositionCache | None,
    *,
    writes: bool,
    calls: Calls | None = None,
    unchanged: Collection[Node] = (),
) -> tuple[Parts, Templates]:
    """Return a program decomposed by tracing each distinct call once.

    Raises:
        WholeProgramError: It cannot be done so, or torch fails on a part of the program.
    """
    try:
        return _traced_by_calls(
            program, rules, cache, writes=writes, calls=calls, unchanged=unchanged
        )
    except DecomposeError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise TemplateError(
            f"torch fails on its parts: {type(error).__name__}: {first}"
        ) from error


def _traced_by_calls(
    program: ExportedProgram,
    rules: Rules,
    cache: DecompositionCache | None,
    *,
    writes: bool,
    calls: Calls | None,
    unchanged: Collection[Node],
) -> tuple[Parts, Templates]:
    _check(program)
    if writes:
        _check_overlaps(program)
    graph_module = program.graph_module
    mode = fake_mode_of(graph_module)
    graph = Graph()
    shared = DecompositionCache() if cache is None else cache
    fakes = FakeTensors(mode)
    templates = Templates(rules, fakes, shared, writes=writes)
    # torch's tracing patches operators for the whole process, so that two at once would fail.
    with tracing_lock, templates:
        regions = Regions()
        specs = program.graph_signature.input_specs
        lifted = LiftedConstants(graph, specs, {**program.state_dict, **program.constants})
        walk = Walk(Writer(graph, fakes, lifted), templates, regions, unchanged=unchanged)
        placeholders = {
            node: walk.placeholder(node)
            for node in graph_module.graph.find_nodes(op="placeholder")
        }
        env = dict(placeholders)
        outputs = walk.run(graph_module, env)
        kept = frozenset() if calls is None else calls.became(env)
        last = graph_module.graph.output_node()
        nodes, signature = new_outputs(
            program,
            placeholders,
            outputs,
            walk.current,
            walk.base,
            lambda node: walk.clone(node, last),
        )
        made = graph.output(nodes)
        made.meta.update(last.meta, from_node=[node_source(last)])
        _eliminate_dead_code(graph, kept)
        made_module = LazyGraphModule(regions.root, graph)
        # Assertions on symbols are inserted last, as torch does: names of nodes depend on it.
        if walk.writer.is_dynamic:
            insert_assertions(made_module)
            update_output_names(signature, graph.output_node())
        made_module.meta.update(graph_module.meta)
        signature.input_specs = lifted.added_to(specs)
        constants = {**program.constants, **lifted.tensors}
        return Parts(made_module, signature, program.state_dict, constants), templates


def _eliminate_dead_code(graph: Graph, kept: Container[Node]) -> None:
    # ``Graph.eliminate_dead_code`` computes of each node whether it is impure, read or not.
    for node in reversed(graph.nodes):
        is_dead = not node.users and node.op == "call_function" and node not in kept
        # Random operators are impure: dropping one would change the numbers drawn after it.
        if is_dead and not node.is_impure():
            graph.erase_node(node)


def _check(program: ExportedProgram) -> None:
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


def _check_overlaps(program: ExportedProgram) -> None:
    """Refuse tensors of the model that overlap in memory which the program writes."""
    memory = MemoryUse.of_program(program)
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for nodes in shared_inputs(program):
        used = [repr(targets[node.name]) for node in nodes if node.users]
        writers = memory.writers(nodes[0])
        if len(used) > 1 and writers:
            raise WholeProgramError(
                f"{' and '.join(used)} overlap in memory, and {writers[0].name!r} writes it"
            )


def _merge_names(program: ExportedProgram) -> tuple[ExportedProgram, bool]:
    """Return ``program`` with one name for each memory that it writes, and whether it writes."""
    program = mended(program)
    if not any(map(writes_in_place, graphs_of(program.graph_module))):
        return program, False
    try:
        return merge_written_names(program), True
    except Exception as error:
        # A program that was changed by hand may be wrong in any way.
        raise DecomposeError(
            f"the writes of the program cannot be followed: {type(error).__name__}: {error}"
        ) from error


def _as_a_whole(program: ExportedProgram, rules: Rules) -> ExportedProgram:
    """Return what torch's own way gives, which keeps all calls of an operator or none."""
    kept = {
        node.target
        for graph_module in graphs_of(program.graph_module)
        for node in graph_module.graph.nodes
        if node.op == "call_function" and rules.keeps_call(node)
    }
    table = {op: rule for op, rule in rules.as_table().items() if op not in kept}
    with tracing_lock, warnings.catch_warnings():
        # torch copies its own pytree specs, which warns about how it is done.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        whole: ExportedProgram = program.run_decompositions(with_checked_counts(table))
    return whole
