"""Give an exported program its eager module hierarchy back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch.export import ExportedProgram, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature

from lowerdeck.torch_base import (
    collector_held,
    expression_of,
    mended,
    plain_number,
    size_conditions,
)
from lowerdeck.unflatten._torch_private import without_effect_tokens
from lowerdeck.unflatten.calls.carrying import ALL_ASKED, notes_of
from lowerdeck.unflatten.calls.flat_args import FlatArgsAdapter
from lowerdeck.unflatten.calls.input_constraints import InputConstraints, input_constraints
from lowerdeck.unflatten.calls.leaf_paths import leaf_paths
from lowerdeck.unflatten.calls.signature import CallSignature, argument_labels, named_arguments
from lowerdeck.unflatten.code import OWN_NAMES
from lowerdeck.unflatten.cut import ProgramCopier, WorkingGraph, cut, direct_graph
from lowerdeck.unflatten.errors import UnsupportedProgramError
from lowerdeck.unflatten.modules import (
    NOT_REPLACEABLE,
    SUPPOSED_ONE,
    Body,
    BodyMaker,
    ModuleFactory,
    UnflattenedModule,
    build_hierarchy,
    install_state,
    note_uncalled,
    replace_children,
    restore,
    shadow_own_names,
    share,
)
from lowerdeck.unflatten.sizes.guards import SizeGuards, size_guards
from lowerdeck.unflatten.trace.call_tree import release
from lowerdeck.unflatten.trace.mutations import Mutations
from lowerdeck.unflatten.trace.trace import Trace

T = TypeVar("T")


def unflatten(
    module: ExportedProgram,
    flat_args_adapter: FlatArgsAdapter | None = None,
    *,
    inplace: bool = True,
    preserve: Literal["all"] | None = None,
    restore_types: bool | torch.nn.Module = False,
    module_factory: ModuleFactory | None = None,
) -> UnflattenedModule:
    """Return a module that computes what the program does, with the eager module's hierarchy.

    Submodules, parameters, buffers and constants have eager's names, order and sharing. The
    program stays as it is and is not kept alive; memory is shared with it until one side writes.

    Args:
        module: The program.
        flat_args_adapter: Turns arguments of another structure into the exported one.
        inplace: Write mutated buffers and inputs in the modules that own them, as eager does.
            Otherwise the graphs of a functional program stay functional, and the outermost code
            writes at its end.
        preserve: With ``"all"`` every child can be called alone: as eager's if the program tells
            its signature, otherwise with the values that it reads and does not own, in the order
            of their first use: tensors, state of what is around it, and numbers that these do
            not tell. It returns what others read of it, in the order in which it is computed.
        restore_types: Make each child an instance of its eager class too, where that class is
            loaded; given the eager module, also copy the plain attributes of its children.
        module_factory: Called with the name and the module of each child; what it returns takes
            the child's place.

    Returns:
        The outermost module; call it as the eager one.

    Raises:
        UnsupportedProgramError: The program is no ``ExportedProgram``, or computes gradients too,
            or an option is none of those above.

    Example:
        >>> import torch
        >>> eager = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> module = unflatten(torch.export.export(eager, (torch.ones(1, 2),)))
        >>> [name for name, _ in module.named_modules()]
        ['', '0', '1']
    """
    if not isinstance(module, ExportedProgram):
        raise UnsupportedProgramError(
            f"expected an ExportedProgram; found a {type(module).__name__}. "
            "Make one by torch.export.export(model, args)."
        )
    if module.graph_signature.backward_signature is not None:
        raise UnsupportedProgramError(
            "expected a program without a backward signature; found one that computes gradients "
            "in its own graph. Export the forward pass alone."
        )
    if preserve not in (None, "all"):
        raise UnsupportedProgramError(
            f"expected preserve='all' or None; found {preserve!r}. To preserve the signatures of "
            "some modules, export with preserve_module_call_signature."
        )
    if not isinstance(restore_types, (bool, torch.nn.Module)):
        raise UnsupportedProgramError(
            f"expected restore_types to be True, False or the eager module; found "
            f"{restore_types!r}."
        )
    with collector_held():
        program = mended(without_effect_tokens(module))
        made, modules = _built(program, flat_args_adapter, inplace, preserve == "all")
    if restore_types:
        eager = restore_types if isinstance(restore_types, torch.nn.Module) else None
        restore(modules, eager)
    if module_factory is not None:
        replace_children(made, module_factory)
    return made


def _built(
    program: ExportedProgram,
    flat_args_adapter: FlatArgsAdapter | None,
    inplace: bool,
    preserve_all: bool,
) -> tuple[UnflattenedModule, Mapping[str, torch.nn.Module]]:
    trace = Trace.of(program, inplace=inplace)
    # Most programs for inference are cut as they are; a copy is for what must be changed first.
    direct = None if preserve_all else direct_graph(trace)
    working = direct or ProgramCopier(trace, preserve_all=preserve_all).build()
    guards = _guards(program, working)
    maker = BodyMaker(working, *cut(working), guards)
    forms = share(trace.tree.root, maker, trace.paths)
    graph, attributes = maker.root_graph()
    signature = _signature(program, working, flat_args_adapter, trace.mutations, guards)
    body = Body(graph, signature, attributes, trace.tree.root.type_name, guards=guards)
    root = UnflattenedModule(body)
    supposed = {trace.paths.canonical(one): names for one, names in trace.paths.supposed.items()}
    root.__dict__.update(
        graph_signature=_copied(program.graph_signature),
        module_call_graph=[_twin(entry) for entry in program.module_call_graph],
        range_constraints=dict(program.range_constraints),
        flat_args_adapter=flat_args_adapter,
        check_input_constraints=True,
        meta={
            **program.graph_module.meta,
            NOT_REPLACEABLE: working.forbidden,
            SUPPOSED_ONE: supposed,
        },
    )
    modules = build_hierarchy(root, forms, trace.paths)
    if not notes_of(program, ALL_ASKED):
        # What is refused when it is called has a reason of its own: a delegate holds it, say.
        note_uncalled(modules, (*working.forbidden, *_owners_of_read_state(trace)))
    install_state(modules, trace.state, trace.paths)
    held = {name.rpartition(".")[2] for name in (*trace.paths.order, *trace.state.entries)}
    if not held.isdisjoint(OWN_NAMES):
        for made in modules.values():
            shadow_own_names(made)
    release(trace.tree)
    return root, modules


def _owners_of_read_state(trace: Trace) -> Iterator[str]:
    """Yield the modules whose state the program reads or writes."""
    written = {mutation.target for mutation in trace.mutations.all}
    for node in trace.program.graph.find_nodes(op="placeholder"):
        if node.name in trace.state.targets and (node.users or node in written):
            for name in trace.state.names_of(node.name):
                yield trace.paths.canonical(name.rpartition(".")[0])


def _copied(signature: ExportGraphSignature) -> ExportGraphSignature:
    """Return a copy that later changes of the program's signature do not reach."""
    return ExportGraphSignature(
        [_twin(spec) for spec in signature.input_specs],
        [_twin(spec) for spec in signature.output_specs],
    )


def _twin(plain: T) -> T:
    """Return a shallow copy, as ``copy.copy`` does in eight times the time."""
    made = object.__new__(type(plain))
    made.__dict__.update(vars(plain))
    return made


def _signature(
    program: ExportedProgram,
    working: WorkingGraph,
    adapter: FlatArgsAdapter | None,
    mutations: Mutations,
    guards: SizeGuards,
) -> CallSignature:
    signature = _recorded_signature(program)
    known = getattr(signature, "forward_arg_names", None)
    names, others = named_arguments(signature.in_spec, known)
    leaves = adapter.get_flat_arg_paths() if adapter is not None else []
    if len(leaves) != len(working.inputs):
        labels = argument_labels(signature.in_spec, names)
        examples = [node.meta.get("val") for node in working.inputs]
        leaves = leaf_paths(signature.in_spec, labels, examples)
    constraints: InputConstraints = input_constraints(
        working.inputs, leaves, program.range_constraints, guards
    )
    return CallSignature(
        signature.in_spec,
        signature.out_spec,
        names,
        others,
        adapts=adapter is not None,
        constraints=constraints,
        updates=() if mutations.inplace else tuple(_updates(working, mutations)),
    )


def _recorded_signature(program: ExportedProgram) -> ModuleCallSignature:
    signature: ModuleCallSignature | None = program.module_call_graph[0].signature
    if signature is None:
        raise UnsupportedProgramError(
            "The program does not say how its arguments are structured: found no signature for "
            "the outermost module. Export it with torch.export.export."
        )
    return signature


def _guards(program: ExportedProgram, working: WorkingGraph) -> SizeGuards:
    """Return what sizes that vary must meet: one side of each branch is in the program."""
    try:
        conditions = size_conditions(program)
    except TypeError as error:
        raise UnsupportedProgramError(
            f"The program's conditions on sizes are no texts ({error}): found another kind of "
            "value. A file that torch.export.save wrote has texts there."
        ) from error
    if not conditions:
        return size_guards(program.range_constraints, (), {})
    examples = [node.meta.get("val") for node in working.inputs]
    shapes: list[Any] = [
        tuple(expression_of(plain_number(size)) for size in value.shape)
        if isinstance(value, torch.Tensor)
        else expression_of(plain_number(value))
        for value in examples
    ]
    # Strict export, and calls of any number of arguments, have names of their own for these.
    sources = {f"L['flat_args'][{number}]": shape for number, shape in enumerate(shapes)}
    signature = _recorded_signature(program)
    names, _ = named_arguments(signature.in_spec, getattr(signature, "forward_arg_names", None))
    labels = argument_labels(signature.in_spec, names)
    for pattern in (r"L['\g<0>']", r"L['\1'][\2]"):
        known = [re.sub(r"^(.+)_(\d+)$|^.*$", pattern, label) for label in labels]
        sources.update(zip(leaf_paths(signature.in_spec, known, examples), shapes, strict=True))
    return size_guards(program.range_constraints, conditions, sources)


def _updates(working: WorkingGraph, mutations: Mutations) -> Iterator[tuple[str | None, int]]:
    for mutation in mutations.all:
        if mutation.target in working.inputs:
            yield None, working.inputs.index(mutation.target)
        else:
            yield str(mutation.spec.target), 0
